"""A weight gradient reaches Megatron as its own linears would hand it over."""

from __future__ import annotations

import pytest
import torch

from megatron_plugins.modules.gradient_accumulation import deliver


def test_fused_accumulation_adds_float32_into_main_grad_and_says_so() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.main_grad = torch.full((4,), 1.0)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    grad = torch.full((4,), 2.0**-20)
    handed = deliver(weight, grad, fused=True)
    assert handed.dtype is torch.bfloat16 and not handed.any()
    # 2^-20 is lost in bf16 next to 1, not in float32.
    assert torch.equal(weight.main_grad, torch.full((4,), 1.0 + 2.0**-20))
    assert weight.grad_added_to_main_grad


def test_fused_accumulation_without_a_buffer_is_refused_with_the_way_out() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(RuntimeError, match="gradient_accumulation_fusion.*DistributedDataParallel"):
        deliver(weight, torch.ones(4), fused=True)


def test_zeros_are_positive_after_rounding() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    handed = deliver(weight, torch.tensor([-1e-30, -0.0, 1.0]), fused=False)
    assert handed.dtype is torch.float16
    assert torch.equal(handed.view(torch.int16), torch.tensor([0.0, 0.0, 1.0]).half().view(torch.int16))
