"""The kernel's memory policy of the calling thread: set_mempolicy(2) and get_mempolicy(2), through libnuma or directly.

libnuma's functions of these names are the bare system calls. Where the library is not installed, this module makes the calls by
number; where neither is possible, or a container forbids them, the functions return ``unavailable: `` and the reason.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, Literal

from embodied_rl.sim.topology import format_list

_MODES = {0: "default", 1: "preferred", 2: "bind", 3: "interleave", 4: "local", 5: "preferred", 6: "weighted interleave"}
"""MPOL_* of <linux/mempolicy.h>; 5 is MPOL_PREFERRED_MANY, which is preferred with several nodes."""
_PREFERRED, _BIND, _PREFERRED_MANY = 1, 2, 5
_MODE_FLAGS = 0b111 << 13
"""MPOL_F_NUMA_BALANCING, MPOL_F_RELATIVE_NODES, MPOL_F_STATIC_NODES: ORed into the mode."""
_CALL_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236), "riscv64": (237, 236)}
"""{machine: numbers of set_mempolicy and get_mempolicy}."""
_MASK_BITS = 1024
"""Nodes a mask has room for; the kernel refuses masks smaller than its own number of possible nodes (at most 1024)."""
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

MemoryMode = Literal["preferred", "bind"]


def set_memory_policy(nodes: Sequence[int], mode: MemoryMode = "preferred", library: str = "libnuma.so.1") -> str:
    """Take this thread's new memory from `nodes`, and return the policy that the kernel reports afterwards.

    Memory that is in use already stays where it is; threads and processes started afterwards inherit the policy.

    Args:
        nodes: NUMA nodes, all below 1024; empty: report the policy and do not change it.
        mode: "preferred" falls back to other nodes when these are full, where "bind" kills the process.
    Returns:
        ``default``, ``preferred:0``, ``bind:0-1``, …, or ``unavailable: `` and the reason. Never raises for lack of permission.
    """
    calls = _system_calls(library)
    if isinstance(calls, str):
        return f"unavailable: {calls}"
    set_policy, get_policy = calls
    if nodes:
        number = _BIND if mode == "bind" else _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY
        mask = _mask(nodes)
        # The kernel subtracts one from the number of bits it is given.
        if set_policy(ctypes.c_int(number), mask, ctypes.c_ulong(_MASK_BITS + 1)) != 0:
            return _refusal("set_mempolicy", f"{mode}:{format_list(set(nodes))}")
    return _read_back(get_policy)


def memory_policy(library: str = "libnuma.so.1") -> str:
    """This thread's memory policy, in the words of `set_memory_policy`."""
    return set_memory_policy((), library=library)


def _read_back(get_policy: Callable[..., int]) -> str:
    mode, mask = ctypes.c_int(), _mask(())
    if get_policy(ctypes.byref(mode), mask, ctypes.c_ulong(_MASK_BITS + 1), None, ctypes.c_ulong(0)) != 0:
        return _refusal("get_mempolicy", "")
    name = _MODES.get(mode.value & ~_MODE_FLAGS, f"mode {mode.value}")
    nodes = [word * _WORD_BITS + bit for word, value in enumerate(mask) for bit in range(_WORD_BITS) if value >> bit & 1]
    return f"{name}:{format_list(nodes)}" if nodes else name


def _refusal(call: str, wanted: str) -> str:
    code = ctypes.get_errno()
    reason = {
        errno.EPERM: "not permitted here (containers need the capability SYS_NICE)",
        errno.ENOSYS: "this kernel has no NUMA support",
        errno.EINVAL: "the kernel refuses these nodes or this mode",
    }.get(code, os.strerror(code))
    return f"unavailable: {' '.join(filter(None, [call, wanted]))}: {reason}"


def _mask(nodes: Sequence[int]) -> Any:
    """An array of unsigned longs with one bit per node."""
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return mask


def _system_calls(library: str) -> tuple[Callable[..., int], Callable[..., int]] | str:
    """(set_mempolicy, get_mempolicy), or why there are none."""
    try:
        numa = ctypes.CDLL(library, use_errno=True)
        return numa.set_mempolicy, numa.get_mempolicy
    except (OSError, AttributeError):
        pass
    numbers = _CALL_NUMBERS.get(platform.machine()) if platform.system() == "Linux" and _WORD_BITS == 64 else None
    if numbers is None:
        return f"libnuma is not installed, and {platform.system()} on {platform.machine()} has no number for its call here"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def by_number(number: int) -> Callable[..., int]:
        return lambda first, *rest: int(syscall(ctypes.c_long(number), first, *rest))

    return by_number(numbers[0]), by_number(numbers[1])
