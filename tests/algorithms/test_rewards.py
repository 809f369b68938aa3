from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest

from embodied_rl.algorithms.rewards import ReturnNormalizer


def test_equals_a_loop_over_all_rollouts() -> None:
    rng = np.random.default_rng(0)
    normalizer = ReturnNormalizer(gamma=0.9, clip=2.0)
    running, seen = np.zeros(3), []
    for _ in range(4):
        reward = (rng.normal(size=(11, 3)) * 3 + 1).astype(np.float32)
        done = rng.random((11, 3)) < 0.2
        normalised = normalizer(reward, done)
        for t in range(11):
            running = running * 0.9 + reward[t]
            seen.extend(running.tolist())
            running[done[t]] = 0.0
        assert normalizer.var == pytest.approx(np.var(seen), rel=1e-10)
        expected = np.clip(reward / np.sqrt(np.var(seen) + 1e-8), -2.0, 2.0)
        np.testing.assert_allclose(normalised, expected, rtol=1e-5)
        assert normalised.dtype == np.float32


class _Scripted(gymnasium.Env[np.ndarray, np.int64]):
    """Rewards 1, 2, 3, … without end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.total = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.total += 1
        return np.zeros(1, np.float32), float(self.total), False, False, {}


def test_statistics_are_those_of_gymnasium() -> None:
    # Without episode ends: gymnasium 1.4 forgets the past one step early, at the terminal reward itself.
    wrapped = gymnasium.wrappers.NormalizeReward(_Scripted(), gamma=0.95)
    wrapped.reset(seed=0)
    for _ in range(50):
        wrapped.step(np.int64(0))
    normalizer = ReturnNormalizer(gamma=0.95)
    normalizer(np.arange(1.0, 51.0)[:, None], np.zeros((50, 1), bool))
    # gymnasium starts from a pseudo-count of 1e-4, hence the tolerance.
    assert normalizer.var == pytest.approx(float(wrapped.return_rms.var), rel=1e-3)


def test_state_survives_json_exactly() -> None:
    rng = np.random.default_rng(1)
    reward, done = rng.normal(size=(2, 8, 4)), np.zeros((8, 4), bool)
    first, second = ReturnNormalizer(0.99), ReturnNormalizer(0.99)
    first(reward[0], done)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert np.array_equal(first(reward[1], done), second(reward[1], done))
    assert first.state_dict() == second.state_dict()


def test_restart_forgets_running_returns_alone() -> None:
    normalizer = ReturnNormalizer(gamma=1.0)
    normalizer(np.full((5, 1), 2.0), np.zeros((5, 1), bool))
    count = normalizer.count
    normalizer.restart_episodes()
    normalizer(np.full((1, 1), 2.0), np.zeros((1, 1), bool))
    assert normalizer.carried is not None
    assert normalizer.carried.tolist() == [2.0]
    assert normalizer.count == count + 1
