"""gym-aloha: two ViperX arms that hand over a cube or put a peg into a socket (Zhao et al. 2023, arXiv:2304.13705).

gym-aloha draws three pictures in every step, which takes most of its time (5 steps a second on a CPU core), and has no state observation.
This simulator uses its scenes, rewards and starting positions unchanged, and draws only the requested pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.robots.mujoco_model import Drawing, MujocoSim
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

if TYPE_CHECKING:
    from gym_aloha.tasks.sim import BimanualViperXTask
    from mujoco import MjModel

TASKS = {
    "AlohaTransferCube-v0": (
        "transfer_cube",
        "TransferCubeTask",
        "sample_box_pose",
        "pick up the cube with the right arm and hand it over to the left arm",
    ),
    "AlohaInsertion-v0": ("insertion", "InsertionTask", "sample_insertion_pose", "insert the peg into the socket"),
}
"""{id: (scene, gym-aloha's class, its function that places the objects, instruction)}."""

OBSERVATIONS = ("state", "pixels", "pixels_agent_pos")
MAX_EPISODE_STEPS = 300
SUCCESS_REWARD = 4
"""Reward of success: gym-aloha's reward counts stages, 0 to 4."""

ARM_JOINTS = 6
JOINTS = 2 * (ARM_JOINTS + 1)


def tasks() -> list[str]:
    """Task ids. Raises MissingExtraError if gym-aloha is not installed."""
    _gym_aloha()
    return sorted(TASKS)


class AlohaSim(MujocoSim):
    """Actions [14] are target positions: six joints in radians and the gripper from 0 (closed) to 1 (open), left arm, then right.

    Snapshots are exact.

    Args:
        task: "AlohaTransferCube-v0" or "AlohaInsertion-v0".
        observation: "state" is ``state`` [35] or [42]: joint positions 14 and velocities 14 (grippers normalised), then the objects'
            poses, position and quaternion; "pixels" the camera as ``rgb``; "pixels_agent_pos" also ``agent_pos`` [14].
        camera: observed camera: "top", "angle", "front_close", "left_pillar" or "right_pillar".
        max_episode_steps: steps until an episode is truncated, 50 a second.
        max_target_step_rad: largest distance of a joint's target from its position, because distant targets (random ones, say) make
            the physics diverge; recorded demonstrations stay well below. None: no limit, as in gym-aloha.

    Raises MissingExtraError; UserError: unknown task, observation or camera.
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        observation: str = "state",
        camera: str = "top",
        image_height: int = 240,
        image_width: int = 320,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        max_target_step_rad: float | None = 1.0,
        render_size: int = 256,
    ) -> None:
        require_known(task, TASKS, f"gym-aloha task '{task}' is not known.")
        require_known(observation, OBSERVATIONS, f"gym-aloha observation '{observation}' is not known.")
        scene, task_class, sampler, instruction = TASKS[task]
        self._library = _gym_aloha()
        self._task: BimanualViperXTask = vars(self._library.tasks.sim)[task_class]()
        self._sample: Callable[[int], Any] = vars(self._library.utils)[sampler]
        from dm_control.mujoco import Physics

        first = Physics.from_xml_path(str(self._library.constants.ASSETS_DIR / f"bimanual_viperx_{scene}.xml"))
        # All environments share one model: dm_control's Physics are views of it and of their own MjData.
        self._physics = [first, *(type(first).from_model(first.model) for _ in range(num_envs - 1))]
        model = first.model.ptr
        super().__init__(model, [physics.data.ptr for physics in self._physics], Drawing(model), camera, render_size)
        self._drawing.check_camera(camera)
        reach = np.inf if max_target_step_rad is None else float(max_target_step_rad)
        if not reach > 0:
            raise UserError(f"sim.kwargs.max_target_step_rad must be above 0, or null for no limit, got {reach:g}.")
        self._reach = np.tile([*[reach] * ARM_JOINTS, np.inf], 2)
        self._substeps = round(self._library.constants.DT / self.model.opt.timestep)
        parts: dict[str, TensorSpec] = {}
        if observation == "state":
            parts["state"] = TensorSpec((2 * JOINTS + self._task.get_env_state(first).size,))
        else:
            parts["rgb"] = TensorSpec((image_height, image_width, 3), "uint8")
        if observation == "pixels_agent_pos":
            parts["agent_pos"] = TensorSpec((JOINTS,))
        low, high = _action_bounds(self.model)
        self.spec = SimSpec(
            task=task,
            observation=parts,
            action=ActionSpec.continuous(low, high),
            max_episode_steps=int(max_episode_steps),
            control_hz=round(1.0 / self._library.constants.DT, 6),
            instruction=instruction,
            reports_success=True,
            can_render=True,
            snapshots="exact",
        )

    def _begin(self, i: int, seed: int) -> None:
        physics = self._physics[i]
        # gym-aloha places its objects with a 32-bit seed, which a variable of its module passes on.
        self._library.tasks.sim.BOX_POSE[0] = np.concatenate(np.atleast_2d(self._sample(seed % 2**32)))
        with physics.reset_context():
            self._task.initialize_episode(physics)

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        physics = self._physics[i]
        present = self._task.get_qpos(physics)
        # In float32, the dtype of gym-aloha's action space: it scales the grippers in the dtype that it receives.
        self._task.before_step(np.clip(action, present - self._reach, present + self._reach).astype(np.float32), physics)
        physics.step(self._substeps)
        reward = self._task.get_reward(physics)
        out.reward[i], out.success[i] = reward, reward == SUCCESS_REWARD
        out.info[i] = {"stage": int(reward)}

    def close(self) -> None:
        super().close()
        for physics in self._physics:
            physics.free()

    def _observe(self, i: int, out: StepBuffers) -> None:
        physics, parts = self._physics[i], out.observation
        if "state" in parts:
            positions, velocities = self._task.get_qpos(physics), self._task.get_qvel(physics)
            parts["state"][i] = np.concatenate([positions, velocities, self._task.get_env_state(physics)])
        if "rgb" in parts:
            self._draw(i, self._render_camera, parts["rgb"][i])
        if "agent_pos" in parts:
            parts["agent_pos"][i] = self._task.get_qpos(physics)


make = AlohaSim
"""`num_envs` environments of one task."""


def _action_bounds(model: MjModel) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of the actuators. gym-aloha's action space says [-1, 1], in which the arms cannot even keep their starting pose.

    The model has one actuator per finger, two for each gripper; the gripper's action is one number in [0, 1].
    """
    low, high = model.actuator_ctrlrange.T
    one_arm = ARM_JOINTS + 2
    bounds = [([*side[:ARM_JOINTS], end], [*side[one_arm : one_arm + ARM_JOINTS], end]) for side, end in ((low, 0.0), (high, 1.0))]
    return np.concatenate(bounds[0]), np.concatenate(bounds[1])


def _gym_aloha() -> ModuleType:
    with from_extra("gym-aloha", "aloha"):
        import gym_aloha.constants
        import gym_aloha.tasks.sim
        import gym_aloha.utils
    return gym_aloha
