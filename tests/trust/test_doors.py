"""No door runs what a stranger's file names: the mark that the stranger's code leaves does not appear until the user says so."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodied_rl import trust
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import evaluate, offline_eval, record, render, replay
from embodied_rl.config import SimConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError
from embodied_rl.sim.faults import SimFault
from embodied_rl.train import train
from embodied_rl.trust import UntrustedCode
from tests.forks import run_forked
from tests.short_run import told
from tests.trust.forging import CARTPOLE, EVIL, SIM, cartpole_config, checkpoint_in, forge, strangers

pytestmark = pytest.mark.usefixtures("forked")

ENVIRONMENT = {"sim.target": "embodied_rl.sim.text.tasks:make", "sim.kwargs.environment": EVIL}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Appears when the stranger's module is imported, in this process or in one that it starts."""
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])))
    sys.modules.pop("tests.trust.evil", None)
    return tmp_path / "mark"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_in(tmp_path_factory.mktemp("own") / "run")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "cartpole"
    record.main(["sim=cartpole", "policy=random", "num_episodes=2", "sim.num_slots=1", f"output={folder}"])
    return folder


def strange_recording(source: Path, folder: Path, **sim: Any) -> Path:
    """A copy whose simulator is another; the signature stays, as a forger would leave it."""
    shutil.copytree(source, folder)
    path = folder / "recording.json"
    data = json.loads(path.read_bytes())
    data["sim"] = {**data["sim"], **sim}
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder


def error_of(capsys: pytest.CaptureFixture[str], call: Callable[[], object]) -> str:
    with pytest.raises(SystemExit) as ended:
        call()
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(line) <= 410
    return line


@pytest.mark.parametrize("changes", [{"sim.target": EVIL}, ENVIRONMENT, {"sim.task": "tests.trust.evil:Task-v0"}])
@pytest.mark.parametrize("door", ["evaluate", "render", "record", "offline_eval"])
def test_a_strangers_checkpoint_runs_nothing(
    door: str, changes: dict[str, Any], checkpoint: Path, recording: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", changes)
    further = {
        "evaluate": ["num_episodes=1"],
        "render": ["num_episodes=1"],
        "record": ["num_episodes=1", f"output={tmp_path / 'out'}"],
        "offline_eval": [f"recording={recording}"],
    }[door]
    module = {"evaluate": evaluate, "render": render, "record": record, "offline_eval": offline_eval}[door]
    line = error_of(capsys, lambda: module.main([f"checkpoint={path}", *further]))
    name = next(value for value in changes.values() if value.startswith("tests.trust.evil"))
    assert "config.yaml' names code that is not registered here" in line
    assert name in line
    assert f"trust={name}" in line.replace("'", "").replace('["', "").replace('"]', "") or f'trust=["{name}"]' in line
    assert not mark.exists()


def test_against_is_a_door_too(checkpoint: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL})
    given = [f"checkpoint={checkpoint}", f"against={theirs}"]
    assert EVIL in error_of(capsys, lambda: evaluate.main(given))
    assert EVIL in error_of(capsys, lambda: render.main(given))
    assert not mark.exists()


@pytest.mark.parametrize("resume", ["path", "auto"])
def test_resuming_a_strangers_run_runs_nothing(resume: str, checkpoint: Path, mark: Path, tmp_path: Path) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL})
    given = [f"resume={path}"] if resume == "path" else ["resume=auto", f"run_dir={tmp_path / 'theirs'}"]
    with pytest.raises(UntrustedCode, match=EVIL):
        train(load_train_config(["sim=cartpole", *given]), overrides=given)
    # What the file says to trust is not what the user says.
    forge(path, {"trust": [EVIL]}, signature=lambda old: None)
    with pytest.raises(UntrustedCode, match=EVIL):
        train(load_train_config(["sim=cartpole", *given]), overrides=given)
    assert not mark.exists()


def test_what_the_user_puts_in_its_place_is_not_asked_about(
    checkpoint: Path, recording: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL, "algorithm.warm_start.player": "os:system"})
    given = [f"resume={path}", "sim=frozenlake"]
    with pytest.raises(UntrustedCode) as refused:  # the player is still theirs
        train(load_train_config(given), overrides=given)
    assert refused.value.targets == ("os:system",)
    given += ["algorithm.warm_start=null", "algorithm.minibatch_size=32"]
    with pytest.raises(UserError, match=r"another simulator|FrozenLake"):  # begun, with the user's own simulator
        train(load_train_config(given), overrides=given)
    given = [f"resume={path}", "sim.name=cartpole", "experiment=cartpole"]
    with pytest.raises(UntrustedCode) as refused:  # experiments replace nothing of a checkpoint
        train(load_train_config([f"resume={path}", "experiment=cartpole"]), overrides=given)
    assert set(refused.value.targets) == {EVIL, "os:system"}
    theirs = strange_recording(recording, tmp_path / "recorded", target="embodied_rl.sim.text.tasks:make", kwargs={"environment": EVIL})
    typed = ["sim.kwargs.environment=no_such_package.module:Mine"]
    assert "no_such_package" in error_of(capsys, lambda: replay.main([f"recording={theirs}", *typed]))
    assert not mark.exists()


@pytest.mark.parametrize("door", ["evaluate", "render", "record"])
def test_playing_does_not_ask_about_what_the_command_line_replaces(
    door: str, checkpoint: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = {"evaluate": evaluate, "render": render, "record": record}[door]
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL, "sim.kwargs.reward": EVIL})
    given = [f"checkpoint={path}", "num_episodes=1", *([f"output={tmp_path / 'out'}"] if door == "record" else [])]
    mine = "sim.target=no_such_package.module:Mine"
    # Theirs is not imported, nor asked about; the argument that is still theirs is.
    assert f"sim.kwargs.reward={EVIL}" in error_of(capsys, lambda: module.main([*given, mine]))
    assert "no_such_package" in error_of(capsys, lambda: module.main([*given, mine, "sim.kwargs.reward=none"]))
    assert "no_such_package" in error_of(capsys, lambda: module.main([*given, "sim=fetch_reach", mine]))
    # The name of their simulator stands for theirs, whatever it is called.
    assert EVIL in error_of(capsys, lambda: module.main([*given, "sim=cartpole"]))
    assert not mark.exists()


def test_with_trust_it_runs(checkpoint: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL, "sim.num_slots": 1, "sim.pipeline_groups": 1})
    with pytest.raises(SystemExit):
        evaluate.main([f"checkpoint={path}", "num_episodes=1", f"trust={EVIL}"])
    assert "a stranger's code ran" in capsys.readouterr().err
    assert mark.exists()
    mark.unlink()
    given = [f"resume={path}", f"trust={EVIL}"]
    with pytest.raises(SimFault, match="a stranger's code ran"):
        train(load_train_config(["sim=cartpole", *given]), overrides=given)
    assert mark.exists()


def test_trust_is_of_what_it_names_alone(checkpoint: Path, tmp_path: Path) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {**ENVIRONMENT, "algorithm.warm_start.player": "os:system"})
    with pytest.raises(UntrustedCode) as refused:
        load_checkpoint(path)
    assert refused.value.targets == ("os:system", EVIL) or refused.value.targets == (EVIL, "os:system")
    with pytest.raises(UntrustedCode, match="os:system") as refused:
        load_checkpoint(path, trust=[EVIL])
    assert refused.value.targets == ("os:system",)
    with pytest.raises(UntrustedCode):
        load_checkpoint(path, trust=f"{EVIL}, os:system")  # a text is one name, and not what it contains
    assert load_checkpoint(path, trust=[EVIL, "os:system"]).config.sim.kwargs == {"environment": EVIL}


def test_the_allow_list(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    listed = tmp_path / "config" / "embodied_rl" / "trusted.yaml"
    listed.parent.mkdir(parents=True)
    for text, trusted in [
        (f"- {EVIL}\n", True),
        ("- tests.trust.*\n", True),
        ("- tests.trust.evil.*\n", True),
        ("", False),
        ("- tests.trust.ev.*\n- tests.trust.evil\n- os:system\n", False),
    ]:
        listed.write_text(text, encoding="utf-8")
        if trusted:
            assert load_checkpoint(path).config.sim.target == EVIL
        else:
            with pytest.raises(UntrustedCode):
                load_checkpoint(path)
    listed.write_text("tests.trust: yes", encoding="utf-8")
    with pytest.raises(UserError, match=f"^'{listed}' must be a YAML list of names"):
        load_checkpoint(path)


def test_ones_own_run_goes_on_and_nobody_elses(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = checkpoint_in(tmp_path / "run", cartpole_config(tmp_path / "run", sim={**SIM, "target": EVIL}))
    assert load_checkpoint(own).config.sim.target == EVIL
    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved", symlinks=True)
    assert load_checkpoint(moved).config.sim.target == EVIL, "also where it was moved to"
    state = json.loads((own / "state.json").read_text(encoding="utf-8"))
    with_signature = forge(moved / "checkpoints" / own.name, {"sim.kwargs.command": ["sh", "-c", "id"]})
    with pytest.raises(UntrustedCode, match="command"):
        load_checkpoint(with_signature)  # signed, and changed since
    other = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL})
    with pytest.raises(UntrustedCode):
        load_checkpoint(forge(other, {}, signature=lambda old: state["signature"]))  # one's own signature, of another configuration
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(UntrustedCode):
        load_checkpoint(own)


def test_old_checkpoints_of_registered_simulators_just_work(checkpoint: Path, tmp_path: Path) -> None:
    assert load_checkpoint(strangers(checkpoint, tmp_path / "theirs", {})).config.sim.target == SIM["target"]


def test_what_cannot_be_signed_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    trust._warn.cache_clear()
    with pytest.warns(UserWarning, match="not signed"):
        own = checkpoint_in(tmp_path / "run", cartpole_config(tmp_path / "run", sim={**SIM, "target": EVIL}))
    with pytest.raises(UntrustedCode):
        load_checkpoint(own)
    assert load_checkpoint(own, trust=[EVIL]).spec == CARTPOLE


# ---- recordings ----


@pytest.mark.parametrize("changes", [{"target": EVIL}, {"target": "embodied_rl.sim.text.tasks:make", "kwargs": {"environment": EVIL}}])
def test_a_strangers_recording_runs_nothing(
    changes: dict[str, Any], recording: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = strange_recording(recording, tmp_path / "theirs", **changes)
    for door in (replay, render):
        for given in ([], ["sim.num_slots=1"]):
            line = error_of(capsys, lambda door=door, given=given: door.main([f"recording={path}", *given]))  # type: ignore[misc]
            assert EVIL in line
            assert str(path) in line
    with pytest.raises(UntrustedCode):
        replay.replay(open_recording(path))
    assert not mark.exists()
    with pytest.raises(SystemExit):
        replay.main([f"recording={path}", f"trust={EVIL}"])
    assert "a stranger's code ran" in capsys.readouterr().err
    assert mark.exists()


def test_a_copied_recording_is_signed_by_nobody_new(recording: Path, tmp_path: Path) -> None:
    from embodied_rl.commands.episode_tools import main

    path = strange_recording(recording, tmp_path / "theirs", target=EVIL)
    main(["split", str(path), f"output={tmp_path / 'split'}", "fractions=0.5,0.5"])
    with pytest.raises(UntrustedCode):
        replay.sim_of(open_recording(tmp_path / "split" / "train"))
    main(["split", str(recording), f"output={tmp_path / 'copies'}", "fractions=0.5,0.5"])
    (copied, own) = (open_recording(folder).info for folder in (tmp_path / "copies" / "train", recording))
    assert copied.signature == own.signature
    assert own.signature is not None


def test_one_replays_ones_own_recording(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    opened = open_recording(recording)
    assert isinstance(replay.sim_of(opened), SimConfig)
    # A simulator of the user's own, recorded by the user.
    opened.info = replace(opened.info, sim={**opened.info.sim, "target": EVIL}).signed()
    assert replay.sim_of(opened).target == EVIL


def test_an_imported_file_is_no_way_around(mark: Path) -> None:
    from embodied_rl.episodes.formats.maniskill import TARGET
    from embodied_rl.episodes.recording import RecordingInfo
    from tests.episodes.episode_toys import STATE_SPEC

    # ManiSkill's files say which task they are of, and gymnasium imports what stands before a colon.
    info = RecordingInfo(STATE_SPEC, {"name": "maniskill", "target": TARGET, "task": "tests.trust.evil:X"}, {})

    class Opened:
        path = Path("theirs.h5")

        def __init__(self) -> None:
            self.info = info

    with pytest.raises(UntrustedCode, match=r"sim\.task=tests\.trust\.evil:X"):
        replay.sim_of(Opened())  # type: ignore[arg-type]
    assert not mark.exists()


# ---- what is said ----


def test_the_message_holds_the_very_command(checkpoint: Path, mark: Path, tmp_path: Path) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.target": EVIL})
    for command in (["evaluate", f"checkpoint={path}", "num_episodes=1"], ["train", f"resume={path}", "seed=1"]):
        done = run_forked(f"embodied_rl.{command[0]}", *command[1:], cwd=Path.cwd())
        assert done.returncode == 2, done.stderr
        (line,) = told(done.stderr)
        assert line.endswith((f"python -m embodied_rl.{' '.join(command)} trust={EVIL}", f"add trust={EVIL} to this command"))
        assert str(path) in line
    assert not mark.exists()


def test_a_message_copies_nothing_that_a_terminal_would_obey(checkpoint: Path, tmp_path: Path) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.kwargs.command": ["sh", "-c", "\x1b]0;owned\x07"]})
    with pytest.raises(UntrustedCode) as refused:
        load_checkpoint(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 400


def test_long_and_many_names(checkpoint: Path, tmp_path: Path) -> None:
    path = strangers(checkpoint, tmp_path / "theirs", {"sim.kwargs": {f"key{i}": f"package{i}.module:Class" for i in range(100)}})
    with pytest.raises(UntrustedCode, match="and 99 more") as refused:
        load_checkpoint(path)
    assert len(str(refused.value)) <= 400
    assert load_checkpoint(path, trust=refused.value.targets).step == 100
