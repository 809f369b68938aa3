"""A key-value cache whose rows have lengths of their own and change hands between two decode steps.

Shapes: R rows, C columns of room, n active rows (always the first n), w columns that the longest active row fills, D size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values, [R, heads, C, D] each."""

    is_sliding = False

    def __init__(self, slab: SlabCache) -> None:
        super().__init__()
        self._slab = slab

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(like: Tensor) -> Tensor:
            return torch.zeros(
                self._slab.num_rows, like.shape[1], self._slab.num_columns, like.shape[3], dtype=like.dtype, device=like.device
            )

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def _held(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Put one new token [n, heads, 1, D] behind each active row; returns views of [n, heads, w, D]."""
        own_keys, own_values = self._held()
        rows, places = self._slab.active_rows, self._slab.places
        own_keys[rows, :, places] = key_states[:, :, 0]
        own_values[rows, :, places] = value_states[:, :, 0]
        count, width = len(rows), self._slab.width
        return own_keys[:count, :, :width], own_values[:count, :, :width]

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Fill a row's first columns from [heads, length, D]."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        own_keys, own_values = self._held()
        own_keys[row, :, : keys.shape[1]] = keys
        own_values[row, :, : values.shape[1]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row to another."""
        for tensor in self._held():
            tensor[target, :, :length] = tensor[source, :, :length]

    def grow(self, num_columns: int) -> None:
        """Make room for more columns; what is held stays."""
        if not self.is_initialized:
            return
        old = self._held()
        self.lazy_initialization(*old)
        for tensor, former in zip(self._held(), old, strict=True):
            tensor[:, :, : former.shape[2]] = former

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slab.width, 0

    def get_seq_length(self) -> int:
        return self._slab.width - 1

    def get_max_length(self) -> int:
        return self._slab.num_columns


class SlabCache(Cache):
    """Handed to a transformers model for decode steps of one token; prompts are run with an ordinary cache and copied in."""

    def __init__(self, num_layers: int, num_rows: int, num_columns: int, max_columns: int) -> None:
        self.num_rows, self.num_columns, self.max_columns = num_rows, num_columns, max_columns
        self.active_rows = torch.zeros(0, dtype=torch.int64)
        """[n] int64: 0, 1, …, n − 1."""
        self.places = torch.zeros(0, dtype=torch.int64)
        """[n] int64: the column that each row's next token goes to."""
        self.width = 0
        self._slabs = [SlabLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slabs))

    @property
    def num_bytes(self) -> int:
        """What keys and values take; 0 before the first prompt."""
        return sum(tensor.nbytes for layer in self._slabs if layer.is_initialized for tensor in layer._held())

    def begin_step(self, lengths: list[int], device: torch.device) -> None:
        """Say how many tokens each active row holds; the next forward adds one to each."""
        self.width = max(lengths) + 1
        self._make_room(self.width)
        self.active_rows = torch.arange(len(lengths), device=device)
        self.places = torch.tensor(lengths, device=device)

    def fill(self, row: int, source: DynamicCache, source_row: int, length: int) -> None:
        """Take a prompt's keys and values over; the source is padded on the right."""
        self._make_room(length + 1)
        for layer, prompt in zip(self._slabs, source.layers, strict=True):
            assert isinstance(prompt, DynamicLayer)
            assert prompt.keys is not None
            assert prompt.values is not None
            layer.write(row, prompt.keys[source_row, :, :length], prompt.values[source_row, :, :length])

    def move(self, source: int, target: int, length: int) -> None:
        """Let the row `target` hold what `source` holds."""
        for layer in self._slabs:
            layer.move(source, target, length)

    def _make_room(self, columns: int) -> None:
        if columns <= self.num_columns:
            return
        self.num_columns = min(max(columns, 2 * self.num_columns), max(columns, self.max_columns))
        for layer in self._slabs:
            layer.grow(self.num_columns)


def decode_mask(places: Tensor, width: int, window: int | None, dtype: torch.dtype, additive: bool) -> Tensor:
    """[n, 1, 1, w]: which columns each row's new token attends to, itself included; only the last `window` where given."""
    columns = torch.arange(width, device=places.device)
    allowed = columns <= places[:, None]
    if window is not None:
        allowed &= columns > places[:, None] - window
    allowed = allowed[:, None, None, :]
    if not additive:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=places.device).masked_fill(~allowed, torch.finfo(dtype).min)
