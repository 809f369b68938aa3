"""Typed configuration, validated once, here; nothing below this room knows OmegaConf.

Every field is checked for its type and range when the configuration is built; an unknown key, a wrong type or an
impossible combination is one `UserError` line with the choices. Derived quantities are properties.
"""

from __future__ import annotations

from embodied_rl.config.agent import AgentConfig, ToolsConfig, WarmStartConfig
from embodied_rl.config.algorithm import AlgorithmConfig, CorrectionConfig, GroupsConfig, InitializedConfig, KlConfig, RewardConfig
from embodied_rl.config.domains import DomainConfig, PlayerConfig
from embodied_rl.config.files import config_file, config_folders, group_names, load_sim_config
from embodied_rl.config.flow import FlowNetworkConfig, FlowOptions, FlowPolicyConfig, PI0Options, PI0PolicyConfig
from embodied_rl.config.hybrid import HybridConfig, RayConfig, RayCpusConfig, RayGpusConfig, RewardWorkerConfig, ShardingConfig
from embodied_rl.config.language import LanguageConfig, TinyModelConfig
from embodied_rl.config.placement import PlacementConfig
from embodied_rl.config.policy import AnyPolicyConfig, CustomPolicyConfig, PolicyConfig
from embodied_rl.config.recorded import CloningConfig, OffPolicyConfig, RecordedConfig
from embodied_rl.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    GenerationConfig,
    LoggerConfig,
    RecordConfig,
    TrainConfig,
    VideoConfig,
)
from embodied_rl.config.sim import SimConfig
from embodied_rl.config.vla import OpenVLAOFTPolicyConfig, OpenVLAPolicyConfig, TinyVLAConfig, VLAOptions

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "AnyPolicyConfig",
    "CheckpointConfig",
    "CloningConfig",
    "CorrectionConfig",
    "CustomPolicyConfig",
    "DomainConfig",
    "EvaluationConfig",
    "FlowNetworkConfig",
    "FlowOptions",
    "FlowPolicyConfig",
    "GenerationConfig",
    "GroupsConfig",
    "HybridConfig",
    "InitializedConfig",
    "KlConfig",
    "LanguageConfig",
    "LoggerConfig",
    "OffPolicyConfig",
    "OpenVLAOFTPolicyConfig",
    "OpenVLAPolicyConfig",
    "PlayerConfig",
    "PlacementConfig",
    "PI0Options",
    "PI0PolicyConfig",
    "PolicyConfig",
    "RayConfig",
    "RayCpusConfig",
    "RayGpusConfig",
    "RecordConfig",
    "RecordedConfig",
    "RewardConfig",
    "RewardWorkerConfig",
    "ShardingConfig",
    "SimConfig",
    "TinyVLAConfig",
    "TinyModelConfig",
    "ToolsConfig",
    "TrainConfig",
    "VLAOptions",
    "VideoConfig",
    "WarmStartConfig",
    "config_file",
    "config_folders",
    "group_names",
    "load_sim_config",
]
