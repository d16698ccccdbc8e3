"""The kernels of loss and embedding as compiled for AMD GPUs: nothing spilled or contracted, and the reference's bits.

The loss's gradient is elementwise: the audit executes its code, for several launches.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from bits import assert_equal_bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_overrides.audit.api import execute
from te_overrides.audit.compile import Kernel, launch_grid
from te_overrides.kernels.cross_entropy import kernel, reference
from te_overrides.kernels.embedding import kernel as embedding_kernel

ARCHITECTURES = ["gfx942", "gfx950"]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
WIDTH = 48
FLOAT32 = ("known_ptr", "sum_ptr", "peak_ptr", "total_ptr", "grad_ptr", "out_ptr")
INT64 = ("target_ptr", "ids_ptr", "order_ptr")
LANES = {"LANES_HERE": 8, "LANES_ALL": 8}
KERNELS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any], int]] = {
    "peaks": (kernel.peaks_kernel, ("logits_ptr",), {"LANES_HERE": 8, "BLOCK": kernel.PEAKS[0]}, kernel.PEAKS[1]),
    "sums": (
        kernel.sums_kernel,
        ("logits_ptr",),
        LANES | {"WIDTH": 19008, "BLOCK_LEVELS": kernel.SUMS[0].bit_length() - 1, "MORE_LEVELS": 6, "NARROW": False},
        64,
    ),
    "finish": (
        kernel.finish_kernel, (), LANES | {"WIDTH": 19008, "LEVELS": 3, "NEGATE": True, "ROWS": kernel.FINISH[0]},
        kernel.FINISH[1],
    ),
    "gradient": (
        kernel.grad_kernel,
        ("logits_ptr", "out_ptr"),
        {"BLOCK": kernel.GRADIENT[0], "NEGATE": True, "NARROW": False},
        kernel.GRADIENT[1],
    ),
    "lookup": (
        embedding_kernel.lookup_kernel, ("weight_ptr", "out_ptr"), {"BLOCK": embedding_kernel.BLOCK},
        embedding_kernel.THREADS,
    ),
    "embedding gradient": (
        embedding_kernel.gradient_kernel,
        ("grad_ptr",),
        {"BLOCK": embedding_kernel.BLOCK, "AHEAD": embedding_kernel.AHEAD},
        embedding_kernel.THREADS,
    ),
}  # fmt: skip


def compiled(name: str, dtype: str, target: GPUTarget, **changed: Any) -> triton.compiler.CompiledKernel:
    function, typed, constants, threads = KERNELS[name]
    constants = constants | changed
    types = dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(INT64, "*i64") | dict.fromkeys(typed, dtype)
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in function.arg_names}
    pointers = [i for i, n in enumerate(signature) if n.endswith("_ptr")]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": max(threads // target.warp_size, 1), "num_stages": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES.values())
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_for_amd_nothing_spills_or_is_fused(arch: str, dtype: str, name: str) -> None:
    assembly = compiled(name, dtype, GPUTarget("hip", arch, 64)).asm["amdgcn"]
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", assembly)
    assert len(spilled) == 2 and set(spilled) == {"0"}
    assert not re.search(r"v_(?:pk_)?(?:fma_mix(?:lo|hi)_f16|fmac?_f32)", assembly)
    assert "global_atomic" not in assembly


@pytest.mark.parametrize("dtype", NAMES.values())
def test_compiled_for_hopper_the_fused_exponential_has_fourteen_operations(dtype: str) -> None:
    """Eight elements a thread: what the header of `narrow.py` counts, and no library call."""
    ptx = compiled("sums", dtype, GPUTarget("cuda", 90, 32), NARROW=True).asm["ptx"]
    found = re.findall(r"^\s*(fma|add|sub|mul|div)\.(?:rn|rz)?\.?f64", ptx, re.M)
    assert len(found) == 8 * 14, len(found)
    assert not re.search(r"fma\.rn\.f32|\bcall\b", ptx)


def subject(dtype: str) -> Kernel:
    """The gradient, one program a row; rows are what the audit counts as elements."""
    rows = ("target_ptr", "grad_ptr", "peak_ptr", "total_ptr")
    return Kernel(
        kernel.grad_kernel,
        {"logits_ptr": dtype, "target_ptr": "*i64"}
        | dict.fromkeys(rows[1:], "*fp32")
        | {"out_ptr": dtype}
        | dict.fromkeys(("stride", "first", "valid", "width"), "i32"),
        block="BLOCK",
        scalars={"stride": WIDTH, "first": WIDTH, "valid": WIDTH - 5, "width": WIDTH},
        constexprs={"NEGATE": True, "NARROW": False},
        sizes={"logits_ptr": WIDTH, "out_ptr": WIDTH} | dict.fromkeys(rows, 1),
        programs=lambda _, n: n,
    )


def launches(*blocks: int, warps: tuple[int, ...]) -> list[Any]:
    return launch_grid({"BLOCK": blocks, "num_warps": warps, "enable_fp_fusion": (False,)})


def _array(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1).copy()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize(
    ("block", "warps"), [(64, 1), (512, 2), (kernel.GRADIENT[0], kernel.GRADIENT[1] // 64)]
)
def test_the_gradient_for_amd_gpus_has_the_reference_s_bits(
    arch: str, dtype: torch.dtype, block: int, warps: int
) -> None:
    """The second of two ranks, five of its columns padding."""
    rows = 4
    generator = torch.Generator().manual_seed(0)
    whole = (4.0 * torch.randn(rows, 1024, generator=generator)).to(dtype)
    whole[1, 50], whole[2, 60] = -torch.inf, torch.nan
    target = torch.tensor([WIDTH + 3, 0, WIDTH, WIDTH + 46])
    grad = torch.tensor([1.0, -0.25, 3e-5, 0.0])
    # The row's maximum and total are the reference's, over columns of which the kernel is given a part.
    masked = whole.clone()
    masked[:, 2 * WIDTH - 5 :] = -torch.inf
    leaf = masked.requires_grad_()
    reference.vocab_parallel_cross_entropy(leaf, target).backward(grad)
    assert leaf.grad is not None
    want = leaf.grad[:, WIDTH : 2 * WIDTH].contiguous()
    peak, total = _statistics(masked.detach())
    arrays = {
        "logits_ptr": _array(whole[:, WIDTH : 2 * WIDTH].contiguous()), "target_ptr": target.numpy().copy(),
        "grad_ptr": grad.numpy().copy(), "peak_ptr": peak.numpy().copy(), "total_ptr": total.numpy().copy(),
        "out_ptr": np.zeros_like(_array(want)),
    }  # fmt: skip
    (launch,) = launches(block, warps=(warps,))
    left = execute(subject(NAMES[dtype]), arch, launch, arrays, rows)["out_ptr"]
    got = torch.from_numpy(left[: want.numel()].copy()).view(dtype).view(want.shape)
    assert_equal_bits(got, want, f"gradient on {arch}")


def _statistics(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's largest logit and total of each row."""
    found: list[torch.Tensor] = []

    class Context:
        def save_for_backward(self, *tensors: torch.Tensor) -> None:
            found.extend(tensors)

    target = torch.zeros(len(logits), dtype=torch.int64)
    reference.VocabParallelLogProb.forward(Context(), logits, target, None, None)  # type: ignore[arg-type]
    return found[1], found[2]
