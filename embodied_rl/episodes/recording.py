"""What a recorded episode holds, and a recording as its readers show it, whatever files it came from; numpy only."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.trust import RECORDING, sign
from embodied_rl.types import Observation, SimSpec

FORMAT_VERSION = 1
Value = npt.ArrayLike | Mapping[str, object] | None
"""A row of a column: an array or a number, a text, or what JSON can hold."""
STEP_COLUMNS = ("action", "reward", "terminated", "truncated", "success")
"""Columns per step that every episode has, and …"""
OPTIONAL_COLUMNS = ("sampled_action", "log_prob", "value", "policy_version", "chunk")
"""… those that it may lack."""
Fate = Literal["kept", "extra", "changed", "filled", "lost"]
"""kept: exact, where the format itself keeps it. extra: exact, in a place of ours that other readers of the format overlook.
changed: there, but not bit by bit or not under its name. filled: the file does not say; something else stands in its place.
lost: not there any more."""


@dataclass(frozen=True)
class FieldNote:
    """What becomes of one field in another format."""

    field: str
    """As in `RecordedEpisode`: ``log_prob``, ``observation.state``, ``seed``; or what else the line is about."""
    fate: Fate
    note: str = ""
    """Where it is, what stands for it, or why it is gone."""

    def __str__(self) -> str:
        return f"{self.fate:<8}{self.field}{': ' if self.note else ''}{self.note}"


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """T steps of one environment between two resets, and the T + 1 observations around them.

    Raises ValueError when the lengths do not agree.
    """

    seed: int
    """Of the reset."""
    observation: Observation
    """{key: [T + 1, ...]} before each step, and after the last; parts of varying size are object arrays."""
    action: np.ndarray
    """[T, A] float32 (int64 [T, 1] for discrete, an object array [T] of str for text): what the simulator was given."""
    reward: np.ndarray
    """[T] float32"""
    terminated: np.ndarray
    """[T] bool; only the last can be True."""
    truncated: np.ndarray
    """[T] bool; only the last can be True."""
    success: np.ndarray
    """[T] bool: success at this step."""
    sampled_action: np.ndarray | None = None
    """[T, A] normalised and unclipped, as the policy drew it: what `log_prob` is the log-probability of. None: not known."""
    log_prob: np.ndarray | None = None
    """[T, L] under the policy that acted, of `sampled_action` (of `action` where the choice is discrete); None: not known."""
    value: np.ndarray | None = None
    """[T] the acting policy's estimate before each step; None: not known."""
    policy_version: np.ndarray | None = None
    """[T] int64 version of the weights that acted."""
    state: Mapping[str, np.ndarray] | None = None
    """{name: [T + 1, ...]} the simulator's physical state around the steps, where it was recorded."""
    snapshots: Mapping[int, bytes] = field(default_factory=dict)
    """{step t: `EnvManager.snapshot` before step t}, for the steps that were asked for."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{camera: [T + 1, H, W, 3] uint8} pictures for people, which no policy saw."""
    chunk: np.ndarray | None = None
    """[T] int64 number of the message (action chunk or turn) that each step belongs to; None: every step is one."""
    task: str | None = None
    """Of a recording with several tasks; None: the recording's only one."""
    instruction: str | None = None
    """Language instruction; None: the recording's, if any."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, JSON-able (reset options, final info, the player's name, …)."""
    same_lengths: InitVar[bool] = False
    """The caller has checked that the lengths agree, so that they are not checked again."""

    def __post_init__(self, same_lengths: bool) -> None:
        if not same_lengths:
            self._require_lengths()
        ends = (self.terminated | self.truncated)[:-1]
        if ends.any():
            raise ValueError(f"The episode ends at step {int(np.argmax(ends))}, but has {self.num_steps} steps.")

    def _require_lengths(self) -> None:
        steps = self.num_steps
        wrong = {name: len(rows) for name, rows in self.columns().items() if len(rows) != steps + ("." in name)}
        if steps < 1 or wrong:
            raise ValueError(f"An episode of {steps} steps has {steps} rows, and {steps + 1} of observations and states; got {wrong}.")

    def columns(self) -> dict[str, np.ndarray]:
        """{name: all its rows}: [T, ...] by the field's name, [T + 1, ...] as ``observation.KEY``, ``state.NAME``, ``images.CAMERA``."""
        columns = {f"observation.{key}": rows for key, rows in self.observation.items()}
        columns |= self.per_step()
        columns |= {f"state.{name}": rows for name, rows in (self.state or {}).items()}
        return columns | {f"images.{camera}": rows for camera, rows in self.images.items()}

    def per_step(self) -> dict[str, np.ndarray]:
        """{name: rows [T, ...]} of `STEP_COLUMNS`, and of those of `OPTIONAL_COLUMNS` that are known."""
        rows = vars(self)
        return {name: rows[name] for name in (*STEP_COLUMNS, *OPTIONAL_COLUMNS) if rows[name] is not None}

    @property
    def num_steps(self) -> int:
        """T"""
        return len(self.reward)

    @property
    def episode_return(self) -> float:
        """Sum of rewards, undiscounted."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def success_once(self) -> bool:
        return bool(self.success.any())

    @property
    def success_at_end(self) -> bool:
        return bool(self.success[-1])

    @property
    def complete(self) -> bool:
        """Whether the episode came to an end; a recorder that was stopped can leave one that did not."""
        return bool(self.terminated[-1] or self.truncated[-1])


@dataclass(frozen=True)
class RecordingInfo:
    """What all episodes of a recording share, and everything needed to play them again."""

    spec: SimSpec
    sim: Mapping[str, Any]
    """The simulator's configuration (`SimConfig` as a dictionary); empty for a recording that was imported from elsewhere."""
    policy: Mapping[str, Any]
    """Who acted: ``kind`` (checkpoint, expert, random, imported, training) and what identifies it (path, step, hash of the weights)."""
    command: str = ""
    """How the recording was made."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, this package and the simulator's."""
    created: str = ""
    """ISO 8601, UTC."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    signature: str | None = None
    """Of `sim`, by the user whose run recorded it (`signed`); it goes along where a recording is copied."""

    def signed(self) -> RecordingInfo:
        """For the run that records `sim` itself: with this user's signature, which lets `sim` name code of the user's own later."""
        return replace(self, signature=sign(RECORDING, self.sim_bytes))

    @property
    def sim_bytes(self) -> bytes:
        """`sim` as it is signed: the same after it was written and read."""
        return json.dumps(self.sim, sort_keys=True, separators=(",", ":")).encode()

    def to_dict(self) -> dict[str, Any]:
        own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        return {"format": "embodied_rl episodes", "format_version": FORMAT_VERSION, **own, "spec": self.spec.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RecordingInfo:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        if data.get("format") != "embodied_rl episodes" or data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format {data.get('format')!r} version {data.get('format_version')!r}; this is 'embodied_rl episodes' {FORMAT_VERSION}"
            )
        fields = ("sim", "policy", "command", "versions", "created", "metadata")
        return RecordingInfo(SimSpec.from_dict(data["spec"]), **{name: data[name] for name in fields}, signature=data.get("signature"))


@dataclass(frozen=True, eq=False)
class EpisodeBlock:
    """n episodes with M steps together; a column's rows lie one episode after another.

    Read-only views into the recording's files where they lie there like that, as long as the recording is open; copies otherwise.
    """

    numbers: np.ndarray
    """[n] int64 of the episodes in their recording."""
    lengths: np.ndarray
    """[n] int64 steps of each."""
    columns: Mapping[str, np.ndarray]
    """{name: [M, ...], or [M + n, ...] of observations, states and images}; named as in `RecordedEpisode`, the key behind a dot:
    ``action``, ``observation.state``."""

    def __len__(self) -> int:
        """n"""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """M"""
        return int(self.lengths.sum())

    @property
    def step_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per step."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def observation_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per observation."""
        return self.step_starts + np.arange(len(self))

    @property
    def episode_of_step(self) -> np.ndarray:
        """[M] int64 which of the n episodes each step belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def first_not_finite(self, names: Iterable[str]) -> tuple[int, str] | None:
        """(number of an episode in the recording, one of these columns that holds NaN or infinity there); None: there is none."""
        for name in names:
            rows = self.columns[name]
            if rows.dtype.kind in "fc" and not (finite := np.isfinite(rows)).all():
                row = int(np.argmin(finite.reshape(len(rows), -1).all(axis=1)))
                return self._number_at(name, row), name
        return None

    def first_early_end(self) -> int | None:
        """Number of an episode in the recording that goes on after a step that ends it; None: there is none."""
        if "terminated" not in self.columns or "truncated" not in self.columns:
            return None
        early = self.columns["terminated"] | self.columns["truncated"]
        early[np.cumsum(self.lengths) - 1] = False
        return self._number_at("terminated", int(np.argmax(early))) if early.any() else None

    def _number_at(self, name: str, row: int) -> int:
        starts = self.observation_starts if per_observation(name) else self.step_starts
        return int(self.numbers[np.searchsorted(starts, row, side="right") - 1])


def per_observation(name: str) -> bool:
    """Whether a column has a row for each observation, one more than steps."""
    return "." in name


def block_of(episodes: Sequence[RecordedEpisode], numbers: np.ndarray, names: Iterable[str]) -> EpisodeBlock:
    """Episodes in memory as a block. Raises KeyError naming a column that one of them lacks."""
    lengths = np.array([episode.num_steps for episode in episodes], np.int64)
    there = [episode.columns() for episode in episodes]
    return EpisodeBlock(numbers, lengths, {name: joined([columns[name] for columns in there]) for name in names})


def runs_of(positions: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, stop): [3, 4, 5, 9, 2] → (3, 6), (9, 10), (2, 3)."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, cuts) if len(part)]


def cut_by_steps(lengths: np.ndarray, max_steps: int) -> list[int]:
    """Where to cut episodes into blocks of at most `max_steps` steps (or a single episode): the ends of the blocks."""
    ends, cuts, first = np.cumsum(lengths), list[int](), 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        first = max(first + 1, int(np.searchsorted(ends, before + max_steps, side="right")))
        cuts.append(first)
    return cuts


def joined(parts: list[Any]) -> np.ndarray:
    """Rows one after another; pictures are decoded."""
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])


BLOCK_STEPS = 2**14
"""Steps that `Recording.blocks` reads at once."""


class RecordingError(UserError):
    """A recording that cannot be read or written: damaged, lying about itself, or of another simulator.

    The message names the file, and the episode and the field where there are any.
    """


@dataclass(frozen=True)
class RecordedStep:
    """Step t of an episode: what was seen, what was done, and what came of it."""

    observation: Mapping[str, Any]
    """{key: [...]} before the step; parts of varying size are values."""
    action: np.ndarray | str
    """[A] what the simulator was given (a str for text)."""
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    next_observation: Mapping[str, Any]
    """{key: [...]} after the step."""
    sampled_action: np.ndarray | None = None
    """[A] as the policy drew it; None: not known, here and below."""
    log_prob: np.ndarray | None = None
    """[L]"""
    value: float | None = None
    policy_version: int | None = None
    chunk: int | None = None
    """Number of the message that the step belongs to."""
    state: Mapping[str, np.ndarray] | None = None
    """{name: [...]} the simulator's state before the step."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{camera: [H, W, 3] uint8} before the step."""

    @staticmethod
    def of(row: Mapping[str, Any], **others: Any) -> RecordedStep:
        """From a row of `STEP_COLUMNS` and those of `OPTIONAL_COLUMNS` that are known, and the other fields."""
        return RecordedStep(**{name: _PLAIN[name](value) if name in _PLAIN else value for name, value in row.items()}, **others)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "reward": float,
    "value": float,
    "chunk": int,
    **dict.fromkeys(("terminated", "truncated", "success"), bool),
}


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """What is known of all E episodes without reading one."""

    lengths: np.ndarray
    """[E] int64 steps."""
    seeds: np.ndarray
    """[E] int64"""
    returns: np.ndarray
    """[E] float64 undiscounted."""
    success_once: np.ndarray
    """[E] bool"""
    success_at_end: np.ndarray
    """[E] bool"""
    complete: np.ndarray
    """[E] bool: the episode came to an end."""
    tasks: np.ndarray
    """[E] object: str, or None for the recording's only task."""

    @staticmethod
    def of(episodes: list[RecordedEpisode]) -> EpisodeTable:
        return EpisodeTable.of_rows(
            [(e.num_steps, e.seed, e.episode_return, e.success_once, e.success_at_end, e.complete, e.task) for e in episodes]
        )

    @staticmethod
    def of_rows(rows: Sequence[tuple[int, int, float, bool, bool, bool, str | None]]) -> EpisodeTable:
        """Of what is known of each episode, in the order of the columns."""
        columns = []
        for index, dtype in enumerate((np.int64, np.int64, np.float64, bool, bool, bool, object)):
            columns.append(np.empty(len(rows), dtype))
            columns[-1][:] = [row[index] for row in rows]
        return EpisodeTable(*columns)


class Recording(ABC):
    """E recorded episodes, read one at a time. Use it as a context manager, or `close` it.

    Readers of files derive from it and give `episode`; `step` is worth giving too where an episode is not read lazily.
    """

    format: ClassVar[str] = "native"
    """Whose files they are."""
    notes: tuple[FieldNote, ...] = ()
    """What of other projects' files was read, derived or lost."""

    def __init__(self, path: Path, info: RecordingInfo, table: EpisodeTable) -> None:
        self.path, self.info, self.table = path, info, table

    @abstractmethod
    def episode(self, number: int) -> RecordedEpisode:
        """Episode `number` in 0 … E - 1 (from the end where negative).
        Raises IndexError: there is none of this number; RecordingError: its data are damaged."""

    def read_many(self, numbers: Sequence[int] | np.ndarray, columns: Sequence[str]) -> EpisodeBlock:
        """Columns of several episodes, in the order of `numbers`; all at once, which is many times as fast as one by one.

        Args:
            numbers: [n >= 1] of episodes, as `episode` takes them.
            columns: names of the columns, such as ``action`` or ``observation.state``.

        Raises IndexError: there is no episode of such a number; RecordingError: an episode lacks a column, or its data are damaged.
        """
        positions = np.array([self._position(int(number)) for number in numbers], np.int64)
        return self._checked(self._read_block(positions, columns))

    def blocks(self, columns: Sequence[str], max_steps: int = BLOCK_STEPS) -> Iterator[EpisodeBlock]:
        """All episodes in order, some at a time: blocks of at most `max_steps` steps, or of a single episode that is longer.

        Args:
            columns: as `read_many` takes them.
            max_steps: bounds the memory where a block is no view.

        Raises RecordingError: as `read_many`.
        """
        first = 0
        for stop in self._block_ends(max_steps):
            yield self._checked(self._read_block(np.arange(first, stop), columns))
            first = stop

    def step(self, number: int, time: int) -> RecordedStep:
        """Step `time` in 0 … T - 1 of episode `number`. Raises as `episode` does."""
        return step_of(self.episode(number), time)

    def damage(self, number: int) -> list[str]:
        """Contradictions to the format's own checksums, one line each; most formats have none."""
        return []

    def fingerprint(self, number: int) -> Hashable | None:
        """Equal for episodes that are the same in everything; None where the format cannot say it without a comparison."""
        return None

    def close(self) -> None:  # noqa: B027 (a reader that holds no file has nothing to do)
        """Let go of the files; episodes that were handed out may become unreadable."""

    @property
    def spec(self) -> SimSpec:
        return self.info.spec

    @property
    def lengths(self) -> np.ndarray:
        """[E] int64 steps of each episode."""
        return self.table.lengths

    @property
    def seeds(self) -> np.ndarray:
        """[E] int64"""
        return self.table.seeds

    @property
    def returns(self) -> np.ndarray:
        """[E] float64 undiscounted."""
        return self.table.returns

    @property
    def success_once(self) -> np.ndarray:
        """[E] bool"""
        return self.table.success_once

    @property
    def success_at_end(self) -> np.ndarray:
        """[E] bool"""
        return self.table.success_at_end

    @property
    def complete(self) -> np.ndarray:
        """[E] bool"""
        return self.table.complete

    @property
    def tasks(self) -> np.ndarray:
        """[E] object: the task's name; the simulator's where the episode names none."""
        return np.array([self.spec.task if task is None else task for task in self.table.tasks], object)

    @property
    def num_steps(self) -> int:
        return int(self.table.lengths.sum())

    def __len__(self) -> int:
        return len(self.table.lengths)

    def __iter__(self) -> Iterator[RecordedEpisode]:
        return (self.episode(number) for number in range(len(self)))

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, positions: np.ndarray, columns: Sequence[str]) -> EpisodeBlock:
        """`read_many` of existing episodes [n] int64."""
        episodes = [self.episode(int(position)) for position in positions]
        try:
            return block_of(episodes, positions, columns)
        except KeyError as error:
            raise self._lacks(str(error.args[0]), episodes[0].columns()) from None

    def _block_ends(self, max_steps: int) -> list[int]:
        return cut_by_steps(self.lengths, max_steps)

    def _lacks(self, name: str, there: Mapping[str, Any]) -> RecordingError:
        return RecordingError(f"'{self.path}' has episodes without a column '{name}'.{did_you_mean(name, there)}")

    def _checked(self, block: EpisodeBlock) -> EpisodeBlock:
        """What `episode` promises too: a step that ends an episode is its last."""
        early = block.first_early_end()
        if early is not None:
            raise RecordingError(f"'{self.path}', episode {early}: it goes on after a step that ends it.")
        return block

    def _position(self, number: int) -> int:
        """`number`, counted from the end where negative. Raises IndexError."""
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            raise IndexError(f"'{self.path}' has {len(self)} episodes, there is no episode {number}.")
        return position


def last_only(length: int, value: bool) -> np.ndarray:
    """[T] bool, False but for the last."""
    flags = np.zeros(length, bool)
    flags[-1] = value
    return flags


def step_of(episode: RecordedEpisode, time: int) -> RecordedStep:
    """Step `time` of an episode in memory. Raises IndexError."""
    if not 0 <= time < episode.num_steps:
        raise IndexError(f"The episode has {episode.num_steps} steps, there is no step {time}.")

    return RecordedStep.of(
        {name: rows[time] for name, rows in episode.per_step().items()},
        observation={key: part[time] for key, part in episode.observation.items()},
        next_observation={key: part[time + 1] for key, part in episode.observation.items()},
        state=None if episode.state is None else {name: part[time] for name, part in episode.state.items()},
        images={camera: part[time] for camera, part in episode.images.items()},
    )
