"""Examples and guides do what they say: commands compose, the notebook and the script run, the documented simulator learns."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from embodied_rl.config import TrainConfig, group_names
from embodied_rl.config.compose import compose_config, load_train_config
from embodied_rl.errors import UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.robots.gymnasium import GymnasiumSim
from embodied_rl.types import StepBuffers
from tests.forks import run_forked

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(EXAMPLES.rglob("README.md")), *GUIDES]
OTHER_FLAGS = ("--help", "--explain", "--config-dir", "--cfg")


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Contents of the fenced blocks of a Markdown text in these languages."""
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield body


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(name, arguments) of every ``python -m embodied_rl.<name> …`` in a Markdown text's shell blocks."""
    found = []
    for body in blocks(text, "bash", "sh", "console"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "-m"] and words[2].startswith("embodied_rl."):
                found.append((words[2].removeprefix("embodied_rl."), words[3:]))
    return found


def sweep(arguments: list[str]) -> list[list[str]]:
    """The jobs of a multirun: ``seed=1,2`` is two; commas within brackets separate nothing."""
    choices = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        choices.append([argument] if value[:1] in ("[", "{") else [f"{key}={part}" for part in value.split(",")])
    return [list(job) for job in itertools.product(*choices)]


def _but_seed(overrides: list[str]) -> list[str]:
    return [word for word in overrides if not word.startswith("seed=")]


def composed(overrides: list[str]) -> TrainConfig:
    """What these overrides are; pages show the same commands."""
    return _composed(tuple(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> TrainConfig:
    return load_train_config(overrides)


def check(name: str, arguments: list[str]) -> None:
    """Raises UserError, or fails, where a command could not be run as it is written."""
    if name == "train":
        if "sim=my_robot" in arguments:  # the name that examples/custom_simulator brings once it is installed: test_custom_simulator.py
            arguments = ["sim=custom", "sim.target=my_robot_sim.sim:MyRobot", *(word for word in arguments if word != "sim=my_robot")]
            arguments.append("sim.name=my_robot")
        if any(flag in arguments for flag in OTHER_FLAGS):
            return
        jobs = sweep([word for word in arguments if word != "-m"]) if "-m" in arguments else [arguments]
        jobs = [jobs[0], jobs[-1]] if all(_but_seed(job) == _but_seed(jobs[0]) for job in jobs) else jobs
        for overrides in jobs:
            config = composed(overrides)
            chosen = dict(word.split("=", 1) for word in overrides)
            if "sim" in chosen and "sim.name" not in chosen:
                assert config.sim.name == chosen["sim"], "an experiment won over the simulator on the command line"
    elif name in ("evaluate", "render", "record", "replay", "offline_eval", "plan", "serve_agent", "serve_envs"):
        importlib.import_module(f"embodied_rl.commands.{name}").COMMAND.parse(arguments)
    elif name == "tune":
        from embodied_rl.commands import tune

        own = {argument.name for argument in tune.COMMAND.arguments}
        tune.COMMAND.parse([word for word in arguments if word.partition("=")[0] in own])
        fixed, ranges = tune.split_words([word for word in arguments if word.partition("=")[0] not in own])
        composed([*fixed, *(one.word(one.choices[0] if one.choices else one.low) for one in ranges)])
    elif name == "report":
        from embodied_rl.commands.report import COMMAND

        named = [word for word in arguments if "=" in word]
        assert len(named) < len(arguments) or any(word.startswith("run=") for word in named), "no run is named"
        COMMAND.parse([*(["run=x"] if not any(word.startswith("run=") for word in named) else []), *named])
    elif name == "episodes":
        from embodied_rl.commands.episode_tools import COMMANDS

        COMMANDS[arguments[0]].parse(arguments[1:])
    elif name == "catalog":
        from embodied_rl.commands.catalog import KINDS, what_to_check

        if arguments[:1] == ["check"]:
            what_to_check(arguments[1:])
        else:
            assert set(arguments) <= {*KINDS, "--json"}
    else:
        assert importlib.util.find_spec(f"embodied_rl.{name}") is not None
        assert not arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_run_as_written(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, arguments in commands(text):
        check(name, arguments)
    for body in blocks(text, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_train_config":
                load_train_config(ast.literal_eval(node.args[0]))


def test_commands_are_found_and_wrong_ones_refused() -> None:
    text = """
Not one: python -m embodied_rl.train
```bash
python -m embodied_rl.train experiment=fetch_reach 'policy.hidden_sizes=[64,64]' \\
    seed=2   # a comment
python -m embodied_rl.train -m seed=1,2 experiment=cartpole
make train
```
"""
    first, second = commands(text)
    assert first == ("train", ["experiment=fetch_reach", "policy.hidden_sizes=[64,64]", "seed=2"])
    assert sweep(second[1][1:]) == [["seed=1", "experiment=cartpole"], ["seed=2", "experiment=cartpole"]]
    check(*first)
    for wrong in (["experiment=fetch_reech"], ["seeds=3"], ["-m", "seed=1,x"], ["algorithm.clip_high=high"]):
        with pytest.raises(UserError):
            check("train", wrong)
    with pytest.raises(UserError, match="num_episodes"):
        check("evaluate", ["checkpoint=x", "episodes=3"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_experiment_has_its_page() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in group_names("experiment"):
        text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
        (command, arguments), *_ = commands(text)
        assert command == "train"
        assert composed(arguments).sim == composed([f"experiment={name}"]).sim
        assert "\nResult: " in text
        extra = composed(arguments).sim.extra
        assert (f'pip install "embodied-rl[{extra}]"' in text) == (extra is not None)
        assert f"[{name}]({name})" in index


def test_the_table_of_settings_is_the_configuration() -> None:
    import yaml

    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.split("### Settings")[1].split("### Reading")[0]
    told: dict[str, Any] = {}
    for names, values in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", table, re.MULTILINE):
        told |= zip(re.findall(r"`(\w+)`", names), (yaml.safe_load(value) for value in values.split(",")), strict=True)
    written = yaml.safe_load((ROOT / "configs" / "algorithm" / "ppo.yaml").read_text(encoding="utf-8"))
    composed = compose_config([])["algorithm"]
    configured = {key: composed[key] for key in written if key != "name"}
    # PyYAML reads 3e-4 as text; both sides are compared as numbers where they are numbers.
    assert {key: _number(value) for key, value in told.items()} == {key: _number(value) for key, value in configured.items()}


def _number(value: Any) -> Any:
    try:
        return float(value) if not isinstance(value, bool) else value
    except (TypeError, ValueError):
        return value


# ---- programs -------------------------------------------------------------------------------------------------------


def run(module: str, *words: str, folder: Path) -> str:
    """Run a module that is found in `folder`; return what it printed."""
    done = run_forked(module, *words, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_env_manager_script(tmp_path: Path) -> None:
    """In a process that has imported nothing: the script itself checks that it needs no torch."""
    script = (EXAMPLES / "use_the_env_manager" / "cross_entropy.py").read_text(encoding="utf-8")
    assert script.count("num_generations=12") == 1
    (tmp_path / "shorter.py").write_text(script.replace("num_generations=12", "num_generations=4"), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "shorter.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout
    (returns,) = re.findall(r"by generation: ([\d ]+)", printed)
    elite = [int(value) for value in returns.split()]
    assert len(elite) == 4
    # A random linear controller seldom holds 300 of 500 steps on average; a good one holds all.
    assert elite[-1] >= 475 > elite[0]
    (episodes,) = re.findall(r"at random: (\d+) episodes", printed)
    # Random CartPole episodes take about 22 steps: 20,000 steps are about 900 of them.
    assert 750 < int(episodes) < 1050


@pytest.mark.usefixtures("forked")
def test_the_example_of_the_env_manager_guide(tmp_path: Path) -> None:
    use, chunks, snapshots = blocks((ROOT / "docs" / "environment_manager.md").read_text(encoding="utf-8"), "python")
    printed = []
    for body in (use, chunks, snapshots):
        (tmp_path / "example.py").write_text(body, encoding="utf-8")
        printed.append(run("example", folder=tmp_path))
    assert printed[1].startswith("(4, 8) True [0. 0. 0. 0.]")
    assert printed[2] == ""
    rows = [line.split() for line in printed[0].splitlines()]
    assert [int(length) for _, _, length in rows] == [200] * 8, "Pendulum's episodes take 200 steps; 250 steps end one in each slot"
    assert len({seed for seed, _, _ in rows}) == 8


@pytest.mark.slow
@pytest.mark.ci_sample
def test_the_notebook(tmp_path: Path) -> None:
    import nbclient
    import nbformat
    from traitlets.config import Config

    notebook = nbformat.read(EXAMPLES / "notebooks" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    shorter = [('"total_steps=25_000", ', '"total_steps=12_000", "evaluation.num_episodes=10", '), ("checkpoint, 40,", "checkpoint, 10,")]
    shorter += [("num_episodes=2, size=192", "num_episodes=1, size=192")]
    for cell in notebook.cells:
        for shown, run in shorter:
            cell.source = cell.source.replace(shown, run)
    assert all(any(run in cell.source for cell in notebook.cells) for _, run in shorter)
    # Not over TCP: its ports are chosen first, and taken by the kernel some seconds later, when they may be somebody else's.
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # whose names must be short
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        nbclient.NotebookClient(
            notebook, timeout=240, startup_timeout=240, config=config, resources={"metadata": {"path": str(tmp_path)}}
        ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the curve"
    printed = "".join(output.get("text", "") for output in outputs)
    (trained,), (random,) = (re.findall(rf"{policy} +return ([\d.]+)", printed) for policy in ("trained", "random"))
    assert float(random) < 40
    assert float(trained) > 200
    (results,) = tmp_path.glob("runs/cartpole/*/results.json")
    assert json.loads(results.read_text(encoding="utf-8"))["steps"] >= 12_000


# ---- docs/add_a_simulator.md ----------------------------------------------------------------------------------------

SIMULATOR_GUIDE = ROOT / "docs" / "add_a_simulator.md"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the guide's files, each named by its block's first line."""
    for body in blocks(SIMULATOR_GUIDE.read_text(encoding="utf-8"), "python", "yaml"):
        path = tmp_path / body.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body, encoding="utf-8")
    return tmp_path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documented_simulator_is_short_and_obeys_its_physics(written: Path) -> None:
    code = [line for line in (written / "my_sim.py").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 40
    env = load(written / "my_sim.py").Docking()
    start = float(env.reset(seed=5)[0][0])
    for step in range(1, 11):
        observation, _, terminated, truncated, _ = env.step(np.array([0.5]))
        # Velocity grows by 0.1 a step and moves the cart by 0.1 of itself: v = 0.1 n, x = x0 + 0.01 n (n + 1) / 2.
        np.testing.assert_allclose(observation, [start + 0.01 * step * (step + 1) / 2, 0.1 * step], rtol=1e-5)
        assert not terminated
        assert not truncated


def test_both_documented_forms_are_the_same_simulator(written: Path) -> None:
    single, batch = load(written / "my_sim.py").Docking(), load(written / "my_batch_sim.py").DockingBatch(num_envs=3)
    out = StepBuffers.allocate(batch.spec, 3)
    batch.reset([0, 1, 2], [7, 8, 9], out)
    first, _ = single.reset(seed=8)
    np.testing.assert_array_equal(out.observation["state"][1], first)
    untouched = out.observation["state"][0].copy()
    rng, successes = np.random.default_rng(0), 0
    for _ in range(60):
        # Towards the mark and braking, with noise, so that success comes up.
        action = np.clip(-(first[0] + first[1]) + 0.1 * rng.standard_normal(1), -1.0, 1.0).astype(np.float32)
        first, reward, _, _, info = single.step(action)
        batch.step([2, 1], np.stack([-action, action]), out)
        np.testing.assert_array_equal(out.observation["state"][1], first)
        np.testing.assert_allclose(out.reward[1], reward, rtol=1e-6)
        assert out.success[1] == info["success"]
        successes += info["success"]
    assert 0 < successes < 60
    np.testing.assert_array_equal(out.observation["state"][0], untouched)


def test_documented_simulators_leave_observations_out(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are checked whole, with chunks of four among the properties, and draw what is read and no more."""
    monkeypatch.syspath_prepend(str(written))
    for name in ("my_sim", "my_batch_sim"):  # imported by the others, and by no other test
        monkeypatch.delitem(sys.modules, name, raising=False)
    seen, pixels = load(written / "my_camera_sim.py").DockingSeen, load(written / "my_pixels.py").Pixels
    docking = load(written / "my_sim.py")
    drawn = 0

    class Counted(docking.Docking):
        def render(self) -> np.ndarray:
            nonlocal drawn
            drawn += 1
            return super().render()

    for factory in (seen, lambda: pixels(TimeLimit(Counted(), 30))):
        report = check_sim(factory, steps=40, new_processes=False)
        assert report["unread"].outcome == "pass", report
        assert report.ok, report
    sim = GymnasiumSim([TimeLimit(pixels(Counted()), 30)])
    out, drawn = StepBuffers.allocate(sim.spec, 1), 0
    sim.reset([0], [5], out)
    for _ in range(8):
        sim.advance([0], np.full((1, 1), 0.5, np.float32), out)
    assert drawn == 1, "the reset's"
    sim.observe([0], out)
    assert drawn == 2
    np.testing.assert_array_equal(out.observation["rgb"][0], sim.render(0))
    stacked = GymnasiumSim([FrameStackObservation(pixels(Counted()), 2)])
    drawn, rows = 0, StepBuffers.allocate(stacked.spec, 1)
    stacked.reset([0], [5], rows)
    stacked.advance([0], np.full((1, 1), 0.5, np.float32), rows)
    stacked.advance([0], np.full((1, 1), 0.5, np.float32), rows)
    assert drawn == 3, "a stack of frames reads all of them"


def test_the_documented_check(written: Path) -> None:
    run("check_my_sim", folder=written)


def test_a_configuration_folder_of_ones_own(written: Path) -> None:
    (arguments,) = [words for name, words in commands(SIMULATOR_GUIDE.read_text(encoding="utf-8")) if "--config-dir" in words]
    import yaml

    composed = yaml.safe_load(run("embodied_rl.train", *arguments, "--cfg", "job", folder=written))
    assert composed["sim"]["target"] == "my_sim:Docking"
    assert composed["sim"]["success_ends_episode"] is True
    assert composed["sim"]["num_slots"] == 16, "what the file does not say comes from train.yaml"


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.usefixtures("forked")
def test_the_documented_simulators_are_learned(written: Path) -> None:
    training = [words for name, words in commands(SIMULATOR_GUIDE.read_text(encoding="utf-8")) if name == "train" and "sim=custom" in words]
    single, batch = training
    changes = ["video.enabled=no", "logger=quiet", "evaluation.num_episodes=50"]

    def train(*words: str) -> None:
        done = run_forked("embodied_rl.train", *words, *changes, cwd=written)
        assert done.returncode == 0, done.stderr[-4000:]

    train(*single, "run_dir=single")
    assert json.loads((written / "single/results.json").read_text(encoding="utf-8"))["success"] >= 0.9  # random actions: 0.15
    few = [word for word in batch if not word.startswith("total_steps=")]
    train(*few, "evaluation.every_steps=null", "total_steps=4096", "run_dir=batch")
    # The same simulator in two forms: the same training, iteration by iteration.
    of_single, of_batch = (
        [json.loads(row) for row in (written / name / "metrics.jsonl").read_text().splitlines()] for name in ("single", "batch")
    )
    compared = {name for name in of_batch[-1] if name.startswith(("episode/", "train/", "step"))}
    assert len(of_batch) >= 4
    assert len(compared) > 5
    for one, other in zip(of_single, of_batch, strict=False):
        assert {name: one[name] for name in compared} == pytest.approx({name: other[name] for name in compared}, rel=1e-6)


def test_a_custom_simulator_needs_its_target_and_takes_any_argument() -> None:
    with pytest.raises(UserError, match=r"sim\.target must be given .* sim\.target=my_package"):
        load_train_config(["sim=custom"])
    config = load_train_config(["sim=custom", "sim.target=a.b:C", "sim.kwargs.gravity=1.6", "sim.kwargs.terrain=moon"])
    assert (config.sim.target, config.sim.kwargs) == ("a.b:C", {"gravity": 1.6, "terrain": "moon"})
    # Where a simulator's file has arguments already, new ones join them.
    known = load_train_config([]).sim.kwargs
    assert load_train_config(["sim.kwargs.extra_camera=true"]).sim.kwargs == {**known, "extra_camera": True}
