"""Weights in shared memory, for generators in other processes of this machine.

```
 header │ layout (JSON) │ buffer 0: version v │ buffer 1: version v − 1, or v + 1 being written
```
The publisher writes into the older buffer and then marks it as the newest. A reader locks its buffer, so that the publisher never
writes into it; the lock ends with the reader's process. A reader therefore sees one whole version or the next.
The memory has no name (memfd) and is freed with its last user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.hybrid.weight_sync import NamedTensors

_MAGIC = 0x454D4257
_PAGE = 4096
_MAGIC_WORD, _LAYOUT_BYTES, _ACTIVE, _VERSION, _BUFFER_BYTES, _CLOSED = 0, 1, 2, 3, 5, 6
"""Indices of the header's words; _VERSION and the word after it belong to the two buffers."""
_ALIGNMENT = 64
_NAP_S = 0.0005
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class _Place:
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedWeightsPublisher:
    """The training side; one process, one thread."""

    def __init__(self, specs: Mapping[str, Tensor], *, timeout_s: float = 60.0) -> None:
        """Lay out shared memory for tensors of these names, shapes and types, twice. `timeout_s`: longest wait of `publish` for readers of
        an older version. Raises UserError: there is not enough memory, or the system has no memfd (it is not Linux)."""
        if not hasattr(os, "memfd_create"):
            raise UserError("Publishing weights to other processes needs Linux (memfd).")
        places, size = _lay_out(specs)
        text = json.dumps(
            {name: [place.offset, list(place.shape), str(place.dtype).removeprefix("torch.")] for name, place in places.items()}
        ).encode()
        self._timeout_s, self._places, self._size, self._pinned = timeout_s, places, size, 0
        self._fd = os.memfd_create("embodied_rl_weights", os.MFD_CLOEXEC)
        total = _first_buffer(len(text)) + 2 * size
        try:
            os.ftruncate(self._fd, total)
            self._map = mmap.mmap(self._fd, total)
        except OSError as error:
            os.close(self._fd)
            raise UserError(f"{total / 2**20:.0f} MiB of shared memory for weights are not available: {error}.") from error
        self._map[_PAGE : _PAGE + len(text)] = text
        self._header = np.frombuffer(self._map, np.int64, 8)
        self._header[_LAYOUT_BYTES], self._header[_ACTIVE], self._header[_BUFFER_BYTES] = len(text), -1, size
        self._header[_VERSION : _VERSION + 2] = -1
        self._header[_MAGIC_WORD] = _MAGIC
        self._buffers = [_views(self._map, _first_buffer(len(text)) + number * size, places) for number in range(2)]

    @property
    def path(self) -> str:
        """Path that readers open; works for processes of the same user while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @torch.no_grad()
    def publish(self, version: int, tensors: NamedTensors, *, only_changed: bool = False) -> int:
        """Write every tensor of the layout, then show them to readers; returns the number of bytes written.

        Args:
            only_changed: compare first and write only what differs from this buffer's last version. Reading is cheaper than writing if most
                is frozen; tensors on a GPU are written whole, which is faster than copying them here to compare.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape; readers keep the version before.
            TimeoutError: a reader did not release the older version.
        """
        target = 1 - int(self._header[_ACTIVE]) if self._header[_ACTIVE] >= 0 else 0
        _lock(self._fd, target, fcntl.F_WRLCK, self._timeout_s, f"a reader still holds version {self._header[_VERSION + target]}")
        try:
            self._header[_VERSION + target] = -1
            views, missing, written = self._buffers[target], set(self._places), 0
            device: torch.device | None = None
            for name, tensor in tensors:
                if name not in missing or tensor.shape != views[name].shape:
                    raise ValueError(f"tensor '{name}' {list(tensor.shape)} does not belong to this publication, or was sent twice.")
                missing.discard(name)
                if only_changed and not tensor.is_cuda and _same_bytes(views[name], tensor.to(views[name].dtype).contiguous()):
                    continue
                if tensor.is_cuda and device is None:
                    device, self._pinned = tensor.device, self._pinned or _pin(self._map)
                views[name].copy_(tensor, non_blocking=True)
                written += views[name].nbytes
            if device is not None:
                torch.cuda.synchronize(device)
            if missing:
                raise ValueError(f"tensors were not published: {', '.join(sorted(missing)[:4])} (of {len(missing)}).")
            self._header[_VERSION + target] = version
            self._header[_ACTIVE] = target
        finally:
            _unlock(self._fd, target)
        return written

    def close(self) -> None:
        """Tell readers that nothing follows; what they hold stays valid. May be called twice."""
        if self._fd >= 0:
            self._header[_CLOSED] = 1
            _unpin(self._pinned)
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class HeldWeights:
    """One whole version, valid while it is held."""

    version: int
    tensors: dict[str, Tensor]
    """Views of the shared memory, to be read only."""


class SharedWeightsReader:
    """The generating side."""

    def __init__(self, path: str) -> None:
        """Open a publisher's `path`. Raises UserError if there is none."""
        try:
            # Opened here, never inherited, because locks belong to the result of `open`.
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        except (OSError, ValueError) as error:
            raise UserError(
                f"No weights are published at '{path}' ({error}): the trainer has ended, or belongs to another user."
            ) from error
        self._header = np.frombuffer(self._map, np.int64, 8)
        if self._header[_MAGIC_WORD] != _MAGIC:
            raise UserError(f"'{path}' has no published weights.")
        size = int(self._header[_LAYOUT_BYTES])
        layout: dict[str, Any] = json.loads(self._map[_PAGE : _PAGE + size])
        places = {name: _Place(offset, tuple(shape), getattr(torch, dtype)) for name, (offset, shape, dtype) in layout.items()}
        self._pinned = 0
        step = int(self._header[_BUFFER_BYTES])
        self._buffers = [_views(self._map, _first_buffer(size) + number * step, places) for number in range(2)]

    @property
    def version(self) -> int | None:
        """The newest version; None before the first."""
        active = int(self._header[_ACTIVE])
        return None if active < 0 else int(self._header[_VERSION + active])

    @property
    def closed(self) -> bool:
        """Whether the publisher has said that nothing follows."""
        return bool(self._header[_CLOSED])

    @contextmanager
    def hold(self, timeout_s: float = 60.0) -> Iterator[HeldWeights]:
        """Hold the newest version. Meanwhile the publisher can publish one further version, and waits with the one after it.
        Raises TimeoutError: nothing has been published yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            active = int(self._header[_ACTIVE])
            if active >= 0:
                _lock(self._fd, active, fcntl.F_RDLCK, max(deadline - time.monotonic(), 0.0), "weights are being written")
                # The lock may have come after this buffer was the newest, or after a writer gave up half way.
                if active == int(self._header[_ACTIVE]) and self._header[_VERSION + active] >= 0:
                    break
                _unlock(self._fd, active)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights were published within {timeout_s:g} s.")
            time.sleep(_NAP_S)
        try:
            if torch.cuda.is_initialized():  # their loader copies them to a GPU
                self._pinned = self._pinned or _pin(self._map)
            yield HeldWeights(int(self._header[_VERSION + active]), self._buffers[active])
        finally:
            _unlock(self._fd, active)

    def close(self) -> None:
        """Release the memory. May be called twice."""
        if self._fd >= 0:
            _unpin(self._pinned)
            os.close(self._fd)
            self._fd = -1


class AnnouncedWeights:
    """Reader for publishers whose path comes with each version: a new path means a new publisher."""

    def __init__(self) -> None:
        self._reader: tuple[str, SharedWeightsReader] | None = None

    @contextmanager
    def hold(self, version: int, path: str) -> Iterator[HeldWeights]:
        if self._reader is None or self._reader[0] != path:
            if self._reader is not None:
                self._reader[1].close()
            self._reader = (path, SharedWeightsReader(path))
        with self._reader[1].hold() as held:
            assert held.version == version, "weights are published before they are announced"
            yield held


def _lay_out(specs: Mapping[str, Tensor]) -> tuple[dict[str, _Place], int]:
    places, offset = {}, 0
    for name, tensor in specs.items():
        places[name] = _Place(offset, tuple(tensor.shape), tensor.dtype)
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return places, -(-max(offset, 1) // _PAGE) * _PAGE


def _first_buffer(layout_bytes: int) -> int:
    return _PAGE + -(-layout_bytes // _PAGE) * _PAGE


def _views(memory: mmap.mmap, start: int, places: Mapping[str, _Place]) -> dict[str, Tensor]:
    views = {}
    for name, place in places.items():
        count = prod(place.shape)
        if count == 0:
            views[name] = torch.empty(place.shape, dtype=place.dtype)
            continue
        views[name] = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=start + place.offset).view(place.shape)
    return views


def _pin(memory: mmap.mmap) -> int:
    """Make the GPU's driver lock these pages in place, so that copies run at the speed of the link; returns the address for `_unpin`.

    -1: the system refuses, and copies are slower.
    """
    address = np.frombuffer(memory, np.uint8).ctypes.data
    if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) == 0:
        return address
    with contextlib.suppress(RuntimeError):  # CUDA keeps the refusal, and torch raises it at its next kernel, whatever that is
        torch.ones(1, device="cuda")
    return -1


def _unpin(address: int) -> None:
    if address > 0:
        torch.cuda.cudart().cudaHostUnregister(address)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors of one size have the same bits; NaN equals itself. Runs at memory speed, unlike `torch.equal`."""
    return a.nbytes == 0 or _LIBC.memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def _lock(fd: int, number: int, kind: int, timeout_s: float, what: str) -> None:
    """Lock buffer `number` for this opening of the file; the kernel releases it when the process ends."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > deadline:
            raise TimeoutError(f"Weights could not be locked within {timeout_s:g} s: {what}.")
        time.sleep(_NAP_S)


def _unlock(fd: int, number: int) -> None:
    if fd >= 0:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))
