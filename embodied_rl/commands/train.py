"""``python -m embodied_rl.train``: from Hydra's configuration to Trainer.run(); and its help."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import shlex
import sys
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.commands.cli import command_line, explain, loading, run_command, terminal_width
from embodied_rl.config import TrainConfig, group_names
from embodied_rl.errors import UserError
from embodied_rl.files import configs_dir
from embodied_rl.progress import run_clock, screen_lines, spoke
from embodied_rl.run_folder import announce, find_run_folder, replaced_keys, require_no_run
from embodied_rl.trust import code_names

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.loggers import Logger


_EXAMPLES = (
    "",
    "sim=maniskill_pickcube seed=3 algorithm.clip_high=0.28",
    "experiment=fetch_reach run_dir=runs/fetch_reach",
    "-m experiment=cartpole seed=1,2,3",
)
_CHOSEN = ("experiment", "sim", "policy", "algorithm", "generation", "hybrid", "logger", "protocol")


def _value(composed: Mapping[str, Any], name: str) -> str:
    """Value of a configuration's dotted key, as a user would type it; empty if it has none."""
    here: object = composed
    for part in name.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return ""
        here = here[part]
    return json.dumps(here, ensure_ascii=False).replace('"', "")


def help_text(width: int | None = None) -> str:
    """Help text in lines of at most `width` characters, unless a word is longer; None: the terminal's width, at most 100. Shows the default
    values of ``python -m embodied_rl.train``."""
    from embodied_rl.config.compose import compose_config, or_main_job
    from embodied_rl.config.describing import described_keys

    width = terminal_width() if width is None else width

    def wrapped(text: str, indent: int, first: int = 0) -> str:
        shown = textwrap.wrap(text, width, initial_indent=" " * first, subsequent_indent=" " * indent, break_on_hyphens=False)
        return "\n".join(shown)

    composed = compose_config(or_main_job([]))
    lines = ["usage: python -m embodied_rl.train [-m] [group=name …] [key=value …]", ""]
    lines += [
        wrapped("Train a policy in a simulator. With -m, values separated by commas give one run each, one after another.", 0),
        "",
        "examples:",
    ]
    lines += [f"  python -m embodied_rl.train {example}".rstrip() for example in _EXAMPLES]
    lines += ["", "choices, one file each (group=name):"]
    lines += [wrapped(f"{group}: {', '.join(group_names(group))}", 6, 2) for group in _CHOSEN]
    for group, keys in described_keys().items():
        lines += ["", f"{group or 'the run'}:"]
        for key in keys:
            default = _value(composed, key.name) if "(" not in group else key.default
            what = ", ".join(filter(None, [key.kind, key.bounds])) + f": {default or key.default}"
            lines += [wrapped(f"{key.name}  ({what})", 6, 2), wrapped(key.text.replace("``", ""), 6, 6)]
    lines += [
        "",
        wrapped("To print these values: python -m embodied_rl.train --cfg job. All keys on one page: docs/configuration.md.", 0),
    ]
    return "\n".join(lines)


def main() -> None:
    """Train as the command line says; mistakes are one line on stderr and exit status 2."""
    run_command(_hydra_main)


def _hydra_main() -> None:
    import hydra

    from embodied_rl.config.compose import add_installed_configs, add_resolvers, check_overrides, runs_to_show

    if "--explain" in sys.argv[1:]:
        explain()
        return
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text())
        return
    arguments = check_overrides(sys.argv[1:], functools.partial(_check_run_of_sweep, folders=set()))
    add_installed_configs()
    add_resolvers()
    runs = runs_to_show(arguments)
    for number, run in enumerate(runs):
        sys.argv[1:] = run
        if len(runs) > 1:
            print(("---\n" if number else "") + f"# {shlex.join(word for word in run if '=' in word)}")
        hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")(_train)()
    if _swept:
        _tell_sweep(_swept)


def _check_run_of_sweep(config: TrainConfig, folders: set[str]) -> None:
    """Raise UserError for an invalid combination, and for a folder that has a run or is among the `folders` of runs checked before.
    Each run of a sweep prints its own warnings."""
    from embodied_rl.config.rules import resolve

    named = any(word.startswith("run_dir=") for word in sys.argv[1:])
    if config.resume is None:  # otherwise the checkpoint's own configuration counts
        if named:
            require_no_run(Path(config.run_dir))
        with warnings.catch_warnings(action="ignore"):
            resolve(config)
    if named and config.run_dir in folders:
        fix = "name it by what differs, such as 'run_dir=runs/seed${seed}'"
        raise UserError(f"run_dir={config.run_dir} is the folder of several runs of this sweep: {fix}.")
    folders.add(config.run_dir)


_swept: list[Path] = []
"""Folders of a sweep's runs (``-m``)."""


def _tell_sweep(folders: Sequence[Path]) -> None:
    """Print a table of a sweep's runs, and write one report about all of them."""
    from embodied_rl.reporting import sweep_table
    from embodied_rl.reports.page import MAX_RUNS, write_report

    print(f"\n{sweep_table(folders)}")
    if len(folders) <= MAX_RUNS:
        print(f"\n  report      {write_report(folders)}", flush=True)


def _train(composed: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    # Hydra would print a traceback for our errors, so they are handled here.
    run_command(lambda: _train_composed(composed, list(HydraConfig.get().overrides.task)))


def _train_composed(composed: DictConfig, overrides: list[str]) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    config = TrainConfig.from_dict({str(key): value for key, value in plain.items()})
    # A shell would interpret ${seed}.
    overrides = [f"run_dir={config.run_dir}" if word.startswith("run_dir=") and "${" in word else word for word in overrides]
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep:
        print(f"\nRun {HydraConfig.get().job.num + 1}: {shlex.join(overrides)}", flush=True)
    folder = train(config, overrides=overrides, command=command_line("train", overrides))
    if sweep:
        _swept.append(folder)


def train(
    config: TrainConfig,
    *,
    overrides: Sequence[str] = (),
    command: str = "from Python, with the configuration below",
    loggers: Sequence[Logger] = (),
    tells: bool = True,
) -> Path:
    """Run a configuration from start to report. Returns the run's folder.

    Args:
        config: configuration to run. If ``config.resume`` finds a checkpoint, the checkpoint's own configuration is continued, with
            the values of `overrides` replacing the stored ones.
        overrides: the ``key=value`` of the command line.
        command: how the run was started, for the model card.
        tells: whether to print the result at the end.

    Raises UserError: and its kinds, for everything a user can mend; SimFault, NonFiniteError: see `Trainer.run`.
    """
    folder = find_run_folder(config, overrides)
    run_dir, checkpoint = folder.path, folder.checkpoint
    began = _process_start()
    started: float | None = began
    with folder.claimed(), run_clock(began):
        if checkpoint is not None:
            config = _continued(config, checkpoint, overrides)
            announce(f"Resuming {checkpoint.path} at {checkpoint.step:,} of {config.total_steps:,} steps.")
            if checkpoint.step >= config.total_steps:
                announce("The training is complete; the run is only evaluated again. To train longer, set a larger total_steps.")
        if Path(config.run_dir).resolve() != run_dir.resolve():
            # A checkpoint names its run's folder, and the default folder may be taken: other processes write here too.
            config = dataclasses.replace(config, run_dir=str(run_dir))
        # A libgomp that spins between parallel regions takes cores from the simulators; it reads this variable when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from embodied_rl.reporting import plan_text, require_time, shows_progress, too_short

        if shows_progress(config):
            # The following imports torch, which takes seconds.
            what, where = plan_text(config, run_dir)
            texts = [what, *too_short(config)] if checkpoint is None else [what]
            print("\n".join([*(line for text in texts for line in screen_lines(text)), where]), flush=True)
            spoke()
        if checkpoint is None:
            require_time(config, time.monotonic() - began, "before anything was started")
        with loading("PyTorch", shown=shows_progress(config)):
            from embodied_rl.roles.wire import RoleLost
        for num_restarts in itertools.count():
            try:
                _run(config, run_dir, command, checkpoint, started, loggers, tells)
            except RoleLost as lost:
                # The training process has ended, and its weights are lost.
                checkpoint, started = _last_before(lost, config, run_dir, num_restarts), None
            else:
                break
    return run_dir


def _run(
    config: TrainConfig,
    run_dir: Path,
    command: str,
    checkpoint: Checkpoint | None,
    started: float | None,
    loggers: Sequence[Logger],
    tells: bool,
) -> None:
    from embodied_rl.checkpoint import resume_command
    from embodied_rl.reporting import remember_start, shows_progress

    with loading("libraries", shown=shows_progress(config)):
        import torch

        from embodied_rl.roles.wire import RoleLost
        from embodied_rl.trainer import Trainer

    # The run's seed is not the caller's.
    forked = torch.random.fork_rng(devices=[])
    with forked, Trainer(config, run_dir, command=command, checkpoint=checkpoint, started=started, loggers=loggers) as trainer:
        try:
            trainer.run()
            trainer.loggers.training_ended()
        except RoleLost as lost:
            if not trainer.interrupted:
                raise
            # A user who stops a run may stop its machines too: nothing is restarted.
            go_on = resume_command(command, run_dir)
            raise UserError(f"{lost} The run was stopping; work after its last checkpoint is lost. Continue with: {go_on}") from lost
        if trainer.interrupted:
            trainer.close()
            announce(f"Interrupted and saved at {trainer.steps:,} steps. Continue with: {resume_command(command, run_dir)}")
            return
        episodes = trainer.evaluate(config.evaluation.num_episodes, first_seed=config.evaluation.seed)
        if not episodes:
            go_on = f"python -m embodied_rl.evaluate {shlex.quote(f'checkpoint={run_dir}')}"
            announce(f"max_minutes={config.max_minutes:g} left no time for the final evaluation. Evaluate with: {go_on}")
            return
        if checkpoint is None and _is_whole_command() and trainer.episode_s is not None:
            remember_start(config, trainer.start_s, trainer.episode_s)
        trainer.require_folder()
        from embodied_rl.commands.render import render_videos
        from embodied_rl.reports.page import finish_run

        finish_run(trainer.summary(episodes), render_videos, tells=tells)


def _last_before(lost: Exception, config: TrainConfig, run_dir: Path, num_restarts: int) -> Checkpoint:
    """Checkpoint to which a run goes back. Raises UserError if there is none, or after too many restarts."""
    from embodied_rl.checkpoint import find_last, load_checkpoint

    last = find_last(run_dir)
    if last is None or num_restarts >= config.hybrid.max_restarts:
        why = "There is no checkpoint yet" if last is None else f"The run has already restarted {num_restarts} times (hybrid.max_restarts)"
        raise UserError(f"{lost} {why}. Continue with run_dir={run_dir} resume=auto.") from lost
    checkpoint = load_checkpoint(last, trust=code_names(config.to_dict()))  # of this very run
    announce(f"{lost} The run continues from {last}, at {checkpoint.step:,} steps.")
    return checkpoint


def _continued(config: TrainConfig, checkpoint: Checkpoint, overrides: Sequence[str]) -> TrainConfig:
    """Checkpoint's configuration with the command line's changes: single values, and whole groups except experiments."""
    merged, given = checkpoint.config.to_dict(), config.to_dict()
    for path in replaced_keys(overrides):
        target, source = merged, given
        for part in path[:-1]:
            target, source = target[part], source[part]
        target[path[-1]] = source[path[-1]]
    return TrainConfig.from_dict(merged)


_num_starts = 0


def _is_whole_command() -> bool:
    """Whether the present run is the command's first, which imported everything itself."""
    return _num_starts == 1 and sys.argv[0].endswith("train.py")


def _process_start() -> float:
    """Time (``time.monotonic()``) of the user's command, from which wall-clock figures count.

    A Python caller's clock starts now, and so does that of every further job of a sweep.
    """
    import psutil

    global _num_starts
    _num_starts += 1
    return time.monotonic() - (time.time() - psutil.Process().create_time() if _is_whole_command() else 0.0)
