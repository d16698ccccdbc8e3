"""dX of a column-parallel linear: both forms are what the contract says, and its sum travels while dW is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bits import assert_equal_bits
from megatron_plugins.modules import gradient_accumulation, linear
from megatron_plugins.modules.input_gradient import start_input_gradient
from megatron_plugins.parallel_layout import ParallelLayout
from te_overrides.kernels.gemm.reference import chain, lane_tree
from te_overrides.kernels.tree.reference import balanced_tree

ALONE = ParallelLayout(None, None, False)


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(12, 2, 64, generator=generator).to(torch.bfloat16)
    return grad, torch.randn(64, 24, generator=generator).to(torch.bfloat16)


def test_the_packed_form_chains_a_lane_s_gate_and_up(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    grad, weight = operands
    flat, turned = grad.view(24, 64), weight.t()
    lanes = []
    for lane in range(8):
        gate, up = slice(4 * lane, 4 * lane + 4), slice(32 + 4 * lane, 36 + 4 * lane)
        acc = chain(flat[:, up], turned[:, up], chain(flat[:, gate], turned[:, gate]))
        lanes.append(acc.to(torch.bfloat16))
    got = start_input_gradient(grad, weight, ALONE, 2, two_lane=False)()
    assert_equal_bits(got, balanced_tree(lanes).view(12, 2, 24), "packed")


def test_the_two_lane_form_adds_up_s_tree_to_gate_s(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    grad, weight = operands
    gate, up = (
        lane_tree(grad.view(24, 64)[:, cut], weight[cut].t(), tp_size=1)
        for cut in (slice(0, 32), slice(32, 64))
    )
    got = start_input_gradient(grad, weight, ALONE, 2, two_lane=True)()
    assert_equal_bits(got, (gate + up).view(12, 2, 24), "two-lane")
    packed = start_input_gradient(grad, weight, ALONE, 2, two_lane=False)()
    assert not torch.equal(got, packed)


def test_the_weight_s_gradient_is_computed_while_the_input_s_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def started(name: str, original: Any) -> Any:
        def start(*arguments: Any) -> Any:
            finish = original(*arguments)
            seen.append(f"start {name}")

            def wait() -> Any:
                seen.append(f"wait for {name}")
                return finish()

            return wait

        return start

    def deliver(*arguments: Any, original: Any = gradient_accumulation.gradient) -> Any:
        seen.append("dW")
        return original(*arguments)

    monkeypatch.setattr(linear, "start_gather_tokens", started("tokens", linear.start_gather_tokens))
    monkeypatch.setattr(linear, "start_input_gradient", started("dX", linear.start_input_gradient))
    monkeypatch.setattr(gradient_accumulation, "gradient", deliver)
    x = torch.randn(4, 1, 8, requires_grad=True)
    weight = torch.randn(16, 8, requires_grad=True)
    linear._ColumnParallel.apply(x, weight, ALONE, 1, False, False).sum().backward()
    assert seen == ["start tokens", "start dX", "wait for tokens", "dW", "wait for dX"]
    assert x.grad is not None and weight.grad is not None
