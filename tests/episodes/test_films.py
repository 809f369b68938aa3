"""Films whose pictures wait for each other: none lacks a picture, and none shows what was encoded before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embodied_rl.episodes.layout import PICTURES_AT_ONCE, Column, Filming, FilmingTools
from embodied_rl.episodes.pictures import VideoReader, VideoWriter
from embodied_rl.errors import UserError

HEIGHT, WIDTH, FPS = 32, 48, 20
SHAPE = (HEIGHT, WIDTH, 3)
COLUMNS = {
    "rgb": Column("observation.rgb", "mp4_lossless", "observation", "|u1", SHAPE),
    "image:front": Column("images.front", "mp4", "observation", "|u1", SHAPE),
}


def pictures(seed: int, count: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """A block that moves over a ground of its own, a little of it noise: encoded by way of other pictures and of none."""
    rng = np.random.default_rng(seed)
    shown = np.repeat(rng.integers(0, 256, (1, *shape), np.uint8), count, axis=0)
    shown[:, : shape[0] // 2] = rng.integers(0, 256, 3, np.uint8)
    for number, picture in enumerate(shown):
        picture[:8, number % 24 : number % 24 + 8] = rng.integers(0, 256, 3, np.uint8)
    return shown


def decoded(path: Path, shape: tuple[int, ...], count: int) -> np.ndarray:
    reader = VideoReader(path, shape, count)
    try:
        return np.stack([reader.read(number) for number in range(count)])
    finally:
        reader.close()


@pytest.mark.parametrize("count", [1, PICTURES_AT_ONCE, 3 * PICTURES_AT_ONCE + 1])
def test_pictures_wait_for_each_other_and_all_are_in_the_film(tmp_path: Path, count: int) -> None:
    tools = FilmingTools(list)
    shown = {seed: {part: pictures(seed + index, count) for index, part in enumerate(COLUMNS)} for seed in (30, 41)}
    films = {seed: Filming(tmp_path, COLUMNS, FPS, seed, tools) for seed in shown}
    for step in range(count):
        for seed, filming in films.items():
            filming.add({part: frames[step].copy() for part, frames in shown[seed].items()})
            assert max(len(rooms) for rooms in filming._waiting.values()) < PICTURES_AT_ONCE
    for seed, filming in films.items():
        filming.finish()
        lossless, lossy = (tmp_path / f"{column.name}-{seed}-{count}.mp4" for column in COLUMNS.values())
        np.testing.assert_array_equal(decoded(lossless, SHAPE, count), shown[seed]["rgb"])
        writer = VideoWriter(tmp_path / "alone.mp4", HEIGHT, WIDTH, FPS, lossless=False)
        for picture in shown[seed]["image:front"]:
            writer.add(picture)
        writer.close()
        assert lossy.read_bytes() == writer.path.read_bytes(), "memory that a lossless film has used says nothing to the next one"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_film_does_not_depend_on_what_came_before_or_how_many_pictures_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {seed: pictures(seed, count) for seed, count in {1: 20, 2: 37, 3: 3, 4: 16, 5: 33}.items()}

    def filmed(seed: int, tools: FilmingTools) -> list[bytes]:
        filming = Filming(tmp_path, COLUMNS, FPS, seed, tools)
        for picture in shown[seed]:
            filming.add(dict.fromkeys(COLUMNS, picture))
        filming.finish()
        return [(tmp_path / f"{column.name}-{seed}-{len(shown[seed])}.mp4").read_bytes() for column in COLUMNS.values()]

    tools = FilmingTools(list)
    lost = Filming(tmp_path, COLUMNS, FPS, 99, tools)
    for picture in pictures(99, 21):
        lost.add(dict.fromkeys(COLUMNS, picture))
    lost.discard()
    films = {seed: filmed(seed, tools) for seed in shown}
    monkeypatch.setattr("embodied_rl.episodes.layout.PICTURES_AT_ONCE", 1)
    assert films == {seed: filmed(seed, FilmingTools(list)) for seed in shown}


def test_few_large_pictures_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.episodes.layout.WAITING_BYTES", 3 * len(COLUMNS) * HEIGHT * WIDTH * 3 + 1)
    shown, filming = pictures(1, 20), Filming(tmp_path, COLUMNS, FPS, 1, FilmingTools(list))
    most = 0
    for picture in shown:
        filming.add(dict.fromkeys(COLUMNS, picture))
        most = max(most, *(len(rooms) for rooms in filming._waiting.values()))
    assert most == 2, "the third one is encoded at once, and those that wait with it"
    filming.finish()
    np.testing.assert_array_equal(decoded(tmp_path / "observation.rgb-1-20.mp4", SHAPE, 20), shown)


def test_a_filming_that_is_given_up_gives_its_memory_back(tmp_path: Path) -> None:
    tools = FilmingTools(list)
    for seed in range(5):
        filming = Filming(tmp_path, COLUMNS, FPS, seed, tools)
        for picture in pictures(seed, 3):
            filming.add(dict.fromkeys(COLUMNS, picture))
        filming.discard()
        filming.discard()
    assert list(tmp_path.iterdir()) == []
    (rooms,) = tools.values()
    assert len(rooms) <= 2 * PICTURES_AT_ONCE


def test_a_video_that_cannot_be_written_fails_again_and_again(tmp_path: Path) -> None:
    """libav crashes when pictures follow one that could not be written, as they do when they wait in a queue."""
    path = tmp_path / "video.mp4"
    path.symlink_to("/dev/full")
    writer = VideoWriter(path, HEIGHT, WIDTH, FPS, lossless=True)
    for picture in pictures(0, 40):
        with pytest.raises(UserError, match="No space left on device"):
            writer.add(picture)
    with pytest.raises(UserError, match="No space left on device"):
        writer.discard()
    assert not path.is_symlink()
