"""What one rank does for a case: run the block, compare its share with what one rank computed alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from megatron_plugins.verify.ffn import block
from megatron_plugins.verify.ffn.plan import ONE, SLICES, Case, Mesh
from te_overrides.kernels import accounting
from te_overrides.kernels.bits import count_mismatches
from te_overrides.kernels.collectives.reference import even_cuts, owned

Record = tuple[str, int, int]
"""Column, mismatched elements, elements."""
ACCUMULATIONS = ((1, False), (3, False), (3, True))
"""Micro-batches, and whether their gradients are added in a float32 main_grad."""


def column_of_weights(micro_batches: int, fused: bool) -> str:
    """The column of weight gradients after so many micro-batches."""
    return f"dW {micro_batches} {'main_grad' if fused else 'grad'}"


class Records:
    """Comparisons of one rank."""

    def __init__(self) -> None:
        self.all: list[Record] = []

    def compare(self, column: str, got: torch.Tensor, want: torch.Tensor) -> None:
        mismatched, total, _ = count_mismatches(got, want.to(got.device))
        self.all.append((column, mismatched, total))


def run_baseline(
    rank: int, world: int, rows: int, kind: str, hidden: int, intermediate: int, device: str, file: str
) -> None:
    """One rank alone: output, dHidden and weight gradients of a batch, into `file`."""
    block.enter(ONE)
    module = block.build(ONE, hidden, intermediate, device)
    x, grad = block.tokens(rows, hidden, device)
    with torch.no_grad():
        found: dict[str, Any] = {"infer": block.forward(module, x)}
    found["train"], found["dx"] = block.training_pass(module, x, grad)
    if kind == "backward":
        found["dw"] = {
            (count, fused): _accumulated(module, ONE, rows, hidden, device, count, fused)
            for count, fused in ACCUMULATIONS
        }
    torch.save(_on_host(found), file)


def _on_host(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _on_host(value) for key, value in found.items()}
    return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu()


def _accumulated(
    module: Any, mesh: Mesh, rows: int, hidden: int, device: str, count: int, fused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight gradients after `count` micro-batches of different tokens."""
    block.accumulate(module, fused)
    for micro_batch in range(count):
        x, grad = block.tokens(rows, hidden, device, micro_batch)
        block.training_pass(module, block.mine(x, mesh, mesh.sp), block.mine(grad, mesh, mesh.sp))
    first, second = block.weight_gradients(module, fused)
    return first.detach().clone(), second.detach().clone()


@functools.lru_cache(maxsize=2)
def _baseline(file: str, made: float) -> Any:
    return torch.load(file, mmap=True)


def run_case(
    rank: int, world: int, case: Case, hidden: int, intermediate: int, device: str, file: str
) -> list[Record]:
    """Compare this rank's share of a case with the baseline in `file`."""
    records, mesh = Records(), case.mesh
    want = _baseline(file, Path(file).stat().st_mtime)
    block.enter(mesh)
    module = block.build(mesh, hidden, intermediate, device)
    if case.kind == "slices":
        _slices(records, module, mesh, case.rows, hidden, device, want)
        return records.all
    x, grad = (block.mine(t, mesh, mesh.sp) for t in block.tokens(case.rows, hidden, device))
    share = {name: block.mine(want[name], mesh, mesh.sp) for name in ("infer", "train", "dx")}
    with torch.no_grad():
        infer = block.forward(module, x)
        again = block.forward(module, x)
    out, dx = block.training_pass(module, x, grad)
    records.compare("forward", infer, share["infer"])
    records.compare("training output", out, share["train"])
    records.compare("train = infer", out, infer)
    records.compare("repeats", again, infer)
    if case.kind == "forward":
        return records.all
    records.compare("dHidden", dx, share["dx"])
    for count, fused in ACCUMULATIONS:
        got = _accumulated(module, mesh, case.rows, hidden, device, count, fused)
        if (count, fused) == ACCUMULATIONS[-1]:
            twice = _accumulated(module, mesh, case.rows, hidden, device, count, fused)
            for one, two in zip(got, twice, strict=True):
                records.compare("repeats", two, one)
        shards = (
            block.shard_of_first(want["dw"][count, fused][0], mesh),
            block.shard_of_second(want["dw"][count, fused][1], mesh),
        )
        for mine, whole in zip(got, shards, strict=True):
            records.compare(column_of_weights(count, fused), mine, _owned_rows(whole, mesh))
    return records.all


def _owned_rows(whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """What a context-parallel rank holds of a weight gradient: its own rows, +0 elsewhere."""
    own = even_cuts(whole.shape[0], mesh.cp)[block.cp_rank()]
    return owned(whole[own], own, whole.shape[0], dim=0)


def _slices(
    records: Records, module: Any, mesh: Mesh, rows: int, hidden: int, device: str, want: Any
) -> None:
    """Some rows by themselves against the same rows inside the batch."""
    x, grad = block.tokens(rows, hidden, device)
    for first, end in SLICES:
        cut = slice(min(first, rows), min(end, rows))
        if cut.stop <= cut.start:
            continue
        with torch.no_grad():
            infer = block.forward(module, x[cut])
        out, dx = block.training_pass(module, x[cut], grad[cut])
        records.compare("forward", infer, want["infer"][cut])
        records.compare("training output", out, want["train"][cut])
        records.compare("train = infer", out, infer)
        records.compare("dHidden", dx, want["dx"][cut])


def run_work(rank: int, world: int, mesh: Mesh, hidden: int, intermediate: int) -> dict[str, Any]:
    """Multiply-adds and bytes sent by this rank for one forward and backward of 32 rows, on the CPU's references."""
    block.enter(mesh)
    module = block.build(mesh, hidden, intermediate, "cpu")
    x, grad = (block.mine(t, mesh, mesh.sp) for t in block.tokens(32, hidden, "cpu"))
    with accounting.count() as counter:
        block.training_pass(module, x, grad)
    return {"flops": counter.flops, "bytes": counter.total_bytes_sent}


def try_certificates(rank: int, world: int) -> list[dict[str, Any]]:
    """Every certificate of a library product that speaks of this GPU, tried again."""
    from te_overrides.kernels.gemm import certified

    found = certified.certificates().recheck(torch.device("cuda", torch.cuda.current_device()))
    return [
        {
            "shape": list(key.shape),
            "dtype": key.dtype,
            "was": before.equal,
            "is": now.equal,
            "why": now.refused,
        }
        for key, before, now in found
    ]


def environment(rank: int, world: int, device: str) -> dict[str, Any]:
    """What ran, said by a process that ran on it."""
    import triton

    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
    }
