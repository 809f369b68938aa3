"""Which device each process of a run without Ray has: plans of machines that are made up, by hand, and runs that start such processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_rl.config import TrainConfig, facts
from embodied_rl.config.compose import load_train_config
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster
from embodied_rl.roles import local_devices
from embodied_rl.roles.local_devices import LocalDevices, plan_devices, visible_gpu
from embodied_rl.sim.manager import EnvManager
from embodied_rl.trainer import Trainer
from tests.golden.runs import RUNS
from tests.roles.runs import GROUPS, ROLLOUTS, assert_same_run, configured, trained

pytestmark = pytest.mark.usefixtures("forked")
RANKS = "hybrid.sharding={num_shards: 2}"
SCORED = "hybrid.reward_worker={target: a.b:c}"


def machine(gpus: int) -> Cluster:
    return Cluster(ClusterConfig((NodesConfig(cores=16, gpus=gpus),), name="this machine"))


def roles(generation: str, train: str, reward: str = "") -> str:
    return f"hybrid.placement={{env: [0/cpu], generation: [{generation}], train: [{train}]{f', reward: [{reward}]' if reward else ''}}}"


def plan(gpus: int, *words: str) -> LocalDevices:
    return plan_devices(load_train_config(["sim=cartpole", "algorithm=grpo", *words]), machine(gpus))


@pytest.mark.parametrize(
    ("gpus", "words", "ranks", "players"),
    [
        # Without names: training has the first, what plays the last.
        (0, ["hybrid=collocated"], (None,), ()),
        (4, ["hybrid=collocated"], (0,), ()),
        (4, ["hybrid=fsdp2"], (0, 1), ()),
        (0, ["hybrid=disaggregated", "hybrid.players=2"], (None,), (None, None)),
        (4, ["hybrid=disaggregated", "hybrid.players=2"], (0,), (3, 2)),
        (8, ["hybrid=disaggregated", RANKS], (0, 1), (7,)),
        # Named, on devices of their own.
        (8, [roles("0/gpu:0", "0/gpu:5")], (5,), (0,)),
        (8, [roles("0/gpu:0-1", "0/gpu:6-7"), RANKS, "hybrid.players=2"], (6, 7), (0, 1)),
        (8, [roles("0/gpu:2, 0/gpu:4", "0/gpu:3"), "hybrid.players=4"], (3,), (2, 2, 4, 4)),
        (2, [roles("0/cpu", "0/gpu:*"), RANKS, "hybrid.players=3"], (0, 1), (None, None, None)),
        (2, [roles("0/gpu:1", "0/cpu"), RANKS], (None, None), (1,)),
        # In turns: what plays is in the process of the first rank, on its device.
        (0, [roles("0/cpu", "0/cpu"), RANKS], (None, None), ()),
        (8, [roles("0/gpu:6", "0/gpu:6")], (6,), ()),
        (8, [roles("0/gpu:6", "0/gpu:4-7"), "hybrid.sharding={num_shards: 2, num_replicas: 2}"], (6, 4, 5, 7), ()),
        (8, [roles("0/gpu:1", "0/gpu:0", reward="0/gpu:2")], (0,), (1,)),
    ],
)
def test_who_has_which_device(gpus: int, words: list[str], ranks: tuple[int | None, ...], players: tuple[int | None, ...]) -> None:
    assert plan(gpus, *words) == LocalDevices(ranks, players)


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        (2, [roles("0/gpu:0", "0/gpu:2")], "Device '0/gpu:2' does not exist"),
        (4, [roles("0/gpu:0", "1/gpu:0")], "Device '1/gpu:0' does not exist"),
        (4, [roles("0/gpu:0", "0/gpu:1-3"), RANKS], "train 3 GPUs, and training has 2 ranks .* train: .'0/gpu:1-2'., or .*num_shards=3"),
        (4, [roles("0/gpu:0", "0/gpu:1"), RANKS], r"train 1 GPUs, and training has 2 ranks .* Nearest valid choice: hybrid.sharding"),
        (4, [roles("0/gpu:0-1", "0/gpu:0")], r"acts only there\. Nearest valid choice: generation: \['0/gpu:0'\]"),
        (4, [roles("0/gpu:0-1", "0/gpu:2"), "hybrid.players=3"], r"hybrid.players=4, or generation: \['0/gpu:0'\]"),
        (4, [roles("0/gpu:1", "0/gpu:1"), "generation=vllm"], "CUDA_VISIBLE_DEVICES=1, or another GPU for role generation"),
        (4, [roles("0/gpu:1", "0/gpu:0", reward="0/gpu:3"), SCORED], r"reward: \['0/gpu:1'\], or hybrid.cluster=ray"),
    ],
)
def test_roles_that_a_machine_cannot_have(gpus: int, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(gpus, *words)


def test_a_process_sees_what_this_one_calls_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu(3) == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5, 7")
    assert visible_gpu(2) == "7"


def run(config: TrainConfig, run_dir: Path) -> tuple[Any, list[str | None]]:
    """A run, closed, and what each process that plays was told to see."""
    run_dir.mkdir()
    with Trainer(config, run_dir, command="test") as trainer:
        manager: Any = trainer.manager
        handles = [] if isinstance(manager, EnvManager) else getattr(manager._handle, "_workers", [manager._handle])
        seen = [one.process.environment.get("CUDA_VISIBLE_DEVICES") for one in handles]
        trainer.run()
    return trainer, seen


def made_up(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    for module in (local_devices, facts):
        monkeypatch.setattr(module, "this_machine", lambda config: machine(gpus))


def test_ranks_and_players_are_started_on_what_the_roles_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are made up, and all else is real: torch finds none of them and computes on the processor. The numbers are those of one
    process."""
    task = [*GROUPS, RANKS, "total_steps=150"]
    here = trained(tmp_path / "here", *task)
    made_up(monkeypatch, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    trainer, seen = run(configured(tmp_path / "named", *task, roles("0/gpu:1", "0/gpu:6-7")), tmp_path / "named")
    assert seen == ["9"]
    host = trainer.method.sharded.host
    assert ([host.device_index(rank) for rank in range(2)], len(host.processes)) == ([6, 7], 1)
    assert_same_run(here, tmp_path / "named")


def test_each_player_is_started_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, 4)
    words = [*GROUPS, "total_steps=50", "hybrid.players=2"]
    assert run(configured(tmp_path / "two", *words, roles("0/gpu:1-2", "0/cpu")), tmp_path / "two")[1] == ["1", "2"]


def test_what_trains_on_the_processor_leaves_the_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of pictures would take a GPU that is there: these are made up, and taking one fails."""
    made_up(monkeypatch, 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    trainer, seen = run(configured(tmp_path / "run", *RUNS["ppo_cnn"], "hybrid.device=auto", roles("0/gpu:1", "0/cpu")), tmp_path / "run")
    assert seen == ["1"]
    assert {part.device.type for part in trainer.policy.parameters()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("generation", "train", "device"), [("0/gpu:0", "0/gpu:1", 1), ("0/gpu:1", "0/gpu:1", 1), ("0/cpu", "0/gpu:1", 1)])
def test_roles_on_two_gpus(tmp_path: Path, generation: str, train: str, device: int) -> None:
    trainer, _ = run(configured(tmp_path / "run", *RUNS["ppo_cnn"], "hybrid.device=cuda", roles(generation, train)), tmp_path / "run")
    assert {part.device.index for part in trainer.policy.parameters()} == {device}


def test_roles_of_one_processor_are_a_run_in_turns_with_its_ranks(tmp_path: Path) -> None:
    """Which are real, and meet over gloo."""
    task = [*ROLLOUTS, RANKS, "total_steps=256"]
    trainer, seen = run(configured(tmp_path / "named", *task, roles("0/cpu", "0/cpu")), tmp_path / "named")
    assert (seen, len(trainer.method.sharded.host.processes)) == ([], 1)
    assert_same_run(trained(tmp_path / "here", *task), tmp_path / "named")
