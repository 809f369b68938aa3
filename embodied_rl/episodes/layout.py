"""The columns of a part of a recording, how their rows are stored, and the files that hold them (docs/episodes.md).

A *part* is a folder with one row of every column per step (or per observation), all episodes one after another. All episodes of a part
have the same columns; an episode with others goes into another part.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from embodied_rl.episodes.recording import OPTIONAL_COLUMNS, RecordingError, Value
from embodied_rl.errors import brief
from embodied_rl.reading import parse_npy
from embodied_rl.types import SimSpec, VariableSpec

Encoding = Literal["array", "text", "json", "arrays", "png", "mp4", "mp4_lossless"]
"""array: rows of one shape, in one .npy file. text, json: UTF-8 of varying size; arrays: an .npy file per row; png: a PNG file per row:
these lie in one .bin file, with (offset, size) of each row in an .npy file beside it. mp4, mp4_lossless: one video per episode."""

VideoFormat = Literal["mp4", "png", "raw"]

FINITE_COLUMNS = ("action", "reward", "sampled_action", "log_prob", "value")
"""Columns that may hold neither NaN nor infinity; observations may not either, the simulator's state may."""
SNAPSHOTS = "snapshots"
_SMALLEST_VIDEO = 16
"""Pixels a side; smaller pictures are stored as arrays."""
_NUMERIC_KINDS = "biufc"


@dataclass(frozen=True)
class Column:
    """One field of the episodes of a part."""

    name: str
    """As in `RecordedEpisode`: ``reward``, ``observation.state``, ``state.qpos``, ``images.front``."""
    encoding: Encoding
    per: Literal["step", "observation"]
    """T rows or T + 1 rows an episode."""
    dtype: str = ""
    """numpy's, with byte order (``<f4``); empty where rows vary in size."""
    shape: tuple[int, ...] = ()
    """Of a row; empty where rows vary in size."""

    @property
    def stem(self) -> str:
        """Name of its file or folder without the suffix; what file names cannot hold is percent-encoded."""
        return quote(self.name, safe="")

    @property
    def is_blob(self) -> bool:
        return self.encoding in ("text", "json", "arrays", "png")

    @property
    def is_video(self) -> bool:
        return self.encoding in ("mp4", "mp4_lossless")

    @property
    def is_picture(self) -> bool:
        return self.is_video or self.encoding == "png"

    @cached_property
    def must_be_finite(self) -> bool:
        floating = self.encoding == "array" and np.dtype(self.dtype).kind in "fc"
        return floating and (self.name in FINITE_COLUMNS or self.name.startswith("observation."))

    @cached_property
    def row_bytes(self) -> int:
        """Of a row of fixed size."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def rows_of(self, num_steps: int) -> int:
        """Rows of an episode of `num_steps` steps."""
        return num_steps if self.per == "step" else num_steps + 1

    def to_dict(self) -> dict[str, Any]:
        fixed = {"dtype": self.dtype, "shape": list(self.shape)} if self.dtype else {}
        return {"name": self.name, "encoding": self.encoding, "per": self.per, **fixed}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Column:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        name, encoding, per = data["name"], data["encoding"], data["per"]
        if not isinstance(name, str) or not name or encoding not in Encoding.__args__ or per not in ("step", "observation"):  # type: ignore[attr-defined]
            raise ValueError(f"column {name!r:.60} has encoding {encoding!r:.40} and rows per {per!r:.40}")
        shape = tuple(data.get("shape", ()))
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in shape):
            raise ValueError(f"column {name!r:.60} has shape {brief(list(shape), 60)}")
        dtype = ""
        if encoding in ("text", "json", "arrays"):
            shape = ()
        else:
            dtype = _plain_dtype(data["dtype"])
            if encoding != "array" and (dtype != "|u1" or len(shape) != 3 or shape[2] != 3):
                raise ValueError(f"column {name!r:.60} holds pictures of shape {brief(list(shape), 60)} and dtype {dtype}")
        return Column(name, encoding, per, dtype, shape)


SNAPSHOT_COLUMN = Column(SNAPSHOTS, "arrays", "step")
"""Not one of a part's columns: it has rows for some steps only, with the step's number."""


def _plain_dtype(text: object) -> str:
    dtype = np.dtype(str(text))
    if dtype.kind not in _NUMERIC_KINDS or dtype.shape or dtype.names:
        raise ValueError(f"dtype {text!r:.60} is not a plain number")
    return dtype.str


def is_extra(name: str) -> bool:
    """Whether a column is one that the simulator's spec does not speak of."""
    return name in OPTIONAL_COLUMNS or name.startswith(("state.", "images."))


def layout_for(spec: SimSpec, video: VideoFormat, extras: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of an episode of this simulator.

    Args:
        extras: {name of an optional column: one row of it}, among them ``state.<name>`` and ``images.<camera>``.

    Raises:
        RecordingError: something cannot be stored.
    """
    text_action = spec.action.kind == "text"
    columns = []
    for key, part in spec.observation.items():
        name = f"observation.{key}"
        if isinstance(part, VariableSpec):
            columns.append(Column(name, "arrays" if part.kind == "array" else part.kind, "observation"))
        else:
            columns.append(_fixed(name, np.dtype(part.dtype), part.shape, "observation", video))
    if text_action:
        columns.append(Column("action", "text", "step"))
    else:
        columns.append(_fixed("action", np.dtype(spec.action.dtype), (spec.action.dim,), "step", "raw"))
    columns.append(_fixed("reward", np.dtype(np.float32), (), "step", "raw"))
    columns += [_fixed(name, np.dtype(bool), (), "step", "raw") for name in ("terminated", "truncated", "success")]
    for name, row in extras.items():
        per: Literal["step", "observation"] = "step" if name in OPTIONAL_COLUMNS else "observation"
        value = np.asarray(row)
        if value.dtype.kind in "OU" and name == "sampled_action":
            columns.append(Column(name, "text", per))
        elif text_action and name in ("sampled_action", "log_prob", "policy_version"):
            # As many as the turn has tokens: a shape for the part would give nearly every episode its own part.
            columns.append(Column(name, "arrays", per))
        else:
            pictures = name.startswith("images.")
            if pictures and (value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3):
                raise RecordingError(f"Field '{name}' must hold pictures [H, W, 3] uint8, got {value.dtype} {list(value.shape)}.")
            columns.append(_fixed(name, value.dtype, value.shape, per, video if pictures else "raw"))
    return tuple(columns)


def picture_column(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Column | None:
    """The column of an observation or of images where these are kept as videos (`video="mp4"`); None where they are not."""
    if dtype.kind not in _NUMERIC_KINDS:
        return None
    column = _fixed(name, dtype, shape, "observation", "mp4")
    return column if column.is_video else None


def _fixed(name: str, dtype: np.dtype, shape: tuple[int, ...], per: Literal["step", "observation"], video: VideoFormat) -> Column:
    if dtype.kind not in _NUMERIC_KINDS:
        raise RecordingError(f"Field '{name}' must hold numbers, got dtype {dtype}.")
    encoding: Encoding = "array"
    if dtype == np.uint8 and len(shape) == 3 and shape[2] == 3:
        if video == "png" and min(shape) > 0:
            encoding = "png"
        elif video == "mp4" and min(shape[:2]) >= _SMALLEST_VIDEO:
            # What a policy saw must come back bit by bit; what people look at may be smaller.
            encoding = "mp4" if name.startswith("images.") else "mp4_lossless"
    return Column(name, encoding, per, dtype.str, tuple(int(size) for size in shape))


def encode_row(column: Column, value: Value) -> bytes:
    """The bytes of a row of varying size. Raises RecordingError when the value is of another kind."""
    if column.encoding == "text":
        if not isinstance(value, str):
            raise RecordingError(f"Field '{column.name}' must hold str, got {type(value).__name__}: {value!r:.80}.")
        return value.encode("utf-8", "surrogatepass")
    if column.encoding == "json":
        try:
            return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError) as error:
            raise RecordingError(f"Field '{column.name}' must hold what JSON can: {error}.") from error
    if column.encoding == "png":
        from embodied_rl.episodes.pictures import encode_png

        return encode_png(np.asarray(value))
    array = np.asarray(value)
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise RecordingError(f"Field '{column.name}' must hold arrays of numbers, got dtype {array.dtype}.")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def decode_row(column: Column, data: bytes) -> Any:
    """The inverse of `encode_row`. Raises ValueError (among its kinds RecordingError) for anything else."""
    if column.encoding == "text":
        return data.decode("utf-8", "surrogatepass")
    if column.encoding == "json":
        return json.loads(data.decode("utf-8", "surrogatepass"))
    if column.encoding == "png":
        from embodied_rl.episodes.pictures import decode_png

        return decode_png(data, column.shape)
    array = parse_npy(data)
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise ValueError("is not an array of numbers")
    return array
