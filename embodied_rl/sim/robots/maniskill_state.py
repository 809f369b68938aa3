"""ManiSkill 3.0.1's environments as we need them: patches, observations by our names, and saved episodes.

With the patches ManiSkill runs headless and fast on a CPU; each keeps every number of a fresh process bit for bit.

PhysX keeps caches (contacts, islands, the broad phase) that can be neither read nor set, and that change the last bits of later steps. So
both the restored and the saved environment rebuild their scene and set the same state. From then on they are equal bit by bit; an
environment that was never saved differs from them by about 1e-6, in contact by up to some 1e-2.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import numpy as np

from embodied_rl.errors import MissingAssetsError, UserError, did_you_mean
from embodied_rl.sim.robots.saved_state import Leaf, Node, Packer, Unpacker, Unsavable
from embodied_rl.sim.robots.spaces import WhenRead
from embodied_rl.sim.snapshots import SnapshotError

if TYPE_CHECKING:
    import sapien
    import torch
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.agents.controllers.base_controller import BaseController
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.envs.scene import ManiSkillScene
    from mani_skill.utils.building._mjcf_loader import MJCFLoader
    from mani_skill.utils.structs import Actor, Articulation, ArticulationJoint, Link, Pose
    from mani_skill.utils.structs.base import BaseStruct
    from mani_skill.utils.structs.render_camera import RenderCamera
    from sapien.physx import PhysxArticulation, PhysxRigidDynamicComponent

    Tensors: TypeAlias = torch.Tensor | Mapping[str, Any]
    "What ManiSkill calls an observation: the state, or nested dictionaries by the mode's own names."

# ---- patches ----------------------------------------------------------------------------------------------------------


class _NullMaterial:
    """Replaces `sapien.render.RenderMaterial`, whose constructor fails without a rendering device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> None:
        return None

    def __getattribute__(self, name: str) -> Any:
        # Tasks call set_base_color(…) and the like on materials.
        return (lambda *args, **kwargs: None) if name.startswith("set_") else object.__getattribute__(self, name)


@contextmanager
def no_render_materials(active: bool) -> Iterator[None]:
    """While a scene without pictures is built, give tasks materials that need no rendering device.

    Even ``render_backend="none"`` makes materials, and their constructor requires a Vulkan device.
    """
    if not active:
        yield
        return
    import sapien.pysapien.render as original

    users = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("sapien", "mani_skill")]
    with ExitStack() as stack:
        for module in [original, *users]:
            if vars(module).get("RenderMaterial") is not None:
                stack.enter_context(mock.patch.object(module, "RenderMaterial", _NullMaterial))
        yield


@contextmanager
def no_asset_prompt(task: str) -> Iterator[None]:
    """Turn ManiSkill's question whether to download assets, which waits for the keyboard, into an error with the command."""
    from mani_skill.utils import download_asset

    def refuse(message: str) -> bool:
        owner = [*message.split(), task, task][1]  # "Environment PickSingleYCB-v1 requires …", "Robot widowxai has …"
        raise MissingAssetsError(
            f"ManiSkill task '{task}' needs assets of '{owner}' that are not on this machine. "
            f"Get them: python -m mani_skill.utils.download_asset {owner}"
        )

    try:
        with mock.patch.object(download_asset, "prompt_yes_no", refuse):
            yield
    except SystemExit as error:  # raised if there is nothing to download
        raise MissingAssetsError(f"ManiSkill task '{task}' needs a robot whose files are not on this machine.") from error


@cache
def contacts_of_their_own() -> None:
    """Make every robot and scene from an MJCF file follow this file's contact flags.

    ManiSkill writes a file's flags into its own defaults: after MS-CartpoleBalance-v1, whose file disables contacts, the parts of every
    humanoid and hopper pass through each other for the rest of the process.
    """
    from mani_skill.utils.building import _mjcf_loader as loader

    parse = loader.MJCFLoader._parse_mjcf

    def parse_alone(self: MJCFLoader, mjcf_string: str) -> object:
        loader.DEFAULT_MJCF_OPTIONS = {"contact": True}
        return parse(self, mjcf_string)

    loader.MJCFLoader._parse_mjcf = parse_alone


def without_environment_light(camera: sapien.render.RenderCameraComponent) -> None:
    """Give the camera of a scene without an environment map a reflectance table with one entry instead of SAPIEN's.

    SAPIEN computes its table of 512 x 512 entries before a process draws its first picture: 3 to 7 s of a core without a GPU. Shaders
    multiply an entry by the light of the environment map, which is 0 without a map, so pictures stay equal bit for bit.
    """
    import sapien

    camera.set_texture("BRDFLUT", sapien.render.RenderTexture(np.zeros((1, 1, 2), np.float32), 2, "R32G32Sfloat"))


@cache
def quick_first_picture() -> None:
    """Apply `without_environment_light` to the cameras of all scenes made from now on that are drawn on the CPU."""
    from mani_skill.utils.structs.render_camera import RenderCamera

    slow_create = RenderCamera.create.__func__

    def create(
        cls: type[RenderCamera],
        render_cameras: list[sapien.render.RenderCameraComponent],
        scene: ManiSkillScene,
        mount: Actor | Link | None = None,
    ) -> RenderCamera:
        if not scene.gpu_sim_enabled and all(one.render_system.cubemap is None for one in scene.sub_scenes):
            for camera in render_cameras:
                without_environment_light(camera)
        return slow_create(cls, render_cameras, scene, mount)

    RenderCamera.create = classmethod(create)


@cache
def fast_tensors() -> None:
    """Replace two hot spots that build small tensors number by number, for one scene on the CPU; other cases stay unchanged.

    A Panda step reads about eleven poses and sets eleven joint targets; together that is a fifth of the step.
    """
    import torch
    from mani_skill.utils.structs import articulation, pose

    slow_create = pose.Pose.create.__func__
    slow_targets = articulation.Articulation.set_joint_drive_targets
    single_pose = pose.sapien.Pose

    def create(cls: type[Pose], value: object, device: torch.device | None = None) -> Pose:
        if type(value) is list and len(value) == 1 and type(value[0]) is single_pose and (device is None or device.type == "cpu"):
            row = np.empty((1, 7), np.float32)
            row[0, :3], row[0, 3:] = value[0].p, value[0].q
            return cls(raw_pose=torch.from_numpy(row))
        return slow_create(cls, value, device)

    def set_joint_drive_targets(
        self: Articulation,
        targets: object,
        joints: list[ArticulationJoint] | None = None,
        joint_indices: torch.Tensor | None = None,
    ) -> None:
        # A batch has several robots here, and controllers that see it as a CPU's scene (`maniskill_batch.structs`).
        is_single = len(self._objs) == 1 and not self.scene.gpu_sim_enabled
        if not is_single or joints is None or not isinstance(targets, torch.Tensor) or targets.dtype != torch.float32:
            return slow_targets(self, targets, joints, joint_indices)
        row = targets[0].numpy()
        for i, joint in enumerate(joints):
            assert joint.active_index is not None
            joint._objs[0].drive_target = row[i : i + 1]
        return None

    pose.Pose.create = classmethod(create)
    articulation.Articulation.set_joint_drive_targets = set_joint_drive_targets


def quick_torch() -> None:
    """Give ManiSkill's tasks a torch that seeds and names the device as fast as a machine without CUDA allows.

    `torch.manual_seed` takes 120 µs to seed absent devices too, and ``with torch.device("cpu")`` sends every operation in it through Python
    without effect: a third of StackCube's reset.
    """
    import torch

    if torch.cuda.is_available():
        return
    named, quick = torch.device, ModuleType("torch")
    vars(quick).update(vars(torch))

    def manual_seed(seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(int(seed))

    def device(name: str | torch.device) -> torch.device | AbstractContextManager[None]:
        found = named(name)
        return nullcontext() if found.type == "cpu" else found  # tasks use it only after `with`

    vars(quick).update(manual_seed=manual_seed, device=device)
    concerned = ("mani_skill.envs.sapien_env", "mani_skill.envs.tasks.", "mani_skill.utils.scene_builder.")
    for name, module in list(sys.modules.items()):
        if name.startswith(concerned) and vars(module).get("torch") is torch:
            vars(module)["torch"] = quick


# ---- observations -----------------------------------------------------------------------------------------------------


TEXTURES = ("rgb", "depth", "segmentation", "position", "normal", "albedo")
"""Textures that a camera can produce, joined by "+" in an observation mode."""

MODES = ("state", "state_dict", "rgbd", "pointcloud", *TEXTURES)
"""Observation modes; textures, "state" and "state_dict" also combine: "rgb+segmentation+state"."""


def check_mode(task: str, obs_mode: str) -> bool:
    """Whether an observation mode needs pictures. Raises UserError for a mode that cannot be adapted."""
    modes = str(obs_mode).split("+")
    for mode in modes:
        if mode not in MODES or (len(modes) > 1 and mode in ("rgbd", "pointcloud")):
            raise UserError(
                f"ManiSkill task '{task}': obs_mode='{obs_mode}' is not a choice.{did_you_mean(mode, MODES)} "
                "The textures of cameras and the state combine with '+', as in rgb+segmentation+state."
            )
    return not {*modes} <= {"state", "state_dict"}


def named_parts(observation: Tensors) -> dict[str, torch.Tensor]:
    """Tensors [n, ...] by the names of our parts.

    ``state`` is flat: the task's whole view of the simulation if the mode has "state", else the robot's own joints and what the task adds
    to them. The first camera has ``rgb`` [H, W, 3] uint8, ``depth`` [H, W, 1] int16 in millimetres, ``segmentation`` [H, W, 1] int16 with
    the number of the object (0: background) and ``position`` [H, W, 3] int16 in millimetres; every further camera has ``rgb.<camera>`` and
    so on. A point cloud is ``pointcloud`` [P, 4] float32 (metres, and 1 where there is a surface), with ``pointcloud.rgb`` and
    ``pointcloud.segmentation``.
    """
    if not isinstance(observation, Mapping):
        return {"state": observation}
    parts: dict[str, torch.Tensor] = {}
    if "state" in observation:
        parts["state"] = observation["state"]
    else:
        from mani_skill.utils import common

        shown = {key: observation[key] for key in ("agent", "extra") if key in observation}
        parts["state"] = common.flatten_state_dict(shown, use_torch=True)
    for index, (camera, textures) in enumerate(observation.get("sensor_data", {}).items()):
        for texture, picture in textures.items():
            parts[f"{texture}.{camera}" if index else texture] = picture
    for key, points in observation.get("pointcloud", {}).items():
        parts["pointcloud" if key == "xyzw" else f"pointcloud.{key}"] = points
    return parts


@contextmanager
def unobserved(env: BaseEnv) -> Iterator[None]:
    """Let ``env.step`` or ``env.reset`` in the block make no observation, except one that the task's reward reads. Do not use the
    returned one.

    `env` is ManiSkill's own (`BaseEnv`), with one scene or many.
    """
    make = env.get_obs
    env.get_obs = lambda info=None, unflattened=False: WhenRead(cache(partial(make, info, unflattened)))
    env._flatten_raw_obs = lambda observation: None
    try:
        yield
    finally:
        del env.get_obs, env._flatten_raw_obs


# ---- saved episodes ---------------------------------------------------------------------------------------------------


LEFT = frozenset({"_last_obs", "_init_raw_obs", "_init_raw_state", "segmentation_id_map"})
"""Attributes that are not saved: only a reset to a given state reads them, or only their shapes matter, or building the scene sets them."""


class EpisodeState:
    """Captures and restores the episode of one environment; make it before the environment's first reset.

    Args:
        env: a ManiSkill environment of one scene (`physx_cpu`).
        renders: whether it was made with a rendering device.
    """

    def __init__(self, env: BaseEnv, renders: bool) -> None:
        self._env, self._renders = env, renders
        # A scene's contents (the size of a peg, say) follow from the seed of its construction, which a plain reset does not change.
        self.scene_seed = int(env._episode_seed[0])
        build = env._reconfigure

        def build_and_remember(options: dict[str, Any]) -> None:
            self.scene_seed = int(env._episode_seed[0])
            build(options)

        env._reconfigure = build_and_remember

    def capture(self) -> dict[str, Any]:
        """State as a tree for `encode_state`; call `restore` afterwards, also in this environment."""
        attributes = {name: vars(owner) for name, owner in owners_of(self._env)}
        return self.pack(self.scene_seed, int(self._env._episode_seed[0]), physics_of(bodies_of(self._env.scene)), attributes)

    @staticmethod
    def pack(scene_seed: int, episode_seed: int, physics: dict[str, Any], attributes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Argument of `restore`, from the attributes of each owner (`owners_of`) and the state of the bodies (`physics_of`)."""
        packer = _TorchPacker()
        packed = {name: packer.attributes(SimpleNamespace(**values)) for name, values in attributes.items()}
        return {"scene_seed": scene_seed, "episode_seed": episode_seed, "physics": physics, "attributes": packed}

    def restore(self, state: dict[str, Any]) -> None:
        """Rebuild the scene and set the captured state; takes some 20 ms, more with cameras.

        Raises SnapshotError: the state is of another task or robot.
        """
        import torch

        with torch.inference_mode(), no_render_materials(active=not self._renders):
            with unobserved(self._env):  # the worker has the observation
                self._env.reset(seed=state["scene_seed"], options={"reconfigure": True})
                if self._env.reconfiguration_freq == 0 and state["episode_seed"] != state["scene_seed"]:
                    self._env.reset(seed=state["episode_seed"])  # for random draws of the episode that are not part of the saved state
            owners = dict(owners_of(self._env))
            if owners.keys() != state["attributes"].keys():
                raise SnapshotError(
                    f"Snapshot was taken from a robot with {', '.join(state['attributes'])}; this one has {', '.join(owners)}. "
                    "Restore it into a simulator made with the same arguments."
                )
            _set_physics(bodies_of(self._env.scene), state["physics"])
            unpacker = _TorchUnpacker()
            for name, attributes in state["attributes"].items():
                unpacker.attributes(owners[name], attributes)


def owners_of(env: BaseEnv) -> Iterator[tuple[str, BaseEnv | BaseAgent | BaseController]]:
    """The Python objects with an episode's state: the environment, its robots and their controllers."""
    yield "env", env
    if env.agent is not None:
        agents = {"agent": env.agent, **{f"agent {name}": agent for name, agent in vars(env.agent).get("agents_dict", {}).items()}}
        for name, agent in agents.items():
            yield name, agent
            for mode, controller in vars(agent).get("controllers", {}).items():
                yield f"{name} {mode}", controller
                for part, inner in vars(controller).get("controllers", {}).items():
                    yield f"{name} {mode} {part}", inner


@dataclass(frozen=True)
class Bodies:
    """SAPIEN's objects in one scene, by the names of ManiSkill's actors and articulations, in the order of their construction."""

    articulations: dict[str, PhysxArticulation]
    actors: dict[str, tuple[sapien.Entity, PhysxRigidDynamicComponent | None]]
    """{name: (entity, its body, None unless dynamic)}."""


def places_of(struct: BaseStruct, i: int) -> list[int]:
    """Which of a struct's objects are in the `i`-th of a scene's separate scenes."""
    return [place for place, scene in enumerate(struct._scene_idxs.tolist()) if scene == i]


def bodies_of(scene: ManiSkillScene, i: int = 0) -> Bodies:
    """Bodies in the `i`-th of a scene's separate scenes."""
    articulations, actors = {}, {}
    for name, articulation in scene.articulations.items():
        for k in places_of(articulation, i):
            articulations[name] = articulation._objs[k]
    for name, actor in scene.actors.items():
        for k in places_of(actor, i):
            actors[name] = (actor._objs[k], actor._bodies[k] if actor.px_body_type == "dynamic" else None)
    return Bodies(articulations, actors)


def physics_of(bodies: Bodies) -> dict[str, Any]:
    """State of every body of a scene, whether ManiSkill's own state includes it or not."""
    articulations, actors = {}, {}
    for name, body in bodies.articulations.items():
        articulations[name] = {
            "root": _pose(body.root_pose),
            "root_velocity": np.concatenate([body.root_linear_velocity, body.root_angular_velocity]),
            "qpos": np.array(body.qpos),
            "qvel": np.array(body.qvel),
            "qf": np.array(body.qf),
            "targets": [(np.array(joint.drive_target), np.array(joint.drive_velocity_target)) for joint in body.active_joints],
        }
    for name, (entity, body) in bodies.actors.items():
        state = {"pose": _pose(entity.pose)}
        if body is not None:
            state["velocity"] = np.concatenate([body.linear_velocity, body.angular_velocity])
        actors[name] = state
    return {"articulations": articulations, "actors": actors}


def _set_physics(bodies: Bodies, state: dict[str, Any]) -> None:
    for kind, present in (("articulations", bodies.articulations), ("actors", bodies.actors)):
        if state[kind].keys() != present.keys():
            raise SnapshotError(f"Snapshot was taken from a scene with the {kind} {sorted(state[kind])}; this one has {sorted(present)}.")
    for name, saved in state["articulations"].items():
        body = bodies.articulations[name]
        body.root_pose = _to_pose(saved["root"])
        body.root_linear_velocity, body.root_angular_velocity = np.split(saved["root_velocity"], 2)
        body.qpos, body.qvel, body.qf = saved["qpos"], saved["qvel"], saved["qf"]
        for joint, (position, velocity) in zip(body.active_joints, saved["targets"], strict=True):
            joint.drive_target, joint.drive_velocity_target = position, velocity
    for name, saved in state["actors"].items():
        entity, body = bodies.actors[name]
        entity.pose = _to_pose(saved["pose"])
        if body is not None and "velocity" in saved:
            body.linear_velocity, body.angular_velocity = np.split(saved["velocity"], 2)


def _pose(pose: sapien.Pose) -> np.ndarray:
    return np.concatenate([pose.p, pose.q])


def _to_pose(row: np.ndarray) -> sapien.Pose:
    import sapien

    return sapien.Pose(row[:3], row[3:])


class _TorchPacker(Packer):
    """A `Packer` that also handles tensors, ManiSkill's poses and its lists of random generators."""

    def _attribute(self, name: str, value: object) -> Node | Leaf:
        if name in LEFT:
            raise Unsavable
        return super()._attribute(name, value)

    def _special(self, value: object) -> Node | None:
        import torch
        from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
        from mani_skill.utils.structs import pose

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, pose.Pose):
            return ("pose", self.node(value.raw_pose))
        if isinstance(value, BatchedRNG):
            return ("generators", [self.node(generator) for generator in value.rngs])
        return None

    def _tensor(self, tensor: torch.Tensor) -> Node:
        """As for arrays: the storage, once, and the tensor's position in it."""
        if tensor.device.type != "cpu" or tensor.layout.__repr__() != "torch.strided":
            raise Unsavable
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        key = ("storage", place) if size else ("empty", id(tensor))
        memory = self._memory(key, lambda: ctypes.string_at(place, size) if size else b"")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ("tensor", dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), memory)


class _TorchUnpacker(Unpacker):
    packer = _TorchPacker

    def _special(self, node: Node) -> Any:
        if node[0] == "tensor":
            return self._tensor(*node[1:])
        if node[0] == "pose":
            from mani_skill.utils.structs import pose

            return pose.Pose(raw_pose=self.node(node[1]))
        if node[0] == "generators":
            from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

            return BatchedRNG(rngs=[self.node(item) for item in node[1]])
        return super()._special(node)

    def _tensor(self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, memory: int | np.ndarray) -> torch.Tensor:
        import torch

        if isinstance(memory, np.ndarray):
            storage: torch.Tensor = torch.empty(memory.size, dtype=torch.uint8)
            storage.numpy()[:] = memory
            self._seen.append(storage)
        else:
            storage = self._seen[memory]
        kind = vars(torch).get(dtype)
        if not isinstance(kind, torch.dtype):
            raise SnapshotError(f"Snapshot holds a tensor of dtype '{dtype}' that this torch does not have.")
        return storage.view(kind).as_strided(shape, stride, offset)
