"""One attention row has one value: whatever shares its launch, its batch, its rank or its process.

Context parallelism is played by hand here, rank after rank in one process, so that every degree and layout is cheap;
tests/distributed/test_attention_cp.py repeats it with process groups.
"""

import pytest
import torch

from attention_cases import RESULTS, everything, operands, rows_of
from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.attention import reference
from te_overrides.kernels.attention.reference import (
    Mask,
    attention_delta,
    attention_dkv,
    attention_dq,
    attention_forward,
)
from te_overrides.kernels.tree.reference import balanced_tree_dim
from te_overrides.kernels.zigzag.reference import LAYOUTS, from_canonical, rank_positions, to_canonical

# A multiple of 2 * CP for every degree below, and no multiple of BLOCK_N.
SEQ = 144
DEGREES = [1, 2, 3, 4, 8]
MASKS = [(True, None), (False, None), (True, (40, 0)), (False, (10, 50))]


def by_hand(q, k, v, grad, cp_size, layout, causal=True, window=None):
    """All ranks of a context-parallel group, one after the other; results in the order of positions."""
    mask = Mask.of(causal, window)
    owned = [rank_positions(SEQ, cp_size, rank, layout) for rank in range(cp_size)]
    forward = [attention_forward(q[rows], k, v, rows, mask=mask) for rows in owned]
    out = to_canonical([x for x, _ in forward], layout)
    lse = to_canonical([x for _, x in forward], layout, 2)
    delta = to_canonical(
        [attention_delta(grad[r], x) for r, (x, _) in zip(owned, forward, strict=True)], layout, 2
    )
    dq = [attention_dq(q[r], k, v, grad[r], lse[..., r], delta[..., r], r, mask=mask) for r in owned]
    dkv = [attention_dkv(q, k[r], v[r], grad, lse, delta, r, mask=mask) for r in owned]
    dk, dv = (to_canonical([x[i] for x in dkv], layout) for i in range(2))
    return dict(zip(RESULTS, (out, lse, to_canonical(dq, layout), dk, dv), strict=True))


def mismatches(got, want):
    return {name: count_mismatches(got[name], want[name])[0] for name in RESULTS}


def assert_same(got, want, what):
    for name in RESULTS:
        assert_equal_bits(got[name], want[name], f"{name}, {what}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_no_context_parallel_degree_or_layout_changes_a_bit(layout, causal, window):
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16)
    want = everything(q, k, v, grad, causal=causal, window=window)
    for cp_size in DEGREES:
        got = by_hand(q, k, v, grad, cp_size, layout, causal, window)
        assert_same(got, want, f"CP={cp_size}, {layout}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("groups", [8, 4, 1])
def test_tensor_parallel_head_shards_do_not_change_a_bit(dtype, groups):
    q, k, v, grad = operands(100, 2, 8, groups, 8, dtype)
    want = everything(q, k, v, grad)
    for tp_size in (degree for degree in (2, 4, 8) if groups % degree == 0):
        shards = zip(*(x.chunk(tp_size, 2) for x in (q, k, v, grad)), strict=True)
        parts = [everything(*shard) for shard in shards]
        got = {name: torch.cat([p[name] for p in parts], 1 if name == "lse" else 2) for name in RESULTS}
        assert_same(got, want, f"TP={tp_size}, {groups} groups")


def test_the_rest_of_the_batch_does_not_change_a_bit():
    q, k, v, grad = operands(100, 5, 4, 2, 16)
    want = everything(q, k, v, grad)
    for chosen in ([3], [4, 0], [2, 2, 1, 0]):
        got = everything(*(x[:, chosen] for x in (q, k, v, grad)))
        for name in RESULTS:
            dim = 0 if name == "lse" else 1
            part = want[name].index_select(dim, torch.tensor(chosen))
            assert_equal_bits(got[name], part, f"{name}, sequences {chosen}")


def test_any_subset_of_rows_has_the_rows_own_bits():
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16)
    want = everything(q, k, v, grad)
    delta = attention_delta(grad, want["out"])
    mask = Mask.of(True, None)
    for rows in ([0], [143], [63, 64], [1, 5, 70, 128, 129], list(range(0, 144, 7))):
        rows = torch.tensor(rows)
        out, lse = attention_forward(q[rows], k, v, rows, mask=mask)
        dq = attention_dq(q[rows], k, v, grad[rows], lse, delta[..., rows], rows, mask=mask)
        dk, dv = attention_dkv(q, k[rows], v[rows], grad, want["lse"], delta, rows, mask=mask)
        got = dict(zip(RESULTS, (out, lse, dq, dk, dv), strict=True))
        assert_same(got, rows_of(want, rows), f"rows {rows.tolist()}")


def test_a_longer_sequence_does_not_change_a_causal_row():
    q, k, v, grad = operands(200, 1, 2, 1, 16)
    want = everything(q, k, v, grad)
    for seq in (1, 63, 64, 65, 130):
        got = everything(*(x[:seq] for x in (q, k, v, grad)))
        for name in ("out", "lse", "dQ"):
            part = rows_of(want, range(seq))[name]
            assert_equal_bits(got[name], part, f"{name} of the first {seq} of 200 rows")


def test_hidden_garbage_stays_hidden():
    """NaN in future keys, values, queries and gradients reaches nobody who does not see them."""
    q, k, v, grad = operands(100, 1, 2, 1, 8)
    want = everything(q, k, v, grad)
    spoiled = [x.clone() for x in (q, k, v, grad)]
    for x in spoiled:
        x[70:] = float("nan")
    got = everything(*spoiled)
    for name in ("out", "lse", "dQ"):
        assert_equal_bits(
            rows_of(got, range(70))[name], rows_of(want, range(70))[name], f"{name} before the NaN rows"
        )
    # Keys that a window hides from every later query.
    spoiled = [x.clone() for x in (q, k, v, grad)]
    want = everything(q, k, v, grad, window=(5, 0))
    for x in spoiled:
        x[:20] = float("nan")
    got = everything(*spoiled, window=(5, 0))
    assert_same(rows_of(got, range(25, 100)), rows_of(want, range(25, 100)), "rows past the window")


@pytest.mark.parametrize("elements", [1 << 10, 1 << 20])
def test_the_size_of_a_block_of_rows_does_not_change_a_bit(elements, monkeypatch):
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16)
    want = everything(q, k, v, grad)
    monkeypatch.setattr(reference, "_SCORE_ELEMENTS", elements)
    assert_same(everything(q, k, v, grad), want, f"blocks of {elements} elements")


def test_shapes_seen_before_threads_and_repeats_do_not_change_a_bit():
    q, k, v, grad = operands(SEQ, 2, 4, 2, 16)
    want = everything(q, k, v, grad)
    everything(*operands(37, 1, 2, 2, 5, torch.float32))
    assert_same(everything(q, k, v, grad), want, "after another shape")
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert_same(everything(q, k, v, grad), want, "another number of threads")
    finally:
        torch.set_num_threads(threads)


def test_memory_layout_of_the_operands_does_not_change_a_bit():
    q, k, v, grad = operands(90, 2, 4, 2, 16)
    want = everything(q, k, v, grad)
    packed = torch.cat([q, k, v], 2)
    views = packed.split([4, 2, 2], 2)
    grad_bhsd = grad.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    assert_same(everything(*views, grad_bhsd), want, "views of a packed projection")


def test_a_layout_taken_for_the_other_is_seen():
    """verl#4250, verl#1332, ms-swift#10071: the mix-up passes every check of shapes."""
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16)
    want = everything(q, k, v, grad)
    shuffled = [torch.cat([from_canonical(x, 2, r, "zigzag") for r in range(2)]) for x in (q, k, v, grad)]
    got = everything(*shuffled)
    got = {n: to_canonical(got[n], "zigzag", 2 if n == "lse" else 0, cp_size=2) for n in RESULTS}
    assert all(count > 0 for count in mismatches(got, want).values())


def _halves(x, dim):
    half = x.shape[dim] // 2
    return balanced_tree_dim(x.narrow(dim, 0, half) + x.narrow(dim, half, half), dim)


def _tiles_descending(s_k):
    return reversed([slice(a, min(a + reference.BLOCK_N, s_k)) for a in range(0, s_k, reference.BLOCK_N)])


def _blocks_descending(count, elements_per_row, start=0):
    return reversed([slice(a, min(a + 16, start + count)) for a in range(start, start + count, 16)])


MUTATIONS = {
    "halves instead of neighbours in the tree": ("balanced_tree_dim", _halves, {"out", "lse"}),
    "a chain instead of the tree": (
        "balanced_tree_dim",
        lambda x, dim: x.cumsum(dim).select(dim, -1),
        {"out", "lse"},
    ),
    "torch.sum instead of the tree": ("balanced_tree_dim", torch.sum, {"out", "lse"}),
    "tiles descending": ("_tiles", _tiles_descending, {"out", "lse", "dQ"}),
    "queries descending": ("_blocks", _blocks_descending, {"dK", "dV"}),
    "BLOCK_N 32": ("BLOCK_N", 32, {"out", "lse"}),
    "BLOCK_N 128": ("BLOCK_N", 128, {"out", "lse"}),
    "exp2 of the library": ("exp2", torch.exp2, {"out", "lse", "dQ", "dK", "dV"}),
    "weights not rounded": ("_rounded", lambda x, dtype: x, {"out", "dQ", "dK", "dV"}),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_another_order_is_seen_so_the_comparison_can_fail(mutation, monkeypatch):
    """float32, where no rounding to 16 bits hides an order, except where that rounding is what is mutated."""
    name, replacement, changes = MUTATIONS[mutation]
    dtype = torch.bfloat16 if name == "_rounded" else torch.float32
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16, dtype)
    want = everything(q, k, v, grad)
    monkeypatch.setattr(reference, name, replacement)
    got = mismatches(everything(q, k, v, grad), want)
    assert {name for name, count in got.items() if count} >= changes, got


def test_a_block_size_that_follows_the_rank_is_seen(monkeypatch):
    """What an autotuner does: two ranks with other shapes take other tiles."""
    q, k, v, grad = operands(SEQ, 1, 4, 2, 16)
    want = everything(q, k, v, grad)
    monkeypatch.setattr(reference, "BLOCK_N", 32)
    got = by_hand(q, k, v, grad, 2, "zigzag")
    assert mismatches(got, want)["out"] > 0
