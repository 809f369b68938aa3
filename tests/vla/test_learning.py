"""Learning from chunks: the objective at every level by hand, micro-batches equal to one batch, learning rates, precision."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.episode_method import EpisodeBatch, EpisodeMethod
from embodied_rl.config import AlgorithmConfig, CorrectionConfig, GroupsConfig, HybridConfig, KlConfig, TinyVLAConfig
from embodied_rl.learning.episode_objectives import EpisodeObjective
from embodied_rl.learning.executors import LocalExecutor
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.methods.groups import prepare_episodes
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.tiny_vla import TinyVLAPolicy
from embodied_rl.types import ActionSpec, Episode, EpisodeGroup, SimSpec, TensorSpec
from tests.learning.samples import rollout_learner, update

K, A, ROWS = 3, 2, 24
SPEC = SimSpec("Toy-v0", {"rgb": TensorSpec((16, 16, 3), "uint8")}, ActionSpec.continuous([-1.0] * A, [1.0] * A), instruction="go")
SMALL = TinyVLAConfig(chunk=K, width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_keypoints=4, num_bins=9)
CONFIG = AlgorithmConfig(num_epochs=1, minibatch_size=ROWS, normalize_advantage="none", max_grad_norm=1e9, entropy_coef=0.01)


def tiny(**changes: Any) -> TinyVLAPolicy:
    torch.manual_seed(0)
    policy = build_policy(dataclasses.replace(SMALL, **changes), SPEC)
    assert isinstance(policy, TinyVLAPolicy)
    return policy


def chunk_batch(policy: TinyVLAPolicy, *, of_actions: bool = False) -> Batch:
    """Actions of the policy itself with ratios around 1; the last chunks are cut short."""
    generator = torch.Generator().manual_seed(1)
    ready = policy.prepare({"rgb": torch.randint(0, 256, (ROWS, 16, 16, 3), dtype=torch.uint8, generator=generator).numpy()})
    with torch.no_grad():
        acted = policy.act(ready, torch.rand(ROWS, K * A, generator=generator))
    executed = torch.ones(ROWS, K, dtype=torch.bool)
    executed[-9:, 2], executed[-4:, 1] = False, False
    shape = (ROWS, K) if of_actions else (ROWS,)
    numbers = [torch.randn(shape, generator=generator) for _ in range(3)]
    noise = 0.2 * torch.randn(ROWS, K * A, generator=generator)
    return Batch(
        ready, acted.action, acted.log_prob + noise, *numbers,
        unit_mask=executed.repeat_interleave(A, dim=1), value_mask=executed if of_actions else None,
    )  # fmt: skip


def gradient(policy: TinyVLAPolicy, config: AlgorithmConfig, batch: Batch) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    learner = rollout_learner(policy, config)
    learner.executor.begin(learner.objective, batch)
    figures = learner.executor.step(np.arange(ROWS), 0.0)  # at this rate, nothing moves
    return figures["loss"], {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}, figures


def by_hand(policy: TinyVLAPolicy, config: AlgorithmConfig, batch: Batch) -> Tensor:
    """The loss, row by row and unit by unit."""
    evaluation = policy.evaluate(batch.observation, batch.action)
    of_actions = batch.value_mask is not None
    terms, values, entropies = [], [], []
    for row in range(ROWS):
        kept = [unit for unit in range(K * A) if batch.unit_mask[row, unit]]
        groups = {"token": [[unit] for unit in kept], "chunk": [kept]}
        groups["action"] = [[u for u in kept if u // A == k] for k in range(K) if any(u // A == k for u in kept)]
        for units in groups[config.ratio]:
            ratio = torch.exp(sum(evaluation.log_prob[row, u] - batch.log_prob[row, u] for u in units))
            advantage = batch.advantage[row, units[0] // A] if of_actions else batch.advantage[row]
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
        for k in range(K) if of_actions else (None,):
            at = row if k is None else (row, k)
            if k is None or batch.value_mask[row, k]:
                values.append((evaluation.value[at] - batch.returns[at]) ** 2)
        entropies.append(sum(evaluation.entropy[row, u] for u in kept))
    return torch.stack(terms).mean() + config.value_coef * torch.stack(values).mean() - config.entropy_coef * torch.stack(entropies).mean()


@pytest.mark.parametrize(
    ("ratio", "of_actions"), [("chunk", False), ("action", False), ("token", False), ("action", True), ("token", True)]
)
def test_the_objective_at_every_level_is_that_by_hand(ratio: Any, of_actions: bool) -> None:
    config = dataclasses.replace(CONFIG, ratio=ratio)
    policy = tiny(value="action" if of_actions else "chunk", value_gradient=True)
    batch = chunk_batch(policy, of_actions=of_actions)
    loss, found, _ = gradient(policy, config, batch)
    reference = tiny(value="action" if of_actions else "chunk", value_gradient=True)
    expected = by_hand(reference, config, batch)
    expected.backward()
    assert loss == pytest.approx(float(expected), abs=1e-5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("ratio", ["chunk", "action", "token"])
@pytest.mark.parametrize("aggregation", [None, "seq-mean-token-mean"])
def test_micro_batches_add_up_to_one_batch(ratio: Any, aggregation: Any) -> None:
    config = dataclasses.replace(CONFIG, ratio=ratio, aggregation=aggregation, normalize_advantage="minibatch", value_clip=0.2)
    whole_loss, whole, whole_metrics = gradient(policy := tiny(), config, chunk_batch(policy))
    loss, parts, metrics = gradient(policy := tiny(), dataclasses.replace(config, micro_batch_size=7), chunk_batch(policy))
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    assert metrics == pytest.approx(whole_metrics, abs=1e-5)
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, atol=1e-5, rtol=1e-3, msg=name)


def test_what_was_not_executed_has_no_gradient() -> None:
    """Tokens of steps that were never played may be any: the update is the same."""
    made = []
    for token in (0, 8):
        policy = tiny()
        batch = chunk_batch(policy)
        batch = batch.replaced(
            action=torch.where(batch.unit_mask, batch.action, token), log_prob=torch.where(batch.unit_mask, batch.log_prob, -token)
        )
        made.append(gradient(policy, dataclasses.replace(CONFIG, ratio="chunk"), batch)[1])
    for name, expected in made[0].items():
        torch.testing.assert_close(made[1][name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_parts_have_their_own_learning_rates() -> None:
    """Adam's first step is the learning rate times the sign of the gradient."""
    config = dataclasses.replace(CONFIG, learning_rate=1e-3, value_learning_rate=3e-3, head_learning_rate=5e-4, adam_eps=1e-12)
    policy = tiny()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    update(rollout_learner(policy, config), chunk_batch(policy), 0, 1, 0)
    rates = {"backbone": 1e-3, "value": 3e-3, "head": 5e-4}
    for name, parameter in policy.named_parameters():
        moved = (parameter.detach() - before[name]).abs()
        assert float(moved.max()) == pytest.approx(rates[policy.role_of(name)], rel=1e-2), name


def test_bfloat16_products_leave_weights_and_sums_in_float32() -> None:
    figures = {}
    for precision in ("float32", "bfloat16"):
        policy = tiny()
        learner = rollout_learner(policy, dataclasses.replace(CONFIG, num_epochs=2), precision=precision)
        assert isinstance(learner.executor, LocalExecutor)
        figures[precision] = update(learner, chunk_batch(policy), 0, 1, 0)
        assert {p.dtype for p in policy.parameters()} == {torch.float32}
        assert {t.dtype for name, t in learner.state_tensors().items() if name.startswith("exp_avg")} == {torch.float32}
    for name in ("policy_loss", "value_loss", "entropy"):
        assert figures["bfloat16"][name] == pytest.approx(figures["float32"][name], rel=0.05, abs=0.02)
        assert figures["bfloat16"][name] != figures["float32"][name]


def test_a_resumed_learner_goes_on_with_the_same_bits() -> None:
    config = dataclasses.replace(CONFIG, ratio="action", value_learning_rate=3e-3)
    policy = tiny()
    batch, learner = chunk_batch(policy), rollout_learner(policy, config)
    update(learner, batch, 0, 2, 0)
    other = copy.deepcopy(policy)
    resumed = rollout_learner(other, config)
    resumed.load_state_tensors(learner.state_tensors())
    for each in (learner, resumed):
        update(each, batch, 1, 2, 0)
    for name, expected in policy.state_dict().items():
        assert torch.equal(other.state_dict()[name], expected), name


# ---- whole episodes -------------------------------------------------------------------------------------------------------


def groups_of(policy: Any, *, chunks: bool) -> list[EpisodeGroup]:
    """Two groups of three episodes that the policy played; of chunks, the last ones are cut."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    found = []
    for number in range(2):
        episodes = []
        for member in range(3):
            steps = 2 + member
            if chunks:
                seen: dict[str, Any] = {"rgb": rng.integers(0, 256, (steps, 16, 16, 3), dtype=np.uint8)}
                noise = torch.rand(steps, K * A, generator=generator)
            else:
                seen = {key: rng.normal(size=(steps, *part.shape)).astype(np.float32) for key, part in policy.spec.tensors.items()}
                noise = torch.randn(steps, policy.spec.action.dim, generator=generator)
            with torch.no_grad():
                acted = policy.act({key: torch.from_numpy(part) for key, part in seen.items()}, noise)
            executed = np.ones((steps, K), bool)
            executed[-1, 1:] = False
            fields: dict[str, Any] = {"executed": executed, "mask": executed.repeat(A, axis=1)} if chunks else {}
            if chunks:
                fields["chunk_reward"] = np.where(executed, np.linspace(-1, 1, executed.size).reshape(executed.shape), 0).astype(np.float32)
            episodes.append(
                Episode(
                    observation=seen,
                    action=acted.action.numpy(),
                    log_prob=acted.log_prob.numpy() + 0.1 * rng.normal(size=acted.log_prob.shape).astype(np.float32),
                    reward=rng.normal(size=steps).astype(np.float32),
                    terminated=False,
                    truncated=True,
                    success=bool(member),
                    seed=number,
                    domain="toy",
                    policy_version=np.zeros(steps, np.int64),
                    final_observation={key: part[-1] for key, part in seen.items()},
                    **fields,
                )
            )
        found.append(EpisodeGroup(number, "toy", number, 0, tuple(episodes)))
    return found


def episode_learner(policy: Any, config: AlgorithmConfig, hybrid: HybridConfig | None = None) -> Learner:
    hybrid = hybrid or HybridConfig(device="cpu", num_threads=1)
    learner = make_learner(EpisodeObjective(policy, config), policy, config, hybrid)
    learner.keep_reference()
    return learner


def learn(learner: Learner, batch: EpisodeBatch) -> dict[str, float]:
    """One update, with a reference that is a little away."""
    config = learner.config
    if learner.has_reference:
        with torch.no_grad():
            for parameter in learner.policy.reference[0].parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    rows, _ = prepare_episodes(EpisodeMethod(config), learner, EpisodeObjective(learner.policy, config), batch)
    size = rows.episodes_of(config.minibatch_size)
    return learner.update(rows, minibatch_rows=size, progress=0.0, seed=[1], kl_coef=config.kl.coef)


GROUPED = AlgorithmConfig(
    advantage="grpo", loss="ppo_clip", groups=GroupsConfig(group_size=3), num_epochs=2, minibatch_size=6, learning_rate=1e-3,
    entropy_coef=0.01, kl=KlConfig(coef=0.1), max_grad_norm=1e9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "changes"),
    [
        *((ratio, {"aggregation": mode}) for ratio in ("chunk", "action", "token") for mode in ("token-mean", "seq-mean-token-mean")),
        ("token", {"advantage": "gae_chunk"}),
        ("action", {"advantage": "gae_action", "kl": KlConfig(coef=0.1, place="reward")}),
        ("token", {"advantage": "gae_action", "value_clip": 0.2}),
    ],
)
def test_micro_batches_of_episodes_add_up(ratio: Any, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(GROUPED, ratio=ratio, minibatch_size=100, num_epochs=1, **changes)
    stats, made = [], []
    for size in (None, 4):
        policy = tiny(value="action" if config.advantage == "gae_action" else "chunk")
        batch = EpisodeBatch.of(groups_of(policy, chunks=True), policy.prepare)
        stats.append(learn(episode_learner(policy, dataclasses.replace(config, micro_batch_size=size)), batch))
        made.append({name: p.detach() for name, p in policy.named_parameters()})
    assert stats[1] == pytest.approx(stats[0], abs=1e-5)
    for name, expected in made[0].items():
        torch.testing.assert_close(made[1][name], expected, atol=2e-5, rtol=0, msg=name)


def test_length_normalisation_divides_by_the_tokens_that_were_executed() -> None:
    """On the first step all ratios are known: the loss is minus the mean over episodes of the mean over executed tokens of A·r."""
    config = dataclasses.replace(GROUPED, ratio="token", aggregation="seq-mean-token-mean", kl=KlConfig(), entropy_coef=0.0, clip_low=1.0,
                                 clip_high=1e6, num_epochs=1, minibatch_size=100, normalize_advantage="none")  # fmt: skip
    policy = tiny()
    batch = EpisodeBatch.of(groups_of(policy, chunks=True), policy.prepare)
    with torch.no_grad():
        flat = (policy.evaluate(batch.observation, batch.action).log_prob - batch.unit_log_prob).exp()
    learner = episode_learner(policy, config)
    _, credit = prepare_episodes(EpisodeMethod(config), learner, EpisodeObjective(policy, config), batch)
    means = []
    for row in range(6):
        own = batch.row == row
        means.append(float((flat[own] * credit.advantage[row, batch.column[own]][:, None])[batch.unit_mask[own]].mean()))
    decoupled = dataclasses.replace(config, correction=CorrectionConfig(mode="mask", high=1e6))
    found = learn(episode_learner(policy, decoupled), batch)
    assert np.isfinite(found["policy_loss"])
    # ppo_clip against the acting policy itself: old log-probabilities are those of the present weights, so the ratio is 1.
    own = learn(episode_learner(tiny(), config), batch)
    expected = [float(credit.advantage[row][batch.mask[row]].mean()) for row in range(6)]
    assert own["policy_loss"] == pytest.approx(-float(np.mean(expected)), abs=1e-5)
    assert found["policy_loss"] == pytest.approx(-float(np.mean(means)), abs=1e-4)
