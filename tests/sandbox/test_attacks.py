"""Programs that try what the sandbox is to stop, at every level that this machine has: the table in docs/sandbox.md, cell by cell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from embodied_rl.sandbox import landlock
from embodied_rl.sandbox.box import Box, Level
from embodied_rl.sandbox.levels import ATTACKS, LEVELS, Attack, failure, protection_table
from embodied_rl.sandbox.python import ProgramEnd, PythonLimits, run_boxed, run_program

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


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    for name in ("home/.ssh", "other", "open"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home/.ssh/id_rsa").write_text("secret")
    (tmp_path / "other/letter").write_text("secret")
    (tmp_path / "other/letter").chmod(0o644)
    (tmp_path / "open").chmod(0o777)
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, "VICTIM": "secret"})
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        yield Victim(tmp_path, process, [tcp, unix])
    process.kill()
    process.wait()


def need(level: Level) -> None:
    if failure(level):
        pytest.skip(f"{level}: {failure(level)}")


def tree_is_gone(mark: str) -> bool:
    """Whether no process has `mark` in its command line; looked for during five seconds."""
    until = time.monotonic() + 5.0
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


def test_every_row_of_the_table_has_a_program() -> None:
    assert {attack.name for attack in ATTACKS} == {*REACHED, *USED, "outlive", "orphan"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.name in REACHED], ids=lambda attack: attack.name)
def test_what_a_program_reaches(attack: Attack, level: Level, victim: Victim) -> None:
    need(level)
    ended = run_program(f"{victim.names()}\n{REACHED[attack.name]}\n{DONE}", LIMITS, level)
    reached = ended.output.endswith("done\n")
    if level in attack.stopped:
        assert not reached, ended
        assert "Error" in ended.output.splitlines()[-1], "the kernel refused it, and nothing else went wrong"
    elif not reached and attack.name in ("ptrace", "namespace", "environ"):
        pytest.skip(f"this machine stops it by itself: {ended.output.splitlines()[-1]}")
    else:
        assert reached, ended


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", USED)
def test_what_a_program_uses(name: str, level: Level) -> None:
    need(level)
    box = PythonLimits(timeout_s=1.0 if name == "time" else 60.0).box(level, network=False)
    if name == "processor":  # of all, that is: each of the eight is far below
        box = replace(box, cpu_s=1.5)
    began = time.monotonic()
    ended = run_boxed(f"{USED[name]}\n{DONE}", box)
    assert "done" not in ended.output, ended
    assert time.monotonic() - began < 50
    if name == "time":
        assert ended.timed_out
    elif name in ("processor", "memory", "unmapped"):
        assert {"processor": "processor time", "memory": "of memory", "unmapped": "it wrote"}[name] in ended.stopped, ended
    else:
        assert ended.stopped or "Error" in ended.output, ended


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outlives_its_program(level: Level) -> None:
    need(level)
    mark = f"7{os.getpid()}.25"
    # The program waits until the sleeper is another command, which shows that it ran.
    code = (
        "import os, subprocess, sys\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
        f"        os.execvp('sleep', ['sleep', {mark!r}])\n    os._exit(0)\nos.wait()\nprint('left it')"
    )
    assert run_program(code, LIMITS, level).output == "left it\n"
    assert tree_is_gone(mark)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outlives_us(level: Level, tmp_path: Path) -> None:
    need(level)
    mark = f"8{os.getpid()}.25"
    code = (
        f"import os\nif not os.fork(): os.setsid(); os.execvp('sleep', ['sleep', {mark!r}])\nprint('begun', flush=True)\nwhile True: pass"
    )
    ours = f"from embodied_rl.sandbox.python import *\nrun_program({code!r}, PythonLimits(timeout_s=600.0), {level!r})"
    process = subprocess.Popen([sys.executable, "-c", ours], cwd=Path(__file__).parents[2], env={**os.environ, "TMPDIR": str(tmp_path)})
    until = time.monotonic() + 60
    while not any(mark.encode() in _read(path) for path in _sleepers(process.pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until, "it ran"
    assert list(tmp_path.glob("sandbox-*")), "it has a scratch folder"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tree_is_gone(mark)
    until = time.monotonic() + 5.0
    while list(tmp_path.glob("sandbox-*")) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(tmp_path.glob("sandbox-*"))


def _sleepers(own: int) -> list[Path]:
    """Command lines of others that are no Python."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path).startswith(b"sleep")]


def test_an_older_landlock_keeps_signals_inside_all_the_same(victim: Victim) -> None:
    """Through the filter of system calls, before version 6."""
    need("landlock")

    def run(code: str) -> ProgramEnd:
        return run_boxed(f"{victim.names()}\n{code}", Box("landlock", timeout_s=60.0, landlock_abi=1))

    assert "PermissionError" in run(REACHED["signal"]).output
    assert "PermissionError" in run(REACHED["home"]).output
    assert "PermissionError" in run(REACHED["connect"]).output
    assert run("open('own', 'w').write('x'); print(open('own').read())").output == "x\n"


@pytest.mark.parametrize("level", LEVELS)
def test_a_network_opens_nothing_else(level: Level, victim: Victim) -> None:
    need(level)
    for name, reached in (("connect", True), ("home", False), ("environ", False), ("write", False), ("unix", False), ("ptrace", False)):
        code = f"{victim.names()}\n{REACHED[name]}\n{DONE}"
        ended = run_program(code, LIMITS, level, network=True)
        if reached or level != "prlimit":
            assert ended.output.endswith("done\n") is reached, (name, ended)


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_one_port_and_no_other(level: Level, victim: Victim) -> None:
    need(level)
    if landlock.version() < 4:
        pytest.skip("this kernel's Landlock knows no ports")
    port = victim.servers[0].getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        second = f"PORT = {other.getsockname()[1]}"
        box = Box(level, "ports", ports=(port,), timeout_s=60.0)
        assert run_boxed(f"{victim.names()}\n{REACHED['connect']}\n{DONE}", box).output == "done\n"
        assert "PermissionError" in run_boxed(f"{victim.names()}\n{second}\n{REACHED['connect']}", box).output
        datagram = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"
        assert "PermissionError" in run_boxed(f"{victim.names()}\n{datagram}", box).output


@pytest.mark.parametrize("level", LEVELS)
def test_folders_that_are_opened(level: Level, tmp_path: Path) -> None:
    need(level)
    for name in ("read", "write"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "read" / "file").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "read")
    box = Box(level, readable=(str(tmp_path / "read"), str(tmp_path / "link")), writable=(str(tmp_path / "write"),), timeout_s=60.0)
    run = f"import os\nos.chdir({str(tmp_path)!r}) if {level != 'namespaces'} else None\nfolder = {str(tmp_path)!r}\n"
    assert run_boxed(f"{run}print(open(folder + '/read/file').read(), open(folder + '/link/file').read())", box).output == "read read\n"
    assert run_boxed(f"{run}open(folder + '/write/new', 'w').write('x')", box).output == ""
    assert (tmp_path / "write" / "new").read_text() == "x"
    if level != "prlimit":
        assert "Error" in run_boxed(f"{run}open(folder + '/read/new', 'w')", box).output


def test_what_programs_may_use_works_at_every_level() -> None:
    for level in LEVELS:
        if failure(level):
            continue
        code = (
            "import subprocess, sys, numpy, threading, tempfile\nprint(numpy.arange(4).sum())\n"
            "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout.strip())\n"
            "thread = threading.Thread(target=print, args=['thread']); thread.start(); thread.join()\n"
            "with tempfile.TemporaryFile() as file: file.write(b'x')\nopen('/dev/null', 'w').write('x')\nsys.exit(5)"
        )
        ended = run_program(code, LIMITS, level)
        assert (ended.output, ended.status) == ("6\n42\nthread\n", 5), (level, ended)
        assert run_program("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", LIMITS, level).status == 128 + signal.SIGTERM


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "sandbox.md"
    assert protection_table() in page.read_text(encoding="utf-8")
