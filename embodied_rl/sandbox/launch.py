"""The process that becomes a sandbox: it starts the program inside, supervises it, and ends when nothing of it is left.

```
our process ─ the supervisor ─ (in namespaces:  enters them ─ their first process ─) the program ─ what it starts
```
The supervisor is outside: at all levels above limits, the program can neither see nor stop it. If our process ends, the supervisor
notices; if the supervisor ends, the kernel ends the program.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from embodied_rl.sandbox import kernel, landlock, namespaces, seccomp, supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from embodied_rl.sandbox.box import Spec

NOT_STARTED = 97
"""Exit status if the kernel refuses a part of the sandbox."""

_MORE_PROCESSES = 8


def main(spec: Spec) -> str:
    """Run the program. Returns only in the program's process: the source of the Python program to run there."""
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    inside = spec["level"] == "namespaces"
    ready, tell = os.pipe()
    go, let_go = os.pipe()
    me, group = os.getpid(), supervisor.new_group()
    launched = os.fork()
    if not launched:
        os.close(ready)
        os.close(let_go)
        try:
            kernel.end_with_parent(me)
            if group is not None:
                group.enter()
            if inside:
                _enter(spec, tell, go)
            else:
                os.close(go)
                _confine(spec, as_nobody=False)
        except OSError as error:
            os.write(2, f"sandbox: {error}\n".encode())
            os._exit(NOT_STARTED)
        os.close(tell)
        return _program(spec)
    os.close(tell)
    os.close(go)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    if inside and os.read(ready, 1):
        os.write(let_go, b"n" if namespaces.map_users(launched) else b"u")
    tree = supervisor.Tree(launched, hulls=2 if inside else 0, group=group)
    reason, status = supervisor.watch(tree, launched, spec)
    tree.kill()
    if os.getppid() != spec["parent"]:  # the parent would have deleted it
        import subprocess

        subprocess.run(["rm", "-rf", "--", spec["scratch"]], check=False)
    if inside and not reason:
        own = os.read(ready, 8)
        status = int.from_bytes(own, "little") if len(own) == 8 else NOT_STARTED << 8
    _end(spec, reason, status)
    raise AssertionError("it has ended")


def _end(spec: Spec, reason: str, status: int | None) -> None:
    """Report the reason, and end as the program did."""
    if reason not in ("", "stopped"):
        os.write(spec["report"], reason.encode() if spec["report"] != 2 else f"sandbox: stopped: {reason}\n".encode())
    number = signal.SIGKILL if status is None else os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not number:
        assert status is not None, "it ended"
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _enter(spec: Spec, tell: int, go: int) -> None:
    """Enter namespaces and continue in the program's process; two processes stay behind."""
    _die_first()
    namespaces.enter(network=spec["network"] != "none")
    os.write(tell, b"r")
    quiet = os.open(os.devnull, os.O_RDWR)  # before the root changes for all processes of the namespace
    as_nobody = os.read(go, 1) == b"n"
    os.close(go)
    first = os.fork()
    if first:
        os.close(tell)
        _close_streams(quiet)
        os.waitpid(first, 0)
        os._exit(0)
    kernel.end_with_parent()
    namespaces.build_root(spec, namespaces.UID_NOBODY if as_nobody else os.geteuid())
    program = os.fork()
    if program:
        _close_streams(quiet)
        while True:
            number, status = os.waitpid(-1, 0)  # other children are orphans
            if number == program:
                os.write(tell, status.to_bytes(8, "little"))
                os._exit(0)  # ends everything that is left
    os.close(quiet)
    _confine(spec, as_nobody=as_nobody)


def _close_streams(quiet: int) -> None:
    """Close the streams of a waiting process, so that the program's closing of a stream takes effect."""
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)


def _die_first() -> None:
    """Let the kernel kill this process first when memory runs out."""
    try:
        kernel.write("/proc/self/oom_score_adj", "1000")
    except OSError:  # it goes without
        return


def _confine(spec: Spec, *, as_nobody: bool) -> None:
    """Restrict this process, which becomes the program, to its rights."""
    level, abi = spec["level"], spec["landlock_abi"]
    if level != "namespaces":
        _die_first()
    os.setsid()
    os.chdir(spec["cwd"])
    file_size = spec["scratch_mb"] * 2**20
    limits = [(resource.RLIMIT_FSIZE, file_size), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, spec["open_files"])]
    if spec["address_mb"]:
        limits.append((resource.RLIMIT_AS, spec["address_mb"] * 2**20))
    if spec["cpu_s"]:
        limits.append((resource.RLIMIT_CPU, int(spec["cpu_s"]) + 1))
    if level == "namespaces" and kernel.counts_processes_by_namespace():
        # Slightly above the limit, so that the supervisor sees it exceeded and ends the program.
        limits.append((resource.RLIMIT_NPROC, spec["processes"] + _MORE_PROCESSES))
    for name, limit in limits:
        most = resource.getrlimit(name)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(name, (limit, limit))
    _give_up_rights(spec, as_nobody)
    if level == "prlimit":
        return
    ports = spec["ports"] if spec["network"] == "ports" else [] if spec["network"] == "none" else None
    if level == "landlock":
        readable = [*spec["readable"], *spec["shown"]]
        landlock.restrict(abi, readable=readable, writable=[spec["scratch"], *spec["writable"]], devices=spec["devices"], ports=ports)
    elif spec["network"] != "none":
        landlock.restrict(abi, readable=None, writable=[], devices=[], ports=ports)
    seccomp.install(_filter(spec))


def _give_up_rights(spec: Spec, as_nobody: bool) -> None:
    kept = None
    if as_nobody:  # root's files in the shown folders stay readable, and writable if the folder is
        kept = kernel.CAP_DAC_OVERRIDE if spec["writable"] else kernel.CAP_DAC_READ_SEARCH
    kernel.bound_capabilities(kept)
    if as_nobody:
        os.setgroups([])
        os.setresgid(namespaces.UID_NOBODY, namespaces.UID_NOBODY, namespaces.UID_NOBODY)
        os.setresuid(namespaces.UID_NOBODY, namespaces.UID_NOBODY, namespaces.UID_NOBODY)
    kernel.set_capabilities(kept)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)  # no program started from here on gains more rights than this process


def _filter(spec: Spec) -> list[seccomp.Instruction]:
    """Filter of the system calls that the level does not restrict otherwise."""
    inside, network, abi = spec["level"] == "namespaces", spec["network"], spec["landlock_abi"]
    internet = (seccomp.AF_INET, seccomp.AF_INET6)
    only_ports = network == "ports" and abi >= 4
    families: tuple[int, ...] = ()
    if inside and network == "none":
        families = (seccomp.AF_UNIX, *internet, seccomp.AF_NETLINK)  # they lead nowhere
    elif network != "none":
        families = internet if only_ports else (*internet, seccomp.AF_NETLINK)
        if inside and abi >= 6:
            families = (seccomp.AF_UNIX, *families)
    return seccomp.rules(
        families=families,
        streams_only=only_ports,
        our_view=not inside,
        signals=inside or abi >= 6,
        truncation=inside or abi >= 3,
        uncounted=not spec["address_mb"],
    )


def _program(spec: Spec) -> str:
    """Become the program, or return its Python source."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if spec["report"] != 2:
        os.close(spec["report"])
    if spec["words"]:
        try:
            os.execvp(spec["words"][0], spec["words"])
        except OSError as error:
            os.write(2, f"sandbox: '{spec['words'][0]}' cannot be started: {error.strerror}\n".encode())
            os._exit(NOT_STARTED)
    source = b""
    # Not a byte more: the rest is the program's own input.
    while len(source) < spec["code_bytes"] and (part := os.read(0, spec["code_bytes"] - len(source))):
        source += part
    sys.argv[:] = ["program.py"]
    sys.path.pop(0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "embodied_rl"]:
        del sys.modules[name]
    return source.decode("utf-8", "replace")
