"""Policies by name: the configuration's kind decides which class is built."""

from __future__ import annotations

import numpy as np
import torch

from embodied_rl.config import AnyPolicyConfig, CustomPolicyConfig
from embodied_rl.config.building import check_constructor, require
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.memory import parameter_bytes, require_memory
from embodied_rl.policies.base import ActionOutput, Policy
from embodied_rl.registry import Registry, load_target
from embodied_rl.types import SimSpec, TensorSpec


def build_policy(config: AnyPolicyConfig, spec: SimSpec) -> Policy:
    """Build the policy of a configuration for a simulator.

    New weights come from torch's global generator, so seed it first.
    Raises UserError: the policy does not fit the simulator, or its checkpoint folder is incomplete.
    """
    build = load_target(BUILDERS[config.name])
    if config.name in MADE_OF_SIZES:
        with torch.device("meta"):  # shapes without memory, and without drawing random numbers
            parts = parameter_bytes(build(config, spec))
        require_memory(f"policy.name={config.name} with these sizes", parts, "policy.hidden_sizes, or policy.width,")
    policy: Policy = build(config, spec)
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


POLICIES = Registry("policy", "policies", {})
"""Policies of installed packages (entry points ``embodied_rl.policies``)."""


def custom_class(config: CustomPolicyConfig) -> type[Policy]:
    """Class that `policy.target` names; its constructor takes `policy.options`. Raises UserError."""
    require(config.target != "???", "policy.target", "given, such as policy.target=my_package.my_module:MyPolicy", config.target)
    cls: object = POLICIES.load(config.target)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise UserError(f"policy.target='{config.target}' is not a policy: it must be a subclass of embodied_rl.policies.base.Policy.")
    if cls.__init__ is torch.nn.Module.__init__:
        raise UserError(f"policy.target='{config.target}' has no constructor: give it `def __init__(self, spec: SimSpec, …)`.")
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
    _check_contract(policy, config.target)
    return policy


def _check_contract(policy: Policy, target: str) -> None:
    """Raise UserError if what a user's policy returns for two observations of zeros does not fit the contract of `Policy`. Policies that
    translate actions or read texts are not tried."""
    parts, layout = {key: policy.spec.observation[key] for key in policy.observation_keys}, policy.action_layout
    if next(policy.parameters(), None) is None:
        raise UserError(f"'{target}' has no parameters to learn: its layers must be attributes that are torch modules.")
    if policy.translates or not all(isinstance(part, TensorSpec) for part in parts.values()):
        return
    shape, was_training = (2, layout.num_units), policy.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        policy.eval()
        seen = policy.prepare({key: np.zeros((2, *part.shape), part.dtype) for key, part in parts.items() if isinstance(part, TensorSpec)})
        acted = policy.act(seen, torch.from_numpy(layout.noise(np.random.default_rng(0), (2,))))
        if not isinstance(acted, ActionOutput):
            raise UserError(f"'{target}': `act` must return ActionOutput(action, log_prob), got {type(acted).__name__}.")
        results: list[tuple[str, str, torch.Tensor, tuple[int, ...]]] = [
            ("act", "action", acted.action, (2, layout.width)),
            ("act", "log_prob", acted.log_prob, shape),
        ]
        if type(policy).evaluate is not Policy.evaluate and tuple(acted.action.shape) == (2, layout.width):
            evaluated = policy.evaluate(seen, acted.action)
            results += [("evaluate", "log_prob", evaluated.log_prob, shape), ("evaluate", "entropy", evaluated.entropy, shape)]
            results += [("evaluate", "value", evaluated.value, (2,))]
        if type(policy).value is not Policy.value:
            results.append(("value", "values", policy.value(seen), (2,)))
        policy.train(was_training)
    for method, name, found, wanted in results:
        if tuple(found.shape) != wanted:
            said = f"{list(found.shape)}, for 2 observations, and must be {list(wanted)}"
            raise UserError(f"'{target}': `{method}` returns {name} of shape {said}.")
    if acted.action.dtype.is_floating_point != (layout.dtype == "float32"):
        raise UserError(f"'{target}': `act` returns actions of {acted.action.dtype}, and must return {layout.dtype}.")
    again = [found for method, name, found, _ in results if (method, name) == ("evaluate", "log_prob")]
    if again and not torch.allclose(again[0], acted.log_prob, rtol=0.05, atol=0.05, equal_nan=True):
        both = f"{acted.log_prob[0].tolist()} and {again[0][0].tolist()}"
        raise UserError(f"'{target}': `act` and `evaluate` differ in the log-probabilities of the same action: {both}.")
