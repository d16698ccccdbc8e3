"""The Hopper GEMM compiles without a GPU: the matrix instruction of the numerics class, accumulators in registers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
pytest.importorskip("triton.experimental.gluon._runtime", reason="Gluon comes with Triton 3.6")

from hopper_code import compiled, stack  # noqa: E402
from te_overrides.kernels.gemm import hopper, hopper_gated  # noqa: E402

# Bytes of stack that loop counters may take; one register of an accumulator too many would be hundreds.
SCALARS = 16
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
PLAIN = {
    "SEGMENTS": 1,
    "A_K": True,
    "B_K": True,
    "WIDE": False,
    "ADD": False,
    "POSITIVE": False,
}


def built(dtype: torch.dtype, block_n: int, lanes: int, **more: Any) -> Any:
    """One variant, as `hopper.product` launches it."""
    flags = PLAIN | more
    rows = 1 if block_n == 128 else 10**6
    tile = hopper.launch(rows, 4096, lanes, flags["WIDE"], 132)
    assert tile["BN"] == block_n
    blocks = {
        "a": [64, 64],
        "b": [block_n, 64] if flags["B_K"] else [64, block_n],
        "c": [64, tile["CN"]],
    }

    def descriptor(name: str) -> str:
        return f"tensordesc<{NAMES[dtype]}{blocks[name]},{hopper.layout_of(tuple(blocks[name]), dtype)!r}>"

    function = hopper.gemm_kernel
    constants = tile | flags | {
        "BM": 128, "BK": 64, "LANES": lanes, "DTYPE": hopper.GL_DTYPE[dtype],
        "C_LAYOUT": hopper.layout_of(tuple(blocks["c"]), dtype),
    }  # fmt: skip
    types = {name: descriptor(name) for name in blocks} | {"scratch": f"*{NAMES[dtype]}"}
    if flags["WIDE"]:
        types |= {"c": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    return compiled(function, signature, constants, ("stride",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "block_n", "lanes", "more"),
    [
        (torch.bfloat16, 256, 1, {}),
        (torch.bfloat16, 256, 8, {}),
        (torch.bfloat16, 128, 8, {}),
        (torch.float16, 256, 8, {}),
        (torch.bfloat16, 256, 4, {}),
        (torch.bfloat16, 256, 8, {"SEGMENTS": 2, "B_K": False}),
        (torch.bfloat16, 256, 1, {"A_K": False, "B_K": False, "POSITIVE": True}),
        (torch.bfloat16, 256, 1, {"A_K": False, "B_K": False, "WIDE": True}),
    ],
)  # fmt: skip
def test_it_compiles_to_one_instruction_without_spilled_accumulators(
    dtype: torch.dtype, block_n: int, lanes: int, more: dict[str, Any]
) -> None:
    kernel = built(dtype, block_n, lanes, **more)
    found = set(
        re.findall(r"(wgmma\.mma_async|mma\.sync)\S*?\.m64n(\d+)k16\.f32\.(bf16|f16)\.", kernel.asm["ptx"])
    )
    assert found == {("wgmma.mma_async", str(block_n), "bf16" if dtype == torch.bfloat16 else "f16")}
    assert not re.search(r"\b(?:red|atom)\.(?:global|shared)", kernel.asm["ptx"])
    assert stack(kernel) <= SCALARS
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.slow
def test_the_epilogue_that_adds_compiles() -> None:
    """Spills once a tile, outside the loop over K."""
    kernel = built(torch.bfloat16, 256, 1, A_K=False, B_K=False, WIDE=True, ADD=True)
    assert kernel.metadata.shared <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(("block_n", "keep"), [(256, False), (256, True), (128, True)])
def test_the_gated_product_compiles_to_one_instruction_without_spilled_accumulators(
    block_n: int, keep: bool
) -> None:
    function, tile = hopper_gated.gated_kernel, hopper_gated.launch(1 if block_n == 128 else 10**6, 8192, 132)
    assert tile["BN"] == block_n
    side = block_n // 2
    blocks = {"a": [64, 64], "b": [side, 64], "c": [64, side], "packed": [64, side]}
    constants = tile | {
        "BM": 128, "BK": 64, "A_K": True, "DTYPE": hopper.GL_DTYPE[torch.bfloat16], "KEEP": keep,
        "C_LAYOUT": hopper.layout_of((64, side), torch.bfloat16),
    }  # fmt: skip
    types = {
        name: f"tensordesc<bf16{block},{hopper.layout_of(tuple(block), torch.bfloat16)!r}>"
        for name, block in blocks.items()
    } | dict.fromkeys(constants, "constexpr")
    kernel = compiled(function, {name: types.get(name, "i32") for name in function.arg_names}, constants)
    found = set(re.findall(r"wgmma\.mma_async\S*?\.m64n(\d+)k16\.f32\.bf16\.", kernel.asm["ptx"]))
    assert found == {str(block_n)}
    # The activation may need a few more registers than there are, once a tile; an accumulator would be 64 bytes and up.
    assert stack(kernel) <= 4 * SCALARS
    assert kernel.metadata.shared <= 227 * 1024


def test_what_it_cannot_take_is_said() -> None:
    a, b = torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(256, 512, dtype=torch.bfloat16)
    assert hopper.obstacle(a, b, count=8) is None
    assert hopper.obstacle(a.t().contiguous().t(), b.t().contiguous().t()) is None
    for words, x, y, more in (
        ("operands of torch.float32", a.float(), b.float(), {}),
        ("lanes of torch.float32", a, b, {"count": 8, "lane": torch.float32}),
        ("lanes of torch.float32", a, b, {"count": 1, "lane": torch.float32}),
        ("16 lanes", a, b, {"count": 16}),
        ("(256, 512) with torch.float16", a, b.half(), {}),
        ("(256, 512) with torch.bfloat16 (256, 448)", a, b[:, :448], {}),
        ("too small", a[:64], b, {}),
        ("no multiple of 64", a[:, :496], b[:, :496], {"count": 8}),
        ("strides (1024, 2)", torch.zeros(256, 1024, dtype=torch.bfloat16)[:, ::2], b, {}),
        ("the first operand", a[:, 1:449], b[:, :448], {}),
        ("100 columns", a, b[:100], {}),
    ):
        assert words in (hopper.obstacle(x, y, **more) or ""), words  # type: ignore[arg-type]
    assert hopper_gated.obstacle(a, b) is None
    assert "no multiple of 16 bytes" in (hopper_gated.obstacle(a, b[:200]) or "")
    assert "not contiguous" in (hopper_gated.obstacle(a, b.t().contiguous().t()) or "")
