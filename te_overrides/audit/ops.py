"""The library functions whose dependence on the launch was published, as kernels of a compiler's shape.

`unary`, `binary` and `ternary` are what torch.compile emits for a contiguous elementwise operation whose size is
a multiple of the block: no mask. With a mask, the compiler keeps the elements of a thread apart more often.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from te_overrides.audit.compile import Kernel

__all__ = ["OPS", "op_kernel", "reference"]


@triton.jit
def _one(x, OP: tl.constexpr):
    if OP == "log1p":
        return libdevice.log1p(x)
    elif OP == "expm1":
        return libdevice.expm1(x)
    elif OP == "exp":
        return libdevice.exp(x)
    elif OP == "exp2":
        return libdevice.exp2(x)
    elif OP == "log":
        return libdevice.log(x)
    elif OP == "log2":
        return libdevice.log2(x)
    elif OP == "log10":
        return libdevice.log10(x)
    elif OP == "sqrt":
        return libdevice.sqrt(x)
    elif OP == "rsqrt":
        return libdevice.rsqrt(x)
    elif OP == "tanh":
        return libdevice.tanh(x)
    elif OP == "sinh":
        return libdevice.sinh(x)
    elif OP == "cosh":
        return libdevice.cosh(x)
    elif OP == "erf":
        return libdevice.erf(x)
    elif OP == "atan":
        return libdevice.atan(x)
    elif OP == "sigmoid":
        return tl.sigmoid(x)
    else:
        tl.static_assert(False, "no such operation")


@triton.jit
def unary(in_ptr, out_ptr, n, OP: tl.constexpr, MASKED: tl.constexpr, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    if MASKED:
        x = tl.load(in_ptr + i, i < n)
        tl.store(out_ptr + i, _one(x, OP), i < n)
    else:
        tl.store(out_ptr + i, _one(tl.load(in_ptr + i), OP))


@triton.jit
def binary(in_ptr, in2_ptr, out_ptr, n, OP: tl.constexpr, MASKED: tl.constexpr, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    mask = i < n if MASKED else None
    x = tl.load(in_ptr + i, mask)
    y = tl.load(in2_ptr + i, mask)
    if OP == "pow":
        z = libdevice.pow(x, y)
    elif OP == "div":
        z = x / y
    else:
        tl.static_assert(OP == "mul_add", "no such operation")
        z = x * y + x
    tl.store(out_ptr + i, z, mask)


@triton.jit
def ternary(
    in_ptr, in2_ptr, in3_ptr, out_ptr, n, OP: tl.constexpr, MASKED: tl.constexpr, XBLOCK: tl.constexpr
):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    mask = i < n if MASKED else None
    x = tl.load(in_ptr + i, mask)
    y = tl.load(in2_ptr + i, mask)
    z = tl.load(in3_ptr + i, mask)
    tl.store(out_ptr + i, libdevice.fma(x, y, z), mask)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


_UNARY: dict[str, Callable[..., np.ndarray] | None] = {
    "log1p": np.log1p, "expm1": np.expm1, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2,
    "log10": np.log10, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sinh": np.sinh,
    "cosh": np.cosh, "erf": None, "atan": np.arctan, "sigmoid": _sigmoid,
}  # fmt: skip
_BINARY: dict[str, Callable[..., np.ndarray]] = {
    "pow": np.power, "div": np.divide, "mul_add": lambda x, y: x * y + x,
}  # fmt: skip
_TERNARY: dict[str, Callable[..., np.ndarray]] = {"fma": lambda x, y, z: x * y + z}
OPS = (*_UNARY, *_BINARY, *_TERNARY)


def op_kernel(op: str, masked: bool = False) -> Kernel:
    """The kernel of a named operation, float32.

    Raises:
        ValueError: no such operation; the message lists those there are.
    """
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; known are {', '.join(OPS)}")
    fn = unary if op in _UNARY else binary if op in _BINARY else ternary
    inputs = [name for name in fn.arg_names if name.endswith("_ptr")]
    return Kernel(
        fn,
        dict.fromkeys(inputs, "*fp32") | {"n": "i32"},
        constexprs={"OP": op, "MASKED": masked},
    )


def reference(op: str, *inputs: np.ndarray) -> np.ndarray | None:
    """The operation in float64, from which errors are counted; None where numpy has none."""
    fn = {**_UNARY, **_BINARY, **_TERNARY}[op]
    if fn is None:
        return None
    with np.errstate(all="ignore"):
        return fn(*(value.astype(np.float64) for value in inputs))
