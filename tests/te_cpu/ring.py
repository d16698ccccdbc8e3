"""Calls TransformerEngine's context-parallel entry point on gloo ranks, as `backends.py` calls it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_overrides.kernels.zigzag.reference import rank_positions

BATCH, LENGTH, HEADS, GROUPS, D = 2, 32, 4, 2, 8
CORRECTIONS = (
    "flash_attn_fwd_softmax_lse_correction",
    "flash_attn_fwd_second_half_softmax_lse_correction",
    "flash_attn_fwd_out_correction_init",
    "flash_attn_fwd_out_correction",
    "flash_attn_fwd_second_half_out_correction",
    "flash_attn_fwd_incremental_out_correction",
    "flash_attn_fwd_incremental_second_half_out_correction",
)


def operands(length: int = LENGTH, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Tensor]:
    """query, key, value, grad_out of the whole sequence, [b, s, heads or groups, d]."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return [torch.randn(BATCH, length, n, D, generator=generator).to(dtype) for n in heads]


def positions(length: int, group: dist.ProcessGroup) -> Tensor:
    """Positions of the sequence that this rank holds."""
    return rank_positions(length, dist.get_world_size(group), dist.get_rank(group), "zigzag")


def run(
    entry: Callable[..., Any],
    group: dist.ProcessGroup,
    whole: list[Tensor],
    qkv_format: str = "bshd",
    **options: Any,
) -> dict[str, Tensor]:
    """out, dQ, dK, dV of this rank's rows, each [b, s_local, heads or groups, d]."""
    from megatron_plugins.verify.model import te_on_cpu

    length = whole[0].shape[1]
    mine = positions(length, group)
    q, k, v, grad = (x[:, mine] for x in whole)
    if qkv_format == "sbhd":
        q, k, v, grad = (x.transpose(0, 1) for x in (q, k, v, grad))
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    cu_seqlens = torch.arange(0, (BATCH + 1) * length, length, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "softmax_scale": D**-0.5, "qkv_format": qkv_format, "attn_mask_type": "causal", "deterministic": True,
        "use_fused_attention": False, "window_size": (-1, 0),
    }  # fmt: skip
    out = entry(
        True, q, k, v, cu_seqlens, cu_seqlens, length, length, None, None, 0.0, group,
        dist.get_process_group_ranks(group), te_on_cpu.FakeStream(), "p2p", **{**arguments, **options},
    )  # fmt: skip
    out = out.view(q.shape)
    out.backward(grad.contiguous())
    results = {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}
    return {n: x.transpose(0, 1) if qkv_format == "sbhd" else x for n, x in results.items()}


# Sequences of 5, 11 and 3 tokens (ISEEKYAN/Megatron-LM#111), each padded to 16 at every degree.
CU_SEQLENS = torch.tensor([0, 5, 16, 19], dtype=torch.int32)
CU_SEQLENS_PADDED = torch.tensor([0, 16, 32, 48], dtype=torch.int32)


def packed_operands(seed: int = 2) -> list[Tensor]:
    """query, key, value, grad_out of the packed batch, [t, heads or groups, d]; padding holds numbers as well."""
    generator = torch.Generator().manual_seed(seed)
    tokens = int(CU_SEQLENS_PADDED[-1])
    return [torch.randn(tokens, n, D, generator=generator) for n in (HEADS, GROUPS, GROUPS, HEADS)]


def packed_positions(group: dist.ProcessGroup) -> Tensor:
    """Rows of the packed batch that this rank holds: its chunks of every sequence, sequence by sequence."""
    starts, stops = CU_SEQLENS_PADDED[:-1].tolist(), CU_SEQLENS_PADDED[1:].tolist()
    return torch.cat(
        [start + positions(stop - start, group) for start, stop in zip(starts, stops, strict=True)]
    )


def run_packed(entry: Callable[..., Any], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """out, dQ, dK, dV of this rank's rows of the packed batch, each [t_local, heads or groups, d]."""
    mine = packed_positions(group)
    q, k, v, grad = (x[mine] for x in packed_operands())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = entry(
        True, q, k, v, CU_SEQLENS, CU_SEQLENS, 16, 16, CU_SEQLENS_PADDED, CU_SEQLENS_PADDED, 0.0, group,
        dist.get_process_group_ranks(group), None, "p2p", softmax_scale=D**-0.5, qkv_format="thd",
        attn_mask_type="padding_causal", pad_between_seqs=True,
    )  # fmt: skip
    out.backward(grad)
    return {"out": out.detach(), "dQ": q.grad, "dK": k.grad, "dV": v.grad}


@contextmanager
def counted(module: Any) -> Iterator[Counter[str]]:
    """Counts the calls that reach the module's correction functions, whoever provides them."""
    calls: Counter[str] = Counter()
    present = {name: getattr(module, name) for name in CORRECTIONS if hasattr(module, name)}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name, function in present.items():
        setattr(module, name, wrap(name, function))
    yield calls
    for name, function in present.items():
        setattr(module, name, function)
