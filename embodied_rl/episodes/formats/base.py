"""Shared code of readers and writers of other projects' formats: field notes, errors, checks, and this package's side entry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied_rl.episodes.folder import fit_problems
from embodied_rl.episodes.recording import (
    EpisodeTable,
    Fate,
    FieldNote,
    RecordedEpisode,
    Recording,
    RecordingError,
    RecordingInfo,
    not_finite,
)
from embodied_rl.errors import UserError, brief
from embodied_rl.reading import parse_json as parse_text
from embodied_rl.reading import read_regular
from embodied_rl.types import ActionSpec, TensorSpec, VariableSpec

_ORDER = ("lost", "filled", "changed", "extra", "kept")


class NoteBook:
    """Collects notes over all episodes: equal notes count once, and a worse fate of the same field wins."""

    def __init__(self) -> None:
        self._notes: dict[str, FieldNote] = {}

    def add(self, field: str, fate: Fate, note: str = "") -> None:
        known = self._notes.get(field)
        if known is None or _ORDER.index(fate) < _ORDER.index(known.fate):
            self._notes[field] = FieldNote(field, fate, note)

    def __iter__(self) -> Iterator[FieldNote]:
        """Iterate over the notes, worst first, then by name."""
        return iter(sorted(self._notes.values(), key=lambda note: (_ORDER.index(note.fate), note.field)))


SIDE_ENTRY = "embodied_rl"
"""Name of this package's entry in files of other formats, for data without a place in the format; other readers ignore it."""
IMPORTED = {"kind": "imported"}
"""`RecordingInfo.policy` of a file that does not name the player."""

Advance = Callable[[int], object]
"""Callback with the number of episodes done since the last call."""


def damaged(path: Path, what: str, episode: int | str | None = None, field: str | None = None) -> RecordingError:
    """One-line error for an invalid file."""
    where = f"'{path}'"
    where += "" if episode is None else f", episode {episode}"
    where += "" if field is None else f", field '{brief(field, 80)}'"
    return RecordingError(f"{where}: {brief(what, 260)}.")


@contextmanager
def raised_as_damage(path: Path, episode: int | None = None) -> Iterator[None]:
    """Convert any error while reading another program's file to RecordingError: its data may be of any type at any place.
    Raises RecordingError in place of the errors of Python, numpy or a library."""
    try:
        yield
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
        OSError,
        RuntimeError,
    ) as error:
        raise damaged(path, f"cannot be read ({type(error).__name__}: {brief(error)})", episode) from error


def unknown_seed(number: int) -> int:
    """Substitute seed of episode `number` in a file without seeds: -1, -2, …, so that no two episodes seem equal."""
    return -1 - number


class ForeignRecording(Recording):
    """A recording in another project's format."""

    format: ClassVar[str]
    """Name of the format among `FORMATS`."""

    def __init__(self, path: Path, info: RecordingInfo, table: EpisodeTable, notes: NoteBook) -> None:
        super().__init__(path, info, table)
        self.notes = tuple(notes)
        """Notes on missing fields and their replacements."""

    def episode(self, number: int) -> RecordedEpisode:
        position = self._position(number)
        with raised_as_damage(self.path, position):
            found = self._episode(position)
            if problems := fit_problems(found, self.spec):
                raise damaged(self.path, problems[0].rstrip("."), position)
        return found

    @abstractmethod
    def _episode(self, number: int) -> RecordedEpisode:
        """Read the existing episode `number`. Any error other than RecordingError counts as damage."""


def table_row(fields: Mapping[str, Any], task: str | None) -> tuple[int, int, float, bool, bool, bool, str | None]:
    """An episode's row for `EpisodeTable.of_rows`, from its fields [T]."""
    reward, success = fields["reward"], fields["success"]
    ended = bool(fields["terminated"][-1] or fields["truncated"][-1])
    return len(reward), fields["seed"], float(reward.sum(dtype=np.float64)), bool(success.any()), bool(success[-1]), ended, task


# ---- what files say -------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises RecordingError naming the file."""
    try:
        return parse_json(path, read_regular(path))
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    except OSError as error:
        raise damaged(path, f"cannot be read as JSON ({error})") from error


def parse_json(path: Path, text: str | bytes, field: str | None = None, episode: int | None = None) -> dict[str, Any]:
    """Parse a JSON object from an attribute or a column. Raises RecordingError."""
    try:
        data = parse_text(text)
    except (TypeError, ValueError) as error:
        raise damaged(path, f"cannot be read as JSON ({error})", episode, field) from error
    if not isinstance(data, dict):
        raise damaged(path, f"must hold a JSON object, holds a {type(data).__name__}", episode, field)
    return data


def finish_episode(path: Path, number: int, fields: Mapping[str, Any]) -> RecordedEpisode:
    """Build an episode and check it. Raises RecordingError naming file, episode and field."""
    for name in ("action", "reward", "value", "log_prob", "sampled_action"):
        require_finite(path, fields.get(name), number, name)
    for key, part in fields["observation"].items():
        require_finite(path, part, number, f"observation.{key}")
    for name in ("reward", "terminated", "truncated", "success"):
        if fields[name].ndim != 1:
            raise damaged(path, f"must hold one value a step, holds rows of {list(fields[name].shape[1:])}", number, name)
    try:
        return RecordedEpisode(**fields)
    except (ValueError, TypeError) as error:
        raise damaged(path, str(error).rstrip("."), number) from error


def require_finite(path: Path, array: np.ndarray | None, episode: int, field: str) -> None:
    """Raise RecordingError if an array [T, ...] contains NaN or infinity."""
    if array is not None and (bad := not_finite(array)) is not None:
        raise damaged(path, f"holds {bad[1]} at step {bad[0]}", episode, field)


def as_float32(array: np.ndarray, field: str, notes: NoteBook | None = None) -> np.ndarray:
    """Convert to float32, with a note if that changes a number."""
    single = array.astype(np.float32, copy=False)
    if notes is not None and array.dtype != np.float32 and not np.array_equal(single.astype(array.dtype), array, equal_nan=True):
        notes.add(field, "changed", f"{array.dtype} in the file, rounded to float32")
    return single


def split_ends(ended: np.ndarray, field: str, notes: NoteBook) -> bool:
    """Whether the last of [T] flags is set; notes earlier ones, which some recorders write when they continue after success."""
    if ended[:-1].any():
        notes.add(field, "changed", "also set before the last step (the recorder continued after the task's end); only the last counts")
    return bool(ended[-1])


def repeat_last(array: np.ndarray) -> np.ndarray:
    """Repeat the last row: [T, ...] → [T + 1, ...]."""
    return np.concatenate([array, array[-1:]])


def unknown_last(array: np.ndarray) -> np.ndarray:
    """Append a row of NaN for a state that is not in the file: [T, ...] → [T + 1, ...] floating."""
    floating = array if array.dtype.kind == "f" else array.astype(np.float64)
    return np.concatenate([floating, np.full_like(floating[-1:], np.nan)])


# ---- specs of files that have none ----------------------------------------------------------------------------------


class ActionBounds:
    """Minimum and maximum of each action dimension over the added episodes."""

    def __init__(self) -> None:
        self.low: np.ndarray | None = None
        self.high: np.ndarray | None = None

    def add(self, action: np.ndarray) -> None:
        """Add actions [T, A]; rows with NaN, which `finish_episode` refuses, are ignored."""
        action = action[np.isfinite(action).all(axis=1)]
        if not len(action):
            return
        low, high = action.min(axis=0), action.max(axis=0)
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)

    def spec(self, notes: NoteBook) -> ActionSpec:
        """Action spec with bounds [-1, 1] if all actions are inside, otherwise those of the data; a note says which."""
        if self.low is None or self.high is None:
            raise RecordingError("No episode has only finite actions.")
        if (self.low >= -1).all() and (self.high <= 1).all():
            notes.add("spec.action", "filled", "the file has no bounds; -1 … 1, within which all actions lie")
            return ActionSpec.continuous(-np.ones_like(self.low), np.ones_like(self.high))
        notes.add("spec.action", "filled", "the file has no bounds; smallest and largest action of each dimension")
        return ActionSpec.continuous(self.low, self.high)


def tensor_specs(observation: Mapping[str, np.ndarray]) -> dict[str, TensorSpec | VariableSpec]:
    """Specs of an episode's observation parts [T + 1, ...] of numbers or texts."""
    specs: dict[str, TensorSpec | VariableSpec] = {}
    for key, part in observation.items():
        specs[key] = VariableSpec("text") if part.dtype == object else TensorSpec(tuple(part.shape[1:]), str(part.dtype))
    return specs


# ---- our side entry -------------------------------------------------------------------------------------------------


def side_info(info: RecordingInfo, kept: Mapping[str, TensorSpec | VariableSpec]) -> dict[str, Any]:
    """`RecordingInfo` for a file with only the observations `kept`."""
    return replace(info, spec=replace(info.spec, observation=dict(kept))).to_dict()


def parse_side_info(path: Path, data: Mapping[str, Any]) -> RecordingInfo:
    """Inverse of `side_info`. Raises RecordingError."""
    try:
        return RecordingInfo.from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"was not written by this package ({type(error).__name__}: {error})", field=SIDE_ENTRY) from error


def side_episode(episode: RecordedEpisode) -> dict[str, Any]:
    """JSON-able parts of an episode other than arrays and pictures."""
    return {
        "seed": episode.seed,
        "task": episode.task,
        "instruction": episode.instruction,
        "metadata": dict(episode.metadata),
    }


def parse_side_episode(path: Path, data: object, number: int) -> dict[str, Any]:
    """Inverse of `side_episode`. Raises RecordingError."""
    kinds: dict[str, tuple[type, ...]] = {
        "seed": (int,),
        "task": (str, type(None)),
        "instruction": (str, type(None)),
        "metadata": (dict,),
    }
    if not isinstance(data, dict):
        raise damaged(path, f"must be a JSON object, is a {type(data).__name__}", number, SIDE_ENTRY)
    for name, kind in kinds.items():
        if type(data.get(name)) not in kind:
            raise damaged(path, f"holds {data.get(name)!r:.60} for '{name}'", number, SIDE_ENTRY)
    return {name: data[name] for name in kinds}


def note_side_episode(episode: RecordedEpisode, notes: NoteBook, where: str, own: Sequence[str] = ()) -> None:
    """Add notes on the fields of `side_episode`, and on snapshots, which are not written; `own`: fields that the format itself stores."""
    present = {"seed": True, "task": episode.task is not None, "instruction": episode.instruction is not None}
    present["metadata"] = bool(episode.metadata)
    for name in (name for name, there in present.items() if there):
        notes.add(name, "kept" if name in own else "extra", "" if name in own else where)
    if episode.snapshots:
        notes.add("snapshots", "lost", "only this package's simulators read them; the native format keeps them")
