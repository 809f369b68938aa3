"""What the tables of methods have in common; importing this loads no tensor library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_rl.registry import load_target


@dataclass(frozen=True)
class MethodInfo:
    """A pure function that a configuration can name."""

    name: str
    target: str
    """``package.module:function``; keyword arguments only."""
    summary: str
    """Its formula in one line."""
    source: str
    inputs: tuple[str, ...]
    """Arrays it takes by these names, all required."""
    optional_inputs: tuple[str, ...] = ()
    """Arrays it takes but can do without."""
    options: tuple[str, ...] = ()
    """Numbers and choices of its own that a configuration may set."""
    required_options: tuple[str, ...] = ()
    """Those of `options` that have no default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that make the function this method."""

    def load(self) -> Callable[..., Any]:
        """The function, without `fixed`."""
        return load_target(self.target)
