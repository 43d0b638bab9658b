"""A progress bar of a run in a terminal, drawn by rich."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from moorage_client.workflow.callbacks import ExecutionCallbacks
from moorage_client.workflow.graph import DAG

NAMES_MAX: Final = 3
"""Maximum running nodes that are named beside the bar; the others are counted."""


class ProgressBar:
    """Shows the progress of a run: `with ProgressBar(dag) as bar:`.

    Give `bar.callbacks` to the executor. On a terminal the bar moves, and stays visible after the
    block. Without a terminal, the bar is written once, at the end.

    Args:
        dag: The graph.
        callbacks: The program's own callbacks, which are called first.
        console: The console for the bar; default: stderr.
        done: The number of nodes that need not run, for example because of a journal.
    """

    def __init__(
        self,
        dag: DAG,
        callbacks: ExecutionCallbacks | None = None,
        console: Console | None = None,
        done: int = 0,
    ) -> None:
        self._own = callbacks or ExecutionCallbacks()
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),  # A name may contain `[/x]`.
            console=console or Console(stderr=True),
        )
        self._bar = self._progress.add_task("", total=len(dag), completed=done)
        self._lock = threading.Lock()
        self._running: dict[str, None] = {}
        self._counts = {"failed": 0, "skipped": 0}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    @property
    def callbacks(self) -> ExecutionCallbacks:
        """The callbacks to give to an executor."""
        own = self._own
        return replace(
            own,
            on_start=_both(own.on_start, self._note_start),
            on_complete=_both(own.on_complete, self._note_completion),
            on_failure=_both(own.on_failure, self._note_failure),
            on_skip=_both(own.on_skip, self._note_skip),
        )

    def _note_start(self, name: str) -> None:
        with self._lock:
            self._running[name] = None
        self._show(0)

    def _note_completion(self, name: str, _: object) -> None:
        with self._lock:
            self._running.pop(name, None)
        self._show(1)

    def _note_failure(self, name: str, _: BaseException) -> None:
        with self._lock:
            self._running.pop(name, None)
            self._counts["failed"] += 1
        self._show(1)

    def _note_skip(self, _: str) -> None:
        with self._lock:
            self._counts["skipped"] += 1
        self._show(1)

    def _show(self, ended: int) -> None:
        with self._lock:
            counts = [f"{count} {kind}" for kind, count in self._counts.items() if count]
            names = list(self._running)[:NAMES_MAX]
            more = len(self._running) - len(names)
            text = ", ".join([*counts, *names, *([f"and {more} more"] if more else [])])
            self._progress.update(self._bar, advance=ended, description=text)


def _both(
    first: Callable[..., object] | None, then: Callable[..., object]
) -> Callable[..., object]:
    """Return a callback that calls both; the second only if the first raises no error."""
    if first is None:
        return then

    def call(*arguments: object) -> None:
        first(*arguments)
        then(*arguments)

    return call
