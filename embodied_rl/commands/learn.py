"""`embodied_rl.learn`: a run from Python, with what it leaves behind as an object."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.commands.cell_source import importable
from embodied_rl.commands.cli import command_line
from embodied_rl.errors import UserError, brief
from embodied_rl.files import next_free
from embodied_rl.run_folder import SOURCE_FOLDER

if TYPE_CHECKING:
    from embodied_rl.commands.load_policy import LoadedPolicy
    from embodied_rl.loggers import Logger


@dataclass(frozen=True)
class Run:
    """A run's folder. What it reads is read anew each time, so that it may be of a run that goes on elsewhere."""

    path: Path

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json. Raises UserError where the run has not ended with an evaluation."""
        file = self.path / "results.json"
        if not file.is_file():
            raise UserError(f"{brief(self.path)} holds no results.json yet: the run was not evaluated to its end. Go on with run.resume().")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """{name: [n] float64} over the n rows of metrics.jsonl, ``step`` among them; NaN where a row has none of that name."""
        from embodied_rl.loggers.jsonl import read_metrics

        rows = read_metrics(self.path)
        numbers = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
        names = ["step", *sorted(numbers - {"step"})]
        return {name: np.array([value if isinstance(value := row.get(name), int | float) else np.nan for row in rows]) for name in names}

    @property
    def report(self) -> Path:
        """The page about the run, written where it is not there yet. Raises UserError."""
        from embodied_rl.reports import write_report

        page = self.path / "report.html"
        return page if page.is_file() else write_report([self.path])

    @property
    def checkpoint(self) -> Path:
        """The last one."""
        return self.path / "checkpoints" / "last"

    def resume(self, *, total_steps: int | None = None, overrides: Sequence[str] = ()) -> Run:
        """Go on with the run, to `total_steps` where they are given, and return it. Raises as `learn`."""
        more = [] if total_steps is None else [f"total_steps={total_steps}", "stop_at_success=null"]
        source = self.path / SOURCE_FOLDER
        if source.is_dir() and str(source.resolve()) not in sys.path:
            sys.path.insert(0, str(source.resolve()))
        return trained([*more, *overrides, f"resume={self.path}"], source)

    def load_policy(self) -> LoadedPolicy:
        """The trained policy, to be asked for actions."""
        from embodied_rl.commands.load_policy import load_policy

        return load_policy(self.path)


def learn(
    sim: str | Callable[..., Any],
    *,
    policy: str = "mlp",
    algorithm: str = "ppo",
    total_steps: int = 20_000,
    seed: int = 1,
    run_dir: Path | str | None = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Train a policy in a simulator, evaluate it on held-out seeds, and return the run.

    Args:
        sim: a ``gymnasium.Env`` class (or VectorEnv, or SimEnv), a function that makes one, the id of a registered gymnasium task
            (``"Pendulum-v1"``), a name of the catalogue (``"fetch_reach"``), or ``"package.module:Name"``. The source of a class of a
            notebook's cell, or of the script that runs, is what simulator processes get.
        policy: a file of ``configs/policy``.
        algorithm: a file of ``configs/algorithm``.
        total_steps: environment steps, at most.
        seed: the same seed gives the same run.
        run_dir: where the run goes; None: a new folder below ``runs/``.
        overrides: any other ``key=value`` of the command line.

    Raises:
        UserError: and its kinds, for everything a user can mend.
        SimFault, NonFiniteError: see `embodied_rl.trainer.Trainer.run`.
    """
    name = sim if isinstance(sim, str) else sim.__name__
    given = [word for word in overrides if not word.startswith("run_dir=")]
    if run_dir is None:
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name.rpartition(":")[2])
        run_dir = next_free(Path("runs") / stem / f"{datetime.now():%Y%m%d-%H%M%S}-seed{seed}")
    words = [*_sim_words(sim, Path(run_dir)), f"policy={policy}", f"algorithm={algorithm}", f"total_steps={total_steps}", f"seed={seed}"]
    return trained([*words, *given, f"run_dir={run_dir}"], Path(run_dir) / SOURCE_FOLDER)


def _sim_words(sim: str | Callable[..., Any], run_dir: Path) -> list[str]:
    """The overrides that name a simulator."""
    from embodied_rl.config import group_names

    if not isinstance(sim, str):
        return ["sim=custom", f"sim.target={importable(sim, run_dir / SOURCE_FOLDER)}"]
    if sim in group_names("sim"):
        return [f"sim={sim}"]
    import gymnasium

    if sim in gymnasium.registry or "-v" in sim:
        return ["sim=custom", "sim.target=embodied_rl.sim.robots.gymnasium:make", f"+sim.task={sim}"]
    return ["sim=custom", f"sim.target={sim}"] if ":" in sim else [f"sim={sim}"]


def trained(words: list[str], source: Path | None = None, loggers: Sequence[Logger] = ()) -> Run:
    """Train as the command line would with these words; `source` is a folder whose modules the simulators need.

    `loggers`: see `Trainer`. Raises as `learn`.
    """
    from embodied_rl.commands.train import train
    from embodied_rl.config.compose import load_train_config

    variable = f"PYTHONPATH={shlex.quote(str(source))} " if source is not None and source.is_dir() else ""
    return Run(train(load_train_config(words), overrides=words, command=variable + command_line("train", words), loggers=loggers))
