"""FSDP2 on two gloo ranks against ordinary training in this process, and checkpoints that change the number of ranks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from embodied_rl.config import PolicyConfig, ShardingConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.learning import fsdp
from embodied_rl.learning.fsdp import parallelize
from embodied_rl.learning.rank_hosts import LOOPBACK, listening_store
from embodied_rl.learning.sharded_checkpoint import load_sharded, read_index, read_whole, save_sharded
from tests.forks import start_forked
from tests.learning.fsdp_rank import CASES, MAX_NORM, MICRO_BATCHES, losses, make, make_folder, train
from tests.learning.samples import make_policy, prepare_optimizer, training_tensors
from tests.policies import test_actor_critic, test_tiny_vla


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def plain(folder: Path, case: str) -> tuple[dict[str, torch.Tensor], list[float], torch.optim.Optimizer, torch.nn.Module]:
    """Ordinary training with torch's own clipping: the independent answer."""
    policy = make(folder, **CASES[case].get("language", {}))
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=1e-5, weight_decay=0.01)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        sum(loss() for loss in losses(policy, 0, 1)).backward()  # type: ignore[union-attr]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)))
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}, norms, optimizer, policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a checkpoint of one process, and what two ranks made of both."""
    folder = tmp_path_factory.mktemp("fsdp")
    make_folder(folder)
    _, _, optimizer, policy = plain(folder, "float32")
    save_sharded(folder / "one_process", training_tensors(policy, optimizer), metadata={"step": 3})
    told = folder / "told.txt"
    where, _store = listening_store(LOOPBACK, 2, 120.0)
    with told.open("wb") as output:
        ranks = [start_forked("tests.learning.fsdp_rank", rank, 2, where, folder, output=output) for rank in range(2)]
    assert [rank.wait(500) for rank in ranks] == [0, 0], told.read_text()[-6000:]
    return folder


@pytest.mark.parametrize("case", ["float32", "recomputed", "lora", "replicated", "tensor"])
def test_two_ranks_are_one(folder: Path, case: str) -> None:
    weights, norms, _, _ = plain(folder, case)
    found = load_file(folder / "results_2.safetensors")
    torch.testing.assert_close(found[f"{case}/norms"], torch.tensor(norms, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert max(norms) > MAX_NORM, "nothing was clipped"
    names = {name.removeprefix(f"{case}/") for name in found if name.startswith(f"{case}/")} - {"norms", "reductions"}
    assert names == weights.keys()
    start = make(folder, **CASES[case].get("language", {})).state_dict()
    moved = {name for name in names if not torch.equal(start[name], weights[name])}
    assert moved == {name for name in names if case != "lora" or ".lora_" in name or name.startswith("value_head")}
    for name in names:
        torch.testing.assert_close(found[f"{case}/{name}"], weights[name], rtol=0, atol=1e-5)


def test_gradients_are_exchanged_once_a_step(folder: Path) -> None:
    sent, parts = load_file(folder / "results_2.safetensors")["float32/reductions"].tolist()
    # Two layers, the value head and the rest; three steps of three micro-batches each.
    assert parts == 4
    assert sent == 3 * parts
    assert len(MICRO_BATCHES) == 3


def test_bfloat16_is_near_and_not_the_same(folder: Path) -> None:
    _, norms, _, _ = plain(folder, "bfloat16")
    found = load_file(folder / "results_2.safetensors")["bfloat16/norms"]
    difference = (found / torch.tensor(norms) - 1).abs()
    assert 1e-6 < float(difference[0]) < 0.03
    stored = load_file(folder / "results_2.safetensors")
    assert {tensor.dtype for name, tensor in stored.items() if name.startswith("bfloat16/model")} == {torch.float32}


# ---- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["float32", "tensor"])
def test_checkpoint_of_two_ranks_is_read_by_one(folder: Path, case: str) -> None:
    _, _, optimizer, policy = plain(folder, case)
    wanted = {name: tensor.clone() for name, tensor in training_tensors(policy, optimizer).items()}
    fresh = make(folder)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    prepare_optimizer(fresh, fresh_optimizer)
    target = training_tensors(fresh, fresh_optimizer)
    assert load_sharded(folder / f"{case}_ranks", target) == {"step": 3}
    assert target.keys() == wanted.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in wanted)
    for name, tensor in target.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-5)
    # Both ranks wrote about half.
    sizes = [entry["bytes"] for entry in read_index(folder / f"{case}_ranks")["files"].values()]
    assert len(sizes) == 2
    if case == "float32":
        assert min(sizes) > 0.4 * sum(sizes)


@pytest.mark.parametrize("case", ["float32", "tensor"])
def test_checkpoint_of_one_process_is_read_by_two_ranks(folder: Path, case: str) -> None:
    found = load_file(folder / "results_2.safetensors")
    _, _, optimizer, policy = plain(folder, "float32")
    for name, tensor in training_tensors(policy, optimizer).items():
        assert torch.equal(found[f"{case} loaded/{name}"], tensor), name


def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(7)}
    path = save_sharded(tmp_path / "saved", tensors).wait()
    target = {"a": torch.zeros(3, 4), "b": torch.tensor(0)}
    load_sharded(path, target)
    assert torch.equal(target["a"], tensors["a"])
    assert target["b"] == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]
    with pytest.raises(IncompatibleCheckpointError, match=r"'a'.*float32 \[3, 4\].*float32 \[4, 3\]"):
        load_sharded(path, {"a": torch.zeros(4, 3)})
    with pytest.raises(IncompatibleCheckpointError, match="no tensor 'c'"):
        load_sharded(path, {"c": torch.zeros(1)})
    file = path / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IncompatibleCheckpointError, match="SHA-256 differs"):
        load_sharded(path, target)
    file.unlink()
    with pytest.raises(IncompatibleCheckpointError, match="is missing"):
        load_sharded(path, target)
    (path / "index.json").write_text("{")
    with pytest.raises(IncompatibleCheckpointError, match="damaged"):
        load_sharded(path, target)
    with pytest.raises(IncompatibleCheckpointError, match=r"index\.json is missing"):
        load_sharded(tmp_path / "nowhere", target)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("tensors", "a", "shape"), [2**40, 3], "needs more bytes than its files have"),
        (("tensors", "a", "shape"), [2, -3], "has no shape, type and parts"),
        (("tensors", "a", "dtype"), "os:system", "has no shape, type and parts"),
        (("tensors", "a", "parts", 0, "file"), "../elsewhere", "a file that is not listed"),
        (("tensors", "a", "parts", 0, "size"), [2], "has no shape, type and parts"),
        (("tensors", "a", "parts"), None, "has a missing or wrong entry"),
        (("files", "rank_00000.safetensors"), {}, "'files' has no checksums"),
    ],
)
def test_an_index_that_cannot_be_is_one_line_before_memory_is_taken(tmp_path: Path, place: Any, value: Any, message: str) -> None:
    path = save_sharded(tmp_path / "saved", {"a": torch.arange(6.0).reshape(2, 3)}).wait()
    index = json.loads((path / "index.json").read_text())
    inner = index
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(IncompatibleCheckpointError, match="SHA-256 differs"):
        read_whole(path)
    del index["sha256"]  # as a forger would, or an older version
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(IncompatibleCheckpointError, match=message) as caught:
        read_whole(path)
    assert "\n" not in str(caught.value)


def test_a_save_replaces_and_one_that_fails_leaves_the_old(tmp_path: Path) -> None:
    save_sharded(tmp_path / "c", {"a": torch.zeros(2)})
    save_sharded(tmp_path / "c", {"a": torch.ones(2)}, asynchronous=True).wait()
    target = {"a": torch.zeros(2)}
    load_sharded(tmp_path / "c", target)
    assert target["a"].tolist() == [1, 1]
    with pytest.raises(TypeError):
        save_sharded(tmp_path / "c", {"a": torch.full((2,), 5.0)}, metadata={"not JSON": object()})
    load_sharded(tmp_path / "c", target)
    assert target["a"].tolist() == [1, 1]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        save_sharded(tmp_path / "file" / "c", {"a": torch.zeros(2)})


# ---- without ranks ------------------------------------------------------------------------------------------------------


def test_norm_and_clipping_are_torchs() -> None:
    policy = make_policy()
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1e3):
        for parameter in policy.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        ours = [p.grad.clone() for p in policy.parameters()]  # type: ignore[union-attr]
        norm = fsdp.clip_gradients(policy.parameters(), 0.5)
        clipped = [p.grad for p in policy.parameters()]
        for parameter, gradient in zip(policy.parameters(), ours, strict=True):
            parameter.grad = gradient
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)), rel=1e-6)
        for parameter, gradient in zip(policy.parameters(), clipped, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_blocks_are_layers_or_sequences(tmp_path: Path) -> None:
    policy = make_policy()
    assert fsdp.blocks_of(policy) == [policy.actor, policy.critic]
    make_folder(tmp_path)
    language = make(tmp_path, lora_rank=2)
    assert fsdp.blocks_of(language) == list(language.base.model.layers)


def test_what_cannot_be_sharded_is_said(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="'scale' has no dimension"):
        fsdp.shard(module, None, ShardingConfig())  # type: ignore[arg-type]
    mesh = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UserError, match="ActorCritic has no tensor-parallel plan"):
        parallelize(make_policy(), mesh)  # type: ignore[arg-type]
    make_folder(tmp_path)
    with pytest.raises(UserError, match=r"q_proj' has LoRA"):
        parallelize(make(tmp_path, lora_rank=2, lora_targets=("q_proj",)), mesh)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"num_tensor_shards=3 does not divide the model's num_attention_heads 2"):
        parallelize(make(tmp_path), SimpleNamespace(size=lambda: 3))  # type: ignore[arg-type]
    for bad in ({"num_shards": 0}, {"micro_batch_size": 0}, {"start_timeout_s": 0.0}):
        with pytest.raises(UserError, match=next(iter(bad))):
            ShardingConfig(**bad)


def test_train_helper_takes_plain_modules(tmp_path: Path) -> None:
    make_folder(tmp_path)
    norms, _ = train(make(tmp_path), 0, 1)
    assert norms == pytest.approx(plain(tmp_path, "float32")[1], rel=1e-5)


def test_a_block_that_no_forward_runs_is_no_obstacle_to_micro_batches() -> None:
    """As the last block of OpenVLA's vision transformers; gradients are those of the module without ranks."""

    class TwoOfThree(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

        def evaluate(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x)).square().sum()

    plain, x = TwoOfThree(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain.evaluate(x).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = ShardingConfig(num_shards=1, precision="bfloat16")
        cut = fsdp.shard(TwoOfThree(), fsdp.make_mesh(config, "cpu"), config)
        fsdp.accumulate(cut, [functools.partial(cut.evaluate, part) for part in x.split(2)])
        found = {name: None if one.grad is None else fsdp.whole(one.grad) for name, one in cut.named_parameters()}
    finally:
        dist.destroy_process_group()
    for name, one in plain.named_parameters():
        if one.grad is None:
            assert found[name] is None or not found[name].any()
        else:
            torch.testing.assert_close(found[name], one.grad, atol=0.3, rtol=0.05, msg=name)


@pytest.mark.parametrize("kind", ["mixed", "tiny_vla"])
def test_our_networks_of_pictures_in_bfloat16_are_near(kind: str) -> None:
    """Pictures, buffers and what stands between the blocks are float32 there."""
    noise = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    if kind == "mixed":
        sim = test_actor_critic.spec(test_actor_critic.BOTH)
        policy: Any = test_actor_critic.make(PolicyConfig(encoder="mixed", hidden_sizes=(8,), normalize_observation=True), sim)
        ready = test_actor_critic.observe(sim, 4)
    else:
        policy = test_tiny_vla.make(state_key="state")
        ready = policy.prepare(test_tiny_vla.observe())
    action = policy.act(ready, noise[:, : policy.noise_width]).action
    wanted = policy.evaluate(ready, action)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = ShardingConfig(num_shards=1, precision="bfloat16")
        found = fsdp.shard(policy, fsdp.make_mesh(config, "cpu"), config).evaluate(ready, action)
        found.log_prob.sum().backward()
    finally:
        dist.destroy_process_group()
    for exact, rough in ((wanted.log_prob, found.log_prob), (wanted.value, found.value)):
        assert rough.dtype == torch.float32
        torch.testing.assert_close(rough, exact, atol=0.2, rtol=0.05)
        assert not torch.equal(rough, exact)
