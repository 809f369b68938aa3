"""The folder of a run: its choice, its owner, and the history that is copied when a run continues in another folder.

A run's folder holds ``run.json`` with a number drawn when the run began, and so does each of its checkpoints. If the two agree, the run
continues in the folder. Otherwise the checkpoint belongs to another run: nothing is written beside it, and the run continues in a new
folder with a copy of the history.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.files import copy_files, next_free, write_atomic, write_atomic_with, writing_to
from embodied_rl.reading import parse_json, read_regular

if TYPE_CHECKING:
    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.config import TrainConfig

RUN_FILE = "run.json"
SOURCE_FOLDER = "source"
"""Subfolder of a run's folder with modules of what a notebook defined, written before the run begins."""
_LOCK = ".lock"
_DEFAULT_NAME = re.compile(r"\d{8}-\d{6}-seed(\d+)")
"""Name of a run's folder if the user names none, with the run's seed."""
_FAULTS = "faults.jsonl"
_FOLDERS = ("tensorboard", "demonstrations")
"""Folders of the history; recorded training episodes stay where they are."""


@dataclass(frozen=True)
class RunFolder:
    """Folder that a run writes to."""

    path: Path
    checkpoint: Checkpoint | None
    """Checkpoint that the run continues from; None: a new run."""
    claim: IO[bytes]
    """Open file that keeps other runs out of the folder until it is closed."""
    made: Sequence[Path]
    """The folder and those around it that did not exist before, innermost first."""

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other runs out until the block ends. Then, if nothing was written, remove the lock and the folders that were made."""
        with self.claim:
            try:
                yield
            finally:
                with suppress(OSError):  # the user has removed it, or another run takes it at this moment
                    if os.listdir(self.path) == [_LOCK]:
                        (self.path / _LOCK).unlink()
                        for folder in self.made:
                            folder.rmdir()


def write_failure(run_dir: Path, step: int, context: Mapping[str, Any], arrays: Mapping[str, Any]) -> Path:
    """Write the batch that a run failed at into its folder, as one file of arrays; return its path. `context`: its origin, JSON-able."""
    path = run_dir / "failures" / f"non_finite_step_{step:09d}.npz"
    named = {name: np.asarray(value) for name, value in arrays.items()}
    named["context_json"] = np.frombuffer(json.dumps(context).encode(), np.uint8)
    write_atomic_with(path, lambda temporary: np.savez(temporary, allow_pickle=False, **named))
    return path


def find_run_folder(config: TrainConfig, overrides: Sequence[str]) -> RunFolder:
    """Make and claim the folder of the run that a configuration asks for; copies the history if it is not the checkpoint's own folder.

    `overrides`: those of the command line, which show whether the user named `run_dir`, and which values replace the checkpoint's.

    Raises:
        UserError: the folder holds another run, another process writes there, or it cannot be written.
        IncompatibleCheckpointError: see `load_checkpoint`.
    """
    from embodied_rl.checkpoint import adopt_checkpoint

    run_dir = Path(config.run_dir)
    named = not _DEFAULT_NAME.fullmatch(run_dir.name) or any(word.startswith("run_dir=") for word in overrides)
    checkpoint = _checkpoint_of(config, run_dir, named, overrides)
    source = None
    if checkpoint is not None:
        if run_dir.resolve() == checkpoint.run_dir.resolve() or (not named and belongs(checkpoint)):
            run_dir = checkpoint.run_dir
        else:
            source, run_dir = checkpoint, _unused(run_dir, named)
    elif config.resume == "auto" and _holds_files(run_dir) and named:
        # Killed before its first checkpoint: start again, in its own folder.
        announce(f"{run_dir} has no checkpoint yet; the run starts from the beginning.")
    else:
        run_dir = _unused(run_dir, named)
    made = _missing(run_dir)
    while (claim := _claim(run_dir)) is None:
        if named or (checkpoint is not None and source is None):
            raise UserError(f"Another process is writing the run in {run_dir}. Wait for it, end it, or choose another run_dir.")
        # Two runs that start within a second choose the same default folder.
        taken, run_dir = run_dir, next_free(Path(config.run_dir))
        made = _missing(run_dir)
        announce(f"{taken} belongs to another run; this run writes to {run_dir}.")
    if source is not None:
        announce(f"{source.path} belongs to another folder's run; this run continues in {run_dir}, with a copy of its history.")
        copy_history(source, run_dir)
        note_run_id(run_dir, str(source.state.get("run_id") or uuid.uuid4().hex))
        checkpoint = adopt_checkpoint(source, run_dir)  # the folder's first, so that the run can continue from there at any time
    return RunFolder(run_dir, checkpoint, claim, made)


def require_no_run(run_dir: Path) -> None:
    """Raise UserError if a folder holds a run's checkpoints."""
    from embodied_rl.checkpoint import find_last

    if find_last(run_dir) is not None:
        raise UserError(f"run_dir={run_dir} already has a run. Continue it with resume=auto, or choose another folder.")


def replaced_keys(overrides: Sequence[str]) -> list[list[str]]:
    """Keys, split at dots, whose values on the command line replace a checkpoint's."""
    paths = [override.split("=", 1)[0].lstrip("+~").rpartition("@")[2].split(".") for override in overrides]  # sim@domains.arm.sim
    return [path for path in paths if path[0] not in ("experiment", "protocol", "resume", "run_dir", "trust", "hydra")]


def run_id(run_dir: Path) -> str:
    """The number of the run in a folder; drawn and written if there is none. Raises UserError if that fails."""
    known = _noted_id(run_dir)
    if known is None:
        known = uuid.uuid4().hex
        note_run_id(run_dir, known)
    return known


def note_run_id(run_dir: Path, number: str) -> None:
    """Write the run's number into a folder. Raises UserError if that fails."""
    write_atomic(run_dir / RUN_FILE, json.dumps({"run_id": number}) + "\n")


def belongs(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is in the folder of the run that wrote it."""
    own = checkpoint.state.get("run_id")
    return checkpoint.path.parent.name == "checkpoints" and own is not None and own == _noted_id(checkpoint.run_dir)


def copy_history(checkpoint: Checkpoint, run_dir: Path) -> None:
    """Copy the history of a checkpoint's run, up to its step, into the folder where it continues. Raises UserError."""
    from embodied_rl.loggers.jsonl import METRICS_FILE, history_until

    source = checkpoint.run_dir
    with writing_to(run_dir):
        if checkpoint.path.parent.name == "checkpoints":
            for name in _FOLDERS:
                copy_files(source / name, run_dir / name)
            if (source / _FAULTS).is_file():
                shutil.copy(source / _FAULTS, run_dir / _FAULTS)
            if (source / METRICS_FILE).is_file():
                write_atomic(run_dir / METRICS_FILE, history_until(source, checkpoint.step))


def announce(text: str) -> None:
    """Print a line for the user on stderr, beside the run's output."""
    print(text, file=sys.stderr, flush=True)


# ---- inside ---------------------------------------------------------------------------------------------------------


def _checkpoint_of(config: TrainConfig, run_dir: Path, named: bool, overrides: Sequence[str]) -> Checkpoint | None:
    from embodied_rl.checkpoint import find_last, load_checkpoint

    replaced = [".".join(path) for path in replaced_keys(overrides)]
    if config.resume != "auto":
        return None if config.resume is None else load_checkpoint(config.resume, trust=config.trust, replaced=replaced)
    found = find_last(run_dir)
    if found is None and not named:
        found = _newest_unfinished(run_dir.parent, config.seed)
    return None if found is None else load_checkpoint(found, trust=config.trust, replaced=replaced)


def _unused(run_dir: Path, named: bool) -> Path:
    """A folder for a new run: `run_dir`, or the next free name. Raises UserError if the user named the folder of a run."""
    if not _holds_files(run_dir):
        return run_dir
    if named:
        require_no_run(run_dir)
    free = next_free(run_dir)
    announce(f"{run_dir} is not empty; this run writes to {free}.")
    return free


def _noted_id(run_dir: Path) -> str | None:
    try:
        return str(parse_json(read_regular(run_dir / RUN_FILE))["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holds_files(run_dir: Path) -> bool:
    return run_dir.is_dir() and any(path.name not in (_LOCK, RUN_FILE, SOURCE_FOLDER) for path in run_dir.iterdir())


def _missing(folder: Path) -> list[Path]:
    """The folder and those around it that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _claim(run_dir: Path) -> IO[bytes] | None:
    """Lock the folder for this process until the file is closed or the process ends; None if another process has it.
    Raises UserError if nothing can be written."""
    with writing_to(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write_test"
        probe.touch()
        probe.unlink(missing_ok=True)
        claim = (run_dir / _LOCK).open("ab")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A refused run may have removed it since it was opened, and a third one made another.
        if not (run_dir / _LOCK).exists() or os.fstat(claim.fileno()).st_nlink == 0:
            raise BlockingIOError
    except BlockingIOError:
        claim.close()
        return None
    except OSError:  # a file system without locks
        pass
    return claim


def _newest_unfinished(folder: Path, seed: int) -> Path | None:
    """The last checkpoint of the newest unfinished run (without results) of this folder and seed."""
    from embodied_rl.checkpoint import find_last

    runs = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    for run in runs:
        named = _DEFAULT_NAME.match(run.name)
        if named and int(named[1]) == seed and not (run / "results.json").exists() and (last := find_last(run)) is not None:
            return last
    return None
