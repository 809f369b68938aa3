"""Threads of the CPU's linear algebra, torch's and numpy's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch


@contextmanager
def compute_threads(num_threads: int) -> Iterator[None]:
    """Run the block with this many threads in torch's operations and numpy's matrix products, then as before.

    Both libraries keep their threads spinning for a while after each operation, on cores that simulators need, and wait for
    all of them at its end: with more threads than free cores, an update of a small network took a hundred times as long.
    torch's own setting does not reach numpy, whose wheels bring an OpenBLAS of their own; where numpy has another library,
    only torch is limited.
    """
    functions = _openblas()
    torch_before, blas_before = torch.get_num_threads(), functions[0]() if functions else 0
    torch.set_num_threads(num_threads)
    if functions:
        functions[1](num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(torch_before)
        if functions:
            functions[1](blas_before)


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Reader and setter of the thread count of numpy's own OpenBLAS."""
    folder = Path(np.__file__).resolve().parent
    for path in [*folder.parent.glob("numpy.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")]:
        library = ctypes.CDLL(str(path))
        for prefix, suffix in (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", "")):
            try:
                get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")
                put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}")
            except AttributeError:
                continue
            get.restype, get.argtypes = ctypes.c_int, []
            put.restype, put.argtypes = None, [ctypes.c_int]
            return get, put
    return None
