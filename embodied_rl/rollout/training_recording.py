"""Writing a share of a run's training episodes down as they are played, with the log-probabilities and versions that they were played with.

Nothing of the run depends on it: it looks at what the collectors pass on, draws no random number and touches no simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.agents.turns import Turn, texts
from embodied_rl.config import RecordConfig
from embodied_rl.episodes.folder import RECORDING_FILE
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo, Value
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.generation.base import ActedBatch
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.rollout.groups import Assignment
from embodied_rl.rollout.observations import copied, stacked
from embodied_rl.sim.instrumented import split
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import Episode, Observation, StepBatch

FOLDER = "episodes"
"""Of a run's folder."""


@dataclass
class _Slot:
    """What a slot is playing."""

    index: int = 0
    """Number of its episode since the restart."""
    recorded: bool = False
    """Whether the episode is written down; decided at its first action."""
    fresh: bool = True
    """The episode has had no action yet."""


class TrainingRecorder:
    """Takes what the collectors see and writes the chosen episodes into ``<run_dir>/episodes``.

    Which episodes are chosen follows from their seeds, so that a run that is resumed chooses the same; those that it plays a second
    time are in the recording already and are skipped.

    Args:
        folder: of the recording; gone on with where it exists.

    Raises:
        RecordingError: the folder holds a recording of another simulator, or a damaged one.
    """

    def __init__(self, folder: Path, info: RecordingInfo, config: RecordConfig, *, seed: int, num_slots: int) -> None:
        resume = (folder / RECORDING_FILE).is_file()
        self.num_recorded = len(open_recording(folder)) if resume else 0
        self._writer = RecordingWriter(folder, info, video=config.video, resume=resume, duplicates="skip")
        self._config, self._seeds, self._num_slots = config, EpisodeSeeds.training(seed), num_slots
        self._sinks = BatchSinks(self._writer, num_slots, observations_alone=True)
        self._round = 0
        self._slots: list[_Slot] = []
        self._done: dict[str, np.ndarray] = {}
        """{column: [N, ...]} what was done in the step of each slot that is being simulated."""

    # ---- fixed rollouts of all slots --------------------------------------------------------------------------------

    def restarted(self, seed_round: int) -> None:
        """All slots begin new episodes, as `EnvManager.reset` counts them; what they were playing is given up."""
        self._give_up()
        self._sinks.forget_batches()
        self._round, self._slots = seed_round, [_Slot() for _ in range(self._num_slots)]

    def acted(self, slots: np.ndarray, observation: Observation, acted: ActedBatch, given: np.ndarray) -> None:
        """A batch of slots is about to be sent its actions.

        Args:
            slots: [n]
            observation: {key: [n, ...]} what was seen before.
            acted: what the policy drew.
            given: [n, A] what the simulator is given.
        """
        seen: Observation | None = None
        for row, slot in enumerate(slots.tolist()):
            playing = self._slots[slot]
            if playing.fresh:
                playing.fresh = False
                playing.recorded = self._begins(slot, playing.index, acted.version)
                if playing.recorded:
                    seen = seen or split(observation).observation
                    seed, who = self._seed(slot, playing.index), {"kind": "training", "version": acted.version}
                    self._sinks.start(slot, seed, seen, row, metadata={"policy": who})
        done = {"action": given, "log_prob": acted.log_prob}
        if _is_kept(acted.action, acted.log_prob):
            done["sampled_action"] = acted.action
        for name, rows in (done | {"policy_version": np.full(len(slots), acted.version)}).items():
            if name not in self._done:
                self._done[name] = np.empty((self._num_slots, *rows.shape[1:]), rows.dtype)
            self._done[name][slots] = rows

    def stepped(self, batch: StepBatch) -> None:
        """What came of it, as `EnvManager.recv` hands it out."""
        slots = batch.slots.tolist()
        aborted = [] if batch.aborted is None else np.flatnonzero(batch.aborted).tolist()
        for row in aborted:
            if self._slots[slots[row]].recorded:
                self._sinks.discard(slots[row])
        rows = [row for row, slot in enumerate(slots) if self._slots[slot].recorded and row not in aborted]
        if rows:
            self._write(batch, rows)
        for summary in batch.episodes:
            if self._slots[summary.slot].recorded:
                # The same seed, unless episodes are counted otherwise here than in the simulators.
                assert summary.seed == self._seed(summary.slot, self._slots[summary.slot].index), "another episode ended"
                self._count(self._sinks.finish(summary.slot, {"final_info": summary.final_info}))
        for slot in (*(slots[row] for row in aborted), *(summary.slot for summary in batch.episodes)):
            self._slots[slot] = _Slot(self._slots[slot].index + 1)

    # ---- groups of whole episodes -----------------------------------------------------------------------------------

    def finished(self, episode: Episode, given: np.ndarray, success: Sequence[bool], *, group: int, member: int) -> None:
        """An episode of a group is over.

        Args:
            episode: as it goes into the group.
            given: [T, A] what the simulator was given, or T texts.
            success: of each step.
            group, member: whose it is.
        """
        if not self._is_chosen(f"{episode.seed}/{member}"):
            return
        who = {"kind": "training", "group": group, "member": member}
        recorded = RecordedEpisode(
            seed=episode.seed,
            observation={
                key: _joined(part, episode.final_observation[key]) for key, part in split(episode.observation).observation.items()
            },
            action=given,
            reward=np.asarray(episode.reward, np.float32),
            terminated=_last(episode.num_messages, episode.terminated),
            truncated=_last(episode.num_messages, episode.truncated),
            success=np.asarray(success, bool),
            sampled_action=episode.action if _is_kept(episode.action, episode.log_prob) else None,
            # The mode's is no probability of having drawn it.
            log_prob=None if episode.metadata.get("greedy") else episode.log_prob,
            policy_version=episode.policy_version,
            metadata={**episode.metadata, "policy": who},
        )
        self._count(self._writer.add(recorded))

    def close(self) -> None:
        """Give up what is in progress and flush the rest."""
        self._give_up()
        self._writer.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _seed(self, slot: int, index: int) -> int:
        return self._seeds.seed(slot, index, self._num_slots, self._round)

    def _begins(self, slot: int, index: int, version: int) -> bool:
        """Whether to write a slot's next episode down."""
        seed = self._seed(slot, index)
        return self._is_chosen(str(seed)) and not self._writer.has(seed, policy={"kind": "training", "version": version})

    def _is_chosen(self, name: str) -> bool:
        limit = self._config.max_episodes
        if limit is not None and self.num_recorded >= limit:
            return False
        digest = hashlib.blake2b(f"record/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._config.share * 2**64

    def _write(self, batch: StepBatch, rows: list[int]) -> None:
        """A step of the slots in these rows of a batch."""
        done = {name: column[batch.slots] for name, column in self._done.items()}
        self._sinks.step_batch(batch, done, rows=None if len(rows) == len(batch.slots) else rows)
        self._sinks.settle()

    def _count(self, number: int) -> None:
        self.num_recorded += number != SKIPPED

    def _give_up(self) -> None:
        for slot in range(self._num_slots):
            if self._sinks.in_progress(slot):
                self._sinks.discard(slot)
        self._slots = []


def _is_kept(action: np.ndarray, log_prob: np.ndarray) -> bool:
    """Whether actions as the policy drew them can be stored: a text or choice each, or one number a unit, and no denoising."""
    return action.ndim == 1 or action.shape[1] == log_prob.shape[1]


def _joined(part: np.ndarray, last: Value) -> np.ndarray:
    """[T + 1, ...]"""
    if part.dtype != object:
        return np.concatenate([part, np.asarray(last, part.dtype)[None]])
    joined = np.empty(len(part) + 1, dtype=object)
    joined[:-1], joined[-1] = part, last
    return joined


def _last(length: int, flag: bool) -> np.ndarray:
    """[length] bool: False but for the last."""
    flags = np.zeros(length, bool)
    flags[-1] = flag
    return flags


@dataclass
class AgentRecord:
    """A language agent's episode that may be written down, while it is played: its simulator's side, with the texts that were sampled.

    A turn that calls tools is no step of the simulator, and stands in none of the rows.
    """

    seen: list[dict[str, Any]] = field(default_factory=list)
    """{key: what was seen} before each step, and after the last where nothing was answered to it any more."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns that were steps."""
    success: list[bool] = field(default_factory=list)

    def looked(self, observation: Observation, row: int) -> None:
        """The agent is shown a row of a batch."""
        self.seen.append({key: copied(part[row]) for key, part in observation.items()})

    def stepped(self, turn: int, success: bool) -> None:
        """The simulator took the action of a turn."""
        self.turns.append(turn)
        self.success.append(success)

    def finish(
        self,
        recorder: TrainingRecorder,
        assignment: Assignment,
        turns: Sequence[Turn],
        *,
        terminated: bool,
        truncated: bool,
        success: bool,
        greedy: bool,
        final: dict[str, Any] | None,
    ) -> None:
        """Hand the episode to a recorder.
        `final`: {key: what was seen} after the last step; None: the agent was shown it, and answered no more."""
        if not self.turns:
            return
        seen = self.seen if final is None else [*self.seen, final]
        assert len(seen) == len(self.turns) + 1, "a look before each step, and one after the last"
        played = [turns[number] for number in self.turns]
        actions = texts([turn.parsed.text for turn in played])
        episode = Episode(
            observation={key: stacked([part[key] for part in seen[:-1]]) for key in seen[0]},
            action=actions,
            log_prob=np.array([[turn.log_prob.sum(dtype=np.float64)] for turn in played], np.float32),
            reward=np.array([turn.game_reward for turn in played], np.float32),
            terminated=terminated,
            truncated=truncated,
            success=success,
            seed=assignment.seed,
            domain=assignment.domain,
            policy_version=np.array([turn.version.min() for turn in played], np.int64),
            final_observation=seen[-1],
            metadata={"greedy": greedy, "answers": [turn.answer for turn in played]},
        )
        recorder.finished(episode, actions, self.success, group=assignment.group, member=assignment.member)
