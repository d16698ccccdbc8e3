"""Shows which runs are under way: a bar on a terminal, one line per finished run elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress(AbstractContextManager["Progress"]):
    """Names of the runs that have begun and of those that have ended.

    with Progress("layouts", total=30) as progress:
        progress.begin("TP2 bf16")
        progress.end("TP2 bf16", "0 of 4,096 differ")
    """

    def __init__(self, title: str, total: int, console: Console | None = None) -> None:
        self.title, self.total, self.done = title, total, 0
        self.console = console or Console()
        self.running: list[str] = []
        self._bar: RichProgress | None = None
        if self.console.is_terminal:
            self._bar = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[running]}", markup=False),
                console=self.console,
            )
            self._task = self._bar.add_task(title, total=total, running="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str) -> None:
        """A run has started."""
        self.running.append(name)
        self._update()

    def end(self, name: str, result: str) -> None:
        """A run that was begun has ended; `result` is shown beside its name.

        Raises:
            ValueError: no run of this name is under way.
        """
        if name not in self.running:
            raise ValueError(f"progress: {name!r} ends, but only {self.running} are under way")
        self.running.remove(name)
        self.done += 1
        line = f"[{self.done}/{self.total}] {name}: {result}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._update()

    def _update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, running=", ".join(self.running))
