"""ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425) on a CUDA device: all environments of a process in one simulation.

They advance together, in one call of the physics engine. A step's results move from the device into pinned memory in one go, and from there
into the rows. All processes of a manager use the same `device`: set ``num_workers`` and ``pipeline_groups`` to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.robots.maniskill import tasks
from embodied_rl.sim.robots.maniskill_sim import ManiSkillBase, require_task
from embodied_rl.sim.robots.maniskill_state import named_parts, no_render_materials
from embodied_rl.types import StepBuffers

__all__ = ["HostBuffers", "ManiSkillGpuSim", "make", "tasks"]

if TYPE_CHECKING:
    import torch
    from mani_skill.envs.sapien_env import BaseEnv
    from mani_skill.utils.registration import EnvSpec

    Tree: TypeAlias = torch.Tensor | np.ndarray | Mapping[str, "Tree"]

_RESERVED = ("num_envs", "sim_backend", "render_mode", "reconfiguration_freq")


def make(
    task: str,
    num_envs: int,
    device: str = "cuda",
    render: bool = False,
    render_size: int = 256,
    camera_size: int | None = None,
    **kwargs: Any,
) -> ManiSkillGpuSim:
    """`num_envs` environments of one ManiSkill task in one simulation on a GPU.

    Args:
        task: id such as "PushCube-v1".
        num_envs: environments, all in one scene graph.
        device: "cuda" or "cuda:1"; "cpu" runs the same code for a single environment, to test it without a GPU.
        render: prepare for `render`; needs Vulkan.
        camera_size: pixels a side of the cameras of an image `obs_mode`; None: the task's size.
        **kwargs: ManiSkill's own: ``obs_mode``, ``control_mode``, ``reward_mode``, ``robot_uids``, ``sim_config``, …

    Raises:
        MissingExtraError: ManiSkill is not installed.
        MissingAssetsError: the task's meshes are not on this machine; the message has the command that fetches them.
        UserError: unknown task, rejected argument, no such CUDA device, or pictures without Vulkan.
    """
    for name in _RESERVED:
        if name in kwargs:
            raise UserError(f"ManiSkill task '{task}': '{name}' is set by the simulator on the GPU and cannot be given.")
    backend = physics_backend(task, device, num_envs)  # first: without a GPU, installing and downloading would be in vain
    require_task(task)
    return ManiSkillGpuSim(task, num_envs, render, render_size, camera_size, kwargs, backend)


def physics_backend(task: str, device: str, num_envs: int) -> str:
    """ManiSkill's name of the physics engine on a device. Raises UserError if the device does not exist or does not support it."""
    kind, _, index = str(device).partition(":")
    if kind == "cpu" and not index:
        if num_envs != 1:
            raise UserError(
                f"ManiSkill task '{task}': on a CPU a simulation has one environment, and {num_envs} were requested. Use "
                "embodied_rl.sim.robots.maniskill:make, which makes one for each."
            )
        return "physx_cpu"
    if kind != "cuda" or (index and not index.isdigit()):
        raise UserError(f"ManiSkill task '{task}': device='{device}' is not a choice: 'cuda', 'cuda:<number>' or 'cpu'.")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UserError(
            f"ManiSkill task '{task}' was requested on a GPU, but torch {torch.__version__} finds no CUDA device. "
            "embodied_rl.sim.robots.maniskill:make runs it on the CPU (for example sim=maniskill_pushcube)."
        )
    if index and int(index) >= count:
        raise UserError(f"ManiSkill task '{task}': device='{device}' does not exist; there are {count}, cuda:0 to cuda:{count - 1}.")
    return f"physx_cuda:{index}" if index else "physx_cuda"


class HostBuffers:
    """Host memory, pinned if the source is a GPU, into which tensors are copied together.

    Copies into pinned memory run in parallel with each other and with the CPU; one wait covers all.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Arrays with the tensors' values, valid until the next call; shapes and dtypes must stay the same from call to call."""
        import torch

        for name, source in tensors.items():
            if (buffer := self._buffers.get(name)) is None:
                buffer = self._buffers[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            assert (buffer.shape, buffer.dtype) == (source.shape, source.dtype), f"{name}: {source.shape} after {buffer.shape}"
            buffer.copy_(source.detach(), non_blocking=source.is_cuda)
        for device in {source.device for source in tensors.values() if source.is_cuda}:
            torch.cuda.synchronize(device)  # which need not be torch's present device
        return {name: self._buffers[name].numpy() for name in tensors}


class ManiSkillGpuSim(ManiSkillBase):
    """One simulation of all environments on a GPU; see `make`.

    Seeds: ManiSkill draws the initial states of all environments that are reset together from one generator, seeded with the first one's
    seed. Here each environment draws its own, so that its initial state follows from its own seed. GPU physics is not reproducible beyond
    that, and controllers with targets (``…_target_…``) lose theirs when a neighbour is reset.

    Snapshots contain the simulation's poses and velocities, but neither the physics engine's caches nor the controllers: approximate.
    """

    snapshots, steps_together = "approximate", True

    def _build(self, registered: EnvSpec, made: dict[str, Any], num_envs: int) -> BaseEnv:
        self.num_envs = num_envs
        self._host = HostBuffers()
        self._seeds = np.arange(num_envs, dtype=np.int64)
        made |= {"num_envs": num_envs, "reconfiguration_freq": 0}
        self.env: BaseEnv = registered.make(**made)
        return self.env

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        """Reset these environments and no others. ``options={"reconfigure": True}`` needs all of them, because it rebuilds the scene."""
        reconfigure = bool((options or {}).get("reconfigure"))
        if reconfigure and len(env_ids) != self.num_envs:
            raise UserError(
                f"ManiSkill task '{self.spec.task}' has its {self.num_envs} environments in one scene: reconfigure=True must reset all of "
                f"them, got {len(env_ids)}."
            )
        for i, seed in zip(env_ids, seeds, strict=True):
            self._seeds[i] = seed
        chosen = self._torch.as_tensor(list(env_ids), dtype=self._torch.int64, device=self.env.device)
        passed = {**(options or {}), "env_idx": chosen}
        with self._torch.inference_mode(), self._own_draws(env_ids), no_render_materials(active=reconfigure and not self._render):
            observation, _ = self.env.reset(seed=self._seeds.tolist(), options=passed)
        self._elapsed[list(env_ids)] = 0
        self._write_rows(out, list(env_ids), self._host.fetch(named_parts(observation)))

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Take one control step in all environments, which `env_ids` must name."""
        rows = np.empty((self.num_envs, self.spec.action.dim), np.float32)
        rows[np.asarray(env_ids)] = actions
        with self._torch.inference_mode():
            batch = self._torch.from_numpy(rows).to(self.env.device, non_blocking=True)
            observation, reward, _, _, info = self.env.step(self._by_robot(batch))
            parts = named_parts(observation)
            scalars = {key: value for key, value in info.items() if hasattr(value, "numel") and value.numel() == self.num_envs}
            fetched = self._host.fetch({**parts, "/reward": reward, **{f"/{key}": value for key, value in scalars.items()}})
        everything = list(range(self.num_envs))
        self._write_rows(out, everything, {key: fetched[key] for key in parts})
        self._put(out, everything, fetched["/reward"], {key: fetched[f"/{key}"].reshape(-1).tolist() for key in scalars})

    def _saved(self, env_id: int) -> dict[str, Any]:
        """Poses and velocities of one environment, the task's additions to them, and the number of its steps."""
        with self._torch.inference_mode():
            state = map_tree(self.env.get_state_dict(), lambda tensor: tensor[env_id : env_id + 1].cpu().numpy())
        return {"state": state, "elapsed": int(self._elapsed[env_id]), "seed": int(self._seeds[env_id])}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        device = self.env.device
        with self._torch.inference_mode():
            chosen = self._torch.tensor([env_id], device=device)
            self.env.set_state_dict(map_tree(saved["state"], lambda array: self._torch.as_tensor(array, device=device)), chosen)
            self.env._elapsed_steps[env_id] = saved["elapsed"]
        self._elapsed[env_id], self._seeds[env_id] = saved["elapsed"], saved["seed"]

    def _env(self, env_id: int) -> BaseEnv:
        return self.env

    def close(self) -> None:
        self.env.close()

    @contextmanager
    def _own_draws(self, env_ids: Sequence[int]) -> Iterator[None]:
        """Let each environment draw its initial state from generators with its own seed during the reset in the block.

        ManiSkill's reset seeds torch with the first environment's seed, and numpy's generators of all environments, those in mid-episode
        included; these are restored.
        """
        env = self.env
        initialize = env._initialize_episode
        before = list(env._batched_episode_rng.rngs)

        def one_by_one(env_idx: torch.Tensor, options: dict[str, Any]) -> None:
            whole, first = env.scene._reset_mask, env._episode_rng
            for index in env_idx:
                i = int(index)
                env.scene._reset_mask = self._torch.zeros_like(whole)
                env.scene._reset_mask[i] = True
                env._episode_rng = env._batched_episode_rng[i]
                self._torch.manual_seed(int(self._seeds[i]))  # ManiSkill has forked torch's generators around this call
                initialize(index[None], options)
            env.scene._reset_mask, env._episode_rng = whole, first

        with mock.patch.object(env, "_initialize_episode", one_by_one):
            yield
        for i in set(range(self.num_envs)) - {int(i) for i in env_ids}:
            env._batched_episode_rng[i] = before[i]


def map_tree(tree: Tree, function: Callable[[Any], Any]) -> Tree:
    """Nested dictionaries with every leaf replaced by ``function(leaf)``."""
    return {key: map_tree(value, function) for key, value in tree.items()} if isinstance(tree, Mapping) else function(tree)
