"""Streams, events and the allocator's records of a GPU, as a log: who waits for whom, and whose memory is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class FakeStreams:
    """What `torch.cuda` says of streams.

    Attributes:
        current: the current stream.
        log: ("event", None, stream), ("wait", stream of the event, waiting stream), ("wait all", stream, waiting
            stream) and ("read", address of the storage, stream), in order.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, str]] = []
        self._named: dict[str, FakeStream] = {}
        self.current = self.named("start")

    def named(self, name: str) -> FakeStream:
        """The stream of that name."""
        return self._named.setdefault(name, FakeStream(self, name))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Every tensor counts as one of a GPU from here on, for what asks `streams.py`."""
        from te_overrides.kernels.collectives import streams

        patch.setattr(streams, "_on_gpu", lambda x: True)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(
            torch.Tensor,
            "record_stream",
            lambda x, stream: self.log.append(("read", x.untyped_storage().data_ptr(), stream.name)),
        )


class FakeStream:
    def __init__(self, streams: FakeStreams, name: str) -> None:
        self._streams, self.name = streams, name

    def record_event(self) -> str:
        self._streams.log.append(("event", None, self.name))
        return self.name

    def wait_event(self, event: str) -> None:
        self._streams.log.append(("wait", event, self.name))

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.log.append(("wait all", other.name, self.name))
