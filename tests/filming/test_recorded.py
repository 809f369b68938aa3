"""Films of recorded episodes: every picture is the recorded one, and what is written is what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from embodied_rl.commands.render import film_recording
from embodied_rl.episodes.recording import EpisodeTable, RecordedEpisode, Recording, RecordingInfo
from embodied_rl.errors import UserError
from embodied_rl.media.episodes import from_pictures, moment_of, recorded_cameras, stride_of
from embodied_rl.media.overlays import Film
from embodied_rl.video import border_width
from tests.filming.samples import SPEC, recorded_episode


class InMemory(Recording):
    def __init__(self, path: Path, episodes: Sequence[RecordedEpisode]) -> None:
        super().__init__(path, RecordingInfo(SPEC, {}, {"kind": "random"}), EpisodeTable.of(map(vars, episodes)))
        self._episodes = episodes

    def episode(self, number: int) -> RecordedEpisode:
        return self._episodes[number]


def mp4(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_moments_are_what_was_known_after_so_many_steps() -> None:
    episode = recorded_episode(seed=3, num_steps=4)
    first, third, last = (moment_of(episode, step) for step in (0, 3, 4))
    assert (first.reward, first.episode_return, first.success, first.value, first.action) == (0.0, 0.0, False, 10.0, None)
    assert (third.reward, third.episode_return, third.success, third.value) == (0.5, 1.5, False, 7.0)
    assert third.action is not None
    np.testing.assert_array_equal(third.action, [0.5, 3.0])
    assert (last.episode_return, last.success, last.value) == (2.0, True, None)


def test_cameras_are_side_by_side_and_long_episodes_are_thinned() -> None:
    episode = recorded_episode(seed=3, num_steps=10)
    views = recorded_cameras(episode)
    assert list(views) == ["front", "wrist"]
    filmed = from_pictures(InMemory(Path("x"), [episode]), 0, views, episode, size=24, stride=4)
    assert [moment.step for moment in filmed.moments] == [0, 4, 8, 10]
    for moment, frame in zip(filmed.moments, filmed.frames, strict=True):
        assert frame.shape == (24, 48, 3)
        # 32 × 48 scaled to 16 × 24, with four black rows above and below.
        assert (frame[4:20, :24] == moment.step).all()
        assert (frame[:4, :24] == 0).all()
        assert (frame[:, 24:] == 100 + moment.step).all()
    assert (filmed.task, filmed.instruction, filmed.seed) == ("Toy-v0", "push the cube", 3)
    # 250 steps all have a picture, 251 every second; and a gibibyte is the most, whatever the length.
    assert [stride_of([length], 1) for length in (250, 251, 500, 1004)] == [1, 2, 2, 8]
    assert stride_of([100, 100], 2**30 // 102) == 4  # (100 // 4 + 2) · 2 pictures are the first that fit


def test_pictures_that_the_policy_saw_do_as_well() -> None:
    seen = np.zeros((5, 8, 8, 3), np.uint8)
    episode = recorded_episode(seed=1, num_steps=4, images={}, observation={"rgb": seen, "state": np.zeros((5, 2), np.float32)})
    assert list(recorded_cameras(episode)) == ["rgb"]


def test_the_best_recorded_episodes_are_shown(tmp_path: Path) -> None:
    # Seeds 1, 2, 3 with 3, 9 and 5 steps of reward 0.5: odd seeds succeed; of these the longer one has more return.
    recording = InMemory(tmp_path / "toy.h5", [recorded_episode(seed, steps) for seed, steps in ((1, 3), (2, 9), (3, 5))])
    (path,) = film_recording(recording, tmp_path / "videos", Film(select="best:2", size=64, formats=("mp4",), overlay="none"))
    assert path.name == "Toy-v0_toy_best.mp4"
    frames = mp4(path)
    assert frames[0].shape == (64, 132, 3)
    # The left tile is seed 3's, whose last picture has the grey 5; the right one stops at seed 1's third. H.264 blurs by little.
    last = frames[-1].astype(int)
    assert abs(last[32, 32] - 5).max() <= 3
    assert abs(last[32, 100] - 3).max() <= 3
    (again,) = film_recording(recording, tmp_path / "videos", Film(select="best:2", size=64, formats=("mp4",), overlay="none"))
    assert again.name == "Toy-v0_toy_best_2.mp4"
    (first,) = film_recording(recording, tmp_path / "videos", Film(num_episodes=9, size=64, formats=("mp4",), cameras=("wrist",)))
    assert first.name == "Toy-v0_toy.mp4"
    assert mp4(first)[0].shape[1] == 3 * (64 + 2 * border_width(64)) + 2 * 4, "all three, where there are no nine"


def test_what_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no episodes"):
        film_recording(InMemory(tmp_path / "toy", []), tmp_path, Film())
    recording = InMemory(tmp_path / "toy", [recorded_episode(1, 3)])
    with pytest.raises(UserError, match=r"no pictures of camera 'wirst'. Did you mean 'wrist'\? Known: front, wrist."):
        film_recording(recording, tmp_path, Film(cameras=("wirst",)))
    blind = InMemory(tmp_path / "toy", [recorded_episode(1, 3, images={})])
    with pytest.raises(UserError, match="does not name its simulator"):
        film_recording(blind, tmp_path, Film())
    mixed = InMemory(tmp_path / "toy", [recorded_episode(1, 3), recorded_episode(3, 3, images={})])
    with pytest.raises(UserError, match=r"Episode 1 of '.*toy' has no pictures of camera 'front'"):
        film_recording(mixed, tmp_path, Film())
