"""Several players as actors of a real Ray cluster: what as many processes play, wherever the actors are and whoever ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.config import HybridConfig, RayConfig, RayCpusConfig, RewardWorkerConfig
from embodied_rl.config.hybrid import ClusterConfig, NodesConfig
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster
from embodied_rl.roles.ray_cluster import needs_of, nodes_of, prepare
from embodied_rl.trainer import Trainer
from tests.roles.runs import GROUPS, TEXTS, assert_same_run, configured, curve, trained

TWO = ["hybrid.players=2", "hybrid.num_threads=1"]
SCORED = "hybrid.reward_worker={target: tests.roles.scores:short_is_good, num_workers: 1}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes for the module; runs find and leave them."""
    pytest.importorskip("ray")
    ray = prepare(RayConfig(address="given"))
    from ray.cluster_utils import Cluster as RayNodes

    made = RayNodes(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    made.add_node(num_cpus=3)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


def node_of(ray: Any, actor: Any) -> str:
    # The public way (ray.util.state) needs the dashboard, which is not there.
    return str(ray._private.state.actors(actor._actor_id.hex())["Address"]["NodeID"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        pytest.param([*GROUPS, SCORED, "hybrid.publish=changed", "total_steps=250", "evaluation.every_steps=100"], id="robot"),
        pytest.param([*TEXTS, "total_steps=250", "evaluation.every_steps=100"], id="texts"),
    ],
)
def test_two_players_of_a_cluster_are_two_processes_bit_for_bit(tmp_path: Path, cluster: Any, task: list[str]) -> None:
    here = trained(tmp_path / "here", *task, "hybrid=disaggregated", *TWO)
    assert_same_run(here, trained(tmp_path / "ray", *task, "hybrid=ray", *TWO))
    assert len(curve(here)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "generation"])
def test_players_are_on_the_nodes_that_are_named_and_one_that_is_killed_costs_nothing_but_time(
    tmp_path: Path, cluster: Any, role: str
) -> None:
    import ray

    task = [*GROUPS, *TWO, "total_steps=250"]
    whole = trained(tmp_path / "whole", *task, "hybrid=disaggregated")
    where = "hybrid.placement={env: [0-1/cpu], generation: [0-1/cpu], train: [0/cpu]}"
    folder = tmp_path / "killed"
    folder.mkdir()
    with Trainer(configured(folder, *task, "hybrid=ray", where), folder, command="test") as trainer:
        manager: Any = trainer.manager
        nodes = [[node_of(ray, actor) for actor in (player.env, player.generation)] for player in manager._handle._workers]
        assert all(env == generation for env, generation in nodes), "what a player asks for does not leave its node"
        assert len({env for env, _ in nodes}) == 2
        method: Any = trainer.method
        prepare_update = method.prepare

        def kill_first(experience: Any) -> Any:
            if trainer.iteration == 1:
                ray.kill(getattr(manager._handle._workers[1], role))
            return prepare_update(experience)

        method.prepare = kill_first
        trainer.run()
        assert manager.num_restarts == 1
    assert_same_run(whole, folder)


def test_what_players_need() -> None:
    """Each as much as one; ranks of training are divided as without them."""
    config = HybridConfig(
        cluster="ray",
        players=3,
        reward_worker=RewardWorkerConfig("a:b", num_workers=2),
        ray=RayConfig(cpus=RayCpusConfig(env=2.0, generation=0.5, train=1.0, reward=0.25)),
    )
    expected = [("env", 2.0)] * 3 + [("generation", 0.5)] * 3 + [("train", 1.0)] + [("reward", 0.25)] * 6
    assert [(need.role, need.cpus) for need in needs_of(config)] == expected


def test_the_nodes_of_players() -> None:
    devices = Cluster(ClusterConfig((NodesConfig(count=2, cores=8, gpus=2),)))
    assert nodes_of(devices.select(["0-1/cpu"]), "env", 4, players=4) == [0, 0, 1, 1]
    assert nodes_of(devices.select(["1/gpu:0-1"]), "generation", 2, players=2) == [1, 1]
    with pytest.raises(UserError, match=r"role env 2 nodes, and there are 3 players.*a multiple of 2"):
        nodes_of(devices.select(["0-1/cpu"]), "env", 3, players=3)


def test_players_of_a_cluster_divide_groups(tmp_path: Path) -> None:
    resolve(configured(tmp_path, *GROUPS, "hybrid=ray", "hybrid.players=2"))
    resolve(configured(tmp_path, "sim=cartpole", "hybrid=ray", "hybrid.players=2"))
    resolve(configured(tmp_path, "experiment=multi_domain", "hybrid=ray", "hybrid.players=2"))
