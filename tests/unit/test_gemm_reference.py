"""The chain and the eight lanes do what docs/numbers.md draws, whatever surrounds an element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.gemm import ops
from te_overrides.kernels.gemm import reference as gemm
from te_overrides.kernels.tree.reference import balanced_tree


def _operands(
    m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    return torch.randn(m, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)


def test_chain_is_the_scalar_loop_of_the_contract() -> None:
    a, b = _operands(3, 4, 37, torch.float32)
    want = np.zeros((3, 4), np.float32)
    for k in range(37):
        want = want + a.numpy()[:, k : k + 1] * b.numpy()[:, k][None]
    assert_equal_bits(gemm.chain(a, b), torch.from_numpy(want), "chain")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_element_depends_on_its_row_and_column_alone(dtype: torch.dtype) -> None:
    a, b = _operands(33, 41, 64, dtype)
    whole = gemm.one_lane(a, b)
    assert_equal_bits(gemm.one_lane(a[5:6], b), whole[5:6], "one row alone")
    assert_equal_bits(gemm.one_lane(a[30:], b[7:9]), whole[30:, 7:9], "a corner alone")
    assert_equal_bits(gemm.one_lane(a.t().contiguous().t(), b.flip(0).flip(0)), whole, "other strides")


def test_chain_does_not_depend_on_the_thread_count_or_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _operands(65, 700, 48)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = gemm.chain(a, b)
    torch.set_num_threads(2)
    assert_equal_bits(gemm.chain(a, b), whole, "two threads")
    torch.set_num_threads(before)
    monkeypatch.setattr(gemm, "_BLOCK_ELEMENTS", 900)
    assert_equal_bits(gemm.chain(a, b), whole, "one row a block")


@pytest.mark.parametrize("segments", [None, [64, 64]])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_subtrees_of_the_ranks_join_to_the_unsharded_tree(tp_size: int, segments: list[int] | None) -> None:
    a, b = _operands(6, 10, 128)
    whole = gemm.lane_tree(a, b, tp_size=1, segments=segments)
    parts = []
    for rank in range(tp_size):
        if segments is None:
            columns = list(range(128))[rank * 128 // tp_size : (rank + 1) * 128 // tp_size]
        else:
            width = 64 // tp_size
            columns = [s + rank * width + i for s in (0, 64) for i in range(width)]
        local = [width for _ in segments for width in [64 // tp_size]] if segments else None
        parts.append(gemm.lane_tree(a[:, columns], b[:, columns], tp_size=tp_size, segments=local))
    assert_equal_bits(balanced_tree(parts), whole, f"TP={tp_size}")


def test_another_tree_order_is_seen() -> None:
    """Mutation: adding lanes one after the other instead of by the tree must not pass for equal."""
    a, b = _operands(16, 16, 256)
    lanes = [gemm.chain(a[:, cut], b[:, cut]).to(a.dtype) for cut in gemm.cut_lanes(256, 8)]
    one_by_one = lanes[0]
    for lane in lanes[1:]:
        one_by_one = one_by_one + lane
    assert count_mismatches(one_by_one, gemm.lane_tree(a, b, tp_size=1))[0] > 0


def test_a_fused_multiply_add_is_seen() -> None:
    """Mutation: products kept exact (as an fma does) differ from the contract's rounded products in float32."""
    a, b = _operands(16, 16, 64, torch.float32)
    acc = torch.zeros(16, 16)
    for k in range(64):
        acc = (acc.double() + a[:, k : k + 1].double() * b[:, k].double()).float()
    assert count_mismatches(acc, gemm.chain(a, b))[0] > 0


def test_tf32_is_not_used_for_float32() -> None:
    """thinking-machines-lab/batch_invariant_ops#23: ones [M, 1] @ arange(8192) [1, N] is exact in float32."""
    row = torch.arange(8192, dtype=torch.float32)
    assert_equal_bits(gemm.one_lane(torch.ones(3, 1), row[:, None]), row.expand(3, -1), "ones @ arange")


def test_lanes_of_bf16_and_float32_against_float64() -> None:
    """NVIDIA/TransformerEngine#1761: a bf16 reduction costs accuracy; float32 lanes are selectable."""
    a, b = _operands(32, 32, 512)
    exact = a.double() @ b.double().t()
    scale = exact.norm()
    bf16 = (gemm.lane_tree(a, b, tp_size=1).double() - exact).norm() / scale
    fp32 = (gemm.lane_tree(a, b, tp_size=1, dtype=torch.float32).double() - exact).norm() / scale
    print(f"relative error: bf16 lanes {bf16:.3e}, float32 lanes {fp32:.3e}")
    assert fp32 < 1e-6 < bf16 < 1e-2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gemm.lanes_per_rank(3), ["3", "8 lanes", "Use TP"]),
        (
            lambda: gemm.lane_tree(torch.ones(1, 12), torch.ones(1, 12), tp_size=1),
            ["K = 12", "8 lanes", "Pad"],
        ),
        (
            lambda: gemm.lane_tree(torch.ones(1, 16), torch.ones(1, 16), tp_size=1, segments=[8]),
            ["[8]", "16"],
        ),
        (lambda: gemm.chain(torch.ones(2, 3), torch.ones(2, 4)), ["(2, 3)", "(2, 4)"]),
        (
            lambda: ops.add_one_lane_(torch.ones(2, 4), torch.ones(2, 3), torch.ones(2, 3)),
            ["(2, 3)", "(2, 4)", "needs float32 (2, 2)"],
        ),
        (
            lambda: ops.add_one_lane_(torch.ones(2, 2).half(), torch.ones(2, 3), torch.ones(2, 3)),
            ["torch.float16", "needs float32"],
        ),
    ],
)
def test_refusals_name_value_rule_and_way_out(call: object, words: list[str]) -> None:
    with pytest.raises(gemm.LaneError) as error:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(error.value)
