"""What lies where, to the byte, and that training goes on bit for bit after things were moved out and in."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embodied_rl.config import HybridConfig, ShardingConfig
from embodied_rl.config.hybrid import PlacementConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import GenerationRequest, TokenBackend
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.hybrid.engine import HybridEngine, make_engine
from embodied_rl.hybrid.residency import Gradients, Hooks, Residency, Tensors
from embodied_rl.learning.learner import Learner
from embodied_rl.learning.optimizer import Optimizer
from embodied_rl.methods.base import Method
from embodied_rl.trainer import Trainer
from tests.learning.samples import CONFIG, make_batch, make_policy, parameters, rollout_learner, update
from tests.policies.language_models import load, tiny
from tests.roles.runs import GROUPS, configured


class Trains(Method):
    """What the engine asks of a method."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @property
    def all_learners(self) -> list[Learner]:
        return [self._learner]


class Simulators:
    """Counts what `EnvManager` would be asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload(self) -> int:
        self.calls.append("off")
        return 1000

    def onload(self) -> None:
        self.calls.append("on")


def test_memory_usage_counts_bytes_and_tied_weights_once() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(4, 2))
    module[1].weight = module[0].weight
    residency = Residency()
    residency.register("parameters", Tensors(module.parameters))
    assert residency.memory_usage() == {"parameters": {"host": 0, "cpu": 4 * (64 + 8 + 2)}}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    view = module[0].weight[2:4]
    residency.begin("generation")
    # Nothing is left behind: the storage itself is empty.
    assert residency.memory_usage() == {"parameters": {"host": 4 * (64 + 8 + 2), "cpu": 0}}
    assert module[0].weight.untyped_storage().nbytes() == 0
    assert residency.metrics()["residency/moved_bytes"] == 296
    residency.begin("generation")
    assert residency.metrics()["residency/moved_bytes"] == 0
    residency.begin("training")
    assert residency.memory_usage() == {"parameters": {"host": 0, "cpu": 296}}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr()
    assert torch.equal(view, before["0.weight"][2:4])


def test_freed_gradients_do_not_count_as_moved() -> None:
    module, residency = nn.Linear(3, 3), Residency()
    module(torch.ones(3)).sum().backward()
    residency.register("gradients", Gradients(module.parameters))
    assert residency.memory_usage() == {"gradients": {"cpu": 4 * 12}}
    residency.begin("generation")
    assert residency.memory_usage() == {"gradients": {}}
    assert residency.metrics()["residency/moved_bytes"] == 0


def test_nan_and_odd_types_come_back_bit_for_bit() -> None:
    tensors = [torch.tensor([float("nan"), -0.0, 1.0]), torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor(True), torch.empty(0)]
    bits = [tensor.clone().view(-1).view(torch.uint8).tolist() for tensor in tensors]
    resident = Tensors(lambda: tensors)
    assert resident.offload() == 12 + 4 + 1
    assert resident.offload() == 0
    assert resident.onload() == 17
    assert [tensor.view(-1).view(torch.uint8).tolist() for tensor in tensors] == bits


@pytest.mark.parametrize("offload", [(), ("optimizer", "gradients"), ("optimizer", "gradients", "simulators")])
def test_training_goes_on_bit_for_bit(offload: tuple[str, ...]) -> None:
    def run(config: HybridConfig) -> tuple[dict[str, torch.Tensor], HybridEngine, Simulators]:
        policy = make_policy()
        learner, simulators = rollout_learner(policy, CONFIG, allow_fused=False, num_threads=1), Simulators()
        engine = make_engine(config, policy, TorchGenerator(policy), Trains(learner), simulators)
        batch = make_batch(policy)
        engine.publish(0)
        for iteration in range(3):
            with engine.generation():
                usage = engine.residency.memory_usage()
                if iteration and "optimizer" in config.offload:
                    number = sum(p.numel() for p in policy.parameters())
                    steps = len(list(policy.parameters()))
                    # Two float32 moments for each parameter, and a step count for each tensor.
                    assert usage["optimizer"] == {"host": 8 * number + 4 * steps, "cpu": 0}
                    assert usage["gradients"] == {}
            with engine.training():
                update(learner, batch, iteration, 3, 0)
                if "gradients" in config.offload:
                    assert engine.residency.memory_usage()["gradients"] == {"cpu": 4 * sum(p.numel() for p in policy.parameters())}
            engine.publish(iteration + 1)
        engine.close()
        return {**parameters(policy), **learner.state_tensors()}, engine, simulators

    plain, _, _ = run(HybridConfig(device="cpu"))
    moved, engine, simulators = run(HybridConfig(device="cpu", offload=offload))  # type: ignore[arg-type]
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    assert simulators.calls == (["off", "on", "off", "on", "off"] if "simulators" in offload else [])
    assert ("residency/moved_bytes" in engine.metrics()) == bool(offload)


def test_hooks_are_called_in_turn_and_once() -> None:
    calls: list[str] = []
    residency = Residency()
    residency.register("kv_cache", Hooks(lambda: calls.append("off") or 64, lambda: calls.append("on")))  # type: ignore[func-returns-value]
    residency.begin("generation")
    assert calls == []
    residency.begin("training")
    residency.begin("training")
    assert calls == ["off"]
    assert residency.memory_usage() == {"kv_cache": {"host": 64}}
    residency.onload_all()
    residency.onload_all()
    assert calls == ["off", "on"]


class Answering(Generator):
    """Has a backend with a cache."""

    def __init__(self, backend: TokenBackend) -> None:
        self._backend = backend

    @property
    def caches(self) -> tuple[TokenBackend]:
        return (self._backend,)


def test_key_value_cache_is_let_go_and_made_anew(tmp_path: Path) -> None:
    """Answers in flight go on as if nothing had been, and one may be given up meanwhile."""
    backends = pytest.importorskip("embodied_rl.generation.torch_tokens", reason="the extra 'language' is not installed")
    model = load(tiny(tmp_path / "model"))
    asked = [GenerationRequest(request_id=i, prompt_ids=np.arange(3, 9 + i), max_new_tokens=12 + i, seed=i) for i in range(4)]

    def run(config: HybridConfig) -> tuple[dict[int, Any], list[int]]:
        backend = backends.TorchTokens(model, max_batch=3)
        policy = make_policy()
        engine = make_engine(config, policy, Answering(backend), Trains(rollout_learner(policy, CONFIG, num_threads=1)), Simulators())
        backend.submit(asked)
        sizes, found = [], []
        for turn in range(3):
            with engine.generation():
                for _ in range(4):
                    found += backend.poll(timeout_s=0.0)
                sizes.append(backend.cache_bytes)
                keys = weakref.ref(backend._cache.layers[0].keys)
            with engine.training():
                sizes.append(backend.cache_bytes)
                assert (keys() is None) == bool(config.offload), "free at once, without the collector of circles"
                if turn == 1:
                    backend.abort([1])
                if config.offload:  # nothing is sampled without a cache
                    waiting = backend.num_in_flight
                    found += backend.poll(timeout_s=0.0)
                    assert (backend.num_in_flight, backend.cache_bytes) == (waiting, 0)
        with engine.generation():
            found += backend.poll(min_ready=4)
        return {one.request_id: one for one in found}, sizes

    plain, there = run(HybridConfig(device="cpu"))
    moved, sizes = run(HybridConfig(device="cpu", offload=("kv_cache",)))
    # 2 layers of keys and values: 3 rows, 1 head, 128 columns and a spare one, 32 float32 each.
    assert there == [2 * 2 * 3 * 129 * 32 * 4] * 6
    assert sizes == [there[0], 0] * 3
    assert {0, 2, 3} <= moved.keys()
    for number in (0, 2, 3):
        assert moved[number].token_ids.tolist() == plain[number].token_ids.tolist()
        np.testing.assert_allclose(moved[number].log_prob, plain[number].log_prob, atol=1e-5)


def test_memory_that_torch_keeps_is_given_to_hosts_that_act_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    policy = make_policy()
    generator, trains = TorchGenerator(policy), Trains(rollout_learner(policy, CONFIG))
    monkeypatch.setattr(generator, "publish", lambda version: done.append("published"))
    for kind, wanted in (("collocated", ["published"]), ("multiplexed", ["freed", "published"])):
        config = HybridConfig(device="cpu", placement=PlacementConfig(kind=kind))  # type: ignore[arg-type]
        make_engine(config, policy, generator, trains, Simulators()).publish(1)
        assert done == wanted
        done.clear()


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"hybrid\.sharding must be set where hybrid\.offload names parameters"):
        HybridConfig(offload=("parameters",))
    with pytest.raises(UserError, match=r"hybrid\.offload must be without repetition"):
        HybridConfig(offload=("optimizer", "optimizer"))
    with pytest.raises(UserError, match=r"hybrid\.precision must be float32 with hybrid\.sharding"):
        HybridConfig(precision="bfloat16", sharding=ShardingConfig())
    policy = make_policy()
    fused = Trains(rollout_learner(policy))
    with pytest.raises(UserError, match="TorchGenerator has no cache"):
        make_engine(HybridConfig(device="cpu", offload=("kv_cache",)), policy, TorchGenerator(policy), fused, Simulators())
    with pytest.raises(UserError, match="already keeps its optimizer state on the CPU"):
        make_engine(HybridConfig(device="cpu", offload=("optimizer",)), policy, TorchGenerator(policy), fused, Simulators())


@pytest.mark.gpu
def test_gpu_memory_is_given_back_by_the_allocators_own_numbers() -> None:
    def trained() -> tuple[nn.Module, Optimizer]:
        module = nn.Sequential(*[nn.Linear(1024, 1024, device="cuda") for _ in range(8)])
        optimizer = Optimizer(dict(module.named_parameters()), eps=1e-8, max_grad_norm=1.0)
        module(torch.randn(4, 1024, device="cuda")).sum().backward()
        optimizer.step(1e-3)
        return module, optimizer

    trained()  # cuBLAS takes memory of its own from the allocator, once
    gc.collect()
    others = torch.cuda.memory_allocated()
    module, optimizer = trained()
    before = {name: tensor.clone().cpu() for name, tensor in module.state_dict().items()}
    residency = Residency()
    residency.register("parameters", Tensors(module.parameters))
    residency.register("gradients", Gradients(module.parameters))
    residency.register("optimizer", Tensors(optimizer.tensors))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    on_gpu = sum(size for row in residency.memory_usage().values() for place, size in row.items() if place.startswith("cuda"))
    residency.begin("generation")
    torch.cuda.synchronize()
    # The allocator rounds each tensor up to 512 bytes.
    freed = allocated - torch.cuda.memory_allocated()
    assert on_gpu <= freed <= on_gpu + 512 * 80
    assert torch.cuda.memory_allocated() - others < 0.02 * on_gpu
    residency.begin("training")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name])


def test_the_optimizer_of_groups_is_moved(tmp_path: Path) -> None:
    """A method on groups says what it trains, as one on rollouts does; its run is the same."""
    (tmp_path / "run").mkdir()
    config = configured(tmp_path / "run", *GROUPS, "hybrid.offload=[optimizer]", "hybrid.device=cpu", "total_steps=100")
    with Trainer(config, tmp_path / "run", command="test") as trainer:
        assert len(trainer.method.all_learners) == 1
        trainer.run()
        assert "optimizer" in trainer.engine.residency.memory_usage()
