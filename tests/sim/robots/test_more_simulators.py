"""gym-aloha, robosuite, more of gymnasium-robotics, and the lists of tasks: the real simulators behind their adapters."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.commands import catalog
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory, task_list
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots import aloha, gymnasium_robotics, libero, robosuite
from embodied_rl.sim.robots.mujoco_model import Drawing
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.trajectories import actions_for, assert_depends_on_seed_alone

draws = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    """Tests named after a simulator are skipped where it is not installed."""
    for name, adapter in (("aloha", aloha), ("robosuite", robosuite), ("libero", libero), ("robotics", gymnasium_robotics)):
        if name in request.node.name:
            try:
                adapter.tasks()
            except MissingExtraError as error:
                pytest.skip(str(error))


# ---- gym-aloha ----


PLAIN_ALOHA = """
import sys
from pathlib import Path
import gymnasium, gym_aloha
import numpy as np
folder = Path(sys.argv[1])
for task in sys.argv[2:]:
    env = gymnasium.make(f"gym_aloha/{task}", obs_type="pixels_agent_pos", disable_env_checker=True)
    first, _ = env.reset(seed=4)
    for action in np.load(folder / "actions.npy"):
        last, reward, *_ = env.step(action)
    qpos, picture = np.array(env.unwrapped._env.physics.data.qpos), last["pixels"]["top"]
    np.savez(folder / task, first=first["agent_pos"], last=last["agent_pos"], qpos=qpos, reward=reward, picture=picture)
"""


@pytest.fixture(scope="module")
def plain_aloha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same two actions and, of each task, what gym-aloha makes of them. It draws three pictures a step, so two have to
    do; in a process of its own, because dm_control's drawing does not notice what else draws beside it."""
    pytest.importorskip("gym_aloha")
    folder = tmp_path_factory.mktemp("aloha")
    np.save(folder / "actions.npy", np.random.default_rng(0).uniform(-1, 1, (2, 14)).astype(np.float32))
    subprocess.run([sys.executable, "-c", PLAIN_ALOHA, folder, *sorted(aloha.TASKS)], check=True)
    return folder


@draws
@pytest.mark.parametrize("task", sorted(aloha.TASKS))
def test_aloha_equals_gym_aloha(task: str, plain_aloha: Path) -> None:
    actions, expected = np.load(plain_aloha / "actions.npy"), np.load(plain_aloha / f"{task}.npz")
    sim = aloha.make(task, 1, observation="pixels_agent_pos", image_height=48, image_width=64, max_target_step_rad=None)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [4], out)
    np.testing.assert_array_equal(out.observation["agent_pos"][0], expected["first"].astype(np.float32))
    for action in actions:
        sim.step([0], action[None], out)
    np.testing.assert_array_equal(sim._physics[0].data.qpos, expected["qpos"])
    np.testing.assert_array_equal(out.observation["agent_pos"][0], expected["last"].astype(np.float32))
    assert out.reward[0] == expected["reward"]
    coarse = expected["picture"].reshape(48, 10, 64, 10, 3).mean((1, 3))
    assert np.abs(out.observation["rgb"][0] - coarse).mean() < 10, "another picture than gym-aloha's"
    assert coarse.std() > 20
    sim.close()


def test_aloha_places_the_cube_by_its_seed() -> None:
    """gym-aloha: x in [0, 0.2] m, y in [0.4, 0.6] m, z 5 cm, drawn by numpy's RandomState(seed)."""
    sim = aloha.make("AlohaTransferCube-v0", 2)
    assert sim.spec.observation == {"state": TensorSpec((35,))}
    assert (sim.spec.max_episode_steps, sim.spec.control_hz, sim.spec.action.dim) == (300, 50.0, 14)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, HELD_OUT_START + 3], out)
    for row, seed in ((0, 3), (1, HELD_OUT_START + 3)):
        x, y = np.random.RandomState(seed).uniform(size=2) * 0.2 + [0.0, 0.4]
        np.testing.assert_allclose(out.observation["state"][row, 28:], [x, y, 0.05, 1, 0, 0, 0], atol=1e-6)
    start = out.observation["state"][0, :14]
    assert (start >= sim.spec.action.low).all()
    assert (start <= sim.spec.action.high).all()


def test_aloha_limits_how_far_a_target_lies() -> None:
    sim = aloha.make("AlohaInsertion-v0", 1, max_target_step_rad=0.5)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    before = out.observation["state"][0, :14].astype(np.float64)
    action = np.array([sim.spec.action.high])
    action[0, 1] = before[1] + 0.25  # within reach: taken as it is
    sim.step([0], action, out)
    control = np.asarray(sim._physics[0].data.ctrl)
    np.testing.assert_allclose(
        control[:6], [before[0] + 0.5, before[1] + 0.25, *(np.minimum(action[0, 2:6], before[2:6] + 0.5))], atol=1e-6
    )
    assert control[6] == pytest.approx(0.058, abs=1e-6), "an open gripper is 58 mm at the finger, without a limit of its way"


def test_aloha_success_is_the_cube_in_the_left_hand_in_the_air() -> None:
    sim = aloha.make("AlohaTransferCube-v0", 1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    hold = out.observation["state"][0, :14][None]
    sim.step([0], hold, out)
    assert (out.reward[0], out.success[0]) == (0, False)
    physics = sim._physics[0]
    fingers = [physics.named.data.geom_xpos[f"vx300s_left/10_{side}_gripper_finger"] for side in ("left", "right")]
    with physics.reset_context():
        physics.data.qpos[-7:-4] = np.mean(fingers, axis=0)
    sim.step([0], hold, out)
    assert (out.reward[0], out.success[0], out.terminated[0]) == (4, True, False)


@pytest.mark.parametrize("task", sorted(aloha.TASKS))
def test_aloha_continues_bit_by_bit(task: str) -> None:
    """In another slot and in another simulator of the process, over 100 steps."""
    first, second = aloha.make(task, 2), aloha.make(task, 1)
    assert_depends_on_seed_alone(first)
    out, other = StepBuffers.allocate(first.spec, 2), StepBuffers.allocate(second.spec, 1)
    first.reset([0], [5], out)
    start, rng = out.observation["state"][0, :14].copy(), np.random.default_rng(1)
    low, high = np.array(first.spec.action.low), np.array(first.spec.action.high)
    actions = np.clip(start + rng.uniform(-0.4, 0.4, (140, 1, 14)), low, high).astype(np.float32)
    for action in actions[:40]:
        first.step([0], action, out)
    saved = first.snapshot(0)
    first.restore(1, saved)
    second.restore(0, saved)
    for action in actions[40:]:
        first.step([0, 1], np.concatenate([action, action]), out)
        second.step([0], action, other)
        state = np.asarray(first._physics[0].data.qpos)
        np.testing.assert_array_equal(state, first._physics[1].data.qpos)
        np.testing.assert_array_equal(state, second._physics[0].data.qpos)
        assert out.reward[0] == out.reward[1] == other.reward[0]
    assert first._elapsed == [140, 140]
    assert np.abs(out.observation["state"][0, :14] - start).max() > 0.1, "nothing moved"
    with pytest.raises(SnapshotError):
        aloha.make(next(name for name in aloha.TASKS if name != task), 1).restore(0, saved)


def test_aloha_names_are_checked() -> None:
    with pytest.raises(UserError, match="Did you mean 'AlohaInsertion-v0'"):
        aloha.make("AlohaInsertion", 1)
    with pytest.raises(UserError, match="Did you mean 'pixels'"):
        aloha.make("AlohaInsertion-v0", 1, observation="pixel")
    with pytest.raises(UserError, match=r"Camera 'topp' is not known. Did you mean 'top'"):
        aloha.make("AlohaInsertion-v0", 1, camera="topp")


# ---- robosuite ----


def plain_robosuite(task: str, seed: int, **kwargs: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """robosuite without the adapter."""
    suite = robosuite.import_robosuite()
    controller = suite.load_controller_config(default_controller="OSC_POSE")
    options = {"use_camera_obs": False, "has_offscreen_renderer": False, **kwargs}
    env = suite.make(task, robots="Panda", controller_configs=controller, reward_shaping=True, ignore_done=True, **options)
    np.random.seed(seed)  # noqa: NPY002  (what robosuite draws from)
    return env, env.reset()


@pytest.fixture(scope="module")
def lift() -> Iterator[SimEnv]:
    """Two environments, which several tests reset: each takes a second to make."""
    if importlib.util.find_spec("robosuite") is None:
        pytest.skip("robosuite is not installed")
    sim = robosuite.make("Lift", 2)
    yield sim
    sim.close()


def test_robosuite_equals_robosuite(lift: SimEnv) -> None:
    sim = lift
    assert sim.spec.observation == {"state": TensorSpec((42,))}
    assert (sim.spec.action.dim, sim.spec.control_hz, sim.spec.max_episode_steps, sim.spec.snapshots) == (7, 20.0, 500, "replay")
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([1, 0], [7, 8], out)
    env, expected = plain_robosuite("Lift", 7)
    for action in actions_for(sim, 15):
        sim.step([0, 1], np.stack([-action, action]), out)
        expected, reward, *_ = env.step(action)
    wanted = np.concatenate([expected["robot0_proprio-state"], expected["object-state"]])
    np.testing.assert_array_equal(out.observation["state"][1], wanted.astype(np.float32))
    assert out.reward[1] == np.float32(reward)


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("Lift", marks=pytest.mark.ci_sample), "Door", "Wipe", "TwoArmPegInHole"])
def test_robosuite_depends_on_its_seed_alone(task: str, lift: SimEnv) -> None:
    assert_depends_on_seed_alone(lift if task == "Lift" else robosuite.make(task, 2), num_steps=10)


def test_robosuite_success_is_a_lifted_cube() -> None:
    """A hand-written expert: above the cube, down, close, up. Success is the cube 4 cm above the table (0.8 m)."""
    sim = robosuite.make("Lift", 1, max_episode_steps=90)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    env, above, heights, successes = sim.envs[0], np.array([0, 0, 0.1]), [], []
    for t in range(90):
        cube, hand = np.array(env.sim.data.body_xpos[env.cube_body_id]), env._eef_xpos
        target = cube + above if t < 25 else cube if t < 50 else hand + above
        action = np.zeros((1, 7), np.float32)
        action[0, :3], action[0, 6] = np.clip(10 * (target - hand), -1, 1), 1.0 if t >= 40 else -1.0
        sim.step([0], action, out)
        heights.append(env.sim.data.body_xpos[env.cube_body_id][2])
        successes.append(bool(out.success[0]))
        assert not out.terminated[0]
    np.testing.assert_array_equal(successes, np.array(heights) > 0.8 + 0.04)
    assert successes[-1]
    assert not successes[0]
    assert out.truncated[0]


REPLAY = """
import hashlib, sys
import numpy as np
from embodied_rl.sim.factory import SimFactory
from embodied_rl.types import StepBuffers
sim = SimFactory("embodied_rl.sim.robots.robosuite:make", sys.argv[1]).make(1)
out, rng, digest = StepBuffers.allocate(sim.spec, 1), np.random.default_rng(0), hashlib.blake2b()
sim.reset([0], [7], out)
for _ in range(int(sys.argv[2])):
    sim.step([0], rng.uniform(sim.spec.action.low, sim.spec.action.high, (1, sim.spec.action.dim)).astype(np.float32), out)
    digest.update(out.observation["state"].tobytes() + out.reward.tobytes() + np.asarray(sim.envs[0].sim.data.qpos).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "steps"),
    [
        pytest.param("Stack", "80", marks=pytest.mark.ci_sample),
        *((task, "200") for task in ("Stack", "Door", "NutAssemblySquare", "PickPlace", "Wipe")),
    ],
)
def test_robosuite_replays_bit_by_bit_in_a_new_process(
    task: str, steps: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why its snapshots are "replay"."""
    other = subprocess.run([sys.executable, "-c", REPLAY, task, steps], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(sys, "argv", ["replay", task, steps])
    capsys.readouterr()
    exec(REPLAY, {})
    first, second = (said.strip().splitlines()[-1] for said in (other, capsys.readouterr().out))
    assert first == second
    assert len(first) == 128


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(robosuite.INSTRUCTIONS))
def test_every_robosuite_task_runs(task: str) -> None:
    sim = robosuite.make(task, 1, max_episode_steps=4)
    assert task in robosuite.tasks()
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [1], out)
    first = out.observation["state"].copy()
    for action in actions_for(sim, 4):
        sim.step([0], action[None], out)
    assert np.isfinite(out.observation["state"]).all()
    assert (out.observation["state"] != first).mean() > 0.3
    assert out.truncated[0]


@draws
@pytest.mark.slow
@pytest.mark.ci_sample
def test_robosuite_pictures_equal_its_own() -> None:
    """Pixel by pixel where multisampling is on; ours has the top row first, robosuite's the bottom row."""
    env, expected = plain_robosuite("Lift", 3, use_camera_obs=True, has_offscreen_renderer=True, camera_heights=64, camera_widths=64)
    own = np.array(expected["agentview_image"][::-1])
    drawing = Drawing(env.sim.model._model, hidden_groups=(robosuite.COLLISION_GROUP,), multisampling=True)
    np.testing.assert_array_equal(drawing.frame(env.sim.data._data, "agentview", 64, 64), own)
    drawing.close()
    env.close()
    sim = robosuite.make("Lift", 1, observation="rgb", image_size=64, cameras=["agentview", "robot0_eye_in_hand"])
    assert sim.spec.tensors["state"] == TensorSpec((32,)), "pictures leave the objects' state out"
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [3], out)
    difference = np.abs(out.observation["rgb"][0].astype(int) - own)
    assert difference.mean() < 3, "edges alone may differ"
    assert out.observation["rgb.robot0_eye_in_hand"].std() > 5
    sim.close()


def test_robosuite_names_are_checked_and_its_import_leaves_no_trace() -> None:
    assert logging.FileHandler.__name__ == "FileHandler"
    before = os.environ.get("MUJOCO_GL")
    robosuite.import_robosuite()
    assert os.environ.get("MUJOCO_GL") == before
    for arguments, words in (
        ({"task": "Lif"}, "task 'Lif' is not known. Did you mean 'Lift'"),
        ({"robots": "Pandda"}, "robot 'Pandda' is not known. Did you mean 'Panda'"),
        ({"controller": "OSC_POS"}, "controller 'OSC_POS' is not known. Did you mean 'OSC_POSE'"),
        ({"observation": "pixels"}, "Known: rgb, rgb.state, state"),
        ({"render_camera": "agentveiw"}, "Camera 'agentveiw' is not known. Did you mean 'agentview'"),
        ({"reward_scal": 2}, "'Lift' cannot be made with .*reward_scal"),
        ({"observation": "rgb+state", "cameras": []}, r"sim\.kwargs\.cameras is empty: observation=rgb\+state needs at least one"),
    ):
        with pytest.raises(UserError, match=words):
            SimFactory("embodied_rl.sim.robots.robosuite:make", arguments.pop("task", "Lift"), arguments).make(1)


# ---- gymnasium-robotics beyond Fetch ----

ROBOTICS = {  # task: (numbers of the state, steps, control rate)
    "HandReachDense-v3": (63 + 15, 50, 25.0),
    "HandManipulateBlockDense-v1": (61 + 7, 100, 25.0),
    "HandManipulateEgg_BooleanTouchSensors-v1": (153 + 7, 100, 25.0),
    "AdroitHandDoor-v1": (39, 200, 100.0),
    "AdroitHandRelocate-v1": (39, 200, 100.0),
    "FrankaKitchen-v1": (59, 280, 12.5),
    "PointMaze_UMazeDense-v3": (4 + 2, 300, 100.0),
    "AntMaze_UMazeDense-v5": (105 + 2 + 2, 700, 20.0),
}


@pytest.mark.parametrize("task", sorted(ROBOTICS))
def test_robotics_tasks_depend_on_their_seed_alone_and_continue(task: str) -> None:
    sim = gymnasium_robotics.make(task, 2)
    size, steps, rate = ROBOTICS[task]
    assert sim.spec.observation == {"state": TensorSpec((size,))}
    assert (sim.spec.max_episode_steps, sim.spec.control_hz, sim.spec.snapshots) == (steps, rate, "exact")
    assert sim.spec.reports_success
    assert sim.spec.instruction
    assert_depends_on_seed_alone(sim)
    out, actions = StepBuffers.allocate(sim.spec, 2), actions_for(sim, 130)
    sim.reset([0], [5], out)
    for action in actions[:30]:
        sim.step([0], action[None], out)
    sim.restore(1, sim.snapshot(0))
    for action in actions[30:]:
        sim.step([0, 1], np.stack([action, action]), out)
        np.testing.assert_array_equal(out.observation["state"][0], out.observation["state"][1])
        assert out.reward[0] == out.reward[1]


def test_robotics_lists_the_families_that_work() -> None:
    found = gymnasium_robotics.tasks()
    kinds = Counter(
        next(name for name in gymnasium_robotics.INSTRUCTIONS | {"FrankaKitchen": ""} if task.startswith(name)) for task in found
    )
    assert kinds["AntMaze"] == kinds["PointMaze"] == 20
    assert (kinds["AdroitHandDoor"], kinds["FrankaKitchen"], kinds["FetchReach"], kinds["HandReach"]) == (2, 1, 2, 2)
    assert not [task for task in found if task.startswith(("Ant-", "HalfCheetah"))], "old copies of gymnasium's own tasks"


def test_robotics_kitchen_success_is_that_nothing_is_left_to_do() -> None:
    sim = gymnasium_robotics.make("FrankaKitchen-v1", 1, tasks_to_complete=["microwave", "slide cabinet"])
    assert sim.spec.instruction == "open the microwave, open the slide cabinet"
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    still = np.zeros((1, 9), np.float32)
    sim.step([0], still, out)
    assert (out.reward[0], out.success[0], out.info[0]) == (0, False, {"success": False, "tasks_left": 2})
    data = gymnasium_robotics.inner(sim.envs[0]).data
    for joint, goal, left in (("microwave", -0.75, 1), ("slide_cabinet", 0.37, 0)):
        data.joint(joint).qpos[:] = goal
        sim.step([0], still, out)
        assert (out.reward[0], out.success[0], out.info[0]["tasks_left"]) == (1, left == 0, left)  # type: ignore[index]
    assert not out.terminated[0]
    with pytest.raises(UserError, match=r"no task 'microwav'. Did you mean 'microwave'"):
        gymnasium_robotics.make("FrankaKitchen-v1", 1, tasks_to_complete=["microwav"])


# ---- lists of tasks ----


@pytest.mark.parametrize(
    ("name", "some", "sets"),
    [
        ("aloha_insertion", "AlohaTransferCube-v0", ()),
        ("robosuite_lift", "NutAssemblySquare", ()),
        ("libero_goal", "libero_10/KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it", libero.SETS),
        ("fetch_push, a robotics task", "AntMaze_UMaze-v5", ()),
    ],
)
def test_catalog_lists_every_task_of_a_simulator(name: str, some: str, sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name = name.partition(",")[0]
    catalog.main(["tasks", name, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert some in document["tasks"]
    assert tuple(document["sets"]) == sets
    catalog.main(["tasks", name])
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [*(f"{each}  (several tasks)" for each in sets), *document["tasks"]]
    assert f"{len(document['tasks'])} tasks" in printed.err


def test_a_simulator_without_a_list_says_so() -> None:
    with pytest.raises(UserError, match=r"'tests.sim.robots.trajectories' has no list of tasks"):
        task_list("tests.sim.robots.trajectories:episode")
    with pytest.raises(UserError, match="cannot be imported"):
        task_list("no_such_package.sim:make")


@pytest.mark.parametrize(
    ("adapter", "module", "extra"),
    [(aloha, "gym_aloha.constants", "aloha"), (robosuite, "robosuite", "robosuite"), (libero, "libero", "libero")],
)
def test_a_missing_package_names_its_extra(adapter: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if adapter is libero:
        libero._package.cache_clear()
        libero.suites.cache_clear()
    known = {aloha: "AlohaInsertion-v0", robosuite: "Lift", libero: "libero_goal/0"}[adapter]
    try:
        for attempt in (adapter.tasks, lambda: adapter.make(known, 1)):
            with pytest.raises(MissingExtraError, match=rf'pip install "embodied-rl\[{extra}\]"'):
                attempt()
    finally:
        libero._package.cache_clear()
        libero.suites.cache_clear()
