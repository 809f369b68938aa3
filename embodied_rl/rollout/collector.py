"""The pump between simulators and generator: it fills a rollout, one group of slots simulating while another is acted for."""

from __future__ import annotations

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
"""How long to wait for simulators before looking again: at which hosts play, at a queue's deadlines."""


def action_noise(layout: ActionLayout, shape: tuple[int, ...], seed: int, iteration: int) -> np.ndarray:
    """The randomness of one rollout's actions [*shape, noise_width], a function of (seed, iteration): nothing to save for a resume."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, iteration, _NOISE_STREAM])))
    return layout.noise(generator, shape)


@dataclass
class CollectorTimes:
    """Seconds since the start of a rollout."""

    simulate_s: float = 0.0
    """Waiting for simulators."""
    act_s: float = 0.0
    """Turning observations into actions, and copying."""


class Collector:
    """Fills what a method learns from: a rollout of all slots, or groups of episodes. One kind of batch is each collector's own.

    `NOT_PLAYED` stands where a method plays nothing, or another process plays.
    """

    plays: bool = True
    """False: there is nothing to ask for."""
    recorder: TrainingRecorder | None = None
    """Writes a share of the episodes down."""
    layout: ActionLayout | None = None
    """Of the actions of what acts; None: of texts."""
    seeds: EpisodeSeeds = EpisodeSeeds.training(0)
    """Of the slots of fixed rollouts."""
    scorer: Scorer | None = None
    """Gives episodes a further reward before they are handed in, while others are played."""
    min_ready: int | None = None
    """Slots to wait for; None: all of them, so that nothing is played before a batch is asked for."""

    def __init__(self) -> None:
        self.times = CollectorTimes()
        """Of the last batch."""

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        """Begin new episodes: those that `queue` asks for, or in all slots, with seeds of `seed_round`."""

    def score_with(self, scorer: Scorer | None) -> None:
        """Hand finished episodes to `scorer` first; None: to the queue."""
        self.scorer = scorer

    def draw(self, way: Way, *, random_before: int = 0, first: int = 0, domain: str = "") -> None:
        """How the rollouts that begin from now on are acted in, of a collector whose generator can be switched. It goes by their numbers,
        which are those of the versions that learn from them: whether one is played ahead changes nothing.

        Args:
            random_before: those before this one are played at random instead.
            first: no earlier one is played.
            domain: whose rollouts.
        """
        raise AssertionError("this collector's generator cannot be switched")

    def next_rollouts(self, version: int) -> dict[str, Rollout]:
        """{domain: its rollout that `version` learns from}, of those that play some by now; the only one has no name."""
        return {}

    def next_groups(self, version: int) -> list[EpisodeGroup]:
        """The groups that `version` learns from, after its rollouts. Raises SimFault (see EnvManager) and BatchNeverFullError."""
        return []

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """Play on for a moment, ahead of what was asked for; False: nothing may be played now, or with a patience of 0, nothing is ready.
        `patience_s`: how long to wait where nothing is ready."""
        return False

    @property
    def keeps_weights(self) -> bool:
        """Whether something is left to play with the present weights, so that newer ones may not act yet."""
        return False

    def episodes(self) -> list[bytes]:
        """The running episodes of all slots, between two batches; none where a batch ends with its episodes.

        Raises UserError where the simulator's cannot be saved.
        """
        return []

    def take_up(self, episodes: Sequence[bytes]) -> None:
        """Go on in the episodes that `episodes` gave, here or in another process. Raises SnapshotError for another simulator's."""
        raise AssertionError("no episode of this collector runs between two batches")

    def figures(self) -> dict[str, float]:
        """What is counted of agents since the last call."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Of the last batch; nothing beside `times` by default."""
        return {}

    def close(self) -> None:
        """End what the collector holds beside simulators and backends: an agent's tools."""


NOT_PLAYED = Collector()
NOT_PLAYED.plays = False


class RolloutCollector(Collector):
    """Collects rollouts of `rollout_steps` steps from all slots of a manager, one after another without a gap.

    With staleness S the next ones are collected while the trainer learns from the last (two buffers for S = 1): rollout n, which version
    n is to learn from, is played wholly with version n - S (the first ones after a restart with the version of then). Newer
    weights are not published while this one `keeps_weights`; so what is collected depends on seeds and not on the clock.

    In lockstep groups of slots take turns. With `min_ready` each slot goes through its decisions as its simulator answers: one whose host
    is lent to training waits, and the others fill their share meanwhile. What a slot draws depends on neither.

    Between two rollouts the manager may have other turns (`Simulators.num_turns`), which changes nothing but time: the policy acts for the
    same groups at the same places, whatever part of them is ready.
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
            rollout_steps: decisions of each slot: chunks, where the policy acts in chunks.
            num_groups: of slots, that are acted for one by one; stepped as `manager.num_turns` says. 1 with `min_ready`.
            layout: of the policy's actions; None: they are the simulator's own.
            max_staleness: S; 0: `pump` does nothing.
            share: which slots of a rollout these are: they see and draw what they do in a rollout of all of them.
            starts: where episodes start that do not start ordinarily; their summaries say ``final_info["start"]``.
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
        """What each group sees now."""
        self.max_staleness = max_staleness
        self._partial: _PartialRollout | None = None
        """What is being filled."""
        self._next_number = 0
        """Of the rollout that begins next: the version that is to learn from it."""
        self._way: Way | None = None
        """See `draw`; None: the generator's own."""
        self._random_before = self._first = 0
        self._filled: deque[Rollout] = deque()
        self._since = CollectorTimes()
        """What was spent since the last rollout was handed out."""
        self._round: int | None = None
        """Of seeds, after a restart until its first decision."""
        self._starts = None if starts is None else SlotStarts(manager, starts, share=share)

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0, reconfigure: bool = True) -> None:
        """Begin new episodes in all slots, with seeds that depend only on (seed, seed_round, slot): where a run can be resumed.

        What was collected ahead is given up.
        """
        self._partial, self._next_number = None, max(seed_round, self._first)
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
        """See `Collector.episodes`. A rollout that was begun ahead is played to its end; those that wait to be learned from go with the
        first slot's episode, and what is recorded of each with its own."""
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
        self._partial, self._next_number = None, found[0].get("next_number", self.generator.version)
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
        return {} if version < self._first else {"": self.next_rollout(version)}

    def next_rollout(self, version: int) -> Rollout:
        """`rollout_steps` × `num_slots` transitions, or what is left of those that were begun before; number `version`. Raises SimFault."""
        while self.advance(version):
            pass
        self.times, self._since = self._since, CollectorTimes()
        rollout = self._filled.popleft()
        self.manager.rollout_took(self.times.simulate_s + self.times.act_s, rollout.num_steps)
        return rollout

    def advance(self, version: int) -> bool:
        """One decision of what `next_rollout` gives. False: that is complete."""
        assert self._batches, "restart() comes first"
        if self._filled:
            return False
        if self._partial is None:
            self._next_number = version
        self._advance()
        return True

    def pump(self, patience_s: float = PATIENCE_S) -> bool:
        """One decision of a group ahead of time. False: the next rollout may not begin before newer weights act."""
        may_play = self._partial is not None or self._may_begin
        if not may_play or (patience_s == 0.0 and not self._is_ready()):
            return False
        self._advance()
        return True

    @property
    def keeps_weights(self) -> bool:
        # Without staleness a rollout that was not begun is played with whatever acts when it is asked for.
        return self._partial is not None or (self.max_staleness > 0 and self._may_begin)

    @property
    def _may_begin(self) -> bool:
        """Whether the next rollout may be played with the present weights."""
        return self._next_number - self.generator.version <= self.max_staleness

    def _arrange(self) -> None:
        """Groups of slots as the manager has them stepped now."""
        turns, slots = self.manager.num_turns, range(self.manager.num_slots)
        whole = self.min_ready is None and turns not in (None, len(self._acted_groups))
        self._num_turns, self._turn = turns, 0
        """`_turn`: in lockstep, the group that is next."""
        self._groups = [slots] if whole else self._acted_groups
        """What is stepped together."""
        self._parts = [slice(part.start, part.stop) for part in self._acted_groups] if whole else []
        """Of a group, those that are acted for one by one: a product of all rows may sum in another order than those of two halves."""
        self._enough = (None if turns else max(1, len(slots) // 4)) if whole else self.min_ready
        """Slots to wait for; None: a group."""

    def _see(self, whole: StepBatch) -> None:
        """All slots begin, or go on, with what this batch shows."""
        if self._enough is not None:  # rows are put in place as they come
            whole = replace(whole, observation={key: part.copy() for key, part in whole.observation.items()})
        self._batches = [rows_of(whole, group) for group in self._groups]

    def _advance(self) -> None:
        """The next decision of a group, or of the slots that are ready; after the last one, what came of it."""
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
        """`seen`: of all slots, and kept so."""
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
        """The first episodes after a restart: those that start inside others."""
        if self._starts is not None and self._round is not None:
            self._see(self._starts.restart(joined(self._batches), self.seeds, self._round))
        self._round = None

    def _receive(self, partial: _PartialRollout, group: range | None) -> StepBatch:
        """Wait for a group's simulators, or with None for any, and note what came of their last decision."""
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
        """Decide for a group that `seen` is of, or for single slots of all that `seen` shows, and send it on."""
        slots, observation = seen.slots, seen.observation
        if isinstance(group, range):
            acted = self._acted(slots, observation, partial.noise[partial.place(group)], self._parts)
        else:
            # The policy acts for whole parts, in which every row keeps its place: what comes of a row does not depend on which are ready.
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
        """What the generator does for these rows, in these parts of them; none: for all of them at once."""
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
        """`num_open`: decisions of which nothing came back yet."""
        self.decided = np.zeros(size[1], np.int64)
        """[N] decisions that were made."""
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
        """Where the rows of `_final` belong, as places in the flat rollout."""
        self._episodes: list[tuple[int, EpisodeSummary]] = []
        """With the decision that each ended with."""

    def place(self, slots: range | np.ndarray, ago: int = 0) -> tuple[Any, Any]:
        """Index [T, N] of the decision that these slots make next, or made `ago`; those of a range are at the same one."""
        if isinstance(slots, range):
            return int(self.decided[slots.start]) - ago, slice(slots.start, slots.stop)
        return self.decided[slots] - ago, slots

    def acted(self, group: range | np.ndarray, observation: Observation, acted: ActedBatch) -> None:
        """The next decision of these slots: what was seen, and what the policy drew."""
        rollout, rows = self._rollout, self.place(group)
        for key, part in observation.items():
            rollout.observation[key][rows] = part
        rollout.action[rows], rollout.log_prob[rows], rollout.policy_version[rows] = acted.action, acted.log_prob, acted.version
        self.decided[rows[1]] += 1

    def received(self, group: range | np.ndarray, batch: StepBatch) -> None:
        """What came of these slots' last decision."""
        if not len(group):  # all that was sent waits for its host
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
                # What became of an aborted slot's chunk is not known: it counts as one step without reward, as it does without chunks.
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
        """The whole; `last` is what each group sees after its last step."""
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
