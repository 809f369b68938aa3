"""The gymnasium.vector view, held against gymnasium's own vector environment."""

from __future__ import annotations

from contextlib import closing

import gymnasium
import numpy as np

from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.vector import ManagerVectorEnv


def test_it_steps_like_the_single_environments() -> None:
    manager = EnvManager(SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1"), 3, num_workers=2)
    singles = [gymnasium.make("CartPole-v1") for _ in range(3)]
    with closing(ManagerVectorEnv(manager)) as vector:
        assert vector.single_action_space == gymnasium.spaces.Discrete(2)
        observation, _ = vector.reset(seed=3)
        index = [0, 0, 0]
        rows = [env.reset(seed=EpisodeSeeds.training(3).seed(slot, 0, 3))[0] for slot, env in enumerate(singles)]
        np.testing.assert_array_equal(observation, rows)
        rng = np.random.default_rng(0)
        ended = 0
        for _ in range(60):
            actions = rng.integers(0, 2, 3)
            observation, reward, terminated, truncated, infos = vector.step(actions)
            for slot, env in enumerate(singles):
                row, single_reward, over, cut, _ = env.step(actions[slot])
                assert (single_reward, over, cut) == (reward[slot], terminated[slot], truncated[slot])
                if over or cut:
                    ended += 1
                    np.testing.assert_array_equal(infos["final_obs"][slot], row)
                    assert infos["_final_obs"][slot]
                    index[slot] += 1
                    row, _ = env.reset(seed=EpisodeSeeds.training(3).seed(slot, index[slot], 3))
                np.testing.assert_array_equal(observation[slot], row)
        assert ended > 3
        assert observation in vector.observation_space


def test_gymnasiums_own_wrappers_take_it() -> None:
    manager = EnvManager(SimFactory("embodied_rl.sim.robots.gymnasium:make", "Pendulum-v1"), 2)
    with closing(gymnasium.wrappers.vector.RecordEpisodeStatistics(ManagerVectorEnv(manager))) as vector:
        vector.reset(seed=1)
        for _ in range(200):
            *_, infos = vector.step(vector.action_space.sample())
        assert infos["episode"]["l"].tolist() == [200, 200]
