"""Isolates simulators that draw from process-wide random generators from each other."""

# ruff: noqa: NPY002  (numpy's legacy global generator is the subject here)
from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

NumpyState = tuple[Any, ...] | dict[str, Any]
PythonState = tuple[Any, ...]


class PrivateRandom:
    """One environment's private state of the process-wide generators `numpy.random` and `random`."""

    def __init__(self) -> None:
        self.state: tuple[NumpyState, PythonState] | None = None
        """(numpy's state, random's state), plain values and an array; None before the first use. Set it to continue from there."""

    @contextmanager
    def active(self, seed: int | None = None) -> Iterator[None]:
        """Run the body with this state (seeded first if a seed is given), then restore the process's own."""
        with process_state_kept(), self.taken(seed):
            yield

    @contextmanager
    def taken(self, seed: int | None = None) -> Iterator[None]:
        """As `active`, for several states within one `process_state_kept`: saving and setting a state takes 40 microseconds."""
        if seed is not None:
            np.random.seed(seed % 2**32)
            random.seed(seed)
        elif self.state is not None:
            np.random.set_state(self.state[0])
            random.setstate(self.state[1])
        try:
            yield
        finally:
            self.state = np.random.get_state(), random.getstate()


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the process-wide generators after the body."""
    process = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(process[0])
        random.setstate(process[1])


def fingerprint() -> tuple[bytes, Any]:
    """Present state of both process-wide generators; two are equal if nothing was drawn in between."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return np.asarray(keys).tobytes() + repr((name, *rest)).encode(), random.getstate()
