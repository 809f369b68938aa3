"""What commands print: text and tables that fit the terminal, and tables with tabs, unpadded, into pipes and files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from embodied_rl.progress import wrapped_lines

if TYPE_CHECKING:
    from rich.table import Table


def terminal_width() -> int:
    """Characters of a line: those of the terminal (or of COLUMNS), at most 100; 100 where there is neither."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def columns(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Names and what they mean side by side in lines of at most `width` characters; a long name has a line for itself."""
    left = min(max(len(name) for name, _ in rows), width // 3)
    lines = []
    for name, text in rows:
        room = wrapped_lines(text, width - left - 4)
        if len(name) > left:
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {name if number == 0 else '':<{left}}  {part}" for number, part in enumerate(room or [""])]
    return lines


def print_tables(*tables: Table) -> None:
    """Print tables. On a terminal those that would be wider than it are written a row at a time, as ``name: heading value, …``; into a pipe
    or file go the title and a line a row, with tabs between its cells."""
    from rich.console import Console

    if not sys.stdout.isatty():
        for table in tables:
            rows = ["\t".join(row).rstrip("\t") for row in _cells(table)]
            print("\n".join([*_text(table.title), *rows, *_text(table.caption)]))
        return
    console = Console(highlight=False)
    for table in tables:
        if all(column.no_wrap for column in table.columns) and Console(width=1000).measure(table).maximum > console.width:
            print("\n".join(_as_rows(table, console.width)))
        else:
            console.print(table)


def _cells(table: Table) -> list[list[str]]:
    """The headings, then the rows, without markup."""
    from rich.text import Text

    def plain(cell: object) -> str:
        return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [[str(column.header) for column in table.columns], *([plain(cell) for cell in row] for row in rows)]


def _as_rows(table: Table, width: int) -> list[str]:
    headings, *rows = _cells(table)
    lines = wrapped_lines(str(table.title or ""), width)
    for name, *cells in rows:
        told = ", ".join(f"{heading} {cell}" for heading, cell in zip(headings[1:], cells, strict=True) if cell)
        lines += wrapped_lines(f"  {name or headings[0]}: {told}", width, 6)
    return [*lines, *(part for line in _text(table.caption) for part in wrapped_lines(line, width))]


def _text(heading: object) -> list[str]:
    """A table's title or caption, where it has one."""
    return [str(heading)] if heading else []
