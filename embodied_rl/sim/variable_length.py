"""Values of varying size in shared memory: text, JSON and arrays, each in its slot's own buffer of the slab.

A buffer is a row of bytes and its used size. Pages that are never written take no memory, so buffers can be generous. Unlike a ring, they
cannot fill up with another slot's unread values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.specs import PartValue
from embodied_rl.types import VariableSpec

INFO_BUFFER = VariableSpec("json", 2**16)
"""Buffer of an episode's final info."""
_INFO_ARRAY_LIMIT = 64
"""Most elements of an array in a final info; larger arrays are left out."""


def buffer_fields(name: str, spec: VariableSpec, num_slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Entries of a slab's layout for the buffers of all slots."""
    return {f"buffer/{name}": ((num_slots, spec.max_bytes), "uint8"), f"buffer_size/{name}": ((num_slots,), "int64")}


class VariableLengthBuffers:
    """Rows [start, stop) of one part's buffers in a slab."""

    def __init__(self, name: str, spec: VariableSpec, arrays: Mapping[str, np.ndarray], start: int, stop: int) -> None:
        self.name, self.spec, self._start = name, spec, start
        self._bytes = arrays[f"buffer/{name}"][start:stop]
        self._sizes = arrays[f"buffer_size/{name}"][start:stop]

    def write(self, row: int, value: PartValue) -> None:
        """Write a value into a row. Raises UserError if it has another kind or exceeds its buffer."""
        data = self._encode(value)
        if len(data) > self.spec.max_bytes:
            raise UserError(
                f"'{self.name}' of slot {self._start + row} takes {len(data):,} bytes and its buffer is {self.spec.max_bytes:,}: give its "
                f"VariableSpec or ActionSpec a max_bytes of at least {len(data):,}."
            )
        self._bytes[row, : len(data)] = np.frombuffer(data, np.uint8)
        self._sizes[row] = len(data)

    def read(self, row: int) -> Any:
        """Value of a row; None if nothing was written yet."""
        size = int(self._sizes[row])
        return None if size == 0 else self._decode(self._bytes[row, :size].tobytes())

    def read_all(self, rows: Iterable[int]) -> np.ndarray:
        """Object array of the values of `rows`."""
        return np.fromiter(map(self.read, rows), object)

    def copy_row(self, row: int, into: VariableLengthBuffers) -> None:
        """Copy a row to the same row of other buffers, as bytes."""
        size = int(self._sizes[row])
        into._bytes[row, :size] = self._bytes[row, :size]
        into._sizes[row] = size

    # Every encoding begins with one byte, so that an empty text differs from an empty buffer.

    def _encode(self, value: PartValue) -> bytes:
        if self.spec.kind == "text":
            if not isinstance(value, str):
                raise UserError(f"'{self.name}' must be a str, got {type(value).__name__}: {value!r:.80}.")
            return b"t" + value.encode("utf-8", "surrogatepass")
        if self.spec.kind == "json":
            try:
                return b"j" + json.dumps(value).encode()
            except (TypeError, ValueError) as error:
                raise UserError(f"'{self.name}' must hold what JSON can: {error}.") from error
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in "biufc":
            raise UserError(f"'{self.name}' must be a numeric array, got dtype {array.dtype}.")
        header = json.dumps([array.dtype.str, np.asarray(value).shape]).encode()
        return b"a" + header + b"\n" + array.tobytes()

    def _decode(self, data: bytes) -> Any:
        if self.spec.kind == "text":
            return data[1:].decode("utf-8", "surrogatepass")
        if self.spec.kind == "json":
            return json.loads(data[1:])
        header, _, raw = data[1:].partition(b"\n")
        dtype, shape = json.loads(header)
        return np.frombuffer(raw, dtype).reshape(shape)


def plain_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of a simulator's info that JSON can express: numbers, strings, small arrays and nests of these."""
    kept: dict[str, Any] = {}
    for key, value in (info or {}).items():
        plain = _plain(value)
        if plain is not _NOTHING:
            kept[str(key)] = plain
    while kept and len(json.dumps(kept)) + 1 > INFO_BUFFER.max_bytes:
        largest = max(kept, key=lambda key: len(json.dumps(kept[key])))
        del kept[largest]
    return kept


_NOTHING = object()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "biuf" and value.size <= _INFO_ARRAY_LIMIT else _NOTHING
    if isinstance(value, Mapping):
        return {str(key): plain for key, item in value.items() if (plain := _plain(item)) is not _NOTHING}
    if isinstance(value, (list, tuple)) and len(value) <= _INFO_ARRAY_LIMIT:
        items = [_plain(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in items) else items
    return _NOTHING
