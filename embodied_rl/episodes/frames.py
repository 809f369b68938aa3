"""Pictures of an episode that are decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import EllipsisType

import numpy as np
import numpy.typing as npt

_Index = int | np.integer | slice | Sequence[int] | np.ndarray | EllipsisType | None


class Frames:
    """[T + 1, H, W, 3] uint8, read-only, as an array is indexed by its first axis; `np.asarray` decodes them all."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self, count: int, shape: tuple[int, ...], read: Callable[[int], np.ndarray], video: tuple[Path, str] | None = None
    ) -> None:
        self.shape, self.video = (count, *shape), video
        """`video`: the file that holds exactly these pictures, and its encoding."""
        self._read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """When decoded."""
        return self.size

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self._read(number) for number in range(len(self)))

    def __getitem__(self, key: _Index | tuple[_Index, ...]) -> np.ndarray:
        first, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if isinstance(first, int | np.integer):
            number = int(first) + len(self) if first < 0 else int(first)
            if not 0 <= number < len(self):
                raise IndexError(f"There are {len(self)} pictures, no picture {int(first)}.")
            picture = self._read(number)
            return picture[rest] if rest else picture
        if first is Ellipsis or first is None:
            return np.asarray(self)[key]
        numbers = np.arange(len(self))[first]
        pictures = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        for position, number in enumerate(numbers):
            pictures[position] = self._read(int(number))
        return pictures[(slice(None), *rest)] if rest else pictures

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("Pictures are decoded, which makes a copy.")
        return self[:].astype(dtype or np.uint8, copy=False)
