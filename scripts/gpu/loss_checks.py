"""Vocabulary loss and embedding on this GPU: bits against the references, then times against the usual loss.

    python scripts/gpu/loss_checks.py [--json [FILE]] [--only bits|times] [--seconds N]

Bits: the fused exponential for every float32 that a difference from the largest logit can be; log-probabilities and
gradients of bf16, fp16 and float32 logits at TP 1, 2, 4 and 8 (slices on one GPU), with padded columns, rows alone
against rows in a batch, repeats; embedding lookup and gradient. Times: forward, backward and both at 4096 rows of
152,064 bf16 logits, against torch's cross entropy in float32 and Megatron's fused one (its arithmetic at TP=1), eager
and compiled. Cells that would start after N seconds are listed as skipped. Exit status 1 when an element differs, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from ffn_checks import Rows
from gemm_checks import median_ms

from megatron_plugins.verify.outputs import add_json, json_alone, write_json
from te_overrides.kernels.cross_entropy import kernel, narrow, ops, reference
from te_overrides.kernels.embedding import kernel as embedding_kernel
from te_overrides.kernels.embedding import reference as embedding_reference
from te_overrides.kernels.launching import Plans
from te_overrides.kernels.portable_math.kernel import exp

ROWS, VOCABULARY, TRUE_VOCABULARY = 4096, 152064, 151936
EXPECTED = (RuntimeError, ValueError, TypeError, AssertionError, triton.runtime.errors.TritonError)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def both_exponentials(wrong_ptr, first, last, BLOCK: tl.constexpr):
    """Counts, a program, the float32 bit patterns from `first` to `last` on which the two disagree."""
    program = tl.program_id(0).to(tl.int64)
    bits = first + program * BLOCK + tl.arange(0, BLOCK)
    x = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    differ = narrow.exp_of_difference(x).to(tl.int32, bitcast=True) != exp(x).to(tl.int32, bitcast=True)
    tl.store(wrong_ptr + program, tl.sum((differ & (bits <= last)).to(tl.int32), 0))


def exponential_checks(rows: Rows) -> None:
    """All of [-0, -inf]: beyond -104 too, where the portable exponential is 0."""
    first, last, block = 0x80000000, 0xFF800000, 1024
    wrong = torch.zeros(triton.cdiv(last - first + 1, block), dtype=torch.int32, device="cuda")
    both_exponentials[(wrong.numel(),)](wrong, first, last, BLOCK=block, enable_fp_fusion=False)
    row = {"check": "exponential", "mismatched": int(wrong.sum()), "total": last - first + 1}
    rows.rows.append(row)
    print(row, flush=True)


def sharded(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, size: int, valid: int | None, negate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of `size` ranks that take turns in one process."""
    parts = [x.contiguous() for x in logits.chunk(size, -1)]
    ranks = [kernel.log_prob_steps(x, target, (i, size), valid, negate) for i, x in enumerate(parts)]
    mine, results = [next(rank) for rank in ranks], []
    for _ in range(2):
        everybody, mine = mine, []
        for rank in ranks:
            try:
                mine.append(rank.send(everybody))
            except StopIteration as end:
                results.append(end.value)
    assert all(torch.equal(result[0], results[0][0]) or result[0].isnan().any() for result in results)
    grads = [
        kernel.log_prob_backward(grad, x, target, *results[i][1:], i, valid, negate)
        for i, x in enumerate(parts)
    ]
    return results[0][0], torch.cat(grads, -1)


def referred(
    logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor, valid: int | None, negate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    function = reference.vocab_parallel_cross_entropy if negate else reference.vocab_parallel_log_prob
    out = function(leaf, target, None, valid)
    out.backward(grad)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def both(rows: Rows, name: str, got: Callable[[], Any], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for part, index in (("output", 0), ("gradient", 1)):
        rows.compare(f"{name}, {part}", lambda index=index: got()[index], want[index])


def loss_checks(rows: Rows) -> None:
    for dtype in DTYPES:
        for valid, scale, negate in ((TRUE_VOCABULARY, 1.0, True), (None, 8.0, False)):
            case_checks(rows, dtype, valid, scale, negate)
    repeats(rows)


def case_checks(rows: Rows, dtype: torch.dtype, valid: int | None, scale: float, negate: bool) -> None:
    """TP degrees, and rows alone against rows in a batch."""
    logits = (scale * torch.randn(48, VOCABULARY, device="cuda")).to(dtype)
    target = torch.randint(0, TRUE_VOCABULARY, (48,), device="cuda")
    logits[1], logits[2, 5], logits[3, 9], logits[4, 7] = -0.0, torch.inf, torch.nan, -torch.inf
    # As a trained model's: one token far above the others.
    logits[8:16].scatter_(1, target[8:16, None], 30.0)
    grad = torch.randn(48, device="cuda") / 4096
    grad[5], grad[6] = 0.0, 1e-30
    want = referred(logits, target, grad, valid, negate)
    name = f"{dtype} valid {valid} x {scale}"
    for size in (1, 2, 4, 8):
        both(rows, f"{name} TP={size}", partial(sharded, logits, target, grad, size, valid, negate), want)
    for cut in (slice(0, 1), slice(13, 14), slice(7, 40)):
        part = partial(sharded, logits[cut], target[cut], grad[cut], 1, valid, negate)
        both(rows, f"{name} rows {cut}", part, (want[0][cut], want[1][cut]))


def repeats(rows: Rows) -> None:
    """The same again and again, and through autograd."""
    logits = (4 * torch.randn(600, 9216, device="cuda")).bfloat16()
    target = torch.randint(0, 9216, (600,), device="cuda")
    grad = torch.randn(600, device="cuda")
    want = referred(logits, target, grad, None, True)
    for _ in range(10):
        both(rows, "again", lambda: sharded(logits, target, grad, 1, None, True), want)

    def through_autograd() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        out = ops.vocab_parallel_cross_entropy(leaf, target)
        out.backward(grad)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    both(rows, "autograd", through_autograd, want)


def embedding_checks(rows: Rows) -> None:
    for dtype in DTYPES:
        ids, grad = (
            torch.randint(-50, 1000, (4096,), device="cuda"),
            torch.randn(4096, 4096, device="cuda").to(dtype),
        )
        ids[1000:1500] = 7
        weight = torch.randn(900, 4096, device="cuda").to(dtype)
        weight[3] = -0.0
        wanted = embedding_reference.embedding_gradient(ids, grad, 900)
        rows.compare(
            f"embedding gradient {dtype}",
            partial(embedding_kernel.embedding_gradient, ids, grad, 900),
            wanted,
        )
        turned = ids.view(2, -1).t()
        wanted = embedding_reference.lookup(turned, weight, 5)
        rows.compare(f"lookup {dtype}", lambda i=turned, w=weight: embedding_kernel.lookup(i, w, 5), wanted)


def megatron(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """megatron.core.fusions.fused_cross_entropy's arithmetic at TP=1: loss and what it keeps, float32 softmax."""
    x = logits.float()
    x = x - x.amax(-1, keepdim=True)
    predicted = x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exponentials = x.exp()
    total = exponentials.sum(-1)
    return total.log() - predicted, exponentials / total.unsqueeze(-1)


def megatron_backward(softmax: torch.Tensor, target: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    hot = torch.arange(softmax.shape[-1], device=softmax.device) == target.unsqueeze(-1)
    return ((softmax - hot.float()) * grad.unsqueeze(-1)).bfloat16()


def times(deadline: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def cell(name: str, functions: dict[str, Callable[[], Any]], repeats: int = 7) -> None:
        if time.monotonic() > deadline:
            found.append({"cell": name, "skipped": "the time was up"})
            return
        kept, errors = {}, {}
        for label, function in functions.items():
            try:
                function()
                kept[label] = function
            except EXPECTED as error:
                errors[label] = f"{type(error).__name__}: {error}"[:300]
        ms = median_ms(kept, repeats)
        first = next(iter(ms.values()))
        found.append(
            {"cell": name, "ms": ms, "ratio": {k: v / first for k, v in ms.items()}, "errors": errors}
        )
        print(name, {k: f"{v:.3f} ({v / first:.3f})" for k, v in ms.items()}, errors or "", flush=True)

    logits = (2 * torch.randn(ROWS, VOCABULARY, device="cuda")).bfloat16()
    target, grad = (
        torch.randint(0, VOCABULARY, (ROWS,), device="cuda"),
        torch.full((ROWS,), 1 / ROWS, device="cuda"),
    )
    _, peak, total = kernel.log_prob(logits, target)
    forward, backward = torch.compile(megatron), torch.compile(megatron_backward)
    softmax = forward(logits, target)[1]

    def launched(**launches: tuple[int, int]) -> Callable[[], Any]:
        """Forward or backward with other blocks or threads."""
        plans = Plans()

        def call() -> Any:
            before = {name: getattr(kernel, name) for name in launches}, kernel._plans
            kernel._plans = plans
            for name, value in launches.items():
                setattr(kernel, name, value)
            try:
                if "GRADIENT" in launches:
                    return kernel.log_prob_backward(grad, logits, target, peak, total)
                return kernel.log_prob(logits, target)
            finally:
                kernel._plans = before[1]
                for name, value in before[0].items():
                    setattr(kernel, name, value)

        return call

    cell("forward", {
        "Megatron fused, compiled": lambda: forward(logits, target),
        "ours": lambda: kernel.log_prob(logits, target, negate=True),
        "copy of the logits": lambda: logits.clone(),
    })  # fmt: skip
    cell("backward", {
        "Megatron fused, compiled": lambda: backward(softmax, target, grad),
        "ours": lambda: kernel.log_prob_backward(grad, logits, target, peak, total, negate=True),
    })  # fmt: skip
    stages = kernel._plan_forward(logits, 0, VOCABULARY, 1, True)
    known, lanes = torch.empty(ROWS, 9, device="cuda"), torch.empty(ROWS, 8, device="cuda")
    out = torch.empty(ROWS, device="cuda")
    cell("parts of forward", {
        "peaks": lambda: stages[0](logits, target, known),
        "sums": lambda: stages[1](logits, known, lanes),
        "finish": lambda: stages[2](known, lanes, target, out, out, out),
    })  # fmt: skip
    cell("sums with other launches", {
        f"{block} columns, {threads} threads": launched(SUMS=(block, threads))
        for block, threads in ((512, 32), (256, 32), (1024, 32), (1024, 64), (2048, 128), (1024, 128), (2048, 64))
    }, 5)  # fmt: skip
    cell("peaks with other launches", {
        f"{block} columns, {threads} threads": launched(PEAKS=(block, threads))
        for block, threads in ((2048, 128), (1024, 64), (4096, 128), (4096, 256))
    }, 5)  # fmt: skip
    cell("gradient with other launches", {
        f"{block} columns, {threads} threads": launched(GRADIENT=(block, threads))
        for block, threads in ((1024, 64), (512, 32), (256, 32), (1024, 128), (2048, 128), (512, 64), (2048, 256))
    }, 5)  # fmt: skip
    leaf = logits.clone().requires_grad_()

    def trained(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            leaf.grad = None
            loss(leaf).backward(grad)

        return step

    def usual(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x.float(), target, reduction="none")

    def fused_both() -> None:
        _, kept = forward(logits, target)
        backward(kept, target, grad)

    cell("forward and backward", {
        "Megatron fused, compiled": fused_both,
        "torch cross_entropy": trained(usual),
        "torch cross_entropy, compiled": trained(torch.compile(usual)),
        "ours": trained(lambda x: ops.vocab_parallel_cross_entropy(x, target)),
    })  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    hidden = torch.randn(ROWS, 4096, device="cuda").bfloat16()
    hot = ids.clone()
    hot[:1024] = 0
    theirs = torch.ops.aten.embedding_dense_backward
    table = torch.randn(VOCABULARY, 4096, device="cuda").bfloat16()
    cell("embedding gradient", {
        "torch": lambda: theirs(hidden, ids, VOCABULARY, -1, False),
        "ours, float32": lambda: embedding_kernel.embedding_gradient(ids, hidden, VOCABULARY),
        "torch, one token 1024 times": lambda: theirs(hidden, hot, VOCABULARY, -1, False),
        "ours, one token 1024 times": lambda: embedding_kernel.embedding_gradient(hot, hidden, VOCABULARY),
        "zeros alone": lambda: torch.zeros(VOCABULARY, 4096, device="cuda"),
    }, 5)  # fmt: skip
    cell("lookup", {
        "torch": lambda: torch.nn.functional.embedding(ids, table),
        "ours": lambda: embedding_kernel.lookup(ids, table, 0),
    }, 5)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json(parser)
    parser.add_argument("--only", choices=("bits", "times"))
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    with json_alone(args.json):
        deadline = time.monotonic() + args.seconds
        torch.manual_seed(0)
        rows = Rows()
        if args.only != "times":
            for check in (exponential_checks, loss_checks, embedding_checks):
                try:
                    check(rows)
                except EXPECTED as error:
                    rows.rows.append(
                        {"check": check.__name__, "mismatched": 1, "total": 1, "error": f"{error!r}"[:600]}
                    )
                print(f"{check.__name__}: {time.monotonic() - deadline + args.seconds:.1f} s", flush=True)
        bad = [row for row in rows.rows if row["mismatched"]]
        for row in bad[:20]:
            print(row, flush=True)
        total = sum(row["total"] for row in rows.rows)
        print(f"{len(rows.rows)} bit checks, {len(bad)} with mismatches, {total:,} elements", flush=True)
        # Times of wrong kernels say where to look, and are no result.
        found = times(deadline) if args.only != "bits" else []
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "bits": rows.rows, "times": found,
    }  # fmt: skip
    write_json(args.json, report)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
