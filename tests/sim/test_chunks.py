"""Action chunks: K steps a message, cut at the episode's end."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.manager import EnvManager

COUNTING = "tests.sim.toy:CountingSim"


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
