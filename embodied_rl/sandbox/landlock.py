"""A Landlock ruleset (Linux 5.13 and later): files, ports and processes that a program may reach."""

from __future__ import annotations

import ctypes
import os
import stat

from embodied_rl.sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_CONNECT = 2
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2


def version() -> int:
    """Version of this kernel's Landlock; 0: none. 4 adds ports, 6 signals and abstract sockets."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow rights on a path; a missing path is ignored."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    kernel.call("landlock_add_rule", ruleset, 1, ctypes.byref(_PathRule(rights, place)), 0)
    os.close(place)


def restrict(abi: int, *, readable: list[str] | None, writable: list[str], devices: list[str], ports: list[int] | None) -> None:
    """Restrict this process and its descendants, for good.

    Args:
        abi: the version whose restrictions are used, at most `version()`.
        readable: files and folders that may be read and run; `writable` may also be changed, and `devices` read and written but not
            created; all other files are inaccessible. None: files are not restricted.
        ports: TCP ports that it may connect to, while it may listen on none; None: any.

    Raises OSError: the kernel refuses.
    """
    # 13 rights on files in the first version; later versions added moving and linking, truncation and device controls.
    files = 0 if readable is None else (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    net = 3 if ports is not None and abi >= 4 else 0
    scoped = _ABSTRACT_SOCKETS | _SIGNALS if abi >= 6 else 0
    attributes = _Ruleset(files, net, scoped)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    if not (files or net or scoped):
        return
    ruleset = kernel.call("landlock_create_ruleset", ctypes.byref(attributes), size, 0)
    if files:
        for path in readable or ():
            _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, files)
        for path in devices:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    for port in (ports or ()) if net else ():
        kernel.call("landlock_add_rule", ruleset, 2, ctypes.byref((ctypes.c_uint64 * 2)(_CONNECT, port)), 0)
    kernel.call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
