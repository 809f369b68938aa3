"""docs/architecture.md names files that exist, and the set to read in an evening stays that short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LONGEST_EVENING = 3_500
"""Lines."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def evening_set() -> list[str]:
    return re.findall(r"^\*\*`(\S+?)`\.\*\*", section("The evening set"), re.MULTILINE)


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`(embodied_rl/\S+?)`", PAGE)
    assert len(named) >= 30
    for name in named:
        assert (ROOT / name).is_file(), name
    rooms = re.findall(r"\b([a-z]+)/(?=\s|$)", section("The way of the data"))
    assert len(rooms) >= 15
    for room in rooms:
        assert (ROOT / "embodied_rl" / room / "__init__.py").is_file(), room


def test_the_evening_set_is_short_and_the_readme_lists_it() -> None:
    files = evening_set()
    assert len(files) == len(set(files)) == 13
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in files}
    assert sum(lines.values()) <= LONGEST_EVENING, lines
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Read these first\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| \[(\S+?)\]\(\1\)", first, re.MULTILINE) == files


def test_each_file_has_three_sentences() -> None:
    for paragraph in section("The evening set").strip().split("\n\n"):
        text = " ".join(paragraph.partition(".** ")[2].split()) or " ".join(paragraph.partition(".**\n")[2].split())
        assert len(re.findall(r"[.!?](?= [A-Z`]|$)", text)) == 3, text


def test_twenty_changes_take_one_file_each() -> None:
    rows = re.findall(r"^\| (?!To change|---)(.+?) \| (.+?) \|$", section("Where to change what"), re.MULTILINE)
    assert len(rows) == 20
    assert all(len(re.findall(r"`embodied_rl/", files)) == 1 for _, files in rows)
