"""Shows where a long benchmark is: a bar over problems, libraries and rounds on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Listener(Protocol):
    """Is told how far a benchmark has come."""

    def begin(self, title: str) -> None:
        """A problem starts."""

    def update(self, num_steps: int, doing: str) -> None:
        """So many steps of all problems are done, and this is being done. Called from a thread of its own."""


class Lines:
    """One line for each problem."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str) -> None:
        """Prints the line."""
        self._console.print(title, markup=False, highlight=False)

    def update(self, num_steps: int, doing: str) -> None:
        """Prints nothing."""


class Bar:
    """One bar over all steps of all problems."""

    def __init__(self, bar: Progress, num_steps: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=num_steps)
        self._title = ""

    def begin(self, title: str) -> None:
        """Changes the words beside the bar."""
        self._title = title

    def update(self, num_steps: int, doing: str) -> None:
        """Moves the bar. Draws it now and at no other time: a timed library shares the cores with it."""
        self._bar.update(self._task, completed=num_steps, description=f"{self._title}\n{doing}", refresh=True)


@contextlib.contextmanager
def shown(console: Console, num_steps: int) -> Iterator[Listener]:
    """Show progress on ``console`` until the block is left; a bar leaves nothing behind."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        yield Bar(bar, num_steps)
