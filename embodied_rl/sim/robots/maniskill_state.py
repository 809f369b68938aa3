"""Save and restore one ManiSkill environment on the CPU.

PhysX keeps caches (contacts, islands, the broad phase) that can be neither read nor set, and that change the last bits of later steps. So
both the restored and the saved environment rebuild their scene and set the same state. From then on they are equal bit by bit; an
environment that was never saved differs from them by about 1e-6, in contact by up to some 1e-2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.sim.robots.maniskill_patches import no_render_materials
from embodied_rl.sim.robots.saved_state import Leaf, Node, Packer, Unpacker, Unsavable
from embodied_rl.sim.snapshots import SnapshotError

if TYPE_CHECKING:
    import torch
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.agents.controllers.base_controller import BaseController
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.envs.scene import ManiSkillScene
    from sapien import Entity, Pose
    from sapien.physx import PhysxArticulation, PhysxRigidDynamicComponent

    Tensors: TypeAlias = torch.Tensor | Mapping[str, Any]
    "What ManiSkill calls an observation: the state, or nested dictionaries by the mode's own names."


# ---- observations -----------------------------------------------------------------------------------------------------


TEXTURES = ("rgb", "depth", "segmentation", "position", "normal", "albedo")
"""Textures that a camera can produce, joined by "+" in an observation mode."""

MODES = ("state", "state_dict", "rgbd", "pointcloud", *TEXTURES)
"""Observation modes; textures, "state" and "state_dict" also combine: "rgb+segmentation+state"."""


def check_mode(task: str, obs_mode: str) -> bool:
    """Whether an observation mode needs pictures. Raises UserError for a mode that cannot be adapted."""
    if obs_mode in ("state", "state_dict", "rgbd", "pointcloud"):
        return obs_mode in ("rgbd", "pointcloud")
    for word in str(obs_mode).split("+"):
        if word not in (*TEXTURES, "state", "state_dict"):
            raise UserError(
                f"ManiSkill task '{task}': obs_mode='{obs_mode}' is not a choice.{did_you_mean(word, MODES)} "
                "The textures of cameras and the state combine with '+', as in rgb+segmentation+state."
            )
    return any(word in TEXTURES for word in str(obs_mode).split("+"))


def cameras(observation: Tensors) -> tuple[str, ...]:
    """Names of the cameras, in the order of the parts; parts of the first camera have plain names."""
    return tuple(observation.get("sensor_data", {})) if isinstance(observation, Mapping) else ()


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
def observing(env: BaseEnv, observed: bool) -> Iterator[None]:
    """Unless `observed`, let ``env.step`` or ``env.reset`` in the block make no observation, except one that the task's reward reads. Do
    not use the returned observation then.

    `env` is ManiSkill's own (`BaseEnv`), with one scene or many.
    """
    if observed:
        yield
        return
    make = env.get_obs
    env.get_obs = lambda info=None, unflattened=False: _WhenRead(lambda: make(info, unflattened))
    env._flatten_raw_obs = lambda observation: None
    try:
        yield
    finally:
        del env.get_obs, env._flatten_raw_obs


class _WhenRead(Mapping[str, Any]):
    """An observation that is made once a part of it is read."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        return self._make()

    def __getitem__(self, key: str) -> Any:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def dtype_name(tensor: torch.Tensor) -> str:
    """numpy's name of a tensor's dtype: "float32" for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


def numbered_objects(env: BaseEnv) -> dict[int, str]:
    """{number in segmentation pictures: name of the object or robot link}."""
    return {int(number): str(thing.name) for number, thing in env.unwrapped.segmentation_id_map.items()}


# ---- pictures from a camera of the user's choice ----------------------------------------------------------------------


def film_cameras(env: BaseEnv) -> list[str]:
    """Names of the cameras for people, then of the sensor cameras."""
    scene = env.unwrapped.scene
    return list(dict.fromkeys([*scene.human_render_cameras, *scene.sensors]))


def film_from(env: BaseEnv, camera: str) -> np.ndarray:
    """One picture [H, W, 3] uint8 of the first scene; `camera` is one of `film_cameras`."""
    base = env.unwrapped
    if camera in base.scene.human_render_cameras:
        return base.render_rgb_array(camera).cpu().numpy()[0]
    # Objects that ManiSkill hides from sensors (a goal's marker, say) stay hidden: the picture shows what the sensor sees.
    for hidden in base._hidden_objects:
        hidden.hide_visual()
    base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
    sensor = base.scene.sensors[camera]
    sensor.capture()
    observed = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)
    return observed["rgb"].cpu().numpy()[0]


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
            with observing(self._env, False):  # the worker has the observation
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
    actors: dict[str, tuple[Entity, PhysxRigidDynamicComponent | None]]
    """{name: (entity, its body, None unless dynamic)}."""


def bodies_of(scene: ManiSkillScene, i: int = 0) -> Bodies:
    """Bodies in the `i`-th of a scene's separate scenes."""
    articulations, actors = {}, {}
    for name, articulation in scene.articulations.items():
        for k in (place for place, number in enumerate(articulation._scene_idxs.tolist()) if number == i):
            articulations[name] = articulation._objs[k]
    for name, actor in scene.actors.items():
        for k in (place for place, number in enumerate(actor._scene_idxs.tolist()) if number == i):
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


def _pose(pose: Pose) -> np.ndarray:
    return np.concatenate([pose.p, pose.q])


def _to_pose(row: np.ndarray) -> Pose:
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
        key = ("storage", storage.data_ptr())
        memory: int | np.ndarray
        if storage.nbytes() and key in self._seen:
            memory = self._seen[key]
        else:
            self._seen[key if storage.nbytes() else ("empty", id(tensor))] = len(self._seen)
            memory = np.frombuffer(ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b"", np.uint8)
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
