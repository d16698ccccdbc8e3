"""Truncation shrinks a residual stream, rounding does not: the published drift, emulated on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bits import assert_equal_bits, count_mismatches
from te_overrides.kernels.rmsnorm.add import add_rmsnorm, add_rmsnorm_backward
from te_overrides.kernels.rmsnorm.reference import rmsnorm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import reproduce_rmsnorm_bias as bias

ROUNDS = {"0 nearest even": bias.emulated(bias.nearest_even), "ours": bias.ours}
TRUNCATES = bias.emulated(bias.truncate)


@pytest.fixture
def fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias, "CASES", tuple((128, x, r) for _, x, r in bias.CASES))


@pytest.mark.usefixtures("fewer_rows")
def test_the_mean_signed_error_sees_truncation_and_no_other() -> None:
    for call in bias.single_calls(TRUNCATES, 0):
        assert call["mean_signed_error"] < -1.4e-3, call
        assert call["mean_signed_error_of_out"] < -2.7e-3, call
        assert 0.2 < call["differ_from_nearest_even"] / call["total"] < 0.55, call
    for name, function in ROUNDS.items():
        for call in bias.single_calls(function, 0):
            # A hundredth of truncation's; the rest is what a mean of half a million elements leaves.
            assert abs(call["mean_signed_error"]) < 1.4e-5 + 4 * call["standard_error"], (name, call)
            assert call["differ_from_nearest_even"] == 0, (name, call)


def test_72_calls_drift_as_published_with_truncation_and_not_at_all_with_rounding() -> None:
    found = bias.streams({**ROUNDS, "truncated": TRUNCATES}, 16, 0)
    for calls, published in bias.PUBLISHED["shrink_percent"].items():
        shrunk = found["truncated"]["shrink_percent"][calls - 1]
        assert shrunk == pytest.approx(published, rel=0.02), f"after {calls} calls"
        assert found["truncated"]["cosine"][calls] == pytest.approx(bias.PUBLISHED["cosine"][calls], abs=5e-5)
        for name in ROUNDS:
            assert abs(found[name]["shrink_percent"][calls - 1]) < 0.04, f"{name} after {calls} calls"


def test_the_documented_modes_bit_by_bit() -> None:
    x = torch.tensor([0x3F800000, 0x3F80FFFF, 0x3F808000, 0x3F818000, 0x40490FDB], dtype=torch.int32).view(
        torch.float32
    )
    want = {
        bias.nearest_even: [0x3F80, 0x3F81, 0x3F80, 0x3F82, 0x4049],
        bias.low_half: [0x0000, 0xFFFF, 0x8000, 0x8000, 0x0FDB],
        bias.truncate: [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x4049],
    }
    for mode, halves in want.items():
        got = [int(v) & 0xFFFF for v in mode(x).view(torch.int16)]
        assert got == halves, mode.__name__
    assert bias.value_of_bits(torch.ones(1)).item() == 16256.0


@pytest.mark.usefixtures("fewer_rows")
def test_the_script_writes_json_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bias.main(["--json", "--rows", "2", "--plot", str(tmp_path / "drift.png")])
    report = json.loads(capsys.readouterr().out)
    assert report["operators"]["4 nearest away, assembly"] == {"absent": "does not compile"}
    low_half = report["operators"]["1 truncate, keep NaN"]
    assert low_half["stream"]["broken_at"] <= 2 and low_half["single_calls"][0]["mean_signed_error"] is None
    assert len(report["operators"]["2 truncate"]["stream"]["shrink_percent"]) == bias.CALLS
    assert (tmp_path / "drift.png").stat().st_size > 5000
    assert "NaN" not in json.dumps(report["operators"]["1 truncate, keep NaN"])
    bias.show(bias.measure(2, 0))
    assert "8.980%" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_add_and_norm_is_the_two_operations(dtype: torch.dtype, zero_centered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, grad, grad_residual = (torch.randn(6, 80, generator=generator).to(dtype) for _ in range(4))
    weight = torch.randn(80, generator=generator).to(dtype)
    out, residual_out, rstd = add_rmsnorm(x, residual, weight, 1e-6, zero_centered)
    total = x + residual
    want, want_rstd = rmsnorm(total, weight, 1e-6, zero_centered)
    for name, got, expected in (("out", out, want), ("sum", residual_out, total), ("rstd", rstd, want_rstd)):
        assert_equal_bits(got, expected, name)
    dx, terms = add_rmsnorm_backward(grad, grad_residual, residual_out, weight, rstd, zero_centered)
    xd, wd = total.double().requires_grad_(), weight.double().requires_grad_()
    scale = wd + 1 if zero_centered else wd
    normed = xd / (xd.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    (normed * grad.double() + xd * grad_residual.double()).sum().backward()
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(dx.double(), xd.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(terms.double().sum(0), wd.grad, rtol=tolerance, atol=3 * tolerance)


def test_norming_the_unrounded_sum_is_seen() -> None:
    """Mutation: out of the float32 sum, as a fused kernel is tempted to compute it."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, 256, generator=generator).bfloat16() for _ in range(2))
    weight = torch.ones(256).bfloat16()
    out, _, _ = add_rmsnorm(x, residual, weight, 1e-6)
    unrounded, _ = rmsnorm(x.float() + residual.float(), weight.float(), 1e-6)
    assert count_mismatches(unrounded.bfloat16(), out)[0] > 0


def test_operands_that_would_be_broadcast_or_promoted_are_refused() -> None:
    x, weight = torch.zeros(2, 8).bfloat16(), torch.ones(8).bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16.*float32.*one dtype"):
        add_rmsnorm(x, torch.zeros(2, 8), weight, 1e-6)
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(8,\)"):
        add_rmsnorm(x, torch.zeros(8).bfloat16(), weight, 1e-6)


def test_the_page_shows_what_its_results_say() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "evidence"
    page = (folder / "add-rmsnorm.md").read_text()
    operators = json.loads((folder / "results" / "add-rmsnorm-drift-cpu.json").read_text())["operators"]
    for name, label in (("2 truncate", "truncation"), ("0 nearest even", "nearest even"), ("ours", "ours")):
        errors = [call["mean_signed_error"] for call in operators[name]["single_calls"]]
        shrink = [operators[name]["stream"]["shrink_percent"][calls - 1] for calls in bias.SHOWN]
        cells = [label, f"{min(errors):+.2e} to {max(errors):+.2e}", *(f"{s:.3f}%" for s in shrink)]
        assert f"| {' | '.join(cells)} |" in page, cells
