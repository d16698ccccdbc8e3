"""Do all ranks mean the same sum? Asked once for every new one, before its bytes move.

A collective whose ranks disagree about shape, dtype or operation hangs, or worse, adds what does not belong together.
Before a group sees a sum for the first time its ranks exchange a line of text each; a difference is an error on every
rank that names all lines. What was agreed on once is not asked again: ranks that part ways later, one repeating an old
sum while another starts a new one, are caught by the group's own timeout.
"""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

WIDTH = 512
"""Bytes of a line, filled up with zeros. Of a longer one the beginning travels, and a hash of all of it."""

REMEMBERED = 4096
"""Lines a group remembers. All are forgotten at once when there are more, which every rank does at the same line."""

# By the group itself: one that is made after another was destroyed may get its name, and even its id, on some ranks.
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


class DisagreementError(ValueError):
    """Ranks of one group were about to compute different things together."""


class CaptureError(RuntimeError):
    """A graph was about to capture a sum that the ranks have not agreed on yet."""


def require_agreement(line: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange `line` unless this group has agreed on it before.

    Args:
        line: operation, dtypes and shapes, and what the environment makes of them.
        device: where the group's backend can move bytes.

    Raises:
        DisagreementError: on every rank, naming every rank's line.
        CaptureError: a graph is being captured, which cannot ask.
    """
    known = _agreed.setdefault(group, set())
    if line in known:
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"a sum over ranks that was never agreed on was about to be captured into a graph: {line}. Ranks agree on "
            "the host, which a graph does not replay. Run what is captured once before the capture, with the same "
            "shapes, as torch.cuda.make_graphed_callables does."
        )
    text = line.encode()
    if len(text) > WIDTH:
        mark = f" … [{hashlib.blake2b(text, digest_size=8).hexdigest()}]".encode()
        text = text[: WIDTH - len(mark)] + mark
    mine = torch.tensor(list(text.ljust(WIDTH, b"\0")), dtype=torch.uint8, device=device)
    lines = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lines, mine, group=group)
    said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in lines]
    if len(set(said)) > 1:
        listed = "; ".join(f"rank {rank} {words}" for rank, words in enumerate(said))
        raise DisagreementError(
            f"the ranks of a group are about to do different things: {listed}. Every rank must call the same "
            "operation with the same shapes, dtypes and settings of the environment, in the same order."
        )
    if len(known) >= REMEMBERED:
        known.clear()
    known.add(line)
