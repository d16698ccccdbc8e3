"""Ctrl-C ends a command with one line: what it started does not hear it and is ended by the command itself.

A terminal sends SIGINT to every process of the command at once. Ranks that heard it would each print a traceback, and
an engine that died of it would leave ranks behind, which wait on a pipe that their siblings hold open.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STATUS = 130
"""What a shell reports of a command that SIGINT ended."""


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started inside never hear SIGINT, forked or executed; one that comes meanwhile is heard here then.

    Not at once: Python calls hooks around a fork and drops what a signal's handler raises in one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        # What is pending comes now, to the list.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def become_deaf() -> None:
    """For a rank: multiprocessing unblocks signals when it first spawns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _once(*_: object) -> None:
    # What has been started is being ended now; a second Ctrl-C would leave some of it behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_until_interrupted(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The status of ``run(args)``; of one that Ctrl-C ends, `STATUS`, after one line on standard error.

    The line names the files of ``args.json`` and ``args.out`` that were written until then.
    """
    began = time.time()
    before = signal.signal(signal.SIGINT, _once)
    try:
        return run(args)
    except KeyboardInterrupt:
        written = [str(path) for path in _places(args) if path.is_file() and path.stat().st_mtime >= began]
        left = f"written until then: {', '.join(written)}" if written else "nothing written"
        print(f"stopped by the user (Ctrl-C); {left}", file=sys.stderr, flush=True)
        return STATUS
    finally:
        signal.signal(signal.SIGINT, before)


def _places(args: argparse.Namespace) -> list[Path]:
    file, folder = getattr(args, "json", None), getattr(args, "out", None)
    places = [] if file in (None, "-") else [Path(file)]
    if folder is not None and Path(folder).is_dir():
        places += sorted(Path(folder).iterdir())
    return places
