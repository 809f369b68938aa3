"""Locations of configuration files, ours and those of installed packages."""

from __future__ import annotations

from pathlib import Path

from embodied_rl.config.building import build
from embodied_rl.config.run import SimConfig
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.files import configs_dir
from embodied_rl.registry import installed_config_folders, installed_targets


def load_sim_config(name: str) -> SimConfig:
    """Read ``configs/sim/<name>.yaml``, ours or an installed package's, or use the target that a package registered under this
    name. Raises UserError with the nearest name."""
    import yaml

    path = config_file("sim", name)
    if path is not None:
        return build(SimConfig, yaml.safe_load(path.read_text(encoding="utf-8")), "sim")
    target = installed_targets("sim").get(name)
    if target is None:
        raise UserError(f"Simulator '{name}' is not known.{did_you_mean(name, group_names('sim'))}")
    return SimConfig(name=name, target=target)


def config_folders() -> list[Path]:
    """Folders that are searched for configuration files: ours, then those of installed packages (entry points ``embodied_rl.configs``)."""
    return [configs_dir(), *installed_config_folders().values()]


def config_file(group: str, name: str) -> Path | None:
    """File of one choice of a group, from the first folder of `config_folders` that has it."""
    paths = (folder / group / f"{name}.yaml" for folder in config_folders())
    return next((path for path in paths if path.is_file()), None)


def group_names(group: str) -> list[str]:
    """Names of one group's choices (sim, policy, algorithm, experiment, …): the configuration files', and for ``sim`` also those that
    installed packages registered."""
    names = {path.stem for folder in config_folders() for path in Path(folder / group).glob("*.yaml")}
    return sorted(names.union(installed_targets("sim") if group == "sim" else ()))
