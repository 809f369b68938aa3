"""A key-value cache whose rows have lengths of their own and change hands between two decode steps, and attention over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

# Shapes: R rows, C columns of room, n rows of a step (all active rows, which always come first, or some of them) with q new tokens each,
# w columns filled by the longest of them, D size of a head.


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values, [R, heads, C, D] each."""

    is_sliding = False

    def __init__(self, slab: SlabCache) -> None:
        super().__init__()
        self._slab = slab

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(like: Tensor) -> Tensor:
            columns = self._slab.num_columns + 1  # the last is `SlabCache.spare_column`
            return torch.zeros(self._slab.num_rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device)

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write the new tokens [n, heads, q, D] after each row of the step; return [n, heads, w, D], views of a span."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        own_keys, own_values = self.held
        rows, places, width = self._slab.rows, self._slab.places, self._slab.width
        own_keys[rows[:, None], :, places] = key_states.transpose(1, 2)
        own_values[rows[:, None], :, places] = value_states.transpose(1, 2)
        chosen = self._slab.span or rows
        return own_keys[chosen, :, :width], own_values[chosen, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slab.width, 0

    def get_seq_length(self) -> int:
        return self._slab.width - 1

    def get_max_length(self) -> int:
        return self._slab.num_columns


class SlabCache(Cache):
    """Cache for a transformers model's decode steps, and for prompts whose beginning it contains; other prompts run with an ordinary cache
    and are copied in."""

    def __init__(self, num_layers: int, num_rows: int, num_columns: int, max_columns: int, on_move: Callable[[], None]) -> None:
        """`on_move` is called when keys and values leave their memory, before they get more."""
        self.num_rows, self.num_columns, self.max_columns = num_rows, num_columns, max_columns
        self.rows = torch.zeros(0, dtype=torch.int64)
        """[n] int64 rows of the step."""
        self.span: slice | None = None
        """The step's rows as a slice, if they are contiguous."""
        self.places = torch.zeros(0, 0, dtype=torch.int64)
        """[n, q] int64 columns of each row's next tokens."""
        self.width = 0
        self._on_move = on_move
        self._slabs = [SlabLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slabs))

    @property
    def num_bytes(self) -> int:
        """Size of keys and values; 0 before the first prompt."""
        return sum(tensor.nbytes for layer in self._slabs if layer.is_initialized for tensor in layer.held)

    @property
    def spare_column(self) -> int:
        """Column that no token of a request attends to: a step writes its padding there."""
        return self.num_columns

    def begin_step(self, rows: Tensor, span: slice | None, places: Tensor, width: int) -> None:
        """The next forward appends tokens to rows [n], contiguous if there is a span, in columns [n, q]; it reads `width` columns."""
        self.rows, self.span, self.places, self.width = rows, span, places, width

    def fill(self, row: int, source: DynamicCache, source_row: int, length: int) -> None:
        """Copy a prompt's keys and values; the source is padded on the right."""
        self.make_room(length + 1)
        for layer, prompt in zip(self._slabs, source.layers, strict=True):
            assert isinstance(prompt, DynamicLayer)
            assert prompt.keys is not None
            assert prompt.values is not None
            if not layer.is_initialized:
                layer.lazy_initialization(prompt.keys, prompt.values)
            for tensor, filled in zip(layer.held, (prompt.keys, prompt.values), strict=True):
                tensor[row, :, :length] = filled[source_row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of row `source` to row `target`."""
        for layer in self._slabs:
            for tensor in layer.held:
                tensor[target, :, :length] = tensor[source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Swap the first `length` columns of two rows."""
        for layer in self._slabs:
            for tensor in layer.held:
                tensor[[one, other], :, :length] = tensor[[other, one], :, :length]

    def free(self, num_columns: int) -> None:
        """Free keys and values; the next prompt makes room for `num_columns`. (Dropping the cache would not: its layers refer to it.)"""
        self.num_columns = num_columns
        for layer in self._slabs:
            layer.keys, layer.values, layer.is_initialized = None, None, False
        self._on_move()

    def make_room(self, columns: int) -> None:
        """Grow to at least `columns`: keys and values move."""
        if columns <= self.num_columns:
            return
        self.num_columns = min(max(columns, 2 * self.num_columns), max(columns, self.max_columns))
        self._on_move()
        for layer in (layer for layer in self._slabs if layer.is_initialized):
            old = layer.held
            layer.lazy_initialization(*old)
            for tensor, former in zip(layer.held, old, strict=True):
                tensor[:, :, : former.shape[2] - 1] = former[:, :, :-1]


def decode_mask(places: Tensor, width: int, window: int | None, dtype: torch.dtype, additive: bool) -> Tensor:
    """[n, 1, q, w] mask of the columns that new tokens [n, q] attend to, themselves included; only the last `window` if given."""
    columns = torch.arange(width, device=places.device)
    allowed = columns <= places[..., None]
    if window is not None:
        allowed &= columns > places[..., None] - window
    allowed = allowed[:, None]
    if not additive:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=places.device).masked_fill(~allowed, torch.finfo(dtype).min)


_UNGROUPED = nn.Module()
"""A layer in which every head has its own keys and values."""


def attention_by_group(
    attention: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [n, H, q, D] to key and value [n, G, w, D] of G groups of heads: returns [n, q, H, D], and no weights.

    With one new token per row, the heads of a group are passed as if they were tokens: transformers' own `attention` would first copy all
    keys and values for each head.
    """
    num_groups, bias = key.shape[1], options.get("position_bias")
    if query.shape[2] != 1 or query.shape[1] == num_groups or attention_mask is None or attention_mask.shape[1] != 1 or bias is not None:
        return attention(module, query, key, value, attention_mask, **options)
    found, _ = attention(_UNGROUPED, query.unflatten(1, (num_groups, -1)).squeeze(3), key, value, attention_mask, **options)
    return found.transpose(1, 2).flatten(1, 2)[:, None], None
