"""LIBERO: its tables, files and messages, and the simulator itself with stand-ins for its meshes (`libero_stand_ins`)."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots import libero, robosuite
from embodied_rl.sim.robots.libero import chosen_states, read_init_states
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.train import train
from embodied_rl.types import StepBuffers
from tests.golden.runs import make_openvla
from tests.sim.robots.libero_stand_ins import write_stand_ins

draws = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        libero.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def test_libero_tasks_equal_its_own_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIBERO itself, in a process of its own with our configuration file and nobody at the keyboard."""
    code = (
        "import json\nfrom libero.libero.benchmark import get_benchmark_dict\n"
        f"suites = {{name: get_benchmark_dict()[name]() for name in {list(libero.SETS)}}}\n"
        "print(json.dumps({name: [[task.name, task.language] for task in suite.tasks] for name, suite in suites.items()}))"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = {**os.environ, "HOME": str(tmp_path), "LIBERO_CONFIG_PATH": str(libero.configuration_folder())}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=280
    )
    expected = json.loads(done.stdout.strip().splitlines()[-1])
    assert {suite: len(rows) for suite, rows in expected.items()} == dict(zip(libero.SETS, (10, 10, 10, 90, 10), strict=True))
    assert libero.suites() == {suite: [name for name, _ in rows] for suite, rows in expected.items()}
    for suite, rows in expected.items():
        for name, language in rows:
            assert libero.instruction(f"{suite}/{name}") == language
            assert (libero._package() / "bddl_files" / suite / f"{name}.bddl").is_file()
    assert len(libero.tasks()) == 130


def test_libero_initial_states_equal_what_torch_reads() -> None:
    torch = pytest.importorskip("torch")
    import _codecs

    from numpy._core.multiarray import _reconstruct

    plain = [(_reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype, np.dtypes.Float64DType, _codecs.encode]
    for task in libero.tasks()[::9]:
        path = libero._package() / "init_files" / f"{task}.pruned_init"
        with torch.serialization.safe_globals(plain):
            expected = torch.load(path, weights_only=True)
        states = read_init_states(path)
        np.testing.assert_array_equal(states, expected)
        assert states.shape[0] == 50


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("libero-evil",))


@pytest.mark.parametrize("content", [Evil(), [1.0, 2.0], np.zeros((3, 2), np.float32), np.asfortranarray(np.ones((50, 4)))])
def test_libero_states_of_another_form_are_refused_and_not_run(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "task.pruned_init"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match="cannot be read"):
        read_init_states(path)
    assert not (tmp_path / "libero-evil").exists()


def test_libero_states_for_training_and_evaluation_never_meet() -> None:
    training, held_out = range(5000), range(HELD_OUT_START, HELD_OUT_START + 5000)
    tasks = libero._expand("libero_goal")
    seen = {name: Counter(libero.episode_of(tasks, "split", seed) for seed in seeds) for name, seeds in (("t", training), ("h", held_out))}
    assert not seen["t"].keys() & seen["h"].keys()
    assert {state for _, state in seen["t"]} == set(range(40))
    assert {state for _, state in seen["h"]} == set(range(40, 50))
    once = Counter(libero.episode_of(tasks, "split", seed) for seed in range(HELD_OUT_START + 3, HELD_OUT_START + 103))
    assert (len(once), set(once.values())) == (100, {1}), "a hundred consecutive seeds are each task with each state, once"
    everything = Counter(libero.episode_of(tasks, "all", seed) for seed in range(500))
    assert (len(everything), set(everything.values())) == (500, {1})
    assert not set(chosen_states("train", 0)) & set(chosen_states("test", 0))


def test_libero_without_assets_names_the_command_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question was asked"))
    with pytest.raises(
        MissingAssetsError, match=r"hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets"
    ):
        libero.make("libero_spatial/0", 1, assets_dir=str(tmp_path))
    for name in libero.ASSET_FOLDERS:
        (tmp_path / name).mkdir()
    assert libero.assets_folder(tmp_path) == tmp_path


def test_libero_configuration_is_the_users_or_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = libero.configuration_folder()
    assert folder.is_relative_to(tmp_path / ".cache" / "embodied_rl")
    paths = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert paths.keys() == {"benchmark_root", "bddl_files", "init_states", "datasets", "assets"}
    assert len(list(Path(paths["bddl_files"]).rglob("*.bddl"))) == 130
    (tmp_path / ".libero").mkdir()
    (tmp_path / ".libero" / "config.yaml").write_text("{}", encoding="utf-8")
    assert libero.configuration_folder() == tmp_path / ".libero"


def test_libero_orientation_equals_robosuites() -> None:
    pytest.importorskip("robosuite")
    with robosuite.quiet_import():
        from robosuite.utils.transform_utils import quat2axisangle
    for quaternion in np.random.default_rng(0).normal(size=(50, 4)):
        unit = quaternion / np.linalg.norm(quaternion)
        np.testing.assert_allclose(libero.axis_angle(unit), quat2axisangle(unit.copy()), atol=1e-7)
    np.testing.assert_array_equal(libero.axis_angle(np.array([0.0, 0.0, 0.0, 1.0])), np.zeros(3))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(libero.axis_angle(np.array([0.0, 0.0, half, half])), [0, 0, np.pi / 2])  # a quarter turn about z


def test_libero_names_are_checked() -> None:
    for arguments, words in (
        ({"task": "libero_spacial"}, "suite 'libero_spacial' is not known. Did you mean 'libero_spatial'"),
        ({"task": "libero_goal/10"}, "'libero_goal/10' is not known. Or a number below 10"),
        ({"task": "libero_goal/turn_on_the_stov"}, "Did you mean 'turn_on_the_stove'"),
        ({"init_states": "tests"}, "Did you mean 'test'"),
        ({"orientation": "upsidedown"}, "Known: raw, rotated, upright"),
        ({"observation": "state"}, "The objects of the tasks of 'libero_goal' differ"),
        ({"cameras": []}, r"sim\.kwargs\.cameras is empty: observation=rgb needs at least one"),
    ):
        with pytest.raises(UserError, match=words):
            libero.make(**{"task": "libero_goal", "num_envs": 1, **arguments})  # type: ignore[arg-type]


# ---- with stand-ins for the meshes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_stand_ins(tmp_path_factory.mktemp("assets") / "libero"))


@draws
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_object", "libero_spatial"])
def test_libero_suites_begin_every_task_at_its_stored_state(suite: str, assets: str) -> None:
    """All ten tasks in turn: joints and objects lie where the file says (settling moves them a little), each in its own words."""
    sim = libero.make(suite, 1, assets_dir=assets, image_size=64)
    out, pictures = StepBuffers.allocate(sim.spec, 1), []
    for seed in range(10):
        sim.reset([0], [seed], out)
        task, number = sim.task_of(seed)
        assert (task, number) == (f"{suite}/{libero.suites()[suite][seed]}", 0)
        assert (sim.many_tasks, sim.task_at(0)) == (True, task)
        assert out.observation["instruction"][0] == libero.instruction(task)
        stored = libero._init_states(task)[number]
        found = sim.envs[0].sim.data.qpos
        np.testing.assert_allclose(found[:7], stored[1:8], atol=0.1, err_msg="the arm only sags while things settle")
        first = 9  # behind the arm's joints and the two fingers
        places = np.arange(first, first + 35, 7)[:, None] + np.arange(2)
        np.testing.assert_allclose(found[places], stored[1:][places], atol=0.1, err_msg="objects fall, they do not wander")
        assert 10 < out.observation["rgb"].std() < 100
        pictures.append(out.observation["rgb"][0].copy())
    assert all((one != other).any() for one, other in pairwise(pictures))
    sim.close()


@draws
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", ["libero_object", "libero_spatial"])
def test_libero_is_well_behaved(suite: str, assets: str) -> None:
    """All that `catalog check` asks for: seeds, rows, other processes, replays."""
    kwargs = {"assets_dir": assets, "image_size": 32, "cameras": ["agentview"], "max_episode_steps": 12}
    report = check_sim(SimFactory("embodied_rl.sim.robots.libero:make", suite, kwargs), num_envs=2, steps=8, continuation_steps=8)
    assert report.ok, report


@draws
@pytest.mark.slow
def test_libero_goal_is_reached_when_the_thing_lies_in_the_basket(assets: str) -> None:
    """LIBERO's own predicate over our boxes: the soup put into the basket by hand counts, and the reward comes with it."""
    sim = libero.make("libero_object/0", 1, assets_dir=assets, image_size=32, cameras=("agentview",))
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [5], out)
    hold = np.array([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]], np.float32)
    sim.step([0], hold, out)
    assert (out.reward[0], out.success[0], out.terminated[0]) == (0.0, False, False)
    env = sim.envs[0]
    basket = env.sim.data.body_xpos[env.obj_body_id["basket_1"]]
    pose = np.array([basket[0], basket[1], basket[2] + 0.03, 1.0, 0.0, 0.0, 0.0])
    env.sim.data.set_joint_qpos(env.objects_dict["alphabet_soup_1"].joints[0], pose)
    env.sim.forward()
    sim.step([0], hold, out)
    assert (out.reward[0], out.success[0], out.terminated[0]) == (1.0, True, False)
    sim.close()


@draws
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_object", "libero_spatial"])
def test_openvla_oft_trains_on_libero(suite: str, assets: str, tmp_path: Path) -> None:
    """GRPO on groups that begin at one stored state, chunks of two, with the tiny reference model: as `libero_grpo_openvla_oft`."""
    folder = make_openvla(tmp_path / "model")
    words = [
        "experiment=libero_grpo_openvla_oft", f"sim={suite}", f"policy.path={folder}", "policy.unnorm_key=bridge_orig", "policy.chunk=2",
        "policy.prompt_tokens=64", "policy.dtype=float32", "policy.gradient_checkpointing=false", f"sim.kwargs.assets_dir={assets}",
        "sim.kwargs.image_size=64", "sim.num_slots=2", "sim.num_workers=1", "sim.max_episode_steps=4", "algorithm.groups.group_size=2",
        "algorithm.groups.groups_per_step=1", "algorithm.groups.filters=[]", "algorithm.minibatch_size=8", "algorithm.micro_batch_size=4",
        "algorithm.learning_rate=1e-4", "hybrid.precision=float32", "video.enabled=no", "logger=quiet", "evaluation.num_episodes=2",
        f"run_dir={tmp_path / 'run'}", "total_steps=16",
    ]  # fmt: skip
    train(load_train_config(words))
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("train/policy_loss" in row for row in logged) == 2, "sixteen steps are two groups of two episodes of four"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["steps"] == 16


@draws
@pytest.mark.slow
def test_libero_equals_its_own_wrapper(assets: str) -> None:
    """State and picture after settling, of a task of a suite, against LIBERO's own environment."""
    sim = libero.make("libero_spatial", 1, image_size=64, init_states="all", orientation="rotated", assets_dir=assets)
    out, seed = StepBuffers.allocate(sim.spec, 1), 23
    sim.reset([0], [seed], out)
    task, number = libero.episode_of(sim.tasks, "all", seed)
    assert (number, out.observation["instruction"][0]) == (2, libero.instruction(task))
    from libero.libero.envs import OffScreenRenderEnv

    description = str(libero._package() / "bddl_files" / f"{task}.bddl")
    own = OffScreenRenderEnv(bddl_file_name=description, camera_heights=64, camera_widths=64)
    own.seed(0)
    own.reset()
    observation = own.set_init_state(libero._init_states(task)[number])
    for _ in range(10):
        observation, *_ = own.step([0, 0, 0, 0, 0, 0, -1])
    np.testing.assert_array_equal(sim.envs[0].sim.data.qpos, own.sim.data.qpos)
    far = np.abs(out.observation["rgb"][0].astype(int) - observation["agentview_image"][::-1, ::-1])
    assert far.max() <= 1, "drawn by two contexts: a few edges differ in their last bit"
    assert (far > 0).mean() < 0.01
    np.testing.assert_array_equal(out.observation["state"][0, :3], observation["robot0_eef_pos"].astype(np.float32))
    sim.close()
    own.close()
