"""ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425) on the CPU: manipulation tasks on SAPIEN's physics.

The CPU backend holds one environment per scene, so a process steps `num_envs` separate ones. From state it runs on a
machine without any Vulkan; pictures need a Vulkan device and ``render: true``, which may be Mesa's lavapipe (software).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied_rl.errors import MissingAssetsError, UserError, did_you_mean
from embodied_rl.sim.robots.maniskill_assets import UNDECLARED_NEEDS, assets_message, missing_assets, registered_tasks
from embodied_rl.sim.robots.maniskill_sim import ManiSkillSim
from embodied_rl.sim.robots.maniskill_verdicts import Verdict, batches, verdict

__all__ = ["ManiSkillSim", "make", "tasks"]


def tasks() -> list[str]:
    """Ids of the tasks that run with what is on this machine. Raises MissingExtraError where ManiSkill is not installed."""
    registered = registered_tasks()
    return sorted(task for task in registered if not any(name in task for name in UNDECLARED_NEEDS) and not missing_assets(task))


def make(
    task: str,
    num_envs: int,
    render: bool = False,
    render_size: int = 256,
    camera_size: int | None = None,
    batched: bool | None = None,
    **kwargs: Any,
) -> ManiSkillSim:
    """`num_envs` environments of one ManiSkill task in this process.

    Args:
        task: id such as "PushCube-v1".
        num_envs: environments, each with its own scene.
        render: prepare for `render`; needs Vulkan, and costs seconds of start-up and memory.
        render_size: pixels a side of `render`'s picture.
        camera_size: pixels a side of the cameras of an image `obs_mode`; None: what the task says. ``sensor_configs`` of one
            camera, by its name, goes before it.
        batched: step all environments through ManiSkill's batched code (`maniskill_batch`), with equal numbers in a quarter of the
            time; None: where there are 16 or more. A task that does not come out equal in a check, made once and remembered, is
            stepped one environment at a time, and a line says so.
        **kwargs: ManiSkill's own: ``obs_mode`` ("state", "rgb", "rgb+segmentation+state", …; see `maniskill_observation`),
            ``control_mode``, ``reward_mode``, ``robot_uids``, ``sensor_configs``, …

    Raises:
        MissingExtraError: ManiSkill is not installed.
        MissingAssetsError: the task's meshes are not on this machine; the message holds the command that fetches them.
        UserError: unknown task, rejected argument, or no Vulkan where pictures are asked for.
    """
    registered = registered_tasks()
    if task not in registered:
        raise UserError(f"ManiSkill task '{task}' is not known.{did_you_mean(task, registered)}")
    missing = missing_assets(task)
    if missing:
        raise MissingAssetsError(assets_message(task, missing))
    made: dict[str, Any] = {"render": render, "render_size": render_size, "camera_size": camera_size, "kwargs": kwargs}
    if batches(task, num_envs, batched, {"camera_size": camera_size, "kwargs": kwargs}):
        from embodied_rl.sim.robots.maniskill_batch.sim import ManiSkillBatchSim

        return ManiSkillBatchSim(task, num_envs, **made)
    return ManiSkillSim(task, num_envs, **made)


def batch_verdict(task: str, kwargs: Mapping[str, Any]) -> Verdict:
    """Whether a task can be stepped as a batch, with these arguments of `make`; found out now where it is not remembered."""
    registered_tasks()
    ours = ("render", "render_size", "camera_size", "batched")
    return verdict(task, {"camera_size": kwargs.get("camera_size"), "kwargs": {k: v for k, v in kwargs.items() if k not in ours}})
