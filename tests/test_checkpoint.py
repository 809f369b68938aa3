"""Checkpoints come back bit by bit, survive a crash at every moment, and refuse in one line what does not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl import checkpoint as module
from embodied_rl.checkpoint import (
    add_result_to_card,
    check_compatible,
    check_tensors,
    find_last,
    load_checkpoint,
    resume_command,
    save_checkpoint,
)
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.sample_run import SPEC, make_config


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
    changing = [(module.os, "rename"), (module.os, "replace"), (module, "fsync"), (module, "_write_tensors"), (module.shutil, "rmtree")]
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
        "import sys, torch; from pathlib import Path; sys.path.insert(0, sys.argv[2]); from tests.test_checkpoint import save\n"
        "for step in range(1, 100000): save(Path(sys.argv[1]), step, policy={'w': torch.full((200_000,), float(step))})"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(Path(__file__).parent.parent)])
    try:
        deadline = time.monotonic() + 60
        while find_last(tmp_path) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    survivor = load_checkpoint(tmp_path)
    assert survivor.policy["w"].unique().tolist() == [float(survivor.step)]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IncompatibleCheckpointError, match=r"holds no checkpoint \(state.json is missing\)"):
        load_checkpoint(tmp_path / "empty")
    save(tmp_path, 1000)
    with pytest.raises(IncompatibleCheckpointError, match=r"does not exist\. Beside it lie: step_000001000"):
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
    with pytest.raises(IncompatibleCheckpointError, match=r"format version 99 \(written by embodied_rl 7.0.0\).* reads version 1"):
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
        f"python -m embodied_rl.train experiment=fetch_reach resume={folder}",
    ):
        assert part in card, part


def test_the_held_out_result_comes_to_the_head_of_the_card_once(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for rate in ("90 %", "95 %"):
        add_result_to_card(folder, {"held-out success": rate})
    result = (folder / "MODEL_CARD.md").read_text().partition("## Result\n")[2].partition("\n\n")[0]
    assert result.splitlines() == ["| metric | value |", "|---|---|", "| held-out success | 95 % |", "| eval/success | 0.25 |"]


def test_the_command_to_continue_keeps_the_overrides() -> None:
    command = "python -m embodied_rl.train sim=cartpole resume=auto total_steps=100 +policy.a=1 'run_dir=my runs/1'"
    expected = "python -m embodied_rl.train sim=cartpole +policy.a=1 'run_dir=my runs/1' 'resume=my runs/1' total_steps=200"
    assert resume_command(command, "my runs/1", total_steps=200) == expected
