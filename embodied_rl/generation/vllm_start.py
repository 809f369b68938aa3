"""What vLLM trips over in a process that has done other things before."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import TokenCache
from embodied_rl.policies.model_folder import first_line


class _WithoutLLVM:
    """Stands for `sys` where vLLM's build for CPUs looks into everything that all modules hold when an engine starts: it breaks on
    llvmlite (numba), whose library answers to every name, ``__dict__`` among them."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] != "llvmlite"}


@contextmanager
def scannable_modules() -> Iterator[None]:
    """Starting an engine within it works after numba was imported, as after the first update of a run."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # other builds and versions do not look
        yield
        return
    looking: Any = dispatcher
    looking.sys = _WithoutLLVM()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that it has looked at
            yield
    finally:
        looking.sys = sys


Call = Callable[..., Any]
"""(name of a method of the engine, arguments …) → what it returns, once it has."""


class Sleeper:
    """Puts an engine to sleep and wakes it.

    On GPUs this frees the memory (vLLM's sleep level 1). Its build for processors keeps it: there sleeping only stops the engine, and
    `frees` is False.
    """

    def __init__(self, call: Call, *, on_processors: bool) -> None:
        self.frees = not on_processors
        self.device = torch.device("cpu" if on_processors else "cuda")
        self.asleep = False
        self._call, self._weights_are_here = call, True
        self._bytes = sum(call("collective_rpc", "embodied_cache_bytes"))

    @property
    def cache_bytes(self) -> int:
        """What keys and values take now, on all workers together."""
        return 0 if self.asleep and self.frees else self._bytes

    def sleep(self) -> int:
        """Sample nothing until `wake`; returns the bytes of keys and values that were freed. They are recomputed afterwards."""
        if self.asleep:
            return 0
        before = self.cache_bytes
        self._call("sleep", level=1, mode="keep")
        self.asleep, self._weights_are_here = True, False
        return before - self.cache_bytes

    def wake_weights(self) -> None:
        """New weights are about to be written over the old ones, which must be there for that."""
        if not self._weights_are_here:
            self._call("wake_up", tags=["weights"])
            self._weights_are_here = True

    def wake(self) -> None:
        """Go on where `sleep` stopped."""
        if self.asleep:
            self._call("wake_up", tags=["kv_cache"] if self._weights_are_here else None)
            self.asleep, self._weights_are_here = False, True


class Sleeps(TokenCache):
    """What a backend whose engine can sleep reports about it."""

    _sleeper: Sleeper

    @property
    def can_free_memory(self) -> bool:
        """Whether `release_memory` gives memory back: on GPUs."""
        return self._sleeper.frees

    @property
    def device(self) -> torch.device:
        """Where the model and its cache lie."""
        return self._sleeper.device

    @property
    def cache_bytes(self) -> int:
        """What keys and values take now."""
        return self._sleeper.cache_bytes


_BUCKET_BYTES = 2**30


def load_in_place(call: Callable[[], object]) -> None:
    """Raises UserError, in one line, when the engine refuses a tensor."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        call()
    except EngineDeadError:
        raise
    except Exception as error:  # an engine in another process reports whatever happened there as a bare Exception
        raise UserError(f"vLLM cannot take the new weights; those it serves may be half replaced: {first_line(error)}") from error


def load_files(tensors: Iterable[tuple[str, Any]], call: Callable[[str], object]) -> None:
    """Call `call` with the path of one file of tensors after another. Raises as `load_in_place` does."""
    with _Exchange() as exchange:
        for path in exchange.files(tensors):
            load_in_place(partial(call, str(path)))


class _Exchange:
    """A folder in shared memory, where there is one, through which tensors reach vLLM's workers."""

    def __enter__(self) -> _Exchange:
        shared = Path("/dev/shm")
        self._folder = Path(tempfile.mkdtemp(prefix="embodied_weights_", dir=shared if os.access(shared, os.W_OK) else None))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def files(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[Path]:
        """A file of about a gibibyte at a time; each is gone when the next one is asked for."""
        bucket: dict[str, Any] = {}
        size = 0
        for name, tensor in tensors:
            whole = tensor.detach().contiguous().cpu()
            bucket[name] = whole
            size += whole.numel() * whole.element_size()
            if size >= _BUCKET_BYTES:
                yield from self._written(bucket)
                bucket, size = {}, 0
        if bucket:
            yield from self._written(bucket)

    def _written(self, bucket: dict[str, Any]) -> Iterator[Path]:
        path = self._folder / "weights.safetensors"
        save_file(bucket, path)
        yield path
        path.unlink()
