"""A seccomp filter of a sandboxed program's system calls, in the kernel's packet-filter instructions."""

from __future__ import annotations

import ctypes

from embodied_rl.sandbox import kernel
from embodied_rl.sandbox.kernel import CALLS

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _IPPROTO_TCP, _MSG_FASTOPEN = 1, 6, 0x20000000

_DENIED = [
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd",
    "perf_event_open", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "move_mount", "fsopen",
    "fsconfig", "fsmount", "fspick", "mount_setattr", "open_by_handle_at", "name_to_handle_at", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "bpf", "userfaultfd", "keyctl", "add_key", "request_key", "memfd_secret", "swapon", "swapoff", "reboot",
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "quotactl", "acct", "syslog",
]  # fmt: skip
"""Calls denied by every filter: other processes' memory, other views of the files, ways around this filter, and administration."""
_DENIED_IN_OUR_VIEW = [
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat", "utimensat",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "shmget",
    "semget", "msgget", "mq_open", "inotify_add_watch", "fanotify_mark",
]  # fmt: skip
"""Calls denied if the program sees our files and message queues, because Landlock does not check them."""
_UNCOUNTED = ["shmget", "semget", "msgget"]
"""Calls denied if memory that no process maps must not exist."""
_SIGNALS = ["kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"]
_OWN_PROCESS_ONLY: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "migrate_pages",
                     "move_pages"), (0,)),
    "setpriority": (0, 0), "ioprio_set": (1, 0),
}  # fmt: skip
"""{call: its first arguments}: process 0 is the caller; the last two would also take a whole user's processes."""

_SET_OWNER = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}
"""Commands (F_SETOWN, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP) that let a file send signals to any process."""
_TYPING = (0x5412, 0x541C)
"""Commands of ioctl that type keys into the terminal that we were started from."""
_O_TRUNC = 0x200

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38

Instruction = tuple[int, int, int, int]


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index)


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | error)


def _when(name: str, body: list[Instruction]) -> list[Instruction]:
    """`body` for one call; it must end in a return."""
    return [(_EQUAL, 0, len(body), CALLS[name]), *body] if name in CALLS else []


def _sockets(families: tuple[int, ...], streams_only: bool) -> list[Instruction]:
    """Body for `socket`: allows these families, and only TCP for the internet's."""
    body: list[Instruction] = [_argument(0)]
    for family in families:
        inside: list[Instruction] = [(_RETURN, 0, 0, _ALLOW)]
        if streams_only and family in (AF_INET, AF_INET6):
            # Landlock checks ports of TCP itself only: not of MPTCP, say, which has streams too.
            protocol = [_argument(2), (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, _IPPROTO_TCP), _refuse(_EACCES)]
            inside = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _SOCK_STREAM), _refuse(_EACCES), *protocol, *inside]
        body += [(_EQUAL, 0, len(inside), family), *inside]
    return [*body, _refuse(_EACCES)]


def _unless(index: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    """Body: refuses these values of the masked argument, and allows others."""
    equal = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [_argument(index), (_AND, 0, 0, mask), *equal, (_RETURN, 0, 0, _ALLOW), _refuse(_EPERM)]


def rules(
    *, families: tuple[int, ...], streams_only: bool, our_view: bool, signals: bool, truncation: bool, uncounted: bool
) -> list[Instruction]:
    """Instructions of the filter.

    Args:
        streams_only: allow only TCP of the internet's families.
        our_view: the program sees our files and processes (there are no namespaces between).
        signals: allow sending signals, because something else confines them.
        truncation: allow emptying files, because something else confines it.
        uncounted: allow memory that outlives its mapping, in files without a name.
    """
    found: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, kernel.ARCH), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if kernel.ARCH == kernel.X86_64:  # x32 calls have other numbers
        found += [(_AT_LEAST, 0, 1, 0x40000000), _refuse(_ENOSYS)]
    denied = [*_DENIED, *(_DENIED_IN_OUR_VIEW if our_view else []), *([] if signals else _SIGNALS)]
    denied += [*([] if truncation else ["truncate"]), *([] if uncounted else _UNCOUNTED)]
    for name in denied:
        found += _when(name, [_refuse(_EPERM)])
    if not uncounted:
        found += _when("memfd_create", [_refuse(_ENOSYS)])
        found += _when("mmap", _unless(3, (0x21, 0x23), 0x2F))  # shared and of no file
    if not truncation:  # of a file that is opened for reading or for neither; Landlock checks the other ways of opening
        emptying = (_O_TRUNC, _O_TRUNC | 3)
        found += _when("openat2", [_refuse(_ENOSYS)])
        found += _when("open", _unless(1, emptying, _O_TRUNC | 3)) + _when("openat", _unless(2, emptying, _O_TRUNC | 3))
    # Its flags are in memory, which no filter can read; the C library falls back to `clone`.
    found += _when("clone3", [_refuse(_ENOSYS)])
    namespaces = kernel.NAMESPACE_FLAGS & ~0x80  # in `clone` that bit belongs to the signal at the child's end
    found += _when("clone", [_argument(0), (_ANY_BIT, 0, 1, namespaces), _refuse(_EPERM), (_RETURN, 0, 0, _ALLOW)])
    found += _when("ioctl", _unless(1, _TYPING if signals else (*_TYPING, *_SET_OWNER["ioctl"])))
    found += [] if signals else _when("fcntl", _unless(1, _SET_OWNER["fcntl"]))
    found += _when("socket", _sockets(families, streams_only))
    if streams_only:  # sending with this flag connects too, and Landlock does not see it
        for name, index in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            found += _when(name, [_argument(index), (_ANY_BIT, 0, 1, _MSG_FASTOPEN), _refuse(_EACCES), (_RETURN, 0, 0, _ALLOW)])
    for name, values in _OWN_PROCESS_ONLY.items() if our_view else ():
        same = [one for index, value in enumerate(values) for one in (_argument(index), (_EQUAL, 1, 0, value), _refuse(_EPERM))]
        found += _when(name, [*same, (_RETURN, 0, 0, _ALLOW)])
    return [*found, (_RETURN, 0, 0, _ALLOW)]


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(filter_rules: list[Instruction]) -> None:
    """Apply the rules to this process and its descendants, for good. Raises OSError."""
    array = (_Instruction * len(filter_rules))(*(_Instruction(*rule) for rule in filter_rules))
    program = _Program(len(filter_rules), ctypes.cast(array, ctypes.c_void_p).value)
    kernel.call("seccomp", 1, 0, ctypes.byref(program))
