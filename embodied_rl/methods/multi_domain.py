"""Several domains in one run: their simulators, the policies that play them, one group queue for all, and one update a role."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from embodied_rl.agents.agent import Agent
from embodied_rl.agents.dialogue import write_dialogues
from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.algorithms.filters import GroupFilter, build_filters
from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.methods.agents import DIALOGUES
from embodied_rl.methods.base import Experience, Method, Recordable
from embodied_rl.methods.domain_roles import Role, RolePolicies, RoleWarmStarts, domain_of
from embodied_rl.methods.groups import queue_config
from embodied_rl.rollout.domain_collector import DomainCollector
from embodied_rl.rollout.domains import PLAYER_SIGN, DomainMixture, place_of, queue_weights
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.queue_pump import QueuePump
from embodied_rl.sim.faults import FaultRecord
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import EpisodeGroup, EpisodeSummary, SimSpec

OWN_PLAYER = "policy"
"""In metrics: the run's own backend, beside the players of generation.mix."""
_DIALOGUES_SHOWN = 4
"""Episodes of each domain."""


@dataclass
class Seat:
    """One player in one domain: its simulators and, where they are in this process, its generator, collector and agent."""

    domain: str
    """The configuration's."""
    player: str
    """`OWN_PLAYER`, or a name of generation.mix."""
    sim: SimConfig
    """Of the domain."""
    manager: Simulators
    """An `EnvManager`; or, of simulators in another process, what is known of them here (`domains_apart.DomainElsewhere`)."""
    trained: bool
    generator: Generator | None = None
    """Plays held-out episodes; None: not in this process."""
    collector: QueuePump | None = None
    """None: it is elsewhere."""
    agent: Agent | None = None
    """Of a domain of text that is played here."""

    @property
    def name(self) -> str:
        """Of its groups in the queue."""
        return name_of(self.domain, self.player)


class DomainManagers(Simulators):
    """The simulators of all seats, as the training loop knows one manager."""

    plays_itself = True

    def __init__(self, config: TrainConfig, seats: Sequence[Seat]) -> None:
        self._config, self.seats = config, list(seats)
        self.backends: list[TokenBackend] = []
        """To be closed at the end."""
        self._faults: list[FaultRecord] = []
        self._num_faults = [0] * len(self.seats)
        self.num_slots = sum(seat.manager.num_slots for seat in self.seats)
        first = self.seats[0].manager.spec
        self.spec: SimSpec = dataclasses.replace(
            first, task="+".join(config.domains), reports_success=all(seat.manager.spec.reports_success for seat in self.seats)
        )

    @staticmethod
    def start(config: TrainConfig) -> DomainManagers:
        """Start all simulators. Raises as `EnvManager` does; what was started is ended then."""
        seeds = EpisodeSeeds.training(config.seed)
        seats: list[Seat] = []
        with ExitStack() as stack:
            for domain, player in seats_of(config):
                sim, other = config.domains[domain].sim, config.generation.mix.get(player)
                # Separate simulators for each player: a slow server holds up no other player.
                slots, chunk_size = None if other is None else other.num_slots, config.for_domain(domain).policy.chunk_size
                manager = EnvManager.from_config(sim, seeds, num_slots=slots, autoreset=False, chunk_size=chunk_size)
                stack.callback(manager.close)
                seats.append(Seat(domain, player, sim, manager, trained=is_trained(config, player)))
            found = DomainManagers(config, seats)
            stack.pop_all()
        return found

    @property
    def fault_records(self) -> list[FaultRecord]:
        """See `EnvManager.fault_records`: of all seats, in the order in which they were asked for here."""
        for index, seat in enumerate(self.seats):
            found = seat.manager.fault_records
            self._faults += found[self._num_faults[index] :]
            self._num_faults[index] = len(found)
        return self._faults

    def worker_pids(self) -> list[int]:
        """Of all seats."""
        return [pid for seat in self.seats for pid in seat.manager.worker_pids()]

    def evaluate(
        self,
        generator: object,
        num_episodes: int,
        first_seed: int,
        on_episode: Callable[[EpisodeSummary], object] | None = None,
        *,
        domain: str | None = None,
    ) -> list[EpisodeSummary]:
        """Play held-out seeds in every domain (or in one), `num_episodes` in each; they say their domain as ``final_info["task"]``."""
        played: list[EpisodeSummary] = []
        for seat in self.seats:
            if seat.player == OWN_PLAYER and seat.generator is not None and domain in (None, seat.domain):
                own = evaluate(seat.manager, seat.generator, num_episodes, first_seed=first_seed, on_episode=on_episode)
                played += [dataclasses.replace(e, final_info={**e.final_info, "task": seat.domain}) for e in own]
        return played

    def close(self) -> None:
        """End simulators, tools and backends."""
        with ExitStack() as stack:
            for seat in self.seats:
                stack.callback(seat.manager.close)
                if seat.collector is not None:
                    stack.callback(seat.collector.close)
            for backend in self.backends:
                stack.callback(backend.close)


class DomainGenerators(Generator):
    """What the engine publishes to: every role's players."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = list(roles)
        self.version = 0

    def publish(self, version: int) -> None:
        """See `Generator.publish`."""
        for role in self._roles:
            role.publish(version)
        self.version = version


class DomainsMethod(Method):
    """Groups of all domains out of one queue; every role learns from its own."""

    def __init__(self, config: TrainConfig, seats: Sequence[Seat], roles: dict[str, Role], run_dir: Path) -> None:
        """`seats`: with their collectors; without, the caller sets `collector` (`roles.assembly.connect`)."""
        groups = config.algorithm.groups
        assert groups is not None, "the configuration was checked"
        self.config, self.roles = config, roles
        self._seats = {seat.name: seat for seat in seats}
        self.warm_start: RoleWarmStarts = RoleWarmStarts(list(roles.values()))
        self._run_dir = run_dir
        self.queue = make_domain_queue(config)
        if all(seat.collector is not None for seat in seats):
            self.collector = make_domain_collector(config, seats, self.queue)
        self._figures: dict[str, float] = {}
        self._last: dict[str, list[AgentEpisode]] = defaultdict(list)

    @property
    def sharded(self) -> RankExecutor | None:
        """See `Method.sharded`: of the language policy, the only one with ranks."""
        return next((role.ranks for role in self.roles.values() if role.ranks is not None), None)

    @property
    def own_seats(self) -> list[Seat]:
        """Where the run's own policies play."""
        return [seat for seat in self._seats.values() if seat.player == OWN_PLAYER]

    def recordable(self, num_slots: int, spec: SimSpec, sim: SimConfig) -> list[Recordable]:
        """See `Method.recordable`: one for each domain."""
        return [
            Recordable(_here(seat), seat.domain, seat.manager.num_slots, plain_spec(seat.manager.spec), seat.sim) for seat in self.own_seats
        ]

    def collect(self, iteration: int) -> Experience:
        groups = self.collector.next_groups(iteration)
        self._note(groups)
        trained = [group for group in groups if self._seats[group.domain].trained]
        episodes = [episode for group in trained for episode in group.episodes]
        finished = [(episode.success, _task_return(episode), episode.num_steps) for episode in episodes]
        observation = {
            f"{name}/{key}": part
            for name, role in self.roles.items()
            if (own := self._of(role, trained))
            for key, part in role.observation(own).items()
        }
        return Experience(sum(episode.num_steps for episode in episodes), finished, observation, trained)

    def prepare(self, experience: Experience) -> list[EpisodeGroup]:
        """The groups that are learned from; a role's rewards become advantages within its update."""
        groups: list[EpisodeGroup] = experience.data
        return groups

    def update(self, prepared: list[EpisodeGroup], *, iteration: int, steps: int) -> dict[str, float]:
        stats: dict[str, float] = {}
        for name, role in self.roles.items():
            if own := self._of(role, prepared):
                stats |= {f"{name}/{key}": value for key, value in role.learn(own, iteration=iteration, steps=steps).items()}
        return stats

    def published(self, version: int) -> None:
        self.queue.published(version)

    def restart(self, iteration: int) -> None:
        """Episodes in flight are asked for again, with the same seeds; a warm start comes before the first ones."""
        self.warm_start.run(iteration)
        state = self.queue.state_dict()
        self.queue = make_domain_queue(self.config)
        self.queue.load_state_dict(state)
        self.collector.restart(self.queue)

    def finish(self) -> None:
        """Write down the last training episodes of the domains of text, to be read."""
        for name, episodes in self._last.items():
            tokenizer = next(role.policy.tokenizer for role in self.roles.values() if name in role.domains)
            write_dialogues(
                self._run_dir / f"{Path(DIALOGUES).stem}-{name}.html",
                episodes,
                functools.partial(tokenizer.decode, skip_special_tokens=False),
                f"{name}: the last training episodes",
            )

    def metrics(self) -> dict[str, float]:
        counts = self.queue.counts().figures()
        for name, own in self.queue.domain_counts().items():
            counts |= {f"{place_of(name)}/groups_{outcome}": value for outcome, value in own.figures("").items() if outcome != "in_flight"}
        told = {key: value for role in self.roles.values() for key, value in role.metrics().items()}
        return {**counts, **self._figures, **self.collector.metrics(), **told}

    def state_tensors(self) -> dict[str, Tensor]:
        return {f"{name}/{key}": part for name, role in self.roles.items() for key, part in role.state_tensors().items()}

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What ranks wrote of their optimizer, as it stands in `state_tensors` of a run without ranks."""
        divided = next(name for name, role in self.roles.items() if role.ranks is not None)
        return {f"{divided}/{key}": part for key, part in state.items()}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for name, role in self.roles.items():
            role.load_state_tensors({k.removeprefix(f"{name}/"): part for k, part in state.items() if k.startswith(f"{name}/")})

    def state_dict(self) -> dict[str, Any]:
        specs = {seat.domain: plain_spec(seat.manager.spec).to_dict() for seat in self.own_seats}
        roles = {name: role.state_dict() for name, role in self.roles.items()}
        return {"queue": self.queue.state_dict(), "roles": roles, "specs": specs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, role in self.roles.items():
            role.load_state_dict(state["roles"][name])
        self.queue = make_domain_queue(self.config)
        self.queue.load_state_dict(state["queue"])
        self.collector.restart(self.queue)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _of(self, role: Role, groups: Sequence[EpisodeGroup]) -> list[EpisodeGroup]:
        return [group for group in groups if domain_of(group) in role.domains]

    def _note(self, groups: Sequence[EpisodeGroup]) -> None:
        """Figures of this batch: of each domain as the run's own player played it, and of every player where there are several."""
        figures: dict[str, float] = {}
        for name, seat in self._seats.items():
            own = [group for group in groups if group.domain == name]
            if seat.player == OWN_PLAYER:
                figures |= {f"domains/{seat.domain}/{key}": value for key, value in _figures(own).items()}
            if self.config.generation.mix:
                figures |= {f"players/{seat.player}/{seat.domain}/{key}": value for key, value in _figures(own).items()}
            told = [episode for group in own for episode in group.episodes if isinstance(episode, AgentEpisode)]
            if told and seat.player == OWN_PLAYER:
                self._last[name] = told[:_DIALOGUES_SHOWN]
        self._figures = figures


def _here(seat: Seat) -> QueuePump:
    assert seat.collector is not None, "the seat is played in this process"
    return seat.collector


def _figures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """``groups`` and ``episodes`` of a batch, and means over its episodes, where there are any: ``success``, ``return``, ``length``."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts = {"groups": float(len(groups)), "episodes": float(len(episodes))}
    if not episodes:
        return counts
    return {
        **counts,
        "success": float(np.mean([episode.success for episode in episodes])),
        "return": float(np.mean([_task_return(episode) for episode in episodes])),
        "length": float(np.mean([episode.num_steps for episode in episodes])),
    }


def _task_return(episode: Any) -> float:
    """The simulator's rewards, without penalties of the agent's."""
    return episode.game_return if isinstance(episode, AgentEpisode) else episode.episode_return


def played_by(config: TrainConfig, player: str) -> tuple[str, ...]:
    """The domains where a player of generation.mix plays."""
    chosen = config.generation.mix[player].domains
    text = [name for name, domain in config.domains.items() if domain.policy is None]
    return tuple(name for name in config.domains if name in (chosen or text))


def seats_of(config: TrainConfig) -> list[tuple[str, str]]:
    """(domain, player) of all seats, in their order."""
    found: list[tuple[str, str]] = []
    for domain in config.domains:
        found.append((domain, OWN_PLAYER))
        found += [(domain, name) for name in config.generation.mix if domain in played_by(config, name)]
    return found


def is_trained(config: TrainConfig, player: str) -> bool:
    """Whether the run's policy learns from what a player plays."""
    if player == OWN_PLAYER:
        return True
    return config.generation.mix[player].is_policy and config.generation.mix[player].train


def name_of(domain: str, player: str) -> str:
    """Of a seat's groups in the queue."""
    return domain if player == OWN_PLAYER else f"{domain}{PLAYER_SIGN}{player}"


def make_domain_queue(config: TrainConfig) -> GroupQueue:
    """One queue for all domains. Filters choose what is learned from; a baseline's groups all count."""
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    shares = {name: (player.share, played_by(config, name)) for name, player in config.generation.mix.items()}
    weights = queue_weights({name: domain.weight for name, domain in config.domains.items()}, shares)
    trained = {name_of(domain, player): is_trained(config, player) for domain, player in seats_of(config)}

    def only_trained(apply: GroupFilter) -> GroupFilter:
        return lambda group: apply(group) if trained[group.domain] else None

    filters = [only_trained(apply) for apply in build_filters(groups.filters)]
    return GroupQueue(queue_config(groups), seed=config.seed, domains=DomainMixture(weights), filters=filters)


def make_domain_collector(config: TrainConfig, seats: Sequence[Seat], queue: GroupQueue) -> DomainCollector:
    """Fills the queue from the seats' collectors."""
    groups = config.algorithm.groups
    assert groups is not None, "the configuration was checked"
    collector = DomainCollector({seat.name: seat.collector for seat in seats}, queue, lockstep=groups.max_staleness == 0)
    collector.restart(queue)
    return collector


def policies_of(roles: dict[str, Role]) -> RolePolicies:
    """All policies as one module."""
    return RolePolicies({name: role.policy for name, role in roles.items()})
