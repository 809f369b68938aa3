"""The small vision-language-action model: acting and evaluating agree, what is read and what is not, and bad input has its line."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import TinyVLAConfig
from embodied_rl.errors import UserError
from embodied_rl.policies.base import given_action, prepare_observation
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.tiny_vla import TinyVLAPolicy, _Layer, shifted, word_ids
from embodied_rl.types import ActionLayout, ActionSpec, SimSpec, TensorSpec, VariableSpec

SPEC = SimSpec(
    task="Toy-v0",
    observation={"rgb": TensorSpec((32, 24, 3), "uint8"), "state": TensorSpec((5,)), "instruction": VariableSpec("text")},
    action=ActionSpec.continuous([-1.0, 0.0], [1.0, 10.0]),
)
SMALL = TinyVLAConfig(chunk=3, width=16, num_heads=2, num_layers=2, conv_channels=(4, 8), num_keypoints=3, num_bins=9)


def make(spec: SimSpec = SPEC, **changes: Any) -> TinyVLAPolicy:
    torch.manual_seed(0)
    policy = build_policy(dataclasses.replace(SMALL, **changes), spec)
    assert isinstance(policy, TinyVLAPolicy)
    with torch.no_grad():
        policy.action_head.weight.mul_(50.0)  # so that the choices differ in probability
    return policy


def observe(rows: int = 4, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "rgb": rng.integers(0, 256, (rows, 32, 24, 3), dtype=np.uint8),
        "state": rng.normal(size=(rows, 5)).astype(np.float32),
        "instruction": np.array(["reach the red disc", "push the block", "reach the blue disc", "go"][:rows], dtype=object),
    }


@pytest.mark.parametrize("changes", [{}, {"decoding": "autoregressive"}, {"state_key": "state", "temperature": 1.6}, {"value": "action"}])
def test_evaluate_reproduces_what_act_said(changes: dict[str, Any]) -> None:
    policy, noise = make(**changes), torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    ready = policy.prepare(observe())
    for given in (noise, None):
        acted = policy.act(ready, given)
        assert acted.action.shape == acted.log_prob.shape == (4, 6)
        again = policy.evaluate(ready, acted.action)
        torch.testing.assert_close(again.log_prob.detach(), acted.log_prob, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.value, policy.value(ready))
        assert again.value.shape == ((4, 3) if changes.get("value") == "action" else (4,))
    assert not torch.equal(policy.act(ready, noise).action, policy.act(ready, None).action)


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_a_chunks_probabilities_sum_to_one(decoding: str) -> None:
    policy = make(decoding=decoding, chunk=1, num_bins=5)
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    one = {key: part[:1].expand(25, *part.shape[1:]) for key, part in policy.prepare(observe()).items()}
    with torch.no_grad():
        total = policy.evaluate(one, every).log_prob.sum(-1).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-5)


def test_later_tokens_depend_on_earlier_ones_only_where_they_are_told() -> None:
    for decoding, depends in (("autoregressive", True), ("parallel", False)):
        policy = make(decoding=decoding)
        ready = policy.prepare(observe())
        tokens = torch.zeros(4, 6, dtype=torch.int64)
        changed = tokens.clone()
        changed[:, 2] = 7
        with torch.no_grad():
            first, second = (policy.evaluate(ready, each).log_prob for each in (tokens, changed))
        assert torch.equal(first[:, :2], second[:, :2]), "nothing is known of what comes later"
        assert bool((first[:, 3:] - second[:, 3:]).abs().max() > 1e-6) == depends


def test_the_words_decide_and_their_padding_does_not() -> None:
    policy, seen = make(), observe()
    seen["rgb"][:] = seen["rgb"][:1]
    with torch.no_grad():
        log_prob = policy.evaluate(policy.prepare(seen), torch.zeros(4, 6, dtype=torch.int64)).log_prob
        assert len(torch.unique(log_prob[:, 0])) == 4
        longer = make(max_words=30)
        longer.load_state_dict(policy.state_dict() | {"encoder.word_places": longer.encoder.word_places.clone()})
        longer.encoder.word_places[:16] = policy.encoder.word_places
        same = longer.evaluate(longer.prepare(seen), torch.zeros(4, 6, dtype=torch.int64)).log_prob
    torch.testing.assert_close(same, log_prob, atol=1e-5, rtol=0)


def test_actions_reach_the_simulator_in_its_units() -> None:
    policy = make()
    # Nine edges make eight intervals of 1/4; token 8 - i is interval i, whose center is -7/8 + i/4.
    tokens = np.array([[8, 8, 4, 4, 1, 1]])
    np.testing.assert_allclose(policy.simulator_action(tokens), [[[-0.875, 0.625], [0.125, 5.625], [0.875, 9.375]]], atol=1e-6)
    assert given_action(policy, tokens).shape == (1, 3, 2)
    assert given_action(make(chunk=1), tokens[:, :2]).shape == (1, 2), "a chunk of one step is a step"
    assert policy.action_layout == ActionLayout(width=6, dtype="int64", num_units=6, noise_width=6, noise_kind="uniform", chunk_size=3)


def test_cloning_loss_is_the_cross_entropy_of_the_tokens_that_exist() -> None:
    policy, ready = make(), None
    ready = policy.prepare(observe(2))
    action = torch.tensor([[[-0.9, 0.6], [0.1, 0.1], [0.9, -0.4]]] * 2)
    tokens = torch.from_numpy(policy.action_tokens.encode(action.numpy())).flatten(1)
    with torch.no_grad():
        expected = -policy.evaluate(ready, tokens).log_prob
        torch.testing.assert_close(policy.cloning_loss(ready, action), expected.mean(-1))
        mask = torch.tensor([[True, True, False], [True, False, False]])
        action[~mask] = float("nan")
        masked = policy.cloning_loss(ready, torch.nan_to_num(action), mask)
        torch.testing.assert_close(masked, torch.stack([expected[0, :4].mean(), expected[1, :2].mean()]))


def test_the_values_loss_leaves_the_actions_alone_unless_asked() -> None:
    for asked in (False, True):
        policy = make(value_gradient=asked)
        policy.value(policy.prepare(observe())).sum().backward()
        touched = {policy.role_of(name) for name, p in policy.named_parameters() if p.grad is not None and bool(p.grad.abs().max() > 0)}
        assert touched == ({"value", "backbone"} if asked else {"value"})


def test_gradients_are_the_same_when_layers_are_computed_again() -> None:
    tokens, gradients = torch.zeros(4, 6, dtype=torch.int64), []
    for again in (False, True):
        policy = make(gradient_checkpointing=again)
        policy.evaluate(policy.prepare(observe()), tokens).log_prob.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_words_are_rows_of_the_embedding() -> None:
    ids = word_ids("Push the block, to the LEFT!", 1024, 16)
    assert ids[1] == ids[4]
    assert ids == word_ids("push the block to the left", 1024, 16)
    assert all(0 < row < 1024 for row in ids)
    assert word_ids("a b c", 1024, 2) == word_ids("a b", 1024, 16)
    known = ["move", "the", "tip", "onto", "red", "green", "blue", "disc", "push", "block", "to", "left", "right"]
    assert len({word_ids(word, 1024, 1)[0] for word in known}) == len(set(known)), "the words of PixelTasks are told apart"


def test_prepared_once_is_prepared_for_good() -> None:
    policy = make(state_key="state")
    ready = prepare_observation(policy, observe())
    assert {key: part.dtype for key, part in ready.items()} == {"image": torch.uint8, "words": torch.int64, "state": torch.float32}
    assert policy.observation_keys == ("rgb", "state", "instruction")
    assert torch.equal(policy.act(observe(), None).action, policy.act(ready, None).action)


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"image_key": "state"}, SPEC, r"policy\.image_key='state': task 'Toy-v0' shows no image 'state'.* Known: rgb"),
        ({}, dataclasses.replace(SPEC, observation={"state": TensorSpec((5,))}, instruction="go"), r"shows no image at all"),
        ({"state_key": "stat"}, SPEC, r"policy\.state_key='stat' is not a vector .*Did you mean 'state'"),
        ({}, dataclasses.replace(SPEC, action=ActionSpec.discrete(3)), r"takes discrete actions; .* use policy=mlp"),
        ({}, dataclasses.replace(SPEC, observation={"rgb": SPEC.observation["rgb"]}), r"gives no instruction.* set policy\.instruction"),
        ({"conv_channels": (4, 4, 4, 4, 4)}, SPEC, r"has too many layers for an image of 32x24 pixels"),
    ],
)
def test_what_does_not_fit_is_one_line(changes: dict[str, Any], spec: SimSpec, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make(spec, **changes)
    assert "\n" not in str(error.value)


def test_an_empty_instruction_is_refused() -> None:
    seen = observe()
    seen["instruction"][2] = "  ?"
    with pytest.raises(UserError, match="The instruction is empty"):
        make().prepare(seen)
    with pytest.raises(UserError, match=r"policy\.instruction must be null or words"):
        dataclasses.replace(SMALL, instruction=" ")


def test_images_are_moved_at_random_only_while_the_policy_is_cloned() -> None:
    torch.manual_seed(0)
    image = torch.arange(5 * 7 * 3, dtype=torch.uint8).reshape(1, 5, 7, 3).expand(200, -1, -1, -1)
    noise = make(cloning_shift=1).cloning_noise(200)
    assert noise is not None
    moved = shifted(image, noise)
    away = [int(row[2, 3, 0]) - int(image[0, 2, 3, 0]) for row in moved]
    assert away == [3 * (7 * down + right) for down, right in noise.tolist()]
    assert set(away) == {3 * (7 * down + right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    corner = shifted(torch.eye(6, dtype=torch.uint8)[None, :, :, None].expand(50, -1, -1, 3), 6 * noise[:50])
    assert corner.shape == (50, 6, 6, 3)
    policy = make(cloning_shift=3)
    ready = policy.prepare(observe(2))
    action = torch.zeros(2, 3, 2)
    with torch.no_grad():
        first, second = (policy.cloning_loss(ready, action, noise=policy.cloning_noise(2)) for _ in range(2))
        assert not torch.equal(first, second)
        policy.eval()
        assert policy.cloning_noise(2) is None
        assert torch.equal(
            policy.evaluate(ready, torch.zeros(2, 6, dtype=torch.int64)).log_prob,
            make().evaluate(ready, torch.zeros(2, 6, dtype=torch.int64)).log_prob,
        )


def test_queries_read_a_memory_as_attention_to_its_keys_and_values() -> None:
    torch.manual_seed(0)
    layer = _Layer(12, 4).double()
    queries = torch.randn(3, 5, 12, dtype=torch.double, requires_grad=True)
    memory = torch.randn(3, 7, 12, dtype=torch.double, requires_grad=True)
    there = torch.arange(7) < torch.tensor([[7], [4], [1]])
    gradients = []
    for remembered in (None, layer.remember(memory)):
        layer(queries, memory, there, False, remembered).sin().sum().backward()
        tensors = (queries, memory, *layer.parameters())
        gradients.append([tensor.grad.clone() for tensor in tensors if tensor.grad is not None])
        assert len(gradients[-1]) == len(tensors)
        for tensor in tensors:
            tensor.grad = None
    for absorbed, direct in zip(*gradients, strict=True):
        torch.testing.assert_close(absorbed, direct, rtol=1e-10, atol=1e-12)
