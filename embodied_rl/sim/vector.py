"""An EnvManager as a gymnasium.vector.VectorEnv or a gymnasium.Env, for libraries that use these interfaces."""

from __future__ import annotations

import dataclasses
import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from embodied_rl.config import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.spaces import action_rows, gather, info_row, observation_parts, row_of, space_of
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.types import ActionSpec, Observation, SimSpec, StepBatch, TensorSpec, VariableSpec

Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class WrongMaskError(UserError, TypeError):
    """A reset mask has the wrong type: gymnasium's callers expect a TypeError."""


class AnyText(gymnasium.spaces.Text):
    """Texts of any characters; gymnasium's own space lists all that may occur. Samples are ASCII."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


def make_vec_env(
    sim: str,
    num_envs: int | None = None,
    *,
    num_workers: int | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    seed: int = 0,
    task: str | None = None,
    **kwargs: Any,
) -> ManagerVectorEnv:
    """A simulator of the catalogue as a vector environment with its own worker processes: ``make_vec_env("maniskill_pushcube", 8)``.

    Args:
        sim: a name of ``python -m embodied_rl.catalog sims``.
        num_envs: environments; None: the number in the simulator's configuration.
        num_workers: processes; None: as many as there are cores.
        autoreset_mode: see `ManagerVectorEnv`.
        seed: seed of the episodes if `reset` gets none.
        task: another task of the same simulator.
        kwargs: arguments of the simulator, which override its configuration.

    Raises UserError: a name, task or argument that is not known, or observations or actions without a fixed space.
    """
    config = load_sim_config(sim)
    slots = config.num_slots if num_envs is None else num_envs
    config = dataclasses.replace(
        config, task=task or config.task, kwargs={**config.kwargs, **kwargs}, num_slots=slots, num_workers=num_workers, pipeline_groups=1
    )
    autoreset = AutoresetMode(autoreset_mode) is not AutoresetMode.DISABLED
    manager = EnvManager.from_config(config, EpisodeSeeds.training(seed), autoreset=autoreset)
    try:
        return ManagerVectorEnv(manager, autoreset_mode)
    except BaseException:
        manager.close()
        raise


def make_env(sim: str, *, task: str | None = None, **kwargs: Any) -> ManagerEnv:
    """One environment of a simulator of the catalogue, in its own process, as a `gymnasium.Env`: ``make_env("cartpole")``.

    Arguments and errors are those of `make_vec_env`.
    """
    return ManagerEnv(make_vec_env(sim, 1, num_workers=1, autoreset_mode=AutoresetMode.DISABLED, task=task, **kwargs))


class ManagerEnv(gymnasium.Env[Any, Any]):
    """The only slot of a view with autoreset DISABLED, as a `gymnasium.Env`. Closing it closes the manager."""

    def __init__(self, view: ManagerVectorEnv) -> None:
        """Raises UserError for a view with several slots or another mode."""
        if view.num_envs != 1 or view.metadata["autoreset_mode"] is not AutoresetMode.DISABLED:
            mode = view.metadata["autoreset_mode"].name
            raise UserError(f"A gymnasium.Env shows one slot with autoreset DISABLED; this view has {view.num_envs} with {mode}.")
        self.view = view
        self.observation_space, self.action_space = view.single_observation_space, view.single_action_space
        self.metadata = {key: value for key, value in view.metadata.items() if key != "autoreset_mode"}
        self.render_mode = view.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode with `seed`, in [0, 2**31), or with the next one that follows from the last given seed."""
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(2**30)) if seed is None else seed
        observation, infos = self.view.reset(seed=[chosen], options=options)
        return row_of(observation, 0), info_row(infos, 0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step with an action in the simulator's units."""
        actions = {key: [part] for key, part in action.items()} if isinstance(action, Mapping) else [action]
        observation, reward, terminated, truncated, infos = self.view.step(actions)
        return row_of(observation, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info_row(infos, 0)

    def render(self) -> np.ndarray:
        """Picture [H, W, 3] uint8. Raises UserError if the simulator cannot draw."""
        return self.view.render()[0]

    def close(self) -> None:
        self.view.close()


class ManagerVectorEnv(VectorEnv):
    """Lockstep view of a manager.

    The spaces are those of the adapted gymnasium environment, with its bounds and dtypes; the numbers are the slabs', in float32. For a
    simulator without such spaces a lone ``state`` becomes plain arrays [N, D], and other observations become dictionaries. Texts are tuples
    of N. Observations are copies. ``infos["success"]`` [N] is the step's, if the simulator reports it; ``infos["aborted"]`` [N] appears
    when a fault ended an episode early. Closing the view closes the manager.
    """

    def __init__(self, manager: EnvManager, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP) -> None:
        """Choose how the view reports an episode's end (https://farama.org/Vector-Autoreset-Mode).

        Args:
            autoreset_mode: SAME_STEP: the step that ends an episode returns the next one's first observation, and the last one in
                ``infos["final_obs"]``. NEXT_STEP, gymnasium's default, which some of its wrappers require: that step returns the last
                observation; the next step ignores the slot's action and returns the first one, with reward 0. DISABLED: call
                ``reset(options={"reset_mask": …})`` for an ended slot before the next step; the manager needs ``autoreset=False``.

        Raises:
            UserError: a manager whose `autoreset` does not fit the mode, or with chunks, or observations or actions without a fixed space.
        """
        mode = AutoresetMode(autoreset_mode)
        if manager.autoreset == (mode is AutoresetMode.DISABLED):
            needed = "DISABLED needs a manager that was made with autoreset=False (EnvManager(…, autoreset=False))"
            other = "SAME_STEP and NEXT_STEP need one that begins the next episodes itself (autoreset=True)"
            raise UserError(f"autoreset_mode {mode.name} does not fit this manager: {needed}; {other}.")
        if manager.chunk_size > 1:
            raise UserError(
                f"A gymnasium.vector.VectorEnv steps once a call: the manager's chunk_size must be 1, got {manager.chunk_size}."
            )
        self.manager = manager
        self.num_envs = manager.num_slots
        spec = manager.spec
        self.single_observation_space = _observation_space(spec)
        self.single_action_space = _action_space(spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"], "render_fps": round(spec.control_hz or 30)}
        self.render_mode = "rgb_array" if spec.can_render else None
        self._seeds: EpisodeSeeds | None = None
        self._seed_round = 0
        self._mode, self._begun = mode, False
        self._over = np.zeros(self.num_envs, bool)
        self._current: dict[str, np.ndarray] = {}
        """NEXT_STEP: {key: [N, ...]} of the running episodes, or of the next one after an end. DISABLED: the last observations shown."""
        self._streams: list[SeedStream] = []
        self._index = np.zeros(self.num_envs, np.int64)
        """DISABLED: number of each slot's present episode among its seeds."""

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all slots.

        Args:
            seed: one seed, from which all slots' and later episodes' seeds follow; or a list with the seed of each slot's next episode
                (None: it follows from the others), from which later ones follow; None: continue with new seeds.
            options: ``{"reconfigure": True}`` also forgets what the simulator keeps between episodes. Only for DISABLED:
                ``{"reset_mask": [N] bool}`` begins new episodes in these slots and leaves the others as they are; `seed` then
                belongs to these slots. The very first reset begins episodes in all slots.

        Raises:
            UserError: a list of another length, a seed out of [0, 2**31), a mask of another shape, or any other option.
            WrongMaskError: a mask that is not an array of bool.
        """
        disabled = self._mode is AutoresetMode.DISABLED
        known = ["reconfigure", *(["reset_mask"] if disabled else [])]
        if unknown := sorted(set(options or {}) - set(known)):
            raise UserError(f"reset takes the option {' or '.join(map(repr, known))}, got {', '.join(map(repr, unknown))}.")
        if "reset_mask" in (options or {}):
            slots = self._masked(**(options or {}))
            if self._streams:
                return self._reset_some(seed, slots), {}
        self._seed_round = 0 if seed is not None else self._seed_round + 1
        if seed is not None:
            self._seeds = _seeds_of_slots(seed, self.num_envs)
        batch = self.manager.reset(self._seeds, seed_round=self._seed_round, reconfigure=bool((options or {}).get("reconfigure")))
        self._over[:], self._begun = False, True
        if self._mode is not AutoresetMode.SAME_STEP:
            self._current = {key: part.copy() for key, part in batch.observation.items()}
        if disabled:
            self._index[:] = 0
            seeds = self._seeds or self.manager.seeds
            self._streams = [SeedStream(seeds, self._seed_round, slot, self.num_envs) for slot in range(self.num_envs)]
        return self._copy(batch.observation), {}

    def _masked(self, reset_mask: Any, reconfigure: bool = False) -> np.ndarray:
        """Slots that a mask selects. Raises UserError and WrongMaskError."""
        if not isinstance(reset_mask, np.ndarray):
            raise WrongMaskError(f"`options['reset_mask']` must be a numpy array, got {type(reset_mask).__name__}.")
        if reset_mask.dtype != bool:
            raise WrongMaskError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {reset_mask.dtype}.")
        if reset_mask.shape != (self.num_envs,):
            raise UserError(f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {reset_mask.shape}.")
        if not reset_mask.any():
            wanted = "must contain a boolean array with at least one True value"
            raise UserError(f"`options['reset_mask']` {wanted}, got reset_mask={reset_mask}.")
        if reconfigure:
            raise UserError("reset takes the option 'reconfigure' for all slots together: leave 'reset_mask' out.")
        return np.flatnonzero(reset_mask)

    def _reset_some(self, seed: int | Sequence[int | None] | None, slots: np.ndarray) -> Any:
        """Begin new episodes in some slots. Returns the observations of all."""
        self._index[slots] += 1
        if seed is not None:
            seeds = _seeds_of_slots(seed, self.num_envs)
            for slot in slots.tolist():
                self._streams[slot], self._index[slot] = SeedStream(seeds, 0, slot, self.num_envs), 0
        self.manager.begin(slots, [self._streams[slot].seed(int(self._index[slot])) for slot in slots])
        for key, part in self.manager.recv(slots).observation.items():
            self._current[key][slots] = part
        self._over[slots] = False
        return self._copy(self._current)

    def step(self, actions: Any) -> Stepped:
        """Step every slot with actions of `action_space`, or a list of one action per slot, in the simulator's units."""
        if not self._begun:
            raise gymnasium.error.ResetNeeded("Call reset before the first step: it begins the episodes.")
        rows = action_rows(self.single_action_space, actions, self.num_envs)
        if self._mode is AutoresetMode.NEXT_STEP:
            return self._step_or_begin(rows)
        if self._over.any():  # only with DISABLED
            over = np.flatnonzero(self._over).tolist()
            raise UserError(f"The episodes of slots {over} are over: begin new ones first, reset(options={{'reset_mask': …}}).")
        batch = self.manager.step(rows)
        infos = self._infos(batch, np.arange(self.num_envs))
        if self._mode is AutoresetMode.DISABLED:
            self._over = batch.done.copy()
            self._current = {key: part.copy() for key, part in batch.observation.items()}
        elif batch.done.any():
            ends = {
                one.slot: {"episode": {"r": one.episode_return, "l": one.length}, "is_success": one.success_once} for one in batch.episodes
            }
            for slot in np.flatnonzero(batch.done).tolist():
                last = row_of(self._copy({key: part[slot : slot + 1] for key, part in batch.final_observation.items()}), 0)
                infos = self._add_info(infos, {"final_obs": last}, slot)
                if slot in ends:  # aborted episodes have no end
                    infos = self._add_info(infos, {"final_info": ends[slot]}, slot)
        return self._copy(batch.observation), batch.reward.astype(np.float64), batch.terminated.copy(), batch.truncated.copy(), infos

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self.manager.render(range(self.num_envs)))

    def close_extras(self, **kwargs: Any) -> None:
        self.manager.close()

    def _step_or_begin(self, actions: np.ndarray | list[str]) -> Stepped:
        """NEXT_STEP: slots with an ended episode show the next one's first observation, which is here already; the others step."""
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        shown = {key: part.copy() for key, part in self._current.items()}
        infos: dict[str, Any] = {}
        going = np.flatnonzero(~self._over)
        if len(going):
            self.manager.send(going, [actions[slot] for slot in going] if isinstance(actions, list) else actions[going])
            batch = self.manager.recv(going)
            done = batch.done
            for key, part in batch.observation.items():
                self._current[key][going] = shown[key][going] = part
                if done.any():  # without an ended episode, text parts have no final observation
                    shown[key][going[done]] = batch.final_observation[key][done]
            reward[going], terminated[going], truncated[going] = batch.reward, batch.terminated, batch.truncated
            infos = self._infos(batch, going)
        self._over = terminated | truncated
        return self._copy(shown), reward, terminated, truncated, infos

    def _infos(self, batch: StepBatch, slots: np.ndarray) -> dict[str, Any]:
        """``infos`` of a step in gymnasium's layout: an entry per slot, and a mask of the slots that have one."""
        infos: dict[str, Any] = {}
        stepped = np.isin(np.arange(self.num_envs), slots)
        for key, values in (("success", batch.success if self.manager.spec.reports_success else None), ("aborted", batch.aborted)):
            if values is not None:
                infos[key] = np.zeros(self.num_envs, bool)
                infos[key][slots], infos[f"_{key}"] = values, stepped
        return infos

    def _copy(self, observation: Observation) -> Any:
        return gather(self.single_observation_space, observation)


def _seeds_of_slots(seeds: int | Sequence[int | None], num_slots: int) -> EpisodeSeeds:
    """All from one seed; or each slot's first seed as given, and later ones from the list."""
    if isinstance(seeds, int | np.integer):
        return EpisodeSeeds.training(int(seeds))
    first = tuple(None if seed is None else int(seed) for seed in seeds)
    if len(first) != num_slots:
        raise UserError(f"A list of seeds must have one for each of the {num_slots} slots, got {len(first)}.")
    if wrong := [seed for seed in first if seed is not None and not 0 <= seed < 2**31]:
        raise UserError(f"Seeds must be between 0 and 2**31 - 1, got {wrong[0]}.")
    digest = hashlib.blake2b(repr(first).encode(), digest_size=4).digest()
    return EpisodeSeeds.training(int.from_bytes(digest, "little"), first=first)


def _observation_space(spec: SimSpec) -> gymnasium.Space[Any]:
    """The adapted environment's space if the parts are unchanged; else a space made of the parts."""
    if "observation" in spec.spaces:
        own = space_of(spec.spaces["observation"])
        if {part.name: part.spec for part in observation_parts(own)} == dict(spec.observation):
            return own
    parts = {key: _space(part) for key, part in spec.observation.items()}
    return parts["state"] if list(parts) == ["state"] else gymnasium.spaces.Dict(parts)


def _space(part: TensorSpec | VariableSpec) -> gymnasium.Space[Any]:
    if isinstance(part, VariableSpec):
        if part.kind == "text":
            return AnyText(part.max_bytes)
        raise UserError(
            f"Observations of kind '{part.kind}' have no fixed space, so that this simulator cannot be a gymnasium.vector.VectorEnv."
        )
    kind = np.dtype(part.dtype)
    if kind.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, part.shape, kind.type)
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    return gymnasium.spaces.Box(limits.min if limits else 0, limits.max if limits else 1, part.shape, kind.type)


def _action_space(spec: SimSpec) -> gymnasium.Space[Any]:
    action: ActionSpec = spec.action
    if "action" in spec.spaces:
        return space_of(spec.spaces["action"])
    if action.kind == "text":
        return AnyText(action.max_bytes)
    if action.kind == "discrete":
        return gymnasium.spaces.Discrete(action.num_actions)
    return gymnasium.spaces.Box(np.asarray(action.low, np.float32), np.asarray(action.high, np.float32), dtype=np.float32)
