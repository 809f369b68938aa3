"""Recorded episodes of a run: the given recordings, or its expert's, which are recorded first."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig, TrainConfig
from embodied_rl.episodes.dataset import AS_RECORDED, DatasetOptions, EpisodeRef, SeenRewards, check_recording, choose_episodes
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, Recording, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.policies.base import Policy
from embodied_rl.progress import progress_bar
from embodied_rl.rollout.evaluation import PlayedEpisode, play_each
from embodied_rl.rollout.groups import group_seed
from embodied_rl.sim.instrumented import instrumented, plain_spec, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.experts import expert_target
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.types import ActionSpec
from embodied_rl.versions import versions

FOLDER = "demonstrations"
"""Subfolder of a run's folder for the expert's episodes."""
_TRIES = 3
"""Seeds that the expert may play per wanted episode: a simulator may give an episode up."""


def training_sim(config: TrainConfig) -> SimConfig:
    """Configuration of the run's simulator, with the expert's action in its observation if the run needs an expert.
    Raises UserError if the task has no expert."""
    cloning = config.algorithm.cloning
    needed = config.algorithm.learns_from_recordings and (not config.recording or (cloning is not None and cloning.dagger))
    return instrumented(config.sim, expert=expert_of(config), reconfigure=False) if needed else config.sim


def expert_of(config: TrainConfig) -> str:
    """Target of the expert that a run learns from. Raises UserError if its task has none."""
    return config.algorithm.recorded.expert or expert_target(config.sim, "algorithm.recorded.expert")


class Demonstrations:
    """The recorded episodes of a run; `load` before the first update, and again after a resume."""

    def __init__(
        self,
        config: TrainConfig,
        manager: Simulators,
        policy: Policy,
        run_dir: Path,
        *,
        domain: str = "",
        is_over: Callable[[], bool] = lambda: False,
        shown: bool = True,
    ) -> None:
        """Open and check the given recordings. Raises UserError. `domain`: domain of the expert, in a run with several. `is_over`: whether
        the run's time is over, checked while the expert plays. `shown`: whether progress is shown."""
        self._is_over, self._shown = is_over, shown
        self.config, self.manager, self.policy = config, manager, policy
        self.spec = plain_spec(manager.spec)
        self._folder = run_dir / FOLDER / domain
        self._recordings: list[Recording] = []
        for path in config.recording:
            recording = open_recording(path, verify=config.algorithm.recorded.verify)
            # Imported recordings name their task in their own manner.
            check_recording(recording, self.spec, policy.observation_keys, same_task=bool(recording.info.sim))
            _warn_of_other_settings(recording, config.sim)
            self._recordings.append(recording)

    def load(self) -> list[EpisodeRef]:
        """The episodes to learn from; without a given recording the expert plays first, and the manager's running episodes are lost.
        Raises UserError: there are no such episodes."""
        recorded = self.config.algorithm.recorded
        if not self._recordings:
            self._record_expert()
            self._recordings.append(open_recording(self._folder))
        return choose_episodes(
            self._recordings, only_success=recorded.only_success, max_episodes=recorded.max_episodes, seed=self.config.seed
        )

    def options(self, *, rewards: SeenRewards = AS_RECORDED, n_step: int = 1, action_margin: float = 0.0) -> DatasetOptions:
        """Dataset options for this policy. A chunk is one decision: `n_step` of them are as many times its steps."""
        return DatasetOptions(
            self.policy.observation_keys,
            self.config.algorithm.gamma,
            n_step=n_step * self.policy.chunk_size,
            rewards=rewards,
            action_margin=action_margin,
            window=self.policy.chunk_size if self.policy.translates else None,
        )

    def _record_expert(self) -> None:
        recorded, spec = self.config.algorithm.recorded, self.spec
        info = RecordingInfo(
            spec=spec,
            sim=dataclasses.asdict(self.config.sim),
            policy={"kind": "expert", "target": expert_of(self.config), "randomness": list(recorded.expert_randomness)},
            command="recorded at the beginning of a training run",
            versions=versions(),
        ).signed()
        with (
            closing(RecordingWriter(self._folder, info, resume=self._folder.exists())) as writer,
            progress_bar("the expert plays", recorded.expert_episodes, shown=self._shown) as advance,
            self._played_here() as manager,
        ):
            advance(len(writer.seeds))
            for number, episode in self._missing_episodes(manager, set(writer.seeds)):
                writer.add(dataclasses.replace(episode, metadata={"number": number}))
                advance(1)
            if (played := len(writer.seeds)) < (wanted := recorded.expert_episodes):
                raise UserError(
                    f"The expert finished only {played} of {wanted} episodes (algorithm.recorded.expert_episodes): the simulator failed "
                    "in the others."
                )

    def _played_here(self) -> AbstractContextManager[Simulators]:
        """The run's simulators, or separate ones with the expert if the run's are in another process."""
        if not self.manager.plays_itself:
            return nullcontext(self.manager)
        return EnvManager.from_config(training_sim(self.config), EpisodeSeeds.given(0), chunk_size=self.config.policy.chunk_size)

    def _missing_episodes(self, manager: Simulators, known: set[int]) -> Iterator[tuple[int, RecordedEpisode]]:
        recorded, slots = self.config.algorithm.recorded, manager.num_slots
        wanted, first = recorded.expert_episodes - len(known), 0
        while wanted > 0 and first < _TRIES * recorded.expert_episodes:
            numbers = range(first, first + min(slots, recorded.expert_episodes))
            first = numbers.stop
            seeds = {number: group_seed(self.config.seed, FOLDER, number) for number in numbers}
            open_ones = {number: seed for number, seed in seeds.items() if seed not in known}
            if self._is_over():
                raise UserError(
                    f"max_minutes={self.config.max_minutes:g} was over while the expert played {recorded.expert_episodes - wanted} of "
                    f"{recorded.expert_episodes} episodes. They are kept: set a larger max_minutes, and add resume=auto."
                )
            shares = [recorded.expert_randomness[number % len(recorded.expert_randomness)] for number in open_ones]
            played = play_expert(manager, list(open_ones.values()), shares) if open_ones else []
            for number, episode in zip(open_ones, played, strict=True):
                if episode is not None and wanted > 0:
                    known.add(episode.seed)
                    wanted -= 1
                    yield number, episode


def _warn_of_other_settings(recording: Recording, sim: SimConfig) -> None:
    """Warn if settings differ although spaces are equal: a control mode of the same size, another reward."""
    theirs, ours = recording.info.sim.get("kwargs"), sim.kwargs
    if not isinstance(theirs, Mapping):
        return
    keys = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
    if keys:
        differences = "; ".join(f"{key} {theirs.get(key)!r} ≠ {ours.get(key)!r}" for key in keys)
        warnings.warn(
            f"Recording '{recording.path}' was made with other settings of the simulator: {differences} (recording ≠ simulator).",
            stacklevel=2,
        )


def play_expert(manager: Simulators, seeds: Sequence[int], randomness: Sequence[float]) -> list[RecordedEpisode | None]:
    """Play episodes of these seeds in parallel with the expert (see `instrumented`), with some random steps.

    Args:
        seeds: at most as many as the manager has slots.
        randomness: for each episode, the share of steps drawn uniformly from the simulator's range.

    Returns them in the order of `seeds`; None for an episode that the simulator gave up.
    """
    spec = manager.spec.action
    draws = [np.random.default_rng(np.random.SeedSequence([seed, 7])) for seed in seeds]

    def act(slot: int, seen: dict[str, Any]) -> np.ndarray:
        advice = split(seen).expert_action
        assert advice is not None, "the simulator is instrumented with an expert"
        return random_action(spec, draws[slot]) if draws[slot].random() < randomness[slot] else advice

    def keep(seen: dict[str, Any]) -> dict[str, Any]:
        return {key: np.array(part) for key, part in split(seen).observation.items()}

    played = play_each(manager, seeds, act, keep) if seeds else []
    return [None if one.summary is None else _recorded(one, chunks=manager.chunk_size > 1) for one in played]


def _recorded(played: PlayedEpisode, *, chunks: bool) -> RecordedEpisode:
    """`chunks`: the messages are chunks of one step."""
    reward, terminated, truncated, success = zip(*played.outcomes, strict=True)
    return RecordedEpisode(
        seed=played.seed,
        observation={key: np.stack([seen[key] for seen in played.seen]) for key in played.seen[0]},
        action=np.concatenate(played.actions) if chunks else np.stack(played.actions),
        reward=np.array(reward, np.float32),
        terminated=np.array(terminated, bool),
        truncated=np.array(truncated, bool),
        success=np.array(success, bool),
    )


def random_action(spec: ActionSpec, rng: np.random.Generator) -> np.ndarray:
    """[A] uniform over the simulator's range."""
    if spec.kind == "discrete":
        return rng.integers(spec.num_actions, size=1)
    return np.asarray(spec.denormalise(rng.uniform(-1.0, 1.0, spec.dim).astype(np.float32)))
