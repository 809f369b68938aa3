"""Recorded episodes in other projects' formats: detection, reading and writing."""

from __future__ import annotations

import importlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied_rl.episodes.formats.base import Advance, ForeignRecording
from embodied_rl.episodes.recording import FieldNote, Recording, RecordingError, raised_as_damage
from embodied_rl.errors import did_you_mean
from embodied_rl.files import cannot_write

NATIVE = "native"


FORMATS = {
    "maniskill": ("ManiSkillRecording", "maniskill"),
    "lerobot": ("LeRobotRecording", "lerobot_writer"),
    "robomimic": ("RobomimicRecording", "robomimic"),
    "minari": ("MinariRecording", "minari"),
}
"""{name: (`ForeignRecording` class in the module of this name, module with `write`)}; `embodied_rl.episodes.reader` and ``writer`` handle
the native format."""


def detect_format(path: Path) -> str | None:
    """Detect the format at `path` from names and first groups: "native", a name in `FORMATS`, or None."""
    if path.is_dir():
        if (path / "recording.json").is_file():
            return NATIVE
        if (path / "meta" / "info.json").is_file():
            return "lerobot"
        if (path / "main_data.hdf5").is_file() or (path / "data" / "main_data.hdf5").is_file():
            return "minari"
        files = sorted(file for file in path.iterdir() if file.suffix in (".h5", ".hdf5"))
        return detect_format(files[0]) if files else None
    if path.suffix == ".json" and path.with_suffix(".h5").is_file():
        return "maniskill"
    if path.suffix in (".h5", ".hdf5") and path.is_file():
        return _hdf5_format(path)
    return None


def _hdf5_format(path: Path) -> str:
    """Detect the format by group names; if the file cannot be opened, by a .json file beside it, so that a reader reports the error."""
    from embodied_rl.episodes.formats.hdf5 import H5File

    guess = "maniskill" if path.with_suffix(".json").is_file() else "robomimic"
    try:
        file = H5File(path)
    except RecordingError:
        return guess
    try:
        names = file.names(file.root)
        if "data" in names:
            return "robomimic"
        return "maniskill" if any(name.startswith("traj_") for name in names) else guess
    finally:
        file.close()


def open_foreign(path: Path) -> ForeignRecording:
    """Open a file or folder in another project's format.
    Raises RecordingError: no known format, damaged, or inconsistent; MissingExtraError: h5py or pyarrow is not installed."""
    name = detect_format(path)
    if name is None or name == NATIVE:
        raise RecordingError(f"'{path}' is not a recording in a known format: native, {', '.join(FORMATS)}.")
    reader: type[Any] = getattr(importlib.import_module(f"{__name__}.{name}"), FORMATS[name][0])
    with raised_as_damage(path):
        recording = reader(path)
    assert isinstance(recording, ForeignRecording)
    return recording


def write_foreign(recording: Recording, output: Path, name: str, advance: Advance | None = None, **options: str) -> tuple[FieldNote, ...]:
    """Write a recording in the format `name`; the folder appears when it is complete.

    Args:
        output: a new or empty folder.
        **options: options of the format (``video`` of lerobot).

    Returns a note on each field.

    Raises:
        RecordingError: the recording contains data that the format cannot, or is damaged; or the folder is not empty.
        UserError: it cannot be written.
        MissingExtraError: h5py or pyarrow is not installed.
    """
    if name not in FORMATS:
        raise RecordingError(f"Format '{name}' is not known.{did_you_mean(name, FORMATS)}")
    if not len(recording):
        raise RecordingError(f"'{recording.path}' has no episode, and files of {name} hold at least one.")
    module = importlib.import_module(f"{__name__}.{FORMATS[name][1]}")
    with new_folder(output) as temporary:
        temporary.mkdir(parents=True)
        notes: tuple[FieldNote, ...] = module.write(recording, temporary, output.resolve(), advance or (lambda _: None), **options)
    return notes


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `output` if the block succeeds. Raises as `require_free`; UserError: it cannot be written."""
    require_free(output)
    # Not the process's number: containers that share a disk have the same ones.
    temporary = output.with_name(f".{output.name}.tmp-{uuid.uuid4().hex}")
    try:
        yield temporary
        if output.is_dir():
            output.rmdir()
        os.replace(temporary, output)
    except OSError as error:
        raise cannot_write(output, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_free(output: Path) -> None:
    """Raise RecordingError if `output` exists and is not an empty folder, or is the current one."""
    if not output.name:
        raise RecordingError(f"'{output}' is the current folder, which cannot be replaced. Name a new folder.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise RecordingError(f"'{output}' already exists and is not an empty folder. Choose another output, or move it away.")
