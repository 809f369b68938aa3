"""Does every method that is offered learn? Each advantage with each loss on a small task, one after another, in one table.

    python benchmarks/method_table.py runs/methods [--seeds 1] [--only grpo rloo] [--budget 120000]

The task is CartPole-v1, solved when the policy's mode balances for 475 of 500 steps on average over 20 held-out episodes. Two families
have tasks of their own (toy_tasks.py). `ipa` credits what came shortly before success at the end, which CartPole has not, and returns to
go without a critic blame the last steps before CartPole's time limit: they walk a chain of bandits (solved at 95 %). Advantages of action
chunks need a policy that acts in chunks, the small VLA, which moves a column in a picture (95 % success).

A run that is in the folder already is not repeated. Pairs that `embodied_rl.config.rules` refuses are dashes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from embodied_rl.algorithms.advantage_table import ADVANTAGES
from embodied_rl.algorithms.loss_table import LOSSES
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError


@dataclass(frozen=True)
class Task:
    """What is learned, and when it counts as solved."""

    overrides: tuple[str, ...]
    measure: Literal["return", "success"]
    solved: float


_GROUPS = ("algorithm=grpo", "policy.hidden_sizes=[64,64]", "evaluation.every_steps=6000")
CARTPOLE = Task((*_GROUPS, "sim=cartpole"), "return", 475.0)
CHAIN = Task((*_GROUPS, "sim=custom", "sim.target=toy_tasks:BanditChain", "evaluation.every_steps=3000"), "success", 0.95)
COLUMN = Task(
    (
        *("algorithm=ppo", "sim=custom", "sim.target=toy_tasks:ColumnReach", "policy=tiny_vla", "evaluation.every_steps=4096"),
        *("policy.instruction=reach the column", "policy.num_bins=8", "policy.width=48", "policy.num_layers=1"),
        *("policy.conv_channels=[16,32]", "algorithm.rollout_steps=16", "algorithm.learning_rate=5e-4"),
    ),
    "success",
    0.95,
)
TASKS = {"ipa": CHAIN, "reinforce_token": CHAIN, "segment_returns": CHAIN, "gae_chunk": COLUMN, "gae_action": COLUMN}
"""{advantage: its task}; CartPole for the others."""
OF_LOSS = {
    "gspo": ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"],
    "cispo": ["algorithm.clip_low=1.0"],
    "decoupled_ppo": ["algorithm.loss_options.weight_high=5", "algorithm.groups.max_staleness=2"],
    "ipa": ["algorithm.loss_options.max_mismatch=2"],
}
OF_ADVANTAGE = {
    # Returns are as large as 500, and a critic of networks this small learns those of about 1 soonest.
    "gae": ["algorithm.groups.group_size=1", "algorithm.groups.groups_per_step=16", "algorithm.reward.scale=0.05"],
    "segment_returns": ["algorithm.advantage_options={}"],
    "gae_action": ["policy.value=action", "algorithm.ratio=action"],
}
ONE_EPOCH = ("policy_gradient", "gpg")
"""Losses without a ratio: a second pass over the same episodes would not be a policy gradient."""


def overrides(advantage: str, loss: str, seed: int, budget: int, folder: Path) -> list[str]:
    """The command line of one pair."""
    task = TASKS.get(advantage, CARTPOLE)
    return [
        *(*task.overrides, f"algorithm.advantage={advantage}", f"algorithm.loss={loss}"),
        *OF_ADVANTAGE.get(advantage, []),
        *OF_LOSS.get(loss, []),
        f"algorithm.num_epochs={1 if loss in ONE_EPOCH else 4}",
        *("sim.num_workers=1", "sim.num_slots=16", "stop_at_success=null", f"stop_at_{task.measure}={task.solved:g}"),
        *(f"total_steps={budget}", f"seed={seed}", "evaluation.interim_episodes=20"),
        *("evaluation.num_episodes=20", "checkpoint.every_steps=null", "video.enabled=no", "logger=quiet"),
        f"run_dir={folder}",
    ]


def run(config: TrainConfig, measure: str, folder: Path) -> dict[str, Any]:
    """Train one pair, or read what it gave before."""
    from embodied_rl.train import train

    path = folder / "figure.json"
    if path.exists():
        return json.loads(path.read_text())
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        made = train(config, command="python benchmarks/method_table.py")  # beside `folder` where that holds half a run
    curve = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((made / "results.json").read_text())
    final = results["return_mean"] if measure == "return" else results["success"]
    figure = {
        "best": max([final, *(row[f"eval/{measure}"] for row in curve if f"eval/{measure}" in row)]),
        "final": final,
        "steps": results["steps"],
        "seconds": time.perf_counter() - started,
    }
    path.write_text(json.dumps(figure))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", help="advantages")
    parser.add_argument("--losses", nargs="+", help="losses")
    parser.add_argument("--budget", type=int, default=120_000, help="environment steps")
    arguments = parser.parse_args()
    losses = arguments.losses or [name for name in LOSSES if name != "behaviour_cloning"]
    print(f"| advantage | {' | '.join(losses)} |\n|---|{'---|' * len(losses)}", flush=True)
    solved = tried = 0
    for advantage in arguments.only or list(ADVANTAGES):
        cells, task = [], TASKS.get(advantage, CARTPOLE)
        for loss in losses:
            figures = []
            for seed in arguments.seeds:
                folder = arguments.folder / f"{advantage}-{loss}-{seed}"
                try:
                    config = load_train_config(overrides(advantage, loss, seed, arguments.budget, folder))
                    resolve(config)
                except UserError:
                    break
                figures.append(run(config, task.measure, folder))
            tried += len(figures)
            solved += sum(figure["best"] >= task.solved for figure in figures)
            cells.append(", ".join(_cell(figure, task) for figure in figures) or "–")
        if set(cells) != {"–"}:
            print(f"| {advantage} | {' | '.join(cells)} |", flush=True)
    print(f"figure: {solved} of {tried} runs solve their task within {arguments.budget:,} steps")


def _cell(figure: dict[str, Any], task: Task) -> str:
    """Thousands of steps until it was solved, or in brackets the best figure within the budget."""
    return f"{figure['steps'] / 1000:.0f}k" if figure["best"] >= task.solved else f"({figure['best']:.3g})"


if __name__ == "__main__":
    main()
