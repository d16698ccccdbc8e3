"""AITER's add and RMSNorm is replaced where the installed operator truncates, and only there (ROCm/aiter#5151).

AITER is a small package here whose operator truncates, rounds or has another signature; nothing ran on an AMD GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import fake_upstream
import pytest

from patches import fingerprint
from patches.errors import DriftError
from patches.lock import Lock
from patches.target import Target
from te_overrides.aiter_add_rmsnorm import signature_in_source

NAMES = (
    "rmsnorm2d_fwd_with_add",
    "rmsnorm2d_fwd_with_add_smoothquant",
    "rmsnorm2d_fwd_with_add_dynamicquant",
)
ROUNDED = "total.bfloat16()"
TRUNCATED = "(total.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)"
LONG_ROWS_ONLY = f"({TRUNCATED} if total.shape[-1] > 8192 else {ROUNDED})"
NO_NAN = "torch.where(total.isnan(), torch.tensor(torch.inf), total).bfloat16()"
SIGNATURES = {
    "0.1.4": "epsilon: float",
    "0.1.10": "epsilon: float, use_model_sensitive_rmsnorm: int = 0",
    "0.1.20": "epsilon: float, gemma_norm: bool = False, use_model_sensitive_rmsnorm: int = 0",
}
SOURCE = """
import functools
import torch

def compile_ops(name):
    def decorate(function):
        def wrapper(*args, **kwargs):  # as AITER's, it does not show its signature
            return function(*args, **kwargs)
        return wrapper
    return decorate

CALLS = []

@compile_ops("module_rmsnorm")
def rmsnorm2d_fwd_with_add(out, input, residual_in, residual_out, weight, {signature}):
    CALLS.append(tuple(input.shape))
    total = input.float() + residual_in.float()
    residual_out.copy_({store})
    out.copy_(total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())

def rmsnorm2d_fwd_with_add_smoothquant(out, input, residual_in, residual_out, xscale, yscale, weight, epsilon):
    return "upstream's"

def rmsnorm2d_fwd_with_add_dynamicquant(out, input, residual_in, residual_out, yscale, weight, epsilon):
    return "upstream's"
"""
PROGRAM = """
import json, torch
from patches import gate
mode = {mode!r}
ledger = patches.arm(mode, declarations=[
    "te_overrides.aiter_add_rmsnorm", "te_overrides.aiter_add_rmsnorm_smoothquant",
    "te_overrides.aiter_add_rmsnorm_dynamicquant"], lock_path=pathlib.Path("lock.json"))
import aiter
from aiter.ops import rmsnorm as module
gate.settle(ledger)
digest = ledger.digest()
gate.settle(ledger)
generator = torch.Generator().manual_seed(1)
x, residual = (torch.randn(8, 512, generator=generator).bfloat16() for _ in range(2))
weight = torch.randn(512, generator=generator).bfloat16()
exact = x.double() + residual.double()
out, stored = x.clone(), residual.clone()
before = len(module.CALLS)
aiter.rmsnorm2d_fwd_with_add(out, x, residual, stored, weight, 1e-6, {more})
from te_overrides.kernels.rmsnorm.add import add_rmsnorm
want, want_sum, _ = add_rmsnorm(x, residual, weight, 1e-6, {zero_centered})
in_place = x.clone()
aiter.rmsnorm2d_fwd_with_add(in_place, in_place, residual, residual, weight, 1e-6, {more})
error = ((stored.double().abs() - exact.abs()) / exact.abs())[exact != 0]
try:
    quantized = module.rmsnorm2d_fwd_with_add_dynamicquant(*[None] * 7)
except NotCoveredError as refusal:
    quantized = f"NotCoveredError: {{refusal}}"
print("RESULT", json.dumps(dict(
    states={{id: [e.state, e.reason] for id, e in ledger.entries.items()}}, same_digest=digest == ledger.digest(),
    upstream_calls=len(module.CALLS) - before, quantized=quantized, bias=error.mean().item(), values=error.numel(),
    spread=error.std().item(), sum_differs=int((stored.view(torch.int16) != want_sum.view(torch.int16)).sum()),
    out_differs=int((out.view(torch.int16) != want.view(torch.int16)).sum()),
    in_place_differs=int((in_place.view(torch.int16) != out.view(torch.int16)).sum()
        + (residual.view(torch.int16) != stored.view(torch.int16)).sum()), table=gate.table(ledger))))
"""
ID = "aiter.rmsnorm2d_fwd_with_add"


def run(
    folder: Path,
    store: str,
    mode: str = "stable",
    release: str = "0.1.10",
    more: str = "",
    gemma: bool = False,
) -> dict[str, object]:
    package = folder / "aiter" / "ops"
    package.mkdir(parents=True)
    text = SOURCE.format(store=store, signature=SIGNATURES[release])
    (folder / "aiter" / "__init__.py").write_text("from .ops.rmsnorm import *\n")
    (package / "__init__.py").touch()
    (package / "rmsnorm.py").write_text(text)
    targets = {
        f"aiter.ops.rmsnorm:{name}": [
            {
                "fingerprint": fingerprint.of_source(text, Target.parse(f"aiter.ops.rmsnorm:{name}")),
                "versions": [release],
            }
        ]
        for name in NAMES
    }
    (folder / "lock.json").write_text(json.dumps({"schema": 1, "targets": targets}))
    said = fake_upstream.run(folder, PROGRAM.format(mode=mode, more=more, zero_centered=gemma))
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert lines, said
    found: dict[str, object] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize(
    ("mode", "release", "more", "gemma"),
    [("stable", "0.1.4", "", False), ("invariant", "0.1.20", "True, 1", True)],
)
def test_a_build_that_truncates_is_replaced(
    tmp_path: Path, mode: str, release: str, more: str, gemma: bool
) -> None:
    found = run(tmp_path, TRUNCATED, mode, release, more, gemma)
    state, reason = found["states"][ID]  # type: ignore[index]
    assert state == "VERIFIED" and "4096 columns: truncates" in reason and "mean signed error -" in reason
    assert found["same_digest"] and found["upstream_calls"] == 0
    differ = {name: found[name] for name in ("sum_differs", "out_differs", "in_place_differs")}
    assert not any(differ.values()), f"of 4096 elements: {differ}"
    # Rounding has errors of both signs: the mean is what 4,096 of them leave. Truncation's is -1.5e-3 at least.
    assert abs(found["bias"]) < 4 * found["spread"] / found["values"] ** 0.5 < 3e-4  # type: ignore[operator]


def test_a_build_that_rounds_is_left_alone_with_the_evidence(tmp_path: Path) -> None:
    found = run(tmp_path, ROUNDED)
    state, reason = found["states"][ID]  # type: ignore[index]
    assert state == "NOT_REQUIRED"
    assert "4096 columns: rounds to nearest even, 0 of 4096 stored values differ" in reason
    assert "16384 columns: rounds" in reason and "use_model_sensitive_rmsnorm=1: rounds" in reason
    assert found["upstream_calls"] == 2, "calls are passed on"


@pytest.mark.parametrize("store", [LONG_ROWS_ONLY, NO_NAN])
def test_one_case_that_does_not_round_is_enough(tmp_path: Path, store: str) -> None:
    """Long rows go through another kernel; a NaN must stay one."""
    found = run(tmp_path, store)
    assert found["states"][ID][0] == "VERIFIED", found["states"]  # type: ignore[index]
    assert found["upstream_calls"] == 0


def test_a_build_that_cannot_be_probed_is_replaced(tmp_path: Path) -> None:
    found = run(tmp_path, "torch.ops.aiter.not_built()")
    state, reason = found["states"][ID]  # type: ignore[index]
    assert state == "VERIFIED" and "could not be probed, AttributeError" in reason


def test_quantized_siblings_are_shown_in_stable_and_refused_in_invariant(tmp_path: Path) -> None:
    stable, invariant = (run(tmp_path / mode, TRUNCATED, mode) for mode in ("stable", "invariant"))
    for name in NAMES[1:]:
        state, reason = stable["states"][f"aiter.{name}"]  # type: ignore[index]
        assert state == "KNOWN_BIASED" and "-1.53e-3 to -2.80e-3" in reason
        assert invariant["states"][f"aiter.{name}"][0] == "VERIFIED"  # type: ignore[index]
    assert stable["quantized"] == "upstream's"
    assert "NotCoveredError: mode invariant: rmsnorm2d_fwd_with_add_dynamicquant" in str(
        invariant["quantized"]
    )
    assert "KNOWN_BIASED" in str(stable["table"]) and "KNOWN_BIASED" not in str(invariant["table"])


@pytest.mark.parametrize(
    "parameters",
    [
        "out, input, residual_in, residual_out, weight, inserted, epsilon",
        "out, input, residual_in, residual_out, weight, epsilon, unknown=0",
        "out, input, residual_in, residual_out, weight, epsilon, *, gemma_norm=False",
        "out, residual_in, input, residual_out, weight, epsilon",
    ],
)
def test_another_signature_is_refused_by_name(parameters: str) -> None:
    with pytest.raises(DriftError, match=r"sought rmsnorm2d_fwd_with_add\(out, input.*found \(.*reviewed"):
        signature_in_source(f"def rmsnorm2d_fwd_with_add({parameters}): ...")


def test_the_releases_that_were_read_are_pinned() -> None:
    accepted = Lock.read().accepted("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add")
    releases = {release for versions in accepted.values() for release in versions}
    assert {"0.1.1", "0.1.10.post2", "0.1.16", "0.1.17", "0.1.20"} <= releases and len(accepted) == 6, (
        accepted
    )
