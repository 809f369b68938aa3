"""What the files of a part say about themselves, held against each other before anything is read from them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from embodied_rl.episodes.index import Index
from embodied_rl.episodes.layout import SNAPSHOTS, Column
from embodied_rl.episodes.recording import RecordingError
from embodied_rl.errors import brief
from embodied_rl.reading import open_regular, parse_json, read_npy_header, read_regular

LAYOUT_FILE = "part.json"


def part_folders(recording: Path) -> list[Path]:
    """The parts of a recording, by number."""
    found = [folder for folder in recording.glob("part-*") if folder.name[5:].isdigit() and folder.is_dir()]
    return sorted(found, key=lambda folder: int(folder.name[5:]))


def read_columns(folder: Path) -> tuple[Column, ...]:
    """The columns of a part. Raises RecordingError where ``part.json`` is missing or wrong."""
    path = folder / LAYOUT_FILE
    try:
        columns = tuple(Column.from_dict(data) for data in parse_json(read_regular(path))["columns"])
    except OSError as error:
        raise RecordingError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordingError(f"'{path}' does not describe columns: {brief(error)}.") from error
    if len({column.name for column in columns}) != len(columns):
        raise RecordingError(f"'{path}' names a column twice.")
    return columns


def array_offsets(folder: Path, columns: tuple[Column, ...], index: Index) -> dict[str, int]:
    """{column: where its rows begin in the .npy file}, snapshots included, videos not.

    Raises:
        RecordingError: a file holds something else, or fewer rows than the index says.
    """
    offsets = {}
    step_ends = index.step_rows + index.table.lengths
    for column in columns:
        if not column.is_video:
            ends = step_ends if column.per == "step" else step_ends + np.arange(1, index.num_episodes + 1)
            offsets[column.name] = _array_offset(folder / f"{column.stem}.npy", column.name, *array_dtype(column), ends)
    ends = index.snapshot_rows + index.snapshots
    offsets[SNAPSHOTS] = _array_offset(folder / f"{SNAPSHOTS}.npy", SNAPSHOTS, "<i8", (3,), ends)
    return offsets


def array_dtype(column: Column) -> tuple[str, tuple[int, ...]]:
    """dtype and row shape of a column's .npy file: its own, or (offset, size) for rows of varying size."""
    return ("<i8", (2,)) if column.is_blob else (column.dtype, column.shape)


def _array_offset(path: Path, field: str, dtype: str, shape: tuple[int, ...], ends: np.ndarray) -> int:
    """Where the rows of an .npy file begin, if it reaches to the rows `ends` [E], one past the last of each episode."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            found = read_npy_header(file)
            offset = file.tell()
    except OSError as error:
        raise RecordingError(f"'{path}', field '{field}': cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordingError(f"'{path}', field '{field}': {error}.") from error
    # The number of rows in the header is not looked at: a recorder that was killed may have counted one episode too many.
    if found[0][1:] != shape or found[1] or found[2].str != dtype:
        rows = ", ".join(["rows", *map(str, shape)])
        held = f"{brief(found[2], 40)} {brief(list(found[0]), 80)}"
        raise RecordingError(f"'{path}', field '{field}': holds {held} instead of {np.dtype(dtype)} [{brief(rows, 80)}].")
    row_bytes = np.dtype(dtype).itemsize * math.prod(shape)
    # Floating: what is claimed may not fit into 64 bits, and is only compared.
    missing = offset + ends * float(min(row_bytes, 2**62)) > size
    if missing.any():
        episode = int(np.argmax(missing))
        raise RecordingError(
            f"'{path}', episode {episode}, field '{field}': the file is cut short: {size} bytes, and the episode ends at "
            f"{offset + int(ends[episode]) * row_bytes}."
        )
    return offset
