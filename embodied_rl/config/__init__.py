"""Typed configuration, validated once, here; nothing below this room knows OmegaConf.

Every field is checked for its type and range when the configuration is built; an unknown key, a wrong type or an
impossible combination is one `UserError` line with the choices. Derived quantities are properties.
"""

from __future__ import annotations

from embodied_rl.config.algorithm import AlgorithmConfig, GroupsConfig, InitializedConfig, KlConfig, RewardConfig
from embodied_rl.config.files import config_file, config_folders, group_names, load_sim_config
from embodied_rl.config.policy import PolicyConfig
from embodied_rl.config.recorded import CloningConfig, OffPolicyConfig, RecordedConfig
from embodied_rl.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    GenerationConfig,
    HybridConfig,
    LoggerConfig,
    RecordConfig,
    TrainConfig,
    VideoConfig,
)
from embodied_rl.config.sim import SimConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CloningConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "GroupsConfig",
    "HybridConfig",
    "InitializedConfig",
    "KlConfig",
    "LoggerConfig",
    "OffPolicyConfig",
    "PolicyConfig",
    "RecordConfig",
    "RecordedConfig",
    "RewardConfig",
    "SimConfig",
    "TrainConfig",
    "VideoConfig",
    "config_file",
    "config_folders",
    "group_names",
    "load_sim_config",
]
