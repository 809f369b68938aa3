"""JSON form of observations, actions and snapshots between `embodied_rl.sim.remote` and the environment service.

Requests typed by hand use plain lists of numbers; programs use raw bytes in base64, exact and small; both use PNG for pictures. The spec
decides what a value is, so that no text can be mistaken for an array.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.specs import Json, PartValue
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec

Encoding = Literal["lists", "base64"]
ENCODINGS: tuple[Encoding, ...] = ("lists", "base64")

_KINDS = frozenset("biufc")
_PNG_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_PNG_LEVEL = 1
"""zlib level: a simulator's frames shrink nearly as much at 1 as at 6, in a fifth of the time."""


class WireError(ValueError):
    """The other side sent something that violates the protocol."""


# ---- arrays ---------------------------------------------------------------------------------------------------------


def encode_array(array: np.ndarray, encoding: Encoding = "base64") -> Json:
    """Encode a picture ([..., H, W, 1, 3 or 4] uint8) as PNG, anything else as nested lists or base64."""
    array = np.ascontiguousarray(array) if array.ndim else np.array(array)
    if _is_picture(array):
        return {"png": base64.b64encode(_png(array)).decode("ascii"), "shape": list(array.shape)}
    if encoding == "lists" and array.dtype.kind in "biuf" and np.isfinite(array).all():  # JSON has no NaN
        return array.tolist()
    data = base64.b64encode(array.tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def decode_array(data: Json, dtype: str | None = None) -> np.ndarray:
    """Decode what `encode_array` returns; lists become arrays of `dtype`. Raises WireError."""
    try:
        if not isinstance(data, dict):
            return np.asarray(data, dtype)
        shape = [int(size) for size in data["shape"]]
        if any(size < 0 for size in shape):
            raise WireError(f"An array has the shape {shape}.")
        if "png" in data:
            return _read_png(base64.b64decode(data["png"], validate=True), shape)
        kind = np.dtype(data["dtype"])
        raw = base64.b64decode(data["data"], validate=True)
        if kind.kind not in _KINDS or math.prod(shape) * kind.itemsize != len(raw):
            raise WireError(f"An array of dtype {kind} and shape {shape} cannot have {len(raw)} bytes.")
        return np.frombuffer(raw, kind).reshape(shape).copy()
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, OSError, OverflowError) as error:
        raise WireError(f"An array cannot be read ({type(error).__name__}: {error}).") from error


def _is_picture(array: np.ndarray) -> bool:
    return array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] in _PNG_MODES and array.size > 0


def _png(array: np.ndarray) -> bytes:
    """PNG in which several pictures of one array become one tall picture."""
    from PIL import Image

    channels = array.shape[-1]
    pixels = array.reshape(-1, array.shape[-2], channels)
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels, _PNG_MODES[channels]).save(file, "PNG", compress_level=_PNG_LEVEL)
    return file.getvalue()


def _read_png(data: bytes, shape: list[int]) -> np.ndarray:
    from PIL import Image

    if len(shape) < 3 or shape[-1] not in _PNG_MODES:
        raise WireError(f"A picture cannot have the shape {shape}.")
    try:
        opened = Image.open(io.BytesIO(data), formats=("PNG",))
    except Image.DecompressionBombError as error:
        raise WireError(f"A picture cannot be read: {error}") from error
    with opened as image:
        # Checked before it is unpacked: a small file may contain a picture larger than the memory.
        if (image.width, image.height) != (shape[-2], math.prod(shape[:-2])) or image.mode != _PNG_MODES[shape[-1]]:
            raise WireError(f"A picture of {image.width} x {image.height} ({image.mode}) was said to have the shape {shape}.")
        return np.array(image, np.uint8).reshape(shape)


# ---- observations ---------------------------------------------------------------------------------------------------


def encode_observation(spec: SimSpec, parts: Mapping[str, Any], encoding: Encoding) -> dict[str, Any]:
    """Encode one environment's observation {key: value without the slot axis}."""
    return {
        key: encode_array(np.asarray(parts[key]), encoding) if _is_array(part) else parts[key] for key, part in spec.observation.items()
    }


def decode_observation(spec: SimSpec, data: Json) -> dict[str, Any]:
    """Decode what `encode_observation` returns. Raises WireError if a part is missing or has another shape."""
    if not isinstance(data, dict):
        raise WireError(f"An observation must be an object, got {type(data).__name__}.")
    found: dict[str, Any] = {}
    for key, part in spec.observation.items():
        if key not in data:
            raise WireError(f"The observation has no '{key}'.{did_you_mean(key, data)}")
        found[key] = _decode_part(key, part, data[key])
    return found


def _is_array(part: TensorSpec | VariableSpec) -> bool:
    return isinstance(part, TensorSpec) or part.kind == "array"


def _decode_part(key: str, part: TensorSpec | VariableSpec, data: Json) -> PartValue:
    if isinstance(part, VariableSpec):
        if part.kind == "array":
            return decode_array(data)
        if part.kind == "text" and not isinstance(data, str):
            raise WireError(f"The observation's '{key}' must be a text, got {type(data).__name__}.")
        return data
    array = decode_array(data, part.dtype)
    if array.shape != part.shape:
        raise WireError(f"The observation's '{key}' has the shape {list(array.shape)}; the spec says {list(part.shape)}.")
    return array


def encode_spec(spec: SimSpec) -> dict[str, Any]:
    """A spec as JSON, which has no infinity: infinite bounds become the texts "inf" and "-inf"."""
    data = spec.to_dict()
    for name in ("low", "high"):
        data["action"][name] = [bound if math.isfinite(bound) else str(bound) for bound in data["action"][name]]
    return data


def decode_spec(data: Mapping[str, Any]) -> SimSpec:
    """Decode what `encode_spec` returns. Raises WireError for an invalid spec."""
    try:
        action = data["action"]
        bounds = {name: [float(bound) for bound in action[name]] for name in ("low", "high")}
        return SimSpec.from_dict({**data, "action": {**action, **bounds}})
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"A simulator's spec cannot be read: {error!r}.") from error


# ---- actions and snapshots ------------------------------------------------------------------------------------------


def encode_action(action: str | np.ndarray) -> Json:
    """Encode one row of `SimEnv.step`'s actions: a list of numbers, or a text. A float32 survives, since its decimal form is exact."""
    return action if isinstance(action, str) else np.asarray(action).tolist()


def decode_action(spec: ActionSpec, data: Json) -> np.ndarray:
    """Decode to [1, A] in the simulator's units, or an object array [1] of `str`: what `SimEnv.step` takes for one environment.

    Raises UserError: another kind or length, not finite, not among the choices, or a text that exceeds its buffer.
    """
    if spec.kind == "text":
        return _decode_text(spec, data)
    wanted = f"a list of {spec.dim} numbers" if spec.kind == "continuous" else f"a whole number below {spec.num_actions}"
    refusal = UserError(f"The action must be {wanted}, got {data!r:.80}.")
    try:
        row = np.asarray(data, np.float64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise refusal from None
    if len(row) != spec.dim or not np.isfinite(row).all():
        raise refusal
    if spec.kind == "discrete" and (row[0] != int(row[0]) or not 0 <= row[0] < spec.num_actions):
        raise refusal
    with np.errstate(over="ignore"):
        action = row.astype(spec.dtype)
    if not np.isfinite(action).all():  # a finite 64-bit number may be infinite in 32 bits
        raise refusal
    return action[None]


def _decode_text(spec: ActionSpec, data: Json) -> np.ndarray:
    if not isinstance(data, str):
        raise UserError(f"The action must be a text, got {data!r:.80}.")
    size = len(data.encode("utf-8", "surrogatepass"))
    if size > spec.max_bytes:
        raise UserError(f"The action has {size:,} bytes, and a text of this simulator at most {spec.max_bytes:,}.")
    return np.array([data], object)


def encode_snapshot(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_snapshot(data: Json) -> bytes:
    """Decode what `encode_snapshot` returns. Raises SnapshotError for invalid base64."""
    with suppress(ValueError):
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
    raise SnapshotError("A snapshot is a text in base64, as the service gave it.")
