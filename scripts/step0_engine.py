"""Runs the small model in many layouts on one set of processes and compares every layout with the unsharded run.

One engine process arms (or does not arm) the patch layer, imports Megatron once and forks its ranks; each layout then
borrows as many ranks as it needs and gives them a process group of their own. The engine prints one JSON object a line:
``{"event": "begin"|"row"|"error", …}``. The quick start runs it plain, for upstream's own figures, and armed. Upstream
is never measured in an armed process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from step0_plan import ROOT, Task, tasks

RANKS = 8
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _spec(mode: str) -> Any:
    if mode == "deterministic":
        from megatron_plugins.layer_specs import deterministic_gpt_layer_spec

        return deterministic_gpt_layer_spec
    if mode == "ring":
        import step0_ring

        return step0_ring.ring_spec()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)


def _functions(mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(mean of a whole [B, S] loss, log-probability of labels under vocabulary-sharded logits)."""
    from megatron.core import parallel_state, tensor_parallel

    if mode == "deterministic":
        from megatron_plugins.loss import mean_loss
        from megatron_plugins.parallel_layout import ParallelLayout
        from te_overrides.kernels.cross_entropy.reference import vocab_parallel_log_prob

        whole = ParallelLayout(None, None, False)

        def log_prob(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            group = parallel_state.get_tensor_model_parallel_group()
            return vocab_parallel_log_prob(logits, labels, group if dist.get_world_size(group) > 1 else None)

        return lambda per_token: mean_loss(per_token, torch.ones_like(per_token), whole), log_prob

    def upstream_log_prob(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        by_position = logits.transpose(0, 1).float().contiguous()
        loss = tensor_parallel.vocab_parallel_cross_entropy(by_position, labels.transpose(0, 1).contiguous())
        return -loss.transpose(0, 1)

    return lambda per_token: per_token.float().mean(), upstream_log_prob


def _run_model(model: Any, layout: Any, tokens: torch.Tensor, functions: Any) -> dict[int, dict[str, Any]]:
    """Results after one and after three micro-batches."""
    import step0_model

    mean_loss, log_prob = functions
    results: dict[int, dict[str, Any]] = {}
    steps = []
    for index, batch in enumerate(tokens):
        steps.append(step0_model.step(model, layout, batch, mean_loss=mean_loss, log_prob=log_prob))
        if index + 1 in (1, len(tokens)):
            whole = {what: torch.stack([s[what] for s in steps]) for what in ("logits", "logprobs", "loss")}
            results[index + 1] = {**whole, "gradients": step0_model.whole_gradients(model, layout)}
    return results


def _run(task: Task, mode: str, folder: Path) -> dict[int, dict[str, Any]]:
    import step0_model

    layout = step0_model.Layout(task.name, task.tp, task.cp, task.sp)
    dtype = TORCH_DTYPES[task.dtype]
    step0_model.initialize(layout)
    tokens = step0_model.byte_tokens(ROOT / "docs")
    checkpoint = folder / f"checkpoint-{task.dtype}.pt"
    model = step0_model.build(layout, dtype, _spec(mode))
    if task.name == "TP1":
        torch.save(step0_model.make_checkpoint(model), checkpoint)
    step0_model.load(model, torch.load(checkpoint))
    functions = _functions(mode)
    if task.kind == "actor":
        return _actor(model, layout, tokens, functions, checkpoint, dtype, mode)
    return _run_model(model, layout, tokens, functions)


def _actor(
    reference: Any,
    layout: Any,
    tokens: torch.Tensor,
    functions: Any,
    checkpoint: Path,
    dtype: torch.dtype,
    mode: str,
) -> dict[int, dict[str, Any]]:
    """A reference runs, other shapes pass through it, then an actor from the same checkpoint runs in the same
    process."""
    import step0_model

    _run_model(reference, layout, tokens[:1], functions)
    for length in (16, 48, 80, 112):
        ids = tokens[0, :1, :length]
        mask = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        reference(ids, torch.arange(length)[None], mask)
    actor = step0_model.build(layout, dtype, _spec(mode))
    step0_model.load(actor, torch.load(checkpoint))
    return _run_model(actor, layout, tokens, functions)


def _serve(pipe: Connection, mode: str, folder: Path) -> None:
    """A rank: waits for (task, rank, store), runs it, answers with seconds or a traceback."""
    torch.set_num_threads(1)
    import megatron_on_cpu

    megatron_on_cpu.install()
    while True:
        message = pipe.recv()
        if message is None:
            return
        task, rank, store = message
        start = time.monotonic()
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, task.ranks), rank=rank, world_size=task.ranks
            )
            results = _run(task, mode, folder)
            if rank == 0:
                torch.save(results, folder / f"{task.key}.pt")
            dist.barrier()
            dist.destroy_process_group()
            pipe.send({"seconds": time.monotonic() - start})
        except BaseException:
            pipe.send({"error": traceback.format_exc()})
            raise


def compare(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Mismatches of one run against the unsharded one, part by part."""
    from te_overrides.kernels.bits import count_mismatches

    parts: dict[str, list[int]] = {}
    for what in ("logits", "logprobs", "loss"):
        parts[what] = list(count_mismatches(got[what], want[what])[:2])
    mismatched = total = 0
    for name, gradient in want["gradients"].items():
        differ, count, _ = count_mismatches(got["gradients"][name], gradient)
        mismatched, total = mismatched + differ, total + count
    parts["gradients"] = [mismatched, total]
    return {
        "mismatched": sum(part[0] for part in parts.values()),
        "total": sum(part[1] for part in parts.values()),
        "max_abs_logprob": float((got["logprobs"] - want["logprobs"]).abs().max()),
        "parts": parts,
    }


def _say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Engine:
    """Hands tasks to idle ranks; a layout waits until as many as it needs are idle."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode, self.folder = mode, folder
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, mode, folder), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, todo: list[Task]) -> None:
        """Run every task; reports a row for each once its unsharded run is known."""
        import megatron.core

        idle = list(range(RANKS))
        running: dict[int, tuple[Task, list[int], list[float]]] = {}
        waiting, number = list(todo), 0
        baselines: set[str] = set()
        while waiting or running:
            for task in list(waiting):
                ready = task.name == "TP1" or task.dtype in baselines
                if ready and task.ranks <= len(idle):
                    waiting.remove(task)
                    ranks, idle = idle[: task.ranks], idle[task.ranks :]
                    store = str(self.folder / f"store-{self.mode}-{number}")
                    for rank, worker in enumerate(ranks):
                        self.pipes[worker].send((task, rank, store))
                    running[number] = (task, ranks, [])
                    number += 1
                    _say(event="begin", mode=self.mode, task=asdict(task), megatron=megatron.core.__version__)
            owner = {worker: key for key, (_, ranks, _) in running.items() for worker in ranks}
            for pipe in wait([self.pipes[worker] for worker in owner]):
                worker = self.pipes.index(pipe)  # type: ignore[arg-type]
                key = owner[worker]
                task, ranks, seconds = running[key]
                try:
                    answer = self.pipes[worker].recv()
                except EOFError:
                    answer = {
                        "error": f"rank process {worker} died, exit status {self.processes[worker].exitcode}"
                    }
                if "error" in answer:
                    _say(event="error", mode=self.mode, task=asdict(task), message=answer["error"])
                    raise SystemExit(2)
                seconds.append(answer["seconds"])
                if len(seconds) == task.ranks:
                    del running[key]
                    idle += ranks
                    if task.name == "TP1":
                        baselines.add(task.dtype)
                    self._report(task, max(seconds))

    def _report(self, task: Task, seconds: float) -> None:
        got = torch.load(self.folder / f"{task.key}.pt")
        want = torch.load(self.folder / f"TP1-{task.dtype}.pt")
        for micro_batches in want:
            _say(
                event="row",
                mode=self.mode,
                task=asdict(task),
                micro_batches=micro_batches,
                seconds=seconds,
                result=compare(got[micro_batches], want[micro_batches]),
            )

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(timeout=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("upstream", "ring", "deterministic"))
    parser.add_argument("--only", action="append", help="run only these layouts (TP1 is always run)")
    parser.add_argument("--te-sources", type=Path, default=ROOT / ".venv" / "transformer-engine-sources")
    args = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which fails on machines that are not in their own DNS.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    if args.mode == "deterministic":
        os.environ["DETERMINISTIC_ROCM"] = "invariant"
        import patches.auto  # noqa: F401
    else:
        os.environ.pop("DETERMINISTIC_ROCM", None)
    import megatron.core.models.gpt  # noqa: F401  imported once, before the ranks are forked

    import step0_model  # noqa: F401

    if args.mode == "ring":
        import step0_ring

        step0_ring.load_ring(args.te_sources)
    todo = [t for t in tasks(args.mode) if not args.only or t.name == "TP1" or t.name in args.only]
    with tempfile.TemporaryDirectory(prefix="step0-") as name:
        os.environ.setdefault("DETERMINISTIC_ROCM_LEDGER", f"{name}/determinism-ledger.json")
        engine = Engine(args.mode, Path(name))
        engine.run(todo)
        engine.close()


if __name__ == "__main__":
    main()
