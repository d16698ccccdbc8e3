"""What Megatron's optimizer and gradient buffers ask of torch.cuda, answered by the CPU.

Plumbing, as in scripts/megatron_on_cpu.py; everything that computes is upstream's or this project's own code.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

import megatron_on_cpu


def install() -> None:
    """Redirect streams, device queries, tensor type names and the device argument of factories. Idempotent."""
    if getattr(torch.cuda, "_optimizer_on_cpu", False):
        return
    megatron_on_cpu.install()
    nothing = types.SimpleNamespace(
        wait_stream=lambda *_: None,
        synchronize=lambda *_: None,
        wait_event=lambda *_: None,
        record_event=lambda *_: None,
    )
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: nothing  # type: ignore[assignment,return-value]
    torch.cuda.Stream = lambda *_a, **_k: nothing  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 1  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
    )
    kind = torch.Tensor.type
    # Megatron's optimizer sorts parameters by the names of CUDA tensor types.
    torch.Tensor.type = (  # type: ignore[method-assign]
        lambda self, *a, **k: (
            kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.", 1)
        )
    )
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand"):
        make = getattr(torch, name)

        def on_cpu(*args: Any, _make: Any = make, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return _make(*args, **kwargs)

        setattr(torch, name, on_cpu)
    torch.cuda._optimizer_on_cpu = True  # type: ignore[attr-defined]
