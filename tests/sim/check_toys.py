"""A small simulator that keeps every promise, and one way of breaking each; used by test_check.py, in new processes too."""

# ruff: noqa: NPY002  (numpy's legacy global generator is one of the ways)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec


class Puck(SimEnv):
    """A puck on ice, pushed and blown about: velocity += 0.1 action + noise, position += 0.1 velocity; cut after `limit` steps.

    `fault` is what it does wrong, "" for nothing; `out_of` ends episodes (terminated) beyond this position.
    """

    hidden: ClassVar[dict[bytes, Any]] = {}

    def __init__(self, num_envs: int, fault: str = "", limit: int = 150, snapshots: str = "exact", out_of: float = np.inf) -> None:
        if fault == "raises_while_built":
            raise RuntimeError("no such motor")
        if fault == "user_error":
            raise UserError("Task 'puck' needs ice.")
        self.fault, self.limit, self.out_of, self.num_envs = fault, limit, out_of, num_envs
        bound = np.inf if fault == "infinite_bounds" else 1.0
        observation = {"state": TensorSpec((3,), "float64"), "rgb": TensorSpec((4, 4, 3), "uint8")}
        self.spec = SimSpec(
            "puck", observation, ActionSpec.continuous([-bound], [bound]), limit, reports_success=True, can_render=True,
            snapshots=snapshots,  # type: ignore[arg-type]
        )  # fmt: skip
        self.state = np.zeros((num_envs, 3))  # position, velocity, steps
        self.rng = [np.random.default_rng(0) for _ in range(num_envs)]
        self.wind = np.random.default_rng(0)
        self.last: dict[int, Any] = {}
        self.finished = [False] * num_envs
        self.closed = False

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        rebuilt = bool((options or {}).get("reconfigure"))
        for i, seed in zip(env_ids, seeds, strict=True):
            if self.fault == "small_seeds_only" and seed >= 2**30:
                raise OverflowError("seed does not fit 30 bits")
            chosen = {"ignores_seed": 0, "depends_on_place": seed + i}.get(self.fault, seed)
            self.rng[i] = np.random.default_rng(chosen)
            before = self.state[i].copy()
            self.state[i] = self.rng[i].uniform(-1, 1), 0, 0
            if self.fault == "random_hash":
                self.state[i, 0] += 1e-9 * (hash("puck") % 1000)
            if self.fault == "carries_over" or (self.fault == "mended_by_reconfigure" and not rebuilt):
                self.state[i, 1] = 1e-3 * before[1]
            if self.fault == "global_random":
                np.random.seed(seed % 2**32)
            if self.fault == "confused_after_end" and self.finished[i]:
                self.state[i, 0] += 0.5
            self.finished[i] = False
            if self.fault == "reset_writes_reward":
                out.reward[i] = 0
            self.last[i] = np.zeros(1)
            self._observe(i, out, reset=True)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        neighbours = self.state[:, 0].copy()
        for row, i in enumerate(env_ids):
            place = min(i, len(actions) - 1) if self.fault == "mixes_up_rows" else row
            self._advance(i, actions[place], neighbours[(i + 1) % self.num_envs], out)
            self._finish(i, actions[place], out)
        if self.fault == "writes_every_row":
            out.reward[[i for i in range(self.num_envs) if i not in env_ids]] = 0

    def _advance(self, i: int, action: np.ndarray, neighbour: float, out: StepBuffers) -> None:
        position, velocity, steps = self.state[i].tolist()
        push = float(action[0])
        noise = self.rng[i].normal(0, 0.01)
        if self.fault == "unseeded_noise" or (self.fault == "unseeded_late" and steps > 60):
            noise = np.random.default_rng().normal(0, 0.01)
        if self.fault == "global_random":
            noise = np.random.normal(0, 0.01)
        if self.fault == "feels_neighbour":
            noise += 1e-6 * neighbour
        if self.fault == "keeps_action":
            noise += 0.01 * float(self.last[i][0])
            self.last[i] = action
        if self.fault == "reads_its_row" and steps > 0:
            position = float(out.observation["state"][i, 0])
        if self.fault == "breaks_at_the_bounds":
            with np.errstate(all="ignore"):
                noise *= float(np.log1p(-np.float64(abs(push))))
        velocity += 0.1 * push + noise
        self.state[i] = position + 0.1 * velocity, velocity, steps + 1

    def _finish(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        position, _, steps = self.state[i].tolist()
        if self.fault != "leaves_reward":
            out.reward[i] = -abs(position)
        out.terminated[i] = abs(position) > self.out_of
        out.truncated[i] = steps >= self.limit and self.fault != "no_limit"
        out.success[i] = abs(position) < 0.1
        out.info[i] = {"contact": object()} if self.fault == "strange_info" else {"steps": np.int64(steps)}
        self.finished[i] = bool(out.terminated[i] or out.truncated[i])
        if self.fault == "resets_by_itself" and self.finished[i]:
            self.state[i] = self.rng[i].uniform(-1, 1), 0, 0
        self._observe(i, out)

    def _observe(self, i: int, out: StepBuffers, reset: bool = False) -> None:
        state = self.state[i]
        if self.fault == "leaves_velocity" and reset:
            out.observation["state"][i, [0, 2]] = state[[0, 2]]
        elif self.fault == "stretches":
            out.observation["state"][i] = state[:1]
        elif self.fault == "nan" and state[2] == 10:
            out.observation["state"][i] = np.nan
        else:
            out.observation["state"][i] = state
        out.observation["rgb"][i] = np.full((4, 4, 3), 0.5) if self.fault == "float_picture" else np.uint8(int(state[2]) % 256)

    def snapshot(self, env_id: int) -> bytes:
        state: Any = {"state": self.state[env_id], "rng": self.rng[env_id].bit_generator.state}
        if self.fault == "saves_float32":
            state["state"] = self.state[env_id].astype(np.float32)
        if self.fault == "keeps_snapshots_here":
            name = f"{id(self)}/{len(self.hidden)}"
            self.hidden[encode_state(name)] = {"state": self.state[env_id].copy(), "rng": self.rng[env_id].bit_generator.state}
            return encode_state(name)
        return encode_state(state)

    def restore(self, env_id: int, data: bytes) -> None:
        if self.fault == "accepts_anything" and b"not a" in data:
            return
        decoded = decode_state(data)
        state = self.hidden[data] if self.fault == "keeps_snapshots_here" else decoded
        elapsed = self.state[env_id, 2]
        self.state[env_id] = state["state"]
        if self.fault == "forgets_steps":
            self.state[env_id, 2] = elapsed
        self.rng[env_id].bit_generator.state = state["rng"]

    def render(self, env_id: int) -> np.ndarray:
        if self.fault == "render_steps":
            self.rng[env_id].normal()
        frame = np.zeros((8, 10, 3), np.float32 if self.fault == "float_frame" else np.uint8)
        frame[:, int(np.clip(5 + 4 * self.state[env_id, 0], 0, 9))] = 1 if self.fault == "float_frame" else 255
        return frame

    def close(self) -> None:
        if self.fault == "closes_once" and self.closed:
            raise RuntimeError("already closed")
        self.closed = True


class SplitPuck(Puck):
    """The same puck, stepped and observed apart."""

    step = SimEnv.step

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self.unread = StepBuffers.allocate(self.spec, self.num_envs).observation
        Puck.step(self, env_ids, actions, replace(out, observation=self.unread))
        if self.fault == "rewards_what_is_seen":
            out.reward[list(env_ids)] += out.observation["state"][list(env_ids), 1]

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            if self.fault == "looks_and_moves":
                self.rng[i].normal()
            self._observe(i, out)


class CapturingEnv(gymnasium.Env):
    """A correct gymnasium.Env that draws from numpy's global generator while it steps, as many old ones do."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = np.random.uniform(-1, 1)
        return np.array([self.position, 0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.position += 0.1 * (int(action) - 1) + np.random.normal(0, 0.05)
        return np.array([self.position, action], np.float32), -abs(self.position), abs(self.position) > 1.5, False, {}


def vector_cartpole(num_envs: int) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
