"""Typed configuration, validated once here; no lower layer knows OmegaConf.

Every field is checked for its type and range when the configuration is built; an unknown key, a wrong type or an
impossible combination is one `UserError` line with the choices. Derived quantities are properties.
"""

from __future__ import annotations

from embodied_rl.config.agent import AgentConfig as AgentConfig
from embodied_rl.config.agent import ToolsConfig as ToolsConfig
from embodied_rl.config.agent import WarmStartConfig as WarmStartConfig
from embodied_rl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from embodied_rl.config.algorithm import CloningConfig as CloningConfig
from embodied_rl.config.algorithm import CorrectionConfig as CorrectionConfig
from embodied_rl.config.algorithm import GroupsConfig as GroupsConfig
from embodied_rl.config.algorithm import InitializedConfig as InitializedConfig
from embodied_rl.config.algorithm import KlConfig as KlConfig
from embodied_rl.config.algorithm import OffPolicyConfig as OffPolicyConfig
from embodied_rl.config.algorithm import RecordedConfig as RecordedConfig
from embodied_rl.config.algorithm import RewardConfig as RewardConfig
from embodied_rl.config.files import config_file as config_file
from embodied_rl.config.files import group_names as group_names
from embodied_rl.config.files import load_sim_config as load_sim_config
from embodied_rl.config.hybrid import HybridConfig as HybridConfig
from embodied_rl.config.hybrid import PlacementConfig as PlacementConfig
from embodied_rl.config.hybrid import RayConfig as RayConfig
from embodied_rl.config.hybrid import RayCpusConfig as RayCpusConfig
from embodied_rl.config.hybrid import RayGpusConfig as RayGpusConfig
from embodied_rl.config.hybrid import RewardWorkerConfig as RewardWorkerConfig
from embodied_rl.config.hybrid import ShardingConfig as ShardingConfig
from embodied_rl.config.policy import AnyPolicyConfig as AnyPolicyConfig
from embodied_rl.config.policy import CustomPolicyConfig as CustomPolicyConfig
from embodied_rl.config.policy import FlowOptions as FlowOptions
from embodied_rl.config.policy import FlowPolicyConfig as FlowPolicyConfig
from embodied_rl.config.policy import LanguageConfig as LanguageConfig
from embodied_rl.config.policy import OpenVLAOFTPolicyConfig as OpenVLAOFTPolicyConfig
from embodied_rl.config.policy import OpenVLAPolicyConfig as OpenVLAPolicyConfig
from embodied_rl.config.policy import PI0Options as PI0Options
from embodied_rl.config.policy import PI0PolicyConfig as PI0PolicyConfig
from embodied_rl.config.policy import PolicyConfig as PolicyConfig
from embodied_rl.config.policy import TinyModelConfig as TinyModelConfig
from embodied_rl.config.policy import TinyVLAConfig as TinyVLAConfig
from embodied_rl.config.policy import VLAOptions as VLAOptions
from embodied_rl.config.run import CheckpointConfig as CheckpointConfig
from embodied_rl.config.run import DomainConfig as DomainConfig
from embodied_rl.config.run import EvaluationConfig as EvaluationConfig
from embodied_rl.config.run import GenerationConfig as GenerationConfig
from embodied_rl.config.run import LoggerConfig as LoggerConfig
from embodied_rl.config.run import PlayerConfig as PlayerConfig
from embodied_rl.config.run import RecordConfig as RecordConfig
from embodied_rl.config.run import SimConfig as SimConfig
from embodied_rl.config.run import TrainConfig as TrainConfig
from embodied_rl.config.run import VideoConfig as VideoConfig
