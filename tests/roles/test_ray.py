"""The roles as actors of a real Ray cluster on this machine: the same curve, actors that are killed, and what can never begin."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import HybridConfig, RayConfig, RayCpusConfig, RewardWorkerConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.generation.torch_tokens import TorchTokens
from embodied_rl.hybrid.weight_sync import RayPublisher, ray_tensors
from embodied_rl.roles.device_lease import DeviceLease, HostPlan
from embodied_rl.roles.multiplexed import MultiplexedTokens
from embodied_rl.roles.ray_cluster import Need, RayCluster, needs_of, why_never
from embodied_rl.roles.ray_watch import ClusterWatch
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.agents.samples import tiny_policy
from tests.forks import run_forked
from tests.methods.test_domain_options import DOOR as DOOR_SIM
from tests.methods.test_domain_options import PLAYERS
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.methods.test_programs import STAYS
from tests.methods.test_programs import small as programs
from tests.methods.test_rollout_domains import ROLLOUTS_OF_DOMAINS
from tests.roles.runs import GROUPS, QUICK, ROLLOUTS, TEXTS, assert_same_run, configured, curve, groups_of, trained
from tests.roles.test_multiplexed import check_a_robots_run

SCORED = "hybrid.reward_worker={target: tests.roles.scores:short_is_good, num_workers: 1}"


def test_a_run_with_ray_is_the_run_without_it_bit_for_bit(tmp_path: Path, session: Any) -> None:
    """With reward workers too: threads here, actors there."""
    task = [*GROUPS, SCORED, "hybrid.reward_worker.num_workers=2", "total_steps=200", "evaluation.every_steps=100"]
    here, there = trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, "hybrid=ray")
    assert_same_run(here, there)
    assert curve(there)[-1]["reward_worker/scored"] > 0


def test_a_robots_run_trains_while_the_other_host_plays(tmp_path: Path, session: Any) -> None:
    check_a_robots_run(tmp_path, "hybrid.cluster=ray", "hybrid.num_threads=1", "total_steps=350")


def test_requests_of_a_turn_reach_each_host_together(tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share a forward pass do not depend on the clock: a host that looks up after each step answers as one that never does."""
    from embodied_rl.roles import ray_roles, token_process
    from embodied_rl.roles.ray_calls import call_named

    def answered(moment_s: float) -> tuple[list[int], list[tuple[int, list[float]]]]:
        monkeypatch.setattr(token_process, "_MOMENT_S", moment_s)
        sent: list[int] = []

        class Here:
            """An actor's calls, in this process."""

            def __init__(self, backend: TorchTokens) -> None:
                self.backend, self.tokens = backend, self

            def remote(self, name: object, what: str, **arguments: Any) -> Any:
                if what == "submit":
                    sent.append(len(arguments["requests"]))
                return session.put(("value", call_named(self.backend, ray_roles._OF_TOKENS, what, **arguments)))

        model = tiny_policy(tmp_path).generation_model()
        hosts = [ray_roles.RayTokens(Here(TorchTokens(model)), ("", ""), False, True, "cpu") for _ in range(2)]
        tokens = MultiplexedTokens(hosts, DeviceLease(HostPlan(2, 1, 2)), 8, lambda version, tensors: None)
        asked = [
            GenerationRequest(request_id=number, prompt_ids=np.arange(3 + number), max_new_tokens=12, seed=number) for number in range(7)
        ]
        for request in asked[:6]:
            tokens.submit([request])
        found = tokens.poll(6)
        tokens.submit(asked[6:])
        tokens.abort([6])
        assert [last.request_id for last in tokens.poll()] == [6], "it was sent before it was aborted"
        return sent, sorted((one.request_id, one.log_prob.tolist()) for one in found)

    often, seldom = answered(0.0), answered(60.0)
    assert often[0][:2] == [3, 3]
    assert often == seldom


@pytest.mark.slow
def test_agent_programs_with_ray(tmp_path: Path, session: Any) -> None:
    """Programs and their proxy are beside the collector, the model that answers is another actor; it learns from what it said."""
    task = ["total_steps=12", "evaluation.num_episodes=3", "hybrid.num_threads=1", "hybrid.device=cpu", "algorithm.groups.filters=[]"]
    with Trainer(programs(tmp_path, *task, "hybrid=ray", program=STAYS), tmp_path, command="test") as trainer:
        method: Any = trainer.method
        before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
        collect, versions = method.collect, []

        def note(iteration: int) -> Any:
            experience = collect(iteration)
            turns = [turn for group in groups_of(experience) for episode in group.episodes for turn in episode.turns]
            versions.append({int(version) for turn in turns for version in turn.version})
            return experience

        method.collect = note
        trainer.run()
        assert versions == [{number} for number in range(trainer.iteration)], "each batch is answered with the newest weights"
        assert trainer.iteration > 1
        after = trainer.policy.state_dict()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["agent/turns_per_program"] >= 1
    assert rows[-1]["train/tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param(ROLLOUTS, id="one"), pytest.param(ROLLOUTS_OF_DOMAINS, id="domains")])
def test_fixed_rollouts_with_ray(tmp_path: Path, session: Any, task: Sequence[str]) -> None:
    task = ["total_steps=384", *task, "evaluation.every_steps=128"]
    assert_same_run(trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, "hybrid=ray", "hybrid.num_threads=1"))


DOOR = ("sim=key_door", *QUICK, "hybrid.num_threads=1", "policy.hidden_sizes=[16]", "algorithm.minibatch_size=64", "total_steps=400")
CLONES = (*DOOR, "algorithm.warm_start={episodes: 4, num_epochs: 2, measured_episodes: 2}")
SEVERAL = (
    *(*COMMON, *DOMAINS[:2], "algorithm.warm_start={episodes: 2, num_epochs: 2, minibatch_rows: 64, measured_episodes: 2}"),
    f"domains.door={{weight: 2, sim: {DOOR_SIM}, policy: {{hidden_sizes: [16], normalize_observation: true}}}}",
    *(f"domains.{name}.algorithm.warm_start.player='embodied_rl.sim.text.{module}:player'" for name, module in PLAYERS),
    *("algorithm.kl.coef=0.1", "total_steps=200", "hybrid.num_threads=1"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        pytest.param((*CLONES, "algorithm=ppo", "algorithm.rollout_steps=32"), id="rollouts"),
        pytest.param((*CLONES, *GROUPS[1:4], "algorithm.kl.coef=0.1"), id="groups"),
        pytest.param(SEVERAL, id="domains"),
    ],
)
def test_a_robots_warm_start_with_ray(tmp_path: Path, session: Any, task: Sequence[str]) -> None:
    """The driver clones, and the actor that trains goes on from there, and compares with it."""
    here, there = trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, "hybrid=ray")
    assert_same_run(here, there)
    assert any(name.startswith("warm_start/") and name.endswith("episodes") for name in curve(there)[0])


@pytest.mark.slow
def test_a_language_agent_with_ray_is_the_one_without_it_bit_for_bit(tmp_path: Path, session: Any) -> None:
    """The warm start comes before the actor that trains keeps its reference, and is in both runs' checkpoints; with reward workers too."""
    task = [*TEXTS, SCORED, "total_steps=250", "evaluation.every_steps=100", "algorithm.kl.coef=0.1"]
    here, there = trained(tmp_path / "here", *task), trained(tmp_path / "ray", *task, "hybrid=ray")
    assert_same_run(here, there)
    rows = curve(there)
    assert rows[0]["warm_start/episodes"] == 8.0
    assert rows[0]["reward_worker/scored"] == 8.0
    assert [row["train/kl"] for row in rows if "train/kl" in row][-1] > 0.0
    states = [load_checkpoint(folder) for folder in (here, there)]
    assert states[0].state["algorithm"] == states[1].state["algorithm"]
    assert states[0].learner.keys() == states[1].learner.keys()


@pytest.mark.slow
@pytest.mark.parametrize("task", [ROLLOUTS, [*TEXTS, "policy.lora_rank=4"]], ids=["rollouts", "texts"])
def test_two_ranks_of_the_actor_that_trains_are_two_ranks_here(tmp_path: Path, session: Any, task: list[str]) -> None:
    """And the run goes on without Ray, on its two ranks, from the actor's checkpoint."""
    task = [*task, "algorithm.warm_start=null", "checkpoint.every_steps=128", "checkpoint.keep_last=9"]
    ranks = "hybrid.sharding={num_shards: 2, micro_batch_size: 4}"
    here = trained(tmp_path / "here", *task, "total_steps=384", ranks)
    assert_same_run(here, trained(tmp_path / "ray", *task, "total_steps=384", "hybrid=ray", "hybrid.num_threads=1", ranks))
    middle = sorted((tmp_path / "ray" / "checkpoints").glob("step_*"))[0]
    assert not (middle / "sharded").exists(), "the actor's state is whole"
    assert (here / "checkpoints" / middle.name / "sharded").is_dir()
    for source, name, where in ((tmp_path / "ray", "back", ranks), (here, "there", "hybrid=ray")):
        moved = tmp_path / name
        shutil.copytree(source / "checkpoints" / middle.name, moved / "checkpoints" / middle.name)
        shutil.copy(source / "metrics.jsonl", moved)
        more = ["hybrid.num_threads=1", ranks] if where == "hybrid=ray" else []
        if (source / "model").is_dir():  # what an adapter belongs to
            shutil.copytree(source / "model", moved / "model")
        train(configured(moved, *task, "total_steps=384", where, *more, "resume=auto"), overrides=[where])
        assert_same_run(here, moved)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "generation"])
def test_a_killed_actor_of_a_language_agent_is_replaced(tmp_path: Path, session: Any, role: str) -> None:
    task = [*TEXTS, "total_steps=400", "algorithm.warm_start=null"]
    whole = trained(tmp_path / "whole", *task)
    config = configured(tmp_path / role, *task, "hybrid=ray")
    (tmp_path / role).mkdir()
    with Trainer(config, tmp_path / role, command="test") as trainer:
        kill_once(trainer, session, role, at=1)
        trainer.run()
        assert trainer.manager.num_restarts == 1
    assert_same_run(whole, tmp_path / role)


@pytest.mark.slow
def test_a_language_agent_with_ray_plays_on_while_training(tmp_path: Path, session: Any) -> None:
    overrides = [*TEXTS, "hybrid=ray", "algorithm.warm_start=null", "algorithm.groups.max_staleness=1", "total_steps=700"]
    config = configured(tmp_path / "run", *overrides)
    (tmp_path / "run").mkdir()
    ages: list[int] = []
    with Trainer(config, tmp_path / "run", command="test") as trainer:
        method: Any = trainer.method
        update = method.update

        def note(experience: Any, **options: Any) -> Any:
            ages.extend(group.age(trainer.iteration) for group in groups_of(experience["experience"]))
            time.sleep(0.5)
            return update(experience, **options)

        method.update = note
        trainer.run()
    assert set(ages) == {0, 1}


def test_weights_through_the_object_store(session: Any) -> None:
    """This process and another read what was published, whole and in order, while the publisher's own tensors change already."""

    class Reader:
        def read(self, references: list[Any]) -> dict[str, torch.Tensor]:
            return dict(ray_tensors(references))

    weights = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "of numpy": torch.from_numpy(np.arange(0)),
        "flags": torch.tensor([True, False]),
    }
    publisher, reader = RayPublisher(bucket_bytes=16), session.remote(Reader).remote()
    first, num_bytes = publisher.publish(weights.items())
    weights["a"] += 100.0
    for read in (dict(ray_tensors(first)), session.get(reader.read.remote(first))):
        assert list(read) == list(weights)
        torch.testing.assert_close(read["a"], torch.tensor([[0.0, 1, 2], [3, 4, 5]]), rtol=0, atol=0)
        for name in ("b", "count", "empty", "flags"):
            assert read[name].dtype == weights[name].dtype
            torch.testing.assert_close(read[name], weights[name], rtol=0, atol=0, equal_nan=True)
    assert num_bytes == 24 + 6 + 8 + 0 + 2
    assert len(first) == 2, "24 bytes do not fit a bucket of 16, and the others together do"
    second, _ = publisher.publish(weights.items())
    assert session.get(reader.read.remote(second))["a"][0, 0] == 100.0


def test_the_end_of_a_rank_that_has_answered_everything_is_noticed(session: Any) -> None:
    """One that writes its part of a checkpoint: rank 0 would wait for the part for ten minutes."""
    from embodied_rl.roles.ray_training import RankWorker, RayLink

    actor = session.remote(num_cpus=0)(RankWorker).remote()
    link = RayLink(actor)
    assert link.failure(240.0) is None
    session.kill(actor)
    deadline = time.monotonic() + 60.0
    while (found := link.failure(0.05)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found[0], "its process has ended"


def test_what_can_never_begin_is_refused_at_once(session: Any) -> None:
    """Ray itself would wait without a word; here, for longer than a test may take."""
    with pytest.raises(UserError, match=r"cannot start.*train 64 CPUs.*the maximum is 4 CPUs"):
        RayCluster(HybridConfig(cluster="ray", ray=RayConfig(cpus=RayCpusConfig(train=64.0), start_timeout_s=1e5)))


def test_an_address_where_nobody_listens_is_said_at_once(tmp_path: Path) -> None:
    """In a process of its own: this one has a cluster."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        wrong = [f"hybrid.ray.address=127.0.0.1:{free.getsockname()[1]}", f"run_dir={tmp_path / 'run'}"]
        done = run_forked("embodied_rl.train", "experiment=cartpole", "hybrid=ray", *wrong, cwd=tmp_path)
    assert done.returncode != 0
    assert "no Ray cluster could be reached there" in done.stderr
    assert "refused" in done.stderr
    assert "ray start --head" in done.stderr


def test_what_others_hold_is_waited_for_and_then_refused(session: Any) -> None:
    patient, impatient = (
        HybridConfig(cluster="ray", ray=RayConfig(cpus=RayCpusConfig(env=3.5, train=0.25), start_timeout_s=seconds)) for seconds in (200, 2)
    )
    holding = RayCluster(patient)
    with pytest.raises(UserError, match=r"not free within 2 s.*other jobs use them"):
        RayCluster(impatient)
    holding.close()
    RayCluster(patient).close()


@pytest.mark.skipif(sys.platform != "linux", reason="clusters are watched on Linux only")
def test_the_watch_of_a_cluster_ends_what_began_with_it_and_nothing_else() -> None:
    watch = ClusterWatch()
    # The second loses its environment, as Ray's agents lose a part of theirs.
    inside = subprocess.Popen(["sh", "-c", "env -i sleep 600 & echo $! && exec sleep 600"], stdout=subprocess.PIPE)
    assert inside.stdout is not None
    unmarked = psutil.Process(int(inside.stdout.readline()))
    deadline = time.monotonic() + 60.0
    while unmarked.name() != "sleep":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch.began()
    outside = subprocess.Popen(["sleep", "600"])
    watch.close()
    watch.close()
    assert (inside.wait(60.0), outside.poll()) == (-signal.SIGKILL, None)
    assert not unmarked.is_running() or unmarked.status() == psutil.STATUS_ZOMBIE
    inside.stdout.close()
    outside.kill()
    outside.wait()


def test_whether_actors_fit_the_nodes() -> None:
    """Against arithmetic by hand."""
    small, large = {"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}
    env, train = Need("env", 3.0, 0.0), Need("train", 1.0, 1.0)
    assert why_never([env, train], [large], "PACK") is None  # 3 + 1 of 4
    assert why_never([env, train], [small, large], "STRICT_SPREAD") is not None  # env fits `large` alone, and so does train
    assert "3 CPUs" in str(why_never([env], [small, small], "PACK"))
    assert why_never([Need("env", 2.0, 0.0)] * 2, [small, small], "PACK") is None
    assert "at the same time" in str(why_never([Need("env", 2.0, 0.0)] * 3, [small, small], "PACK"))
    assert "on one node" in str(why_never([Need("env", 2.0, 0.0)] * 2, [small, small], "STRICT_PACK"))
    # 1.5 + 0.5 and 1.0 + 1.0: a greedy order (1.0 beside 0.5) would leave no room.
    parts = [Need("env", cpus, 0.0) for cpus in (1.0, 0.5, 1.5, 1.0)]
    assert why_never(parts, [small, small], "PACK") is None
    assert why_never([*parts, Need("env", 0.25, 0.0)], [small, small], "PACK") is not None


def test_every_reward_worker_needs_its_share() -> None:
    config = HybridConfig(reward_worker=RewardWorkerConfig("a:b", num_workers=3), ray=RayConfig(cpus=RayCpusConfig(reward=2.0)))
    assert [(need.role, need.cpus) for need in needs_of(config)] == [("env", 1.0), ("generation", 0.25), ("train", 0.5)] + 3 * [
        ("reward", 2.0)
    ]
    with pytest.raises(UserError, match="role train neither"):
        needs_of(HybridConfig(ray=RayConfig(cpus=RayCpusConfig(train=0.0))))


def kill_once(trainer: Trainer, session: Any, role: str, at: int) -> None:
    """Kill the actor of a role while the trainer prepares the update of iteration `at`."""
    method: Any = trainer.method
    prepare = method.prepare

    def kill(experience: Any) -> Any:
        if trainer.iteration == at:
            handle = trainer.manager._handle
            actor = handle.rewards[0] if role == "reward" else getattr(handle, role)
            session.kill(actor, no_restart=role != "reward")
        return prepare(experience)

    method.prepare = kill


@pytest.mark.slow
@pytest.mark.parametrize("role", ["env", "generation", "reward"])
def test_a_killed_actor_is_replaced_and_nothing_is_consumed_twice(tmp_path: Path, session: Any, role: str) -> None:
    task = [*GROUPS, SCORED, "total_steps=300"]
    whole = trained(tmp_path / "whole", *task)
    config = configured(tmp_path / role, *task, "hybrid=ray", SCORED)
    (tmp_path / role).mkdir()
    with Trainer(config, tmp_path / role, command="test") as trainer:
        kill_once(trainer, session, role, at=2)
        trainer.run()
        assert trainer.manager.num_restarts == (0 if role == "reward" else 1), "Ray begins reward workers anew by itself"
    assert_same_run(whole, tmp_path / role)


@pytest.mark.slow
def test_a_killed_train_worker_goes_back_to_the_last_checkpoint(tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodied_rl.roles.ray_training import TrainedApart

    task = [*GROUPS, "total_steps=500", "checkpoint.every_steps=100"]
    whole = trained(tmp_path / "whole", *task)
    update = TrainedApart.update
    killed: list[int] = []

    def kill_once_then_update(self: TrainedApart, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        if iteration == 4 and not killed:
            killed.append(iteration)
            session.kill(self._worker)
        return update(self, prepared, iteration=iteration, steps=steps)

    monkeypatch.setattr(TrainedApart, "update", kill_once_then_update)
    again = trained(tmp_path / "killed", *task, "hybrid=ray")
    assert killed == [4]
    assert_same_run(whole, again)


@pytest.mark.slow
def test_a_train_worker_that_ends_before_the_first_checkpoint_says_how_to_go_on(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embodied_rl.roles.ray_training import TrainedApart

    update = TrainedApart.update

    def kill_then_update(self: TrainedApart, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        session.kill(self._worker)
        return update(self, prepared, iteration=iteration, steps=steps)

    monkeypatch.setattr(TrainedApart, "update", kill_then_update)
    with pytest.raises(UserError, match=r"TrainWorker has ended.*no checkpoint yet.*resume=auto"):
        trained(tmp_path / "run", *GROUPS, "total_steps=300", "hybrid=ray")


@pytest.mark.slow
def test_a_run_that_is_to_end_is_not_begun_anew_when_a_train_worker_ends_too(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embodied_rl.roles.ray_training import TrainedApart

    update = TrainedApart.update

    def lose_all_then_update(self: TrainedApart, prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
        if iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            session.kill(self._worker)
        return update(self, prepared, iteration=iteration, steps=steps)

    monkeypatch.setattr(TrainedApart, "update", lose_all_then_update)
    with pytest.raises(UserError, match=r"TrainWorker has ended.*was stopping.*Continue with"):
        trained(tmp_path / "run", *GROUPS, "total_steps=1000", "checkpoint.every_steps=50", "hybrid=ray")
    assert (tmp_path / "run" / "checkpoints" / "last" / "policy.safetensors").is_file()
