"""Do all ranks mean the same, in the same order? What is exchanged about it can never be taken for payload.

A collective whose ranks disagree about shape, dtype, operation or order hangs, or worse, adds what does not belong
together. Ranks therefore compare what they do over the group's key-value store (`meeting.py`), beside the payload:

    before a call that is new to the group     the call, and everything the group was asked for since its beginning
    before a known call, `EVERY` calls after   the same
    the last comparison

"Everything since the beginning" is a count and a rolling hash of calls in order. A difference is an error on every rank
that names every rank's call where they part.

What is found when:

- Ranks whose next call is new on all of them but not the same: before any byte moves.
- Ranks that make known calls in different orders, or of which one makes a known call while another makes a new one:
  at the next comparison. What was computed since the last one may be wrong until then, for at most `EVERY` calls of
  that group. Where sizes differ as well, the group's library mostly stops earlier, with its own error or by the group's
  timeout.
- A rank that does not come to a comparison: an error within the group's timeout, on every rank that came, naming who
  came and who did not.
- Not found: a difference in the last calls of a group, fewer than `EVERY`, that no comparison follows (`compare` makes
  one on request); data that differ although calls do not; calls that a graph replays, which the host does not see.

While a graph is captured nothing is exchanged: a call that is new is refused, a known one counts as everywhere, and a
comparison that became due is made by the first call behind the capture. Ranks have to capture the same calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from te_overrides.kernels.collectives.meeting import meet

EVERY = 1024
"""Known calls between two comparisons. One over a TCP store took 0.9 ms of 2 ranks and 2.9 ms of 8 that shared two
busy CPU cores: 1 to 3 µs a call, as much as counting it takes. Ten times as often would be felt."""

REMEMBERED = 4096
"""Calls a group remembers. All are forgotten at once when there are more, which every rank does at the same call."""

LONGEST = 512
"""Characters of a call that are told. Of a longer one the beginning, and a hash of all of it."""

# Modulo a prime, the polynomial of two orders of the same calls is the same only by chance, once in 2^61.
_PRIME, _BASE = (1 << 61) - 1, 0x1B873593CC9E2D51


class DisagreementError(ValueError):
    """Ranks of one group were about to compute different things together, or did."""


class CaptureError(RuntimeError):
    """A graph was about to capture a call that the ranks have not agreed on yet."""


@dataclass
class _Calls:
    """What this process was asked for in a group.

    Attributes:
        known: of each call its number for the hash, and its words.
        count, mark: how many there were, and the hash of all of them in order.
        since: words of those since the last comparison.
        meetings: how many comparisons there were.
        parted: the error that ended the group's order.
    """

    known: dict[Hashable, tuple[int, str]] = field(default_factory=dict)
    count: int = 0
    mark: int = 0
    since: list[str] = field(default_factory=list)
    meetings: int = 0
    parted: str = ""


# By the group itself: one that is made after another was destroyed may get its name, and even its id, on some ranks.
_calls: WeakKeyDictionary[dist.ProcessGroup, _Calls] = WeakKeyDictionary()


def require_agreement(
    call: Hashable,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    words: Callable[[Any], str] = str,
    continues: int = 0,
) -> int:
    """Count a call of the group; compare it with the other ranks where it is new, or a comparison is due.

    Args:
        call: what must be equal on all ranks: operation, dtypes and shapes, and what the environment makes of them.
        device: where the payload lies.
        words: what `call` says in a message, on every rank alike.
        continues: number of an earlier call of which this is a later part. Ranks that wait for equal calls in another
            order have parted, too.

    Returns:
        The number of this call in its group, from 1.

    Raises:
        DisagreementError: on every rank, naming every rank's call.
        MissingRankError: a rank did not come to the comparison.
        CaptureError: a graph is being captured, and the call is new.
        StoreError: ranks have no store.
    """
    calls = _calls.get(group)
    if calls is None:
        calls = _calls.setdefault(group, _Calls())
    entry = calls.known.get(call)
    if entry is None or len(calls.since) >= EVERY or calls.parted:
        entry = _compared(calls, call, group, device, words)
    calls.count += 1
    number, said = entry
    calls.mark = (calls.mark * _BASE + number) % _PRIME
    if continues:
        calls.mark = (calls.mark * _BASE + continues) % _PRIME
        said = f"{said} of call {continues}"
    calls.since.append(said)
    return calls.count


def compare(group: dist.ProcessGroup) -> None:
    """Compare everything the group was asked for so far. Collective over `group`.

    Raises:
        DisagreementError, MissingRankError, StoreError: as for `require_agreement`.
    """
    calls = _calls.setdefault(group, _Calls())
    if calls.parted:
        raise DisagreementError(calls.parted)
    _meet(calls, "a comparison that was asked for", group)


def _compared(
    calls: _Calls, call: Hashable, group: dist.ProcessGroup, device: torch.device, words: Callable[[Any], str]
) -> tuple[int, str]:
    """The entry of `call`, once it may be made."""
    if calls.parted:
        raise DisagreementError(calls.parted)
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    entry = calls.known.get(call)
    if entry is not None:
        if not captured:
            _meet(calls, entry[1], group)
        return entry
    text = words(call)
    if captured:
        raise CaptureError(
            f"a call over ranks that was never agreed on was about to be captured into a graph: {text}. Ranks agree on "
            "the host, which a graph does not replay. Run what is captured once before the capture, with the same "
            "shapes, as torch.cuda.make_graphed_callables does."
        )
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if len(text) > LONGEST:
        mark = f" … [{digest.hexdigest()}]"
        text = text[: LONGEST - len(mark)] + mark
    _meet(calls, text, group)
    if len(calls.known) >= REMEMBERED:
        calls.known.clear()
    entry = calls.known[call] = int.from_bytes(digest.digest(), "little"), text
    return entry


def _meet(calls: _Calls, text: str, group: dist.ProcessGroup) -> None:
    """Compare this rank's past and its next call with the others'."""
    calls.meetings += 1
    name = str(calls.meetings)
    word = json.dumps([calls.count, calls.mark, text]).encode()
    try:
        verdict = meet(group, name, word, _judge, text)
        if verdict == b"past":
            history = json.dumps([calls.count, *calls.since, text]).encode()
            verdict = meet(group, f"{name} past", history, _where_they_part, text)
            calls.parted = verdict.decode()
    except RuntimeError as error:
        # The ranks' meetings are not counted alike any more.
        calls.parted = (
            f"an earlier call of this group failed, and nothing can be computed in it since: {error}"
        )
        raise
    if verdict:
        raise DisagreementError(verdict.decode())
    calls.since.clear()


def _listed(said: list[str]) -> str:
    """What each rank says; of several that say the same the first, and who else does."""
    by_words: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        by_words.setdefault(words, []).append(rank)
    return "; ".join(
        f"rank {first} {words}" + (f" (so do ranks {others})" if others else "")
        for words, (first, *others) in by_words.items()
    )


_RULE = (
    "Every rank must make the same calls with the same shapes, dtypes and settings of the environment, in the same "
    "order; shards of different sizes are padded to one."
)


def _judge(words: list[bytes]) -> bytes:
    """Nothing where all ranks say the same, "past" where earlier calls differ, what to raise where the next ones do."""
    if len(set(words)) == 1:
        return b""
    said = [json.loads(word) for word in words]
    if len({(count, mark) for count, mark, _ in said}) > 1:
        return b"past"
    listed = _listed([text for _, _, text in said])
    return f"the ranks of a group are about to do different things: {listed}. {_RULE}".encode()


def _where_they_part(words: list[bytes]) -> bytes:
    """What to raise, of every rank's calls since the last comparison; the last of each is not made yet."""
    said = [json.loads(word) for word in words]
    counts, calls = [count for count, *_ in said], [each for _, *each in said]
    at = next((i for i, column in enumerate(zip(*calls, strict=False)) if len(set(column)) > 1), None)
    if at is None:
        at = min(len(each) for each in calls) - 1
    first = counts[0] - (len(calls[0]) - 1) + 1
    listed = _listed([", then ".join(each[at : at + 3]) for each in calls])
    return (
        f"the ranks of a group have done different things, or the same in another order. They part at call "
        f"{first + at} of the group, {at + 1} after their last comparison: {listed}. What the group computed from "
        f"there on is not to be used. {_RULE}"
    ).encode()
