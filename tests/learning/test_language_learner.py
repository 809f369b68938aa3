"""The language learner's gradients: micro-batches against one batch, every loss against its definition, and its state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, GroupsConfig, HybridConfig, KlConfig
from embodied_rl.errors import NonFiniteError
from embodied_rl.learning.episode_objectives import TokenObjective
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence
from tests.agents.samples import tiny_policy

LENGTHS = ((5, 3), (9, 1), (3, 6), (12, 2), (4, 4))


def config(**options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        **{"advantage": "grpo", "loss": "ppo_clip", "groups": GroupsConfig(), "num_epochs": 1, "learning_rate": 0.01, **options}
    )


def learner(policy: LanguagePolicy, **options: Any) -> Learner:
    algorithm = config(**options)
    return make_learner(TokenObjective(policy, algorithm), policy, algorithm, HybridConfig(device="cpu", num_threads=1))


def evaluated(own: Learner, data: TokenBatch) -> TokenBatch:
    """With the log-probabilities that an update begins with."""
    reference = own.token_log_probs(data.sequences, of_reference=True) if own.has_reference else None
    return dataclasses.replace(data, present=own.token_log_probs(data.sequences) if own.needs_present else None, reference=reference)


def differentiate(own: Learner, data: TokenBatch, kl_coef: float = 0.0) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Figures and gradients of one minibatch of all rows, micro-batch by micro-batch."""
    rows, numbers = own.objective.begin(data, kl_coef=kl_coef)
    (part,) = own.objective.divide(own.policy, rows, 1, None)
    total: dict[str, float] = {}
    for places in part.micro:
        loss, metrics = own.objective(own.policy, rows.chosen(torch.tensor(places)), numbers)
        loss.backward()
        for name, value in {**metrics, "loss": loss}.items():
            total[name] = total.get(name, 0.0) + float(value.detach())
    return total, gradients(own.policy)


def batch(seed: int = 0) -> TokenBatch:
    """Rows of different lengths; the last token of row 1 is sampled and not learned from."""
    rng = np.random.default_rng(seed)
    sequences = [TokenSequence.of(rng.integers(4, 100, prompt), rng.integers(4, 100, sampled)) for prompt, sampled in LENGTHS]
    width = max(len(sequence) for sequence in sequences)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        mask[row, : len(sequence)] = torch.from_numpy(sequence.mask)
    mask[2, 8] = False

    def noise(scale: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, mask.shape).astype(np.float32)) * mask

    turn = (torch.arange(width) // 4).expand(mask.shape)
    return TokenBatch(tuple(sequences), mask, noise(1.0), -4.6 * mask + noise(0.3), turn, torch.tensor([True, False, True, False, True]))


def gradients(policy: LanguagePolicy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "seq-mean-token-mean"},
        {"aggregation": "seq-mean-token-sum-norm", "horizon": 7},
        {"loss": "gspo", "entropy_coef": 0.01},
        {"loss": "cispo", "kl": KlConfig(coef=0.1)},
        {"loss": "topr", "advantage": "reinforce"},
        {"loss": "ipa", "advantage": "ipa", "loss_options": {"max_mismatch": 5.0}},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()) or "ppo_clip",
)
def test_micro_batches_give_the_gradient_of_one_batch(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for tokens in (16, 10_000):  # several rows a forward, or all of them
        policy = tiny_policy(tmp_path / f"model{tokens}", spread=0.2, max_tokens_per_micro_batch=tokens)
        own = learner(policy, **options)
        own.keep_reference()
        data = batch()
        # The update has begun: the policy has moved on since the tokens were evaluated.
        data = evaluated(own, data)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        found.append((*differentiate(own, data, kl_coef=0.1), len(policy.micro_batches(data.sequences))))
    assert found[0][2] > 2
    assert found[1][2] == 1
    for name, value in found[1][0].items():
        assert found[0][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in found[1][1].values())
    for name, gradient in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], gradient, rtol=1e-3, atol=1e-6)


def test_the_gradient_is_that_of_the_definition(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "model", spread=0.2)
    data, own = batch(), learner(policy, clip_low=0.2, clip_high=0.3)
    _, found = differentiate(own, dataclasses.replace(data, present=data.behaviour_log_prob))
    policy.zero_grad()
    # Each row alone, through the transformers model itself; PPO's clipped surrogate written out; the mean over all learned tokens.
    total = torch.zeros(())
    for row, sequence in enumerate(data.sequences):
        ids = torch.from_numpy(sequence.token_ids)
        log_prob = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0]
        for place in np.flatnonzero(data.mask[row]):
            ratio = (log_prob[place - 1] - data.behaviour_log_prob[row, place]).exp()
            advantage = data.advantage[row, place]
            total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
    (total / int(data.mask.sum())).backward()
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_an_update_makes_good_tokens_likelier_and_reports(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "model", spread=0.2)
    data = batch()
    data = dataclasses.replace(data, advantage=data.mask.float() * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None])
    own = learner(policy, num_epochs=3)
    before = own.token_log_probs(data.sequences)
    sampled = dataclasses.replace(data, behaviour_log_prob=before, present=before)
    stats = own.update(sampled, minibatch_rows=2, progress=0.0, seed=[1])
    change = (own.token_log_probs(data.sequences) - before) * data.mask
    assert (change.sum(1) * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]) > 0).all()
    assert stats["minibatches"] == 9.0  # three epochs of 2 + 2 + 1 rows, as evenly as may be
    assert stats["tokens"] == 15.0
    assert "log_prob_difference" not in stats  # they are the same numbers
    assert stats["learning_rate"] == 0.01


def test_cloning_learns_what_it_is_shown(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "model")
    own = learner(policy)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 100, 6) for _ in range(8)]
    # The answer is the prompt's first token plus 100, a rule that has to be read off the prompt.
    shown = [TokenSequence.of(prompt, np.array([prompt[0] + 20])) for prompt in prompts]
    losses = [own.clone(shown, num_epochs=epochs, minibatch_rows=4, learning_rate=0.01, seed=0) for epochs in (1, 40)]
    assert losses[0] > 4.0  # nearly the logarithm of the vocabulary
    assert losses[1] < 0.2
    with torch.no_grad():
        likeliest = [int(policy.model(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1].argmax()) for prompt in prompts]
    assert likeliest == [int(prompt[0]) + 20 for prompt in prompts]
    assert not own.state_tensors()["step"]


def test_state_continues_exactly_reference_included(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kl": KlConfig(coef=0.1)}
    first = learner(tiny_policy(tmp_path / "first", spread=0.2), **options)
    first.keep_reference()
    data = batch()

    def step(own: Learner, seed: int) -> dict[str, float]:
        return own.update(evaluated(own, data), minibatch_rows=3, progress=0.0, seed=[seed], kl_coef=0.1)

    step(first, 1)
    second = learner(tiny_policy(tmp_path / "second", spread=0.5), **options)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_tensors(first.state_tensors())
    assert step(first, 2) == step(second, 2)
    for name, tensor in first.policy.state_dict().items():
        assert torch.equal(tensor, second.policy.state_dict()[name])
    assert step(first, 3)["kl"] > 0


def test_numbers_that_are_not_finite_stop_before_the_step(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "model")
    own, data = learner(policy), batch()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    advantage = data.advantage.clone()
    advantage[0, 6] = float("nan")
    broken = dataclasses.replace(data, advantage=advantage)
    with pytest.raises(NonFiniteError, match="ppo_clip loss is nan"):
        own.update(evaluated(own, broken), minibatch_rows=5, progress=0.0, seed=[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
