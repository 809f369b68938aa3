"""Describes each key of the configuration from its declaration: for the page of keys and for ``train --help``."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import typing
from dataclasses import dataclass
from typing import Any

from embodied_rl import config
from embodied_rl.config.building import bounds_in, type_hints

GROUPS = {
    "": "TrainConfig",
    "sim": "SimConfig",
    "policy": "PolicyConfig",
    "policy (tiny_vla)": "TinyVLAConfig",
    "policy (openvla and openvla_oft: in a simulator)": "VLAOptions",
    "policy (openvla)": "OpenVLAPolicyConfig",
    "policy (openvla_oft, beside openvla's)": "OpenVLAOFTPolicyConfig",
    "policy (flow and pi0: denoising)": "FlowOptions",
    "policy (flow: networks)": "FlowPolicyConfig",
    "policy (pi0: in a simulator)": "PI0Options",
    "policy (pi0)": "PI0PolicyConfig",
    "policy (policy=language)": "LanguageConfig",
    "policy (policy=custom)": "CustomPolicyConfig",
    "policy.tiny (policy=language)": "TinyModelConfig",
    "algorithm": "AlgorithmConfig",
    "algorithm.groups": "GroupsConfig",
    "algorithm.reward": "RewardConfig",
    "algorithm.kl": "KlConfig",
    "algorithm.correction": "CorrectionConfig",
    "algorithm.warm_start": "WarmStartConfig",
    "agent": "AgentConfig",
    "agent.tool_options": "ToolsConfig",
    "algorithm.initialized": "InitializedConfig",
    "algorithm.recorded": "RecordedConfig",
    "algorithm.cloning": "CloningConfig",
    "algorithm.off_policy": "OffPolicyConfig",
    "generation": "GenerationConfig",
    "generation.mix.NAME": "PlayerConfig",
    "domains.NAME": "DomainConfig",
    "hybrid": "HybridConfig",
    "hybrid.placement": "PlacementConfig",
    "hybrid.ray": "RayConfig",
    "hybrid.ray.cpus": "RayCpusConfig",
    "hybrid.ray.gpus": "RayGpusConfig",
    "hybrid.reward_worker": "RewardWorkerConfig",
    "hybrid.sharding": "ShardingConfig",
    "evaluation": "EvaluationConfig",
    "checkpoint": "CheckpointConfig",
    "record": "RecordConfig",
    "video": "VideoConfig",
    "logger": "LoggerConfig",
}
"""{group, with what chooses it: its dataclass}"""


@dataclass(frozen=True)
class Key:
    """One key of the configuration."""

    name: str
    """Full name: ``sim.num_slots``."""
    kind: str
    """``int or null``; type and bounds say more to a reader than the name of a quantity."""
    bounds: str
    """``between 1 and 1,000,000``; empty: none."""
    default: str
    """Default in YAML; "required" if there is none."""
    text: str
    """Text of the string below its declaration."""


def described_keys() -> dict[str, list[Key]]:
    """{group of `GROUPS`: its keys}, in the order of the declarations."""
    sources = {sys.modules[vars(config)[name].__module__] for name in GROUPS.values()}
    nodes = [node for source in sources for node in ast.parse(inspect.getsource(source)).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    found: dict[str, list[Key]] = {}
    for group, name in GROUPS.items():
        part, keys = vars(config)[name], found.setdefault(group, [])
        for field, following in itertools.pairwise([*classes[name].body, None]):
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).endswith("Config"):
                said = following.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else None
                text = "" if said is None else " ".join(str(said.value).split())
                keys.append(_key(group.partition(" ")[0], field, type_hints(part)[ast.unparse(field.target)], text))
    return found


def _key(group: str, field: ast.AnnAssign, hint: object, text: str) -> Key:
    name = ".".join(filter(None, [group, ast.unparse(field.target)]))
    bounds = next((str(bounds) for bounds in bounds_in(hint)), "")
    written = str(hint).removeprefix("typing.") if typing.get_origin(hint) is typing.Literal else ast.unparse(field.annotation)
    kind = _kind(hint) if bounds else written.replace(" | None", " or null")
    default = "required" if field.value is None else ast.unparse(field.value).replace("None", "null")
    default = {"field(default_factory=dict)": "{}", "True": "true", "False": "false"}.get(default, default)
    return Key(name, kind, bounds, default, text)


def _kind(hint: Any) -> str:
    """int, float or null, tuple[int, ...]"""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return " or ".join(repr(word) for word in arguments)
    if origin is tuple:
        return f"tuple[{_kind(arguments[0])}, ...]"
    if arguments:
        return " or ".join("null" if argument is type(None) else _kind(argument) for argument in arguments)
    return str(hint.__name__)
