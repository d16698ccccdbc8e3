"""Rows: RMSNorm, cross entropy, embedding gradient, granules, gradient norm, against float64 and against themselves."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.cross_entropy.reference import (
    VocabularyError,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_prob,
)
from te_overrides.kernels.embedding.reference import embedding_gradient
from te_overrides.kernels.grad_norm.reference import (
    NonFiniteError,
    norm_from_bins,
    square_bins,
    sum_of_squares,
)
from te_overrides.kernels.granules import reference as granules
from te_overrides.kernels.rmsnorm.reference import rmsnorm, rmsnorm_backward
from te_overrides.kernels.rope.reference import Rope
from te_overrides.kernels.swiglu.ops import SwiGLU
from te_overrides.kernels.swiglu.reference import swiglu


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norms_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    x, w = _randn(40, 96).to(dtype), _randn(96, seed=1).to(dtype)
    whole, rstd = rmsnorm(x, w, 1e-6)
    alone, _ = rmsnorm(x[17:18], w, 1e-6)
    assert_equal_bits(alone, whole[17:18], "row alone")
    dx, terms = rmsnorm_backward(x.flip(0), x, w, rstd)
    dx1, terms1 = rmsnorm_backward(x.flip(0)[17:18], x[17:18], w, rstd[17:18])
    assert_equal_bits(dx1, dx[17:18], "dx of a row alone")
    assert_equal_bits(terms1, terms[17:18], "dgamma terms of a row alone")


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm_agrees_with_float64_autograd(zero_centered: bool) -> None:
    x, w, g = _randn(12, 64), _randn(64, seed=1), _randn(12, 64, seed=2)
    xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
    scale = wd + 1 if zero_centered else wd
    want = xd / (xd.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    want.backward(g.double())
    y, rstd = rmsnorm(x, w, 1e-5, zero_centered)
    dx, terms = rmsnorm_backward(g, x, w, rstd, zero_centered)
    torch.testing.assert_close(y.double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), xd.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.double().sum(0), wd.grad, rtol=1e-5, atol=1e-5)


def test_log_prob_agrees_with_float64_and_masks_padding() -> None:
    logits = _randn(5, 2048) * 4
    target = torch.tensor([0, 7, 1999, 1023, 1024])
    exact = torch.log_softmax(logits.double()[:, :2000], -1).gather(-1, target[:, None]).squeeze(-1)
    x = logits.clone().requires_grad_()
    got = vocab_parallel_log_prob(x, target, valid=2000)
    torch.testing.assert_close(got.detach().double(), exact, rtol=1e-6, atol=1e-6)
    got.sum().backward()
    want = torch.zeros_like(logits).double()
    want[:, :2000] = -torch.softmax(logits.double()[:, :2000], -1)
    want[torch.arange(5), target] += 1
    torch.testing.assert_close(x.grad.double(), want, rtol=1e-5, atol=1e-6)


def test_a_log_prob_row_does_not_depend_on_the_other_rows() -> None:
    logits, target = _randn(9, 1024).bfloat16(), torch.arange(9) * 100
    whole = vocab_parallel_log_prob(logits, target)
    assert_equal_bits(vocab_parallel_log_prob(logits[4:5], target[4:5]), whole[4:5], "row alone")


def test_a_negative_target_has_megatrons_loss_and_one_beyond_the_vocabulary_has_none() -> None:
    """Labels of -100 or -1 reach the loss of RL and fine-tuning jobs; the loss mask multiplies them by 0 afterwards."""
    upstream = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy").VocabParallelCrossEntropy
    logits, grad = _randn(6, 1024) * 4, _randn(6, seed=1)
    target = torch.tensor([-1, -100, -(2**63), 5, 1024, 2**40])
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, target)
    loss.backward(grad)
    x, peak = upstream.calculate_logits_max(logits.double())
    mask, masked, predicted, total, e = upstream.calculate_predicted_logits(x, target, peak, 0, 1024)
    soft, want = upstream.calculate_cross_entropy_loss(e, predicted, total)
    rows = upstream.prepare_gradient_calculation_operands(soft, mask)
    want_grad = upstream.calculate_gradients(rows[0], rows[1], masked, *rows[2:], grad)
    torch.testing.assert_close(loss[:4].detach().double(), want[:4].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), want_grad.double(), rtol=1e-5, atol=1e-6)
    assert loss[4:].isnan().all(), "a silent number for a token that does not exist"


def test_a_vocabulary_that_depends_on_tp_is_refused_with_the_value_to_set() -> None:
    with pytest.raises(VocabularyError, match=r"151936.*1024.*152576"):
        vocab_parallel_log_prob(torch.zeros(1, 151936), torch.zeros(1, dtype=torch.int64))


def test_embedding_gradient_is_a_chain_in_token_order() -> None:
    ids = torch.tensor([3, 1, 3, 3, -1, 9, 1])
    grad = _randn(7, 5).bfloat16()
    want = torch.zeros(4, 5)
    for i, row in enumerate(ids.tolist()):
        if 0 <= row < 4:
            want[row] = want[row] + grad[i].float()
    assert_equal_bits(embedding_gradient(ids, grad, 4), want, "embedding gradient")


def test_granules_of_another_size_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: a granule of 8 brackets the same sum differently."""
    terms = _randn(256, 2, 33)
    want = granules.sum_granules(granules.granule_partials(terms))
    torch.testing.assert_close(want.double(), terms.double().sum((0, 1)), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(granules, "GRANULE", 8)
    assert count_mismatches(granules.sum_granules(granules.granule_partials(terms)), want)[0] > 0


@pytest.mark.parametrize("positions", [1, 15, 16, 17, 40])
def test_a_short_last_granule_is_a_shorter_chain(positions: int) -> None:
    terms = _randn(positions, 3, 4)
    partials = granules.granule_partials(terms)
    for g in range(partials.shape[0]):
        want = torch.zeros(3, 4)
        for t in range(16 * g, min(16 * g + 16, positions)):
            want = want + terms[t]
        assert_equal_bits(partials[g], want, f"granule {g}")


def test_a_straddling_granule_is_refused() -> None:
    granules.check_run(24, shared=False, what="x")
    with pytest.raises(granules.GranuleError, match="24.*16.*Pad"):
        granules.check_run(24, shared=True, what="dgamma")


def test_the_gradient_norm_is_exact_and_independent_of_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([_randn(3000), torch.tensor([1e-30, 3e20, -1e-44, 0.0, -0.0, 1.5e-3])])
    exact = sum(Fraction(float(v)) ** 2 for v in values)
    bins = square_bins([values])
    numerator, exponent = sum_of_squares(bins)
    assert Fraction(numerator) * Fraction(2) ** exponent == exact
    shards = square_bins([values[::3]]) + square_bins([values[1::3], values[2::3]])
    assert norm_from_bins(bins) == norm_from_bins(shards) == pytest.approx(math.sqrt(exact), rel=1e-15)
    with monkeypatch.context() as patch:
        patch.setattr("te_overrides.kernels.grad_norm.reference._PART", 7)
        assert torch.equal(square_bins([values]), bins), "a tensor taken in parts"
    assert norm_from_bins(square_bins([torch.tensor([3.0, 4.0])])) == 5.0
    assert norm_from_bins(square_bins([torch.zeros(3)])) == 0.0
    with pytest.raises(NonFiniteError):
        square_bins([torch.tensor([1.0, math.nan])])


def test_rope_and_swiglu_gradients_agree_with_float64() -> None:
    t, freqs, g = _randn(6, 2, 3, 16), torch.rand(6, 1, 1, 16) * 50, _randn(6, 2, 3, 16, seed=3)
    x = t.clone().requires_grad_()
    out = Rope.apply(x, freqs, False, 1.0)
    out.backward(g)
    xd = t.double().requires_grad_()
    first, second = xd.chunk(2, -1)
    want = xd * freqs.double().cos() + torch.cat([-second, first], -1) * freqs.double().sin()
    want.backward(g.double())
    torch.testing.assert_close(out.detach().double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), xd.grad, rtol=1e-5, atol=1e-5)
    packed = _randn(7, 32, seed=5).requires_grad_()
    SwiGLU.apply(packed).backward(g.flatten()[: 7 * 16].view(7, 16))
    pd = packed.detach().double().requires_grad_()
    gate, up = pd.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(g.flatten()[: 7 * 16].view(7, 16).double())
    torch.testing.assert_close(packed.grad.double(), pd.grad, rtol=1e-5, atol=1e-5)
    row = packed.detach()[3:4].chunk(2, -1)
    assert_equal_bits(swiglu(*row), SwiGLU.apply(packed).detach()[3:4], "swiglu row alone")
