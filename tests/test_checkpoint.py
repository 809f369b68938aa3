"""Checkpoints come back bit by bit, survive a crash at every moment, and refuse in one line what does not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl import errors
from embodied_rl.checkpoint import (
    CheckpointWriter,
    add_result_to_card,
    adopt_checkpoint,
    base_of,
    check_compatible,
    check_tensors,
    find_last,
    load_checkpoint,
    note_base,
    resume_command,
    save_checkpoint,
)
from embodied_rl.checkpoint import folder as module
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.files import sum_of_document
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from tests.forks import run_forked, start_forked
from tests.sample_run import SPEC, make_config

pytestmark = pytest.mark.usefixtures("forked")


def save(run_dir: Path, step: int = 1000, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "policy": {"actor.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7, "actor.bias": torch.full((3,), float(step))},
        "learner": {"adam.step": torch.tensor(5, dtype=torch.int64), "rng": torch.get_rng_state()},
        "state": {"iteration": 3, "best": -np.inf, "rng": np.random.default_rng(4).bit_generator.state, "rate": np.float64(0.1)},
        "config": make_config(run_dir),
        "spec": SPEC,
        "metrics": {"eval/success": 0.25},
        "command": "python -m embodied_rl.train experiment=fetch_reach",
    }
    return save_checkpoint(run_dir, step, **{**arguments, **changes})


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    rng_state = torch.get_rng_state().clone()
    config = make_config(tmp_path, algorithm={"learning_rate": 3e-4, "target_kl": 0.1}, seed=7)
    folder = save(tmp_path, 111616, config=config)
    assert folder == tmp_path / "checkpoints" / "step_000111616"
    loaded = load_checkpoint(folder)
    assert loaded.step == 111616
    assert loaded.config == config
    assert loaded.spec == SPEC
    assert loaded.metrics == {"eval/success": 0.25}
    assert loaded.run_dir == tmp_path.resolve()
    assert torch.equal(loaded.policy["actor.weight"], torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7)
    assert torch.equal(loaded.learner["rng"], rng_state)
    assert loaded.learner["adam.step"].dtype == torch.int64
    assert loaded.learner["adam.step"].item() == 5
    assert loaded.state["best"] == -np.inf
    # The numpy generator continues exactly where the saved one stood: 128-bit integers survive JSON.
    generator = np.random.default_rng()
    generator.bit_generator.state = loaded.state["rng"]
    assert generator.random(5).tolist() == np.random.default_rng(4).random(5).tolist()
    assert load_checkpoint(folder, with_learner=False).learner == {}


def test_tied_and_strided_tensors_are_saved_by_value(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    save(tmp_path, policy={"a": weight, "tied": weight, "transposed": weight.T, "row": weight[1]})
    loaded = load_checkpoint(tmp_path).policy
    assert torch.equal(loaded["tied"], weight)
    assert torch.equal(loaded["transposed"], weight.T)
    assert torch.equal(loaded["row"], torch.tensor([3.0, 4.0, 5.0]))


def test_a_checkpoint_is_found_by_folder_run_or_link(tmp_path: Path) -> None:
    assert find_last(tmp_path) is None
    first = save(tmp_path, 1000, is_best=True)
    second = save(tmp_path, 2000)
    assert find_last(tmp_path) == second.resolve()
    for given in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "last", second, second / "policy.safetensors"):
        assert load_checkpoint(given).step == 2000, given
    for given in (tmp_path / "checkpoints" / "best", str(first)):
        assert load_checkpoint(given).step == 1000, given
    assert os.readlink(tmp_path / "checkpoints" / "last") == "step_000002000", "links are relative, so that a run can be moved"


def test_last_k_and_best_are_kept(tmp_path: Path) -> None:
    for step in (1000, 2000, 3000, 4000, 5000):
        save(tmp_path, step, is_best=step == 2000)
    root = tmp_path / "checkpoints"
    assert sorted(entry.name for entry in root.iterdir()) == ["best", "last", "step_000002000", "step_000004000", "step_000005000"]
    assert (root / "best").resolve().name == "step_000002000"
    # A run that was resumed from an earlier step keeps what it saves now, not what has the higher number.
    save(tmp_path, 2500)
    assert find_last(tmp_path) == (root / "step_000002500").resolve()
    assert sorted(entry.name for entry in root.iterdir()) == ["best", "last", "step_000002000", "step_000002500", "step_000005000"]
    # The clock is set back by an hour.
    earlier = time.time() + 3600
    os.utime(root / "step_000002500" / "state.json", (earlier, earlier))
    for step in (2600, 2700):
        save(tmp_path, step)
    assert sorted(entry.name for entry in root.iterdir()) == ["best", "last", "step_000002000", "step_000002600", "step_000002700"]


def test_best_is_not_kept_where_it_is_not_wanted(tmp_path: Path) -> None:
    config = make_config(tmp_path, checkpoint={"keep_last": 1, "keep_best": False})
    save(tmp_path, 1000, config=config, is_best=True)
    save(tmp_path, 2000, config=config)
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["last", "step_000002000"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1000, metrics={"eval/success": 0.1})
    save(tmp_path, 1000, metrics={"eval/success": 0.9})
    assert load_checkpoint(tmp_path).metrics == {"eval/success": 0.9}
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["last", "step_000001000"]


class PowerCut(BaseException):
    """Not an Exception, so that nothing on the way may tidy up after it as it would after an error."""


def while_power_lasts(original: Callable[..., Any], budget: Iterator[int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if next(budget, None) is None:
            raise PowerCut
        return original(*arguments, **options)

    return call


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Cut the power before every system call that changes the folder, in turn, until a save goes through."""
    changing = [
        (module.os, "rename"),
        (module.os, "replace"),
        (module, "fsync"),
        (module, "write_policy"),
        (module, "write_tensors"),
        (module.shutil, "rmtree"),
    ]
    config = make_config(tmp_path, checkpoint={"keep_last": 1})
    save(tmp_path, 1000, config=config)
    for cut_at in range(100):
        budget = iter(range(cut_at))
        with monkeypatch.context() as patch:
            for owner, name in changing:
                patch.setattr(owner, name, while_power_lasts(getattr(owner, name), budget))
            step = 1000 if again else 2000 + cut_at
            try:
                save(tmp_path, step, config=config, policy={"w": torch.full((4,), float(cut_at))})
                break
            except PowerCut:
                pass
        survivor = load_checkpoint(tmp_path)
        assert len(survivor.learner) == 2
    else:
        pytest.fail("no save went through")
    assert cut_at > 8, "the test must have cut at many places"
    assert float(load_checkpoint(tmp_path).policy["w"][0]) == cut_at
    leftovers = [entry.name for entry in (tmp_path / "checkpoints").iterdir() if entry.name.startswith(".")]
    assert leftovers == [], "the next save clears what crashes left"


def test_sigkill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from tests.test_checkpoint import save\n"
        "for step in range(1, 100000): save(Path(sys.argv[1]), step, policy={'w': torch.full((200_000,), float(step))})"
    )
    process = start_forked("-c", program, tmp_path)
    try:
        deadline = time.monotonic() + 240
        while find_last(tmp_path) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    survivor = load_checkpoint(tmp_path)
    assert survivor.policy["w"].unique().tolist() == [float(survivor.step)]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IncompatibleCheckpointError, match=r"is not a checkpoint \(state.json is missing\)"):
        load_checkpoint(tmp_path / "empty")
    for step, run in enumerate(("b", "a")):
        save(tmp_path / "runs" / run, step)
    with pytest.raises(IncompatibleCheckpointError, match=r"The folder contains several runs \(.*runs/a saved last\): give one of them\."):
        load_checkpoint(tmp_path / "runs")
    save(tmp_path, 1000)
    with pytest.raises(IncompatibleCheckpointError, match=r"does not exist\. Checkpoints beside it: step_000001000"):
        load_checkpoint(tmp_path / "checkpoints" / "step_000009999")


@pytest.mark.parametrize("name", ["policy.safetensors", "learner.safetensors", "config.yaml"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    (folder / name).unlink()
    with pytest.raises(IncompatibleCheckpointError, match=f"{name} is missing"):
        load_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 4, 60, -1], ids=["empty", "in the header's length", "in the header", "in the data"])
def test_truncated_tensors_are_refused(tmp_path: Path, kept: int) -> None:
    folder = save(tmp_path)
    path = folder / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IncompatibleCheckpointError, match=r"policy\.safetensors' is truncated or damaged") as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"format_version": 1, "step"', "", "[1, 2]", '{"format_version": 1}'])
def test_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path)
    (folder / "state.json").write_text(text)
    with pytest.raises(IncompatibleCheckpointError, match=r"state\.json|format version"):
        load_checkpoint(folder)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**document, "format_version": 99, "package_version": "7.0.0"}))
    with pytest.raises(IncompatibleCheckpointError, match=r"format version 99 \(written by embodied_rl 7.0.0\).* reads versions 1 to 4"):
        load_checkpoint(folder)


def test_a_configuration_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    with (folder / "config.yaml").open("a") as file:
        file.write("colour: red\n")
    with pytest.raises(IncompatibleCheckpointError, match=r"config\.yaml.*'colour' is not known"):
        load_checkpoint(folder)


def test_another_simulator_is_refused_with_what_differs(tmp_path: Path) -> None:
    loaded = load_checkpoint(save(tmp_path))
    check_compatible(loaded, SPEC)
    other = SimSpec(
        "PushCube-v1", {"state": TensorSpec((35,)), "rgb": TensorSpec((8, 8, 3), "uint8")}, ActionSpec.continuous([-1] * 8, [1] * 8)
    )
    with pytest.raises(IncompatibleCheckpointError) as caught:
        check_compatible(loaded, other)
    message = str(caught.value)
    for part in ("task FetchReachDense-v4 ≠ PushCube-v1", "'state' [16] float32 ≠ [35] float32", "'rgb' absent ≠ [8, 8, 3] uint8"):
        assert part in message
    assert "continuous(4) within [-1, 1] ≠ continuous(8) within [-1, 1]" in message
    assert "sim=fetch_reach" in message
    renamed = SimSpec("Another-v0", SPEC.observation, SPEC.action)
    check_compatible(loaded, renamed, same_task=False)
    with pytest.raises(IncompatibleCheckpointError, match="task"):
        check_compatible(loaded, renamed)
    tilted = SimSpec(SPEC.task, SPEC.observation, ActionSpec.continuous([-1, -1, -1, -0.5], [1, 1, 1, 1]))
    with pytest.raises(IncompatibleCheckpointError, match="bounds of single dimensions"):
        check_compatible(loaded, tilted)
    talk = SimSpec("Talk-v0", {"text": VariableSpec("text", 100)}, ActionSpec.text(50))
    check_compatible(replace(loaded, spec=talk), replace(talk, observation={"text": VariableSpec("text", 200)}, action=ActionSpec.text(9)))


def test_other_tensors_are_named(tmp_path: Path) -> None:
    loaded = load_checkpoint(save(tmp_path))
    check_tensors(loaded, {"actor.weight": torch.zeros(3, 4), "actor.bias": torch.zeros(3)})
    with pytest.raises(IncompatibleCheckpointError) as caught:
        check_tensors(loaded, {"actor.weight": torch.zeros(3, 5), "critic.weight": torch.zeros(1)})
    message = str(caught.value)
    assert "lacks critic.weight" in message
    assert "has unknown actor.bias" in message
    assert "actor.weight [3, 4] instead of [3, 5]" in message


def test_arrays_in_the_state_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ndarray: put arrays and tensors into `learner`"):
        save(tmp_path, state={"running_mean": np.zeros(3)})
    assert not (tmp_path / "checkpoints").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"Cannot write .*step_000001000"):
        save(tmp_path / "run")


def test_the_model_card_says_how_it_was_made_and_how_to_use_it(tmp_path: Path) -> None:
    folder = save(tmp_path, 2048)
    card = (folder / "MODEL_CARD.md").read_text()
    for part in (
        "python -m embodied_rl.train experiment=fetch_reach",
        "| eval/success | 0.25 |",
        f"python -m embodied_rl.evaluate checkpoint={folder} num_episodes=100",
        f"python -m embodied_rl.render checkpoint={folder}",
        "learning_rate: 0.0003",
        f"- torch {torch.__version__}",
        "2,048 environment steps",
        f"python -m embodied_rl.train resume={folder}",
    ):
        assert part in card, part


def test_the_held_out_result_comes_to_the_head_of_the_card_once(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for rate in ("90 %", "95 %"):
        add_result_to_card(folder, {"held-out success": rate})
    result = (folder / "MODEL_CARD.md").read_text().partition("## Result\n")[2].partition("\n\n")[0]
    assert result.splitlines() == ["| metric | value |", "|---|---|", "| held-out success | 95 % |", "| eval/success | 0.25 |"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "python -m embodied_rl.train sim=cartpole trust=my.env:Env resume=auto total_steps=100 'run_dir=runs/${hydra:job.num}'",
            "python -m embodied_rl.train 'resume=my runs/1' total_steps=200 trust=my.env:Env",
        ),
        ("from Python, with the configuration below", "python -m embodied_rl.train 'resume=my runs/1' total_steps=200"),
        (
            "PYTHONPATH='my runs/1/source' python -m embodied_rl.train sim=custom",
            "PYTHONPATH='my runs/1/source' python -m embodied_rl.train 'resume=my runs/1' total_steps=200",
        ),
    ],
)
def test_the_command_to_continue_repeats_nothing_that_the_checkpoint_holds(command: str, expected: str) -> None:
    assert resume_command(command, "my runs/1", total_steps=200) == expected


# ---- what is on the disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy.safetensors", "learner.safetensors", "config.yaml", "model/config.json", "state.json"])
def test_a_flipped_bit_is_refused_with_the_way_out(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "in_short", str)  # two paths in a folder of the tests with a long name would be shortened

    def describe(folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "toy"}')

    before = save(tmp_path, 1000)
    folder = save(tmp_path, 2000, describe=describe)
    path = folder / name
    content = bytearray(path.read_bytes())
    # Of numbers and texts alike: nothing else notices the lowest bit of a digit.
    place = content.rindex(b"0.25") + 3 if name == "state.json" else len(content) - 3
    content[place] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(IncompatibleCheckpointError) as caught:
        load_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "damaged" in message or "cannot be read" in message
    if name != "config.yaml" or "damaged" in message:
        assert f"resume={before}" in message
    assert load_checkpoint(before).step == 1000
    if name == "learner.safetensors":
        assert load_checkpoint(folder, with_learner=False).step == 2000, "evaluation does not read it"


def _forge(folder: Path, **changes: Any) -> None:
    """Change entries of state.json, with a digest that fits."""
    document = json.loads((folder / "state.json").read_text()) | changes
    document["sha256"] = sum_of_document(document)
    (folder / "state.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("state.json", "[" * 100_000, "nested too deeply"),
        (
            "config.yaml",
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
            "a million values",
        ),
        ("config.yaml", "[" * 5000, "nested too deeply"),
        ("config.yaml", "seed: " + "9" * 10_000, "4300 digits"),
    ],
)
def test_text_that_blows_up_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = save(tmp_path)
    (folder / name).write_text(text)
    if name != "state.json":
        _forge(folder, files={})
    with pytest.raises(IncompatibleCheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("files", [[], {"config.yaml": None}, {"config.yaml": {"bytes": "many", "sha256": ""}}, {"config.yaml": {}}])
def test_sums_that_are_none_are_damage(tmp_path: Path, files: Any) -> None:
    folder = save(tmp_path)
    _forge(folder, files=files)
    with pytest.raises(IncompatibleCheckpointError, match="has no checksums"):
        load_checkpoint(folder)


def test_a_pipe_in_a_checkpoint_holds_nobody_up(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")
    with pytest.raises(IncompatibleCheckpointError, match=r"config\.yaml"):
        load_checkpoint(folder)


def test_an_adopted_checkpoint_brings_its_base_and_never_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    folder = save(tmp_path / "run", base=note_base(tmp_path / "run/model", tmp_path / "run"))
    before = load_checkpoint(folder)
    adopted = adopt_checkpoint(before, tmp_path / "other")
    assert adopted.path == tmp_path / "other/checkpoints" / folder.name
    assert find_last(tmp_path / "other") == adopted.path
    assert base_of(load_checkpoint(adopted.path)) == (tmp_path / "other/model").resolve()
    assert torch.equal(load_checkpoint(adopted.path).policy["actor.weight"], before.policy["actor.weight"])
    _forge(folder, base={"path": "../elsewhere", "within_run": True, "files": {}})
    with pytest.raises(IncompatibleCheckpointError, match="outside of its run"):
        adopt_checkpoint(load_checkpoint(folder), tmp_path / "third/run")
    assert not (tmp_path / "third/elsewhere").exists()


def test_a_checkpoint_without_sums_is_read(tmp_path: Path) -> None:
    """As they were written before there were any."""
    folder = save(tmp_path)
    document = json.loads((folder / "state.json").read_text())
    del document["files"], document["sha256"]
    (folder / "state.json").write_text(json.dumps(document))
    assert load_checkpoint(folder).step == 1000


FULL = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.test_checkpoint import save
from embodied_rl.checkpoint import CheckpointWriter
from embodied_rl.errors import UserError
run = Path(sys.argv[1])
save(run, 1, policy={"w": torch.full((2000,), 1.0)})
if sys.argv[3] == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    save(run, 2, policy={"w": torch.full((200_000,), 2.0)})
except UserError as error:
    print("told:", error)
else:
    raise SystemExit("it was written all the same")
"""


@pytest.mark.parametrize("how", ["tmpfs", "limit"])
def test_a_full_disk_is_one_error_and_the_last_checkpoint_stays(tmp_path: Path, how: str) -> None:
    """A file system of 256 KiB, where this machine lets us mount one; and a limit on the size of files, which works everywhere."""
    program, root = tmp_path / "full.py", str(Path(__file__).parents[1])
    program.write_text(FULL)
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    kept_and_listed = f"cp -a {run} {kept} && ls -A {run}/checkpoints"
    if how == "tmpfs":
        mount = f"mount -t tmpfs -o size=256k tmpfs {run}"
        if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
            pytest.skip("file systems cannot be mounted here")
        command = f"{mount} && {sys.executable} {program} {run} {root} {how} && {kept_and_listed}"
        done = subprocess.run(["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True, check=False)
        printed = done.stdout
    else:
        done = run_forked("-c", FULL, str(run), root, how, cwd=tmp_path)
        printed = done.stdout + subprocess.run(["sh", "-c", kept_and_listed], capture_output=True, text=True, check=True).stdout
    assert done.returncode == 0, done.stdout + done.stderr
    told, *left = printed.splitlines()
    assert told.startswith(f"told: Cannot write '{run}/checkpoints/step_000000002': ")
    assert ("No space left on device" if how == "tmpfs" else "File too large") in told
    assert sorted(left) == ["last", "step_000000001"], "nothing is left that would fill the disk further"
    survivor = load_checkpoint(kept)
    assert survivor.step == 1
    assert survivor.policy["w"].unique().tolist() == [1.0]
    assert os.readlink(kept / "checkpoints" / "last") == "step_000000001"


def test_a_checkpoint_in_the_background_moves_the_link_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = threading.Event(), module.write_tensors

    def slowly(path: Path, tensors: Any) -> None:
        assert gate.wait(60)
        original(path, tensors)

    writer = CheckpointWriter(tmp_path, asynchronous=True)
    arguments: dict[str, Any] = {
        "state": {"iteration": 1}, "config": make_config(tmp_path), "spec": SPEC, "metrics": {}, "command": "train",
    }  # fmt: skip
    gate.set()
    writer.save(1000, policy={"w": torch.ones(3)}, learner={}, **arguments)
    writer.wait()
    gate.clear()
    monkeypatch.setattr(module, "write_tensors", slowly)
    weights = torch.full((3,), 2.0)
    writer.save(2000, policy={"w": weights}, learner={}, **arguments)
    weights.fill_(7.0)  # training goes on
    assert find_last(tmp_path) == (tmp_path / "checkpoints" / "step_000001000").resolve()
    gate.set()
    writer.wait()
    assert find_last(tmp_path) == (tmp_path / "checkpoints" / "step_000002000").resolve()
    assert load_checkpoint(tmp_path).policy["w"].tolist() == [2.0, 2.0, 2.0], "what it was when the checkpoint was begun"
    # What goes wrong in the background is told to whoever asks next, once.
    monkeypatch.setattr(module, "write_tensors", lambda path, tensors: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    writer.save(3000, policy={"w": weights}, learner={}, **arguments)
    with pytest.raises(UserError, match=r"Cannot write .*step_000003000': No space left on device"):
        writer.wait()
    writer.wait()
    assert find_last(tmp_path) == (tmp_path / "checkpoints" / "step_000002000").resolve()

    def half(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("begun")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"Cannot write .*checkpoints': No space left on device"):
        writer.save(4000, policy={"w": weights}, learner={}, describe=half, **arguments)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"last", "step_000001000", "step_000002000"}, "nothing that would fill the disk further"


def test_the_base_of_an_adapter_is_looked_for_and_compared(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    (base / "config.json").write_text("{}")
    checkpoint = load_checkpoint(save(run, base=note_base(base, run)))
    assert base_of(checkpoint) == base.resolve()
    base.rename(tmp_path / "moved")
    with pytest.raises(IncompatibleCheckpointError, match=r"holds only an adapter, and its base model is missing: .*/base'.*policy.model"):
        base_of(checkpoint)
    assert base_of(checkpoint, str(tmp_path / "moved")) == tmp_path / "moved"
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(IncompatibleCheckpointError, match=r"is not the base model that it was trained on: of 'model.safetensors'"):
        base_of(checkpoint, str(tmp_path / "moved"))
    # A model within the run moves with it.
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"weights")
    save(run, 2000, base=note_base(run / "model", run))
    run.rename(tmp_path / "elsewhere")
    assert base_of(load_checkpoint(tmp_path / "elsewhere")) == (tmp_path / "elsewhere" / "model").resolve()
    assert base_of(load_checkpoint(save(tmp_path / "whole"))) is None
