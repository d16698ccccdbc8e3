"""Lets megatron-core build and run a model on a machine without a GPU.

megatron-core spells the device out in a few places: the RNG tracker reads the device generator, RoPE pins a small index
tensor. These are plumbing, not arithmetic; everything that computes is upstream's or this project's own code. Call
`install()` before the first model is built. For demonstrations and tests only.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Redirect torch.cuda's generator, device queries and pinning to the CPU. Idempotent."""
    if getattr(torch.cuda, "_redirected_to_cpu", False):
        return
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    cuda.get_rng_state = lambda *_a, **_k: torch.get_rng_state()  # type: ignore[assignment]
    cuda.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)  # type: ignore[assignment]
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_a, **_k: self  # type: ignore[assignment,method-assign]
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    torch.tensor = tensor  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as rng

    rng._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()
    cuda._redirected_to_cpu = True  # type: ignore[attr-defined]
