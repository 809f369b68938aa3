"""Resolves names: ``package.module:Attribute`` targets, entry points, and errors that suggest the nearest name."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from embodied_rl.errors import MissingExtraError, UserError, did_you_mean, require_known


def load_target(target: str, extra: str | None = None) -> Any:
    """Import ``package.module:Attribute``.

    Raises:
        MissingExtraError: a module that the target imports is not installed, and `extra` names the extra that provides it.
        UserError: the text is not a target, or the module or attribute does not exist.
    """
    module_name, _, attribute = target.partition(":")
    # Every importable target has the form that `embodied_rl.trust` looks for in files.
    strange = any(letter.isspace() or letter in "/:" for letter in target.replace(":", "", 1))
    if not attribute or not module_name or module_name.startswith(".") or strange:
        raise UserError(f"Target '{target}' is not of the form 'package.module:Attribute'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if extra is not None and (error.name or "").partition(".")[0] != module_name.partition(".")[0]:
            raise MissingExtraError(f"'{target}'", extra, error) from error
        raise UserError(f"Target '{target}' cannot be imported: {error}. Is its package installed in this environment?") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UserError(f"Module '{module_name}' has no '{attribute}'.{did_you_mean(attribute, public)}") from None


@cache
def installed_targets(kind: str) -> dict[str, str]:
    """{name: ``package.module:Attribute``} of installed packages' entry points in the group ``embodied_rl.<kind>``."""
    return {point.name: point.value for point in _points(kind)}


@cache
def installed_config_folders() -> dict[str, Path]:
    """{package: its folder ``configs/``} of installed packages, from the entry-point group ``embodied_rl.configs``.

    The value of such an entry point is a package, which is found without importing it. A package without such a folder is left out
    with a warning: another package's mistake must not stop a run that does not use it.
    """
    folders: dict[str, Path] = {}
    for point in _points("configs"):
        package, *inner = point.value.split(".")
        spec = importlib.util.find_spec(package)
        places = [Path(place, *inner, "configs") for place in (spec.submodule_search_locations or ())] if spec is not None else []
        found = [place for place in places if place.is_dir()]
        if found:
            folders[point.value] = found[0]
        else:
            warnings.warn(
                f"Entry point '{point.name} = {point.value}' of group 'embodied_rl.configs' names no package with a folder 'configs'.",
                stacklevel=2,
            )
    return folders


def _points(kind: str) -> list[EntryPoint]:
    return sorted(entry_points(group=f"embodied_rl.{kind}"), key=lambda point: (point.name, point.value))


class Registry:
    """Named targets of one kind; installed packages add theirs through the entry-point group ``embodied_rl.<group>``."""

    def __init__(self, kind: str, group: str, targets: dict[str, str]) -> None:
        self.kind, self.group = kind, group
        self.built_in = dict(targets)
        """This package's own targets, which no other package replaces."""

    def target(self, name: str) -> str:
        """The target of a name; a ``package.module:Attribute`` passes through. Raises UserError with the nearest name."""
        if ":" in name:
            return name
        known = {**installed_targets(self.group), **self.built_in}
        require_known(name, known, f"{self.kind.capitalize()} '{name}' is not known.")
        return known[name]

    def load(self, name: str) -> Any:
        return load_target(self.target(name))
