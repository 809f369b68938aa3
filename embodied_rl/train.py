"""``python -m embodied_rl.train``: Hydra in, Trainer.run() out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from embodied_rl.cli import command_line, run_command

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.config import TrainConfig

_PROCESS_START = time.time()


def main() -> None:
    """Train as the command line says; mistakes are one line on stderr and exit status 2."""
    run_command(_hydra_main)


def _hydra_main() -> None:
    import hydra

    from embodied_rl.compose import check_overrides
    from embodied_rl.paths import configs_dir

    check_overrides("train", sys.argv[1:])
    hydra.main(version_base="1.3", config_path=str(configs_dir()), config_name="train")(_train)()


def _train(composed: DictConfig) -> None:
    from omegaconf import OmegaConf

    from embodied_rl.config import TrainConfig

    # Hydra would print a traceback for our errors; here they are still ours.
    run_command(lambda: train(TrainConfig.from_dict(OmegaConf.to_container(composed, resolve=True))))  # type: ignore[arg-type]


def train(config: TrainConfig, *, command: str | None = None) -> Path:
    """Run a configuration from start to report. Returns the run's folder.

    Raises:
        UserError: and its kinds, for everything a user can mend.
        SimFault, NonFiniteError: see `Trainer.run`.
    """
    run_dir, checkpoint = _where(config)
    if checkpoint is not None:
        _announce(f"Resuming {checkpoint.path} at {checkpoint.step:,} steps.")
    started = max(_PROCESS_START, time.time() - 60.0) if checkpoint is None else None
    from embodied_rl.trainer import Trainer

    with Trainer(config, run_dir, command=command or command_line("train"), checkpoint=checkpoint, started=started) as trainer:
        trainer.run()
        if trainer.interrupted:
            _announce(f"Interrupted and saved. Go on with: python -m embodied_rl.train resume={run_dir}")
            return run_dir
        first_seed = config.evaluation.seed
        episodes = trainer.evaluate(config.evaluation.num_episodes, first_seed=first_seed)
        from embodied_rl.reporting import finish_run

        finish_run(trainer.summary(episodes))
    return run_dir


def _where(config: TrainConfig) -> tuple[Path, Checkpoint | None]:
    """The run's folder, and the checkpoint to continue from."""
    from embodied_rl.checkpoint import find_last, load_checkpoint
    from embodied_rl.errors import UserError
    from embodied_rl.files import cannot_write, next_free

    run_dir = Path(config.run_dir)
    checkpoint = None
    if config.resume == "auto":
        found = find_last(run_dir) or _newest_unfinished(run_dir.parent, config.seed)
        checkpoint = load_checkpoint(found) if found is not None else None
    elif config.resume is not None:
        checkpoint = load_checkpoint(config.resume)
    if checkpoint is not None:
        run_dir = checkpoint.run_dir
    elif run_dir.exists() and any(run_dir.iterdir()):
        if find_last(run_dir) is not None and "seed" not in run_dir.name:
            raise UserError(f"run_dir={run_dir} already holds a run. Continue it with resume=auto, or choose another folder.")
        run_dir = next_free(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write_test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    return run_dir, checkpoint


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
