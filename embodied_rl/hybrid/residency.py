"""Memory of the device: an account of it, and moves to and from the host between the turns of generation and training.

```
                 parameters*  gradients  optimizer  key-value cache  simulators
 generation        out          out        out          in              in
 training          in           in         in           out             out          * of a trained copy (sharding)
```
Only registered objects move. Tensors move by storage, with every view, tied weight and sharded part, and return to the same place bit for
bit. On a GPU the host side is pinned and copies run on a separate stream. On a CPU, "out" is a store beside the tensors, whose own
memory is freed: a caller must not read a tensor that is out, as on a GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from embodied_rl.learning.fsdp import local_part

Kind = Literal["parameters", "gradients", "optimizer", "kv_cache", "simulators"]
MemoryUsage = dict[str, dict[str, int]]
"""{kind: {place: bytes}}; places are devices, and ``host`` for what was moved out."""

WANTED: dict[str, frozenset[str]] = {
    "generation": frozenset({"kv_cache", "simulators"}),
    "training": frozenset({"parameters", "gradients", "optimizer"}),
}
"""Kinds that a turn needs; all other registered kinds are out during it."""
HOST = "host"


class Resident(Protocol):
    """An object with memory that can be moved off the device."""

    def num_bytes(self) -> dict[str, int]:
        """{place: bytes} at present."""

    def offload(self) -> int:
        """Move it out; return the bytes moved, without those only freed. Does nothing if it is out."""

    def onload(self) -> int:
        """Bring it back; return the bytes moved."""


class Residency:
    """All objects that move between the turns."""

    def __init__(self) -> None:
        self._residents: dict[str, list[Resident]] = {}
        self._out: set[str] = set()
        self._moved_bytes, self._moved_s = 0, 0.0

    def register(self, kind: Kind, resident: Resident) -> None:
        """Move `resident` out during turns that do not need its kind."""
        self._residents.setdefault(kind, []).append(resident)

    @property
    def has_out(self) -> bool:
        """Whether anything is out."""
        return bool(self._out)

    def begin(self, turn: str) -> None:
        """Move out what the turn does not need, then bring in what it needs. Raises what a resident raises."""
        wanted = WANTED[turn]
        for kind in self._residents:
            if kind not in wanted and kind not in self._out:
                self._out.add(kind)
                self._move([resident.offload for resident in self._residents[kind]])
        for kind in sorted(self._out & wanted):
            self.onload(kind)

    def onload(self, kind: str) -> None:
        """Bring one kind back, if it is out."""
        if kind in self._out:
            self._move([resident.onload for resident in self._residents[kind]])
            self._out.discard(kind)

    def onload_all(self, *, but: tuple[str, ...] = ()) -> None:
        """Bring everything back, except the kinds in `but`: before a checkpoint is written, or at the end."""
        for kind in sorted(self._out.difference(but)):
            self.onload(kind)

    def memory_usage(self) -> MemoryUsage:
        """Exact bytes of every registered kind, by place."""
        found: dict[str, Counter[str]] = {kind: Counter() for kind in self._residents}
        for kind, residents in self._residents.items():
            for resident in residents:
                found[kind].update(resident.num_bytes())
        return {kind: dict(places) for kind, places in found.items()}

    def metrics(self) -> dict[str, float]:
        """Memory in use, bytes moved since the last call, and the time that this process waited for the moves."""
        if not self._residents:
            return {}
        figures = {f"residency/{kind}_{place}_bytes": float(n) for kind, row in self.memory_usage().items() for place, n in row.items()}
        figures |= {"residency/moved_bytes": float(self._moved_bytes), "residency/moved_s": self._moved_s}
        self._moved_bytes, self._moved_s = 0, 0.0
        return figures

    def _move(self, moves: Iterable[Callable[[], int]]) -> None:
        started = time.perf_counter()
        self._moved_bytes += sum(move() for move in moves)
        self._moved_s += time.perf_counter() - started


class Tensors(Resident):
    """Tensors that move to the host and back."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` lists them at each call, because optimizer state, for example, only exists after the first step."""
        self._tensors = tensors
        self._aside: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._pinned: dict[int, Tensor] = {}
        """{bytes: host buffers for reuse}: pinning memory costs more than copying it."""
        self._stream: torch.cuda.Stream | None = None

    def num_bytes(self) -> dict[str, int]:
        return {HOST: sum(host.numel() for _, host in self._aside)} | _bytes_of(self._tensors())

    @torch.no_grad()
    def offload(self) -> int:
        if self._aside:
            return 0
        storages = [storage for storage in _storages(self._tensors()) if storage.nbytes()]
        with self._copying(storages):
            for number, storage in enumerate(storages):
                host = self._host_buffer(number, storage)
                host.copy_(_as_bytes(storage), non_blocking=True)
                self._aside.append((storage, host))
        if self._stream is not None:
            self._stream.synchronize()  # a storage may be freed only after it is copied
        for storage, _ in self._aside:
            storage.resize_(0)
        return sum(host.numel() for _, host in self._aside)

    @torch.no_grad()
    def onload(self) -> int:
        """See `Resident.onload`. On a GPU it returns while copies still run; later kernels wait for them."""
        storages = [storage for storage, _ in self._aside]
        for storage, host in self._aside:
            storage.resize_(host.numel())
        with self._copying(storages):
            for storage, host in self._aside:
                _as_bytes(storage).copy_(host, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        moved = sum(host.numel() for _, host in self._aside)
        self._aside = []
        return moved

    def _copying(self, storages: list[torch.UntypedStorage]) -> Any:
        """The side stream of the storages' GPU; does nothing on a CPU."""
        device = next((storage.device for storage in storages if storage.device.type == "cuda"), None)
        if device is None:
            return torch.no_grad()
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _host_buffer(self, number: int, storage: torch.UntypedStorage) -> Tensor:
        if storage.device.type != "cuda":
            return torch.empty(storage.nbytes(), dtype=torch.uint8)
        kept = self._pinned.get(number)
        if kept is None or kept.numel() != storage.nbytes():
            kept = self._pinned[number] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return kept


class Gradients(Resident):
    """Gradients, which are freed because no turn needs those of another."""

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters

    def num_bytes(self) -> dict[str, int]:
        return _bytes_of(parameter.grad for parameter in self._parameters() if parameter.grad is not None)

    def offload(self) -> int:
        for parameter in self._parameters():
            parameter.grad = None
        return 0

    def onload(self) -> int:
        """Nothing to bring back: the next backward pass makes new ones."""
        return 0


class Hooks(Resident):
    """Memory that given functions free: simulators (`EnvManager.offload` and `onload`), a generator's cache."""

    def __init__(
        self, offload: Callable[[], int], onload: Callable[[], Any], num_bytes: Callable[[], dict[str, int]] | None = None
    ) -> None:
        """
        Args:
            offload: returns the bytes that it keeps on the host instead.
            num_bytes: {place: bytes} at present; None: only what is kept on the host is known.
        """
        self._offload, self._onload, self._num_bytes = offload, onload, num_bytes
        self._kept: int | None = None

    def num_bytes(self) -> dict[str, int]:
        return {HOST: self._kept or 0} | ({} if self._num_bytes is None else self._num_bytes())

    def offload(self) -> int:
        """See `Resident.offload`; returns the bytes kept on the host."""
        if self._kept is not None:
            return 0
        self._kept = int(self._offload())
        return self._kept

    def onload(self) -> int:
        if self._kept is None:
            return 0
        self._onload()
        kept, self._kept = self._kept, None
        return kept


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, because views and tied weights share theirs."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local_part(tensor).detach().untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def _bytes_of(tensors: Iterable[Tensor]) -> dict[str, int]:
    """{device: bytes}"""
    sizes: Counter[str] = Counter()
    for storage in _storages(tensors):
        sizes[str(storage.device)] += storage.nbytes()
    return dict(sizes)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
