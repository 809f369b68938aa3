"""Replay recorded episodes in their simulator, by actions or from state to state, and measure the differences.

By action: reset to the recorded seed, then play the recorded actions; differences add up. By state: restore the recorded state before each
step that has one, so that a difference belongs to a single step (or to the steps since the last snapshot).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from embodied_rl.episodes.recording import RecordedEpisode, Value
from embodied_rl.episodes.sink import Sink
from embodied_rl.errors import UserError
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.instrumented import encode_physics, instrumented_snapshot, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.types import SimSpec, StepBatch

By = Literal["action", "state"]
_GAVE_UP = "its simulator failed"


@dataclass(frozen=True)
class KeyDrift:
    """Difference of one part of the observation over an episode's N compared observations."""

    max_abs: float
    mean_abs: float
    """Mean absolute difference over all elements of all compared observations."""
    first_step: int | None
    """Steps before the first observation that differs in any bit, 0 for the one after the reset; None: all are equal."""
    per_step: np.ndarray
    """[N] float64 largest absolute difference at each observation; for text and lists 0 if equal and 1 if not."""


@dataclass(frozen=True)
class EpisodeReplay:
    """Result of replaying one episode."""

    number: int
    """Number of the episode in the recording."""
    seed: int
    num_steps: int
    """Number of recorded steps."""
    num_replayed: int
    """Number of replayed steps; smaller if the replay ended earlier."""
    observation: Mapping[str, KeyDrift]
    reward: KeyDrift
    """Difference of the rewards; `first_step` is the step whose reward differs."""
    success_once: tuple[bool, bool]
    """Success at any step, (recorded, replayed)."""
    success_at_end: tuple[bool, bool]
    """Success at the last step, (recorded, replayed)."""
    ends_match: bool
    """Whether both ended after the same step and in the same way (terminated, truncated or neither)."""
    failure: str | None = None
    """Reason why the replay did not reach its end; None: it did."""

    @property
    def max_drift(self) -> float:
        """Largest difference over all parts of the observation."""
        return max((drift.max_abs for drift in self.observation.values()), default=0.0)

    @property
    def first_step(self) -> int | None:
        """First observation that differs in any part."""
        return min((drift.first_step for drift in self.observation.values() if drift.first_step is not None), default=None)

    @property
    def is_exact(self) -> bool:
        """Whether every observation and reward is equal bit by bit, and the end is the same."""
        return self.failure is None and self.ends_match and self.first_step is None and self.reward.first_step is None

    @property
    def success_matches(self) -> bool:
        return self.failure is None and self.success_once[0] == self.success_once[1] and self.success_at_end[0] == self.success_at_end[1]


@dataclass
class _Track:
    """Running differences of one part."""

    largest: list[float] = field(default_factory=list)
    total: float = 0.0
    num_elements: int = 0
    first_step: int | None = None

    def compare(self, recorded: Value, replayed: Value, step: int) -> None:
        if isinstance(recorded, (np.ndarray, np.generic)) and np.asarray(recorded).dtype.kind in "biufc":
            before, now = np.asarray(recorded), np.asarray(replayed)
            if before.shape != now.shape:
                difference, equal = np.ones(1), False
            else:
                difference = np.abs(now.astype(np.float64) - before.astype(np.float64))
                equal = bool(np.array_equal(before, now))
        else:
            equal = recorded == replayed
            difference = np.array([0.0 if equal else 1.0])
        self.largest.append(float(difference.max(initial=0.0)))
        self.total += float(difference.sum())
        self.num_elements += max(difference.size, 1)
        if not equal and self.first_step is None:
            self.first_step = step

    def drift(self) -> KeyDrift:
        per_step = np.asarray(self.largest, np.float64)
        return KeyDrift(float(per_step.max(initial=0.0)), self.total / max(1, self.num_elements), self.first_step, per_step)


@dataclass
class _Running:
    """Running replay of an episode in a slot."""

    number: int
    episode: RecordedEpisode
    observation: dict[str, _Track]
    sink: Sink | None
    reward: _Track = field(default_factory=_Track)
    step: int = 0
    success: list[bool] = field(default_factory=list)
    ended: tuple[bool, bool] = (False, False)
    """(terminated, truncated) of the last step."""
    begun: bool = False

    @property
    def over(self) -> bool:
        return self.step == self.episode.num_steps or any(self.ended)


def require_replayable(number: int, episode: RecordedEpisode, by: By) -> None:
    """Raise UserError if an episode lacks what its replay begins from."""
    start = episode.metadata.get("start") or {}
    if start.get("step", 0):
        raise UserError(
            f"Episode {number} (seed {episode.seed}) cannot be replayed: it started inside another episode, at a step that its seed "
            "does not give."
        )
    if by == "state" and episode.state is None and not episode.snapshots:
        raise UserError(
            f"Episode {number} (seed {episode.seed}) was recorded without states (states=physics or states=snapshots:K): replay it "
            "by=action."
        )


class Replayer:
    """Replays as many episodes at a time as the manager has slots.

    Args:
        manager: manager of an `instrumented` simulator with ``autoreset=False``; its running episodes are lost.
        by: "action" or "state".
        open_sink: opens the sink where a replayed episode is written with newly drawn pictures; None: nothing is written.
    """

    def __init__(self, manager: EnvManager, by: By, open_sink: Callable[[RecordedEpisode], Sink] | None = None) -> None:
        self._manager, self._by, self._open_sink = manager, by, open_sink
        self._keys = tuple(split(manager.spec.observation).observation)
        self._idle = list(range(manager.num_slots))
        self._running: dict[int, _Running] = {}

    def run(self, episodes: Iterable[tuple[int, RecordedEpisode]]) -> Iterator[EpisodeReplay]:
        """Replay episodes, given as (number, episode); yield results in the order of finishing.
        Raises UserError: an episode cannot be replayed in this way; the message names it and the reason; SimFault: see EnvManager."""
        waiting = iter(episodes)
        while True:
            yield from self._begin(waiting)
            if not self._running:
                return
            self._restore()
            slots = sorted(self._running)
            self._manager.send(slots, self._actions(slots))
            batch = self._manager.recv(slots)
            for row, slot in enumerate(slots):
                running = self._running[slot]
                failure = self._take(running, batch, row)
                if failure is not None or running.over:
                    yield self._end(slot, failure)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, waiting: Iterator[tuple[int, RecordedEpisode]]) -> Iterator[EpisodeReplay]:
        """Begin the next episodes; yield those that the simulator gives up at once."""
        while self._idle and (following := next(waiting, None)) is not None:
            number, episode = following
            require_replayable(number, episode, self._by)
            tracks = {key: _Track() for key in self._keys if key in episode.observation}
            sink = None if self._open_sink is None else self._open_sink(episode)
            self._running[self._idle.pop(0)] = _Running(number, episode, tracks, sink)
        begun = sorted(slot for slot, running in self._running.items() if not running.begun)
        if not begun:
            return
        self._manager.begin(begun, [self._running[slot].episode.seed for slot in begun])
        batch = self._manager.recv(begun)
        for row, slot in enumerate(begun):
            running = self._running[slot]
            running.begun = True
            if batch.aborted is not None and batch.aborted[row]:
                yield self._end(slot, _GAVE_UP)
                continue
            first = split({key: part[row] for key, part in batch.observation.items()})
            self._compare(running, first.observation, 0)
            if running.sink is not None:
                episode = running.episode
                running.sink.start(
                    _at(episode.observation, 0), _at(episode.state or {}, 0) or None, {**_at(episode.images, 0), **first.images}
                )
        if not self._running:
            yield from self._begin(waiting)

    def _restore(self) -> None:
        """Restore the recorded states; by action, only repeat the snapshots of the recording."""
        wanted: dict[int, Snapshot] = {}
        taken: list[int] = []
        for slot, running in sorted(self._running.items()):
            data = running.episode.snapshots.get(running.step)
            if self._by == "action":
                if data is not None and self._manager.spec.snapshots == "exact":
                    taken.append(slot)
            elif data is not None:
                wanted[slot] = Snapshot.from_bytes(data)
            elif running.episode.state is not None:
                wanted[slot] = self._physics_snapshot(running)
        if taken:
            # Some simulators (ManiSkill) continue differently after a saved state: taking the snapshot is part of the episode.
            self._manager.snapshot(taken)
        if wanted:
            self._manager.restore(list(wanted), [instrumented_snapshot(snapshot, self._manager.spec) for snapshot in wanted.values()])

    def _physics_snapshot(self, running: _Running) -> Snapshot:
        """Convert a recorded physical state to the form that `EnvManager.restore` takes."""
        episode, step = running.episode, running.step
        counters = {
            "returns": float(episode.reward[:step].sum(dtype=np.float64)),
            "lengths": step,
            "success_once": bool(episode.success[:step].any()),
        }
        observation = {key: part for key, part in _at(episode.observation, step).items() if key in self._keys}
        return Snapshot(
            task=self._manager.spec.task,
            chunk_size=self._manager.chunk_size,
            stream=SeedStream(EpisodeSeeds.given(episode.seed), 0, 0, 1),
            index=0,
            base={"sim": encode_physics(_at(episode.state or {}, step)), "counters": counters, "observation": observation},
            options={},
            actions=(),
            observation=observation,
        )

    def _actions(self, slots: Sequence[int]) -> Any:
        actions = [running.episode.action[running.step] for running in (self._running[slot] for slot in slots)]
        return [str(action) for action in actions] if self._manager.spec.action.kind == "text" else np.stack(actions)

    def _take(self, running: _Running, batch: StepBatch, row: int) -> str | None:
        """Compare a step; return the reason why the episode cannot continue, if any."""
        if batch.aborted is not None and batch.aborted[row]:
            return _GAVE_UP
        episode, step = running.episode, running.step
        running.ended = bool(batch.terminated[row]), bool(batch.truncated[row])
        after = split({key: part[row] for key, part in (batch.final_observation if any(running.ended) else batch.observation).items()})
        self._compare(running, after.observation, step + 1)
        running.reward.compare(episode.reward[step], batch.reward[row], step)
        running.success.append(bool(batch.success[row]))
        if running.sink is not None:
            running.sink.step(**_recorded_step(episode, step, after.images))
        running.step += 1
        return None

    def _compare(self, running: _Running, replayed: Mapping[str, Any], step: int) -> None:
        for key, track in running.observation.items():
            track.compare(running.episode.observation[key][step], replayed[key], step)

    def _end(self, slot: int, failure: str | None) -> EpisodeReplay:
        running = self._running.pop(slot)
        self._idle.append(slot)
        episode = running.episode
        recorded_end = bool(episode.terminated[-1]), bool(episode.truncated[-1])
        whole = running.step == episode.num_steps
        if running.sink is not None:
            if whole and failure is None:
                running.sink.finish()
            else:
                running.sink.discard()
        return EpisodeReplay(
            number=running.number,
            seed=episode.seed,
            num_steps=episode.num_steps,
            num_replayed=running.step,
            observation={key: track.drift() for key, track in running.observation.items()},
            reward=running.reward.drift(),
            success_once=(episode.success_once, any(running.success)),
            success_at_end=(episode.success_at_end, bool(running.success and running.success[-1])),
            ends_match=whole and running.ended == recorded_end,
            failure=failure,
        )


def check_fits(recorded: SimSpec, simulator: SimSpec) -> None:
    """Check that a simulator accepts the recorded actions. Raises UserError naming the difference."""
    ours, theirs = recorded.action, simulator.action
    if (ours.kind, ours.dim, ours.num_actions) != (theirs.kind, theirs.dim, theirs.num_actions):
        raise UserError(
            f"The recorded actions ({ours.kind}, {ours.dim} dimensions, {ours.num_actions} choices) are not those of "
            f"task '{simulator.task}' ({theirs.kind}, {theirs.dim}, {theirs.num_actions}). "
            "Was it recorded in another control mode? See sim.KEY=VALUE."
        )
    shared = recorded.observation.keys() & simulator.observation.keys()
    differing = [key for key in sorted(shared) if recorded.observation[key] != simulator.observation[key]]
    if differing:
        key = differing[0]
        raise UserError(
            f"Observation '{key}' was recorded as {recorded.observation[key]}; task '{simulator.task}' shows {simulator.observation[key]}. "
            "Was it recorded with other settings? See sim.KEY=VALUE."
        )


def _at(parts: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {key: part[row] for key, part in parts.items()}


def _recorded_step(episode: RecordedEpisode, step: int, images: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A step in the form of `Sink.step`, with the new pictures beside the recorded ones."""
    return {
        **{name: rows[step] for name, rows in episode.per_step().items()},
        "observation": _at(episode.observation, step + 1),
        "state": _at(episode.state or {}, step + 1) or None,
        "images": {**_at(episode.images, step + 1), **images} or None,
        "snapshot": episode.snapshots.get(step),
    }
