"""``python -m embodied_rl.evaluate checkpoint=PATH``: success and return of a checkpoint on held-out seeds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.cli import Argument, Command, command_line, run_command

if TYPE_CHECKING:
    from rich.table import Table

    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.config import SimConfig
    from embodied_rl.generation.base import ActedBatch, Generator
    from embodied_rl.reporting import Figures
    from embodied_rl.types import EpisodeSummary, Observation, SimSpec

EVALUATION_FILE = "evaluation.json"

COMMAND = Command(
    name="evaluate",
    summary="Play held-out seeds, which training never saw, with a checkpoint's policy and report success and return.",
    arguments=(
        Argument("checkpoint", str, "a run's folder (its last checkpoint), or a checkpoint's"),
        Argument("num_episodes", int, "episodes to play, one per seed", 100),
        Argument("seed", int, "the held-out seeds are 2**30 + seed, 2**30 + seed + 1, …", 0),
        Argument(
            "policy", str, "the checkpoint's policy, or random actions for comparison", "checkpoint", choices=("checkpoint", "random")
        ),
        Argument("sim", str, "another simulator with the same spaces; default: the checkpoint's own", None),
        Argument("output", str, "where to write JSON; default: evaluation.json in the run's folder", None),
    ),
    prefixes={"sim.": "change a value of the simulator's configuration, e.g. sim.num_slots=4"},
    examples=(
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1",
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1/checkpoints/best num_episodes=500 seed=1000",
    ),
)


@dataclass(frozen=True)
class EvaluationResult:
    """Episodes of one evaluation and what they say."""

    sim: SimConfig
    spec: SimSpec
    policy: str
    """checkpoint or random."""
    episodes: Sequence[EpisodeSummary]
    figures: Figures
    wall_clock_s: float


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    num_episodes: int,
    *,
    seed: int = 0,
    sim: SimConfig | None = None,
    policy: str = "checkpoint",
) -> EvaluationResult:
    """Play `num_episodes` held-out seeds, each once, with the policy's mode (or with random actions).

    Args:
        checkpoint: what to evaluate.
        num_episodes: >= 1.
        seed: the seeds are 2**30 + seed + 0 … num_episodes - 1.
        sim: another simulator configuration; None: the checkpoint's.
        policy: "checkpoint" or "random".

    Raises:
        IncompatibleCheckpointError: the simulator's spaces are not those that the policy was trained with.
        UserError, SimFault: from the simulator.
    """
    from embodied_rl.reporting import summarise
    from embodied_rl.rollout.evaluation import evaluate
    from embodied_rl.sim.manager import EnvManager
    from embodied_rl.sim.seeding import EpisodeSeeds

    started = time.perf_counter()
    wanted = checkpoint.config.sim if sim is None else sim
    # More slots than episodes would start simulators for nothing.
    slots = min(wanted.num_slots, num_episodes)
    with EnvManager.from_config(wanted, EpisodeSeeds.held_out(seed), num_slots=slots) as manager:
        spec = manager.spec
        generator = make_generator(checkpoint, spec, policy=policy, same_task=is_own_task(checkpoint, wanted), seed=seed)
        episodes = evaluate(manager, generator, num_episodes, first_seed=seed)
    figures = summarise(episodes, spec.reports_success)
    return EvaluationResult(wanted, spec, policy, episodes, figures, time.perf_counter() - started)


def is_own_task(checkpoint: Checkpoint, sim: SimConfig) -> bool:
    """Whether `sim` names what the policy was trained in; otherwise the user asked for a transfer, and equal spaces are enough."""
    trained = checkpoint.config.sim
    return (sim.name, sim.task) == (trained.name, trained.task)


def make_generator(
    checkpoint: Checkpoint, spec: SimSpec, *, policy: str = "checkpoint", same_task: bool = True, seed: int = 0
) -> Generator:
    """What acts: the checkpoint's policy with its weights loaded, or random actions drawn from `seed`.

    Raises:
        IncompatibleCheckpointError: the policy does not fit the simulator `spec`, or the tensors do not fit the policy.
    """
    if policy == "random":
        from embodied_rl.generation.random_backend import RandomGenerator

        return NoisyGenerator(RandomGenerator(spec), spec, seed)
    from embodied_rl.checkpoint import check_compatible, check_tensors
    from embodied_rl.generation.torch_backend import TorchGenerator
    from embodied_rl.policies.actor_critic import build_policy

    check_compatible(checkpoint, spec, same_task=same_task)
    module = build_policy(checkpoint.config.policy, spec)
    check_tensors(checkpoint, module.state_dict())
    module.load_state_dict(checkpoint.policy)
    module.train(False)
    generator = TorchGenerator(module)
    generator.publish(0)
    return generator


class NoisyGenerator:
    """Draws the noise that a deterministic caller does not give, so that random actions are random. Implements `Generator`."""

    def __init__(self, generator: Generator, spec: SimSpec, seed: int) -> None:
        self._generator, self._action, self._random = generator, spec.action, np.random.default_rng(seed)

    @property
    def version(self) -> int:
        return self._generator.version

    @version.setter
    def version(self, version: int) -> None:
        self._generator.version = version

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        if noise is None:
            shape = (len(slots), self._action.dim)
            noise = (
                self._random.random(shape, np.float32)
                if self._action.kind == "discrete"
                else self._random.standard_normal(shape, np.float32)
            )
        self._generator.send(slots, observation, noise)

    def recv(self) -> ActedBatch:
        return self._generator.recv()

    def publish(self, version: int) -> None:
        self._generator.publish(version)


def choose_sim(checkpoint: Checkpoint, name: str | None, overrides: Mapping[str, Any]) -> SimConfig:
    """The checkpoint's simulator configuration, or the named one, with values such as ``{"sim.num_slots": 4}`` changed.

    Workers and groups shrink with the number of slots unless they are given themselves.

    Raises:
        UserError: an unknown simulator, key or value.
    """
    import dataclasses

    from embodied_rl.config import SimConfig, load_sim_config
    from embodied_rl.errors import UserError

    base = checkpoint.config.sim if name is None or name == checkpoint.config.sim.name else load_sim_config(name)
    data = dataclasses.asdict(base)
    for key, value in overrides.items():
        _, first, *rest = key.split(".")
        if not rest:
            data[first] = value
        elif first == "kwargs" and len(rest) == 1:
            data["kwargs"] = {**data["kwargs"], rest[0]: value}
        else:
            raise UserError(f"Configuration key '{key}' is not known: only sim.KEY and sim.kwargs.KEY can be changed.")
    slots = data["num_slots"]
    if isinstance(slots, int) and slots >= 1:
        for limited in ("num_workers", "pipeline_groups"):
            if f"sim.{limited}" not in overrides and data[limited] is not None:
                data[limited] = min(data[limited], slots)
    return SimConfig.from_dict(data)


def result_table(result: EvaluationResult) -> Table:
    """What the command prints."""
    from rich import box
    from rich.table import Table

    figures = result.figures
    title = f"{result.spec.task}, {result.policy} policy, {figures.num_episodes} held-out seeds {figures.seeds[0]} … {figures.seeds[1]}"
    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    for column in ("", "value", "95% interval"):
        table.add_column(column, justify="left" if not column else "right")
    for label, rate, interval in (
        ("success (once)", figures.success, figures.success_interval),
        ("success (at end)", figures.success_at_end, figures.success_at_end_interval),
    ):
        if rate is not None and interval is not None:
            table.add_row(label, f"{rate:.1%}", f"{100 * interval[0]:.1f} – {100 * interval[1]:.1f}%")
    low, high = figures.return_interval
    table.add_row("return", f"{figures.return_mean:.4g} ± {figures.return_std:.3g}", f"{low:.4g} – {high:.4g}")
    table.add_row("episode length", f"{figures.length_mean:.1f}", "")
    return table


def result_document(result: EvaluationResult, checkpoint: Checkpoint, command: str) -> dict[str, Any]:
    """What evaluation.json holds: figures, provenance and a row per episode."""
    import dataclasses

    from embodied_rl.reporting import episode_rows
    from embodied_rl.versions import machine, versions

    return {
        "task": result.spec.task,
        "policy": result.policy,
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        **result.figures.to_dict(),
        "wall_clock_s": round(result.wall_clock_s, 2),
        "command": command,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "sim": dataclasses.asdict(result.sim),
        "versions": versions(),
        "machine": machine(),
        "episodes": episode_rows(result.episodes),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    run_command(lambda: _main(arguments))


def _main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)
    from rich.console import Console

    from embodied_rl.checkpoint import load_checkpoint
    from embodied_rl.errors import UserError
    from embodied_rl.files import write_atomic

    if values["num_episodes"] < 1:
        raise UserError(f"num_episodes must be >= 1, got {values['num_episodes']}.")
    if not 0 <= values["seed"] < 2**29:
        raise UserError(f"seed must be between 0 and 2**29, got {values['seed']}.")
    checkpoint = load_checkpoint(values["checkpoint"], with_learner=False)
    sim = choose_sim(checkpoint, values["sim"], overrides)
    result = evaluate_checkpoint(checkpoint, values["num_episodes"], seed=values["seed"], sim=sim, policy=values["policy"])
    output = Path(values["output"]) if values["output"] else checkpoint.run_dir / EVALUATION_FILE
    document = result_document(result, checkpoint, command_line("evaluate", argv))
    console = Console(highlight=False, soft_wrap=True)
    # Shown first: a file that cannot be written must not cost the figures.
    console.print(result_table(result))
    write_atomic(output, json.dumps(document, indent=1) + "\n")
    console.print(f"{result.wall_clock_s:.1f} s. Every episode: {output}", markup=False)


if __name__ == "__main__":
    main()
