"""ManiSkill's registry and assets, and `num_envs` separate environments in one process; `maniskill.make` makes them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from embodied_rl.errors import MissingAssetsError, UserError, did_you_mean, from_extra, require_known
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import named
from embodied_rl.sim.robots.garbage import quick_rebuild
from embodied_rl.sim.robots.maniskill_batch import UnsupportedTask
from embodied_rl.sim.robots.maniskill_state import (
    EpisodeState,
    check_mode,
    contacts_of_their_own,
    fast_tensors,
    named_parts,
    no_asset_prompt,
    no_render_materials,
    quick_first_picture,
    quick_torch,
    unobserved,
)
from embodied_rl.sim.robots.spaces import action_spec, action_splits
from embodied_rl.specs import SnapshotKind
from embodied_rl.types import SimSpec, StepBuffers, TensorSpec

if TYPE_CHECKING:
    import torch
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.utils.registration import EnvSpec

    from embodied_rl.sim.robots.maniskill_state import Tensors

# ---- ManiSkill's registry, and which of its tasks have their meshes and data sets on this machine ---------------------


UNDECLARED_NEEDS = ("SceneManipulation", "OpenCabinetDoor", "DrawSVG", "PushT", "WidowXAI")
"""Tasks that need more than ManiSkill's registry declares (scene data sets, svgpathtools, a renderer, a robot); `tasks` omits them."""

_SELDOM_USED = {"cv2": "opencv-python", "h5py": "h5py", "IPython": "ipython", "IPython.display": "ipython"}
"""{module of ManiSkill's digital twins, recordings and notebooks: its package}."""


def registered_tasks() -> Mapping[str, Any]:
    """ManiSkill's registry, id → specification. Raises MissingExtraError if it is not installed. The first call takes seconds."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # some of its modules import GitPython, which requires a git command
    with from_extra("ManiSkill", "maniskill"), _placeholders(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Failed to find system libvulkan": true and harmless; we report it when it matters
        import mani_skill.envs
        from mani_skill.utils.logging_utils import logger
        from mani_skill.utils.registration import REGISTERED_ENVS
    assert mani_skill.envs
    logger.setLevel("ERROR")  # its tasks warn about their own scenes, one line per object
    return REGISTERED_ENVS


@contextmanager
def _placeholders() -> Iterator[None]:
    """Replace modules that ManiSkill imports with all its tasks, but few tasks use, by placeholders if they are not installed."""
    absent = [name for name in _SELDOM_USED if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: _Placeholder(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


class _Placeholder(ModuleType):
    """Replaces a module that is not installed; calling anything in it raises an error that says so."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise UserError(
                f"ManiSkill uses {self.__name__}.{name} here, which is not installed. Install it: pip install {_SELDOM_USED[self.__name__]}"
            )

        return missing


def missing_assets(task: str) -> list[str]:
    """Data sources of the task and its default robot that are not on this machine, sorted."""
    from mani_skill.agents.registration import REGISTERED_AGENTS
    from mani_skill.utils import assets

    registered = registered_tasks()[task]
    wanted = list(registered.asset_download_ids or [])
    robots = inspect.signature(registered.cls.__init__).parameters.get("robot_uids")
    default = robots.default if robots is not None else ()
    for robot in (default,) if isinstance(default, str) else default or ():
        wanted += REGISTERED_AGENTS[robot].asset_download_ids if robot in REGISTERED_AGENTS else []
    sources: set[str] = set()
    for name in wanted:
        sources |= set(assets.expand_data_group_into_individual_data_source_ids(name)) if name in assets.DATA_GROUPS else {name}
    return sorted(name for name in sources if not assets.is_data_source_downloaded(name))


def require_task(task: str) -> None:
    """Raise UserError with the nearest id if ManiSkill has no such task, MissingExtraError if it is not installed, and MissingAssetsError
    with the command that fetches what `missing_assets` names."""
    require_known(task, registered_tasks(), f"ManiSkill task '{task}' is not known.")
    if missing := missing_assets(task):
        raise MissingAssetsError(assets_message(task, missing))


def assets_message(task: str, missing: Sequence[str]) -> str:
    """The error message for `missing_assets`, with the command that fetches them."""
    named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (
        f"ManiSkill task '{task}' needs assets that are not on this machine: {named}. "
        f"Get them: python -m mani_skill.utils.download_asset {task}"
    )


def check_arguments(task: str, made: Mapping[str, Any]) -> None:
    """Raise UserError for a ``reward_mode`` that the task lacks, or ``robot_uids`` (one name or several) that ManiSkill lacks."""
    cls, mode = registered_tasks()[task].cls, str(made["reward_mode"])
    require_known(made["reward_mode"], cls.SUPPORTED_REWARD_MODES, f"ManiSkill task '{task}' has no reward_mode '{mode}'.")
    if (robots := made.get("robot_uids")) is None:
        return
    from mani_skill.agents.registration import REGISTERED_AGENTS

    for name in named(robots) if isinstance(robots, Iterable) else [robots]:
        if name not in REGISTERED_AGENTS:
            supported = cls.SUPPORTED_ROBOTS or REGISTERED_AGENTS
            choices = {robot for entry in supported for robot in ((entry,) if isinstance(entry, str) else entry)}
            raise UserError(f"ManiSkill has no robot '{name}' (robot_uids) for task '{task}'.{did_you_mean(str(name), choices)}")


# ---- the simulator ----------------------------------------------------------------------------------------------------


REWARD_MODES = ("normalized_dense", "dense", "sparse", "none")
"""Reward modes in the order of preference."""

INSTRUCTIONS = {
    "PushCube-v1": "push the cube to the target",
    "PullCube-v1": "pull the cube to the target",
    "PickCube-v1": "pick up the cube and move it to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "LiftPegUpright-v1": "lift the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the box",
    "PokeCube-v1": "poke the cube with the peg",
    "RollBall-v1": "roll the ball to the goal",
    "PlaceSphere-v1": "place the sphere into the bin",
    "PullCubeTool-v1": "pull the cube closer with the tool",
}


class ManiSkillBase(SimEnv):
    """A ManiSkill task with any number of scenes: construction, spec, pictures. ``terminated`` is ManiSkill's "fail"; success is reported
    and does not end the episode. A subclass makes the environments (`_build`)."""

    snapshots: SnapshotKind
    steps_together = False

    def __init__(
        self,
        task: str,
        num_envs: int,
        render: bool,
        render_size: int,
        camera_size: int | None,
        kwargs: Mapping[str, Any],
        backend: str = "physx_cpu",
    ) -> None:
        registered = registered_tasks()[task]
        made: dict[str, Any] = {"obs_mode": "state", **kwargs}
        made.setdefault("reward_mode", next(mode for mode in REWARD_MODES if mode in registered.cls.SUPPORTED_REWARD_MODES))
        observes_pictures = check_mode(task, made["obs_mode"])
        check_arguments(task, made)
        self._render = observes_pictures or render
        if self._render:
            require_vulkan(task)
            quick_first_picture()
            made |= {"render_mode": "rgb_array", "human_render_camera_configs": {"width": render_size, "height": render_size}}
            if not observes_pictures and not self.steps_together:  # only `film_from` uses the task's own cameras
                made.setdefault("sensor_configs", {"width": render_size, "height": render_size})
            if camera_size is not None:
                made["sensor_configs"] = {"width": camera_size, "height": camera_size, **made.get("sensor_configs", {})}
            made.setdefault("render_backend", backend.replace("physx_", ""))
        else:
            made["render_backend"] = "none"
        made["sim_backend"] = backend
        import torch

        self._torch = torch
        contacts_of_their_own()
        # Inference mode from the first tensor on: nothing here is differentiated, and each small operation gets cheaper.
        with torch.inference_mode(), no_asset_prompt(task), no_render_materials(active=not self._render), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the precision of ManiSkill's spaces
            try:
                first = self._build(registered, made, num_envs)
            except (UserError, UnsupportedTask):
                raise
            except FileNotFoundError as error:
                raise MissingAssetsError(assets_message(task, [str(error.filename)])) from error
            except Exception as error:  # a wrong argument surfaces as any of a dozen types
                hint = "" if self._render or "render" not in str(error) else " Give it a renderer: +sim.kwargs.render=true."
                raise UserError(f"ManiSkill task '{task}' cannot be made with {made}: {type(error).__name__}: {error}.{hint}") from error
            observation, info = first.reset(seed=0 if first.num_envs == 1 else list(range(first.num_envs)))
        self.cameras = tuple(observation.get("sensor_data", {})) if isinstance(observation, Mapping) else ()
        """Names of the cameras of an image mode. Parts of the first camera have plain names: "rgb"; others "rgb.<second camera>"."""
        self._robots = action_splits(first.single_action_space)
        self._limit: int | None = registered.max_episode_steps
        self._elapsed = np.zeros(num_envs, np.int64)
        parts = {
            key: TensorSpec(tuple(part.shape[1:]), str(part.dtype).removeprefix("torch.")) for key, part in named_parts(observation).items()
        }
        self.spec = SimSpec(
            task=task,
            observation=parts,
            action=action_spec(first.single_action_space),
            max_episode_steps=self._limit,
            control_hz=float(first.control_freq),
            instruction=INSTRUCTIONS.get(task),
            reports_success="success" in info,
            can_render=self._render,
            snapshots=self.snapshots,
            steps_together=self.steps_together,
        )

    def _build(self, registered: EnvSpec, made: dict[str, Any], num_envs: int) -> BaseEnv:
        """Make the environments of a registered task; returns one, after a reset, as an example."""
        raise NotImplementedError

    def _env(self, env_id: int) -> BaseEnv:
        """ManiSkill's environment with environment `env_id`: the only one in it, or one of all if they step together."""
        raise NotImplementedError

    def render(self, env_id: int) -> np.ndarray:
        """Picture of the task's human camera, [H, W, 3] uint8. Raises UserError if the simulator was made without ``render=True``."""
        if not self._render:
            raise UserError(
                f"ManiSkill task '{self.spec.task}' was made without rendering: pass render=True (configuration: +sim.kwargs.render=true)."
            )
        with self._torch.inference_mode():
            return self._env(env_id).render()[env_id if self.steps_together else 0].cpu().numpy()

    def objects(self, env_id: int = 0) -> dict[int, str]:
        """{number in segmentation pictures: name of the object or robot link}; 0 is the unnamed background."""
        return {int(number): str(thing.name) for number, thing in self._env(env_id).unwrapped.segmentation_id_map.items()}

    def _by_robot(self, rows: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Actions [n, A] in the task's form: with several robots a dictionary by their names."""
        return {robot: rows[:, columns] for robot, columns in self._robots.items()} if self._robots else rows

    def _write_rows(self, out: StepBuffers, rows: Sequence[int], parts: Mapping[str, np.ndarray]) -> None:
        """Write these environments' rows of parts [n, …] of all."""
        for key, array in parts.items():
            if len(rows) == len(array):
                out.observation[key][: len(array)] = array
            else:
                out.observation[key][rows] = array[rows]

    def _put(self, out: StepBuffers, rows: list[int], reward: np.ndarray, columns: Mapping[str, list[Any]]) -> None:
        """Write the results of a step of `rows`, and count it. `reward`: of all; `columns`: {key: values by environment} of the info."""
        out.reward[rows] = reward.reshape(-1)[rows]
        for flag, key in ((out.terminated, "fail"), (out.success, "success")):
            flag[rows] = np.asarray(columns[key], bool)[rows] if key in columns else False
        self._elapsed[rows] += 1
        out.truncated[rows] = self._limit is not None and self._elapsed[rows] >= self._limit
        for i in rows:
            out.info[i] = {key: column[i] for key, column in columns.items()}


class ManiSkillSim(ManiSkillBase):
    """ManiSkill environments that are stepped one by one; see `maniskill.make`.

    Seeds: an episode is a function of its seed in a fresh environment. ManiSkill keeps traces of earlier episodes in the physics engine's
    caches; ``options={"reconfigure": True}`` rebuilds the scene and makes the episode exact (some 20 ms, more with cameras).
    """

    snapshots = "exact"

    def _build(self, registered: EnvSpec, made: dict[str, Any], num_envs: int) -> BaseEnv:
        fast_tensors()
        quick_torch()
        quick_rebuild()
        self._infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        made["num_envs"] = 1
        return self._build_each(registered, made, num_envs)

    def _build_each(self, registered: EnvSpec, made: dict[str, Any], num_envs: int) -> BaseEnv:
        """Make the environments, and the objects that save and restore each one's episode."""
        self.envs: list[BaseEnv] = [registered.make(**made) for _ in range(num_envs)]
        self._states = [EpisodeState(env, self._render) for env in self.envs]
        return self.envs[0]

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        builds = bool((options or {}).get("reconfigure")) or self.envs[0].reconfiguration_freq != 0
        with self._torch.inference_mode(), no_render_materials(active=builds and not self._render):
            for i, seed in zip(env_ids, seeds, strict=True):
                observation, _ = self.envs[i].reset(seed=int(seed), options=dict(options or {}))
                self._elapsed[i] = 0
                self._write(out, i, observation)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        with self._torch.inference_mode():
            for i in env_ids:
                self._write(out, i, self.envs[i].get_obs(self._infos[i]))

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        limit = self._limit
        with self._torch.inference_mode():
            rows = self._torch.tensor(actions)  # a copy: rows may be shared memory, and controllers keep their last action
            for row, i in enumerate(env_ids):
                action = self._by_robot(rows[row : row + 1])
                with unobserved(self.envs[i]):
                    _, reward, _, _, info = self.envs[i].step(action)
                self._elapsed[i] += 1
                self._infos[i] = info
                out.reward[i] = reward.item()
                out.terminated[i] = "fail" in info and bool(info["fail"])
                out.truncated[i] = limit is not None and self._elapsed[i] >= limit
                out.success[i] = "success" in info and bool(info["success"])
                out.info[i] = {key: value.item() for key, value in info.items() if hasattr(value, "item") and value.numel() == 1}

    def _env(self, env_id: int) -> BaseEnv:
        return self.envs[env_id]

    def film_cameras(self, env_id: int) -> list[str]:
        """See `SimEnv`: ManiSkill's cameras for people, then the sensor cameras."""
        scene = self.envs[env_id].unwrapped.scene
        return list(dict.fromkeys([*scene.human_render_cameras, *scene.sensors])) if self._render else []

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        base = self.envs[env_id].unwrapped
        with self._torch.inference_mode():
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

    def snapshot(self, env_id: int) -> bytes:
        """See `SimEnv`. The live environment rebuilds its scene too, so that both continue alike (`maniskill_state`)."""
        data = super().snapshot(env_id)
        self.restore(env_id, data)
        return data

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"elapsed": int(self._elapsed[env_id]), "episode": self._states[env_id].capture()}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        self._states[env_id].restore(saved["episode"])
        self._elapsed[env_id] = saved["elapsed"]

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """See `SimEnv`: ManiSkill's own ``env_states``, "actors/<name>" [13] and "articulations/<name>" [13 + 2 · joints]. Left
        out are the targets that some controllers keep, which ManiSkill itself does not set again."""
        groups = self.envs[env_id].scene.get_sim_state()
        return {f"{group}/{name}": np.array(row[0]) for group, rows in groups.items() for name, row in rows.items()}

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """See `SimEnv`. What follows differs from the uninterrupted episode by about 1e-6, in contact by more: see `snapshot`."""
        groups: dict[str, dict[str, Any]] = {}
        for name, row in state.items():
            group, _, body = name.partition("/")
            groups.setdefault(group, {})[body] = self._torch.tensor(np.asarray(row, np.float32)[None])
        with self._torch.inference_mode():
            self.envs[env_id].set_state_dict(groups)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _write(self, out: StepBuffers, i: int, observation: Tensors) -> None:
        for key, part in named_parts(observation).items():
            out.observation[key][i] = part[0].numpy()


def require_vulkan(task: str) -> None:
    """Raise UserError if pictures cannot be drawn."""
    from embodied_rl.sim.rendering import vulkan_available

    if not vulkan_available():
        raise UserError(
            f"ManiSkill task '{task}' needs pictures, and this machine has no Vulkan device. `python -m embodied_rl.doctor` names the "
            "package of a software device (lavapipe); obs_mode=state needs none."
        )
