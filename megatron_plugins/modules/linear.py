"""Column- and row-parallel linears in the contract's orders (docs/numbers.md, "Eight lanes", "Tokens").

Column-parallel: the forward is one chain a rank, dX is the eight-lane contraction over output rows, finished by the
tree over TP. Row-parallel: the forward is the eight-lane contraction over inputs, dX is one chain. dW is one chain over
all tokens, owned by rows over context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_plugins.collectives.ownership import (
    bias_gradient,
    gather_tokens,
    start_gather_tokens,
    sum_over_tp,
)
from megatron_plugins.modules.gradient_accumulation import rounded, start_weight_gradient_delivery
from megatron_plugins.modules.guard import require_supported
from megatron_plugins.modules.input_gradient import start_input_gradient
from megatron_plugins.modules.norm import DeterministicRMSNorm, normalize
from megatron_plugins.modules.norm_functions import NormTerms
from megatron_plugins.packed_order import of_batch
from megatron_plugins.parallel_layout import ParallelLayout, layout_of
from te_overrides.kernels.collectives.transport import all_gather
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.gemm.ops import gated, lane_tree, one_lane
from te_overrides.kernels.swiglu.ops import swiglu_packed_backward


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _ColumnParallel(torch.autograd.Function):
    """x [s(/TP), B, K], weight [N / TP, K] -> [s, B, N / TP]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layout: ParallelLayout, segments: int, two_lane: bool,
        fused: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.segments, ctx.two_lane, ctx.fused = layout, segments, two_lane, fused
        full = gather_tokens(x, layout)
        return one_lane(_flat(full), weight).view(*full.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_column_gradients(ctx, grads[0], x, weight, ctx.segments), None, None, None, None


def _column_gradients(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, segments: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX [s(/TP), B, K] and dW [N / TP, K] of a column-parallel product for `grad` [s, B, N / TP]."""
    layout: ParallelLayout = ctx.layout
    dx = dw = None
    # Operands of dW travel while dX is computed, dX's sum while dW is.
    if ctx.needs_input_grad[1]:
        gathered = start_gather_tokens(x, layout)
        delivered = start_weight_gradient_delivery(weight, gathered, grad, layout, ctx.fused)
    if ctx.needs_input_grad[0]:
        reduced = start_input_gradient(grad, weight, layout, segments, ctx.two_lane)
    if ctx.needs_input_grad[1]:
        dw = delivered()
    if ctx.needs_input_grad[0]:
        dx = reduced()
    return dx, dw


class _GatedColumnParallel(torch.autograd.Function):
    """x [s(/TP), B, K], weight [gate; up] [2 I / TP, K] -> SwiGLU of both projections, [s, B, I / TP]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layout: ParallelLayout, two_lane: bool, fused: bool
    ) -> torch.Tensor:
        ctx.layout, ctx.two_lane, ctx.fused = layout, two_lane, fused
        full = gather_tokens(x, layout)
        out, packed = gated(_flat(full), weight, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(x, weight, packed)
        return out.view(*full.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight, packed = ctx.saved_tensors
        inner = swiglu_packed_backward(_flat(grad), packed).view(*grad.shape[:-1], weight.shape[0])
        return *_column_gradients(ctx, inner, x, weight, 2), None, None, None


class _RowParallel(torch.autograd.Function):
    """x [s, B, K / TP], weight [N, K / TP] -> [s(/TP), B, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, layout: ParallelLayout, fused: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout, ctx.fused = layout, fused
        partial = lane_tree(_flat(x), weight, tp_size=layout.tp_size).view(*x.shape[:-1], weight.shape[0])
        return sum_over_tp(partial, layout, layout.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layout: ParallelLayout = ctx.layout
        grad = gather_tokens(grads[0].contiguous(), layout)
        dx = dw = None
        # Operands of dW travel while dX is computed.
        if ctx.needs_input_grad[1]:
            delivered = start_weight_gradient_delivery(weight, lambda: x, grad, layout, ctx.fused)
        if ctx.needs_input_grad[0]:
            dx = one_lane(_flat(grad), weight.t()).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            dw = delivered()
        return dx, dw, None, None


class BiasAdd(torch.autograd.Function):
    """``x + bias`` with one rounding; the bias's gradient by granules.

    x [s, B, C], bias [C]. `tokens_over_tp`: x holds this TP rank's share of the tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, layout: ParallelLayout, tokens_over_tp: bool
    ) -> torch.Tensor:
        ctx.layout, ctx.tokens_over_tp, ctx.bias_dtype = layout, tokens_over_tp, bias.dtype
        return torch.add(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        dbias = None
        if ctx.needs_input_grad[1]:
            total = bias_gradient(grad, ctx.layout, tokens_over_tp=ctx.tokens_over_tp)
            dbias = rounded(total, ctx.bias_dtype)
        return grad, dbias, None, None


class _GatherColumns(torch.autograd.Function):
    """[..., C / TP] to [..., C] in rank order; the gradient is this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: ParallelLayout) -> torch.Tensor:
        ctx.layout, ctx.width = layout, x.shape[-1]
        return torch.cat(all_gather(x.contiguous(), layout.tp_group), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        start = ctx.layout.tp_rank * ctx.width
        return grads[0][..., start : start + ctx.width].contiguous(), None


class DeterministicColumnParallelLinear(ColumnParallelLinear):
    """Megatron's ColumnParallelLinear with layout-invariant arithmetic. Same constructor, parameters, checkpoints."""

    gradient_segments = 1
    """Packed parts of the output rows: 2 for ``[gate; up]`` (set by the MLP that knows)."""
    two_lane_gradient = False
    """Whether the parts' input gradients are reduced one by one (set by the MLP that was chosen for it)."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.adopt()

    def adopt(self) -> None:
        """Check what the contract covers and read the groups. Also called when an upstream instance is taken over.

        Raises:
            NotCoveredError: MoE experts, deferred weight gradients, CPU offloading.
        """
        require_supported(self.config, is_expert=self.is_expert)
        self.layout = layout_of(self.config, self.tp_group)

    def _before(self, input_: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the weight."""
        return input_

    def _multiplied(self, input_: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`_before`, in the weight's dtype where the residual stream is float32 by configuration, as TE's linears do.

        Any other difference of dtypes is refused by the product.
        """
        x = self._before(input_)
        return x.to(weight.dtype) if self.config.fp32_residual_connection else x

    @eager_only
    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ [s(/TP), B, K] -> ([s, B, N / TP] or [s, B, N] when gathered, bias or None)."""
        weight = self.weight if weight is None else weight
        if weight is None or tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            want = (self.output_size_per_partition, self.input_size)
            found = None if weight is None else tuple(weight.shape)
            raise ValueError(
                f"{type(self).__name__} needs a weight of shape {want}, got {found}: pass `weight=` when the layer "
                "allocates none."
            )
        out = _ColumnParallel.apply(
            self._multiplied(input_, weight), weight, of_batch(self.layout), self.gradient_segments,
            self.two_lane_gradient, self.config.gradient_accumulation_fusion,
        )  # fmt: skip
        if self.bias is not None and not self.skip_bias_add:
            out = BiasAdd.apply(out, self.bias, of_batch(self.layout), False)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather and self.layout.tp_size > 1:
            out = _GatherColumns.apply(out, self.layout)
        return out, (self.bias if self.skip_bias_add else None)

    def gated(self, input_: torch.Tensor) -> torch.Tensor:
        """SwiGLU of this projection onto packed ``[gate; up]`` rows, in one kernel on a GPU: same bits as one by one.

        Args:
            input_: [s(/TP), B, K].

        Returns:
            [s, B, I / TP].

        Raises:
            ValueError: a layer with a bias, which belongs between the two.
        """
        if self.bias is not None:
            raise ValueError(f"{type(self).__name__} has a bias: call it, add the bias, then the activation.")
        out: torch.Tensor = _GatedColumnParallel.apply(
            self._multiplied(input_, self.weight), self.weight, of_batch(self.layout), self.two_lane_gradient,
            self.config.gradient_accumulation_fusion,
        )  # fmt: skip
        return out


class DeterministicLayerNormColumnParallelLinear(DeterministicColumnParallelLinear):
    """RMSNorm, then the column-parallel linear: one module with the parameter names of TransformerEngine's.

    Built as Megatron builds ``TELayerNormColumnParallelLinear``; checkpoints of the two are interchangeable. The bits
    are those of a `DeterministicRMSNorm` in front of a `DeterministicColumnParallelLinear`.
    """

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        norm = DeterministicRMSNorm(self.config, input_size, self.config.layernorm_epsilon)
        # Held as a parameter of this module, so that it has TransformerEngine's name; the norm is a function of it.
        self.layer_norm_weight = norm.weight

    def _before(self, input_: torch.Tensor) -> torch.Tensor:
        return normalize(input_, self.norm_terms())

    def norm_terms(self) -> NormTerms:
        """What the norm in front computes with."""
        zero_centered = bool(self.config.layernorm_zero_centered_gamma)
        epsilon = self.config.layernorm_epsilon
        return NormTerms(self.layer_norm_weight, epsilon, zero_centered, of_batch(self.layout))


class DeterministicRowParallelLinear(RowParallelLinear):
    """Megatron's RowParallelLinear with the eight-lane tree. Same constructor, parameters, checkpoints."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        require_supported(self.config, is_expert=self.is_expert)
        self.layout = layout_of(self.config, self.tp_group)
        if self.bias is not None:
            # A skipped bias is added by the residual add, which needs to know how its tokens lie.
            self.bias.deterministic_layout = self.layout

    @eager_only
    def forward(self, input_: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ [s, B, K / TP] -> ([s(/TP), B, N], bias or None)."""
        if not self.input_is_parallel and self.layout.tp_size > 1:
            width = self.input_size_per_partition
            start = self.layout.tp_rank * width
            input_ = _TakeColumns.apply(input_, self.layout, start, width)
        layout = of_batch(self.layout)
        out = _RowParallel.apply(input_, self.weight, layout, self.config.gradient_accumulation_fusion)
        if self.bias is not None and not self.skip_bias_add:
            out = BiasAdd.apply(out, self.bias, layout, layout.sequence_parallel)
        return out, (self.bias if self.skip_bias_add else None)


class _TakeColumns(torch.autograd.Function):
    """A replicated [..., C] to this rank's columns; the gradient gathers them in rank order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: ParallelLayout, start: int, width: int) -> torch.Tensor:
        ctx.layout = layout
        return x[..., start : start + width].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.cat(all_gather(grads[0].contiguous(), ctx.layout.tp_group), dim=-1), None, None, None
