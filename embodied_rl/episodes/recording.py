"""Contents of a recorded episode, and the common interface of recordings in all file formats; numpy only."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from embodied_rl.errors import UserError, brief, did_you_mean, shown
from embodied_rl.trust import RECORDING, sign
from embodied_rl.types import Observation, SimSpec

FORMAT_VERSION = 1


class RecordingError(UserError):
    """A recording that cannot be read or written: damaged, inconsistent, or of another simulator.

    The message names the file, and the episode and the field if there are any.
    """


def damaged(path: Path, what: object, episode: int | str | None = None, field: str | None = None) -> RecordingError:
    """One-line error for an invalid file."""
    where = f"'{path}'"
    where += "" if episode is None else f", episode {episode}"
    where += "" if field is None else f", field '{brief(field, 80)}'"
    return RecordingError(f"{where}: {brief(what, 260)}.")


@contextmanager
def raised_as_damage(path: Path, episode: int | None = None, field: str | None = None, said: str = "cannot be read") -> Iterator[None]:
    """Convert errors while reading a file to RecordingError: files hold data of any type at any place, and libraries raise many classes.
    The message has the reason after `said` ("": only the reason). Errors that no file causes pass: they are our faults."""
    try:
        yield
    except (UserError, AssertionError, ImportError, NameError):
        raise
    except Exception as error:
        if isinstance(error, ValueError | OSError):
            reason = str((isinstance(error, OSError) and error.strerror) or error).rstrip(".")
        elif isinstance(error, KeyError) and " " not in str(error):  # those of h5py have sentences
            reason = f"no field {error}"
        else:
            reason = f"{type(error).__name__}: {error}"
        raise damaged(path, f"{said}: {brief(reason)}" if said else reason, episode, field) from error


Value = npt.ArrayLike | Mapping[str, object] | None
"""A row of a column: an array, a number, a text, or any JSON value."""
STEP_COLUMNS = ("action", "reward", "terminated", "truncated", "success")
"""Columns per step that every episode has."""
OPTIONAL_COLUMNS = ("sampled_action", "log_prob", "value", "policy_version", "chunk")
"""Columns per step that an episode may lack."""
Fate = Literal["kept", "extra", "changed", "filled", "lost"]
"""kept: exact, where the format itself keeps it. extra: exact, in an additional place that other readers of the format ignore. changed:
present, but not bit by bit or not under its name. filled: absent from the file and replaced by another value. lost: no longer present."""


@dataclass(frozen=True)
class FieldNote:
    """Conversion of one field to another format."""

    field: str
    """Field name as in `RecordedEpisode`: ``log_prob``, ``observation.state``, ``seed``; or another subject of the note."""
    fate: Fate
    note: str = ""
    """Location of the field, its replacement, or the reason for its loss."""


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """T steps of one environment between two resets, and the T + 1 observations around them.
    Raises ValueError if the lengths are inconsistent."""

    seed: int
    """Seed of the reset."""
    observation: Observation
    """Observations {key: [T + 1, ...]} before each step, and after the last; parts of varying size are object arrays."""
    action: np.ndarray
    """The simulator's actions [T, A] float32 (int64 [T, 1] for discrete, an object array [T] of str for text)."""
    reward: np.ndarray
    """Rewards [T] float32."""
    terminated: np.ndarray
    """[T] bool; only the last can be True."""
    truncated: np.ndarray
    """[T] bool; only the last can be True."""
    success: np.ndarray
    """[T] bool: success at this step."""
    sampled_action: np.ndarray | None = None
    """[T, A] normalised and unclipped, as the policy drew it: the argument of `log_prob`. None: not known."""
    log_prob: np.ndarray | None = None
    """[T, L] under the behaviour policy, of `sampled_action` (of `action` if the choice is discrete); None: not known."""
    value: np.ndarray | None = None
    """[T] the behaviour policy's value estimate before each step; None: not known."""
    policy_version: np.ndarray | None = None
    """[T] int64 version of the acting weights."""
    state: Mapping[str, np.ndarray] | None = None
    """{name: [T + 1, ...]} the simulator's physical state around the steps, if recorded."""
    snapshots: Mapping[int, bytes] = field(default_factory=dict)
    """{step t: `EnvManager.snapshot` before step t}, for the steps with a snapshot."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{camera: [T + 1, H, W, 3] uint8} pictures for people, not seen by the policy."""
    chunk: np.ndarray | None = None
    """[T] int64 number of each step's message (action chunk or turn); None: every step is one."""
    task: str | None = None
    """Task in a recording with several tasks; None: the recording's only one."""
    instruction: str | None = None
    """Language instruction; None: the recording's, if any."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON-able data (reset options, final info, the player's name, …)."""
    same_lengths: InitVar[bool] = False
    """Whether the caller has already checked that the lengths agree."""

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
        """{name: rows [T, ...]} of `STEP_COLUMNS`, and of the known `OPTIONAL_COLUMNS`."""
        rows = vars(self)
        return {name: rows[name] for name in (*STEP_COLUMNS, *OPTIONAL_COLUMNS) if rows[name] is not None}

    @property
    def num_steps(self) -> int:
        """Number of steps, T."""
        return len(self.reward)

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of rewards."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def success_once(self) -> bool:
        return bool(self.success.any())

    @property
    def success_at_end(self) -> bool:
        return bool(self.success[-1])

    @property
    def complete(self) -> bool:
        """Whether the episode ended; a stopped recorder may leave one that did not."""
        return bool(self.terminated[-1] or self.truncated[-1])


def fields_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `RecordedEpisode.columns`, for all rows or for one of each: the fields, with those in several columns as mappings."""
    fields: dict[str, Any] = {"observation": {}, "state": {}, "images": {}}
    for name, rows in columns.items():
        field, dot, key = name.partition(".")
        if dot:
            fields[field][key] = rows
        else:
            fields[name] = rows
    fields["state"] = fields["state"] or None
    return fields


CHOSEN = "chosen_by_success"
"""Metadata of a recording that a split by success made, or a merge with such a one."""


@dataclass(frozen=True)
class RecordingInfo:
    """Data shared by all episodes of a recording, including everything needed to replay them."""

    spec: SimSpec
    sim: Mapping[str, Any]
    """The simulator's configuration (`SimConfig` as a dictionary); empty for a recording imported from elsewhere."""
    policy: Mapping[str, Any]
    """Player: ``kind`` (checkpoint, expert, random, imported, training) and its identification (path, step, hash of the weights)."""
    command: str = ""
    """Command that made the recording."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python, this package and the simulator's package."""
    created: str = ""
    """Time of creation: ISO 8601, UTC."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    signature: str | None = None
    """Signature of `sim` by the recording user (`signed`); copies of the recording keep it."""

    def signed(self) -> RecordingInfo:
        """Sign `sim` as this user, for the run that records it; the signature later permits `sim` to name the user's own code."""
        return replace(self, signature=sign(RECORDING, self.sim_bytes))

    @property
    def selected_by_outcome(self) -> str:
        """Why its episodes are a biased sample of the acting policy's behaviour; "" if they may be a fair one."""
        plan = self.metadata.get("plan")
        if isinstance(plan, Mapping) and plan.get("only_success"):
            return "the recording keeps only successful episodes (only_success=true), so a mean over its episodes is not the policy's value"
        if self.metadata.get(CHOSEN):
            return "its episodes, or some of them, were chosen by their success (split by=success), so their mean is not the policy's value"
        return ""

    @property
    def sim_bytes(self) -> bytes:
        """Signed form of `sim`, unchanged by writing and reading."""
        return json.dumps(self.sim, sort_keys=True, separators=(",", ":")).encode()

    def to_dict(self) -> dict[str, Any]:
        own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}
        return {"format": "embodied_rl episodes", "format_version": FORMAT_VERSION, **own, "spec": self.spec.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RecordingInfo:
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        if data.get("format") != "embodied_rl episodes" or data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format {data.get('format')!r} version {data.get('format_version')!r}; this is 'embodied_rl episodes' {FORMAT_VERSION}"
            )
        mappings, texts = ("sim", "policy", "versions", "metadata"), ("command", "created")
        if wrong := [name for name in mappings if not isinstance(data[name], dict)] or [n for n in texts if not isinstance(data[n], str)]:
            raise ValueError(f"'{wrong[0]}' must be {'a mapping' if wrong[0] in mappings else 'a text'}, got {shown(data[wrong[0]])}")
        fields = {name: data[name] for name in (*mappings, *texts)}
        return RecordingInfo(SimSpec.from_dict(data["spec"]), **fields, signature=data.get("signature"))


@dataclass(frozen=True, eq=False)
class EpisodeBlock:
    """n episodes with M steps together; a column's rows are in the order of the episodes.

    Read-only views into the recording's files if the rows are contiguous there, valid while the recording is open; copies otherwise.
    """

    numbers: np.ndarray
    """[n] int64 numbers of the episodes in their recording."""
    lengths: np.ndarray
    """[n] int64 number of steps of each episode."""
    columns: Mapping[str, np.ndarray]
    """{name: [M, ...], or [M + n, ...] for observations, states and images}; named as in `RecordedEpisode`, the key after a dot:
    ``action``, ``observation.state``."""

    def __len__(self) -> int:
        """Number of episodes, n."""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Number of steps, M."""
        return int(self.lengths.sum())

    @property
    def step_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per step."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def observation_starts(self) -> np.ndarray:
        """[n] int64 first row of each episode in columns per observation."""
        return self.step_starts + np.arange(len(self))

    def first_not_finite(self, names: Iterable[str]) -> tuple[int, str] | None:
        """First (episode number in the recording, column) with NaN or infinity; None: all are finite."""
        for name in names:
            if (bad := not_finite(self.columns[name])) is not None:
                return self._number_at(name, bad[0]), name
        return None

    def first_early_end(self) -> int | None:
        """Number of the first episode that continues after a step that ends it; None: there is none."""
        if "terminated" not in self.columns or "truncated" not in self.columns:
            return None
        early = self.columns["terminated"] | self.columns["truncated"]
        early[np.cumsum(self.lengths) - 1] = False
        return self._number_at("terminated", int(np.argmax(early))) if early.any() else None

    def _number_at(self, name: str, row: int) -> int:
        starts = self.observation_starts if per_observation(name) else self.step_starts
        return int(self.numbers[np.searchsorted(starts, row, side="right") - 1])


def not_finite(rows: np.ndarray) -> tuple[int, Any] | None:
    """(first row with NaN or infinity, the first such number) of [n, ...]; None: all are finite."""
    if rows.dtype.kind not in "fc" or (finite := np.isfinite(rows)).all():
        return None
    return int(np.argmin(finite.reshape(len(rows), -1).all(axis=1))), rows[~finite].ravel()[0]


def per_observation(name: str) -> bool:
    """Whether a column has a row per observation, one more than steps."""
    return "." in name


def block_of(episodes: Sequence[RecordedEpisode], numbers: np.ndarray, names: Iterable[str]) -> EpisodeBlock:
    """Convert episodes in memory to a block. Raises KeyError naming a column that one of them lacks."""
    lengths = np.array([episode.num_steps for episode in episodes], np.int64)
    there = [episode.columns() for episode in episodes]
    return EpisodeBlock(numbers, lengths, {name: joined([columns[name] for columns in there]) for name in names})


def runs_of(positions: np.ndarray) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, stop): [3, 4, 5, 9, 2] → (3, 6), (9, 10), (2, 3)."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, cuts) if len(part)]


def cut_by_steps(lengths: np.ndarray, max_steps: int) -> list[int]:
    """Ends of blocks of at most `max_steps` steps (or of a single longer episode)."""
    ends, cuts, first = np.cumsum(lengths), list[int](), 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        first = max(first + 1, int(np.searchsorted(ends, before + max_steps, side="right")))
        cuts.append(first)
    return cuts


def joined(parts: list[Any]) -> np.ndarray:
    """Concatenate rows; pictures are decoded."""
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([np.asarray(part) for part in parts])


BLOCK_STEPS = 2**14
"""Number of steps that `Recording.blocks` reads at once."""


@dataclass(frozen=True)
class RecordedStep:
    """Step t of an episode: observation, action and outcome."""

    observation: Mapping[str, Any]
    """Observation {key: [...]} before the step; parts of varying size are values."""
    action: np.ndarray | str
    """The simulator's action [A] (a str for text)."""
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    next_observation: Mapping[str, Any]
    """Observation {key: [...]} after the step."""
    sampled_action: np.ndarray | None = None
    """Action [A] as the policy drew it; None: not known, here and below."""
    log_prob: np.ndarray | None = None
    """Log-probabilities [L] of the action."""
    value: float | None = None
    policy_version: int | None = None
    chunk: int | None = None
    """Number of the step's message."""
    state: Mapping[str, np.ndarray] | None = None
    """State {name: [...]} of the simulator before the step."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Pictures {camera: [H, W, 3] uint8} before the step."""

    @staticmethod
    def of(before: Mapping[str, Any], after: Mapping[str, Any]) -> RecordedStep:
        """Build a step from a row of each column of `RecordedEpisode.columns`, and the next rows of the observation."""
        fields = {name: value.item() if isinstance(value, np.generic) else value for name, value in fields_of(before).items()}
        return RecordedStep(**fields, next_observation=fields_of(after)["observation"])


@dataclass(frozen=True, eq=False)
class EpisodeTable:
    """Data about all E episodes that need no reading of an episode."""

    lengths: np.ndarray
    """[E] int64 number of steps."""
    seeds: np.ndarray
    """[E] int64 seeds."""
    returns: np.ndarray
    """[E] float64 undiscounted returns."""
    success_once: np.ndarray
    """[E] bool: success at any step."""
    success_at_end: np.ndarray
    """[E] bool: success at the last step."""
    complete: np.ndarray
    """[E] bool: whether the episode ended."""
    tasks: np.ndarray
    """[E] object: str, or None for the recording's only task."""

    @staticmethod
    def of(episodes: Iterable[Mapping[str, Any]]) -> EpisodeTable:
        """Build the table from the fields of `RecordedEpisode` of each episode, one at a time."""
        rows = []
        for fields in episodes:
            reward, success = fields["reward"], fields["success"]
            ended = fields["terminated"][-1] or fields["truncated"][-1]
            outcome = (reward.sum(dtype=np.float64), success.any(), success[-1], ended)
            rows.append((len(reward), fields["seed"], *outcome, fields.get("task")))
        columns = []
        for index, dtype in enumerate((np.int64, np.int64, np.float64, bool, bool, bool, object)):
            columns.append(np.empty(len(rows), dtype))
            columns[-1][:] = [row[index] for row in rows]
        return EpisodeTable(*columns)


class Recording(ABC):
    """E recorded episodes, read one at a time. Use it as a context manager, or `close` it.

    Readers of files derive from it and implement `episode`; a reader that loads whole episodes should implement `step` too.
    """

    format: ClassVar[str] = "native"
    """Name of the file format."""
    notes: tuple[FieldNote, ...] = ()
    """Fields of other projects' files that were read, derived or lost."""

    def __init__(self, path: Path, info: RecordingInfo, table: EpisodeTable) -> None:
        self.path, self.info, self.table = path, info, table
        self.lengths, self.seeds, self.returns = table.lengths, table.seeds, table.returns
        self.success_once, self.success_at_end, self.complete = table.success_once, table.success_at_end, table.complete

    @abstractmethod
    def episode(self, number: int) -> RecordedEpisode:
        """Episode `number` in 0 … E - 1 (negative: from the end).
        Raises IndexError: there is no such number; RecordingError: its data are damaged."""

    def read_many(self, numbers: Sequence[int] | np.ndarray, columns: Sequence[str]) -> EpisodeBlock:
        """Read columns of several episodes at once, in the order of `numbers`; many times as fast as one by one.

        Args:
            numbers: [n >= 1] episode numbers, as for `episode`.
            columns: names of the columns, such as ``action`` or ``observation.state``.

        Raises IndexError: there is no episode of such a number; RecordingError: an episode lacks a column, or its data are damaged.
        """
        positions = np.array([self._position(int(number)) for number in numbers], np.int64)
        return self._checked(self._read_block(positions, columns))

    def blocks(self, columns: Sequence[str], max_steps: int = BLOCK_STEPS) -> Iterator[EpisodeBlock]:
        """Yield all episodes in order, in blocks of at most `max_steps` steps, or of a single longer episode.

        Args:
            columns: as for `read_many`.
            max_steps: bounds the memory if a block is no view.

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
        """Mismatches with the format's own checksums, one line each; most formats have none."""
        return []

    def fingerprint(self, number: int) -> Hashable | None:
        """Value that is equal for identical episodes; None if the format cannot tell without a comparison."""
        return None

    def close(self) -> None:  # noqa: B027 (a reader that holds no file has nothing to do)
        """Close the files; episodes from this recording may become unreadable."""

    @property
    def spec(self) -> SimSpec:
        return self.info.spec

    @property
    def tasks(self) -> np.ndarray:
        """[E] object: the task's name; the simulator's if the episode names none."""
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
        """`read_many` for existing episodes [n] int64."""
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
        """Check, as `episode` does, that only the last step ends an episode."""
        early = block.first_early_end()
        if early is not None:
            raise RecordingError(f"'{self.path}', episode {early}: it continues after a step that ends it.")
        return block

    def _position(self, number: int) -> int:
        """Convert a negative `number` to a position. Raises IndexError."""
        position = number + len(self) if number < 0 else number
        if not 0 <= position < len(self):
            raise IndexError(f"'{self.path}' has {len(self)} episodes; episode {number} does not exist.")
        return position


def last_only(length: int, value: bool) -> np.ndarray:
    """[T] bool: `value` at the last step, False elsewhere."""
    flags = np.zeros(length, bool)
    flags[-1] = value
    return flags


def step_of(episode: RecordedEpisode, time: int) -> RecordedStep:
    """Step `time` of an episode in memory. Raises IndexError."""
    if not 0 <= time < episode.num_steps:
        raise IndexError(f"The episode has {episode.num_steps} steps; step {time} does not exist.")

    columns = episode.columns()
    after = {name: rows[time + 1] for name, rows in columns.items() if name.startswith("observation.")}
    return RecordedStep.of({name: rows[time] for name, rows in columns.items()}, after)
