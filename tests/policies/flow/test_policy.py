from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from embodied_rl.errors import UserError
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.flow.policy import FlowOptions, FlowPolicy, FlowPolicyConfig, Record, RecordLayout, build_flow
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

METHODS = ("flow_sde", "flow_noise", "dppo")
SPEC = SimSpec("Toy-v0", {"state": TensorSpec((5,)), "rgb": TensorSpec((32, 32, 3), "uint8")}, ActionSpec.continuous([-1.0] * 3, [1.0] * 3))
SMALL = FlowPolicyConfig(chunk=2, hidden_sizes=(32, 32))


def make(method: Any, config: FlowPolicyConfig = SMALL, **changes: Any) -> FlowPolicy:
    """A policy with weights far from the start, where all velocities are nearly zero."""
    torch.manual_seed(0)
    policy = build_flow(replace(config, method=method, **changes), SPEC)
    with torch.no_grad():
        policy.model.layers[-1].weight.normal_(0, 0.4)
        if policy.noise_net is not None:
            policy.noise_net.output.weight.normal_(0, 0.3)
    return policy


def observe(rows: int, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "state": torch.randn(rows, 5, generator=generator),
        "rgb": torch.randint(0, 256, (rows, 32, 32, 3), dtype=torch.uint8, generator=generator),
    }


def noise_for(policy: FlowPolicy, rows: int, seed: int = 2) -> Tensor:
    return torch.randn(rows, policy.noise_width, generator=torch.Generator().manual_seed(seed))


CONFIGS = (SMALL, replace(SMALL, image_key="rgb", image_features=16), replace(SMALL, state_key=None, image_key="rgb", image_features=16))


@pytest.mark.parametrize("config", CONFIGS, ids=["state", "both", "image"])
@pytest.mark.parametrize("method", METHODS)
def test_evaluate_reproduces_what_act_said(method: str, config: FlowPolicyConfig) -> None:
    policy, observation = make(method, config), observe(12)
    policy.update_statistics(observation)
    noise = noise_for(policy, 12)
    outputs = [policy.act({key: part[i : i + 3] for key, part in observation.items()}, noise[i : i + 3]) for i in range(0, 12, 3)]
    action, log_prob = torch.cat([o.action for o in outputs]), torch.cat([o.log_prob for o in outputs])
    evaluation = policy.evaluate(observation, action)
    assert evaluation.log_prob.shape == evaluation.entropy.shape == (12, policy.num_units)
    torch.testing.assert_close(evaluation.log_prob, log_prob, atol=2e-4, rtol=0)
    torch.testing.assert_close(evaluation.value, torch.cat([o.value for o in outputs if o.value is not None]), atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluation.value, policy.value(observation), atol=1e-5, rtol=0)
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in policy.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_the_mode_is_evaluated_as_it_was_said(method: str) -> None:
    policy, observation = make(method), observe(4)
    first, second = (policy.act(observation, None) for _ in range(2))
    assert torch.equal(first.action, second.action)
    torch.testing.assert_close(policy.evaluate(observation, first.action).log_prob, first.log_prob, atol=2e-4, rtol=0)
    # By hand: five Euler steps from the fixed draw.
    context = policy.model.context(observation)
    x = policy.initial_noise.expand(4, -1, -1)
    with torch.no_grad():
        for step in range(5):
            x = x - policy.model.velocity(context, x, torch.full((4,), 1 - step / 5)) / 5
    np.testing.assert_allclose(policy.simulator_action(first.action), x.numpy(), atol=1e-5)


def test_learned_noise_is_the_joint_density_of_the_chain() -> None:
    policy, observation = make("flow_noise"), observe(6)
    output = policy.act(observation, noise_for(policy, 6))
    chain = torch.cat([output.action[:, 6:], output.action[:, :6]], dim=1).view(6, 6, 2, 3)
    context = policy.model.context(observation)
    expected = Normal(0.0, 1.0).log_prob(chain[:, 0])
    assert policy.noise_net is not None
    with torch.no_grad():
        for step in range(5):
            t = torch.full((6,), 1 - step / 5)
            std = policy.noise_net(context, t)
            assert 0.08 <= std.min() < std.max() <= 0.16
            mean = chain[:, step] - policy.model.velocity(context, chain[:, step], t) / 5
            expected = expected + Normal(mean, std).log_prob(chain[:, step + 1])
    torch.testing.assert_close(output.log_prob, expected.flatten(1), atol=1e-3, rtol=0)


def test_learned_noise_starts_in_the_middle_of_its_bounds() -> None:
    policy = build_flow(replace(SMALL, num_steps=10), SPEC)
    assert policy.noise_net is not None
    std = policy.noise_net(torch.randn(2, 5), torch.tensor([1.0, 0.1]))
    # On a logarithmic scale: sqrt(0.08·0.16).
    torch.testing.assert_close(std, torch.full_like(std, (0.08 * 0.16) ** 0.5))


def test_dppo_scores_every_step_by_itself_with_a_floor() -> None:
    policy, observation = make("dppo", noise_level=0.3), observe(6)
    output = policy.act(observation, noise_for(policy, 6))
    chain = torch.cat([output.action[:, 6:], output.action[:, :6]], dim=1).view(6, 6, 2, 3)
    context, delta = policy.model.context(observation), 0.2
    parts = []
    with torch.no_grad():
        for step in range(5):
            t = 1 - step / 5
            v = policy.model.velocity(context, chain[:, step], torch.full((6,), t))
            sigma2 = 0.09 * t / max(1 - t, delta)
            clean, dirty = chain[:, step] - t * v, chain[:, step] + (1 - t) * v
            mean = clean * (1 - t + delta) + dirty * (t - delta - sigma2 * delta / (2 * t))
            # The last step's own deviation, 0.3·sqrt(0.2/0.8)·sqrt(0.2) = 0.067, is raised to 0.1.
            parts.append(Normal(mean, max((sigma2 * delta) ** 0.5, 0.1)).log_prob(chain[:, step + 1]).flatten(1))
    torch.testing.assert_close(output.log_prob, torch.cat(parts, dim=1), atol=1e-3, rtol=0)


def test_one_stochastic_step_is_drawn_by_the_noise() -> None:
    policy, observation = make("flow_sde"), observe(5)
    noise = noise_for(policy, 5)
    # Φ(-9) = 0, Φ(-0.6) = 0.274, Φ(0) = 0.5, Φ(0.7) = 0.758, Φ(9) = 1, of five steps.
    noise[:, -1] = torch.tensor([-9.0, -0.6, 0.0, 0.7, 9.0])
    record = policy.layout.unpack(policy.act(observation, noise).action)
    assert record.index is not None
    assert record.after is not None
    assert record.index.tolist() == [0, 1, 2, 3, 4]
    context = policy.model.context(observation)
    with torch.no_grad():
        for row in range(5):
            x = noise[row : row + 1, :6].view(1, 2, 3)
            for step in range(5):
                t = 1 - step / 5
                v = policy.model.velocity(context[row : row + 1], x, torch.full((1,), t))
                if step == row:
                    torch.testing.assert_close(record.before[row], x, atol=1e-5, rtol=0)
                    sigma2 = 0.25 * t / max(1 - t, 0.2)
                    score = -(x + (1 - t) * v) / t
                    x = x - 0.2 * v + 0.5 * sigma2 * 0.2 * score + (sigma2 * 0.2) ** 0.5 * noise[row, 6:12].view(1, 2, 3)
                    torch.testing.assert_close(record.after[row], x[0], atol=1e-5, rtol=0)
                else:
                    x = x - 0.2 * v
            torch.testing.assert_close(record.chunk[row], x[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_ratios_average_to_one(method: str) -> None:
    """E[p_new/p_old] = 1 under the old policy, for any density that is normalised: a check of the whole road."""
    policy, rows = make(method), 20_000
    observation = {key: part.expand(rows, *part.shape[1:]) for key, part in observe(1).items()}
    output = policy.act(observation, noise_for(policy, rows))
    with torch.no_grad():
        for parameter in policy.model.layers.parameters():
            parameter.add_(0.005 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        ratio = (policy.evaluate(observation, output.action).log_prob - output.log_prob).double().sum(-1).exp()
    assert 0.02 < ratio.std() < 3.0, "the two policies must differ, and not by worlds"
    assert ratio.mean().item() == pytest.approx(1.0, abs=5 * ratio.std().item() / rows**0.5)


@pytest.mark.parametrize("method", METHODS)
def test_a_generator_acts_with_it(method: str) -> None:
    """Collectors see rows of numbers only, and their width is the policy's matter."""
    policy, observation = make(method), observe(4)
    noise = noise_for(policy, 4)
    generator = TorchGenerator(policy)  # type: ignore[arg-type]
    generator.publish(3)
    generator.send(np.arange(4), {key: part.numpy() for key, part in observation.items()}, noise.numpy())
    acted, expected = generator.recv(), policy.act(observation, noise)
    assert acted.version == 3
    np.testing.assert_allclose(acted.action, expected.action.numpy(), atol=1e-6)
    np.testing.assert_allclose(acted.log_prob, expected.log_prob.numpy(), atol=1e-4)
    assert acted.action.shape == (4, policy.action_width)


def test_rows_are_independent_of_each_other() -> None:
    policy, observation = make("flow_sde"), observe(8)
    noise = noise_for(policy, 8)
    whole = policy.act(observation, noise).action
    alone = policy.act({key: part[3:4] for key, part in observation.items()}, noise[3:4]).action
    torch.testing.assert_close(whole[3:4], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("one_step", [True, False])
def test_records_survive_their_row(one_step: bool) -> None:
    layout = RecordLayout((2, 2), (3, 4), 5, one_step)
    shape = (7, 1 if one_step else 5, 3, 4)
    record = Record(
        torch.randn(7, 2, 2), torch.randn(shape), torch.randn(7, 2, 2) if one_step else None, torch.arange(7) % 5 if one_step else None
    )
    row = layout.pack(record)
    # 4 + 12 + 4 + 1, and 4 + 5·12.
    assert row.shape == (7, 21 if one_step else 64)
    again = layout.unpack(row)
    for name in ("chunk", "before", "after", "index"):
        one, two = getattr(record, name), getattr(again, name)
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)
    with pytest.raises(UserError, match="has 21 numbers" if one_step else "has 64 numbers"):
        layout.unpack(row[:, :-1])


def test_density_of_a_linear_network_is_normal() -> None:
    """Without hidden layers v = W·x + w(t): the flow's log-density has the gradient of a normal's, linear in a."""
    policy = make("flow_sde", replace(SMALL, chunk=1, hidden_sizes=()))
    observation = {key: part.expand(3, *part.shape[1:]) for key, part in observe(1).items()}
    points = torch.tensor([[[-1.0, 0.0, 0.5]], [[0.0, 0.0, 0.5]], [[1.0, 0.0, 0.5]]])
    values = policy.log_density(observation, points, num_steps=16)
    weight = policy.model.layers[-1].weight[:, :3].detach()
    # x_1 = e^W·a + c, so the second difference along the first axis is -|e^W·e_1|².
    expected = -torch.linalg.matrix_exp(weight)[:, 0].square().sum()
    torch.testing.assert_close(values[0] - 2 * values[1] + values[2], expected, atol=1e-4, rtol=1e-4)


def test_cloning_fills_up_dimensions() -> None:
    policy, observation = make("flow_sde"), observe(4)
    action, noise = torch.randn(4, 2, 2), policy.cloning_noise(4)
    padded = torch.cat([action, torch.zeros(4, 2, 1)], dim=-1)
    torch.testing.assert_close(policy.cloning_loss(observation, action, noise=noise), policy.cloning_loss(observation, padded, noise=noise))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FlowOptions("flow_sd"), "Did you mean 'flow_sde'"),  # type: ignore[arg-type]
        (lambda: FlowOptions(num_steps=1), "num_steps must be between 2 and 10,000, got 1"),
        (lambda: FlowOptions(noise_level=0.0), "noise_level must be above 0"),
        (lambda: FlowOptions(min_std=0.2, max_std=0.1), r"policy\.min_std must be <= policy\.max_std \(0\.1\), got 0\.2"),
        (lambda: FlowOptions(std_floor=0.0), "std_floor must be above 0"),
        (lambda: FlowPolicyConfig(state_key=None), "would see nothing"),
        (lambda: FlowPolicyConfig(chunk=0), "chunk must be between 1 and"),
        (lambda: FlowPolicyConfig(time_features=3), "time_features must be even"),
        (lambda: build_flow(FlowPolicyConfig(state_key="stat"), SPEC), "Did you mean 'state'"),
        (lambda: build_flow(FlowPolicyConfig(state_key="rgb"), SPEC), "policy.state_key='rgb' is not a vector of task"),
        (lambda: build_flow(FlowPolicyConfig(image_key="state"), SPEC), "policy.image_key='state': .* shows no image 'state'"),
        (lambda: build_flow(SMALL, replace(SPEC, action=ActionSpec.discrete(3))), "takes discrete ones"),
        (lambda: make("flow_sde").act(observe(2), torch.zeros(2, 6)), r"must be \[2, 13\], got \[2, 6\]"),
    ],
)
def test_bad_input_is_one_line(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
