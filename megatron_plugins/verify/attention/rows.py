"""What the ranks of a row compute, compared element by element with what one rank computed.

Operands are drawn from a seed, the same in every process. A rank compares its own part and reports it; nothing is
gathered to be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_plugins.verify.attention.plan import RESULTS, Row, Shape
from te_overrides.kernels.attention.context_parallel import context_parallel_attention, packed_attention
from te_overrides.kernels.attention.paged import paged_attention
from te_overrides.kernels.attention.ranks import Levels, Ranks
from te_overrides.kernels.zigzag.reference import from_canonical, packed_rank_rows

Parts = Iterator[tuple[str, Tensor, Tensor]]
PAGE = 16


@functools.lru_cache(maxsize=2)
def operands(shape: Shape, device: str, seed: int = 0) -> list[Tensor]:
    """query, key, value, grad_out [s, b, h, d] in bfloat16, standard normal; read only."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.groups, shape.groups, shape.heads)
    return [
        torch.randn(shape.length, shape.batch, n, shape.head_dim, generator=generator).bfloat16().to(device)
        for n in heads
    ]


def everything(attention: Callable[..., Any], tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """All five results of one call, through autograd; the LSE as `[s, b, h]`, `[t, h]` if packed."""
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors[:3])
    out, lse = attention(q, k, v, **options)
    out.backward(tensors[3])
    rows_first = lse.permute(2, 0, 1) if lse.dim() == 3 else lse.T
    return dict(zip(RESULTS, (out.detach(), rows_first, q.grad, k.grad, v.grad), strict=True))


def boundaries(shape: Shape) -> tuple[list[int], list[int]]:
    """`cu_seqlens` and the padded ones of a packed batch of `shape.length` rows: an empty sequence, padding, tails."""
    step = shape.length // 3
    return [0, step - 5, step - 5, step - 5 + step - 32, 2 * step - 37 + step], [
        0,
        step,
        step,
        2 * step,
        3 * step,
    ]


class Baseline:
    """One rank's results, computed once and only as far as rows ask for them."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self._known: dict[str, dict[str, Tensor]] = {}

    def dense(self) -> dict[str, Tensor]:
        """The whole batch."""
        return self._once(
            "dense", lambda: everything(context_parallel_attention, operands(self.shape, self.device))
        )

    def packed(self) -> dict[str, Tensor]:
        """Each packed sequence by itself; padding is zeros and -inf."""
        return self._once("packed", self._packed)

    def _packed(self) -> dict[str, Tensor]:
        tensors = [x[:, 0] for x in operands(self.shape, self.device)]
        cu_seqlens, padded = boundaries(self.shape)
        whole = {
            name: torch.zeros(
                x.shape if name != "LSE" else x.shape[:2],
                dtype=torch.float32 if name == "LSE" else x.dtype,
                device=x.device,
            )
            for name, x in zip(RESULTS, (tensors[0], tensors[0], *tensors[:3]), strict=True)
        }
        whole["LSE"].fill_(-torch.inf)
        for index, start in enumerate(padded[:-1]):
            length = cu_seqlens[index + 1] - cu_seqlens[index]
            if length:
                rows = slice(start, start + length)
                alone = everything(context_parallel_attention, [x[rows].unsqueeze(1) for x in tensors])
                for name, x in alone.items():
                    whole[name][rows] = x.squeeze(1)
        return whole

    def _once(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        if name not in self._known:
            self._known[name] = compute()
        return self._known[name]


def _part(x: Tensor, row: Row, rank: int) -> Tensor:
    """What a rank of a mesh holds of [s, b, h, …]: its rows and its heads."""
    cp_rank, tp_rank = divmod(rank, row.tp)
    return from_canonical(x, row.cp, cp_rank, row.layout).chunk(row.tp, 2)[tp_rank].contiguous()


def _compared(got: dict[str, Tensor], want: dict[str, Tensor]) -> Parts:
    return ((name, got[name], want[name]) for name in got)


def mesh(row: Row, baseline: Baseline, cp_group: Ranks, rank: int, **options: Any) -> Parts:
    """The batch over CP times TP ranks; TP cuts heads."""
    local = [_part(x, row, rank) for x in operands(baseline.shape, baseline.device)]
    got = everything(context_parallel_attention, local, cp_group=cp_group, layout=row.layout, **options)
    return _compared(got, {name: _part(x, row, rank) for name, x in baseline.dense().items()})


def lean(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """The schedule that holds least: one key head gathered at a time."""
    return mesh(row, baseline, cp_group, rank, gather_bytes=1)


def repeats(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """Again and again; on a GPU on changing streams, beside products of changing sizes."""
    tensors, want = operands(baseline.shape, baseline.device), baseline.dense()
    for index in range(baseline.shape.repeats):
        if baseline.device == "cpu":
            yield from _compared(everything(context_parallel_attention, tensors), want)
            continue
        side, noise = torch.cuda.Stream(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(noise):
            busy = torch.rand(256 * (1 + index % 8), 2048, device=baseline.device)
            busy = busy @ busy.T
        with torch.cuda.stream(side):
            got = everything(context_parallel_attention, tensors)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        yield from _compared(got, want)


def alone(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """Every batch row without the others."""
    tensors, want = operands(baseline.shape, baseline.device), baseline.dense()
    for index in range(baseline.shape.batch):
        one = slice(index, index + 1)
        got = everything(context_parallel_attention, [x[:, one].contiguous() for x in tensors])
        yield from _compared(got, {name: x[:, one] for name, x in want.items()})


def beside(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """The batch between rows of another one."""
    tensors, others = (operands(baseline.shape, baseline.device, seed) for seed in (0, 1))
    wider = [torch.cat([y, x, y], 1) for x, y in zip(tensors, others, strict=True)]
    middle = slice(baseline.shape.batch, 2 * baseline.shape.batch)
    got = everything(context_parallel_attention, wider)
    return _compared({name: x[:, middle] for name, x in got.items()}, baseline.dense())


def packed(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """Sequences of several lengths with NaN between them, against each one by itself."""
    cu_seqlens, bounds = boundaries(baseline.shape)
    tensors = [x[:, 0].clone() for x in operands(baseline.shape, baseline.device)]
    for index, stop in enumerate(bounds[1:]):
        start = bounds[index] + cu_seqlens[index + 1] - cu_seqlens[index]
        for x in tensors:
            x[start:stop] = torch.nan
    rows = packed_rank_rows(bounds, row.cp, rank, row.layout).to(baseline.device)
    got = everything(
        packed_attention, [x[rows] for x in tensors], cu_seqlens=cu_seqlens, cu_seqlens_padded=bounds,
        cp_group=cp_group, layout=row.layout,
    )  # fmt: skip
    return _compared(got, {name: x[rows] for name, x in baseline.packed().items()})


def _paged(baseline: Baseline, tokens: int) -> Parts:
    """The last tokens of each batch row, of its whole length and of shorter ones, over shuffled pages."""
    query, key, value, _ = operands(baseline.shape, baseline.device)
    pages = -(-baseline.shape.length // PAGE)
    order = torch.randperm(pages * baseline.shape.batch, generator=torch.Generator().manual_seed(2))
    table = order.view(baseline.shape.batch, pages).to(baseline.device, torch.int32)
    caches = []
    for x in (key, value):
        cache = x.new_full((table.numel(), PAGE, *x.shape[2:]), torch.nan)
        for index in range(baseline.shape.batch):
            rows = torch.nn.functional.pad(
                x[:, index], (0, 0, 0, 0, 0, pages * PAGE - len(x)), value=torch.nan
            )
            cache[table[index].long()] = rows.unflatten(0, (pages, PAGE))
        caches.append(cache)
    want = baseline.dense()
    for length in (baseline.shape.length, baseline.shape.length // 2 + 1, tokens):
        at = slice(length - tokens, length)
        lengths = torch.full((baseline.shape.batch,), length, dtype=torch.int32, device=baseline.device)
        out, lse = paged_attention(
            query[at].transpose(0, 1).contiguous(), *caches, block_table=table, seq_lens=lengths
        )
        got = {"out": out.transpose(0, 1), "LSE": lse.permute(2, 0, 1)}
        yield from _compared(got, {name: want[name][at] for name in got})


def decode(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """One token a sequence."""
    return _paged(baseline, 1)


def chunk(row: Row, baseline: Baseline, cp_group: Ranks, rank: int) -> Parts:
    """Some tokens a sequence."""
    return _paged(baseline, 37)


KINDS: dict[str, Callable[..., Parts]] = {
    "mesh": mesh, "levels": mesh, "lean": lean, "repeats": repeats, "alone": alone, "beside": beside,
    "packed": packed, "decode": decode, "chunk": chunk,
}  # fmt: skip


def groups_of(row: Row, rank: int) -> Ranks:
    """The context-parallel ranks of this one; every process of the world takes part in making every group."""
    if row.kind == "levels":
        flat = torch.arange(row.cp).view(-1, 2)
        inner = [dist.new_group(part.tolist()) for part in flat]
        outer = [dist.new_group(part.tolist()) for part in flat.T]
        return Levels.of([inner[rank // 2], outer[rank % 2]], range(row.cp)) if rank < row.cp else None
    if row.cp == 1:
        return None
    made = [dist.new_group([cp * row.tp + tp for cp in range(row.cp)]) for tp in range(row.tp)]
    return made[rank % row.tp] if rank < row.ranks else None
