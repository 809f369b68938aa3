"""The console: a progress bar and a grouped table on a terminal, elsewhere a plain line at intervals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from embodied_rl.loggers.base import Logger
from embodied_rl.loggers.meanings import SUCCESS_ENDS, derived, meaning_of
from embodied_rl.progress import LINE_INTERVAL_S, clock_text, end_board, number_text, show_board, spoke, wrapped_lines

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_GROUPS = (("Episodes", ("episode", "eval")), ("Time", ("speed", "time")), ("Training", ("train",)))
_LINE_METRICS = ("episode/success", "episode/return", "episode/length", "eval/success", "speed/steps_per_s")


class ConsoleLogger(Logger):
    """Shows how far the run is, how long it still takes and how well it performs."""

    def __init__(
        self,
        total_steps: int,
        run_config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`run_config` gives the title, what ends the run beside its steps, and the work after training."""
        from rich.console import Console

        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._total, self._clock = total_steps, clock
        self._start_step, self._started_s = resume_step or 0, clock()
        run = run_config or {}
        sim, evaluation = run.get("sim") or {}, run.get("evaluation") or {}
        self._title = str(sim.get("task") or sim.get("name") or "training")
        self._caption = SUCCESS_ENDS if sim.get("success_ends_episode") else ""
        self._max_minutes: float | None = run.get("max_minutes")
        self._may_end_early = any(run.get(key) is not None for key in ("stop_at_success", "stop_at_return"))
        self._final_episodes = int(evaluation.get("num_episodes", 0))
        self._latest: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        """Step and time of the first logged iteration, whose own time includes compiling kernels."""
        self._step, self._logged_s = self._start_step, self._started_s
        """Step and time of the last log call; the last line may be printed long after, when the run has been evaluated and filmed."""
        self._next_line_s = -float("inf")
        self._pending = False
        self._is_shown = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._logged_s = step, self._clock()
        if self._first is None and step > self._start_step:
            self._first = step, self._logged_s
        # Metrics that are not measured in every iteration (interim evaluations) stay visible.
        self._latest.update(metrics)
        if self._console.is_terminal:
            self._is_shown = True
            show_board(self._board, self._console)
            return
        self._pending = True
        if self._clock() >= self._next_line_s:
            self._print_line()

    def message(self, text: str) -> None:
        # Wrapped between words on a terminal; unchanged in a file.
        lines = wrapped_lines(text, self._console.width) if self._console.is_terminal else [text]
        self._console.print("\n".join(lines), markup=False)

    def training_ended(self) -> None:
        if self._pending and not self._is_shown:
            self._print_line(is_last=True)

    def close(self) -> None:
        self.training_ended()
        if self._is_shown:
            end_board(self._board)

    def seconds_left(self) -> float | None:
        """Wall-clock seconds left: the steps at this run's own pace and the final evaluation, within max_minutes; None before the first
        step."""
        done, began = self._step - self._start_step, self._started_s
        if done <= 0:
            return None
        if self._first is not None and self._step > self._first[0]:
            done, began = self._step - self._first[0], self._first[1]
        whole = max(0.0, (self._logged_s - began) * (self._total - self._step) / done)
        length, speed = self._latest.get("episode/length"), self._latest.get("speed/steps_per_s", 0.0)
        if length is not None and speed > 0:  # the final evaluation steps as fast as training
            whole += self._final_episodes * length / speed
        return whole if self._max_minutes is None else max(0.0, min(whole, 60.0 * self._max_minutes - self._elapsed_s()))

    def _elapsed_s(self) -> float:
        """Seconds since the user's command, with start-up; without a trainer's clock, since the logger was made."""
        return self._latest.get("speed/wall_clock_s", self._logged_s - self._started_s)

    def _left_text(self) -> str:
        return f"{'≤ ' if self._may_end_early else ''}{clock_text(self.seconds_left())} left"

    def _board(self) -> Group:
        from rich.console import Group

        caption_text = self._caption if "episode/return" in self._latest else ""
        caption = [f"[dim]{line}[/dim]" for line in wrapped_lines(caption_text, min(self._console.width, 100))]
        return Group(self._bar(), metrics_table(self._latest, self._console.width), *caption)

    def _bar(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        bar = Table.grid(padding=(0, 1), expand=False)
        progress = f"{self._step:,}/{self._total:,} steps", f"{min(1.0, self._step / self._total):.0%}"
        times = f"{clock_text(self._elapsed_s())} elapsed", self._left_text()
        width = self._console.width - len(self._title) - sum(len(text) + 1 for text in (*progress, *times)) - 1
        drawn = [ProgressBar(total=self._total, completed=min(self._step, self._total), width=min(width, 36))] if width >= 6 else []
        shown = (f"[cyan]{progress[1]}[/cyan]", times[0], f"[green]{times[1]}[/green]")
        bar.add_row(f"[bold]{self._title}[/bold]", *drawn, progress[0], *shown)
        return bar

    def _print_line(self, *, is_last: bool = False) -> None:
        self._next_line_s, self._pending = self._clock() + LINE_INTERVAL_S, False
        parts = [f"step {self._step:,}/{self._total:,} ({min(1.0, self._step / self._total):.0%})"]
        parts += [f"{meaning_of(name).label} {format_metric(name, self._latest[name])}" for name in _LINE_METRICS if name in self._latest]
        shares = time_shares(self._latest)
        if shares:
            parts.append("time " + " ".join(f"{name} {share:.0%}" for name, share in shares.items()))
        losses = [n for n in self._latest if n.startswith("train/") and n.endswith("loss")]
        parts += [f"{name.removeprefix('train/')} {format_metric(name, self._latest[name])}" for name in losses]
        parts += [f"elapsed {clock_text(self._elapsed_s())}", "training has ended" if is_last else self._left_text()]
        self._console.print(" · ".join(parts), markup=False)
        self._console.file.flush()
        spoke()


def metrics_table(metrics: Mapping[str, float], width: int) -> Table:
    """Table with one column per group of metrics: episodes, time by phase, training; if it is wider than `width`, the first two groups
    share a column."""
    from rich import box
    from rich.console import Console, Group
    from rich.table import Table

    cells = [(title, cell) for title, prefixes in _GROUPS if (cell := _cell(derived(metrics), prefixes)).row_count]
    table = Table(box=box.ROUNDED, show_header=True, header_style="bold", padding=(0, 1))
    for title, _ in cells:
        table.add_column(title, vertical="top")
    if cells:
        table.add_row(*(cell for _, cell in cells))
    if len(cells) < len(_GROUPS) or Console(width=1000).measure(table).maximum <= width:
        return table
    (episodes, figures), (time_title, times), (training, losses) = cells
    table = Table(box=box.ROUNDED, show_header=True, header_style="bold", padding=(0, 1))
    table.add_column(episodes, vertical="top")
    table.add_column(training, vertical="top")
    table.add_row(Group(figures, "", f"[bold]{time_title}[/bold]", times), losses)
    return table


def _cell(metrics: Mapping[str, float], prefixes: Sequence[str]) -> Table:
    """The metrics of these groups, one per line."""
    from rich.table import Table

    cell, shares = Table.grid(padding=(0, 2)), time_shares(metrics)
    for name in [name for prefix in prefixes for name in metrics if name.partition("/")[0] == prefix]:
        group, _, short = name.partition("/")
        share = shares.get(short.removesuffix("_s")) if group == "time" else None
        value = format_metric(name, metrics[name]) + (f" ({share:.0%})" if share is not None else "")
        colour = "green" if short.startswith("success") else "default"
        cell.add_row(meaning_of(name).label, f"[{colour}]{value}[/{colour}]")
    return cell


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """{phase: its share of all ``time/<phase>_s``}, which sum to 1; empty if nothing was timed. Wall-clock time is no phase."""
    phases = [name for name in metrics if name.startswith("time/") and name != "time/wall_clock_s"]
    times = {name.removeprefix("time/").removesuffix("_s"): metrics[name] for name in phases}
    total = sum(times.values())
    return {name: value / total for name, value in times.items()} if total > 0 else {}


def format_metric(name: str, value: float) -> str:
    """Percent for success, seconds for times, thousands separators for speeds, four digits for the rest."""
    short = name.rpartition("/")[2]
    if value != value:
        return "–"
    if short.startswith("success"):
        return f"{value:.1%}"
    if short.endswith("per_s"):
        return f"{value:,.0f}"
    if short == "wall_clock_s":
        return clock_text(value)
    if name.startswith("time/"):
        return f"{value:.2f} s"
    return number_text(value)
