"""The tree is the one drawn in docs/numbers.md, in both forms, and a wrong order is visible in bits."""

import pytest
import torch

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.tree.reference import balanced_tree, balanced_tree_dim


def _terms(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return (torch.randn(count, 257, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_written_out_orders_of_the_contract(dtype):
    x = _terms(8, dtype)
    assert_equal_bits(
        balanced_tree(x.unbind(0)), ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])), "n = 8"
    )
    assert_equal_bits(balanced_tree(x[:5].unbind(0)), ((x[0] + x[1]) + (x[2] + x[3])) + x[4], "n = 5")
    assert_equal_bits(
        balanced_tree(x[:7].unbind(0)), ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + x[6]), "n = 7"
    )
    assert_equal_bits(balanced_tree(x[:3].unbind(0)), (x[0] + x[1]) + x[2], "n = 3")
    assert_equal_bits(balanced_tree([x[0]]), x[0], "n = 1")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 13, 16, 33, 100])
def test_the_sliced_form_is_the_listed_form_along_any_dimension(count):
    x = _terms(count, torch.bfloat16, seed=count)
    want = balanced_tree(x.unbind(0))
    assert_equal_bits(balanced_tree_dim(x, 0), want, f"dim 0 of {count}")
    assert_equal_bits(balanced_tree_dim(x.t().contiguous(), -1), want, f"dim -1 of {count}")


def test_a_power_of_two_nests_so_that_ranks_can_finish_the_lower_levels():
    x = _terms(8, torch.bfloat16)
    want = balanced_tree_dim(x, 0)
    for ranks in (1, 2, 4, 8):
        partial = [balanced_tree_dim(part, 0) for part in x.chunk(ranks)]
        assert_equal_bits(balanced_tree(partial), want, f"{ranks} ranks of {8 // ranks} lanes")


def test_the_shape_beside_the_summed_dimension_does_not_enter():
    x = _terms(13, torch.float32)
    whole = balanced_tree_dim(x, 0)
    for column in (0, 31, 256):
        assert_equal_bits(balanced_tree_dim(x[:, column], 0), whole[column], f"column {column} alone")


def test_every_add_rounds_once_in_the_dtype_of_the_terms():
    # 256 + 1 is not representable in bf16 and ties to 256; a float32 accumulator would reach 258.
    x = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert balanced_tree_dim(x, 0).item() == 256.0
    x = torch.tensor([1.0, 1.0, 256.0], dtype=torch.bfloat16)
    assert balanced_tree_dim(x, 0).item() == 258.0


def test_another_order_is_seen():
    x = _terms(8, torch.float32)
    chain = x[0]
    for term in x[1:]:
        chain = chain + term
    mismatched, _, _ = count_mismatches(chain, balanced_tree_dim(x, 0))
    assert mismatched > 0
    reversed_tree, _, _ = count_mismatches(
        balanced_tree_dim(x[[0, 2, 1, 3, 4, 6, 5, 7]], 0), balanced_tree_dim(x, 0)
    )
    assert reversed_tree > 0


def test_what_has_no_sum_is_refused():
    with pytest.raises(ValueError, match="no terms"):
        balanced_tree([])
    with pytest.raises(ValueError, match="is empty"):
        balanced_tree_dim(torch.empty(0, 3), 0)
    with pytest.raises(ValueError, match=r"term 1 is torch.float32 \(1, 3\)"):
        balanced_tree([torch.zeros(3), torch.zeros(1, 3)])
    with pytest.raises(ValueError, match="term 1 is torch.float64"):
        balanced_tree([torch.zeros(3), torch.zeros(3, dtype=torch.float64)])
