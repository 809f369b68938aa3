"""Writes the tables of docs/configuration.md from the dataclasses of embodied_rl/config, between the markers there.

Use: `.venv/bin/python scripts/config_tables.py`; a test fails when the page and the code disagree.
"""

from __future__ import annotations

from pathlib import Path

from embodied_rl.config.describing import Key, described_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
START, END = "<!-- tables: written by scripts/config_tables.py -->\n", "<!-- end of tables -->"


def tables() -> str:
    """A list of the sections, then the tables, as Markdown. Each key has an anchor of its name: ``configuration.md#algorithm.gamma``."""
    head = "| Key | Type | Bounds | Default | |\n|---|---|---|---|---|\n"
    groups = described_keys()
    seen: set[str] = set()
    sections, links = [], []
    for group, keys in groups.items():
        rows = [_row(key, is_first=key.name not in seen) for key in keys]
        linked = next((key.name for key in keys if key.name not in seen), keys[0].name)
        seen |= {key.name for key in keys}
        links.append(f"[{group or 'the run'}](#{linked})")
        sections.append(f"### {group or 'The run'}\n\n{head}{''.join(rows)}")
    return "\n".join([f"{' · '.join(links)}\n", *sections])


def rewritten(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables()}\n{END}{after}"


def _row(key: Key, *, is_first: bool) -> str:
    """Of keys that several kinds of policies have, the first has the anchor."""
    anchor = f'<a id="{key.name}"></a>' if is_first else ""
    kind = key.kind if key.bounds else key.kind.replace("|", "\\|")
    default = key.default if key.default == "required" else f"`{key.default}`"
    return f"| {anchor}`{key.name}` | {kind} | {key.bounds} | {default} | {key.text.replace('``', '`')} |\n"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
