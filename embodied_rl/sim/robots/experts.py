"""Which expert solves which task: scripted controllers that stand beside their simulator and may read its state.

Each is an `Expert` (see `embodied_rl.sim.instrumented`): from one environment's observation to its action in the simulator's units.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv

_HERE = "embodied_rl.sim.robots"
ANY_TASK = ""

EXPERTS: dict[str, dict[str, str]] = {
    f"{_HERE}.maniskill:make": {
        "PushCube": f"{_HERE}.experts_maniskill:PushCubeExpert",
        "PickCube": f"{_HERE}.experts_maniskill:PickCubeExpert",
        "StackCube": f"{_HERE}.experts_maniskill:StackCubeExpert",
    },
    f"{_HERE}.metaworld:make": {ANY_TASK: f"{_HERE}.experts:MetaWorldExpert"},
    f"{_HERE}.gymnasium_robotics:make": {
        "FetchReach": f"{_HERE}.experts_fetch:FetchReachExpert",
        "FetchReachDense": f"{_HERE}.experts_fetch:FetchReachExpert",
        "FetchPush": f"{_HERE}.experts_fetch:FetchPushExpert",
        "FetchPushDense": f"{_HERE}.experts_fetch:FetchPushExpert",
    },
    f"{_HERE}.pixel_reach:PixelReach": {"PixelReach": f"{_HERE}.experts:PixelReachExpert"},
    f"{_HERE}.pixel_tasks:PixelTasks": {ANY_TASK: f"{_HERE}.pixel_tasks:PixelTasksExpert"},
    f"{_HERE}.key_door:KeyDoor": {"KeyDoor": f"{_HERE}.key_door:KeyDoorExpert"},
}
"""{target of the simulator: {task without its version: target of the expert}}; `ANY_TASK` stands for all of a simulator's."""


def expert_target(config: SimConfig) -> str:
    """The expert of a simulator's task. Raises UserError naming the tasks that have one."""
    of_target = EXPERTS.get(config.target, {})
    task = re.sub(r"-v\d+$", "", config.task or "")
    found = of_target.get(task, of_target.get(ANY_TASK))
    if found is None:
        known = sorted(
            name or {"metaworld": "all of Meta-World", "pixel_tasks": "all of PixelTasks"}[target.split(":")[0].rsplit(".", 1)[1]]
            for target, tasks in EXPERTS.items()
            for name in tasks
        )
        raise UserError(
            f"Task '{config.task}' of sim={config.name} has no expert. Tasks with one: {', '.join(known)}. "
            "Give one of your own: expert=package.module:Class."
        )
    return found


class PixelReachExpert:
    """Straight to the disc: one control step moves the tip by the speed times its duration."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        self._sim: Any = sim
        self._env_id = env_id

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action [2] of this moment, out of the simulator's own positions."""
        from embodied_rl.sim.robots.pixel_reach import CONTROL_HZ, MAX_SPEED

        tip, disc = self._sim.positions(self._env_id)
        return np.clip((disc - tip) * CONTROL_HZ / MAX_SPEED, -1.0, 1.0).astype(np.float32)


class MetaWorldExpert:
    """Meta-World's own scripted policy of the task (`metaworld.policies`), which reads the 39 numbers of its observation."""

    def __init__(self, sim: SimEnv, env_id: int) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        # Each policy says that it asks for more than a whole step, which is meant, and clipped here.
        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")
        policies = cast(dict[str, Any], ENV_POLICY_MAP)
        self._policy = policies[sim.task_at(env_id)]()

    def __call__(self, observation: Mapping[str, Any]) -> np.ndarray:
        """From ``state`` [39 or more] to the action [4]."""
        action = self._policy.get_action(np.asarray(observation["state"][:39], np.float64))
        return np.clip(action, -1.0, 1.0).astype(np.float32)
