"""The page's style and script. The page forbids every other one (its content security policy), and anything from a network."""

from __future__ import annotations

from functools import cache

from embodied_rl.errors import UserError
from embodied_rl.paths import assets_dir


@cache
def style() -> str:
    """CSS. Raises UserError where the installation lacks the file."""
    return _read("page.css")


@cache
def script() -> str:
    """JavaScript: the switch between light and dark, and what is shown under the pointer."""
    return _read("page.js")


def _read(name: str) -> str:
    path = assets_dir() / "report_page" / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"'{path}' is missing from this installation ({error.strerror}). Install embodied_rl again.") from error
