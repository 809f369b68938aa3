"""Run experiments with several seeds through the training command, draw their curves and print the table of results.

Runs go one after another, because each takes all cores. Finished ones (with a results.json) are skipped, interrupted ones
continue from their last checkpoint. ``--plot`` draws and prints what is finished and trains nothing.

    python benchmarks/learning_curves.py --experiments maniskill_pushcube fetch_reach --seeds 1 2 3
    python benchmarks/learning_curves.py --experiments maniskill_pushcube fetch_reach --seeds 1 2 3 --plot
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tables import markdown_table

from embodied_rl.config import group_names
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.files import next_free, write_atomic_with

ROOT = Path(__file__).resolve().parents[1]
METRICS = {
    "episode/success": "success rate of the last 100 training episodes",
    "eval/success": "success rate of evaluations during training",
    "episode/return": "mean return of the last 100 training episodes",
}
"""What is drawn: the first that the run has."""
NUM_POINTS = 200
HEADER = ("experiment", "seed", "held-out success (95% interval)", "environment steps", "training", "total", "steps/s")


def results_of(run_dir: Path) -> dict[str, Any] | None:
    """The run's results.json, or None where it is not finished."""
    path = run_dir / "results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def train(experiment: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> bool:
    """Run or continue one experiment; whether it came to its end. A run that left no checkpoint is moved aside and begun again."""
    from embodied_rl.checkpoint import find_last

    if run_dir.exists() and find_last(run_dir) is None:
        run_dir.rename(next_free(run_dir.with_name(f"{run_dir.name}.unfinished")))
    command = [f"experiment={experiment}", f"seed={seed}", f"run_dir={run_dir}", "resume=auto", *overrides]
    print(f"{experiment} seed {seed}: python -m embodied_rl.train {' '.join(command)}", file=sys.stderr, flush=True)
    # The checkout's own package, wherever this was started from.
    with subprocess.Popen([sys.executable, "-m", "embodied_rl.train", *command], cwd=ROOT, stdout=sys.stderr) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C has reached the run too, and it saves itself
            raise
    finished = status == 0 and results_of(run_dir) is not None
    if not finished:
        print(f"{experiment} seed {seed}: not finished (exit status {status})", file=sys.stderr, flush=True)
    return finished


def seconds_text(seconds: float) -> str:
    """``4:05`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table_row(experiment: str, seed: int, results: dict[str, Any]) -> list[str]:
    """One row of the table, out of a results.json; the return stands in for success where the task has no notion of it."""
    if results["success"] is None:
        low, high = results["return_mean_interval_95"]
        outcome = f"return {results['return_mean']:.4g} ({low:.4g} to {high:.4g})"
    else:
        low, high = results["success_interval_95"]
        outcome = f"{results['success']:.1%} of {results['num_episodes']} ({100 * low:.1f}–{100 * high:.1f}%)"
    steps, train_s = results["steps"], results["train_wall_clock_s"]
    times = [seconds_text(train_s), seconds_text(results["wall_clock_s"])]
    return [experiment, str(seed), outcome, f"{steps:,}", *times, f"{steps / train_s:,.0f}" if train_s > 0 else "–"]


def read_curve(run_dir: Path) -> tuple[str, np.ndarray, np.ndarray]:
    """(metric, steps [E], values [E]) of a run's metrics.jsonl. Raises UserError when it has neither success nor return."""
    from embodied_rl.loggers.jsonl import read_metrics

    rows = read_metrics(run_dir)
    for metric in METRICS:
        points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            return metric, np.array(steps), np.array(values, np.float64)
    raise UserError(f"'{run_dir}' has no {' or '.join(METRICS)} in its metrics: no episode ended. Train longer.")


def mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of (steps, values) curves over the steps that all of them have: [NUM_POINTS] each, [0] where there are none."""
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    grid = np.linspace(first, last, NUM_POINTS if first <= last else 0)
    return grid, np.mean([np.interp(grid, steps, values) for steps, values in curves], axis=0)


def plot(experiment: str, run_dirs: dict[int, Path], path: Path) -> Path:
    """A thin line per seed, and their mean as far as all of them went."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves = {seed: read_curve(run_dir) for seed, run_dir in run_dirs.items()}
    metric = next(iter(curves.values()))[0]
    for seed, (_, steps, values) in curves.items():
        axes.plot(steps, values, linewidth=0.9, alpha=0.7, label=f"seed {seed}")
    if len(curves) > 1:
        axes.plot(*mean_curve([(steps, values) for _, steps, values in curves.values()]), color="black", linewidth=2, label="mean")
    axes.set_title(experiment, fontsize=11)
    axes.set_xlabel("environment steps")
    axes.set_ylabel(METRICS[metric], fontsize=8)
    if metric.endswith("success"):
        axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return write_atomic_with(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def summarise(runs: Path, experiments: Sequence[str], seeds: Sequence[int], media: Path) -> str:
    """Draw one picture per experiment and return the table of what is finished; the last line says how much that is."""
    rows: list[list[str]] = []
    for experiment in experiments:
        folders = {seed: runs / experiment / f"seed{seed}" for seed in seeds}
        finished = {seed: results for seed, folder in folders.items() if (results := results_of(folder)) is not None}
        rows += [table_row(experiment, seed, results) for seed, results in finished.items()]
        if finished:
            picture = plot(experiment, {seed: folders[seed] for seed in finished}, media / f"curve_{experiment}.png")
            print(f"curves: {picture}", file=sys.stderr)
    return f"{markdown_table(HEADER, rows)}\n\nfigure: {len(rows)} of {len(experiments) * len(seeds)} runs finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--experiments", nargs="+", required=True, help="names of configs/experiment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning_curves", help="folder of the runs")
    parser.add_argument("--plot", action="store_true", help="train nothing; draw the curves and print the table of what is finished")
    parser.add_argument("--media", type=Path, default=ROOT / "docs" / "media", help="folder of the pictures")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the configuration, for every run: video.enabled=no")
    arguments = parser.parse_args()
    known = group_names("experiment")
    unknown = [name for name in arguments.experiments if name not in known]
    try:
        if unknown:
            raise UserError(f"Experiment '{unknown[0]}' is not known.{did_you_mean(unknown[0], known)}")
        runs = arguments.runs.resolve()
        if arguments.plot:
            print(summarise(runs, arguments.experiments, arguments.seeds, arguments.media))
            return
        # Seeds outside: after an interruption every experiment has something to show.
        wanted = [(experiment, seed) for seed in arguments.seeds for experiment in arguments.experiments]
        folders = {(experiment, seed): runs / experiment / f"seed{seed}" for experiment, seed in wanted}
        done = [results_of(folders[key]) is not None or train(*key, folders[key], arguments.overrides) for key in wanted]
    except UserError as error:
        sys.exit(f"error: {error}")
    print(f"figure: {sum(done)} of {len(done)} runs finished")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
