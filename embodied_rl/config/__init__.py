"""Typed configuration, validated once, here; nothing below this room knows OmegaConf.

Every field is checked for its type and range when the configuration is built; an unknown key, a wrong type or an
impossible combination is one `UserError` line with the choices. Derived quantities are properties.
"""

from __future__ import annotations

from embodied_rl.config.agent import AgentConfig, ToolsConfig, WarmStartConfig
from embodied_rl.config.algorithm import (
    AlgorithmConfig,
    CloningConfig,
    CorrectionConfig,
    GroupsConfig,
    InitializedConfig,
    KlConfig,
    OffPolicyConfig,
    RecordedConfig,
    RewardConfig,
)
from embodied_rl.config.files import config_file, config_folders, group_names, load_sim_config
from embodied_rl.config.hybrid import (
    HybridConfig,
    PlacementConfig,
    RayConfig,
    RayCpusConfig,
    RayGpusConfig,
    RewardWorkerConfig,
    ShardingConfig,
)
from embodied_rl.config.policy import (
    AnyPolicyConfig,
    CustomPolicyConfig,
    FlowNetworkConfig,
    FlowOptions,
    FlowPolicyConfig,
    LanguageConfig,
    OpenVLAOFTPolicyConfig,
    OpenVLAPolicyConfig,
    PI0Options,
    PI0PolicyConfig,
    PolicyConfig,
    TinyModelConfig,
    TinyVLAConfig,
    VLAOptions,
)
from embodied_rl.config.run import (
    CheckpointConfig,
    DomainConfig,
    EvaluationConfig,
    GenerationConfig,
    LoggerConfig,
    PlayerConfig,
    RecordConfig,
    SimConfig,
    TrainConfig,
    VideoConfig,
)

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
