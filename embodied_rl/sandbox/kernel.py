"""System calls of a sandbox and their numbers. For the launching process, so it imports little."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACE_FLAGS = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x80
)  # and time

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 8, 24, 36, 38, 47
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ARCH = {"x86_64": X86_64, "aarch64": AARCH64}.get(os.uname().machine, 0)
"""Kernel's audit number of this architecture; 0: its system calls are not listed here."""

_COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "openat2": 437, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
    "memfd_secret": 447, "process_mrelease": 448, "fchmodat2": 452, "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip
_X86_64 = {
    "open": 2, "mmap": 9, "fcntl": 72, "truncate": 76, "inotify_add_watch": 254, "openat": 257, "fanotify_mark": 301, "memfd_create": 319,
    "ioctl": 16, "shmget": 29, "socket": 41, "sendto": 44, "sendmsg": 46, "clone": 56, "kill": 62, "semget": 64, "msgget": 68, "chmod": 90,
    "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "syslog": 103, "capset": 126, "rt_sigqueueinfo": 129,
    "utime": 132, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "pivot_root": 155, "chroot": 161, "acct": 163,
    "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200,
    "sched_setaffinity": 203, "tgkill": 234, "utimes": 235, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "ioprio_set": 251, "migrate_pages": 256, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272,
    "move_pages": 279, "utimensat": 280, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "prlimit64": 302, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "sendmmsg": 307, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "sched_setattr": 314, "seccomp": 317, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "fcntl": 25, "inotify_add_watch": 27, "truncate": 45, "openat": 56, "mmap": 222, "fanotify_mark": 263, "memfd_create": 279,
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "ioctl": 29, "ioprio_set": 30,
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "quotactl": 60,
    "utimensat": 88, "acct": 89, "capset": 91, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "syslog": 116,
    "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131,
    "rt_sigqueueinfo": 138, "setpriority": 140, "reboot": 142, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198,
    "sendto": 206, "sendmsg": 211, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225,
    "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "setns": 268, "sendmmsg": 269, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "finit_module": 273, "sched_setattr": 274, "seccomp": 277, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
CALLS = {**_COMMON, **(_X86_64 if ARCH == X86_64 else _AARCH64 if ARCH == AARCH64 else {})}
"""{name: number} on this machine."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def failed(what: str) -> OSError:
    """Error of the last call, with a description of it."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def call(name: str, *arguments: object) -> int:
    """Make a system call by name. Raises OSError if it fails or this machine's calls are unknown."""
    if name not in CALLS:
        raise OSError(38, f"{name}: not known for {os.uname().machine}")
    plain = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]  # ctypes passes bytes as a pointer
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in plain]
    result = int(_libc.syscall(ctypes.c_long(CALLS[name]), *wide))
    if result < 0:
        raise failed(name)
    return result


def prctl(*arguments: int) -> None:
    """Call prctl. Raises OSError."""
    if _libc.prctl(*map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:5])):
        raise failed("prctl")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system. Raises OSError."""
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None):
        raise failed(f"mount {target}")


def bind(source: str, target: str, *, writable: bool = False, devices: bool = False) -> None:
    """Show `source` and what is mounted below it at `target`. Raises OSError."""
    mount(source, target, flags=MS_BIND | MS_REC)
    wanted = MS_NOSUID | (0 if writable else MS_RDONLY) | (0 if devices else MS_NODEV)
    attributes = (ctypes.c_uint64 * 4)(wanted, 0, 0, 0)
    call("mount_setattr", _AT_FDCWD, target, _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


def end_with_parent(parent: int = 0) -> None:
    """Let the kernel kill this process when its parent, the process `parent`, ends. (0: a parent outside this namespace.)"""
    prctl(_PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(137)


def bound_capabilities(kept: int | None = None) -> None:
    """Let nothing that starts from here on have a capability other than `kept`; without effect for a user who has none."""
    for number in range(64):
        if number != kept and _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) and ctypes.get_errno() == 22:
            break  # the kernel has no more of them
    prctl(_PR_SET_KEEPCAPS, 1)


def set_capabilities(kept: int | None = None) -> None:
    """Drop every capability except `kept`, which started programs inherit. Raises OSError."""
    mask = 0 if kept is None else 1 << kept
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", header, (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0))
    if kept is not None:
        prctl(_PR_CAP_AMBIENT, 2, kept)


def counts_processes_by_namespace() -> bool:
    """Whether a process limit counts the processes of a namespace, not all of its user."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


def write(path: str, text: str, flags: int = 0) -> None:
    """Write with one system call, as the kernel's own files require. Raises OSError."""
    file = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        if text:
            os.write(file, text.encode())
    finally:
        os.close(file)
