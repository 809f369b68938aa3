"""Which tasks run as a batch on this machine: asked once for a task, its arguments, the batch's size and the packages' versions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from embodied_rl.files import RememberedAnswers

BATCH_FROM = 16
"""Environments in a simulator from which they are stepped as a batch without being asked to."""
WRITTEN_FOR = {"mani-skill": "3.0.", "sapien": "3.0."}
"""Versions whose inside we know; others are not tried."""
_FOLDER = "maniskill_batch"
_CHECK = 1
"""To be raised when the batch or its check changes, so that what is remembered is asked again."""


@dataclass(frozen=True)
class Verdict:
    """Whether a task's batch gives the numbers of environments by themselves."""

    task: str
    equal: bool
    reason: str
    """Of a difference; empty where there is none."""
    versions: dict[str, str]
    """Of the packages that it was found with."""

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        found = "a batch is equal to environments by themselves" if self.equal else f"stepped one by one: {self.reason}"
        return f"{self.task}: {found} ({packages})"


def batches(task: str, num_envs: int, asked: bool | None, arguments: Mapping[str, Any]) -> bool:
    """Whether environments are to be stepped as a batch; says in one line why not, where they were to be.

    Args:
        asked: True and False are the user's; None: from `BATCH_FROM` on.
        arguments: of `ManiSkillSim`, from ``kwargs``.

    Raises:
        UserError: the task cannot be made with these arguments, batch or not.
    """
    if asked is False or (asked is None and num_envs < BATCH_FROM):
        return False
    if num_envs == 1:
        _say(task, "a batch of one is no batch")
        return False
    found = verdict(task, arguments, num_envs)
    if not found.equal:
        _say(task, found.reason)
    return found.equal


def verdict(task: str, arguments: Mapping[str, Any], num_envs: int = BATCH_FROM) -> Verdict:
    """Remembered, or found out now, which takes a second or two. Raises UserError where the task cannot be made at all."""
    versions = {name: version(name) for name in WRITTEN_FOR}
    for name, known in WRITTEN_FOR.items():
        if not versions[name].startswith(known):
            return Verdict(task, False, f"batches are written for {name} {known}x, and this is {versions[name]}", versions)
    answers, question = RememberedAnswers(_FOLDER), _question(task, {**arguments, "num_envs": num_envs}, versions)
    answer: Any = answers.read(task, question)
    with suppress(TypeError):
        remembered = Verdict(**answer)
        if remembered.task == task and type(remembered.equal) is bool:
            return remembered
    from embodied_rl.sim.robots.maniskill_batch.check import difference

    reason = difference(task, arguments, num_envs)
    found = Verdict(task, reason is None, reason or "", versions)
    answers.write(task, question, asdict(found))
    return found


def remembered() -> list[Verdict]:
    """What is remembered of the versions installed now, by task; a task with several arguments several times."""
    versions = {name: version(name) for name in WRITTEN_FOR}
    found = []
    answer: Any
    for answer in RememberedAnswers(_FOLDER):
        with suppress(TypeError):
            one = Verdict(**answer)
            if one.versions == versions:
                found.append(one)
    return found


def _question(task: str, arguments: Mapping[str, Any], versions: Mapping[str, str]) -> object:
    import torch

    # The last bits of torch's sums depend on its version and on the processor's vectors.
    asked = [_CHECK, sorted(versions.items()), torch.__version__, torch.backends.cpu.get_cpu_capability(), sorted(arguments.items())]
    return [task, asked]


def _say(task: str, reason: str) -> None:
    warnings.warn(f"ManiSkill task '{task}' is stepped one environment at a time: {reason}.", stacklevel=4)
