"""KeyDoor: a point robot fetches a key, passes the door that it opens, and drives to a goal; a long task with a reward only at the end.

The floor is 2 m × 1 m, with a wall across the middle at x = 1 m. The robot starts at the lower left, the key lies at the upper left, the
door is in the middle of the wall, and the goal at the lower right: 60 steps at full speed, in an order that random motion does not find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

MAX_EPISODE_STEPS = 160
CONTROL_HZ = 10.0
MAX_STEP_M = 0.04
"""Metres that a step moves along each axis at action 1."""
SIZE_M = np.array([2.0, 1.0])
WALL_X_M = 1.0
DOOR_Y_M = (0.35, 0.65)
START_M, KEY_M, GOAL_M = np.array([0.15, 0.15]), np.array([0.15, 0.85]), np.array([1.85, 0.15])
START_SPREAD_M = 0.1
REACH_M = 0.1
"""Distance in metres within which key and goal are reached."""

_X, _Y, _HAS_KEY, _STEPS = range(4)


def tasks() -> list[str]:
    return ["KeyDoor"]


class KeyDoor(SimEnv):
    """KeyDoor environments. Actions are velocities along x and y in [-1, 1]; the reward is 1 at the goal, which ends the episode, else 0.

    Observation "state" [3] = (x − 1, 2 y − 1, 1 with the key and −1 without it), positions in metres. Starts differ by ± 0.1 m.

    Args:
        num_envs: environments in this process; many cost hardly more than one.
        render_size: width in pixels of `render`'s picture; its height is half of it.

    Raises UserError: another task.
    """

    def __init__(self, num_envs: int, task: str = "KeyDoor", render_size: int = 256) -> None:
        require_known(task, tasks(), f"Task '{task}' is not known.")
        self._state = np.zeros((num_envs, 4))  # x, y, key (0 or 1), steps taken
        self._render_size = render_size
        self.spec = SimSpec(
            task=task,
            observation={"state": TensorSpec((3,))},
            action=ActionSpec.continuous([-1.0, -1.0], [1.0, 1.0]),
            max_episode_steps=MAX_EPISODE_STEPS,
            control_hz=CONTROL_HZ,
            instruction="fetch the key, go through the door and drive to the goal",
            reports_success=True,
            can_render=True,
            snapshots="exact",
        )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for env_id, seed in zip(env_ids, seeds, strict=True):
            spread = np.random.default_rng(int(seed)).uniform(-START_SPREAD_M, START_SPREAD_M, 2)
            self._state[env_id] = (*(START_M + spread), 0.0, 0.0)
        self._observe(np.asarray(env_ids), out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        rows = np.asarray(env_ids)
        state = self._state[rows]
        move = MAX_STEP_M * np.clip(actions, -1.0, 1.0)
        x, y = state[:, _X], state[:, _Y]
        wanted = np.clip(x + move[:, 0], 0.0, SIZE_M[0])
        blocked = ((x < WALL_X_M) != (wanted < WALL_X_M)) & ~((state[:, _HAS_KEY] > 0) & _in_door(y))
        state[:, _X] = np.where(blocked, x, wanted)
        state[:, _Y] = np.clip(y + move[:, 1], 0.0, SIZE_M[1])
        state[:, _HAS_KEY] = np.maximum(state[:, _HAS_KEY], _near(state, KEY_M))
        state[:, _STEPS] += 1
        self._state[rows] = state
        arrived = _near(state, GOAL_M)
        out.reward[rows], out.success[rows], out.terminated[rows] = arrived, arrived, arrived
        out.truncated[rows] = (state[:, _STEPS] >= MAX_EPISODE_STEPS) & ~arrived
        self._observe(rows, out)

    def render(self, env_id: int) -> np.ndarray:
        """[size / 2, size, 3] uint8, seen from above: the robot blue, the key yellow, the goal green, the closed door red."""
        width = self._render_size
        x, y = np.meshgrid((np.arange(width) + 0.5) * SIZE_M[0] / width, (np.arange(width // 2)[::-1] + 0.5) * SIZE_M[0] / width)
        frame = np.full((width // 2, width, 3), 235, np.uint8)
        has_key = self._state[env_id, _HAS_KEY] > 0
        wall = np.abs(x - WALL_X_M) < 0.02
        frame[wall & ~_in_door(y)] = (60, 60, 60)
        frame[wall & _in_door(y)] = (190, 220, 190) if has_key else (200, 60, 60)
        discs = [(GOAL_M, REACH_M, (90, 180, 90)), *([] if has_key else [(KEY_M, 0.05, (230, 190, 40))])]
        for centre, radius, colour in [*discs, (self._state[env_id, :2], 0.04, (50, 90, 200))]:
            frame[np.hypot(x - centre[0], y - centre[1]) < radius] = colour
        return frame

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"state": self._state[env_id].copy()}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        self._state[env_id] = saved["state"]

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """See `SimEnv`: x and y in metres, and 1 with the key."""
        return {"robot": self._state[env_id, : _HAS_KEY + 1].copy()}

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        self._state[env_id, : _HAS_KEY + 1] = state["robot"]

    def _observe(self, rows: np.ndarray, out: StepBuffers) -> None:
        state = self._state[rows]
        out.observation["state"][rows, 0] = state[:, _X] - 1.0
        out.observation["state"][rows, 1] = 2.0 * state[:, _Y] - 1.0
        out.observation["state"][rows, 2] = 2.0 * state[:, _HAS_KEY] - 1.0
        for row in rows:
            out.info[row] = None


class KeyDoorExpert:
    """Drives straight to the key, through the door and to the goal."""

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Action [2] float32 for one environment's ``state`` [3]."""
        x, y, key = (float(number) for number in observation["state"])
        position = np.array([x + 1.0, (y + 1.0) / 2.0])
        if key < 0:
            target = KEY_M
        elif position[0] < WALL_X_M:
            target = np.array([WALL_X_M + 2 * MAX_STEP_M, sum(DOOR_Y_M) / 2])
        else:
            target = GOAL_M
        return np.clip((target - position) / MAX_STEP_M, -1.0, 1.0).astype(np.float32)


def _near(state: np.ndarray, place: np.ndarray) -> np.ndarray:
    """[n] bool: whether each environment's robot is within reach of `place`."""
    return np.hypot(state[:, _X] - place[0], state[:, _Y] - place[1]) <= REACH_M


def _in_door(y: np.ndarray) -> np.ndarray:
    """Whether a position y along the wall lies in the door."""
    return (y >= DOOR_Y_M[0]) & (y <= DOOR_Y_M[1])
