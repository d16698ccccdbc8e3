"""Runs the rows of one side on a set of processes and prints one JSON object a line.

A process that computes as upstream does must never have been armed, so each side has an engine of its own:
``python -m megatron_plugins.verify.model.engine SIDE OPTIONS``. It imports Megatron once, forks its ranks, and gives
every row as many idle ranks as it needs and a process group of their own. A row that fails is reported with the
traceback of the rank that failed first; the ranks are killed and forked anew, and the other rows go on.

Events: ``{"event": "start"|"begin"|"step"|"row"|"failed", …}``; a step is told by rank 0. They have standard output to
themselves and one writer, this process: whatever else is printed, by ranks too, goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

from megatron_plugins.verify.interrupts import become_deaf
from megatron_plugins.verify.model.plan import BASELINE, SHAPES, SIDES, Row, Setting, selected

ROW_SECONDS = 420.0
"""A row that takes longer hangs."""


_ending = False


def _end(*_: Any) -> None:
    """SIGTERM: as any error, ranks are ended and files removed on the way out."""
    global _ending
    _ending = True
    sys.exit(1)


def _leave_if_asked() -> None:
    # Python drops what is raised in its hooks around a fork, the exit of `_end` included.
    if _ending:
        sys.exit(1)


def _serve(pipe: Connection, setting: Setting, baseline: Path, inherited: list[Connection]) -> None:
    """A rank: waits for (row, rank, store), runs it, answers with records or a traceback.

    Args:
        inherited: the engine's ends of pipes; open here, they would keep the ranks from seeing that it is gone.
    """
    become_deaf()
    for end in inherited:
        end.close()
    arm(setting.side)
    import torch

    from megatron_plugins.verify.model import train

    torch.set_num_threads(1)
    if setting.device == "cpu":
        from megatron_plugins.verify.model import on_cpu

        on_cpu.install_for_training()
    while True:
        try:
            message = pipe.recv()
        except EOFError:  # the engine was killed
            return
        if message is None:
            return
        row, rank, store = message
        start = time.monotonic()
        try:

            def on_step(done: int, rank: int = rank) -> None:
                if rank == 0:
                    pipe.send({"step": done})

            is_baseline = row.name == BASELINE
            records, phases = train.run_row(setting, row, rank, store, baseline, is_baseline, on_step)
            peak = 0
            if setting.device == "cuda":
                peak = torch.cuda.max_memory_allocated()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            seconds = time.monotonic() - start
            pipe.send({"records": records, "seconds": seconds, "phases": phases, "peak_bytes": peak})
        except BaseException:
            pipe.send({"error": traceback.format_exc(), "rank": rank})
            raise


def arm(side: str) -> None:
    """Arm the patch layer for our side, and see that it is off for any other. Before megatron is imported."""
    if side == "deterministic":
        os.environ["DETERMINISTIC_ROCM"] = "invariant"
        import patches.auto  # noqa: F401
    else:
        os.environ.pop("DETERMINISTIC_ROCM", None)


_events: TextIO = sys.stdout


def _say(**event: Any) -> None:
    # One write, or the end of the line comes after what somebody else has to say.
    _events.write(json.dumps(event) + "\n")
    _events.flush()


def keep_standard_output() -> None:
    """From here on events alone are written to standard output."""
    global _events
    _events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


class _Running:
    """A row under way on some ranks."""

    def __init__(self, row: Row, workers: list[int]) -> None:
        self.row, self.workers = row, workers
        self.answers: list[dict[str, Any]] = []
        self.deadline = time.monotonic() + ROW_SECONDS


class Engine:
    """Hands rows to idle ranks; a row waits until as many as it needs are idle, and for the baseline.

    Args:
        setting: what all rows share.
        ranks: how many processes.
        folder: for the baseline and rendezvous files.
        one_at_a_time: no two rows at once; on a GPU they would share its memory.
        start: how processes start, "fork" or "spawn".
    """

    def __init__(self, setting: Setting, ranks: int, folder: Path, one_at_a_time: bool, start: str) -> None:
        self.setting, self.ranks, self.folder = setting, ranks, folder
        self.one_at_a_time, self.start = one_at_a_time, start
        self.baseline = folder / "baseline.pt"
        self.number = 0
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.idle: list[int] = []

    def _fork(self) -> None:
        context: Any = multiprocessing.get_context(self.start)
        self.pipes, self.processes, self.idle = [], [], list(range(self.ranks))
        for _ in range(self.ranks):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            inherited = list(self.pipes) if self.start == "fork" else []
            arguments = (theirs, self.setting, self.baseline, inherited)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            self.processes.append(process)
            process.start()
            theirs.close()
            _leave_if_asked()

    def _kill(self) -> None:
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def run(self, rows: list[Row]) -> None:
        """Run the baseline, then every row; one event each."""
        self._fork()
        waiting = [Row(BASELINE), *rows]
        running: list[_Running] = []
        have_baseline = False
        while waiting or running:
            _leave_if_asked()
            self._start(waiting, running, have_baseline)
            failed = self._collect(running)
            for run in [r for r in running if len(r.answers) == r.row.ranks]:
                running.remove(run)
                self.idle += run.workers
                if run.row.name == BASELINE:
                    have_baseline = True
                self._report(run)
            if failed is not None:
                run, message = failed
                _say(event="failed", side=self.setting.side, row=run.row.name, message=message)
                # Its peers wait for it in a collective, and rows beside it may share their fate.
                waiting = [r.row for r in running if r is not run] + waiting
                running = []
                self._kill()
                if run.row.name == BASELINE:
                    for row in waiting:
                        _say(
                            event="failed", side=self.setting.side, row=row.name,
                            message=f"the run on one rank, which it is compared with, failed: {_last_line(message)}",
                        )  # fmt: skip
                    return
                self._fork()

    def _start(self, waiting: list[Row], running: list[_Running], have_baseline: bool) -> None:
        for row in list(waiting):
            if self.one_at_a_time and running:
                return
            if row.ranks > len(self.idle) or not (have_baseline or row.name == BASELINE):
                continue
            waiting.remove(row)
            workers, self.idle = self.idle[: row.ranks], self.idle[row.ranks :]
            store = str(self.folder / f"store-{self.number}")
            self.number += 1
            for rank, worker in enumerate(workers):
                self.pipes[worker].send((row, rank, store))
            running.append(_Running(row, workers))
            _say(event="begin", side=self.setting.side, row=row.name)

    def _collect(self, running: list[_Running]) -> tuple[_Running, str] | None:
        """Take the answers that have come; the row that failed and why, if one did."""
        owners = {self.pipes[worker]: (run, worker) for run in running for worker in run.workers}
        for pipe in wait(list(owners), timeout=1.0):
            run, worker = owners[pipe]  # type: ignore[index]
            try:
                answer = self.pipes[worker].recv()
            except (EOFError, ConnectionResetError):
                self.processes[worker].join(timeout=5)
                code = self.processes[worker].exitcode
                answer = {"error": f"a rank's process died with exit status {code}", "rank": worker}
            if "step" in answer:
                _say(
                    event="step", side=self.setting.side, row=run.row.name, done=answer["step"],
                    steps=self.setting.shape.steps,
                )  # fmt: skip
                continue
            if "error" in answer:
                return run, f"rank {answer['rank']}: {answer['error']}"
            run.answers.append(answer)
        for run in running:
            if time.monotonic() > run.deadline:
                return run, f"not done after {ROW_SECONDS:.0f} seconds"
        return None

    def _report(self, run: _Running) -> None:
        _say(
            event="row",
            side=self.setting.side,
            row=run.row.name,
            seconds=max(answer["seconds"] for answer in run.answers),
            phases=run.answers[0]["phases"],
            peak_bytes=max(answer["peak_bytes"] for answer in run.answers),
            columns=combine([record for answer in run.answers for record in answer["records"]]),
        )

    def close(self) -> None:
        """Let the ranks end."""
        self._kill()


def combine(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Columns of a row out of the records of all its ranks: replicas count once, by the worst of them."""
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        key = (record["column"], record["name"], *record["replica"])
        if key not in parts or record["mismatched"] > parts[key]["mismatched"]:
            parts[key] = record
    columns: dict[str, dict[str, Any]] = {}
    for record in parts.values():
        column = columns.setdefault(
            record["column"], {"mismatched": 0, "total": 0, "first": None, "max_abs": 0.0}
        )
        column["mismatched"] += record["mismatched"]
        column["total"] += record["total"]
        column["first"] = column["first"] or record["first"]
        column["max_abs"] = max(column["max_abs"], record["max_abs"])
    return columns


def _last_line(message: str) -> str:
    lines = [line for line in message.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else message


def arguments() -> argparse.ArgumentParser:
    """The options that the command line hands on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--shape", required=True, help="JSON of a plan.Shape, or a name")
    parser.add_argument("--rows", nargs="*", default=None)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--te-sources", type=Path, default=None)
    parser.add_argument(
        "--start", choices=("fork", "spawn"), help="how ranks start; on a GPU they are spawned"
    )
    return parser


def shape_of(text: str) -> Any:
    """A shape by name or as JSON."""
    from megatron_plugins.verify.model.plan import Shape

    return SHAPES[text] if text in SHAPES else Shape(**json.loads(text))


def main(argv: list[str] | None = None) -> None:
    """Run one side's rows."""
    args = arguments().parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    keep_standard_output()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which fails on machines that are not in their own DNS.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    arm(args.side)
    import torch

    torch.set_num_threads(1)
    if args.side == "ring":
        from megatron_plugins.verify.model import te_ring

        te_ring.load_ring(args.te_sources)
    import megatron.core
    from megatron.core.models.gpt import GPTModel  # noqa: F401  imported once, before the ranks are forked

    from megatron_plugins.verify.model import train  # noqa: F401

    setting = Setting(shape_of(args.shape), args.dtype, args.device, args.side)
    rows = selected(args.rows, args.ranks)
    _say(
        event="start",
        side=args.side,
        megatron=megatron.core.__version__.partition("+")[0],
        shape=asdict(setting.shape),
    )
    with tempfile.TemporaryDirectory(prefix="verify-model-") as name:
        os.environ.setdefault("DETERMINISTIC_ROCM_LEDGER", f"{name}/determinism-ledger.json")
        most = max((row.ranks for row in rows), default=1)
        on_gpu = args.device == "cuda"
        # A forked process cannot use a GPU that its parent has as much as counted.
        start = args.start or ("spawn" if on_gpu else "fork")
        ranks = most if on_gpu else max(most, args.ranks)
        engine = Engine(setting, ranks, Path(name), one_at_a_time=on_gpu, start=start)
        try:
            engine.run(rows)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
