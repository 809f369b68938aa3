"""Replaying: exact where nothing changed, and every kind of difference is found where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.rollout.recording import RecordingPlan
from embodied_rl.rollout.replaying import By, EpisodeReplay, Replayer, check_fits
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.rollout.recording_toys import manager_of, record_toy, toy

BY_STEP, SPEAKER = "tests.rollout.recording_toys:ByStep", "tests.rollout.recording_toys:Speaker"


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedEpisode]:
    """Five episodes of the counting toy with snapshots: actions 1.0, 1.1, …, observation (seed, steps, sum)."""
    folder = tmp_path_factory.mktemp("recorded") / "r"
    record_toy(folder, RecordingPlan(5, snapshot_every=2), toy("SavedCountingSim", length=5), slots=2, expert=BY_STEP)
    return sorted(open_recording(folder), key=lambda episode: episode.seed)


def play(
    episodes: list[RecordedEpisode], by: By = "action", slots: int = 2, name: str = "SavedCountingSim", **kwargs: Any
) -> list[EpisodeReplay]:
    with manager_of(toy(name, **{"length": 5, **kwargs}), slots) as manager:
        return sorted(Replayer(manager, by).run(enumerate(episodes)), key=lambda replay: replay.number)


def changed(episode: RecordedEpisode, name: str, change: Callable[[np.ndarray], None]) -> RecordedEpisode:
    part = np.array(getattr(episode, name))
    change(part)
    return dataclasses.replace(episode, **{name: part})


@pytest.mark.parametrize("by", ["action", "state"])
@pytest.mark.parametrize("slots", [1, 3])
def test_nothing_changed_is_exact(episodes: list[RecordedEpisode], by: By, slots: int) -> None:
    found = play(episodes, by, slots)
    assert [replay.seed for replay in found] == [0, 1, 2, 3, 4]
    for replay in found:
        assert replay.is_exact
        assert replay.success_matches
        assert (replay.num_steps, replay.num_replayed, replay.max_drift, replay.first_step) == (5, 5, 0.0, None)
        np.testing.assert_array_equal(replay.observation["state"].per_step, np.zeros(6))


def test_episodes_whose_simulator_dies_at_their_beginning_are_failures(tmp_path: Path) -> None:
    """And the next ones are replayed all the same."""
    together = "tests.rollout.recording_toys:TogetherSim"
    config = dataclasses.replace(toy(), target=together, num_workers=1)
    record_toy(tmp_path / "r", RecordingPlan(3, first_seed=5), config, slots=2, expert="tests.rollout.recording_toys:by_seed")
    recorded = sorted(open_recording(tmp_path / "r"), key=lambda episode: episode.seed)
    config = dataclasses.replace(config, kwargs={"victim": 6, "once": str(tmp_path / "once")})
    with manager_of(config, 2) as manager:
        found = sorted(Replayer(manager, "action").run(enumerate(recorded)), key=lambda replay: replay.number)
    assert [(replay.failure, replay.num_replayed) for replay in found] == [("its simulator failed", 0)] * 2 + [(None, 3)]
    assert found[2].is_exact


def test_another_action_is_off_by_so_much_from_its_step_on(episodes: list[RecordedEpisode]) -> None:
    def more(action: np.ndarray) -> None:
        action[2] += 0.5

    (replay,) = play([changed(episodes[1], "action", more)])
    # The third step's action is 0.5 larger: so are the sums from the fourth observation on, and the third reward.
    np.testing.assert_allclose(replay.observation["state"].per_step, [0, 0, 0, 0.5, 0.5, 0.5], rtol=1e-6)
    assert (replay.first_step, replay.reward.first_step) == (3, 2)
    # 3 of the 6 · 3 numbers that were compared are 0.5 off.
    assert replay.observation["state"].mean_abs == pytest.approx(3 * 0.5 / 18)
    assert replay.max_drift == pytest.approx(0.5)
    assert not replay.is_exact
    assert replay.success_matches


def test_by_state_the_difference_ends_at_the_next_snapshot(episodes: list[RecordedEpisode]) -> None:
    def more(action: np.ndarray) -> None:
        action[2] += 0.5

    (replay,) = play([changed(episodes[1], "action", more)], "state")
    # Snapshots at steps 0, 2 and 4: the one at 4 brings the sum back, so that the last observation is right again.
    np.testing.assert_allclose(replay.observation["state"].per_step, [0, 0, 0, 0.5, 0.5, 0], rtol=1e-6)


def test_a_simulator_that_drifts(episodes: list[RecordedEpisode]) -> None:
    (replay,) = play(episodes[:1], "state", drifts=True)
    # Every restore adds 0.25 to the sum, and the next one sets it anew: off by 0.25 after each.
    np.testing.assert_allclose(replay.observation["state"].per_step, [0, 0.25, 0.25, 0.25, 0.25, 0.25], rtol=1e-6)


def test_success_that_comes_out_otherwise_is_a_mismatch(episodes: list[RecordedEpisode]) -> None:
    weaker = changed(episodes[0], "action", lambda action: action.fill(0.1))
    lying = changed(episodes[1], "success", lambda success: success.fill(False))
    failed, lied, fine = play([weaker, lying, episodes[2]])
    assert failed.success_once == (True, False)
    assert lied.success_once == (False, True)
    assert [failed.success_matches, lied.success_matches, fine.success_matches] == [False, False, True]


def test_ends_that_differ(episodes: list[RecordedEpisode]) -> None:
    (shorter,) = play(episodes[:1], length=3)
    assert (shorter.num_replayed, shorter.ends_match) == (3, False)
    (longer,) = play(episodes[:1], length=9)
    assert (longer.num_replayed, longer.ends_match, longer.max_drift) == (5, False, 0.0)


def test_another_seed_is_seen_after_the_reset(episodes: list[RecordedEpisode]) -> None:
    (replay,) = play([dataclasses.replace(episodes[0], seed=9)])
    assert replay.first_step == 0
    assert replay.max_drift == 9.0
    # By state the snapshot brings everything back, the seed in the state included.
    (replay,) = play([dataclasses.replace(episodes[0], seed=9)], "state")
    np.testing.assert_array_equal(replay.observation["state"].per_step, [9, 0, 0, 0, 0, 0])


def test_a_failed_simulator_is_a_failure_of_the_replay(episodes: list[RecordedEpisode]) -> None:
    found = play(episodes, misbehave="raise", victim=3)
    assert [replay.failure for replay in found] == [None, None, None, "its simulator failed", None]
    assert [replay.success_matches for replay in found] == [True, True, True, False, True]


def test_texts_differ_or_not(tmp_path: Path) -> None:
    record_toy(tmp_path / "r", RecordingPlan(2), toy("TalkingSim", length=3), slots=2, expert=SPEAKER)
    first, second = sorted(open_recording(tmp_path / "r"), key=lambda episode: episode.seed)
    second = changed(second, "action", lambda action: action.__setitem__(1, "other"))
    with manager_of(toy("TalkingSim", length=3), 1) as manager:
        same, other = Replayer(manager, "action").run([(0, first), (1, second)])
    assert same.is_exact
    np.testing.assert_array_equal(other.observation["text"].per_step, [0, 0, 1, 0])
    assert other.observation["lengths"].first_step == 2


def test_what_cannot_be_replayed_says_why(episodes: list[RecordedEpisode]) -> None:
    bare = dataclasses.replace(episodes[0], snapshots={})
    with pytest.raises(UserError, match=r"Episode 0 \(seed 0\) was recorded without states .* by=action"):
        play([bare], "state")
    inside = dataclasses.replace(episodes[0], metadata={"start": {"source": 3, "step": 12}})
    with pytest.raises(UserError, match="started inside another episode"):
        play([inside])
    ours = SimSpec("one", {"state": TensorSpec((3,))}, ActionSpec.continuous([-1] * 8, [1] * 8))
    theirs = dataclasses.replace(ours, action=ActionSpec.continuous([-1] * 4, [1] * 4))
    with pytest.raises(UserError, match=r"continuous, 8 dimensions.*'one' \(continuous, 4.*control mode"):
        check_fits(ours, theirs)
    with pytest.raises(UserError, match="Observation 'state' was recorded as"):
        check_fits(ours, dataclasses.replace(ours, observation={"state": TensorSpec((4,))}))


def test_pictures_are_added_and_the_rest_stays(tmp_path: Path, episodes: list[RecordedEpisode]) -> None:
    from embodied_rl.episodes.recording import RecordingInfo
    from embodied_rl.sim.instrumented import plain_spec

    with manager_of(toy("SavedCountingSim", length=5), 2, image_size=6) as manager:
        info = RecordingInfo(plain_spec(manager.spec), {}, {"kind": "toy"})
        with RecordingWriter(tmp_path / "drawn", info, video="png") as writer:
            list(Replayer(manager, "action", lambda episode: EpisodeSink(writer, episode.seed)).run(enumerate(episodes)))
    for drawn in open_recording(tmp_path / "drawn"):
        before = episodes[drawn.seed]
        for name in ("action", "reward", "terminated", "truncated", "success"):
            np.testing.assert_array_equal(getattr(drawn, name), getattr(before, name))
        np.testing.assert_array_equal(drawn.observation["state"], before.observation["state"])
        assert dict(drawn.snapshots) == dict(before.snapshots)
        # The toy draws the number of its steps.
        assert [int(picture.max()) for picture in drawn.images["render"]] == [0, 1, 2, 3, 4, 5]
