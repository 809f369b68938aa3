"""The pump between simulators and generator for whole episodes: it plays what the group queue requests and hands the episodes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.rollout.groups import Assignment, GroupQueue
from embodied_rl.rollout.initialized import Start, StartLibrary
from embodied_rl.rollout.observations import copied, stacked
from embodied_rl.rollout.queue_pump import SlotPump
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionLayout, Episode, EpisodeSummary, Observation, StepBatch

if TYPE_CHECKING:
    from embodied_rl.rollout.batch_sinks import TrainingRecorder

_NOISE_STREAM = 2
_NOISE_BLOCK = 64


class EpisodeNoise:
    """Randomness of one episode's actions, a function of only `key`: the order of arrival changes nothing."""

    def __init__(self, layout: ActionLayout, key: Sequence[int]) -> None:
        """`layout`: layout of the policy's actions."""
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        self._layout = layout
        self._block = self._draw()
        self._used = 0

    def next(self) -> np.ndarray:
        """Next noise [noise_width] float32: standard normal for continuous actions, uniform in [0, 1) for discrete ones."""
        if self._used == _NOISE_BLOCK:
            self._block, self._used = self._draw(), 0
        self._used += 1
        return self._block[self._used - 1]

    def _draw(self) -> np.ndarray:
        return self._layout.noise(self._generator, (_NOISE_BLOCK,))


@dataclass
class EpisodeRecorder:
    """Running episode of a slot, with its data so far."""

    assignment: Assignment
    noise: EpisodeNoise
    start: Start | None = None
    """Start inside another episode; None: an ordinary start."""
    observation: list[dict[str, Any]] = field(default_factory=list)
    action: list[np.ndarray] = field(default_factory=list)
    given: list[np.ndarray] = field(default_factory=list)
    """Actions [A], or chunks [k, A], that the simulator received."""
    log_prob: list[np.ndarray] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    success: list[bool] = field(default_factory=list)
    chunk_reward: list[np.ndarray] = field(default_factory=list)
    """Rewards [K] of each message; empty if messages are single steps."""
    chunk_success: list[np.ndarray] = field(default_factory=list)
    executed: list[np.ndarray] = field(default_factory=list)
    recorded: bool = False
    """Whether the episode is recorded: every step of its chunks is observed."""
    inner: list[Observation] = field(default_factory=list)
    """Observations {key: [K - 1, ...]} inside each message, if chunks are recorded."""
    success_at: int | None = None
    """Messages up to the first success; None: no success yet."""

    def stepped(self, batch: StepBatch, row: int) -> None:
        """Note the outcome of the last action: a row of `batch`."""
        success = bool(batch.success[row])
        self.reward.append(float(batch.reward[row]))
        self.success.append(success)
        if batch.chunk_reward is not None and batch.chunk_success is not None and batch.executed is not None:
            self.chunk_reward.append(batch.chunk_reward[row].copy())
            self.chunk_success.append(batch.chunk_success[row].copy())
            self.executed.append(batch.executed[row].copy())
            if self.recorded:
                self.inner.append({key: part[row].copy() for key, part in batch.inner.items()})
        if success and self.success_at is None:
            self.success_at = len(self.reward)

    def acted(self, observation: dict[str, Any], acted: ActedBatch, given: np.ndarray, row: int) -> None:
        """Note an action: the `row` of what the policy drew, and of what the simulator receives."""
        self.observation.append(observation)
        self.action.append(acted.action[row])
        self.given.append(given[row])
        self.log_prob.append(acted.log_prob[row])
        self.version.append(acted.version)

    def finish(self, batch: StepBatch, row: int, success: bool, metadata: dict[str, Any], unit_steps: np.ndarray | None = None) -> Episode:
        """Build the episode, whose last step is a row of `batch`; `unit_steps` [L]: the chunk step of each action unit."""
        executed = np.stack(self.executed) if self.executed else None
        observation = {key: stacked([seen[key] for seen in self.observation]) for key in self.observation[0]}
        return Episode(
            observation=observation,
            action=np.stack(self.action),
            log_prob=np.stack(self.log_prob),
            reward=np.asarray(self.reward, np.float32),
            terminated=bool(batch.terminated[row]),
            truncated=bool(batch.truncated[row]),
            success=success,
            seed=self.assignment.seed,
            domain=self.assignment.domain,
            policy_version=np.asarray(self.version, np.int64),
            final_observation={key: copied(part[row]) for key, part in batch.final_observation.items()},
            mask=None if executed is None or unit_steps is None else executed[:, unit_steps],
            executed=executed,
            chunk_reward=np.stack(self.chunk_reward) if self.chunk_reward else None,
            metadata=metadata,
        )


class GroupCollector(SlotPump[EpisodeRecorder]):
    """Fills the queue's groups from a manager made with ``autoreset=False``; idle slots stand still.

    With ``min_ready=None`` all running slots move in lockstep: which observations share a forward pass, and so the last bit of every
    number, depends only on the seeds. With a number, the collector takes whatever is ready; no slot waits for the slowest.
    """

    layout: ActionLayout

    def __init__(
        self,
        manager: Simulators,
        generator: Generator,
        queue: GroupQueue,
        *,
        seed: int,
        min_ready: int | None = None,
        starts: StartLibrary | None = None,
        layout: ActionLayout | None = None,
    ) -> None:
        """
        Args:
            layout: layout of the policy's actions; None: the simulator's own actions.
            starts: see `SlotPump`.
        """
        super().__init__(manager, queue, seed=seed, min_ready=min_ready, starts=starts)
        self.layout = layout or ActionLayout.of(manager.spec.action)
        self.generator = generator
        self._unanswered: dict[int, Observation] = {}

    def restart(self, queue: GroupQueue | None = None, *, seed_round: int = 0) -> None:
        super().restart(queue)
        self._unanswered.clear()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _new(self, assignment: Assignment, start: Start | None) -> EpisodeRecorder:
        noise = EpisodeNoise(self.layout, (self.seed, assignment.group, assignment.member, assignment.attempt, _NOISE_STREAM))
        # An episode that starts inside another one cannot be replayed from its seed.
        recorded = start is None and self.recorder is not None and self.recorder.chooses(assignment.seed, assignment.member)
        return EpisodeRecorder(assignment, noise, start, recorded=recorded)

    def _took_up(self, seen: Mapping[int, dict[str, Any]]) -> None:
        self._unanswered |= seen
        if self.min_ready is not None:
            self._answer()  # without waiting for others

    def _take_steps(self, batch: StepBatch) -> None:
        for row, slot, recorder, summary in self._outcomes(batch):
            if recorder.action:  # not for the observation at the start
                recorder.stepped(batch, row)
                self.queue.progressed(recorder.assignment)
            if summary is not None:
                self._stop(slot)
                episode = self._episode(recorder, batch, row, summary)
                if recorder.recorded and self.recorder is not None:
                    self._record(self.recorder, recorder, episode)
                self._hand_in(recorder.assignment, episode, partial(self._taken, recorder, summary))
            elif self.queue.should_stop(recorder.assignment):
                self._stop(slot)
            else:
                self._unanswered[slot] = {key: copied(part[row]) for key, part in batch.observation.items()}
        # Another member's end may have made these superfluous, in this batch or, in lockstep, in an earlier one.
        for slot in [slot for slot in self._unanswered if self.queue.should_stop(self._playing[slot].assignment)]:
            del self._unanswered[slot]
            self._stop(slot)

    def _episode(self, recorder: EpisodeRecorder, batch: StepBatch, row: int, summary: EpisodeSummary) -> Episode:
        greedy = {"greedy": recorder.assignment.greedy}
        metadata: dict[str, Any] = {"final_info": summary.final_info, **greedy, **self._start_metadata(recorder.start)}
        return recorder.finish(batch, row, summary.success_once, metadata, self.layout.unit_steps(self.manager.spec.action.dim))

    def _record(self, to: TrainingRecorder, recorder: EpisodeRecorder, episode: Episode) -> None:
        whose = recorder.assignment
        success = np.stack(recorder.chunk_success) if recorder.chunk_success else np.asarray(recorder.success)
        to.finished(episode, np.stack(recorder.given), success, group=whose.group, member=whose.member, inner=recorder.inner)

    def _taken(self, recorder: EpisodeRecorder, summary: EpisodeSummary) -> None:
        """Tell the library of starts about an episode that the queue accepted."""
        if self._starts is not None:
            given, seen = recorder.given[: recorder.success_at], dict(enumerate(recorder.observation))
            self._starts.played(recorder.assignment, recorder.start, summary, given=given, seen=seen)

    def _answer(self, patience_s: float = 0.0) -> None:
        if not self._unanswered:
            return
        # Greedy members act without noise, and noise is an argument of the whole call.
        greedy = [slot for slot in self._unanswered if self._playing[slot].assignment.greedy]
        for slots, noisy in ((sorted(self._unanswered.keys() - set(greedy)), True), (sorted(greedy), False)):
            if slots:
                self._act(slots, noisy)
        self._unanswered.clear()

    def _act(self, slots: list[int], noisy: bool) -> None:
        rows = [self._unanswered[slot] for slot in slots]
        observation = {key: stacked([row[key] for row in rows]) for key in rows[0]}
        noise = np.stack([self._playing[slot].noise.next() for slot in slots]) if noisy else None
        self.generator.send(np.asarray(slots), observation, noise)
        acted = self.generator.recv()
        given = acted.for_simulator(self.manager.spec.action, self.manager.chunk_size)
        for row, slot in enumerate(slots):
            self._playing[slot].acted(rows[row], acted, given, row)
        self.manager.send(slots, given, [self._playing[slot].recorded for slot in slots])
        self._in_step += len(slots)
