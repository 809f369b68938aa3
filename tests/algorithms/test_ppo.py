from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from embodied_rl.algorithms import advantages
from embodied_rl.algorithms.ppo import PPO, RolloutValues, flat_rows
from embodied_rl.config import AlgorithmConfig
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.types import Rollout
from tests.algorithms.arrays import on_arrays

CONFIG = AlgorithmConfig(minibatch_size=2, gamma=0.9, gae_lambda=0.8)


def rollout_and_values() -> tuple[Rollout, RolloutValues]:
    rng = np.random.default_rng(0)
    terminated, truncated = np.zeros((2, 5, 3), bool)
    truncated[2, 1] = terminated[4, 0] = True

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    rollout = Rollout(
        observation={"state": normal(5, 3, 4)},
        action=normal(5, 3, 2),
        log_prob=normal(5, 3, 2),
        reward=normal(5, 3),
        terminated=terminated,
        truncated=truncated,
        last_observation={"state": normal(3, 4)},
        final_observation={"state": normal(1, 4)},
        policy_version=np.zeros((5, 3), np.int64),
        episodes=(),
    )
    return rollout, RolloutValues(normal(5, 3), normal(3), normal(1))


def estimate(rollout: Rollout, values: RolloutValues, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return on_arrays(advantages.gae)(
        reward=reward,
        value=values.value,
        last_value=values.last_value,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        final_value=values.final_value,
        gamma=0.9,
        gae_lambda=0.8,
    )


def test_rows_are_time_major_and_belong_together() -> None:
    rollout, values = rollout_and_values()
    batch = PPO(replace(CONFIG, normalize_advantage="none")).prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])})
    advantage, returns = estimate(rollout, values, rollout.reward)
    assert batch.num_rows == 15
    for row, (t, n) in enumerate(np.ndindex(5, 3)):
        assert np.array_equal(batch.observation["state"][row], rollout.observation["state"][t, n])
        assert np.array_equal(batch.action[row], rollout.action[t, n])
        assert np.array_equal(batch.log_prob[row], rollout.log_prob[t, n])
        assert batch.value[row] == values.value[t, n]
        assert batch.advantage[row] == advantage[t, n]
        assert batch.returns[row] == returns[t, n]


def test_whitening_changes_advantages_and_leaves_returns() -> None:
    rollout, values = rollout_and_values()
    plain, whitened = (
        PPO(replace(CONFIG, normalize_advantage=how)).prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])})
        for how in ("minibatch", "batch")
    )
    raw = plain.advantage.numpy()
    np.testing.assert_allclose(whitened.advantage.numpy(), (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)
    assert np.array_equal(plain.returns, whitened.returns)


def test_rewards_are_normalised_before_advantages() -> None:
    rollout, values = rollout_and_values()
    algorithm = PPO(replace(CONFIG, normalize_reward=True, normalize_advantage="none", reward_clip=1e9))
    batch = algorithm.prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])})
    assert algorithm.reward_normalizer is not None
    scaled = rollout.reward / np.sqrt(algorithm.reward_normalizer.moments.var + 1e-8)
    np.testing.assert_allclose(batch.returns.numpy().reshape(5, 3), estimate(rollout, values, scaled.astype(np.float32))[1], atol=1e-5)


def test_resumed_preparation_is_the_same() -> None:
    rollout, values = rollout_and_values()
    config = replace(CONFIG, normalize_reward=True)
    first, second = PPO(config), PPO(config)
    first.prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])})
    second.load_state_dict(first.state_dict())
    for algorithm in (first, second):
        algorithm.restart_episodes()
    assert np.array_equal(
        first.prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])}).advantage,
        second.prepare(rollout, values, {"state": flat_rows(rollout.observation["state"])}).advantage,
    )
    with pytest.raises(IncompatibleCheckpointError, match="normalize_reward=False now, but True"):
        PPO(CONFIG).load_state_dict(first.state_dict())
