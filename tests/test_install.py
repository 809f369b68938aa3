"""What a new user installs: the main job's own lock, few dependencies, the console command, a container's steps, recipes for clusters."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embodied_rl.__main__ import COMMANDS
from tests.short_run import told
from tests.test_layers import COMMAND_LINES

ROOT = Path(__file__).resolve().parents[1]
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({names!r})


class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
"""
"""A sitecustomize.py that hides packages from an interpreter and from its worker processes."""


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(each.name): str(each.specifier) for each in found}


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment for processes that find only what requirements.train.lock brings."""
    from importlib.metadata import packages_distributions

    brought = pins("requirements.train.lock").keys() | {"embodied-rl", "pip"}
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier() and not {canonicalize_name(owner) for owner in owners} & brought and module != "embodied_rl"
    ]
    assert {"mujoco", "transformers", "cv2", "IPython", "h5py", "httpx", "pyarrow", "wandb"} <= set(hidden)
    folder = tmp_path_factory.mktemp("lean")
    (folder / "sitecustomize.py").write_text(HIDE.format(names=sorted(hidden)), encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run(environment: dict[str, str], cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_training_lock_is_a_part_of_the_whole() -> None:
    training, everything = pins("requirements.train.lock"), pins("requirements.lock")
    assert training.items() <= everything.items()
    assert len(training) < len(everything) / 2
    assert not training.keys() & {"transformers", "mujoco", "ray", "wandb", "opencv-python", "pytest"}


def test_project_itself_needs_twelve_packages_and_the_training_lock_has_them() -> None:
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [line.strip() for line in declared["options"]["install_requires"].splitlines()]
    direct = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len(direct) <= 12
    locked = pins("requirements.train.lock")
    assert [str(each) for each in direct if not each.specifier.contains(locked[canonicalize_name(each.name)][2:])] == []


BYTECODE = 75e6
"""Bytes of what training imports, compiled, and of pip."""


def test_what_make_train_installs_takes_one_and_a_half_gigabytes() -> None:
    import torch

    if Path(sys.prefix).resolve() != ROOT / ".venv" or torch.version.cuda is not None:
        pytest.skip("it is make that leaves out what training does not read, and CUDA's libraries take more")
    if shutil.which("strip") is None:
        pytest.skip("symbol tables stay where binutils are missing: 117 MB")
    sizes = {name: installed_bytes(name) for name in pins("requirements.train.lock") | {"pip": ""}}
    assert sizes["torch"] > 0.3e9
    assert sum(sizes.values()) + BYTECODE < 1.5e9, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def installed_bytes(name: str) -> int:
    """What an installed package takes, without its bytecode: `make everything` compiles all of it."""
    listed = [Path(str(each.locate())) for each in distribution(name).files or []]
    return sum(path.stat().st_size for path in listed if path.suffix != ".pyc" and path.is_file())


def test_every_command_line_is_a_command() -> None:
    lines = COMMAND_LINES - {"__main__", "commands", "episode_tools"} | {"episodes"}
    assert COMMANDS.keys() == lines
    listed = run(dict(os.environ), ROOT, "-m", "embodied_rl")
    assert all(re.search(rf"^  {name} ", listed.stdout, re.MULTILINE) for name in lines)
    unknown = run(dict(os.environ), ROOT, "-m", "embodied_rl", "catlog")
    assert unknown.returncode == 2
    assert "Did you mean 'catalog'?" in unknown.stderr
    helped = run(dict(os.environ), ROOT, "-m", "embodied_rl", "offline-eval", "--help")
    assert helped.stdout.startswith("usage: python -m embodied_rl.offline_eval")


MISSING = (
    (("sim=halfcheetah",), "mujoco"),
    (("sim=pixel_reach", "policy=cnn"), "mujoco"),
    (("experiment=fetch_reach",), "robotics"),
    (("experiment=frozenlake_text",), "language"),
)
ONE_AFTER_THE_OTHER = """
import sys
from embodied_rl.commands.train import main

for words in {commands!r}:
    sys.argv = ["train", *words]
    try:
        main()
    except SystemExit as ended:
        print("status", ended.code, file=sys.stderr)
"""
"""In one process, which imports torch once."""


def test_what_is_missing_is_one_line_with_the_command(lean: dict[str, str], tmp_path: Path) -> None:
    commands = [[*arguments, f"run_dir=run{number}"] for number, (arguments, _) in enumerate(MISSING)]
    done = run(lean, tmp_path, "-c", ONE_AFTER_THE_OTHER.format(commands=commands))
    lines = told(done.stderr)
    assert lines[1::2] == ["status 2"] * len(MISSING), done.stderr
    for line, (_, extra) in zip(lines[::2], MISSING, strict=True):
        assert line.startswith("error: ")
        assert f'pip install "embodied-rl[{extra}]"' in line


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of each step; every line of the file must be one, a comment, or the rest of one."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    steps = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"(ARG|FROM|RUN|COPY|ENV|WORKDIR|ENTRYPOINT|CMD) +(\S.*)", line)
            assert match is not None, line
            steps.append((match[1], match[2]))
    return steps


def test_dockerfile_copies_what_is_there_and_runs_what_make_runs(tmp_path: Path) -> None:
    steps = dockerfile()
    stages = [arguments.split(" AS ")[1] for instruction, arguments in steps if instruction == "FROM"]
    assert stages == ["system", "cpu", "cuda"]
    copied = [name for instruction, arguments in steps if instruction == "COPY" for name in arguments.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    needed = re.search(r"^\$\(STAMP\): (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert needed is not None
    assert {name.partition("/")[0] for name in needed[1].split()} <= set(copied), "make would find no rule for what is missing"
    for instruction, arguments in steps:
        if instruction == "RUN":
            script = tmp_path / "step.sh"
            script.write_text(arguments, encoding="utf-8")
            assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0, arguments
        if "make" in arguments.split() and instruction == "RUN" and "apt-get" not in arguments:
            assert re.match(r"make setup( TORCH=cpu)? && ", arguments)


def test_slurm_job_parses_and_its_command_composes() -> None:
    job = ROOT / "examples" / "cluster" / "slurm_ray.sbatch"
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0
    _composes(re.search(r"embodied-rl train (.*?) \"\$@\"", job.read_text(encoding="utf-8")))


def test_kubernetes_job_has_what_its_operator_asks_for() -> None:
    text = (ROOT / "examples" / "cluster" / "kuberay.yaml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all({"rayStartParams", "template"} <= group.keys() for group in groups)
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert {variable["name"] for variable in container["env"]} == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
    assert all(group["groupName"] for group in cluster["workerGroupSpecs"])
    assert cluster["rayVersion"] == pins("requirements.test.lock")["ray"][2:]
    _composes(re.search(r"embodied-rl train (.*)", text))


def _composes(command: re.Match[str] | None) -> None:
    from embodied_rl.compose import load_train_config

    assert command is not None
    words = [re.sub(r'"?\$\{?\w+\}?(:\$\w+)?"?', "here:1", word) for word in command[1].split()]
    config = load_train_config(words)
    assert config.hybrid.cluster == "ray"
    assert config.resume == "auto"
