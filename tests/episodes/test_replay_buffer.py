"""The ring of fresh transitions."""

from __future__ import annotations

import numpy as np

from embodied_rl.episodes.dataset import ReplayBuffer, Transitions


def transitions(first: int, count: int) -> Transitions:
    """Transition i has i everywhere, and i + 1 after."""
    numbers = np.arange(first, first + count)

    def seen(at: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": at[:, None].astype(np.float32), "rgb": np.broadcast_to(at[:, None, None, None], (count, 2, 2, 3)).astype(np.uint8)}

    return Transitions(seen(numbers), numbers[:, None].astype(np.float32), numbers.astype(np.float32), numbers / 100.0, seen(numbers + 1))


def contents(buffer: ReplayBuffer) -> set[int]:
    return set(buffer.sample(np.random.default_rng(0), 500).reward.astype(int).tolist())


def test_the_oldest_go_first() -> None:
    buffer = ReplayBuffer(5)
    buffer.add(transitions(0, 3))
    assert len(buffer) == 3
    assert contents(buffer) == {0, 1, 2}
    buffer.add(transitions(3, 4))
    assert len(buffer) == 5
    assert contents(buffer) == {2, 3, 4, 5, 6}
    buffer.add(transitions(7, 13))
    assert contents(buffer) == {15, 16, 17, 18, 19}
    assert buffer.num_added == 20


def test_rows_stay_together() -> None:
    buffer = ReplayBuffer(7)
    for first in range(0, 30, 3):
        buffer.add(transitions(first, 3))
    drawn = buffer.sample(np.random.default_rng(1), 64)
    numbers = drawn.reward
    np.testing.assert_array_equal(drawn.observation["state"][:, 0], numbers)
    np.testing.assert_array_equal(drawn.next_observation["state"][:, 0], numbers + 1)
    np.testing.assert_array_equal(drawn.observation["rgb"][:, 1, 1, 2], numbers)
    np.testing.assert_array_equal(drawn.action[:, 0], numbers)
    np.testing.assert_allclose(drawn.discount, numbers / 100.0, rtol=1e-6)
    assert drawn.observation["rgb"].dtype == np.uint8


def test_a_saved_buffer_goes_on_as_it_was() -> None:
    for filled in (3, 12):
        first, second = ReplayBuffer(5), ReplayBuffer(5)
        first.add(transitions(0, filled))
        second.load_state_arrays({name: part.copy() for name, part in first.state_arrays().items()})
        for buffer in (first, second):
            buffer.add(transitions(filled, 4))
        drawn = [buffer.sample(np.random.default_rng(2), 40) for buffer in (first, second)]
        np.testing.assert_array_equal(drawn[0].reward, drawn[1].reward)
        np.testing.assert_array_equal(drawn[0].next_observation["rgb"], drawn[1].next_observation["rgb"])
