"""A light simulator with a picture, words and known arithmetic, and small policies for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.sim.env import SimEnv
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec, VariableSpec

WORDS = ("go left", "go right")
SIM = (
    "sim=custom",
    "sim.name=points",
    "sim.target=tests.vla.toys:PointSim",
    "sim.num_slots=4",
    "sim.num_workers=1",
)
"""Overrides for a run in it."""
TINY = (
    "policy=tiny_vla",
    "policy.width=16",
    "policy.num_heads=2",
    "policy.num_layers=1",
    "policy.conv_channels=[4]",
    "policy.num_keypoints=4",
    "policy.num_bins=9",
    "policy.chunk=3",
)
QUIET = ("video.enabled=no", "logger=quiet", "stop_at_success=null", "evaluation.every_steps=null", "evaluation.num_episodes=4")


class PointSim(SimEnv):
    """A point at x in [-1, 1] moves by 0.2 times the first dimension of the action; its column of the picture is white. "go left" is
    even seeds': success at x <= -0.5, "go right" odd ones': at x >= 0.5. Reward: the way towards that side. Ten steps at most.

    Args:
        dim: action dimensions, of which the first counts.
        words: "observation": a part ``instruction``; "spec": one in the spec, for all; "none": neither.
        pixels: False: "state" [1] alone.
    """

    def __init__(self, num_envs: int, dim: int = 2, size: int = 16, words: str = "observation", pixels: bool = True) -> None:
        self._x, self._elapsed = np.zeros(num_envs), np.zeros(num_envs, int)
        self._side = np.ones(num_envs)
        parts: dict[str, TensorSpec | VariableSpec] = {"state": TensorSpec((1,))}
        if pixels:
            parts["rgb"] = TensorSpec((size, size, 3), "uint8")
        if words == "observation":
            parts["instruction"] = VariableSpec("text", 64)
        self.spec = SimSpec(
            task="Point-v0",
            observation=parts,
            action=ActionSpec.continuous([-1.0] * dim, [1.0] * dim),
            max_episode_steps=10,
            instruction="go left" if words == "spec" else None,
            reports_success=True,
            can_render=True,
            snapshots="replay",
        )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            self._x[i] = np.random.default_rng(int(seed)).uniform(-0.4, 0.4)
            self._elapsed[i], self._side[i] = 0, 1.0 if seed % 2 else -1.0
            self._observe(i, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        for i, action in zip(env_ids, np.clip(actions, -1.0, 1.0), strict=True):
            before = self._x[i]
            self._x[i] = np.clip(before + 0.2 * action[0], -1.0, 1.0)
            self._elapsed[i] += 1
            out.reward[i] = self._side[i] * (self._x[i] - before)
            out.terminated[i], out.truncated[i] = False, self._elapsed[i] >= 10
            out.success[i] = self._side[i] * self._x[i] >= 0.5
            out.info[i] = None
            self._observe(i, out)

    def side(self, env_id: int) -> float:
        return float(self._side[env_id])

    def render(self, env_id: int) -> np.ndarray:
        frame = np.zeros((32, 32, 3), np.uint8)
        frame[:, int((self._x[env_id] + 1) * 15.5)] = 255
        return frame

    def close(self) -> None:
        pass

    def _observe(self, i: int, out: StepBuffers) -> None:
        out.observation["state"][i] = self._x[i]
        if "rgb" in out.observation:
            frame = out.observation["rgb"][i]
            frame[:] = 0
            frame[:, int((self._x[i] + 1) * 0.4999 * frame.shape[1])] = 255
        if "instruction" in out.observation:
            out.observation["instruction"][i] = WORDS[int(self._side[i] > 0)]


class PointExpert:
    """Goes where it is told at full speed; further dimensions stay at 0."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        self._sim: Any = sim
        self._env_id = env_id

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        action = np.zeros(self._sim.spec.action.dim, np.float32)
        action[0] = self._sim.side(self._env_id)
        return action
