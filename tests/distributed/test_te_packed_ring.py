"""TransformerEngine's own ring over packed sequences calls our corrections, and its output is that of a dense ring.

Unmodified upstream `.py`; the stand-ins are those of `te_on_cpu.py` and `tests/te_cpu/packed_ring.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bits import assert_equal_bits
from procs import run_ranks
from te_cpu import packed_ring, ring
from upstream_wheels import TRANSFORMER_ENGINE, sources


def _packed(rank: int, world_size: int) -> dict[str, Any]:
    from patches import current_ledger, gate
    from te_cpu.armed import backends, context_parallel, te_on_cpu

    te_on_cpu.prepare_ring(context_parallel)
    packed_ring.prepare(context_parallel, backends)
    ledger = current_ledger()
    report: dict[str, Any] = {"refused": "", "rows": ring.positions(ring.LENGTH, dist.group.WORLD)}
    if ledger is not None:
        gate.settle(ledger)
        entries = {name: ledger.entries[name] for name in packed_ring.CORRECTIONS}
        report["states"] = {name: e.state for name, e in entries.items()}
        report["before"] = {name: e.called for name, e in entries.items()}
    try:
        report["packed"], report["dense"] = packed_ring.run(
            context_parallel.attn_forward_func_with_cp, dist.group.WORLD
        )
    except NotImplementedError as error:
        report["refused"] = str(error)
    if ledger is not None:
        report["called"] = {name: ledger.entries[name].called for name in packed_ring.CORRECTIONS}
    return report


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("version", TRANSFORMER_ENGINE)
def test_a_packed_ring_calls_ours_and_has_the_bits_of_a_dense_one(version: str, world_size: int) -> None:
    environment = {
        "DETERMINISTIC_ROCM": "stable",
        "TE_SOURCES": str(sources(version)),
        "NVTE_TORCH_COMPILE": "0",
    }
    reports = run_ranks(world_size, _packed, env=environment, imports=("te_cpu.armed",))
    q, k, v = (x.double().transpose(1, 2) for x in ring.operands()[:3])
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    exact = exact.transpose(1, 2)
    second_half, output = packed_ring.CORRECTIONS
    for rank, report in enumerate(reports):
        where = f"TE {version}, CP={world_size}, rank {rank}"
        assert report["refused"] == "" and set(report["states"].values()) == {"VERIFIED"}, report
        assert not any(report["before"].values()) and report["called"][output], where
        # The last rank of a causal ring attends to everything; every other one has steps of half its queries.
        assert report["called"][second_half] == (rank < world_size - 1), where
        assert_equal_bits(report["packed"], report["dense"], f"{where}: packed against dense")
        error = float((report["packed"].double() - exact[:, report["rows"]]).abs().max())
        assert error < 5e-6, f"{where}: off by {error:.1e}"


def test_without_the_layer_the_packed_ring_goes_into_the_compiled_module() -> None:
    """So the functions that ran above are ours: upstream's raise in this stand-in."""
    environment = {"DETERMINISTIC_ROCM": "", "TE_SOURCES": str(sources("2.20.2")), "NVTE_TORCH_COMPILE": "0"}
    reports = run_ranks(2, _packed, env=environment, imports=("te_cpu.armed",))
    assert all(
        "thd_" in report["refused"] and "compiled symbol" in report["refused"] for report in reports
    ), reports
