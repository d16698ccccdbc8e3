"""Lets megatron-core build, run and train a model on a machine without a GPU.

megatron-core spells the device out in places: the RNG tracker reads the device generator, RoPE pins a small index
tensor, the optimizer asks for streams and names its buffers' device. These are plumbing, not arithmetic; everything
that computes is upstream's or this project's own code. For verification, demonstrations and tests only.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

# What is replaced belongs to others; nothing here is typed as theirs.
_TORCH: Any = torch
_MARK = "_redirected_to_cpu"


def install() -> None:
    """Redirect torch.cuda's generator, device queries and pinning to the CPU: enough to run a model. Idempotent."""
    if getattr(torch.cuda, _MARK, False):
        return
    cuda = _TORCH.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    _TORCH.Tensor.cuda = lambda self, *_a, **_k: self
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    _TORCH.tensor = tensor
    import megatron.core.tensor_parallel.random as rng

    rng._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    setattr(cuda, _MARK, True)


def install_for_training() -> None:
    """`install`, and what Megatron's buffers, schedules and optimizer ask of torch.cuda. Idempotent."""
    if getattr(torch.cuda, _MARK, False) == "training":
        return
    install()
    cuda = _TORCH.cuda
    nothing = types.SimpleNamespace(
        wait_stream=lambda *_: None,
        synchronize=lambda *_: None,
        wait_event=lambda *_: None,
        record_event=lambda *_: None,
    )
    cuda.current_stream = cuda.default_stream = lambda *_: nothing
    cuda.Stream = lambda *_a, **_k: nothing
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.synchronize = lambda *_: None
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
    )
    kind = torch.Tensor.type
    # Megatron's optimizer sorts parameters by the names of CUDA tensor types.
    _TORCH.Tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.", 1)
    )
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand"):
        make = getattr(torch, name)

        def on_cpu(*args: Any, _make: Any = make, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            made: torch.Tensor = _make(*args, **kwargs)
            return made

        setattr(torch, name, on_cpu)
    setattr(cuda, _MARK, "training")
