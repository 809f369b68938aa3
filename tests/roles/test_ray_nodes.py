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
from tests.roles.runs import BARE, GROUPS, assert_same_run, configured, curve, trained
from tests.short_run import last_of

pytestmark = pytest.mark.slow
DEADLINE_S = 240.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head of two CPUs; tests add nodes."""
    pytest.importorskip("ray")
    prepare(RayConfig(address="given"))
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **BARE})
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
        with pytest.raises(UserError, match=r"gives to env.*has left"):
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
    command = [sys.executable, "-m", "embodied_rl.train", *last_of(task), "hybrid=ray", f"run_dir={run_dir}"]
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
    gone, left = psutil.wait_procs(below, timeout=DEADLINE_S)
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


DRIVER = """
import sys
from embodied_rl.compose import load_train_config
from embodied_rl.roles.ray_cluster import RayCluster

for _ in range(2):
    connected = RayCluster(load_train_config(["sim=cartpole", *sys.argv[1:]]).hybrid)
    print("connected", flush=True)
    sys.stdin.readline()
    connected.close()
    print("closed", flush=True)
"""


def driver(*overrides: str) -> subprocess.Popen[str]:
    """A process that is connected to a cluster; a line on its standard input makes it let go of it, and connect once more."""
    environment = dict(os.environ)
    # Another's cluster may ask for the token that an earlier test of this process has set.
    if not any(word.startswith("hybrid.ray.address=") for word in overrides):
        environment = {key: value for key, value in environment.items() if not key.startswith("RAY_AUTH")}
    command = [sys.executable, "-c", DRIVER, *overrides]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "connected\n":
        assert line, "it ended"
    return process


@pytest.mark.ci_sample
def test_a_cluster_that_was_started_here_ends_with_its_driver() -> None:
    """A driver that lets go of its cluster, and then is killed with another."""
    pytest.importorskip("ray")
    process = driver("hybrid=ray")
    assert process.stdin is not None
    assert process.stdout is not None
    for killed in (False, True):
        below = psutil.Process(process.pid).children(recursive=True)
        assert {"gcs_server", "raylet"} <= {part.name() for part in below}
        num_agents = sum("Agent" in " ".join(part.cmdline()) for part in below)
        assert num_agents == 2, "what outlives its raylet by a minute: the test means something"
        if killed:
            process.kill()
            process.communicate()
        else:
            process.stdin.write("\n")
            process.stdin.flush()
            assert [process.stdout.readline(), process.stdout.readline()] == ["closed\n", "connected\n"]
        _, left = psutil.wait_procs(below, timeout=45.0)
        assert [" ".join(part.cmdline()) for part in left] == []


def test_a_cluster_of_others_outlives_a_driver_that_is_killed(cluster: Any) -> None:
    servers = [part for part in psutil.Process().children(recursive=True) if part.name() in ("raylet", "gcs_server")]
    assert len(servers) == 2
    agents = [part for part in psutil.Process().children(recursive=True) if "Agent" in " ".join(part.cmdline())]
    process = driver(*on(cluster))
    process.kill()
    process.communicate()
    time.sleep(8.0)  # longer than a cluster of ours would have lived
    assert agents
    assert all(part.is_running() and part.status() != psutil.STATUS_ZOMBIE for part in [*servers, *agents])
