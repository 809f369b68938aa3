"""Encoders that go on from film to film: no film shows what was encoded before it, and none lacks a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.episodes.encoders import GROUP_OF_PICTURES, KeptEncoders
from embodied_rl.episodes.films import PICTURES_AT_ONCE, Filming, FilmingTools
from embodied_rl.episodes.layout import Column
from embodied_rl.episodes.pictures import VideoReader, VideoWriter

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


def film(path: Path, shown: np.ndarray, encoders: KeptEncoders | None, fps: int = FPS) -> bytes:
    writer = VideoWriter(path, shown.shape[1], shown.shape[2], fps, lossless=True, encoders=encoders)
    for picture in shown:
        writer.add(picture)
    writer.close()
    return path.read_bytes()


def decoded(path: Path, shape: tuple[int, ...], count: int) -> np.ndarray:
    reader = VideoReader(path, shape, count)
    try:
        return np.stack([reader.read(number) for number in range(count)])
    finally:
        reader.close()


# One, two and three pictures that stand for themselves: the next film begins after an even and after an odd number of them.
LENGTHS = [1, GROUP_OF_PICTURES, GROUP_OF_PICTURES + 1, 5, 2 * GROUP_OF_PICTURES + 1, 1, 2, GROUP_OF_PICTURES]


def test_a_film_is_the_one_that_a_new_encoder_makes(tmp_path: Path) -> None:
    encoders = KeptEncoders()
    for number, length in enumerate(LENGTHS):
        shown = pictures(number, length)
        assert film(tmp_path / "kept.mp4", shown, encoders) == film(tmp_path / "new.mp4", shown, None), f"film {number}"
        np.testing.assert_array_equal(decoded(tmp_path / "kept.mp4", SHAPE, length), shown)


def test_films_of_several_kinds_and_at_once_have_encoders_of_their_own(tmp_path: Path) -> None:
    encoders = KeptEncoders()
    kinds: Sequence[tuple[tuple[int, ...], int]] = [(SHAPE, 20), (SHAPE, 10), ((33, 17, 3), 20), (SHAPE, 20)]
    for turn in range(3):
        shown = [pictures(10 * turn + number, 6 + turn, shape) for number, (shape, _) in enumerate(kinds)]
        writers = [
            VideoWriter(tmp_path / f"{number}.mp4", shape[0], shape[1], fps, lossless=True, encoders=encoders)
            for number, (shape, fps) in enumerate(kinds)
        ]
        for step in range(6 + turn):
            for writer, frames in zip(writers, shown, strict=True):
                writer.add(frames[step])
        for number, (writer, (_, fps)) in enumerate(zip(writers, kinds, strict=True)):
            writer.close()
            assert writer.path.read_bytes() == film(tmp_path / "new.mp4", shown[number], None, fps)
    assert sorted(len(free) for free in encoders._free.values()) == [1, 1, 2]


def test_a_film_that_is_given_up_leaves_nothing_in_the_next_one(tmp_path: Path) -> None:
    encoders = KeptEncoders()
    for given_up in (1, 3, GROUP_OF_PICTURES + 3):
        writer = VideoWriter(tmp_path / "lost.mp4", HEIGHT, WIDTH, FPS, lossless=True, encoders=encoders)
        for picture in pictures(1, given_up):
            writer.add(picture)
        writer.discard()
        assert not (tmp_path / "lost.mp4").exists()
        shown = pictures(2, 7)
        assert film(tmp_path / "kept.mp4", shown, encoders) == film(tmp_path / "new.mp4", shown, None)
    (free,) = encoders._free.values()
    assert len(free) == 1, "it came back from every film"


@pytest.mark.parametrize("count", [1, PICTURES_AT_ONCE, 3 * PICTURES_AT_ONCE + 1])
def test_pictures_wait_for_each_other_and_all_are_in_the_film(tmp_path: Path, count: int) -> None:
    tools = FilmingTools()
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


def test_few_large_pictures_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodied_rl.episodes.films.WAITING_BYTES", 3 * len(COLUMNS) * HEIGHT * WIDTH * 3 + 1)
    shown, filming = pictures(1, 20), Filming(tmp_path, COLUMNS, FPS, 1, FilmingTools())
    most = 0
    for picture in shown:
        filming.add(dict.fromkeys(COLUMNS, picture))
        most = max(most, *(len(rooms) for rooms in filming._waiting.values()))
    assert most == 2, "the third one is encoded at once, and those that wait with it"
    filming.finish()
    np.testing.assert_array_equal(decoded(tmp_path / "observation.rgb-1-20.mp4", SHAPE, 20), shown)


def test_a_filming_that_is_given_up_gives_its_memory_back(tmp_path: Path) -> None:
    tools = FilmingTools()
    for seed in range(5):
        filming = Filming(tmp_path, COLUMNS, FPS, seed, tools)
        for picture in pictures(seed, 3):
            filming.add(dict.fromkeys(COLUMNS, picture))
        filming.discard()
        filming.discard()
    assert list(tmp_path.iterdir()) == []
    (rooms,) = tools._rooms.values()
    assert len(rooms) <= 2 * PICTURES_AT_ONCE
