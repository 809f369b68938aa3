"""Learning curves on HalfCheetah-v5: ours (experiment=halfcheetah) and stable-baselines3's PPO with equal hyper-parameters.

Both normalise observations and rewards by running moments and advantages by minibatch; what is compared is the return of
training episodes in the task's own units. Each finished run is one file of JSON lines, so that the command can be repeated
after an interruption and goes on with the runs that are missing.

    python benchmarks/halfcheetah_peers.py runs/halfcheetah_peers --seeds 1 2 3
    python benchmarks/halfcheetah_peers.py runs/halfcheetah_peers --seeds 1 2 3 --plot
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import provenance

from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.errors import UserError
from embodied_rl.files import write_atomic, write_atomic_with

LABELS = {"ours": "embodied_rl", "sb3": "stable-baselines3"}
SIDES = tuple(LABELS)
FINAL_SHARE = 0.1
"""A run's final return is the mean over the episodes that ended in this last share of its steps."""
NUM_BINS = 50
Episodes = list[tuple[int, float]]
"""(environment steps of all slots at the episode's end, return) in the order of the ends."""
Tell = Callable[[Episodes], None]


@dataclass(frozen=True)
class Run:
    """One finished run."""

    side: str
    seed: int
    total_steps: int
    overrides: tuple[str, ...]
    steps: np.ndarray
    """[E] int64 environment steps at the end of each episode."""
    returns: np.ndarray
    """[E] float64"""

    def final(self) -> float:
        """Mean return of the last tenth of the run. Raises UserError when no episode ended there."""
        last = self.returns[self.steps > (1 - FINAL_SHARE) * self.total_steps]
        if last.size == 0:
            raise UserError(
                f"No episode of {self.side} seed {self.seed} ended in the last {FINAL_SHARE:.0%} of {self.total_steps} steps. Train longer."
            )
        return float(last.mean())

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Centres [NUM_BINS] of equal parts of the run, and mean returns there [NUM_BINS] (interpolated where no episode ended)."""
        edges = np.linspace(0, self.total_steps, NUM_BINS + 1)
        centres = (edges[:-1] + edges[1:]) / 2
        which = np.clip(np.searchsorted(edges, self.steps, side="left") - 1, 0, NUM_BINS - 1)
        counts = np.bincount(which, minlength=NUM_BINS)
        sums = np.bincount(which, self.returns, minlength=NUM_BINS)
        full = counts > 0
        return centres, np.interp(centres, centres[full], sums[full] / counts[full])


def run_config(seed: int, total_steps: int, run_dir: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """What both sides are told."""
    # stable-baselines3 normalises advantages by minibatch only, so ours does too.
    equal = ["algorithm.normalize_advantage=minibatch", "logger=quiet", "checkpoint.every_steps=null"]
    own = [f"seed={seed}", f"total_steps={total_steps}", f"run_dir={run_dir}"]
    return load_train_config(["experiment=halfcheetah", *equal, *overrides, *own])


def train_ours(config: TrainConfig, tell: Tell) -> None:
    """The unmodified `Trainer.run`; the rollouts it collects are listened to."""
    from embodied_rl.trainer import Trainer

    with Trainer(config, Path(config.run_dir), command="benchmarks/halfcheetah_peers.py") as trainer:
        collector: Any = trainer.method.collector
        collect = collector.next_rollout

        def listening(iteration: int) -> Any:
            rollout = collect(iteration)
            ends = np.argwhere(rollout.terminated | rollout.truncated)
            assert [episode.slot for episode in rollout.episodes] == ends[:, 1].tolist()
            at = trainer.steps + (ends[:, 0] + 1) * config.sim.num_slots
            tell([(int(steps), episode.episode_return) for steps, episode in zip(at, rollout.episodes, strict=True)])
            return rollout

        collector.next_rollout = listening
        trainer.run()
        if trainer.interrupted:
            raise KeyboardInterrupt


def train_sb3(config: TrainConfig, tell: Tell) -> None:
    """stable-baselines3's PPO over DummyVecEnv and VecNormalize; the Monitor below them reports returns in the task's units."""
    from peers import ppo_arguments, vec_env
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Listener(BaseCallback):
        def _on_step(self) -> bool:
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            if ended:
                tell([(self.num_timesteps, float(total)) for total in ended])
            return True

    envs = vec_env(config)
    try:
        PPO(env=envs, **ppo_arguments(config)).learn(total_timesteps=config.total_steps, callback=Listener())
    finally:
        envs.close()


def run_path(folder: Path, side: str, seed: int) -> Path:
    return folder / f"{side}_seed{seed}.jsonl"


def run_once(folder: Path, side: str, seed: int, total_steps: int, overrides: Sequence[str]) -> None:
    """Train one side with one seed and write its file; nothing is left of a run that does not come to its end."""
    episodes: Episodes = []
    reported = 0

    def tell(ended: Episodes) -> None:
        nonlocal reported
        episodes.extend(ended)
        if ended and ended[-1][0] - reported >= total_steps / 10:
            reported = ended[-1][0]
            recent = np.mean([total for _, total in episodes[-20:]])
            print(f"{side} seed {seed}: {reported:,} of {total_steps:,} steps, return {recent:.0f}", file=sys.stderr, flush=True)

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        config = run_config(seed, total_steps, Path(temporary) / f"seed{seed}", overrides)
        {"ours": train_ours, "sb3": train_sb3}[side](config, tell)
    head = {
        "side": side,
        "seed": seed,
        "total_steps": total_steps,
        "overrides": list(overrides),
        "wall_clock_s": round(time.perf_counter() - started, 1),
        "made_with": provenance("mujoco", "stable-baselines3"),
    }
    lines = [head, *({"steps": steps, "return": total} for steps, total in episodes)]
    write_atomic(run_path(folder, side, seed), "".join(json.dumps(line) + "\n" for line in lines))


def read_run(path: Path) -> Run:
    """A finished run. Raises UserError when the file is not one."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps, returns = [row["steps"] for row in rows], [row["return"] for row in rows]
        told = head["side"], head["seed"], head["total_steps"], tuple(head["overrides"])
        return Run(*told, np.array(steps, np.int64), np.array(returns, np.float64))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is not a run of this benchmark: {error!r}. Remove it to run it again.") from error


def run_missing(folder: Path, seeds: Sequence[int], total_steps: int, overrides: Sequence[str] = ()) -> list[Run]:
    """Train what is not there yet, the sides in turns, and return all runs. Raises UserError when a file is of other settings."""
    runs = []
    for seed in seeds:
        for side in SIDES:
            path = run_path(folder, side, seed)
            if not path.exists():
                run_once(folder, side, seed, total_steps, overrides)
            run = read_run(path)
            if (run.total_steps, run.overrides) != (total_steps, tuple(overrides)):
                told = f"{run.total_steps} steps with overrides {list(run.overrides)}, not {total_steps} with {list(overrides)}"
                raise UserError(f"'{path}' is a run of {told}. Choose another folder.")
            runs.append(run)
    return runs


def finals_of(runs: Sequence[Run], side: str) -> np.ndarray:
    """[S] final returns of a side's seeds."""
    return np.array([run.final() for run in runs if run.side == side])


def spread(finals: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; 0 for one) over seeds."""
    return float(finals.mean()), float(finals.std(ddof=1)) if finals.size > 1 else 0.0


def report(runs: Sequence[Run]) -> str:
    """Final means and spreads, and whether each side's mean lies within the other's spread; the figure is the last line."""
    finals = {side: finals_of(runs, side) for side in SIDES}
    lines = [f"return of training episodes in the last {FINAL_SHARE:.0%} of the steps"]
    for side in SIDES:
        mean, std = spread(finals[side])
        lines.append(f"{LABELS[side]:<18} {mean:7.0f} ± {std:.0f} over seeds ({', '.join(f'{value:.0f}' for value in finals[side])})")
    for side, other in (SIDES, SIDES[::-1]):
        mean, (centre, std) = spread(finals[side])[0], spread(finals[other])
        by_std = "within" if abs(mean - centre) <= std else "outside"
        by_range = "within" if finals[other].min() <= mean <= finals[other].max() else "outside"
        spreads = f"{LABELS[other]}'s mean ± std, {by_range} its seeds' range {finals[other].min():.0f} to {finals[other].max():.0f}"
        if finals[other].size > 1:  # one seed has no spread
            lines.append(f"mean of {LABELS[side]} lies {by_std} {spreads}")
    (ours, ours_std), (theirs, theirs_std) = spread(finals["ours"]), spread(finals["sb3"])
    # A quotient of returns says something only where both are better than nothing.
    ratio = f"ratio {ours / theirs:.2f}" if min(ours, theirs) > 0 else "no ratio: not both are positive"
    return "\n".join(
        [*lines, f"figure: final return ours {ours:.0f} ± {ours_std:.0f}, stable-baselines3 {theirs:.0f} ± {theirs_std:.0f} ({ratio})"]
    )


def plot(runs: Sequence[Run], path: Path) -> Path:
    """One thin line per seed, the mean of each side with its standard deviation over seeds as a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side, colour in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
        curves = [run.curve() for run in runs if run.side == side]
        centres, values = curves[0][0], np.stack([curve[1] for curve in curves])
        for row in values:
            axes.plot(centres, row, color=colour, alpha=0.35, linewidth=0.8)
        mean, std = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(NUM_BINS)
        axes.plot(centres, mean, color=colour, linewidth=2, label=f"{LABELS[side]}, mean of {len(values)} seeds")
        axes.fill_between(centres, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.set(title="HalfCheetah-v5, PPO, equal hyper-parameters", xlabel="environment steps", ylabel="return of training episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    return write_atomic_with(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="where the runs' files are, and are written")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=500_000, help="environment steps of each run")
    parser.add_argument("--plot", action="store_true", help="also draw the curves")
    parser.add_argument("--media", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "media", help="folder of the picture")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the configuration, for both sides: algorithm.num_epochs=4")
    arguments = parser.parse_args()
    # As `python -m embodied_rl.train` does, and before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        runs = run_missing(arguments.folder, arguments.seeds, arguments.steps, arguments.overrides)
        text = report(runs)
        if arguments.plot:
            print(f"curves: {plot(runs, arguments.media / 'halfcheetah_peers.png')}")
        print(text)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
