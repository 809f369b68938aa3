"""A small policy with ragged rows, and every policy loss of the table with options, for tests that hold for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embodied_rl.algorithms.aggregation import Aggregation
from embodied_rl.algorithms.loss_table import LOSSES

NUM_ROWS, NUM_UNITS, NUM_FEATURES, NUM_ACTIONS = 64, 7, 3, 5

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.5},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"clip_low": 0.3, "clip_high": 0.2},
    "policy_gradient": {},
    "gpg": {},
    "topr": {},
    "ipa": {"max_mismatch": 1.02},
    "behaviour_cloning": {},
}

AGGREGATIONS = (
    Aggregation("token-mean"),
    Aggregation("seq-mean-token-sum"),
    Aggregation("seq-mean-token-mean"),
    Aggregation("seq-mean-token-sum-norm", horizon=12),
)

Case = dict[str, Tensor]


def make_case(seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    """Rows of a linear softmax policy; lengths from 0 to NUM_UNITS, with holes; the four policies differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    features = normal(NUM_ROWS, NUM_UNITS, NUM_FEATURES)
    action = torch.randint(NUM_ACTIONS, (NUM_ROWS, NUM_UNITS), generator=generator)
    theta = 0.5 * normal(NUM_FEATURES, NUM_ACTIONS)
    case = {"features": features, "action": action, "theta": theta}
    for name, distance in (("old_log_prob", 0.15), ("behaviour_log_prob", 0.25)):
        case[name] = log_prob_of(theta + distance * normal(NUM_FEATURES, NUM_ACTIONS), case)
    length = torch.randint(NUM_UNITS + 1, (NUM_ROWS,), generator=generator)
    holes = torch.rand(NUM_ROWS, NUM_UNITS, generator=generator) < 0.15
    case["mask"] = (torch.arange(NUM_UNITS) < length[:, None]) & ~holes
    case["advantage"] = normal(NUM_ROWS)
    case["weight"] = normal(NUM_ROWS, NUM_UNITS).abs()
    case["chunk_id"] = torch.arange(NUM_UNITS).expand(NUM_ROWS, NUM_UNITS) // 3
    case["positive"] = case["advantage"] > 0
    return case


def log_prob_of(theta: Tensor, case: Case) -> Tensor:
    """[B, L] of the recorded actions."""
    return (case["features"] @ theta).log_softmax(-1).gather(-1, case["action"][..., None]).squeeze(-1)


def select(case: Case, rows: Tensor | slice) -> Case:
    return {name: x if name == "theta" else x[rows] for name, x in case.items()}


def run(
    name: str,
    case: Case,
    *,
    aggregation: Aggregation,
    denominator: Tensor | float | None = None,
    log_prob: Tensor | None = None,
    optional: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss `name` of these rows; `log_prob` None: that of ``case["theta"]``, which may carry gradients."""
    info = LOSSES[name]
    tensors = {**case, "log_prob": log_prob_of(case["theta"], case) if log_prob is None else log_prob}
    wanted = info.inputs + (info.optional_inputs if optional else ())
    arguments = {key: tensors[key] for key in wanted}
    return info.load()(**arguments, **OPTIONS[name], mask=case["mask"], denominator=denominator, aggregation=aggregation)


def gradient(name: str, parts: list[Case], *, aggregation: Aggregation, denominator: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Summed over parts: the loss, and its gradient with respect to theta."""
    theta = parts[0]["theta"].clone().requires_grad_()
    total = torch.zeros((), dtype=theta.dtype)
    for part in parts:
        loss, _ = run(name, {**part, "theta": theta}, aggregation=aggregation, denominator=denominator)
        loss.backward()
        total += loss.detach()
    assert theta.grad is not None
    return total, theta.grad


def global_denominator(masks: list[Tensor], aggregation: Aggregation) -> Tensor:
    """Units in all masks of all ranks, at least 1."""
    total = torch.stack([aggregation.count(mask) for mask in masks]).sum().double()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total.clamp(min=1)
