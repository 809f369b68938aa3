"""Transitions for learning with a critic: rewards of n steps, and what comes after, exact at every kind of episode's end.

Shape legend: T units of one sequence (steps, or messages of several steps), S slots beside each other, B transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, Observation, Rollout

RewardKind = Literal["recorded", "success"]
"""recorded: the simulator's. success: 1 at a step that succeeds, after which nothing counts, else 0."""


@dataclass(frozen=True)
class Transitions:
    """What a critic learns from: Q(observation, action) ≈ reward + discount · V(next_observation)."""

    observation: Observation
    """{key: [B, ...]}"""
    action: np.ndarray
    """[B, A] float32 normalised, within [-1, 1]; int64 [B, 1] for discrete. Of messages: [B, K, A], 0 where not executed."""
    reward: np.ndarray
    """[B] float32: discounted sum until the next observation."""
    discount: np.ndarray
    """[B] float32: γ to the power of the steps between, 0 after a terminated step."""
    next_observation: Observation
    """{key: [B, ...]}; of a truncated episode its final one. Not to be looked at where discount is 0."""
    executed: np.ndarray | None = None
    """[B, K] bool: of actions [B, K, A], those that exist; None: actions are single steps."""

    @property
    def num_rows(self) -> int:
        """B"""
        return len(self.reward)

    def columns(self) -> dict[str, np.ndarray]:
        """``observation.<key>``, ``next_observation.<key>``, ``action``, ``reward``, ``discount`` and, of chunks, ``executed``."""
        own = {"action": self.action, "reward": self.reward, "discount": self.discount}
        own |= {} if self.executed is None else {"executed": self.executed}
        before = {f"observation.{key}": part for key, part in self.observation.items()}
        return {**before, **{f"next_observation.{key}": part for key, part in self.next_observation.items()}, **own}

    @staticmethod
    def of_columns(columns: Mapping[str, np.ndarray]) -> Transitions:
        """The inverse of `columns`."""

        def below(side: str) -> Observation:
            return {name.removeprefix(f"{side}."): part for name, part in columns.items() if name.startswith(f"{side}.")}

        own = (columns["action"], columns["reward"], columns["discount"], below("next_observation"), columns.get("executed"))
        return Transitions(below("observation"), *own)

    @staticmethod
    def concatenate(parts: list[Transitions]) -> Transitions:
        """One after another; at least one."""
        if len(parts) == 1:
            return parts[0]
        return Transitions(
            observation={key: np.concatenate([part.observation[key] for part in parts]) for key in parts[0].observation},
            action=np.concatenate([part.action for part in parts]),
            reward=np.concatenate([part.reward for part in parts]),
            discount=np.concatenate([part.discount for part in parts]),
            next_observation={key: np.concatenate([part.next_observation[key] for part in parts]) for key in parts[0].next_observation},
            executed=None if parts[0].executed is None else np.concatenate([p.executed for p in parts if p.executed is not None]),
        )


@dataclass(frozen=True)
class Windows:
    """For each unit of a sequence: what the n units from it on bring."""

    reward: np.ndarray
    """[T, ...] float32: r_t + c_t r_{t+1} + c_t c_{t+1} r_{t+2} + …, c the units' discounts."""
    end: np.ndarray
    """[T, ...] int64: last unit of the window; the next observation is the one after it."""
    discount: np.ndarray
    """[T, ...] float32: product of the window's c, 0 where its last unit terminated."""


def n_step_windows(reward: np.ndarray, factor: np.ndarray | float, terminated: np.ndarray, truncated: np.ndarray, n: int) -> Windows:
    """Returns over n units, cut at the end of an episode and at the end of the sequence, where they bootstrap earlier.

    The n-step return of Sutton and Barto, Reinforcement Learning (2018), eq. 7.1. A shorter window is as good a target: nothing is
    left out and nothing of another episode gets in.

    Args:
        reward: [T, ...] of each unit.
        factor: [T, ...] or one number: discount over each unit, γ for a step, γ^m for a message of m steps.
        terminated, truncated: [T, ...] bool: the episode ends with this unit.
        n: at least 1.
    """
    length = len(reward)
    factors = np.broadcast_to(np.asarray(factor, np.float64), reward.shape)
    total, discount = np.zeros(reward.shape), np.ones(reward.shape)
    end = np.broadcast_to(np.arange(length).reshape(-1, *[1] * (reward.ndim - 1)), reward.shape).copy()
    alive = np.ones(reward.shape, bool)
    stops = terminated | truncated
    for ahead in range(min(n, length)):
        rest = length - ahead
        going = alive[:rest]
        total[:rest] += np.where(going, discount[:rest] * reward[ahead:], 0.0)
        discount[:rest] *= np.where(going, factors[ahead:] * ~terminated[ahead:], 1.0)
        end[:rest] += going & (ahead > 0)
        going &= ~stops[ahead:]
        alive[max(rest - 1, 0) :] = False  # the sequence ends there
    return Windows(total.astype(np.float32), end, discount.astype(np.float32))


def outcome(kind: RewardKind, reward: np.ndarray, terminated: np.ndarray, success: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and ends as a learner sees them, see `RewardKind`. Raises ValueError where success is wanted and not known."""
    if kind == "recorded":
        return reward, terminated
    if success is None:
        raise ValueError("reward='success' needs the success of each step.")
    return success.astype(np.float32), terminated | success


def rollout_transitions(
    rollout: Rollout, keys: tuple[str, ...], action: np.ndarray, *, gamma: float, n_step: int = 1, reward: RewardKind = "recorded"
) -> Transitions:
    """All decisions of a rollout [T, N] as B = T·N transitions, time-major; windows are cut at the rollout's end.

    A chunk is one decision: its rewards are summed with their discounts up to where it was cut, and what follows counts γ to the power of
    its steps.

    Args:
        action: [B, A] as critics read it, or chunks [B, K, A]; steps that were not executed are set to 0.
    """
    steps, slots = rollout.reward.shape
    units, executed = _decisions(rollout, gamma, reward), None
    windows = n_step_windows(units.reward, units.factor, units.terminated, units.truncated, n_step)
    slot = np.broadcast_to(np.arange(slots), (steps, slots))
    final = np.argwhere(rollout.truncated & ~rollout.terminated)
    after: Observation = {}
    for key in keys:
        following = np.concatenate([rollout.observation[key][1:], rollout.last_observation[key][None]])
        following[final[:, 0], final[:, 1]] = rollout.final_observation[key]
        after[key] = following[windows.end, slot].reshape(steps * slots, *following.shape[2:])
    if rollout.executed is not None:
        executed = rollout.executed.reshape(steps * slots, -1)
        action = np.where(executed[..., None], action, 0).astype(action.dtype)
    return Transitions(
        {key: rollout.observation[key].reshape(steps * slots, *rollout.observation[key].shape[2:]) for key in keys},
        action,
        windows.reward.reshape(-1),
        windows.discount.reshape(-1),
        after,
        executed,
    )


@dataclass(frozen=True)
class Units:
    """What came of each unit of a sequence; all [T, ...]."""

    reward: np.ndarray
    """Discounted sum over its steps."""
    factor: np.ndarray
    """γ to the power of its steps."""
    terminated: np.ndarray
    truncated: np.ndarray


def _decisions(rollout: Rollout, gamma: float, kind: RewardKind) -> Units:
    """Of each decision of a rollout. A chunk that succeeds in its middle counts up to there where success is what is rewarded."""
    if rollout.executed is None or rollout.chunk_reward is None:
        rewards, terminated = outcome(kind, rollout.reward, rollout.terminated, rollout.success)
        return Units(rewards, np.full(rewards.shape, float(gamma)), terminated, rollout.truncated)
    rewards, over = outcome(kind, rollout.chunk_reward, np.zeros_like(rollout.executed), rollout.chunk_success)
    before = np.cumsum(over, axis=-1) - over > 0
    counted = rollout.executed & ~before
    powers = np.power(float(gamma), np.arange(rewards.shape[-1]))
    return Units(
        (rewards.astype(np.float64) * counted) @ powers,
        np.power(float(gamma), counted.sum(-1)),
        rollout.terminated | (over & counted).any(-1),
        rollout.truncated,
    )


def normalise_actions(action: np.ndarray, spec: ActionSpec, *, margin: float = 0.0) -> np.ndarray:
    """The inverse of `ActionSpec.denormalise`: actions [..., A] in the simulator's units onto [-1 + margin, 1 - margin].

    What lies beyond the bounds is clipped, as simulators do it; a dimension without extent becomes 0. Discrete choices pass through.

    Args:
        margin: keeps a squashed policy's targets where tanh can reach them: it is 1 only at infinity.

    Raises:
        UserError: the simulator's bounds are not finite, so that there is nothing to normalise by.
    """
    if spec.kind != "continuous":
        return action.astype(np.int64)
    low, high = np.asarray(spec.low, np.float64), np.asarray(spec.high, np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise UserError("Recorded actions cannot be normalised: the simulator's action bounds are not finite. Wrap it so that they are.")
    half = 0.5 * (high - low)
    flat = half <= 0
    unit = (np.asarray(action, np.float64) - low) / np.where(flat, 1.0, half) - 1.0
    limit = 1.0 - margin
    return np.clip(np.where(flat, 0.0, unit), -limit, limit).astype(np.float32)


class ReplayBuffer:
    """A ring of `capacity` transitions; the oldest are overwritten. Memory is taken as it fills."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_added = 0
        """Transitions ever added; the next one goes to this number modulo capacity."""
        self._columns: dict[str, np.ndarray] = {}
        """{name of `Transitions.columns`: [capacity, ...]}, made as the first transitions come."""

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def add(self, transitions: Transitions) -> None:
        """Append B transitions; of more than fit, the last."""
        rows = (self.num_added + np.arange(transitions.num_rows)) % self.capacity
        kept = slice(max(0, transitions.num_rows - self.capacity), None)
        given = transitions.columns()
        if not self._columns:
            self._make(given)
        for name, column in self._columns.items():
            column[rows[kept]] = given[name][kept]
        self.num_added += transitions.num_rows

    def _make(self, like: Mapping[str, np.ndarray]) -> None:
        # Pages of np.empty are taken from the system when they are written to.
        self._columns = {name: np.empty((self.capacity, *part.shape[1:]), part.dtype) for name, part in like.items()}

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """B = size transitions, drawn with replacement. Raises ValueError while there is none."""
        rows = rng.integers(len(self), size=size)
        return Transitions.of_columns({name: column[rows] for name, column in self._columns.items()})

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The rows that are filled, and their count: all that a resumed run needs."""
        return {"num_added": np.array(self.num_added, np.int64), **{name: column[: len(self)] for name, column in self._columns.items()}}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exactly. Raises KeyError or ValueError for another buffer's state."""
        self.num_added = int(state["num_added"])
        rest = {name: part for name, part in state.items() if name != "num_added"}
        if self.num_added and not self._columns:
            self._make(rest)
        for name, column in self._columns.items():
            column[: len(self)] = rest[name]
