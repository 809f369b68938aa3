"""Writing a share of a run's training episodes down as they are played, with the log-probabilities and versions that they were played with.

Nothing of the run depends on it: it looks at what the collectors pass on, draws no random number and touches no simulator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import RecordConfig
from embodied_rl.episodes.info import RECORDING_FILE
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recorded import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.generation.base import ActedBatch
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
    sink: EpisodeSink | None = None
    """None: the episode is not recorded."""
    fresh: bool = True
    """Nobody has acted in the episode yet."""
    step: dict[str, Any] | None = None
    """What was done in the step that is being simulated."""


class TrainingRecorder:
    """Takes what the collectors see and writes the chosen episodes into ``<run_dir>/episodes``.

    Which episodes are chosen follows from their seeds, so that a run that is resumed chooses the same; those that it plays a second
    time are in the recording already and are skipped.

    Args:
        folder: of the recording; gone on with where it exists.
        info: what all episodes share.
        config: which share.
        seed: the run's.
        num_slots: of the manager.

    Raises:
        RecordingError: the folder holds a recording of another simulator, or a damaged one.
    """

    def __init__(self, folder: Path, info: RecordingInfo, config: RecordConfig, *, seed: int, num_slots: int) -> None:
        resume = (folder / RECORDING_FILE).is_file()
        self.num_recorded = len(open_recording(folder)) if resume else 0
        self._writer = RecordingWriter(folder, info, video=config.video, resume=resume, duplicates="skip")
        self._config, self._seeds, self._num_slots = config, EpisodeSeeds.training(seed), num_slots
        self._round = 0
        self._slots: list[_Slot] = []

    # ---- fixed rollouts of all slots --------------------------------------------------------------------------------

    def restarted(self, seed_round: int) -> None:
        """All slots begin new episodes, as `EnvManager.reset` counts them; what they were playing is given up."""
        self._give_up()
        self._round, self._slots = seed_round, [_Slot() for _ in range(self._num_slots)]

    def acted(self, slots: np.ndarray, observation: Observation, acted: ActedBatch, given: np.ndarray) -> None:
        """A batch of slots is about to be sent its actions.

        Args:
            slots: [n]
            observation: {key: [n, ...]} what was seen before.
            acted: what the policy drew.
            given: [n, A] what the simulator is given.
        """
        for row, slot in enumerate(slots.tolist()):
            playing = self._slots[slot]
            if playing.fresh:
                playing.fresh = False
                playing.sink = self._open(slot, playing.index, acted.version)
                if playing.sink is not None:
                    playing.sink.start(_plain(observation, row))
            if playing.sink is not None:
                playing.step = {
                    "action": np.array(given[row]),
                    "sampled_action": acted.action[row].copy(),
                    "log_prob": acted.log_prob[row].copy(),
                    "policy_version": acted.version,
                }

    def stepped(self, batch: StepBatch) -> None:
        """What came of it, as `EnvManager.recv` hands it out."""
        summaries = {episode.slot: episode for episode in batch.episodes}
        for row, slot in enumerate(batch.slots.tolist()):
            playing, summary = self._slots[slot], summaries.get(slot)
            aborted = batch.aborted is not None and bool(batch.aborted[row])
            if playing.sink is not None and aborted:
                playing.sink.discard()
            elif playing.sink is not None and playing.step is not None:
                self._step(playing.sink, playing.step, batch, row)
                if summary is not None:
                    assert summary.seed == playing.sink.seed, "episodes were counted otherwise than the simulators count them"
                    self._count(playing.sink.finish({"final_info": summary.final_info}))
            if aborted or summary is not None:
                self._slots[slot] = _Slot(playing.index + 1)

    # ---- groups of whole episodes -----------------------------------------------------------------------------------

    def finished(self, episode: Episode, given: Any, success: Sequence[bool], *, group: int, member: int) -> None:
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
            sampled_action=episode.action,
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

    def _open(self, slot: int, index: int, version: int) -> EpisodeSink | None:
        seed = self._seeds.seed(slot, index, self._num_slots, self._round)
        who = {"kind": "training", "version": version}
        if not self._is_chosen(str(seed)) or self._writer.has(seed, policy=who):
            return None
        return self._writer.open_episode(seed, metadata={"policy": who})

    def _is_chosen(self, name: str) -> bool:
        limit = self._config.max_episodes
        if limit is not None and self.num_recorded >= limit:
            return False
        digest = hashlib.blake2b(f"record/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._config.share * 2**64

    def _step(self, sink: EpisodeSink, step: dict[str, Any], batch: StepBatch, row: int) -> None:
        over = bool(batch.terminated[row] or batch.truncated[row])
        sink.step(
            **step,
            reward=float(batch.reward[row]),
            terminated=bool(batch.terminated[row]),
            truncated=bool(batch.truncated[row]),
            success=bool(batch.success[row]),
            observation=_plain(batch.final_observation if over else batch.observation, row),
        )

    def _count(self, number: int) -> None:
        self.num_recorded += number != SKIPPED

    def _give_up(self) -> None:
        for playing in self._slots:
            if playing.sink is not None:
                playing.sink.discard()
        self._slots = []


def _plain(observation: Observation, row: int) -> dict[str, Any]:
    """One slot's row of what the simulator shows by itself."""
    return split({key: part[row] for key, part in observation.items()}).observation


def _joined(part: np.ndarray, last: Any) -> np.ndarray:
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
