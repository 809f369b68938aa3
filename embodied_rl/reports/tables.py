"""Tables, tiles and other small pieces of HTML; every text from a file is escaped here."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from embodied_rl.loggers.meanings import FIGURES


def text(value: object) -> str:
    """Escaped."""
    return html.escape(str(value))


def hint(sentence: str) -> str:
    """A question mark that shows a sentence under the pointer, or when it has the focus; empty for none."""
    return f'<span class="hint" tabindex="0" role="note" aria-label="{text(sentence)}"></span>' if sentence else ""


def facts(rows: Mapping[str, Any]) -> str:
    """A table of names and values; those without a value are left out."""
    cells = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows.items() if value is not None)
    return f'<table class="facts">{cells}</table>' if cells else ""


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table whose cells are HTML already; the columns in `numbers` are right-aligned."""
    kind = ['class="n"' if index in numbers else "" for index in range(len(columns))]
    # Hints of a table would be cut off by its scrolling card; those of headings are the browser's own.
    told = [f'title="{text(FIGURES[name])}"' if name in FIGURES else "" for name in columns]
    head = "".join(f"<th {kind[index]} {told[index]}>{text(name)}</th>" for index, name in enumerate(columns))
    body = "".join("<tr>" + "".join(f"<td {kind[index]}>{cell}</td>" for index, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def tile(label: str, number: str, more: str = "", interval: tuple[float, float, float] | None = None) -> str:
    """A figure that is seen at once.

    Args:
        label: what it is.
        number: the figure.
        more: a line below.
        interval: (low, value, high), shares of one: drawn as a bar.
    """
    bar = ""
    if interval is not None:
        low, value, high = (100 * min(1.0, max(0.0, end)) for end in interval)
        bar = f'<div class="range"><i style="left:{low:.1f}%;width:{max(0.5, high - low):.1f}%"></i><b style="left:{value:.1f}%"></b></div>'
    below = f'<div class="more">{text(more)}</div>' if more else ""
    marked = text(label) + hint(FIGURES.get(label.rpartition(": ")[2], ""))
    return f'<div class="tile"><div class="label">{marked}</div><div class="number">{text(number)}</div>{bar}{below}</div>'


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    """What is shown when one asks for it."""
    return f"<details{' open' if is_open else ''}><summary>{text(summary)}</summary>{content}</details>"


def card(content: str, title: str = "") -> str:
    """A block on the page; empty for no content."""
    head = f"<h3>{text(title)}</h3>" if title else ""
    return f'<div class="card">{head}{content}</div>' if content else ""


def percent(value: object) -> str:
    """``97.0%``, or a dash."""
    return f"{100 * value:.1f}%" if isinstance(value, int | float) else "–"


def percent_range(interval: Sequence[float] | None) -> str:
    """``91.5–99.0%``, or a dash."""
    return f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}%" if interval else "–"


def number_range(interval: Sequence[float] | None) -> str:
    """``-0.25 to -0.17``, or a dash."""
    return f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else "–"


def number(value: object, digits: int = 4) -> str:
    """Significant figures, or a dash."""
    return f"{value:.{digits}g}" if isinstance(value, int | float) else "–"


def clock(seconds: object) -> str:
    """``2 min 15 s``, or a dash."""
    if not isinstance(seconds, int | float):
        return "–"
    whole = round(seconds)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"
