"""Two nodes of a real Ray cluster on this machine: where roles go, a node that is removed, and a driver that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from embodied_rl.config import RayConfig
from embodied_rl.errors import UserError
from embodied_rl.roles.ray_cluster import prepare
from embodied_rl.trainer import Trainer
from tests.roles.runs import GROUPS, assert_same_run, configured, curve, trained

pytestmark = pytest.mark.slow
DEADLINE_S = 240.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head of two CPUs; tests add nodes."""
    pytest.importorskip("ray")
    prepare(RayConfig(address="given"))
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


def on(cluster: Any) -> list[str]:
    return ["hybrid=ray", f"hybrid.ray.address={cluster.address}"]


def node_of(ray: Any, actor: Any) -> str:
    # The public way (ray.util.state) needs the dashboard, which is not there.
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])


def at_iteration(trainer: Trainer, iteration: int, do: Callable[[], None]) -> None:
    """Have `do` called once, before the update of `iteration`."""
    method: Any = trainer.method
    prepare_update = method.prepare

    def first_do(experience: Any) -> Any:
        if trainer.iteration == iteration:
            do()
        return prepare_update(experience)

    method.prepare = first_do


def test_roles_go_to_the_nodes_that_are_named_and_a_run_ends_when_one_is_gone(tmp_path: Path, cluster: Any) -> None:
    import ray

    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    where = "hybrid.placement={env: [1/cpu], generation: [0/cpu], train: [0/cpu]}"
    config = configured(tmp_path / "run", *GROUPS, *on(cluster), where, "total_steps=10000")
    (tmp_path / "run").mkdir()
    with Trainer(config, tmp_path / "run", command="test") as trainer:
        handle = trainer.manager._handle
        nodes = {"env": node_of(ray, handle.env), "generation": node_of(ray, handle.generation)}
        nodes["train"] = node_of(ray, trainer.method._worker)  # type: ignore[attr-defined]
        head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
        assert {role: node == head for role, node in nodes.items()} == {"env": False, "generation": True, "train": True}
        at_iteration(trainer, 2, lambda: cluster.remove_node(second, allow_graceful=False))
        with pytest.raises(UserError, match=r"names for env.*has gone"):
            trainer.run()


def test_a_node_that_is_removed_costs_time_and_nothing_else(tmp_path: Path, cluster: Any) -> None:
    """Who was on it begins again where there is room; the train worker from its last checkpoint."""
    task = [*GROUPS, "total_steps=300", "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task)
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    spread = [*task, *on(cluster), "hybrid.ray.strategy=SPREAD", "hybrid.ray.cpus={env: 1, generation: 0.25, train: 0.25}"]
    removed: list[int] = []
    original = Trainer._publish

    def remove_then_publish(self: Trainer) -> None:
        if self.iteration == 3 and not removed:
            removed.append(self.iteration)
            cluster.remove_node(second, allow_graceful=False)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_publish", remove_then_publish)
        again = trained(tmp_path / "again", *spread)
    assert removed == [3]
    assert_same_run(whole, again)


def test_a_driver_that_dies_leaves_nobody_behind_and_its_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    task = [*GROUPS, "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task, "total_steps=600")
    run_dir = tmp_path / "killed"
    command = [sys.executable, "-m", "embodied_rl.train", *task, "hybrid=ray", f"run_dir={run_dir}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    with (tmp_path / "messages").open("w") as messages:
        process = subprocess.Popen([*command, "total_steps=600"], cwd=Path(__file__).parents[2], env=environment, stderr=messages)
    deadline = time.monotonic() + DEADLINE_S
    while not (run_dir / "checkpoints/last").exists():
        assert process.poll() is None, (tmp_path / "messages").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    assert {"raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {
        " ".join(part.cmdline()).split(" ")[0].split("/")[-1] for part in below
    }
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps_then = curve(run_dir)[-1]["step"]
    gone, left = psutil.wait_procs(below, timeout=10)
    assert not left, [part.name() for part in left]
    assert gone
    done = subprocess.run(
        [*command, "total_steps=600", "resume=auto"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Resuming" in done.stderr
    assert steps_then < curve(run_dir)[-1]["step"]
    assert_same_run(whole, run_dir)
