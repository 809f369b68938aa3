from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from embodied_rl.config import AlgorithmConfig, HybridConfig, ShardingConfig
from embodied_rl.errors import IncompatibleCheckpointError, NonFiniteError
from embodied_rl.learning.devices import compute_threads, repeatable, training_device
from embodied_rl.learning.executors import LocalExecutor
from embodied_rl.learning.fused import Faster, FusedExecutor
from embodied_rl.learning.learner import LEAST_IMAGES, Learner, scheduled, shuffled
from embodied_rl.learning.objectives import RolloutObjective
from embodied_rl.methods.rollout import rollout_values
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import TrainedModule
from embodied_rl.types import ActionSpec, Rollout, SimSpec, TensorSpec
from tests.learning.samples import CONFIG, SPEC, make_batch, make_policy, parameters, rollout_learner
from tests.learning.samples import update as update_on


def update(learner: Learner, iteration: int = 0, rows: int = 300) -> dict[str, float]:
    batch = make_batch(make_policy(learner.policy.spec, **vars(learner.policy.config)), rows)
    return update_on(learner, batch, iteration, 10, 5)


def both(config: AlgorithmConfig, **policy: Any) -> tuple[tuple[ActorCritic, dict[str, float]], tuple[ActorCritic, dict[str, float]]]:
    made = []
    for allow_fused in (True, False):
        actor_critic = make_policy(**policy)
        learner = rollout_learner(actor_critic, config, num_threads=2, allow_fused=allow_fused)
        assert isinstance(learner.executor, FusedExecutor) == allow_fused
        batch = make_batch(actor_critic)
        made.append((actor_critic, update_on(learner, batch, 3, 10, 5)))
    return made[0], made[1]


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        ({}, {}),
        ({"value_clip": 0.2, "dual_clip": 1.2, "entropy_coef": 0.01, "clip_high": 0.3}, {"activation": "elu"}),
        ({"normalize_advantage": "minibatch", "lr_schedule": "linear", "max_grad_norm": 1e9}, {"normalize_observation": True}),
        ({"entropy_coef": 0.05, "clip_low": 0.05}, {"activation": "relu", "hidden_sizes": (24,)}),
        ({}, {"hidden_sizes": ()}),
        ({}, {"hidden_sizes": (128, 16)}),
    ],
)
def test_hand_derived_gradients_equal_autograd(algorithm: dict[str, Any], policy: dict[str, Any]) -> None:
    start = parameters(make_policy(**policy))
    (fused, fused_metrics), (general, metrics) = both(replace(CONFIG, **algorithm), **policy)
    for name, parameter in general.named_parameters():
        assert not torch.equal(parameter, start[name])
        torch.testing.assert_close(dict(fused.named_parameters())[name], parameter, atol=1e-5, rtol=0)
    assert fused_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert fused_metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-4), name


def test_a_horizon_divides_the_policys_loss_in_every_executor() -> None:
    whole = replace(CONFIG, num_epochs=1, minibatch_size=300)
    divided = replace(whole, aggregation="seq-mean-token-sum-norm", horizon=9)
    losses = [update(rollout_learner(make_policy(), config))["policy_loss"] for config in (whole, divided)]
    assert losses[1] == pytest.approx(losses[0] / 9, rel=1e-5)


def test_one_step_is_adam_by_hand() -> None:
    """The first Adam step moves each parameter by lr * g / (|g| + eps), g clipped by its global norm."""
    config = replace(CONFIG, num_epochs=1, minibatch_size=10_000, max_grad_norm=0.1, adam_eps=1e-3, learning_rate=0.01)
    policy = make_policy()
    batch, before = make_batch(policy), parameters(policy)
    objective = RolloutObjective(policy, config)
    loss, _ = objective(policy, *objective.begin(batch, kl_coef=0.0))
    gradients = dict(zip(before, torch.autograd.grad(loss, list(policy.parameters())), strict=True))
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    assert norm > 0.1
    stats = update_on(rollout_learner(policy, config), batch, 0, 1, 0)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, parameter in policy.named_parameters():
        g = gradients[name] * (0.1 / norm)
        torch.testing.assert_close(parameter.detach(), before[name] - 0.01 * g / (g.abs() + 1e-3), atol=2e-6, rtol=0)


@pytest.mark.parametrize("allow_fused", [True, False])
def test_same_seed_same_bits_and_other_iteration_other_order(allow_fused: bool) -> None:
    def train(iteration: int) -> dict[str, torch.Tensor]:
        learner = rollout_learner(make_policy(), CONFIG, allow_fused=allow_fused)
        update(learner, iteration)
        return parameters(learner.policy)

    first, second, other = train(0), train(0), train(1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("allow_fused", [True, False])
def test_resume_is_exact(allow_fused: bool, tmp_path: Path) -> None:
    straight = rollout_learner(make_policy(normalize_observation=True), CONFIG, allow_fused=allow_fused)
    fresh = straight.state_tensors()
    assert int(fresh["step"]) == 0
    update(straight, 0)
    save_file(straight.policy.state_dict(), tmp_path / "policy.safetensors")
    save_file(straight.state_tensors(), tmp_path / "learner.safetensors")
    update(straight, 1)

    torch.manual_seed(99)
    resumed = rollout_learner(make_policy(normalize_observation=True), CONFIG, allow_fused=allow_fused)
    resumed.policy.load_state_dict(load_file(tmp_path / "policy.safetensors"))
    resumed.load_state_tensors(load_file(tmp_path / "learner.safetensors"))
    update(resumed, 1)
    expected, got = straight.policy.state_dict(), resumed.policy.state_dict()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    expected, got = straight.state_tensors(), resumed.state_tensors()
    assert int(got["step"]) == 2 * 4 * 5
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_state_passes_between_implementations() -> None:
    fused, general = (rollout_learner(make_policy(), CONFIG, allow_fused=allow) for allow in (True, False))
    update(fused, 0)
    general.policy.load_state_dict(fused.policy.state_dict())
    general.load_state_tensors(fused.state_tensors())
    for learner in (fused, general):
        update(learner, 1)
    for name, parameter in general.policy.named_parameters():
        torch.testing.assert_close(fused.policy.state_dict()[name], parameter.detach(), atol=1e-5, rtol=0)


def test_foreign_state_is_refused() -> None:
    state = rollout_learner(make_policy(hidden_sizes=(8,)), CONFIG).state_tensors()
    with pytest.raises(IncompatibleCheckpointError, match=r"exp_avg\.actor"):
        rollout_learner(make_policy(), CONFIG).load_state_tensors(state)


@pytest.mark.parametrize("allow_fused", [True, False])
def test_nan_stops_before_the_parameters_are_touched(allow_fused: bool) -> None:
    policy = make_policy()
    learner = rollout_learner(policy, replace(CONFIG, minibatch_size=300), allow_fused=allow_fused)
    batch = make_batch(policy)
    batch.returns[17] = float("nan")
    before = parameters(policy)
    with pytest.raises(NonFiniteError, match="300 rows") as caught:
        update_on(learner, batch, 0, 1, 0)
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.named_parameters())
    arrays = caught.value.batch
    assert arrays is not None
    (place,) = np.flatnonzero(np.isnan(arrays["returns"]))
    assert np.array_equal(arrays["observation.state"][place], batch.observation["state"][17].numpy())
    assert len(arrays["returns"]) == 300


@pytest.mark.parametrize("allow_fused", [True, False])
def test_target_kl_stops(allow_fused: bool) -> None:
    eager = replace(CONFIG, learning_rate=0.02, num_epochs=8)
    free = update(rollout_learner(make_policy(), eager, allow_fused=allow_fused))
    held = update(rollout_learner(make_policy(), replace(eager, target_kl=0.15), allow_fused=allow_fused))
    calm = update(rollout_learner(make_policy(), replace(eager, learning_rate=1e-6, target_kl=0.15), allow_fused=allow_fused))
    assert (free["epochs_done"], calm["epochs_done"]) == (8, 8)
    assert 1 <= held["epochs_done"] < 8
    assert held["approx_kl"] < free["approx_kl"]


@pytest.mark.parametrize("allow_fused", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_values_are_those_of_the_policy(allow_fused: bool, normalize: bool) -> None:
    policy = make_policy(normalize_observation=normalize)
    batch = make_batch(policy, 24)
    state = batch.observation["state"].numpy()
    nothing = np.zeros((6, 3), np.float32)
    rollout = Rollout(
        observation={"state": state[:18].reshape(6, 3, 11), "unread": np.zeros((6, 3, 2), np.float32)},
        action=nothing,
        log_prob=nothing,
        reward=nothing,
        terminated=nothing.astype(bool),
        truncated=nothing.astype(bool),
        last_observation={"state": state[18:21]},
        final_observation={"state": state[21:24]},
        policy_version=np.zeros((6, 3), np.int64),
        episodes=(),
    )
    values = rollout_values(rollout_learner(policy, CONFIG, allow_fused=allow_fused), policy, rollout)
    with torch.no_grad():
        expected = policy.value(batch.observation).numpy()
    assert (values.value.shape, values.last_value.shape, values.final_value.shape) == ((6, 3), (3,), (3,))
    got = np.concatenate([values.value.ravel(), values.last_value, values.final_value])
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        (SPEC, {"distribution": "squashed"}),
        (SimSpec("Toy-v0", SPEC.observation, ActionSpec.discrete(4)), {}),
        (
            SimSpec("Toy-v0", {"rgb": TensorSpec((36, 36, 3), "uint8")}, SPEC.action),
            {"encoder": "cnn", "observation_key": "rgb", "cnn_channels": (4, 4), "cnn_kernels": (8, 4), "cnn_strides": (4, 2)},
        ),
    ],
)
def test_other_policies_learn_what_they_are_rewarded_for(spec: SimSpec, policy: dict[str, Any]) -> None:
    """Positive advantage for some rows, negative for the others: their log-probabilities part, and the value error falls."""
    actor_critic = make_policy(spec, **policy)
    batch = make_batch(actor_critic, 64)
    advantage = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    before = actor_critic.evaluate(batch.observation, batch.action)
    batch = replace(batch, advantage=advantage, log_prob=before.log_prob.detach())
    config = replace(CONFIG, learning_rate=1e-3, num_epochs=20, minibatch_size=32)
    stats = update_on(rollout_learner(actor_critic, config), batch, 0, 1, 0)
    after = actor_critic.evaluate(batch.observation, batch.action)
    gain = (after.log_prob - before.log_prob).sum(-1)
    assert gain[advantage > 0].mean() > gain[advantage < 0].mean() + 0.05
    assert (after.value - batch.returns).pow(2).mean() < (before.value - batch.returns).pow(2).mean()
    assert all(math.isfinite(value) for value in stats.values())


@pytest.mark.parametrize("changes", [{}, {"normalize_advantage": "minibatch", "value_clip": 0.2, "micro_batch_size": 20}])
def test_minibatches_of_images_are_computed_side_by_side(changes: dict[str, Any]) -> None:
    """One part of a minibatch for each thread: up to the order of sums what one thread computes, and the same every time."""
    spec = SimSpec("Toy-v0", {"rgb": TensorSpec((36, 36, 3), "uint8")}, SPEC.action)
    images = {"encoder": "cnn", "observation_key": "rgb", "cnn_channels": (4, 4), "cnn_kernels": (8, 4), "cnn_strides": (4, 2)}
    config = replace(CONFIG, minibatch_size=3 * LEAST_IMAGES, num_epochs=2, **changes)
    batch = make_batch(make_policy(spec, **images), 250)
    found = []
    for num_threads in (1, 3, 3, 16):
        learner = rollout_learner(make_policy(spec, **images), config, num_threads=num_threads)
        assert isinstance(learner.executor, LocalExecutor)
        assert learner.executor.side_by_side == min(num_threads, 3)
        assert learner.compute_threads == (5 if num_threads == 16 else 1)
        metrics = update_on(learner, batch)
        found.append((parameters(learner.policy), metrics))
        learner.executor.close()
    start, ((whole, figures), (three, _), (again, _), _) = parameters(make_policy(spec, **images)), found
    for name, parameter in whole.items():
        assert not torch.equal(parameter, start[name])
        assert torch.equal(three[name], again[name])
        torch.testing.assert_close(three[name], parameter, atol=2e-5, rtol=0)
    assert found[1][1] == found[2][1]
    for name, value in figures.items():
        assert found[1][1][name] == pytest.approx(value, abs=1e-4, rel=1e-3), name


def test_steps_that_a_chunk_did_not_take_are_not_explained() -> None:
    """Returns 1, 2, 3 vary by 2/3 and the errors of values 1, 2, 4 by 2/9: 2/3 are explained. The fourth step does not exist."""
    rows = make_batch(make_policy(), 2).replaced(
        value=torch.tensor([[1.0, 2.0], [4.0, 9.0]]),
        returns=torch.tensor([[1.0, 2.0], [3.0, 0.0]]),
        value_mask=torch.tensor([[True, True], [True, False]]),
    )
    assert RolloutObjective(make_policy(), CONFIG).summary(rows, 1, 1)["explained_variance"] == pytest.approx(2 / 3)


def test_learning_rate_schedules() -> None:
    linear = replace(CONFIG, lr_schedule="linear", learning_rate=0.1)
    assert [scheduled(linear, i / 4) for i in range(6)] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
    assert scheduled(replace(CONFIG, learning_rate=0.1), 0.75) == 0.1


@pytest.mark.parametrize(("rows", "size", "expected"), [(10, 4, [3, 3, 4]), (8, 4, [4, 4]), (9, 8, [4, 5]), (3, 8, [3])])
def test_minibatches_cover_all_rows_evenly(rows: int, size: int, expected: list[int]) -> None:
    generator = np.random.default_rng(0)
    first, second = (shuffled(generator, rows, size) for _ in range(2))
    assert sorted(map(len, first)) == expected
    assert sorted(np.concatenate(first).tolist()) == list(range(rows))
    assert rows < 8 or np.concatenate(first).tolist() != np.concatenate(second).tolist()


def test_moved_parameters_are_tied_again() -> None:
    """Something may replace the tensors that lie in the flat vector; training goes on with their values."""
    straight, moved = rollout_learner(make_policy(), CONFIG), rollout_learner(make_policy(), CONFIG)
    for parameter in moved.policy.parameters():
        parameter.data = parameter.detach().clone()
    for learner in (straight, moved):
        update(learner)
    assert all(torch.equal(a, b) for a, b in zip(straight.policy.parameters(), moved.policy.parameters(), strict=True))


@pytest.mark.parametrize(("hidden_sizes", "num_threads"), [((32, 32), 2), ((515, 515), 4)])
def test_the_critics_own_thread_changes_no_bit(hidden_sizes: tuple[int, ...], num_threads: int) -> None:
    """Nor does what is played with one thread while a wide network is trained with several, however long it takes."""

    def train(second: bool | None, pause_s: float = 0.0) -> dict[str, torch.Tensor]:
        learner = rollout_learner(make_policy(hidden_sizes=hidden_sizes), replace(CONFIG, num_epochs=1), num_threads=num_threads)
        assert isinstance(learner.executor, FusedExecutor)
        assert learner.compute_threads == num_threads // 2

        def play() -> None:
            with compute_threads(1):
                time.sleep(pause_s)

        learner.executor.meanwhile = play
        if second is not None:
            learner.executor._threads.second = second
            learner.executor._threads.took = lambda seconds: None  # type: ignore[method-assign]
        update(learner, 0, 200)
        return parameters(learner.policy)

    alone = train(second=False)
    for other in (train(second=True), train(second=True, pause_s=0.01), train(second=None)):
        assert all(torch.equal(alone[name], other[name]) for name in alone)


@pytest.mark.parametrize("second_s", [0.5, 2.0])
def test_the_faster_of_two_ways_is_kept_and_asked_for_again(second_s: float) -> None:
    ways = Faster(num_tries=3, keep_for=5)
    taken = []
    for number in range(21):
        taken.append(ways.second)
        slow = 100.0 if number in (0, 1, 2) else 0.0  # what is compiled at first, and one that was kept from its core
        ways.took((second_s if ways.second else 1.0) + slow)
    tried, kept = [False, True] * 4, [second_s < 1.0] * 5
    assert taken == [*tried, *kept, *tried]


@pytest.mark.parametrize(
    ("work", "widest", "options", "wanted"),
    [
        ("vectors", 64, {}, "cpu"),
        ("vectors", 1024, {}, "cuda"),
        ("pictures", 64, {}, "cuda"),
        ("large", 64, {}, "cuda"),
        ("vectors", 64, {"device": "cuda"}, "cuda"),
        ("vectors", 64, {"sharding": ShardingConfig()}, "cuda"),
        ("large", 64, {"device": "cpu"}, "cpu"),
    ],
)
def test_a_gpu_is_left_to_others_where_it_would_wait_for_calls(
    work: str, widest: int, options: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    policy = TrainedModule()
    policy.work, policy.layer = work, torch.nn.Linear(1, 1)  # type: ignore[assignment]
    assert training_device(HybridConfig(**options), policy, widest).type == wanted
    assert training_device(HybridConfig(**options), policy, widest, gpu=3).index == (3 if wanted == "cuda" else None), "as roles name it"


def test_the_state_of_a_reference_on_a_gpu_is_on_the_host() -> None:
    """As all of a learner's: with Ray it goes to a process that may have no GPU."""
    with FakeTensorMode():
        policy, there = TrainedModule(), TrainedModule()
        there.weight = torch.nn.Parameter(torch.empty(2, device="cuda"))
        policy.reference = (there,)
        (state,) = policy.reference_state().values()
    assert state.device.type == "cpu"


def test_only_steps_on_a_gpu_ask_for_repeatable_sums() -> None:
    for device, asked in (("cpu", False), ("cuda", True)):
        with repeatable(torch.device(device)):
            assert torch.are_deterministic_algorithms_enabled() is asked
        assert not torch.are_deterministic_algorithms_enabled()


def test_attention_has_its_gradient_in_strict_mode() -> None:
    """torch's kernels for GPUs ignore determinism that only warns (attention_backward.cu); other operations may have no fixed order."""
    strict: dict[str, bool] = {}

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            strict[ctx.name] = not torch.is_deterministic_algorithms_warn_only_enabled()
            return gradient, None

    query = torch.randn(1, 2, 5, 8, requires_grad=True)
    plain, with_cudnn = torch.nn.functional.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
    with repeatable(torch.device("cuda")):
        read = Seen.apply(query, "before")
        found = torch.nn.functional.scaled_dot_product_attention(read, read, read, is_causal=True)
        assert found.grad_fn is not None
        found.grad_fn.register_prehook(lambda gradients: strict.update(attention=not torch.is_deterministic_algorithms_warn_only_enabled()))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        Seen.apply(found, "after").sum().backward()
    assert strict == {"after": False, "attention": True, "before": False}
    assert torch.nn.functional.scaled_dot_product_attention is plain
    assert torch.backends.cuda.cudnn_sdp_enabled() is with_cudnn
    assert not torch.are_deterministic_algorithms_enabled()
