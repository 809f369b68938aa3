"""``python -m embodied_rl.train``: Hydra in, Trainer.run() out."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from embodied_rl.cli import command_line, run_command

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.config import TrainConfig

_LOCK = ".lock"
_DEFAULT_NAME = re.compile(r"\d{8}-\d{6}-seed\d+")
"""Of a run's folder, where the user names none."""


def main() -> None:
    """Train as the command line says; mistakes are one line on stderr and exit status 2."""
    run_command(_hydra_main)


def _hydra_main() -> None:
    import hydra

    from embodied_rl.compose import add_installed_configs, check_overrides, open_kwargs
    from embodied_rl.paths import configs_dir

    check_overrides("train", sys.argv[1:])
    add_installed_configs()
    sys.argv[1:] = open_kwargs(sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")(_train)()


def _train(composed: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    # Hydra would print a traceback for our errors; here they are still ours.
    run_command(lambda: _train_composed(composed, list(HydraConfig.get().overrides.task)))


def _train_composed(composed: DictConfig, overrides: list[str]) -> None:
    from omegaconf import OmegaConf

    from embodied_rl.config import TrainConfig

    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    train(
        TrainConfig.from_dict({str(key): value for key, value in plain.items()}),
        overrides=overrides,
        command=command_line("train", overrides),
    )


def train(config: TrainConfig, *, overrides: Sequence[str] = (), command: str = "embodied_rl.train.train(config)") -> Path:
    """Run a configuration from start to report. Returns the run's folder.

    Args:
        config: what to run. Where ``config.resume`` finds a checkpoint, the checkpoint's own configuration is continued, with
            the values of `overrides` in place of its own.
        overrides: the ``key=value`` of the command line.
        command: how the run was started, for the model card.

    Raises:
        UserError: and its kinds, for everything a user can mend.
        SimFault, NonFiniteError: see `Trainer.run`.
    """
    run_dir, checkpoint, claim = _where(config)
    with claim:
        if checkpoint is not None:
            config = _continued(config, checkpoint, overrides)
            _announce(f"Resuming {checkpoint.path} at {checkpoint.step:,} of {config.total_steps:,} steps.")
        # A libgomp that spins between parallel regions takes the cores from the simulators; it must be told before torch loads it.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from embodied_rl.roles.failures import RoleLost

        started: float | None = _process_start()
        for num_restarts in itertools.count():
            try:
                _run(config, run_dir, command, checkpoint, started)
            except RoleLost as lost:
                # Who trained has ended, and its weights are gone with it.
                checkpoint, started = _last_before(lost, config, run_dir, num_restarts), None
            else:
                break
    return run_dir


def _run(config: TrainConfig, run_dir: Path, command: str, checkpoint: Checkpoint | None, started: float | None) -> None:
    from embodied_rl.checkpoint import resume_command
    from embodied_rl.errors import UserError
    from embodied_rl.roles.failures import RoleLost
    from embodied_rl.trainer import Trainer

    with Trainer(config, run_dir, command=command, checkpoint=checkpoint, started=started) as trainer:
        try:
            trainer.run()
        except RoleLost as lost:
            if not trainer.interrupted:
                raise
            # Whoever ends a run may end its machines too: nothing is begun anew.
            go_on = resume_command(command, run_dir)
            raise UserError(f"{lost} The run was to end; what came after its last checkpoint is lost. Go on with: {go_on}") from lost
        if trainer.interrupted:
            trainer.close()
            _announce(f"Interrupted and saved at {trainer.steps:,} steps. Go on with: {resume_command(command, run_dir)}")
            return
        episodes = trainer.evaluate(config.evaluation.num_episodes, first_seed=config.evaluation.seed)
        from embodied_rl.render import render_videos
        from embodied_rl.reporting import finish_run

        finish_run(trainer.summary(episodes), render_videos)


def _last_before(lost: Exception, config: TrainConfig, run_dir: Path, num_restarts: int) -> Checkpoint:
    """The checkpoint that a run goes back to. Raises UserError where there is none, or this has happened too often."""
    from embodied_rl.checkpoint import find_last, load_checkpoint
    from embodied_rl.errors import UserError
    from embodied_rl.trust import code_names

    last = find_last(run_dir)
    if last is None or num_restarts >= config.hybrid.max_restarts:
        why = "There is no checkpoint yet" if last is None else f"It was begun anew {num_restarts} times already (hybrid.max_restarts)"
        raise UserError(f"{lost} {why}. Go on with run_dir={run_dir} resume=auto.") from lost
    checkpoint = load_checkpoint(last, trust=code_names(config.to_dict()))  # of this very run
    _announce(f"{lost} The run goes on from {last}, at {checkpoint.step:,} steps.")
    return checkpoint


def _continued(config: TrainConfig, checkpoint: Checkpoint, overrides: Sequence[str]) -> TrainConfig:
    """The checkpoint's configuration with what the command line sets: single values, and whole groups except experiments."""
    from embodied_rl.config import TrainConfig

    merged, given = checkpoint.config.to_dict(), config.to_dict()
    for override in overrides:
        path = override.split("=", 1)[0].lstrip("+~").split(".")
        if path[0] in ("experiment", "protocol", "resume", "run_dir", "trust", "hydra"):
            continue
        target, source = merged, given
        for part in path[:-1]:
            target, source = target[part], source[part]
        target[path[-1]] = source[path[-1]]
    return TrainConfig.from_dict(merged)


_started_before = False


def _process_start() -> float:
    """When the user's command began: what a wall-clock figure must count from.

    A Python caller's clock starts now, and so does that of every further job of a sweep.
    """
    import psutil

    global _started_before
    first, _started_before = not _started_before, True
    return psutil.Process().create_time() if first and sys.argv[0].endswith("train.py") else time.time()


def _where(config: TrainConfig) -> tuple[Path, Checkpoint | None, IO[bytes]]:
    """The run's folder, the checkpoint to continue from, and what keeps other runs out of the folder until it is closed."""
    from embodied_rl.checkpoint import find_last, load_checkpoint
    from embodied_rl.errors import UserError
    from embodied_rl.files import next_free

    run_dir = Path(config.run_dir)
    checkpoint = None
    if config.resume == "auto":
        found = find_last(run_dir) or _newest_unfinished(run_dir.parent, config.seed)
        checkpoint = load_checkpoint(found, trust=config.trust) if found is not None else None
    elif config.resume is not None:
        checkpoint = load_checkpoint(config.resume, trust=config.trust)
    if checkpoint is not None:
        run_dir = checkpoint.run_dir
    elif config.resume == "auto" and _holds_files(run_dir) and not _DEFAULT_NAME.fullmatch(run_dir.name):
        # Killed before its first checkpoint: from the start again, in its own folder.
        _announce(f"{run_dir} holds no checkpoint yet; its run begins again.")
    elif _holds_files(run_dir):
        # Two runs that start within a second want the same default folder; one that the user named is not to be guessed about.
        if find_last(run_dir) is not None and not _DEFAULT_NAME.fullmatch(run_dir.name):
            raise UserError(f"run_dir={run_dir} already holds a run. Continue it with resume=auto, or choose another folder.")
        taken, run_dir = run_dir, next_free(run_dir)
        _announce(f"{taken} is not empty; this run goes to {run_dir}.")
    while (claim := _claim(run_dir)) is None:
        if checkpoint is not None or not _DEFAULT_NAME.fullmatch(Path(config.run_dir).name):
            raise UserError(f"Another process is writing the run in {run_dir}. Wait for it, end it, or choose another run_dir.")
        taken, run_dir = run_dir, next_free(Path(config.run_dir))
        _announce(f"{taken} is another run's; this run goes to {run_dir}.")
    return run_dir, checkpoint, claim


def _holds_files(run_dir: Path) -> bool:
    return run_dir.is_dir() and any(path.name != _LOCK for path in run_dir.iterdir())


def _claim(run_dir: Path) -> IO[bytes] | None:
    """Make the folder this process's own until the file is closed, or the process ends; None where it is another's already.

    Raises UserError where nothing can be written.
    """
    from embodied_rl.files import cannot_write

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write_test"
        probe.touch()
        probe.unlink(missing_ok=True)
        claim = (run_dir / _LOCK).open("ab")
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        claim.close()
        return None
    except OSError:  # a file system without locks
        pass
    return claim


def _newest_unfinished(folder: Path, seed: int) -> Path | None:
    """The last checkpoint of the newest run of this folder and seed that has no results yet."""
    from embodied_rl.checkpoint import find_last

    runs = sorted(folder.glob(f"*-seed{seed}*"), reverse=True) if folder.is_dir() else []
    for run in runs:
        if not (run / "results.json").exists() and (last := find_last(run)) is not None:
            return last
    return None


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
