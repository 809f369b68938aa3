"""Rows that notice how a simulator treats them: filled with values it cannot have meant, and watching what is written.

Used by `embodied_rl.sim.check`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied_rl.types import SimSpec, StepBuffers

SENTINEL = "(never written)"
"""Stands in rows of parts of varying size."""


def poison_of(dtype: np.dtype[Any], which: int) -> Any:
    """One of two values (`which` 0 or 1) that a row holds before the simulator writes; a place that keeps both was not written."""
    if dtype.kind == "f":
        return (np.nan, 12345.0)[which]
    if dtype.kind == "b":
        return bool(which)
    return (17, 113)[which]  # fits int8 and uint8


class WatchedRows(np.ndarray):
    """An array that notes assignments which numpy accepts silently but which are mistakes. Its views note into the same list."""

    notes: list[str]
    label: str

    def __array_finalize__(self, source: Any) -> None:
        self.notes = getattr(source, "notes", [])
        self.label = getattr(source, "label", "")

    def __setitem__(self, index: Any, value: Any) -> None:
        target, given = np.asarray(self)[index], np.asarray(value)
        if given.dtype.kind in "biuf":
            if given.shape == (1,) and np.ndim(target) and target.shape[-1] > 1:
                self.notes.append(f"{self.label}: a value of shape (1,) is stretched over {target.shape}")
            elif self.dtype.kind in "iu" and not _fits(given, self.dtype):
                self.notes.append(f"{self.label}: {given.dtype} values do not fit {self.dtype} and are cut")
        super().__setitem__(index, value)


def _fits(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    if values.dtype == dtype or values.size == 0:
        return True
    limits = np.iinfo(dtype)
    return bool(
        np.isfinite(values).all() and values.min() >= limits.min and values.max() <= limits.max and (values == np.round(values)).all()
    )


def watched_buffers(spec: SimSpec, num_envs: int) -> tuple[StepBuffers, list[str]]:
    """Buffers whose arrays watch assignments, and the list that fills with what they notice."""
    notes: list[str] = []
    plain = StepBuffers.allocate(spec, num_envs)
    observation = {
        key: _watch(part, f"observation '{key}'", notes) if key in spec.tensors else part for key, part in plain.observation.items()
    }
    return StepBuffers(
        observation, _watch(plain.reward, "reward", notes), plain.terminated, plain.truncated, plain.success, plain.info
    ), notes


def _watch(array: np.ndarray, label: str, notes: list[str]) -> np.ndarray:
    watched = array.view(WatchedRows)
    watched.notes, watched.label = notes, label
    return watched


def poison(out: StepBuffers, which: int) -> None:
    """Fill every row with one of the two poisons."""
    for part in out.observation.values():
        part.fill(SENTINEL if part.dtype == object else poison_of(part.dtype, which))
    for part in (out.reward, out.terminated, out.truncated, out.success):
        part.fill(poison_of(part.dtype, which))


def copy_of(out: StepBuffers) -> dict[str, np.ndarray]:
    """{name: array} of everything but info; observations under ``observation 'key'``."""
    arrays = {f"observation '{key}'": np.array(part) for key, part in out.observation.items()}
    return arrays | {name: np.array(getattr(out, name)) for name in ("reward", "terminated", "truncated", "success")}


def unwritten(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Where two equal runs over different poisons left both: bool, of the arrays' shape."""
    if first.dtype == object:
        return np.array([a is SENTINEL or b is SENTINEL for a, b in zip(first, second, strict=True)], bool)
    kind = first.dtype
    was_first = np.isnan(first) if kind.kind == "f" else first == poison_of(kind, 0)
    return np.asarray(was_first & (second == np.asarray(poison_of(kind, 1), kind)))
