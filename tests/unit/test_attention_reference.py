"""The attention reference is the contract, clause by clause, and it is accurate."""

import math

import numpy as np
import pytest
import torch

from attention_cases import everything, operands
from bits import assert_equal_bits
from te_overrides.kernels.attention.context_parallel import context_parallel_attention
from te_overrides.kernels.attention.reference import (
    AttentionError,
    Mask,
    attention_delta,
    attention_dkv,
    attention_dq,
    attention_forward,
)
from te_overrides.kernels.portable_math.reference import exp2, log_f64

F = np.float32


def _tree(terms):
    while len(terms) > 1:
        terms = [F(a + b) for a, b in zip(terms[0::2], terms[1::2], strict=False)] + (
            terms[-1:] if len(terms) % 2 else []
        )
    return terms[0]


def _dot(a, b):
    acc = F(0)
    for x, y in zip(a, b, strict=True):
        acc = F(acc + F(x * y))
    return acc


def _exp2(x):
    return F(exp2(torch.tensor([x], dtype=torch.float32)).item())


def _round(x, dtype):
    return F(torch.tensor(float(x), dtype=torch.float32).to(dtype).float().item())


def contract_scalar_by_scalar(q, k, v, grad, sees, dtype, block_n=64):
    """docs/numbers.md, "Attention", one head pair at a time in numpy scalars, every masked key of a tile included."""
    seq, d = q.shape
    scale = F(1 / math.sqrt(d))
    log2_scale = F(1 / math.sqrt(d) * math.log2(math.e))
    out, lse = np.zeros((seq, v.shape[1]), F), np.zeros(seq, F)
    for i in range(seq):
        m, row_sum, acc = F(-np.inf), F(0), [F(0)] * v.shape[1]
        for start in range(0, seq, block_n):
            keys = range(start, min(start + block_n, seq))
            s = [F(_dot(q[i], k[j]) * log2_scale) if sees(i, j) else F(-np.inf) for j in keys]
            if not any(sees(i, j) for j in keys):
                continue
            m_new = max(m, *s)
            p = [_exp2(F(x - m_new)) if sees(i, j) else F(0) for x, j in zip(s, keys, strict=True)]
            p += [F(0)] * (block_n - len(p))
            alpha = _exp2(F(m - m_new)) if m != -np.inf else F(0)
            row_sum = F(F(row_sum * alpha) + _tree(p))
            acc = [F(a * alpha) for a in acc]
            for x, j in zip(p, keys, strict=False):
                acc = [F(a + F(_round(x, dtype) * y)) for a, y in zip(acc, v[j], strict=True)]
            m = m_new
        out[i] = [_round(F(np.float64(a) / np.float64(row_sum)), dtype) + F(0) for a in acc]
        lse[i] = F(
            np.float64(m) * math.log(2) + log_f64(torch.tensor([float(row_sum)], dtype=torch.float64)).item()
        )

    delta = [_tree([F(x * y) for x, y in zip(grad[i], out[i], strict=True)]) for i in range(seq)]
    p, ds = {}, {}
    for i in range(seq):
        for j in range(seq):
            if sees(i, j):
                s = F(_dot(q[i], k[j]) * log2_scale)
                value = _exp2(F(s - F(lse[i] * F(math.log2(math.e)))))
                p[i, j] = _round(value, dtype)
                ds[i, j] = _round(F(value * F(_dot(grad[i], v[j]) - delta[i])), dtype)
    return out, lse, p, ds, scale


def _chain_rows(shape, terms):
    acc = np.zeros(shape, F)
    for weight, row in terms:
        acc = (acc + (weight * row).astype(F)).astype(F)
    return acc


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bit_is_the_one_that_the_contract_spells_out(dtype):
    seq, heads, d, d_v = 70, 2, 3, 5
    q, k, v, grad = operands(seq, 1, heads, 1, d, dtype, d_v=d_v)
    got = everything(q, k, v, grad)
    tensors = [x[:, 0].float().numpy() for x in (q, k, v, grad)]
    weights = []
    for head in range(heads):
        of_head = [tensors[0][:, head], tensors[1][:, 0], tensors[2][:, 0], tensors[3][:, head]]
        out, lse, p, ds, scale = contract_scalar_by_scalar(*of_head, lambda i, j: j <= i, dtype)
        assert_equal_bits(got["out"][:, 0, head].float(), torch.from_numpy(out), f"out, head {head}")
        assert_equal_bits(got["lse"][0, head], torch.from_numpy(lse), f"lse, head {head}")
        dq = np.stack(
            [_chain_rows(d, [(ds[i, j], of_head[1][j]) for j in range(i + 1)]) * scale for i in range(seq)]
        )
        assert_equal_bits(got["dQ"][:, 0, head], torch.from_numpy(dq).to(dtype) + 0.0, f"dQ, head {head}")
        weights.append((p, ds, of_head[0], of_head[3]))
    for j in range(seq):
        pairs = [(weights[head], i) for head in range(heads) for i in range(j, seq)]
        dv = _chain_rows(d_v, [(p[i, j], g[i]) for (p, _, _, g), i in pairs])
        dk = _chain_rows(d, [(ds[i, j], rows[i]) for (_, ds, rows, _), i in pairs]) * scale
        assert_equal_bits(got["dV"][j, 0, 0], torch.from_numpy(dv).to(dtype) + 0.0, f"dV, key {j}")
        assert_equal_bits(got["dK"][j, 0, 0], torch.from_numpy(dk).to(dtype) + 0.0, f"dK, key {j}")


MASKS = [(True, None), (False, None), (True, (20, 0)), (False, (9, 33)), (False, (-1, 5)), (True, (0, 0))]


def float64_sdpa(q, k, v, grad, causal, window):
    """The textbook formula in float64: out, lse, dQ, dK, dV in the layout of the reference."""
    seq, _, heads, d = q.shape
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    left, right = window or (-1, -1)
    distance = torch.arange(seq)[None, :] - torch.arange(seq)[:, None]
    hidden = torch.zeros(seq, seq, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0 or causal:
        hidden |= distance > (0 if causal else right)
    k_heads, v_heads = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("ibhd,jbhd->bhij", q, k_heads) / math.sqrt(d)
    s = s.masked_fill(hidden, -math.inf)
    out = torch.einsum("bhij,jbhd->ibhd", s.softmax(-1), v_heads)
    out.backward(grad.double())
    lse = s.logsumexp(-1)
    return {"out": out, "lse": lse, "dQ": q.grad, "dK": k.grad, "dV": v.grad}


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("heads", "groups", "d", "d_v"), [(4, 4, 16, 16), (4, 2, 24, 8), (3, 1, 7, 7)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)]
)
def test_error_against_float64_is_that_of_the_input_dtype(
    causal, window, heads, groups, d, d_v, dtype, bound
):
    q, k, v, grad = operands(90, 2, heads, groups, d, dtype, d_v=d_v)
    want = float64_sdpa(q, k, v, grad, causal, window)
    for name, got in everything(q, k, v, grad, causal=causal, window=window).items():
        scale = want[name].norm()
        # A window of one key has dQ = dK = 0 exactly in float64: there the values of the other gradients are the scale.
        error = ((got.double() - want[name]).norm() / torch.maximum(scale, want["dV"].norm())).item()
        assert error < (2e-6 if name == "lse" else bound), f"{name}: relative error {error:.2e}"


def test_rounding_has_no_direction():
    """A truncated store passes any ULP bound; its mean signed error does not."""
    q, k, v, grad = operands(192, 1, 8, 8, 16)
    want = float64_sdpa(q, k, v, grad, True, None)
    for name, got in everything(q, k, v, grad).items():
        if name != "lse":
            relative = (got.double() - want[name]) * want[name].sign() / want[name].abs().mean()
            assert abs(relative.mean().item()) < 3e-4, (
                f"{name}: mean signed error {relative.mean().item():.1e}"
            )


def test_rows_without_keys_are_zero_with_lse_minus_infinity_and_send_no_gradient():
    """flash-attention#978 returns +inf, flashinfer#4401 NaN, flashinfer#4452 a sentinel."""
    q, k, v, grad = operands(6, 2, 2, 1, 8)
    # Queries at positions -3 … 2 under a causal mask: the first three come before every key.
    positions = torch.arange(-3, 3)
    mask = Mask.of(True, None)
    out, lse = attention_forward(q, k, v, positions, mask=mask)
    assert_equal_bits(out[:3], torch.zeros_like(out[:3]), "out of keyless rows")
    assert bool((lse[..., :3] == -math.inf).all()) and bool(lse[..., 3:].isfinite().all())
    dq = attention_dq(q, k, v, grad, lse, attention_delta(grad, out), positions, mask=mask)
    assert_equal_bits(dq[:3], torch.zeros_like(dq[:3]), "dQ of keyless rows")
    assert bool((dq[4:] != 0).any())


def test_no_keys_and_no_queries_are_served():
    q, k, v, grad = operands(4, 1, 2, 1, 8)
    mask = Mask.of(False, None)
    out, lse = attention_forward(q, k[:0], v[:0], torch.arange(4), mask=mask)
    assert_equal_bits(out, torch.zeros_like(q), "out over no keys")
    assert bool((lse == -math.inf).all())
    delta = attention_delta(grad, out)
    assert_equal_bits(
        attention_dq(q, k[:0], v[:0], grad, lse, delta, torch.arange(4), mask=mask), torch.zeros_like(q), "dQ"
    )
    empty = torch.empty(1, 2, 0)
    dk, dv = attention_dkv(q[:0], k, v, grad[:0], empty, empty, torch.arange(4), mask=mask)
    assert_equal_bits(dk, torch.zeros_like(k), "dK of keys that nobody sees")
    assert_equal_bits(dv, torch.zeros_like(v), "dV of keys that nobody sees")
    assert attention_forward(q[:0], k, v, torch.arange(0), mask=mask)[0].shape == (0, 1, 2, 8)
    nothing = context_parallel_attention(q[:0], k[:0], v[:0])
    assert nothing[0].shape == (0, 1, 2, 8) and nothing[1].shape == (1, 2, 0)


def test_a_score_of_minus_infinity_is_a_weight_of_zero_and_not_a_nan():
    q, k, v, _ = operands(70, 1, 1, 1, 4, torch.float32)
    k[0] = torch.tensor([-3e38, 0, 0, 0])
    q[:, :, :, 0] = 30.0
    out, lse = attention_forward(q, k, v, torch.arange(70), mask=Mask.of(True, None))
    assert_equal_bits(out[0], torch.zeros_like(out[0]), "a row whose only score is -inf")
    assert float(lse[0, 0, 0]) == -math.inf
    assert bool(out[1:].isfinite().all())


def test_lse_of_large_and_small_scores_does_not_overflow():
    q, k, v, _ = operands(70, 1, 1, 1, 4, torch.float32)
    for factor in (1e4, 1e-30):
        lse = attention_forward(q * factor, k, v, torch.arange(70), mask=Mask.of(False, None))[1]
        s = torch.einsum("ibhd,jbhd->bhij", q.double() * factor, k.double()) / 2
        assert torch.allclose(lse.double(), s.logsumexp(-1), rtol=1e-6, atol=0)


def test_gradients_are_never_minus_zero():
    q, k, v, grad = operands(80, 1, 2, 1, 8)
    got = everything(q, k, v, torch.zeros_like(grad) * -1.0)
    for name in ("dQ", "dK", "dV"):
        assert not bool(got[name].signbit().any()), name


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v, _ = operands(8, 1, 1, 1, 4, torch.float32)
    out, _ = context_parallel_attention(q.requires_grad_(), k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_what_needs_a_gradient_gets_one():
    q, k, v, grad = operands(40, 1, 2, 1, 8)
    want = everything(q, k, v, grad)
    for name, index in (("dQ", 0), ("dK", 1), ("dV", 2)):
        tensors = [x.clone().requires_grad_(i == index) for i, x in enumerate((q, k, v))]
        context_parallel_attention(*tensors)[0].backward(grad)
        assert [x.grad is not None for x in tensors] == [i == index for i in range(3)]
        assert_equal_bits(tensors[index].grad, want[name], name)


def test_what_the_contract_does_not_cover_is_refused_by_name():
    q, k, v, grad = operands(8, 1, 4, 2, 8)
    for arguments, message in [
        ((q[:, :, :3], k, v), "3 query heads are not a multiple of 2 groups"),
        ((q, k[:4], v), "key and value must agree"),
        ((q, k[..., :4], v), "query and key in b and d"),
        ((q.double(), k.double(), v.double()), "torch.float64.*covers one of torch.bfloat16"),
        ((q.float(), k, v), "torch.float32, torch.bfloat16"),
        ((q[0], k[0], v[0]), r"takes \[s, b, h, d\] operands"),
    ]:
        with pytest.raises(AttentionError, match=message):
            context_parallel_attention(*arguments)
    for causal, window, message in [
        (True, (-1, 3), "reaches 3 keys into the future"),
        (False, (-2, 0), "number of keys from 0, or -1"),
    ]:
        with pytest.raises(AttentionError, match=message):
            context_parallel_attention(q, k, v, causal=causal, window=window)
    mask = Mask.of(True, None)
    with pytest.raises(AttentionError, match="query_positions must ascend"):
        attention_forward(q, k, v, torch.arange(8).flip(0), mask=mask)
    with pytest.raises(AttentionError, match=r"must be int64 \(8,\) on the CPU"):
        attention_forward(q, k, v, torch.arange(7), mask=mask)
    lse = attention_forward(q, k, v, torch.arange(8), mask=mask)[1]
    with pytest.raises(AttentionError, match="delta is torch.float64"):
        attention_dq(q, k, v, grad, lse, lse.double(), torch.arange(8), mask=mask)
    with pytest.raises(AttentionError, match="grad_out is"):
        attention_dq(q, k, v, grad[:4], lse, lse, torch.arange(8), mask=mask)
    with pytest.raises(AttentionError, match="to the left"):
        Mask(left=-1)
