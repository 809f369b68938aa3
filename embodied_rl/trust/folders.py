"""The user's own folders of this package, where the XDG Base Directory Specification puts them."""

from __future__ import annotations

import os
from pathlib import Path

_NAME = "embodied_rl"


def config_folder() -> Path | None:
    """What the user writes: ``$XDG_CONFIG_HOME/embodied_rl``. None where the user has no home."""
    return _folder("XDG_CONFIG_HOME", ".config")


def state_folder() -> Path | None:
    """What we keep for the user: ``$XDG_STATE_HOME/embodied_rl``. None where the user has no home."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, below_home: str) -> Path | None:
    given = os.environ.get(variable, "")
    if os.path.isabs(given):  # the specification: others are ignored
        return Path(given) / _NAME
    try:
        return Path.home() / below_home / _NAME
    except RuntimeError:
        return None
