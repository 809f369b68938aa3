"""Builds the simulator of a worker process from its target's name, and the base class of wrappers around simulators."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, brief, did_you_mean, shown
from embodied_rl.registry import load_target
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.types import SimSpec, StepBuffers

if TYPE_CHECKING:
    from embodied_rl.config import SimConfig  # simulator processes have no configuration


class SimWrapper(SimEnv):
    """Passes every call on to a simulator; subclasses override what they add. It takes whole steps: every observation is made.

    A subclass that is a configuration's target takes ``num_envs``, ``inner`` (the fields of the inner `SimFactory`) and its own arguments.
    """

    def __init__(self, sim: SimEnv) -> None:
        self._sim = sim
        self.spec, self.many_tasks = sim.spec, sim.many_tasks

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._sim.reset(env_ids, seeds, out, options)
        self._seen(env_ids, out)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, out)
        self._seen(env_ids, out)

    def _seen(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        """Called after the simulator has written new observations of these environments."""

    def task_at(self, env_id: int) -> str:
        return self._sim.task_at(env_id)

    def episodes_ended(self, env_ids: Sequence[int]) -> None:
        self._sim.episodes_ended(env_ids)

    def close(self) -> None:
        self._sim.close()

    def render(self, env_id: int) -> np.ndarray:
        return self._sim.render(env_id)

    def film_cameras(self, env_id: int) -> list[str]:
        return self._sim.film_cameras(env_id)

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        return self._sim.film_from(env_id, camera)

    def snapshot(self, env_id: int) -> bytes:
        return self._sim.snapshot(env_id)

    def restore(self, env_id: int, data: bytes) -> None:
        self._sim.restore(env_id, data)

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        return self._sim.physics(env_id)

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        self._sim.set_physics(env_id, state)


def wrapped(config: SimConfig, target: str, **own: object) -> SimConfig:
    """The same simulator inside the `SimWrapper` named by `target`, which gets the arguments `own`."""
    inner = {"target": config.target, "task": config.task, "kwargs": config.kwargs, "extra": config.extra}
    return dataclasses.replace(config, target=target, task=None, kwargs={"inner": inner, **own})


SIDES = {"render_size", "image_size", "image_height", "image_width", "camera_size", "picture_size"}
"""Arguments of our simulators that are a picture's side; the drawing libraries end the process at a side of 0."""


@dataclass(frozen=True)
class SimFactory:
    """How a worker process builds its simulator: picklable, and nothing is imported before `make`."""

    target: str
    """``package.module:Attribute``: a SimEnv class or factory (it takes ``num_envs``), or a factory of one gymnasium.Env."""
    task: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None
    """Extra of setup.cfg that installs the simulator's packages, for the error message."""

    @property
    def key(self) -> str:
        """Key that is equal for factories that build the same simulator."""
        return repr(dataclasses.asdict(self))

    def make(self, num_envs: int, picture_size: int | None = None) -> SimEnv:
        """Build `num_envs` environments in this process. `picture_size`: side in pixels of the pictures that they will draw; None: unknown.

        Raises MissingExtraError, MissingAssetsError or UserError; for a simulator that is not of this package also what its class raises.
        """
        configure_rendering()  # before the target imports mujoco, sapien or pygame
        factory, kwargs, ours = load_target(self.target, extra=self.extra), dict(self.kwargs), self.target.startswith("embodied_rl.")
        for name in SIDES & kwargs.keys() if ours else ():
            if not (kwargs[name] is None or (isinstance(kwargs[name], (int, np.integer)) and kwargs[name] >= 1)):
                raise UserError(f"sim.kwargs.{name} must be a whole number of pixels, at least 1, got {shown(kwargs[name])}.")
        if picture_size is not None:
            # Simulators that must know beforehand whether they will draw take these arguments.
            wanted, taken = {"render": True, "render_size": picture_size}, _parameters(factory)
            kwargs = {name: value for name, value in wanted.items() if name in taken} | kwargs
        try:
            return adapt(factory, num_envs, self.task, kwargs)
        except (UserError, MemoryError, RuntimeError):  # a service or a driver may be back when the manager tries again
            raise
        except Exception as error:  # the packages behind our simulators check few arguments, and raise a dozen types
            if "inner" in kwargs or not ours or (isinstance(error, OSError) and error.errno):
                raise  # the author of a simulator needs the traceback; the machine's own errors may pass
            raise UserError(f"'{self.task or self.target}' cannot be made with {dict(self.kwargs)}: it {described(error)}.") from error


def named(names: str | Iterable[str]) -> list[str]:
    """Value of an argument that takes one name or several."""
    return [names] if isinstance(names, str) else list(names)


def described(error: Exception) -> str:
    """One line with an exception and the place in the simulator where it was raised."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name})"
        trace = trace.tb_next
    return f"raised {type(error).__name__}: {brief(error, 300)}{place}"


def adapt(factory: Callable[..., Any], num_envs: int, task: str | None, kwargs: dict[str, Any]) -> SimEnv:
    """Make a SimEnv from a factory of SimEnv, gymnasium.Env or gymnasium.vector.VectorEnv.

    Raises UserError: the factory rejects its arguments, or its result is none of these.
    """
    if task is not None:
        kwargs = {"task": task, **kwargs}
    parameters = _parameters(factory)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind in named and name not in {"num_envs", *kwargs}]
    if unknown or needed:
        name = called(factory)
        if name == "make":  # the name of our own adapters' factories
            name = factory.__module__.rpartition(".")[2]
        if unknown:
            raise UserError(f"Simulator '{name}' does not take {', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], parameters)}")
        raise UserError(f"Simulator '{name}' needs {', '.join(map(repr, needed))}: set sim.kwargs.{needed[0]}=VALUE.")
    if "num_envs" in parameters:
        made = factory(num_envs=num_envs, **kwargs)
        if isinstance(made, SimEnv):
            _check_contract(made)
            return made
        sim = _adapter("VectorEnvSim")(made)
        if made.num_envs != num_envs:
            raise UserError(
                f"The vector environment of '{called(factory)}' has {made.num_envs} environments, and {num_envs} were asked for."
            )
        return sim
    envs = [factory(**kwargs) for _ in range(num_envs)]
    return _adapter("GymnasiumSim")(envs, task=task)


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a constant, a module, something written in C
        raise UserError(f"{factory!r} must be a class or function that makes a gymnasium.Env, a VectorEnv or a SimEnv.") from None


def called(factory: Callable[..., Any]) -> str:
    """Name of a class or function; a description of anything else."""
    return factory.__qualname__ if hasattr(factory, "__qualname__") else str(factory)


def _adapter(name: str) -> Callable[..., SimEnv]:
    """Import an adapter by name, like a user's class: the contract imports none of its implementations."""
    adapter: Callable[..., SimEnv] = load_target(f"embodied_rl.sim.robots.gymnasium:{name}")
    return adapter


def _check_contract(sim: SimEnv) -> None:
    """Raise UserError for a class that lacks a method without a default."""
    kind = type(sim)
    if kind.step is SimEnv.step and (kind.advance is SimEnv.advance or kind.observe is SimEnv.observe):
        raise UserError(f"{kind.__name__} must have a method `step`, or both `advance` and `observe` (embodied_rl.sim.env.SimEnv).")
    if not hasattr(sim, "spec") or not isinstance(sim.spec, SimSpec):
        raise UserError(f"{kind.__name__}.spec must be an embodied_rl.types.SimSpec: set it in __init__.")


# ---- tasks of a simulator: its adapter lists them, and imports that simulator only ------------------------------------


def task_list(target: str) -> tuple[list[str], list[str]]:
    """(tasks, names of sets of tasks, which alternate from episode to episode): ``tasks()`` and ``SETS`` of the module of `target`.

    Raises:
        MissingExtraError: the simulator is not installed.
        UserError: the module cannot be imported, or has no list of tasks (a user's own simulator need not have one).
    """
    module_name = target.partition(":")[0]
    configure_rendering()  # before the adapter imports mujoco, sapien or pygame
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"'{target}' cannot be imported: {error}. Is its package installed in this environment?") from error
    tasks = vars(module).get("tasks")
    if not callable(tasks):
        raise UserError(f"'{module_name}' has no list of tasks: add a function tasks() -> list[str] beside its factory.")
    return list(tasks()), list(vars(module).get("SETS", ()))
