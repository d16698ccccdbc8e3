"""`reference.py` as Triton kernels: float32 logits exist in registers only.

    peaks_kernel    largest logit of each lane, and the target's logit where it is here
    sums_kernel     sum of exponentials of each lane: trees over blocks, then over the blocks' sums
    finish_kernel   the tree over the lanes, the logarithm, the log-probability
    grad_kernel     the logits' gradient, elementwise

Ranks exchange what the first two write. A lane of a row belongs to one program and is added by a tree that is written
out level by level, so neither blocks nor threads can change a bit.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from te_overrides.kernels.collectives.transport import all_gather, group_rank, group_size
from te_overrides.kernels.cross_entropy.narrow import exp_of_difference, softmax
from te_overrides.kernels.cross_entropy.reference import check_vocabulary
from te_overrides.kernels.gemm.reference import LANES, lanes_per_rank
from te_overrides.kernels.launching import Launch, Plans, device_of, options, row_stride, signature, with_rows
from te_overrides.kernels.portable_math.kernel import exp, exp_f64, log_f64
from te_overrides.kernels.rounding.kernel import rounded
from te_overrides.kernels.tree.kernel import tree_of_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PEAKS = (2048, 128)
"""(columns of a block, threads of a program)."""
SUMS = (512, 32)
GRADIENT = (1024, 64)
FINISH = (64, 64)

_plans = Plans()


@triton.jit
def _logits(ptr, column, inside, valid):
    """float32 logits of columns; -inf for padding and outside."""
    x = tl.load(ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(column < valid, x, float("-inf"))


@triton.jit
def peaks_kernel(
    logits_ptr, target_ptr, known_ptr, stride, first, valid, width,
    LANES_HERE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits [rows, LANES_HERE * width], target [rows] -> known [rows, LANES_HERE + 1]: lane maxima, target's logit.

    `first`: the rank's first column; `valid`: true columns of this rank. NaN may or may not come through as a maximum:
    it reaches the sums either way.
    """
    program = tl.program_id(0).to(tl.int64)
    row, lane = program // LANES_HERE, program % LANES_HERE
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, _logits(logits_ptr + row * stride, lane * width + at, at < width, valid))
    tl.store(known_ptr + row * (LANES_HERE + 1) + lane, tl.max(peak, 0))
    if lane == 0:
        place = tl.load(target_ptr + row) - first
        here = (place >= 0) & (place < LANES_HERE * width)
        tl.store(
            known_ptr + row * (LANES_HERE + 1) + LANES_HERE, _logits(logits_ptr + row * stride, place, here, valid)
        )  # fmt: skip


@triton.jit
def _peak(known_ptr, row, rows, LANES_HERE: tl.constexpr, LANES_ALL: tl.constexpr):
    """[R] largest logit of the rows from what every rank knows, [ranks, rows, LANES_HERE + 1]."""
    lane = tl.arange(0, LANES_ALL)
    at = ((lane // LANES_HERE)[None, :] * rows + row[:, None]) * (LANES_HERE + 1) + (lane % LANES_HERE)[
        None, :
    ]
    return tl.max(tl.load(known_ptr + at, mask=(row < rows)[:, None], other=0.0), 1)


@triton.jit
def sums_kernel(
    logits_ptr, known_ptr, sum_ptr, stride, rows, valid,
    WIDTH: tl.constexpr, LANES_HERE: tl.constexpr, LANES_ALL: tl.constexpr, BLOCK_LEVELS: tl.constexpr,
    MORE_LEVELS: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """-> sum [rows, LANES_HERE]: of a lane's exponentials of the difference from the row's largest logit."""
    program = tl.program_id(0).to(tl.int64)
    row, lane = program // LANES_HERE, program % LANES_HERE
    peak = _peak(known_ptr, row + tl.arange(0, 1), rows, LANES_HERE, LANES_ALL)[:, None]
    subtrees = tl.full((1, 2**MORE_LEVELS), -0.0, tl.float32)
    for piece in range((WIDTH + 2**BLOCK_LEVELS - 1) // 2**BLOCK_LEVELS):
        at = piece * 2**BLOCK_LEVELS + tl.arange(0, 2**BLOCK_LEVELS)
        x = _logits(logits_ptr + row * stride, lane * WIDTH + at, at < WIDTH, valid)[None, :]
        if NARROW:
            terms = exp_of_difference(x - peak)
        else:
            terms = exp(x - peak)
        # -0 is the one number that changes no sum.
        terms = tl.where((at < WIDTH)[None, :], terms, -0.0)
        subtree = tree_of_rows(terms, BLOCK_LEVELS)[:, None]
        subtrees = tl.where(tl.arange(0, 2**MORE_LEVELS)[None, :] == piece, subtree, subtrees)
    tl.store(sum_ptr + row * LANES_HERE + lane + tl.arange(0, 1), tree_of_rows(subtrees, MORE_LEVELS))


@triton.jit
def finish_kernel(
    known_ptr, sum_ptr, target_ptr, out_ptr, peak_ptr, total_ptr, rows,
    WIDTH: tl.constexpr, LANES_HERE: tl.constexpr, LANES_ALL: tl.constexpr, LEVELS: tl.constexpr,
    NEGATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """known and sum of every rank -> log-probability (or its negative), largest logit and total, each [rows]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    peak = _peak(known_ptr, row, rows, LANES_HERE, LANES_ALL)
    lane = tl.arange(0, LANES_ALL)
    at = ((lane // LANES_HERE)[None, :] * rows + row[:, None]) * LANES_HERE + (lane % LANES_HERE)[None, :]
    total = tree_of_rows(tl.load(sum_ptr + at, mask=inside[:, None], other=1.0), LEVELS)
    target = tl.load(target_ptr + row, mask=inside, other=0)
    exists = (target >= 0) & (target < LANES_ALL * WIDTH)
    owner = target // (LANES_HERE * WIDTH)
    # NaN: no rank has a logit beyond the vocabulary.
    logit = tl.load(
        known_ptr + (owner * rows + row) * (LANES_HERE + 1) + LANES_HERE, mask=inside & exists, other=float("nan")
    )  # fmt: skip
    # A negative target is one that a loss mask takes out: a number, as in Megatron.
    shifted = tl.where(target < 0, 0.0, (logit - peak).to(tl.float64))
    value = (shifted - log_f64(total.to(tl.float64))).to(tl.float32)
    if NEGATE:
        value = -value
    tl.store(out_ptr + row, value, mask=inside)
    tl.store(peak_ptr + row, peak, mask=inside)
    tl.store(total_ptr + row, total, mask=inside)


@triton.jit
def grad_kernel(
    logits_ptr, target_ptr, grad_ptr, peak_ptr, total_ptr, out_ptr, stride, first, valid, width,
    BLOCK: tl.constexpr, NEGATE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """-> out [rows, width] contiguous: (one-hot - softmax) times the row's gradient, in the logits' dtype."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    peak, total, grad = (
        tl.load(peak_ptr + row),
        tl.load(total_ptr + row),
        tl.load(grad_ptr + row).to(tl.float32),
    )
    if NEGATE:
        grad = -grad
    hot = column == tl.load(target_ptr + row) - first
    difference = _logits(logits_ptr + row * stride, column, inside, valid) - peak
    if NARROW:
        soft = softmax(difference, total)
    else:
        soft = (exp_f64(difference.to(tl.float64)) / total.to(tl.float64)).to(tl.float32)
    value = rounded((tl.where(hot, 1.0, 0.0) - soft) * grad, DTYPE)
    tl.store(out_ptr + row * width + column, value, mask=inside)


def is_narrow(hip: bool) -> bool:
    """Whether exponentials come from `narrow.py`: NVIDIA's compiler. The interpreter does not fuse."""
    return not hip and isinstance(sums_kernel, triton.JITFunction)


def _plan_forward(
    logits: torch.Tensor, first: int, valid: int, size: int, negate: bool
) -> tuple[Launch, Launch, Launch]:
    local = logits.shape[-1]
    rows, here, stride = logits.numel() // local, lanes_per_rank(size), row_stride(logits)
    width = local // here
    lanes = {"WIDTH": width, "LANES_HERE": here}
    levels = {"BLOCK_LEVELS": SUMS[0].bit_length() - 1}
    levels["MORE_LEVELS"] = (triton.cdiv(width, SUMS[0]) - 1).bit_length()
    narrow = {"NARROW": is_narrow(torch.version.hip is not None)}
    every, last = (
        {"LANES_ALL": LANES},
        {"LEVELS": LANES.bit_length() - 1, "NEGATE": negate, "ROWS": FINISH[0]},
    )
    peaks = {"LANES_HERE": here, "BLOCK": PEAKS[0]}
    grid = (rows * here, 1, 1)
    return (
        Launch(peaks_kernel, grid, (stride, first, valid, width), peaks, options(PEAKS[1])),
        Launch(sums_kernel, grid, (stride, rows, valid), lanes | every | levels | narrow, options(_warps(SUMS[1]))),
        Launch(finish_kernel, (triton.cdiv(rows, FINISH[0]), 1, 1), (rows,), lanes | every | last, options(FINISH[1])),
    )  # fmt: skip


def _warps(threads: int) -> int:
    """A whole warp at least: 64 threads on AMD."""
    return max(threads, 64) if torch.version.hip else threads


def _columns(logits: torch.Tensor, index: int, valid: int | None) -> tuple[int, int]:
    """The rank's first column, and how many of its columns are no padding."""
    local = logits.shape[-1]
    first = index * local
    return first, local if valid is None else min(max(valid - first, 0), local)


def require(logits: torch.Tensor, target: torch.Tensor, size: int) -> None:
    """Raises VocabularyError as the reference does, and ValueError for what no kernel takes."""
    check_vocabulary(logits.shape[-1] * size)
    if logits.dtype not in DTYPES or target.dtype != torch.int64 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"vocabulary loss: logits {logits.dtype} {tuple(logits.shape)}, targets {target.dtype} "
            f"{tuple(target.shape)}; the kernel takes logits of {DTYPES} and int64 targets, one a row"
        )


def log_prob(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    valid: int | None = None,
    negate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of the targets, the rows' largest logits and sums of exponentials, each [...] float32.

    Args:
        logits, target, group, valid: see `reference.VocabParallelLogProb`.
        negate: return the loss instead.

    Raises:
        VocabularyError: a padded vocabulary that is no multiple of 1024.
        ValueError: dtypes or shapes that the kernel does not take.
    """
    steps = log_prob_steps(logits, target, (group_rank(group), group_size(group)), valid, negate)
    mine = next(steps)
    while True:
        try:
            mine = steps.send(all_gather(mine, group))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def log_prob_steps(
    logits: torch.Tensor,
    target: torch.Tensor,
    rank: tuple[int, int],
    valid: int | None = None,
    negate: bool = False,
) -> Generator[torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`log_prob` of rank (index, size), stopping where ranks exchange: yields its part and is sent every rank's."""
    index, size = rank
    require(logits, target, size)
    logits, target = with_rows(logits), target.contiguous()
    first, valid_here = _columns(logits, index, valid)
    here, device = lanes_per_rank(size), logits.device
    out, peak, total = (torch.empty(target.shape, dtype=torch.float32, device=device) for _ in range(3))
    known = torch.empty(out.numel(), here + 1, dtype=torch.float32, device=device)
    lanes = torch.empty(out.numel(), here, dtype=torch.float32, device=device)
    key = ("forward", device, signature(logits), signature(target), first, valid_here, size, negate)
    launches = _plans(key, _plan_forward, logits, first, valid_here, size, negate) if out.numel() else None
    if launches:
        with device_of(logits):
            launches[0](logits, target, known)
    known = _joined((yield known))
    if launches:
        with device_of(logits):
            launches[1](logits, known, lanes)
    lanes = _joined((yield lanes))
    if launches:
        with device_of(logits):
            launches[2](known, lanes, target, out, peak, total)
    return out, peak, total


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _plan_backward(logits: torch.Tensor, first: int, valid: int, negate: bool) -> Launch:
    width = logits.shape[-1]
    block, threads = GRADIENT
    return Launch(
        grad_kernel,
        (logits.numel() // width, triton.cdiv(width, block), 1),
        (row_stride(logits), first, valid, width),
        {"BLOCK": block, "NEGATE": negate, "NARROW": is_narrow(torch.version.hip is not None)},
        options(threads),
    )


def log_prob_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    peak: torch.Tensor,
    total: torch.Tensor,
    index: int = 0,
    valid: int | None = None,
    negate: bool = False,
) -> torch.Tensor:
    """The logits' gradient [..., V / TP] in their dtype, for `grad` [...] and what `log_prob` returned."""
    logits, target, grad = with_rows(logits), target.contiguous(), grad.contiguous()
    first, valid_here = _columns(logits, index, valid)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        signatures = (signature(logits), signature(target), signature(grad))
        key = ("backward", logits.device, *signatures, first, valid_here, negate)
        plan = _plans(key, _plan_backward, logits, first, valid_here, negate)
        with device_of(logits):
            plan(logits, target, grad, peak, total, out)
    return out
