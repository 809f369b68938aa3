"""``python -m embodied_rl.replay`` on real simulators: exact where they are deterministic, and honest where something differs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands.record import main as record
from embodied_rl.commands.replay import main, replay
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.sim.manager import EnvManager
from tests.short_run import one_line_error, told

pytestmark = pytest.mark.usefixtures("forked")


def recorded(folder: Path, *argv: str, num_workers: int = 1) -> Path:
    record([*argv, f"sim.num_workers={num_workers}", f"output={folder}"])
    return folder


@pytest.fixture(scope="module")
def key_door(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "key_door"
    return recorded(folder, "sim=key_door", "num_episodes=4", "sim.num_slots=4", "states=physics", num_workers=2)


def rewritten(source: Path, folder: Path, change: Any, **info: Any) -> Path:
    """A recording whose episodes (and what they share) were changed."""
    recording = open_recording(source)
    with RecordingWriter(folder, dataclasses.replace(recording.info, **info)) as writer:
        for episode in recording:
            writer.add(change(episode))
    return folder


def off(episode: RecordedEpisode) -> RecordedEpisode:
    """The action of step 10 turned round."""
    action = np.array(episode.action)
    action[10] *= -1
    return dataclasses.replace(episode, action=action)


def lying(episode: RecordedEpisode) -> RecordedEpisode:
    return dataclasses.replace(episode, success=np.zeros(episode.num_steps, bool))


def fails(argv: list[str]) -> Any:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


def test_report_and_table(key_door: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([f"recording={key_door}", f"report={tmp_path / 'report.json'}"])
    assert "KeyDoor, replayed by action: 4 episodes, 4 exact, success as recorded in 4" in capsys.readouterr().out
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["num_episodes"], document["num_exact"], document["num_success_matched"], document["max_drift"]) == (4, 4, 4, 0.0)
    for episode, before in zip(document["episodes"], open_recording(key_door), strict=True):
        assert (episode["seed"], episode["num_steps"], episode["first_step"]) == (before.seed, before.num_steps, None)
        assert episode["observation"]["state"]["per_step"] == [0.0] * (before.num_steps + 1)


def test_an_action_that_differs_is_found_at_its_step(key_door: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rewritten(key_door, tmp_path / "off", off)
    capsys.readouterr()
    # Every episode still comes to its goal or not: what is asked here is where it leaves the record.
    fails([f"recording={folder}", "tolerance=0.01"])
    out, err = capsys.readouterr()
    assert told(err)[0].startswith("error: ")
    assert "0 exact" in out
    document = json.loads((folder / "replay-action.json").read_text())
    for episode, before in zip(document["episodes"], open_recording(folder), strict=True):
        assert episode["first_step"] == 11
        # At full speed upwards, y was to rise by 0.04 m; it falls by as much: 2 · 0.08 in 2 y - 1.
        assert episode["observation"]["state"]["per_step"][11] == pytest.approx(0.16 * abs(before.action[10][1]), abs=0.09)
    # By state, the next step is right again, since the recorded state was restored before it.
    main([f"recording={folder}", "by=state", "num_episodes=2"])
    document = json.loads((folder / "replay-state.json").read_text())
    for episode in document["episodes"]:
        differing = np.flatnonzero(episode["observation"]["state"]["per_step"])
        assert differing.tolist() == [11]


def test_success_that_does_not_match_fails(key_door: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rewritten(key_door, tmp_path / "lying", lying)
    assert fails([f"recording={folder}"]) == 1
    out, err = capsys.readouterr()
    assert "Success is not as recorded in 4 of 4 episodes: seeds [" in err
    assert "success as recorded in 0" in out


def test_tolerance(key_door: Path, tmp_path: Path) -> None:
    folder = rewritten(
        key_door,
        tmp_path / "far",
        lambda episode: dataclasses.replace(episode, observation={"state": episode.observation["state"] + np.float32(0.5)}),
    )
    main([f"recording={folder}", "tolerance=0.6"])
    assert fails([f"recording={folder}", "tolerance=0.4"]) == 1


def test_a_replay_that_ends_before_its_record_is_within_no_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here nothing else can differ: the task reports no success, and the five steps that are replayed are equal."""
    folder = recorded(tmp_path / "swing", "sim=pendulum", "policy=random", "num_episodes=1", "sim.max_episode_steps=9")
    main([f"recording={folder}", "sim.max_episode_steps=5"])
    assert fails([f"recording={folder}", "sim.max_episode_steps=5", "tolerance=9"]) == 1
    assert "1 of 1 episodes ended before their recorded end: 5 of 9 steps of seed 0." in told(capsys.readouterr().err)[-1]


def test_missing_states_are_told_before_a_simulator_starts(tmp_path: Path, key_door: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rewritten(key_door, tmp_path / "stateless", lambda episode: dataclasses.replace(episode, state=None))
    monkeypatch.setattr(EnvManager, "from_config", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(UserError, match="was recorded without states"):
        replay(open_recording(folder), by="state")


def test_pictures_for_what_was_recorded_without(key_door: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main([f"recording={key_door}", "render=true", "size=64", "video=png", f"output={tmp_path / 'drawn'}", "num_episodes=2"])
    drawn = open_recording(tmp_path / "drawn")
    assert len(drawn) == 2
    from embodied_rl.sim.robots.key_door import KeyDoor

    for episode in drawn:
        assert episode.images["render"].shape == (episode.num_steps + 1, 32, 64, 3)
        # The same picture as the simulator draws of the recorded state.
        sim = KeyDoor(1, render_size=64)
        assert episode.state is not None
        for step in (0, 20, episode.num_steps):
            sim.set_physics(0, {"robot": episode.state["robot"][step]})
            np.testing.assert_array_equal(episode.images["render"][step], sim.render(0))
    assert drawn.info.metadata["rendered_from"] == str(key_door)
    monkeypatch.chdir(shutil.copytree(key_door, tmp_path / "here"))
    main(["recording=.", "render=true", "size=32", "num_episodes=1"])
    assert len(open_recording(tmp_path / "here-rendered")) == 1
    # By state the pictures are of the recorded states too.
    main([f"recording={key_door}", "render=true", "by=state", "size=64", "video=png", f"output={tmp_path / 'by_state'}", "num_episodes=1"])
    np.testing.assert_array_equal(open_recording(tmp_path / "by_state").episode(0).images["render"], drawn.episode(0).images["render"])


HALFCHEETAH = ("sim=halfcheetah", "policy=random", "sim.max_episode_steps=60")
CARTPOLE = ("sim=cartpole", "policy=random")
PIXEL_REACH = ("sim=pixel_reach", "sim.kwargs.pixels=false", "policy=random")
HUMANOID = ("sim=humanoid", "policy=random")


@pytest.mark.parametrize(
    ("states", "sim"),
    [
        *(("physics", sim) for sim in (HALFCHEETAH, HUMANOID, CARTPOLE, PIXEL_REACH)),
        *(("snapshots:7", sim) for sim in (HALFCHEETAH, CARTPOLE, PIXEL_REACH)),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_mujoco_is_exact_by_action_and_by_state(sim: tuple[str, ...], states: str, tmp_path: Path) -> None:
    recording = open_recording(recorded(tmp_path / "r", *sim, "num_episodes=3", "sim.num_slots=2", f"states={states}"))
    for by in ("action", "state"):
        report = replay(recording, by=by)  # type: ignore[arg-type]
        assert [episode.is_exact for episode in report.episodes] == [True] * 3, [episode.max_drift for episode in report.episodes]


def test_by_state_finds_the_way_back_from_another_seed(tmp_path: Path) -> None:
    """Restoring is not merely skipped: an episode that began elsewhere is where it was recorded after the first step."""
    folder = recorded(tmp_path / "r", "sim=halfcheetah", "policy=random", "sim.max_episode_steps=20", "num_episodes=1", "states=physics")
    moved = open_recording(rewritten(folder, tmp_path / "moved", lambda episode: dataclasses.replace(episode, seed=77)))
    (by_action,) = replay(moved, by="action").episodes
    (by_state,) = replay(moved, by="state").episodes
    assert by_action.observation["state"].per_step[-1] > 0.1
    assert by_state.observation["state"].per_step[0] > 0.01
    assert by_state.observation["state"].per_step[1:].max() < 1e-6


@pytest.mark.slow
@pytest.mark.ci_sample
def test_metaworld_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("metaworld")
    folder = recorded(tmp_path / "r", "sim=metaworld_drawer_open", "num_episodes=2", "sim.num_slots=2", "states=physics")
    recording = open_recording(folder)
    assert recording.success_once.all()
    for by in ("action", "state"):
        assert all(episode.is_exact for episode in replay(recording, by=by).episodes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.ci_sample
def test_maniskill_by_state_and_by_action(tmp_path: Path) -> None:
    pytest.importorskip("mani_skill")
    argv = ("sim=maniskill_pickcube", "sim.kwargs.control_mode=pd_ee_delta_pos", "num_episodes=2", "sim.num_slots=2")
    physics = open_recording(recorded(tmp_path / "physics", *argv, "states=physics"))
    assert physics.success_once.all()
    for by in ("action", "state"):
        assert all(episode.is_exact for episode in replay(physics, by=by).episodes)  # type: ignore[arg-type]
    # From elsewhere: the physical state is set before each step, and PhysX's contacts are not part of it: equal to single precision
    # until the fingers touch the cube, then off by some hundredths (of joint velocities, mostly).
    moved = open_recording(rewritten(tmp_path / "physics", tmp_path / "moved", lambda e: dataclasses.replace(e, seed=e.seed + 500)))
    for episode in replay(moved, by="state").episodes:
        assert episode.observation["state"].per_step[0] > 0.01
        assert episode.observation["state"].per_step[1:6].max() < 1e-4
        assert episode.observation["state"].per_step[1:].max() < 0.3
        assert episode.success_once == (True, True)


@pytest.mark.slow
def test_maniskill_snapshots_are_exact(tmp_path: Path) -> None:
    """Taking one builds the scene anew: replaying by action takes them again at the same steps."""
    pytest.importorskip("mani_skill")
    argv = ("sim=maniskill_stackcube", "num_episodes=2", "sim.num_slots=2", "states=snapshots:10")
    recording = open_recording(recorded(tmp_path / "r", *argv))
    for by in ("action", "state"):
        assert all(episode.is_exact for episode in replay(recording, by=by).episodes)  # type: ignore[arg-type]


def test_mistakes_are_one_line(key_door: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = rewritten(key_door, tmp_path / "bare", lambda episode: dataclasses.replace(episode, state=None), sim={})
    named = rewritten(key_door, tmp_path / "named", lambda episode: dataclasses.replace(episode, state=None))
    for argv, message in (
        ([f"recording={tmp_path / 'keydoor'}"], "keydoor' does not exist"),
        ([f"recording={bare}"], "does not name its simulator (task 'KeyDoor'). Give it, for example sim="),
        ([f"recording={named}", "by=state"], "was recorded without states"),
        ([f"recording={key_door}", "sim=pendulum"], "are not those of task 'Pendulum-v1'"),
        ([f"recording={key_door}", "by=seed"], "by=seed is not a choice"),
        ([f"recording={key_door}", "output=x"], "output=x needs render=true"),
        ([f"recording={key_door}", "size=64"], "size=64 needs render=true"),
        ([f"recording={key_door}", "render=true", f"output={key_door}"], "already has a recording"),
        ([f"recording={key_door}", "num_episodes=0"], "num_episodes must be between 1 and"),
        ([f"recording={key_door}", "tolerance=-1"], "tolerance must be between 0 and"),
    ):
        assert message in one_line_error(main, argv, capsys)
    main([f"recording={bare}", "sim=key_door"])


def test_a_recording_of_another_format_is_replayed_by_its_simulators_name(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "r", "sim=key_door", "num_episodes=2")
    imported = rewritten(folder, tmp_path / "imported", lambda episode: episode, sim={}, policy={"kind": "imported"})
    main([f"recording={imported}", "sim=key_door", f"report={tmp_path / 'x.json'}"])
    assert json.loads((tmp_path / "x.json").read_text())["num_exact"] == 2
    assert isinstance(open_recording(imported).info, RecordingInfo)
