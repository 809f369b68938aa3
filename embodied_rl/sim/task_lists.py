"""Which tasks a simulator has: asked of its adapter, which imports that simulator and no other."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from embodied_rl.errors import UserError


@dataclass(frozen=True)
class TaskList:
    """The tasks of one adapter."""

    target: str
    """``package.module:factory`` that makes them."""
    tasks: tuple[str, ...]
    sets: tuple[str, ...]
    """Names that stand for several tasks, which take turns from episode to episode; empty where there are none."""


def task_list(target: str) -> TaskList:
    """Ask the module of `target` for ``tasks()`` and ``SETS``.

    Raises:
        MissingExtraError: the simulator is not installed.
        UserError: the module cannot be imported, or has no list of tasks (a simulator of the user's own need not have one).
    """
    from embodied_rl.sim.rendering import configure_rendering

    module_name = target.partition(":")[0]
    configure_rendering()  # before the adapter imports mujoco, sapien or pygame
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"'{target}' cannot be imported: {error}. Is its package installed in this environment?") from error
    tasks = getattr(module, "tasks", None)
    if not callable(tasks):
        raise UserError(f"'{module_name}' has no list of tasks: a function tasks() -> list[str] beside its factory would give one.")
    return TaskList(target, tuple(tasks()), tuple(getattr(module, "SETS", ())))
