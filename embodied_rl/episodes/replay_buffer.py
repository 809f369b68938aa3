"""Fresh transitions, the latest so many of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embodied_rl.episodes.transitions import Transitions


class ReplayBuffer:
    """A ring of `capacity` transitions; the oldest are overwritten. Memory is taken as it fills."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_added = 0
        """Transitions ever added; the next one goes to this number modulo capacity."""
        self._columns: dict[str, np.ndarray] = {}
        """{name of `Transitions.columns`: [capacity, ...]}, made as the first transitions come."""

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def add(self, transitions: Transitions) -> None:
        """Append B transitions; of more than fit, the last."""
        rows = (self.num_added + np.arange(transitions.num_rows)) % self.capacity
        kept = slice(max(0, transitions.num_rows - self.capacity), None)
        given = transitions.columns()
        if not self._columns:
            self._make(given)
        for name, column in self._columns.items():
            column[rows[kept]] = given[name][kept]
        self.num_added += transitions.num_rows

    def _make(self, like: Mapping[str, np.ndarray]) -> None:
        # Pages of np.empty are taken from the system when they are written to.
        self._columns = {name: np.empty((self.capacity, *part.shape[1:]), part.dtype) for name, part in like.items()}

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """B = size transitions, drawn with replacement. Raises ValueError while there is none."""
        rows = rng.integers(len(self), size=size)
        return Transitions.of_columns({name: column[rows] for name, column in self._columns.items()})

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The rows that are filled, and their count: all that a resumed run needs."""
        return {"num_added": np.array(self.num_added, np.int64), **{name: column[: len(self)] for name, column in self._columns.items()}}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exactly. Raises KeyError or ValueError for another buffer's state."""
        self.num_added = int(state["num_added"])
        rest = {name: part for name, part in state.items() if name != "num_added"}
        if self.num_added and not self._columns:
            self._make(rest)
        for name, column in self._columns.items():
            column[: len(self)] = rest[name]
