"""Does every method that is offered learn? Each advantage with each loss on CartPole, one after another, in one table.

    python benchmarks/method_table.py runs/methods [--seeds 1] [--only grpo rloo] [--budget 60000]

A pair has solved CartPole-v1 when the policy's mode balances for 475 of 500 steps on average over 20 held-out episodes. A run that
is in the folder already is not repeated. Pairs that `embodied_rl.algorithms.composition` refuses are listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

from embodied_rl.algorithms.advantage_table import ADVANTAGES
from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.loss_table import LOSSES
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError

SOLVED = 475.0
OF_LOSS = {
    "gspo": ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"],
    "cispo": ["algorithm.clip_low=1.0"],
    "decoupled_ppo": ["algorithm.loss_options.weight_high=5", "algorithm.groups.max_staleness=2"],
    "ipa": ["algorithm.loss_options.max_mismatch=2"],
}
OF_ADVANTAGE = {
    "gae": ["algorithm.groups.group_size=1", "algorithm.groups.groups_per_step=16"],
    "segment_returns": ["algorithm.advantage_options={}"],
}
ONE_EPOCH = ("policy_gradient", "gpg")
"""Losses without a ratio: a second pass over the same episodes would not be a policy gradient."""


def overrides(advantage: str, loss: str, seed: int, budget: int, folder: Path) -> list[str]:
    """The command line of one pair."""
    return [
        *("sim=cartpole", "algorithm=grpo", f"algorithm.advantage={advantage}", f"algorithm.loss={loss}"),
        *OF_ADVANTAGE.get(advantage, []),
        *OF_LOSS.get(loss, []),
        f"algorithm.num_epochs={1 if loss in ONE_EPOCH else 4}",
        *("policy.hidden_sizes=[64,64]", "sim.num_workers=1", "sim.num_slots=16", "stop_at_success=null", f"stop_at_return={SOLVED:g}"),
        *(f"total_steps={budget}", f"seed={seed}", "evaluation.every_steps=6000", "evaluation.interim_episodes=20"),
        *("evaluation.num_episodes=20", "checkpoint.every_steps=null", "video.enabled=no", "logger=quiet"),
        f"run_dir={folder}",
    ]


def run(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Train one pair, or read what it gave before."""
    from embodied_rl.train import train

    path = folder / "figure.json"
    if path.exists():
        return json.loads(path.read_text())
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        made = train(config, command="python benchmarks/method_table.py")  # beside `folder` where that holds half a run
    curve = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    best = max((row.get("eval/return", 0.0) for row in curve), default=0.0)
    results = json.loads((made / "results.json").read_text())
    figure = {
        "best": max(best, results["return_mean"]),
        "final": results["return_mean"],
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
    parser.add_argument("--budget", type=int, default=60_000, help="environment steps")
    arguments = parser.parse_args()
    losses = arguments.losses or [name for name in LOSSES if name != "behaviour_cloning"]
    print(f"| advantage | {' | '.join(losses)} |\n|---|{'---|' * len(losses)}", flush=True)
    solved = tried = 0
    for advantage in arguments.only or list(ADVANTAGES):
        cells = []
        for loss in losses:
            figures = []
            for seed in arguments.seeds:
                folder = arguments.folder / f"{advantage}-{loss}-{seed}"
                try:
                    config = load_train_config(overrides(advantage, loss, seed, arguments.budget, folder))
                    compose(config.algorithm)
                except UserError:
                    break
                figures.append(run(config, folder))
            tried += len(figures)
            solved += sum(figure["best"] >= SOLVED for figure in figures)
            cells.append(", ".join(_cell(figure) for figure in figures) or "–")
        if set(cells) != {"–"}:
            print(f"| {advantage} | {' | '.join(cells)} |", flush=True)
    print(f"figure: {solved} of {tried} runs solve CartPole-v1 within {arguments.budget:,} steps")


def _cell(figure: dict[str, Any]) -> str:
    """Thousands of steps until it was solved, or in brackets the best return within the budget."""
    return f"{figure['steps'] / 1000:.0f}k" if figure["best"] >= SOLVED else f"({figure['best']:.0f})"


if __name__ == "__main__":
    main()
