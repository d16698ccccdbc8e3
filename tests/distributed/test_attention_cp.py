"""Context-parallel attention over real process groups: the bits of one rank, the work and the bytes of a share.

One world of eight ranks serves every degree and mesh; each rank compares its rows with the results of one process.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from attention_cases import RESULTS, everything, operands, packed_everything
from bits import assert_equal_bits
from procs import run_ranks
from te_overrides.kernels import accounting
from te_overrides.kernels.attention import reference
from te_overrides.kernels.attention.context_parallel import context_parallel_attention
from te_overrides.kernels.zigzag.reference import (
    LAYOUTS,
    LayoutError,
    ZigzagError,
    from_canonical,
    packed_rank_rows,
)

WORLD = 8
# A multiple of 2 * CP for CP 1, 2, 3, 4 and 8, and no multiple of BLOCK_N.
SEQ = 144
# (CP, TP): ranks cp * TP + tp of the world; ranks beyond CP * TP sit out.
MESHES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2), (8, 1)]
CASES = {
    "causal bf16": ({"causal": True}, torch.bfloat16),
    "full fp32": ({"causal": False}, torch.float32),
    "window bf16": ({"causal": True, "window": (30, 0)}, torch.bfloat16),
}


def _case(name):
    options, dtype = CASES[name]
    return options, operands(SEQ, 2, 8, 4, 8, dtype)


def _mine(x, cp_size, cp_rank, tp_size, tp_rank, layout):
    return from_canonical(x, cp_size, cp_rank, layout).chunk(tp_size, 2)[tp_rank].contiguous()


def _groups(cp_size, tp_size):
    """The context-parallel group of every tp rank; every rank of the world must take part in making each."""
    return [dist.new_group([cp * tp_size + tp for cp in range(cp_size)]) for tp in range(tp_size)]


def _invariance(rank, world_size, want):
    compared = 0
    for cp_size, tp_size in MESHES:
        groups = _groups(cp_size, tp_size)
        if rank >= cp_size * tp_size:
            continue
        cp_rank, tp_rank = divmod(rank, tp_size)
        for name, layout in itertools.product(CASES, LAYOUTS):
            options, tensors = _case(name)
            local = [_mine(x, cp_size, cp_rank, tp_size, tp_rank, layout) for x in tensors]
            got = everything(*local, cp_group=groups[tp_rank], layout=layout, **options)
            for result in RESULTS:
                # The LSE is [b, h, s]: bring rows and heads to where the others have them.
                whole = want[name][result].permute(2, 0, 1) if result == "lse" else want[name][result]
                part = got[result].permute(2, 0, 1) if result == "lse" else got[result]
                what = f"{result}, {name}, CP={cp_size}, TP={tp_size}, {layout}, cp rank {cp_rank}, tp rank {tp_rank}"
                assert_equal_bits(part, _mine(whole, cp_size, cp_rank, tp_size, tp_rank, layout), what)
                compared += part.numel()
    return compared


def test_no_degree_layout_or_head_shard_changes_a_bit():
    want = {}
    for name in CASES:
        options, tensors = _case(name)
        want[name] = everything(*tensors, **options)
    compared = run_ranks(WORLD, _invariance, want)
    elements = sum(x.numel() for results in want.values() for x in results.values())
    assert sum(compared) == elements * len(MESHES) * len(LAYOUTS)


def _flops(tensors, **options):
    """Multiply-adds of forward and of forward with backward, and the bytes sent by both."""
    with accounting.count() as forward:
        context_parallel_attention(*tensors[:3], **options)
    with accounting.count() as both:
        everything(*tensors, **options)
    return forward.flops, both.flops, both.bytes_sent


def _work(rank, world_size):
    options, tensors = _case("causal bf16")
    shares = []
    for layout in LAYOUTS:
        local = [_mine(x, world_size, rank, 1, 0, layout) for x in tensors]
        forward, both, sent = _flops(local, cp_group=dist.group.WORLD, layout=layout, **options)
        q_bytes, k_bytes, v_bytes, grad_bytes = (x.numel() * x.element_size() for x in local)
        row_bytes = 4 * local[0].shape[:3].numel()
        # Forward and dQ bring K and V; dK, dV bring Q, dO, LSE and delta.
        per_peer = 2 * (k_bytes + v_bytes) + q_bytes + grad_bytes + 2 * row_bytes
        assert sent == {"all_gather": (world_size - 1) * per_peer}
        shares.append((forward, both))
    return shares


def test_work_and_bytes_are_those_of_a_share():
    """The ranks' multiply-adds add up to those of one rank; zigzag spreads causal work evenly."""
    options, tensors = _case("causal bf16")
    alone_forward, alone, _ = _flops(tensors, **options)
    results = run_ranks(4, _work)
    for index, layout in enumerate(LAYOUTS):
        forward, both = zip(*(shares[index] for shares in results), strict=True)
        assert sum(forward) == alone_forward, f"{layout}: {forward} of {alone_forward}"
        # Blocks of keys end at chunk boundaries too, so that ranks compute fewer hidden pairs than one rank does.
        assert 0.85 * alone < sum(both) <= alone, f"{layout}: {both} of {alone}"
        assert max(both) < 1.1 * sum(both) / 4, f"{layout}: {both}"
        uneven = 4 * max(forward) / sum(forward)
        assert uneven < 1.1 if layout == "zigzag" else uneven > 1.4, f"{layout}: {forward}"


def _compile_off(rank, world_size):
    options, tensors = _case("causal bf16")
    local = [_mine(x, world_size, rank, 1, 0, "zigzag") for x in tensors]
    return everything(*local, cp_group=dist.group.WORLD, **options)


def test_the_switch_of_upstreams_compiler_does_not_change_a_bit():
    """NVIDIA/TransformerEngine#1217: with NVTE_TORCH_COMPILE=0 other code ran, and broke."""
    runs = [run_ranks(2, _compile_off, env={"NVTE_TORCH_COMPILE": value}) for value in "01"]
    for off, on in zip(*runs, strict=True):
        for name in RESULTS:
            assert_equal_bits(off[name], on[name], name)


def _mutated(rank, world_size, want):
    """A rank whose tile follows its degree, as an autotuner's would."""
    reference.BLOCK_N = 64 // world_size
    options, tensors = _case("causal bf16")
    local = [_mine(x, world_size, rank, 1, 0, "zigzag") for x in tensors]
    got = everything(*local, cp_group=dist.group.WORLD, **options)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_equal_bits(got["out"], from_canonical(want["out"], world_size, rank, "zigzag"), "out")
    with pytest.raises(ZigzagError, match="sequence length 142 .* multiple of 4; pad it to 144"):
        everything(*(x[:71] for x in local), cp_group=dist.group.WORLD, **options)


def test_a_tile_that_follows_the_degree_is_seen_and_uneven_rows_are_refused():
    options, tensors = _case("causal bf16")
    run_ranks(2, _mutated, everything(*tensors, **options))


# Lengths of ISEEKYAN/Megatron-LM#111 and NVIDIA/Megatron-LM#4495, an empty sequence, and one of several tiles;
# padded to what zigzag over 2, 3 and 4 ranks takes.
LENGTHS, PADDED = [5, 11, 3, 0, 140], [24, 24, 24, 0, 144]


def _cumulative(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def _pack():
    """Packed operands [t, h, d] with NaN in the padding rows."""
    tensors = [x.squeeze(1) for x in operands(sum(PADDED), 1, 4, 2, 8)]
    for start, length, padded in zip(_cumulative(PADDED), LENGTHS, PADDED, strict=False):
        for x in tensors:
            x[start + length : start + padded] = float("nan")
    return tensors


def _packed(rank, world_size, want):
    bounds = {"cu_seqlens": _cumulative(LENGTHS), "cu_seqlens_padded": _cumulative(PADDED)}
    for cp_size in (2, 3, 4):
        group = dist.new_group(list(range(cp_size)))
        if rank >= cp_size:
            continue
        for layout in LAYOUTS:
            rows = packed_rank_rows(_cumulative(PADDED), cp_size, rank, layout)
            got = packed_everything(*(x[rows] for x in _pack()), cp_group=group, layout=layout, **bounds)
            for name in RESULTS:
                part = want[name][..., rows] if name == "lse" else want[name][rows]
                assert_equal_bits(got[name], part, f"{name}, packed, CP={cp_size}, {layout}, rank {rank}")
            if cp_size == 2:
                unpadded = [x[: 19 // 2] for x in _pack()]
                with pytest.raises(
                    LayoutError, match="sequence 0 of the packed batch, length 5 .* pad it to"
                ):
                    packed_everything(*unpadded, cp_group=group, layout=layout, cu_seqlens=[0, 5, 16, 19])


def test_packed_sequences_have_the_same_bits_under_every_degree_or_are_refused_by_name():
    bounds = {"cu_seqlens": _cumulative(LENGTHS), "cu_seqlens_padded": _cumulative(PADDED)}
    run_ranks(4, _packed, packed_everything(*_pack(), **bounds))
