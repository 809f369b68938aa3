"""SimEnv: what a simulator's author writes, and how everything else is adapted to it."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import SimSpec, StepBuffers


class SimEnv(ABC):
    """A batch of environments of one simulator in one process: the base class of every simulator.

    A simulator writes `spec`, `reset`, and its control step: `step`, or, where an observation can be left out, its two parts `advance`
    and `observe`. What else a simulator can do is a method with a default: draw (`render`, `film_cameras`, `film_from`), save episodes
    (`snapshot`, `restore`), show its physical state (`physics`, `set_physics`).

    Parts of varying size (`VariableSpec`) are object arrays: assign a `str`, an array or what JSON holds to a row. Text actions
    arrive as an object array [n] of `str`.

    Row ``i`` of `StepBuffers` belongs to environment ``i``. A simulator fills the rows of the environments it was asked
    about and touches no other; it never resets by itself (the worker does, and keeps the final observation).
    """

    spec: SimSpec
    many_tasks: bool = False
    """Whether an episode's task follows from its seed: then `task_at` names it."""

    @abstractmethod
    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        """Start new episodes; the same seed gives the same episode. Fills ``out.observation`` only.

        ``options={"reconfigure": True}`` asks for an episode that owes nothing to the ones before it, where a plain
        reset keeps something (ManiSkill).
        """

    # ---- a control step, whole or in two parts ----------------------------------------------------------------------

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Advance each named environment by one control step with its row of `actions` [len(env_ids), A], in the simulator's units."""
        self.advance(env_ids, actions, out)
        self.observe(env_ids, out)

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """As `step`, reward, flags and info included, but the rows of ``out.observation`` may be left as they are.

        The worker plays the inner steps of an action chunk with it, and asks `observe` for those environments whose chunk or episode is
        over there. A wrapper that needs every observation (a recording, a film, an expert) calls `step`.
        """
        self.step(env_ids, actions, out)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:  # noqa: B027  # a default
        """Write the observations of the present states, after `advance` and before the next `reset`; by default `step` has written them.

        It changes nothing that the episode depends on, random generators included: the same episode follows whether it is called after
        a step or not. The names may be some of those that were advanced last, also where all environments step together.
        """

    def episodes_ended(self, env_ids: Sequence[int]) -> None:  # noqa: B027  # a default
        """The episodes of these environments are over by whatever rule: the simulator's own, a limit of steps, or its first success. Their
        last observation is still in the buffers, and a `reset` follows."""

    def close(self) -> None:  # noqa: B027  # a default
        """Let go of what the simulator holds. May be called twice."""

    def task_at(self, env_id: int) -> str:
        """The task of the running episode of one environment."""
        return self.spec.task

    # ---- pictures ---------------------------------------------------------------------------------------------------

    def render(self, env_id: int) -> np.ndarray:
        """Return an image [H, W, 3] uint8 of one environment. Raises UserError where rendering is not possible."""
        raise UserError(f"Simulator '{self.spec.task}' draws no pictures: its class has no method `render`.")

    def film_cameras(self, env_id: int) -> list[str]:
        """Names of the cameras that `film_from` takes; they may depend on the running episode's task. None where `render` is all."""
        return []

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        """Return an image [H, W, 3] uint8. Raises UserError for a camera that there is not."""
        raise UserError(f"Simulator '{self.spec.task}' has no camera '{camera}'; choose 'default'.")

    # ---- saved episodes: `spec.snapshots` says "exact" or "approximate" -----------------------------------------------

    def snapshot(self, env_id: int) -> bytes:
        """The episode of one environment (`embodied_rl.sim.snapshots.encode_state`); may set the live environment's own state again,
        so that both continue alike.

        The worker keeps what is its own beside the simulator's bytes (the last observation, return, length, seeds). Whatever the episode
        still depends on is in the bytes: physics state and warm start, controllers, random generators, elapsed steps, wrappers.
        """
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is taken up by its seed and actions.")

    def restore(self, env_id: int, data: bytes) -> None:
        """Take up an episode saved by a simulator made with the same arguments, in this process or another, by this environment or
        another; writes no observation. Raises SnapshotError for bytes of another task or version."""
        raise SnapshotError(f"Task '{self.spec.task}' has no snapshots: an episode is taken up by its seed and actions.")

    # ---- the physical state by name: what recordings keep beside the observation --------------------------------------

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """{name: [...]} copies: ``actors/cube`` [13] and ``articulations/panda`` [13 + 2 · joints] in ManiSkill, ``qpos`` [nq], ``qvel``
        [nv], … in MuJoCo. Raises UserError for a task that keeps it where we do not look.

        Unlike a snapshot it is no more than the bodies and joints (and what drives them), in a form that other programs read; what else
        the episode depends on follows from its seed. Names and shapes are the same in all episodes of a simulator.
        """
        raise UserError(f"Simulator '{self.spec.task}' does not show its physical state.")

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """Set what `physics` gave, in a running episode of the same seed. Raises UserError as `physics`."""
        raise UserError(f"Simulator '{self.spec.task}' does not take a physical state.")


class SimWrapper(SimEnv):
    """Passes everything on to a simulator; a subclass overrides what it adds. It steps whole: every observation is made."""

    def __init__(self, sim: SimEnv) -> None:
        self._sim = sim
        self.spec, self.many_tasks = sim.spec, sim.many_tasks

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        self._sim.reset(env_ids, seeds, out, options)

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.step(env_ids, actions, out)

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

    def make(self, num_envs: int) -> SimEnv:
        """Build `num_envs` environments in this process. Raises MissingExtraError, MissingAssetsError or UserError."""
        configure_rendering()  # before the target imports mujoco, sapien or pygame
        factory = load_target(self.target, extra=self.extra)
        return adapt(factory, num_envs, self.task, dict(self.kwargs))


def adapt(factory: Callable[..., Any], num_envs: int, task: str | None, kwargs: dict[str, Any]) -> SimEnv:
    """Make a SimEnv from a SimEnv factory, a gymnasium.Env factory or a gymnasium.vector.VectorEnv factory.

    Raises:
        UserError: the factory rejects its arguments, or what it makes is none of these.
    """
    if task is not None:
        kwargs = {"task": task, **kwargs}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a constant, a module, something written in C
        raise UserError(f"{factory!r} is no class or function that makes a gymnasium.Env, a VectorEnv or a SimEnv.") from None
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters]
    if unknown:
        name = getattr(factory, "__qualname__", str(factory))
        if name == "make":  # as our own adapters call theirs
            name = str(getattr(factory, "__module__", name)).rpartition(".")[2]
        raise UserError(
            f"Simulator '{name}' does not take {', '.join(map(repr, unknown))}. It takes: {', '.join(parameters) or 'no arguments'}."
        )
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
