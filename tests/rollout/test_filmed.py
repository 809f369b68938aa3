"""Videos that the simulators' own processes encode: the recording holds what it would hold otherwise, whatever fails on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.record import Showing, record
from embodied_rl.config import SimConfig
from embodied_rl.episodes.layout import films_folder, keep_films
from embodied_rl.episodes.pictures import VideoReader
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.rollout.batch_sinks import BatchSinks
from embodied_rl.rollout.filmed import EncodingSim, filmed_columns, films_of, with_films
from embodied_rl.rollout.recording import RecordingPlan
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.types import StepBatch, StepBuffers
from tests.rollout.recording_toys import painted

TOYS = "tests.rollout.recording_toys"
BY_STEP, BY_SEED = f"{TOYS}:ByStep", f"{TOYS}:by_seed"
LENGTH = 5


def painting(**kwargs: object) -> SimConfig:
    return SimConfig(name="painting", target=f"{TOYS}:PaintingSim", kwargs={"length": LENGTH, **kwargs}, num_slots=4, num_workers=2)


def record_painting(folder: Path, plan: RecordingPlan, config: SimConfig, *, expert: str = BY_STEP, resume: bool = False) -> int:
    """Returns how many episodes were played."""
    showing = Showing(snapshot_every=plan.snapshot_every, image_size=16)
    return record(config, folder, plan, policy="expert", expert=expert, showing=showing, resume=resume).result.num_played


def check(folder: Path, seeds: list[int]) -> None:
    """Every picture is the one of its seed and step: what was seen to the bit, what is for people nearly."""
    recording = open_recording(folder)
    assert sorted(episode.seed for episode in recording) == seeds
    for episode in recording:
        shown = np.stack([painted(episode.seed, step) for step in range(LENGTH + 1)])
        np.testing.assert_array_equal(episode.observation["rgb"][:], shown)
        grey = np.asarray(episode.images["render"][:]).astype(int)
        assert grey.shape == (LENGTH + 1, 16, 16, 3)
        assert np.abs(grey - 10 * np.arange(LENGTH + 1)[:, None, None, None]).max() <= 3
    assert not list(folder.glob(".films-*")), "what is under way goes when the recorder goes"
    videos = [path.parent.name for path in folder.rglob("*.mp4")]
    assert sorted(videos) == ["images.render"] * len(seeds) + ["observation.rgb"] * len(seeds)


def test_each_process_encodes_what_it_draws(tmp_path: Path) -> None:
    record_painting(tmp_path / "r", RecordingPlan(9, first_seed=7), painting())
    check(tmp_path / "r", list(range(7, 16)))


def test_a_limit_of_steps_that_is_not_the_simulators_own_ends_a_film_too(tmp_path: Path) -> None:
    record_painting(tmp_path / "r", RecordingPlan(3), dataclasses.replace(painting(length=99), max_episode_steps=LENGTH))
    check(tmp_path / "r", [0, 1, 2])


def test_unsuccessful_episodes_leave_no_film(tmp_path: Path) -> None:
    played = record_painting(tmp_path / "r", RecordingPlan(3, only_success=True), painting(), expert=BY_SEED)
    check(tmp_path / "r", [1, 3, 5])
    assert played >= 6


def test_pictures_in_the_middle_of_a_chunk_are_filmed(tmp_path: Path) -> None:
    """The simulator draws what is read; a film reads everything."""
    folder, length = films_folder(tmp_path), 6
    config = dataclasses.replace(painting(length=length), target=f"{TOYS}:SplitPaintingSim", num_workers=1)
    with keep_films(folder), EnvManager.from_config(with_films(config, folder), EpisodeSeeds.training(7), chunk_size=4) as manager:
        films = films_of(manager.spec, folder)
        assert films is not None
        manager.reset()
        ended = [one for _ in range(2) for one in manager.step(np.ones((4, 4, 1))).episodes]
        assert [one.length for one in ended] == [length] * 4
        for one in ended:
            shown = np.stack([painted(one.seed, step) for step in range(length + 1)])
            with contextlib.closing(
                VideoReader(films.path("observation.rgb", one.seed, length + 1), shown.shape[1:], length + 1)
            ) as reader:
                np.testing.assert_array_equal([reader.read(step) for step in range(length + 1)], shown)


def test_a_recording_of_a_simulator_that_draws_what_is_read_has_every_picture(tmp_path: Path) -> None:
    record_painting(tmp_path / "r", RecordingPlan(5), dataclasses.replace(painting(), target=f"{TOYS}:SplitPaintingSim"))
    check(tmp_path / "r", list(range(5)))


@pytest.mark.parametrize("kind", ["raise", "exit", "hang"])
def test_a_worker_that_fails_in_mid_episode_films_it_again(tmp_path: Path, kind: str) -> None:
    config = painting(misbehave=kind, at=3, once=str(tmp_path / "once"))
    record_painting(tmp_path / "r", RecordingPlan(6), dataclasses.replace(config, step_timeout_s=3.0 if kind == "hang" else 300.0))
    assert (tmp_path / "once").exists()
    check(tmp_path / "r", list(range(6)))


def test_an_episode_that_goes_on_from_a_snapshot_is_played_again(tmp_path: Path) -> None:
    """Its new process has not seen its beginning."""
    played = record_painting(
        tmp_path / "r", RecordingPlan(4, snapshot_every=2), painting(misbehave="exit", at=4, once=str(tmp_path / "once"))
    )
    check(tmp_path / "r", [0, 1, 2, 3])
    assert played == 4
    attempts = {episode.seed: episode.metadata["attempt"] for episode in open_recording(tmp_path / "r")}
    assert 1 in attempts.values()
    assert {tuple(sorted(episode.snapshots)) for episode in open_recording(tmp_path / "r")} == {(0, 2, 4)}


def test_a_killed_recorders_films_go_when_the_next_one_comes(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    code = (
        "from pathlib import Path; import sys; from tests.rollout.test_filmed import *; "
        "record_painting(Path(sys.argv[1]), RecordingPlan(4000), painting(step_s=0.01))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 120
    while len(list(folder.glob("part-0000/observation.rgb/*.mp4"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = folder.glob(".films-*")
    mine = films_folder(folder)
    with keep_films(mine):
        assert not left.exists()
        other = films_folder(folder)
        with keep_films(other):
            assert mine.exists(), "somebody lives in it"
        assert not other.exists()
    done = {episode.seed for episode in open_recording(folder)}
    assert len(done) >= 2, "a film is moved before its episode's row is written"
    record_painting(folder, RecordingPlan(max(done) + 3), painting(step_s=0.01), resume=True)
    check(folder, list(range(max(done) + 3)))


def test_a_film_that_is_not_there_is_an_error_of_its_episode_alone(tmp_path: Path) -> None:
    sim = EncodingSim(2, {"target": f"{TOYS}:PaintingSim", "kwargs": {"length": 2}}, str(tmp_path / "films"))
    films = films_of(sim.spec, tmp_path / "films")
    assert films is not None
    assert films.columns == {"observation.rgb"}
    out, rows = StepBuffers.allocate(sim.spec, 2), np.arange(2)
    with RecordingWriter(tmp_path / "r", RecordingInfo(sim.spec, {}, {})) as writer, keep_films(films.folder):
        sinks = BatchSinks(writer, 2, films)
        sim.reset([0, 1], [5, 6], out)
        for slot in (0, 1):
            sinks.start(slot, 5 + slot, out.observation, slot)
        for _ in range(2):
            sim.step([0, 1], np.ones((2, 1)), out)
            seen = out.observation
            batch = StepBatch(rows, seen, out.reward, out.terminated, out.truncated, out.success, final_observation=seen, episodes=())
            over = sinks.step_batch(batch, {"action": np.ones((2, 1), np.float32)})
        assert over == [0, 1]
        assert not films.are_whole(5, 3), "whoever simulates says when an episode is over"
        sim.episodes_ended([0, 1])
        assert films.are_whole(5, 3)
        films.remove(6, 3)
        assert sinks.finish(0) == 0
        with pytest.raises(RecordingError, match=r"'observation\.rgb': the video with 3 pictures is missing"):
            sinks.finish(1)
        sim.close()
    (episode,) = open_recording(tmp_path / "r")
    np.testing.assert_array_equal(episode.observation["rgb"][2], painted(5, 2))


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    sim = EncodingSim(1, {"target": f"{TOYS}:PaintingSim"}, str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"Cannot write '.*gone/\.observation\.rgb-8\.mp4': No such file"):
        sim.reset([0], [8], StepBuffers.allocate(sim.spec, 1))  # whose first picture does not wait for others


def test_what_is_filmed() -> None:
    config = with_films(painting(), Path("somewhere"))
    assert config.kwargs["folder"] == os.path.abspath("somewhere")
    sim = EncodingSim(1, {"target": "tests.sim.toy:CountingSim", "kwargs": {"image": True}}, "nowhere")
    assert filmed_columns(sim.spec) == {}, "pictures of 8 × 8 are arrays"
    assert films_of(sim.spec, Path("nowhere")) is None
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))  # and nothing is written


def test_a_recorder_that_comes_while_another_one_begins_leaves_it_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, lock, locked = films_folder(tmp_path), fcntl.flock, list[int]()

    def late(file: int, how: int) -> None:
        locked.append(file)
        if len(locked) == 1:
            with keep_films(films_folder(tmp_path)):
                pass
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with keep_films(mine):
        assert len(locked) > 1
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []
