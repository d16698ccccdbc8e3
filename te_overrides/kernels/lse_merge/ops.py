"""The merge as registered torch operators: reference on a CPU, kernel on a GPU, opaque to a compiler.

A surrounding torch.compile sees `torch.ops.deterministic_rocm.*` and keeps the call as it is: it can neither fuse into
the arithmetic nor pick a variant of it. The operators work on the caller's stream and write into the caller's tensors
(`Tensor(a!)` in the schema says so to functionalization). They have no derivative: upstream calls them inside
`autograd.Function.forward`.

Names and arguments are those of `reference.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from te_overrides.kernels.devices import require_one_device
from te_overrides.kernels.lse_merge import reference

NAMESPACE = "deterministic_rocm"
_LSE = "Tensor softmax_lse_per_step"
_OUT = "Tensor(a!) out, Tensor out_per_step"
_INCREMENTAL = "Tensor old_softmax_lse, Tensor new_softmax_lse"
SCHEMAS = {
    "merge_lse_": f"(Tensor(a!) softmax_lse, {_LSE}) -> ()",
    "merge_second_half_lse_": f"(Tensor(a!) softmax_lse, {_LSE}) -> ()",
    "out_correction_init": (
        "(Tensor out_init_step, Tensor softmax_lse, Tensor softmax_lse_init_step, int seq_dim) -> Tensor"
    ),
    "out_correction_": f"({_OUT}, Tensor softmax_lse, {_LSE}, int seq_dim) -> ()",
    "second_half_out_correction_": f"({_OUT}, Tensor softmax_lse, {_LSE}, int seq_dim) -> ()",
    "incremental_out_correction_": f"({_OUT}, {_INCREMENTAL}, {_LSE}, int seq_dim) -> ()",
    "incremental_second_half_out_correction_": f"({_OUT}, {_INCREMENTAL}, {_LSE}, int seq_dim) -> ()",
    "merge_": f"(Tensor(a!) out, Tensor(b!) softmax_lse, Tensor out_per_step, {_LSE}, int seq_dim) -> ()",
}

# Operators live as long as the library object does.
_library = torch.library.Library(NAMESPACE, "DEF")


def _on_gpu(name: str) -> Callable[..., Any]:
    names = tuple(inspect.signature(getattr(reference, name)).parameters)

    def call(*args: Any) -> Any:
        # The dispatcher comes here as soon as one operand lies on a GPU.
        operands = {key: x for key, x in zip(names, args, strict=False) if isinstance(x, torch.Tensor)}
        require_one_device("LSE merge", **operands)
        # Triton is needed on a GPU alone.
        from te_overrides.kernels.lse_merge import kernel

        return getattr(kernel, name)(*args)

    return call


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, getattr(reference, name), "CPU")
        # ROCm's torch dispatches under this key as well.
        _library.impl(name, _on_gpu(name), "CUDA")
        in_place = name.endswith("_")
        _library.impl(
            name, (lambda *_: None) if in_place else (lambda out, *_: torch.empty_like(out)), "Meta"
        )


_register()

merge_lse_ = torch.ops.deterministic_rocm.merge_lse_.default
merge_second_half_lse_ = torch.ops.deterministic_rocm.merge_second_half_lse_.default
out_correction_init = torch.ops.deterministic_rocm.out_correction_init.default
out_correction_ = torch.ops.deterministic_rocm.out_correction_.default
second_half_out_correction_ = torch.ops.deterministic_rocm.second_half_out_correction_.default
incremental_out_correction_ = torch.ops.deterministic_rocm.incremental_out_correction_.default
incremental_second_half_out_correction_ = (
    torch.ops.deterministic_rocm.incremental_second_half_out_correction_.default
)
merge_ = torch.ops.deterministic_rocm.merge_.default
