"""The recorder on toy simulators in real worker processes, whose every number is known by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.errors import UserError
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.rollout.recording import ATTEMPTS_FILE, GeneratorPlayer, RecordingPlan, unsuccessful_seeds
from embodied_rl.sim.episode_log import Snapshot
from embodied_rl.types import ActionSpec, Observation
from tests.rollout.recording_toys import manager_of, record_toy, toy

BY_STEP, BY_SEED, SPEAKER = (f"tests.rollout.recording_toys:{name}" for name in ("ByStep", "by_seed", "Speaker"))


def by_seed(folder: Path) -> dict[int, RecordedEpisode]:
    return {episode.seed: episode for episode in open_recording(folder)}


def assert_equal_sets(one: Path, other: Path) -> None:
    """The same episodes, bit by bit, whatever their order."""
    left, right = by_seed(one), by_seed(other)
    assert left.keys() == right.keys()
    for seed, episode in left.items():
        for name in ("action", "reward", "terminated", "truncated", "success", "sampled_action", "log_prob", "value", "policy_version"):
            np.testing.assert_array_equal(getattr(episode, name), getattr(right[seed], name), err_msg=f"{name} of seed {seed}")
        for key, part in episode.observation.items():
            np.testing.assert_array_equal(part, right[seed].observation[key])


@pytest.mark.parametrize(("slots", "groups"), [(1, 1), (4, 1), (5, 2)])
def test_every_seed_once_with_the_experts_actions(tmp_path: Path, slots: int, groups: int) -> None:
    result = record_toy(tmp_path / "r", RecordingPlan(11, first_seed=100), toy(length=3), slots=slots, num_groups=groups, expert=BY_STEP)
    assert (result.num_recorded, result.num_played, result.num_steps, result.missing, result.complete) == (11, 11, 33, (), True)
    episodes = by_seed(tmp_path / "r")
    assert sorted(episodes) == list(range(100, 111))
    for seed, episode in episodes.items():
        # Actions 1.0, 1.1, 1.2; the observation is (seed, steps, sum of actions); the reward is the action.
        np.testing.assert_allclose(episode.action[:, 0], [1.0, 1.1, 1.2], rtol=1e-6)
        np.testing.assert_allclose(episode.observation["state"], [[seed, 0, 0], [seed, 1, 1], [seed, 2, 2.1], [seed, 3, 3.3]], rtol=1e-6)
        np.testing.assert_allclose(episode.reward, [1.0, 1.1, 1.2], rtol=1e-6)
        assert episode.success.tolist() == [False, False, True]
        assert episode.terminated.tolist() == [False, False, True]
        assert (episode.log_prob, episode.sampled_action, episode.value, episode.policy_version) == (None, None, None, None)
        assert episode.metadata["final_info"]["total"] == pytest.approx(3.3)


def test_random_actions_and_their_log_probabilities(tmp_path: Path) -> None:
    with manager_of(toy()) as manager:
        player = GeneratorPlayer(RandomGenerator(manager.spec), manager.spec.action, draws=True)
    record_toy(tmp_path / "r", RecordingPlan(6), toy(), player=player)
    episodes = by_seed(tmp_path / "r")
    for episode in episodes.values():
        assert episode.sampled_action is not None
        assert episode.log_prob is not None
        # Uniform on [-1, 1]: density 1/2; the simulator's bounds are ±10.
        np.testing.assert_allclose(episode.log_prob, np.full((5, 1), np.log(0.5)), rtol=1e-6)
        np.testing.assert_allclose(episode.action, 10 * episode.sampled_action, rtol=1e-6)
    drawn = np.concatenate([episode.action for episode in episodes.values()])
    assert len(np.unique(drawn)) == 6 * 5, "episodes share their noise"


class Critical(Generator):
    """A generator with values: acts 0.25, and a value that is the sum so far."""

    version = 7

    has_values = True

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self.num_rows, self.noise = len(slots), noise

    def recv(self) -> ActedBatch:
        return ActedBatch(
            np.arange(self.num_rows), np.full((self.num_rows, 1), 0.25, np.float32), np.zeros((self.num_rows, 1), np.float32), 7
        )

    def publish(self, version: int) -> None: ...

    def value(self, observation: Observation) -> np.ndarray:
        return observation["state"][:, 2]


def test_a_policys_mode_has_values_and_versions_but_no_log_probability(tmp_path: Path) -> None:
    player = GeneratorPlayer(Critical(), ActionSpec.continuous([-10.0], [10.0]), draws=False)
    record_toy(tmp_path / "r", RecordingPlan(3), toy(length=3), slots=2, player=player)
    for episode in open_recording(tmp_path / "r"):
        assert episode.log_prob is None
        np.testing.assert_array_equal(episode.policy_version, [7, 7, 7])
        np.testing.assert_allclose(episode.value, [0.0, 2.5, 5.0])  # before each step
        np.testing.assert_allclose(episode.action, np.full((3, 1), 2.5))


def test_a_seeds_episode_does_not_depend_on_the_others(tmp_path: Path) -> None:
    with manager_of(toy()) as manager:
        player = GeneratorPlayer(RandomGenerator(manager.spec), manager.spec.action, draws=True)
    record_toy(tmp_path / "many", RecordingPlan(9), toy(), slots=5, num_groups=2, player=player)
    record_toy(tmp_path / "one", RecordingPlan(9), toy(), slots=1, player=player)
    assert_equal_sets(tmp_path / "many", tmp_path / "one")


def test_only_successes_and_the_others_are_noted(tmp_path: Path) -> None:
    plan = RecordingPlan(4, only_success=True)
    result = record_toy(tmp_path / "r", plan, toy(length=5), slots=3, expert=BY_SEED)
    assert result.complete
    # 5 · 0.7 = 3.5 reaches 3, 5 · 0.1 does not: the odd seeds succeed.
    assert sorted(by_seed(tmp_path / "r")) == [1, 3, 5, 7]
    assert unsuccessful_seeds(tmp_path / "r" / ATTEMPTS_FILE) >= {0, 2, 4, 6}
    with (tmp_path / "r" / ATTEMPTS_FILE).open("a") as file:
        file.write('{"seed": 99, "outc')  # torn
    assert 99 not in unsuccessful_seeds(tmp_path / "r" / ATTEMPTS_FILE)
    more = record_toy(tmp_path / "r", dataclasses.replace(plan, num_episodes=6), toy(length=5), slots=3, resume=True, expert=BY_SEED)
    assert sorted(by_seed(tmp_path / "r")) == [1, 3, 5, 7, 9, 11]
    assert more.num_recorded == 6
    assert more.num_played <= 12 - 8 + 2, "seeds that were decided were played again"


def test_too_few_successes(tmp_path: Path) -> None:
    plan = RecordingPlan(4, only_success=True, max_seeds=5)
    result = record_toy(tmp_path / "r", plan, toy(length=5), expert=BY_SEED)
    assert (result.complete, result.num_recorded, result.missing) == (False, 2, ())
    assert sorted(by_seed(tmp_path / "r")) == [1, 3]


def test_resumed_where_it_was(tmp_path: Path) -> None:
    with manager_of(toy()) as manager:
        player = GeneratorPlayer(RandomGenerator(manager.spec), manager.spec.action, draws=True)
    record_toy(tmp_path / "whole", RecordingPlan(10), toy(), slots=3, player=player)
    record_toy(tmp_path / "parts", RecordingPlan(4), toy(), slots=3, player=player)
    result = record_toy(tmp_path / "parts", RecordingPlan(10), toy(), slots=3, player=player, resume=True)
    assert (result.num_recorded, result.num_played) == (10, 6)
    assert_equal_sets(tmp_path / "whole", tmp_path / "parts")


def test_a_failed_simulators_episode_is_played_again(tmp_path: Path) -> None:
    config = dataclasses.replace(toy(misbehave="exit", once=str(tmp_path / "once")), on_fault="restart")
    result = record_toy(tmp_path / "r", RecordingPlan(8), config, expert=BY_STEP)
    assert (tmp_path / "once").exists()
    assert (result.complete, result.missing) == (True, ())
    record_toy(tmp_path / "clean", RecordingPlan(8), toy(), expert=BY_STEP)
    assert_equal_sets(tmp_path / "r", tmp_path / "clean")
    assert max(episode.metadata["attempt"] for episode in open_recording(tmp_path / "r")) == 1


def test_an_episode_that_fails_always_is_reported(tmp_path: Path) -> None:
    result = record_toy(tmp_path / "r", RecordingPlan(8, max_retries=1), toy(misbehave="raise", victim=5), expert=BY_STEP)
    assert (result.num_recorded, result.missing, result.complete) == (7, (5,), False)
    assert sorted(by_seed(tmp_path / "r")) == [0, 1, 2, 3, 4, 6, 7]
    (line,) = [json.loads(text) for text in (tmp_path / "r" / ATTEMPTS_FILE).read_text().splitlines()]
    assert line == {"seed": 5, "outcome": "given_up"}
    # Resumed, it is tried again, and here it is mended.
    again = record_toy(tmp_path / "r", RecordingPlan(8), toy(misbehave="raise", victim=-1), resume=True, expert=BY_STEP, same=False)
    assert (again.num_played, again.missing, again.complete) == (1, (), True)


def test_snapshots_at_their_steps_continue_the_episode(tmp_path: Path) -> None:
    record_toy(tmp_path / "r", RecordingPlan(2, snapshot_every=2), toy("SavedCountingSim", length=5), slots=2, expert=BY_STEP)
    for episode in open_recording(tmp_path / "r"):
        assert sorted(episode.snapshots) == [0, 2, 4]
        with manager_of(toy("SavedCountingSim", length=5), slots=1) as manager:
            manager.restore([0], [Snapshot.from_bytes(episode.snapshots[2])])
            for step in (2, 3, 4):
                manager.send([0], episode.action[step][None])
                batch = manager.recv([0])
            np.testing.assert_array_equal(batch.final_observation["state"][0], episode.observation["state"][-1])
            assert batch.episodes[0].seed == episode.seed
            assert batch.episodes[0].episode_return == pytest.approx(episode.episode_return)


def test_no_snapshots_where_they_say_no_more_than_the_actions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'count' has no snapshots \(spec.snapshots is 'replay'\).*states=none"):
        record_toy(tmp_path / "r", RecordingPlan(2, snapshot_every=2), toy(), expert=BY_STEP)


def test_pictures_of_every_step(tmp_path: Path) -> None:
    record_toy(tmp_path / "r", RecordingPlan(2), toy(length=3), slots=2, expert=BY_STEP, image_size=6)
    for episode in open_recording(tmp_path / "r"):
        # The toy draws [4, 6, 3] in the grey value of its steps; the last moment is there, not the next episode's first.
        assert episode.images["render"].shape == (4, 4, 6, 3)
        assert [int(picture.max()) for picture in episode.images["render"]] == [0, 1, 2, 3]


def test_text(tmp_path: Path) -> None:
    record_toy(tmp_path / "r", RecordingPlan(3), toy("TalkingSim", length=2), slots=2, expert=SPEAKER)
    for episode in open_recording(tmp_path / "r"):
        assert episode.action.tolist() == ["word 1", "word 2"]
        assert episode.observation["text"].tolist() == [f"seed {episode.seed}", "word 1", "word 2"]
        assert episode.observation["lengths"].tolist() == [[], [6], [6, 6]]
        assert [picture.shape for picture in episode.observation["picture"]] == [(1, 5, 3), (2, 5, 3), (3, 5, 3)]


def test_environments_that_step_together(tmp_path: Path) -> None:
    config = dataclasses.replace(toy(), target="tests.rollout.recording_toys:TogetherSim")
    result = record_toy(tmp_path / "r", RecordingPlan(7), config, slots=3, expert=BY_SEED)
    assert result.complete
    for seed, episode in by_seed(tmp_path / "r").items():
        # Episodes of 2 or 3 steps: those that wait for others are not moved by them before they are recorded.
        assert episode.num_steps == 2 + seed % 2
        np.testing.assert_array_equal(episode.observation["state"][:, 1], np.arange(episode.num_steps + 1))


def test_environments_that_die_together_at_their_beginning_begin_again(tmp_path: Path) -> None:
    kwargs = {"victim": 5, "once": str(tmp_path / "once")}
    config = dataclasses.replace(toy(**kwargs), target="tests.rollout.recording_toys:TogetherSim", num_workers=1)
    result = record_toy(tmp_path / "r", RecordingPlan(3, first_seed=5), config, slots=2, expert=BY_SEED)
    assert (result.num_recorded, result.complete) == (3, True)
    assert [episode.metadata["attempt"] for _, episode in sorted(by_seed(tmp_path / "r").items())] == [1, 1, 0]
