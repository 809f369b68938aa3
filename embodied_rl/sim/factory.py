"""How a worker process builds its simulator: by a name, whatever that names. And a wrapper for what is to be added to a simulator."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.registry import load_target
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.types import SimSpec, StepBuffers

if TYPE_CHECKING:
    from embodied_rl.config import SimConfig  # a simulator's process has no configuration


class SimWrapper(SimEnv):
    """Passes everything on to a simulator; a subclass overrides what it adds. It steps whole: every observation is made.

    A subclass that is a configuration's target takes ``num_envs``, ``inner`` (the fields of the inner one's `SimFactory`) and its own.
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
        """The simulator has written new observations of these environments."""

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
    """The same simulator inside the `SimWrapper` that `target` names, which is made with these arguments."""
    inner = {"target": config.target, "task": config.task, "kwargs": config.kwargs, "extra": config.extra}
    return dataclasses.replace(config, target=target, task=None, kwargs={"inner": inner, **own})


@dataclass(frozen=True)
class SimFactory:
    """How a worker process builds its simulator: picklable, and nothing is imported before `make`."""

    target: str
    """``package.module:Attribute``: a SimEnv class or factory (it takes ``num_envs``), or a factory of one gymnasium.Env."""
    task: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra: str | None = None
    """The extra of setup.cfg that brings the simulator's packages, for the error message."""

    @property
    def key(self) -> str:
        """The same for factories that build the same."""
        return repr(dataclasses.asdict(self))

    def make(self, num_envs: int, picture_size: int | None = None) -> SimEnv:
        """Build `num_envs` environments in this process, which will draw pictures of about `picture_size` pixels a side (None: perhaps).

        Raises MissingExtraError, MissingAssetsError or UserError.
        """
        configure_rendering()  # before the target imports mujoco, sapien or pygame
        factory, kwargs = load_target(self.target, extra=self.extra), dict(self.kwargs)
        if picture_size is not None:
            # Simulators that must know beforehand that they will draw say so by taking these.
            wanted, taken = {"render": True, "render_size": picture_size}, _parameters(factory)
            kwargs = {name: value for name, value in wanted.items() if name in taken} | kwargs
        return adapt(factory, num_envs, self.task, kwargs)


def adapt(factory: Callable[..., Any], num_envs: int, task: str | None, kwargs: dict[str, Any]) -> SimEnv:
    """Make a SimEnv from a SimEnv factory, a gymnasium.Env factory or a gymnasium.vector.VectorEnv factory.

    Raises UserError: the factory rejects its arguments, or what it makes is none of these.
    """
    if task is not None:
        kwargs = {"task": task, **kwargs}
    parameters = _parameters(factory)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters]
    if unknown:
        name = called(factory)
        if name == "make":  # as our own adapters call theirs
            name = factory.__module__.rpartition(".")[2]
        raise UserError(f"Simulator '{name}' does not take {', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], parameters)}")
    if "num_envs" in parameters:
        made = factory(num_envs=num_envs, **kwargs)
        if isinstance(made, SimEnv):
            _check_contract(made)
            return made
        if _is_like_a_simulator(made):
            raise UserError(
                f"{type(made).__name__} is made with num_envs and has a SimSpec, and is no SimEnv: write "
                f"`class {type(made).__name__}(SimEnv)`, from embodied_rl.sim.env import SimEnv."
            )
        return _adapter("VectorEnvSim")(made)
    envs = [factory(**kwargs) for _ in range(num_envs)]
    if not all(hasattr(env, name) for env in envs for name in ("observation_space", "action_space", "reset", "step")):
        raise UserError(f"A simulator factory without num_envs must return a gymnasium.Env, got {type(envs[0]).__name__}.")
    return _adapter("GymnasiumSim")(envs, task=task)


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a constant, a module, something written in C
        raise UserError(f"{factory!r} is no class or function that makes a gymnasium.Env, a VectorEnv or a SimEnv.") from None


def called(factory: Callable[..., Any]) -> str:
    """The name of a class or function; of what has none, what it is."""
    return factory.__qualname__ if hasattr(factory, "__qualname__") else str(factory)


def _adapter(name: str) -> Callable[..., SimEnv]:
    """By its name, as a user's own class: the contract imports none of those that implement it."""
    adapter: Callable[..., SimEnv] = load_target(f"embodied_rl.sim.robots.gymnasium:{name}")
    return adapter


def _is_like_a_simulator(made: object) -> bool:
    return isinstance(vars(made).get("spec") if hasattr(made, "__dict__") else None, SimSpec)


def _check_contract(sim: SimEnv) -> None:
    """Raises UserError for a class that leaves out what has no default."""
    kind = type(sim)
    if kind.step is SimEnv.step and (kind.advance is SimEnv.advance or kind.observe is SimEnv.observe):
        raise UserError(f"{kind.__name__} must have a method `step`, or both `advance` and `observe` (embodied_rl.sim.env.SimEnv).")
    if not hasattr(sim, "spec") or not isinstance(sim.spec, SimSpec):
        raise UserError(f"{kind.__name__}.spec must be an embodied_rl.types.SimSpec: set it in __init__.")


# ---- which tasks a simulator has: asked of its adapter, which imports that simulator and no other ---------------------


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
    module_name = target.partition(":")[0]
    configure_rendering()  # before the adapter imports mujoco, sapien or pygame
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"'{target}' cannot be imported: {error}. Is its package installed in this environment?") from error
    tasks = vars(module).get("tasks")
    if not callable(tasks):
        raise UserError(f"'{module_name}' has no list of tasks: a function tasks() -> list[str] beside its factory would give one.")
    return TaskList(target, tuple(tasks()), tuple(vars(module).get("SETS", ())))
