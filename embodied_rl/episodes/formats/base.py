"""Shared code of readers and writers of other projects' formats: field notes, errors, checks, and this package's side entry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied_rl.episodes.folder import ABOUT_KINDS, finite_problems, fit_problems
from embodied_rl.episodes.recording import (
    EpisodeTable,
    Fate,
    FieldNote,
    RecordedEpisode,
    Recording,
    RecordingError,
    RecordingInfo,
    damaged,
    last_only,
    raised_as_damage,
)
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


class ForeignRecording(Recording):
    """A recording in another project's format."""

    format: ClassVar[str]
    """Name of the format among `FORMATS`."""

    def __init__(self, path: Path) -> None:
        """Read the small columns of all episodes once. Raises RecordingError if they are damaged or inconsistent."""
        notes, bounds = NoteBook(), ActionBounds()
        count, info = self._open(notes)

        def survey() -> Iterator[dict[str, Any]]:
            for number in range(count):
                fields = self._flags(number, notes)
                with raised_as_damage(path, number, "action", said=""):
                    bounds.add(fields["action"])
                yield fields

        table = EpisodeTable.of(survey())
        super().__init__(path, self._foreign_info(bounds, notes) if info is None else info, table)
        self.notes = tuple(notes)
        """Notes on missing fields and their replacements."""

    def episode(self, number: int) -> RecordedEpisode:
        position = self._position(number)
        with raised_as_damage(self.path, position):
            found = self._episode(position)
            for field, what in fit_problems(found, self.spec):
                raise damaged(self.path, what, position, field)
        return found

    @abstractmethod
    def _open(self, notes: NoteBook) -> tuple[int, RecordingInfo | None]:
        """Find the episodes; return their number and the side entry's info. None: another program wrote the file."""

    @abstractmethod
    def _foreign_info(self, bounds: ActionBounds, notes: NoteBook) -> RecordingInfo:
        """Recording info of another program's file."""

    @abstractmethod
    def _flags(self, number: int, notes: NoteBook) -> dict[str, Any]:
        """All fields of an episode except observations and states, named as in `RecordedEpisode`."""

    @abstractmethod
    def _episode(self, number: int) -> RecordedEpisode:
        """Read the existing episode `number`. Any error other than RecordingError counts as damage."""


def filled(name: str, length: int, notes: NoteBook, said: str) -> np.ndarray:
    """Substitute [T] for a ``reward`` or ``success`` that is not in the file."""
    notes.add(name, "filled", f"{said}; {'False' if name == 'success' else '0'} at every step")
    return np.zeros(length, bool if name == "success" else np.float32)


def unknown_seed(number: int) -> int:
    """Substitute seed of episode `number` in a file without seeds: -1, -2, …, so that no two episodes seem equal."""
    return -1 - number


def seed_or_unknown(seed: object, number: int, notes: NoteBook, why: str) -> int:
    """The seed in the file, or `unknown_seed`."""
    if type(seed) is int:
        return seed
    notes.add("seed", "filled", f"{why}; negative numbers, one for each episode")
    return unknown_seed(number)


# ---- what files say -------------------------------------------------------------------------------------------------


def file_in(path: Path, first: str, *suffixes: str) -> Path:
    """`path`, or the only file with one of the suffixes in that folder; of several `first`, or the first by name. Raises RecordingError."""
    if not path.is_dir():
        return path
    found = sorted((file.name != first, file.name, file) for file in path.iterdir() if file.suffix in suffixes)
    if not found:
        raise damaged(path, f"has no {suffixes[0]} file")
    return found[0][2]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises RecordingError naming the file."""
    if not path.is_file():
        raise damaged(path, "is missing")
    with raised_as_damage(path, said="cannot be read as JSON"):
        return parse_json(path, read_regular(path))


def parse_json(path: Path, text: str | bytes, field: str | None = None, episode: int | None = None) -> dict[str, Any]:
    """Parse a JSON object from an attribute or a column. Raises RecordingError."""
    with raised_as_damage(path, episode, field, "cannot be read as JSON"):
        data = parse_text(text)
    if not isinstance(data, dict):
        raise damaged(path, f"must hold a JSON object, holds a {type(data).__name__}", episode, field)
    return data


def finish_episode(path: Path, number: int, fields: Mapping[str, Any]) -> RecordedEpisode:
    """Build an episode and check it. Raises RecordingError naming file, episode and field."""
    for name in ("reward", "terminated", "truncated", "success"):
        if fields[name].ndim != 1:
            raise damaged(path, f"must hold one value a step, holds rows of {list(fields[name].shape[1:])}", number, name)
    with raised_as_damage(path, number, said=""):
        episode = RecordedEpisode(**fields)
        for field, what in finite_problems(episode):
            raise damaged(path, what, number, field)
    return episode


def as_float32(array: np.ndarray, field: str, notes: NoteBook | None = None) -> np.ndarray:
    """Convert to float32, with a note if that changes a number."""
    single = array.astype(np.float32, copy=False)
    if notes is not None and array.dtype != np.float32 and not np.array_equal(single.astype(array.dtype), array, equal_nan=True):
        notes.add(field, "changed", f"{array.dtype} in the file, rounded to float32")
    return single


def split_ends(ended: np.ndarray, field: str, notes: NoteBook) -> np.ndarray:
    """[T] flags of which only the last counts; notes earlier ones, which some recorders write when they continue after success."""
    if ended[:-1].any():
        notes.add(field, "changed", "also set before the last step (the recorder continued after the task's end); only the last counts")
    return last_only(len(ended), bool(ended[-1]))


def guessed_ends(done: np.ndarray | None, length: int, name: str, notes: NoteBook) -> dict[str, np.ndarray]:
    """terminated and truncated [T] of a file that has at most [T] flags `name`, which are set when an episode is done."""
    terminated = last_only(length, False) if done is None else split_ends(done.astype(bool), "terminated", notes)
    notes.add("terminated", "filled", f"'{name}' of the last step, which does not tell the task's end from a cut; False without it")
    notes.add("truncated", "filled", "an episode that is not done at its last step was cut by its recorder")
    return {"terminated": terminated, "truncated": last_only(length, not terminated[-1])}


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
        """Add actions [T, A] (texts are ignored, and rows with NaN, which `finish_episode` refuses). Raises ValueError: another A."""
        if action.dtype.kind == "O":
            return
        if action.ndim != 2:
            raise ValueError(f"must be [T, A], is {list(action.shape)}")
        if self.low is not None and self.low.size != action.shape[1]:
            raise ValueError(f"has {action.shape[1]} columns, earlier episodes {self.low.size}")
        action = action[np.isfinite(action).all(axis=1)]
        if len(action):
            low, high = action.min(axis=0), action.max(axis=0)
            self.low = low if self.low is None else np.minimum(self.low, low)
            self.high = high if self.high is None else np.maximum(self.high, high)

    def spec(self, notes: NoteBook) -> ActionSpec:
        """Action spec with bounds [-1, 1] if all actions are inside, otherwise those of the data, or as many choices; a note says which."""
        if self.low is None or self.high is None:
            raise RecordingError("No episode has only finite actions.")
        if self.high.dtype.kind == "i":
            notes.add("spec.action", "filled", "the file has no number of choices; the largest action and one")
            return ActionSpec.discrete(int(self.high.max()) + 1)
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
    with raised_as_damage(path, field=SIDE_ENTRY, said="was not written by this package"):
        return RecordingInfo.from_dict(data)


def side_episode(episode: RecordedEpisode) -> dict[str, Any]:
    """JSON-able parts of an episode other than arrays and pictures."""
    return {name: vars(episode)[name] for name in ABOUT_KINDS} | {"metadata": dict(episode.metadata)}


def parse_side_episode(path: Path, data: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Inverse of `side_episode`. Raises RecordingError."""
    for name, kind in ABOUT_KINDS.items():
        if type(data.get(name)) not in kind:
            raise damaged(path, f"holds {data.get(name)!r:.60} for '{name}'", number, SIDE_ENTRY)
    return {name: data[name] for name in ABOUT_KINDS}


def note_side_episode(episode: RecordedEpisode, notes: NoteBook, where: str, own: Sequence[str] = ()) -> None:
    """Add notes on the fields of `side_episode`, and on snapshots, which are not written; `own`: fields that the format itself stores."""
    for name, value in side_episode(episode).items():
        if value not in (None, {}):
            notes.add(name, "kept" if name in own else "extra", "" if name in own else where)
    if episode.snapshots:
        notes.add("snapshots", "lost", "only this package's simulators read them; the native format keeps them")
