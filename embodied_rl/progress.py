"""Progress of a command: bars with the time left on a terminal, else a line every ten seconds. All of it uses one clock.

Phases may be nested (an evaluation within a training run): a line shows the innermost. On a terminal one display draws everything that
moves, a run's table (`show_board`) above the bars: two displays would write over each other.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LINE_INTERVAL_S, FIRST_LINE_S = 10.0, 1.0
"""Seconds between lines, and to the first line of a command that has printed nothing yet."""
_BESIDE_TITLE = 60
"""Columns of a bar and the text after it; a title that leaves less space gets its own lines."""
_began = time.monotonic()
"""Time at which the user's command began, unless `run_clock` sets another."""


class Advance(Protocol):
    """Reports `count` further units done; the bar shows the note (such as a success rate)."""

    def __call__(self, count: int, note: str = "") -> None: ...


class _Phase:
    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total, self.done, self.note = title, total, 0, ""
        self.began_s = time.monotonic()

    def left_s(self) -> float | None:
        """Seconds left at this phase's own pace; None if unknown."""
        if not self.total or self.done <= 0:
            return None
        return (time.monotonic() - self.began_s) * max(self.total - self.done, 0) / self.done

    def line(self) -> str:
        parts = [self.title if self.total is None else f"{self.title} {self.done:,}/{self.total:,}", self.note]
        parts.append(f"elapsed {clock_text(time.monotonic() - _began)}")
        if (left := self.left_s()) is not None:
            parts.append(f"left {clock_text(left)}")
        return " · ".join(filter(None, parts))


class _Display:
    """The open phases and, on a terminal, the one live display of this process."""

    def __init__(self) -> None:
        self.phases: list[_Phase] = []
        self.board: Callable[[], Any] | None = None
        self.live: Live | None = None
        self.spoke_s: float | None = None
        """Time of the last line; None: no line yet."""
        self.to_stdout = False
        """Whether lines go to stdout; False: to stderr, because a command's output is its result."""
        self._ended: threading.Event | None = None

    def open(self, phase: _Phase) -> None:
        self.phases.append(phase)
        if sys.stderr.isatty():
            if self.live is None:
                from rich.console import Console

                self._start(Console(stderr=True, highlight=False), transient=True)
        elif self._ended is None:
            if self.spoke_s is None:
                self.spoke_s = time.monotonic() + FIRST_LINE_S - LINE_INTERVAL_S
            self._ended = threading.Event()
            threading.Thread(target=self._speak, args=(self._ended,), name="progress", daemon=True).start()

    def close(self, phase: _Phase) -> None:
        self.phases.remove(phase)
        if self.phases:
            return
        if self._ended is not None:
            self._ended.set()
            self._ended = None
        if self.live is not None and self.board is None:
            self.stop()

    def show(self, board: Callable[[], Any], console: Console) -> None:
        if self.board != board:
            self.stop()
            self.board = board
            self._start(console, transient=False)
        if self.live is not None:
            self.live.refresh()

    def stop(self) -> None:
        """Leave the screen as it is, and stop drawing."""
        live, self.live = self.live, None
        if live is not None:
            live.stop()

    def render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bars, titles = Table.grid(padding=(0, 1)), list[Text]()
        width = self.live.console.width if self.live is not None else 80
        # A run's table has its own bar.
        for phase in [phase for phase in self.phases[-1:] if self.board is None or phase.total is not None]:
            bar = ProgressBar(total=phase.total, completed=phase.done, pulse=phase.total is None, width=24 if width >= 100 else 12)
            left = phase.left_s()
            count = "" if phase.total is None else f"{phase.done:,}/{phase.total:,}"
            shown = "" if left is None else f"[green]{clock_text(left)} left[/green]"
            figures: list[ProgressBar | Text | str] = [bar, count, f"{clock_text(time.monotonic() - _began)} elapsed", shown, phase.note]
            if len(phase.title) + _BESIDE_TITLE > width:
                titles += [Text(line) for line in wrapped_lines(phase.title, width)]
            else:
                figures.insert(0, Text(phase.title))
            bars.add_row(*figures)
        parts = [] if self.board is None else [self.board()]
        return Group(*parts, *titles, *([bars] if bars.row_count else []))

    def _start(self, console: Console, *, transient: bool) -> None:
        from rich.live import Live

        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=2, transient=transient)
        self.live.start(refresh=True)

    def _speak(self, ended: threading.Event) -> None:
        while not ended.wait(0.2):
            phases = self.phases[-1:]  # the main thread may close it meanwhile
            if phases and (self.spoke_s is None or time.monotonic() - self.spoke_s >= LINE_INTERVAL_S):
                self.spoke_s = time.monotonic()
                print(phases[0].line(), file=sys.stdout if self.to_stdout else sys.stderr, flush=True)


_display = _Display()


@contextmanager
def progress_bar(title: str, total: int | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """Show progress until the block ends: the number done of `total` and the time left, or without a total only the elapsed time.

    Yields:
        The function to call as the work continues.
    """
    phase = _Phase(title, total)
    if shown:
        _display.open(phase)

    def advance(count: int, note: str = "") -> None:
        phase.done, phase.note = phase.done + count, note

    try:
        yield advance
    finally:
        if shown:
            _display.close(phase)


def show_board(board: Callable[[], Any], console: Console) -> None:
    """Draw what `board` returns, repeatedly while it is shown, above the bars; on `console`, which is a terminal."""
    _display.show(board, console)


def end_board(board: Callable[[], Any]) -> None:
    """Leave the board as it is on the screen; does nothing if it is not shown."""
    if _display.board == board:
        _display.stop()
        _display.board = None


def spoke() -> None:
    """Note that another line reported progress, so that our next line is due an interval later."""
    _display.spoke_s = time.monotonic()


@contextmanager
def run_clock(started: float) -> Iterator[None]:
    """Context of a training run: displayed times count from `started` (``time.monotonic()``), and lines go to stdout with its figures.
    Inside another run clock, such as a study of many runs, the outer one stays."""
    global _began
    if _display.to_stdout:
        yield
        return
    before = _began, _display.to_stdout
    _began, _display.to_stdout = started, True
    try:
        yield
    finally:
        _began, _display.to_stdout = before


def figure_table(title: str, columns: Sequence[str], leading: int = 1) -> Table:
    """An empty console table; its first `leading` columns are names, the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ROUNDED, caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < leading else "right", no_wrap=True)
    return table


def wrapped_lines(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most `width` characters, unless a word is longer; all but the first are indented."""
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def screen_lines(text: str, indent: int = 0) -> list[str]:
    """Wrapped to the terminal's width, at most 100, if stdout is one; else unwrapped."""
    return wrapped_lines(text, min(shutil.get_terminal_size().columns, 100), indent) if sys.stdout.isatty() else [text]


def number_text(value: float, digits: int = 4) -> str:
    """Significant figures, as ``0.1235`` and ``12346``: a power of ten only for very small numbers and from a billion on."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e9 else text


def clock_text(seconds: float | None) -> str:
    """``1:02:03`` or ``2:03``; ``-:--`` if unknown."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
