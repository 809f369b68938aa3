"""PPO on two ranks against one process, through the learner's own door."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.errors import NonFiniteError, UserError
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.hybrid.engine import HybridEngine, make_engine
from embodied_rl.learning import sharded_checkpoint
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.objectives import RolloutObjective, divide
from embodied_rl.learning.rank_hosts import TrainWorkerError
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.methods.base import Method
from embodied_rl.policies.actor_critic import ActorCritic
from tests.learning.samples import make_batch, make_policy, parameters, rollout_learner, update
from tests.short_run import train_shortly

pytestmark = pytest.mark.usefixtures("forked")

CONFIG = AlgorithmConfig(num_epochs=2, minibatch_size=64, entropy_coef=0.01, value_clip=0.2, normalize_advantage="minibatch")
ROWS = 203
"""No multiple of anything: ranks and micro-batches differ in size."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sharded(policy: ActorCritic, num_ranks: int, **options: object) -> tuple[Learner, RankExecutor]:
    learner = rollout_learner(policy, CONFIG, sharding=ShardingConfig(num_shards=num_ranks, **options))  # type: ignore[arg-type]
    assert learner.ranks is not None
    return learner, learner.ranks


@pytest.mark.parametrize(("num_parts", "size"), [(1, None), (2, None), (3, 7), (8, 3), (60, 5)])
def test_parts_of_a_minibatch_are_the_minibatch(num_parts: int, size: int | None) -> None:
    weights = np.random.default_rng(0).integers(1, 5, 50)
    parts = divide(weights, num_parts, size)
    assert np.concatenate([part.rows for part in parts]).tolist() == list(range(50))
    assert len({len(part.micro) for part in parts}) == 1
    assert max(len(part.rows) for part in parts) - min(len(part.rows) for part in parts) <= 1
    for part in parts:
        assert [place for places in part.micro for place in places if place >= 0] == list(range(len(part.rows)))
        for places in part.micro:
            # A micro-batch ends with the row that fills it.
            assert size is None or places == [-1] or weights[part.rows[places[:-1]]].sum() < size


def test_two_ranks_train_as_one_process_and_go_on_from_its_state() -> None:
    alone, together = make_policy(), make_policy()
    batch = make_batch(alone, ROWS)
    make_batch(together, ROWS)  # the same statistics
    plain = rollout_learner(alone, CONFIG, allow_fused=False)
    learner, updater = sharded(together, 2, micro_batch_size=10)
    engine = HybridEngine(together, TorchGenerator(together), trained=updater)
    try:
        for iteration in range(2):
            wanted = update(plain, batch, iteration, 5, 0)
            found = update(learner, batch, iteration, 5, 0)
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            before = parameters(together)
            engine.publish(iteration)
            assert any(not torch.equal(before[name], after) for name, after in parameters(together).items())
            for name, parameter in parameters(alone).items():
                torch.testing.assert_close(parameters(together)[name], parameter, rtol=0, atol=1e-5)
            # Statistics belong to the loop; the ranks get them with the next batch.
            for policy in (alone, together):
                policy.update_statistics({"state": 3.0 + torch.ones(40, 11) * torch.arange(40)[:, None]})
        seen = {"state": torch.randn(77, 11, generator=torch.Generator().manual_seed(0))}
        with torch.no_grad():
            np.testing.assert_allclose(learner.values(seen), alone.value(seen), atol=1e-5)
        state = learner.state_tensors()
        assert state.keys() == plain.state_tensors().keys()
        for name, tensor in plain.state_tensors().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-6)
        # Resumed: other weights and moments are taken up exactly.
        other = make_policy(init_log_std=-1.0)
        together.load_state_dict(other.state_dict())
        changed = {name: tensor + 1 for name, tensor in state.items()}
        learner.load_state_tensors(changed)
        assert all(torch.equal(tensor, changed[name]) for name, tensor in learner.state_tensors().items())
        together.load_state_dict(make_policy().state_dict())
        updater.write_back()
        assert all(torch.equal(parameters(other)[name], tensor) for name, tensor in parameters(together).items())
        # What is not finite is said, and not stepped with.
        bad = dataclasses.replace(batch, advantage=torch.where(torch.arange(ROWS) == 7, torch.nan, batch.advantage))
        before = learner.state_tensors()
        with pytest.raises(NonFiniteError, match="nan"):
            update(learner, bad, 0, 5, 0)
        assert update(learner, batch, 0, 5, 0)["grad_norm"] > 0
        assert int(before["step"]) <= int(learner.state_tensors()["step"])
        # A rank that ends is named.
        updater.host.processes[0].kill()  # type: ignore[attr-defined]
        with pytest.raises(TrainWorkerError, match="rank 1 ended with status -9"):
            update(learner, batch, 0, 5, 0)
    finally:
        engine.close()
        engine.close()
    assert all(process.poll() is not None for process in updater.host.processes)  # type: ignore[attr-defined]


def test_one_rank_is_the_plain_learner_and_bfloat16_is_near() -> None:
    uncaught, alone = sys.excepthook, make_policy()
    batch = make_batch(alone, ROWS)
    wanted = update(rollout_learner(alone, CONFIG, allow_fused=False), batch, 0, 5, 0)
    for precision, tolerance in (("float32", 1e-5), ("bfloat16", 0.05)):
        policy = make_policy()
        make_batch(policy, ROWS)
        learner, updater = sharded(policy, 1, precision=precision)
        try:
            found = update(learner, batch, 0, 5, 0)
            updater.write_back()
        finally:
            updater.close()
        assert found["policy_loss"] == pytest.approx(wanted["policy_loss"], rel=tolerance, abs=tolerance)
        assert (found["policy_loss"] == pytest.approx(wanted["policy_loss"], rel=1e-6)) == (precision == "float32")
        for name, parameter in parameters(alone).items():
            torch.testing.assert_close(parameters(policy)[name], parameter, rtol=0, atol=1e-5 if precision == "float32" else 5e-3)
    assert sys.excepthook is uncaught


def test_offloading_to_the_host_changes_nothing_on_a_processor() -> None:
    policies = [make_policy(), make_policy()]
    for policy, offload in zip(policies, (False, True), strict=True):
        batch = make_batch(policy, ROWS)
        hybrid = HybridConfig(num_threads=1, sharding=ShardingConfig(cpu_offload=offload))
        updater = RankExecutor(policy, CONFIG, hybrid, torch.device("cpu"))
        learner = Learner(policy, CONFIG, RolloutObjective(policy, CONFIG), updater, 1)
        try:
            update(learner, batch, 0, 5, 0)
            updater.write_back()
        finally:
            updater.close()
    for name, parameter in parameters(policies[0]).items():
        assert torch.equal(parameters(policies[1])[name], parameter)


def test_the_store_of_the_ranks_is_there_as_long_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's ranks meet in it before their first exchange, which comes after all have joined. A killed run leaves no file of it behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    learner, ranks = sharded(make_policy(), 1)
    try:
        ranks._store.set_timeout(timedelta(seconds=5))
        ranks._store.set("later", "here")
        assert ranks._store.get("later") == b"here"
        assert list(tmp_path.iterdir()) == []
    finally:
        ranks.close()
    assert learner.ranks is ranks


@pytest.mark.gpu
def test_offloading_to_the_host_keeps_what_is_trained_there_and_trains_the_same() -> None:
    policies = [make_policy().cuda(), make_policy().cuda()]
    for policy, offload in zip(policies, (False, True), strict=True):
        batch = make_batch(make_policy(), ROWS)
        learner = rollout_learner(policy, CONFIG, device="cuda", sharding=ShardingConfig(cpu_offload=offload))
        updater = learner.ranks
        assert updater is not None
        try:
            update(learner, batch, 0, 5, 0)
            updater.write_back()
            assert updater.rank is not None
            optimizer = updater.rank.local.optimizers[""]
            held = [*optimizer.parameters.values(), *(part for name, part in optimizer.parts().items() if name != "step")]
            assert {tensor.device.type for tensor in held} == {"cpu" if offload else "cuda"}
        finally:
            updater.close()
    for name, parameter in parameters(policies[0]).items():
        torch.testing.assert_close(parameters(policies[1])[name], parameter, rtol=0, atol=1e-5)


def test_what_cannot_train_on_ranks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()

    config = HybridConfig(device="cpu", sharding=ShardingConfig(num_shards=2))
    with pytest.raises(UserError, match="Method cannot divide its policy"):
        make_engine(config, policy, TorchGenerator(policy), Method(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"hybrid\.sharding has 2 ranks, and this machine 1 GPUs"):
        RankExecutor(policy, CONFIG, config, torch.device("cuda"))
    cut = HybridConfig(device="cpu", sharding=ShardingConfig(num_tensor_shards=2))
    monkeypatch.setattr("subprocess.Popen", None)  # no rank is started that would say it too, with its traceback
    with pytest.raises(UserError, match="ActorCritic has no tensor-parallel plan"):
        RankExecutor(policy, CONFIG, cut, torch.device("cpu"))


def test_a_rank_that_cannot_start_is_said_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever waits for it would wait for longer than a test may take."""
    policy = make_policy()
    monkeypatch.setattr(policy, "state_dict", lambda: {"of another policy": torch.zeros(1)})
    with pytest.raises(TrainWorkerError, match="rank 1 ended with status 1"):
        sharded(policy, 2, start_timeout_s=1e5)
    assert "of another policy" in capfd.readouterr().err


def test_a_rank_that_starts_too_late_is_a_line() -> None:
    with pytest.raises(
        UserError, match=r"rank 1 of training did not start within 0\.001 s: set a longer hybrid\.sharding\.start_timeout_s"
    ):
        sharded(make_policy(), 2, start_timeout_s=1e-3)


def test_a_rank_that_fails_ends_even_if_its_checkpoint_cannot_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after the kill of rank 0, when the exchange that it took part in fails: nobody renames the folder that its thread waits for."""
    finishes = threading.Event()
    monkeypatch.setattr(sharded_checkpoint, "_finish", lambda *_: finishes.wait())
    _, ranks = sharded(make_policy(), 2)
    try:
        ranks.save_parts(tmp_path / "parts")
        ranks.host.tell({"do": "nothing that it knows"})
        assert ranks.host.processes[0].wait(120) == 1  # type: ignore[attr-defined]
        assert "unknown request" in capfd.readouterr().err
    finally:
        finishes.set()
        ranks.close()


def test_a_rank_that_ends_before_its_part_is_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is killed for its memory while it copies its part; the others' parts would be waited for in vain."""
    _, ranks = sharded(make_policy(), 2)
    try:
        monkeypatch.setattr(sharded_checkpoint, "_all_there", lambda *_: False)
        wait = ranks.save_parts(tmp_path / "parts")
        ranks.host.processes[0].kill()  # type: ignore[attr-defined]
        with pytest.raises(TrainWorkerError, match="rank 1 ended with status -9"):
            wait()
        assert list(tmp_path.iterdir()) == []
    finally:
        ranks.close()


def test_a_refused_run_leaves_no_rank_behind(tmp_path: Path) -> None:
    common = ("sim=cartpole", "hybrid=fsdp2", "hybrid.device=cpu", "hybrid.offload=[kv_cache]")
    with pytest.raises(UserError, match="has no cache"):
        train_shortly(tmp_path / "run", *common)
    assert not torch.distributed.is_initialized()
    # That no process is left is looked at when the module ends.


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_run_on_two_ranks_has_the_curve_of_one(tmp_path: Path) -> None:
    common = ("experiment=cartpole", "total_steps=768", "hybrid.device=cpu", "hybrid.num_threads=1", "policy.hidden_sizes=[16,16]")
    train_shortly(tmp_path / "one", *common)
    train_shortly(tmp_path / "two", *common, "hybrid=fsdp2", "hybrid.offload=[parameters,gradients,optimizer,simulators]")
    one, two = (curve(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 3
    for wanted, found in zip(one, two, strict=True):
        names = {name for name in wanted if name.startswith(("train/", "episode/"))}
        assert {"train/policy_loss", "train/grad_norm", "episode/return"} <= names
        assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, rel=1e-4, abs=1e-5)
    assert two[-1]["residency/optimizer_host_bytes"] == 0  # training has just ended: it is there
    assert two[-1]["residency/moved_bytes"] > 0
    assert not any(name.startswith("residency/") for name in one[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(("algorithm=grpo", "algorithm.kl.coef=0.1", "algorithm.entropy_coef=0.01"), marks=pytest.mark.ci_sample),
        ("algorithm=ppo_episodes",),
        ("algorithm=gspo",),
    ],
)
def test_episodes_on_two_ranks_have_the_curve_of_one(tmp_path: Path, algorithm: tuple[str, ...]) -> None:
    common = ("sim=cartpole", *algorithm, "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=1", "total_steps=150")
    common += ("hybrid.device=cpu", "hybrid.num_threads=1", "algorithm.num_epochs=2")
    train_shortly(tmp_path / "one", *common)
    train_shortly(tmp_path / "two", *common, "hybrid=fsdp2", "hybrid.sharding.micro_batch_size=1")
    one, two = (curve(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) > 1
    for wanted, found in zip(one, two, strict=True):
        names = {name for name in wanted if name.startswith(("train/", "episode/"))}
        assert {name: found[name] for name in names} == pytest.approx({name: wanted[name] for name in names}, rel=1e-3, abs=1e-5)


def curve(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/policy_loss" in line]
