"""ManiSkill on the CPU: numbers bit for bit as ManiSkill's own, no Vulkan needed, no question asked on the keyboard."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.sim.rendering import vulkan_available
from embodied_rl.sim.robots import maniskill
from embodied_rl.sim.robots.maniskill import ManiSkillSim
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.trajectories import assert_depends_on_seed_alone, assert_equal, episode

RECONFIGURE = {"reconfigure": True}

UNPATCHED_COMPARISON = """
import numpy as np, torch
import gymnasium
from embodied_rl.errors import MissingAssetsError, UserError
from embodied_rl.sim.robots import maniskill
from embodied_rl.sim.robots.maniskill_state import no_render_materials
from embodied_rl.sim.rendering import vulkan_available
from embodied_rl.types import StepBuffers

assert not vulkan_available()
maniskill.registered_tasks()
tasks = [
    ("PushCube-v1", "pd_joint_delta_pos"),
    ("PickCube-v1", "pd_ee_delta_pose"),
    ("StackCube-v1", "pd_ee_delta_pos"),
    ("MS-HopperHop-v1", None),
]
expected = {}
for task, control in tasks:
    with no_render_materials(True):
        arguments = dict(obs_mode="state", control_mode=control, reward_mode="normalized_dense")
        env = gymnasium.make(task, sim_backend="physx_cpu", render_backend="none", **arguments)
        observation, _ = env.reset(seed=11)
    rng, low, high = np.random.default_rng(0), env.action_space.low, env.action_space.high
    actions = [rng.uniform(low, high).astype(np.float32) for _ in range(60)]
    rows = [(observation.numpy()[0].copy(), 0.0, False, False)]
    for action in actions:
        observation, reward, _, truncated, info = env.step(action)
        rows.append((observation.numpy()[0].copy(), float(reward), bool(info.get("success", False)), bool(truncated)))
    expected[task] = actions, rows
from mani_skill.utils.structs.pose import Pose
assert not hasattr(Pose, "_embodied_rl_fast"), "the comparison has to run unpatched first"
for task, control in tasks:
    sim = maniskill.make(task, 2, control_mode=control)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [5, 11], out)
    actions, rows = expected[task]
    for t, row in enumerate(rows):
        if t:
            sim.step([0, 1], np.stack([-actions[t - 1], actions[t - 1]]), out)
        got = (out.observation["state"][1], out.reward[1], out.success[1], out.truncated[1])
        assert (got[0] == row[0]).all(), (task, t, np.abs(got[0] - row[0]).max())
        assert got[1] == np.float32(row[1]) and got[2] == row[2] and got[3] == row[3], (task, t, got[1:], row[1:])
    print("equal", task, len(rows))
for task, words in [("PickSingleYCB-v1", "ycb"), ("PickCubeWidowXAI-v1", "widowxai"), ("ReplicaCAD_SceneManipulation-v1", "replica_cad")]:
    try:
        maniskill.make(task, 1)
    except MissingAssetsError as error:
        assert words in str(error) and "mani_skill.utils.download_asset" in str(error), error
        print("refused", task)
assert not {"PickSingleYCB-v1", "PickCubeWidowXAI-v1"} & set(maniskill.tasks()) and len(maniskill.tasks()) >= 40
try:
    maniskill.make("PushCube-v1", 1, render=True)
except UserError as error:
    print("no pictures:", error)
"""


PICTURES = """
import os, sys, tempfile
import gymnasium, numpy as np
from PIL import Image
from embodied_rl.sim.rendering import configure_rendering
configure_rendering()
import mani_skill.envs, sapien
from mani_skill.envs.tasks import PushCubeEnv
from mani_skill.utils.registration import register_env
from embodied_rl.sim.robots import maniskill_state

@register_env("Sky-v1", max_episode_steps=50)
class Sky(PushCubeEnv):
    def _load_lighting(self, options):
        super()._load_lighting(options)
        files = [f"{folder}/{side}.png" for side in range(6)]
        for file, side in zip(files, np.random.default_rng(0).integers(0, 255, (6, 8, 8, 3), np.uint8)):
            Image.fromarray(side).save(file)
        for scene in self.scene.sub_scenes:
            scene.set_environment_map_from_files(*files)

def drawn():
    env = gymnasium.make(sys.argv[1], obs_mode="rgb", render_mode="rgb_array", sim_backend="physx_cpu", render_backend="cpu")
    seen = [env.reset(seed=1)[0]["sensor_data"]["base_camera"]["rgb"].numpy()]
    for _ in range(3):
        seen.append(env.step(np.full(env.action_space.shape, 0.3, np.float32))[0]["sensor_data"]["base_camera"]["rgb"].numpy())
    return [*seen, env.render().numpy()]

with tempfile.TemporaryDirectory() as folder:
    theirs = drawn()
    maniskill_state.quick_first_picture()
    given = []
    original = maniskill_state.without_environment_light
    maniskill_state.without_environment_light = lambda camera: given.append(original(camera))
    ours = drawn()
assert all(picture.std() > 5 for picture in theirs)
assert bool(given) is (sys.argv[1] != "Sky-v1")
assert all((one == other).all() for one, other in zip(theirs, ours, strict=True))
print("equal", len(ours), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def pushcube() -> ManiSkillSim:
    try:
        maniskill.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))
    return maniskill.make("PushCube-v1", 2, control_mode="pd_joint_delta_pos")


def test_bit_for_bit_as_maniskill_itself_without_vulkan_assets_or_keyboard(pushcube: ManiSkillSim, tmp_path: Path) -> None:
    """In a fresh process with no Vulkan driver, no assets and a closed standard input."""
    hidden = {
        "VK_ICD_FILENAMES": str(tmp_path / "none.json"),
        "VK_DRIVER_FILES": str(tmp_path / "none.json"),
        "MS_ASSET_DIR": str(tmp_path),
    }
    environment = {**{key: value for key, value in os.environ.items() if key != "MS_SKIP_ASSET_DOWNLOAD_PROMPT"}, **hidden}
    done = subprocess.run(
        [sys.executable, "-c", UNPATCHED_COMPARISON],
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("equal") for line in lines) == 4, done.stdout
    assert sum(line.startswith("refused") for line in lines) == 3, done.stdout
    assert any(line.startswith("no pictures") and "Vulkan" in line for line in lines), done.stdout


def test_spec(pushcube: ManiSkillSim) -> None:
    spec = pushcube.spec
    assert spec.observation == {"state": TensorSpec((35,))}
    assert (spec.action.dim, spec.action.low, spec.action.high) == (8, (-1.0,) * 8, (1.0,) * 8)
    assert (spec.max_episode_steps, spec.control_hz, spec.reports_success, spec.can_render) == (50, 20.0, True, False)
    assert spec.instruction == "push the cube to the target"


def test_depends_on_the_seed_alone_when_reconfigured(pushcube: ManiSkillSim) -> None:
    assert_depends_on_seed_alone(pushcube, RECONFIGURE)


def test_neighbours_do_not_matter(pushcube: ManiSkillSim) -> None:
    alone = episode(pushcube, 2, {1: 7}, 15, RECONFIGURE)
    together = episode(pushcube, 2, {0: 8, 1: 7}, 15, RECONFIGURE, order=[1, 0])
    assert_equal(alone[1], together[1])


def test_a_file_that_disables_contacts_disables_its_own() -> None:
    """The cart-pole's file does; shapes ignore each other whose third collision groups have a bit in common."""
    maniskill.make("MS-CartpoleBalance-v1", 1).close()
    sim = maniskill.make("MS-HumanoidStand-v1", 1)
    links = {link.name: link for link in sim.envs[0].agent.robot.links}
    right, left = (
        [shape.get_collision_groups()[2] for shape in links[name]._bodies[0].collision_shapes] for name in ("right_foot", "left_foot")
    )
    sim.close()
    assert len(right) == len(left) == 2
    assert not any(one & other for one in right for other in left), "one foot would pass through the other"


def test_initial_state_follows_the_seed_without_reconfiguring(pushcube: ManiSkillSim) -> None:
    first, second = episode(pushcube, 2, {0: 3, 1: 4}, 3), episode(pushcube, 2, {0: 4, 1: 3}, 3)
    np.testing.assert_array_equal(first[0][0], second[1][0])
    assert (first[0][0] != first[1][0]).any()


def test_truncation_counts_from_each_reset(pushcube: ManiSkillSim) -> None:
    out, zeros = StepBuffers.allocate(pushcube.spec, 2), np.zeros((2, 8), np.float32)
    pushcube.reset([0, 1], [1, 2], out)
    for t in range(1, 61):
        pushcube.step([0, 1], zeros, out)
        assert out.truncated.tolist() == [t == 50, t == 60], t
        if t in (10, 50):
            pushcube.reset([1] if t == 10 else [0], [3], out)


def test_success_is_reported_and_ends_nothing(pushcube: ManiSkillSim) -> None:
    """The cube put onto the target: success, full reward (1 in normalised form), neither terminated nor truncated."""
    out = StepBuffers.allocate(pushcube.spec, 2)
    pushcube.reset([0, 1], [1, 2], out)
    task = pushcube.envs[1]
    import torch

    with torch.inference_mode():
        pose = task.obj.pose
        pose.raw_pose[:, :2] = task.goal_region.pose.p[:, :2]
        task.obj.set_pose(pose)
    pushcube.step([0, 1], np.zeros((2, 8), np.float32), out)
    assert out.success.tolist() == [False, True]
    assert out.reward[1] == 1.0
    assert not out.terminated.any()
    assert not out.truncated.any()
    assert out.info[1] == {"elapsed_steps": 1, "success": True}


def test_two_robots_take_one_flat_action(pushcube: ManiSkillSim) -> None:
    sim = maniskill.make("TwoRobotPickCube-v1", 1, control_mode="pd_joint_delta_pos")
    assert sim.spec.action.dim == 16
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    left, right = (agent.robot for agent in sim.envs[0].agent.agents)
    before = left.get_qpos().clone(), right.get_qpos().clone()
    action = np.zeros((1, 16), np.float32)
    action[0, 8 + 3] = 1.0  # the second robot's fourth joint
    for _ in range(3):
        sim.step([0], action, out)
    moved = [float((robot.get_qpos() - start)[0, 3].abs()) for robot, start in zip((left, right), before, strict=True)]
    assert moved[0] < 0.01 < 0.05 < moved[1]
    sim.close()


def test_errors_name_the_nearest(pushcube: ManiSkillSim) -> None:
    with pytest.raises(UserError, match=r"'PushCub-v1' is not known. Did you mean 'PushCube-v1'"):
        maniskill.make("PushCub-v1", 1)
    with pytest.raises(UserError, match=r"cannot be made with .*pd_joint_dlta"):
        maniskill.make("PushCube-v1", 1, control_mode="pd_joint_dlta")
    with pytest.raises(UserError, match=r"no reward_mode 'dens'. Did you mean 'dense'"):
        maniskill.make("PushCube-v1", 1, reward_mode="dens")
    with pytest.raises(
        UserError, match=r"no robot 'pandaa' \(robot_uids\) for task 'PushCube-v1'. Did you mean 'panda'\? Known: fetch, panda."
    ):
        maniskill.make("PushCube-v1", 1, robot_uids="pandaa")
    with pytest.raises(UserError, match=r"no robot 'fetsh' .* Known: panda_wristcam"):
        maniskill.make("TwoRobotPickCube-v1", 1, robot_uids=["panda_wristcam", "fetsh"])
    with pytest.raises(UserError, match=r"no robot '7' .* Known: fetch, panda."):
        maniskill.make("PushCube-v1", 1, robot_uids=7)
    with pytest.raises(UserError, match=r"'PushT-v1' cannot be made with .* Give it a renderer: \+sim\.kwargs\.render=true"):
        maniskill.make("PushT-v1", 1)  # it reads the size of a shape that it draws
    with pytest.raises(UserError, match=r"render=True"):
        pushcube.render(0)


def test_missing_assets_are_an_error_and_not_a_question(pushcube: ManiSkillSim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("ManiSkill asked on the keyboard"))
    from mani_skill.utils import assets

    monkeypatch.setattr(assets, "is_data_source_downloaded", lambda name: False)
    with pytest.raises(MissingAssetsError, match=r"ycb.*python -m mani_skill.utils.download_asset PickSingleYCB-v1"):
        maniskill.make("PickSingleYCB-v1", 1)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    with pytest.raises(MissingExtraError, match=r'pip install "embodied-rl\[maniskill\]"'):
        maniskill.make("PushCube-v1", 1)


def test_importing_the_adapter_brings_neither_torch_nor_maniskill() -> None:
    code = "import sys, embodied_rl.sim.robots.maniskill; assert not {'torch', 'mani_skill', 'sapien'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


@pytest.mark.slow
def test_pictures(pushcube: ManiSkillSim) -> None:
    """In this process, after simulators without pictures: the stand-in materials are gone."""
    if not vulkan_available():
        pytest.skip("no Vulkan device")
    sim = maniskill.make("PushCube-v1", 1, control_mode="pd_joint_delta_pos", obs_mode="rgb+state", camera_size=32, render_size=64)
    assert sim.spec.observation == {"state": TensorSpec((35,)), "rgb": TensorSpec((32, 32, 3), "uint8")}
    out, plain = StepBuffers.allocate(sim.spec, 1), StepBuffers.allocate(pushcube.spec, 2)
    sim.reset([0], [5], out, RECONFIGURE)
    pushcube.reset([0], [5], plain, RECONFIGURE)
    np.testing.assert_array_equal(out.observation["state"][0], plain.observation["state"][0])
    assert out.observation["rgb"].std() > 5
    assert sim.render(0).shape == (64, 64, 3)
    assert sim.render(0).std() > 5


@pytest.mark.slow
@pytest.mark.parametrize("task", ["PushCube-v1", "PegInsertionSide-v1", "Sky-v1"])
def test_pictures_are_maniskills_own_with_and_without_an_environment_map(task: str, pushcube: ManiSkillSim) -> None:
    """SAPIEN's table of reflectances counts only where light comes from an environment map: elsewhere one entry replaces it."""
    if not vulkan_available():
        pytest.skip("no Vulkan device")
    done = subprocess.run([sys.executable, "-c", PICTURES, task], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("equal"), done.stdout
