"""Adapter of any `gymnasium.Env` or `gymnasium.vector.VectorEnv` to SimEnv, sufficient for most simulators.

Gymnasium (Towers et al. 2024, "Gymnasium: A Standard Interface for Reinforcement Learning Environments").
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from embodied_rl.errors import MissingExtraError, UserError, brief, did_you_mean
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.faults import WrongShapeError
from embodied_rl.sim.private_random import PrivateRandom, fingerprint, process_state_kept
from embodied_rl.sim.robots import spaces
from embodied_rl.sim.robots.mujoco_model import draw_from, model_cameras, physics_of
from embodied_rl.sim.robots.saved_state import EnvState, layers_of
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import SimSpec, StepBuffers

# ---- environments that can skip an observation ------------------------------------------------------------------------


_PASS_OBSERVATIONS_ON = (
    gymnasium.Wrapper.step,
    gymnasium.ActionWrapper.step,
    gymnasium.RewardWrapper.step,
    OrderEnforcing.step,
    TimeLimit.step,
)
"""`step` methods of wrappers that neither read nor change an observation."""


@runtime_checkable
class ObservesOnDemand(Protocol):
    """Two methods of a `gymnasium.Env` or wrapper whose observations are expensive (it draws them, say).

    They are used if every wrapper around it passes observations through unchanged: those of `gymnasium.make`, and wrappers of actions and
    rewards. Inside others (a stack of frames) every step is observed, unless the outer wrapper has the two methods as well.
    """

    def set_observing(self, observing: bool) -> None:
        """False: the next steps' observations are not read, and `step` may return anything instead, such as None. True: `step` observes
        again. Environments start in this state, and every `reset` happens in it."""

    def observe(self) -> Any:
        """The present observation, as `step` would have returned it. Changes nothing and draws no random number."""


def on_demand(env: gymnasium.Env) -> ObservesOnDemand | None:
    """Outermost layer of an environment that observes on demand; None: there is none, or a wrapper around it needs every observation."""
    for layer in layers_of(env):
        if isinstance(layer, ObservesOnDemand):
            return layer
        if type(layer).step not in _PASS_OBSERVATIONS_ON:
            return None
    return None


# ---- environments stepped in sequence ---------------------------------------------------------------------------------


SAVED_WHOLE = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
"""Modules of the tasks for which tests show that `EnvState` saves the whole state."""


def tasks() -> list[str]:
    """Ids of gymnasium's own tasks that this installation registers, the newest version of each."""
    return newest(task for task, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("gymnasium.envs.classic_control"))


def newest(ids: Iterable[str]) -> list[str]:
    """Highest version of each id: of ``A-v1, A-v2, B-v0`` these are ``A-v2, B-v0``. Ids without a version stay."""
    best: dict[str, tuple[int, str]] = {}
    for task in ids:
        name, _, version = task.rpartition("-v")
        key, number = (name, int(version)) if name and version.isdigit() else (task, 0)
        best[key] = max(best.get(key, (-1, "")), (number, task))
    return sorted(task for _, task in best.values())


def make(task: str, num_envs: int, **kwargs: Any) -> GymnasiumSim:
    """`num_envs` times ``gymnasium.make(task, **kwargs)``, with the step limit of gymnasium's registry.

    For ``package:Task-v0`` the package is imported first, which registers the task.

    Raises:
        UserError: the id is not registered, or the task has spaces that cannot be adapted.
        MissingExtraError: the task's own packages are missing.
    """
    task = find_spec(task).id
    return GymnasiumSim([make_one(task, **kwargs) for _ in range(num_envs)], task=task, exact_snapshots=saved_whole(task))


def saved_whole(task: str) -> bool:
    """Whether snapshots of a registered task are exact: see `EnvState`."""
    return str(find_spec(task).entry_point).startswith(SAVED_WHOLE)


def find_spec(task: str) -> gymnasium.envs.registration.EnvSpec:
    """Specification registered as `task`, or as the second part of ``package:task`` once the package is imported.

    Raises UserError: not registered, or the package cannot be imported.
    """
    package, colon, name = task.partition(":")
    if not colon:
        name = task
    else:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"Gymnasium task '{task}' names a package that cannot be imported: {error}.") from error
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error:
        raise UserError(f"Gymnasium task '{name}' is not known.{did_you_mean(name, newest(gymnasium.registry))}") from None


def make_one(task: str, extra: str = "all", **kwargs: Any) -> gymnasium.Env:
    """``gymnasium.make`` with errors that name the nearest id or the missing extra, and with rendering to arrays if the task offers it."""
    env_spec = find_spec(task)
    try:
        point = env_spec.entry_point
        made = gymnasium.envs.registration.load_env_creator(point) if isinstance(point, str) else point
        if isinstance(made, type) and issubclass(made, gymnasium.Env) and "rgb_array" in made.metadata.get("render_modes", []):
            kwargs.setdefault("render_mode", "rgb_array")
        return gymnasium.make(env_spec.id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise MissingExtraError(f"Gymnasium task '{task}'", extra, error) from error


def _check_alike(envs: Sequence[gymnasium.Env]) -> None:
    """Raise UserError if an environment's spaces differ from the first one's: one slab holds all of them."""

    def shown(space: gymnasium.Space) -> list[tuple[Any, ...]]:
        return [(part.path, part.spec) for part in spaces.observation_parts(space)]

    for number, env in enumerate(envs[1:], start=1):
        for what, name, adapted in (("observations", "observation_space", shown), ("actions", "action_space", spaces.action_spec)):
            first, other = getattr(envs[0], name), getattr(env, name)
            if other != first and adapted(other) != adapted(first):
                rule = f"The environments of one simulator must have the same {what}"
                raise UserError(f"{rule}: environment 0 has {first}, {number} has {other}.")


def short_step(env: gymnasium.Env) -> Callable[[Any], tuple[Any, ...]]:
    """`env.step` without the calls of wrappers that only pass on: the order check is dropped, and a limit counts in one place."""
    while type(env).step in (gymnasium.Wrapper.step, OrderEnforcing.step) and "step" not in vars(env):
        assert isinstance(env, gymnasium.Wrapper), env
        env = env.env
    if type(env) is not TimeLimit:
        return env.step
    inner, limit = short_step(env.env), cast(Limit, env)

    def step(action: Any) -> tuple[Any, ...]:
        answer = inner(action)
        limit._elapsed_steps += 1
        if limit._elapsed_steps < limit._max_episode_steps or not isinstance(answer, Sequence):  # the caller refuses what is no tuple
            return answer
        return (*answer[:3], True, *answer[4:])

    return step


class Limit(Protocol):
    """The counters of a `TimeLimit`, which gymnasium annotates as None."""

    _elapsed_steps: int
    _max_episode_steps: int


class GymnasiumSim(SimEnv):
    """A list of gymnasium environments stepped one after the other in this process.

    Box, Discrete (one-hot), MultiBinary, Text and image observations become named parts: a vector is "state", an image [H, W, 3] uint8 is
    "rgb", a text "text", and the entries of a Dict keep their keys, nested ones joined by dots. Actions are a Box, Discrete or Text.

    An episode depends only on its seed: the simulator seeds the process-wide generators (`numpy.random`, `random`) around every reset, and
    if a task also draws from them while stepping, each environment has its own copy.

    Environments with the methods of `ObservesOnDemand` are observed only if the observation is read; others are observed in every step.

    Args:
        task: name in the spec; by default the registered id.
        exact_snapshots: the whole state of these environments is known to be where `EnvState` looks. Otherwise the spec says
            "replay", since an unknown environment may keep its state anywhere.
        **declared: further fields of the spec: ``instruction``, ``control_hz``, …

    Raises UserError: an observation or action space that cannot be adapted, or that differs from one environment to the next.
    """

    def __init__(self, envs: Sequence[gymnasium.Env], task: str | None = None, exact_snapshots: bool = False, **declared: Any) -> None:
        self.envs = list(envs)
        first = self.envs[0]
        if not isinstance(first, gymnasium.Env):
            raise UserError(f"A simulator factory without num_envs must return a gymnasium.Env, got {type(first).__name__}.")
        _check_spaces(first, "observation_space", "action_space")
        shared: dict[str, bytes] = {}
        self._states = [EnvState(env, shared) for env in self.envs] if exact_snapshots else None  # before the first reset
        self._random = [PrivateRandom() for _ in self.envs]
        made = self.envs
        self._physics = functools.cache(lambda env_id: physics_of(made[env_id]))  # keeps the list, not this object, in memory
        self._write = spaces.row_writer(spaces.observation_parts(first.observation_space))
        _check_alike(self.envs)
        spec = _spec_of(first, first.observation_space, first.action_space, task)
        self._success_key, self._draws_while_stepping = self._probe(first, spec)
        declared |= {"reports_success": self._success_key is not None, "snapshots": "exact" if exact_snapshots else "replay"}
        self.spec = replace(spec, **declared)
        self._steps = [short_step(env) for env in self.envs]
        self._to_action = spaces.action_converter(first.action_space)
        found = [on_demand(env) for env in self.envs]
        self._on_demand: list[ObservesOnDemand] = [hook for hook in found if hook is not None] if None not in found else []
        self._observing = True

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        passed = _passed(options) or None
        for i, seed in zip(env_ids, seeds, strict=True):
            env, seed = self.envs[i], int(seed)
            with self._random[i].active(seed):
                env.action_space.seed(seed)
                observation, _ = env.reset(seed=seed, options=passed)
            self._put(out, i, observation, "The first observation")

    def advance(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        hooks = [self._on_demand[i] for i in env_ids] if self._on_demand else []
        for hook in hooks:
            hook.set_observing(False)
        self._observing = not hooks
        try:
            self.step(env_ids, actions, out)
        finally:
            self._observing = True
            for hook in hooks:
                hook.set_observing(True)

    def observe(self, env_ids: Sequence[int], out: StepBuffers) -> None:
        if self._on_demand:
            for i in env_ids:
                self._put(out, i, self._on_demand[i].observe(), "A step")

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        if not self._draws_while_stepping:
            self._step_rows(env_ids, actions, out)
            return
        with process_state_kept():
            for row, i in enumerate(env_ids):
                with self._random[i].taken():
                    self._step_rows([i], actions[row : row + 1], out)

    def _put(self, out: StepBuffers, i: int, observation: Any, what: str) -> None:
        try:
            self._write(out.observation, i, observation)
        except ValueError as error:
            raise _unlike(self.spec.task, what, error) from error

    def _step_rows(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        # Plain tasks take about 20 µs per step, so this loop avoids every call and look-up.
        reward, terminated, truncated, success, infos = out.reward, out.terminated, out.truncated, out.success, out.info
        steps, key, write, observation, observing = self._steps, self._success_key, self._write, out.observation, self._observing
        for i, action in zip(env_ids, self._to_action(actions), strict=True):
            answer = steps[i](action)
            try:
                new, reward[i], terminated[i], truncated[i], infos[i] = answer
                if observing:
                    write(observation, i, new)
                success[i] = False if key is None else bool(infos[i].get(key, False))  # type: ignore[union-attr]
            except (ValueError, TypeError, AttributeError) as error:
                raise _unlike(self.spec.task, "A step", error) from error

    def render(self, env_id: int) -> np.ndarray:
        """One frame [H, W, 3] uint8. Raises UserError if the task or this machine cannot render."""
        return _picture(self.spec, self.envs[env_id].render)

    def film_cameras(self, env_id: int) -> list[str]:
        """See `SimEnv`: cameras of a MuJoCo model; none for other environments."""
        return model_cameras(self.envs[env_id])

    def film_from(self, env_id: int, camera: str) -> np.ndarray:
        return np.asarray(draw_from(self.envs[env_id], camera), np.uint8)

    def _saved(self, env_id: int) -> dict[str, Any]:
        return {"env": self._state(env_id).capture(), "random": self._random[env_id].state if self._draws_while_stepping else None}

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        self._state(env_id).restore(saved["env"])
        self._random[env_id].state = saved["random"]

    def physics(self, env_id: int) -> dict[str, np.ndarray]:
        """See `SimEnv` and `embodied_rl.sim.robots.mujoco_model`."""
        return self._physics(env_id).get()

    def set_physics(self, env_id: int, state: Mapping[str, np.ndarray]) -> None:
        self._physics(env_id).set(state)

    def _state(self, env_id: int) -> EnvState:
        if self._states is None:
            raise SnapshotError(f"The state of '{self.spec.task}' cannot be located: its episodes are replayed, not saved.")
        return self._states[env_id]

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _probe(self, env: gymnasium.Env, spec: SimSpec) -> tuple[str | None, bool]:
        """Key of success, and whether stepping draws from process-wide generators. Raises UserError: the answers are not gymnasium's."""
        row = StepBuffers.allocate(spec, 1).observation
        with self._random[0].active(0):
            first, (second, *numbers, step_info), key, draws = _tried(env, spec.task)
        success = False if (found := step_info.get(key)) is None else found
        for name, value in zip(("reward", "terminated", "truncated", key), (*numbers, success), strict=True):
            if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf":
                raise UserError(f"`step` of '{spec.task}' must return a number or bool as {name}, got {value!r:.80}.")
        try:
            self._write(row, 0, first)
            self._write(row, 0, second)
        except ValueError as error:
            raise UserError(f"'{spec.task}' does not keep to its observation space: {brief(error)}.") from error
        return key, draws


def _tried(env: gymnasium.Env | VectorEnv, task: str) -> tuple[Any, tuple[Any, ...], str | None, bool]:
    """Take one step: (first observation, the step's answer, the key of success, whether process-wide generators drew).

    Every episode begins with a seeded reset, so the step leaves no trace. Raises UserError: the answers are not gymnasium's.
    """
    env.action_space.seed(0)
    try:
        answer = env.reset(seed=0, options=None)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise UserError(f"`reset` of '{task}' must take seed and options, as gymnasium's environments do: {error}.") from error
    first, reset_info = _parts_of(answer, "reset", "observation, info")
    before = fingerprint()
    stepped = env.step(env.action_space.sample())
    draws = fingerprint() != before
    stepped = _parts_of(stepped, "step", "observation, reward, terminated, truncated, info")
    key = next((key for key in spaces.SUCCESS_KEYS if key in stepped[-1] or key in reset_info), None)
    return first, stepped, key, draws


def _passed(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options for gymnasium's `reset`: each does what "reconfigure" requests, and tasks may reject options that they do not know."""
    return {key: value for key, value in (options or {}).items() if key != "reconfigure"}


def _unlike(task: str, what: str, error: Exception) -> WrongShapeError:
    return WrongShapeError(f"{what} of '{task}' is not what its spaces and gymnasium ask for: {brief(error).rstrip('.')}.")


def _check_spaces(env: gymnasium.Env | VectorEnv, *names: str) -> None:
    """Raise UserError for spaces of an older gym, or for several agents."""
    for name in names:
        space = getattr(env, name, None)
        if not isinstance(space, gymnasium.Space):
            raise UserError(f"{type(env).__name__}.{name} must be a gymnasium.Space, got {space!r:.80}.")


def _picture(spec: SimSpec, render: Callable[[], Any]) -> np.ndarray:
    """[H, W, 3] uint8. Raises UserError if there are no pictures, and for what `render` returned instead."""
    if not spec.can_render:
        raise UserError(f"Task '{spec.task}' was made without render_mode='rgb_array', or cannot render.")
    shape = np.shape(frame := render())
    if len(shape) != 3 or shape[2] != 3 or not all(shape):
        raise UserError(
            f"`render` of '{spec.task}' must return an array [H, W, 3] with render_mode='rgb_array', got {shape or frame!r:.80}."
        )
    return np.asarray(frame, np.uint8)


def _parts_of(answer: Any, method: str, parts: str) -> tuple[Any, ...]:
    """An answer's `parts`. Raises UserError for the answer of an older gym, which has others."""
    if not (isinstance(answer, tuple) and len(answer) == parts.count(",") + 1 and isinstance(answer[-1], Mapping)):
        raise UserError(
            f"`{method}` must return ({parts}), with a dictionary as info, as gymnasium's environments do; got {answer!r:.100}."
        )
    return answer


# ---- environments stepped as one batch --------------------------------------------------------------------------------


class VectorEnvSim(SimEnv):
    """Steps all environments of one VectorEnv together, and resets individual ones.

    The vector environment must not reset by itself (autoreset mode DISABLED), because the worker keeps final observations and chooses
    seeds. A SyncVectorEnv is switched to that mode; make others with ``autoreset_mode="Disabled"``.

    Single episodes cannot be resumed: replaying one's actions would step all the others.

    `task`: name in the spec; by default the registered id. Raises UserError: it resets by itself, or has spaces that cannot be adapted.
    """

    def __init__(self, env: VectorEnv, task: str | None = None) -> None:
        if not isinstance(env, VectorEnv):
            raise UserError(
                "A simulator factory that takes num_envs must return a gymnasium.vector.VectorEnv, or an instance of a subclass of "
                f"embodied_rl.sim.env.SimEnv, got {type(env).__name__}."
            )
        _check_spaces(env, "single_observation_space", "single_action_space")
        if spaces.action_splits(env.single_action_space):
            raise UserError(f"Action space {env.single_action_space} of a vector environment cannot be adapted; Box and Discrete can.")
        _disable_autoreset(env)
        self.env = env
        parts = spaces.observation_parts(env.single_observation_space)
        spec = _spec_of(env, env.single_observation_space, env.single_action_space, task)
        *_, self._success_key, _ = _tried(env, spec.task)
        self.spec = replace(spec, reports_success=self._success_key is not None, snapshots="none", steps_together=True)
        self._write = spaces.row_writer(parts)
        self._to_action = spaces.action_converter(env.single_action_space)
        self._over = np.zeros(env.num_envs, bool)
        """Environments whose episode has ended: gymnasium refuses their next step."""

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        chosen = np.zeros(self.env.num_envs, bool)
        asked: Any = [0] * self.env.num_envs  # gymnasium annotates int; vector environments take a list
        for i, seed in zip(env_ids, seeds, strict=True):
            chosen[i], asked[i] = True, int(seed)
        passed = _passed(options)
        if not chosen.all():
            passed["reset_mask"] = chosen
        observation, _ = self.env.reset(seed=asked, options=passed or None)
        self._over &= ~chosen
        try:
            for i in env_ids:
                self._write(out.observation, i, spaces.row_of(observation, i))
        except (ValueError, TypeError, LookupError) as error:
            raise _unlike(self.spec.task, "The first observation", error) from error

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        if self._over.any():  # in the middle of a chunk: what they do until the worker resets them is not read
            self.env.reset(options={"reset_mask": self._over})
        order = np.argsort(np.asarray(env_ids))
        rows = self._to_action(actions[order])
        answer = self.env.step(np.asarray(rows))
        try:
            self._put(answer, out)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise _unlike(self.spec.task, "A step", error) from error

    def _put(self, answer: tuple[Any, ...], out: StepBuffers) -> None:
        observation, reward, terminated, truncated, info = answer
        never: np.ndarray = np.zeros(self.env.num_envs, bool)
        success = never if self._success_key is None else info.get(self._success_key, never)
        for name, given in (("reward", reward), ("terminated", terminated), ("truncated", truncated), ("success", success)):
            column = np.asarray(given)
            if column.shape != never.shape:
                raise ValueError(f"{name} has the shape {column.shape}, not {never.shape}")
            vars(out)[name][:] = column
        self._over = out.terminated | out.truncated
        for i in range(self.env.num_envs):
            self._write(out.observation, i, spaces.row_of(observation, i))
            out.info[i] = spaces.info_row(info, i)

    def render(self, env_id: int) -> np.ndarray:
        """One frame [H, W, 3] uint8. Raises UserError if the vector environment cannot render."""
        return _picture(self.spec, lambda: self.env.render()[env_id])  # type: ignore[index]

    def close(self) -> None:
        self.env.close()


def _spec_of(env: Any, seen: gymnasium.Space, acted: gymnasium.Space, task: str | None) -> SimSpec:
    """Spec of an environment, or of a vector of them, with these spaces; the caller sets `reports_success` and `snapshots`."""
    registered = env.spec
    return SimSpec(
        task=task or (registered.id if registered is not None else type(env.unwrapped).__name__),
        observation={part.name: part.spec for part in spaces.observation_parts(seen)},
        action=spaces.action_spec(acted),
        max_episode_steps=registered.max_episode_steps if registered is not None else None,
        control_hz=spaces.control_hz(env),
        can_render=env.render_mode == "rgb_array",
        spaces={"observation": spaces.describe(seen), "action": spaces.describe(acted)},
    )


def _disable_autoreset(env: VectorEnv) -> None:
    base = env.unwrapped
    if isinstance(base, SyncVectorEnv) and base.autoreset_mode is not AutoresetMode.DISABLED:
        base.autoreset_mode = AutoresetMode.DISABLED
        base.metadata = {**base.metadata, "autoreset_mode": AutoresetMode.DISABLED}
    mode = env.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.DISABLED and mode != "Disabled":
        raise UserError(
            f"Vector environment {type(base).__name__} resets automatically (autoreset mode {mode}). Make it with "
            "autoreset_mode='Disabled' (gymnasium.make_vec: vectorization_mode='sync'; vector_kwargs={'autoreset_mode': 'Disabled'} "
            "for 'async')."
        )
