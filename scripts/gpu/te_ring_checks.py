"""The merge inside TransformerEngine's own context-parallel attention, with its real compiled kernels.

    python scripts/gpu/te_ring_checks.py [--ranks 2] [--json [FILE]]

Needs an installed TransformerEngine and a GPU. Mode `stable` keeps upstream's ring and replaces what merges its steps.
Each rank is a process; on a machine with fewer GPUs than ranks they share one, and the ring's messages go through the
host over gloo (the bytes are the same, the time is not, so no time is measured). Reported, beside upstream as it is:

    called      how often the replaced functions ran in one forward
    close       largest difference of the output to the one of a single rank, the same kernels
    repeats     elements that differ between repeats: at once, after other shapes, on a side stream
    packed      the same for a packed batch (thd), whose corrections upstream has in C++

Exit status 1 if a replaced function was not called, a repeat differs, or the output is farther from a single rank's
than upstream's own by more than a tenth. Exit status 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
HEADS, GROUPS, D, LENGTH = 16, 4, 128, 4096
CONTEXT_PARALLEL = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


class _Staged:
    """A send and a receive that meet in host memory; `wait` brings what came to the device. Waiting twice is once."""

    def __init__(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, group: Any) -> None:
        self.received, self.host = received, torch.empty(received.shape, dtype=received.dtype)
        self.outgoing = sent.cpu()
        self.requests = [dist.isend(self.outgoing, to, group), dist.irecv(self.host, source, group)]

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        if self.requests:
            self.received.copy_(self.host)
        self.requests = []


def _stage(context_parallel: Any) -> None:
    def communicate(
        rank: int, sent: Any, to: int, received: Any, source: int, group: Any, batched: Any
    ) -> Any:
        return [_Staged(sent, to, received, source, group)]

    context_parallel.flash_attn_p2p_communicate = communicate


def _zigzag(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    chunks = x.chunk(2 * ranks, 0)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def _counted(module: Any, names: list[str], calls: Counter[str]) -> None:
    for name in names:
        function = getattr(module, name)

        def call(*arguments: Any, name: str = name, function: Any = function) -> Any:
            calls[name] += 1
            return function(*arguments)

        setattr(module, name, call)


def rank_main(rank: int, ranks: int, armed: bool, store: str, found: Any) -> None:
    """One rank; rank 0 puts its report into `found`."""
    os.environ.update(
        {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "DETERMINISTIC_ROCM": "stable" if armed else ""}
    )
    import patches.auto  # noqa: F401

    torch.cuda.set_device(rank % torch.cuda.device_count())
    shared = torch.cuda.device_count() < ranks
    dist.init_process_group("gloo" if shared else "nccl", f"file://{store}", rank=rank, world_size=ranks)
    import transformer_engine.pytorch as te

    cp = sys.modules[CONTEXT_PARALLEL]
    if shared:
        _stage(cp)
    from patches import current_ledger, gate

    ledger = current_ledger()
    if ledger is not None:
        gate.settle(ledger)
    report: dict[str, Any] = {
        "states": {}
        if ledger is None
        else {i: e.state for i, e in ledger.entries.items() if i.startswith("te.")},
        "bindings": {
            n: getattr(cp.tex, n).__doc__ for n in ("thd_second_half_lse_correction", "thd_out_correction")
        },
    }
    calls: Counter[str] = Counter()
    _counted(cp, [n for n in dir(cp) if n.startswith("flash_attn_fwd") and n.endswith("correction")], calls)
    _counted(cp.tex, ["thd_second_half_lse_correction", "thd_out_correction"], calls)
    generator = torch.Generator("cuda").manual_seed(0)

    def operands(length: int) -> list[torch.Tensor]:
        return [
            torch.randn(length, 1, n, D, device="cuda", dtype=torch.bfloat16, generator=generator)
            for n in (HEADS, GROUPS, GROUPS)
        ]

    def attention(parallel: bool, layout: str) -> Any:
        mask = "padding_causal" if layout == "thd" else "causal"
        module = te.DotProductAttention(
            HEADS, D, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format=layout, attn_mask_type=mask
        )
        if parallel:
            module.set_context_parallel_group(
                dist.group.WORLD, list(range(ranks)), torch.cuda.Stream(), "p2p"
            )
        return module

    whole, other = operands(LENGTH), operands(LENGTH // 2)
    for layout in ("sbhd", "thd"):
        alone, ring = attention(False, layout), attention(True, layout)

        def forward(
            module: Any, tensors: list[torch.Tensor], parallel: bool, layout: str = layout
        ) -> torch.Tensor:
            length = tensors[0].shape[0] * (ranks if parallel else 1)
            if layout == "sbhd":
                return module(*tensors)
            bounds = torch.tensor([0, length // 4, length], dtype=torch.int32, device="cuda")
            packed = [x.squeeze(1) for x in tensors]
            return module(
                *packed, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds,
                cu_seqlens_kv_padded=bounds, max_seqlen_q=length, max_seqlen_kv=length,
            )  # fmt: skip

        def shard(x: torch.Tensor, layout: str = layout) -> torch.Tensor:
            if layout == "sbhd":
                return _zigzag(x, rank, ranks).contiguous()
            parts = x.split([x.shape[0] // 4, x.shape[0] - x.shape[0] // 4])
            return torch.cat([_zigzag(part, rank, ranks) for part in parts]).contiguous()

        with torch.no_grad():
            mine, others = [shard(x) for x in whole], [shard(x) for x in other]
            want = shard(forward(alone, whole, False))
            calls.clear()
            first = forward(ring, mine, True)
            row: dict[str, Any] = {
                "called": dict(calls),
                "close": float((first.float() - want.float()).abs().max()),
            }
            differing = [int((forward(ring, mine, True) != first).sum()) for _ in range(5)]
            for _ in range(3):
                forward(ring, others, True)
            differing.append(int((forward(ring, mine, True) != first).sum()))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                late = forward(ring, mine, True)
            torch.cuda.current_stream().wait_stream(stream)
            differing.append(int((late != first).sum()))
            row["repeats"], row["total"] = differing, first.numel()
        report[layout] = row
    report["shared device"] = shared
    if rank == 0:
        found.update(report)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    from megatron_plugins.verify.outputs import add_json, write_json

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    add_json(parser)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: sought a GPU that torch can use, found none", file=sys.stderr)
        raise SystemExit(2)
    context = torch.multiprocessing.get_context("spawn")
    reports: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "ranks": args.ranks,
        "torch": torch.__version__,
    }
    with context.Manager() as manager:
        for name, armed in (("upstream", False), ("ours", True)):
            found = manager.dict()
            with tempfile.TemporaryDirectory() as folder:
                arguments = (args.ranks, armed, f"{folder}/store", found)
                torch.multiprocessing.spawn(rank_main, arguments, nprocs=args.ranks)
            reports[name] = dict(found)
    write_json(args.json or "-", reports)
    broken = []
    for layout in ("sbhd", "thd"):
        ours, upstream = reports["ours"][layout], reports["upstream"][layout]
        if any(ours["repeats"]):
            broken.append(f"{layout}: repeats differ in {ours['repeats']} of {ours['total']} elements")
        if ours["close"] > 1.1 * upstream["close"]:
            broken.append(f"{layout}: {ours['close']} from a single rank, upstream {upstream['close']}")
        if ours["called"] != upstream["called"] or not ours["called"]:
            broken.append(f"{layout}: called {ours['called']}, upstream {upstream['called']}")
    print("\n".join(f"BROKEN {line}" for line in broken) or "0 contract breaks", file=sys.stderr)
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    main()
