"""SimEnv: what a simulator's author writes, and how everything else is adapted to it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.registry import load_target
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.types import SimSpec, StepBuffers


@runtime_checkable
class SimEnv(Protocol):
    """A batch of environments of one simulator in one process.

    Parts of varying size (`VariableSpec`) are object arrays: assign a `str`, an array or what JSON holds to a row. Text actions
    arrive as an object array [n] of `str`.

    Row ``i`` of `StepBuffers` belongs to environment ``i``. A simulator fills the rows of the environments it was asked
    about and touches no other; it never resets by itself (the worker does, and keeps the final observation). One that can leave
    observations out inherits `embodied_rl.sim.split_step.SplitStep`.
    """

    spec: SimSpec

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        """Start new episodes; the same seed gives the same episode. Fills ``out.observation`` only.

        ``options={"reconfigure": True}`` asks for an episode that owes nothing to the ones before it, where a plain
        reset keeps something (ManiSkill).
        """
        ...

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        """Advance each named environment by one control step with its row of `actions` [len(env_ids), A], in the simulator's units."""
        ...

    def render(self, env_id: int) -> np.ndarray:
        """Return an image [H, W, 3] uint8 of one environment. Raises UserError where rendering is not possible."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SnapshotEnv(SimEnv, Protocol):
    """A simulator whose episodes can be saved and taken up again; its spec says ``snapshots="exact"`` or ``"approximate"``.

    The worker keeps what is its own beside the simulator's bytes (the last observation, return, length, seeds), so `restore`
    writes no observation. Whatever the episode still depends on is in the bytes: physics state and warm start, controllers,
    random generators, elapsed steps, wrappers.
    """

    def snapshot(self, env_id: int) -> bytes:
        """The episode of one environment (`embodied_rl.sim.snapshots.encode_state`); may set the live environment's own state again,
        so that both continue alike."""
        ...

    def restore(self, env_id: int, data: bytes) -> None:
        """Take up an episode saved by a simulator made with the same arguments, in this process or another, by this environment or
        another. Raises SnapshotError for bytes of another task or version."""
        ...


@runtime_checkable
class PhysicsEnv(SimEnv, Protocol):
    """A simulator that shows its physical state by name and can be set to one: what recordings keep beside the observation.

    Unlike a snapshot it is no more than the bodies and joints (and what drives them), in a form that other programs read; what else
    the episode depends on follows from its seed. Names and shapes are the same in all episodes of a simulator.
    """

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """{name: [...]} copies: ``actors/cube`` [13] and ``articulations/panda`` [13 + 2 · joints] in ManiSkill, ``qpos`` [nq], ``qvel``
        [nv], … in MuJoCo. Raises UserError for a task that keeps it where we do not look."""
        ...

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        """Set what `physics` gave, in a running episode of the same seed."""
        ...


@runtime_checkable
class CameraEnv(SimEnv, Protocol):
    """A simulator that can be drawn from several cameras; `SimEnv.render` is the one that it chooses itself, "default"."""

    def film_cameras(self, env_id: int) -> list[str]:
        """Names of the cameras that `film_from` takes; they may depend on the running episode's task."""
        ...

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        """Return an image [H, W, 3] uint8. Raises UserError for a camera that there is not."""
        ...


@runtime_checkable
class EndingEnv(SimEnv, Protocol):
    """A simulator that wants to know when an episode is over by whatever rule: its own, a limit of steps, or its first success."""

    def episodes_ended(self, env_ids: Sequence[int]) -> None:
        """The episodes of these environments are over; their last observation is still in the buffers, and a `reset` follows."""
        ...


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
        if isinstance(made, SimEnv) and isinstance(getattr(made, "spec", None), SimSpec):
            return made
        from embodied_rl.sim.robots.gymnasium import VectorEnvSim

        return VectorEnvSim(made)
    from embodied_rl.sim.robots.gymnasium import GymnasiumSim

    envs = [factory(**kwargs) for _ in range(num_envs)]
    if not all(hasattr(env, name) for env in envs for name in ("observation_space", "action_space", "reset", "step")):
        raise UserError(f"A simulator factory without num_envs must return a gymnasium.Env, got {type(envs[0]).__name__}.")
    return GymnasiumSim(envs, task=task)
