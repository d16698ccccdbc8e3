"""One side's training step on one GPU, as a JSON object: ``python scripts/benchmarks/model_side.py SIDE OPTIONS``.

A process of its own, because one that computes as upstream does must never have been armed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]


def measure(side: str, shape: Any, repeats: int) -> dict[str, Any]:
    """Milliseconds of forward and backward, of the optimizer step, by part; host milliseconds; peak bytes."""
    import torch
    from model_parts import Parts, table, watch_model

    from megatron_plugins.verify.model import build, train
    from megatron_plugins.verify.model.plan import Row, Setting

    setting = Setting(shape, "bf16", "cuda", side)
    # Upstream runs as it is run: with its fused activation and residual adds.
    changes = {} if side == "deterministic" else {"bias_activation_fusion": True, "bias_dropout_fusion": True}
    row = Row("one rank")
    with tempfile.TemporaryDirectory() as folder, train.process_group(0, 1, f"{folder}/store", "cuda"):
        build.initialize(row)
        trainer = train.Trainer(setting, row, **changes)
        batches = train.tokens(shape)[0]

        def timed(run: Any) -> tuple[float, float]:
            """GPU and host milliseconds of one call."""
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            clock = time.perf_counter()
            start.record()
            run()
            end.record()
            host = time.perf_counter() - clock
            torch.cuda.synchronize()
            return start.elapsed_time(end), host * 1e3

        def step() -> None:
            trainer.step(batches, keep=False)

        warm = time.perf_counter()
        for _ in range(2):
            step()
            trainer.finish()
        torch.cuda.synchronize()
        warm = time.perf_counter() - warm
        torch.cuda.reset_peak_memory_stats()
        steps, optimizer = [], []
        for _ in range(repeats):
            steps.append(timed(step))
            optimizer.append(timed(trainer.finish))
        peak = torch.cuda.max_memory_allocated()
        parts = Parts()
        watch_model(parts, trainer.model)
        step()
        parts.clear()
        watched = [timed(step)[0] for _ in range(2)]
        by_part = {
            name: (forward / len(watched), backward / len(watched))
            for name, (forward, backward) in parts.milliseconds().items()
        }
    return {
        "step_ms": statistics.median(gpu for gpu, _ in steps),
        "optimizer_ms": statistics.median(gpu for gpu, _ in optimizer),
        "host_ms": statistics.median(host for _, host in steps),
        "host_ms_per_layer": statistics.median(host for _, host in steps) / shape.layers,
        "warm_up_s": warm,
        "peak_bytes": peak,
        "parts_ms": table(by_part, statistics.mean(watched)),
        "watched_step_ms": statistics.mean(watched),
        "device": torch.cuda.get_device_name(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DETERMINISTIC_ROCM_LEDGER", os.devnull)
    from megatron_plugins.verify.model.engine import arm, shape_of

    arm(args.side)
    print(json.dumps({"event": "side", **measure(args.side, shape_of(args.shape), args.repeats)}), flush=True)


if __name__ == "__main__":
    main()
