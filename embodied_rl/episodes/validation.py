"""Everything that can be wrong with a recording, without playing it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from embodied_rl.episodes.layout import FINITE_COLUMNS
from embodied_rl.episodes.recorded import RecordedEpisode, RecordingInfo
from embodied_rl.episodes.recording import Recording, RecordingError
from embodied_rl.types import SimSpec, VariableSpec

_RETURN_TOLERANCE = 1e-6
"""Relative; other projects' files hold returns that were summed in another order."""


def validate(recording: Recording, pictures: bool = True) -> list[str]:
    """Read every episode, and compare it with what the recording says about itself.

    Checked are: everything is readable and as long as it should be; shapes, dtypes and discrete actions fit the simulator's spec;
    nothing is NaN or infinite but the simulator's state; lengths, returns and success are those of the table; checksums, where the
    format has them; no episode is there twice.

    Args:
        recording: an open one.
        pictures: decode every picture too, which takes most of the time.

    Returns:
        One line per problem, with the file, the episode and the field; none for a sound recording.
    """
    problems: list[str] = []
    seen: dict[Any, int] = {}
    for number in range(len(recording)):
        damaged = recording.damage(number)
        problems += damaged
        try:
            episode = recording.episode(number)
            problems += [f"'{recording.path}', episode {number}, {problem}" for problem in _episode_problems(recording, number, episode)]
            if pictures:
                _decode(episode)
        except RecordingError as error:
            # A recording that verifies what it reads says it again.
            problems += [] if str(error) in damaged else [str(error)]
            continue
        fingerprint = recording.fingerprint(number)
        if fingerprint is not None and seen.setdefault(fingerprint, number) != number:
            problems.append(f"'{recording.path}', episode {number}: is a copy of episode {seen[fingerprint]}.")
    return problems


def fit_problems(episode: RecordedEpisode, spec: SimSpec) -> list[str]:
    """What of an episode does not fit a simulator: one line per field, without a place."""
    problems = []
    if episode.observation.keys() != spec.observation.keys():
        problems.append(f"field 'observation': has the keys {sorted(episode.observation)}, and the simulator {sorted(spec.observation)}.")
    for key, part in spec.observation.items():
        rows = episode.observation.get(key)
        if rows is not None and not isinstance(part, VariableSpec):
            problems += _shape_problems(f"observation.{key}", rows, part.dtype, part.shape)
    if spec.action.kind == "text":
        wrong = [time for time, action in enumerate(episode.action) if not isinstance(action, str)]
        problems += [f"field 'action': step {wrong[0]} is not text."] if wrong else []
        return problems
    problems += _shape_problems("action", episode.action, spec.action.dtype, (spec.action.dim,))
    if spec.action.kind == "discrete" and not problems:
        outside = (episode.action < 0) | (episode.action >= spec.action.num_actions)
        if outside.any():
            step = int(np.argmax(outside.any(axis=1)))
            problems.append(f"field 'action': step {step} is {episode.action[step].tolist()}, of {spec.action.num_actions} choices.")
    return problems


def finite_problems(episode: RecordedEpisode) -> list[str]:
    """NaN and infinity where there may be none: one line per field, without a place."""
    problems = []
    for name, rows in episode.columns().items():
        due = name in FINITE_COLUMNS or name.startswith("observation.")
        if due and isinstance(rows, np.ndarray) and rows.dtype.kind in "fc" and not (finite := np.isfinite(rows)).all():
            row = int(np.argmin(finite.reshape(len(rows), -1).all(axis=1)))
            problems.append(f"field '{name}': row {row} holds {rows[~finite].ravel()[0]}.")
    return problems


def _episode_problems(recording: Recording, number: int, episode: RecordedEpisode) -> Iterator[str]:
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
            yield f"field '{name}': is said to be {said}, and is {found}."
    said_return, found_return = float(table.returns[number]), episode.episode_return
    if not abs(said_return - found_return) <= _RETURN_TOLERANCE * max(1.0, float(np.abs(episode.reward, dtype=np.float64).sum())):
        yield f"field 'return': is said to be {said_return:.6g}, and the rewards add up to {found_return:.6g}."


def _shape_problems(name: str, rows: np.ndarray, dtype: str, shape: tuple[int, ...]) -> list[str]:
    if np.dtype(rows.dtype) == np.dtype(dtype) and rows.shape[1:] == shape:
        return []
    return [f"field '{name}': holds rows {rows.dtype} {list(rows.shape[1:])}, and the simulator {dtype} {list(shape)}."]


def _decode(episode: RecordedEpisode) -> None:
    """Read all pictures, one at a time. Raises RecordingError."""
    for rows in (*episode.observation.values(), *episode.images.values()):
        if not isinstance(rows, np.ndarray):
            for time in range(len(rows)):
                rows[time]


def require_compatible(source: RecordingInfo, target: RecordingInfo, source_name: str, target_name: str) -> None:
    """Raise RecordingError where episodes of one do not fit beside those of the other."""
    for what in ("observation", "action"):
        ours, theirs = (info.spec.to_dict()[what] for info in (source, target))
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                raise RecordingError(
                    f"Episodes of '{source_name}' do not fit into '{target_name}': {what}.{key} is {ours.get(key)!r:.200} there and "
                    f"{theirs.get(key)!r:.200} here."
                )


def adopted(episode: RecordedEpisode, source: RecordingInfo, target: RecordingInfo) -> RecordedEpisode:
    """The episode with what its recording said for all of its episodes, where the target's says something else."""
    changes: dict[str, object] = {}
    if episode.task is None and source.spec.task != target.spec.task:
        changes["task"] = source.spec.task
    if episode.instruction is None and source.spec.instruction != target.spec.instruction:
        changes["instruction"] = source.spec.instruction
    if "policy" not in episode.metadata and dict(source.policy) != dict(target.policy):
        changes["metadata"] = {**episode.metadata, "policy": dict(source.policy)}
    return dataclasses.replace(episode, **changes) if changes else episode  # type: ignore[arg-type]
