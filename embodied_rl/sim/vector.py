"""An EnvManager seen as a gymnasium.vector.VectorEnv, for libraries that know that interface."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, SupportsIndex

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from embodied_rl.errors import UserError
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.types import ActionSpec, EpisodeSummary, Observation, StepBatch, TensorSpec, VariableSpec

Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class ManagerVectorEnv(VectorEnv):
    """Lockstep view of a manager.

    Observations are copies. A simulator whose only observation is ``state`` gives plain arrays [N, D]; others give dictionaries.
    ``infos["success"]`` [N] is that of the step, where the simulator knows it; ``infos["aborted"]`` [N] is there when a fault made an
    episode be given up. Closing the view closes the manager.
    """

    def __init__(self, manager: EnvManager, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP) -> None:
        """How the view reports an episode's end (https://farama.org/Vector-Autoreset-Mode).

        Args:
            manager: whose slots are shown.
            autoreset_mode: SAME_STEP: the step that ends an episode gives the next one's first observation, and the last one in
                ``infos["final_obs"]``. NEXT_STEP, gymnasium's own default, which some of its wrappers insist on: it gives the last
                observation; the next step ignores the slot's action and gives the first one, with reward 0. DISABLED: a slot whose episode
                is over must be begun by ``reset(options={"reset_mask": …})`` before the next step; the manager is one with
                ``autoreset=False``.

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
        parts: dict[str, gymnasium.Space[Any]] = {key: _space(part) for key, part in spec.observation.items()}
        self._plain = list(parts) == ["state"]
        self.single_observation_space = parts["state"] if self._plain else gymnasium.spaces.Dict(parts)
        self.single_action_space = _action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"], "render_fps": round(spec.control_hz or 30)}
        self.render_mode = "rgb_array" if spec.can_render else None
        self._seeds: EpisodeSeeds | None = None
        self._seed_round = 0
        self._mode = mode
        self._over = np.zeros(self.num_envs, bool)
        self._current: dict[str, np.ndarray] = {}
        """NEXT_STEP: {key: [N, ...]} of the running episodes; where one is over, the first of the next. DISABLED: what was shown last."""
        self._streams: list[SeedStream] = []
        self._index = np.zeros(self.num_envs, np.int64)
        """DISABLED: the seeds of each slot's episodes, and the number there of the present one."""

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all slots.

        Args:
            seed: one, from which every slot's and every later episode's seed follows; or a list with that of each slot's next episode
                (None: one that follows from the others), from which those of later episodes follow; None: go on with new ones.
            options: ``{"reconfigure": True}`` also forgets what the simulator keeps between episodes. Only for DISABLED:
                ``{"reset_mask": [N] bool}`` begins new episodes in these slots, and leaves the others where they are; `seed` is then
                of these slots.

        Raises:
            UserError: a list of another length, a seed out of [0, 2**31), a mask of another shape or kind, or any other option.
        """
        disabled = self._mode is AutoresetMode.DISABLED
        known = ["reconfigure", *(["reset_mask"] if disabled else [])]
        if unknown := sorted(set(options or {}) - set(known)):
            raise UserError(f"reset takes the option {' or '.join(map(repr, known))}, got {', '.join(map(repr, unknown))}.")
        if "reset_mask" in (options or {}):
            return self._reset_some(seed, **(options or {})), {}
        self._seed_round = 0 if seed is not None else self._seed_round + 1
        if isinstance(seed, SupportsIndex):
            self._seeds = EpisodeSeeds.training(int(seed))
        elif seed is not None:
            self._seeds = _seeds_of_slots(seed, self.num_envs)
        batch = self.manager.reset(self._seeds, seed_round=self._seed_round, reconfigure=bool((options or {}).get("reconfigure")))
        self._over[:] = False
        if self._mode is not AutoresetMode.SAME_STEP:
            self._current = {key: part.copy() for key, part in batch.observation.items()}
        if disabled:
            self._index[:] = 0
            seeds = self._seeds or self.manager.seeds
            self._streams = [SeedStream(seeds, self._seed_round, slot, self.num_envs) for slot in range(self.num_envs)]
        return self._copy(batch.observation), {}

    def _reset_some(self, seed: int | Sequence[int | None] | None, reset_mask: np.ndarray, reconfigure: bool = False) -> Any:
        """New episodes in some slots. Returns the observations of all."""
        if (
            not isinstance(reset_mask, np.ndarray)
            or reset_mask.dtype != bool
            or reset_mask.shape != (self.num_envs,)
            or not reset_mask.any()
        ):
            told = f"{reset_mask.dtype} {list(reset_mask.shape)}" if isinstance(reset_mask, np.ndarray) else type(reset_mask).__name__
            raise UserError(f"options['reset_mask'] must be a numpy array [{self.num_envs}] of bool with at least one True, got {told}.")
        if reconfigure:
            raise UserError("reset takes the option 'reconfigure' for all slots together: leave 'reset_mask' out.")
        if not self._streams:
            raise UserError("The first reset begins episodes in all slots: leave 'reset_mask' out.")
        slots = np.flatnonzero(reset_mask)
        self._index[slots] += 1
        if seed is not None:
            seeds = EpisodeSeeds.training(int(seed)) if isinstance(seed, SupportsIndex) else _seeds_of_slots(seed, self.num_envs)
            for slot in slots.tolist():
                self._streams[slot], self._index[slot] = SeedStream(seeds, 0, slot, self.num_envs), 0
        self.manager.begin(slots, [self._streams[slot].seed(int(self._index[slot])) for slot in slots])
        for key, part in self.manager.recv(slots).observation.items():
            self._current[key][slots] = part
        self._over[slots] = False
        return self._copy(self._current)

    def step(self, actions: np.ndarray) -> Stepped:
        """One step of every slot with actions in the simulator's units."""
        rows = np.asarray(actions).reshape(self.num_envs, -1)
        if self._mode is AutoresetMode.NEXT_STEP:
            return self._step_or_begin(rows)
        if self._over.any():  # only in DISABLED
            over = np.flatnonzero(self._over).tolist()
            raise UserError(f"The episodes of slots {over} are over: begin new ones first, reset(options={{'reset_mask': …}}).")
        batch = self.manager.step(rows)
        infos = self._infos(batch, np.arange(self.num_envs))
        if self._mode is AutoresetMode.DISABLED:
            self._over = batch.done.copy()
            self._current = {key: part.copy() for key, part in batch.observation.items()}
            if batch.episodes:
                infos |= self._final_info(batch.episodes)
        elif batch.done.any():
            done = batch.done
            final = np.full(self.num_envs, None, dtype=object)
            for slot in np.flatnonzero(done):
                row = {key: part[slot].copy() for key, part in batch.final_observation.items()}
                final[slot] = row["state"] if self._plain else row
            infos |= {"final_obs": final, "_final_obs": done, "final_info": self._final_info(batch.episodes), "_final_info": done}
        return self._copy(batch.observation), batch.reward.astype(np.float64), batch.terminated.copy(), batch.truncated.copy(), infos

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self.manager.render(range(self.num_envs)))

    def close_extras(self, **kwargs: Any) -> None:
        self.manager.close()

    def _step_or_begin(self, actions: np.ndarray) -> Stepped:
        """NEXT_STEP: slots whose episode is over show the first observation of the next, which is here already; the others step."""
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        shown = {key: part.copy() for key, part in self._current.items()}
        infos: dict[str, Any] = {}
        going = np.flatnonzero(~self._over)
        if len(going):
            self.manager.send(going, actions[going])
            batch = self.manager.recv(going)
            done = batch.done
            for key, part in batch.observation.items():
                self._current[key][going] = shown[key][going] = part
                shown[key][going[done]] = batch.final_observation[key][done]
            reward[going], terminated[going], truncated[going] = batch.reward, batch.terminated, batch.truncated
            infos = self._infos(batch, going)
        self._over = terminated | truncated
        return shown["state"] if self._plain else shown, reward, terminated, truncated, infos

    def _infos(self, batch: StepBatch, slots: np.ndarray) -> dict[str, Any]:
        """The ``infos`` of a step, as gymnasium lays them out: an entry per slot, and a mask of the slots that have one."""
        infos: dict[str, Any] = {}
        stepped = np.isin(np.arange(self.num_envs), slots)
        for key, values in (("success", batch.success if self.manager.spec.reports_success else None), ("aborted", batch.aborted)):
            if values is not None:
                infos[key] = np.zeros(self.num_envs, bool)
                infos[key][slots], infos[f"_{key}"] = values, stepped
        return infos

    def _final_info(self, episodes: Sequence[EpisodeSummary]) -> dict[str, Any]:
        """Return, length and success of the episodes that ended, with gymnasium's masks; one that was given up is in none."""
        returns, lengths, success = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        ended = np.zeros(self.num_envs, bool)
        for episode in episodes:
            ended[episode.slot] = True
            returns[episode.slot], lengths[episode.slot] = episode.episode_return, episode.length
            success[episode.slot] = episode.success_once
        info: dict[str, Any] = {"episode": {"r": returns, "_r": ended, "l": lengths, "_l": ended}, "_episode": ended}
        return info | {"is_success": success, "_is_success": ended}

    def _copy(self, observation: Observation) -> Any:
        return observation["state"].copy() if self._plain else {key: part.copy() for key, part in observation.items()}


def _seeds_of_slots(seeds: Sequence[int | None], num_slots: int) -> EpisodeSeeds:
    """Each slot's first seed as given; the others follow from the list."""
    first = tuple(None if seed is None else int(seed) for seed in seeds)
    if len(first) != num_slots:
        raise UserError(f"A list of seeds must have one for each of the {num_slots} slots, got {len(first)}.")
    if wrong := [seed for seed in first if seed is not None and not 0 <= seed < 2**31]:
        raise UserError(f"Seeds must be between 0 and 2**31 - 1, got {wrong[0]}.")
    digest = hashlib.blake2b(repr(first).encode(), digest_size=4).digest()
    return EpisodeSeeds.training(int.from_bytes(digest, "little"), first=first)


def _space(part: TensorSpec | VariableSpec) -> gymnasium.spaces.Box:
    if isinstance(part, VariableSpec):
        raise UserError(
            f"Observations of kind '{part.kind}' have no fixed space, so that this simulator cannot be a gymnasium.vector.VectorEnv."
        )
    kind = np.dtype(part.dtype)
    if kind.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, part.shape, kind.type)
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    return gymnasium.spaces.Box(limits.min if limits else 0, limits.max if limits else 1, part.shape, kind.type)


def _action_space(action: ActionSpec) -> gymnasium.Space[Any]:
    if action.kind == "text":
        raise UserError("Text actions have no fixed space, so that this simulator cannot be a gymnasium.vector.VectorEnv.")
    if action.kind == "discrete":
        return gymnasium.spaces.Discrete(action.num_actions)
    return gymnasium.spaces.Box(np.asarray(action.low, np.float32), np.asarray(action.high, np.float32), dtype=np.float32)
