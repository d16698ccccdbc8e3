"""The norm's kernels as compiled for AMD GPUs: one expression an element over launches, and the reference's bits."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from bits import assert_equal_bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

import triton
import triton.language as tl

from te_overrides.audit.api import AuditResult, audit, execute
from te_overrides.audit.compile import Kernel, launch_grid
from te_overrides.kernels.rmsnorm import add, reference
from te_overrides.kernels.rmsnorm.backward_kernel import backward_kernel
from te_overrides.kernels.rmsnorm.forward_kernel import forward_kernel

ARCHITECTURES = ["gfx942", "gfx950"]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
EPS = 1e-6
GRANULE = 4
"""A quarter of the contract's, so that the audit unrolls a quarter of the rows."""


def forward(columns: int, dtype: str = "*bf16", zero_centered: bool = False) -> Kernel:
    """As many rows as the audit has elements."""
    tensors = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "residual_out_ptr")
    return Kernel(
        forward_kernel,
        dict.fromkeys(tensors, dtype)
        | {"rstd_ptr": "*fp32", "epsilon_bits": "i64"}
        | dict.fromkeys(("rows", "x_stride", "residual_stride"), "i32"),
        constexprs={
            "COLUMNS": columns, "LEVELS": (columns - 1).bit_length(), "ADD": True, "ZERO_CENTERED": zero_centered,
            "NATIVE": False,
        },
        block="ROWS",
        scalars={
            "rows": lambda _, n: n, "x_stride": columns, "residual_stride": columns,
            "epsilon_bits": struct.unpack("<q", struct.pack("<d", EPS))[0],
        },
        sizes=dict.fromkeys(tensors, columns),
    )  # fmt: skip


def backward(columns: int, dtype: str = "*bf16", heads: int = 1) -> Kernel:
    """As many chains as the audit has elements, of `GRANULE` positions and `heads` rows each."""
    rows = GRANULE * heads
    tensors = ("grad_ptr", "x_ptr", "weight_ptr", "grad_residual_ptr", "dx_ptr")
    return Kernel(
        backward_kernel,
        dict.fromkeys(tensors, dtype)
        | dict.fromkeys(("rstd_ptr", "partial_ptr"), "*fp32")
        | dict.fromkeys(
            ("positions", "inners", "grad_stride", "x_stride", "grad_residual_stride"), "i32"
        ),
        constexprs={
            "COLUMNS": columns, "LEVELS": (columns - 1).bit_length(), "HEADS": heads, "GRANULE": GRANULE,
            "ADD": True, "ZERO_CENTERED": False, "NATIVE": False,
        },
        block="CHAINS",
        scalars={
            "positions": lambda _, n: GRANULE * n, "inners": 1,
            "grad_stride": columns, "x_stride": columns, "grad_residual_stride": columns,
        },
        sizes=dict.fromkeys(tensors, rows * columns) | {"rstd_ptr": rows, "partial_ptr": columns},
    )  # fmt: skip


def require_one_class(result: AuditResult) -> None:
    assert result.one_class, (
        [[str(launch) for launch in group.launches] for group in result.groups],
        dict(result.unknown),
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES.values())
@pytest.mark.parametrize(("columns", "zero_centered"), [(100, True), (256, False)])
def test_a_norm_of_short_rows_is_one_expression(
    arch: str, dtype: str, columns: int, zero_centered: bool
) -> None:
    launches = launch_grid({"ROWS": (1, 2, 4), "num_warps": (1, 2, 4), "enable_fp_fusion": (False,)})
    require_one_class(audit(forward(columns, dtype, zero_centered), arch, launches, elements=4))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("columns", [4096, 5120])
def test_a_norm_of_long_rows_is_one_expression(arch: str, columns: int) -> None:
    launches = launch_grid({"ROWS": (1,), "num_warps": (2, 4, 8, 16), "enable_fp_fusion": (False,)})
    require_one_class(audit(forward(columns), arch, launches, elements=2))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("columns", "dtype", "heads", "chains", "warps"),
    [
        (128, "*bf16", 3, (2, 4), (1, 2, 4)),
        # With four warps LLVM divides by -100 and saves a negation: another expression, equal bits (executed below).
        (100, "*fp16", 1, (2, 4), (1, 2)),
        (1024, "*fp32", 1, (1, 2), (2, 4)),
    ],
)
def test_gradients_are_one_expression(
    arch: str, columns: int, dtype: str, heads: int, chains: tuple[int, ...], warps: tuple[int, ...]
) -> None:
    launches = launch_grid({"CHAINS": chains, "num_warps": warps, "enable_fp_fusion": (False,)})
    require_one_class(audit(backward(columns, dtype, heads), arch, launches, elements=4))


@triton.jit
def whole_axis_kernel(x_ptr, out_ptr, n, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """What a norm usually does: a reduction whose order is the layout's."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out_ptr + row, tl.sum(x * x, axis=1))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_reduction_over_the_whole_axis_follows_the_launch(arch: str) -> None:
    """Mutation, pytorch/torchtitan#3960 and ROCm/triton#953: a result that follows num_warps. The audit finds it."""
    kernel = Kernel(
        whole_axis_kernel,
        {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"},
        constexprs={"COLUMNS": 256},
        block="BLOCK",
        sizes={"x_ptr": 256},
    )
    launches = launch_grid({"BLOCK": (1,), "num_warps": (1, 4), "enable_fp_fusion": (False,)})
    result = audit(kernel, arch, launches, elements=4)
    assert not result.unknown and len(result.groups) == 2


def _array(x: torch.Tensor, length: int | None = None) -> np.ndarray:
    """Bits of a tensor, filled up to `length`."""
    flat = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1)
    return np.concatenate([flat, np.zeros((length or flat.size) - flat.size, flat.dtype)])


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array[: like.numel()].copy()).view(like.dtype).view(like.shape)


def _operands(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Three of [rows, columns] and one of [columns], special values and a row of zeros among them."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(3)]
    special = torch.tensor([0.0, -0.0, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan])
    found[0][0, : len(special)] = special.to(dtype)
    found[0][1], found[1][1] = 0.0, -0.0
    return [*found, torch.randn(columns, generator=generator).to(dtype)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("columns", [100, 4096])
def test_the_norm_for_amd_gpus_has_the_reference_s_bits(arch: str, dtype: torch.dtype, columns: int) -> None:
    x, residual, _, weight = _operands(4, columns, dtype)
    want = add.add_rmsnorm(x, residual, weight, EPS)
    (launch,) = launch_grid({"ROWS": (1,), "num_warps": (4,), "enable_fp_fusion": (False,)})
    arrays = {"x_ptr": _array(x), "residual_ptr": _array(residual), "weight_ptr": _array(weight, x.numel())}
    for name, wanted in zip(("out_ptr", "residual_out_ptr", "rstd_ptr"), want, strict=True):
        arrays[name] = np.zeros_like(_array(wanted))
    left = execute(forward(columns, NAMES[dtype]), arch, launch, arrays, 4)
    for name, wanted in zip(("out_ptr", "residual_out_ptr", "rstd_ptr"), want, strict=True):
        assert_equal_bits(_tensor(left[name], wanted), wanted, f"{name} on {arch}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("warps", [2, 4])
def test_gradients_for_amd_gpus_have_the_reference_s_bits(
    arch: str, dtype: torch.dtype, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 2 * GRANULE, 100
    x, grad, stream, weight = _operands(rows, columns, dtype)
    _, rstd = reference.rmsnorm(x, weight, EPS)
    monkeypatch.setattr("te_overrides.kernels.granules.reference.GRANULE", GRANULE)
    shaped = [t.view(rows, 1, -1) for t in (grad, stream, x)]
    dx, partials = add.add_rmsnorm_backward_partials(*shaped, weight, rstd.view(rows, 1, 1))
    (launch,) = launch_grid({"CHAINS": (2,), "num_warps": (warps,), "enable_fp_fusion": (False,)})
    arrays = {
        "grad_ptr": _array(grad), "x_ptr": _array(x), "weight_ptr": _array(weight, x.numel()),
        "rstd_ptr": _array(rstd), "grad_residual_ptr": _array(stream), "dx_ptr": np.zeros_like(_array(dx)),
        "partial_ptr": np.zeros_like(_array(partials)),
    }  # fmt: skip
    left = execute(backward(columns, NAMES[dtype]), arch, launch, arrays, 2)
    assert_equal_bits(_tensor(left["dx_ptr"], dx), dx, f"dx on {arch}")
    assert_equal_bits(_tensor(left["partial_ptr"], partials), partials, f"partials on {arch}")
