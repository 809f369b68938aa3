"""Policies by name: the configuration's kind decides which class is built."""

from __future__ import annotations

from embodied_rl.config import (
    AnyPolicyConfig,
    CustomPolicyConfig,
)
from embodied_rl.config.building import check_constructor
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.memory import parameter_bytes, require_memory
from embodied_rl.policies.base import Policy
from embodied_rl.registry import Registry, load_target
from embodied_rl.types import SimSpec


def build_policy(config: AnyPolicyConfig, spec: SimSpec) -> Policy:
    """Build the policy of a configuration for a simulator.

    New weights come from torch's global generator, so seed it first.
    Raises UserError: the policy does not fit the simulator, or its checkpoint folder is incomplete.
    """
    if config.name in MADE_OF_SIZES:
        _require_memory(config, spec)
    policy: Policy = load_target(BUILDERS[config.name])(config, spec)
    policy.built_from = config
    return policy


BUILDERS: dict[str, str] = {
    "actor_critic": "embodied_rl.policies.actor_critic:build_policy",
    "custom": "embodied_rl.policies.build:build_custom",
    "flow": "embodied_rl.policies.flow.policy:build_flow",
    "openvla": "embodied_rl.policies.openvla.policy:build_openvla",
    "openvla_oft": "embodied_rl.policies.openvla.policy:build_openvla",
    "pi0": "embodied_rl.policies.flow.pi0:build_pi0",
    "tiny_vla": "embodied_rl.policies.tiny_vla:TinyVLAPolicy",
}
"""{`policy.name`: its builder, from a configuration and a simulator's spec}; heavy libraries load only with kinds that need them."""

MADE_OF_SIZES = ("actor_critic", "flow", "tiny_vla")
"""Kinds whose configuration sets the networks' sizes; for the others the checkpoint does."""


def _require_memory(config: AnyPolicyConfig, spec: SimSpec) -> None:
    """Raise UserError if training the policy needs more memory than this machine has."""
    import torch

    with torch.device("meta"):  # shapes without memory, and without drawing random numbers
        policy: Policy = load_target(BUILDERS[config.name])(config, spec)
    require_memory(f"policy.name={config.name} with these sizes", parameter_bytes(policy), "policy.hidden_sizes, or policy.width,")


POLICIES = Registry("policy", "policies", {})
"""Policies of installed packages (entry points ``embodied_rl.policies``)."""


def custom_class(config: CustomPolicyConfig) -> type[Policy]:
    """Class that `policy.target` names; its constructor takes `policy.options`. Raises UserError."""
    cls: object = POLICIES.load(config.target)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UserError(f"policy.target='{config.target}' is not a policy: it must be a subclass of embodied_rl.policies.base.Policy.")
    check_constructor(cls, config.target, config.options, "policy.options", offered=("spec",))
    return cls


def build_custom(config: CustomPolicyConfig, spec: SimSpec) -> Policy:
    """Build the policy for a simulator. Raises UserError if it is no policy, or plays other chunks than the configuration says."""
    policy = custom_class(config)(spec, **config.options)
    policy.spec = spec
    if policy.chunk_size != config.chunk:
        raise UserError(
            f"policy.chunk={config.chunk}, and '{config.target}' acts for {policy.chunk_size} steps at a time (its chunk_size): "
            f"set policy.chunk={policy.chunk_size}."
        )
    for key in policy.observation_keys:
        if key not in spec.observation:
            known = did_you_mean(key, spec.observation)
            raise UserError(f"'{config.target}' reads '{key}', which task '{spec.task}' does not have.{known}")
    return policy
