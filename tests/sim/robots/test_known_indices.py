"""Simulators with look-ups taken out of their steps, against the packages' own steps, bit for bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.robots import gymnasium_robotics, metaworld, pusht, robosuite
from embodied_rl.sim.robots.robosuite import CompiledModels, KnownSite
from embodied_rl.types import StepBuffers

TASKS = ("FetchReach-v4", "FetchPickAndPlaceDense-v4", "HandReachDense-v3")
MAZES = ("PointMaze_UMazeDense-v3", "PointMaze_Open-v3")
SEEDS = (0, 7, 23)


def require_equal(ours: list[Any], plain: list[Any]) -> None:
    """Raises AssertionError where a bit differs."""
    for mine, theirs in zip(ours, plain, strict=True):
        for part, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(part, other)


def played(sim: SimEnv, seeds: Sequence[int], num_steps: int = 8) -> list[Any]:
    """What random actions lead to, in an episode of each seed; at a step in their midst the state is saved, lost and restored."""
    out, found, dim = StepBuffers.allocate(sim.spec, 1), [], sim.spec.action.dim
    for seed in seeds:
        random = np.random.default_rng(seed)
        sim.reset([0], [seed], out)
        for number in range(num_steps):
            if number == num_steps // 2:
                saved = sim.snapshot(0)  # type: ignore[attr-defined]
                sim.step([0], random.uniform(-1.0, 1.0, (1, dim)).astype(np.float32), out)
                sim.restore(0, saved)  # type: ignore[attr-defined]
            sim.step([0], random.uniform(-1.0, 1.0, (1, dim)).astype(np.float32), out)
            parts = [part[0].copy() for part in out.observation.values()]
            found.append([*parts, out.reward.copy(), out.terminated.copy(), out.truncated.copy(), out.success.copy()])
    sim.close()
    return found


@pytest.mark.parametrize("task", TASKS)
def test_fetch_and_hand_equal_the_packages_own_steps(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium_robotics")
    quick = gymnasium_robotics.make(task, 1)
    changed = quick.envs[0].unwrapped._utils  # type: ignore[attr-defined]
    ours = played(quick, SEEDS)
    monkeypatch.setattr(gymnasium_robotics, "know_indices", lambda env: None)
    plain = gymnasium_robotics.make(task, 1)
    assert isinstance(changed, SimpleNamespace)
    assert isinstance(plain.envs[0].unwrapped._utils, ModuleType)  # type: ignore[attr-defined]
    require_equal(ours, played(plain, SEEDS))


@pytest.mark.parametrize("task", MAZES)
@pytest.mark.parametrize("continuing", [True, False])
def test_point_mazes_step_as_their_package_does(task: str, continuing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed towards the goal, which is reached, and begun anew or moved on to the next."""
    pytest.importorskip("gymnasium_robotics")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def play() -> list[Any]:
        sim = gymnasium_robotics.make(task, 1, continuing_task=continuing, reset_target=True)
        out, found = StepBuffers.allocate(sim.spec, 1), []
        for seed in SEEDS:
            sim.reset([0], [seed], out)
            for _ in range(120):
                x, y, vx, vy, goal_x, goal_y = out.observation["state"][0]
                push = 4.0 * np.array([[goal_x - x, goal_y - y]]) - np.array([[vx, vy]])
                sim.step([0], push.astype(np.float32), out)
                found.append([out.observation["state"].copy(), out.reward.copy(), out.terminated.copy(), out.success.copy()])
        sim.close()
        return found

    ours = play()
    monkeypatch.setattr(gymnasium_robotics, "know_indices", lambda env: None)
    require_equal(ours, play())
    assert {bool(success) for *_, success in ours} == {True, False}
    assert list(tmp_path.iterdir()) == [], "the model's file is removed"


METAWORLD = ("push-v3", "drawer-open-v3", "stick-pull-v3", "door-open-v3")  # one object, a quaternion of MuJoCo's, two objects, a handle


@pytest.mark.parametrize("task", [*METAWORLD, pytest.param("all", marks=pytest.mark.slow)])
def test_metaworlds_steps_are_its_own(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("metaworld")
    from metaworld.utils import reward_utils

    for name in metaworld.tasks() if task == "all" else [task]:
        ours = played(metaworld.make(name, 1), SEEDS)
        with monkeypatch.context() as patched:
            patched.setattr(metaworld, "shorten_steps", lambda env: None)
            patched.setattr(reward_utils, "tolerance", reward_utils.tolerance.__wrapped__)
            require_equal(ours, played(metaworld.make(name, 1), SEEDS))


def test_metaworlds_tolerances_are_its_own() -> None:
    """Of numbers within bounds, beyond them and on them, of numpy's type and of Python's; and what is no such number is its own."""
    utils = pytest.importorskip("metaworld.utils.reward_utils")
    rng, own = np.random.default_rng(0), vars(utils.tolerance).get("__wrapped__", utils.tolerance)
    quick = metaworld.quick_tolerance(own)
    for number in range(3000):
        x, lower, width = rng.normal(0.0, 0.2, 3)
        bounds = (float(lower), float(lower + abs(width)) if number % 5 else np.inf)
        given = [np.float64(x), float(x), bounds[0], bounds[1]][number % 4]
        more = {"margin": abs(rng.normal()) * (number % 7 != 0), "sigmoid": "long_tail" if number % 11 else "gaussian"}
        expected, found = own(given, bounds=bounds, **more), quick(given, bounds=bounds, **more)
        assert np.float64(found).tobytes() == np.float64(expected).tobytes()
    with pytest.raises(ValueError, match="Lower bound"):
        quick(0.0, (1.0, 0.0), 0.1, sigmoid="long_tail")


def test_quaternions_are_scipys() -> None:
    """Of MuJoCo's matrices of random turns, of small ones, and of quarter turns, where two of the four are as large as each other."""
    mujoco = pytest.importorskip("mujoco")
    rotation = pytest.importorskip("scipy.spatial.transform").Rotation
    rng, matrix = np.random.default_rng(0), np.zeros(9)
    small = np.array([1.0, 0.0, 0.0, 0.0]) + 10.0 ** rng.integers(-12, 0, (300, 1)) * rng.normal(size=(300, 4))
    quarters = rng.integers(-1, 2, (300, 4)).astype(float)
    for turn in np.concatenate([rng.normal(size=(300, 4)), small, quarters[quarters.any(axis=1)]]):
        mujoco.mju_quat2Mat(matrix, turn / np.linalg.norm(turn))
        expected = rotation.from_matrix(matrix.reshape(3, 3)).as_quat()
        assert metaworld._Turned.from_matrix(matrix.reshape(3, 3)).as_quat().tobytes() == expected.tobytes()


def test_a_grasped_object_is_felt_and_rewarded_as_metaworld_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushed and carried by Meta-World's expert, who closes the gripper around it."""
    pytest.importorskip("metaworld")
    from metaworld.policies import ENV_POLICY_MAP
    from metaworld.sawyer_xyz_env import SawyerXYZEnv
    from metaworld.utils import reward_utils

    felt = set[bool]()

    def play() -> list[Any]:
        sim = metaworld.make("push-v3", 1)
        assert isinstance(sim, metaworld.GymnasiumSim)
        env: Any = sim.envs[0].unwrapped
        out, found, expert = StepBuffers.allocate(sim.spec, 1), [], ENV_POLICY_MAP["push-v3"]()
        sim.reset([0], [0], out)
        for number in range(80):
            action = np.clip(expert.get_action(out.observation["state"][0].astype(np.float64)), -1.0, 1.0)
            sim.step([0], action[None].astype(np.float32), out)
            told = [np.float64(value) for value in (out.info[0] or {}).values()]
            found.append([out.observation["state"].copy(), out.reward.copy(), env.tcp_center, env.data.qpos.copy(), *told])
            for geom in range(env.model.ngeom) if number % 10 == 9 else ():
                touched = env.touching_object(geom)
                assert touched == SawyerXYZEnv.touching_object(env, geom)
                felt.add(bool(touched))
        sim.close()
        return found

    ours = play()
    monkeypatch.setattr(metaworld, "shorten_steps", lambda env: None)
    monkeypatch.setattr(reward_utils, "tolerance", reward_utils.tolerance.__wrapped__)
    require_equal(ours, play())
    assert felt == {True, False}


@pytest.mark.parametrize(
    ("task", "controller", "robots"),
    [
        ("Lift", "OSC_POSE", "Panda"),
        pytest.param("Stack", "OSC_POSITION", "Panda", marks=pytest.mark.slow),
        pytest.param("Wipe", "JOINT_POSITION", "UR5e", marks=pytest.mark.slow),
        pytest.param("TwoArmLift", "OSC_POSE", "Baxter", marks=pytest.mark.slow),
        pytest.param("PickPlaceCan", "JOINT_TORQUE", "IIWA", marks=pytest.mark.slow),
    ],
)
def test_robosuites_steps_are_its_own(task: str, controller: str, robots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two resets, each of which builds model, robots and controllers anew; the controllers feed on every bit that they read."""
    pytest.importorskip("robosuite")

    def play() -> tuple[list[Any], list[type]]:
        sim, random = robosuite.make(task, 1, robots=robots, controller=controller), np.random.default_rng(3)
        out, found, towards = StepBuffers.allocate(sim.spec, 1), [], random.uniform(-1.0, 1.0, sim.spec.action.dim)
        for seed in (0, 5):
            sim.reset([0], [seed], out)
            for _ in range(12):
                action = 0.7 * towards + 0.3 * random.uniform(-1.0, 1.0, len(towards))
                sim.step([0], action[None].astype(np.float32), out)
                data = sim.envs[0].sim.data._data
                own = [out.observation["state"], out.reward, out.success, data.qpos, data.qvel, data.qacc_warmstart, data.contact.geom]
                found.append([part.copy() for part in own])
        held = [robot.controller for robot in sim.envs[0].robots]
        controllers = [one for each in held for one in (each.values() if isinstance(each, dict) else [each])]
        sim.close()
        return found, [type(getattr(one.update, "__self__", None)) for one in controllers]

    ours, known = play()
    monkeypatch.setattr(robosuite, "shorten_steps", lambda env: None)
    plain, own = play()
    assert set(known) == {KnownSite}
    assert KnownSite not in own
    require_equal(ours, plain)


def test_robosuites_physics_and_touch_are_mujocos() -> None:
    """A state that changes between `forward` and `step` is worked out anew; NaN begins anew, as in `mj_step`; shapes touch as before."""
    pytest.importorskip("robosuite")
    import mujoco
    from robosuite.environments.base import MujocoEnv

    sim = robosuite.make("Lift", 1)
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
    env: Any = sim.envs[0]
    model, data = env.sim.model._model, env.sim.data._data
    for change in (None, 0.01, None, np.nan, None):
        plain = copy.copy(data)
        env.sim.forward()
        mujoco.mj_forward(model, plain)
        for each in (data, plain):
            each.ctrl[:] = 0.1
            each.qpos[0] += change or 0.0
        env.sim.step()
        mujoco.mj_step(model, plain)
        for name in ("qpos", "qvel", "qacc", "qacc_warmstart", "sensordata", "xpos", "cfrc_ext"):
            np.testing.assert_array_equal(getattr(data, name), getattr(plain, name))
    touching, cube, pads = set[bool](), env.cube, env.robots[0].gripper.important_geoms["left_fingerpad"]
    for first, second in [(cube, None), (cube, pads), ("table_collision", cube), (pads, None), (cube, "table_collision"), (cube, cube)]:
        found = env.check_contact(first, second)
        assert found is MujocoEnv.check_contact(env, first, second)
        touching.add(found)
    sim.close()
    assert touching == {True, False}


def test_models_that_are_copied_are_as_compiled() -> None:
    mujoco = pytest.importorskip("mujoco")
    first, second = (f"<mujoco><worldbody><geom name='g' size='{size}'/></worldbody></mujoco>" for size in (0.1, 0.2))
    models = CompiledModels()

    def compiled(xml: str) -> Any:
        return mujoco.MjSpec.from_string(xml).compile()  # other tests' compilations are kept

    def same(one: Any, other: Any) -> bool:
        images = [np.zeros(mujoco.mj_sizeModel(each), np.uint8) for each in (one, other)]
        for each, image in zip((one, other), images, strict=True):
            mujoco.mj_saveModel(each, None, image)
        return np.array_equal(*images)

    held = [models.of(xml) for xml in (first, second, first, first, first, first, second, first)]
    held[4].geom_size[:] = 9.0  # a copy of its own
    for xml, found in zip((first, second, first, first, first, first, second, first), held, strict=True):
        assert same(found, compiled(xml)) == (found is not held[4])
    assert models._kept[0] == first
    with models.all_kept():
        models.of(second)
    assert models._kept[0] == second
    assert same(models.of(second), compiled(second))


@pytest.mark.parametrize(("module", "task"), [(gymnasium_robotics, "FetchReach-v4"), (metaworld, "reach-v3")])
def test_environments_of_one_simulator_share_a_compilation(module: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(module.__name__.rpartition(".")[2])
    import mujoco

    compiled, compile_file = list[str](), mujoco.MjModel.from_xml_path
    monkeypatch.setattr(mujoco.MjModel, "from_xml_path", lambda path: compiled.append(path) or compile_file(path))  # type: ignore[func-returns-value]
    counting = mujoco.MjModel.from_xml_path
    models = [env.unwrapped.model for env in module.make(task, 3).envs]
    assert len(compiled) == 1
    assert mujoco.MjModel.from_xml_path is counting
    models[0].body_mass[1] += 1.0
    assert models[1].body_mass[1] == models[2].body_mass[1] == models[0].body_mass[1] - 1.0


@pytest.mark.slow
def test_robosuites_marks_are_left_as_it_says() -> None:
    pytest.importorskip("robosuite")
    from robosuite.environments.manipulation.wipe import Wipe

    sim, random = robosuite.make("Wipe", 1), np.random.default_rng(0)
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
    env: Any = sim.envs[0]
    marks = random.permutation(env.model.mujoco_arena.markers).tolist()
    for number in (0, 1, 37, 99, 100):
        env.wiped_markers = marks[:number]
        for found, expected in zip(env._get_wipe_information(), Wipe._get_wipe_information(env), strict=True):
            assert np.asarray(found, np.float64).tobytes() == np.asarray(expected, np.float64).tobytes()
    sim.close()


@pytest.mark.parametrize("observation", ["state", "keypoints"])
def test_pusht_steps_as_its_package_does(observation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package cuts the T's two boxes in the order of a set, which changes the last bit of the covered share from one environment to
    the next; here both take them in order."""
    pytest.importorskip("gym_pusht")
    from gym_pusht.envs.pusht import PushTEnv, pymunk_to_shapely

    def coverage(env: PushTEnv) -> float:
        goal, block = (pymunk_to_shapely(body, env._block_shapes) for body in (env.get_goal_pose_body(env.goal_pose), env.block))
        return float(goal.intersection(block).area / goal.area)

    def play() -> list[Any]:
        sim, random = pusht.make("PushT-v0", 1, observation=observation), np.random.default_rng(3)
        out, found = StepBuffers.allocate(sim.spec, 1), []
        for seed in SEEDS:
            sim.reset([0], [seed], out)
            for _ in range(100):
                near = np.array(sim.envs[0].unwrapped.block.position) + random.uniform(-60.0, 60.0, 2)  # type: ignore[attr-defined]
                sim.step([0], np.clip(near, 0.0, 512.0)[None].astype(np.float32), out)
                info = {key: np.array(value) for key, value in sorted((out.info[0] or {}).items())}
                found.append([*(part.copy() for part in out.observation.values()), out.reward.copy(), out.success.copy(), *info.values()])
        sim.close()
        return found

    ours = play()
    monkeypatch.setattr(pusht, "shorten_steps", lambda task: None)
    monkeypatch.setattr(PushTEnv, "_get_coverage", coverage)
    require_equal(ours, play())
    assert {bool(each[-3] > 0) for each in ours} == {True, False}  # "n_contacts", before two more
