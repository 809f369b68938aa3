"""A fork is what a process of its own would be: its output, folder, environment, descriptors and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from embodied_rl.distributed.processes import start_module
from tests.forks import run_forked, start_forked

SAYS = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["TOLD"], os.getpid() == os.getpgid(0), __name__, os.read(int(sys.argv[1]), 9), flush=True)
print("torch" in sys.modules, file=sys.stderr)
raise SystemExit(7)
"""
WAITS = "import time; print('waits', flush=True); time.sleep(600)"


def test_it_is_as_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says_it.py").write_text(SAYS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    told = []
    for start in (start_module, start_forked):
        there, here = os.pipe()
        with open(tmp_path / "output", "w+b") as output:
            process = start("says_it", there, "word", pass_fds=[there], environment={"TOLD": "so"}, output=output)
            os.close(there)
            os.write(here, b"handed on")
            os.close(here)
            assert process.wait(120) == process.poll() == 7
            output.seek(0)
            told.append(output.read().decode().replace(f"'{there}'", "'N'").splitlines())
    (said, alone), (said_by_fork, together) = told
    assert said == said_by_fork == f"['N', 'word'] {tmp_path} so True __main__ b'handed on'"
    assert (alone, together) == ("False", "True")


@pytest.mark.parametrize(
    "program",
    ["print('kept until the end', end='')", "raise SystemExit", "raise SystemExit('words')", "1 / 0"],
)
def test_it_ends_as_any_python(tmp_path: Path, program: str) -> None:
    """After its threads and what was registered for its exit, with everything that was written."""
    program = f"import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.1, print, ['later']).start(); {program}"
    own = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    fork = run_forked("-c", program, cwd=tmp_path)
    assert (fork.returncode, fork.stdout) == (own.returncode, own.stdout)
    assert fork.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


def test_it_is_killed_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waits_long.py").write_text(WAITS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    there, here = os.pipe()
    with open(here, "wb") as output:
        process, other = (start_forked("waits_long", output=output) for _ in range(2))
    assert os.read(there, 5) == b"waits"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    assert {process.pid, other.pid} <= {child.pid for child in psutil.Process().children(recursive=True)}
    process.kill()
    assert process.wait(120) == -signal.SIGKILL
    assert other.poll() is None
    os.kill(other.pid, signal.SIGTERM)
    assert other.wait(120) == -signal.SIGTERM
    os.close(there)
