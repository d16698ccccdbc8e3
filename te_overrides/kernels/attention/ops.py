"""Attention over position maps: the reference on a CPU, the kernels on a GPU, anything else an error.

Callers (context parallelism, packing, paging, core attention) say which rows they own as runs (`runs.py`) and never
which arithmetic runs. The device of the operands decides that, and nothing else does: what the kernels do not cover is
refused on a GPU (`coverage.py`), since the reference there would have other bits than the kernels elsewhere in the job.

Shapes are the reference's: rows first, `[s, b, h, d]`; statistics `[b, h, s]` float32.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from te_overrides.kernels.attention import reference
from te_overrides.kernels.attention.reference import AttentionError, Mask
from te_overrides.kernels.attention.runs import Run, by_sequence
from te_overrides.kernels.devices import require_one_device, require_one_dtype
from te_overrides.kernels.eager import eager_only


@eager_only
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Query rows over all keys of their sequences.

    Args:
        query: [s_q, b, h, d], rows mapped by `runs`; rows that no run maps are padding.
        key, value: [s_k, b, h_kv, d] and [s_k, b, h_kv, d_v]; a sequence's rows where its runs say, in the order of
            positions.

    Returns:
        out: [s_q, b, h, d_v]; 0 for padding and for rows without keys.
        softmax_lse: [b, h, s_q] float32; -inf for them.

    Raises:
        DeviceError: operands on several devices.
        AttentionError: operands that do not fit together; on a GPU also what the kernels do not cover.
        NoAttentionLaunchError: a GPU without a certified launch.
    """
    require_one_device("attention", query=query, key=key, value=value)
    kernel = kernel_for(query)
    if kernel is not None:
        return kernel.attention_forward(query, key, value, runs, mask=mask, softmax_scale=softmax_scale)
    reference.check_operands(query, key, value)
    s_q, batch, heads, _ = query.shape
    out = query.new_zeros(s_q, batch, heads, value.shape[-1])
    softmax_lse = query.new_full((batch, heads, s_q), -torch.inf, dtype=torch.float32)
    for rows, others, positions in _sequences(runs):
        out[rows], softmax_lse[..., rows] = reference.attention_forward(
            query[rows], key[others], value[others], positions, mask=mask, softmax_scale=softmax_scale
        )
    return out, softmax_lse


@eager_only
def attention_statistics(grad_out: Tensor, out: Tensor, softmax_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers of each query row that backward passes read, [b, h, s] float32 each.

    The second is `reference.attention_delta`, with its bits on every device. The first is the LSE; for the kernels in
    units of log 2, and +inf instead of -inf. Both travel between ranks as they are.
    """
    require_one_device("attention backward", out=out, grad_out=grad_out, softmax_lse=softmax_lse)
    require_one_dtype("attention backward", out=out, grad_out=grad_out)
    kernel = kernel_for(out)
    if kernel is not None:
        return kernel.attention_statistics(grad_out, out, softmax_lse)
    return softmax_lse, reference.attention_delta(grad_out, out)


@eager_only
def attention_dq(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    shift: Tensor,
    delta: Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> Tensor:
    """Whole rows of dQ; `shift` and `delta` are `attention_statistics`, the rest is as for `attention_forward`."""
    _require_together(query, key, value, grad_out, shift, delta)
    kernel = kernel_for(query)
    options = {"mask": mask, "softmax_scale": softmax_scale}
    if kernel is not None:
        return kernel.attention_dq(query, key, value, grad_out, shift, delta, runs, **options)
    dq = torch.zeros_like(query)
    for rows, others, positions in _sequences(runs):
        dq[rows] = reference.attention_dq(
            query[rows], key[others], value[others], grad_out[rows], shift[..., rows], delta[..., rows],
            positions, **options,
        )  # fmt: skip
    return dq


@eager_only
def attention_dkv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    shift: Tensor,
    delta: Tensor,
    runs: tuple[Run, ...],
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole rows of dK and dV. `runs` map rows of `key`; `origin` and `length` name the rows of `query`."""
    _require_together(query, key, value, grad_out, shift, delta)
    kernel = kernel_for(key)
    options = {"mask": mask, "softmax_scale": softmax_scale}
    if kernel is not None:
        return kernel.attention_dkv(query, key, value, grad_out, shift, delta, runs, **options)
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for rows, others, positions in _sequences(runs):
        dk[rows], dv[rows] = reference.attention_dkv(
            query[others], key[rows], value[rows], grad_out[others], shift[..., others], delta[..., others],
            positions, **options,
        )  # fmt: skip
    return dk, dv


def _require_together(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, shift: Tensor, delta: Tensor
) -> None:
    """Raises DeviceError for operands of a backward pass on several devices, DtypeError for several dtypes."""
    operands = {"query": query, "key": key, "value": value, "grad_out": grad_out}
    require_one_device("attention backward", **operands, shift=shift, delta=delta)
    require_one_dtype("attention backward", **operands)
    require_one_dtype("attention backward", shift=shift, delta=delta)


def kernel_for(x: Tensor) -> ModuleType | None:
    """The module of the kernels for operands on a GPU, None for operands on a CPU."""
    if x.device.type == "cpu":
        return None
    if x.device.type != "cuda":
        raise AttentionError(
            f"operands are on {x.device}: the reference runs on cpu, the kernels on cuda (NVIDIA and AMD). "
            "Move them to one of those."
        )
    # Triton is needed on a GPU alone.
    from te_overrides.kernels.attention import kernel

    return kernel


def _sequences(runs: tuple[Run, ...]) -> list[tuple[slice, slice, Tensor]]:
    """Of each sequence: the rows mapped, the rows of its other side, and the positions of the former."""
    found = []
    for group in by_sequence(runs):
        first, last = group[0], group[-1]
        if sum(run.count for run in group) != last.row + last.count - first.row:
            raise AttentionError(f"{group}: rows of one sequence must follow each other")
        positions = torch.cat([torch.arange(run.position, run.position + run.count) for run in group])
        rows = slice(first.row, last.row + last.count)
        found.append((rows, slice(first.origin, first.origin + first.length), positions))
    return found
