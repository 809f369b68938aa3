"""What travels comes back as it was."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.wire import (
    ENCODINGS,
    WireError,
    decode_action,
    decode_array,
    decode_observation,
    decode_snapshot,
    decode_spec,
    encode_action,
    encode_array,
    encode_observation,
    encode_snapshot,
    encode_spec,
)
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.standard_normal((3, 2)).astype(np.float32),
    "float64": RNG.standard_normal(4),
    "nan": np.array([np.nan, -0.0, np.inf]),
    "bool": np.array([True, False]),
    "int64": np.array([2**62, -1]),
    "complex": np.array([1 + 2j]),
    "empty": np.zeros((0, 3), np.float32),
    "number": np.array(1.5),
    "rgb": RNG.integers(0, 256, (5, 7, 3), np.uint8),
    "rgba": RNG.integers(0, 256, (5, 7, 4), np.uint8),
    "grey": RNG.integers(0, 256, (5, 7, 1), np.uint8),
    "several": RNG.integers(0, 256, (2, 3, 5, 7, 3), np.uint8),
    "strided": RNG.integers(0, 256, (10, 14, 3), np.uint8)[::2, ::2],
    "no picture": RNG.integers(0, 256, (5, 7, 2), np.uint8),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str, encoding: Any) -> None:
    array = ARRAYS[name]
    sent = json.loads(json.dumps(encode_array(array, encoding), allow_nan=False))
    back = decode_array(sent, str(array.dtype))
    if encoding == "lists" and array.size == 0:
        back = back.reshape(array.shape)  # a list of nothing has no second axis
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    is_picture = array.dtype == np.uint8 and name != "no picture"
    assert (isinstance(sent, dict) and "png" in sent) == is_picture


def test_pictures_are_small() -> None:
    flat = np.full((128, 128, 3), 7, np.uint8)
    assert len(encode_array(flat)["png"]) < flat.nbytes / 50


def header_of_a_picture(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that would take gigabytes to unpack."""
    chunks = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IEND"
    sealed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "<f4", "shape": [3], "data": "AAAA"},
        {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"dtype": "<f4", "shape": [-1], "data": ""},
        {"dtype": "<f4", "data": ""},
        {"dtype": "<f4", "shape": [1], "data": "*"},
        {"png": "AAAA", "shape": [1, 1, 3]},
        {**encode_array(ARRAYS["rgb"]), "shape": [70, 50, 3]},
        {**encode_array(ARRAYS["rgb"]), "shape": [35, 3]},
        [[1], [1, 2]],
        [10**400],
        {"png": base64.b64encode(header_of_a_picture(60_000, 60_000)).decode(), "shape": [60_000, 60_000, 3]},
        "text",
    ],
)
def test_malformed_arrays_are_refused(wrong: Any) -> None:
    with pytest.raises(WireError):
        decode_array(wrong, "float32")


def test_observations_and_specs() -> None:
    parts = {"state": TensorSpec((2,)), "text": VariableSpec("text"), "tree": VariableSpec("json"), "array": VariableSpec("array")}
    spec = SimSpec("t", parts, ActionSpec.continuous([-np.inf, -1.0], [np.inf, 2.0]), control_hz=20.0)
    assert decode_spec(json.loads(json.dumps(encode_spec(spec), allow_nan=False))) == spec
    values = {"state": np.array([0.1, 3], np.float32), "text": "\ud800 ä", "tree": {"png": "no picture"}, "array": ARRAYS["rgb"]}
    back = decode_observation(spec, json.loads(json.dumps(encode_observation(spec, values, "base64"))))
    assert (back["text"], back["tree"]) == (values["text"], values["tree"])
    assert back["state"].tobytes() == values["state"].tobytes()
    np.testing.assert_array_equal(back["array"], values["array"])
    with pytest.raises(WireError, match=r"no 'state'.*Did you mean 'stat'"):
        decode_observation(spec, {"stat": []})
    with pytest.raises(WireError, match=r"shape \[3\]; the spec says \[2\]"):
        decode_observation(spec, {"state": [1, 2, 3]})
    with pytest.raises(WireError, match="spec cannot be read"):
        decode_spec({"task": "x"})


def test_actions() -> None:
    box = ActionSpec.continuous([-1.0] * 3, [1.0] * 3)
    row = RNG.standard_normal(3).astype(np.float32)
    back = decode_action(box, json.loads(json.dumps(encode_action(row))))
    assert (back.dtype, back.shape, back.tobytes()) == (np.float32, (1, 3), row.tobytes())
    choice = ActionSpec.discrete(3)
    assert decode_action(choice, 2).tolist() == decode_action(choice, encode_action(np.array([2]))).tolist() == [[2]]
    for wrong in (3, -1, 1.5, [1, 1], "1x", None):
        with pytest.raises(UserError, match="a whole number below 3"):
            decode_action(choice, wrong)
    assert decode_action(ActionSpec.text(4), "äb")[0] == "äb"
    with pytest.raises(UserError, match="5 bytes, and a text of this simulator at most 4"):
        decode_action(ActionSpec.text(4), "äbcd")
    with pytest.raises(UserError, match="must be a text"):
        decode_action(ActionSpec.text(4), 5)


def test_snapshots() -> None:
    assert decode_snapshot(encode_snapshot(b"\x00\xff")) == b"\x00\xff"
    for wrong in ("*", 3, None, "ä"):
        with pytest.raises(SnapshotError):
            decode_snapshot(wrong)


@pytest.mark.parametrize("wrong", [[1e300], [10**400], [float("nan")], ["x"], [[1.0], [2.0]], [None], {}, "text"])
def test_an_action_that_is_no_number_of_its_type_is_refused(wrong: object) -> None:
    spec = ActionSpec.continuous([-1.0], [1.0])
    with pytest.raises(UserError, match="a list of 1 numbers"):
        decode_action(spec, wrong)
