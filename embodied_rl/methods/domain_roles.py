"""The learners of a run with several domains: one language policy for all of its domains, and a separate policy for each robot domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied_rl.algorithms.episode_method import EpisodeMethod
from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.learning.learner import make_learner
from embodied_rl.learning.objectives import TokenObjective
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.methods.agents import PreparedTurns, prepare_turns
from embodied_rl.methods.base import Experience
from embodied_rl.methods.groups import GroupMethod
from embodied_rl.methods.warm_start import WarmStart
from embodied_rl.policies.base import TensorObservation, TrainedModule
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.types import EpisodeGroup


class Role(Protocol):
    """One policy with its learner, and the domains that it plays."""

    policy: Any
    domains: tuple[str, ...]
    ranks: RankExecutor | None
    """Where `hybrid.sharding` divides the policy."""

    def publish(self, version: int) -> None:
        """Hand the current weights to the generator or the player that acts with them."""
        ...

    def observation(self, groups: Sequence[EpisodeGroup]) -> TensorObservation:
        """Everything that the policy saw, for its statistics."""
        ...

    def learn(self, groups: Sequence[EpisodeGroup], *, iteration: int, steps: int) -> dict[str, float]:
        """One update; its metrics. Raises NonFiniteLossError."""
        ...

    @property
    def wants_start(self) -> bool:
        """Whether `begin` has a warm start to make."""
        ...

    def begin(self, version: int) -> None:
        """Before the run's first episodes: a warm start, where there is one; the weights it leaves are published as `version`."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_tensors(self) -> dict[str, Tensor]: ...

    def load_state_tensors(self, state: dict[str, Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LanguageRole:
    """One language policy that plays several domains of text; each domain's episodes are valued in its own way. Implements `Role`."""

    def __init__(self, config: TrainConfig, configs: Mapping[str, TrainConfig], policy: LanguagePolicy, *, trust_sampled: bool) -> None:
        """
        Args:
            config: the run's.
            configs: {domain: its own}.
            trust_sampled: see `prepare_turns`.
        """
        self.config, self.policy, self.domains = config, policy, tuple(configs)
        self.backends: list[TokenBackend] = []
        """Those that sample with the policy's weights, in this process."""
        self.player: Any = None
        """The player in another process, with the weights of all roles (`RemotePlayer`); None: the backends are here."""
        self.warm_starts: dict[str, WarmStart] = {}
        self._methods = {name: EpisodeMethod(own.algorithm) for name, own in configs.items()}
        self._trust_sampled = trust_sampled
        self.learner = make_learner(TokenObjective(policy, config.algorithm), policy, config.algorithm, config.hybrid)
        self.ranks = self.learner.ranks
        """Where `hybrid.sharding` divides the policy."""

    def needs_of(self, domain: str) -> frozenset[str]:
        """What the advantage of a domain wants of its episodes."""
        return self._methods[domain].composition.advantage.needs

    def publish(self, version: int) -> None:
        """See `Role.publish`."""
        if self.player is not None:
            self.player.publish(version)
        for backend in self.backends:
            backend.load_weights(version, self.policy.named_weights())

    def observation(self, groups: Sequence[EpisodeGroup]) -> TensorObservation:
        """See `Role.observation`: texts have no statistics."""
        return {}

    def learn(self, groups: Sequence[EpisodeGroup], *, iteration: int, steps: int) -> dict[str, float]:
        """See `Role.learn`: one update on the tokens of all domains."""
        parts: list[PreparedTurns] = []
        for name in self.domains:
            own = [group for group in groups if domain_of(group) == name]
            if own:
                parts.append(prepare_turns(self._methods[name], self.learner, own, trust_sampled=self._trust_sampled))
        prepared = joined(parts)
        num_turns = max(prepared.num_turns, 1)
        stats = self.learner.update(
            prepared.tokens,
            minibatch_rows=round(self.config.algorithm.minibatch_size * prepared.tokens.num_rows / num_turns),
            progress=min(steps / self.config.total_steps, 1.0),
            seed=[self.config.seed, iteration],
            kl_coef=self._kl.kl_coefficient.value,
        )
        if "kl" in stats and self.config.algorithm.kl.place == "loss":
            self._kl.adapt(stats["kl"], num_turns)
            stats["kl_coef"] = self._kl.kl_coefficient.value
        return {**stats, **prepared.metrics}

    @property
    def wants_start(self) -> bool:
        """See `Role.wants_start`."""
        return any(start.wanted for start in self.warm_starts.values())

    def begin(self, version: int) -> None:
        """See `Role.begin`: the players' episodes of all domains are cloned together, so that no domain is forgotten."""
        wanted = {name: start for name, start in self.warm_starts.items() if start.wanted}
        if wanted:
            before = {name: start.success() for name, start in wanted.items()}
            sequences = [sequence for start in wanted.values() for sequence in start.sequences()]
            options = next(iter(wanted.values())).options
            assert options is not None, "a warm start that is wanted has options"
            loss = self.learner.clone(
                sequences,
                num_epochs=options.num_epochs,
                minibatch_rows=options.minibatch_rows,
                learning_rate=options.learning_rate,
                seed=self.config.seed,
            )
            self.publish(version)
            for name, start in wanted.items():
                start.note(before[name], start.success(), loss)
        self.learner.keep_reference()

    def metrics(self) -> dict[str, float]:
        """See `Role.metrics`."""
        return {
            f"warm_start/{name}/{key.removeprefix('warm_start/')}": value
            for name, start in self.warm_starts.items()
            for key, value in start.metrics().items()
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Role.state_tensors`."""
        return self.learner.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `Role.load_state_tensors`."""
        self.learner.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        """See `Role.state_dict`."""
        starts = {name: start.state_dict() for name, start in self.warm_starts.items()}
        return {"episodes": {name: method.state_dict() for name, method in self._methods.items()}, "warm_starts": starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Role.load_state_dict`."""
        for name, own in state["episodes"].items():
            self._methods[name].load_state_dict(own)
        for name, own in state["warm_starts"].items():
            self.warm_starts[name].load_state_dict(own)

    @property
    def _kl(self) -> EpisodeMethod:
        """Whose KL coefficient is the run's: a divergence is of the policy, and not of a domain."""
        return self._methods[self.domains[0]]


class OwnRole:
    """The separate policy of one domain. Implements `Role`."""

    def __init__(self, domain: str, config: TrainConfig, policy: Any, generator: Generator | None, method: GroupMethod) -> None:
        """`config`: the domain's own; `method`: its learner; `generator`: None where a player in another process acts."""
        self.domains: tuple[str, ...] = (domain,)
        self.ranks: RankExecutor | None = None
        self.config, self.policy, self.generator, self.method = config, policy, generator, method

    def publish(self, version: int) -> None:
        """See `Role.publish`."""
        if self.generator is not None:
            self.generator.publish(version)

    def observation(self, groups: Sequence[EpisodeGroup]) -> TensorObservation:
        """See `Role.observation`."""
        return self.method.batch(list(groups)).observation

    def learn(self, groups: Sequence[EpisodeGroup], *, iteration: int, steps: int) -> dict[str, float]:
        """See `Role.learn`."""
        prepared = self.method.prepare(Experience(0, [], {}, self.method.batch(list(groups))))
        return self.method.update(prepared, iteration=iteration, steps=min(steps, self.config.total_steps))

    @property
    def wants_start(self) -> bool:
        """See `Role.wants_start`."""
        return False

    def begin(self, version: int) -> None:
        """See `Role.begin`: nothing to do."""

    def metrics(self) -> dict[str, float]:
        """See `Role.metrics`."""
        return {}

    def state_tensors(self) -> dict[str, Tensor]:
        """See `Role.state_tensors`."""
        return self.method.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `Role.load_state_tensors`."""
        self.method.load_state_tensors(state)

    def state_dict(self) -> dict[str, Any]:
        """See `Role.state_dict`."""
        return {"episodes": self.method.algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Role.load_state_dict`."""
        self.method.algorithm.load_state_dict(state["episodes"])


class RoleWarmStarts:
    """What comes before a run's first episodes, of all roles."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = list(roles)

    @property
    def wanted(self) -> bool:
        """Whether any role has a warm start to make."""
        return any(role.wants_start for role in self._roles)

    def run(self, version: int) -> None:
        """See `Role.begin`."""
        for role in self._roles:
            role.begin(version)


class RolePolicies(TrainedModule):
    """All policies of a run as one module, for checkpoints and statistics."""

    has_description = True

    def __init__(self, policies: Mapping[str, TrainedModule]) -> None:
        super().__init__()
        self.roles = nn.ModuleDict(dict(policies))

    def update_statistics(self, observation: Mapping[str, Tensor]) -> None:
        """See `Policy.update_statistics`; keys are ``role/key``."""
        for name, policy in self.roles.items():
            own = {key.removeprefix(f"{name}/"): part for key, part in observation.items() if key.startswith(f"{name}/")}
            if own:
                policy.update_statistics(own)  # type: ignore[operator]  # every policy has it

    @property
    def language(self) -> LanguagePolicy | None:
        """The one language policy, where there is one."""
        return next((policy for policy in self.roles.values() if isinstance(policy, LanguagePolicy)), None)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(``role/name``, tensor) of what acts: of a language policy only the model, with any adapter merged."""
        for role, policy in self.roles.items():
            for name, tensor in policy.named_weights():  # type: ignore[operator]  # every policy has it
                yield f"{role}/{name}", tensor

    def save_description(self, folder: Path) -> None:
        """What the language policy is built from, for a checkpoint's folder ``model``."""
        if self.language is not None:
            self.language.save_config(folder)
            self.language.save_description(folder)

    def exported_names(self) -> dict[str, tuple[str, str]]:
        """The language policy's; see `TrainedModule`."""
        for role, policy in self.roles.items():
            if policy is self.language:
                return {f"roles.{role}.{name}": place for name, place in self.language.exported_names().items()}
        return {}


def of_roles(tensors: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """{role: {name: tensor}} out of `RolePolicies.named_weights`."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors:
        role, _, own = name.partition("/")
        found.setdefault(role, {})[own] = tensor
    return found


def domain_of(group: EpisodeGroup) -> str:
    """The configuration's domain of a group, without the player's name."""
    return group.domain.partition("@")[0]


def joined(parts: Sequence[PreparedTurns]) -> PreparedTurns:
    """Rows behind one another, as wide as the widest."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens.mask.shape[1] for part in parts)
    tokens = TokenBatch(
        sequences=tuple(sequence for part in parts for sequence in part.tokens.sequences),
        mask=_stacked((part.tokens.mask for part in parts), width),
        advantage=_stacked((part.tokens.advantage for part in parts), width),
        behaviour_log_prob=_stacked((part.tokens.behaviour_log_prob for part in parts), width),
        chunk_id=_stacked((part.tokens.chunk_id for part in parts), width),
        positive=torch.cat([part.tokens.positive for part in parts]),
        present=_stacked_or_none([part.tokens.present for part in parts], width),
        reference=_stacked_or_none([part.tokens.reference for part in parts], width),
    )
    metrics: dict[str, float] = {}
    for part in parts:
        metrics |= part.metrics
    return PreparedTurns(tokens, sum(part.num_turns for part in parts), metrics)


def _stacked_or_none(parts: Sequence[Tensor | None], width: int) -> Tensor | None:
    found = [part for part in parts if part is not None]
    assert len(found) in (0, len(parts)), "one learner says for all of them whether it needs these"
    return _stacked(found, width) if found else None


def _stacked(parts: Iterable[Tensor], width: int) -> Tensor:
    """[R, S] each → [ΣR, width], zeros behind."""
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
