"""Weights to other machines through Ray's object store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from embodied_rl.errors import from_extra
from embodied_rl.hybrid.weight_sync import NamedTensors, buckets

BUCKET_BYTES = 256 * 2**20


class RayPublisher:
    """Buckets in Ray's object store: readers on one node share one copy. The objects go when the next version is published."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Raises MissingExtraError without Ray."""
        self._ray = _import_ray()
        self._bucket_bytes = bucket_bytes
        self._references: list[Any] = []

    def publish(self, tensors: NamedTensors) -> tuple[list[Any], int]:
        """(references, which `ray_tensors` reads, bytes) of tensors, which may be overwritten afterwards."""
        references, size = [], 0
        for bucket in buckets(tensors, self._bucket_bytes):
            text, payload = pack_tensors(bucket, torch.device("cpu"))
            references.append(self._ray.put((text, payload.numpy())))
            size += payload.numel()
        self._references = references
        return list(references), size


def ray_tensors(references: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a `RayPublisher` published, bucket by bucket."""
    ray = _import_ray()
    for reference in references:
        text, payload = ray.get(reference)
        yield from unpack_tensors(text, torch.from_numpy(payload.copy()))  # Ray's arrays are read-only


def _import_ray() -> Any:
    with from_extra("Publishing weights through Ray", "ray"):
        import ray
    return ray


@torch.no_grad()
def pack_tensors(bucket: Sequence[tuple[str, Tensor]], device: torch.device) -> tuple[bytes, Tensor]:
    """Names, shapes and types as JSON, and the contents as one block of bytes, [n] uint8 on `device`."""
    text = json.dumps([[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in bucket]).encode()
    # One without entries, as numpy gives it, has a stride of 0, of which no bytes can be seen.
    parts = [tensor.detach().to(device).contiguous().view(-1).view(torch.uint8) for _, tensor in bucket if tensor.numel()]
    return text, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack_tensors(text: bytes, payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what `pack_tensors` gave."""
    offset = 0
    for name, shape, dtype_name in json.loads(text):
        dtype = getattr(torch, dtype_name)
        size = prod(shape) * dtype.itemsize
        # Copied: a tensor of eight bytes needs an address that is a multiple of eight.
        yield name, payload[offset : offset + size].clone().view(dtype).view(shape)
        offset += size
