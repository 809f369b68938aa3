"""uv installs the project, and the locks, as docs/installation.md says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.neighbours.overlay import REPOSITORY, overlay


@pytest.mark.slow
def test_uv_installs_the_project_and_reads_the_locks(tmp_path: Path) -> None:
    uv = overlay("uv==0.13.9") / "bin" / "uv"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*arguments],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run(str(uv), "venv", str(tmp_path / "env"))
    python = str(tmp_path / "env" / "bin" / "python")
    run(str(uv), "pip", "install", "--python", python, "--no-deps", "-e", ".[maniskill]")
    assert run(python, "-c", "import embodied_rl; print(embodied_rl.__file__)").strip() == str(REPOSITORY / "embodied_rl" / "__init__.py")
    lock = (REPOSITORY / "requirements.train.lock").read_text(encoding="utf-8")
    read = run(str(uv), "pip", "install", "--python", python, "--no-deps", "--dry-run", "-r", "requirements.train.lock")
    assert f"Would install {sum('==' in line for line in lock.splitlines())} packages" in read
