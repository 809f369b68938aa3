"""The codec of snapshots: exact round trips, and one clear error for everything that is not a sound snapshot."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
import zlib
from collections import deque
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.snapshots import FORMAT_VERSION, SnapshotError, decode_state, encode_state

QUIET_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
NEGATIVE_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]


def same(left: Any, right: Any) -> bool:
    """Equality down to types and bits, where == would call NaN different, -0.0 equal to 0.0 and True equal to 1."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, list | tuple | deque):
        lengths = getattr(left, "maxlen", None) == getattr(right, "maxlen", None) and len(left) == len(right)
        return lengths and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left.items(), right.items(), strict=True))
    return bool(left == right)


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(10**6000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    QUIET_NAN,
    NEGATIVE_NAN,
    "",
    "plain",
    "Grüße 机器人 🤖",
    'quote " backslash \\ newline \n null \x00',
    "\ud800",
    "\ud83e\udd16",  # two lone surrogates, which are not the robot above
    b"",
    bytes(range(256)),
    [],
    (),
    {},
    set(),
    pytest.param(frozenset({1, "a"}), id="frozenset"),  # its own text differs from process to process
    [1, (2.0, [None, {"k": (True,)}])],
    {"text": 1, 2: "two", 2.5: [], None: 0, (1, "x"): b"y", b"key": 3, True: 4, "ключ": 5},
    {1, 2.5, "three", (4, 5), b"six", None, 10**5000},
    deque([1, [2]], maxlen=5),
    deque(),
    {"l": 1, "o": ["b", 0, 3]},  # looks like our tags
    ["a", "<f8", [3], 0],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40] if not isinstance(value, int | set) else type(value).__name__)
def test_values_come_back_with_type_and_bits(value: Any) -> None:
    assert same(decode_state(encode_state(value)), value)
    assert same(decode_state(encode_state({"deep": [value]})), {"deep": [value]})


ARRAYS = [
    np.array(3.5, np.float32),
    np.zeros((0, 4)),
    np.arange(24.0).reshape(2, 3, 4)[:, ::2, ::-1],
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.broadcast_to(np.float64(2.0), (3, 2)),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.arange(3, dtype=">u4"),
    np.array([2**64 - 1], np.uint64),
    np.array(["ab", "ç"]),
    np.array([b"xy", b""]),
    np.frombuffer(struct.pack("<3I", 0x7FC0_1234, 0xFFC0_0001, 0x8000_0000), np.float32),  # NaN payloads and -0.0
    np.arange(3.0, dtype=np.float16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays_come_back_bit_by_bit_and_writable(array: np.ndarray) -> None:
    back = decode_state(encode_state(array))
    assert back.dtype.str == array.dtype.str
    assert same(back, np.array(array))
    assert back.flags.writeable
    assert back.flags.c_contiguous
    if array.size:
        back.reshape(-1)[0] = back.reshape(-1)[-1]  # its own memory, not the snapshot's


def test_numpy_scalars_keep_their_type() -> None:
    nan = np.frombuffer(struct.pack("<I", 0x7FC0_1234), np.float32)[0]
    for scalar in (np.float32(0.1), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.str_("x"), np.float64(-0.0), nan):
        assert same(decode_state(encode_state([scalar])), [scalar])


def test_random_trees() -> None:
    rng = random.Random(0)

    def tree(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(VALUES[:26])
        return rng.choice(
            [
                lambda: [tree(depth - 1) for _ in range(rng.randrange(4))],
                lambda: tuple(tree(depth - 1) for _ in range(rng.randrange(4))),
                lambda: {rng.choice("abcdef") + str(i): tree(depth - 1) for i in range(rng.randrange(4))},
                lambda: np.array(rng.choice(ARRAYS)),
            ]
        )()

    for _ in range(200):
        value = tree(5)
        assert same(decode_state(encode_state(value)), value)


def test_equal_trees_give_equal_bytes_in_every_process() -> None:
    """Sets of strings are ordered differently in each process (hash randomisation); their bytes are not."""
    code = "from embodied_rl.sim.snapshots import encode_state as e; print(e({'s': {'a', 'b', 'c', 'd', 'e'}, 't': {1, 'x', (2,)}}).hex())"
    outputs = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=True).stdout
        for seed in (1, 2, 3)
    }
    assert len(outputs) == 1


def test_the_layout_is_what_the_docstring_says() -> None:
    """A second reader of the format, written from its description."""
    array = np.arange(3, dtype="<i4")
    data = encode_state({"a": array, "n": 2})
    magic, version, zero, checksum, skeleton_size, total = struct.unpack_from("<8sHHIQQ", data)
    assert (magic, version, zero, total) == (b"\x93ERLSNAP", FORMAT_VERSION, 0, len(data))
    assert checksum == zlib.crc32(data[16:])
    assert json.loads(data[32 : 32 + skeleton_size]) == ["o", {"a": ["a", "<i4", [3], 0], "n": 2}]
    assert data[32 + skeleton_size :][:12] == array.tobytes()


def test_every_truncation_is_an_error() -> None:
    data = encode_state({"x": np.arange(4.0), "rng": {"state": 2**100}})
    for size in range(len(data)):
        with pytest.raises(SnapshotError):
            decode_state(data[:size])
    with pytest.raises(SnapshotError, match="followed by other bytes"):
        decode_state(data + b"\0")


def test_every_altered_byte_is_an_error() -> None:
    data = encode_state({"x": np.arange(4.0), "n": 3})
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 0x10
        with pytest.raises(SnapshotError):
            decode_state(bytes(altered))


@pytest.mark.parametrize("foreign", [b"", b"no", b"\x80\x04N.", b"PK\x03\x04" + bytes(60), b'{"a": 1}' * 9])
def test_foreign_bytes_are_named_as_such(foreign: bytes) -> None:
    with pytest.raises(SnapshotError, match="not a snapshot"):
        decode_state(foreign)


def test_another_version_is_named() -> None:
    data = bytearray(encode_state(1))
    data[8] = FORMAT_VERSION + 6
    with pytest.raises(SnapshotError, match=f"format version {FORMAT_VERSION + 6}.*reads {FORMAT_VERSION}"):
        decode_state(data)
    assert issubclass(SnapshotError, UserError)


def sealed(skeleton: Any, blocks: bytes = b"") -> bytes:
    """A snapshot with a right header and checksum around any skeleton: what a forger would write."""
    text = json.dumps(skeleton).encode()
    body = struct.pack("<QQ", len(text), 32 + len(text) + len(blocks)) + text + blocks
    return struct.pack("<8sHHI", b"\x93ERLSNAP", FORMAT_VERSION, 0, zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "skeleton",
    [
        ["a", "|O", [1], 0],  # objects would be pointers
        ["a", "<f8", [3], 0],  # more than there is
        ["a", "<f8", [2**40], 0],
        ["a", "<f8", [-1], 0],
        ["a", "|S0", [10**15], 0],  # numpy would take a byte for each
        ["q", 2**70, []],
        ["b", -8, 8],
        ["b", 0, 9],
        ["f", "00"],
        ["x", 1],
        ["o"],
        {"a": 1},
        [[]],
        ["u", "ff"],
        ["s", [["l", []]]],
        ["a", "nonsense", [1], 0],
    ],
    ids=str,
)
def test_forged_content_is_an_error_and_nothing_else(skeleton: Any) -> None:
    assert decode_state(sealed(["a", "<f8", [1], 0], bytes(8))).tolist() == [0.0]  # the forger's tool works
    with pytest.raises(SnapshotError, match="wrong content"):
        decode_state(sealed(skeleton, bytes(8)))


class Strange:
    pass


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [1, (2, Strange())]}, r"state\['a'\]\[1\]\[1\] is a .*Strange"),
        (np.array([object()]), "dtype object"),
        ({"a": np.zeros(2, [("x", "f4")])}, r"state\['a'\] is a numpy array of dtype"),
        ([lambda: None], r"state\[0\] is a builtins.function"),
        ({Strange(): 1}, "Strange"),
    ],
    ids=["deep", "object array", "structured array", "function", "key"],
)
def test_what_cannot_be_saved_is_named_with_its_place(tree: Any, where: str) -> None:
    with pytest.raises(SnapshotError, match=where):
        encode_state(tree)


def test_a_tree_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SnapshotError, match="contains itself"):
        encode_state(loop)
