"""The text worlds of other projects with their own packages, each in an environment of its own, on small data of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.neighbours import webshop_data
from tests.neighbours.overlay import REPOSITORY, overlay, separate

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


WEBSHOP = """
import json, random, sys
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.text import webshop
from embodied_rl.types import StepBuffers
from tests.neighbours.webshop_data import PRODUCTS, instruction
random.seed(int(sys.argv[1]))
before = random.getstate()
sim = webshop.make(2, num_products=100)
assert random.getstate() == before
out, told = StepBuffers.allocate(sim.spec, 2), []

def say(row, *actions):
    for action in actions:
        sim.step([row], [action], out)
    return [str(out.observation["text"][row]), float(out.reward[row]), bool(out.terminated[row]), bool(out.success[row])]

for number in range(3):
    sim.reset([0, 1], [HELD_OUT_START + number] * 2, out)
    first = str(out.observation["text"][0])
    assert first == str(out.observation["text"][1])
    (asked,) = [one for one in PRODUCTS if instruction(one) in first]
    name, _, (right, other), _ = PRODUCTS[asked]
    results = [say(row, f"search[{name}]")[0] for row in (0, 1)]
    say(0, f"click[{asked.lower()}]", f"click[{right}]")
    wrong = say(1, f"click[{asked.lower()}]", f"click[{other}]", "click[no such thing]", "click[buy now]")
    told.append([first, asked, results, say(0, "click[buy now]"), wrong])
kwargs = {"num_products": 100, "max_turns": 8}
report = check_sim(SimFactory("embodied_rl.sim.text.webshop:make", "WebShop", kwargs), num_envs=2, steps=12)
print(json.dumps([told, list(report.failed), str(report)]))
"""


@pytest.mark.parametrize("shop", ["a shop of ours", "checkout"])
def test_webshop_sells_what_is_asked_for(shop: str, tmp_path: Path) -> None:
    """WebShop is in no registry: a shop of ours with its interface, and its repository where $WEBSHOP_CHECKOUT names a clone of it.

    Two customers of one shop have the same goal and do not disturb each other, and a seed is the same goal in every process.
    """
    places = [tmp_path]
    if shop == "checkout":
        if not (checkout := os.environ.get("WEBSHOP_CHECKOUT")):
            pytest.skip("WEBSHOP_CHECKOUT names no clone of princeton-nlp/WebShop")
        names = (
            "flask==3.1.3",
            "blinker",
            "itsdangerous",
            "beautifulsoup4==4.15.0",
            "soupsieve",
            "rank-bm25==0.2.2",
            "thefuzz==0.22.1",
            "rapidfuzz",
        )
        places.append(overlay(*names))
        shutil.copytree(Path(checkout) / "web_agent_site", tmp_path / "web_agent_site")
        (tmp_path / "web_agent_site" / "envs" / "__init__.py").write_text("")  # it also wants the environment that drives a browser
        webshop_data.write_data(tmp_path / "data")
        webshop_data.write_stand_ins(tmp_path)
    else:
        webshop_data.write_shop(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, places), str(REPOSITORY)])}
    runs = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", WEBSHOP, seed]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    told, failed, report = runs[0]
    assert not failed, report
    assert runs[1][0] == told, "prices and limits do not depend on the process"
    assert len({asked for _, asked, *_ in told}) == 3
    for first, asked, results, bought, wrong in told:
        assert "search[<words>]" in first
        assert all(f"click[{asked.lower()}]" in found for found in results)
        assert bought[1:] == [1.0, True, True]
        assert wrong[1:] == [pytest.approx(2 / 3), True, False]


PENCIL = """
(define (problem plan_trial) (:domain alfred)
(:objects agent1 - agent Desk_bar_1 Shelf_bar_1 - receptacle Pencil_bar_1 Book_bar_1 - object
 DeskType ShelfType - rtype PencilType BookType - otype loc_bar_0 loc_bar_1 loc_bar_2 - location)
(:init (= (total-cost) 0) (receptacleType Desk_bar_1 DeskType) (receptacleType Shelf_bar_1 ShelfType)
 (objectType Pencil_bar_1 PencilType) (objectType Book_bar_1 BookType) (canContain DeskType PencilType)
 (canContain ShelfType PencilType) (canContain DeskType BookType) (pickupable Pencil_bar_1) (pickupable Book_bar_1)
 (receptacleAtLocation Desk_bar_1 loc_bar_1) (receptacleAtLocation Shelf_bar_1 loc_bar_2)
 (objectAtLocation Pencil_bar_1 loc_bar_1) (objectAtLocation Book_bar_1 loc_bar_1)
 (inReceptacle Pencil_bar_1 Desk_bar_1) (inReceptacle Book_bar_1 Desk_bar_1) (atLocation agent1 loc_bar_0))
(:goal (and (exists (?r - receptacle) (exists (?o - object)
 (and (inReceptacle ?o ?r) (objectType ?o PencilType) (receptacleType ?r ShelfType))))))
(:metric minimize (total-cost)))
"""
"""A desk with a pencil and a book, and a shelf that the pencil belongs on."""
ALFWORLD = """
import json, sys
from pathlib import Path
import alfworld as package
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.text import alfworld
from embodied_rl.types import StepBuffers
folder, data = Path(sys.argv[1]), Path(package.__file__).parent / "data"
domain = (data / "alfred.pddl").read_text()
grammar = (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", "put a pencil on the shelf")
game = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": (folder / "problem.pddl").read_text(), "solvable": True}
for split in ("train", "valid_unseen"):
    place = folder / "json_2.1.1" / split / "pencil"
    place.mkdir(parents=True)
    (place / "traj_data.json").write_text(json.dumps({"task_type": "pick_and_place_simple"}))
    (place / "game.tw-pddl").write_text(json.dumps(game))
sim = alfworld.make(1, data=str(folder))
out = StepBuffers.allocate(sim.spec, 1)
sim.reset([0], [3], out)
told = [[str(out.observation["text"][0])]]
for command in ("go to desk 1", "take pencil 1 from desk 1", "go to shelf 1", "move pencil 1 to shelf 1"):
    sim.step([0], [command], out)
    told.append([str(out.observation["text"][0]), float(out.reward[0]), bool(out.terminated[0]), bool(out.success[0]), out.info[0]])
report = check_sim(SimFactory("embodied_rl.sim.text.alfworld:make", "all", {"data": str(folder)}), num_envs=2, steps=20, seed=0)
print(json.dumps([told, list(report.failed), str(report)]))
"""


@pytest.mark.timeout(4500)
def test_alfworld_plays_a_game_of_ours(tmp_path: Path) -> None:
    """The package's own engine, grammar and planner, on a household of ours. The planner is built from its source, once: ten minutes."""
    python = separate("alfworld==0.4.2", "numpy", "pyyaml", "gymnasium", "omegaconf", limit_s=3600)
    (tmp_path / "problem.pddl").write_text(PENCIL)
    command = [str(python), "-c", ALFWORLD, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told, failed, report = json.loads(done.stdout.splitlines()[-1])
    assert "Your task is to: put a pencil on the shelf." in told[0][0]
    commands = ("go to desk 1", "take pencil 1 from desk 1", "go to shelf 1", "move pencil 1 to shelf 1")
    for command, before, after in zip(commands, told, told[1:], strict=False):
        assert command in before[0]
        last = command.startswith("move")
        assert after[1:] == [float(last), last, last, {"valid": True}]
    assert set(failed) <= {"seeds"}, f"there is one game\n{report}"
