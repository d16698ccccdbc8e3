"""Counts multiply-adds and exchanged bytes, so that a test can show that no rank executes another rank's share.

Equal bits over parallel layouts could be had by every rank computing everything. What this project promises instead
is that a rank's work stays that of the sharded job, and a promise about work needs a counter. The references for
GEMM, attention and the collectives report here what they execute:

    with accounting.count() as counter:
        out, lse = context_parallel_attention(...)
    counter.flops, counter.bytes_sent["all_gather"]

Outside `count()` a report is one attribute look-up. Counters nest, each sees what is reported while it is open. The
counters are thread-local: autograd runs backward on the calling thread for CPU tensors, which is where the references
are counted; a backward on a device runs on autograd's own thread and is not seen.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Counter:
    """What one `count()` block saw.

    Attributes:
        flops: multiply-adds, each counted as one.
        bytes_sent: bytes that left this rank, by kind of exchange; what a rank hands to itself is not counted.
    """

    flops: int = 0
    bytes_sent: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes_sent(self) -> int:
        """Bytes that left this rank, all kinds together."""
        return sum(self.bytes_sent.values())


class _OpenCounters(threading.local):
    def __init__(self) -> None:
        self.stack: list[Counter] = []


_open = _OpenCounters()


def flops(n: int) -> None:
    """Report `n` multiply-adds."""
    for counter in _open.stack:
        counter.flops += n


def bytes_sent(n: int, what: str) -> None:
    """Report `n` bytes that left this rank in an exchange of kind `what` ("all_gather", "all_to_all", …)."""
    for counter in _open.stack:
        counter.bytes_sent[what] = counter.bytes_sent.get(what, 0) + n


@contextmanager
def count() -> Iterator[Counter]:
    """Open a counter for the calling thread and yield it; it keeps its totals after the block."""
    counter = Counter()
    _open.stack.append(counter)
    try:
        yield counter
    finally:
        # By identity: two counters that saw the same compare equal.
        _open.stack[:] = [other for other in _open.stack if other is not counter]
