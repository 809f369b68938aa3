"""Policies of the user's own: a subclass of `Policy`, named in the configuration."""

from __future__ import annotations

from embodied_rl.config import CustomPolicyConfig
from embodied_rl.config.building import check_constructor
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.policies.base import Policy
from embodied_rl.registry import Registry
from embodied_rl.types import SimSpec

POLICIES = Registry("policy", "policies", {})
"""Those of installed packages (entry points ``embodied_rl.policies``)."""


def custom_class(config: CustomPolicyConfig) -> type[Policy]:
    """The class that `policy.target` names, whose constructor takes `policy.options`. Raises UserError."""
    cls: object = POLICIES.load(config.target)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UserError(f"policy.target='{config.target}' is no policy: it must be a subclass of embodied_rl.policies.base.Policy.")
    check_constructor(cls, config.target, config.options, "policy.options", offered=("spec",))
    return cls


def build_custom(config: CustomPolicyConfig, spec: SimSpec) -> Policy:
    """The policy for a simulator. Raises UserError where it is none, or plays other chunks than the configuration says."""
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
            raise UserError(f"'{config.target}' reads '{key}', which task '{spec.task}' does not show.{known}")
    return policy
