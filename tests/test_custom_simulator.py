"""examples/custom_simulator as a user has it: installed as a package of its own, checked, and trained through each door."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from embodied_rl.errors import UserError
from embodied_rl.registry import installed_config_folders, installed_targets, load_target
from embodied_rl.sim.check import CHECKS
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers
from tests.forks import run_forked
from tests.short_run import QUICK
from tests.test_examples import blocks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "custom_simulator"
CONFIGS_DOOR = '[project.entry-points."embodied_rl.configs"]\nmy_robot_sim = "my_robot_sim"\n'


def install(source: Path, target: Path, without: str = "") -> Path:
    """Install a copy of the example with pip into `target`, as any package is, without a network. Returns `target`."""
    copy = target.parent / f"{target.name}-source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    if without:
        text = (copy / "pyproject.toml").read_text(encoding="utf-8")
        assert without in text
        (copy / "pyproject.toml").write_text(text.replace(without, ""), encoding="utf-8")
        shutil.rmtree(copy / "my_robot_sim" / "configs")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(copy)]
    done = subprocess.run(command, cwd=target.parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds the example."""
    return install(EXAMPLE, tmp_path_factory.mktemp("installed") / "both_doors")


@pytest.fixture(scope="module")
def packages_without_configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the entry point of the class alone."""
    return install(EXAMPLE, tmp_path_factory.mktemp("installed") / "class_alone", without=CONFIGS_DOOR)


def run(packages: Path, folder: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_forked(*words, cwd=folder, env={"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"})
    assert done.returncode == status, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def trained(packages: Path, folder: Path, *overrides: str) -> dict[str, object]:
    """Train two iterations; the run's results."""
    changes = [*(word for word in QUICK if not word.startswith("total_steps")), "total_steps=512", "run_dir=run"]
    run(packages, folder, "embodied_rl.train", *overrides, *changes)
    results = json.loads((folder / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["steps"] == 512
    assert isinstance(results, dict)
    return results


# ---- the package ----------------------------------------------------------------------------------------------------


def test_the_simulator_is_one_file_of_forty_lines() -> None:
    code = (EXAMPLE / "my_robot_sim" / "sim.py").read_text(encoding="utf-8")
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def example_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_robot_sim_under_test", EXAMPLE / "my_robot_sim" / "sim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_obeys_its_physics() -> None:
    module = example_module()
    sim = module.MyRobot(2)
    out = StepBuffers.allocate(sim.spec, 2)
    mass, length, gravity = module.MASS, module.LENGTH, 9.81
    # Equilibrium: the torque m g l sin θ holds the weight where it is.
    sim.reset([0, 1], [1, 2], out)
    angle = 0.7
    sim.state[0] = angle, 0.0, angle, 0
    hold = np.array([[mass * gravity * length * np.sin(angle)]])
    for _ in range(20):
        sim.step([0], hold, out)
    np.testing.assert_allclose(out.observation["state"][0], [angle, 0.0, angle], atol=1e-6)
    assert out.success[0]
    np.testing.assert_allclose(out.reward[0], 1.0, atol=1e-6)
    # A small swing without torque: the damped pendulum θ0 e^(-ct) (cos wt + c/w sin wt), c = b / 2ml², w² = g/l - c².
    start, decay = 0.01, module.DAMPING / (2 * mass * length**2)
    w = np.sqrt(gravity / length - decay**2)
    sim.state[1] = start, 0.0, 0.0, 0
    for step in range(1, 21):
        sim.step([1], np.zeros((1, 1)), out)
        t = step * module.DT * module.SUBSTEPS
        expected = start * np.exp(-decay * t) * (np.cos(w * t) + decay / w * np.sin(w * t))
        # The integrator is of first order: its error is some w·dt/2 = 2% of the amplitude.
        assert abs(out.observation["state"][1, 0] - expected) < 0.035 * start, step
    # Cut at its limit and not before.
    sim.reset([0], [3], out)
    cut = []
    for _ in range(module.LIMIT):
        sim.step([0], np.zeros((1, 1)), out)
        cut.append(bool(out.truncated[0]))
    assert cut == [False] * (module.LIMIT - 1) + [True]


def test_it_is_well_behaved(packages: Path, tmp_path: Path) -> None:
    told = json.loads(run(packages, tmp_path, "embodied_rl.catalog", "check", "my_robot", "--json").stdout)
    outcomes = {result["name"]: result["outcome"] for result in told["results"]}
    assert told["ok"]
    assert outcomes["snapshot"] == outcomes["new_process"] == outcomes["snapshot_new_process"] == "pass"
    with pytest.raises(SnapshotError):
        example_module().MyRobot(1).restore(0, b"\x93ERLSNAP")


def test_the_guide_shows_what_the_package_says() -> None:
    (shown,) = blocks((ROOT / "docs" / "add_a_simulator.md").read_text(encoding="utf-8"), "toml")
    guide, real = tomllib.loads(shown), tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    assert guide["project"]["entry-points"] == real["project"]["entry-points"]
    assert guide["tool"]["setuptools"]["package-data"] == real["tool"]["setuptools"]["package-data"]


def test_the_guide_names_every_check() -> None:
    text = (ROOT / "docs" / "add_a_simulator.md").read_text(encoding="utf-8")
    table = text.split("| Check | What must hold |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {name for name, _, _ in CHECKS}


# ---- the doors ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ci_sample
def test_training_by_the_name_that_the_package_brings(packages: Path, tmp_path: Path) -> None:
    trained(packages, tmp_path, "sim=my_robot")
    composed = yaml.safe_load(run(packages, tmp_path, "embodied_rl.train", "sim=my_robot", "--cfg", "job").stdout)["sim"]
    shipped = yaml.safe_load((EXAMPLE / "my_robot_sim" / "configs" / "sim" / "my_robot.yaml").read_text(encoding="utf-8"))
    assert {key: composed[key] for key in shipped} == shipped, "the package's own configuration file"
    assert composed["num_slots"] == 16, "what it does not say comes from train.yaml"
    # A checkpoint finds its simulator by its class.
    run(packages, tmp_path, "embodied_rl.evaluate", "checkpoint=run", "num_episodes=4")


@pytest.mark.slow
def test_training_by_the_name_of_the_class_alone(packages_without_configs: Path, tmp_path: Path) -> None:
    trained(packages_without_configs, tmp_path, "sim=my_robot", "sim.kwargs.gravity=1.6")
    composed = yaml.safe_load(run(packages_without_configs, tmp_path, "embodied_rl.train", "sim=my_robot", "--cfg", "job").stdout)["sim"]
    assert (composed["name"], composed["target"], composed["success_ends_episode"]) == ("my_robot", "my_robot_sim.sim:MyRobot", False)


@pytest.mark.slow
def test_training_by_target_needs_no_entry_point(packages: Path, tmp_path: Path) -> None:
    by_name = trained(packages, tmp_path, "sim=my_robot")
    other = tmp_path / "by_target"
    other.mkdir()
    shutil.copytree(packages / "my_robot_sim", other / "packages" / "my_robot_sim")  # without metadata: nothing is registered
    by_target = trained(other / "packages", other, "sim=custom", "sim.target=my_robot_sim.sim:MyRobot", "sim.success_ends_episode=true")
    # The same simulator through another door: the same training.
    assert by_target["episodes"] == by_name["episodes"]
    unknown = run(other / "packages", other, "embodied_rl.train", "sim=my_robot", status=2).stderr
    assert "Simulator 'my_robot' is not known." in unknown


def test_the_catalogue_and_messages_know_it(packages: Path, packages_without_configs: Path, tmp_path: Path) -> None:
    def listed(folder: Path) -> dict[str, object]:
        simulators = json.loads(run(folder, tmp_path, "embodied_rl.catalog", "simulators", "--json").stdout)["simulators"]
        assert "cartpole" in {entry["name"] for entry in simulators}
        (found,) = [entry for entry in simulators if entry["name"] == "my_robot"]
        assert isinstance(found, dict)
        return found

    both = listed(packages)
    assert both["description"] == "A one-jointed arm lifts a weight to an angle and holds it there."
    assert (both["task"], both["installed"], both["command"]) == ("LiftWeight", True, "python -m embodied_rl.train sim=my_robot")
    alone = listed(packages_without_configs)
    assert alone["description"] == "Registered by an installed package: my_robot_sim.sim:MyRobot."
    assert alone["command"] == "python -m embodied_rl.train sim=my_robot"
    message = run(packages, tmp_path, "embodied_rl.train", "sim=my_robt", status=2).stderr
    assert "Did you mean 'my_robot'?" in message


def test_entry_points_are_read_without_importing_the_package(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(packages))
    installed_targets.cache_clear()
    installed_config_folders.cache_clear()
    try:
        assert installed_targets("sim")["my_robot"] == "my_robot_sim.sim:MyRobot"
        assert installed_config_folders()["my_robot_sim"] == packages / "my_robot_sim" / "configs"
        assert "my_robot_sim" not in sys.modules
        with pytest.raises(UserError, match="Did you mean 'MyRobot'"):
            load_target("my_robot_sim.sim:MyRobt")
    finally:
        installed_targets.cache_clear()
        installed_config_folders.cache_clear()
        for name in [name for name in sys.modules if name.startswith("my_robot_sim.") or name == "my_robot_sim"]:
            del sys.modules[name]


def test_a_package_whose_folder_is_missing_stops_nobody(tmp_path: Path) -> None:
    metadata = tmp_path / "broken_sim-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-sim\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("[embodied_rl.configs]\nbroken = no_such_package\n", encoding="utf-8")
    done = run(tmp_path, tmp_path, "embodied_rl.catalog", "simulators", "--json")
    assert json.loads(done.stdout)["simulators"]
    assert "Entry point 'broken = no_such_package' of group 'embodied_rl.configs' names no package with a folder 'configs'" in done.stderr
