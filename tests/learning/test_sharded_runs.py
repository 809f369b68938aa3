"""Runs on two ranks from the command line's door: checkpoints in parts, continued on another number of ranks, evaluated as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import evaluate
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.learning.sharded_checkpoint import read_index, read_whole, save_sharded
from embodied_rl.loggers.jsonl import read_metrics
from embodied_rl.train import train
from tests.short_run import one_line_error

pytestmark = pytest.mark.usefixtures("forked")

QUIET = ("video.enabled=no", "logger=quiet", "evaluation.num_episodes=2", "evaluation.every_steps=null", "stop_at_success=null")
ONE = ("hybrid=local", "hybrid.device=cpu", "hybrid.num_threads=1")
TWO = ("hybrid=fsdp2", "hybrid.device=cpu", "hybrid.num_threads=1", "checkpoint.asynchronous=true")
PPO = (
    *("sim=cartpole", "sim.num_slots=4", "sim.num_workers=1", "policy.hidden_sizes=[16,16]", "algorithm.rollout_steps=32"),
    *("algorithm.minibatch_size=48", "algorithm.num_epochs=2", "algorithm.normalize_reward=true"),
)
TINY_LANGUAGE = (
    *("experiment=frozenlake_text", "sim.num_slots=4", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=2"),
    *("algorithm.groups.filters=[]", "algorithm.minibatch_size=8", "agent.max_new_tokens=2", "policy.lora_rank=2"),
    "policy.tiny={hidden_size: 32, num_layers: 1, num_heads: 1, num_key_value_heads: 1, intermediate_size: 32, max_context: 512}",
    *("algorithm.warm_start.episodes=4", "algorithm.warm_start.num_epochs=1", "algorithm.warm_start.measured_episodes=2"),
    # Answers that are no action cost something: episodes that all fail differ, and there is something to learn.
    *("sim.num_workers=1", "agent.invalid_penalty=0.1", "algorithm.entropy_coef=0.02"),
)


def run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    words = [*overrides, f"run_dir={folder}", *(["resume=auto"] if resume else [])]
    return train(load_train_config(words), overrides=words)


def curve(folder: Path) -> list[dict[str, Any]]:
    rows = [row for row in read_metrics(folder) if any(name.startswith("train/") for name in row)]
    return [{name: value for name, value in row.items() if name.startswith(("train/", "episode/", "step"))} for row in rows]


def check_moves(tmp_path: Path, common: tuple[str, ...], half: int, total: int) -> None:
    """2 → 1 and 1 → 2 ranks in the middle of a run: the curve and the weights are those of one process."""
    common = (*common, *QUIET, f"checkpoint.every_steps={half}", "algorithm.lr_schedule=constant")
    whole = run(tmp_path / "whole", *common, *ONE, f"total_steps={total}")
    for name, first, second in (("2 to 1", TWO, ONE), ("1 to 2", ONE, TWO)):
        folder = run(tmp_path / name, *common, *first, f"total_steps={half}")
        assert (folder / "checkpoints" / "last" / "sharded").is_dir() == (first is TWO)
        run(folder, *common, *second, f"total_steps={total}", resume=True)
        wanted, found = curve(whole), curve(folder)
        assert len(found) == len(wanted) > 2
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert (folder / "checkpoints" / "last" / "sharded").is_dir() == (second is TWO)
        ours, reference = load_checkpoint(folder), load_checkpoint(whole)
        assert ours.policy.keys() == reference.policy.keys()
        for tensor, expected in reference.policy.items():
            torch.testing.assert_close(ours.policy[tensor], expected, rtol=0, atol=1e-5, msg=tensor)


def test_rollouts_move_between_one_and_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_moves(tmp_path, PPO, 256, 512)
    folder = tmp_path / "1 to 2"
    last = (folder / "checkpoints" / "last").resolve()
    index = read_index(last / "sharded")
    assert set(index["files"]) == {"rank_00000.safetensors", "rank_00001.safetensors"}
    assert not any(name.startswith("exp_avg") for name in load_file(last / "learner.safetensors")), "they lie with the ranks"
    # What is put together from the parts has the names and numbers of one process.
    alone = load_checkpoint(tmp_path / "2 to 1").learner
    for name, tensor in read_whole(last / "sharded").items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-5, msg=name)
    evaluate.main([f"checkpoint={folder}", "num_episodes=2"])
    assert len(json.loads((folder / "evaluation.json").read_text())["episodes"]) == 2
    # Two ranks go on with what two ranks wrote, as one process does with its own.
    further = ("algorithm.lr_schedule=constant", "checkpoint.every_steps=256", "total_steps=768")
    for name, hybrid in (("1 to 2", TWO), ("2 to 1", ONE)):
        run(tmp_path / name, *PPO, *QUIET, *hybrid, *further, resume=True)
    for mine, theirs in zip(curve(tmp_path / "1 to 2"), curve(tmp_path / "2 to 1"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert curve(folder)[-1]["step"] == 768
    # A flipped bit in a rank's file is found when the optimizer is taken up.
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied, symlinks=True)
    part = copied / "checkpoints" / "last" / "sharded" / "rank_00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(IncompatibleCheckpointError, match=r"rank_00001\.safetensors.*SHA-256 differs"):
        run(copied, *PPO, *QUIET, *ONE, "total_steps=1024", resume=True)


@pytest.mark.slow
def test_groups_move_between_one_and_two_ranks(tmp_path: Path) -> None:
    groups = ("algorithm=grpo", "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=1", "algorithm.kl.coef=0.1")
    check_moves(tmp_path, ("sim=cartpole", *groups, "policy.hidden_sizes=[16]", "sim.num_slots=4", "sim.num_workers=1"), 150, 300)


@pytest.mark.slow
def test_a_language_agent_with_lora_moves_between_one_and_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_moves(tmp_path, TINY_LANGUAGE, 100, 200)
    # Only the adapter was saved.
    last = tmp_path / "1 to 2" / "checkpoints" / "last"
    assert not (last / "policy.safetensors").exists()
    assert all(".lora_" in name for name in load_file(last / "model" / "adapter_model.safetensors"))
    folder = tmp_path / "1 to 2"
    evaluate.main([f"checkpoint={folder}", "num_episodes=2"])
    # What the adapter belongs to is looked for, and compared.
    (folder / "model").rename(folder / "gone")
    told = one_line_error(evaluate.main, [f"checkpoint={folder}", "num_episodes=2"], capsys)
    assert "holds only an adapter, and its base model is missing" in told
    shutil.copytree(folder / "gone", folder / "model")
    weights = folder / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    told = one_line_error(evaluate.main, [f"checkpoint={folder}", "num_episodes=2"], capsys)
    assert "is not the base model that it was trained on: of 'model.safetensors', its content has changed since it was written" in told


def test_a_rank_that_cannot_write_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks by hand: threads of this process, whose second finds no room."""
    from embodied_rl.learning import sharded_checkpoint as module

    rank = [0]
    monkeypatch.setattr(module, "_rank", lambda: rank[0])
    monkeypatch.setattr(module, "_num_ranks", lambda: 2)
    monkeypatch.setattr(module, "_common_number", lambda: 7)
    before = save_part(tmp_path, rank)
    first = save_sharded(tmp_path / "parts", {"w": torch.ones(3)}, asynchronous=True)
    original = module.save_file

    def full(tensors: Any, path: Path, **options: Any) -> None:
        if path.name.startswith("rank_00001"):  # rank 0's thread may not have come so far yet
            raise OSError(28, "No space left on device")
        original(tensors, path, **options)

    monkeypatch.setattr(module, "save_file", full)
    rank[0] = 1
    second = save_sharded(tmp_path / "parts", {"w": torch.ones(3)}, asynchronous=True)
    for saving in (first, second):
        with pytest.raises(UserError, match="No space left on device"):
            saving.wait(60.0)
    monkeypatch.setattr(module, "save_file", original)
    found = {"w": torch.zeros(3)}
    module.load_sharded(before, found)
    assert found["w"].tolist() == [2.0, 2.0, 2.0], "what was there before is whole"
    assert [path.name for path in tmp_path.iterdir()] == ["parts"], "nothing is left that would fill the disk"


def save_part(tmp_path: Path, rank: list[int]) -> Path:
    first = save_sharded(tmp_path / "parts", {"w": torch.full((3,), 2.0)}, asynchronous=True)
    rank[0] = 1
    second = save_sharded(tmp_path / "parts", {"w": torch.full((3,), 2.0)}, asynchronous=True)
    second.wait(60.0)
    rank[0] = 0
    return first.wait(60.0)
