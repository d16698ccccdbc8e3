"""The ranks of a group meet beside their payload: over the key-value store through which they found each other.

Every rank says a word, rank 0 judges all of them, every rank receives its verdict. No byte of it can be mistaken for
payload, and no collective of the group's library is needed. A meeting reads and writes the store a fixed number of
times a rank, rank 0 in one request for all.

Keys lie under `PREFIX` in the group's own part of the store, numbered by the caller. A rank deletes its word and its
verdict when it has read the verdict, so a meeting leaves nothing behind. (A `FileStore` is a log: deleting appends to
it as well.) Verdicts lie under a random name that came with the word: a key that a failed meeting left behind under
the same name is never taken for one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from te_overrides.kernels.collectives.groups import store_of, timeout_of

PREFIX = "deterministic_rocm"
TIMEOUT = timedelta(minutes=30)
"""Where a group does not tell its own timeout."""
ALONE = 0.5
"""Seconds after which rank 0 leaves a sign that it is there, for ranks whose time runs out before its own."""
FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.05
"""Seconds between two looks into the store; they grow, so a long wait is noticed late by a quarter of its length."""
_NONCE = 16
_SAID, _GAVE_UP = b"+", b"-"


class MissingRankError(RuntimeError):
    """A rank did not come to a meeting of its group within the group's timeout."""


class _Meeting:
    def __init__(self, group: dist.ProcessGroup, name: str, what: str) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.store = dist.PrefixStore(PREFIX, store_of(group))
        self.name, self.what = name, what
        self.seconds = (timeout_of(group) or TIMEOUT).total_seconds()

    def word(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def wait_for(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all of them were there in time.

        Asks again and again instead of letting the store wait: a store's client serves one request at a time, the
        library's own threads ask it as well, and a wait that runs out is logged as a warning.
        """
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        try:
            while not self.store.check(list(keys)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                time.sleep(min(pause, left))
                pause = min(1.25 * pause, LONGEST_PAUSE)
        except RuntimeError as error:
            raise MissingRankError(
                f"the group's key-value store does not answer rank {self.rank} any more, before {self.what}: the "
                f"process that holds it has ended, or cannot be reached ({error}). End the job; the ranks' own errors "
                "say why."
            ) from error
        return True

    def missing(self) -> str:
        """Who came and who did not, in words."""
        came = [r for r in range(self.world) if r == self.rank or self.store.check([self.word(r)])]
        absent = [r for r in range(self.world) if r not in came]
        if not absent:
            return (
                f"all ranks of a group came to compare what they do, before {self.what}, but rank 0, which compares, "
                f"did not answer within the group's timeout of {self.seconds:g} s. End the job."
            )
        return (
            f"not all ranks of a group came within its timeout of {self.seconds:g} s to compare what they do, before "
            f"{self.what}: ranks {came} came, ranks {absent} did not. A rank died, is late, or makes "
            "other calls than these ranks. End the job; the missing ranks' own errors say why."
        )


def meet(
    group: dist.ProcessGroup, name: str, word: bytes, judge: Callable[[list[bytes]], bytes], what: str
) -> bytes:
    """Every rank's `word` to rank 0, and what `judge` makes of them to every rank.

    Args:
        group: the process group. Collective over it.
        name: of this meeting, the same on every rank and never used before by this group.
        judge: called on rank 0 with the words in rank order.
        what: what happens next, for the error.

    Raises:
        MissingRankError: a rank did not come within the group's timeout; names those that came and those that did not,
            on every rank that did. One that comes later raises as well.
        StoreError: see `store_of`.
    """
    meeting = _Meeting(group, name, what)
    return _judge(meeting, word, judge) if meeting.rank == 0 else _say(meeting, word)


def _judge(meeting: _Meeting, word: bytes, judge: Callable[[list[bytes]], bytes]) -> bytes:
    others = [meeting.word(rank) for rank in range(1, meeting.world)]
    waited = not meeting.wait_for(others, min(ALONE, meeting.seconds))
    if waited:
        # Only those who have to wait need to know that rank 0 is here.
        meeting.store.set(meeting.word(0), "here")
        meeting.wait_for(others, max(meeting.seconds - ALONE, 0))
    there = [key for key in others if meeting.store.check([key])] if waited else others
    said = meeting.store.multi_get(there)
    if len(there) < len(others):
        failure = meeting.missing()
    elif gone := [rank for rank, each in enumerate(said, 1) if each[:1] == _GAVE_UP]:
        failure = (
            f"rank 0 came to compare what the ranks of a group do, before {meeting.what}, when ranks {gone} had "
            f"stopped waiting for it after the group's timeout of {meeting.seconds:g} s. End the job."
        )
    else:
        failure = ""
    verdict = failure.encode() if failure else judge([word, *(each[1 + _NONCE :] for each in said)])
    mark = _GAVE_UP if failure else _SAID
    names = [_verdict(each[1 : 1 + _NONCE].decode()) for each in said if each[:1] == _SAID]
    meeting.store.multi_set(names, [(mark + verdict).decode()] * len(names))
    if waited:
        meeting.store.delete_key(meeting.word(0))
    if failure:
        raise MissingRankError(failure)
    return verdict


def _say(meeting: _Meeting, word: bytes) -> bytes:
    own, nonce = meeting.word(meeting.rank), os.urandom(_NONCE // 2).hex()
    answer = _verdict(nonce)
    meeting.store.set(own, (_SAID + nonce.encode() + word).decode())
    if not meeting.wait_for([answer], meeting.seconds):
        failure = meeting.missing()
        # Rank 0, should it still come, must not go on as if this rank had.
        meeting.store.set(own, (_GAVE_UP + nonce.encode()).decode())
        raise MissingRankError(failure)
    verdict: bytes = meeting.store.get(answer)
    for key in (own, answer):
        meeting.store.delete_key(key)
    if verdict[:1] == _GAVE_UP:
        raise MissingRankError(verdict[1:].decode())
    return verdict[1:]


def _verdict(nonce: str) -> str:
    return f"verdict/{nonce}"
