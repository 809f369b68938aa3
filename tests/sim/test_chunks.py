"""Action chunks: K steps a message, cut at the episode's end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.manager import EnvManager
from embodied_rl.types import EpisodeSummary

pytestmark = pytest.mark.usefixtures("forked")
COUNTING = "tests.sim.toy:CountingSim"
SPLIT = "tests.sim.toy:SplitCountingSim"


def make(chunk_size: int = 4, slots: int = 2, workers: int = 1, target: str = COUNTING, **kwargs) -> EnvManager:
    options = {name: kwargs.pop(name) for name in ("success_ends_episode", "max_episode_steps") if name in kwargs}
    return EnvManager(SimFactory(target, kwargs=kwargs), slots, num_workers=workers, chunk_size=chunk_size, **options)


def test_a_chunk_is_cut_at_the_episodes_end_and_its_steps_are_told_apart() -> None:
    with make(length=6, workers=2) as manager:
        manager.reset()
        first = manager.step(np.array([[[1.0], [2], [3], [4]], [[0.5], [0], [0], [0]]]))
        assert first.chunk_reward.tolist() == [[1, 2, 3, 4], [0.5, 0, 0, 0]]
        assert first.reward.tolist() == [10, 0.5]
        assert first.executed.all()
        assert not first.done.any()
        # Success is a sum of at least 3: from the third step of the first row on (1 + 2 = 3 is the second).
        assert first.chunk_success.tolist() == [[False, True, True, True], [False] * 4]
        assert first.success.tolist() == [True, False]
        assert first.observation["state"][:, 1:].tolist() == [[4, 10], [4, 0.5]]

        second = manager.step(np.array([[[-9.0], [1], [7], [7]], [[1], [1], [7], [7]]]))
        assert second.executed.tolist() == [[True, True, False, False]] * 2
        assert second.chunk_reward.tolist() == [[-9, 1, 0, 0], [1, 1, 0, 0]]
        assert second.terminated.all()
        assert second.final_observation["state"][:, 1:].tolist() == [[6, 2], [6, 2.5]]
        assert second.observation["state"][:, 1:].tolist() == [[0, 0], [0, 0]]
        assert [(e.length, e.episode_return, e.success_once, e.success_at_end) for e in second.episodes] == [
            (6, 2.0, True, False),
            (6, 2.5, False, False),
        ]
        assert [e.final_info for e in second.episodes] == [{"total": 2.0, "path": [0, 1, 2]}, {"total": 2.5, "path": [0, 1, 2]}]


def test_success_inside_a_chunk_can_end_it() -> None:
    with make(length=50, success_ends_episode=True) as manager:
        manager.reset()
        batch = manager.step(np.array([[[2.0], [2], [2], [2]], [[0], [0], [0], [3]]]))
        assert batch.executed.tolist() == [[True, True, False, False], [True] * 4]
        assert batch.truncated.tolist() == [True, True]
        assert batch.success.tolist() == [True, True]
        assert [e.length for e in batch.episodes] == [2, 4]


def test_the_step_limit_cuts_a_chunk() -> None:
    with make(length=50, max_episode_steps=3) as manager:
        manager.reset()
        batch = manager.step(np.zeros((2, 4, 1)))
        assert batch.executed.sum(axis=1).tolist() == [3, 3]
        assert batch.truncated.all()


def test_chunks_equal_single_steps_and_may_be_shorter() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (12, 2, 1))
    with make(chunk_size=1, length=12) as single:
        single.reset()
        steps = [single.step(row) for row in actions.astype(np.float32)]
        rewards = np.stack([[0, 0]] + [step.reward.copy() for step in steps])[1:]
        last = steps[-1].final_observation["state"].copy()
    for chunk_size, lengths in ((4, (4, 4, 4)), (5, (5, 5, 2)), (8, (3, 8, 1))):
        with make(chunk_size=chunk_size, length=12) as manager:
            manager.reset()
            at, chunked = 0, []
            for length in lengths:
                batch = manager.step(actions[at : at + length].transpose(1, 0, 2))
                chunked.append(batch.chunk_reward[:, :length].copy())
                assert batch.executed.sum(axis=1).tolist() == [length, length]
                at += length
            np.testing.assert_array_equal(batch.final_observation["state"], last)
            assert np.concatenate(chunked, axis=1).shape == (2, 12)
    assert rewards.shape == (12, 2)


def test_chunks_of_chosen_slots_alone() -> None:
    with make(slots=3, workers=2, length=50) as manager:
        manager.reset()
        manager.send([0, 2], np.array([[[1.0], [1]], [[2], [2]]]))
        batch = manager.recv([0, 2])
        assert batch.chunk_reward.tolist() == [[1, 1, 0, 0], [2, 2, 0, 0]]
        assert batch.observation["state"][:, 1].tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(2, 5, 1), (2, 0, 1), (2, 1), (1, 4, 1)])
def test_a_chunk_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with make() as manager:
        manager.reset()
        with pytest.raises(ValueError, match=r"Chunks must be \[2, k, 1\]"):
            manager.send(range(2), np.zeros(shape))


def test_text_has_no_chunks() -> None:
    with pytest.raises(UserError, match="which has no chunks"):
        make(target="tests.sim.toy:TalkingSim")


RULES = {
    "its own end": {"length": 6},
    "the end of a chunk": {"length": 8},
    "first success": {"length": 50, "success_ends_episode": True},
    "a limit": {"length": 50, "max_episode_steps": 7},
}


def played(manager: EnvManager, seed: int = 0, chunks: int = 24) -> tuple[list[dict[str, np.ndarray]], list[EpisodeSummary]]:
    """Everything a caller sees of random chunks, some of them shorter; final observations where an episode ended."""
    manager.reset()
    rng, seen, episodes = np.random.default_rng(seed), [], []
    for _ in range(chunks):
        batch = manager.step(rng.uniform(-1, 1.5, (manager.num_slots, rng.integers(1, manager.chunk_size + 1), 1)))
        assert batch.chunk_reward is not None
        parts = {"observation": batch.observation["state"], "final": batch.final_observation["state"][batch.done], "reward": batch.reward}
        parts |= {"terminated": batch.terminated, "truncated": batch.truncated, "success": batch.success, "each": batch.chunk_reward}
        seen.append({name: part.copy() for name, part in parts.items()})
        episodes += batch.episodes
    return seen, episodes


def assert_equal(mine: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_unread_observations_are_not_made_and_nothing_else_changes(rule: str, together: bool) -> None:
    with make(**RULES[rule]) as manager:
        expected, episodes = played(manager)
    with make(target=SPLIT, together=together, **RULES[rule]) as manager:
        seen, split_episodes = played(manager)
    assert_equal(seen, expected)
    assert len(split_episodes) == len(episodes) > 2
    assert [dataclasses.replace(episode, final_info={}) for episode in split_episodes] == [
        dataclasses.replace(episode, final_info={}) for episode in episodes
    ]


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_environments_that_step_together_are_sent_together(chunk_size: int) -> None:
    with make(chunk_size, target=SPLIT, together=True, length=50) as manager:
        manager.reset()
        manager.send([0], np.zeros((1, 1) if chunk_size == 1 else (1, 4, 1)))
        with pytest.raises(UserError, match=r"steps its 2 environments together, but only 1 were requested: set sim.pipeline_groups=1"):
            manager.recv([0])


def test_chunks_of_a_vector_environment_end_each_on_its_own() -> None:
    """One CartPole falls within ten pushes to the same side, the other one, pushed from side to side, does not."""
    pushes = np.stack([np.ones((8, 1), np.int64), np.tile([[0], [1]], (4, 1))])
    with make(8, target="tests.sim.toy:vector_cartpoles") as together, make(8, target="tests.sim.toy:cartpole") as alone:
        together.reset()
        alone.reset()
        for _ in range(4):
            batch, other = together.step(pushes), alone.step(pushes)
            for part, expected in ((batch.executed, other.executed), (batch.observation["state"], other.observation["state"])):
                np.testing.assert_array_equal(part, expected)
            np.testing.assert_array_equal(batch.final_observation["state"][batch.done], other.final_observation["state"][other.done])
            assert [episode.length for episode in batch.episodes] == [episode.length for episode in other.episodes]


def test_one_observation_is_made_for_each_chunk() -> None:
    with make(target=SPLIT, length=11) as manager:
        manager.reset()
        episodes = [episode for _ in range(3) for episode in manager.step(np.zeros((2, 4, 1))).episodes]
    # What the last step's info knows of: those after the steps 4 and 8. The one after step 11 is made once that step has ended it.
    assert [episode.final_info["observed"] for episode in episodes] == [2, 2]


def test_every_observation_is_made_without_chunks() -> None:
    with make(target=SPLIT, length=11, chunk_size=1) as manager:
        manager.reset()
        episodes = [episode for _ in range(11) for episode in manager.step(np.zeros((2, 1))).episodes]
    assert [episode.final_info["observed"] for episode in episodes] == [10, 10]


def test_a_replayed_episode_makes_only_its_last_observation() -> None:
    with make(target=SPLIT, length=40) as manager:
        manager.reset()
        before = [manager.step(np.full((2, 4, 1), number / 10)).observation["state"].copy() for number in range(5)][-1]
        manager.offload()
        manager.onload()
        batch = manager.step(np.ones((2, 4, 1)))
        np.testing.assert_array_equal(batch.observation["state"], before + np.array([0, 4, 4]))
        episodes = [episode for _ in range(4) for episode in manager.step(np.zeros((2, 4, 1))).episodes]
    # One after the replay, one after each of the five chunks but the last, whose info is older than its observation.
    assert [episode.final_info["observed"] for episode in episodes] == [5, 5]


def test_nan_is_noticed_where_an_observation_is_made() -> None:
    with make(target=SPLIT, length=40, misbehave="nan_observation", at=2) as manager:
        manager.reset()
        with pytest.raises(SimFault, match="NaN or infinity in the observation"):
            manager.step(np.zeros((2, 4, 1)))
