"""Configurations from ``key=value``: see `embodied_rl.config.compose`."""

from embodied_rl.config.compose import check_overrides, compose_config, load_train_config

__all__ = ["check_overrides", "compose_config", "load_train_config"]
