from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.generation.torch_backend import ModuleActor, NumpyGaussianActor, TorchGenerator
from embodied_rl.types import ActionSpec, SimSpec
from tests.learning.samples import SPEC, make_batch, make_policy

DISCRETE = SimSpec("Toy-v0", SPEC.observation, ActionSpec.discrete(4))


@pytest.mark.parametrize(
    ("spec", "policy", "actor"),
    [
        (SPEC, {}, NumpyGaussianActor),
        (SPEC, {"activation": "elu", "normalize_observation": True, "observation_clip": 1.0}, NumpyGaussianActor),
        (SPEC, {"activation": "relu", "hidden_sizes": (9,)}, NumpyGaussianActor),
        (SPEC, {"hidden_sizes": ()}, NumpyGaussianActor),
        (SPEC, {"distribution": "squashed", "normalize_observation": True}, ModuleActor),
        (DISCRETE, {}, ModuleActor),
    ],
)
def test_acts_as_the_policy_does(spec: SimSpec, policy: dict[str, Any], actor: type) -> None:
    actor_critic = make_policy(spec, **policy)
    generator = TorchGenerator(actor_critic)
    assert type(generator._actor) is actor
    observation = make_batch(actor_critic, 8).observation  # moves the statistics too
    with torch.no_grad():
        for parameter in actor_critic.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    generator.publish(3)
    rng = np.random.default_rng(0)
    shape = (8, spec.action.dim)
    noise = rng.random(shape, np.float32) if spec.action.kind == "discrete" else rng.standard_normal(shape, np.float32)
    for given in (noise, None):
        generator.send(np.arange(8), {key: part.numpy() for key, part in observation.items()}, given)
        acted = generator.recv()
        with torch.no_grad():
            expected = actor_critic.act(observation, None if given is None else torch.from_numpy(given))
            evaluated = actor_critic.evaluate(observation, torch.from_numpy(acted.action))
        np.testing.assert_allclose(acted.action, expected.action.numpy(), atol=1e-5)
        np.testing.assert_allclose(acted.log_prob, evaluated.log_prob.numpy(), atol=1e-5)
        assert acted.action.dtype == spec.action.dtype
        assert acted.log_prob.dtype == np.float32
        assert acted.version == 3


def test_answers_in_order_and_reads_before_returning() -> None:
    generator = TorchGenerator(make_policy())
    observation = {"state": np.zeros((1, 11), np.float32)}
    slots = np.array([4])
    generator.send(slots, observation, None)
    observation["state"][:] = 5.0
    slots[:] = 6
    generator.send(slots, observation, None)
    first, second = generator.recv(), generator.recv()
    assert (first.slots.tolist(), second.slots.tolist()) == ([4], [6])
    # All-zero inputs through zero biases: exactly 0.
    assert not first.action.any()
    assert second.action.any()
    with pytest.raises(RuntimeError, match="before any observation was sent"):
        generator.recv()


def test_observations_are_not_changed() -> None:
    policy = make_policy(normalize_observation=True)
    make_batch(policy)
    state = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    generator, before = TorchGenerator(policy), state.copy()
    generator.send(np.arange(3), {"state": state}, None)
    assert np.array_equal(state, before)


def test_random_actions_cover_the_range_evenly() -> None:
    rng, rows = np.random.default_rng(0), 20_000
    generator = RandomGenerator(SPEC)
    generator.publish(2)
    generator.send(np.arange(rows), {}, rng.standard_normal((rows, 3), np.float32))
    acted = generator.recv()
    assert acted.action.dtype == np.float32
    assert acted.version == 2
    # Uniform on [-1, 1]: each tenth of the range holds a tenth, within 5 standard errors (0.0021 each).
    for dim in range(3):
        counts, _ = np.histogram(acted.action[:, dim], bins=10, range=(-1, 1))
        np.testing.assert_allclose(counts / rows, 0.1, atol=0.011)
    np.testing.assert_allclose(acted.log_prob, np.log(0.5), atol=1e-6)


def test_random_choices() -> None:
    generator = RandomGenerator(DISCRETE)
    generator.send(np.arange(5), {}, np.array([[0.0], [0.24], [0.26], [0.5], [0.9999999]], np.float32))
    acted = generator.recv()
    assert acted.action[:, 0].tolist() == [0, 0, 1, 2, 3]
    assert acted.action.dtype == np.int64
    np.testing.assert_allclose(acted.log_prob, np.log(0.25), atol=1e-6)
    generator.send(np.arange(2), {}, None)
    assert generator.recv().action.tolist() == [[0], [0]]
