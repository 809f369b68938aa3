"""Policies by name: the configuration's kind decides which class is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from embodied_rl.config import AnyPolicyConfig
from embodied_rl.memory import parameter_bytes, require_memory
from embodied_rl.policies.base import Policy
from embodied_rl.types import SimSpec


def build_policy(config: AnyPolicyConfig, spec: SimSpec) -> Policy:
    """The policy that a configuration describes, for a simulator.

    New weights are drawn from torch's global generator, so seed it first. Heavy libraries are imported by the kinds that need them.

    Raises:
        UserError: the policy does not fit the simulator, or its checkpoint folder is incomplete.
    """
    if config.name in _MADE_OF_SIZES:
        _require_memory(config, spec)
    policy = BUILDERS[config.name](config, spec)
    policy.built_from = config
    return policy


def _actor_critic(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.policies import actor_critic

    return actor_critic.build_policy(config, spec)


def _custom(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.policies.custom import build_custom

    return build_custom(config, spec)


def _tiny_vla(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.policies.tiny_vla import TinyVLAPolicy

    return TinyVLAPolicy(config, spec)


def _flow(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.config import FlowNetworkConfig, FlowOptions
    from embodied_rl.policies.flow.network import build_flow_policy

    network = FlowNetworkConfig(**{field.name: getattr(config, field.name) for field in fields(FlowNetworkConfig)})
    options = FlowOptions(**{field.name: getattr(config, field.name) for field in fields(FlowOptions)})
    return build_flow_policy(network, options, spec)


def _pi0(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.policies.flow.pi0 import build_pi0

    return build_pi0(config, spec)


def _openvla(config: Any, spec: SimSpec) -> Policy:
    from embodied_rl.policies.openvla.training import build_openvla

    return build_openvla(config, spec)


BUILDERS: dict[str, Callable[[Any, SimSpec], Policy]] = {
    "actor_critic": _actor_critic,
    "custom": _custom,
    "flow": _flow,
    "openvla": _openvla,
    "openvla_oft": _openvla,
    "pi0": _pi0,
    "tiny_vla": _tiny_vla,
}
"""{`policy.name`: what builds it}"""

_MADE_OF_SIZES = ("actor_critic", "flow", "tiny_vla")
"""Kinds whose networks are as large as the configuration says; the others are as large as their checkpoints."""


def _require_memory(config: AnyPolicyConfig, spec: SimSpec) -> None:
    """Raises UserError where training the policy takes more memory than this machine has."""
    import torch

    with torch.device("meta"):  # shapes without memory, and without drawing random numbers
        policy = BUILDERS[config.name](config, spec)
    require_memory(f"policy.name={config.name} with these sizes", parameter_bytes(policy), "policy.hidden_sizes, or policy.width,")
