"""The pump between simulators and generator: it fills a rollout; one group of slots simulates while the policy acts for another."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator, Way
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.observations import rollout_of, tree_of
from embodied_rl.rollout.slot_starts import SlotStarts
from embodied_rl.sim.batches import from_zero, joined, rows_of
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.sim.worker_pool import split_slots
from embodied_rl.timeline import span
from embodied_rl.types import ActionLayout, EpisodeGroup, EpisodeSummary, Observation, Rollout, StepBatch, TensorSpec, VariableSpec

if TYPE_CHECKING:
    from embodied_rl.rollout.batch_sinks import TrainingRecorder
    from embodied_rl.rollout.scoring import Scorer

_NOISE_STREAM = 1
PATIENCE_S = 1.0
"""Seconds to wait for simulators before the collector checks hosts and queue deadlines again."""


def action_noise(layout: ActionLayout, shape: tuple[int, ...], seed: int, iteration: int) -> np.ndarray:
    """[*shape, noise_width] randomness of one rollout's actions, a function of (seed, iteration): a resume needs no saved state."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, iteration, _NOISE_STREAM])))
    return layout.noise(generator, shape)


@dataclass
class CollectorTimes:
    """Seconds since the start of a rollout."""

    simulate_s: float = 0.0
    """Time spent waiting for simulators."""
    act_s: float = 0.0
    """Time spent turning observations into actions, and copying."""


class Collector:
    """Collects what a method learns from: a rollout of all slots, or groups of episodes. Each collector fills one kind of batch.
    `NOT_PLAYED` is the collector of methods that play nothing, or whose playing happens in another process."""

    plays: bool = True
    """Whether the collector plays; False: it has nothing to hand out."""
    recorder: TrainingRecorder | None = None
    """Writer of a share of the episodes; None: none are recorded."""
    layout: ActionLayout | None = None
    """Layout of the generator's actions; None: actions are texts."""
    seeds: EpisodeSeeds = EpisodeSeeds.training(0)
    """Seeds of the slots' episodes in fixed rollouts."""
    scorer: Scorer | None = None
    """Adds a further reward to finished episodes before they are handed out, while others are played."""
    min_ready: int | None = None
    """Number of slots to wait for; None: all slots, and nothing is played before a batch is asked for."""

    def __init__(self) -> None:
        self.times = CollectorTimes()
        """Times of the last batch."""

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Begin new episodes: those that `queue` asks for, or one in each slot, with seeds of `seed_round`."""

    def give_up_groups(self, queue: GroupQueue) -> None:
        """Give up the running episodes of groups, so that their simulators are free; `queue` asks for them again."""
        self.restart(queue)

    def score_with(self, scorer: Scorer | None) -> None:
        """Hand finished episodes to `scorer` before the queue; None: directly to the queue."""
        self.scorer = scorer

    def draw(self, way: Way, *, random_before: int = 0, first: int = 0, domain: str = "") -> None:
        """Set how the coming rollouts act, for a collector whose generator can be switched. The number of a rollout decides, which is the
        version that learns from it: a rollout played ahead acts the same.

        Args:
            random_before: rollouts with smaller numbers act at random instead.
            first: number of the first rollout that is played.
            domain: domain of the rollouts.
        """
        raise AssertionError("this collector's generator cannot be switched")

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        """{domain: rollout that `version` learns from} for the domains that play by now; a single domain has the name ``""``."""
        return {}

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """Groups that `version` learns from; call it after `next_rollouts`. Raises SimFault (see EnvManager) and BatchNeverFullError."""
        return []

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Play ahead for a moment, waiting at most `patience_s` for something to be ready. False: nothing may be played now, or with a
        patience of 0 nothing is ready."""
        return False

    @property
    def keeps_weights(self) -> bool:
        """Whether some rollout must still be played with the present weights, so that newer ones may not act yet."""
        return False

    def episodes(self) -> list[bytes]:
        """Running episodes of all slots, between two batches; empty if batches consist of whole episodes.
        Raises UserError if the simulator cannot save episodes."""
        return []

    def take_up(self, episodes: Sequence[bytes]) -> None:
        """Continue the episodes that `episodes` returned, in this process or another. Raises SnapshotError for another simulator's."""
        raise AssertionError("no episode of this collector runs between two batches")

    def figures(self) -> dict[str, float]:
        """Counts of language agents since the last call."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch beside `times`; empty by default."""
        return {}

    def close(self) -> None:
        """End the scorer; simulators, generators and agents end with those who made them."""
        if self.scorer is not None:
            self.scorer.close()


NOT_PLAYED = Collector()
NOT_PLAYED.plays = False


class RolloutCollector(Collector):
    """Collects rollouts of `rollout_steps` steps from all slots of a manager, one after another without a gap.

    With staleness S the collector plays the next rollouts while the trainer learns from the last (two buffers for S = 1). Rollout n, from
    which version n learns, is played wholly with version n - S (the first ones after a restart: with the version of then). The collector
    `keeps_weights` until that is done. New weights begin nothing before their rollout is asked for, so that what a checkpoint or an
    evaluation in between finds depends on seeds and not on the clock either.

    In lockstep, groups of slots take turns. With `min_ready` each slot continues as soon as its simulator answers: a slot whose host is
    lent to training waits while the others play on. What a slot draws depends on neither.

    Between two rollouts the manager may change its turns (`Simulators.num_turns`), which changes only time: the policy acts for the same
    groups at the same rows, whichever part of them is ready.
    """

    layout: ActionLayout

    def __init__(
        self,
        manager: Simulators,
        generator: Generator,
        *,
        rollout_steps: int,
        num_groups: int,
        seed: int,
        layout: ActionLayout | None = None,
        max_staleness: int = 0,
        min_ready: int | None = None,
        share: Share = WHOLE,
        starts: StartLibrary | None = None,
    ) -> None:
        """
        Args:
            rollout_steps: decisions of each slot: chunks, if the policy acts in chunks.
            num_groups: groups of slots that the policy acts for in turn; `manager.num_turns` says how they are stepped. 1 with `min_ready`.
            layout: layout of the policy's actions; None: the simulator's own.
            max_staleness: S; 0: `pump` does nothing.
            share: which slots of a rollout these are; they see and draw the same as in a rollout of all slots.
            starts: starts for episodes that begin inside others; their summaries have ``final_info["start"]``.
        """
        self.manager = manager
        self.layout = layout or ActionLayout.of(manager.spec.action)
        self.generator = generator
        self.rollout_steps = rollout_steps
        self.seed, self._share = seed, share
        self.seeds = EpisodeSeeds.training(seed, before=share.slots_before)
        self.times = CollectorTimes()
        self.min_ready = min_ready
        self._acted_groups = split_slots(range(manager.num_slots), num_groups)
        self._arrange()
        self._batches: list[StepBatch] = []
        """The present observations of each group."""
        self.max_staleness = max_staleness
        self._partial: _PartialRollout | None = None
        """The rollout that is being filled."""
        self._next_number = 0
        """Number of the rollout that begins next: the version that learns from it."""
        self._asked = -math.inf
        """Latest version whose rollout was asked for since the last restart."""
        self._way: Way | None = None
        """How to act, see `draw`; None: the generator's own."""
        self._random_before = self._first = 0
        self._filled: deque[Rollout] = deque()
        self._since = CollectorTimes()
        """Times since the last rollout was handed out."""
        self._round: int | None = None
        """Round of seeds, from a restart to its first decision; else None."""
        self._starts = None if starts is None else SlotStarts(manager, starts, share=share)

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0, reconfigure: bool = True) -> None:
        """Begin new episodes in all slots, with seeds that depend only on (seed, seed_round, slot); a run can be resumed here.

        Rollouts that were played ahead are dropped.
        """
        self._partial, self._next_number, self._asked = None, max(seed_round, self._first), -math.inf
        self._filled.clear()
        self._since = CollectorTimes()
        self._arrange()
        self._see(self.manager.reset(self.seeds, seed_round=seed_round, reconfigure=reconfigure))
        self._round = seed_round
        if self.recorder is not None:
            self.recorder.restarted(seed_round, self._seed_of)

    def draw(self, way: Way, *, random_before: int = 0, first: int = 0, domain: str = "") -> None:
        self._way, self._random_before, self._first = way, random_before, first

    def episodes(self) -> list[bytes]:
        """See `Collector.episodes`. A rollout begun ahead is played to its end first. The first slot's state holds the rollouts that wait
        to be learned from; each slot's state holds its own part of the recording."""
        while self._partial is not None:
            self._advance()
        self._take_to_starts()
        slots = range(self.manager.num_slots)
        beside: list[dict[str, Any]] = [{} if self.recorder is None else {"recorded": self.recorder.running(slot)} for slot in slots]
        if self._filled or self.max_staleness:
            beside[0] |= {"ahead": [tree_of(rollout) for rollout in self._filled], "next_number": self._next_number}
        if self._starts is not None:
            beside = [{**own, "start": start} for own, start in zip(beside, self._starts.states(), strict=True)]
        episodes = [snapshot.to_bytes() for snapshot in self.manager.snapshot(slots)]
        return [encode_state({**own, "episode": episode}) if own else episode for own, episode in zip(beside, episodes, strict=True)]

    def take_up(self, episodes: Sequence[bytes]) -> None:
        found = [decode_state(episode) for episode in episodes]
        self._partial, self._next_number, self._asked = None, found[0].get("next_number", self.generator.version), -math.inf
        self._arrange()
        self._filled = deque(rollout_of(tree) for tree in found[0].get("ahead", ()))
        saved = [Snapshot.from_bytes(own.get("episode", episode)) for own, episode in zip(found, episodes, strict=True)]
        self._see(self.manager.restore(range(self.manager.num_slots), saved))
        if self._starts is not None:
            self._starts.load([own["start"] for own in found])
            self._round = None
        if self.recorder is not None:
            self.recorder.taken_up(saved, [own.get("recorded") for own in found], self._seed_of)

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        self._asked = version
        return {} if version < self._first else {"": self.next_rollout(version)}

    def next_rollout(self, version: int) -> Rollout:
        """The rollout that `version` learns from: `rollout_steps` × `num_slots` decisions, some perhaps played before. Raises SimFault."""
        while self.advance(version):
            pass
        self.times, self._since = self._since, CollectorTimes()
        rollout = self._filled.popleft()
        self.manager.rollout_took(self.times.simulate_s + self.times.act_s, rollout.num_steps)
        return rollout

    def advance(self, version: int) -> bool:
        """Play one decision of the rollout that `next_rollout` returns. False: that rollout is complete, or it is before the first one."""
        assert self._batches, "restart() comes first"
        self._asked = version
        if self._filled or version < self._first:
            return False
        if self._partial is None:
            self._next_number = version
        self._advance()
        return True

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Play one decision of a group ahead. False: the next rollout may not begin before newer weights act, or nothing is ready."""
        may_play = self._partial is not None or self._may_begin
        if not may_play or (patience_s == 0.0 and not self._is_ready()):
            return False
        self._advance()
        return True

    @property
    def keeps_weights(self) -> bool:
        return self._partial is not None or self._may_begin

    @property
    def _may_begin(self) -> bool:
        """Whether the next rollout may be played ahead with the present weights."""
        return self._next_number - min(self.generator.version, self._asked) <= self.max_staleness

    def _arrange(self) -> None:
        """Group the slots as the manager steps them now."""
        turns, slots = self.manager.num_turns, range(self.manager.num_slots)
        whole = self.min_ready is None and turns not in (None, len(self._acted_groups))
        self._num_turns, self._turn = turns, 0
        """`_turn`: in lockstep, the next group."""
        self._groups = [slots] if whole else self._acted_groups
        """Slots that are stepped together."""
        self._parts = [slice(part.start, part.stop) for part in self._acted_groups] if whole else []
        """Parts of a group that the policy acts for one by one: a product of all rows may sum in another order than those of two halves."""
        self._enough = (None if turns else max(1, len(slots) // 4)) if whole else self.min_ready
        """Number of slots to wait for; None: a group."""

    def _see(self, whole: StepBatch) -> None:
        """Take this batch's observations as the present ones of all slots."""
        if self._enough is not None:  # rows are replaced one by one
            whole = replace(whole, observation={key: part.copy() for key, part in whole.observation.items()})
        self._batches = [rows_of(whole, slice(group.start, group.stop)) for group in self._groups]

    def _advance(self) -> None:
        """Play the next decision of a group, or of the slots that are ready; complete the rollout after the last one."""
        started, waited_before = time.perf_counter(), self._since.simulate_s
        partial = self._partial = self._partial or self._begin()
        if self._enough is None:
            self._advance_group(partial)
        else:
            self._advance_ready(partial, self._batches[0])
        if partial.num_open == 0:
            self._filled.append(partial.finish([batch.observation for batch in self._batches]))
            self._partial = None
        self._since.act_s += time.perf_counter() - started - (self._since.simulate_s - waited_before)

    def _is_ready(self) -> bool:
        """Whether `_advance` would not wait for simulators."""
        group, partial = self._groups[self._turn], self._partial
        return partial is None or partial.decided[group.start] == 0 or self.manager.is_ready(group)

    def _advance_group(self, partial: _PartialRollout) -> None:
        turn, group = self._turn, self._groups[self._turn]
        self._turn = (turn + 1) % len(self._groups)
        if partial.decided[group.start] > 0:
            self._batches[turn] = self._receive(partial, group)
        if partial.decided[group.start] < self.rollout_steps:
            self._act(partial, self._batches[turn], group)

    def _advance_ready(self, partial: _PartialRollout, seen: StepBatch) -> None:
        """`seen`: present observations of all slots; updated in place."""
        if not partial.decided.any():
            self._act(partial, seen, self._groups[0])
            return
        batch = self._receive(partial, None)
        for key, part in batch.observation.items():
            seen.observation[key][batch.slots] = part
        going = batch.slots[partial.decided[batch.slots] < self.rollout_steps]
        if going.size:
            self._act(partial, seen, going)

    def _begin(self) -> _PartialRollout:
        if self.manager.num_turns != self._num_turns:
            seen = joined(self._batches)
            self._arrange()
            self._see(seen)
        self._take_to_starts()
        before, own = self._share.slots_before, self.manager.num_slots
        noise = action_noise(self.layout, (self.rollout_steps, self._share.all_slots or own), self.seed, self._next_number)
        if self._way is not None:
            self.generator.way = "random" if self._next_number < self._random_before else self._way
        self._next_number += 1
        return _PartialRollout(self.manager.spec.observation, self.layout, noise[:, before : before + own])

    @property
    def _seed_of(self) -> Callable[[int], int | None] | None:
        """See `TrainingRecorder.restarted`."""
        return None if self._starts is None else self._starts.seed_of

    def _take_to_starts(self) -> None:
        """After a restart, replace the first episodes that start inside others."""
        if self._starts is not None and self._round is not None:
            self._see(self._starts.restart(joined(self._batches), self.seeds, self._round))
        self._round = None

    def _receive(self, partial: _PartialRollout, group: range | None) -> StepBatch:
        """Wait for the simulators of a group, or of any slots with None, and note the results of their last decision."""
        before = time.perf_counter()
        with span("env", "wait"):
            batch = self.manager.recv(group) if group is not None else self.manager.recv(min_ready=self._enough, timeout_s=PATIENCE_S)
        self._since.simulate_s += time.perf_counter() - before
        if self._starts is not None:
            batch = self._starts.received(batch)
        partial.received(batch.slots if group is None else group, batch)
        if self.recorder is not None:
            self.recorder.stepped(batch)
        return batch if self._starts is None else self._starts.begun(batch)

    def _act(self, partial: _PartialRollout, seen: StepBatch, group: range | np.ndarray) -> None:
        """Decide for a whole group that `seen` shows, or for single slots of all that it shows, and send the actions."""
        slots, observation = seen.slots, seen.observation
        if isinstance(group, range):
            acted = self._acted(slots, observation, partial.noise[partial.place(group)], self._parts)
        else:
            # The policy acts for whole parts, in which each row keeps its place: a row's action does not depend on which rows are ready.
            parts = [part for part in self._parts if ((part.start <= group) & (group < part.stop)).any()]
            rows = np.concatenate([np.arange(part.start, part.stop) for part in parts]) if parts else group
            steps = np.minimum(partial.decided[rows], self.rollout_steps - 1)
            sent = {key: part[rows] for key, part in observation.items()}
            acted = self._acted(slots[rows], sent, partial.noise[steps, rows], from_zero(parts)).rows(np.searchsorted(rows, group))
            slots, observation = group, {key: part[group] for key, part in observation.items()}
        partial.acted(group, observation, acted)
        given = acted.for_simulator(self.manager.spec.action, self.manager.chunk_size)
        if self._starts is not None:
            self._starts.acted(slots, observation, given)
        watched = None if self.recorder is None else self.recorder.acted(slots, observation, acted, given)
        self.manager.send(group if isinstance(group, range) else group.tolist(), given, watched)

    def _acted(self, slots: np.ndarray, observation: Observation, noise: np.ndarray, parts: Sequence[slice]) -> ActedBatch:
        """Act on these rows, part by part; without parts on all rows at once."""
        if parts:
            return self.generator.act_in_parts(slots, observation, noise, parts)
        self.generator.send(slots, observation, noise)
        return self.generator.recv()


class _PartialRollout:
    """A rollout [T, N] while it is being collected."""

    def __init__(self, observation: Mapping[str, TensorSpec | VariableSpec], layout: ActionLayout, noise: np.ndarray) -> None:
        """`noise`: [T, N, noise_width] of all decisions."""
        size = noise.shape[:2]
        chunk_size = (*size, layout.chunk_size) if layout.chunk_size > 1 else None
        self.noise, self.num_open = noise, size[0] * size[1]
        """`num_open`: decisions whose result is still to come."""
        self.decided = np.zeros(size[1], np.int64)
        """[N] number of decisions made."""
        self._rollout = Rollout(
            observation={
                # Text and the like are Python values, as the manager hands them out.
                key: np.empty((*size, *part.shape), part.dtype) if isinstance(part, TensorSpec) else np.empty(size, object)
                for key, part in observation.items()
            },
            action=np.empty((*size, layout.width), layout.dtype),
            log_prob=np.empty((*size, layout.num_units), np.float32),
            reward=np.empty(size, np.float32),
            terminated=np.empty(size, bool),
            truncated=np.empty(size, bool),
            last_observation={},
            final_observation={},
            policy_version=np.empty(size, np.int64),
            episodes=(),
            success=np.empty(size, bool),
            chunk_reward=np.empty(chunk_size, np.float32) if chunk_size else None,
            chunk_success=np.empty(chunk_size, bool) if chunk_size else None,
            executed=np.empty(chunk_size, bool) if chunk_size else None,
        )
        self._final: dict[str, list[np.ndarray]] = {key: [] for key in observation}
        self._cut: list[np.ndarray] = []
        """Positions of the rows of `_final` in the flat rollout."""
        self._episodes: list[tuple[int, EpisodeSummary]] = []
        """Finished episodes, each with the decision that ended it."""

    def place(self, slots: range | np.ndarray, ago: int = 0) -> tuple[Any, Any]:
        """Index [T, N] of these slots' next decision, or of the one `ago` before it; slots of a range are at the same decision."""
        if isinstance(slots, range):
            return int(self.decided[slots.start]) - ago, slice(slots.start, slots.stop)
        return self.decided[slots] - ago, slots

    def acted(self, group: range | np.ndarray, observation: Observation, acted: ActedBatch) -> None:
        """Note the next decision of these slots: the observation, and what the policy drew."""
        rollout, rows = self._rollout, self.place(group)
        for key, part in observation.items():
            rollout.observation[key][rows] = part
        rollout.action[rows], rollout.log_prob[rows], rollout.policy_version[rows] = acted.action, acted.log_prob, acted.version
        self.decided[rows[1]] += 1

    def received(self, group: range | np.ndarray, batch: StepBatch) -> None:
        """Note the result of these slots' last decision."""
        if not len(group):  # all sent slots wait for their hosts
            return
        rollout, rows = self._rollout, self.place(group, ago=1)
        self.num_open -= len(group)
        rollout.reward[rows], rollout.terminated[rows], rollout.truncated[rows] = batch.reward, batch.terminated, batch.truncated
        assert rollout.success is not None
        rollout.success[rows] = batch.success
        if rollout.chunk_reward is not None and rollout.chunk_success is not None and rollout.executed is not None:
            assert batch.chunk_reward is not None, "the manager plays chunks"
            assert batch.executed is not None, "the manager plays chunks"
            chunk_reward, executed = batch.chunk_reward, batch.executed
            rollout.chunk_success[rows] = batch.chunk_success
            if batch.aborted is not None:
                # The result of an aborted slot's chunk is unknown: it counts as one step without reward, as it does without chunks.
                aborted = batch.aborted[:, None]
                chunk_reward = np.where(aborted, np.float32(0.0), chunk_reward)
                executed = np.where(aborted, np.arange(executed.shape[1]) == 0, executed)
            rollout.chunk_reward[rows], rollout.executed[rows] = chunk_reward, executed
        if not batch.episodes and batch.aborted is None:
            return
        self._episodes += [(int(self.decided[episode.slot]), episode) for episode in batch.episodes]
        cut = np.flatnonzero(batch.truncated & ~batch.terminated)
        if cut.size:
            slots = batch.slots[cut]
            self._cut.append((self.decided[slots] - 1) * len(self.decided) + slots)
            for key, part in batch.final_observation.items():
                self._final[key].append(part[cut])

    def finish(self, last: list[Observation]) -> Rollout:
        """Return the whole rollout; `last`: observations of each group after its last step."""
        seen = self._rollout.observation
        order = np.argsort(np.concatenate(self._cut)) if self._cut else np.empty(0, np.int64)
        return replace(
            self._rollout,
            last_observation={key: np.concatenate([part[key] for part in last]) for key in seen},
            final_observation={
                key: np.concatenate(parts)[order] if parts else np.empty((0, *seen[key].shape[2:]), seen[key].dtype)
                for key, parts in self._final.items()
            },
            episodes=tuple(episode for _, episode in sorted(self._episodes, key=lambda ended: (ended[0], ended[1].slot))),
        )
