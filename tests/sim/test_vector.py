"""The gymnasium.vector view, held against gymnasium's own vector environment."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import FaultPolicy
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.spaces import row_of
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.vector import ManagerEnv, ManagerVectorEnv, make_env, make_vec_env
from tests.sim.robots.test_gymnasium import Known

pytestmark = pytest.mark.usefixtures("forked")


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


def test_an_episode_that_was_given_up_has_no_final_info() -> None:
    manager = EnvManager(SimFactory("tests.sim.toy:CountingSim"), 2, num_workers=2, faults=FaultPolicy(recovery="restart"))
    with closing(ManagerVectorEnv(manager)) as vector:
        vector.reset(seed=0)
        assert "aborted" not in vector.step(np.ones((2, 1)))[-1]
        os.kill(manager.worker_pids()[1], signal.SIGKILL)
        *_, truncated, infos = vector.step(np.ones((2, 1)))
        assert truncated.tolist() == infos["aborted"].tolist() == infos["_final_obs"].tolist() == [False, True]
        assert "final_info" not in infos


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
        np.testing.assert_array_equal(vector.reset(seed=np.array([1, 2, 3]))[0], vector.reset(seed=[1, 2, 3])[0])


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


@pytest.fixture
def by_hand() -> Iterator[ManagerVectorEnv]:
    """Three cart-poles whose next episodes are begun by whoever steps them."""
    manager = EnvManager(SimFactory("embodied_rl.sim.robots.gymnasium:make", "CartPole-v1"), 3, num_workers=2, autoreset=False)
    with closing(ManagerVectorEnv(manager, AutoresetMode.DISABLED)) as vector:
        yield vector


def test_without_autoreset_it_is_gymnasiums_own(by_hand: ManagerVectorEnv) -> None:
    """The same seeds in the same resets: every row of every step is SyncVectorEnv's."""
    seeds = np.random.default_rng(1)
    with closing(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.DISABLED)) as plain:
        theirs, counted = wrappers.RecordEpisodeStatistics(plain), wrappers.RecordEpisodeStatistics(by_hand)
        first = [5, 6, 7]
        np.testing.assert_array_equal(counted.reset(seed=first)[0], theirs.reset(seed=first)[0])
        actions, over, partial, steps = np.random.default_rng(0), np.zeros(3, bool), 0, np.zeros(3, int)
        for step in range(120):
            if over.any() or step == 30:  # at step 30: an episode that is going on is left for another
                mask = over | (step == 30) * np.array([False, True, False])
                chosen = [int(seed) for seed in seeds.integers(0, 2**30, 3)]
                ours, told = counted.reset(seed=chosen, options={"reset_mask": mask})
                np.testing.assert_array_equal(ours, theirs.reset(seed=chosen, options={"reset_mask": mask})[0])
                assert told == {}
                partial += not mask.all()
                steps[mask] = 0
            row = actions.integers(0, 2, 3)
            ours, expected = counted.step(row), theirs.step(row)
            for part, reference in zip(ours[:4], expected[:4], strict=True):
                np.testing.assert_array_equal(part, reference)
                assert part.dtype == reference.dtype
            over, steps = expected[2] | expected[3], steps + 1
            assert ("episode" in ours[4]) == ("episode" in expected[4]) == bool(over.any())
            if over.any():
                np.testing.assert_array_equal(ours[4]["_episode"], over)
                # Counted here: gymnasium's own forgets every slot's count at a masked reset, because its environment takes the mask away.
                np.testing.assert_array_equal(ours[4]["episode"]["l"], np.where(over, steps, 0))
                np.testing.assert_array_equal(ours[4]["episode"]["r"], np.where(over, steps, 0.0))
        assert partial > 5


def test_masked_resets_without_seeds_go_through_each_slots_own(by_hand: ManagerVectorEnv) -> None:
    seeds = EpisodeSeeds.training(3)

    def first_of(seed: int) -> np.ndarray:
        return gymnasium.make("CartPole-v1").reset(seed=seed)[0]

    begun, _ = by_hand.reset(seed=3)
    for mask, index in (([True, False, True], [1, 0, 1]), ([True, False, False], [2, 0, 1]), ([True, True, True], [3, 1, 2])):
        begun, _ = by_hand.reset(options={"reset_mask": np.array(mask)})
        np.testing.assert_array_equal(begun, [first_of(seeds.seed(slot, index[slot], 3)) for slot in range(3)])
    other = EpisodeSeeds.training(8)
    begun, _ = by_hand.reset(seed=8, options={"reset_mask": np.array([False, False, True])})
    np.testing.assert_array_equal(begun[2], first_of(other.seed(2, 0, 3)))
    begun, _ = by_hand.reset(options={"reset_mask": np.array([False, True, True])})
    np.testing.assert_array_equal(begun[2], first_of(other.seed(2, 1, 3)))
    np.testing.assert_array_equal(begun[1], first_of(seeds.seed(1, 2, 3)))


def test_steps_and_masks_that_make_no_sense(by_hand: ManagerVectorEnv) -> None:
    mask = np.array([True, False, False])
    with pytest.raises(gymnasium.error.ResetNeeded):
        by_hand.step(np.zeros(3, int))
    first, _ = by_hand.reset(seed=[4, None, 5], options={"reset_mask": mask})
    np.testing.assert_array_equal(first[0], gymnasium.make("CartPole-v1").reset(seed=4)[0])
    by_hand.step(np.zeros(3, int))  # the other slots have begun too
    for wrong in (np.zeros(2, int), np.zeros((3, 2), int), ["left"] * 3, 0):
        with pytest.raises(UserError, match=r"A step takes 3 actions of Discrete\(2\)"):
            by_hand.step(wrong)
    for wrong, told in (
        ([True, False, False], "must be a numpy array, got list"),
        (mask[:2], r"must have shape `\(3,\)`, got \(2,\)"),
        (mask.astype(int), "must have `dtype=np.bool_`, got int64"),
        (mask & False, r"at least one True value, got reset_mask=\[False False False\]"),
    ):
        with pytest.raises(UserError, match=told):
            by_hand.reset(options={"reset_mask": wrong})
    for wrong in ([True, False, False], mask.astype(int)):
        with pytest.raises(TypeError):  # as gymnasium's own
            by_hand.reset(options={"reset_mask": wrong})
    with pytest.raises(TypeError, match="A step takes 3 actions of"):
        by_hand.step(0)
    with pytest.raises(UserError, match="'reconfigure' for all slots together"):
        by_hand.reset(options={"reset_mask": mask, "reconfigure": True})
    over = np.zeros(3, bool)
    while not over.any():
        _, _, terminated, truncated, _ = by_hand.step(np.zeros(3, int))
        over = terminated | truncated
    with pytest.raises(UserError, match=rf"slots \{np.flatnonzero(over).tolist()} are over: begin new ones first".replace("]", r"\]", 1)):
        by_hand.step(np.zeros(3, int))
    by_hand.reset(options={"reset_mask": over})
    by_hand.step(np.zeros(3, int))


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
        ({"autoreset": False}, "SameStep", "SAME_STEP does not fit this manager"),
        ({}, "Disabled", r"DISABLED does not fit .* made with autoreset=False"),
    ):
        with EnvManager(factory, 1, **options) as manager, pytest.raises(UserError, match=message):
            ManagerVectorEnv(manager, mode)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_spaces_are_the_wrapped_environments_own(mode: AutoresetMode) -> None:
    """Bounds and dtypes, nested dictionaries and choices; what is shown lies in them and is what the environment itself gives."""
    factory = SimFactory("tests.sim.robots.test_gymnasium:Known")
    with closing(ManagerVectorEnv(EnvManager(factory, 2, num_workers=1, autoreset=mode is not AutoresetMode.DISABLED), mode)) as ours:
        theirs = SyncVectorEnv([Known] * 2, autoreset_mode=mode)
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space
        assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
        shown, expected = [env.reset(seed=[3, 4])[0] for env in (ours, theirs)]
        assert data_equivalence(shown, expected)
        ours.action_space.seed(0)
        for _ in range(2):
            actions = ours.action_space.sample()
            mine, others = ours.step(actions), theirs.step(actions)
            assert data_equivalence(mine[0], others[0])
            np.testing.assert_allclose(mine[1], others[1], rtol=1e-6)
        last, _, _, truncated, infos = ours.step(actions)  # gymnasium would begin the next episode without a seed
        assert truncated.all()
        last = infos["final_obs"][1] if mode is AutoresetMode.SAME_STEP else row_of(last, 1)
        joints = np.array([[4, 3], [0.5, -0.5]], np.float32)
        assert data_equivalence(last, {"arm": {"joints": joints, "grip": np.int64(1)}, "camera": np.full((4, 5, 3), 3, np.uint8)})
        assert last in ours.single_observation_space


@pytest.mark.parametrize("task", ["CliffWalking-v1", "MountainCarContinuous-v0", "Blackjack-v1"])
def test_numbers_and_choices_of_gymnasiums_tasks(task: str) -> None:
    """Tuples, choices and bounds, through one environment and its own checker."""
    with closing(make_env("cartpole", task=task)) as ours:
        theirs = gymnasium.make(task)
        assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
        np.testing.assert_array_equal(ours.reset(seed=7)[0], theirs.reset(seed=7)[0])
        ours.action_space.seed(1)
        for _ in range(5):
            action = ours.action_space.sample()
            mine, others = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine[0], others[0])
            assert mine[0] in theirs.observation_space
            assert (mine[1], mine[2], mine[3]) == (pytest.approx(others[1]), others[2], others[3])
            if mine[2] or mine[3]:
                break


def test_one_environment_passes_gymnasiums_checker() -> None:
    with closing(make_env("cartpole")) as env, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(spec|render modes|infinity).*")
        check_env(env, skip_render_check=True)
        env.reset(seed=3)
        rows = [env.reset()[0] for _ in range(2)]
        env.reset(seed=3)
        np.testing.assert_array_equal(env.reset()[0], rows[0])  # what follows a seed follows from it
        assert not np.array_equal(*rows)
    with closing(cartpoles()) as view, pytest.raises(UserError, match="one slot with autoreset DISABLED; this view has 3 with SAME_STEP"):
        ManagerEnv(view)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_texts_are_a_space_too(mode: AutoresetMode) -> None:
    with closing(make_vec_env("frozenlake", 2, num_workers=1, autoreset_mode=mode)) as vector:
        shown, _ = vector.reset(seed=1)
        assert shown in vector.observation_space
        assert isinstance(vector.action_space, gymnasium.spaces.Tuple)
        text = shown["text"] if isinstance(shown, dict) else shown
        assert len(text) == 2
        assert all("frozen" in said.lower() or "\n" in said for said in text)
        vector.step(("<answer>Up</answer>", "žluťoučký"))
        with pytest.raises(UserError, match="A step takes 2 actions of"):
            vector.step(("Up",))


def test_no_environments_are_refused() -> None:
    with pytest.raises(UserError, match=r"sim.num_slots must be between 1 and .*, got 0"):
        make_vec_env("cartpole", 0)
