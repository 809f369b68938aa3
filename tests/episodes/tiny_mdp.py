"""A Markov decision process small enough to write down every episode it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from embodied_rl.episodes.estimators import OffPolicyEpisodes, stack

TRANSITION = np.array([[[0.7, 0.2], [0.1, 0.6]], [[0.3, 0.3], [0.5, 0.5]]])
"""[state, action, next state]; what is missing to 1 ends the episode."""
REWARD = np.array([[1.0, -0.5], [0.25, 2.0]])
"""[state, action]"""
START = np.array([0.6, 0.4])
BEHAVIOUR = np.array([[0.5, 0.5], [0.7, 0.3]])
"""μ: [state, action]"""
TARGET = np.array([[0.9, 0.1], [0.2, 0.8]])
"""π"""


@dataclass(frozen=True)
class Path:
    """One episode that is possible."""

    probability: float
    """Under μ."""
    states: tuple[int, ...]
    actions: tuple[int, ...]


def paths(num_steps: int) -> list[Path]:
    """Every episode of at most `num_steps` steps."""

    def grow(state: int, probability: float, states: tuple[int, ...], actions: tuple[int, ...]) -> Iterator[Path]:
        for action in (0, 1):
            chance = probability * float(BEHAVIOUR[state, action])
            seen, done = (*states, state), (*actions, action)
            if len(done) == num_steps:
                yield Path(chance, seen, done)
                continue
            ends = 1.0 - float(TRANSITION[state, action].sum())
            if ends > 1e-12:
                yield Path(chance * ends, seen, done)
            for following in (0, 1):
                yield from grow(following, chance * float(TRANSITION[state, action, following]), seen, done)

    found = [path for state in (0, 1) for path in grow(state, float(START[state]), (), ())]
    assert abs(sum(path.probability for path in found) - 1) < 1e-12
    return found


def exact_values(num_steps: int, gamma: float, policy: np.ndarray = TARGET) -> list[np.ndarray]:
    """[V₀, V₁, …, V_T]: the value of each state with so many steps behind it, by backward induction."""
    values = [np.zeros(2)]
    for _ in range(num_steps):
        q = REWARD + gamma * TRANSITION @ values[0]
        values.insert(0, (policy * q).sum(axis=1))
    return values


def exact_value(num_steps: int, gamma: float) -> float:
    return float(START @ exact_values(num_steps, gamma)[0])


def off_policy(chosen: list[Path], gamma: float, model: list[np.ndarray] | None = None) -> OffPolicyEpisodes:
    """Episodes with their ratios; `model`: Q tables [state, action] by step, from which V = E_π Q."""
    ratio = np.log(TARGET) - np.log(BEHAVIOUR)
    q = v = None
    if model is not None:
        tables = [(table, (TARGET * table).sum(axis=1)) for table in model]
        q = [np.array([tables[t][0][s, a] for t, (s, a) in enumerate(zip(p.states, p.actions, strict=True))]) for p in chosen]
        v = [np.array([*(tables[t][1][s] for t, s in enumerate(p.states)), 0.0]) for p in chosen]
    return stack(
        [REWARD[list(p.states), list(p.actions)] for p in chosen],
        [ratio[list(p.states), list(p.actions)] for p in chosen],
        model_q=q,
        model_v=v,
    )


def sample_paths(count: int, num_steps: int, random: np.random.Generator) -> list[Path]:
    """Episodes played by μ."""
    every = paths(num_steps)
    numbers = random.choice(len(every), size=count, p=[path.probability for path in every])
    return [every[number] for number in numbers]
