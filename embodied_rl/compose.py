"""Composing configurations with Hydra, and saying in one line what is wrong with an override."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from embodied_rl.config import TrainConfig, config_file, group_names
from embodied_rl.errors import UserError, did_you_mean, shown
from embodied_rl.paths import configs_dir
from embodied_rl.registry import installed_config_folders, installed_targets

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

_OPEN = (
    *("sim.kwargs.", "sim.kwargs=", "algorithm.advantage_options.", "algorithm.loss_options."),
    *("domains.", "domains=", "generation.mix.", "generation.mix="),
)

_PASSED_TO_HYDRA = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--multirun",
    "-m",
    "--shell-completion",
    "-sc",
    "--config-dir",
    "-cd",
)


def compose_config(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose ``configs/<name>.yaml`` with overrides, as the command line does, into plain values.

    Raises:
        UserError: naming the key or choice that is not known, and the nearest one.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    add_installed_configs()
    _check_choices(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            composed = compose(name, overrides=open_kwargs(overrides))
        plain = OmegaConf.to_container(composed, resolve=True)
    except RecursionError:
        raise UserError(f"{shown(max(overrides, key=len))} is nested too deeply to be read.") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # Hydra raises ValueError for a group set to null
        raise UserError(_explain(error, name, overrides)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check_choices(overrides: Sequence[str]) -> None:
    """Raises UserError where a group of files is given anything but one name: Hydra would take a list for several files on top of one
    another, and a mapping for a value of its own."""
    import yaml

    for override in overrides:
        group, equals, value = override.partition("=")
        names = group_names(group) if re.fullmatch(r"\w+", group) else []
        if equals and names and not (re.fullmatch(r"[\w.-]+", value) and isinstance(yaml.safe_load(value), str)):
            raise UserError(f"{group} must be the name of one file of configs/{group}, got {shown(value)}.{did_you_mean(value, names)}")


def add_installed_configs() -> None:
    """Let Hydra find what installed packages bring: folders of configuration files, after ours, and simulators that are a target
    and nothing more. Does something once in a process, and nothing where no such package is installed."""
    from hydra.core.config_store import ConfigStore

    targets = {name: target for name, target in installed_targets("sim").items() if config_file("sim", name) is None}
    for name, target in targets.items():
        ConfigStore.instance().store(group="sim", name=name, node={"name": name, "target": target})
    if installed_config_folders():
        from hydra.core.plugins import Plugins

        Plugins.instance().register(_search_path_plugin())


@cache
def _search_path_plugin() -> type[SearchPathPlugin]:
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class InstalledConfigs(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for package, folder in installed_config_folders().items():
                search_path.append(provider=package, path=f"file://{folder}")

    return InstalledConfigs


def open_kwargs(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra wants them: a simulator's or a method's own arguments need no ``+``: which exist is their affair."""
    return [f"++{override}" if override.startswith(_OPEN) else override for override in overrides]


def load_train_config(overrides: Sequence[str]) -> TrainConfig:
    """The configuration that ``python -m embodied_rl.train OVERRIDES`` would run. Raises UserError."""
    return TrainConfig.from_dict(compose_config("train", overrides))


def check_overrides(name: str, arguments: Sequence[str]) -> None:
    """Compose once before Hydra does, so that mistakes are told in our words. Raises UserError.

    Left to Hydra: its own flags, and sweeps, whose overrides are not single values.
    """
    if any(argument.split("=", 1)[0] in _PASSED_TO_HYDRA for argument in arguments):
        return
    plain = compose_config(name, [argument for argument in arguments if not argument.startswith("--")])
    if name == "train":
        TrainConfig.from_dict(plain)


def _explain(error: Exception, name: str, overrides: Sequence[str]) -> str:
    text = str(error)
    choice = re.search(r"Could not find '([\w-]+)/([^']*)'", text) or re.search(r"In '[^']*': Could not find '([\w-]+)/([^']*)'", text)
    if choice:
        group, value = choice.groups()
        kind = {"sim": "Simulator"}.get(group, group.capitalize())
        return f"{kind} '{value}' is not known.{did_you_mean(value, group_names(group))}"
    key = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if key:
        return _unknown_key(key.group(1), name, overrides)
    if "integer string conversion" in text:
        return f"{shown(max(overrides, key=len))} has too many digits to be read."
    return f"The configuration cannot be composed: {' '.join(text.split())}"


def _unknown_key(key: str, name: str, overrides: Sequence[str]) -> str:
    """Which part of a dotted key exists, and what lies there, by the files that the overrides choose."""
    # Names alone: what is wrong about the others would be told in place of the key.
    chosen = [word for word in overrides if word.partition("=")[2] in group_names(word.partition("=")[0])]
    here: Any = compose_config(name, chosen)
    walked: list[str] = []
    for part in key.split("."):
        if not isinstance(here, Mapping) or part not in here:
            break
        here = here[part]
        walked.append(part)
    place = f"in '{'.'.join(walked)}' " if walked else ""
    missing = key.split(".")[len(walked)] if len(walked) < len(key.split(".")) else key
    choices = [str(choice) for choice in here] if isinstance(here, Mapping) else []
    return f"Configuration key '{key}' is not known: {place}there is no '{missing}'.{did_you_mean(missing, choices)}"
