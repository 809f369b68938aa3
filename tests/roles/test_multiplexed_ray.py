"""Hosts that are actors of a real Ray cluster, lent to training and taken back: what they reserve, and the runs of hosts without Ray.

What every change must pass of them in a cluster is in tests/roles/test_ray.py, which starts one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import HybridConfig, RayConfig, RayCpusConfig, RayGpusConfig, ShardingConfig
from embodied_rl.config.hybrid import PlacementConfig
from embodied_rl.generation.torch_backend import ModuleActor
from embodied_rl.learning.devices import compute_threads
from embodied_rl.methods import training_sim
from embodied_rl.roles.ray_cluster import RayCluster, bundles_of, needs_of, prepare
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from tests.golden.runs import RUNS
from tests.roles.runs import ROLLOUTS, assert_same_run, configured, curve, trained
from tests.roles.test_multiplexed import SHARED, run_texts

ON_RAY = ["hybrid.cluster=ray", "hybrid.num_threads=1"]


def reserved(hybrid: HybridConfig) -> list[tuple[list[str], float, float]]:
    """(roles of its actors, CPUs, GPUs) of each bundle."""
    needs = needs_of(hybrid)
    return [([needs[place].role for place in bundle.actors], bundle.whole.cpus, bundle.whole.gpus) for bundle in bundles_of(hybrid, needs)]


def test_a_host_that_is_lent_shares_its_place_with_a_rank() -> None:
    """By hand arithmetic: each host has a whole GPU, of which a rank's half is kept free where it is not lent."""
    ray = RayConfig(cpus=RayCpusConfig(env=2.0, generation=0.5, train=1.0), gpus=RayGpusConfig(generation=0.5, train=1.0))
    shared = PlacementConfig(kind="multiplexed", num_hosts=4)
    found = reserved(HybridConfig(placement=shared, cluster="ray", ray=ray, sharding=ShardingConfig(num_shards=2)))
    assert found == [
        (["env"], 2.0, 0.0),
        (["generation", "train"], 1.0, 1.0),
        (["generation", "train"], 1.0, 1.0),
        (["generation"], 0.5, 1.0),
        (["generation"], 0.5, 1.0),
    ]
    # On processors: two hosts, the first of which is lent, to all three ranks; all fit two cores.
    three = HybridConfig(placement=PlacementConfig(kind="multiplexed"), cluster="ray", sharding=ShardingConfig(num_shards=3))
    (_, env, _), (roles, cpus, _), (_, stays, _) = reserved(three)
    assert roles == ["generation", "train", "train", "train"]
    assert (env, round(cpus, 3), stays) == (1.0, 0.75, 0.25)
    assert [roles for roles, *_ in reserved(HybridConfig(cluster="ray"))] == [["env"], ["generation"], ["train"]]


@pytest.fixture
def three_gpus() -> Iterator[str]:
    """The address of a cluster that says it has three, which no actor looks for: all compute on the processor."""
    pytest.importorskip("ray")
    prepare(RayConfig(address="given"))
    import ray
    from ray.cluster_utils import Cluster

    nodes: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 3, "include_dashboard": False})
    yield str(nodes.address)
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.slow
def test_who_shares_a_gpu(three_gpus: str) -> None:
    """As Ray gives them out."""
    import ray

    config = RayConfig(address=three_gpus, gpus=RayGpusConfig(generation=0.5, train=1.0))
    hybrid = HybridConfig(placement=PlacementConfig(kind="multiplexed"), cluster="ray", ray=config, sharding=ShardingConfig(num_shards=2))

    class Looks:
        def gpus(self) -> list[str]:
            return [str(gpu) for gpu in ray.get_gpu_ids()]

    cluster = RayCluster(hybrid)
    asked = [("generation", 0), ("generation", 1), ("generation", 2), ("train", 0), ("train", 1)]
    actors = [ray.remote(Looks).options(**cluster.options(*one)).remote() for one in asked]
    found = ray.get([actor.gpus.remote() for actor in actors])
    assert sorted(found[:3]) == [["0"], ["1"], ["2"]]
    assert found[3:] == found[:2], "each rank has the GPU of a host that is lent"
    cluster.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*take turns")
def test_a_policy_that_sees_acts_on_each_host(tmp_path: Path, three_gpus: str) -> None:
    """In turns the run of one policy, but for the last bits: parts of a batch are products of their own. Ahead, hosts are lent."""
    words = [*(word for word in RUNS["ppo_cnn"] if not word.startswith("total_steps")), SHARED, "sim.num_workers=2", "hybrid.num_threads=1"]
    on_ray = ["hybrid.cluster=ray", f"hybrid.ray.address={three_gpus}", "hybrid.ray.gpus={generation: 0.5, train: 0.5}"]
    trained(tmp_path / "here", *words, "total_steps=64")
    trained(tmp_path / "ray", *words, "total_steps=64", *on_ray)
    one, several = (load_checkpoint(tmp_path / name).policy for name in ("here", "ray"))
    for key, weight in one.items():
        np.testing.assert_allclose(several[key], weight, atol=1e-4)
    row = curve(trained(tmp_path / "ahead", *words, *on_ray, "algorithm.max_staleness=1", "total_steps=320"))[-1]
    assert row["rollout/age_max"] == 1
    lent = json.loads((tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()[-1])
    assert lent["multiplex/shrinks"] > 2


def test_a_host_that_is_lent_has_no_copy_until_it_is_back(tmp_path: Path) -> None:
    """What an actor does, in this process: afterwards it acts with the weights that came meanwhile."""
    pytest.importorskip("ray")
    from embodied_rl.roles.ray_roles import GenerationWorker

    words = [*RUNS["ppo_cnn"], SHARED, "hybrid.cluster=ray", "hybrid.ray.gpus={generation: 0.5, train: 0.5}"]
    config = configured(tmp_path, *words)
    with EnvManager.from_config(training_sim(config), EpisodeSeeds.training(0), num_slots=2) as manager:
        spec, seen = manager.spec, {key: part.copy() for key, part in manager.reset().observation.items()}
    with compute_threads(1):  # what follows sets them for good
        worker = GenerationWorker(config)
        assert worker.begin("", "", spec.to_dict())[0] == "value"
        own: Any = worker._acting.policies[""]
        (_, before), state = worker.act("", np.arange(2), seen, None), own.policy.state_dict()
        assert worker.lease("lend")[0] == "value"
        assert not own._hosted[1].modules
        worker._acting.load(1, [(name, part * 1.5 if part.is_floating_point() else part) for name, part in state.items()])
        assert not own._hosted[1].modules
        assert worker.lease("take_back")[0] == "value"
        _, after = worker.act("", np.arange(2), seen, None)
    assert (len(own._hosted[1].modules), before.version, after.version) == (1, 0, 1)
    np.testing.assert_array_equal(after.action, ModuleActor(own.policy).act(seen, None)[0])
    assert not np.array_equal(after.log_prob, before.log_prob)


@pytest.mark.slow
def test_an_agents_run_trains_while_the_other_host_answers(tmp_path: Path, session: Any) -> None:
    """Answers move between the actors, and no token is lost; nor is a group with an actor that is killed."""
    episodes, trainer = run_texts(tmp_path, *ON_RAY, kill=lambda manager: session.kill(manager._handle.hosts[0]))
    assert trainer.manager.num_restarts == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] > 0
    assert sum(row["multiplex/overlap_s"] for row in rows) > 0, "nobody answered while training"
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(len(turn.version) == len(turn.token_ids) == len(turn.log_prob) for turn in turns)
    assert all(abs(row["train/log_prob_difference"]) < 0.2 for row in rows if "train/log_prob_difference" in row)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*take turns")
def test_rollouts_in_turns_are_those_of_hosts_without_ray(tmp_path: Path, session: Any) -> None:
    """Bit for bit, and so they go on from a checkpoint within episodes."""
    within = ["checkpoint.within_episodes=true", "checkpoint.every_steps=128", "checkpoint.keep_last=9", "total_steps=384", SHARED]
    trained(tmp_path / "here", *ROLLOUTS, *within)
    trained(tmp_path / "ray", *ROLLOUTS, *within, *ON_RAY)
    middle = tmp_path / "resumed" / "checkpoints" / "step_000000128"
    shutil.copytree(tmp_path / "ray" / "checkpoints" / middle.name, middle)
    trained(tmp_path / "resumed", *ROLLOUTS, *within, *ON_RAY, "resume=auto")
    assert_same_run(tmp_path / "here", tmp_path / "ray")
    first, second = (load_checkpoint(tmp_path / name).policy for name in ("here", "resumed"))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
