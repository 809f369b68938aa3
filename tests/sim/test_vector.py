"""The gymnasium.vector view, held against gymnasium's own vector environment."""

from __future__ import annotations

from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from embodied_rl.errors import UserError
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


def cartpoles(num_slots: int = 3, **kwargs) -> ManagerVectorEnv:
    factory = SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1")
    return ManagerVectorEnv(EnvManager(factory, num_slots, num_workers=2), **kwargs)


def test_next_step_autoreset_ignores_the_action_that_begins_an_episode() -> None:
    singles = [gymnasium.make("CartPole-v1") for _ in range(3)]
    seeds = EpisodeSeeds.training(5)
    with closing(cartpoles(autoreset_mode="NextStep")) as vector:
        observation, _ = vector.reset(seed=5)
        index, over = [0, 0, 0], [False] * 3
        for slot, env in enumerate(singles):
            np.testing.assert_array_equal(observation[slot], env.reset(seed=seeds.seed(slot, 0, 3))[0])
        rng = np.random.default_rng(0)
        begun = 0
        for _ in range(80):
            actions = rng.integers(0, 2, 3)
            observation, reward, terminated, truncated, _ = vector.step(actions)
            for slot, env in enumerate(singles):
                if over[slot]:
                    index[slot], begun = index[slot] + 1, begun + 1
                    expected = (env.reset(seed=seeds.seed(slot, index[slot], 3))[0], 0.0, False, False)
                else:
                    expected = env.step(actions[slot])[:4]
                np.testing.assert_array_equal(observation[slot], expected[0])
                assert (reward[slot], terminated[slot], truncated[slot]) == expected[1:]
                over[slot] = expected[2] or expected[3]
        assert begun > 5
        assert observation in vector.observation_space


def test_all_slots_may_begin_in_the_same_step() -> None:
    factory = SimFactory("embodied_rl.sim.robots.gymnasium:make", "Pendulum-v1")
    with closing(ManagerVectorEnv(EnvManager(factory, 2), AutoresetMode.NEXT_STEP)) as vector:
        vector.reset(seed=1)
        for step in range(1, 203):
            _, reward, _, truncated, _ = vector.step(np.zeros((2, 1), np.float32))
            assert truncated.all() == truncated.any() == (step == 200)
            assert (reward == 0).all() == (step == 201)
        vector.step(np.zeros((2, 1), np.float32))
        # In the middle of an end: the reset leaves nothing of it.
        vector.reset(seed=1)
        assert (vector.step(np.zeros((2, 1), np.float32))[1] != 0).all()


def test_the_info_of_an_end_is_laid_out_as_gymnasiums_is() -> None:
    def single() -> gymnasium.Env:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))

    def first_end(vector: gymnasium.vector.VectorEnv) -> dict:
        vector.reset(seed=2)
        while True:
            *_, infos = vector.step(np.array([0, 1, 0]))
            if "final_info" in infos:
                return infos

    with (
        closing(SyncVectorEnv([single] * 3, autoreset_mode=AutoresetMode.SAME_STEP)) as theirs,
        closing(cartpoles()) as ours,
    ):
        reference, infos = first_end(theirs), first_end(ours)
    assert set(infos) >= set(reference)
    assert set(infos["final_info"]) >= set(reference["final_info"])
    assert set(infos["final_info"]["episode"]) == set(reference["final_info"]["episode"]) - {"t", "_t"}
    # What training loops do with it.
    ended = infos["final_info"]["_episode"]
    assert ended.tolist() == infos["_final_info"].tolist()
    assert ended.any()
    assert (infos["final_info"]["episode"]["r"][ended] == infos["final_info"]["episode"]["l"][ended]).all()
    assert (infos["final_info"]["episode"]["l"][ended] > 0).all()


def test_a_list_of_seeds_is_that_of_the_slots_first_episodes() -> None:
    with closing(cartpoles()) as vector:
        observation, _ = vector.reset(seed=[7, None, 9])
        for slot, seed in ((0, 7), (2, 9)):
            np.testing.assert_array_equal(observation[slot], gymnasium.make("CartPole-v1").reset(seed=seed)[0])

        def play() -> np.ndarray:
            return np.array([vector.step(np.array([0, 1, 0]))[0] for _ in range(40)])

        trajectory = play()  # several episodes
        np.testing.assert_array_equal(vector.reset(seed=[7, None, 9])[0], observation)
        np.testing.assert_array_equal(play(), trajectory)
        vector.reset(seed=[7, None, 8])
        assert not np.array_equal(play()[:, :1], trajectory[:, :1])  # slot 0's second episode follows from the whole list
        for wrong, message in (([1, 2], "one for each of the 3 slots, got 2"), ([1, 2, -1], "between 0 and 2\\*\\*31 - 1, got -1")):
            with pytest.raises(UserError, match=message):
                vector.reset(seed=wrong)


def test_a_reset_without_a_seed_goes_on_from_the_last_one() -> None:
    with closing(cartpoles()) as vector:
        seen = []
        for seed in (np.int64(3), 4, 3):
            vector.reset(seed=seed)
            seen.append(vector.reset()[0])
        np.testing.assert_array_equal(seen[0], seen[2])
        assert not np.array_equal(seen[0], seen[1])
        assert not np.array_equal(vector.reset()[0], seen[2])
        with pytest.raises(UserError, match="takes the option 'reconfigure', got 'reset_mask'"):
            vector.reset(options={"reset_mask": np.array([True, False, False])})


def test_wrappers_that_insist_on_next_step_take_it() -> None:
    statistics = wrappers.RecordEpisodeStatistics(wrappers.NormalizeObservation(cartpoles(autoreset_mode=AutoresetMode.NEXT_STEP)))
    with closing(statistics) as vector:
        vector.reset(seed=1)
        vector.action_space.seed(1)
        lengths: list[int] = []
        seen = []
        for _ in range(150):
            observation, *_, infos = vector.step(vector.action_space.sample())
            seen.append(observation)
            lengths += infos["episode"]["l"][infos["_episode"]].tolist() if "episode" in infos else []
        assert len(lengths) > 3
        assert min(lengths) >= 8  # no CartPole falls sooner; an end counted twice would be of length 1
        assert abs(np.mean(seen)) < 0.5
        assert 0.5 < np.std(seen) < 1.5


def test_what_has_no_such_view_is_refused() -> None:
    factory = SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1")
    for options, mode, message in (
        ({"chunk_size": 2}, "SameStep", "chunk_size must be 1, got 2"),
        ({"autoreset": False}, "SameStep", "autoreset=False"),
        ({}, "Disabled", "SAME_STEP or NEXT_STEP, got DISABLED"),
    ):
        with EnvManager(factory, 1, **options) as manager, pytest.raises(UserError, match=message):
            ManagerVectorEnv(manager, mode)
    with (
        EnvManager(SimFactory("embodied_rl.sim.text.frozenlake:make", None), 1) as manager,
        pytest.raises(UserError, match="no fixed space"),
    ):
        ManagerVectorEnv(manager)
