"""Decoupled PPO on fixed rollouts: PPO's own loss on a changed batch is the formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import ppo_clip_loss
from embodied_rl.algorithms.ppo import corrected
from embodied_rl.algorithms.units import Level, at_level, mask_at_level, spread, unit_steps
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.config import CorrectionConfig
from embodied_rl.loggers.jsonl import read_metrics
from tests.short_run import train_shortly


def batch_of(rows: int, units: int, *, unit_mask: torch.Tensor | None = None) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """(batch, proximal log-probabilities, those of the policy that is trained)"""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = draw(rows, units) - 1
    proximal, present = behaviour + 0.3 * draw(rows, units), behaviour + 0.4 * draw(rows, units)
    batch = Batch({}, draw(rows, units), behaviour, draw(rows), draw(rows), draw(rows), unit_mask=unit_mask)
    return batch, proximal, present


@pytest.mark.parametrize("level", ["chunk", "action", "token"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_and_gradient_are_those_of_the_formula(level: Level, dual_clip: float | None) -> None:
    """Σ w · clip-loss(π / present, A) over what is kept, w = present / behaviour, divided by all; chunks of two steps of two dimensions."""
    executed = torch.ones(64, 4, dtype=torch.bool)
    executed[::3, 2:] = False
    batch, present, new = batch_of(64, 4, unit_mask=executed)
    new.requires_grad_()
    steps = unit_steps(4, 2, 2)
    weighed, metrics = corrected(batch, present, CorrectionConfig(mode="mask", low=0.6, high=1.6), level=level, steps=steps)
    clip = {"clip_low": 0.2, "clip_high": 0.25, "dual_clip": dual_clip}
    mask = mask_at_level(executed, level, steps) if level != "chunk" else None
    mine, _ = ppo_clip_loss(
        log_prob=at_level(new, level, executed, steps),
        old_log_prob=at_level(weighed.log_prob, level, executed, steps),
        advantage=spread(weighed.advantage, level, steps),
        mask=mask,
        **clip,  # type: ignore[arg-type]
    )
    (gradient,) = torch.autograd.grad(mine, new)
    width = {"chunk": 4, "action": 2, "token": 1}[level]

    def summed(log_prob: torch.Tensor) -> torch.Tensor:
        return (log_prob * executed).reshape(64, 4 // width, width).sum(-1)

    a, ratio, weight = batch.advantage[:, None], (summed(new) - summed(present)).exp(), (summed(present) - summed(batch.log_prob)).exp()
    kept = ((weight >= 0.6) & (weight <= 1.6)) * weight
    term = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.25))
    term = term if dual_clip is None else torch.where(a < 0, torch.minimum(term, -a * dual_clip), term)
    there = executed.reshape(64, 4 // width, width).any(-1)
    theirs = (kept.detach() * term * there).sum() / there.sum()
    (other,) = torch.autograd.grad(theirs, new)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(gradient, other)
    assert 0 < metrics["weight_bounded_fraction"] < 1, "the bounds are of no use here"


def test_written_out_by_hand() -> None:
    """Two decisions of two units; w = exp(proximal - behaviour) = e^0.2 and e^-1.0, of which the second is rejected."""
    batch, _, _ = batch_of(2, 2)
    behaviour = torch.tensor([[-1.0, -1.0], [-0.5, -0.5]], dtype=torch.float64)
    proximal = torch.tensor([[-0.9, -0.9], [-1.0, -1.0]], dtype=torch.float64)
    batch = batch.replaced(log_prob=behaviour, advantage=torch.tensor([2.0, 3.0], dtype=torch.float64))
    weighed, metrics = corrected(batch, proximal, CorrectionConfig(mode="mask", low=0.5, high=2.0))
    assert weighed.advantage.tolist() == pytest.approx([2.0 * 1.2214027581601699, 0.0])
    assert weighed.log_prob.tolist() == proximal.tolist()
    assert metrics["weight_bounded_fraction"] == 0.5
    # One ratio for each decision is that of its chunk.
    chunks, _ = corrected(batch, proximal, CorrectionConfig(mode="mask", level="chunk", low=0.5, high=2.0))
    assert torch.equal(chunks.advantage, weighed.advantage)


def test_units_that_were_not_executed_do_not_count() -> None:
    mask = torch.tensor([[True, True, False, False]] * 8)
    batch, proximal, _ = batch_of(8, 4, unit_mask=mask)
    weighed, _ = corrected(batch, proximal, CorrectionConfig(mode="mask", high=100.0))
    seen = (proximal - batch.log_prob)[:, :2].sum(-1).exp()
    torch.testing.assert_close(weighed.advantage, batch.advantage * seen)


def test_the_preset_is_the_loss_of_that_name(tmp_path: Path) -> None:
    short = (
        "sim=cartpole",
        "algorithm.groups.group_size=3",
        "algorithm.groups.groups_per_step=2",
        "policy.hidden_sizes=[8]",
        "total_steps=150",
    )
    exact = ("algorithm.groups.max_staleness=0", "algorithm.num_epochs=2")
    preset = train_shortly(tmp_path / "preset", *short, *exact, "algorithm=decoupled_ppo")
    named = ("algorithm.loss=decoupled_ppo", "algorithm.loss_options.weight_high=5", "algorithm.correction.mode=none")
    by_name = train_shortly(tmp_path / "named", *short, *exact, "algorithm=decoupled_ppo", *named)
    first, second = load_checkpoint(preset).policy, load_checkpoint(by_name).policy
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=2e-5)
    told = [row["train/weight_mean"] for row in read_metrics(preset / "metrics.jsonl") if "train/weight_mean" in row]
    assert told == pytest.approx([1.0] * len(told), abs=0.5)
    assert told
