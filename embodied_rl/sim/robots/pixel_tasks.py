"""PixelTasks: a gantry reaches coloured discs and pushes a block by instruction, seen from above in a small picture.

Our own MuJoCo scene, which draws in a tenth of a millisecond on a CPU: for vision-language-action policies without a GPU. All tasks share
one scene; only the instruction tells an episode's task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import require_known
from embodied_rl.files import assets_dir
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots.mujoco_model import Drawing, MujocoSim, import_mujoco
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec, VariableSpec

MAX_EPISODE_STEPS = 60
CONTROL_HZ = 20.0
SUBSTEPS = 5
"""Physics steps of 10 ms per control step."""
MAX_SPEED = 0.5
"""Velocity of bridge and carriage at action 1, m/s."""
REACHED_M = 0.03
"""Distance in metres of the tip from a disc's centre that counts as reached."""
STRIP_M = 0.17
"""Distance in metres of the block from the middle that counts as at a side."""
RAIL_M = 0.24
"""Range ± in metres of the tip along both axes."""
WORKSPACE_M = 0.2
"""Range ± in metres around the centre in which tip and discs start, along both axes."""
APART_M = 0.085
"""Smallest distance in metres between tip, discs and block at the start."""

INSTRUCTIONS = {
    "reach_red": "move the tip onto the red disc",
    "reach_green": "move the tip onto the green disc",
    "reach_blue": "move the tip onto the blue disc",
    "push_left": "push the block to the left",
    "push_right": "push the block to the right",
}
"""{task: its instruction}"""
DISCS = ("red", "green", "blue")
SETS = ("all", "reach", "push")
"""Sets of tasks that `PixelTasks` accepts; their tasks alternate from episode to episode."""
REWARDS = ("sparse", "dense")


def tasks() -> list[str]:
    return list(INSTRUCTIONS)


def task_set(name: str) -> tuple[str, ...]:
    """Tasks of a set, or the named task. Raises UserError with the nearest name."""
    require_known(name, [*SETS, *INSTRUCTIONS], f"Task '{name}' is not known.")
    return (name,) if name in INSTRUCTIONS else tuple(task for task in INSTRUCTIONS if name == "all" or task.startswith(name))


class PixelTasks(MujocoSim):
    """Environments of one task or a set. Actions are the velocities of bridge (x) and carriage (y) in [-1, 1].

    Observation "rgb" [image_size, image_size, 3] uint8, "state" [2] = the tip's position, ± 1 at the ends of its rails, and "instruction"
    if `task` is a set; seed s plays task s mod n of its n tasks. The gantry and the block have almost no momentum at the end of a control
    step, so that one picture is the whole state.

    Args:
        task: a task, or a set of tasks: see `INSTRUCTIONS` and `SETS`.
        reward: "sparse": 1 at a step that succeeds, else 0. "dense": also the decimetres by which the step came nearer (tip to disc;
            or block to its side plus tip to block).
        render_size: pixels a side of `render`'s picture, at most 512.

    Raises MissingExtraError; UserError: an unknown task or reward, or this machine cannot draw off-screen.
    """

    many_tasks = True

    def __init__(self, num_envs: int, task: str = "all", reward: str = "sparse", image_size: int = 48, render_size: int = 256) -> None:
        self.tasks = task_set(task)
        require_known(reward, REWARDS, f"PixelTasks reward '{reward}' is not known.")
        mujoco = self._mujoco = import_mujoco("PixelTasks")
        model = mujoco.MjModel.from_xml_path(str(assets_dir() / "mujoco" / "pixel_tasks.xml"))
        data = [mujoco.MjData(model) for _ in range(num_envs)]
        super().__init__(model, data, Drawing(model, multisampling=True), "top", render_size)
        # Views of MuJoCo's memory: they show the present state, and requesting an array from MjData costs as much as the arithmetic.
        tip = model.site("tip").id
        self._tips, self._blocks = [each.site_xpos[tip, :2] for each in data], [each.qpos[:2] for each in data]
        self._discs, self._commands = [each.mocap_pos[:, :2] for each in data], [each.ctrl for each in data]
        self._dense = reward == "dense"
        self._present = [self.tasks[0]] * num_envs
        several = len(self.tasks) > 1
        words: dict[str, TensorSpec | VariableSpec] = {"instruction": VariableSpec("text", 256)} if several else {}
        self.spec = SimSpec(
            task=task,
            observation={"rgb": TensorSpec((image_size, image_size, 3), "uint8"), "state": TensorSpec((2,)), **words},
            action=ActionSpec.continuous([-1.0, -1.0], [1.0, 1.0]),
            max_episode_steps=MAX_EPISODE_STEPS,
            control_hz=CONTROL_HZ,
            instruction=None if several else INSTRUCTIONS[task],
            reports_success=True,
            can_render=True,
            snapshots="exact",
        )

    def task_at(self, env_id: int) -> str:
        return self._present[env_id]

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        super().advance(env_ids, np.clip(actions, -1.0, 1.0) * MAX_SPEED, out)

    def _begin(self, i: int, seed: int) -> None:
        data = self.data[i]
        self._mujoco.mj_resetData(self.model, data)
        self._present[i] = self.tasks[seed % len(self.tasks)]
        tip, block, *discs = _places(np.random.default_rng(seed))
        data.qpos[:] = (*block, *tip)
        self._discs[i][:] = discs
        self._mujoco.mj_forward(self.model, data)

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        data, before = self.data[i], self.distance(i)
        self._commands[i][:] = action
        self._mujoco.mj_step(self.model, data, SUBSTEPS)
        self._mujoco.mj_kinematics(self.model, data)  # mj_step leaves body positions one physics step behind
        distance = self.distance(i)
        success = out.success[i] = self._succeeded(i, distance)
        out.reward[i] = float(success) + (10.0 * (before - distance) if self._dense else 0.0)
        out.info[i] = {"distance_m": distance, "task": self._present[i]}

    def distance(self, env_id: int) -> float:
        """Remaining metres: from the tip to its disc, or from the block to its strip plus from the tip to the block."""
        task, tip, block = self._present[env_id], self.tip(env_id), self.block(env_id)
        if task.startswith("reach_"):
            return float(np.hypot(*(tip - self.disc(env_id, task.removeprefix("reach_")))))
        side = -1.0 if task == "push_left" else 1.0
        return max(STRIP_M - side * float(block[0]), 0.0) + float(np.hypot(*(tip - block)))

    def tip(self, env_id: int) -> np.ndarray:
        """[2] metres."""
        return self._tips[env_id]

    def block(self, env_id: int) -> np.ndarray:
        """[2] metres."""
        return self._blocks[env_id]

    def disc(self, env_id: int, colour: str) -> np.ndarray:
        """[2] metres."""
        return self._discs[env_id][DISCS.index(colour)]

    def _succeeded(self, i: int, distance: float) -> bool:
        task = self._present[i]
        if task.startswith("reach_"):
            return distance <= REACHED_M
        return float(self.block(i)[0]) * (-1.0 if task == "push_left" else 1.0) >= STRIP_M

    def _observe(self, i: int, out: StepBuffers) -> None:
        out.observation["state"][i] = self.tip(i) / RAIL_M
        self._draw(i, "top", out.observation["rgb"][i])
        if "instruction" in out.observation:
            out.observation["instruction"][i] = INSTRUCTIONS[self._present[i]]

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"present": self._present[env_id], **super()._saved(env_id)}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        super()._take_up(env_id, saved)
        self._present[env_id] = saved["present"]


def _places(rng: np.random.Generator) -> list[np.ndarray]:
    """[2] metres each: tip, block (near the middle) and the three discs, `APART_M` or more from each other."""
    placed: list[np.ndarray] = []
    while len(placed) < 5:
        spread = np.array([0.09, 0.13]) if len(placed) == 1 else WORKSPACE_M
        place = rng.uniform(-spread, spread, 2)
        if all(np.hypot(*(place - other)) >= APART_M for other in placed):
            placed.append(place)
    return placed


class PixelTasksExpert:
    """Moves straight to the disc; or around the block to its far side, then against it. Reads the simulator's positions."""

    BEHIND_M = 0.062
    """Distance in metres between the centres of tip and block from which pushing starts."""
    CLEAR_M = 0.06
    """Distance in metres along y at which the tip passes the block."""
    ALIGNED_M = 0.012

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        assert isinstance(sim, PixelTasks), "its task names this expert"
        self._sim = sim
        self._env_id = env_id

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The present action [2]."""
        tip = self._sim.tip(self._env_id)
        return np.clip((self._target(tip) - tip) * CONTROL_HZ / MAX_SPEED, -1.0, 1.0).astype(np.float32)

    def _target(self, tip: np.ndarray) -> np.ndarray:
        task = self._sim.task_at(self._env_id)
        if task.startswith("reach_"):
            return self._sim.disc(self._env_id, task.removeprefix("reach_"))
        block = self._sim.block(self._env_id)
        side = -1.0 if task == "push_left" else 1.0
        behind = side * (block[0] - tip[0])  # metres that the tip is on the far side
        beside = tip[1] - block[1]
        if behind >= 0.65 * self.BEHIND_M:
            if abs(beside) <= self.ALIGNED_M:
                return np.array([tip[0] + side * 0.04, block[1]])
            return np.array([block[0] - side * self.BEHIND_M, block[1]])
        if abs(beside) < self.CLEAR_M:
            away = np.sign(beside) or 1.0
            if abs(block[1] + away * self.CLEAR_M) > 0.23:  # no room between block and rail
                away = -away
            return np.array([tip[0], block[1] + away * (self.CLEAR_M + 0.005)])
        return np.array([block[0] - side * self.BEHIND_M, tip[1]])
