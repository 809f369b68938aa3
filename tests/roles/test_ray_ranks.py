"""Ranks of training on two nodes of a real Ray cluster: one node's run bit for bit, ranks and nodes that are lost, and who goes where."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from embodied_rl.config import HybridConfig, RayConfig, RayCpusConfig, RayGpusConfig, ShardingConfig
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster
from embodied_rl.hybrid.weight_sync import pack_tensors
from embodied_rl.roles.ray_cluster import Need, needs_of, nodes_of, prepare, why_never
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.roles.runs import BARE, GROUPS, ROLLOUTS, TEXTS, assert_same_run, configured, curve, trained
from tests.short_run import last_of

RANKS = ["hybrid.sharding={num_shards: 2, micro_batch_size: 4}"]
CPUS = "hybrid.ray.cpus={env: 0.5, generation: 0.5, train: 6}"
"""Of nodes with four and three processors: neither has room for both ranks."""
ON_RAY = ["hybrid=ray", "hybrid.num_threads=1", *RANKS, CPUS]
ENDED_S, DEADLINE_S = 60.0, 240.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes, with addresses of their own where this machine has more than one."""
    pytest.importorskip("ray")
    prepare(RayConfig(address="given"))
    from ray.cluster_utils import Cluster as RayNodes

    made: Any = RayNodes(initialize_head=True, head_node_args={"num_cpus": 4, **BARE})
    made.second = made.add_node(num_cpus=3, node_ip_address="127.0.0.1")
    made.wait_for_nodes()
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


def node_of(ray: Any, actor: Any) -> str:
    # The public way (ray.util.state) needs the dashboard, which is not there.
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])


def pid_of(ray: Any, actor: Any) -> int:
    return int(ray._private.state.actors(actor._actor_id.hex())["Pid"])


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + ENDED_S
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"processes {left} were left running"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("task", [pytest.param(ROLLOUTS, id="rollouts"), pytest.param(GROUPS, id="groups", marks=pytest.mark.ci_sample)])
def test_ranks_on_two_nodes_are_ranks_here(tmp_path: Path, cluster: Any, task: list[str]) -> None:
    """Bit for bit, and one rank's run to 1e-5; every rank is where it should be, and ends with the run."""
    import ray

    task = [*task, "total_steps=256", "evaluation.every_steps=128"]
    here = trained(tmp_path / "here", *task, *RANKS)
    config = configured(tmp_path / "ray", *task, *ON_RAY, f"hybrid.ray.address={cluster.address}")
    (tmp_path / "ray").mkdir()
    with Trainer(config, tmp_path / "ray", command="test") as trainer:
        method: Any = trainer.method
        actors = [method._worker, *method._rank_workers]
        assert len({node_of(ray, actor) for actor in actors}) == len(actors) == 2
        pids = [pid_of(ray, actor) for actor in actors]
        trainer.run()
    wait_until_gone(pids)
    assert_same_run(here, tmp_path / "ray")
    one = trained(tmp_path / "one", *task)
    found, wanted = curve(tmp_path / "ray"), curve(one)
    assert len(found) == len(wanted) > 2
    for mine, theirs in zip(found, wanted, strict=True):
        names = {name for name in theirs if name.startswith(("train/", "episode/"))}
        assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_language_agent_on_two_nodes_goes_on_with_one(tmp_path: Path, cluster: Any) -> None:
    """The model's files come to the other node by themselves; the checkpoint is whole, and one process goes on with it."""
    task = [*TEXTS, "policy.lora_rank=4", "algorithm.warm_start=null", "checkpoint.every_steps=100", "checkpoint.keep_last=9"]
    here = trained(tmp_path / "here", *task, *RANKS, "total_steps=250")
    words = [*task, *ON_RAY, f"hybrid.ray.address={cluster.address}"]
    assert_same_run(here, trained(tmp_path / "ray", *words, "total_steps=250"))
    last = tmp_path / "ray" / "checkpoints" / "last"
    assert not (last / "sharded").exists(), "the actors' state is whole, in the folder of the driver"
    steps = curve(tmp_path / "ray")[-1]["step"]
    train(
        configured(tmp_path / "ray", *task, "hybrid=local", "total_steps=400", "resume=auto"), overrides=["hybrid=local", "total_steps=400"]
    )
    assert curve(tmp_path / "ray")[-1]["step"] > steps


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    task = [*GROUPS, "total_steps=400", "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task, *RANKS)
    killed: list[int] = []
    original = Trainer._publish

    def kill_then_publish(self: Trainer) -> None:
        if self.iteration == 3 and not killed:
            method: Any = self.method
            killed.append(pid_of(ray, method._rank_workers[0]))
            os.kill(killed[0], signal.SIGKILL)
        original(self)

    monkeypatch.setattr(Trainer, "_publish", kill_then_publish)
    again = trained(tmp_path / "again", *task, *ON_RAY, f"hybrid.ray.address={cluster.address}")
    assert len(killed) == 1
    assert_same_run(whole, again)
    told = capfd.readouterr().err
    assert "Rank 1 of training (node " in told
    assert "The run continues from" in told


@pytest.mark.slow
def test_a_rank_whose_node_is_removed_is_named_and_the_run_resumes_on_another(
    tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """No other node has room: the run ends with what is missing, nobody is left, and it goes on when there is a node again."""
    import ray

    task = [*GROUPS, "total_steps=400", "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task, *RANKS)
    words = [*task, *ON_RAY, f"hybrid.ray.address={cluster.address}"]
    removed: list[int] = []
    original = Trainer._publish

    def remove_then_publish(self: Trainer) -> None:
        if self.iteration == 3 and not removed:
            method: Any = self.method
            removed.extend(pid_of(ray, actor) for actor in (method._worker, *method._rank_workers))
            cluster.remove_node(cluster.second, allow_graceful=False)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_publish", remove_then_publish)
        with pytest.raises(UserError, match=r"cluster of 1 nodes.*2 x train 3 CPUs"):
            trained(tmp_path / "again", *words)
    told = capfd.readouterr().err
    assert "Rank 1 of training (node " in told or "The Ray actor TrainWorker has ended" in told
    wait_until_gone(removed)
    cluster.add_node(num_cpus=3)
    cluster.wait_for_nodes()
    again = train(configured(tmp_path / "again", *words, "resume=auto"), overrides=words)
    assert_same_run(whole, again)


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_rank_behind_and_its_run_goes_on(tmp_path: Path, cluster: Any) -> None:
    """From the command line."""
    task = [*GROUPS, "total_steps=600", "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task, *RANKS)
    run_dir = tmp_path / "killed"
    words = [*task, *ON_RAY, f"hybrid.ray.address={cluster.address}", f"run_dir={run_dir}"]
    command, where = [sys.executable, "-m", "embodied_rl.train", *last_of(words)], Path(__file__).parents[2]
    with (tmp_path / "messages").open("w") as messages:
        process = subprocess.Popen(command, cwd=where, stderr=messages)
    deadline = time.monotonic() + DEADLINE_S
    while not (run_dir / "checkpoints/last").exists():
        assert process.poll() is None, (tmp_path / "messages").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    names: dict[int, str] = {}
    for part in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names[part.pid] = part.name()
    actors = [pid for pid, name in names.items() if name.startswith("ray::") and "Worker" in name]
    assert all(any(role in names[pid] for pid in actors) for role in ("TrainWorker", "RankWorker")), names
    see_no_gpu = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"  # of a role without GPUs
    assert {psutil.Process(pid).environ().get(see_no_gpu) for pid in actors} == {"1"}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(actors)
    done = subprocess.run([*command, "resume=auto"], cwd=where, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Resuming" in done.stderr
    assert_same_run(whole, run_dir)


@pytest.mark.slow
def test_ranks_go_to_the_nodes_that_are_named(tmp_path: Path, cluster: Any) -> None:
    import ray

    where = "hybrid.placement={env: [0/cpu], generation: [0/cpu], train: [0-1/cpu]}"
    words = [*GROUPS, *ON_RAY, f"hybrid.ray.address={cluster.address}", where, "total_steps=60"]
    (tmp_path / "run").mkdir()
    with Trainer(configured(tmp_path / "run", *words), tmp_path / "run", command="test") as trainer:
        head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
        method: Any = trainer.method
        assert [node_of(ray, actor) == head for actor in (method._worker, *method._rank_workers)] == [True, False]
        trainer.run()
    assert len(curve(tmp_path / "run")) >= 1


def test_what_ranks_need_is_divided_among_them() -> None:
    sharding = ShardingConfig(num_shards=4, num_replicas=2)
    config = HybridConfig(sharding=sharding, ray=RayConfig(cpus=RayCpusConfig(train=16.0), gpus=RayGpusConfig(train=8.0)))
    needs = needs_of(config)
    assert [(need.role, need.cpus, need.gpus) for need in needs] == [
        ("env", 1.0, 0.0),
        ("generation", 0.25, 0.0),
        *[("train", 2.0, 1.0)] * 8,
    ]
    three = HybridConfig(sharding=ShardingConfig(num_shards=3), ray=RayConfig(cpus=RayCpusConfig(train=0.5)))
    assert [need.cpus for need in needs_of(three) if need.role == "train"] == [0.1666] * 3
    # Eight GPUs in two nodes of four; one less is told at once, however many orders there would be to try.
    node = {"CPU": 16.0, "GPU": 4.0}
    assert why_never(needs, [node, node], "PACK") is None
    assert "8 x train 2 CPUs and 1 GPUs" in str(why_never(needs, [node, {"CPU": 16.0, "GPU": 3.0}], "PACK"))
    nodes = [{"CPU": 4.0, "GPU": float(number % 7 + 1)} for number in range(16)]
    total = sum(int(node["GPU"]) for node in nodes)
    many = [Need("train", 0.5, 1.0)] * total
    assert why_never(many, nodes, "PACK") is None
    assert why_never([*many, Need("train", 0.5, 1.0)], nodes, "PACK") is not None


def test_the_nodes_of_ranks() -> None:
    devices = Cluster(ClusterConfig((NodesConfig(count=2, cores=8, gpus=2),)))
    assert nodes_of(devices.select(["0-1/gpu:*"]), "train", 4) == [0, 0, 1, 1]
    assert nodes_of(devices.select(["1/gpu:0", "0/gpu:0-1"]), "train", 3) == [0, 0, 1]
    assert nodes_of(devices.select(["0-1/cpu"]), "train", 4) == [0, 0, 1, 1]
    assert nodes_of(devices.select(["1/gpu:0-1"]), "train", 1) == [1]
    with pytest.raises(UserError, match=r"role train 4 GPUs, and hybrid\.sharding has 2 ranks"):
        nodes_of(devices.select(["0-1/gpu:*"]), "train", 2)
    with pytest.raises(UserError, match=r"role train 2 nodes, and training has 3 ranks"):
        nodes_of(devices.select(["0-1/cpu"]), "train", 3)
    with pytest.raises(UserError, match=r"role train 2 nodes, and training has 1 rank \(hybrid.sharding is null\)"):
        nodes_of(devices.select(["0-1/cpu"]), "train", 1)


def test_a_rank_builds_a_language_model_of_the_files_that_it_was_given(tmp_path: Path) -> None:
    """Of a run that keeps other domains' steps too: the folder that the driver names is on another machine."""
    pytest.importorskip("ray")
    from embodied_rl.methods.language_player import model_files
    from embodied_rl.roles.ray_training import RankWorker

    (tmp_path / "run").mkdir()
    with Trainer(configured(tmp_path / "run", *TEXTS), tmp_path / "run", command="test") as trainer:
        policy: Any = trainer.policy
        files, described = model_files(policy), policy.describe()
        algorithm = dataclasses.asdict(trainer.config.algorithm)
    described["policy"]["model"] = str(tmp_path / "elsewhere")
    message = {"do": "build", "num_threads": 1, "algorithm": algorithm, **described}
    text, payload = pack_tensors(policy.state_dict().items())
    rank = RankWorker()
    rank.take_model(files)
    assert rank.do(message, text, payload) == ("value", None)
