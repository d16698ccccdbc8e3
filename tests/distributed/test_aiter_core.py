"""The AITER core over fake operators: guards before the first launch, and one launch a unit at every layout."""

import itertools
import sys

import pytest
import torch
import torch.distributed as dist

import fake_aiter
from attention_cases import operands
from bits import assert_equal_bits
from fake_aiter import core_over
from patches.errors import DriftError
from procs import RankFailure, run_ranks
from te_overrides.kernels.attention import core_in_use
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.attention.paged import paged_attention
from te_overrides.kernels.attention.reference import AttentionError
from te_overrides.kernels.zigzag.reference import LAYOUTS, from_canonical

SEQ, HEADS, GROUPS = 48, 8, 4
CASES = {"causal": {}, "full": {"causal": False}, "window": {"window": (9, 0), "softmax_scale": 0.3}}


def _everything(core, tensors, **options):
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out, lse = core.aiter_attention(q, k, v, **options)
    out.backward(tensors[3])
    return {"out": out.detach(), "lse": lse, "dQ": q.grad, "dK": k.grad, "dV": v.grad}


def _meshes(rank, world_size, folder):
    core = core_over(folder)
    whole = operands(SEQ, 2, HEADS, GROUPS, 8)
    want = {name: _everything(core, whole, **options) for name, options in CASES.items()}
    calls = sys.modules["aiter.ops.mha"].CALLS
    alone = len(calls) // len(CASES)
    launches = []
    for cp_size, tp_size in ((2, 2), (3, 1), (4, 2), (8, 1)):
        groups = [dist.new_group([cp * tp_size + tp for cp in range(cp_size)]) for tp in range(tp_size)]
        if rank >= cp_size * tp_size:
            continue
        cp_rank, tp_rank = divmod(rank, tp_size)
        for (name, options), layout in itertools.product(CASES.items(), LAYOUTS):

            def mine(x, layout=layout, cp=(cp_size, cp_rank), tp=(tp_size, tp_rank)):
                return from_canonical(x, *cp, layout).chunk(tp[0], 2)[tp[1]].contiguous()

            calls.clear()
            got = _everything(
                core, [mine(x) for x in whole], cp_group=groups[tp_rank], layout=layout, **options
            )
            launches.append((cp_size, len(calls)))
            # Equal launches everywhere: one batch row, one key head and its query heads, the whole sequence.
            assert {call[1:] for call in calls} <= {((1, SEQ, HEADS // GROUPS, 8), (1, SEQ, 1, 8))}
            for result, part in got.items():
                full = want[name][result]
                if result == "lse":
                    full, part = full.permute(2, 0, 1), part.permute(2, 0, 1)
                what = f"{result}, {name}, CP={cp_size}, TP={tp_size}, {layout}, rank {rank}"
                assert_equal_bits(part, mine(full), what)
    # Eight units a head shard of 1, forward and backward.
    assert alone == 2 * 2 * GROUPS
    if rank == 0:
        # All heads in one launch, as the library would: other bits, seen.
        forward, _ = core.operators()
        q, k, v = (x.transpose(0, 1) for x in whole[:3])
        together = forward(q, k, v, 0.0, 8**-0.5, True, -1, 0, 0, True, False)[0].transpose(0, 1)
        with pytest.raises(AssertionError, match="elements differ"):
            assert_equal_bits(together.contiguous(), want["causal"]["out"], "out")
    return launches


def test_every_layout_has_the_launches_of_one_rank_and_its_bits(tmp_path):
    """Work is divided: the launches of all ranks of a degree add up to those of one."""
    reports = run_ranks(8, _meshes, fake_aiter.write(tmp_path))
    cells = len(CASES) * len(LAYOUTS)
    for cp_size, tp_size in ((2, 2), (3, 1), (4, 2), (8, 1)):
        mine = [sum(n for cp, n in report if cp == cp_size) for report in reports[: cp_size * tp_size]]
        assert sum(mine) == cells * 2 * 2 * GROUPS, (cp_size, mine)


WRONG = {
    "an argument inserted in the middle": (
        {"forward": fake_aiter.FORWARD.replace("SymInt sink_size", "bool fast, SymInt sink_size")},
        "mha_fwd: argument 8 was reviewed as .SymInt sink_size. and is .bool fast.",
    ),
    "an argument that is gone": (
        {"forward": fake_aiter.FORWARD.replace("SymInt sink_size, ", "")},
        "mha_fwd: argument 8 was reviewed as .SymInt sink_size. and is .bool return_softmax_lse.",
    ),
    "an argument renamed": (
        {"backward": fake_aiter.BACKWARD.replace("deterministic", "repeatable")},
        "mha_bwd: argument 11 was reviewed as .bool deterministic. and is .bool repeatable.",
    ),
    "a new one without a default": (
        {"backward": fake_aiter.BACKWARD.replace("? dq=None", " dq")},
        "mha_bwd: argument 12 .* is new and has no default",
    ),
    "an operator that is missing": ({"backward": None}, "mha_bwd. .*Found no such operator"),
}


def _refused(rank, world_size, folder, name):
    _, words = WRONG[name]
    core = core_over(folder)
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(DriftError, match=words):
        core.aiter_attention(x, x, x)
    assert core_in_use._in_use is None, "a refusal claims nothing"


@pytest.mark.parametrize("name", WRONG)
def test_an_operator_with_another_schema_is_not_called(tmp_path, name):
    run_ranks(1, _refused, fake_aiter.write(tmp_path, **WRONG[name][0]), name)


def _unread(rank, world_size, folder):
    core = core_over(folder, read=False)
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(DriftError, match="mha_fwd. Sought source that was read, source:.*found source:"):
        core.aiter_attention(x, x, x)
    core_over(folder)
    for bad, words in (
        ([x.float()] * 3, "float32"),
        ([x, x[:2], x[:2]], "self-attention"),
    ):
        with pytest.raises(AttentionError, match=words):
            core.aiter_attention(*bad)
    core.aiter_attention(x, x, x)
    ours = (
        lambda: context_parallel_attention(x, x, x),
        lambda: packed_attention(x[:, 0], x[:, 0], x[:, 0], cu_seqlens=[0, 4]),
        lambda: paged_attention(
            x[None, :1, 0], x[None, :, 0], x[None, :, 0], block_table=torch.zeros(1, 1, dtype=torch.int32),
            seq_lens=torch.ones(1, dtype=torch.int32),
        ),
    )  # fmt: skip
    for call in ours:
        with pytest.raises(
            AttentionError, match="about to run on this project's kernels, but has run on AITER's"
        ):
            call()
    core_in_use._in_use = None
    ours[0]()
    with pytest.raises(
        AttentionError, match="about to run on AITER's kernels, but has run on this project's"
    ):
        core.aiter_attention(x, x, x)


def test_unread_source_and_two_cores_in_one_process_are_refused(tmp_path):
    run_ranks(1, _unread, fake_aiter.write(tmp_path))


def _mixed(rank, world_size, folder):
    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16)
    call = core_over(folder).aiter_attention if rank else context_parallel_attention
    call(x, x, x, cp_group=dist.group.WORLD)


def test_two_ranks_with_two_cores_are_told_what_each_means(tmp_path):
    with pytest.raises(RankFailure, match="rank 0 attention: .* rank 1 attention on AITER"):
        run_ranks(2, _mixed, fake_aiter.write(tmp_path))


def _absent(rank, world_size):
    from megatron_plugins.aiter_operators import operators
    from te_overrides.kernels.attention.aiter import aiter_attention

    x = torch.zeros(4, 1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(DriftError, match=r"sought aiter\.ops\.mha, found ModuleNotFoundError"):
        aiter_attention(x, x, x, operators=operators)


def test_without_aiter_the_core_says_so():
    run_ranks(1, _absent)
