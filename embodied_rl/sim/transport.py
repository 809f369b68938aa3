"""Shared-memory slabs and spin-then-block signalling between the manager and its workers.

A slab is anonymous memory (memfd) whose descriptor the workers receive over a socket. It has no name, so nothing stays behind in /dev/shm,
whichever process dies and however.

Text, JSON and arrays of varying size have a buffer per slot: a row of bytes and its used size. Pages that are never written take no memory,
so buffers can be generous. Unlike a ring, they cannot fill up with another slot's unread values.

Memory order: a payload is written before the flag that announces it. x86 keeps the order of stores; on other machines `fence` does.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import mmap
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.specs import PartValue
from embodied_rl.stopping import waiting
from embodied_rl.types import SimSpec, VariableSpec

INFO_BUFFER = VariableSpec("json", 2**16)
"""Buffer of an episode's final info."""
_INFO_ARRAY_LIMIT = 64
"""Most elements of an array in a final info; larger arrays are left out."""


def buffer_fields(name: str, spec: VariableSpec, num_slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Entries of a slab's layout for the buffers of all slots."""
    return {f"buffer/{name}": ((num_slots, spec.max_bytes), "uint8"), f"buffer_size/{name}": ((num_slots,), "int64")}


class VariableLengthBuffers:
    """Rows [start, stop) of one part's buffers in a slab."""

    def __init__(self, name: str, spec: VariableSpec, arrays: Mapping[str, np.ndarray], start: int = 0, stop: int | None = None) -> None:
        self.name, self.spec, self._start = name, spec, start
        self._bytes = arrays[f"buffer/{name}"][start:stop]
        self._sizes = arrays[f"buffer_size/{name}"][start:stop]

    def write(self, row: int, value: PartValue) -> None:
        """Write a value into a row. Raises UserError if it has another kind or exceeds its buffer."""
        data = self._encode(value)
        if len(data) > self.spec.max_bytes:
            raise UserError(
                f"'{self.name}' of slot {self._start + row} takes {len(data):,} bytes and its buffer is {self.spec.max_bytes:,}: give its "
                f"VariableSpec or ActionSpec a max_bytes of at least {len(data):,}."
            )
        self._bytes[row, : len(data)] = np.frombuffer(data, np.uint8)
        self._sizes[row] = len(data)

    def read(self, row: int) -> Any:
        """Value of a row; None if nothing was written yet."""
        size = int(self._sizes[row])
        return None if size == 0 else self._decode(self._bytes[row, :size].tobytes())

    def read_all(self, rows: Iterable[int]) -> np.ndarray:
        """Object array of the values of `rows`."""
        return np.fromiter(map(self.read, rows), object)

    def copy_row(self, row: int, into: VariableLengthBuffers) -> None:
        """Copy a row to the same row of other buffers, as bytes."""
        size = int(self._sizes[row])
        into._bytes[row, :size] = self._bytes[row, :size]
        into._sizes[row] = size

    # Every encoding begins with one byte, so that an empty text differs from an empty buffer.

    def _encode(self, value: PartValue) -> bytes:
        if self.spec.kind == "text":
            if not isinstance(value, str):
                raise UserError(f"'{self.name}' must be a str, got {type(value).__name__}: {value!r:.80}.")
            return b"t" + value.encode("utf-8", "surrogatepass")
        if self.spec.kind == "json":
            try:
                return b"j" + json.dumps(value).encode()
            except (TypeError, ValueError) as error:
                raise UserError(f"'{self.name}' must hold what JSON can: {error}.") from error
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in "biufc":
            raise UserError(f"'{self.name}' must be a numeric array, got dtype {array.dtype}.")
        header = json.dumps([array.dtype.str, np.asarray(value).shape]).encode()
        return b"a" + header + b"\n" + array.tobytes()

    def _decode(self, data: bytes) -> Any:
        if self.spec.kind == "text":
            return data[1:].decode("utf-8", "surrogatepass")
        if self.spec.kind == "json":
            return json.loads(data[1:])
        header, _, raw = data[1:].partition(b"\n")
        dtype, shape = json.loads(header)
        return np.frombuffer(raw, dtype).reshape(shape)


def observation_buffers(
    name: str, spec: SimSpec, arrays: Mapping[str, np.ndarray], start: int = 0, stop: int | None = None
) -> dict[str, VariableLengthBuffers]:
    """Rows [start, stop) of the buffers of the observation `name`, by key."""
    return {key: VariableLengthBuffers(f"{name}/{key}", part, arrays, start, stop) for key, part in spec.variables.items()}


def plain_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """The part of a simulator's info that JSON can express: numbers, strings, small arrays and nests of these."""
    kept: dict[str, Any] = {}
    for key, value in (info or {}).items():
        plain = _plain(value)
        if plain is not _NOTHING:
            kept[str(key)] = plain
    while kept and len(json.dumps(kept)) + 1 > INFO_BUFFER.max_bytes:
        largest = max(kept, key=lambda key: len(json.dumps(kept[key])))
        del kept[largest]
    return kept


_NOTHING = object()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "biuf" and value.size <= _INFO_ARRAY_LIMIT else _NOTHING
    if isinstance(value, Mapping):
        return {str(key): plain for key, item in value.items() if (plain := _plain(item)) is not _NOTHING}
    if isinstance(value, (list, tuple)) and len(value) <= _INFO_ARRAY_LIMIT:
        items = [_plain(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in items) else items
    return _NOTHING


# ---- slabs ----------------------------------------------------------------------------------------------------------


IDLE, PENDING, READY, ENDED, ABORTED = 0, 1, 2, 3, 4
"""States of a slot: the caller owns it; the worker owns it; a step is ready; an episode's last step is ready; the episode was given up."""

OBSERVATIONS = ("observation", "final_observation")
"""What a slab has for every slot: the last observation, and that of the last episode's end."""
_WORKER_WORDS = ("worker_doorbell", "worker_waiting", "control_pending", "failed", "progress")
_ALIGNMENT = 64
_SPIN_S = 2e-6
"""Seconds that a waiter spins before it yields: about one hand-over between running processes. More would take the core from others."""
_YIELDS = 200
MANAGER_YIELDS = 1000
"""Yields of the manager, which waits for whole batches and exists once; many workers that yield for long would take each other's time."""
_YIELD_S = 1e-3
_BLOCK_SLICE_S = 0.02
"""Longest single block in seconds: bounds the cost of a missed wake-up and the delay in noticing a dead peer."""


Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""{name: (shape, dtype)} of the arrays in a slab."""


def slab_layout(spec: SimSpec, num_slots: int, num_workers: int, chunk_size: int = 1) -> Shapes:
    """Everything that manager and workers exchange: one row per slot, one word per worker."""
    n = num_slots
    action_shape = (n, spec.action.dim) if chunk_size == 1 else (n, chunk_size, spec.action.dim)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "slot_state": ((-(-n // 8) * 8,), "uint8"),  # padded to whole words, see `Marks`
        "begin": ((n,), "uint8"),
        "begin_seed": ((n,), "int64"),
        "manager_doorbell": ((1,), "uint32"),  # every field starts on a cache line
        "manager_waiting": ((1,), "uint32"),
        # A cache line each, so that workers do not slow each other down.
        **dict.fromkeys(_WORKER_WORDS, ((num_workers, 16), "uint32")),
        "stepping": ((num_workers, 16), "int32"),
        "action": (action_shape, spec.action.dtype),
        "reward": ((n,), "float32"),
        **dict.fromkeys(("terminated", "truncated", "success"), ((n,), "bool")),
        "episode_return": ((n,), "float64"),
        **dict.fromkeys(("episode_length", "episode_seed", "episode_index"), ((n,), "int64")),
        **dict.fromkeys(("episode_success_once", "episode_success_at_end"), ((n,), "bool")),
    }
    if chunk_size > 1:
        shapes |= {
            "chunk_length": ((n,), "int64"),
            "chunk_reward": ((n, chunk_size), "float32"),
            "chunk_success": ((n, chunk_size), "bool"),
            "executed": ((n, chunk_size), "bool"),
            "watched": ((n,), "bool"),
        }
    steps_of: dict[str, tuple[int, ...]] = dict.fromkeys(OBSERVATIONS, ())
    if chunk_size > 1:
        steps_of["inner_observation"] = (chunk_size - 1,)  # memory that is never written is never allocated
    for name, steps in steps_of.items():
        for key, part in spec.tensors.items():
            shapes[f"{name}/{key}"] = ((n, *steps, *part.shape), part.dtype)
        for key, buffer in spec.variables.items():
            shapes |= buffer_fields(f"{name}/{key}", buffer, n * math.prod(steps))
    shapes |= buffer_fields("final_info", INFO_BUFFER, n)
    if isinstance(text := spec.action.part, VariableSpec):
        shapes |= buffer_fields("action", text, n)
    return shapes


def _unnamed_memory() -> int:
    """Descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("embodied_rl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS: an unlinked file
        return os.dup(file.fileno())


class Slab:
    """A mapped block of shared memory with named arrays, each on cache lines of its own; the first one is at its beginning."""

    def __init__(self, shapes: Shapes, fd: int | None = None, what: str = "simulators (fewer sim.num_slots need less)") -> None:
        """`fd`: memory that another process allocated for these shapes; None: allocate it, for `what`. Raises UserError if it is not
        available."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()]
        offsets = list(itertools.accumulate((-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        self.fd = -1 if fd is None else fd
        self.arrays: dict[str, np.ndarray] = {}
        try:
            if fd is None:
                self.fd = _unnamed_memory()
                os.ftruncate(self.fd, offsets[-1])
            memory = mmap.mmap(self.fd, offsets[-1])
        except OSError as error:
            self.close()
            raise UserError(f"{offsets[-1] / 2**20:.0f} MiB of shared memory for {what} are not available: {error}.") from error
        for (name, (shape, dtype)), offset in zip(shapes.items(), offsets, strict=False):
            self.arrays[name] = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)

    def group(self, prefix: str, start: int = 0, stop: int | None = None) -> dict[str, np.ndarray]:
        """Rows [start, stop) of all arrays named ``prefix/key``, by key."""
        return {name.removeprefix(f"{prefix}/"): array[start:stop] for name, array in self.arrays.items() if name.startswith(f"{prefix}/")}

    def close(self) -> None:
        """Drop the arrays and the descriptor; the memory is freed with its last user, since views may still be held."""
        self.arrays = {}
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_fence_lock = threading.Lock()


def _lock_fence() -> None:
    with _fence_lock:
        pass


def _no_fence() -> None:
    pass


fence: Callable[[], None] = _no_fence if platform.machine() in ("x86_64", "AMD64", "i686") else _lock_fence


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_now_ns = time.perf_counter_ns
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True) if _FUTEX_SYSCALL is not None else None


class Marks:
    """Writes one mark to runs of slots in single machine words.

    Copying four or eight bytes at once (a slice assignment, memcpy) may store the same bytes *twice*. A writer that is preempted between
    the two stores finishes after the other side has answered, and undoes the answer: a slot would be stepped twice, or a step that never
    happened would be received. An element of a memoryview is one store.
    """

    def __init__(self, state: np.ndarray, runs: Iterable[range]) -> None:
        """`state`: the slab's "slot_state", whose length is a multiple of 8; `runs`: slots."""
        whole = state.data.cast("B")
        views: dict[int, memoryview] = {8: whole.cast("Q"), 4: whole.cast("I"), 2: whole.cast("H"), 1: whole}
        self.words: list[tuple[memoryview, int, tuple[int, ...]]] = []
        """(memory, index, value for each mark) of every store."""
        for run in runs:
            start = run.start
            while start < run.stop:
                size = next(size for size in (8, 4, 2, 1) if start % size == 0 and start + size <= run.stop)
                values = tuple(int.from_bytes(bytes([mark]) * size, "little") for mark in range(ABORTED + 1))
                self.words.append((views[size], start // size, values))
                start += size

    def write(self, mark: int) -> None:
        for view, index, values in self.words:
            view[index] = values[mark]


class Doorbell:
    """Lets one process wait and any process ring: the waiter spins for some microseconds, yields, then blocks on a futex.

    Without a futex it takes short naps instead.
    """

    def __init__(self, word: np.ndarray, waiting: np.ndarray, yields: int = _YIELDS, *, spins: bool = True) -> None:
        """`word` and `waiting`: uint32 arrays of one element in shared memory; `yields`: how often a waiter yields before it blocks;
        `spins`: whether it spins first. With more processes than cores, spinning would occupy the core of the process that it waits for."""
        self._yields, self._spin_s = yields, _SPIN_S if spins else 0.0
        # Reading a memoryview costs a third of reading an array element, and waiting consists of reads.
        self._word = word.data.cast("B").cast("I")
        self._waiting = waiting.data.cast("B").cast("I")
        self._keep_alive = (word, waiting)
        self._address = ctypes.c_void_p(word.ctypes.data)
        self._syscall = _libc.syscall if _libc is not None else None

    def ring(self) -> None:
        # Several workers ring the manager's doorbell: the clock gives every ring a new value without an atomic increment.
        self._word[0] = _now_ns() & 0xFFFFFFFF
        if self._waiting[0] and self._syscall is not None:
            self._syscall(_FUTEX_SYSCALL, self._address, _FUTEX_WAKE, 1, None, None, 0)

    def wait(self, ready: Callable[[], bool], deadline: float, on_slice: Callable[[], None] | None = None) -> bool:
        """Return True once `ready()` is true, False after `deadline` (time.perf_counter seconds).

        `on_slice` runs about every 20 ms of blocking and may raise (for a dead peer). The data that `ready` reads changes before the
        doorbell rings; until then the waiter reads only the doorbell's word, on a cache line that no other waiter reads.
        """
        clock, word, give_way = time.perf_counter, self._word, os.sched_yield
        seen = word[0]
        fence()
        if ready():
            return True
        spin_until = clock() + self._spin_s
        while clock() < spin_until:
            if word[0] != seen:
                seen = word[0]
                fence()
                if ready():
                    return True
        yield_until = spin_until + _YIELD_S
        for _ in range(self._yields):
            give_way()
            if word[0] != seen:
                seen = word[0]
                fence()
                if ready():
                    return True
            elif clock() > yield_until:  # on a busy machine a yield may last another process's time slice
                break
        return self._block(ready, deadline, on_slice)

    def _block(self, ready: Callable[[], bool], deadline: float, on_slice: Callable[[], None] | None) -> bool:
        self._waiting[0] = 1
        try:
            while True:
                seen = self._word[0]
                fence()
                if ready():
                    return True
                left = deadline - time.perf_counter()
                if left <= 0:
                    return False
                with waiting:
                    self._sleep(seen, min(left, _BLOCK_SLICE_S))
                if on_slice is not None and not ready():
                    on_slice()
        finally:
            self._waiting[0] = 0

    def _sleep(self, seen: int, seconds: float) -> None:
        if self._syscall is None:
            time.sleep(min(seconds, 100e-6))
            return
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(_FUTEX_SYSCALL, self._address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
