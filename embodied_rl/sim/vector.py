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
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import ActionSpec, EpisodeSummary, Observation, StepBatch, TensorSpec, VariableSpec

Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class ManagerVectorEnv(VectorEnv):
    """Lockstep view of a manager.

    Observations are copies. A simulator whose only observation is ``state`` gives plain arrays [N, D]; others give dictionaries.
    ``infos["success"]`` [N] is that of the step, where the simulator knows it; ``infos["aborted"]`` [N] is there when a fault made an
    episode be given up. Closing the view closes the manager.
    """

    def __init__(self, manager: EnvManager, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP) -> None:
        """How an episode's end is told (https://farama.org/Vector-Autoreset-Mode).

        Args:
            manager: whose slots are shown.
            autoreset_mode: SAME_STEP: the step that ends an episode gives the next one's first observation, and the last one in
                ``infos["final_obs"]``. NEXT_STEP, gymnasium's own default, which some of its wrappers insist on: it gives the last
                observation; the next step ignores the slot's action and gives the first one, with reward 0.

        Raises:
            UserError: DISABLED, a manager without autoreset or with chunks, or observations or actions without a fixed space.
        """
        mode = AutoresetMode(autoreset_mode)
        if mode is AutoresetMode.DISABLED:
            raise UserError("The manager begins the next episode itself: autoreset_mode must be SAME_STEP or NEXT_STEP, got DISABLED.")
        if not manager.autoreset:
            raise UserError("A gymnasium.vector.VectorEnv begins its next episodes itself: the manager was made with autoreset=False.")
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
        self._at_next_step = mode is AutoresetMode.NEXT_STEP
        self._over = np.zeros(self.num_envs, bool)
        self._current: dict[str, np.ndarray] = {}
        """NEXT_STEP: {key: [N, ...]} of the running episodes; where one is over, the first of the next."""

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all slots.

        Args:
            seed: one, from which every slot's and every later episode's seed follows; or a list with that of each slot's next episode
                (None: one that follows from the others), from which those of later episodes follow; None: go on with new ones.
            options: ``{"reconfigure": True}`` also forgets what the simulator keeps between episodes.

        Raises:
            UserError: a list of another length, a seed out of [0, 2**31), or any other option.
        """
        if unknown := sorted(set(options or {}) - {"reconfigure"}):
            raise UserError(f"reset takes the option 'reconfigure', got {', '.join(map(repr, unknown))}.")
        self._seed_round = 0 if seed is not None else self._seed_round + 1
        if isinstance(seed, SupportsIndex):
            self._seeds = EpisodeSeeds.training(int(seed))
        elif seed is not None:
            self._seeds = _seeds_of_slots(seed, self.num_envs)
        batch = self.manager.reset(self._seeds, seed_round=self._seed_round, reconfigure=bool((options or {}).get("reconfigure")))
        self._over[:] = False
        if self._at_next_step:
            self._current = {key: part.copy() for key, part in batch.observation.items()}
        return self._copy(batch.observation), {}

    def step(self, actions: np.ndarray) -> Stepped:
        """One step of every slot with actions in the simulator's units."""
        rows = np.asarray(actions).reshape(self.num_envs, -1)
        if self._at_next_step:
            return self._step_or_begin(rows)
        batch = self.manager.step(rows)
        infos = self._infos(batch, np.arange(self.num_envs))
        if batch.done.any():
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
        """What every step tells, as gymnasium lays it out: an entry per slot, and a mask of the slots that have one."""
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
