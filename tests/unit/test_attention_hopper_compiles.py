"""The Hopper attention kernels compile without a GPU: one matrix instruction, one exp2, nearly all in registers."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytest.importorskip("triton.experimental.gluon._runtime", reason="Gluon comes with Triton 3.6")
from triton.experimental.gluon import language as gl  # noqa: E402

from hopper_code import compiled, stack  # noqa: E402
from te_overrides.kernels.attention import hopper  # noqa: E402

ELEMENT = {"bf16": gl.bfloat16, "fp16": gl.float16}
# Bytes of a thread's stack that accumulators push out. Mostly scalars that outlive the loops; dK, dV with a window and
# tails has the most of them.
STACK_LIMIT = 192


def descriptor(rows: int, d: int, dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, d], ELEMENT[dtype])
    return f"tensordesc<{dtype}[{rows}, {d}],{layout!r}>"


def built(which: str, d: int, dtype: str, tail: bool, count: int = 2) -> Any:
    """One kernel as it is launched."""
    launch = hopper.TABLE[d][("forward", "dq", "dkv").index(which)]
    function = getattr(hopper, f"hopper_{which}_kernel")
    columns = launch.columns
    constants = {
        "GROUP": 4, "WINDOW": tail, "END": tail, "TAIL": tail, "D": d, "ST": launch.stages, "BN": columns,
        "REGISTERS": launch.registers, "BQ": columns, "COUNT": count,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    other = 64 if which == "dkv" else columns
    rows = {"q_d": 64, "g_d": 64, "k_d": other, "v_d": other, "o_d": 64, "dq_d": 64, "dk_d": 64, "dv_d": 64}
    types = {name: descriptor(size, d, dtype) for name, size in rows.items()}
    line = f"tensordesc<fp32[{columns}],{gl.NVMMASharedLayout(0, 32, rank=1)!r}>"
    types |= {"shift_d": line, "delta_d": line, "work": "*i32", "scale": "fp32", "softmax_scale": "fp32"}
    types |= dict.fromkeys(("lse", "shift", "delta"), "*fp32") | dict.fromkeys(
        ("out", "dq", "dk", "dv"), f"*{dtype}"
    )
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    return compiled(function, signature, constants)


@pytest.mark.slow
@pytest.mark.parametrize("d", sorted(hopper.TABLE))
@pytest.mark.parametrize(
    ("which", "dtype", "tail", "count"),
    [
        ("forward", "bf16", False, 2),
        ("forward", "fp16", True, 2),
        ("dq", "bf16", False, 2),
        ("dq", "fp16", True, 2),
        ("dkv", "bf16", False, 2),
        ("dkv", "fp16", True, 2),
        ("dkv", "bf16", True, 1),
    ],
)
def test_a_hopper_kernel_compiles(which: str, d: int, dtype: str, tail: bool, count: int) -> None:
    kernel = built(which, d, dtype, tail, count)
    code = kernel.asm["ptx"]
    kinds = set(re.findall(r"(wgmma\.mma_async|mma\.sync)\S*\.f32\.(bf16|f16)\.", code))
    assert kinds == {("wgmma.mma_async", "bf16" if dtype == "bf16" else "f16")}
    assert set(re.findall(r"ex2\S*", code)) == {"ex2.approx.ftz.f32"}
    assert not re.search(r"\b(?:red|atom)\.(?:global|shared)", code)
    assert stack(kernel) <= STACK_LIMIT, f"{stack(kernel)} bytes"
    assert kernel.metadata.shared <= 227 * 1024


def test_tails_are_told_from_the_end_of_a_tensor() -> None:
    from te_overrides.kernels.attention.runs import Run

    last, inner, even = Run(0, 10, 0, 0, 100), Run(0, 10, 0, 0, 90), Run(0, 10, 0, 0, 128)
    assert not hopper._has_tail((last,), 128, 100)
    assert hopper._has_tail((inner,), 128, 100)
    assert not hopper._has_tail((even,), 128, 500)
