"""The overrides against TransformerEngine's own source, release by release, on gloo ranks of this machine.

Only the compiled module, CUDA streams and FlashAttention's kernel pair are stand-ins (`te_on_cpu.py`); every
upstream `.py` that runs is unmodified.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bits import assert_equal_bits, count_mismatches
from procs import run_ranks
from te_cpu import ring
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.tree.reference import balanced_tree
from upstream_wheels import TRANSFORMER_ENGINE, sources

MARK = "__deterministic_rocm__"
# TransformerEngine's modules that add over ranks through functions of its distributed.py, which they import by name.
SUMS = {
    "module.linear": ("allreduce", "symmetric_all_reduce", "reduce_scatter_along_first_dim"),
    "module.layernorm_linear": ("allreduce", "symmetric_all_reduce", "reduce_scatter_along_first_dim"),
    "module.layernorm_mlp": ("allreduce", "symmetric_all_reduce", "reduce_scatter_along_first_dim"),
    "ops.basic.basic_linear": ("reduce_scatter_along_first_dim",),
    "attention.dot_product_attention.context_parallel": ("reduce_scatter_along_first_dim",),
}


def _groups(world_size: int) -> dict[int, dist.ProcessGroup]:
    """Degree -> the group of that size which this rank is in; every rank creates every group."""
    groups = {}
    for degree in (2, world_size):
        for start in range(0, world_size, degree):
            group = dist.new_group(list(range(start, start + degree)))
            if start <= dist.get_rank() < start + degree:
                groups[degree] = group
    return groups


def _sums(rank: int, world_size: int) -> dict[str, Any]:
    """Every form of TransformerEngine's sums over ranks against the tree; who holds the replacements by name."""
    te_distributed = importlib.import_module("transformer_engine.pytorch.distributed")

    def data(of: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(of)
        return (torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)).to(
            dtype
        )

    group = dist.new_group(list(range(world_size)))
    for shape, dtype in itertools.product(
        ((8, 3, 5), (4, 7), (12, 2), (8, 3, 5)), (torch.bfloat16, torch.float32)
    ):
        x = data(rank, shape, dtype)
        want = balanced_tree([data(of, shape, dtype) for of in range(world_size)])
        own = want.chunk(world_size)[rank]
        # None is the default process group.
        for tp_group, async_op in itertools.product((group, None), (False, True)):
            name = f"{shape} {dtype} async {async_op}, default group {tp_group is None}"
            inp = x.clone()
            got, handle = te_distributed.allreduce(inp, tp_group, async_op=async_op)
            assert got is inp and (handle is not None) is async_op
            _ = handle.wait() if handle is not None else None
            assert_equal_bits(got, want, f"allreduce {name}")
            got, handle = te_distributed.reduce_scatter_along_first_dim(x, tp_group, async_op=async_op)
            assert (handle is not None) is async_op
            _ = handle.wait() if handle is not None else None
            assert_equal_bits(got, own, f"reduce_scatter_along_first_dim {name}")
        got, _ = te_distributed.symmetric_all_reduce(x.clone(), group, all_reduce_type="two_shot")
        assert_equal_bits(got, want, f"symmetric_all_reduce {shape} {dtype}")
        original = inspect.unwrap(te_distributed.reduce_scatter_along_first_dim)
        if "output" in inspect.signature(original).parameters:
            out = torch.full_like(own, torch.nan)
            got, _ = te_distributed.reduce_scatter_along_first_dim(x, group, output=out)
            assert got is out
            assert_equal_bits(out, own, f"reduce_scatter_along_first_dim into an output, {shape} {dtype}")
    alone = [dist.new_group([of]) for of in range(world_size)][rank]
    assert te_distributed.allreduce(x, alone) == (x, None)
    assert te_distributed.reduce_scatter_along_first_dim(x, alone) == (x, None)
    return {
        f"{module}.{name}": getattr(
            getattr(importlib.import_module(f"transformer_engine.pytorch.{module}"), name), MARK, None
        )
        for module, names in SUMS.items()
        for name in names
    }


def _everything(rank: int, world_size: int) -> dict[str, Any]:
    from patches import current_ledger
    from te_cpu.armed import backends, context_parallel, te_on_cpu

    te_on_cpu.prepare_ring(context_parallel)
    ledger = current_ledger()
    assert ledger is not None
    entry = context_parallel.attn_forward_func_with_cp
    states = {name: e.state for name, e in ledger.entries.items() if name.startswith("te.")}
    report: dict[str, Any] = {
        "states": states,
        "by name": backends.attn_forward_func_with_cp is entry and getattr(entry, MARK, None),
        "replaced": [n for n in ring.CORRECTIONS if getattr(getattr(context_parallel, n, None), MARK, None)],
        "upstream has": [n for n in ring.CORRECTIONS if hasattr(context_parallel, n)],
    }
    report["sums"] = _sums(rank, world_size)
    groups = _groups(world_size)
    # Upstream's ring with the corrections replaced, at both degrees, with another shape in between.
    original = ledger.entries["te.context_parallel_runtime"].original
    for degree, group in groups.items():
        with ring.counted(context_parallel) as calls:
            report[f"ring {degree}"] = ring.run(original, group, ring.operands())
            ring.run(original, group, ring.operands(length=48))
            report[f"ring {degree} again"] = ring.run(original, group, ring.operands())
        report[f"calls {degree}"] = dict(calls)
        report[f"positions {degree}"] = ring.positions(ring.LENGTH, group)
    # Our runtime through upstream's entry point, both formats and dtypes.
    for dtype in (torch.float32, torch.bfloat16):
        whole = ring.operands(dtype=dtype)
        for degree, group in groups.items():
            for qkv_format in ("bshd", "sbhd"):
                results = ring.run(entry, group, whole, qkv_format)
                report[f"ours {degree} {qkv_format} {dtype}"] = results
        q, k, v, grad = (x.transpose(0, 1) for x in whole)
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out, _ = context_parallel_attention(q, k, v, causal=True, softmax_scale=ring.D**-0.5)
        out.backward(grad)
        one = {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}
        report[f"one rank {dtype}"] = {name: x.transpose(0, 1) for name, x in one.items()}
    for degree, group in groups.items():
        report[f"packed {degree}"] = ring.run_packed(entry, group)
        report[f"rows {degree}"] = ring.packed_positions(group)
    return report


def _packed_on_one_rank() -> dict[str, Tensor]:
    q, k, v, grad = ring.packed_operands()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    boundaries = {"cu_seqlens": ring.CU_SEQLENS, "cu_seqlens_padded": ring.CU_SEQLENS_PADDED}
    out, _ = packed_attention(q, k, v, **boundaries, softmax_scale=ring.D**-0.5)
    out.backward(grad)
    return {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}


def _exact() -> dict[str, Tensor]:
    """float64 attention and its gradients, [b, s, heads, d]."""
    q, k, v, grad = (x.double().transpose(1, 2) for x in ring.operands())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(grad)
    return {
        n: x.transpose(1, 2).detach()
        for n, x in zip(("out", "dQ", "dK", "dV"), (out, q.grad, k.grad, v.grad), strict=True)
    }


def _calls(rank: int, degree: int, names: list[str]) -> dict[str, int]:
    """How often a causal ring calls each function: `rank` whole steps and the rest halves, three rings in all.

    Up to 2.19 the first step is corrected too; the LSE of the first step is cloned and merged with later ones.
    """
    whole, half = rank, degree - 1 - rank
    expected = {
        "flash_attn_fwd_softmax_lse_correction": whole,
        "flash_attn_fwd_second_half_softmax_lse_correction": half,
        "flash_attn_fwd_out_correction_init": 1,
        "flash_attn_fwd_out_correction": whole,
        "flash_attn_fwd_second_half_out_correction": half,
        "flash_attn_fwd_incremental_out_correction": whole,
        "flash_attn_fwd_incremental_second_half_out_correction": half,
    }
    return {name: 3 * expected[name] for name in names if expected[name]}


@pytest.mark.parametrize("version", TRANSFORMER_ENGINE)
def test_the_replacements_are_called_by_upstreams_ring_and_seen_by_its_backends(version: str) -> None:
    """ROCm/TransformerEngine#693: merge and corrections are ours, in every step of a real ring of 2 and of 4.

    A late setattr is invisible to `backends.py`, which imports the entry point by name: here it sees the replacement.
    In mode invariant that entry point gives, at CP 2 and 4, the bits of one rank in out, dQ, dK and dV.
    """
    environment = {"DETERMINISTIC_ROCM": "invariant", "TE_SOURCES": str(sources(version))}
    reports = run_ranks(4, _everything, env=environment, imports=("te_cpu.armed",))
    exact, packed = _exact(), _packed_on_one_rank()
    for rank, report in enumerate(reports):
        assert report["by name"] == "te.context_parallel_runtime"
        assert report["replaced"] == report["upstream has"]
        assert len(report["replaced"]) == (4 if version == "2.20.2" else 5)
        assert report["sums"] == {
            f"{module}.{name}": f"te.{name}" for module, names in SUMS.items() for name in names
        }
        assert "REFUSED" not in report["states"].values() and "ARMED" not in report["states"].values()
        for degree in (2, 4):
            where = f"TE {version}, CP={degree}, rank {rank}"
            assert report[f"calls {degree}"] == _calls(rank % degree, degree, report["replaced"]), where
            mine = report[f"positions {degree}"]
            for name, got in report[f"ring {degree}"].items():
                error = float((got.double() - exact[name][:, mine]).abs().max())
                assert error < 5e-6, f"{where}: {name} of the ring is off by {error:.1e}"
                again = report[f"ring {degree} again"][name]
                assert_equal_bits(again, got, f"{where}: {name} of the ring after another shape")
            for dtype in (torch.float32, torch.bfloat16):
                for qkv_format in ("bshd", "sbhd"):
                    for name, got in report[f"ours {degree} {qkv_format} {dtype}"].items():
                        want = report[f"one rank {dtype}"][name][:, mine]
                        assert_equal_bits(
                            got, want, f"{where}: {name}, {qkv_format}, {dtype}, against one rank"
                        )
            for name, got in report[f"packed {degree}"].items():
                want = packed[name][report[f"rows {degree}"]]
                assert_equal_bits(got, want, f"{where}: {name} of packed sequences against one rank")
    # Mending the merge does not make the ring independent of its size; that is what the runtime is replaced for.
    shards = [report["ring 4"]["out"] for report in reports]
    of_four = torch.empty(ring.BATCH, ring.LENGTH, ring.HEADS, ring.D)
    of_two = torch.empty_like(of_four)
    for rank, report in enumerate(reports):
        of_four[:, report["positions 4"]] = shards[rank]
        of_two[:, report["positions 2"]] = report["ring 2"]["out"]
    assert count_mismatches(of_two, of_four)[0] > 0


def _stable(rank: int, world_size: int) -> dict[str, Any]:
    from te_cpu.armed import context_parallel, te_on_cpu

    te_on_cpu.prepare_ring(context_parallel)
    entry = context_parallel.attn_forward_func_with_cp
    with ring.counted(context_parallel) as calls:
        results = ring.run(entry, dist.group.WORLD, ring.operands())
    corrections = [getattr(context_parallel, n) for n in ring.CORRECTIONS if hasattr(context_parallel, n)]
    return {
        "runtime": getattr(entry, MARK, None),
        "corrections": [getattr(function, MARK, None) for function in corrections],
        "calls": dict(calls),
        "results": results,
    }


def test_mode_stable_keeps_upstreams_runtime_and_replaces_the_corrections() -> None:
    version = "2.20.2"
    runs = {}
    for mode in ("stable", ""):
        environment = {"DETERMINISTIC_ROCM": mode, "TE_SOURCES": str(sources(version))}
        # The stand-ins for CUDA would mislead a compiler; upstream runs its functions eagerly.
        environment["NVTE_TORCH_COMPILE"] = "0"
        runs[mode] = run_ranks(2, _stable, env=environment, imports=("te_cpu.armed",))
    for rank in range(2):
        stable, off = runs["stable"][rank], runs[""][rank]
        assert stable["runtime"] is None and all(stable["corrections"]) and len(stable["corrections"]) == 4
        assert off["runtime"] is None and not any(off["corrections"])
        assert stable["calls"] == off["calls"]
        for name, got in stable["results"].items():
            assert float((got - off["results"][name]).abs().max()) < 1e-5
