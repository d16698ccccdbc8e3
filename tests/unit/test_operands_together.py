"""Operands on several devices or of several dtypes are refused by name, before an address is handed to a kernel.

A kernel is launched with addresses alone: it would read another device's as its own. The device `meta` stands for any
other one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_overrides.kernels.attention import ops as attention
from te_overrides.kernels.cross_entropy import ops as cross_entropy
from te_overrides.kernels.devices import DeviceError, DtypeError
from te_overrides.kernels.embedding import ops as embedding
from te_overrides.kernels.gemm import ops as gemm
from te_overrides.kernels.gemm.reference import LaneError
from te_overrides.kernels.lse_merge import ops as lse_merge
from te_overrides.kernels.lse_merge import reference as lse_reference
from te_overrides.kernels.rmsnorm import ops as rmsnorm
from te_overrides.kernels.rope import ops as rope
from te_overrides.kernels.swiglu import ops as swiglu


def here(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="meta")


FLOAT32, INT64 = torch.float32, torch.int64
SHAPE = (4, 1, 2, 8)  # [s, b, h, d]
Q = here(*SHAPE)
STATISTIC = here(1, 2, 4, dtype=FLOAT32)
DEVICES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "attention": (lambda: attention.attention_forward(Q, Q, there(*SHAPE), (), mask=None), "query", "value"),
    "statistics": (lambda: attention.attention_statistics(there(*SHAPE), Q, STATISTIC), "out", "grad_out"),
    "dQ": (
        lambda: attention.attention_dq(Q, Q, Q, Q, STATISTIC, there(1, 2, 4, dtype=FLOAT32), (), mask=None),
        "query", "delta",
    ),
    "dK, dV": (
        lambda: attention.attention_dkv(Q, Q, Q, there(*SHAPE), STATISTIC, STATISTIC, (), mask=None),
        "query", "grad_out",
    ),
    "loss": (
        lambda: cross_entropy.vocab_parallel_cross_entropy(here(3, 1024), there(3, dtype=INT64)),
        "logits", "target",
    ),
    "log-probability": (
        lambda: cross_entropy.vocab_parallel_log_prob(here(3, 1024), there(3, dtype=INT64)), "logits", "target",
    ),
    "lookup": (lambda: embedding.lookup(there(3, dtype=INT64), here(8, 4), 0), "weight", "ids"),
    "embedding gradient": (lambda: embedding.embedding_gradient(here(3, dtype=INT64), there(3, 4), 8), "grad", "ids"),
    "one lane": (lambda: gemm.one_lane(here(2, 8), there(3, 8)), "a", "b"),
    "gated": (lambda: gemm.gated(here(2, 8), there(4, 8), False), "a", "b"),
    "product of a gradient": (lambda: gemm.gradient(here(2, 8), there(3, 8), torch.bfloat16), "a", "b"),
    "added product": (lambda: gemm.add_one_lane_(there(2, 3, dtype=FLOAT32), here(2, 8), here(3, 8)), "a", "out"),
    "lane tree": (lambda: gemm.lane_tree(here(2, 8), there(3, 8), tp_size=1), "a", "b"),
    "norm": (lambda: rmsnorm.rmsnorm(here(2, 8), there(8), 1e-6), "x", "weight"),
    "add and norm": (lambda: rmsnorm.add_rmsnorm(here(2, 8), there(2, 8), here(8), 1e-6), "x", "residual"),
    "norm's gradient": (
        lambda: rmsnorm.rmsnorm_backward_partials(here(2, 1, 8), here(2, 1, 8), here(8), there(2, 1, 1, dtype=FLOAT32)),
        "x", "rstd",
    ),
    "gradient of add and norm": (
        lambda: rmsnorm.add_rmsnorm_backward_partials(*[here(2, 1, 8)] * 3, there(8), here(2, 1, 1, dtype=FLOAT32)),
        "residual_out", "weight",
    ),
    "RoPE": (lambda: rope.rope(here(*SHAPE), there(4, 1, 1, 8, dtype=FLOAT32)), "t", "freqs"),
    "SwiGLU's gradient": (lambda: swiglu.swiglu_packed_backward(there(2, 4), here(2, 8)), "packed", "grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_operands_on_two_devices_are_named(name: str) -> None:
    call, first, second = DEVICES[name]
    with pytest.raises(DeviceError, match="must lie on one device") as error:
        call()
    said = str(error.value)
    assert {first, second} <= set(said.replace(",", "").replace(":", "").split()), said
    assert "cpu" in said and "meta" in said


@pytest.mark.parametrize("name", lse_merge.SCHEMAS)
def test_a_merge_that_reaches_the_gpu_with_an_operand_elsewhere_is_named(name: str) -> None:
    """torch dispatches to the GPU's function as soon as one operand lies there."""
    wanted = len(
        [part for part in lse_merge.SCHEMAS[name].partition(") ->")[0].split(",") if "Tensor" in part]
    )
    operands = [here(2, 2), *[there(2, 2)] * (wanted - 1)]
    with pytest.raises(DeviceError, match="LSE merge: .* lies on cpu, .* on meta"):
        lse_merge._on_gpu(name)(*operands, 1)
    assert callable(getattr(lse_reference, name))


DTYPES: dict[str, tuple[Callable[[], Any], type[ValueError], tuple[str, ...]]] = {
    "one lane": (lambda: gemm.one_lane(here(2, 8), here(3, 8, dtype=FLOAT32)), LaneError, ("bfloat16", "float32")),
    "lane tree": (
        lambda: gemm.lane_tree(here(2, 8), here(3, 8, dtype=torch.float16), tp_size=1),
        LaneError, ("bfloat16", "float16"),
    ),
    "dQ": (
        lambda: attention.attention_dq(Q, Q, Q, Q.float(), STATISTIC, STATISTIC, (), mask=None),
        DtypeError, ("query", "bfloat16", "grad_out", "float32"),
    ),
    "statistics": (
        lambda: attention.attention_statistics(Q.float(), Q, STATISTIC), DtypeError, ("out", "bfloat16", "float32"),
    ),
    "norm's gradient": (
        lambda: rmsnorm.rmsnorm_backward_partials(
            here(2, 1, 8, dtype=FLOAT32), here(2, 1, 8), here(8), here(2, 1, 1, dtype=FLOAT32)
        ),
        DtypeError, ("x", "bfloat16", "grad", "float32"),
    ),
    "gradient of add and norm": (
        lambda: rmsnorm.add_rmsnorm_backward_partials(
            here(2, 1, 8), here(2, 1, 8, dtype=FLOAT32), here(2, 1, 8), here(8), here(2, 1, 1, dtype=FLOAT32)
        ),
        DtypeError, ("residual_out", "bfloat16", "grad_residual_out", "float32"),
    ),
    "SwiGLU's gradient": (
        lambda: swiglu.swiglu_packed_backward(here(2, 4, dtype=FLOAT32), here(2, 8)),
        DtypeError, ("packed", "bfloat16", "float32"),
    ),
    "loss": (
        lambda: cross_entropy.vocab_parallel_cross_entropy(here(3, 1024), here(3, dtype=torch.int32)),
        ValueError, ("bfloat16", "int32", "int64 targets"),
    ),
    "ids": (lambda: embedding.lookup(here(3), here(8, 4), 0), ValueError, ("bfloat16", "int64")),
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_operands_of_two_dtypes_are_named(name: str) -> None:
    call, kind, words = DTYPES[name]
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_what_may_differ_is_taken() -> None:
    """A float32 weight beside 16-bit rows; ids of 32 bits, which a large table's addresses would overflow."""
    y, _ = rmsnorm.rmsnorm(here(2, 8), here(8, dtype=FLOAT32), 1e-6)
    assert y.dtype == torch.bfloat16
    ids = torch.tensor([1, 0, 2], dtype=torch.int32)
    assert embedding.lookup(ids, torch.eye(4), 0).tolist() == torch.eye(4)[[1, 0, 2]].tolist()
    assert embedding.embedding_gradient(ids, torch.eye(3), 3).tolist() == torch.eye(3)[[1, 0, 2]].tolist()


def test_operands_of_other_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"packed is \(2, 8\), grad \(3, 4\)"):
        swiglu.swiglu_packed_backward(here(3, 4), here(2, 8))
    with pytest.raises(ValueError, match=r"ids are \(2,\), grad \(3, 4\)"):
        embedding.embedding_gradient(here(2, dtype=INT64), here(3, 4), 8)
