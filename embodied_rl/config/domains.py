"""Several domains in one run, and several players in one domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.bounds import Fraction, Positive, Seconds, Slots, Temperature
from embodied_rl.config.building import Config, require
from embodied_rl.config.policy import AnyPolicyConfig
from embodied_rl.config.sim import SimConfig

CREDIT_KEYS = ("advantage", "advantage_options", "gamma", "gae_lambda", "reward", "warm_start")
"""The keys of `algorithm` that a domain sharing the run's policy may override: how its episodes are valued, and whom it clones first."""


@dataclass(frozen=True)
class DomainConfig(Config, place="domains.…"):
    """One domain of a run with several: what is played there, how often, and what is different from the run's own settings."""

    sim: SimConfig
    """Its simulator: ``/sim@domains.NAME.sim: frozenlake`` in an experiment's defaults."""
    weight: Positive = 1.0
    """Its share of the groups, against the other domains'."""
    policy: AnyPolicyConfig | None = None
    """Its own policy, ``/policy@domains.NAME.policy: mlp``; null: the run's, which all such domains share."""
    agent: dict[str, Any] = field(default_factory=dict)
    """In place of the run's `agent`."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """In place of the run's `algorithm`; of a domain that shares the run's policy: only advantage, advantage_options, gamma, gae_lambda,
    reward and warm_start. Groups are the run's."""
    backend: Literal["tokens_torch", "vllm"] | None = None
    """Where its tokens are sampled; null: the run's generation.backend."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("groups" not in self.algorithm, "domains.….algorithm", "without groups: all domains share the run's", "groups")
        if self.policy is None:
            unknown = sorted(set(self.algorithm) - set(CREDIT_KEYS))
            rule = f"some of {', '.join(CREDIT_KEYS)} in a domain that shares the run's policy"
            require(not unknown, "domains.….algorithm", rule, unknown)


@dataclass(frozen=True)
class PlayerConfig(Config, place="generation.mix.…"):
    """Another player of a share of the groups: the same policy on another backend, or a baseline (another model, random actions)."""

    share: Fraction
    """Of the groups of each domain."""
    backend: Literal["tokens_torch", "vllm", "openai", "random"] = "openai"
    """tokens_torch, vllm: the run's policy. openai: a server at `base_url`; random: any of agent.actions. The two are not learned from."""
    train: bool = True
    """Learn from its episodes too (tokens_torch, vllm)."""
    domains: tuple[str, ...] = ()
    """Where it plays; empty: in all domains of text."""
    num_slots: Slots = 8
    """Its own simulators, in each domain."""
    temperature: Temperature | None = None
    """null: agent.temperature."""
    base_url: str | None = None
    """openai: with the version, ``http://127.0.0.1:8000/v1``."""
    model: str | None = None
    """openai: the server's name of the model."""
    api: Literal["chat", "completions"] = "chat"
    """openai: chat sends messages, for the server's own chat template; completions the prompt's text."""
    api_key_env: str | None = None
    """openai: name of the environment variable that holds the key."""
    timeout_s: Seconds = 60.0
    """openai: of one attempt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "openai":
            require(self.base_url is not None, "generation.mix.….base_url", "given for backend=openai", self.base_url)
            require(self.model is not None, "generation.mix.….model", "given for backend=openai", self.model)

    @property
    def is_policy(self) -> bool:
        """Whether it is the run's own policy."""
        return self.backend in ("tokens_torch", "vllm")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` in place of its values, mapping within mapping."""
    result = dict(base)
    for key, value in changes.items():
        own = result.get(key)
        result[key] = merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return result
