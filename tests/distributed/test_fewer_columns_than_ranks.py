"""Sums over tokens with fewer columns than ranks: who owns none works, and the others' bits are one rank's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bits import assert_equal_bits
from megatron_plugins.collectives import ownership
from megatron_plugins.parallel_layout import ParallelLayout
from procs import run_ranks
from te_overrides.kernels.granules.ops import granule_partials
from te_overrides.kernels.zigzag.reference import from_canonical

POSITIONS, BATCH, TOKENS_IN_VOCABULARY = 256, 2, 8
ALONE = ParallelLayout(None, None, False)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _together(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Everybody's parts, which hold +0 where another rank owns: any order of the sum is exact."""
    whole = part.clone()
    dist.all_reduce(whole, group=group)
    return whole


def _gradients(
    x: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor, layout: ParallelLayout
) -> dict[str, torch.Tensor]:
    """Of operands [s, B, …] held under CP; under sequence parallelism the norm's are cut further."""
    mine = grad.chunk(layout.tp_size)[layout.tp_rank] if layout.sequence_parallel else grad
    over_tp = layout.sequence_parallel
    heads = granule_partials(grad.unsqueeze(2).unsqueeze(3).expand(-1, -1, layout_groups(layout), 1, -1))
    return {
        "bias": ownership.bias_gradient(mine, layout, tokens_over_tp=over_tp),
        "q/k-norm": ownership.vector_gradient(heads, layout, tokens_over_tp=False, heads_over_tp=True),
        "weight": ownership.weight_gradient(x, grad, layout),
        "embedding": ownership.embedding_weight_gradient(ids, grad, TOKENS_IN_VOCABULARY, 0, layout),
    }


def layout_groups(layout: ParallelLayout) -> int:
    """KV groups of a rank, of eight."""
    return 8 // layout.tp_size


def _every_mesh(rank: int, world: int) -> int:
    compared = 0
    for columns in (1, 3):
        x, grad = _randn(POSITIONS, BATCH, 5), _randn(POSITIONS, BATCH, columns, seed=1)
        ids = torch.randint(
            0, TOKENS_IN_VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(2)
        )
        want = _gradients(x, grad, ids, ALONE)
        for tp in (1, 2, 8):
            cp_rank, tp_rank = divmod(rank, tp)
            tp_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
            cp_groups = [dist.new_group(list(range(first, world, tp))) for first in range(tp)]
            cp = world // tp
            layout = ParallelLayout(
                tp_groups[cp_rank] if tp > 1 else None, cp_groups[tp_rank] if cp > 1 else None, tp > 1
            )
            held = [from_canonical(t, cp, cp_rank, layout.cp_layout) for t in (x, grad, ids.t().contiguous())]
            got = _gradients(held[0], held[1], held[2].t(), layout)
            for name, part in got.items():
                # Vectors are owned over TP as well; weights are whole on every TP rank here.
                group = dist.group.WORLD if name in ("bias", "q/k-norm") else cp_groups[tp_rank]
                whole = _together(part, group)
                assert_equal_bits(whole, want[name], f"{name}, {columns} columns, TP{tp} CP{cp}")
                compared += whole.numel()
    return compared


def test_ranks_without_a_column_work_and_the_others_have_one_ranks_bits() -> None:
    (compared,) = set(run_ranks(8, _every_mesh))
    assert compared > 0
