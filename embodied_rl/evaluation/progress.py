"""A progress bar on stderr for commands that take a while; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Says that so many more are done; the note (a success rate, say) stands behind the bar."""

    def __call__(self, count: int, note: str = "") -> None: ...


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """Show how many of `total` are done, and the time left, until the block ends.

    Yields:
        What is called as the work goes on.
    """
    if not sys.stderr.isatty():
        yield _say_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(count: int, note: str = "") -> None:
            progress.update(task, advance=count, note=note)

        yield advance


def _say_nothing(count: int, note: str = "") -> None:
    """The `advance` of a command without a terminal."""
