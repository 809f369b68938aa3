"""What programs try against the sandbox, whom they try it on, and whether it came to pass; also a command that an ordinary user can run:

    python -m tests.sandbox.attacks [NAME …]          prints {level: {attack: whether it was stopped}} as JSON

It needs the standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from embodied_rl.sandbox.box import LEVELS, Box, Level, ProgramEnd, PythonLimits, failure, run_program


@dataclass(frozen=True)
class Attack:
    """One attack that a program may try."""

    name: str
    label: str
    """Description for the documentation."""
    stopped: tuple[Level, ...]
    """Levels that stop it, without a network."""


_ALL, _KERNEL = LEVELS, LEVELS[:2]
ATTACKS = (
    Attack("home", "reads `~/.ssh` or another file of the user", _KERNEL),
    Attack("others", "reads other users' files", _KERNEL),
    Attack("environ", "reads `/proc/PARENT/environ`", _KERNEL),
    Attack("write", "writes outside its folder", _KERNEL),
    Attack("modes", "changes the mode of a file outside its folder", _KERNEL),
    Attack("connect", "connects to a port, loopback included", _KERNEL),
    Attack("unix", "connects to another program's Unix socket", _KERNEL),
    Attack("signal", "sends a signal to a process outside", _KERNEL),
    Attack("ptrace", "escapes into another process through `ptrace`", _KERNEL),
    Attack("namespace", "makes namespaces in which it is root", _KERNEL),
    Attack("forks", "runs 300 processes", _ALL),
    Attack("bomb", "forks without end", _ALL),
    Attack("memory", "holds 800 MB in eight processes, with a limit of 512", _ALL),
    Attack("unmapped", "holds memory in files without a name", _ALL),
    Attack("unseen", "holds memory that it no longer maps", _KERNEL),
    Attack("sockets", "holds memory in the buffers of sockets", _ALL),
    Attack("processor", "uses more processor time than it has, in several processes", _ALL),
    Attack("time", "does not end", _ALL),
    Attack("disk", "fills the disk with files in its folder", _ALL),
    Attack("deleted", "fills the disk with deleted files that it holds open", _ALL),
    Attack("deep", "hides files below a thousand folders", _ALL),
    Attack("outlive", "leaves a process behind, in its own session", _ALL),
    Attack("orphan", "goes on after our process was killed with SIGKILL", _ALL),
)

LIMITS = PythonLimits(timeout_s=60.0)

DONE = "print('done')"
REACHED = {
    "home": "print(open(HOME + '/.ssh/id_rsa').read())",
    "others": "print(open(OTHERS).read())",
    "environ": "assert b'VICTIM=' in open('/proc/%d/environ' % VICTIM, 'rb').read()",
    "write": "open(OUTSIDE + '/new', 'w').write('x')",
    "modes": "import os; os.chmod(OTHERS, 0o777)",
    "connect": "import socket; socket.create_connection(('127.0.0.1', PORT), 5)",
    "unix": "import socket; socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "signal": "import os; os.kill(VICTIM, 10)",
    "ptrace": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.ptrace(16, VICTIM, 0, 0): raise OSError(ctypes.get_errno(), 'ptrace')",
    "namespace": "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.unshare(0x10020000): raise OSError(ctypes.get_errno(), 'unshare')",
    "unseen": "import mmap; mmap.mmap(-1, 2**20)",  # shared: it lives as long as one page of it is mapped
}
"""What is reached at once, or refused with an OSError."""
USED = {
    "forks": "import os, time\nfor _ in range(300):\n    if not os.fork():\n        time.sleep(100); os._exit(0)\ntime.sleep(2)",
    "bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "import os, time\nfor _ in range(8):\n    if not os.fork():\n        held = bytearray(b'x') * 100 * 2**20\n"
    "        time.sleep(100); os._exit(0)\n"
    "time.sleep(30)",
    "unmapped": "import os, time\nfiles = [os.memfd_create('x') for _ in range(16)]\nfor file in files:\n"
    "    for _ in range(15): os.write(file, bytes(2**20))\ntime.sleep(2)",
    "processor": "import os\nfor _ in range(3): os.fork()\nwhile True: pass",
    "time": "import time\nwhile True: time.sleep(1)",
    "disk": "import time\nfor number in range(40): open(str(number), 'wb').write(bytes(2**20))\ntime.sleep(2)",
    "deleted": "import os, time\nfiles = []\nfor number in range(40):\n    files.append(open('x', 'wb', 0)); os.unlink('x')\n"
    "    files[-1].write(bytes(2**20))\ntime.sleep(2)",
    "sockets": "import os, socket, time\nfor _ in range(30):\n    if not os.fork():\n"
    "        held = [socket.socketpair() for _ in range(110)]; time.sleep(100)\ntime.sleep(30)",
    "deep": "import os, time\nfor _ in range(1100): os.mkdir('a folder'); os.chdir('a folder')\n"
    "for number in range(40): open(str(number), 'wb').write(bytes(2**20))\ntime.sleep(2)",
}
"""What takes more than there is: the program is stopped, or an error of the kernel's ends it."""


@dataclass
class Victim:
    """A user's home, another user's file, a process with a secret in its variables, and servers."""

    folder: Path
    process: subprocess.Popen[bytes]
    servers: list[socket.socket] = field(default_factory=list)

    def names(self) -> str:
        """For the head of a program."""
        tcp, unix = self.servers
        values = {"HOME": str(self.folder / "home"), "OTHERS": str(self.folder / "other" / "letter"), "OUTSIDE": str(self.folder / "open")}
        return "\n".join(f"{name} = {value!r}" for name, value in values.items()) + (
            f"\nVICTIM = {self.process.pid}\nPORT = {tcp.getsockname()[1]}\nSOCKET = {unix.getsockname()!r}\n"
        )


@contextmanager
def made_victim(folder: Path) -> Iterator[Victim]:
    for name in ("home/.ssh", "other", "open"):
        (folder / name).mkdir(parents=True)
    (folder / "home/.ssh/id_rsa").write_text("secret")
    (folder / "other/letter").write_text("secret")
    (folder / "other/letter").chmod(0o644)
    (folder / "open").chmod(0o777)
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "VICTIM": "secret"})
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket"))
        unix.listen()
        yield Victim(folder, process, [tcp, unix])
    process.kill()
    process.wait()


def reach(name: str, level: Level, victim: Victim) -> ProgramEnd:
    """One of `REACHED` on a victim; it prints done where it comes to pass."""
    return run_program(f"{victim.names()}\n{REACHED[name]}\n{DONE}", LIMITS.box(level))


def box_of(name: str, level: Level) -> Box:
    """For one of `USED`."""
    box = PythonLimits(timeout_s=1.0 if name == "time" else 60.0).box(level)
    return replace(box, cpu_s=0.5) if name == "processor" else box  # of all, that is: each of the eight is far below


def tree_is_gone(mark: str) -> bool:
    """Whether no process has `mark` in its command line; looked for during a minute."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]
        if not found:
            return True
        time.sleep(0.05)
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def outlives(level: Level) -> bool:
    """Whether a process of a session of its own goes on behind its program."""
    mark = f"7{os.getpid()}.25"
    # The program waits until the sleeper is another command, which shows that it ran.
    code = (
        "import os, subprocess, sys\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
        f"        os.execvp('sleep', ['sleep', {mark!r}])\n    os._exit(0)\nos.wait()\nprint('left it')"
    )
    assert run_program(code, LIMITS.box(level)).output == "left it\n"
    return not tree_is_gone(mark)


def outlives_us(level: Level, folder: Path) -> bool:
    """Whether a program, or its scratch folder, is left after SIGKILL of the process that ran it. `folder`: for such folders."""
    mark = f"8{os.getpid()}.25"
    code = (
        f"import os\nif not os.fork(): os.setsid(); os.execvp('sleep', ['sleep', {mark!r}])\nprint('begun', flush=True)\nwhile True: pass"
    )
    ours = f"from embodied_rl.sandbox.box import *\nrun_program({code!r}, PythonLimits(timeout_s=600.0).box({level!r}))"
    process = subprocess.Popen([sys.executable, "-c", ours], cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(folder)})
    until = time.monotonic() + 60
    while not any(mark.encode() in _read(path) for path in _sleepers()) and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until, "it ran"
    assert list(folder.glob("sandbox-*")), "it has a scratch folder"
    process.send_signal(signal.SIGKILL)
    process.wait()
    is_left, until = not tree_is_gone(mark), time.monotonic() + 60.0
    while list(folder.glob("sandbox-*")) and time.monotonic() < until:
        time.sleep(0.05)
    return is_left or bool(list(folder.glob("sandbox-*")))


def _sleepers() -> list[Path]:
    """Command lines of what is no Python."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path).startswith(b"sleep")]


def main() -> None:
    wanted = sys.argv[1:] or [attack.name for attack in ATTACKS]
    stopped: dict[str, dict[str, bool]] = {}
    for level in LEVELS:
        if failure(level):
            continue
        with tempfile.TemporaryDirectory() as folder, made_victim(Path(folder, "victim")) as victim:
            tries: dict[str, Callable[[], bool]] = {"outlive": partial(outlives, level)}
            tries["orphan"] = partial(outlives_us, level, Path(folder))
            tries |= {name: partial(_printed_done, partial(reach, name, level, victim)) for name in REACHED}
            tries |= {name: partial(_printed_done, partial(run_program, f"{USED[name]}\n{DONE}", box_of(name, level))) for name in USED}
            stopped[level] = {name: not tries[name]() for name in wanted}
    print(json.dumps(stopped))


def _printed_done(run: Callable[[], ProgramEnd]) -> bool:
    return run().output.endswith("done\n")


if __name__ == "__main__":
    main()
