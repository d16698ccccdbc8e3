"""SwiGLU's kernels as compiled for AMD GPUs: nothing spilled or contracted, one expression, the reference's bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bits import assert_equal_bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from te_overrides.audit.api import audit, execute
from te_overrides.audit.compile import Kernel, compile_kernel, launch_grid
from te_overrides.kernels.swiglu import kernel, reference

ARCHITECTURES = ["gfx942", "gfx950"]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
WIDTH = 48
"""Columns of gate and of up; rows are what the audit counts as elements."""


def subject(function: Any, dtype: str) -> Kernel:
    """One program a row, as `kernel._plan` launches rows that fit into a block."""
    columns = {"grad_ptr": 1, "packed_ptr": 2, "out_ptr": 1 if function is kernel.forward_kernel else 2}
    values = {"grad_stride": WIDTH, "packed_stride": 2 * WIDTH, "width": WIDTH}
    known = {name: values[name] for name in function.arg_names if name in values}
    pointers = [name for name in function.arg_names if name.endswith("_ptr")]
    return Kernel(
        function,
        dict.fromkeys(pointers, dtype) | dict.fromkeys(known, "i32"),
        block="BLOCK",
        scalars=known,
        constexprs={"NARROW": False},
        sizes={name: columns[name] * WIDTH for name in pointers},
        programs=lambda _, rows: rows,
    )


def launches(*blocks: int, warps: tuple[int, ...] = (kernel.THREADS // 64,)) -> list[Any]:
    return launch_grid({"BLOCK": blocks, "num_warps": warps, "enable_fp_fusion": (False,)})


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES.values())
@pytest.mark.parametrize("function", [kernel.forward_kernel, kernel.backward_kernel])
def test_compiled_for_amd_nothing_spills_or_is_rounded_once_instead_of_twice(
    arch: str, dtype: str, function: Any
) -> None:
    (launch,) = launches(kernel.BLOCK)
    assembly = compile_kernel(subject(function, dtype), arch, launch).assembly
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", assembly)
    assert len(spilled) == 2 and set(spilled) == {"0"}
    # A product merged into its conversion to float16, or into the sum after it.
    assert not re.search(r"v_(?:pk_)?(?:fma_mix(?:lo|hi)_f16|fmac?_f32)", assembly)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES.values())
@pytest.mark.parametrize("function", [kernel.forward_kernel, kernel.backward_kernel])
def test_every_launch_is_one_expression(arch: str, dtype: str, function: Any) -> None:
    # To bfloat16 LLVM writes the integers of the rounding otherwise for one element a thread, and in some versions for
    # sixteen: other expressions, equal bits (executed below).
    grid = [
        *launches(256, warps=(1, 2)),
        *launches(512, warps=(1, 2, 4)),
        *launches(kernel.BLOCK, warps=(2, 4)),
    ]
    result = audit(subject(function, dtype), arch, grid, elements=2)
    assert result.one_class, (len(result.groups), dict(result.unknown))


def _array(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1).copy()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize(
    ("block", "warps"), [(64, 2), (kernel.BLOCK, 1), (kernel.BLOCK, kernel.THREADS // 64)]
)
@pytest.mark.parametrize(
    ("function", "formula"),
    [
        (kernel.forward_kernel, lambda grad, packed: reference.swiglu_packed(packed)),
        (kernel.backward_kernel, reference.swiglu_packed_backward),
    ],
    ids=["forward", "backward"],
)
def test_the_code_for_amd_gpus_has_the_reference_s_bits(
    arch: str, dtype: torch.dtype, block: int, warps: int, function: Any, formula: Callable[..., torch.Tensor]
) -> None:
    rows = 4
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    packed = (3.0 * torch.randn(rows, 2 * WIDTH, generator=generator)).to(dtype)
    special = torch.tensor([0.0, -0.0, 1e-40, 6e-8, 3e38, torch.inf, -torch.inf, torch.nan, -90.0, 6e4])
    packed[0, : len(special)] = special.to(dtype)
    packed[1, WIDTH : WIDTH + len(special)] = special.to(dtype)
    grad[2, : len(special)] = special.to(dtype)
    grad[3] = -0.0
    want = formula(grad, packed)
    arrays = {"packed_ptr": _array(packed), "out_ptr": np.zeros_like(_array(want))}
    if function is kernel.backward_kernel:
        arrays["grad_ptr"] = _array(grad)
    (launch,) = launches(block, warps=(warps,))
    left = execute(subject(function, NAMES[dtype]), arch, launch, arrays, rows)["out_ptr"]
    got = torch.from_numpy(left[: want.numel()].copy()).view(dtype).view(want.shape)
    assert_equal_bits(got, want, f"{function.__name__} on {arch}")
