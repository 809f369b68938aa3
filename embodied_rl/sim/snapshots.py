"""The bytes of a snapshot: plain Python values and numpy arrays, versioned, checked, exact, and never pickled.

Layout, little-endian: ``magic 8s | version u16 | zero u16 | crc32 u32 | skeleton length u64 | total length u64``, then the skeleton (JSON,
ASCII), then the raw blocks of arrays and byte strings. The checksum covers everything after itself.

In the skeleton None, booleans, finite floats, integers of 64 bits and strings represent themselves; everything else is a list that begins
with a tag of one letter (see `TreeWriter`).
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.specs import Json

FORMAT_VERSION = 1
_MAGIC = b"\x93ERLSNAP"
_HEADER = struct.Struct("<8sHHIQQ")
_CHECKED_FROM = 16
"""Offset from which the checksum covers the bytes; magic, version and padding are compared with their only valid values."""
_ALIGNMENT = 16
_ARRAY_KINDS = frozenset("biufcUS")
"""numpy dtype kinds that equal their bytes: booleans, numbers, fixed-width text; not objects or structures."""
_INT64 = 2**63


class SnapshotError(UserError):
    """A snapshot is unusable (damaged, another version, task or simulator), or a state cannot be saved."""


def encode_state(tree: object) -> bytes:
    """Turn a tree of plain values into bytes; `decode_state` gives back an equal tree, bit by bit.

    Leaves: None, bool, int of any size, float, str, bytes, numpy scalars, numpy arrays of numbers, booleans or fixed-width text
    (any strides; they come back contiguous). Inner nodes: list, tuple, dict (keys of any leaf or tuple type), set, frozenset, deque.
    Only these exact types: an enumeration or a subclass would come back as something else. Equal trees give equal bytes, as long
    as their dictionaries were filled in the same order.
    Raises SnapshotError: something in the tree is of another type (the message says where), or it contains itself.
    """
    writer = TreeWriter()
    try:
        skeleton = json.dumps(writer.node(tree), separators=(",", ":"), allow_nan=False).encode("ascii")
    except _Unsupported as error:
        raise SnapshotError(
            f"Snapshot state{error.path} is a {error.type_name}, which cannot be saved. Plain values, numpy arrays of numbers and "
            "list, tuple, dict, set or deque of these can."
        ) from None
    except RecursionError:
        raise SnapshotError("Snapshot state contains itself, or is nested too deeply to be saved.") from None
    padding = -len(skeleton) % _ALIGNMENT
    skeleton += b" " * padding
    total = _HEADER.size + len(skeleton) + writer.size
    body = b"".join((struct.pack("<QQ", len(skeleton), total), skeleton, *writer.blocks))
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, zlib.crc32(body), 0, 0)[:_CHECKED_FROM] + body


def decode_state(data: bytes | bytearray | memoryview) -> Any:
    """Decode what `encode_state` returns; arrays are fresh and writable.

    Raises SnapshotError: the bytes are not a snapshot, are cut short or altered, or have another format version.
    """
    view = memoryview(data).cast("B")
    if len(view) < len(_MAGIC) or view[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError("These bytes are not a snapshot of embodied_rl: they do not begin with its mark.")
    if len(view) < _HEADER.size:
        raise SnapshotError(f"Snapshot is cut short: {len(view)} bytes, and only its header has {_HEADER.size}.")
    _, version, zero, checksum, skeleton_size, total = _HEADER.unpack_from(view)
    if version != FORMAT_VERSION or zero != 0:
        raise SnapshotError(
            f"Snapshot has format version {version}; this version of embodied_rl reads {FORMAT_VERSION}. Take a new snapshot from the "
            "running simulator."
        )
    if total != len(view):
        word = "cut short" if len(view) < total else "followed by other bytes"
        raise SnapshotError(f"Snapshot is {word}: {len(view)} bytes instead of {total}.")
    if zlib.crc32(view[_CHECKED_FROM:]) != checksum:
        raise SnapshotError("Snapshot is damaged: its checksum does not match. Take a new snapshot.")
    blocks_from = _HEADER.size + skeleton_size
    try:
        skeleton = json.loads(bytes(view[_HEADER.size : blocks_from]))
        return TreeReader(view[blocks_from:]).node(skeleton)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error) as error:
        raise SnapshotError(f"Snapshot has a right checksum and wrong content ({error}): it was not written by embodied_rl.") from error


def require_task(tree: object, task: str) -> None:
    """Check the entry "task" of a decoded snapshot. Raises SnapshotError if it is missing or names another task."""
    saved = tree.get("task") if isinstance(tree, dict) else None
    if saved != task:
        raise SnapshotError(f"Snapshot is of task {saved!r} and cannot be restored into task {task!r}.")


class _Unsupported(Exception):
    """A value cannot be saved; the callers complete its path."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.type_name = type_name
        self.path = ""


class TreeWriter:
    """Builds the skeleton and collects blocks. Tags: i integer, f float without a decimal form, u text with lone surrogates,
    b bytes, a array, g numpy scalar, l list, t tuple, o dict of plain text keys, d other dict, s set, z frozenset, q deque."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.size = 0
        self._by_type: dict[type, Callable[[Any], Json]] = {
            type(None): lambda value: None,
            bool: bool,
            int: _integer,
            float: _float,
            str: _text,
            bytes: self._bytes,
            list: lambda value: ["l", self.items(value)],
            tuple: lambda value: ["t", self.items(value)],
            dict: self._dict,
            set: lambda value: ["s", self._sorted(value)],
            frozenset: lambda value: ["z", self._sorted(value)],
            deque: lambda value: ["q", value.maxlen, self.items(value)],
            np.ndarray: self._array,
        }

    def node(self, value: object) -> Json:
        write = self._by_type.get(type(value))
        if write is not None:
            return write(value)
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            array = np.asarray(value)
            return ["g", array.dtype.str, self._block(array.tobytes())]
        return self.other(value)

    def other(self, value: object) -> Json:
        """Node of a value of another type: a list that begins with a tag of the subclass. Raises an error that `encode_state` reports."""
        if isinstance(value, np.ndarray):
            raise _Unsupported(f"numpy array of dtype {value.dtype}")
        raise _Unsupported(f"{type(value).__module__}.{type(value).__qualname__}")

    def items(self, values: Iterable[object]) -> list[Json]:
        nodes: list[Json] = []
        try:
            for value in values:
                nodes.append(self.node(value))  # noqa: PERF401  (the length says where it failed)
        except _Unsupported as error:
            error.path = f"[{len(nodes)}]{error.path}"
            raise
        return nodes

    def _dict(self, value: dict[Any, Any]) -> list[Json]:
        simple = all(type(key) is str and key.isascii() for key in value)
        named: dict[str, Json] = {}
        pairs: list[Json] = []
        for key, item in value.items():
            try:
                node = self.node(item)
                if simple:
                    named[key] = node
                else:
                    pairs.append([self.node(key), node])
            except _Unsupported as error:
                error.path = f"[{key!r}]{error.path}"
                raise
        return ["o", named] if simple else ["d", pairs]

    def _sorted(self, values: Collection[Any]) -> list[Json]:
        # Sets are unordered, and sets of strings differ between processes; sorted, equal sets give equal bytes.
        if all(type(value) is str for value in values):
            return self.items(sorted(values))
        return self.items(sorted(values, key=encode_state))

    def _bytes(self, value: bytes) -> list[Json]:
        return ["b", self._block(value), len(value)]

    def _array(self, value: np.ndarray) -> Json:
        if value.dtype.kind not in _ARRAY_KINDS:
            return self.other(value)
        return ["a", value.dtype.str, list(value.shape), self._block(value.tobytes())]

    def _block(self, content: bytes) -> int:
        offset = self.size
        padding = -len(content) % _ALIGNMENT
        self.blocks.append(content)
        if padding:
            self.blocks.append(bytes(padding))
        self.size += len(content) + padding
        return offset


class TreeReader:
    """Builds the values of a `TreeWriter` from its skeleton and the blocks. Raises one of several built-in errors for wrong content."""

    def __init__(self, blocks: memoryview) -> None:
        self._blocks = blocks
        self._by_tag: dict[str, Callable[..., Any]] = {
            "i": lambda digits: int(digits, 16),
            "f": lambda bits: struct.unpack("<d", bytes.fromhex(bits))[0],
            "u": lambda code: bytes.fromhex(code).decode("utf-8", "surrogatepass"),
            "b": lambda offset, size: bytes(self._block(offset, size)),
            "a": self._array,
            "g": lambda dtype, offset: self._array(dtype, [], offset)[()],
            "l": lambda items: [self.node(item) for item in items],
            "t": lambda items: tuple([self.node(item) for item in items]),
            "o": lambda items: {key: self.node(item) for key, item in items.items()},
            "d": lambda items: {self.node(key): self.node(item) for key, item in items},
            "s": lambda items: {self.node(item) for item in items},
            "z": lambda items: frozenset(self.node(item) for item in items),
            "q": lambda maxlen, items: deque((self.node(item) for item in items), maxlen),
            **self.others(),
        }

    def others(self) -> dict[str, Callable[..., Any]]:
        """{tag: reader of the list's further items} of a subclass's own nodes."""
        return {}

    def node(self, node: Json) -> Any:
        if type(node) is list:
            return self._by_tag[node[0]](*node[1:])
        if type(node) is dict:
            raise ValueError("an object without a tag")
        return node

    def _array(self, dtype: str, shape: list[int], offset: int) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.kind not in _ARRAY_KINDS or not kind.itemsize:  # numpy gives texts of no characters one
            raise ValueError(f"dtype {dtype}")
        if math.prod(shape) * kind.itemsize > len(self._blocks):
            raise ValueError("an array larger than the data")
        array = np.empty(shape, kind)
        if array.nbytes:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._block(offset, array.nbytes), np.uint8)
        return array

    def _block(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > len(self._blocks):
            raise ValueError("a block outside of the data")
        return self._blocks[offset : offset + size]


def _integer(value: int) -> Json:
    # Python refuses to read decimal integers of thousands of digits; hexadecimal ones have no limit.
    return value if -_INT64 <= value < _INT64 else ["i", hex(value)]


def _float(value: float) -> Json:
    # JSON writes the shortest decimal that reads back to the same double, -0.0 included; NaN has payload bits.
    return value if math.isfinite(value) else ["f", struct.pack("<d", value).hex()]


def _text(value: str) -> Json:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:  # JSON would join two lone surrogates into one character
            return ["u", value.encode("utf-8", "surrogatepass").hex()]
    return value
