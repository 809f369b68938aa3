"""PixelReach: a gantry moves its tip onto a disc, seen from above in a small picture; our own MuJoCo scene that draws fast on a CPU.

It is also the example of a simulator with its own state: one file, one class, rows written in place. All environments of a process share
one model and one drawing context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied_rl.errors import require_known
from embodied_rl.files import assets_dir
from embodied_rl.sim.robots.mujoco_model import Drawing, MujocoSim, import_mujoco
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

MAX_EPISODE_STEPS = 50
CONTROL_HZ = 20.0
SUBSTEPS = 5
"""Physics steps of 10 ms per control step."""
MAX_SPEED = 0.8
"""Velocity of bridge and carriage at action 1, m/s."""
SUCCESS_RADIUS_M = 0.03
WORKSPACE_M = 0.22
"""Tip and disc start within this of the centre, along both axes."""
REWARD_SCALE_M = 0.2
NOT_DRAWN = ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_FOG", "mjRND_HAZE")
"""Effects that its pictures leave out for speed."""


def tasks() -> list[str]:
    return ["PixelReach"]


class PixelReach(MujocoSim):
    """Environments of the task. Actions are the velocities of bridge (x) and carriage (y) in [-1, 1]; the reward is ``1 - tanh(distance /
    0.2 m)``, success within 3 cm.

    The gantry has almost no momentum at the end of a control step, so that one picture is the whole state.

    Args:
        pixels: observe "rgb" [image_size, image_size, 3]; False: "state" [4] = tip (x, y) and disc (x, y) in metres.
        render_size: pixels a side of `render`'s picture, at most 512.

    Raises MissingExtraError; UserError: another task, or this machine cannot draw off-screen.
    """

    def __init__(self, num_envs: int, task: str = "PixelReach", pixels: bool = True, image_size: int = 48, render_size: int = 256) -> None:
        require_known(task, tasks(), f"Task '{task}' is not known.")
        mujoco = self._mujoco = import_mujoco("PixelReach")
        model = mujoco.MjModel.from_xml_path(str(assets_dir() / "mujoco" / "pixel_reach.xml"))
        drawing = Drawing(model, multisampling=True, without=NOT_DRAWN)
        super().__init__(model, [mujoco.MjData(model) for _ in range(num_envs)], drawing, "top", render_size)
        self._tip, self._pixels = model.site("tip").id, pixels
        self.spec = SimSpec(
            task=task,
            observation={"rgb": TensorSpec((image_size, image_size, 3), "uint8")} if pixels else {"state": TensorSpec((4,))},
            action=ActionSpec.continuous([-1.0, -1.0], [1.0, 1.0]),
            max_episode_steps=MAX_EPISODE_STEPS,
            control_hz=CONTROL_HZ,
            instruction="move the tip onto the red disc",
            reports_success=True,
            can_render=True,
            snapshots="exact",
        )

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        super().advance(env_ids, np.clip(actions, -1.0, 1.0) * MAX_SPEED, out)

    def _begin(self, i: int, seed: int) -> None:
        rng, data = np.random.default_rng(seed), self.data[i]
        self._mujoco.mj_resetData(self.model, data)
        data.qpos[:], data.mocap_pos[0, :2] = rng.uniform(-WORKSPACE_M, WORKSPACE_M, (2, 2))
        self._mujoco.mj_forward(self.model, data)

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        data = self.data[i]
        data.ctrl[:] = action
        self._mujoco.mj_step(self.model, data, SUBSTEPS)
        self._mujoco.mj_kinematics(self.model, data)  # mj_step leaves body positions one physics step behind
        distance = self.distance(i)
        out.reward[i] = 1.0 - np.tanh(distance / REWARD_SCALE_M)
        out.success[i] = distance <= SUCCESS_RADIUS_M
        out.info[i] = {"distance_m": distance}

    def distance(self, env_id: int) -> float:
        """Metres between tip and disc in the plane."""
        tip, disc = self.positions(env_id)
        return float(np.hypot(*(tip - disc)))

    def positions(self, env_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Tip and disc, [2] metres each."""
        data = self.data[env_id]
        return data.site_xpos[self._tip, :2], data.mocap_pos[0, :2]

    def _observe(self, i: int, out: StepBuffers) -> None:
        if self._pixels:
            self._draw(i, "top", out.observation["rgb"][i])
        else:
            out.observation["state"][i] = np.concatenate(self.positions(i))
