"""robosuite (Zhu et al. 2020, arXiv:2009.12293): manipulation tasks with operational-space and joint controllers.

robosuite draws from the process-wide random generators and builds its model anew at every reset; both are kept so that an
episode depends only on its seed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.private_random import PrivateRandom, process_state_kept
from embodied_rl.sim.rendering import has_display, mujoco_backend
from embodied_rl.sim.robots.garbage import quick_rebuild
from embodied_rl.sim.robots.mujoco_model import Drawing
from embodied_rl.sim.robots.robosuite_steps import keep_models, shorten_steps
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

if TYPE_CHECKING:
    from robosuite.environments.base import MujocoEnv

OBSERVATIONS = ("state", "rgb", "rgb+state")

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "Door": "open the door",
    "NutAssembly": "put the nuts on their pegs",
    "NutAssemblySingle": "put the nut on its peg",
    "NutAssemblySquare": "put the square nut on the square peg",
    "NutAssemblyRound": "put the round nut on the round peg",
    "PickPlace": "put every object into its bin",
    "PickPlaceSingle": "put the object into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal box into its bin",
    "PickPlaceCan": "put the can into its bin",
    "Wipe": "wipe the table clean",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg into the hole with both arms",
    "TwoArmHandover": "hand the hammer over to the other arm",
}

COLLISION_GROUP = 0
"""robosuite's group of collision shapes, which its own pictures leave out."""


def tasks() -> list[str]:
    """robosuite's own tasks, such as "Lift". Raises MissingExtraError where robosuite is not installed."""
    import_robosuite()
    return sorted(INSTRUCTIONS)


def make(
    task: str,
    num_envs: int,
    robots: str | Sequence[str] = "Panda",
    controller: str = "OSC_POSE",
    observation: str = "state",
    cameras: Sequence[str] = ("agentview",),
    image_size: int = 84,
    control_hz: float = 20.0,
    max_episode_steps: int = 500,
    render_camera: str = "frontview",
    render_size: int = 256,
    **kwargs: Any,
) -> RobosuiteSim:
    """`num_envs` environments of one robosuite task, dense reward (``reward_shaping=False``: sparse).

    Args:
        task: name such as "Lift" or "NutAssemblySquare".
        robots: "Panda", "Sawyer", "IIWA", "UR5e", "Jaco", "Kinova3" or "Baxter"; two-armed tasks take two names, or one for both.
        controller: "OSC_POSE" (6 deltas of the end effector, and the gripper), "OSC_POSITION", "IK_POSE", "JOINT_POSITION",
            "JOINT_VELOCITY" or "JOINT_TORQUE".
        observation: "state" is the robots' and the objects' state; "rgb" the cameras and, as ``state``, only the robots' own state;
            "rgb+state" the cameras and the full state.
        cameras: observed cameras: the first is ``rgb``, the others ``rgb.<camera>``; robosuite's "agentview", "frontview",
            "birdview", "sideview", "robot0_robotview", "robot0_eye_in_hand".
        image_size: pixels a side of the observed pictures; the top row comes first.
        **kwargs: robosuite's own: ``reward_shaping``, ``reward_scale``, ``placement_initializer``, ``table_full_size``, …

    Raises MissingExtraError; UserError: unknown task, robot, controller, observation or camera, or an argument that robosuite rejects.
    """
    suite = import_robosuite()
    names = _checked(suite, task, observation, robots, controller)
    made = {
        "env_name": task,
        "robots": names,
        "controller_configs": suite.load_controller_config(default_controller=controller),
        "control_freq": control_hz,
        "reward_shaping": True,
        **kwargs,
    }
    build = _builder(suite, task, made)
    with_cameras = tuple(cameras) if observation != "state" else ()
    return RobosuiteSim(
        [build for _ in range(num_envs)],
        task=task,
        observe_objects=observation != "rgb",
        cameras=with_cameras,
        image_size=(image_size, image_size),
        max_episode_steps=max_episode_steps,
        render_camera=render_camera,
        render_size=render_size,
        instruction=INSTRUCTIONS[task],
    )


def _checked(suite: ModuleType, task: str, observation: str, robots: str | Sequence[str], controller: str) -> list[str]:
    """The robots' names, one for each arm of the task; raises UserError for a name that is not known."""
    check_name("task", task, INSTRUCTIONS)
    check_name("observation", observation, OBSERVATIONS)
    check_name("controller", controller, suite.ALL_CONTROLLERS)
    names = [robots] if isinstance(robots, str) else list(robots)
    for name in names:
        check_name("robot", name, suite.ALL_ROBOTS)
    return names * 2 if task.startswith("TwoArm") and len(names) == 1 and names != ["Baxter"] else names


def _builder(suite: ModuleType, task: str, arguments: Mapping[str, Any]) -> Callable[[], MujocoEnv]:
    def build() -> MujocoEnv:
        try:
            return suite.make(**FIXED_ARGUMENTS, **arguments)
        except (TypeError, AssertionError, ValueError, KeyError) as error:
            shown = {key: value for key, value in arguments.items() if key not in ("env_name", "controller_configs")}
            raise UserError(f"robosuite task '{task}' cannot be made with {shown}: {type(error).__name__}: {error}") from error

    return build


FIXED_ARGUMENTS: dict[str, Any] = {
    "has_renderer": False,
    "has_offscreen_renderer": False,  # `Drawing` draws pictures on request
    "use_camera_obs": False,
    "use_object_obs": True,
    "ignore_done": True,
    "hard_reset": True,
}
"""What the adapter relies on. A hard reset builds the model anew: some tasks draw the sizes of their objects there."""


class RobosuiteSim(SimEnv):
    """Environments of robosuite's interface (robosuite's own tasks, LIBERO's) as a SimEnv.

    robosuite has no way to save what its controllers and sensors hold, and its state set into another environment drifts
    away; with the process-wide generators set by the seed, an episode that is played again is the same bit by bit, in a new
    process as well. So ``spec.snapshots`` is "replay".

    Args:
        build: one function for each environment, which makes it.
        observe_objects: whether ``state`` holds the objects' state after the robots'.
        image_size: (height, width) of the observed pictures.
        multisampling: draw with the model's multisampling, as robosuite itself does.
    """

    def __init__(
        self,
        build: Sequence[Callable[[], MujocoEnv]],
        task: str,
        observe_objects: bool,
        cameras: Sequence[str],
        image_size: tuple[int, int],
        max_episode_steps: int,
        render_camera: str,
        render_size: int,
        instruction: str | None,
        multisampling: bool = False,
    ) -> None:
        self._random = [PrivateRandom() for _ in build]
        self.envs: list[MujocoEnv] = []
        for random, function in zip(self._random, build, strict=True):
            with random.active(0):  # building draws from the process-wide generators
                self.envs.append(function())
        self._shorten_steps = shorten_steps
        self._elapsed = [0] * len(self.envs)
        self._sensed: list[Mapping[str, np.ndarray]] = [{} for _ in self.envs]
        """The last readings of robosuite's sensors; pictures are drawn separately, when they are observed."""
        self._drawings: list[Drawing | None] = [None] * len(self.envs)
        self._multisampling, self._render_size = multisampling, render_size
        self._objects, self._limit = observe_objects, int(max_episode_steps)
        self._cameras = {("rgb" if k == 0 else f"rgb.{camera}"): camera for k, camera in enumerate(cameras)}
        self._render_camera = render_camera
        first = self.envs[0]
        for camera in (*cameras, render_camera):
            self._drawing(0).check_camera(camera)
        low, high = first.action_spec
        self.spec = SimSpec(
            task=task,
            observation={
                "state": TensorSpec(self._state(first._get_observations()).shape),
                **{key: TensorSpec((*image_size, 3), "uint8") for key in self._cameras},
            },
            action=ActionSpec.continuous(low, high),
            max_episode_steps=self._limit,
            control_hz=float(first.control_freq),
            instruction=instruction,
            reports_success=True,
            can_render=True,
            snapshots="replay",
        )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        for i, seed in zip(env_ids, seeds, strict=True):
            with self._random[i].active(int(seed)):
                self._sensed[i] = self._begin(i, int(seed))
            self._shorten_steps(self.envs[i])
            self._elapsed[i] = 0
            self._write(i, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        with process_state_kept():
            for i, action in zip(env_ids, np.array(actions, np.float64), strict=True):  # a copy: controllers keep their goal
                env = self.envs[i]
                with self._random[i].taken():
                    self._sensed[i], out.reward[i], done, info = env.step(action)
                self._elapsed[i] += 1
                out.terminated[i] = bool(done)
                out.truncated[i] = self._elapsed[i] >= self._limit
                out.success[i] = bool(env._check_success())
                out.info[i] = {key: value for key, value in info.items() if isinstance(value, (bool, int, float, str))}

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        for i in env_ids:
            self._write(i, out)

    def render(self, env_id: int) -> np.ndarray:
        return self._picture(env_id, self._render_camera, self._render_size, self._render_size)

    def film_cameras(self, env_id: int) -> list[str]:
        return self._drawing(env_id).cameras()

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        self._drawing(env_id).check_camera(camera)
        return self._picture(env_id, camera, self._render_size, self._render_size)

    def close(self) -> None:
        for drawing in self._drawings:
            if drawing is not None:
                drawing.close()
        for env in self.envs:
            env.close()

    def _begin(self, i: int, seed: int) -> Mapping[str, np.ndarray]:
        """Start an episode and return its first observation; the process-wide generators are seeded already."""
        return self.envs[i].reset()

    def _state(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Robots' proprioception in order, then the objects' state where it is observed."""
        robots = [observation[f"robot{k}_proprio-state"] for k in range(len(self.envs[0].robots))]
        return np.concatenate([*robots, observation["object-state"]] if self._objects else robots)

    def _write(self, i: int, out: StepBuffers) -> None:
        out.observation["state"][i] = self._state(self._sensed[i])
        for key, camera in self._cameras.items():
            frame = out.observation[key][i]
            self._picture(i, camera, frame.shape[0], frame.shape[1], out=frame)

    def _picture(self, i: int, camera: str, height: int, width: int, out: np.ndarray | None = None) -> np.ndarray:
        return self._drawing(i).frame(self.envs[i].sim.data._data, camera, height, width, out=out)

    def _drawing(self, i: int) -> Drawing:
        """The drawing of the environment's present model: a reset builds a new one."""
        model, drawing = self.envs[i].sim.model._model, self._drawings[i]
        if drawing is None or drawing.model is not model:
            if drawing is not None:
                drawing.close()
            drawing = self._drawings[i] = Drawing(model, hidden_groups=(COLLISION_GROUP,), multisampling=self._multisampling)
        return drawing


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raises UserError with the nearest name where `name` is not among the known ones."""
    require_known(name, known, f"robosuite {kind} '{name}' is not known.")


def import_robosuite() -> ModuleType:
    """The package, without its log file and warnings. Raises MissingExtraError where it is not installed."""
    with quiet_import(), from_extra("robosuite", "robosuite"):
        suite = importlib.import_module("robosuite")
    # Wipe prints a line in every step at a joint's limit, which is a part of its reward and no news.
    vars(importlib.import_module("robosuite.robots.robot"))["print"] = lambda *args, **kwargs: None
    keep_models()
    quick_rebuild()
    return suite


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Around the import of robosuite or of what imports it.

    It opens a log in the system's folder for temporary files under a fixed name, which fails for the second user of a machine,
    asks for a file of private settings, and chooses EGL unless MUJOCO_GL says otherwise, even where nothing is ever drawn.
    """
    original, logger = logging.FileHandler, logging.getLogger("robosuite_logs")
    chosen = os.environ.get("MUJOCO_GL")
    if mujoco_backend() is None and not has_display():
        os.environ["MUJOCO_GL"] = "glx"  # loaded when the first window opens, which is never
    logging.FileHandler = lambda *args, **kwargs: logging.NullHandler()  # type: ignore[misc, assignment]
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.FileHandler = original  # type: ignore[misc]
        if chosen is None:
            os.environ.pop("MUJOCO_GL", None)
        else:
            os.environ["MUJOCO_GL"] = chosen
