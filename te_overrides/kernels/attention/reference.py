"""Attention of the contract in plain torch (docs/numbers.md, "Attention"): forward with LSE, backward by ownership.

A library kernel picks its order of sums from the sequence length, the number of heads in the launch, the free
multiprocessors (split-KV) or an atomic's arrival; context parallelism then adds merges and a reduction of partial
dK, dV. Here a query row's arithmetic is fixed by its position in its sequence:

* keys come in tiles of `BLOCK_N` from key 0, ascending, and a row's running (max, sum, accumulator) meets every tile
  that holds a key it sees;
* inside a tile the row sum is the balanced tree, all products are chains (one float32 multiply, one float32 add);
* backward is cut by ownership: `attention_dq` computes whole rows of dQ over all keys, `attention_dkv` whole rows of
  dK, dV over all queries. Nobody ever holds a partial sum of either.

The three functions take the positions of what their caller owns, and everything of the other side in the order of
positions. Who owns what (context parallelism, packing, paging) is decided elsewhere and cannot reach the bits.

A (query, key) pair that the mask hides takes part in no product: garbage in a hidden value, NaN included, stays there.
A kernel that adds `+0 * v` for hidden finite keys instead gets the same bits, because the results are normalized by
`+ 0.0`. Blocks of rows, of keys of one backward, batch and heads are loops or dimensions of elementwise operations
and are free; `BLOCK_N` is not.

Shapes follow Megatron: rows first, `[s, b, h, d]`; `softmax_lse` is `[b, h, s]` float32, natural logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_overrides.kernels import accounting
from te_overrides.kernels.eager import eager_only
from te_overrides.kernels.portable_math.reference import exp2, log_f64
from te_overrides.kernels.tree.reference import balanced_tree_dim

BLOCK_N = 64
"""Keys of one tile. Part of the numbers contract: another value gives other bits."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Elements of one block of scores; the float64 evaluation of exp2 then stays near a core's cache. Free of bits.
_SCORE_ELEMENTS = 1 << 16
# Farther than any position.
_UNLIMITED = 1 << 40


class AttentionError(ValueError):
    """Operands or a mask that the attention contract does not cover."""


@dataclass(frozen=True)
class Mask:
    """A query at position i sees the keys at positions i - left … i + right.

    Attributes:
        left, right: at least 0; None is unlimited. Causal is (None, 0), full attention (None, None).
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and reach < 0:
                raise AttentionError(
                    f"mask reaches {reach} keys to the {name}; give 0 or more, or None for all"
                )

    @classmethod
    def of(cls, causal: bool, window: tuple[int, int] | None) -> Mask:
        """From the arguments of flash attention and TransformerEngine.

        Args:
            window: (left, right), -1 for unlimited; None is (-1, -1).

        Raises:
            AttentionError: a negative reach other than -1, or a causal mask with a window to the right.
        """
        left, right = (-1, -1) if window is None else window
        if left < -1 or right < -1:
            raise AttentionError(
                f"window {(left, right)}: a reach is a number of keys from 0, or -1 for unlimited"
            )
        if causal and right > 0:
            raise AttentionError(
                f"window {(left, right)} reaches {right} keys into the future of a causal mask; "
                "use (left, 0), or causal=False"
            )
        return cls(None if left == -1 else left, 0 if causal else None if right == -1 else right)

    def rows_that_see(self, keys: Tensor, rows: Tensor) -> list[tuple[int, int]]:
        """For every key position, the run [first, stop) of the ascending `rows` that sees it."""
        return _runs(rows, keys, self.right, self.left)

    def keys_seen_by(self, rows: Tensor, keys: Tensor) -> list[tuple[int, int]]:
        """For every row position, the run [first, stop) of the ascending `keys` that it sees."""
        return _runs(keys, rows, self.left, self.right)

    def hidden(self, keys: Tensor, rows: Tensor) -> Tensor | None:
        """bool [keys, rows], True where the row does not see the key; None if every row sees every key."""
        left = _UNLIMITED if self.left is None else self.left
        right = _UNLIMITED if self.right is None else self.right
        if int(rows[-1]) - left <= int(keys[0]) and int(keys[-1]) <= int(rows[0]) + right:
            return None
        distance = keys[:, None] - rows[None, :]
        return (distance < -left) | (distance > right)


@eager_only
def attention_forward(
    query: Tensor,  # [s_q, b, h, d]
    key: Tensor,  # [s_k, b, h_kv, d]
    value: Tensor,  # [s_k, b, h_kv, d_v]
    query_positions: Tensor,  # [s_q]
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of some query rows over all keys of their sequence.

    Args:
        query: rows in the order of `query_positions`; bfloat16, float16 or float32.
        key, value: all keys of the sequence, key i at position i. h_kv divides h; d_v may differ from d.
        query_positions: int64 on the CPU, ascending. A row may lie outside the keys (before key 0: it has no key).
        softmax_scale: default 1 / sqrt(d).

    Returns:
        out: [s_q, b, h, d_v] in the dtype of `query`; 0 for a row without keys.
        softmax_lse: [b, h, s_q] float32; -inf for a row without keys.

    Raises:
        AttentionError: shapes, dtypes or positions that do not fit together.
    """
    check_operands(query, key, value)
    _check_positions(query_positions, query.shape[0], "query_positions")
    groups = key.shape[2]
    q = _columns(query, groups)
    k = _columns(key, groups)
    v = _rows(value)
    scale = _score_scale(softmax_scale, query.shape[-1])
    batch, per_group, s_q = query.shape[1], query.shape[2] // groups, query.shape[0]
    key_positions = torch.arange(key.shape[0])
    row_sum = q.new_zeros(batch, groups, per_group, s_q)
    row_max = torch.full_like(row_sum, -math.inf)
    acc = q.new_zeros(batch, groups, per_group, value.shape[-1], s_q)

    for rows in _blocks(s_q, batch * query.shape[2] * BLOCK_N):
        positions = query_positions[rows]
        runs = mask.rows_that_see(key_positions, positions)
        for tile in _tiles(key.shape[0]):
            first, stop = runs[tile.start][0], runs[tile.stop - 1][1]
            if first == stop:
                continue
            seen = slice(rows.start + first, rows.start + stop)
            s = _scores(q, k, seen, tile, scale, mask.hidden(key_positions[tile], query_positions[seen]))
            old_max, old_sum = row_max[..., seen], row_sum[..., seen]
            new_max = torch.maximum(old_max, s.amax(-2))
            # A row that met only scores of -inf keeps (max, sum, acc): exp2(-inf - 0) is 0, -inf - -inf is NaN.
            shift = torch.where(new_max == -math.inf, 0.0, new_max)
            p = exp2(s.sub_(shift.unsqueeze(-2)))
            alpha = exp2(old_max - shift)
            old_sum.mul_(alpha).add_(balanced_tree_dim(p, -2))
            old_max.copy_(new_max)
            acc_seen = acc[..., seen]
            acc_seen.mul_(alpha.unsqueeze(-2))
            _chain_into(
                acc_seen,
                _rounded(p, query.dtype).unsqueeze(-2).unbind(-3),
                v[tile],
                [(a - first, b - first) for a, b in runs[tile]],
            )

    empty = row_sum == 0.0
    out = (
        (acc.to(torch.float64) / row_sum.to(torch.float64).unsqueeze(-2))
        .to(torch.float32)
        .masked_fill_(empty.unsqueeze(-2), 0.0)
    )
    out = (
        out.permute(4, 0, 1, 2, 3).reshape(s_q, batch, query.shape[2], value.shape[-1]).to(query.dtype) + 0.0
    )
    lse = row_max.to(torch.float64) * math.log(2.0) + log_f64(row_sum.to(torch.float64))
    lse = lse.to(torch.float32).masked_fill_(empty, -math.inf)
    return out, lse.reshape(batch, query.shape[2], s_q)


@eager_only
def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """`delta = tree over d_v of round32(dO * out)`, what softmax's backward subtracts.

    Args:
        grad_out, out: [s, b, h, d_v] of one dtype.

    Returns:
        [b, h, s] float32.
    """
    product = grad_out.to(torch.float32) * out.to(torch.float32)
    return balanced_tree_dim(product, -1).permute(1, 2, 0).contiguous()


@eager_only
def attention_dq(
    query: Tensor,  # [s_q, b, h, d]
    key: Tensor,  # [s_k, b, h_kv, d]
    value: Tensor,  # [s_k, b, h_kv, d_v]
    grad_out: Tensor,  # [s_q, b, h, d_v]
    softmax_lse: Tensor,  # [b, h, s_q]
    delta: Tensor,  # [b, h, s_q]
    query_positions: Tensor,  # [s_q]
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> Tensor:
    """Whole rows of dQ: `chain over keys ascending of ds[i, j] * k[j], then * scale`.

    Args:
        as for `attention_forward`; `softmax_lse` is its result, `delta` is `attention_delta`'s.

    Returns:
        [s_q, b, h, d] in the dtype of `query`; `+0.0` for rows without keys.

    Raises:
        AttentionError: shapes, dtypes or positions that do not fit together.
    """
    check_operands(query, key, value)
    _check_positions(query_positions, query.shape[0], "query_positions")
    operands = _BackwardOperands.of(query, key, value, grad_out, softmax_lse, delta, mask, softmax_scale)
    k_rows = _rows(key)
    key_positions = torch.arange(key.shape[0])
    (s_q, batch, heads, d), groups = query.shape, key.shape[2]
    acc = k_rows.new_zeros(batch, groups, heads // groups, d, s_q)
    for rows in _blocks(s_q, batch * heads * BLOCK_N):
        runs = mask.rows_that_see(key_positions, query_positions[rows])
        for tile in _tiles(key.shape[0]):
            first, stop = runs[tile.start][0], runs[tile.stop - 1][1]
            if first == stop:
                continue
            seen = slice(rows.start + first, rows.start + stop)
            _, ds = operands.weights(seen, tile, query_positions, key_positions)
            _chain_into(
                acc[..., seen],
                ds.unsqueeze(-2).unbind(-3),
                k_rows[tile],
                [(a - first, b - first) for a, b in runs[tile]],
            )
    acc.mul_(_softmax_scale(softmax_scale, d))
    return acc.permute(4, 0, 1, 2, 3).reshape(query.shape).to(query.dtype) + 0.0


@eager_only
def attention_dkv(
    query: Tensor,  # [s_q, b, h, d]
    key: Tensor,  # [s_k, b, h_kv, d]
    value: Tensor,  # [s_k, b, h_kv, d_v]
    grad_out: Tensor,  # [s_q, b, h, d_v]
    softmax_lse: Tensor,  # [b, h, s_q]
    delta: Tensor,  # [b, h, s_q]
    key_positions: Tensor,  # [s_k]
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole rows of dK, dV: heads of a group ascending, inside a head queries ascending, one chain.

    Args:
        query, grad_out, softmax_lse, delta: all rows of the sequence, row i at position i.
        key, value: rows in the order of `key_positions`.
        key_positions: int64 on the CPU, ascending.

    Returns:
        dK [s_k, b, h_kv, d] and dV [s_k, b, h_kv, d_v] in the dtype of `key`; `+0.0` for keys nobody sees.

    Raises:
        AttentionError: shapes, dtypes or positions that do not fit together.
    """
    check_operands(query, key, value)
    _check_positions(key_positions, key.shape[0], "key_positions")
    operands = _BackwardOperands.of(query, key, value, grad_out, softmax_lse, delta, mask, softmax_scale)
    (s_q, batch, heads, d), (s_k, _, groups, d_v) = query.shape, value.shape
    query_positions = torch.arange(s_q)
    q_rows, grad_rows = _head_rows(query, groups), _head_rows(grad_out, groups)
    dk = q_rows.new_zeros(batch, groups, d, s_k)
    dv = q_rows.new_zeros(batch, groups, d_v, s_k)
    for keys in _consecutive(key_positions, BLOCK_N):
        runs = mask.keys_seen_by(query_positions, key_positions[keys])
        rows_of_keys = mask.rows_that_see(key_positions[keys], query_positions)
        first, stop = rows_of_keys[0][0], rows_of_keys[-1][1]
        for head in range(heads // groups):
            for rows in _blocks(stop - first, batch * groups * BLOCK_N, start=first):
                p, ds = operands.weights(rows, keys, query_positions, key_positions, head)
                # Keys innermost: an operation of the chain then runs over consecutive memory.
                p_rows, ds_rows = (x.squeeze(2).transpose(-1, -2).contiguous().unsqueeze(-2) for x in (p, ds))
                _chain_into(dv[..., keys], p_rows.unbind(-3), grad_rows[head][rows], runs[rows])
                _chain_into(dk[..., keys], ds_rows.unbind(-3), q_rows[head][rows], runs[rows])
    dk.mul_(_softmax_scale(softmax_scale, d))
    dk, dv = (x.permute(3, 0, 1, 2).to(key.dtype).contiguous() + 0.0 for x in (dk, dv))
    return dk, dv


@dataclass(frozen=True)
class _BackwardOperands:
    """Operands of both backward passes, laid out for chains over d; recomputes p and ds of a block."""

    q: Tensor  # [d, b, h_kv, g, s_q] float32, as k, v, grad
    k: Tensor  # [d, b, h_kv, 1, s_k]
    v: Tensor  # [d_v, b, h_kv, 1, s_k]
    grad: Tensor  # [d_v, b, h_kv, g, s_q]
    lse: Tensor  # [b, h_kv, g, s_q] in units of log 2
    delta: Tensor  # [b, h_kv, g, s_q]
    dtype: torch.dtype
    mask: Mask
    scale: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        softmax_lse: Tensor,
        delta: Tensor,
        mask: Mask,
        softmax_scale: float | None,
    ) -> _BackwardOperands:
        (s_q, batch, heads, d), groups = query.shape, key.shape[2]
        if grad_out.shape != (s_q, batch, heads, value.shape[-1]):
            raise AttentionError(
                f"grad_out is {tuple(grad_out.shape)}; for query {tuple(query.shape)} and value {tuple(value.shape)} "
                f"it must be {(s_q, batch, heads, value.shape[-1])}"
            )
        for name, rows in (("softmax_lse", softmax_lse), ("delta", delta)):
            if rows.shape != (batch, heads, s_q) or rows.dtype != torch.float32:
                raise AttentionError(
                    f"{name} is {rows.dtype} {tuple(rows.shape)}; for query {tuple(query.shape)} it must be "
                    f"torch.float32 {(batch, heads, s_q)}"
                )
        by_group = (batch, groups, heads // groups, s_q)
        return cls(
            q=_columns(query, groups),
            k=_columns(key, groups),
            v=_columns(value, groups),
            grad=_columns(grad_out, groups),
            lse=(softmax_lse * _round32(math.log2(math.e))).view(by_group),
            delta=delta.reshape(by_group),
            dtype=query.dtype,
            mask=mask,
            scale=_score_scale(softmax_scale, d),
        )

    def weights(
        self,
        rows: slice,
        keys: slice,
        query_positions: Tensor,
        key_positions: Tensor,
        head: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """p and ds, [b, h_kv, g, keys, rows] float32 holding values of the input dtype; hidden pairs hold anything.

        `head` restricts the heads of a group to one (g = 1).
        """
        heads = slice(None) if head is None else slice(head, head + 1)
        hidden = self.mask.hidden(key_positions[keys], query_positions[rows])
        s = _scores(self.q[:, :, :, heads], self.k, rows, keys, self.scale, hidden)
        lse = self.lse[:, :, heads, rows].unsqueeze(-2)
        p = exp2(s.sub_(lse)).masked_fill_(lse == -math.inf, 0.0)
        ds = _chain(self.v[..., keys].unsqueeze(-1), self.grad[:, :, :, heads, rows].unsqueeze(-2))
        ds.sub_(self.delta[:, :, heads, rows].unsqueeze(-2)).mul_(p)
        return _rounded(p, self.dtype), _rounded(ds, self.dtype)


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Verify shapes and dtypes of [s, b, h, d] operands.

    Raises:
        AttentionError: naming what was found and what is needed.
    """
    found = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise AttentionError(
            f"{found}: attention takes [s, b, h, d] operands; packed rows have functions of their own"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3]:
        raise AttentionError(f"{found}: key and value must agree in [s, b, h_kv], query and key in b and d")
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise AttentionError(
            f"{found}: {query.shape[2]} query heads are not a multiple of {key.shape[2]} groups"
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        raise AttentionError(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype}: the attention contract covers one of "
            f"{', '.join(map(str, DTYPES))} for all three operands"
        )


def _check_positions(positions: Tensor, count: int, name: str) -> None:
    if positions.shape != (count,) or positions.dtype != torch.int64 or positions.device.type != "cpu":
        raise AttentionError(
            f"{name} is {positions.dtype} {tuple(positions.shape)} on {positions.device}; "
            f"it must be int64 ({count},) on the CPU, one position a row"
        )
    if count > 1 and not bool((positions.diff() > 0).all()):
        raise AttentionError(f"{name} must ascend; sort the rows by position first")


def _softmax_scale(softmax_scale: float | None, d: int) -> float:
    return _round32(1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale)


def _score_scale(softmax_scale: float | None, d: int) -> float:
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    return _round32(scale * math.log2(math.e))


def _round32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`, held in float32: a product of two such values is exact for 16-bit dtypes."""
    return x if dtype == torch.float32 else x.to(dtype).to(torch.float32)


def _columns(x: Tensor, groups: int) -> Tensor:
    """[s, b, h, d] to float32 [d, b, groups, h / groups, s]: a chain over d takes one slice at a time."""
    s, b, h, d = x.shape
    return x.reshape(s, b, groups, h // groups, d).permute(4, 1, 2, 3, 0).to(torch.float32).contiguous()


def _rows(x: Tensor) -> Tensor:
    """[s, b, groups, d] to float32 [s, b, groups, 1, d, 1]: a chain over s takes one slice at a time."""
    return x.to(torch.float32).contiguous().unsqueeze(-2).unsqueeze(-1)


def _head_rows(x: Tensor, groups: int) -> Tensor:
    """[s, b, h, d] to float32 [h / groups, s, b, groups, d, 1]: a chain over heads of a group, then over s."""
    s, b, h, d = x.shape
    return (
        x.reshape(s, b, groups, h // groups, d)
        .permute(3, 0, 1, 2, 4)
        .to(torch.float32)
        .contiguous()
        .unsqueeze(-1)
    )


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, scale: float, hidden: Tensor | None) -> Tensor:
    """`round32(chain over d of q * k) * scale`, -inf where hidden; [b, h_kv, g, keys, rows]."""
    s = _chain(k[..., keys].unsqueeze(-1), q[..., rows].unsqueeze(-2)).mul_(scale)
    return s if hidden is None else s.masked_fill_(hidden.to(s.device), -math.inf)


def _chain(left: Tensor, right: Tensor) -> Tensor:
    """`for t ascending along dim 0: acc = round32(acc + round32(left[t] * right[t]))`, broadcast over the rest."""
    terms = torch.broadcast_tensors(left, right)[0].shape
    acc = left.new_zeros(terms[1:])
    product = torch.empty_like(acc)
    for a, b in zip(left.unbind(0), right.unbind(0), strict=True):
        torch.mul(a, b, out=product)
        acc.add_(product)
    accounting.flops(terms.numel())
    return acc


def _chain_into(acc: Tensor, left: Sequence[Tensor], right: Tensor, runs: Sequence[tuple[int, int]]) -> None:
    """One more stretch of a chain whose term t reaches the elements `runs[t]` of the last dimension of `acc` alone.

    `for t ascending: acc[..., run] = round32(acc[..., run] + round32(left[t][..., run] * right[t]))`
    """
    width = acc.shape[-1]
    product = torch.empty(acc.shape, dtype=torch.float32, device=acc.device)
    pairs = 0
    for a, b, (first, stop) in zip(left, right.unbind(0), runs, strict=True):
        first, stop = max(first, 0), min(stop, width)
        if stop <= first:
            continue
        if stop - first == width:
            torch.mul(a, b, out=product)
            acc.add_(product)
        else:
            run = slice(first, stop)
            torch.mul(a[..., run], b, out=product[..., run])
            acc[..., run].add_(product[..., run])
        pairs += stop - first
    if width:
        accounting.flops(acc.numel() // width * pairs)


def _runs(positions: Tensor, centers: Tensor, before: int | None, after: int | None) -> list[tuple[int, int]]:
    """For every center, the run [first, stop) of ascending `positions` within [center - before, center + after]."""
    low = centers - (_UNLIMITED if before is None else before)
    high = centers + (_UNLIMITED if after is None else after)
    first = torch.searchsorted(positions, low)
    stop = torch.searchsorted(positions, high, right=True)
    return list(zip(first.tolist(), stop.tolist(), strict=True))


def _tiles(s_k: int) -> Iterator[slice]:
    for start in range(0, s_k, BLOCK_N):
        yield slice(start, min(start + BLOCK_N, s_k))


def _blocks(count: int, elements_per_row: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of `count` rows from `start`, about `_SCORE_ELEMENTS` elements each."""
    size = max(16, _SCORE_ELEMENTS // max(elements_per_row, 1))
    for first in range(start, start + count, size):
        yield slice(first, min(first + size, start + count))


def _consecutive(positions: Tensor, size: int) -> Iterator[slice]:
    """Slices of at most `size` entries whose positions follow each other without a gap."""
    start = 0
    gaps = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    for stop in [*gaps, positions.numel()]:
        for first in range(start, stop, size):
            yield slice(first, min(first + size, stop))
        start = stop
