"""One rank of `test_aggregation.py`: the gradient of every loss on this rank's rows, summed or averaged over ranks.

Usage: python gloo_rank.py RANK NUM_RANKS STORE_FILE OUTPUT_FILE
"""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.algorithms.loss_cases import AGGREGATIONS, OPTIONS, global_denominator, gradient, log_prob_of, make_case, run, select

BOUNDS = (0, 5, 21, 26, 40, 64)
"""Micro-batches of unequal size: the first two are rank 0's, the others rank 1's."""


class Policy(torch.nn.Module):
    """theta as a module, for DistributedDataParallel."""

    def __init__(self, theta: torch.Tensor) -> None:
        super().__init__()
        self.theta = torch.nn.Parameter(theta.clone())

    def forward(self, case: dict[str, torch.Tensor]) -> torch.Tensor:
        return log_prob_of(self.theta, case)


def main(rank: int, num_ranks: int, store: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=dt.timedelta(seconds=120))
    case = make_case()
    first, last = (0, 2) if rank == 0 else (2, 5)
    parts = [select(case, slice(BOUNDS[i], BOUNDS[i + 1])) for i in range(first, last)]
    masks = [part["mask"] for part in parts]
    results: dict[str, torch.Tensor] = {}
    for aggregation in AGGREGATIONS:
        denominator = global_denominator(masks, aggregation)
        results[f"denominator {aggregation.mode}"] = denominator
        for name in OPTIONS:
            loss, grad = gradient(name, parts, aggregation=aggregation, denominator=denominator)
            dist.all_reduce(loss)
            dist.all_reduce(grad)
            results[f"{aggregation.mode} {name} loss"], results[f"{aggregation.mode} {name} gradient"] = loss, grad
        results[f"{aggregation.mode} ddp"] = averaged_gradient(parts, aggregation)
    torch.save(results, output)
    dist.destroy_process_group()


def averaged_gradient(parts: list[dict[str, torch.Tensor]], aggregation: object) -> torch.Tensor:
    """Through DistributedDataParallel, which averages over ranks; one backward pass per micro-batch, reduced at the last."""
    policy = torch.nn.parallel.DistributedDataParallel(Policy(parts[0]["theta"]))
    denominator = global_denominator([part["mask"] for part in parts], aggregation) / dist.get_world_size()  # type: ignore[arg-type]
    for index, part in enumerate(parts):
        policy.require_backward_grad_sync = index == len(parts) - 1
        loss, _ = run("ppo_clip", part, aggregation=aggregation, denominator=denominator, log_prob=policy(part))  # type: ignore[arg-type]
        loss.backward()
    grad = policy.module.theta.grad
    assert grad is not None
    return grad


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
