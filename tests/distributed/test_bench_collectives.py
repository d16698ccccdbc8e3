"""The collectives' benchmark: every implementation does the same work, bits come first, the slowest rank counts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from procs import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "benchmarks")]

import collectives as bench  # noqa: E402
import collectives_cells as cells  # noqa: E402
import results  # noqa: E402

import report  # noqa: E402


def _work(rank: int, world: int) -> dict[str, Any]:
    """By operation: elements of each implementation that are not the sum, and what `measure` returns."""
    found: dict[str, Any] = {}
    group = dist.group.WORLD
    assert group is not None
    for operation in bench.OPERATIONS:
        # Whole numbers: the library's order gives the same sum.
        lanes = cells.LANES if operation == "reduce_scatter_many" else 1
        tensors = [(torch.arange(64.0) % 8).bfloat16() * (rank + 1) + lane for lane in range(lanes)]
        before = [x.clone() for x in tensors]
        wanted = cells.wanted(operation, tensors, group)
        wrong = {}
        for name, one in cells.implementations(operation, tensors, group).items():
            places = [out.data_ptr() for out in one.outs]
            # The last of three calls: what is summed in place is put back before each.
            for _ in range(3):
                one.prepare()
                one.call()
            assert [out.data_ptr() for out in one.outs] == places
            wrong[name] = sum(int((a != b).sum()) for a, b in zip(one.outs, wanted, strict=True))
        cells.leave()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        found[operation] = wrong, cells.measure(rank, world, operation, 1024, "cpu", 1)
    return found


def test_every_implementation_writes_the_sum_and_a_cell_has_every_figure() -> None:
    """On four gloo ranks, by every transport that they can take."""
    ways = {
        "reduce_scatter": {"library", "ours", "ours, nodes"},
        "reduce_scatter_many": {"library", "ours", "ours, nodes"},
        "all_reduce": {"library", "ours", "ours, nodes", "ours, shares"},
        "all_gather": {"library", "ours"},
    }
    ranks = run_ranks(4, _work)
    for rank, found in enumerate(ranks):
        for operation, (wrong, values) in found.items():
            print(f"rank {rank}, {operation}: {sum(wrong.values())} elements differ by {sorted(wrong)}")
            assert set(wrong) == set(values["ms"]) == ways[operation]
            assert not any(wrong.values()) and values["mismatched"] == 0 < values["compared"]
            # All ranks say the same: the slowest one's times.
            assert values == ranks[0][operation][1]
    made = [
        results.Cell(
            name=f"{operation} over 4, 1024 bytes", path=operation, rows=1024, topology="4 ranks", peer="library",
            price_s=1.0, cost_s=1.0, skipped=None, **values,
        )
        for operation, (_, values) in ranks[0].items()
    ]  # fmt: skip
    assert [cell.moved for cell in made] == [1024, 2048, 1024, 4096]
    assert made[0].bandwidth("ours") == pytest.approx(1024 / (made[0].ms["ours"] / 1e3))
    environment = results.Environment("CPU", 0, "2", "3", None, None, None, None)
    page = report.render(
        results.Results(results.SCHEMA, "collectives", "", environment, {}, [c.name for c in made], made),
        "f",
        None,
    )
    assert "| all_reduce over 4, 1024 bytes, ours, shares |" in page and "GB/s" in page


def test_the_slowest_rank_is_that_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that are slow in turn: each one's median is 1."""
    other = torch.tensor([[9.0, 1.0, 1.0]], dtype=torch.float64)

    def all_reduce(times: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        times.copy_(torch.maximum(times, other))

    monkeypatch.setattr(cells.dist, "all_reduce", all_reduce)
    assert cells.slowest(torch.tensor([[1.0, 9.0, 1.0]], dtype=torch.float64)) == [9.0]


def test_every_cell_is_planned_and_priced_by_its_bytes() -> None:
    args = argparse.Namespace(worlds=[2, 4], bytes=None, device="cuda")
    planned = bench.plan(args)
    assert len(planned) == len(set(planned)) == 2 * 4 * len(bench.SIZES["cuda"])
    assert {size for _, _, size in planned} == set(bench.SIZES["cuda"])
    small, large = (bench.price(2, size, "cuda", 25) for size in (1 << 10, 1 << 29))
    assert 0 < small < large


def test_each_transport_that_can_carry_a_sum_has_a_row() -> None:
    def names(*arguments: Any) -> list[str]:
        return list(cells.transports(*arguments))

    assert names("all_reduce", 8, 1 << 10, "cuda") == ["peers", "nodes", "nodes+peers", "shares"]
    assert names("all_reduce", 8, 1 << 20, "cuda") == ["peers", "nodes", "nodes+peers", "gather"]
    assert names("all_reduce", 2, 1 << 20, "cpu") == ["shares"]
    # Two tensors of 256 MiB are more than shared memory takes.
    assert names("reduce_scatter_many", 4, 256 << 20, "cuda") == ["nodes"]
    assert names("reduce_scatter", 4, 256 << 20, "cuda") == ["peers", "nodes", "nodes+peers"]
