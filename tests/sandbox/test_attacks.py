"""Programs that try what the sandbox is to stop, at every level that this machine has: the table in docs/sandbox.md, cell by cell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.sandbox import landlock, supervisor
from embodied_rl.sandbox.box import (
    LEVELS,
    NUM_ATTACKS,
    STOPPED,
    Box,
    Level,
    ProgramEnd,
    PythonLimits,
    failure,
    run_program,
)
from tests.sandbox.attacks import ATTACKS, DONE, LIMITS, REACHED, USED, Attack, Victim, box_of, made_victim, outlives, outlives_us, reach


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    with made_victim(tmp_path / "victim") as made:
        yield made


def need(level: Level) -> None:
    if failure(level):
        pytest.skip(f"{level}: {failure(level)}")


def test_every_row_of_the_table_has_a_program() -> None:
    assert {attack.name for attack in ATTACKS} == {*REACHED, *USED, "outlive", "orphan"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.name in REACHED], ids=lambda attack: attack.name)
def test_what_a_program_reaches(attack: Attack, level: Level, victim: Victim) -> None:
    need(level)
    ended = reach(attack.name, level, victim)
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
def test_what_a_program_uses(name: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(level)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = run_program(f"{USED[name]}\n{DONE}", box_of(name, level))
    assert "done" not in ended.output, ended
    assert ended.timed_out == (name == "time"), ended
    assert not list(tmp_path.glob("sandbox-*")), "its folder is gone"
    said = {"processor": "processor time", "memory": "of memory", "sockets": "of memory"}
    said["unmapped"] = "Function not implemented" if level != "prlimit" else "it wrote"
    if name in said:
        assert said[name] in ended.stopped + ended.output, ended
    elif name != "time":
        assert ended.stopped or "Error" in ended.output, ended


@pytest.mark.parametrize("level", LEVELS)
def test_processor_time_of_children_that_nobody_waits_for_counts(level: Level) -> None:
    """Their times are in no account of /proc: the parent ignores SIGCHLD."""
    need(level)
    if not supervisor.has_groups():
        pytest.skip("no control group can be made here")
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    if not os.fork():\n"
        "        while time.process_time() < 0.02: pass\n        os._exit(0)\n    time.sleep(0.025)"
    )
    ended = run_program(code, replace(PythonLimits(timeout_s=240.0).box(level), cpu_s=0.4))
    assert "processor time" in ended.stopped, ended
    group = supervisor.new_group()
    assert group is not None
    assert group.used_s() == 0.0
    group.remove()
    assert supervisor.has_groups(), "it was removed: there is room for another of this process"


def test_limits_count_while_children_end_all_the_time() -> None:
    """Each orphan that ends sends the supervisor a signal: here there always is one."""
    code = (
        "import os, signal, subprocess, types\nfrom embodied_rl.sandbox import supervisor\n"
        "signal.sigtimedwait = lambda signals, timeout: types.SimpleNamespace(si_signo=signal.SIGCHLD)\n"
        "child = subprocess.Popen(['sleep', '600'])\nspec = {'timeout_s': 10.0, 'parent': os.getppid(), 'processes': 0}\n"
        "print(supervisor.watch(supervisor.Tree(child.pid, hulls=0), child.pid, spec))\nchild.kill()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "('it ran 1 processes and threads at a time (limit: 0)', None)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("which", ["reached", pytest.param("all", marks=pytest.mark.slow)])
def test_it_holds_for_an_ordinary_user_too(which: str) -> None:
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "stdout": subprocess.PIPE}
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(supervisor.__file__).parents[2]), "HOME": "/tmp"}
    imports = "import tomllib, tests.sandbox.attacks"
    for python in (sys.executable, shutil.which("python3", path=os.defpath) or ""):
        try:
            found = subprocess.run([python, "-c", imports], env=environment, stderr=subprocess.PIPE, **nobody)
        except OSError:
            continue  # it lies in a home that others cannot enter
        if found.returncode == 0:
            break
    else:
        pytest.skip("no Python from 3.11 on, and no copy of this package, that an ordinary user can read")
    command = [python, "-m", "tests.sandbox.attacks", *([] if which == "all" else REACHED)]
    stopped = json.loads(subprocess.run(command, env=environment, check=True, **nobody).stdout)
    assert stopped, "limits can be set everywhere"
    names = set(REACHED if which == "reached" else (attack.name for attack in ATTACKS))
    wanted = [(attack.name, level) for attack in ATTACKS for level in attack.stopped if level in stopped and attack.name in names]
    assert [(name, level) for name, level in wanted if not stopped[level][name]] == []


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outlives_its_program(level: Level) -> None:
    need(level)
    assert not outlives(level)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outlives_us(level: Level, tmp_path: Path) -> None:
    need(level)
    assert not outlives_us(level, tmp_path)


def test_what_landlock_does_not_check_is_refused_all_the_same(victim: Victim) -> None:
    """Through the filter of system calls: signals before version 6, emptying a file before version 3, the rest in every version."""
    need("landlock")

    def run(code: str) -> ProgramEnd:
        return run_program(f"{victim.names()}\n{code}", Box("landlock", timeout_s=60.0, landlock_abi=1))

    assert "PermissionError" in run(REACHED["signal"]).output
    assert "PermissionError" in run(REACHED["home"]).output
    assert "PermissionError" in run(REACHED["connect"]).output
    letter = victim.folder / "other" / "letter"
    letter.chmod(0o666)
    for code in (
        "import os; os.truncate(OTHERS, 0)",
        "import os; os.open(OTHERS, os.O_TRUNC | 3)",  # 3: opened for neither reading nor writing
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM)",  # SIGKILL follows, with F_SETSIG
        "import os; os.setpriority(os.PRIO_USER, 0, 0)",
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.inotify_add_watch(libc.inotify_init(), HOME.encode(), 0xfff) < 0: raise OSError(ctypes.get_errno(), 'inotify')",
    ):
        assert "PermissionError: [Errno 1]" in run(code).output, code
    assert letter.read_text() == "secret"
    assert run("open('own', 'w').write('x'); print(open('own').read())").output == "x\n"


@pytest.mark.parametrize("level", LEVELS)
def test_a_network_opens_nothing_else(level: Level, victim: Victim) -> None:
    need(level)
    for name, reached in (("connect", True), ("home", False), ("environ", False), ("write", False), ("unix", False), ("ptrace", False)):
        code = f"{victim.names()}\n{REACHED[name]}\n{DONE}"
        ended = run_program(code, LIMITS.box(level, network=True))
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
        assert run_program(f"{victim.names()}\n{REACHED['connect']}\n{DONE}", box).output == "done\n"
        assert "PermissionError" in run_program(f"{victim.names()}\n{second}\n{REACHED['connect']}", box).output
        datagram = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"
        assert "PermissionError" in run_program(f"{victim.names()}\n{datagram}", box).output
        # Landlock sees neither of these; the first is refused before the kernel says whether it has MPTCP.
        for way in (
            "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
            "socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', PORT))",
        ):
            assert "PermissionError" in run_program(f"{victim.names()}\n{second}\nimport socket\n{way}", box).output, way
        sends = "import socket\none = socket.create_connection(('127.0.0.1', PORT))\none.sendmsg([b'x']); one.sendall(b'y')"
        assert run_program(f"{victim.names()}\n{sends}\n{DONE}", box).output == "done\n"


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
    assert run_program(f"{run}print(open(folder + '/read/file').read(), open(folder + '/link/file').read())", box).output == "read read\n"
    assert run_program(f"{run}open(folder + '/write/new', 'w').write('x')", box).output == ""
    assert (tmp_path / "write" / "new").read_text() == "x"
    if level != "prlimit":
        assert "Error" in run_program(f"{run}open(folder + '/read/new', 'w')", box).output


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
        ended = run_program(code, LIMITS.box(level))
        assert (ended.output, ended.status) == ("6\n42\nthread\n", 5), (level, ended)
        assert run_program("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", LIMITS.box(level)).status == 128 + signal.SIGTERM


def test_folders_that_become_files_while_they_are_counted_are_no_offence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "name").mkdir()
    scandir = os.scandir

    def late(path: str) -> Any:
        if path == str(tmp_path / "name"):
            os.rmdir(path)
            Path(path).touch()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert supervisor._size(str(tmp_path)) is not None


def test_the_page_shows_the_table() -> None:
    rows = ["| A program that … | " + " | ".join(f"`{level}`" for level in LEVELS) + " |", "|---" * (len(LEVELS) + 1) + "|"]
    for attack in ATTACKS:
        cells = ["stopped" if level in attack.stopped else "**not stopped**" for level in LEVELS]
        rows.append(f"| {attack.label} | {' | '.join(cells)} |")
    page = Path(__file__).parents[2] / "docs" / "sandbox.md"
    assert "\n".join(rows) in page.read_text(encoding="utf-8")
    assert len(ATTACKS) == NUM_ATTACKS
    assert {level: sum(level in attack.stopped for attack in ATTACKS) for level in LEVELS} == STOPPED, "the doctor reports it"
