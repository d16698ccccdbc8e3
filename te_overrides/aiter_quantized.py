"""What is said of AITER's quantized add+RMSNorm, whose residual_out is truncated as the unquantized one's is.

Rounding would cost 11 to 31% there, and the bias lies far below the error of quantizing `out`. So mode `stable` leaves
the operators alone and shows them as KNOWN_BIASED. Mode `invariant` promises bits, and refuses the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from patches.errors import NotCoveredError

BIASED = (
    "left alone: residual_out is truncated to bfloat16 on gfx942, mean signed error -1.53e-3 to -2.80e-3 a call "
    "(ROCm/aiter#5151, published, not measured here), below the error of quantization"
)


def refuse(name: str) -> Callable[..., Any]:
    """A function that raises NotCoveredError for the operator `name`."""

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotCoveredError(
            f"mode invariant: {name} was called, which quantizes and whose residual_out AITER truncates; the contract "
            "has no reference of it. Call rmsnorm2d_fwd_with_add and quantize its result, or run with "
            "--deterministic-rocm=stable."
        )

    return refused
