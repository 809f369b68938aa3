"""The text worlds of other projects with their own packages, each in an environment of its own, on small data of ours."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.neighbours.overlay import REPOSITORY, separate

pytestmark = pytest.mark.slow

APPWORLD = """
import json
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.text import appworld
from embodied_rl.types import StepBuffers
LOGIN = '''
[password] = [one["password"] for one in apis.supervisor.show_account_passwords() if one["account_name"] == "simple_note"]
token = apis.simple_note.login(username="ada.example@gmail.com", password=password)["access_token"]
[note] = apis.simple_note.search_notes(access_token=token, query="Kitchen")
print(apis.simple_note.show_note(note_id=note["note_id"], access_token=token)["content"])
'''
sim, told = appworld.make(1), []
out = StepBuffers.allocate(sim.spec, 1)
for seed in (3, HELD_OUT_START):
    sim.reset([0], [seed], out)
    told.append([str(out.observation["text"][0])])
    for code in ("print(1 +", "```python" + LOGIN + "```", "apis.supervisor.complete_task(answer='green')"):
        sim.step([0], [code], out)
        told[-1].append([str(out.observation["text"][0]), float(out.reward[0]), bool(out.terminated[0]), bool(out.success[0])])
print(json.dumps(told))
"""


def test_appworld_plays_two_worlds_of_ours(tmp_path: Path) -> None:
    """The package's own apps, shell and judge: the note is read with its interfaces, and 'green' is right in one world alone."""
    python = separate("appworld==0.1.3.post1", "numpy", "pyyaml", "gymnasium", "omegaconf")
    environment = {**os.environ, "APPWORLD_ROOT": str(tmp_path), "APPWORLD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)}

    def run(*words: str) -> str:
        command = [str(python), *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run("-c", "from appworld.install import install_package\ninstall_package()")
    run(str(REPOSITORY / "tests" / "neighbours" / "appworld_data.py"))
    right, wrong = json.loads(run("-c", APPWORLD).splitlines()[-1])
    for told, colour in ((right, "green"), (wrong, "blue")):
        assert "Which colour does my note 'Kitchen' name?" in told[0]
        assert "Syntax error" in told[1][0]
        assert told[2] == [f"Paint the kitchen {colour}.\n", 0.0, False, False]
    assert right[3][1:] == [1.0, True, True]
    assert wrong[3][1:] == [0.0, True, False]
