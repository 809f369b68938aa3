"""A program's own root folder, processes and network, from the kernel's namespaces without any installed helper."""

from __future__ import annotations

import os

from embodied_rl.sandbox import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from embodied_rl.sandbox.box import Spec

UID_NOBODY = 65534
"""User as which programs of root run."""

_OLD = "/.old"
_RANDOM = ("/dev/random", "/dev/urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_ROOT_LIMIT = "size=4m,nr_inodes=8192,mode=755"
_MAX_FILES = 16384
"""Most files in the scratch folder: each takes kernel memory."""


def enter(*, network: bool) -> None:
    """Enter new namespaces. Raises OSError if the kernel grants none. `network`: keep the present network."""
    ours = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID | kernel.CLONE_NEWCGROUP
    kernel.call("unshare", kernel.CLONE_NEWUSER | ours | (0 if network else kernel.CLONE_NEWNET))


def map_users(process: int) -> bool:
    """Map the users of a process's new namespace. Returns whether the unprivileged user is mapped too, as for root."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        try:
            for name in ("uid_map", "gid_map"):
                kernel.write(f"/proc/{process}/{name}", f"0 0 1\n{UID_NOBODY} {UID_NOBODY} 1\n")
            return True
        except OSError:  # in a container without that user
            pass
    kernel.write(f"/proc/{process}/setgroups", "deny")
    kernel.write(f"/proc/{process}/uid_map", f"{user} {user} 1\n")
    kernel.write(f"/proc/{process}/gid_map", f"{group} {group} 1\n")
    return False


def build_root(spec: Spec, owner: int) -> None:
    """Replace the file system by one with only what the program may see. For the first process of the namespaces.
    `owner`: the user who owns the scratch folder. Raises OSError: the kernel refuses a mount."""
    os.umask(0o022)
    temp, scratch = spec["temp"], spec["scratch"]
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", temp, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _ROOT_LIMIT)
    os.mkdir(temp + _OLD)
    kernel.call("pivot_root", temp, temp + _OLD)
    os.chdir("/")
    os.makedirs(temp, exist_ok=True)
    limit = f"size={spec['scratch_mb']}m,nr_inodes={_MAX_FILES},mode=1777"
    kernel.mount("tmpfs", temp, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, limit)
    for folder, mode in ((scratch, 0o700), (temp + "/.shm", 0o1777)):
        os.mkdir(folder)
        os.chmod(folder, mode)
    if owner != os.geteuid():
        os.chown(scratch, owner, owner)
    _make_devices(temp + "/.shm", spec["devices"])
    os.mkdir("/proc")
    try:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
        kernel.mount("proc", "/proc", "proc", flags)
    except OSError:  # if parts of ours are hidden, as in containers, there is none
        pass
    _show_all(spec["readable"], writable=False)
    _show_all(spec["writable"], writable=True)
    if not os.path.lexists("/etc/passwd"):
        os.makedirs("/etc", exist_ok=True)
        kernel.write("/etc/passwd", f"program:x:{owner}:{owner}::{scratch}:/bin/sh\n", os.O_CREAT)
        kernel.write("/etc/group", f"program:x:{owner}:\n", os.O_CREAT)
    kernel.call("umount2", _OLD, kernel.MNT_DETACH)
    os.rmdir(_OLD)
    closed = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", flags=closed)


def _make_devices(shared_memory: str, devices: list[str]) -> None:
    os.mkdir("/dev")
    for path in (*devices, *_RANDOM):
        kernel.write(path, "", os.O_CREAT)
        kernel.bind(_OLD + path, path, writable=True, devices=True)
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/shm")
    kernel.bind(shared_memory, "/dev/shm", writable=True)


def _show_all(paths: list[str], *, writable: bool) -> None:
    """Show paths at their own places; a path over links appears under both names. Missing paths are skipped."""
    places = {path: _real(path) for path in paths}
    shown: list[str] = []
    for real in sorted({place for place in places.values() if place}):
        if any(real == other or real.startswith(other + "/") for other in shown):
            continue
        shown.append(real)
        if os.path.isdir(_OLD + real):
            os.makedirs(real, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(real), exist_ok=True)
            kernel.write(real, "", os.O_CREAT)
        kernel.bind(_OLD + real, real, writable=writable, devices=writable)
    for path, real in places.items():
        if real and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(real, path)


def _real(path: str) -> str:
    """Target of a path in the old root, as a path of that root; empty: none."""
    parts, real = [part for part in reversed(path.split("/")) if part], ""
    for _ in range(256):
        if not parts:
            return real
        part = parts.pop()
        if part == "..":
            real = real.rpartition("/")[0]
        elif part != ".":
            place = f"{real}/{part}"
            if not os.path.lexists(_OLD + place):
                return ""
            if os.path.islink(_OLD + place):
                target = os.readlink(_OLD + place)
                real = "" if target.startswith("/") else real
                parts += [one for one in reversed(target.split("/")) if one]
            else:
                real = place
    return ""
