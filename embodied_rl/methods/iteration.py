"""One iteration of a run: its streams play, in one domain or several, and every policy is updated."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.learner import Learner
from embodied_rl.methods.base import Experience, Method
from embodied_rl.methods.learners import PolicyLearner
from embodied_rl.methods.starts import Starts
from embodied_rl.methods.stored import StoredLearner
from embodied_rl.methods.streams import Stream, episode_figures, make_queue, of_name, prefixed, recordable_streams
from embodied_rl.rollout.collector import PATIENCE_S, Collector
from embodied_rl.rollout.domains import place_of
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.queue_pump import age_figures
from embodied_rl.types import Episode, EpisodeGroup, Rollout


class StreamsMethod(Method):
    """Every policy learns from its own streams, each in its own mode: from groups of whole episodes, from a rollout that one update
    consumes, or from stored steps, recorded or played.

    An iteration takes a batch of the group queue, if any domain plays groups, and a rollout of every other domain that plays. Policies
    that learn only from recordings take their gradient steps in the same iteration.
    """

    def __init__(
        self,
        config: TrainConfig,
        streams: Sequence[Stream],
        learners: Mapping[str, PolicyLearner],
        stored: Mapping[str, StoredLearner[Any]],
        run_dir: Path,
        queue: GroupQueue | None = None,
        *,
        divided: str,
    ) -> None:
        """
        Args:
            streams: streams without a collector are played in another process; the connection to it sets the method's collector.
            learners: {name of the policy (`Stream.policy`): its learner}.
            stored: those of the learners that store their steps.
            run_dir: folder for what is written at the end of the run.
            queue: group queue that the streams' collectors fill; None: no groups are played here.
            divided: name of the policy that ranks train, in this run or in the one that wrote its checkpoint.
        """
        self.config, self.streams, self.learners, self._run_dir = config, list(streams), dict(learners), run_dir
        self.divided = divided
        self.queue = queue or (None if config.algorithm.groups is None else make_queue(config, streams))
        self.starts = Starts(streams)
        self._stored = dict(stored)
        self._reading = {name: own for name, own in stored.items() if not own.config.algorithm.plays}
        """The stored learners that learn from recordings only."""
        self._max_staleness = max(stream.config.algorithm.max_staleness for stream in streams)
        """Largest allowed staleness of rollouts, in versions."""
        self._figures: dict[str, float] = {}
        """Metrics of the last collected experience."""

    def play_by(self, collector: Collector, acting: Iterable[Generator]) -> None:
        """Set the collector, once; `acting`: generators of its rollouts. Raises UserError if nothing can be played while training."""
        self.collector = collector
        if not self._max_staleness:
            return
        if any(generator.shares_weights for generator in acting):
            key = "algorithm.max_staleness" if self.queue is None else "algorithm.groups.max_staleness"
            raise UserError(
                f"{key}={self._max_staleness}: a policy of this size acts with the trained parameters, not with a copy, so no episode can "
                f"be played during training. Nearest valid choice: hybrid=disaggregated, or {key}=0."
            )
        for learner in self.all_learners:
            learner.executor.meanwhile = functools.partial(self.play_ahead, 0.0)

    @property
    def all_learners(self) -> list[Learner]:
        return [own.learner for own in self.learners.values()]

    @property
    def finished(self) -> bool:
        return all(own.finished for own in self.learners.values())

    @property
    def wants_start(self) -> bool:
        return any(own.wants_start for own in self.learners.values())

    def begin_learning(self, version: int) -> None:
        for learner in self.learners.values():
            learner.begin(version)

    def recordable(self) -> list[Stream]:
        """See `Method.recordable`: every domain as the run's own policy plays it."""
        return recordable_streams(self.streams)

    # ---- an iteration -----------------------------------------------------------------------------------------------

    def collect(self, iteration: int) -> Experience:
        self._draw(iteration)
        self._figures = {}
        rollouts = self._next_rollouts(iteration)
        groups = [] if self.queue is None else self._next_groups(iteration)
        episodes = [episode for group in groups for episode in group.episodes]
        finished = [episode for rollout in rollouts.values() for episode in _finished_in(rollout)]
        finished += _finished(episodes)
        steps = sum(rollout.num_steps for rollout in rollouts.values()) + sum(episode.num_steps for episode in episodes)

        found: dict[str, Any] = {name: {} for name, own in self._stored.items() if name not in self._reading and iteration < own.first}
        found |= self._minibatches()
        if not self.config.plays:
            steps = sum(number * self._reading[name].num_rounds for name, number in found.items())
        seen: dict[str, Tensor] = {}
        for name, learner in self.learners.items():
            played: dict[str, Any] = {}
            for domain in dict.fromkeys(stream.domain for stream in self.streams if stream.policy == name):
                names = {stream.name for stream in self.streams if stream.domain == domain}
                if own := rollouts.get(domain) or [group for group in groups if group.domain in names]:
                    played[domain] = own
            if played:
                found[name] = learner.gather(played)
                seen |= prefixed(name, learner.observation(found[name]))
        return Experience(steps, finished, seen, found)

    def _next_rollouts(self, iteration: int) -> dict[str, Rollout]:
        """{domain: rollout that version `iteration` learns from}, at most `algorithm.max_staleness` versions old. Raises SimFault."""
        rollouts = self.collector.next_rollouts(iteration)
        for domain in filter(None, rollouts):
            figures = {"steps": float(rollouts[domain].num_steps), **episode_figures(_finished_in(rollouts[domain]))}
            self._figures |= prefixed(f"domains/{domain}", figures)
        self.play_ahead(0.0)
        if self._max_staleness and rollouts:
            ages = [age for rollout in rollouts.values() for age in (iteration - rollout.policy_version).ravel().tolist()]
            assert max(ages) <= self._max_staleness, "newer weights wait until older ones have played"
            self._figures |= age_figures("rollout", ages, self._max_staleness)
        return rollouts

    def _next_groups(self, iteration: int) -> list[EpisodeGroup]:
        """The queue's groups that are learned from. Raises SimFault and BatchNeverFullError."""
        groups = self.collector.next_groups(iteration)
        for stream in self.streams:
            own = [group for group in groups if group.domain == stream.name]
            if not stream.plays_groups:
                continue
            if stream.is_own:
                self.learners[stream.policy].note(stream, own)
            if stream.is_own and stream.domain:
                self._figures |= prefixed(f"domains/{stream.domain}", _figures(own))
            if self.config.generation.mix:
                self._figures |= prefixed(f"players/{stream.player}/{stream.domain}", _figures(own))
        trained = {stream.name for stream in self.streams if stream.trained}
        return [group for group in groups if group.domain in trained]

    def _minibatches(self) -> dict[str, int]:
        """{policy that learns only from recordings: its gradient steps per round}, divided by weight among policies of the same method."""
        given: dict[str, int] = {}
        for name, own in self._reading.items():
            alike = [one for one in self._reading.values() if type(one) is type(own)]  # epochs and critics' updates do not compare
            each = sum(one.num_minibatches for one in alike) / sum(one.weight for one in alike)
            given |= {} if own.finished else {name: max(1, round(each * own.weight))}
        return given

    def prepare(self, experience: Experience) -> dict[str, Any]:
        given = {name: own if name in self._reading else self.learners[name].prepare(own) for name, own in experience.data.items()}
        return {name: own for name, own in given.items() if not self.learners[name].finished}

    def update(self, prepared: dict[str, Any], *, iteration: int, steps: int) -> dict[str, float]:
        stats: dict[str, float] = {}
        progress = self.config.progress(steps)
        for name, own in prepared.items():
            stats |= prefixed(name, self.learners[name].update(own, iteration=iteration, progress=progress))
        return stats

    def play_ahead(self, patience_s: float = PATIENCE_S) -> None:
        with compute_threads(1):
            while self.collector.keeps_weights and self.collector.pump(patience_s):
                pass

    def published(self, version: int) -> None:
        if self.queue is not None:
            self.queue.published(version)
        self.starts.commit(self.queue)

    # ---- begin, continue and end of a run ---------------------------------------------------------------------------

    def restart(self, iteration: int) -> None:
        """See `Method.restart`; warm starts, and an expert that other episodes start in, come before the first episodes. Groups in flight
        are requested again, with the same seeds."""
        self.begin_learning(iteration)
        self._begin(iteration)

    def take_up(self, episodes: Mapping[str, Tensor]) -> None:
        """See `Method.take_up`; continues rollouts, and requests groups again."""
        for learner in self._stored.values():
            learner.read()
        if self.queue is not None:
            self._begin(self.queue.version)
        super().take_up(episodes)

    def _begin(self, iteration: int) -> None:
        self._draw(iteration)
        if self.queue is not None:
            self._go_on_with(self.queue.state_dict())
        self.starts.begin_anew()
        self.starts.record()
        self.collector.restart(self.queue, seed_round=iteration)

    def _go_on_with(self, state: Mapping[str, Any]) -> None:
        """Request the groups that a queue's state names."""
        self.queue = make_queue(self.config, self.streams)
        self.queue.load_state_dict(state)

    def _draw(self, iteration: int) -> None:
        """Set how policies with stored steps act from this rollout on."""
        for name, learner in self._stored.items():
            for domain in learner.steps if name not in self._reading else ():
                self.collector.draw(domain=domain, first=learner.first, **learner.way(iteration))

    def finish(self) -> None:
        for learner in self.learners.values():
            learner.finish(self._run_dir)

    # ---- metrics and state -------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        figures = {} if self.queue is None else self.queue.counts().figures()
        if self.queue is not None and self.streams[0].domain:
            for name, own in self.queue.domain_counts().items():
                counts = own.figures("").items()
                figures |= {f"{place_of(name)}/groups_{outcome}": value for outcome, value in counts if outcome != "in_flight"}
        learned = {key: value for learner in self.learners.values() for key, value in learner.metrics().items()}
        return {**figures, **self.starts.metrics(), **self._figures, **self.collector.metrics(), **learned}

    def state_tensors(self) -> dict[str, Tensor]:
        return {key: part for name, own in self.learners.items() for key, part in prefixed(name, own.state_tensors()).items()}

    def of_ranks(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return prefixed(self.divided, state)

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        for name, own in self.learners.items():
            own.load_state_tensors(of_name(name, state))

    def played_state(self) -> dict[str, Any]:
        """The part of `state_dict` that belongs to playing: the queue, and where episodes start."""
        state = {} if self.queue is None else {"queue": self.queue.state_dict()}
        if libraries := self.starts.state(self.queue):
            state["starts"] = libraries.get("", libraries)  # a run's only domain without its name
        return state

    def state_dict(self) -> dict[str, Any]:
        state, own = self.played_state(), {name: learner.state_dict() for name, learner in self.learners.items()}
        if "" in own:
            return {**own[""], **state}
        specs = {stream.domain: stream.spec.to_dict() for stream in self.streams if stream.is_own}
        return {**state, "roles": own, "specs": specs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, learner in self.learners.items():
            learner.load_state_dict(state["roles"][name] if name else state)
        if libraries := self.starts.libraries:
            self.starts.load({"": state["starts"]} if "" in libraries else state["starts"])
        if self.queue is not None:
            self._go_on_with(state["queue"])
        if self.finished:  # a finished run is resumed to train for longer
            for stored in self._stored.values():
                stored.go_on()

    def with_trained(self, state: dict[str, Any]) -> dict[str, Any]:
        """Complete `state`, the `state_dict` of the learning half in another process, with playing and warm starts of this process."""
        state = {**state, **self.played_state()}
        own = {name: learner.state_dict() for name, learner in self.learners.items()}
        if "" in own:
            return {**state, **_started(own[""])}
        return {**state, "roles": {name: {**role, **_started(own[name])} for name, role in state["roles"].items()}}


def _figures(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """The number of ``groups`` in a batch, and `episode_figures`."""
    return {"groups": float(len(groups)), **episode_figures(_finished([episode for group in groups for episode in group.episodes]))}


def _finished_in(rollout: Rollout) -> list[tuple[bool, float, int]]:
    """See `Experience.finished`: success rates, and decisions based on them, count ordinary starts only."""
    ordinary = [episode for episode in rollout.episodes if "start" not in episode.final_info]
    return [(episode.success_once, episode.episode_return, episode.length) for episode in ordinary]


def _finished(episodes: Iterable[Episode]) -> list[tuple[bool, float, int]]:
    """See `Experience.finished`: sampled episodes with ordinary starts."""
    own = (one for one in episodes if one.metadata.get("start", {}).get("source") is None and not one.metadata.get("greedy"))
    return [(episode.success, episode.game_return, episode.num_steps) for episode in own]


def _started(role: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a policy's state about its warm starts."""
    return {name: role[name] for name in ("warm_start", "warm_starts") if name in role}
