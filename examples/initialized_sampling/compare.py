"""KeyDoor with ordinary sampling, sequential rollback and parallel initialization: the same steps, several seeds, one picture.

    python examples/initialized_sampling/compare.py runs/initialized_sampling [--seeds 1 2 3] [--steps 250000] [--plot curve.png]

Runs go one after another; one that is in the folder already is not repeated. Steps are all that were simulated for training: those
that were learned from, the expert's, and those played again to come to a start.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

from embodied_rl.compose import load_train_config
from embodied_rl.train import train

SIDES = {
    "ordinary starts": ["algorithm.initialized.share=0.0"],
    "sequential rollback": ["algorithm.initialized.mode=rollback"],
    "parallel, random places": ["algorithm.initialized.mode=parallel"],
}
SOLVED = 0.95


def run(side: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train one side with one seed, or read what it gave before: its curve [(steps, success)] and seconds."""
    path = folder / f"{side.split()[0].strip(',')}-{seed}"
    if not (path / "figure.json").exists():
        started = time.perf_counter()
        shared = [f"seed={seed}", f"run_dir={path}", f"total_steps={steps}", "stop_at_success=null", "logger=quiet", "video.enabled=no"]
        config = load_train_config(
            ["experiment=initialized_sampling", *shared, "evaluation.every_steps=10_000", "checkpoint.every_steps=null", *SIDES[side]]
        )
        with contextlib.redirect_stdout(io.StringIO()):
            made = train(config, command="python examples/initialized_sampling/compare.py")  # beside `path` where that holds half a run
        lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        results = json.loads((made / "results.json").read_text())
        figure = {"curve": curve(lines), "success": results["success"], "seconds": time.perf_counter() - started}
        path.mkdir(parents=True, exist_ok=True)
        (path / "figure.json").write_text(json.dumps(figure))
    return json.loads((path / "figure.json").read_text())


def curve(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(steps, success from ordinary starts on held-out seeds), with the steps that training does not count."""
    extra, points = 0.0, []
    for line in lines:
        extra = max(extra, line.get("initialized/expert_messages", 0.0) + line.get("initialized/replayed_messages", 0.0))
        if "eval/success" in line:
            points.append((line["step"] + extra, line["eval/success"]))
    return points


def solved_at(points: list[tuple[float, float]]) -> str:
    """Thousands of steps at the first evaluation that counts as solved."""
    return next((f"{steps / 1000:.0f}k" for steps, success in points if success >= SOLVED), "never")


def plot(figures: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for index, (side, runs) in enumerate(figures.items()):
        for number, one in enumerate(runs):
            steps, success = zip(*one["curve"], strict=True)
            axes.plot(
                [step / 1000 for step in steps],
                success,
                color=f"C{index}",
                alpha=0.8,
                linewidth=1.5 if index else 4.0,  # others lie on it while they have not learned anything
                label=None if number else side,
            )
    axes.set(xlabel="environment steps, thousands", ylabel="success on held-out starts", ylim=(-0.03, 1.03))
    axes.set_title("KeyDoor, 50 episodes from ordinary starts; one line a seed", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(figures), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=250_000)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {}
    for side in SIDES:
        figures[side] = [run(side, seed, arguments.steps, arguments.folder) for seed in arguments.seeds]
    print("| starts | seed | success on 100 held-out seeds | 95 % first reached at | wall-clock |\n|---|---|---|---|---|")
    for side, runs in figures.items():
        for seed, one in zip(arguments.seeds, runs, strict=True):
            print(f"| {side} | {seed} | {one['success']:.0%} | {solved_at(one['curve'])} | {one['seconds']:.0f} s |")
    if arguments.plot is not None:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
