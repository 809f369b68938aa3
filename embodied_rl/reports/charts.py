"""Charts as inline SVG without any script, tables and tiles; every text from a file is escaped here.

Colours have numbers and come from the page's style, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from embodied_rl.loggers.meanings import FIGURES


def text(value: object) -> str:
    """Escaped text."""
    return html.escape(str(value))


def hint(sentence: str) -> str:
    """A question mark that shows a sentence under the pointer or on focus; empty for no sentence."""
    return f'<span class="hint" tabindex="0" role="note" aria-label="{text(sentence)}"></span>' if sentence else ""


def facts(rows: Mapping[str, Any]) -> str:
    """A table of names and values, without empty values."""
    cells = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows.items() if value is not None)
    return f'<table class="facts">{cells}</table>' if cells else ""


def grid(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), meanings: Mapping[str, str] = FIGURES
) -> str:
    """A table of HTML cells; the columns in `numbers` are right-aligned, those in `meanings` have explanations."""
    kind = ['class="n"' if index in numbers else "" for index in range(len(columns))]
    # A table's scrolling card would cut off hints; those of headings are the browser's own.
    hints = [f'title="{text(meanings[name])}"' if name in meanings else "" for name in columns]
    head = "".join(f"<th {kind[index]} {hints[index]}>{text(name)}</th>" for index, name in enumerate(columns))
    body = "".join("<tr>" + "".join(f"<td {kind[index]}>{cell}</td>" for index, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def tile(label: str, number: str, more: str = "", interval: tuple[float, float, float] | None = None) -> str:
    """A prominent figure.

    `interval`: (low, value, high), shares of one: drawn as a bar.
    """
    bar = ""
    if interval is not None:
        low, value, high = (100 * min(1.0, max(0.0, end)) for end in interval)
        bar = f'<div class="range"><i style="left:{low:.1f}%;width:{max(0.5, high - low):.1f}%"></i><b style="left:{value:.1f}%"></b></div>'
    below = f'<div class="more">{text(more)}</div>' if more else ""
    marked = text(label) + hint(FIGURES.get(label.rpartition(": ")[2], ""))
    return f'<div class="tile"><div class="label">{marked}</div><div class="number">{text(number)}</div>{bar}{below}</div>'


def details(summary: str, content: str) -> str:
    """Contents that unfold on request."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def card(content: str, title: str = "") -> str:
    """A block on the page; empty for no content."""
    head = f"<h3>{text(title)}</h3>" if title else ""
    return f'<div class="card">{head}{content}</div>' if content else ""


def clock(seconds: object) -> str:
    """``2 min 15 s``, or a dash."""
    if not isinstance(seconds, int | float):
        return "–"
    whole = round(seconds)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"


MAX_POINTS = 400
_MOST_MARKS = 100
"""Most lines or dots that a drawing has room for."""
NUM_COLOURS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 12, 36
"""Pixels around the plot for the axes' numbers."""
_SIZE = 420, 220
"""Width and height of a drawing in its own units; it fills the available room."""


@dataclass(frozen=True)
class Series:
    """One line of a chart. Raises ValueError if the lengths differ."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    kind: Literal["line", "thin", "dots"] = "line"
    """thin: one of several lines with a drawn mean; dots: occasional measurements, so that each point counts."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """(lowest, highest) at each x."""

    def __post_init__(self) -> None:
        ends = self.band or (self.y, self.y)
        if not len(self.x) == len(self.y) == len(ends[0]) == len(ends[1]):
            raise ValueError(f"series '{self.label}' has {len(self.x)} x and {len(self.y)} y")


@dataclass(frozen=True)
class Frame:
    """Position of the data in the drawing, in its own units."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float

    @staticmethod
    def around(series: Sequence[Series], width: float, height: float, y_range: tuple[float, float] | None = None) -> Frame:
        """Smallest frame around all series."""
        xs = [value for one in series for value in one.x]
        ys = [value for one in series for value in (*one.y, *(one.band[0] if one.band else ()), *(one.band[1] if one.band else ()))]
        low, high = min(xs), max(xs)
        return Frame((low, high) if high > low else (low - 0.5, high + 0.5), y_range or _padded(min(ys), max(ys)), width, height)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Position of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (self.width - _LEFT - _RIGHT), self.height - _BOTTOM - up * (self.height - _TOP - _BOTTOM)

    def to_dict(self) -> dict[str, Any]:
        """Values with which the page's script finds the point under the pointer."""
        return {"x": self.x, "y": self.y, "w": self.width, "h": self.height, "m": [_LEFT, _RIGHT, _TOP, _BOTTOM]}


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "environment steps",
    y_range: tuple[float, float] | None = None,
    percent: bool = False,
    note: str = "",
    meaning: str = "",
) -> str:
    """A figure with a title, a legend if there are several series, and the curves. Empty series are left out.

    Args:
        series: at least one with a point, or the figure is empty.
        y_range: None: the smallest that fits.
        percent: the values are shares of one.
        meaning: a sentence under the pointer.
    """
    shown = [reduced(one) for one in series if len(one.x)]
    if not shown:
        return ""
    frame = Frame.around(shown, *_SIZE, y_range)
    as_text = percent_text if percent else short_number
    parts = [_axes(frame, x_label, as_text)]
    order = sorted(shown, key=lambda one: ("thin", "line", "dots").index(one.kind))
    parts += [_band(frame, one) for one in order if one.band]
    parts += [_curve(frame, one) for one in order]
    data = {
        **frame.to_dict(),
        "xl": x_label,
        "percent": percent,
        "series": [{"l": one.label, "c": one.colour, "x": _compact(one.x), "y": _compact(one.y)} for one in shown if one.kind != "thin"],
    }
    legend = _legend([(one.label, one.colour) for one in shown if one.kind != "thin"]) if len(data["series"]) > 1 else ""
    return figure(title, svg(title, frame, "".join(parts)), legend=legend, data=data, note=note, meaning=meaning)


def reduced(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most about `limit` points: the lowest and the highest of each stretch, so that no peak is lost."""
    count = len(series.x)
    if count <= limit:
        return series
    values = np.asarray(series.y, np.float64)
    kept = {0, count - 1}
    for part in np.array_split(np.arange(count), limit // 2):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    at = sorted(kept)
    pick: Callable[[Sequence[float]], list[float]] = lambda numbers: [float(numbers[index]) for index in at]  # noqa: E731
    band = None if series.band is None else (pick(series.band[0]), pick(series.band[1]))
    return Series(series.label, pick(series.x), pick(series.y), series.colour, series.kind, band)


def scatter_chart(
    title: str, points: Sequence[tuple[float, float, int, str]], *, legend: Sequence[tuple[str, int]], x_label: str, meaning: str = ""
) -> str:
    """A figure of single points (x, y, colour, text under the pointer)."""
    if not points:
        return ""
    xs = _padded(min(p[0] for p in points), max(p[0] for p in points))
    frame = Frame(xs, _padded(min(p[1] for p in points), max(p[1] for p in points)), *_SIZE)
    dots = []
    for x, y, colour, text in points:
        at = frame.at(x, y)
        dots.append(f'<circle class="dot c{colour}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3"><title>{html.escape(text)}</title></circle>')
    drawn = svg(title, frame, _axes(frame, x_label, short_number) + "".join(dots))
    return figure(title, drawn, legend=_legend(legend), meaning=meaning)


def range_chart(
    title: str,
    rows: Sequence[tuple[str, int, float | None, Sequence[tuple[float, float]]]],
    *,
    x_label: str,
    x_range: tuple[float, float],
    mark: float | None,
    note: str,
) -> str:
    """A figure of values with their ranges, a row each; what lies outside of `x_range` is cut.

    Args:
        rows: (label, colour, value, its ranges from the widest and palest on); without a value a row has its label only.
        mark: value of a dashed vertical line.
    """
    frame = Frame(x_range, (0.0, float(len(rows))), 840, _TOP + _BOTTOM + 32 * len(rows))
    parts = [_axes(frame, x_label, None)]
    for place, (label, colour, value, ranges) in enumerate(rows):
        left, y = frame.at(x_range[0], len(rows) - place - 0.7)
        parts.append(f'<text class="tick" x="{left + 4:.1f}" y="{y - 8:.1f}">{html.escape(label)}</text>')
        for width, ends in zip((7, 2)[2 - len(ranges) :], ranges, strict=True):
            (low, _), (high, _) = (frame.at(min(max(end, x_range[0]), x_range[1]), 0) for end in ends)
            style = f"stroke-width: {width}; opacity: {0.3 if width > 2 else 1}"
            parts.append(f'<path class="line c{colour % NUM_COLOURS}" style="{style}" d="M{low:.1f} {y:.1f}L{high:.1f} {y:.1f}"/>')
        if value is not None:
            at, _ = frame.at(value, 0)
            name = f"<title>{html.escape(label)}: {value:.4g}</title>"
            parts.append(f'<circle class="dot c{colour % NUM_COLOURS}" cx="{at:.1f}" cy="{y:.1f}" r="4">{name}</circle>')
    if mark is not None:
        at, _ = frame.at(mark, 0)
        parts.append(f'<line class="mark mark-evaluation" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{frame.height - _BOTTOM}"/>')
    return figure(title, svg(title, frame, "".join(parts)), note=note, wide=True)


def stacked_chart(
    title: str,
    edges: Sequence[float],
    shares: Sequence[tuple[int, str, Sequence[float]]],
    marks: Sequence[tuple[float, str, str]],
    *,
    note: str,
    meaning: str = "",
) -> str:
    """A figure of shares that add up to one between neighbouring edges of the horizontal axis, in minutes.

    Args:
        shares: (colour, label, [n] share of each stretch).
        marks: (x, kind, text): vertical lines in the style ``mark-<kind>``; more than `_MOST_MARKS` of a kind are ticks above the shares.
    """
    frame = Frame((edges[0], edges[-1]), (0.0, 1.0), 1080, 230)
    counts = Counter(kind for _, kind, _ in marks)
    below = np.zeros(len(edges) - 1)
    parts = []
    for colour, label, values in shares:
        upper = below + np.asarray(values)
        for index, (low, high) in enumerate(zip(below, upper, strict=True)):
            if high - low > 1e-4:
                (left, top), (right, bottom) = frame.at(edges[index], high), frame.at(edges[index + 1], low)
                text = f"{label}: {high - low:.0%} from {short_number(edges[index])} to {short_number(edges[index + 1])} min"
                box = f'x="{left:.1f}" y="{top:.1f}" width="{max(0.4, right - left):.1f}" height="{bottom - top:.1f}"'
                parts.append(f'<rect class="area c{colour % NUM_COLOURS}" {box}><title>{html.escape(text)}</title></rect>')
        below = upper
    parts.append(_axes(frame, "minutes of wall-clock", percent_text))
    for x, kind, text in marks:
        at, _ = frame.at(x, 0)
        line = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{_TOP if counts[kind] > _MOST_MARKS else frame.height - _BOTTOM}"'
        parts.append(f'<line class="mark mark-{kind}" {line}><title>{html.escape(text)}</title></line>')
    legend = _legend([(label, colour) for colour, label, _ in shares])
    legend += "".join(f'<span class="key"><i class="line-key mark-{kind}"></i>{kind}</span>' for kind in counts)
    return figure(title, svg(title, frame, "".join(parts)), legend=legend, note=note, meaning=meaning, wide=True)


def figure(
    title: str,
    drawing: str,
    *,
    legend: str = "",
    data: dict[str, Any] | None = None,
    note: str = "",
    meaning: str = "",
    wide: bool = False,
) -> str:
    """A titled figure; `data` is for the page's script, `meaning` a sentence under the pointer."""
    head = f"<figcaption>{html.escape(title)}{hint(meaning)}</figcaption>"
    lines = f'<p class="note">{html.escape(note)}</p>' if note else ""
    keys = f'<div class="legend">{legend}</div>' if legend else ""
    points = "" if data is None else f'<script type="application/json">{json_text(data)}</script>'
    return f'<figure class="chart{" wide" if wide else ""}">{head}{lines}{keys}<div class="plot">{drawing}</div>{points}</figure>'


def svg(title: str, frame: Frame, content: str) -> str:
    size = f'viewBox="0 0 {frame.width:g} {frame.height:g}"'
    return f'<svg {size} role="img" aria-label="{html.escape(title)}" preserveAspectRatio="xMidYMid meet">{content}</svg>'


def json_text(value: object) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) within [low, high]."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first = math.ceil(low / step - 1e-9)
    ticks = []
    while first * step <= high + 1e-9 * step:
        ticks.append(0.0 if first == 0 else round(first * step, 12))
        first += 1
    return ticks


def short_number(value: float) -> str:
    """Four figures at most: 12.5k, 3M, 0.0012."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.3g}" if size == 0 or size >= 1e-3 else f"{value:.2g}"


def percent_text(value: float) -> str:
    return f"{100 * value:.4g}%"


def _labelled(ticks: Sequence[float], as_text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Ticks with their labels, which have all their figures if short ones would be equal."""
    labels = [as_text(tick) for tick in ticks]
    if len(set(labels)) < len(ticks):
        labels = [f"{tick:,.12g}" for tick in ticks]
    return list(zip(ticks, labels, strict=True))


def _axes(frame: Frame, x_label: str, as_text: Callable[[float], str] | None) -> str:
    """Axes with their numbers; `as_text`: of the vertical one, None: it has none."""
    left, bottom = frame.at(frame.x[0], frame.y[0])
    right, _ = frame.at(frame.x[1], frame.y[1])
    parts = []
    for tick, label in _labelled(nice_ticks(*frame.y), as_text) if as_text else ():
        _, y = frame.at(frame.x[0], tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    for tick, label in _labelled(nice_ticks(*frame.x, count=max(4, int(frame.width // 100))), short_number):
        x, _ = frame.at(tick, frame.y[0])
        # The last number would leave the drawing, the axis's name would overlap it.
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    parts.append(f'<text class="tick name" x="{right:.1f}" y="{bottom + 31:.1f}" text-anchor="end">{html.escape(x_label)}</text>')
    return "".join(parts)


def _curve(frame: Frame, series: Series) -> str:
    points = [frame.at(x, y) for x, y in zip(series.x, series.y, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = f'<path class="{series.kind} c{series.colour % NUM_COLOURS}" d="{path}"/>'
    if (series.kind == "dots" and len(points) <= _MOST_MARKS) or len(points) == 1:
        drawn += "".join(f'<circle class="dot c{series.colour % NUM_COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    return drawn


def _band(frame: Frame, series: Series) -> str:
    assert series.band is not None, "only series with a band are asked for"
    low, high = series.band
    there = [frame.at(x, y) for x, y in zip(series.x, high, strict=True)]
    back = [frame.at(x, y) for x, y in zip(reversed(series.x), reversed(low), strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*there, *back]) + "Z"
    return f'<path class="band c{series.colour % NUM_COLOURS}" d="{path}"/>'


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    return "".join(f'<span class="key"><i class="c{colour % NUM_COLOURS}"></i>{html.escape(label)}</span>' for label, colour in entries)


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range with a margin above and below, so that no line touches the edge."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        half = abs(low) * 0.5 or 0.5
        return low - half, high + half
    return low - 0.06 * (high - low), high + 0.06 * (high - low)


def _compact(values: Sequence[float]) -> list[float]:
    """Values with six significant figures, as displayed."""
    return [float(f"{value:.6g}") for value in values]
