"""Freed memory that waits in the process, counted in pages that the system had to clear."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from embodied_rl.learning.devices import keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def minibatch():
    blocks = [c.malloc(8 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 8 * 2**20)
    for block in blocks:
        c.free(block)

def count():
    minibatch()
    minibatch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        minibatch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(count(), keep_freed_memory(), count())
"""


def faults(**variables: str) -> tuple[int, str, int]:
    """Pages that are cleared at first, whether freed memory is kept, and pages that are cleared then."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60
    )
    first, kept, then = done.stdout.split()
    return int(first), kept, int(then)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_are_not_cleared_again() -> None:
    # 5 times 4 blocks of 8 MiB are 40,960 pages of 4 KiB.
    first, kept, then = faults()
    assert first > 20_000
    assert kept == "True"
    assert then < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_users_own_setting_of_malloc_stands() -> None:
    _, kept, then = faults(MALLOC_TRIM_THRESHOLD_="1000")
    assert kept == "False"
    assert then > 20_000
