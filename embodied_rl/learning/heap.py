"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names of what `mallopt` sets (malloc.h)."""
LARGEST_BLOCK = 32 * 2**20
"""Bytes of the largest block that glibc can keep on its heap; what is larger has its own pages."""
KEPT = 2**30
"""Bytes at the heap's end that are not given back."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Have freed memory wait in this process for the next allocation; whether it will.

    A convolution's activations are blocks of megabytes that live for a part of one minibatch. glibc gives them back to the system when
    they are freed and asks for them again at once, and the system clears every page of them anew: at 48 x 48 pixels that was 13 to 38%
    of an update's processor time. No number changes. The user's own settings of malloc stand, and other C libraries are left as they are.
    """
    if any(name in os.environ for name in _OF_THE_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
