"""PixelReach: a gantry moves its tip onto a disc, seen from above in a small picture; our own MuJoCo scene that draws fast on a CPU.

It is also the model for a simulator with its own state: one file, one class, rows written in place. All environments of a
process share one model and one drawing context.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.paths import assets_dir
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots.mujoco_model import MujocoPhysics, new_renderer
from embodied_rl.sim.robots.saved_state import DataState
from embodied_rl.sim.snapshots import decode_state, encode_state, require_task
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


def tasks() -> list[str]:
    return ["PixelReach"]


class PixelReach(SimEnv):
    """Actions are the velocities of bridge (x) and carriage (y) in [-1, 1]; the reward is
    ``1 - tanh(distance / 0.2 m)``, success within 3 cm.

    The gantry has no momentum to speak of at the end of a control step, so that one picture is the whole state.

    Args:
        num_envs: environments in this process.
        task: only "PixelReach".
        pixels: observe "rgb" [image_size, image_size, 3]; False: "state" [4] = tip (x, y) and disc (x, y) in metres.
        image_size: pixels a side of the observation.
        render_size: pixels a side of `render`'s picture, at most 512.

    Raises:
        UserError: another task, or this machine cannot draw off-screen.
        MissingExtraError: MuJoCo is not installed.
    """

    def __init__(self, num_envs: int, task: str = "PixelReach", pixels: bool = True, image_size: int = 48, render_size: int = 256) -> None:
        if task != "PixelReach":
            raise UserError(f"Task '{task}' is not known. Known: PixelReach.")
        try:
            import mujoco
        except ImportError as error:
            raise MissingExtraError("PixelReach", "mujoco", error) from error
        self._mujoco = mujoco
        self.model = mujoco.MjModel.from_xml_path(str(assets_dir() / "mujoco" / "pixel_reach.xml"))
        self.data = [mujoco.MjData(self.model) for _ in range(num_envs)]
        self._states = [DataState(data) for data in self.data]
        self._tip = self.model.site("tip").id
        self._elapsed = [0] * num_envs
        self._pixels, self._image_size, self._render_size = pixels, image_size, render_size
        self._renderers: dict[int, Any] = {}
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

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            rng, data = np.random.default_rng(int(seed)), self.data[i]
            self._mujoco.mj_resetData(self.model, data)
            data.qpos[:], data.mocap_pos[0, :2] = rng.uniform(-WORKSPACE_M, WORKSPACE_M, (2, 2))
            self._mujoco.mj_forward(self.model, data)
            self._elapsed[i] = 0
            self._observe(i, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """See `SimEnv`."""
        for i, command in zip(env_ids, np.clip(actions, -1.0, 1.0) * MAX_SPEED, strict=True):
            data = self.data[i]
            data.ctrl[:] = command
            self._mujoco.mj_step(self.model, data, SUBSTEPS)
            self._mujoco.mj_kinematics(self.model, data)  # mj_step leaves positions of bodies one physics step behind
            distance = self.distance(i)
            self._elapsed[i] += 1
            out.reward[i] = 1.0 - np.tanh(distance / REWARD_SCALE_M)
            out.terminated[i] = False
            out.truncated[i] = self._elapsed[i] >= MAX_EPISODE_STEPS
            out.success[i] = distance <= SUCCESS_RADIUS_M
            out.info[i] = {"distance_m": distance}

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        """See `SimEnv`."""
        for i in env_ids:
            self._observe(i, out)

    def distance(self, env_id: int) -> float:
        """Metres between tip and disc in the plane."""
        tip, disc = self.positions(env_id)
        return float(np.hypot(*(tip - disc)))

    def positions(self, env_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Tip and disc, [2] metres each."""
        data = self.data[env_id]
        return data.site_xpos[self._tip, :2], data.mocap_pos[0, :2]

    def render(self, env_id: int) -> np.ndarray:
        frame = np.empty((self._render_size, self._render_size, 3), np.uint8)
        self._draw(env_id, frame)
        return frame

    def snapshot(self, env_id: int) -> bytes:
        """See `SimEnv`."""
        return encode_state({"task": self.spec.task, "elapsed": self._elapsed[env_id], "data": self._states[env_id].capture()})

    def restore(self, env_id: int, data: bytes) -> None:
        """See `SimEnv`. Raises SnapshotError for bytes of another task or version."""
        tree = decode_state(data)
        require_task(tree, self.spec.task)
        self._states[env_id].restore(tree["data"])
        self._elapsed[env_id] = tree["elapsed"]

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """See `SimEnv`."""
        return MujocoPhysics(self.model, self.data[env_id]).get()

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """See `SimEnv`."""
        MujocoPhysics(self.model, self.data[env_id]).set(state)

    def close(self) -> None:
        _close_all(self._renderers)

    def _observe(self, i: int, out: StepBuffers) -> None:
        if self._pixels:
            self._draw(i, out.observation["rgb"][i])
            return
        data = self.data[i]
        out.observation["state"][i] = (*data.site_xpos[self._tip, :2], *data.mocap_pos[0, :2])

    def _draw(self, i: int, frame: np.ndarray) -> None:
        size = frame.shape[0]
        renderer = self._renderers.get(size) or self._new_renderer(size)
        renderer.update_scene(self.data[i], camera="top")
        renderer.render(out=frame)

    def _new_renderer(self, size: int) -> Any:
        renderer = new_renderer(self._mujoco, self.model, size, size)
        for flag in ("mjRND_SHADOW", "mjRND_REFLECTION", "mjRND_SKYBOX", "mjRND_FOG", "mjRND_HAZE"):
            renderer.scene.flags[vars(self._mujoco.mjtRndFlag)[flag]] = 0
        self._renderers[size] = renderer
        atexit.register(_close_all, self._renderers)  # runs before MuJoCo takes its display down, which registered earlier
        return renderer


def _close_all(renderers: dict[int, Any]) -> None:
    while renderers:
        renderers.popitem()[1].close()
