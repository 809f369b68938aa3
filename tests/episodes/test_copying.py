"""Merging and splitting: episodes of one recording in another, with nothing lost and nothing said that was not so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.episodes.folder import adopted, require_compatible, validate
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording, RecordingError
from embodied_rl.episodes.writer import SKIPPED, RecordingWriter
from embodied_rl.types import TensorSpec
from tests.episodes.episode_toys import STATE_SPEC, assert_same_episode, info_of, make_episode, moving_square


def record(folder: Path, seeds: range, spec: object = STATE_SPEC, **policy: object) -> Path:
    with RecordingWriter(folder, info_of(spec, **policy)) as writer:  # type: ignore[arg-type]
        for seed in seeds:
            writer.add(make_episode(seed=seed, num_steps=seed + 2, images={"front": moving_square(seed + 3, 33, 48)}))
    return folder


def copy_episodes(source: Recording, writer: RecordingWriter, indices: Iterable[int] | None = None) -> list[int]:
    require_compatible(source.info, writer.info, str(source.path), str(writer.folder))
    numbers = range(len(source)) if indices is None else indices
    return [writer.add(adopted(source.episode(number), source.info, writer.info)) for number in numbers]


def test_a_split_is_the_chosen_episodes_and_videos_lose_nothing(tmp_path: Path) -> None:
    record(tmp_path / "all", range(5))
    with open_recording(tmp_path / "all") as source:
        with RecordingWriter(tmp_path / "some", source.info) as writer:
            assert copy_episodes(source, writer, [3, 1]) == [0, 1]
        with open_recording(tmp_path / "some") as target:
            assert validate(target) == []
            assert target.info == source.info
            for number, original in enumerate((3, 1)):
                # Pictures too: the lossy video was copied, not encoded again.
                assert_same_episode(target.episode(number), source.episode(original))
    files = [tmp_path / name / "part-0000/images.front" / file for name, file in (("all", "000003.mp4"), ("some", "000000.mp4"))]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_pictures_go_into_another_encoding(tmp_path: Path) -> None:
    record(tmp_path / "all", range(2))
    with open_recording(tmp_path / "all") as source:
        with RecordingWriter(tmp_path / "png", source.info, video="png") as writer:
            copy_episodes(source, writer)
        with open_recording(tmp_path / "png") as target:
            np.testing.assert_array_equal(np.asarray(target.episode(1).images["front"]), np.asarray(source.episode(1).images["front"]))


def test_a_merge_keeps_who_acted_and_in_which_task(tmp_path: Path) -> None:
    """The same seed of two policies is two episodes; of one policy it is one."""
    record(tmp_path / "a", range(3))
    record(tmp_path / "b", range(2), dataclasses.replace(STATE_SPEC, task="other", instruction="push"), kind="expert")
    with (
        open_recording(tmp_path / "a") as first,
        open_recording(tmp_path / "b") as second,
        RecordingWriter(tmp_path / "both", first.info, duplicates="skip") as writer,
    ):
        assert copy_episodes(first, writer) == [0, 1, 2]
        assert copy_episodes(second, writer) == [3, 4]
        assert copy_episodes(second, writer) == [SKIPPED, SKIPPED]
        assert copy_episodes(first, writer, [2]) == [SKIPPED]
    with open_recording(tmp_path / "both") as both:
        assert validate(both) == []
        assert both.tasks.tolist() == ["toy"] * 3 + ["other"] * 2
        assert [episode.metadata.get("policy") for episode in both] == [None] * 3 + [{"kind": "expert"}] * 2
        assert [episode.instruction for episode in both] == [None] * 3 + ["push"] * 2


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    record(tmp_path / "a", range(1))
    wider = dataclasses.replace(STATE_SPEC, observation={"state": TensorSpec((4,))})
    with (
        open_recording(tmp_path / "a") as source,
        RecordingWriter(tmp_path / "b", info_of(wider)) as writer,
        pytest.raises(RecordingError, match=r"a' do not fit into .*b': observation 'state' \[3\] float32 ≠ \[4\] float32"),
    ):
        copy_episodes(source, writer)
