"""Attention by AITER's CK kernels, for those who want their speed on AMD: the same launch at every layout.

What AITER's kernels add, and in which order, follows from the launch: published measurements find other bits when other
numbers of heads share one. Here a launch is one unit, one key head of one batch row over its whole sequence
(`units.py`), whatever TP, CP, layout and batch are. That needs no assumption about a tile inside the
kernel, only that equal launches compute equal bits: `deterministic` is passed, and no variant with atomics is called.
More launches are the price; published figures put it at 6 to 8 times one launch for all heads.

Whether the operators are those that were reviewed is asked before the first launch
(`megatron_plugins/aiter_operators.py`), and one process computes with one core (`core_in_use.py`).

**Not run on an AMD GPU**: what is tested is the guards, the movement, and that launches are equal at every layout.
Not covered: packed sequences, pages, float32, two levels of groups. Its bits are not those of this project's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_overrides.kernels.attention.core_in_use import AITER, claim
from te_overrides.kernels.attention.reference import AttentionError, Mask, check_operands
from te_overrides.kernels.attention.units import Units
from te_overrides.kernels.collectives.agreement import require_agreement
from te_overrides.kernels.collectives.transport import group_size
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.zigzag.reference import check_length

Operators = Callable[[], tuple[Any, Any]]
"""The forward and the backward operator, after whoever gives them has examined them."""
DTYPES = (torch.bfloat16, torch.float16)


@eager_only
def aiter_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    operators: Operators,
    cp_group: dist.ProcessGroup | None = None,
    layout: str = "zigzag",
    causal: bool = True,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences whose rows a context-parallel group shares, one launch a unit.

    Args:
        operators: AITER's `mha_fwd` and `mha_bwd`; asked for before anything else happens.
        others: as for `context_parallel_attention`; bfloat16 and float16.

    Returns:
        out [s_local, b, h, d_v], differentiable, and softmax_lse [b, h, s_local] float32, not differentiable.

    Raises:
        AttentionError: what is not covered, or a process that computes with the other core.
        DisagreementError: ranks that mean different attention.
    """
    check_operands(query, key, value)
    if query.dtype not in DTYPES or query.shape[0] != key.shape[0]:
        raise AttentionError(
            f"query {query.dtype} {tuple(query.shape)}, key {tuple(key.shape)}: the AITER core covers self-attention "
            f"in {', '.join(map(str, DTYPES))}"
        )
    if cp_group is not None and not isinstance(cp_group, dist.ProcessGroup):
        raise AttentionError(
            f"cp_group is a {type(cp_group).__name__}: the AITER core exchanges rows for heads inside one process "
            "group; use cp_comm_type p2p, all_gather or a2a."
        )
    forward, backward = operators()
    claim(AITER)
    ranks = group_size(cp_group)
    check_length(query.shape[0] * ranks, ranks, layout)
    mask = Mask.of(causal, window)
    if ranks > 1:
        assert cp_group is not None
        line = (
            f"attention on {AITER}: {query.dtype} q {tuple(query.shape)} k {tuple(key.shape)} v {tuple(value.shape)}, "
            f"{layout}, {mask}, softmax_scale {softmax_scale}"
        )
        require_agreement(line, cp_group, query.device)
    units = Units(query.shape[1], key.shape[2], cp_group, layout)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = (-1 if side is None else side for side in (mask.left, mask.right))
    return _UnitAttention.apply(query, key, value, units, (forward, backward), (scale, causal, left, right))


class _UnitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        units: Units,
        operators: tuple[Any, Any],
        options: tuple[float, bool, int, int],
    ) -> tuple[Tensor, Tensor]:
        forward, _ = operators
        q, k, v = (units.whole(x) for x in (query, key, value))
        results = [
            forward(q[at], k[at], v[at], 0.0, *options, 0, True, False)[:2] for at in _each(q.shape[0])
        ]
        count, length, per_group, _ = q.shape
        out = (
            torch.cat([out for out, _ in results])
            if results
            else q.new_empty(0, length, per_group, v.shape[-1])
        )
        lse = (
            torch.cat([lse for _, lse in results])
            if results
            else q.new_empty(0, per_group, length, dtype=torch.float32)
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.units, ctx.operators, ctx.options = units, operators, options
        rows = units.held(lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1).permute(1, 2, 0).contiguous()
        ctx.mark_non_differentiable(rows)
        return units.held(out), rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        _, backward = ctx.operators
        q, k, v, out, lse = ctx.saved_tensors
        grad = ctx.units.whole(grad_out)
        results = [
            backward(grad[at], q[at], k[at], v[at], out[at], lse[at], 0.0, *ctx.options, True)[:3]
            for at in _each(q.shape[0])
        ]
        empty = [x.new_empty(0, *x.shape[1:]) for x in (q, k, v)]
        whole = [torch.cat(parts) for parts in zip(*results, strict=True)] if results else empty
        dq, dk, dv = (ctx.units.held(x) for x in whole)
        return dq, dk, dv, None, None, None


def _each(count: int) -> list[slice]:
    """One unit at a time, its dimension kept: the kernels' batch of one."""
    return [slice(index, index + 1) for index in range(count)]
