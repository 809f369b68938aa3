"""Recorded episodes as minibatches: every transition against the episode it comes from, windows of memory, and what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embodied_rl.episodes.dataset import (
    DatasetOptions,
    EpisodeDataset,
    SeenRewards,
    TransitionTable,
    check_recording,
    choose_episodes,
    split_episodes,
)
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec, TensorSpec
from tests.episodes.learning_samples import SPEC, episode, recording

OPTIONS = DatasetOptions(("state",), gamma=0.5)
LENGTHS = (4, 1, 7, 3)


def refs(source: object) -> list:
    return [(source, number) for number in range(len(source))]  # type: ignore[arg-type]


def four_episodes() -> object:
    return recording([episode(length, number, terminated=number == 2, truncated=number != 2) for number, length in enumerate(LENGTHS)])


def test_one_step_transitions_by_hand() -> None:
    table = TransitionTable.read(
        [(recording([episode(3, 5), episode(2, 1, terminated=True, truncated=False)]), n) for n in (0, 1)], SPEC.action, OPTIONS
    )
    found = table.gather(np.arange(5))
    np.testing.assert_array_equal(found.observation["state"], [[5, 0], [5, 1], [5, 2], [1, 0], [1, 1]])
    np.testing.assert_array_equal(found.next_observation["state"], [[5, 1], [5, 2], [5, 3], [1, 1], [1, 2]])
    np.testing.assert_allclose(found.reward, [51, 52, 53, 11, 12])
    # The first episode was cut: its last step bootstraps from its final observation. The second came to its end.
    np.testing.assert_allclose(found.discount, [0.5, 0.5, 0.5, 0.5, 0.0])
    # Actions [2 (t mod 3 - 1), t] within [-2, 2] and [0, 10].
    np.testing.assert_allclose(found.action, [[-1, -1], [0, -0.8], [1, -0.6], [-1, -1], [0, -0.8]], atol=1e-6)
    assert found.action.dtype == np.float32


def test_three_step_transitions_stay_in_their_episode() -> None:
    options = dataclasses.replace(OPTIONS, n_step=3)
    source = recording([episode(4, 0), episode(2, 1)])
    found = TransitionTable.read(refs(source), SPEC.action, options).gather(np.arange(6))
    # 1 + 2/2 + 3/4; 2 + 3/2 + 4/4; 3 + 4/2; 4; 11 + 12/2; 12
    np.testing.assert_allclose(found.reward, [2.75, 4.5, 5.0, 4.0, 17.0, 12.0])
    np.testing.assert_allclose(found.discount, [0.125, 0.125, 0.25, 0.5, 0.25, 0.5])
    np.testing.assert_array_equal(found.next_observation["state"], [[0, 3], [0, 4], [0, 4], [0, 4], [1, 2], [1, 2]])


def test_an_episode_without_an_end_bootstraps_from_its_last_observation() -> None:
    found = TransitionTable.read(refs(recording([episode(2, truncated=False)])), SPEC.action, OPTIONS).gather(np.arange(2))
    np.testing.assert_allclose(found.discount, [0.5, 0.5])


def test_messages_are_transitions_between_messages() -> None:
    """Chunks of 2, 3 and 1 steps: rewards summed with their discount, γ to the power of their length, actions filled up with 0."""
    source = recording([episode(6, chunk=np.array([0, 0, 1, 1, 1, 2]))])
    table = TransitionTable.read(refs(source), SPEC.action, dataclasses.replace(OPTIONS, unit="message"))
    found = table.gather(np.arange(3))
    np.testing.assert_allclose(found.reward, [1 + 2 / 2, 3 + 4 / 2 + 5 / 4, 6])
    np.testing.assert_allclose(found.discount, [0.25, 0.125, 0.5])
    np.testing.assert_array_equal(found.observation["state"][:, 1], [0, 2, 5])
    np.testing.assert_array_equal(found.next_observation["state"][:, 1], [2, 5, 6])
    np.testing.assert_array_equal(table.executed, [[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    np.testing.assert_allclose(found.action[0, :, 1], [-1.0, -0.8, 0.0], atol=1e-6)
    two = TransitionTable.read(refs(source), SPEC.action, dataclasses.replace(OPTIONS, unit="message", n_step=2)).gather(np.arange(3))
    np.testing.assert_allclose(two.reward, [2.0 + 6.25 / 4, 6.25 + 6 / 8, 6])
    np.testing.assert_array_equal(two.next_observation["state"][:, 1], [5, 6, 6])


def test_success_as_reward() -> None:
    source = recording([episode(4, success=np.array([0, 1, 0, 1], bool))])
    options = dataclasses.replace(OPTIONS, rewards=SeenRewards("success"), n_step=2)
    found = TransitionTable.read(refs(source), SPEC.action, options).gather(np.arange(4))
    # Each success ends it: 0 + 1/2; 1; 0 + 1/2; 1.
    np.testing.assert_allclose(found.reward, [0.5, 1.0, 0.5, 1.0])
    np.testing.assert_allclose(found.discount, [0, 0, 0, 0])


@pytest.mark.parametrize("memory_mb", [1.0, 400 / 2**20, 1 / 2**20], ids=["whole", "windows", "one_by_one"])
def test_an_epoch_holds_every_step_once(memory_mb: float) -> None:
    dataset = EpisodeDataset(refs(four_episodes()), SPEC, OPTIONS, seed=3, memory_mb=memory_mb)
    assert dataset.fits == (memory_mb == 1.0)
    everything = {(e, t) for e, length in enumerate(LENGTHS) for t in range(length)}
    orders = []
    for epoch in (0, 1, 5):
        seen = [tuple(row) for batch in dataset.epoch(epoch, 4) for row in batch.observation["state"].astype(int).tolist()]
        assert sorted(seen) == sorted(everything)
        orders.append(seen)
    assert orders[0] != orders[1]
    again = EpisodeDataset(refs(four_episodes()), SPEC, OPTIONS, seed=3, memory_mb=memory_mb)
    assert orders[2] == [tuple(row) for batch in again.epoch(5, 4) for row in batch.observation["state"].astype(int).tolist()]
    assert sum(len(part["state"]) for part in dataset.observations()) == sum(LENGTHS)


def test_no_more_is_held_than_allowed() -> None:
    """Windows of at most 400 bytes; with (steps + 1) · (2·4 + 8·2 + 4·8) = 56 bytes a row, no two of our longer episodes fit together."""
    dataset = EpisodeDataset(refs(four_episodes()), SPEC, OPTIONS, seed=0, memory_mb=400 / 2**20)
    for window in [window for turn in range(6) for window in dataset._windows(turn)[0]]:
        table = dataset._table(window)
        assert len(table.observation["state"]) * 56 <= 400 or len(set(table.observation["state"][:, 0])) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_window_is_drawn_from_as_often_as_it_has_steps(seed: int) -> None:
    """Of 8 episodes of 5 steps, 3 fit at a time: windows of 15, 15 and 10 steps, so 3, 3 and 2 of a round's 8 minibatches of 5."""
    episodes = [episode(5, number, terminated=False, truncated=True) for number in range(8)]
    dataset = EpisodeDataset(refs(recording(episodes)), SPEC, OPTIONS, seed=seed, memory_mb=3 * 6 * 56 / 2**20)
    for turn in range(3):
        taken = [frozenset(dataset.sample(8 * turn + number, 5).observation["state"][:, 0].tolist()) for number in range(8)]
        windows = [set(window) for window in dataset._windows(turn)[0]]
        assert [len(window) for window in windows] == [3, 3, 2]
        for window, expected in zip(windows, (3, 3, 2), strict=True):
            assert sum(one <= window for one in taken) == expected


@pytest.mark.parametrize("memory_mb", [1.0, 400 / 2**20])
def test_samples_are_a_function_of_seed_and_number(memory_mb: float) -> None:
    def draw(seed: int, numbers: list[int]) -> list[list]:
        dataset = EpisodeDataset(refs(four_episodes()), SPEC, OPTIONS, seed=seed, memory_mb=memory_mb)
        return [dataset.sample(number, 6).observation["state"].tolist() for number in numbers]

    assert draw(1, [0, 1, 2, 30]) == [draw(1, [number])[0] for number in (0, 1, 2, 30)]
    assert draw(1, [0])[0] != draw(1, [1])[0]
    assert draw(1, [0]) != draw(2, [0])


def test_samples_are_uniform_over_steps() -> None:
    dataset = EpisodeDataset(refs(four_episodes()), SPEC, OPTIONS, seed=0)
    counts = np.zeros(4)
    for number in range(200):
        counts += np.bincount(dataset.sample(number, 30).observation["state"][:, 0].astype(int), minlength=4)
    # 6000 draws; the share of an episode is its share of the 15 steps, with a standard error of at most 0.0065.
    np.testing.assert_allclose(counts / counts.sum(), np.array(LENGTHS) / 15, atol=0.02)


def test_whole_episodes_are_held_out() -> None:
    source = refs(four_episodes())
    train, held = split_episodes(source, 0.25, seed=1)
    assert len(held) == 1
    assert {n for _, n in train} | {n for _, n in held} == {0, 1, 2, 3}
    assert split_episodes(source, 0.25, seed=1) == (train, held)
    assert [len(part) for part in split_episodes(source, 0.01, seed=1)] == [3, 1]
    assert [len(part) for part in split_episodes(source, 0.99, seed=1)] == [1, 3]
    assert [len(part) for part in split_episodes(source, 0.0, seed=1)] == [4, 0]
    assert [len(part) for part in split_episodes(source[:1], 0.9, seed=1)] == [1, 0]


def test_successful_and_drawn_episodes() -> None:
    good = np.array([0, 1], bool)
    source = recording([episode(2, 0), episode(2, 1, success=good), episode(2, 2), episode(2, 3, success=good)])
    assert [number for _, number in choose_episodes([source], only_success=True)] == [1, 3]
    other, drawn = recording([episode(2, number) for number in range(4)]), set()
    everything = choose_episodes([source, other])
    assert choose_episodes([source, other], max_episodes=8, seed=3) == everything
    for seed in range(60):
        three, five = (choose_episodes([source, other], max_episodes=count, seed=seed) for count in (3, 5))
        places = [everything.index(ref) for ref in five]
        assert len(set(places)) == 5
        assert places == sorted(places)
        assert len(three) == 3
        assert all(ref in five for ref in three)
        drawn |= {everything.index(ref) for ref in three}
    # One of eight is missed by a draw of three with probability 5/8, by sixty with 6e-13.
    assert drawn == set(range(8))
    with pytest.raises(UserError, match="none of its 1 episodes succeeded"):
        choose_episodes([recording([episode(2)])], only_success=True)
    silent = recording([episode(2)], dataclasses.replace(SPEC, reports_success=False))
    with pytest.raises(UserError, match="its simulator does not report success"):
        choose_episodes([silent], only_success=True)
    with pytest.raises(UserError, match=r"'line' has no episodes\. Record some"):
        choose_episodes([recording([])])


def test_a_recording_of_another_simulator_is_refused_with_the_reason() -> None:
    source = recording([episode(2)])
    check_recording(source, SPEC, ["state"], same_task=True)
    other = dataclasses.replace(SPEC, task="Curve-v0")
    check_recording(source, other, ["state"], same_task=False)
    with pytest.raises(
        RecordingError, match=r"of another simulator: task Line-v0 ≠ Curve-v0 \(recording ≠ simulator\)\. Its own is sim=line"
    ):
        check_recording(source, other, ["state"], same_task=True)
    wider = dataclasses.replace(SPEC, observation={"state": TensorSpec((3,))}, action=ActionSpec.continuous([-1.0], [1.0]))
    with pytest.raises(
        RecordingError, match=r"'state' \[2\] float32 ≠ \[3\] float32; action continuous\(2\) .* ≠ continuous\(1\) within \[-1, 1\]"
    ):
        check_recording(source, wider, ["state"], same_task=True)
    with pytest.raises(RecordingError, match=r"has no observation 'stat', which the policy reads\. Did you mean 'state'\?"):
        check_recording(source, SPEC, ["stat"], same_task=True)


def test_numbers_that_are_not_finite_name_episode_and_field() -> None:
    broken = episode(2, 1)
    broken.observation["state"][1, 0] = np.nan
    with pytest.raises(RecordingError, match=r"'line', episode 1: NaN or infinity in observation\.state"):
        TransitionTable.read(refs(recording([episode(2), broken])), SPEC.action, OPTIONS)
    with pytest.raises(RecordingError, match="episode 0: NaN or infinity in reward"):
        TransitionTable.read(refs(recording([episode(2, reward=np.array([1, np.inf], np.float32))])), SPEC.action, OPTIONS)
    with pytest.raises(UserError, match="No recorded episodes"):
        EpisodeDataset([], SPEC, OPTIONS, seed=0)
