"""``python -m embodied_rl.train --help``: the choices of each group, then every key with what it means, in the width of the terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from embodied_rl.commands.printing import terminal_width

_EXAMPLES = (
    "",
    "sim=maniskill_pickcube seed=3 algorithm.clip_high=0.28",
    "experiment=fetch_reach run_dir=runs/fetch_reach",
    "-m experiment=cartpole seed=1,2,3",
)
_CHOSEN = ("experiment", "sim", "policy", "algorithm", "generation", "hybrid", "logger", "protocol")


def _value(composed: Mapping[str, Any], name: str) -> str:
    """What a configuration has for a dotted key, as one types it; empty where it has none."""
    here: object = composed
    for part in name.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return ""
        here = here[part]
    return json.dumps(here, ensure_ascii=False).strip('"').replace('", "', ", ").replace('["', "[").replace('"]', "]")


def help_text(width: int | None = None) -> str:
    """Lines of at most `width` characters, where no word is longer; None: those of the terminal, at most 100. Values are those that
    ``python -m embodied_rl.train`` runs with."""
    from embodied_rl.config import group_names
    from embodied_rl.config.compose import compose_config
    from embodied_rl.config.describing import described_keys

    width = terminal_width() if width is None else width

    def wrapped(text: str, indent: int, first: int = 0) -> str:
        shown = textwrap.wrap(text, width, initial_indent=" " * first, subsequent_indent=" " * indent, break_on_hyphens=False)
        return "\n".join(shown)

    composed = compose_config("train", [])
    lines = ["usage: python -m embodied_rl.train [-m] [group=name …] [key=value …]", ""]
    lines += [
        wrapped("Train a policy in a simulator. -m runs one after the other where values are separated by commas.", 0),
        "",
        "examples:",
    ]
    lines += [f"  python -m embodied_rl.train {example}".rstrip() for example in _EXAMPLES]
    lines += ["", "choices, one file each (group=name):"]
    lines += [wrapped(f"{group}: {', '.join(group_names(group))}", 6, 2) for group in _CHOSEN]
    for group, keys in described_keys().items():
        lines += ["", f"{group or 'the run'}:"]
        for key in keys:
            default = _value(composed, key.name) if "(" not in group else key.default
            what = ", ".join(filter(None, [key.kind, key.bounds])) + f": {default or key.default}"
            lines += [wrapped(f"{key.name}  ({what})", 6, 2), wrapped(key.text.replace("``", ""), 6, 6)]
    lines += [
        "",
        wrapped("Values of this run's files: python -m embodied_rl.train --cfg job. The same keys, to search: docs/configuration.md.", 0),
    ]
    return "\n".join(lines)
