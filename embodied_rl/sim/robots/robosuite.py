"""robosuite (Zhu et al. 2020, arXiv:2009.12293): manipulation tasks with operational-space and joint controllers.

robosuite draws from the process-wide random generators and rebuilds its model at every reset. The adapter keeps both, and isolates the
generators, so that an episode depends only on its seed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.factory import named
from embodied_rl.sim.private_random import PrivateRandom, process_state_kept
from embodied_rl.sim.rendering import has_display, mujoco_backend
from embodied_rl.sim.robots.garbage import quick_rebuild
from embodied_rl.sim.robots.mujoco_model import Drawing, DrawnSim
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

if TYPE_CHECKING:
    from mujoco import MjData, MjModel
    from robosuite.controllers.base_controller import Controller
    from robosuite.controllers.osc import OperationalSpaceController
    from robosuite.environments.base import MujocoEnv
    from robosuite.environments.manipulation.wipe import Wipe
    from robosuite.models.base import MujocoModel
    from robosuite.models.grippers.gripper_model import GripperModel
    from robosuite.utils.binding_utils import MjSim

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
"""robosuite's group of collision shapes, which its own pictures omit."""


def tasks() -> list[str]:
    """robosuite's own tasks, such as "Lift". Raises MissingExtraError if robosuite is not installed."""
    import_robosuite()
    return sorted(INSTRUCTIONS)


def make(
    task: str,
    num_envs: int,
    robots: str | Sequence[str] = "Panda",
    controller: str = "OSC_POSE",
    observation: str = "state",
    cameras: str | Sequence[str] = ("agentview",),
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
        robots: "Panda", "IIWA", "UR5e", "Jaco", "Kinova3" or "Baxter" (MuJoCo 3 rejects a mesh of "Sawyer"); two-armed tasks take two
            names, or one for both; "Baxter" has two arms.
        controller: "OSC_POSE" (6 deltas of the end effector, and the gripper), "OSC_POSITION", "JOINT_POSITION", "JOINT_VELOCITY",
            "JOINT_TORQUE" or "IK_POSE" (which needs pybullet).
        observation: "state" is the robots' and the objects' state; "rgb" the cameras and, as ``state``, only the robots' own state;
            "rgb+state" the cameras and the full state.
        cameras: observed cameras: the first is ``rgb``, the others ``rgb.<camera>``; robosuite's "agentview", "frontview",
            "birdview", "sideview", "robot0_robotview", "robot0_eye_in_hand".
        image_size: pixels a side of the observed pictures; the top row comes first.
        **kwargs: robosuite's own: ``reward_shaping``, ``reward_scale``, ``placement_initializer``, ``table_full_size``, …

    Raises MissingExtraError; UserError: unknown task, robot, controller, observation or camera.
    """
    suite, names = import_robosuite(), named(robots)
    check_name("task", task, INSTRUCTIONS)
    check_name("observation", observation, OBSERVATIONS)
    observed = observed_cameras(observation, cameras)
    check_name("controller", controller, suite.ALL_CONTROLLERS)
    for name in names:
        check_name("robot", name, suite.ALL_ROBOTS)
    if task.startswith("TwoArm") and len(names) == 1 and names != ["Baxter"]:
        names *= 2
    made = {
        "env_name": task,
        "robots": names,
        "controller_configs": suite.load_controller_config(default_controller=controller),
        "control_freq": control_hz,
        "reward_shaping": True,
        **kwargs,
    }
    return RobosuiteSim(
        lambda: suite.make(**FIXED_ARGUMENTS, **made),
        num_envs,
        task=task,
        observe_objects=observation != "rgb",
        cameras=observed,
        image_size=(image_size, image_size),
        max_episode_steps=max_episode_steps,
        render_camera=render_camera,
        render_size=render_size,
        instruction=INSTRUCTIONS[task],
    )


FIXED_ARGUMENTS: dict[str, Any] = {
    "has_renderer": False,
    "has_offscreen_renderer": False,  # `Drawing` draws pictures on request
    "use_camera_obs": False,
    "use_object_obs": True,
    "ignore_done": True,
    "hard_reset": True,
}
"""Arguments that the adapter relies on. A hard reset rebuilds the model, in which some tasks draw the sizes of their objects."""


class RobosuiteSim(DrawnSim):
    """Environments with robosuite's interface (robosuite's own tasks, LIBERO's) as a SimEnv.

    robosuite cannot save the contents of its controllers and sensors, and its state drifts when set into another environment. But a
    replayed episode is the same bit by bit, in a new process too, since the seed sets the generators. So ``spec.snapshots`` is "replay".

    Args:
        observe_objects: whether ``state`` contains the objects' state after the robots'.
        image_size: (height, width) of the observed pictures.
        multisampling: draw with the model's multisampling, as robosuite does.
    """

    def __init__(
        self,
        build: Callable[[], MujocoEnv],
        num_envs: int,
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
        super().__init__(num_envs, render_camera, render_size)
        self._random = [PrivateRandom() for _ in range(num_envs)]
        self.envs: list[MujocoEnv] = []
        for random in self._random:
            with random.active(0), MODELS.all_kept():  # building draws from the process-wide generators
                self.envs.append(build())
        self._sensed: list[Mapping[str, np.ndarray]] = [{} for _ in self.envs]
        """Last readings of robosuite's sensors; pictures are drawn separately, on observation."""
        self._drawings: list[Drawing | None] = [None] * len(self.envs)
        self._multisampling, self._objects = multisampling, observe_objects
        self._cameras = {("rgb" if k == 0 else f"rgb.{camera}"): camera for k, camera in enumerate(cameras)}
        first = self.envs[0]
        for camera in (*cameras, render_camera):
            self._drawn(0)[0].check_camera(camera)
        low, high = first.action_spec
        self.spec = SimSpec(
            task=task,
            observation={
                "state": TensorSpec(self._state(first._get_observations()).shape),
                **{key: TensorSpec((*image_size, 3), "uint8") for key in self._cameras},
            },
            action=ActionSpec.continuous(low, high),
            max_episode_steps=int(max_episode_steps),
            control_hz=float(first.control_freq),
            instruction=instruction,
            reports_success=True,
            can_render=True,
            snapshots="replay",
        )

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        with process_state_kept():
            super().advance(env_ids, np.array(actions, np.float64), out)  # a copy: controllers keep their goal

    def _begin(self, i: int, seed: int) -> None:
        with self._random[i].active(seed):
            self._sensed[i] = self._first(i, seed)
        shorten_steps(self.envs[i])

    def _advance(self, i: int, action: np.ndarray, out: StepBuffers) -> None:
        env = self.envs[i]
        with self._random[i].taken():
            self._sensed[i], out.reward[i], done, info = env.step(action)
        out.terminated[i], out.success[i] = bool(done), bool(env._check_success())
        out.info[i] = {key: value for key, value in info.items() if isinstance(value, (bool, int, float, str))}

    def close(self) -> None:
        for drawing in self._drawings:
            if drawing is not None:
                drawing.close()
        for env in self.envs:
            env.close()

    def _first(self, i: int, seed: int) -> Mapping[str, np.ndarray]:
        """Start an episode and return its first observation; the process-wide generators are seeded already."""
        return self.envs[i].reset()

    def _state(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Robots' proprioception in order, then the objects' state if observed."""
        robots = [observation[f"robot{k}_proprio-state"] for k in range(len(self.envs[0].robots))]
        return np.concatenate([*robots, observation["object-state"]] if self._objects else robots)

    def _observe(self, i: int, out: StepBuffers) -> None:
        out.observation["state"][i] = self._state(self._sensed[i])
        for key, camera in self._cameras.items():
            self._draw(i, camera, out.observation[key][i])

    def _drawn(self, i: int) -> tuple[Drawing, MjData]:
        """Drawing and data of the environment's present model, which each reset rebuilds."""
        sim, drawing = self.envs[i].sim, self._drawings[i]
        if drawing is None or drawing.model is not sim.model._model:
            if drawing is not None:
                drawing.close()
            drawing = self._drawings[i] = Drawing(sim.model._model, (COLLISION_GROUP,), self._multisampling)
        return drawing, sim.data._data


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise UserError with the nearest name if `name` is not among the known ones."""
    require_known(name, known, f"robosuite {kind} '{name}' is not known.")


def observed_cameras(observation: str, cameras: str | Sequence[str]) -> list[str]:
    """Cameras that an observation shows. Raises UserError: it consists of pictures, and there are none."""
    chosen = named(cameras) if "rgb" in observation else []
    if "rgb" in observation and not chosen:
        raise UserError(f"sim.kwargs.cameras is empty: observation={observation} needs at least one camera; observation=state needs none.")
    return chosen


def import_robosuite() -> ModuleType:
    """Import robosuite without its log file and warnings. Raises MissingExtraError if it is not installed."""
    with quiet_import(), from_extra("robosuite", "robosuite"):
        suite = importlib.import_module("robosuite")
    # Wipe prints a line in every step at a joint's limit, which its reward covers.
    vars(importlib.import_module("robosuite.robots.robot"))["print"] = lambda *args, **kwargs: None
    keep_models()
    quick_rebuild()
    return suite


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Around the import of robosuite or of a package that imports it.

    On import robosuite opens a log with a fixed name in the system's temporary folder, which fails for a machine's second user; it asks for
    a file of private settings; and it chooses EGL unless MUJOCO_GL is set, even if nothing is ever drawn.
    """

    def unwritten(*args: object, **kwargs: object) -> logging.Handler:
        return logging.NullHandler()

    chosen = os.environ.get("MUJOCO_GL")
    if mujoco_backend() is None and not has_display():
        os.environ["MUJOCO_GL"] = "glx"  # loaded when the first window opens, so never
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    try:
        with mock.patch.object(logging, "FileHandler", unwritten):
            yield
    finally:
        if chosen is None:
            os.environ.pop("MUJOCO_GL", None)
        else:
            os.environ["MUJOCO_GL"] = chosen


# ---- faster steps and resets -----------------------------------------------------------------------------------------------
# In each of the 25 physics steps of a control step robosuite looks its arm up by name, computes each Jacobian twice and all
# positions, contacts and velocities three times, and each reset recompiles the model. The numbers here are the same bit for bit
# (tests/sim/robots/test_known_indices.py).


def shorten_steps(env: MujocoEnv) -> None:
    """Give a robosuite environment, its robots and their controllers the present model. A hard reset rebuilds all of them."""
    from robosuite.controllers.base_controller import Controller
    from robosuite.controllers.osc import OperationalSpaceController
    from robosuite.environments.base import MujocoEnv
    from robosuite.environments.manipulation.wipe import Wipe
    from robosuite.utils import control_utils

    physics = Physics(env.sim)
    env.sim.forward, env.sim.step = physics.forward, physics.step
    for robot in env.robots:
        robot.__class__ = _known_class(type(robot))  # type: ignore[arg-type]
        robot._ref_joint_actuator_indexes = np.asarray(robot._ref_joint_actuator_indexes, int)
        controllers = robot.controller.values() if isinstance(robot.controller, dict) else [robot.controller]
        for controller in controllers:
            if type(controller).update is Controller.update:
                controller.update = KnownSite(controller, physics).update
            if type(controller) is OperationalSpaceController and controller.interpolator_pos is controller.interpolator_ori is None:
                controller.run_controller = functools.partial(_operational_space, controller, control_utils)
    if isinstance(env, Wipe):
        bodies = np.array([env.sim.model.body_name2id(each.root_body) for each in env.model.mujoco_arena.markers], int)
        env._get_wipe_information = functools.partial(_left_to_wipe, env, env.sim, bodies)
    if type(env).check_contact is MujocoEnv.check_contact:
        env.check_contact = Contacts(env).between
    if type(env)._update_observables is MujocoEnv._update_observables:
        env._update_observables = functools.partial(_update_observables, env)


class Physics:
    """MuJoCo's part of a physics step: ``sim.forward``, its repetition in a controller, and ``sim.step``.

    Only the first of these computes positions, contacts and velocities. The solver runs in all three, because it starts from its last
    solution, which shows in the last bits.
    """

    def __init__(self, sim: MjSim) -> None:
        import mujoco

        self._mujoco, self._model, self._data = mujoco, sim.model._model, sim.data._data
        self._qpos, self._qvel = self._data.qpos, self._data.qvel
        self._known = b""
        """Positions and velocities of the last full computation."""
        self._plain = self._model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4  # mj_step2 does not support it

    def forward(self) -> None:
        """Compute everything."""
        self._mujoco.mj_forward(self._model, self._data)
        self._known = self._state()

    def forward_again(self) -> None:
        """The same, if only controls changed since."""
        if self._state() == self._known:
            self._mujoco.mj_forwardSkip(self._model, self._data, self._mujoco.mjtStage.mjSTAGE_VEL, 0)
        else:
            self.forward()

    def step(self, with_udd: bool = True) -> None:
        mujoco, model, data = self._mujoco, self._model, self._data
        mujoco.mj_checkPos(model, data)
        mujoco.mj_checkVel(model, data)
        if self._state() == self._known and not self._plain:
            mujoco.mj_step2(model, data)
        else:
            mujoco.mj_step(model, data)
        self._known = b""

    def _state(self) -> bytes:
        return self._qpos.tobytes() + self._qvel.tobytes()


class KnownSite:
    """Controller's view of its arm: ``Controller.update`` for one model."""

    def __init__(self, controller: Controller, physics: Physics) -> None:
        import mujoco

        self._mujoco, self._controller, self._physics = mujoco, controller, physics
        self._model, self._data = controller.sim.model._model, controller.sim.data._data
        self._site = int(self._model.site(controller.eef_name).id)
        self._place, self._turn = self._data.site_xpos[self._site], self._data.site_xmat[self._site].reshape([3, 3])
        self._qpos = controller.qpos_index = np.asarray(controller.qpos_index, int)
        self._qvel = controller.qvel_index = np.asarray(controller.qvel_index, int)
        self._linear, self._angular = np.zeros((3, self._model.nv)), np.zeros((3, self._model.nv))
        self._inertia = np.empty((self._model.nv, self._model.nv))

    def update(self, force: bool = False) -> None:
        """Update position, velocity, Jacobian and inertia of the arm in the controller, after ``mj_forward``.

        Each Jacobian is computed once instead of twice. Copies are made where robosuite makes them, because an array's layout decides the
        order in which the controller's products are summed.
        """
        own = self._controller
        if not (own.new_update or force):
            return
        mujoco, model, data, velocities = self._mujoco, self._model, self._data, self._qvel
        if force:
            self._physics.forward()
        else:
            self._physics.forward_again()
        own.ee_pos, own.ee_ori_mat = self._place.copy(), self._turn.copy()
        linear, angular = self._linear, self._angular
        mujoco.mj_jacSite(model, data, linear, angular, self._site)
        qvel = data.qvel
        own.ee_pos_vel, own.ee_ori_vel = np.dot(linear, qvel), np.dot(angular, qvel)
        own.joint_pos, own.joint_vel = data.qpos[self._qpos], qvel[velocities]
        own.J_pos, own.J_ori = np.array(linear[:, velocities]), np.array(angular[:, velocities])
        own.J_full = np.array(np.concatenate([own.J_pos, own.J_ori]))
        mujoco.mj_fullM(model, self._inertia, data.qM)
        own.mass_matrix = self._inertia[velocities, :][:, velocities]
        own.new_update = False


def _operational_space(own: OperationalSpaceController, sums: ModuleType) -> np.ndarray:
    """Torques towards the goal (Khatib 1987): the sums of ``OperationalSpaceController.run_controller`` without its copies."""
    own.update()
    kp, kd = own.kp, own.kd
    force = (own.goal_pos - own.ee_pos) * kp[:3] - own.ee_pos_vel * kd[:3]
    torque = sums.orientation_error(own.goal_ori, own.ee_ori_mat) * kp[3:6] - own.ee_ori_vel * kd[3:6]
    full, places, turns, nullspace = sums.opspace_matrices(own.mass_matrix, own.J_full, own.J_pos, own.J_ori)
    if own.uncoupling:
        wrench = np.concatenate([np.dot(places, force), np.dot(turns, torque)])
    else:
        wrench = np.dot(full, np.concatenate([force, torque]))
    own.torques = np.dot(own.J_full.T, wrench) + own.torque_compensation
    own.torques += sums.nullspace_torques(own.mass_matrix, nullspace, own.initial_joint, own.joint_pos, own.joint_vel)
    own.new_update = True
    return own.torques


class _KnownRobot:
    """Mixin for a class of ``robosuite.robots``: caches what a robot recomputes in each physics step for an unchanged model."""

    @functools.cached_property
    def action_dim(self) -> int:
        return int(super().action_dim)  # type: ignore[misc]

    @functools.cached_property
    def torque_limits(self) -> tuple[np.ndarray, np.ndarray]:
        return super().torque_limits  # type: ignore[misc]

    @functools.cached_property
    def _grips(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, Callable[[np.ndarray], np.ndarray]]]:
        """{id of a gripper: (its actuators, middle of their ranges, half their width, converter of an action)}"""
        return {}

    def grip_action(self, gripper: GripperModel, gripper_action: np.ndarray) -> None:
        """Send a gripper's action [-1, 1] to its actuators, each in its own range."""
        sim = self.sim  # type: ignore[attr-defined]
        if id(gripper) not in self._grips:
            from robosuite.models.grippers.panda_gripper import PandaGripper

            actuators = np.array([sim.model.actuator_name2id(name) for name in gripper.actuators], dtype=int)
            lowest, highest = sim.model._model.actuator_ctrlrange[actuators].T
            is_pandas = type(gripper).format_action is PandaGripper.format_action
            own = functools.partial(_open_or_close, gripper) if is_pandas else gripper.format_action
            self._grips[id(gripper)] = actuators, 0.5 * (highest + lowest), 0.5 * (highest - lowest), own
        actuators, middle, half, action_of = self._grips[id(gripper)]
        sim.data._data.ctrl[actuators] = middle + half * action_of(gripper_action)


def _open_or_close(gripper: GripperModel, action: np.ndarray) -> np.ndarray:
    """`PandaGripper.format_action` in plain numbers."""
    if len(gripper.current_action) != 2 or len(action) != 1:  # the first time: one number for both fingers
        return gripper.format_action(action)
    change, (left, right) = float(np.sign(action[0])) * gripper.speed, gripper.current_action.tolist()
    gripper.current_action = np.array([min(max(left - change, -1.0), 1.0), min(max(right + change, -1.0), 1.0)])
    return gripper.current_action


@functools.cache
def _known_class(robot: type) -> type:
    """Subclass of a robot's class with `_KnownRobot`, or the class itself if it is one."""
    return robot if issubclass(robot, _KnownRobot) else type(robot.__name__, (_KnownRobot, robot), {})


class Contacts:
    """Tells whether shapes touch, for all contacts at once; robosuite makes an object of each and compares names."""

    def __init__(self, env: MujocoEnv) -> None:
        self._env, self._sim = env, env.sim
        self._masks: dict[tuple[str, ...], np.ndarray] = {}
        """{names of shapes: mask over the model's shapes}"""

    def between(self, geoms_1: str | Sequence[str] | MujocoModel, geoms_2: str | Sequence[str] | MujocoModel | None = None) -> bool:
        """Whether a shape of the first touches a shape of the second, or any other (None)."""
        if self._env.sim is not self._sim:  # during a reset
            self._sim, self._masks = self._env.sim, {}
        pairs = self._sim.data._data.contact.geom
        if not len(pairs):
            return False
        first = self._mask(geoms_1)[pairs]
        return bool(first.any() if geoms_2 is None else (first & self._mask(geoms_2)[pairs[:, ::-1]]).any())

    def _mask(self, geoms: str | Sequence[str] | MujocoModel) -> np.ndarray:
        named = (geoms,) if isinstance(geoms, str) else tuple(geoms if isinstance(geoms, Sequence) else geoms.contact_geoms)
        if named not in self._masks:
            model = self._sim.model
            self._masks[named] = np.array([model.geom_id2name(index) in named for index in range(model.ngeom)])
        return self._masks[named]


def _update_observables(env: MujocoEnv, force: bool = False) -> None:
    """Advance all observables in time; those that are due, once per control step, are read."""
    passed = env.model_timestep
    for each in env._observables.values():
        since = each._time_since_last_sample + passed
        due = not each._sampled and each._sampling_timestep - each._current_delay >= since
        if each._enabled and not (force or due or since >= each._sampling_timestep):
            each._time_since_last_sample = since
        else:
            each.update(timestep=passed, obs_cache=env._obs_cache, force=force)


def _left_to_wipe(env: Wipe, sim: MjSim, bodies: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """(largest distance of the remaining marks from their centre, the centre, the vector to it from the hand)."""
    if env.sim is not sim:  # during a reset
        return type(env)._get_wipe_information(env)
    wiped = {id(marker) for marker in env.wiped_markers}
    left = np.array([id(marker) not in wiped for marker in env.model.mujoco_arena.markers], bool)
    if len(wiped) >= env.num_markers or not left.any():
        return 0, np.zeros(3), np.zeros(3)
    places = sim.data._data.xpos[bodies[left]]
    middle = np.add.reduce(places, axis=0, initial=0.0) / len(places)
    return np.max(np.linalg.norm(places - middle, axis=1)), middle, middle - env._eef_xpos


class CompiledModels:
    """Compiled models by their XML. A model that comes a second time in a row is kept, and then copied in an eighth of the time; a task
    that draws object sizes writes another XML each time. What an environment is built with is kept at once: the environments beside it are
    built with the same, and most tasks begin their first episode with it."""

    def __init__(self) -> None:
        self._last, self._kept = "", ("", None)
        self._keeps_all = False

    def of(self, xml: str) -> MjModel:
        """A separate model for each caller."""
        import mujoco

        known, kept = self._kept
        if kept is not None and known == xml:
            return copy.copy(kept)
        model = mujoco.MjModel.from_xml_string(xml)
        if xml == self._last or self._keeps_all:
            self._kept = xml, copy.copy(model)
        self._last = xml
        return model

    @contextlib.contextmanager
    def all_kept(self) -> Iterator[None]:
        """Keep each model that is compiled inside."""
        self._keeps_all = True
        try:
            yield
        finally:
            self._keeps_all = False


MODELS = CompiledModels()
"""Of all robosuite environments of this process."""


@functools.cache
def keep_models() -> None:
    """Let all robosuite environments of this process share compiled models."""
    from robosuite.environments import base

    class KeptSim(base.MjSim):  # type: ignore[misc, name-defined, unused-ignore]
        @classmethod
        def from_xml_string(cls, xml: str) -> KeptSim:
            return cls(MODELS.of(xml))

    vars(base)["MjSim"] = KeptSim
