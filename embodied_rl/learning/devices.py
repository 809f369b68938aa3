"""The device that a run computes on, and the CPU threads of torch's and numpy's linear algebra."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from embodied_rl.config import HybridConfig
from embodied_rl.errors import UserError, shown
from embodied_rl.policies.base import TrainedModule


def resolve_device(device: str | torch.device) -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU. Raises UserError for a device that is not available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={shown(device)} is not a device: write cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UserError(f"device={device}: torch finds {count} GPUs here (python -m embodied_rl.doctor shows why). Use device=cpu or auto.")
    return found


VERY_WIDE_LAYER = 512
"""Width from which single matrix products are worth more than one thread."""


def training_device(hybrid: HybridConfig, policy: TrainedModule, widest: int, gpu: int | None = None) -> torch.device:
    """Device to train a policy on whose widest layer has `widest` outputs; a GPU is the one the policy is on, or `gpu`.
    `hybrid.device=auto` leaves the GPU free if a small policy's update would mostly wait for kernel calls: an MLP of (64, 64) takes 78 ms
    there and 38 ms on a processor, one of (1024, 1024) 95 and 451 (benchmarks/gpu_small.py)."""
    if hybrid.device == "auto" and hybrid.sharding is None and policy.work == "vectors" and widest < VERY_WIDE_LAYER:
        return torch.device("cpu")
    device, present = resolve_device(hybrid.device), next(policy.parameters()).device
    if device.type == present.type:
        return present
    return device if device.type == "cpu" or gpu is None else torch.device("cuda", gpu)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make a GPU add gradients in the same order in every run, so that the same seed gives the same weights, as on a CPU.

    Otherwise the gradients of convolutions and of attention are sums in the order in which blocks finish. Operations that have no fixed
    order in torch stay as they are; cuDNN's attention, one of them, is not used here.
    """
    if device.type != "cuda":
        yield
        return
    # Filling would write every new tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    attend, with_cudnn = functional.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    functional.scaled_dot_product_attention = functools.partial(_attend_repeatably, attend)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* does not have a deterministic implementation")
            warnings.filterwarnings("ignore", message="Deterministic behavior was enabled with")
            yield
    finally:
        functional.scaled_dot_product_attention = attend
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _attend_repeatably(attend: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """Attention whose gradient is computed in strict mode: with warnings only, torch computes it in any order."""
    found = attend(*arguments, **options)
    node = found.grad_fn
    while node is not None and node.name().startswith("Slice"):  # heads whose size was padded
        node = node.next_functions[0][0]
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_prehook(lambda gradients: torch.use_deterministic_algorithms(True))
        node.register_hook(lambda inputs, gradients: torch.use_deterministic_algorithms(True, warn_only=True))
    return found


def num_cores() -> int:
    """Number of cores that this process may run on; all cores if the system cannot tell (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def compute_threads(num_threads: int) -> Iterator[None]:
    """Run the block with this many threads in torch's operations and numpy's matrix products, then restore the old numbers.

    Both libraries keep their threads spinning for a while after each operation, on cores that simulators need, and wait for all of them at
    its end: with more threads than free cores, an update of a small network took a hundred times as long. torch's own setting does not
    reach numpy, whose wheels bring their own OpenBLAS. If numpy uses another library, only torch is limited.
    """
    before = set_compute_threads(num_threads, num_threads)
    try:
        yield
    finally:
        set_compute_threads(*before)


def set_compute_threads(of_torch: int, of_numpy: int) -> tuple[int, int]:
    """Set the threads as `compute_threads` does, for good; return the old numbers."""
    functions = _openblas()
    before = torch.get_num_threads(), functions[0]() if functions else 0
    torch.set_num_threads(of_torch)
    if functions:
        functions[1](of_numpy)
    return before


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Reader and setter of the thread count of numpy's own OpenBLAS."""
    folder = Path(np.__file__).resolve().parent
    for path in [*folder.parent.glob("numpy.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")]:
        library = ctypes.CDLL(str(path))
        for prefix, suffix in (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", "")):
            try:
                get = library[f"{prefix}openblas_get_num_threads{suffix}"]
                put = library[f"{prefix}openblas_set_num_threads{suffix}"]
            except AttributeError:
                continue
            get.restype, get.argtypes = ctypes.c_int, []
            put.restype, put.argtypes = None, [ctypes.c_int]
            return get, put
    return None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names of the options that `mallopt` sets (malloc.h)."""
LARGEST_BLOCK = 32 * 2**20
"""Bytes of the largest block that glibc can keep on its heap; larger blocks get their own pages."""
KEPT = 2**30
"""Free bytes at the heap's end that glibc keeps."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Keep freed memory in this process for the next allocation; return whether that is possible.

    A convolution's activations are blocks of megabytes that live for a part of one minibatch. glibc returns them to the system when
    they are freed and requests them again at once, and the system clears every page anew: at 48 x 48 pixels that was 13 to 38% of an
    update's processor time. No result changes. The user's own settings of malloc win, and other C libraries are left unchanged.
    """
    if any(name in os.environ for name in _OF_THE_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
