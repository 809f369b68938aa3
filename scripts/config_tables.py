"""Writes the tables of docs/configuration.md from the dataclasses of embodied_rl/config, between the markers there.

Use: `.venv/bin/python scripts/config_tables.py`; a test fails when the page and the code disagree.
"""

from __future__ import annotations

from pathlib import Path

from embodied_rl.config.describing import Key, described_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
START, END = "<!-- tables: written by scripts/config_tables.py -->\n", "<!-- end of tables -->"


def tables() -> str:
    """The tables as Markdown."""
    head = "| Key | Type | Bounds | Default | |\n|---|---|---|---|---|\n"
    return "\n".join(f"### {group or 'The run'}\n\n{head}{''.join(map(_row, keys))}" for group, keys in described_keys().items())


def rewritten(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables()}\n{END}{after}"


def _row(key: Key) -> str:
    kind = key.kind if key.bounds else key.kind.replace("|", "\\|")
    default = key.default if key.default == "required" else f"`{key.default}`"
    return f"| `{key.name}` | {kind} | {key.bounds} | {default} | {key.text.replace('``', '`')} |\n"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
