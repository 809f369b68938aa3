"""ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425) on the CPU: manipulation tasks on SAPIEN's physics.

The CPU backend has one environment per scene, so a process steps `num_envs` separate ones. State tasks run on a machine without any Vulkan;
pictures need a Vulkan device and ``render: true``. The device may be Mesa's lavapipe (software).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from embodied_rl.files import RememberedAnswers
from embodied_rl.sim.robots.maniskill_sim import (
    UNDECLARED_NEEDS,
    ManiSkillSim,
    missing_assets,
    registered_tasks,
    require_task,
    require_vulkan,
)

# ---- which tasks run as a batch on this machine -----------------------------------------------------------------------


BATCH_FROM = 16
"""Environments in a simulator from which they are stepped as a batch by default."""
WRITTEN_FOR = {"mani-skill": "3.0.", "sapien": "3.0."}
"""Supported versions, since the batch depends on internals; others are not tried."""
_FOLDER = "maniskill_batch"
_CHECK = 5
"""Version of the batch and its check; raise it when they change, so that remembered verdicts are checked again."""


@dataclass(frozen=True)
class Verdict:
    """Whether a task's batch gives the same numbers as separate environments."""

    task: str
    reason: str
    """Description of the difference; empty if there is none."""
    versions: dict[str, str]
    """{package: version} with which the verdict was found."""

    @property
    def equal(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        found = "a batch is equal to environments by themselves" if self.equal else f"stepped one by one: {self.reason}"
        return f"{self.task}: {found} ({packages})"


def batches(task: str, num_envs: int, asked: bool | None, arguments: Mapping[str, Any]) -> bool:
    """Whether to step the environments as a batch; prints one line with the reason if a batch was wanted but is impossible.

    Args:
        asked: the user's choice; None: from `BATCH_FROM` environments on.
        arguments: arguments of `ManiSkillSim`, from ``kwargs``.

    Raises UserError: the task cannot be made with these arguments, batch or not.
    """
    if asked is False or (asked is None and num_envs < BATCH_FROM):
        return False
    reason = "a batch of one is no batch" if num_envs == 1 else verdict(task, arguments, num_envs).reason
    if reason:
        warnings.warn(f"ManiSkill task '{task}' is stepped one environment at a time: {reason}.", stacklevel=3)
    return not reason


def verdict(task: str, arguments: Mapping[str, Any], num_envs: int = BATCH_FROM) -> Verdict:
    """Remembered verdict, or a new one, which takes a second or two. Raises UserError if the task cannot be made at all."""
    versions = {name: version(name) for name in WRITTEN_FOR}
    for name, known in WRITTEN_FOR.items():
        if not versions[name].startswith(known):
            return Verdict(task, f"batches are written for {name} {known}x, and this is {versions[name]}", versions)
    import torch

    # The last bits of torch's sums depend on its version and on the processor's vectors.
    asked = [_CHECK, sorted(versions.items()), torch.__version__, torch.backends.cpu.get_cpu_capability()]
    answers, question = RememberedAnswers(_FOLDER), [task, [*asked, sorted({**arguments, "num_envs": num_envs}.items())]]
    remembered = _read(answers.read(task, question))
    if remembered is not None and remembered.task == task:
        return remembered
    from embodied_rl.sim.robots.maniskill_batch.sim import difference

    found = Verdict(task, difference(task, arguments, num_envs) or "", versions)
    answers.write(task, question, asdict(found))
    return found


def remembered() -> list[Verdict]:
    """Remembered verdicts for the installed versions, by task; a task with several sets of arguments appears several times."""
    versions = {name: version(name) for name in WRITTEN_FOR}
    found = [_read(answer) for answer in RememberedAnswers(_FOLDER)]
    return [verdict for verdict in found if verdict is not None and verdict.versions == versions]


def _read(answer: object) -> Verdict | None:
    """Verdict in a file of `RememberedAnswers`; None if the file holds something else."""
    with suppress(TypeError):
        if isinstance(answer, dict) and isinstance((found := Verdict(**answer)).reason, str):
            return found
    return None


# ---- tasks by name ----------------------------------------------------------------------------------------------------


def tasks() -> list[str]:
    """Ids of the tasks that run with this machine's assets. Raises MissingExtraError if ManiSkill is not installed."""
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
        render: prepare for `render`; needs Vulkan, and costs seconds of start-up and memory.
        camera_size: pixels a side of the cameras of an image `obs_mode`; None: the task's size. ``sensor_configs`` of one
            camera, by its name, override it.
        batched: step all environments through ManiSkill's batched code (`maniskill_batch`), with equal numbers in a quarter of the
            time; None: if there are 16 or more. A task that fails a check, made once and remembered, is stepped one environment
            at a time, and a line reports that.
        **kwargs: ManiSkill's own: ``obs_mode`` ("state", "rgb", "rgb+segmentation+state", …; see `maniskill_state`),
            ``control_mode``, ``reward_mode``, ``robot_uids``, ``sensor_configs``, …

    Raises MissingExtraError, MissingAssetsError; UserError: unknown task, rejected argument, or pictures without Vulkan.
    """
    if render:
        require_vulkan(task)  # before ManiSkill is imported, which takes seconds
    require_task(task)
    made: dict[str, Any] = {"render": render, "render_size": render_size, "camera_size": camera_size, "kwargs": kwargs}
    if batches(task, num_envs, batched, {"camera_size": camera_size, "kwargs": kwargs}):
        from embodied_rl.sim.robots.maniskill_batch.sim import ManiSkillBatchSim

        return ManiSkillBatchSim(task, num_envs, **made)
    return ManiSkillSim(task, num_envs, **made)


def batch_verdict(task: str, kwargs: Mapping[str, Any]) -> Verdict:
    """Whether a task can be stepped as a batch with these arguments of `make`; checked now if not remembered."""
    registered_tasks()
    ours = ("render", "render_size", "camera_size", "batched")
    return verdict(task, {"camera_size": kwargs.get("camera_size"), "kwargs": {k: v for k, v in kwargs.items() if k not in ours}})
