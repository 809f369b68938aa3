"""Episodes that others start in: an expert's, recorded through the environment manager, or a run's own.

An episode is kept as its seed and its messages, which say where it was after each of them as long as the simulator is
deterministic; and, where the simulator saves its state, as the states that were recorded on the way. Both become a `Snapshot`,
for simulators and text environments alike.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.sim.instrumented import EXPERT, Expert, plain_snapshot
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import ActionSpec, StepBatch


@dataclass(frozen=True, eq=False)
class SourceEpisode:
    """An episode of T messages, up to its first success, inside which others may start."""

    origin: Literal["expert", "own"]
    seed: int
    """Of its reset."""
    actions: tuple[Any, ...]
    """[T] messages in the simulator's units: actions [A], chunks [k, A] or texts."""
    episode_return: float
    success: bool
    states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """{messages before it: base of a `Snapshot`} where the simulator's state was recorded."""
    seen: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """{messages before it: observation} that a replay is compared with; not saved."""

    @property
    def num_messages(self) -> int:
        """T"""
        return len(self.actions)

    def snapshot(self, step: int, *, task: str, chunk_size: int = 1) -> Snapshot:
        """The episode as it was after `step` messages: from the last recorded state before it, or from its seed, and the messages since.

        Raises ValueError for a step outside 0 … T - 1.
        """
        if not 0 <= step < self.num_messages:
            raise ValueError(f"An episode of {self.num_messages} messages has no start after {step} of them.")
        base_step = max((at for at in self.states if at <= step), default=None)
        base = None if base_step is None else self.states[base_step]
        return Snapshot(
            task=task,
            chunk_size=chunk_size,
            stream=SeedStream(EpisodeSeeds.given(self.seed), 0, 0, 1),
            index=0,
            base=base,
            options={},
            actions=self.actions[base_step or 0 : step],
            observation=self.seen.get(step, base["observation"] if base is not None and base_step == step else {}),
        )

    def to_text(self) -> str:
        """For JSON: the snapshot format in base 64."""
        names = ("origin", "seed", "actions", "episode_return", "success")
        tree = {**{name: getattr(self, name) for name in names}, "states": {step: dict(state) for step, state in self.states.items()}}
        return base64.b64encode(encode_state(tree)).decode("ascii")

    @staticmethod
    def from_text(text: str) -> SourceEpisode:
        """The inverse of `to_text`. Raises SnapshotError for anything else."""
        return SourceEpisode(**decode_state(base64.b64decode(text)))


def record_expert(
    manager: Simulators, make_expert: Callable[[], Expert], seeds: Sequence[int], *, every: int
) -> tuple[list[SourceEpisode], int]:
    """Let an expert play each of these seeds, in as many slots as there are, and record it.

    Args:
        manager: made with ``autoreset=False``; what its slots were doing is lost.
        make_expert: called once an episode, so that an expert may remember; `shown_expert` where the simulator's own process has one.
        every: messages between recorded states, where the simulator has such.

    Returns:
        The episodes, whether they succeeded or not, in the order of seeds (one that its simulator gave up is missing), and the number
        of messages that were played.
    """
    found: list[SourceEpisode] = []
    num_messages = 0
    keeps_states = manager.spec.snapshots in ("exact", "approximate")
    for first in range(0, len(seeds), manager.num_slots):
        chosen = list(seeds[first : first + manager.num_slots])
        recorders = [_Recorder(make_expert(), seed, manager.spec.action, chunks=manager.chunk_size > 1) for seed in chosen]
        slots = list(range(len(chosen)))
        manager.begin(slots, chosen)
        observations = _rows(manager.recv(slots))
        while slots:
            actions = [recorders[slot].act(observations[slot]) for slot in slots]
            manager.send(slots, actions if manager.spec.action.kind == "text" else np.stack(actions))
            num_messages += len(slots)
            batch = manager.recv(slots)
            observations = _rows(batch)
            slots = [slot for row, slot in enumerate(slots) if not recorders[slot].took(batch, row)]
            due = [slot for slot in slots if keeps_states and recorders[slot].is_due(every)]
            for slot, snapshot in zip(due, manager.snapshot(due) if due else (), strict=True):
                assert snapshot.base is not None, "a state was asked for"
                recorders[slot].states[len(recorders[slot].actions)] = plain_snapshot(snapshot).base or {}
        found += [source for recorder in recorders if (source := recorder.source) is not None]
    return found, num_messages


def shown_expert() -> Expert:
    """Does what an `instrumented` simulator's expert says; made once an episode, as any other."""
    return lambda observation: observation[EXPERT]


class _Recorder:
    """One episode of an expert."""

    def __init__(self, expert: Expert, seed: int, action: ActionSpec, *, chunks: bool) -> None:
        """`chunks`: the manager's messages are chunks, of which the expert's have one step."""
        self._expert, self._seed, self._action, self._chunks = expert, seed, action, chunks
        self.actions: list[Any] = []
        self.states: dict[int, Mapping[str, Any]] = {}
        self.source: SourceEpisode | None = None
        self._success_at: int | None = None

    def act(self, observation: Mapping[str, Any]) -> Any:
        action = self._expert(observation)
        if self._action.kind != "text":
            action = np.atleast_1d(np.asarray(action, self._action.dtype))
        self.actions.append(action[None] if self._chunks else action)
        return self.actions[-1]

    def is_due(self, every: int) -> bool:
        """Whether the state is to be recorded now; after the first success there is nothing left to start for."""
        return self._success_at is None and len(self.actions) % every == 0

    def took(self, batch: StepBatch, row: int) -> bool:
        """Note what came of the action; whether the episode is over."""
        if batch.aborted is not None and batch.aborted[row]:
            return True
        if self._success_at is None and batch.success[row]:
            self._success_at = len(self.actions)
        summary = next((episode for episode in batch.episodes if episode.slot == int(batch.slots[row])), None)
        if summary is None:
            return False
        actions = tuple(self.actions[: self._success_at])
        self.source = SourceEpisode("expert", self._seed, actions, summary.episode_return, summary.success_once, self.states)
        return True


def _rows(batch: StepBatch) -> dict[int, dict[str, Any]]:
    """{slot: observation}"""
    return {int(slot): {key: part[row] for key, part in batch.observation.items()} for row, slot in enumerate(batch.slots)}
