"""What a rank measures for a cell of ``bench.py ffn``. Runs in a process of its own, armed, beside its peers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from timing import captured, median_ms

from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives.reference import all_reduce
from te_overrides.kernels.gemm import ops
from te_overrides.kernels.swiglu.ops import swiglu_packed_backward

CHECKED_ROWS = 128
"""Rows of the batch with which a cell's rows are compared, where the cell has fewer."""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(rank: int, world: int, device: str) -> dict[str, Any]:
    """Facts of this process."""
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": _version("transformers"),
        "megatron_core": _version("megatron-core"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


class QwenCalls(torch.nn.Module):
    """Qwen3MLP's arithmetic, for machines without transformers."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _qwen(hidden: int, intermediate: int, device: str) -> Any:
    if _version("transformers") is None:
        return QwenCalls(hidden, intermediate).to(device, torch.bfloat16)
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu")
    return Qwen3MLP(config).to(device, torch.bfloat16)


class Ours:
    """The block's arithmetic as the modules compose it, over a tensor-parallel group or on one rank."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor, group: Any, tp: int) -> None:
        self.first, self.second, self.group, self.tp = first, second, group, tp

    def _joined(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.group is None else all_reduce(partial, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = ops.gated(x, self.first, False)
        return self._joined(ops.lane_tree(h, self.second, tp_size=self.tp))

    def step(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(output, dX, dW of gate and up, dW of down)."""
        h, packed = ops.gated(x, self.first, True)
        assert packed is not None
        out = self._joined(ops.lane_tree(h, self.second, tp_size=self.tp))
        d_second = ops.gradient(grad.t(), h.t(), grad.dtype)
        d_packed = swiglu_packed_backward(ops.one_lane(grad, self.second.t()), packed)
        half = self.first.shape[0] // 2
        dx = self._joined(ops.lane_tree(d_packed, self.first.t(), tp_size=self.tp, segments=[half, half]))
        return out, dx, ops.gradient(d_packed.t(), x.t(), grad.dtype), d_second


def _module(first: torch.Tensor, second: torch.Tensor, world: int) -> Any:
    """DeterministicMLP with these shards as weights, or None without megatron-core."""
    if _version("megatron-core") is None:
        return None
    from megatron_plugins.verify.ffn import block
    from megatron_plugins.verify.ffn.plan import Mesh

    mesh = Mesh(world)
    block.enter(mesh)
    module = block.build(mesh, first.shape[1], second.shape[1] * world, first.device.type)
    with torch.no_grad():
        module.linear_fc1.weight.copy_(first)
        module.linear_fc2.weight.copy_(second)
    return module


class _Sum(torch.autograd.Function):
    """The library's sum over ranks forward, the identity backward: Megatron's row-parallel pair."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Copy(torch.autograd.Function):
    """The identity forward, the library's sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class SharedQwen(torch.nn.Module):
    """Qwen3MLP's arithmetic over the default process group, with the vendor's products and sums."""

    def __init__(self, qwen: Any) -> None:
        super().__init__()
        self.qwen = qwen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sum.apply(self.qwen(_Copy.apply(x)))
        return out


def measure(
    rank: int, world: int, rows: int, backward: bool, sizes: dict[str, int], device: str, repeats: int
) -> Any:
    """Milliseconds by implementation, and how many elements of ours differ from the same rows of a batch."""
    hidden, intermediate = sizes["hidden"], sizes["intermediate"] // world
    torch.manual_seed(0)
    peer: Any = _qwen(hidden, intermediate, device)
    first = torch.cat([peer.gate_proj.weight, peer.up_proj.weight]).detach().contiguous()
    second = peer.down_proj.weight.detach().contiguous()
    group = dist.group.WORLD if world > 1 else None
    ours = Ours(first, second, group, world)
    theirs = SharedQwen(peer) if world > 1 else peer
    batch = torch.randn(max(rows, CHECKED_ROWS), hidden, device=device).to(torch.bfloat16)
    x, grad = batch[:rows], torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    functions = _backward(ours, theirs, x, grad) if backward else _forward(ours, theirs, first, second, x)
    mismatched, compared = _bits(ours, batch, x, grad, backward)
    if (module := _module(first, second, world)) is not None:
        from megatron_plugins.verify.ffn import block

        out, dx = block.training_pass(module, x, grad)
        wanted = ours.step(x, grad)[:2] if backward else (ours.forward(x), dx)
        for got, want in zip((out, dx), wanted, strict=True):
            differ, total, _ = count_mismatches(got, want)
            mismatched, compared = mismatched + differ, compared + total

        def step() -> None:
            for weight in module.parameters():
                weight.grad = None
            block.training_pass(module, x, grad)

        functions["DeterministicMLP"] = step if backward else lambda: block.forward(module, x)
    with torch.set_grad_enabled(backward):
        # A process group's host calls are not for a graph here.
        if device == "cuda" and not backward and world == 1:
            functions["ours, CUDA graph"] = captured(functions["ours"])
            functions["Qwen3MLP, CUDA graph"] = captured(functions["Qwen3MLP"])
        ms = median_ms(functions, device, repeats)
    if world > 1:
        ms["cuBLAS + NCCL"] = ms.pop("Qwen3MLP")
    return {"ms": ms, "mismatched": mismatched, "compared": compared}


def _bits(
    ours: Ours, batch: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, backward: bool
) -> tuple[int, int]:
    """Rows alone against rows of the batch; gradients against themselves again."""
    pairs = [(ours.forward(x), ours.forward(batch)[: x.shape[0]])]
    if backward:
        pairs += list(zip(ours.step(x, grad), ours.step(x, grad), strict=True))
    counts = [count_mismatches(got, want)[:2] for got, want in pairs]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def _forward(
    ours: Ours, theirs: Any, first: torch.Tensor, second: torch.Tensor, x: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    half = first.shape[0] // 2
    functions: dict[str, Callable[[], Any]] = {"Qwen3MLP": lambda: theirs(x), "ours": lambda: ours.forward(x)}
    if ours.group is None:
        functions["two library products"] = lambda: F.linear(F.linear(x, first)[:, :half], second)
    return functions


def _backward(ours: Ours, theirs: Any, x: torch.Tensor, grad: torch.Tensor) -> dict[str, Callable[[], Any]]:
    leaf = x.clone().requires_grad_()

    def peer() -> None:
        theirs.zero_grad(set_to_none=True)
        leaf.grad = None
        theirs(leaf).backward(grad)

    return {"Qwen3MLP": peer, "ours": lambda: ours.step(x, grad)}
