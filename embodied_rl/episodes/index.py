"""``episodes.jsonl`` of a part: one line per finished episode, appended after its data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.episodes.recording import EpisodeTable, RecordingError
from embodied_rl.reading import parse_json, read_regular

INDEX_FILE = "episodes.jsonl"
_SEED_LIMIT = 2**63
_MOST_ROWS = 2**32
"""Of an episode: sums of what more claims would not fit into 64 bits."""
_DECODER = json.JSONDecoder()
"""`json.loads` of bytes guesses their encoding first, which takes as long as a short line itself."""
_KINDS: dict[str, tuple[type, ...]] = {
    "steps": (int,),
    "step_row": (int,),
    "observation_row": (int,),
    "snapshots": (int,),
    "snapshot_row": (int,),
    "seed": (int,),
    "task": (str, type(None)),
    "instruction": (str, type(None)),
    "return": (float, int),
    "success_once": (bool,),
    "success_at_end": (bool,),
    "complete": (bool,),
    "crc32": (list,),
    "metadata": (dict,),
}
"""{field of a line: what it may be}, exactly (a bool is no int here)."""


@dataclass(frozen=True, eq=False)
class Index:
    """The finished episodes of a part."""

    path: Path
    lines: list[bytes]
    """[E] one JSON object each; kept as they are, because 10,000 dictionaries take ten times their room."""
    table: EpisodeTable
    snapshots: np.ndarray
    """[E] int64 number of snapshots."""
    sums: np.ndarray
    """[E, C + 1] int64 CRC-32 of each episode's rows of each column, of its snapshots last."""
    size: int
    """Bytes of the finished lines; what comes after is a line that was cut short."""

    @property
    def num_episodes(self) -> int:
        return len(self.lines)

    @property
    def num_steps(self) -> int:
        return int(self.table.lengths.sum())

    @property
    def num_snapshots(self) -> int:
        return int(self.snapshots.sum())

    @property
    def step_rows(self) -> np.ndarray:
        """[E] int64 first row of each episode in columns per step."""
        return np.concatenate(([0], np.cumsum(self.table.lengths)[:-1])).astype(np.int64) if self.lines else np.zeros(0, np.int64)

    @property
    def snapshot_rows(self) -> np.ndarray:
        """[E] int64 first row of each episode among the snapshots."""
        return np.concatenate(([0], np.cumsum(self.snapshots)[:-1])).astype(np.int64) if self.lines else np.zeros(0, np.int64)

    def entry(self, number: int) -> dict[str, Any]:
        """Line `number` as a dictionary."""
        entry: dict[str, Any] = _DECODER.decode(self.lines[number].decode())
        return entry


def encode_entry(entry: Mapping[str, Any]) -> bytes:
    """A line, its end included. Raises RecordingError where the metadata are not JSON, or the seed is no int64."""
    if not -_SEED_LIMIT <= entry["seed"] < _SEED_LIMIT:
        raise RecordingError(f"Seed {entry['seed']} does not fit into 64 bits.")
    try:
        return json.dumps(entry, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise RecordingError(f"Metadata of the episode of seed {entry['seed']} must hold what JSON can: {error}.") from error


def read_index(path: Path, num_columns: int) -> Index:
    """The finished episodes of a part; a last line without an end is not one.

    Raises:
        RecordingError: the file is missing, or a line is not what it should be; the message has the line and the field.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise RecordingError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    size = data.rfind(b"\n") + 1
    lines = data[:size].split(b"\n")[:-1]
    entries = _parse(path, lines)
    columns = {name: _column(path, entries, name) for name in _KINDS}
    lengths, snapshots = (_int64(path, name, columns[name]) for name in ("steps", "snapshots"))
    tasks = np.empty(len(lines), object)
    tasks[:] = columns["task"]
    table = EpisodeTable(
        lengths=lengths,
        seeds=_int64(path, "seed", columns["seed"]),
        returns=_floats(columns["return"]),
        success_once=np.array(columns["success_once"], bool),
        success_at_end=np.array(columns["success_at_end"], bool),
        complete=np.array(columns["complete"], bool),
        tasks=tasks,
    )
    sums = columns["crc32"]
    _require(path, np.array([_are_sums(found, num_columns + 1) for found in sums], bool), "crc32", f"has not {num_columns + 1} sums")
    index = Index(path, lines, table, snapshots, np.array(sums, np.int64).reshape(len(lines), num_columns + 1), size)
    _require(path, lengths >= 1, "steps", "is not at least 1")
    _require(path, snapshots >= 0, "snapshots", "is negative")
    _require(path, np.maximum(lengths, snapshots) <= _MOST_ROWS, "steps", f"or 'snapshots' is more than {_MOST_ROWS:,}")
    _require(path, np.isfinite(table.returns), "return", "is not finite")
    step_rows = index.step_rows
    for name, rows in (
        ("step_row", step_rows),
        ("observation_row", step_rows + np.arange(len(lines))),
        ("snapshot_row", index.snapshot_rows),
    ):
        _require(path, _int64(path, name, columns[name]) == rows, name, "does not follow from the episodes before")
    return index


def _are_sums(found: list[Any], count: int) -> bool:
    return len(found) == count and all(type(value) is int and 0 <= value < 2**32 for value in found)


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    """All lines in one call of the parser, which is several times as fast as one by one; that is for finding the wrong one."""
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        entries = None
    if entries is not None and len(entries) == len(lines) and all(type(entry) is dict for entry in entries):
        return entries
    for number, line in enumerate(lines):
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise RecordingError(f"'{path}', episode {number}: the line is not JSON ({error}).") from error
        if type(entry) is not dict:
            raise RecordingError(f"'{path}', episode {number}: the line is not a JSON object.")
    raise RecordingError(f"'{path}' does not hold one JSON object per line.")


def _column(path: Path, entries: list[dict[str, Any]], name: str) -> list[Any]:
    """A field of all lines."""
    try:
        values = [entry[name] for entry in entries]
    except KeyError:
        number = next(number for number, entry in enumerate(entries) if name not in entry)
        raise RecordingError(f"'{path}', episode {number}: field '{name}' is missing.") from None
    if not set(map(type, values)) <= set(_KINDS[name]):
        number = next(number for number, value in enumerate(values) if type(value) not in _KINDS[name])
        kinds = " or ".join(kind.__name__ for kind in _KINDS[name])
        raise RecordingError(f"'{path}', episode {number}: field '{name}' must be {kinds}, got {values[number]!r:.80}.")
    return values


def _int64(path: Path, name: str, values: list[int]) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        number = next(number for number, value in enumerate(values) if not -_SEED_LIMIT <= value < _SEED_LIMIT)
        raise RecordingError(f"'{path}', episode {number}: field '{name}' does not fit into 64 bits.") from None


def _floats(values: list[float]) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except OverflowError:  # whole numbers of hundreds of digits
        return np.array([float(value) if abs(value) < 2**1023 else np.inf for value in values], np.float64)


def _require(path: Path, holds: np.ndarray, name: str, complaint: str) -> None:
    if not holds.all():
        raise RecordingError(f"'{path}', episode {int(np.argmin(holds))}: field '{name}' {complaint}.")
