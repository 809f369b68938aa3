"""Metadata files of a recording (docs/episodes.md), and the checks of everything that can be wrong with them.

``recording.json`` contains the data that all episodes share, ``part.json`` the columns of a part, ``episodes.jsonl`` one line per finished
episode, appended after its data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from embodied_rl.bounds import whole_number
from embodied_rl.episodes.layout import FINITE_COLUMNS, SNAPSHOT_COLUMN, Column, Per
from embodied_rl.episodes.recording import (
    EpisodeTable,
    RecordedEpisode,
    Recording,
    RecordingError,
    RecordingInfo,
    damaged,
    not_finite,
    raised_as_damage,
)
from embodied_rl.errors import brief
from embodied_rl.reading import open_regular, parse_json, read_npy_header, read_regular
from embodied_rl.specs import spec_differences
from embodied_rl.types import SimSpec

RECORDING_FILE = "recording.json"
LAYOUT_FILE = "part.json"
INDEX_FILE = "episodes.jsonl"
SUMMED = ("reward", "terminated", "truncated", "success")
"""Columns that the index line summarises."""
_SEED_LIMIT = 2**63
_MOST_ROWS = 2**32
"""Limit on an episode's rows: sums of larger numbers would not fit into 64 bits."""
_DECODER = json.JSONDecoder()
"""Faster than `json.loads` of bytes, which guesses their encoding first and takes as long as a short line itself."""
ABOUT_KINDS: dict[str, tuple[type, ...]] = {
    "seed": (int,),
    "task": (str, type(None)),
    "instruction": (str, type(None)),
    "metadata": (dict,),
}
"""{field of `EpisodeAbout`: its exact types} (a bool is no int here)."""
_KINDS: dict[str, tuple[type, ...]] = {
    "steps": (int,),
    "step_row": (int,),
    "observation_row": (int,),
    "snapshots": (int,),
    "snapshot_row": (int,),
    "return": (float, int),
    "success_once": (bool,),
    "success_at_end": (bool,),
    "complete": (bool,),
    "crc32": (list,),
    **ABOUT_KINDS,
}
"""The same for the fields of a line."""


@dataclass(frozen=True)
class EpisodeAbout:
    """Fields of an episode's index line that do not summarise its rows."""

    seed: int
    task: str | None = None
    instruction: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def summary(self, summed: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The line's own fields; `summed` contains the rows [T] of the columns `SUMMED`."""
        reward, success = np.asarray(summed["reward"], np.float32), np.asarray(summed["success"], bool)
        return {
            "steps": len(reward),
            "seed": int(self.seed),
            "task": self.task,
            "instruction": self.instruction,
            "return": float(reward.sum(dtype=np.float64)),
            "success_once": bool(success.any()),
            "success_at_end": bool(success[-1]),
            "complete": bool(summed["terminated"][-1] or summed["truncated"][-1]),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True, eq=False)
class Index:
    """Finished episodes of a part."""

    path: Path
    lines: list[bytes]
    """[E] one JSON object each; kept as bytes, because 10,000 dictionaries take ten times the memory."""
    table: EpisodeTable
    snapshots: np.ndarray
    """[E] int64 number of snapshots."""
    sums: np.ndarray
    """[E, C + 1] int64 CRC-32 of each episode's rows of each column, and last of its snapshots."""
    size: int
    """Bytes of the finished lines; anything after them is a truncated line."""

    @property
    def num_episodes(self) -> int:
        return len(self.lines)

    def starts(self, per: Per) -> np.ndarray:
        """[E + 1] int64 first row of each episode in the columns of a kind, and the row after the last."""
        counts = self.snapshots if per == "snapshot" else self.table.lengths + (per == "observation")
        return np.concatenate([[0], np.cumsum(counts)])

    def entry(self, number: int) -> dict[str, Any]:
        """Line `number` as a dictionary."""
        entry: dict[str, Any] = _DECODER.decode(self.lines[number].decode())
        return entry


def read_info(folder: Path) -> RecordingInfo:
    """Read ``recording.json``. Raises RecordingError if it is missing, damaged, or of another format version."""
    path = folder / RECORDING_FILE
    with raised_as_damage(path, said="does not describe a recording"):
        return RecordingInfo.from_dict(parse_json(read_regular(path)))


def part_folders(recording: Path) -> list[Path]:
    found = [folder for folder in recording.glob("part-*") if whole_number(folder.name[5:]) is not None and folder.is_dir()]
    return sorted(found, key=lambda folder: int(folder.name[5:]))


def read_columns(folder: Path) -> tuple[Column, ...]:
    """Read the columns of a part. Raises RecordingError if ``part.json`` is missing or wrong."""
    path = folder / LAYOUT_FILE
    with raised_as_damage(path, said="does not describe columns"):
        columns = tuple(Column.from_dict(data) for data in parse_json(read_regular(path))["columns"])
    if len({column.name for column in columns}) != len(columns):
        raise damaged(path, "names a column twice")
    return columns


def array_offsets(folder: Path, columns: tuple[Column, ...], index: Index) -> dict[str, int]:
    """{column: offset of its rows in the .npy file}, with snapshots, without videos.
    Raises RecordingError: a file contains other data, or fewer rows than the index says."""
    arrays = [column for column in (*columns, SNAPSHOT_COLUMN) if not column.is_video]
    return {column.name: _array_offset(folder / f"{column.stem}.npy", column, index.starts(column.per)[1:]) for column in arrays}


def _array_offset(path: Path, column: Column, ends: np.ndarray) -> int:
    """Offset of the rows of an .npy file; checks that the file reaches the rows `ends` [E], one past the last of each episode."""
    field, (dtype, shape) = column.name, column.stored
    with raised_as_damage(path, field=field), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = read_npy_header(file)
        offset = file.tell()
    # The header's number of rows is ignored: a killed recorder may have counted one episode too many.
    if found[0][1:] != shape or found[1] or found[2].str != dtype:
        rows = ", ".join(["rows", *map(str, shape)])
        held = f"{brief(found[2], 40)} {brief(list(found[0]), 80)}"
        raise damaged(path, f"holds {held} instead of {np.dtype(dtype)} [{brief(rows, 80)}]", field=field)
    row_bytes = np.dtype(dtype).itemsize * math.prod(shape)
    # In floating point: claimed sizes may not fit into 64 bits, and are only compared.
    missing = offset + ends * float(min(row_bytes, 2**62)) > size
    if missing.any():
        episode = int(np.argmax(missing))
        reach = offset + int(ends[episode]) * row_bytes
        raise damaged(path, f"the file is cut short: {size} bytes, and the episode ends at {reach}", episode, field)
    return offset


def encode_entry(entry: Mapping[str, Any]) -> bytes:
    """Encode a line with its newline. Raises RecordingError if the metadata are not JSON, or the seed is no int64."""
    if not -_SEED_LIMIT <= entry["seed"] < _SEED_LIMIT:
        raise RecordingError(f"Seed {entry['seed']} does not fit into 64 bits.")
    try:
        return json.dumps(entry, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordingError(f"Metadata of the episode of seed {entry['seed']} must hold what JSON can: {error}.") from error


def read_index(path: Path, num_columns: int) -> Index:
    """Read the finished episodes of a part; a last line without a newline is ignored.
    Raises RecordingError: the file is missing, or a line is invalid; the message names the line and the field."""
    with raised_as_damage(path):
        data = read_regular(path)
    size = data.rfind(b"\n") + 1
    lines = data[:size].split(b"\n")[:-1]
    entries = _parse(path, lines)
    columns = {name: _column(path, entries, name) for name in _KINDS}
    lengths, snapshots = (_int64(path, name, columns[name]) for name in ("steps", "snapshots"))
    table = EpisodeTable(
        lengths=lengths,
        seeds=_int64(path, "seed", columns["seed"]),
        returns=_floats(columns["return"]),
        success_once=np.array(columns["success_once"], bool),
        success_at_end=np.array(columns["success_at_end"], bool),
        complete=np.array(columns["complete"], bool),
        tasks=np.fromiter(columns["task"], object, len(lines)),
    )
    sums = columns["crc32"]
    _require(path, np.array([_are_sums(found, num_columns + 1) for found in sums], bool), "crc32", f"has not {num_columns + 1} sums")
    index = Index(path, lines, table, snapshots, np.array(sums, np.int64).reshape(len(lines), num_columns + 1), size)
    _require(path, lengths >= 1, "steps", "is not at least 1")
    _require(path, snapshots >= 0, "snapshots", "is negative")
    _require(path, np.maximum(lengths, snapshots) <= _MOST_ROWS, "steps", f"or 'snapshots' is more than {_MOST_ROWS:,}")
    _require(path, np.isfinite(table.returns), "return", "is not finite")
    for per in get_args(Per):
        name = f"{per}_row"
        _require(path, _int64(path, name, columns[name]) == index.starts(per)[:-1], name, "does not follow from the episodes before")
    return index


def _are_sums(found: list[Any], count: int) -> bool:
    return len(found) == count and all(type(value) is int and 0 <= value < 2**32 for value in found)


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    """Parse all lines in one call, several times as fast as one by one, which then serves to find an invalid line."""
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        entries = None
    if entries is not None and len(entries) == len(lines) and all(type(entry) is dict for entry in entries):
        return entries
    for number, line in enumerate(lines):
        with raised_as_damage(path, number, said="the line is not JSON"):
            entry = parse_json(line)
        if type(entry) is not dict:
            raise damaged(path, "the line is not a JSON object", number)
    raise damaged(path, "does not hold one JSON object per line")


def _column(path: Path, entries: list[dict[str, Any]], name: str) -> list[Any]:
    """Values of a field in all lines."""
    try:
        values = [entry[name] for entry in entries]
    except KeyError:
        raise damaged(path, "is missing", next(n for n, entry in enumerate(entries) if name not in entry), name) from None
    if not set(map(type, values)) <= set(_KINDS[name]):
        number = next(number for number, value in enumerate(values) if type(value) not in _KINDS[name])
        kinds = " or ".join(kind.__name__ for kind in _KINDS[name])
        raise damaged(path, f"must be {kinds}, got {values[number]!r:.80}", number, name)
    return values


def _int64(path: Path, name: str, values: list[int]) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        number = next(number for number, value in enumerate(values) if not -_SEED_LIMIT <= value < _SEED_LIMIT)
        raise damaged(path, "does not fit into 64 bits", number, name) from None


def _floats(values: list[float]) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except OverflowError:  # integers of hundreds of digits
        return np.array([float(value) if abs(value) < 2**1023 else np.inf for value in values], np.float64)


def _require(path: Path, holds: np.ndarray, name: str, complaint: str) -> None:
    if not holds.all():
        raise damaged(path, complaint, int(np.argmin(holds)), name)


def blob_checksum(of_bytes: int, sizes: np.ndarray, marks: Sequence[int] | np.ndarray | None) -> int:
    """CRC-32 of a blob column's rows: continues the CRC of their bytes over the marks, if any, and the sizes."""
    if marks is not None:
        of_bytes = zlib.crc32(np.ascontiguousarray(marks, "<i8").tobytes(), of_bytes)
    return zlib.crc32(np.ascontiguousarray(sizes, "<i8").tobytes(), of_bytes)


def video_name(number: int) -> str:
    """File name of the video of episode `number` of the part."""
    return f"{number:06d}.mp4"


def file_checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with open_regular(path) as file:
        while chunk := file.read(2**20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


_RETURN_TOLERANCE = 1e-6
"""Relative tolerance; other projects' files contain returns that were summed in another order."""


def validate(recording: Recording, pictures: bool = True) -> list[str]:
    """Read every episode, and compare it with the recording's metadata.

    Checks: everything is readable and has its length; shapes, dtypes and discrete actions fit the simulator's spec; only the simulator's
    state contains NaN or infinity; lengths, returns and success match the table; checksums match, if the format has them; no episode is
    there twice.

    `pictures`: also decode every picture, which takes most of the time.

    Returns one line per problem, with the file, the episode and the field; none for a sound recording.
    """
    problems: list[str] = []
    seen: dict[Any, int] = {}
    for number in range(len(recording)):
        altered = recording.damage(number)
        problems += altered
        try:
            episode = recording.episode(number)
            problems += [str(damaged(recording.path, what, number, field)) for field, what in _episode_problems(recording, number, episode)]
            if pictures:
                _decode(episode)
        except RecordingError as error:
            # A recording that verifies on reading reports it again.
            problems += [] if str(error) in altered else [str(error)]
            continue
        fingerprint = recording.fingerprint(number)
        if fingerprint is not None and seen.setdefault(fingerprint, number) != number:
            problems.append(str(damaged(recording.path, f"is a copy of episode {seen[fingerprint]}", number)))
    return problems


def fit_problems(episode: RecordedEpisode, spec: SimSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, complaint) of each mismatch between an episode and a simulator."""
    if episode.observation.keys() != spec.observation.keys():
        yield "observation", f"has the keys {sorted(episode.observation)}, and the simulator {sorted(spec.observation)}"
    fixed = {f"observation.{key}": (episode.observation[key], part) for key, part in spec.tensors.items() if key in episode.observation}
    due = [(name, rows, part.dtype, part.shape) for name, (rows, part) in fixed.items()]
    if spec.action.kind == "text":
        yield from (("action", f"step {time} is not text") for time, action in enumerate(episode.action) if not isinstance(action, str))
    else:
        due.append(("action", episode.action, spec.action.dtype, (spec.action.dim,)))
    for name, rows, dtype, shape in due:
        if np.dtype(rows.dtype) != np.dtype(dtype) or rows.shape[1:] != shape:
            yield name, f"holds rows {rows.dtype} {list(rows.shape[1:])}, and the simulator {dtype} {list(shape)}"
        elif name == "action" and spec.action.kind == "discrete" and (outside := (rows < 0) | (rows >= spec.action.num_actions)).any():
            step = int(np.argmax(outside.any(axis=1)))
            yield name, f"step {step} is {rows[step].tolist()}, of {spec.action.num_actions} choices"


def finite_problems(episode: RecordedEpisode) -> Iterator[tuple[str, str]]:
    """Yield (field, complaint) of each field with forbidden NaN or infinity."""
    for name, rows in episode.columns().items():
        due = name in FINITE_COLUMNS or name.startswith("observation.")
        if due and isinstance(rows, np.ndarray) and (bad := not_finite(rows)) is not None:
            yield name, f"holds {bad[1]} at step {bad[0]}"


def _episode_problems(recording: Recording, number: int, episode: RecordedEpisode) -> Iterator[tuple[str, str]]:
    yield from fit_problems(episode, recording.spec)
    yield from finite_problems(episode)
    table = recording.table
    for name, said, found in (
        ("steps", int(table.lengths[number]), episode.num_steps),
        ("seed", int(table.seeds[number]), episode.seed),
        ("success_once", bool(table.success_once[number]), episode.success_once),
        ("success_at_end", bool(table.success_at_end[number]), episode.success_at_end),
        ("complete", bool(table.complete[number]), episode.complete),
    ):
        if said != found:
            yield name, f"has the value {said} in the metadata, but {found} in the data"
    said_return, found_return = float(table.returns[number]), episode.episode_return
    if not abs(said_return - found_return) <= _RETURN_TOLERANCE * max(1.0, float(np.abs(episode.reward, dtype=np.float64).sum())):
        yield "return", f"is {said_return:.6g} in the metadata, but the rewards add up to {found_return:.6g}"


def _decode(episode: RecordedEpisode) -> None:
    """Decode all pictures, one at a time. Raises RecordingError."""
    for rows in (*episode.observation.values(), *episode.images.values()):
        if not isinstance(rows, np.ndarray):
            for time in range(len(rows)):
                rows[time]


def require_compatible(source: RecordingInfo, target: RecordingInfo, source_name: str, target_name: str) -> None:
    """Raise RecordingError if episodes of the two recordings do not fit together."""
    if differences := spec_differences(source.spec, target.spec):
        raise RecordingError(f"Episodes of '{source_name}' do not fit into '{target_name}': {'; '.join(differences)}.")


def adopted(episode: RecordedEpisode, source: RecordingInfo, target: RecordingInfo) -> RecordedEpisode:
    """Copy of the episode that states its recording's shared values where the target's differ."""
    changes: dict[str, object] = {}
    if episode.task is None and source.spec.task != target.spec.task:
        changes["task"] = source.spec.task
    if episode.instruction is None and source.spec.instruction != target.spec.instruction:
        changes["instruction"] = source.spec.instruction
    if "policy" not in episode.metadata and dict(source.policy) != dict(target.policy):
        changes["metadata"] = {**episode.metadata, "policy": dict(source.policy)}
    return dataclasses.replace(episode, **changes) if changes else episode  # type: ignore[arg-type]
