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
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.hybrid.weight_sync import NamedTensors
from embodied_rl.sim.transport import Slab

_MAGIC = 0x454D4257
_MAGIC_WORD, _LAYOUT_BYTES, _ACTIVE, _VERSION, _CLOSED = 0, 1, 2, 3, 5
"""Indices of the header's words; _VERSION and the word after it belong to the two buffers."""
_HEADER_WORDS = 8
_HEADER_BYTES = 8 * _HEADER_WORDS
_NAP_S = 0.0005
_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FLOCK = struct.Struct("hhqqi4x")


class SharedWeightsPublisher:
    """The training side; one process, one thread."""

    def __init__(self, specs: Mapping[str, Tensor], *, timeout_s: float = 60.0) -> None:
        """Lay out shared memory for tensors of these names, shapes and types, twice. `timeout_s`: longest wait of `publish` for readers of
        an older version. Raises UserError: there is not enough memory, or the system has no memfd (it is not Linux)."""
        if not hasattr(os, "memfd_create"):
            raise UserError("Publishing weights to other processes needs Linux (memfd).")
        layout = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in specs.items()}
        text = json.dumps(layout).encode()
        self._timeout_s, self._pinned = timeout_s, 0
        self._slab, self._buffers = _mapped(text)
        self._slab.arrays["layout"][:] = np.frombuffer(text, np.uint8)
        self._header = self._slab.arrays["header"]
        self._header[_LAYOUT_BYTES], self._header[_ACTIVE] = len(text), -1
        self._header[_VERSION : _VERSION + 2] = -1
        self._header[_MAGIC_WORD] = _MAGIC

    @property
    def path(self) -> str:
        """Path that readers open; works for processes of the same user while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._slab.fd}"

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
        _lock(self._slab.fd, target, fcntl.F_WRLCK, self._timeout_s, f"a reader still holds version {self._header[_VERSION + target]}")
        try:
            self._header[_VERSION + target] = -1
            views, missing, written = self._buffers[target], set(self._buffers[target]), 0
            device: torch.device | None = None
            for name, tensor in tensors:
                if name not in missing or tensor.shape != views[name].shape:
                    raise ValueError(f"tensor '{name}' {list(tensor.shape)} does not belong to this publication, or was sent twice.")
                missing.discard(name)
                if only_changed and not tensor.is_cuda and _same_bytes(views[name], tensor.to(views[name].dtype).contiguous()):
                    continue
                if tensor.is_cuda and device is None:
                    device, self._pinned = tensor.device, self._pinned or _pin(self._slab)
                views[name].copy_(tensor, non_blocking=True)
                written += views[name].nbytes
            if device is not None:
                torch.cuda.synchronize(device)
            if missing:
                raise ValueError(f"tensors were not published: {', '.join(sorted(missing)[:4])} (of {len(missing)}).")
            self._header[_VERSION + target] = version
            self._header[_ACTIVE] = target
        finally:
            _unlock(self._slab.fd, target)
        return written

    def close(self) -> None:
        """Tell readers that nothing follows; what they hold stays valid. May be called twice."""
        if self._slab.fd >= 0:
            self._header[_CLOSED] = 1
            _unpin(self._pinned)
            self._slab.close()


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
        with contextlib.ExitStack() as opened:
            try:
                # Opened here, never inherited, because locks belong to the result of `open`.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                header = np.frombuffer(os.pread(fd, _HEADER_BYTES, 0), np.int64, _HEADER_WORDS)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"No weights are published at '{path}' ({error}): the trainer has ended, or belongs to another user."
                ) from error
            if header[_MAGIC_WORD] != _MAGIC:
                raise UserError(f"'{path}' has no published weights.")
            opened.pop_all()
        self._slab, self._buffers = _mapped(os.pread(fd, int(header[_LAYOUT_BYTES]), _HEADER_BYTES), fd)
        self._header, self._pinned = self._slab.arrays["header"], 0

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
                _lock(self._slab.fd, active, fcntl.F_RDLCK, max(deadline - time.monotonic(), 0.0), "weights are being written")
                # The lock may have come after this buffer was the newest, or after a writer gave up half way.
                if active == int(self._header[_ACTIVE]) and self._header[_VERSION + active] >= 0:
                    break
                _unlock(self._slab.fd, active)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights were published within {timeout_s:g} s.")
            time.sleep(_NAP_S)
        try:
            if torch.cuda.is_initialized():  # their loader copies them to a GPU
                self._pinned = self._pinned or _pin(self._slab)
            yield HeldWeights(int(self._header[_VERSION + active]), self._buffers[active])
        finally:
            _unlock(self._slab.fd, active)

    def close(self) -> None:
        """Release the memory. May be called twice."""
        if self._slab.fd >= 0:
            _unpin(self._pinned)
            self._slab.close()


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


def _mapped(layout: bytes, fd: int | None = None) -> tuple[Slab, list[dict[str, Tensor]]]:
    """The memory of weights with this layout, {name: [shape, dtype]} as JSON, and the tensors of its two buffers."""
    parts = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in json.loads(layout).items()}
    shapes = {"header": ((_HEADER_WORDS,), "int64"), "layout": ((len(layout),), "uint8")}
    for number in range(2):
        shapes |= {f"{number}/{name}": ((prod(shape) * dtype.itemsize,), "uint8") for name, (shape, dtype) in parts.items()}
    slab = Slab(shapes, fd, what="weights")
    buffers = (slab.group(str(number)) for number in range(2))
    return slab, [{name: torch.from_numpy(own[name]).view(dtype).view(shape) for name, (shape, dtype) in parts.items()} for own in buffers]


def _pin(slab: Slab) -> int:
    """Make the GPU's driver lock this memory in place, so that copies run at the speed of the link; returns the address for `_unpin`.

    -1: the system refuses, and copies are slower.
    """
    address = slab.arrays["header"].ctypes.data
    if int(torch.cuda.cudart().cudaHostRegister(address, os.fstat(slab.fd).st_size, 0)) == 0:
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
