"""Publishing weights to generators: a stream of (name, tensor) with a version.

Sources stream parameter by parameter (`fsdp.gather_named`, `LanguagePolicy.named_weights`), so that a sharded model is never whole in one
place. Destinations are another process on this machine (`shared_weights`) or other machines (`RayPublisher`). A stream contains all
weights, only the LoRA weights, or the changes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import from_extra

NamedTensors = Iterable[tuple[str, Tensor]]
INDEX, VALUE, BASE = "::index", "::value", "::base_version"
"""Suffixes of the names in a stream of differences."""
_DENSE_SHARE = 0.5
"""A tensor is sent whole if its changed entries with their indices would take more than this share of it."""


# ---- what is sent -------------------------------------------------------------------------------------------------------


def buckets(tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group neighbours of a stream up to `bucket_bytes`, or one larger tensor: fewer and larger messages, bounded memory."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}.")
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class DeltaSource:
    """Streams the changes since the last publication, bit for bit.

    With small learning rates most bfloat16 weights keep their bits in one update. Entries are compared as integers, so that NaN and -0
    are sent like any number. The host keeps a copy of what was last sent.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        self._last_version = -1

    @torch.no_grad()
    def stream(self, version: int, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Stream `version`; the first stream is whole. Exhaust it: only then is `version` the base of the next differences."""
        base, self._last_version = self._last_version, version
        yield BASE, torch.tensor([base], dtype=torch.int64)
        for name, tensor in tensors:
            value = tensor.detach().cpu().contiguous()
            last = self._last.get(name)
            if last is None or last.shape != value.shape or last.dtype != value.dtype:
                self._last[name] = value.clone()
                yield name, value
                continue
            index = (_bits(value) != _bits(last)).nonzero().squeeze(-1)
            if len(index) == 0:
                continue
            narrow = index.to(torch.int32) if value.numel() < 2**31 else index
            cost = narrow.nbytes + len(index) * value.element_size()
            if cost > _DENSE_SHARE * value.nbytes:
                yield name, value
            else:
                yield name + INDEX, narrow
                yield name + VALUE, value.flatten()[index]
            last.copy_(value)


@torch.no_grad()
def apply_delta(target: Mapping[str, Tensor], present_version: int, stream: NamedTensors) -> int:
    """Bring tensors from `present_version` to the stream's version; returns the number of entries written.
    `target`: {name: tensor} at the version that the stream is based on; written in place. A first stream (base -1) fits any version. Raises
    ValueError: the stream is based on another version, or names an unknown tensor."""
    written, index = 0, torch.empty(0)
    for name, tensor in stream:
        if name == BASE:
            base = int(tensor)
            if base not in (-1, present_version):
                raise ValueError(f"these are differences to version {base}, but the present weights have version {present_version}.")
            continue
        plain = name.removesuffix(INDEX).removesuffix(VALUE)
        if plain not in target:
            raise ValueError(f"tensor '{plain}' does not exist.")
        if name.endswith(INDEX):
            index = tensor.long()
        elif name.endswith(VALUE):
            target[plain].view(-1)[index.to(target[plain].device)] = tensor.to(target[plain].device)
            written += tensor.numel()
        else:
            target[plain].copy_(tensor)
            written += tensor.numel()
    return written


class DeltaSink:
    """The receiver of a `DeltaSource`: holds whole tensors on the host."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._version = -1

    @torch.no_grad()
    def take(self, version: int, stream: NamedTensors) -> dict[str, Tensor]:
        """{name: tensor} of `version`; copy them, because the next stream changes them in place.
        Raises ValueError: the stream is based on another version than the one taken last, or is not from a `DeltaSource`."""
        parts = iter(stream)
        name, base = next(parts, ("nothing", torch.tensor(-1)))
        if name != BASE:
            raise ValueError(f"a stream of differences must begin with its base version, not with '{name}'.")
        if int(base) == -1:
            self._held = {name: tensor.clone() for name, tensor in parts}
        else:
            apply_delta(self._held, self._version, itertools.chain([(name, base)], parts))
        self._version = version
        return self._held


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(_INTEGERS[tensor.element_size()])


# ---- Ray's object store ---------------------------------------------------------------------------------------------


BUCKET_BYTES = 256 * 2**20


class RayPublisher:
    """Buckets in Ray's object store: readers on one node share one copy. Publishing the next version deletes the objects."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Raise MissingExtraError without Ray."""
        self._ray = _import_ray()
        self._bucket_bytes = bucket_bytes
        self._references: list[Any] = []

    def publish(self, tensors: NamedTensors) -> tuple[list[Any], int]:
        """Publish tensors, which may be overwritten afterwards; return (references for `ray_tensors`, bytes)."""
        references, size = [], 0
        for bucket in buckets(tensors, self._bucket_bytes):
            packed = pack_tensors(bucket)
            references.append(self._ray.put(packed))
            size += packed[1].nbytes
        self._references = references
        return list(references), size


def ray_tensors(references: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a `RayPublisher`'s publication, bucket by bucket."""
    ray = _import_ray()
    for reference in references:
        yield from unpack_tensors(*ray.get(reference))


def _import_ray() -> Any:
    with from_extra("Publishing weights through Ray", "ray"):
        import ray
    return ray


@torch.no_grad()
def pack_tensors(tensors: NamedTensors) -> tuple[bytes, np.ndarray]:
    """Names, shapes and types as JSON, and the contents as one block of bytes, [n] uint8."""
    held = list(tensors)
    text = json.dumps([[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in held]).encode()
    # A tensor without entries, as numpy gives it, has a stride of 0 and cannot be viewed as bytes.
    parts = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in held if tensor.numel()]
    return text, torch.cat([torch.empty(0, dtype=torch.uint8), *parts]).numpy()


def unpack_tensors(text: bytes, payload: np.ndarray) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `pack_tensors`: (name, tensor)."""
    offset = 0
    for name, shape, dtype_name in json.loads(text):
        dtype = getattr(torch, dtype_name)
        size = prod(shape) * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype)
        if size:  # one without entries cannot be viewed as bytes, see `pack_tensors`
            # Copied, because a tensor of eight-byte numbers needs an address that is a multiple of eight, and Ray's arrays are read-only.
            tensor.view(-1).view(torch.uint8).numpy()[:] = payload[offset : offset + size]
        yield name, tensor
        offset += size
