"""Experts of the toy simulators, and managers that record them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.rollout.recording import ExpertPlayer, Player, Recorder, RecordingPlan, RecordingResult
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.instrumented import instrumented, plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.toy import CountingSim, SavedCountingSim


class TogetherSim(CountingSim):
    """All environments of a process move whenever one is stepped; odd seeds last 3 steps, even ones 2. The process dies when the episode of
    seed `victim` begins, but `once`."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.spec = dataclasses.replace(self.spec, steps_together=True, snapshots="none")
        self._scratch = StepBuffers.allocate(self.spec, num_envs)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        super().reset(env_ids, seeds, out, options)
        if any(seed == self.victim and self._is_time(env_id) for env_id, seed in zip(env_ids, seeds, strict=True)):
            os._exit(7)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        super().step(env_ids, actions, out)
        for env_id in env_ids:
            seed, steps, _ = self.state[env_id]
            out.terminated[env_id] = steps >= 2 + seed % 2
        others = [env_id for env_id in range(len(self.state)) if env_id not in env_ids]
        super().step(others, np.ones((len(others), 1)), self._scratch)


class ByStep:
    """Reads the simulator's state: an action of 0.1 times the steps taken so far, plus 1."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        self._sim: Any = sim
        self._env_id = env_id

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        return np.array([1 + 0.1 * self._sim.state[self._env_id, 1]], np.float32)


def by_seed() -> Callable[[Mapping[str, Any]], np.ndarray]:
    """Of CountingSim, from the observation: reaches the sum of 3 within 5 steps for odd seeds alone."""
    return lambda observation: np.array([0.7 if observation["state"][0] % 2 else 0.1], np.float32)


class Speaker:
    """Remembers how often it has spoken in its episode."""

    def __init__(self) -> None:
        self.spoken = 0

    def __call__(self, observation: Mapping[str, Any]) -> str:
        self.spoken += 1
        return f"word {self.spoken}"


def wants_three(first: int, second: int, third: int) -> None:
    """No expert."""


def toy(name: str = "CountingSim", **kwargs: Any) -> SimConfig:
    """A simulator of `tests.sim.toy`."""
    return SimConfig(name="toy", target=f"tests.sim.toy:{name}", kwargs=kwargs, num_slots=4, num_workers=2)


@contextmanager
def manager_of(config: SimConfig, slots: int = 4, **shown: Any) -> Iterator[EnvManager]:
    """Of the instrumented simulator."""
    with EnvManager.from_config(instrumented(config, **shown), EpisodeSeeds.given(0), num_slots=slots, autoreset=False) as manager:
        yield manager


def record_toy(
    folder: Path,
    plan: RecordingPlan,
    config: SimConfig,
    *,
    slots: int = 4,
    num_groups: int = 1,
    player: Player | None = None,
    resume: bool = False,
    same: bool = True,
    **shown: Any,
) -> RecordingResult:
    """Record with the expert that `shown` names, or with a player; `same`: the recording says how the simulator was made."""
    with manager_of(config, slots, **shown) as manager:
        info = RecordingInfo(
            plain_spec(manager.spec), {"target": config.target, **({"kwargs": config.kwargs} if same else {})}, {"kind": "toy"}
        )
        with RecordingWriter(folder, info, video="png", resume=resume) as writer:
            return Recorder(manager, player or ExpertPlayer(), writer, plan, num_groups=num_groups).run()


class PaintingSim(SavedCountingSim):
    """Sees pictures [18, 20, 3] of noise that is a function of the episode's seed and steps; draws grey ones of [16, 17, 3] for people."""

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.spec = dataclasses.replace(self.spec, observation={**self.spec.observation, "rgb": TensorSpec((18, 20, 3), "uint8")})

    def render(self, env_id: int) -> np.ndarray:
        return np.full((16, 17, 3), 10 * int(self.state[env_id, 1]), np.uint8)

    def _observe(self, env_id: int, out: StepBuffers) -> None:
        super()._observe(env_id, out)
        out.observation["rgb"][env_id] = painted(*self.state[env_id, :2].astype(int).tolist())


class SplitPaintingSim(PaintingSim):
    """The same, stepped and painted apart."""

    step = SimEnv.step

    def __init__(self, num_envs: int, **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self._unread = StepBuffers.allocate(self.spec, num_envs).observation

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        PaintingSim.step(self, env_ids, actions, dataclasses.replace(out, observation=self._unread))

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for env_id in env_ids:
            self._observe(env_id, out)


class Remembering:
    """Answers the number of times that it was asked in its episode."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        self._asked += 1
        return np.array([self._asked + observation["state"][1] / 100], np.float32)


def painted(seed: int, step: int) -> np.ndarray:
    """What `PaintingSim` shows."""
    return np.random.default_rng((seed, step)).integers(0, 256, (18, 20, 3), np.uint8)
