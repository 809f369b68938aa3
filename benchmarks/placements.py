"""Where an iteration's time goes in each placement that a processor alone allows.

``python benchmarks/placements.py``: the main job (PPO from state) and the text experiment, each in one process, with a process of its own
that plays, on two training ranks, and as actors of a Ray cluster on this machine. Same seed, same numbers: only the time differs.

Medians over iterations, of which the first few are left out. Columns of one iteration:

- simulate: the collector waits for simulators; generate: it turns observations into actions (both measured where that happens);
- train: rewards, advantages, update; publish: the new weights are with whoever acts;
- wait: what remains of collecting: the way of requests and episodes between processes;
- other: logging and the rest of the loop.

With max_staleness 1, simulators and generation go on while training: what they do then is in no column. Multiplexed,
some of the processes that generate stand still meanwhile and leave training their cores.
A placement that an experiment cannot have is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import provenance, text_table

PLACEMENTS: dict[str, tuple[str, ...]] = {
    "in one process": ("hybrid=collocated",),
    "player apart": ("hybrid=disaggregated",),
    "two FSDP ranks": ("hybrid=fsdp2",),
    "Ray": ("hybrid=ray",),
}
AHEAD = {"player apart, staleness 1": ("hybrid=disaggregated",), "multiplexed, staleness 1": ("hybrid=multiplexed",)}
"""Placements that play while they train."""
FIXED_ROLLOUTS = ("pushcube", "pendulum")
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "pushcube": ("sim=maniskill_pushcube", "sim.num_slots=16"),
    "pendulum": ("sim=pendulum",),
    "cartpole_grpo": ("sim=cartpole", "algorithm=grpo"),
    # From a model that knows nothing, so without filters, which would reject nearly all that it plays.
    "text": (
        "experiment=frozenlake_text",
        "algorithm.warm_start=null",
        "algorithm.groups.filters=[]",
        "algorithm.groups.groups_per_step=4",
    ),
}
COMMON = ("evaluation.every_steps=null", "checkpoint.every_steps=null", "stop_at_success=null", "logger=quiet", "video.enabled=no")
PARTS = ("simulate", "generate", "train", "publish", "wait", "other")
_NEVER = 10**9
_RESULT = "measured: "


def measure(overrides: Sequence[str], iterations: int, skipped: int) -> list[dict[str, float]]:
    """Seconds of each part of each iteration, ``whole`` and ``steps`` beside; in this process. Raises UserError."""
    from embodied_rl.compose import load_train_config
    from embodied_rl.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        config = load_train_config([*COMMON, *overrides, f"total_steps={_NEVER}", f"run_dir={folder}"])
        with Trainer(config, Path(folder), command="benchmarks/placements.py") as trainer:
            clock = _Clock(trainer, iterations + skipped)
            trainer.run()
    return clock.rows[skipped:]


class _Clock:
    """Measures a trainer's calls from outside, and ends it."""

    def __init__(self, trainer: Any, iterations: int) -> None:
        self.rows: list[dict[str, float]] = []
        self._trainer, self._iterations = trainer, iterations
        self._seconds = dict.fromkeys(("collect", "prepare", "update", "publish"), 0.0)
        for name in ("collect", "prepare", "update"):
            setattr(trainer.method, name, self._timed(name, getattr(trainer.method, name)))
        trainer._publish = self._timed("publish", trainer._publish)
        self._report, trainer._report = trainer._report, self._reported
        self._began = time.perf_counter()
        restart = trainer._restart_episodes

        def begin_clock() -> None:
            restart()
            self._began = time.perf_counter()

        trainer._restart_episodes = begin_clock

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._seconds[name] += time.perf_counter() - started

        return timed

    def _reported(self, experience: Any, stats: dict[str, float], seconds: float) -> None:
        self._report(experience, stats, seconds)
        now = time.perf_counter()
        metrics, spent = self._trainer.metrics, self._seconds
        simulate = metrics.get("roles/simulate_s", metrics["time/simulate_s"])
        generate = metrics.get("roles/act_s", metrics["time/act_s"])
        row = {"whole": now - self._began, "steps": float(experience.num_steps), "simulate": simulate, "generate": generate}
        row |= {"train": spent["prepare"] + spent["update"], "publish": spent["publish"]}
        row["wait"] = max(spent["collect"] - simulate - generate, 0.0)
        row["other"] = max(row["whole"] - spent["collect"] - row["train"] - row["publish"], 0.0)
        self.rows.append(row)
        self._seconds.update(dict.fromkeys(spent, 0.0))
        self._began = time.perf_counter()
        if len(self.rows) == self._iterations:
            self._trainer.steps = _NEVER


def where_of(placement: str, experiment: str) -> tuple[str, ...]:
    """The overrides that choose a placement."""
    if placement not in AHEAD:
        return PLACEMENTS[placement]
    key = "algorithm.max_staleness" if experiment in FIXED_ROLLOUTS else "algorithm.groups.max_staleness"
    return (*AHEAD[placement], f"{key}=1")


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each column."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def report(results: Mapping[tuple[str, str], dict[str, float] | str]) -> str:
    """One table of all experiments and placements, and the figure; a text in place of numbers says why there are none."""
    header = ["experiment", "placement", "ms", "steps/s", *(f"{part} ms" for part in PARTS)]
    rows, notes = [], []
    for (experiment, placement), result in results.items():
        if isinstance(result, str):
            rows.append([experiment, placement, *["-"] * (len(header) - 2)])
            notes.append(f"{experiment}, {placement}: {result}")
            continue
        cells = [f"{1e3 * result['whole']:.1f}", f"{result['steps'] / result['whole']:.0f}"]
        rows.append([experiment, placement, *cells, *(f"{1e3 * result[part]:.1f}" for part in PARTS)])
    return "\n".join([text_table(header, rows), "", *notes, figure(results)])


def figure(results: Mapping[tuple[str, str], dict[str, float] | str]) -> str:
    """Time of an iteration in multiples of that in one process."""
    parts = []
    for experiment in dict.fromkeys(name for name, _ in results):
        base = results.get((experiment, "in one process"))
        others = {place: found for (name, place), found in results.items() if name == experiment and place != "in one process"}
        if isinstance(base, str) or base is None:
            continue
        ratios = [f"{place} {found['whole'] / base['whole']:.2f}x" for place, found in others.items() if not isinstance(found, str)]
        parts.append(f"{experiment}: {', '.join(ratios) or 'nothing else'}")
    return f"figure: an iteration's time in multiples of one process. {'; '.join(parts)}"


def measured_in_a_process(overrides: Sequence[str], iterations: int, skipped: int) -> dict[str, float] | str:
    """`measure` in a process of its own, so that placements do not meet; the reason where it is refused."""
    command = [sys.executable, __file__, "--one", *overrides, "--iterations", str(iterations), "--skipped", str(skipped)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    found = next((line for line in done.stdout.splitlines() if line.startswith(_RESULT)), None)
    if found is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, float] | str = json.loads(found.removeprefix(_RESULT))
    return result


def main() -> None:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=["pushcube", "text"])
    parser.add_argument("--placements", nargs="+", choices=[*PLACEMENTS, *AHEAD], default=[*PLACEMENTS, *AHEAD])
    parser.add_argument("--iterations", type=int, default=12, help="measured")
    parser.add_argument("--skipped", type=int, default=3, help="before them")
    parser.add_argument("--overrides", nargs="*", default=[], help="for all runs, such as algorithm.rollout_steps=32")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        from embodied_rl.errors import UserError

        try:
            found: dict[str, float] | str = medians(measure(given.one, given.iterations, given.skipped))
        except UserError as refused:
            found = str(refused)
        print(_RESULT + json.dumps(found), flush=True)
        return
    results: dict[tuple[str, str], dict[str, float] | str] = {}
    for experiment in given.experiments:
        for placement in given.placements:
            overrides = [*EXPERIMENTS[experiment], *where_of(placement, experiment), *given.overrides]
            results[experiment, placement] = measured_in_a_process(overrides, given.iterations, given.skipped)
            print(report({(experiment, placement): results[experiment, placement]}).splitlines()[2], file=sys.stderr, flush=True)
    print(provenance("torch", "ray"))
    print(report(results))


if __name__ == "__main__":
    main()
