"""Results that one stream of a GPU computes and another one may wait for.

The allocator knows a tensor's own stream alone, and a wait orders the stream it is made on, no other. So whatever a
stream reads is recorded on it before the host lets go, and whoever asks for a result later, on another stream, waits
for the event that was recorded behind it. On a CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def _on_gpu(x: Tensor) -> bool:
    # The device, which a subclass cannot say otherwise: what has no stream is not asked for one.
    return x.device.type == "cuda"


def read_here(tensors: Iterable[Tensor]) -> None:
    """The current stream reads `tensors`: their memory is not given to others before it has."""
    for x in tensors:
        if _on_gpu(x):
            x.record_stream(torch.cuda.current_stream(x.device))


class Ready:
    """Results that the current stream has just computed, or will have when it gets there.

    Args:
        results: may lie on a CPU.
        event: record one. Without it a later wait on another stream waits for all that this one was given until then:
            cheaper where such waits are rare.
    """

    def __init__(self, results: Sequence[Tensor], *, event: bool = True) -> None:
        self._results = list(results)
        self._device = next((x.device for x in self._results if _on_gpu(x)), None)
        self._stream: Any = None if self._device is None else torch.cuda.current_stream(self._device)
        self._event: Any = self._stream.record_event() if event and self._stream is not None else None

    def take(self) -> list[Tensor]:
        """The results, for the current stream."""
        if self._stream is None:
            return self._results
        here = torch.cuda.current_stream(self._device)
        if here != self._stream:
            if self._event is None:
                here.wait_stream(self._stream)
            else:
                here.wait_event(self._event)
            read_here(self._results)
        return self._results
