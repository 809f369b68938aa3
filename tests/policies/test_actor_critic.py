from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import PolicyConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.actor_critic import ActorCritic, MixedTrunk, build_policy
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.short_run import train_shortly

VECTOR = {"state": TensorSpec((5,))}
IMAGE = {"state": TensorSpec((5,)), "rgb": TensorSpec((64, 48, 3), "uint8")}
CONTINUOUS = ActionSpec.continuous([-1.0, -1.0], [1.0, 1.0])


def spec(observation: dict[str, TensorSpec] = VECTOR, action: ActionSpec = CONTINUOUS) -> SimSpec:
    return SimSpec("Toy-v0", observation, action)


def make(config: PolicyConfig, sim: SimSpec) -> ActorCritic:
    torch.manual_seed(0)
    return build_policy(config, sim)


def observe(sim: SimSpec, rows: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    made = {}
    for key, part in sim.observation.items():
        is_image = part.dtype == "uint8"
        made[key] = rng.integers(0, 256, (rows, *part.shape), np.uint8) if is_image else rng.normal(size=(rows, *part.shape)).astype("f4")
    return {key: torch.from_numpy(array) for key, array in made.items()}


CASES: list[tuple[PolicyConfig, SimSpec]] = [
    (PolicyConfig(hidden_sizes=(16, 16)), spec()),
    (PolicyConfig(hidden_sizes=(16,), normalize_observation=True, activation="elu"), spec()),
    (PolicyConfig(hidden_sizes=(), distribution="squashed"), spec()),
    (PolicyConfig(hidden_sizes=(16, 16), activation="relu"), spec(action=ActionSpec.discrete(4))),
    (PolicyConfig(encoder="cnn", observation_key="rgb", hidden_sizes=(32, 16), activation="relu"), spec(IMAGE)),
    (PolicyConfig(encoder="mixed", hidden_sizes=(32, 16), normalize_observation=True), spec(IMAGE)),
]


@pytest.mark.parametrize(("config", "sim"), CASES)
def test_evaluate_reproduces_what_act_said(config: PolicyConfig, sim: SimSpec) -> None:
    policy, observation = make(config, sim), observe(sim, 33)
    # Move away from the start, where all outputs are nearly zero, and give the normaliser something to do.
    with torch.no_grad():
        policy.actor[-1].weight.normal_(0, 0.7, generator=torch.Generator().manual_seed(4))  # type: ignore[operator]
    policy.update_statistics(observation)
    discrete = sim.action.kind == "discrete"
    noise = torch.rand(33, 1) if discrete else torch.randn(33, sim.action.dim)
    with torch.no_grad():
        acted = [policy.act({key: part[i : i + 3] for key, part in observation.items()}, noise[i : i + 3]) for i in range(0, 33, 3)]
    action = torch.cat([output.action for output in acted])
    assert action.dtype == (torch.int64 if discrete else torch.float32)
    evaluation = policy.evaluate(observation, action)
    assert evaluation.log_prob.shape == evaluation.entropy.shape == (33, sim.action.dim)
    assert evaluation.value.shape == (33,)
    torch.testing.assert_close(evaluation.log_prob, torch.cat([output.log_prob for output in acted]), atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluation.value, policy.value(observation), atol=1e-5, rtol=0)
    (evaluation.log_prob.sum() + evaluation.value.sum() + evaluation.entropy.sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in policy.parameters())


def test_weights_start_orthogonal_with_the_right_gains() -> None:
    policy = make(PolicyConfig(hidden_sizes=(8, 8)), spec())
    for network, gain in ((policy.actor, 0.01), (policy.critic, 1.0)):
        layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        for layer, expected in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
            # The singular values of a scaled (semi-)orthogonal matrix all equal the scale.
            values = torch.linalg.svdvals(layer.weight.detach())
            torch.testing.assert_close(values, torch.full_like(values, expected))
            assert not layer.bias.any()


def test_actor_and_critic_share_nothing_for_vectors() -> None:
    policy, observation = make(PolicyConfig(hidden_sizes=(8,)), spec()), observe(spec(), 4)
    policy.value(observation).sum().backward()
    assert all(p.grad is None for p in policy.actor.parameters())


def test_normalisation_follows_update_statistics_alone() -> None:
    policy = make(PolicyConfig(hidden_sizes=(8,), normalize_observation=True, observation_clip=1.5), spec())
    observation = {"state": torch.randn(1000, 5) * 7 + 3}
    policy.train()
    policy.value(observation)
    assert policy.normalizer is not None
    assert policy.normalizer.count.item() == 0
    policy.update_statistics(observation)
    features = policy.features(observation)
    assert features.abs().max() <= 1.5
    rows = observation["state"].double()
    expected = ((rows - rows.mean(0)) / rows.std(0, correction=0)).clamp(-1.5, 1.5)
    torch.testing.assert_close(features.double(), expected, atol=1e-5, rtol=0)


BOTH = {
    **IMAGE,
    "goal": TensorSpec((3,)),
    "rgb_wrist": TensorSpec((40, 40, 3), "uint8"),
    "map": TensorSpec((4, 4)),
}


def test_vectors_and_images_are_read_together() -> None:
    sim = spec(BOTH)
    policy = make(PolicyConfig(encoder="mixed", hidden_sizes=(8, 16), normalize_observation=True), sim)
    assert policy.observation_keys == ("state", "rgb", "goal", "rgb_wrist")
    assert policy.introduction() == "The policy reads state, rgb, goal, rgb_wrist and ignores map."
    observation = observe(sim, 6)
    policy.update_statistics(observe(sim, 300))
    trunk = policy.trunk
    assert isinstance(trunk, MixedTrunk)
    # The vectors, 5 + 3 numbers less their mean over their deviation, then 8 features of each image.
    seen = observe(sim, 300)
    vectors = torch.cat([seen["state"], seen["goal"]], -1).double()
    scaled = (torch.cat([observation["state"], observation["goal"]], -1) - vectors.mean(0)) / vectors.var(0, correction=0).sqrt()
    features = policy.features(observation)
    assert features.shape == (6, 5 + 3 + 8 + 8)
    torch.testing.assert_close(features[:, :8], scaled.clamp(-10, 10).float(), rtol=1e-4, atol=1e-5)
    for place, key in ((8, "rgb"), (16, "rgb_wrist")):
        changed = {**observation, key: 255 - observation[key]}
        differs = (policy.features(changed) != features).any(0)
        assert differs[place : place + 8].any()
        assert not differs[:place].any()
        assert not differs[place + 8 :].any()
    policy.evaluate(observation, torch.zeros(6, 2)).value.sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in policy.named_parameters() if name.startswith(("trunk", "critic"))
    )


def test_keys_of_both_may_be_chosen() -> None:
    policy = make(PolicyConfig(encoder="mixed", observation_keys=("goal", "rgb_wrist"), hidden_sizes=(8,)), spec(BOTH))
    assert policy.observation_keys == ("goal", "rgb_wrist")
    assert policy.features(observe(spec(BOTH), 2)).shape == (2, 3 + 8)


def test_same_seed_same_weights() -> None:
    first, second = (make(PolicyConfig(), spec()).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_do_not_depend_on_the_number_of_threads() -> None:
    before, states = torch.get_num_threads(), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        states.append(make(PolicyConfig(hidden_sizes=(64, 64)), spec()).state_dict())
        assert torch.get_num_threads() == num_threads
    torch.set_num_threads(before)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    ("change", "sim", "message"),
    [
        ({"observation_key": "stat"}, spec(), "Did you mean 'state'"),
        (
            {"observation_key": "rgb", "encoder": "cnn"},
            spec(),
            "Known: state. policy=cnn reads images, which are [H, W, 3] of uint8. Type: policy=mlp",
        ),
        ({"observation_key": "goals"}, spec({"rgb": IMAGE["rgb"]}), "Known: rgb. Type: policy=cnn"),
        ({"observation_key": "top", "encoder": "cnn"}, spec(BOTH), "Type: policy.observation_key=rgb"),
        ({"encoder": "cnn"}, spec(IMAGE), "or an image: rgb"),
        ({"observation_key": "rgb"}, spec(IMAGE), "or a vector: state"),
        ({"observation_key": "rgb", "encoder": "cnn", "normalize_observation": True}, spec(IMAGE), "must be false for policy.encoder=cnn"),
        (
            {"encoder": "mixed", "observation_keys": ("goall",)},
            spec(BOTH),
            "'goall' is no observation of task 'Toy-v0'. Did you mean 'goal'",
        ),
        ({"encoder": "mixed", "observation_keys": ("map",)}, spec(BOTH), "'map' is neither a vector nor an image"),
        ({"encoder": "mixed"}, spec({"map": TensorSpec((4, 4))}), "has none"),
        ({"distribution": "squashed"}, spec(action=ActionSpec.discrete(3)), "3 discrete ones"),
        ({"observation_key": "rgb", "encoder": "cnn"}, spec({"rgb": TensorSpec((20, 20, 3), "uint8")}), "fewer layers"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], sim: SimSpec, message: str) -> None:
    with pytest.raises(UserError) as caught:
        build_policy(replace(PolicyConfig(), **change), sim)
    assert message in str(caught.value)


def test_a_run_reads_both_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = ("sim=custom", "sim.name=points", "sim.target=tests.vla.toys:PointSim", "policy=mixed", "policy.hidden_sizes=[8,8]")
    layers = ("policy.cnn_channels=[4]", "policy.cnn_kernels=[4]", "policy.cnn_strides=[2]")
    short = (
        *layers,
        "algorithm.rollout_steps=8",
        "algorithm.minibatch_size=16",
        "total_steps=32",
        "logger=default",
        "logger.names=[console,jsonl]",
    )
    run = train_shortly(tmp_path / "run", *points, *short)
    assert "The policy reads state, rgb" in capsys.readouterr().out
    tensors = load_checkpoint(run).policy
    assert {name.split(".")[0] for name in tensors} >= {"trunk", "actor", "critic"}
    assert tensors["trunk.normalizer.count"] == 32
