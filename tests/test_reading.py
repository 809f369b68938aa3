"""Files of others: pipes and devices do not hold us up, and text or headers that claim too much end in one short line."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.errors import UserError, brief
from embodied_rl.reading import json_lines, parse_json, parse_npy, parse_yaml, read_npy_header, read_regular, yaml_text


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"there")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "link") == b"there"
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: to open it would wait for ever
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 300 + "]" * 300, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("9" * 10_000, "4300 digits"),
        (b'"\xff"', "utf-8.*at byte 1"),
        ('{"a": 1,}', "line 1 column"),
    ],
)
def test_json_that_is_none_is_one_short_line(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_json(text)
    assert len(str(raised.value)) <= 160
    assert "\n" not in str(raised.value)


def test_a_line_of_json_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """Texts may hold U+2028, where `str.splitlines` would split them."""
    texts = ["one\u2028two\u0085three", "four"]
    (tmp_path / "a.jsonl").write_text("\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts), encoding="utf-8", newline="")
    assert [found for _, found in json_lines(tmp_path / "a.jsonl", "Texts")] == texts
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"Texts '.*/pipe' cannot be read: .*not a regular file"):
        json_lines(tmp_path / "pipe", "Texts")


def test_json_within_bounds_is_read() -> None:
    assert parse_json(b'{"a": [1, {"b": null}], "c": 1e-3}') == {"a": [1, {"b": None}], "c": 0.001}
    assert parse_json("[" * 200 + "]" * 200) is not None


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than a million"),
        (MERGES, "more than a million"),
        ("&a [*a]", "more than a million"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("- " * 100_000, "nested too deeply"),
        ("a: " + "9" * 10_000, "4300 digits"),
        ("a: 2026-99-99", "month must be in"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("? [1]\n: 2", "unhashable key"),
    ],
)
def test_yaml_that_is_none_or_blows_up_is_one_short_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_yaml(text)
    assert len(str(raised.value)) <= 160
    assert "\n" not in str(raised.value)


def test_yaml_within_bounds_is_read() -> None:
    assert parse_yaml("a: &x {b: [1, 2]}\nc: *x\nd: {<<: *x, e: 3}") == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2], "e": 3}}
    assert parse_yaml("") is None
    assert parse_yaml("[" * 200 + "]" * 200) is not None


def _npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


@pytest.mark.parametrize(
    "data",
    [
        _npy("(" * 9_000),
        _npy("-" * 9_000 + "1"),
        _npy("[" * 60_000),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9" + "9" * 5000 + ",)}"),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        _npy("{'descr': '|O', 'fortran_order': False, 'shape': ()}", b"12345678"),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", b"1234"),
        _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}\n'''"),
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"),
        b"",
    ],
)
def test_headers_of_arrays_that_claim_what_is_not_there(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is (not )?an \.npy file") as raised:
        parse_npy(data)
    assert len(str(raised.value)) <= 220
    assert "\n" not in str(raised.value)


def test_arrays_come_back_bit_by_bit() -> None:
    for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.eye(3)), np.array(True), np.zeros((0, 4), np.int64)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        found = parse_npy(buffer.getvalue())
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert read_npy_header(io.BytesIO(buffer.getvalue()))[0] == array.shape


def test_what_errors_say_is_cut() -> None:
    assert brief("a\n  b\tc") == "a b c"
    assert brief("x" * 500) == "x" * 159 + "…"


def test_yaml_that_is_written_is_read_as_it_was() -> None:
    rng = np.random.default_rng(0)
    letters = list("aZ09      äöü€😀:#'\"\\-?{}[],&*!|>%@`\n\t/=.~")
    for length in (0, 1, 2, 5, 40, 200) * 20:
        told = "".join(rng.choice(letters, length))
        value = {"b": told, "a": [told, {told: None}, 1.5e-7, float("inf"), -3, True], "null": "yes"}
        for style in ({}, {"width": 120, "default_flow_style": None}):
            assert parse_yaml(yaml_text(value, **style)) == value
            assert list(parse_yaml(yaml_text(value, **style))) == ["b", "a", "null"]
