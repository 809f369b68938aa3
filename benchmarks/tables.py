"""What the benchmarks print alike: aligned tables, and the machine and versions that the figures belong to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from embodied_rl.versions import machine, versions


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest entry; the first is set left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()

    return "\n".join(line(cells) for cells in (header, rule, *rows))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for the documentation."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def provenance(*packages: str) -> str:
    """One line: processor, usable cores, and versions of Python, torch, numpy and the named packages."""
    known = versions()
    names = ["embodied_rl", "python", "torch", "numpy", "gymnasium", *packages]
    return f"{machine()['cpu']}, {machine()['cores']} cores; " + ", ".join(f"{name} {known.get(name) or _version(name)}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
