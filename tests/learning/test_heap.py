"""Freed memory that waits in the process, counted in pages that the system had to clear."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from embodied_rl.learning.devices import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def minibatch():
    blocks = [c.malloc(8 * 2**20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 8 * 2**20)
    for block in blocks:
        c.free(block)

minibatch()
minibatch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    minibatch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **variables: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60
    )
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_are_not_cleared_again() -> None:
    # 5 times 4 blocks of 8 MiB are 40,960 pages of 4 KiB.
    assert faults("drop")[1] > 20_000
    kept, count = faults("keep")
    assert kept == "True"
    assert count < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_users_own_setting_of_malloc_stands() -> None:
    kept, count = faults("keep", MALLOC_TRIM_THRESHOLD_="1000")
    assert kept == "False"
    assert count > 20_000
