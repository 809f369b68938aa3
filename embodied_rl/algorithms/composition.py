"""Options of the advantage and the loss that a configuration names."""

from __future__ import annotations

from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.algorithms.catalogue import MethodInfo
from embodied_rl.algorithms.loss_table import loss_info
from embodied_rl.config import AlgorithmConfig
from embodied_rl.config.building import check_arguments
from embodied_rl.errors import UserError, require_known
from embodied_rl.registry import load_target

OF_CONFIG = {"gamma", "gae_lambda", "clip_low", "clip_high", "dual_clip"}
"""Options with a key of their own in the configuration."""
OF_ROLLOUTS = {"log_prob", "old_log_prob", "advantage"}
"""Arrays that a loss on fixed rollouts may take; old is the policy that acted, or with a correction the one at the update's start."""


def check_methods(config: AlgorithmConfig) -> None:
    """Raise UserError for unknown advantages, losses and options of them; `config.rules` checks which combinations are allowed."""
    _check_options(advantage_info(config.advantage), config.advantage_options, "algorithm.advantage_options", config)
    _check_options(loss_info(config.loss), config.loss_options, "algorithm.loss_options", config)


def method_options(info: MethodInfo, given: dict[str, object], config: AlgorithmConfig) -> dict[str, object]:
    """Keyword arguments of a method: its fixed ones, those with a key in the configuration, and the user's options."""
    own = {name: vars(config)[name] for name in info.options if name in OF_CONFIG and vars(config)[name] is not None}
    return {**own, **given, **info.fixed}


def _check_options(info: MethodInfo, given: dict[str, object], where: str, config: AlgorithmConfig) -> None:
    allowed = [name for name in info.options if name not in OF_CONFIG]
    for name in given:
        if name in OF_CONFIG:
            raise UserError(f"{where}.{name} has its own key: set algorithm.{name}.")
        require_known(name, allowed, f"{where}.{name} is not an option of '{info.name}'.")
    missing = [name for name in info.required_options if name not in OF_CONFIG and name not in given]
    if missing:
        raise UserError(f"'{info.name}' needs {where}.{missing[0]}.")
    if given:
        check_arguments(load_target(info.target), given, where)
