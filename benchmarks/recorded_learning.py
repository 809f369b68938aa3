"""Learning from recorded episodes, side by side: what is compared gets the same data, the same answers or the same fresh steps.

Four comparisons on ManiSkill PushCube-v1, each run through the training command and continued where it was interrupted:

    cloning   behaviour cloning of 3 to 100 episodes of the expert
    dagger    DAgger against behaviour cloning at (nearly) equal numbers of the expert's answers
    offline   implicit Q-learning and AWAC against behaviour cloning on the same random, mediocre and expert episodes
    mixed     RLPD against soft actor-critic and PPO at equal fresh steps, with a reward at success alone

    python benchmarks/recorded_learning.py --seeds 1 2 3
    python benchmarks/recorded_learning.py --seeds 1 2 3 --only offline --plot
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from learning_curves import results_of, train
from tables import markdown_table

from embodied_rl.loggers.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("comparison", "learner", "data", "gradient or fresh steps", "success on 100 held-out seeds, by seed", "mean")
QUIET = ("video.enabled=no", "logger=quiet")
EE = "sim.kwargs.control_mode=pd_ee_delta_pos"
MIXED_EPISODES = {"random": 100, "mediocre": 60, "expert": 40}


@dataclass(frozen=True)
class Contender:
    """One learner of a comparison."""

    name: str
    experiment: str
    overrides: tuple[str, ...] = ()
    needs_mixed_data: bool = False


COMPARISONS: dict[str, tuple[Contender, ...]] = {
    "cloning": tuple(Contender(f"bc {n} episodes", "push_bc", (f"algorithm.recorded.expert_episodes={n}",)) for n in (3, 5, 10, 20, 100)),
    "dagger": (
        Contender("dagger 5 episodes + 64", "push_dagger", ("total_steps=64",)),
        Contender("bc 10 episodes", "push_bc", ("algorithm.recorded.expert_episodes=10",)),
        Contender("dagger 5 episodes + 192", "push_dagger", ("total_steps=192",)),
        Contender("bc 20 episodes", "push_bc", ("algorithm.recorded.expert_episodes=20",)),
    ),
    "offline": (
        Contender("bc, all episodes", "push_bc", ("algorithm.recorded.only_success=false",), True),
        Contender("bc, successful ones", "push_bc", (), True),
        Contender("iql", "push_offline", (), True),
        Contender("awac", "push_offline", ("algorithm.off_policy.update=awac", "algorithm.off_policy.temperature=0.05"), True),
    ),
    "mixed": (
        Contender("rlpd, 20 episodes", "push_mixed"),
        Contender("sac from scratch", "push_mixed", ("algorithm.off_policy.recorded_share=0",)),
        Contender(
            "ppo from scratch, dense reward",
            "maniskill_pushcube",
            (EE, "total_steps=10_000", "evaluation.every_steps=2_048", "hybrid.num_threads=1"),
        ),
    ),
}


def record_mixed(runs: Path, seed: int) -> list[Path]:
    """Episodes of random actions, of a policy cloned from five episodes, sampled, and of the expert. Returns their folders."""
    mediocre = runs / "cloning" / "bc_5_episodes" / f"seed{seed}"
    if results_of(mediocre) is None:
        train("push_bc", seed, mediocre, (*QUIET, "algorithm.recorded.expert_episodes=5"))
    who = {"random": ("sim=maniskill_pushcube", EE, "policy=random"), "expert": ("sim=maniskill_pushcube", EE, "policy=expert")}
    who["mediocre"] = (f"checkpoint={mediocre}", "sample=true")
    folders = []
    for name, number in MIXED_EPISODES.items():
        folder = runs / "recordings" / f"seed{seed}" / name
        arguments = (*who[name], f"num_episodes={number}", f"seed={100_000 * seed}", f"output={folder}", "resume=true")
        subprocess.run([sys.executable, "-m", "embodied_rl.record", *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
        folders.append(folder)
    return folders


def folder_of(runs: Path, comparison: str, contender: Contender, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "_" for letter in contender.name)
    return runs / comparison / name / f"seed{seed}"


def run_all(runs: Path, comparisons: Sequence[str], seeds: Sequence[int], further: Sequence[str]) -> None:
    for seed in seeds:
        for comparison in comparisons:
            for contender in COMPARISONS[comparison]:
                folder = folder_of(runs, comparison, contender, seed)
                if results_of(folder) is not None:
                    continue
                data = []
                if contender.needs_mixed_data:
                    data = [f"recording=[{','.join(str(path) for path in record_mixed(runs, seed))}]"]
                train(contender.experiment, seed, folder, (*QUIET, *contender.overrides, *data, *further))


def row(runs: Path, comparison: str, contender: Contender, seeds: Sequence[int]) -> list[str] | None:
    """One line of the table; None where no seed is finished."""
    folders = {seed: folder_of(runs, comparison, contender, seed) for seed in seeds}
    finished: dict[int, dict[str, Any]] = {seed: found for seed, folder in folders.items() if (found := results_of(folder)) is not None}
    if not finished:
        return None
    last = [read_metrics(folders[seed])[-1] for seed in finished]
    labels = [figures.get("data/labels", figures.get("data/recorded_steps", 0.0)) for figures in last]
    successes = [float(found["success"]) for found in finished.values()]
    return [
        comparison,
        contender.name,
        ", ".join(f"{int(count):,}" for count in labels),
        ", ".join(f"{found['steps']:,}" for found in finished.values()),
        ", ".join(f"{success:.0%}" for success in successes),
        f"{np.mean(successes):.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recorded_learning", help="folder of the runs")
    parser.add_argument("--plot", action="store_true", help="train nothing; print the table of what is finished")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the configuration, for every run")
    arguments = parser.parse_args()
    runs = arguments.runs.resolve()
    if not arguments.plot:
        run_all(runs, arguments.only, arguments.seeds, arguments.overrides)
    rows = [row(runs, name, contender, arguments.seeds) for name in arguments.only for contender in COMPARISONS[name]]
    print(markdown_table(HEADER, [found for found in rows if found is not None]))
    print(f"figure: {sum(found is not None for found in rows)} of {len(rows)} learners have a finished run")


if __name__ == "__main__":
    main()
