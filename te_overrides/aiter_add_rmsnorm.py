"""AITER's fused add and RMSNorm, where the installed build truncates what it should round.

On gfx942 the float32 sum loses its low half on the way to bfloat16 (ROCm/aiter#5151): an error of one sign in the
residual stream, which the next layer reads. Whether a build does so depends on release, architecture and compile flags,
and AITER's JIT cache looks only at whether the .so exists: flags that changed leave the old code in use. So the gate
runs the installed operator on 4,096 values a case and looks at what it stored. Where it rounds, calls are passed on.

The replacement rounds twice in `out` (the normed value, then its product with the weight), which upstream does with
``use_model_sensitive_rmsnorm`` alone; that argument changes nothing here. Callers of
``torch.ops.aiter`` are not reached.

Seam: a function of AITER's Python module that its package re-exports.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from patches import override
from patches.errors import DriftError

if TYPE_CHECKING:
    import inspect

MODULE, NAME = "aiter.ops.rmsnorm", "rmsnorm2d_fwd_with_add"
REQUIRED = ("out", "input", "residual_in", "residual_out", "weight", "epsilon")
OPTIONAL = ("gemma_norm", "use_model_sensitive_rmsnorm")
VALUES, LONG_ROW = 4096, 16384
"""Columns of a probed row; rows of more than 8,192 go through another kernel of AITER's."""


def signature_in_source(source: str) -> inspect.Signature:
    """The signature as upstream's source declares it: the decorators that make the operator may hide it.

    Raises:
        DriftError: other parameters than those that were reviewed.
    """
    import ast
    import inspect

    (function,) = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == NAME]
    names = [argument.arg for argument in function.args.args]
    more = names[len(REQUIRED) :]
    defaults = function.args.defaults
    extra = function.args.kwonlyargs or function.args.vararg or function.args.kwarg
    if (
        tuple(names[: len(REQUIRED)]) != REQUIRED
        or set(more) - set(OPTIONAL)
        or extra
        or len(defaults) != len(more)
    ):
        raise DriftError(
            f"sought {NAME}({', '.join(REQUIRED)}, then any of {', '.join(OPTIONAL)}), found "
            f"({ast.unparse(function.args)}): an argument whose meaning nobody reviewed. Install a reviewed release of "
            "AITER (`python -m patches explain aiter.rmsnorm2d_fwd_with_add`), or run without --deterministic-rocm."
        )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, kind) for name in REQUIRED]
        + [
            inspect.Parameter(name, kind, default=ast.literal_eval(value))
            for name, value in zip(more, defaults, strict=True)
        ]
    )


def _signature() -> inspect.Signature:
    from pathlib import Path

    return signature_in_source(Path(sys.modules[MODULE].__file__ or "").read_text())


@functools.cache
def probe(original: Callable[..., None]) -> tuple[bool, str]:
    """(whether the installed operator must be replaced, what it stored); run once a process, on the current device.

    It must be replaced unless every stored value of every case is the one rounded to nearest even, or the NaN.
    """
    import torch

    cases: list[tuple[int, dict[str, int]]] = [(VALUES, {}), (LONG_ROW, {})]
    if "use_model_sensitive_rmsnorm" in _signature().parameters:
        cases.append((VALUES, {"use_model_sensitive_rmsnorm": 1}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(5151)
    needed, words = False, []
    for columns, more in cases:
        x, residual = (torch.randn(1, columns, generator=generator).bfloat16() for _ in range(2))
        x[0, 0] = float("nan")
        exact = x.float() + residual.float()
        nearest, truncated = (
            exact.bfloat16(),
            (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16),
        )
        out, stored = torch.empty_like(x, device=device), torch.empty_like(x, device=device)
        name = f"{columns} columns" + "".join(f", {key}={value}" for key, value in more.items())
        try:
            weight = torch.ones(columns, dtype=x.dtype, device=device)
            original(out, x.to(device), residual.to(device), stored, weight, 1e-6, **more)
            got = stored.cpu()
        except (RuntimeError, ImportError, OSError, TypeError, ValueError, AttributeError) as error:
            # A kernel that does not build or load. What cannot be looked at is replaced; the cause is shown.
            needed = True
            words.append(f"{name}: could not be probed, {type(error).__name__}: {error}")
            continue

        def unlike(want: Any, got: Any = got) -> int:
            return int((got.view(torch.int16) != want.view(torch.int16))[0, 1:].sum()) + int(
                not got[0, 0].isnan()
            )

        off = unlike(nearest)
        needed |= off > 0
        # The signed error is what truncation shows in; the count alone could be a last place either way.
        off_by = ((got.double().abs() - exact.double().abs()) / exact.double().abs())[0, 1:]
        bias = off_by[exact[0, 1:] != 0].mean().item()
        how = (
            "rounds to nearest even" if not off else "truncates" if not unlike(truncated) else "does neither"
        )
        words.append(f"{name}: {how}, {off} of {columns} stored values differ, mean signed error {bias:+.2e}")
    return needed, f"installed operator on {device}: " + "; ".join(words)


@override(
    id="aiter.rmsnorm2d_fwd_with_add",
    target=f"{MODULE}:{NAME}",
    modes=("stable", "invariant"),
    why="residual_out is truncated to bfloat16 on gfx942: the residual stream shrinks by 9% over 72 calls",
    how="sum and norm rounded to nearest even, one row a program; upstream's operator where the gate sees it round",
    retire_when="every supported release of AITER rounds on every supported architecture (ROCm/aiter#5151)",
    evidence="docs/evidence/add-rmsnorm.md",
    distribution="amd-aiter",
    probe=probe,
)
def build(original: Callable[..., None]) -> Callable[..., None]:
    signature = _signature()

    def rmsnorm2d_fwd_with_add(*args: Any, **kwargs: Any) -> None:
        if not probe(original)[0]:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x, residual, out, residual_out = (given[n] for n in ("input", "residual_in", "out", "residual_out"))
        for name in ("out", "residual_out"):
            if given[name].shape != x.shape or given[name].dtype != x.dtype:
                raise ValueError(
                    f"{NAME}: {name} is {given[name].dtype} {tuple(given[name].shape)}, input is {x.dtype} "
                    f"{tuple(x.shape)}; both must have one shape and one dtype. "
                    "Allocate it with torch.empty_like(input)."
                )
        if x.is_cuda:
            from te_overrides.kernels.rmsnorm.kernel import add_rmsnorm
        else:
            from te_overrides.kernels.rmsnorm.add import add_rmsnorm
        normed, total, _ = add_rmsnorm(
            x, residual, given["weight"], given["epsilon"], bool(given.get("gemma_norm", False))
        )
        # By copies: the caller's buffers may be its inputs.
        out.copy_(normed)
        residual_out.copy_(total)
        return None

    return rmsnorm2d_fwd_with_add
