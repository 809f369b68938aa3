"""``python -m embodied_rl.episodes``: what each subcommand prints, writes and refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.commands.episode_tools import COMMANDS, describe, main, merge, parts_of, split_numbers
from embodied_rl.episodes.formats import FORMATS
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.errors import UserError
from embodied_rl.types import ActionSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.formats.samples import STATE, assert_same_episode, info_of, record, rich_episode


def tools(*words: object) -> int:
    """The exit status of a command in this process."""
    try:
        main([str(word) for word in words])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """Six episodes of the seeds 0 … 5; the even ones succeed."""
    episodes = [rich_episode(STATE, seed, 3 + seed, success=seed % 2 == 0, task=None, instruction=None, metadata={}) for seed in range(6)]
    record(tmp_path / "native", info_of(STATE), episodes).close()
    return tmp_path / "native"


def test_help_of_all_and_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools() == tools("--help") == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert tools(name, "--help") == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: python -m embodied_rl.episodes {name} PATH {'… ' if name == 'merge' else ''}key=value …")
        assert command.summary in " ".join(shown.split())
        for example in command.examples:
            command.parse(example.split())  # as the command line would


def test_the_module_is_a_command_line(native: Path) -> None:
    command = [sys.executable, "-m", "embodied_rl.episodes", "info", str(native), "json=true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["format"], data["task"], data["num_episodes"], data["num_steps"]) == ("native", "Push-v1", 6, sum(range(3, 9)))


def test_info_says_what_is_there(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_recording(native) as recording:
        data = describe(recording)
        returns = recording.returns
    assert json.loads(json.dumps(data)) == data
    assert (data["success_once"], data["lengths"], data["seeds"]) == (0.5, {"min": 3, "max": 8}, {"min": 0, "max": 5})
    assert data["returns"]["mean"] == pytest.approx(returns.mean())
    assert data["fields"] == ["sampled_action", "log_prob", "value", "policy_version", "chunk"]
    assert data["states"] == ["actors/cube", "articulations/panda"]
    assert data["images"] == {"front": [16, 18, 3]}
    assert tools("info", native) == 0
    out = capsys.readouterr().out
    for words in ("Push-v1: push", "kind=random, noise_seed=3", "33, 3 to 8 an episode", "50.0% once", "state float32 [3]", "front 16×18"):
        assert words in out


def test_convert_there_and_back(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FORMATS:
        assert tools("convert", native, f"output={tmp_path / name}", f"format={name}", "video=png") == 0
        out = capsys.readouterr().out
        assert f"Fields in {name}:" in out
        assert f"6 episodes: {tmp_path / name}" in out
        assert tools("convert", tmp_path / name, f"output={tmp_path / name}-native", "format=native", "video=raw") == 0
        capsys.readouterr()
        with open_recording(native) as before, open_recording(tmp_path / f"{name}-native") as after:
            assert after.info.to_dict() == before.info.to_dict()
            for found, expected in zip(after, before, strict=True):
                assert_same_episode(found, expected, whole=name != "lerobot", pictures=False)


def test_convert_tells_as_json_and_says_what_mp4_does(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("convert", native, f"output={tmp_path / 'a'}", "format=native", "json=true") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["episodes"], data["read"]) == (6, [])
    assert [(note["field"], note["fate"]) for note in data["written"]] == [("images.front", "changed")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "{native}", "output={out}", "format=lerobt"], "Did you mean 'lerobot'"),
        (["convert", "{native}", "output={out}", "format=minari", "video=raw"], "video=raw needs format=native"),
        (["convert", "{native}", "output={native}", "format=minari"], "already exists and is not an empty folder"),
        (["convert", "output={out}", "format=native"], "Argument PATH is missing"),
        (["info", "{native}2"], "Did you mean 'native'"),
        (["inf", "{native}"], "'inf' is not a subcommand. Did you mean 'info'"),
        (["merge", "{native}", "output={out}"], "merge needs two or more recordings"),
        (["split", "{native}", "output={out}"], "split needs either fractions=0.9,0.1 or by=success|task"),
        (["split", "{native}", "output={out}", "by=success", "fractions=0.5,0.5"], "split needs either"),
        (["split", "{native}", "output={out}", "fractions=0.5,0.4"], "must be two or more numbers above 0 with sum 1"),
        (["split", "{native}", "output={out}", "fractions=half"], "must be two or more numbers"),
        (["split", "{native}", "output={out}", "fractions=0.99,0.01"], "'test' would get none of the 6 episodes"),
        (["split", "{native}", "output={out}", "fractions=0.5,0.5", "names=a,../b"], "must be 2 different folder names"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools(*(word.format(native=native, out=tmp_path / "out") for word in words)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["native"], "nothing is left behind"


def test_validate_lists_problems_and_exits_with_1(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("validate", native) == 0
    assert "6 episodes, nothing wrong." in capsys.readouterr().out
    assert tools("convert", native, f"output={tmp_path / 'there'}", "format=robomimic") == 0
    import h5py

    with h5py.File(tmp_path / "there" / "demos.hdf5", "a") as file:
        file["data/demo_2/actions"][1] = np.nan
        del file["data/demo_4/obs/state"]
    capsys.readouterr()
    assert tools("validate", tmp_path / "there") == 1
    done = capsys.readouterr()
    assert done.out.count("\n") == 2
    assert "episode 2, field 'action': holds nan at step 1" in done.out
    assert "episode 4, field '/data/demo_4/obs/state': is missing" in done.out
    assert "has 2 problems" in done.err
    path = tmp_path / "there" / "demos.hdf5"
    path.write_bytes(path.read_bytes()[:3000])
    assert tools("validate", path) == 1
    assert "cannot be opened as HDF5" in capsys.readouterr().out
    assert tools("validate", tmp_path / "nowhere") == 2, "a wrong path is the user's mistake"


def test_merge_counts_the_same_episode_once(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [make_episode(STATE, seed, 3) for seed in (4, 5, 6)]
    record(tmp_path / "more", info_of(STATE), more).close()
    other = replace(info_of(STATE), policy={"kind": "expert"})
    record(tmp_path / "expert", other, [make_episode(STATE, 5, 2)]).close()
    assert tools("merge", native, tmp_path / "more", tmp_path / "expert", f"output={tmp_path / 'all'}") == 0
    assert "8 episodes, 2 duplicates left out" in capsys.readouterr().out
    with open_recording(tmp_path / "all") as recording:
        # Seed 5 twice: another policy played it the second time. Episodes of other columns lie in a part of their own.
        assert sorted(recording.seeds.tolist()) == [0, 1, 2, 3, 4, 5, 5, 6]
        assert [episode.metadata["policy"] for episode in recording if "policy" in episode.metadata] == [{"kind": "expert"}]
        assert recording.info.metadata["merged"] == [str(native), str(tmp_path / "more"), str(tmp_path / "expert")]


def test_merge_refuses_what_does_not_belong_together(native: Path, tmp_path: Path) -> None:
    spec = replace(STATE, action=ActionSpec.continuous([-1, -1], [1, 1]))
    record(tmp_path / "narrow", info_of(spec), [make_episode(spec, 9, 2)]).close()
    elsewhere = replace(info_of(STATE), sim={**info_of(STATE).sim, "kwargs": {"control_mode": "absolute"}})
    record(tmp_path / "elsewhere", elsewhere, [make_episode(STATE, 9, 2)]).close()
    with open_recording(native) as first, open_recording(tmp_path / "narrow") as second, open_recording(tmp_path / "elsewhere") as third:
        with pytest.raises(RecordingError, match=r"action continuous\(2\) within \[-1, 1\] ≠ continuous\(2\) within \[-2, 2\]"):
            merge([first, second], tmp_path / "out")
        with pytest.raises(RecordingError, match=r"sim\.kwargs is .*delta.* in .*absolute.*ignore_sim=true merges them"):
            merge([first, third], tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert merge([first, third], tmp_path / "out", ignore_sim=True) == (7, 0)
    with open_recording(tmp_path / "out") as merged:
        assert merged.info.sim == {}, "the result does not say that it can be replayed"


def test_unknown_seeds_are_no_duplicates(tmp_path: Path, native: Path) -> None:
    """Two files without seeds: both number theirs -1, -2, …"""
    record(
        tmp_path / "a", info_of(STATE), [replace(make_episode(STATE, 1, 3), seed=-1), replace(make_episode(STATE, 2, 4), seed=-2)]
    ).close()
    record(tmp_path / "b", info_of(STATE), [replace(make_episode(STATE, 1, 5), seed=-1)]).close()
    with open_recording(tmp_path / "a") as first, open_recording(tmp_path / "b") as second:
        assert merge([first, second], tmp_path / "out") == (3, 0)
    with open_recording(tmp_path / "out") as merged:
        assert merged.seeds.tolist() == [-1, -2, -3]
        assert merged.lengths.tolist() == [3, 4, 5]


def test_split_by_fractions_is_a_partition(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("split", native, f"output={tmp_path / 'parts'}", "fractions=0.5,0.34,0.16") == 0
    out = capsys.readouterr().out
    # 6 episodes: ends at round(3), round(5.04), round(6).
    assert [line.split()[0] for line in out.splitlines()] == ["3", "2", "1"]
    seeds = {}
    for name in ("train", "val", "test"):
        with open_recording(tmp_path / "parts" / name) as part, open_recording(native) as whole:
            seeds[name] = part.seeds.tolist()
            for episode in part:
                assert_same_episode(episode, whole.episode(episode.seed), pictures=False)
            assert part.info.metadata["split"] == name
    assert sorted(seed for part in seeds.values() for seed in part) == list(range(6))


def test_the_draw_follows_the_seed_and_keeps_equal_starts_together(tmp_path: Path) -> None:
    """Groups of four episodes of one seed: what one of them shows must not be in the other part."""
    episodes = [replace(make_episode(STATE, seed, 2), metadata={"policy": {"number": number}}) for seed in range(10) for number in range(4)]
    with record(tmp_path / "native", info_of(STATE), episodes) as recording:
        first, second = split_numbers(recording, [0.7, 0.3], seed=1), split_numbers(recording, [0.7, 0.3], seed=1)
        assert first == second != split_numbers(recording, [0.7, 0.3], seed=2)
        assert [len(part) for part in first] == [28, 12]
        seeds = [set(recording.seeds[part].tolist()) for part in first]
        assert not seeds[0] & seeds[1]
        # Every seed is in the larger part about 7 times of 10: 2000 draws of 10 seeds, standard error 0.0033.
        share = np.mean([0 in recording.seeds[split_numbers(recording, [0.7, 0.3], seed)[0]] for seed in range(2000)])
        assert abs(share - 0.7) < 5 * np.sqrt(0.7 * 0.3 / 2000)


def test_split_by_outcome_and_by_task(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("split", native, f"output={tmp_path / 'outcomes'}", "by=success") == 0
    with open_recording(tmp_path / "outcomes" / "success") as good, open_recording(tmp_path / "outcomes" / "failure") as bad:
        assert (good.seeds.tolist(), bad.seeds.tolist()) == ([0, 2, 4], [1, 3, 5])
        assert all("chosen by their success" in part.info.selected_by_outcome for part in (good, bad)), "no estimate of a return from them"
    assert tools("merge", native, tmp_path / "outcomes" / "success", f"output={tmp_path / 'again'}") == 0
    with open_recording(native) as whole, open_recording(tmp_path / "again") as again:
        assert whole.info.selected_by_outcome == ""
        assert "chosen by their success" in again.info.selected_by_outcome
    tasks = [make_episode(STATE, seed, 2, task=task) for seed, task in enumerate(["a/b", None, "a/b"])]
    with record(tmp_path / "tasks", info_of(STATE), tasks) as recording:
        assert parts_of(recording, None, None, "task", 0) == {"Push-v1": [1], "a_b": [0, 2]}
        with pytest.raises(UserError, match="names=x,y needs fractions=…: by=task names the folders itself"):
            parts_of(recording, None, "x,y", "task", 0)
    # Names of other programs: none leads out of the output, and none is another's.
    tasks = [make_episode(STATE, seed, 2, task=task) for seed, task in enumerate(["..", "a/b", "a_b", "", "a/b_3", "漢" * 300])]
    with record(tmp_path / "names", info_of(STATE), tasks) as recording:
        found = {"task": [3], "task_2": [0], "a_b": [1], "a_b_2": [2], "a_b_3": [4], "漢" * 60: [5]}
        assert parts_of(recording, None, None, "task", 0) == found
    silent = replace(STATE, reports_success=False)
    with (
        record(tmp_path / "silent", info_of(silent), [make_episode(silent, 0, 2)]) as recording,
        pytest.raises(UserError, match="does not report"),
    ):
        parts_of(recording, None, None, "success", 0)
    assert capsys.readouterr().out.startswith("3 episodes")


@pytest.mark.parametrize("names", ["..,b", ",b", "a/c,b", "b,b", "a,b,c"])
def test_split_writes_only_below_its_output(names: str, native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools("split", native, f"output={tmp_path / 'parts'}", "fractions=0.5,0.5", f"names={names}") == 2
    assert f"names={names} must be 2 different folder names" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_the_current_folder_is_no_output(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert tools("convert", native, "output=.", "format=native") == 2
    assert "'.' is the current folder, which cannot be replaced" in capsys.readouterr().err


def test_a_video_of_our_own_is_copied_and_no_loss_is_told(native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, told in ((native, "changed images.front"), (tmp_path / "once", "Every field is kept.")):
        output = tmp_path / ("once" if source == native else "twice")
        assert tools("convert", source, f"output={output}", "format=native") == 0
        assert told in capsys.readouterr().out
    one, two = (sorted(path.read_bytes() for path in (tmp_path / name).rglob("*.mp4")) for name in ("once", "twice"))
    assert one == two


def test_success_that_a_source_does_not_report_is_not_reported_after_a_merge(native: Path, tmp_path: Path) -> None:
    silent = replace(STATE, reports_success=False)
    record(tmp_path / "silent", info_of(silent), [make_episode(silent, 9, 2, success=False)]).close()
    with open_recording(native) as first, open_recording(tmp_path / "silent") as second:
        merge([first, second], tmp_path / "out")
    with open_recording(tmp_path / "out") as merged:
        assert not merged.spec.reports_success, "three of seven would be a rate of episodes that nobody judged"


def test_text_that_a_terminal_cannot_show_is_shown_in_another_way(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(STATE, instruction="half \ud800")
    record(tmp_path / "half", info_of(spec), [make_episode(spec, 0, 2)]).close()
    for encoding, words in (("utf-8", ("info", tmp_path / "half")), ("ascii", ("info", "--help"))):
        monkeypatch.setattr(sys, "stdout", shown := io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert tools(*words) == 0
        sys.stdout.flush()
        assert {"utf-8": b"half \\ud800", "ascii": b"key=value \\u2026"}[encoding] in shown.buffer.getvalue()  # type: ignore[attr-defined]
