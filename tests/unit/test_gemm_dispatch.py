"""A product goes to the Hopper kernel where that one computes the same; what it is asked for is what is returned."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon._runtime", reason="Gluon comes with Triton 3.6")

from bits import assert_equal_bits  # noqa: E402
from te_overrides.kernels.gemm import hopper, ops, reference  # noqa: E402


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The reference in place of the Hopper kernel, on CPU tensors."""

    def product(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, count: int = 1, segments: int = 1,
        positive: bool = False, add: bool = False,
    ) -> None:  # fmt: skip
        sizes = [a.shape[1] // segments] * segments
        value = reference.lane_tree(a, b, tp_size=8 // count, dtype=out.dtype, segments=sizes)
        value = value.add(0.0) if positive else value
        out.copy_(out + value if add else value)

    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(hopper, "product", product)
    return ops


A, B = (torch.randn(72, 512, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))


@pytest.mark.parametrize(
    ("dtype", "asked"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {}),
        (torch.bfloat16, {"positive": True}),
        (torch.bfloat16, {"lane": torch.bfloat16, "count": 8}),
        (torch.bfloat16, {"count": 4, "segments": 2}),
        (torch.bfloat16, {"count": 1, "segments": 2}),
    ],
)
def test_what_it_takes_has_the_bits_of_the_reference(
    kernel: ModuleType, dtype: torch.dtype, asked: dict[str, Any]
) -> None:
    got = kernel._by_hopper(A, B, dtype, **asked)
    segments = asked.get("segments", 1)
    want = reference.lane_tree(
        A, B, tp_size=8 // asked.get("count", 1), dtype=dtype, segments=[512 // segments] * segments
    )
    assert got.dtype == dtype
    assert_equal_bits(got, want.add(0.0) if asked.get("positive") else want, f"{dtype} {asked}")


@pytest.mark.parametrize("count", [1, 8])
def test_lanes_in_float32_are_left_to_the_portable_kernel(kernel: ModuleType, count: int) -> None:
    assert kernel._by_hopper(A, B, torch.float32, lane=torch.float32, count=count) is None


def test_another_16_bit_dtype_is_left_to_the_portable_kernel(kernel: ModuleType) -> None:
    assert kernel._by_hopper(A, B, torch.float16) is None


def test_a_gpu_without_these_kernels_asks_for_none(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: False)
    assert kernel._by_hopper(A, B, torch.bfloat16) is None
