"""RoPE's kernels and those of sums over tokens as compiled for AMD GPUs: one expression an element over launches, the
references' bits, nothing spilled, nothing contracted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from bits import assert_equal_bits

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from te_overrides.audit.api import audit, execute
from te_overrides.audit.compile import Kernel, compile_kernel, launch_grid
from te_overrides.kernels.granules import kernel as granules
from te_overrides.kernels.granules import reference as granules_reference
from te_overrides.kernels.rope import kernel as rope
from te_overrides.kernels.rope.reference import Rope

ARCHITECTURES = ["gfx942", "gfx950"]
NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
COLUMNS, ROTATED, HEADS = 40, 24, 2
GRANULE = 4
"""A quarter of the contract's, so that the audit unrolls a quarter of the rows."""


def rotation(
    dtype: str, interleaved: bool, transpose: bool, columns: int = COLUMNS, rotated: int = ROTATED
) -> Kernel:
    """As many rows as the audit has elements, of HEADS heads a position."""
    tensors = ("t_ptr", "cos_ptr", "sin_ptr", "out_ptr")
    return Kernel(
        rope.rotate_kernel,
        dict.fromkeys(tensors, dtype) | dict.fromkeys(("rows", "rows_of_a_position", "t_stride", "columns"), "i32"),
        constexprs={
            "ROTATED": rotated, "WIDTH": 16 if rotated < 64 else 64, "REST": 16 if columns > rotated else 0,
            "INTERLEAVED": interleaved, "TRANSPOSE": transpose, "NATIVE": False,
        },
        block="ROWS",
        scalars={
            "rows": lambda _, n: n, "rows_of_a_position": HEADS, "t_stride": columns, "columns": columns,
        },
        sizes={"t_ptr": columns, "out_ptr": columns, "cos_ptr": rotated, "sin_ptr": rotated},
    )  # fmt: skip


def tables(dtype: str) -> Kernel:
    return Kernel(
        rope.table_kernel,
        {"angles_ptr": "*fp32", "cos_ptr": dtype, "sin_ptr": dtype, "elements": "i32"},
        constexprs={"MSCALE": 1.0, "NATIVE": False},
        block="BLOCK",
        scalars={"elements": lambda _, n: n},
    )


def chains(dtype: str, columns: int) -> Kernel:
    """As many granules as the audit has elements."""
    return Kernel(
        granules.chain_kernel,
        {"terms_ptr": dtype, "out_ptr": "*fp32"} | dict.fromkeys(("positions", "inners", "columns"), "i32"),
        constexprs={"GRANULE": GRANULE},
        block="COLUMNS",
        scalars={"positions": lambda _, n: GRANULE * n, "inners": 1, "columns": columns},
        sizes={"terms_ptr": GRANULE * columns, "out_ptr": columns},
        programs=lambda _, n: n,
    )


def tree(columns: int, levels: int) -> Kernel:
    """2^levels terms of as many columns as the audit has elements."""
    return Kernel(
        granules.tree_kernel,
        {"x_ptr": "*fp32", "out_ptr": "*fp32"}
        | dict.fromkeys(("terms", "columns", "groups", "terms_of_a_sequence", "granule_stride"), "i32"),
        constexprs={"LEVELS": levels},
        block="COLUMNS",
        scalars={
            "terms": 1 << levels, "columns": columns, "groups": 1, "terms_of_a_sequence": 1 << levels,
            "granule_stride": columns,
        },
        sizes={"x_ptr": 1 << levels, "out_ptr": 1},
        programs=lambda _, n: 1,
    )  # fmt: skip


def launches(block: str, *blocks: int, warps: tuple[int, ...]) -> list[Any]:
    return launch_grid({block: blocks, "num_warps": warps, "enable_fp_fusion": (False,)})


def shipped() -> list[tuple[Kernel, Any]]:
    """Every kernel with the launch that runs."""
    (table,) = launches("BLOCK", rope.TABLE_BLOCK, warps=(rope.TABLE_THREADS // 64,))
    (turn,) = launches("ROWS", rope.PAIRS // 64, warps=(rope.THREADS // 64,))
    (chain,) = launches("COLUMNS", granules.CHAIN_COLUMNS, warps=(granules.CHAIN_THREADS // 64,))
    width = min(granules.ELEMENTS >> granules.MOST_LEVELS, granules.MOST_COLUMNS)
    (sums,) = launches("COLUMNS", width, warps=(granules.THREADS // 64,))
    found = [(tree(4096, granules.MOST_LEVELS), sums)]
    for dtype in NAMES.values():
        found += [(tables(dtype), table), (chains(dtype, 4096), chain)]
        found += [(rotation(dtype, *form, 128, 128), turn) for form in ((False, False), (True, True))]
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_runs_neither_spills_nor_contracts(arch: str) -> None:
    for kernel, launch in shipped():
        assembly = compile_kernel(kernel, arch, launch).assembly
        name = f"{kernel.name} {launch}"
        spilled = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", assembly)
        assert len(spilled) == 2 and set(spilled) == {"0"}, name
        assert re.findall(r"\.private_segment_fixed_size:\s+(\d+)", assembly) == ["0"], name
        # float16 widened on the way: a factor of one leaves a sum, an addend of -0 a product, of one rounding each.
        fused = [
            line
            for line in re.findall(r"v_(?:pk_)?(?:fma|fmac)_(?:mix|f64|f32)\w*.*", assembly)
            if not re.search(r"v_fma_mix_f32 .*(?:, 1\.0, |, neg\(0\) )", line)
        ]
        assert not fused, (name, fused)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("interleaved", "transpose"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("dtype", ["*bf16", "*fp16"])
def test_a_rotation_is_one_expression(arch: str, dtype: str, interleaved: bool, transpose: bool) -> None:
    # For two pairs a thread LLVM writes the integers of the rounding otherwise: other expressions, equal bits (below).
    grid = [*launches("ROWS", 4, warps=(1, 2)), *launches("ROWS", 16, warps=(1, 2, 4))]
    result = audit(rotation(dtype, interleaved, transpose), arch, grid, elements=4)
    assert result.one_class, (len(result.groups), dict(result.unknown))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_tree_of_granules_is_one_expression(arch: str) -> None:
    grid = launches("COLUMNS", 4, 16, warps=(1, 4))
    result = audit(tree(4, 5), arch, grid, elements=4)
    assert result.one_class, (len(result.groups), dict(result.unknown))


def _array(x: torch.Tensor, length: int = 0) -> np.ndarray:
    flat = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().reshape(-1)
    return np.concatenate([flat, np.zeros(max(0, length - flat.size), flat.dtype)])


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array[: like.numel()].copy()).view(like.dtype).view(like.shape)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize(("block", "warps"), [(4, 2), (8, 1)])
def test_rope_for_amd_gpus_has_the_reference_s_bits(
    arch: str, dtype: torch.dtype, block: int, warps: int
) -> None:
    rows, generator = 8, torch.Generator().manual_seed(0)
    positions = rows // HEADS
    t, grad = (torch.randn(positions, 1, HEADS, COLUMNS, generator=generator).to(dtype) for _ in range(2))
    t[0, 0, 0, :7] = torch.tensor([0.0, -0.0, 1e-40, 3e38, torch.inf, -torch.inf, torch.nan]).to(dtype)
    freqs = torch.randn(positions, 1, 1, ROTATED, generator=generator) * 1e4
    freqs[0, 0, 0, :3] = torch.tensor([0.0, 2.0**20, 1e-30])
    (by_table,) = launches("BLOCK", 64, warps=(1,))
    blank = torch.zeros(freqs.shape, dtype=dtype)
    arrays = {"angles_ptr": _array(freqs), "cos_ptr": _array(blank), "sin_ptr": _array(blank)}
    left = execute(tables(NAMES[dtype]), arch, by_table, arrays, freqs.numel())
    c, s = (_tensor(left[name], blank) for name in ("cos_ptr", "sin_ptr"))
    for interleaved in (False, True):
        leaf = t.clone().requires_grad_()
        want = Rope.apply(leaf, freqs, interleaved, 1.0)
        want.backward(grad)
        assert leaf.grad is not None
        for transpose, x, wanted in ((False, t, want.detach()), (True, grad, leaf.grad)):
            (launch,) = launches("ROWS", block, warps=(warps,))
            arrays = {
                "t_ptr": _array(x), "cos_ptr": _array(c, rows * ROTATED), "sin_ptr": _array(s, rows * ROTATED),
                "out_ptr": _array(torch.zeros_like(x)),
            }  # fmt: skip
            got = execute(rotation(NAMES[dtype], interleaved, transpose), arch, launch, arrays, rows)[
                "out_ptr"
            ]
            assert_equal_bits(_tensor(got, wanted), wanted, f"{interleaved} {transpose} on {arch}")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_over_tokens_for_amd_gpus_have_the_reference_s_bits(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_overrides.kernels.granules.reference.GRANULE", GRANULE)
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(3 * GRANULE, 1, 40, generator=generator).to(torch.bfloat16)
    terms[:, 0, 0], terms[0, 0, 1:3] = -0.0, torch.tensor([1e-40, torch.inf]).to(torch.bfloat16)
    want = granules_reference.granule_partials(terms)
    (launch,) = launches("COLUMNS", 64, warps=(1,))
    arrays = {"terms_ptr": _array(terms), "out_ptr": _array(torch.zeros_like(want))}
    left = execute(chains("*bf16", 40), arch, launch, arrays, 3)
    assert_equal_bits(_tensor(left["out_ptr"], want), want, f"chains on {arch}")
    partials = torch.randn(32, 1, 4, generator=generator)
    partials[0, 0], partials[:, 0, 3] = torch.tensor([1e30, -1e30, torch.nan, -0.0]), -0.0
    wanted = granules_reference.sum_granules(partials)
    (launch,) = launches("COLUMNS", 4, warps=(2,))
    arrays = {"x_ptr": _array(partials), "out_ptr": _array(torch.zeros(4))}
    left = execute(tree(4, 5), arch, launch, arrays, 4)
    assert_equal_bits(_tensor(left["out_ptr"], wanted), wanted, f"tree on {arch}")
