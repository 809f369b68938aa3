"""Fresh transitions, the latest so many of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from embodied_rl.episodes.transitions import Transitions
from embodied_rl.types import ActionSpec, TensorSpec


class ReplayBuffer:
    """A ring of `capacity` transitions; the oldest are overwritten. Memory is taken as it fills."""

    def __init__(self, capacity: int, observation: Mapping[str, TensorSpec], action: ActionSpec) -> None:
        self.capacity = capacity
        self.num_added = 0
        """Transitions ever added; the next one goes to this number modulo capacity."""
        columns = {
            f"{side}.{key}": (part.shape, part.dtype) for side in ("observation", "next_observation") for key, part in observation.items()
        }
        columns |= {"action": ((action.dim,), action.dtype), "reward": ((), "float32"), "discount": ((), "float32")}
        # Pages of np.empty are taken from the system when they are written to.
        self._columns = {name: np.empty((capacity, *shape), dtype) for name, (shape, dtype) in columns.items()}

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def add(self, transitions: Transitions) -> None:
        """Append B transitions; of more than fit, the last."""
        rows = (self.num_added + np.arange(transitions.num_rows)) % self.capacity
        kept = slice(max(0, transitions.num_rows - self.capacity), None)
        for name, column in self._columns.items():
            column[rows[kept]] = _column(transitions, name)[kept]
        self.num_added += transitions.num_rows

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """B = size transitions, drawn with replacement. Raises ValueError while there is none."""
        rows = rng.integers(len(self), size=size)
        observation: dict[str, dict[str, np.ndarray]] = {"observation": {}, "next_observation": {}}
        for name, column in self._columns.items():
            side, _, key = name.partition(".")
            if key:
                observation[side][key] = column[rows]
        action, reward, discount = (self._columns[name][rows] for name in ("action", "reward", "discount"))
        return Transitions(observation["observation"], action, reward, discount, observation["next_observation"])

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The rows that are filled, and their count: all that a resumed run needs."""
        return {"num_added": np.array(self.num_added, np.int64), **{name: column[: len(self)] for name, column in self._columns.items()}}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exactly. Raises KeyError or ValueError for another buffer's state."""
        self.num_added = int(state["num_added"])
        for name, column in self._columns.items():
            column[: len(self)] = state[name]


def _column(transitions: Transitions, name: str) -> np.ndarray:
    side, _, key = name.partition(".")
    part: np.ndarray = getattr(transitions, side)[key] if key else getattr(transitions, side)
    return part
