"""MJCF files as simulators, against motion that follows from arithmetic."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots import mjcf
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.trajectories import actions_for, assert_depends_on_seed_alone

ANT = str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml")

CART = """
<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 0.5" xyaxes="1 0 0 0 0.2 1"/>
    <body name="goal" mocap="true" pos="1 0 0"><geom type="sphere" size="0.05" contype="0" conaffinity="0" rgba="0 1 0 1"/></body>
    <body name="cart">
      <joint name="slide" type="slide" axis="1 0 0"/>
      <geom type="box" size="0.2 0.1 0.1" mass="2" rgba="1 0 0 1"/>
      <site name="nose" pos="0.2 0 0"/>
    </body>
  </worldbody>
  <actuator><motor name="push" joint="slide" gear="3" ctrlrange="-2 4"/></actuator>
  <sensor><framepos objtype="site" objname="nose"/></sensor>
  <keyframe><key name="ahead" qpos="0.5" qvel="0.25"/></keyframe>
</mujoco>
"""


def reward(model: Any, data: Any) -> float:
    return float(-abs(data.site("nose").xpos[0] - data.mocap_pos[0, 0]))


def success(model: Any, data: Any) -> bool:
    return bool(data.qpos[0] > 0.02)


def far(model: Any, data: Any) -> bool:
    return bool(data.qpos[0] > 0.05)


def place_goal(model: Any, data: Any, rng: np.random.Generator) -> None:
    data.mocap_pos[0, 0] = rng.uniform(1.0, 2.0)


def break_physics(model: Any, data: Any, rng: np.random.Generator) -> None:
    data.qpos[0] = np.nan


@pytest.fixture
def cart(tmp_path: Path) -> str:
    path = tmp_path / "cart.xml"
    path.write_text(CART, encoding="utf-8")
    return str(path)


def function(name: str) -> str:
    return f"{__name__}:{name}"


def test_motion_reward_success_and_end_follow_from_arithmetic(cart: str) -> None:
    """A force of 3·u on 2 kg, semi-implicit Euler of h = 10 ms: after n steps v = n·h·a and x = h²·a·n(n + 1)/2."""
    functions = {"reward": function("reward"), "success": function("success"), "terminated": function("far")}
    sim = mjcf.make(2, cart, frame_skip=4, max_episode_steps=6, **functions)
    assert sim.spec.observation == {"state": TensorSpec((1 + 1 + 3,))}
    assert (sim.spec.action.low, sim.spec.action.high) == ((-2.0,), (4.0,))
    assert (sim.spec.control_hz, sim.spec.max_episode_steps, sim.spec.snapshots) == (25.0, 6, "exact")
    assert sim.spec.reports_success
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [0, 1], out)
    np.testing.assert_array_equal(out.observation["state"], np.array([[0, 0, 0.2, 0, 0]] * 2, np.float32))
    acceleration = 3 * 1.0 / 2
    for step in range(1, 7):
        sim.step([1], np.array([[1.0]], np.float32), out)
        n = 4 * step
        x, v = 0.01**2 * acceleration * n * (n + 1) / 2, n * 0.01 * acceleration
        np.testing.assert_allclose(out.observation["state"][1], [x, v, x + 0.2, 0, 0], rtol=1e-5, atol=1e-7)  # the sensor is up to date
        assert out.reward[1] == pytest.approx(-(1 - (x + 0.2)), rel=1e-5)
        assert (out.success[1], out.terminated[1], out.truncated[1]) == (x > 0.02, x > 0.05, step == 6)
        assert out.info[1] == {"time_s": pytest.approx(n * 0.01)}
    np.testing.assert_array_equal(out.observation["state"][0, :2], [0, 0])  # the other environment has not moved


def test_controls_beyond_their_range_count_as_its_ends(cart: str) -> None:
    sim = mjcf.make(1, cart, frame_skip=1)
    out = StepBuffers.allocate(sim.spec, 1)
    for asked, applied in ((100.0, 4.0), (-100.0, -2.0)):
        sim.reset([0], [0], out)
        sim.step([0], np.array([[asked]], np.float32), out)
        assert out.observation["state"][0, 1] == pytest.approx(0.01 * 3 * applied / 2)


def test_episodes_begin_at_the_keyframe_with_noise_and_goals_of_their_seed(cart: str) -> None:
    still = mjcf.make(1, cart, keyframe="ahead")
    out = StepBuffers.allocate(still.spec, 1)
    still.reset([0], [0], out)
    np.testing.assert_array_equal(out.observation["state"][0, :2], [0.5, 0.25])
    sim = mjcf.make(2, cart, keyframe=0, reset_noise=0.1, randomise=function("place_goal"), observe=["qpos", "qvel", "mocap"])
    assert_depends_on_seed_alone(sim)
    out, seen = StepBuffers.allocate(sim.spec, 2), []
    for seed in range(40):
        sim.reset([0], [seed], out)
        seen.append(out.observation["state"][0].copy())
    rows = np.array(seen)
    for column, low, high in ((0, 0.4, 0.6), (1, 0.15, 0.35), (2, 1.0, 2.0)):
        assert low <= rows[:, column].min() < low + 0.3 * (high - low)
        assert high >= rows[:, column].max() > high - 0.3 * (high - low)
    np.testing.assert_array_equal(rows[:, 3:], np.tile([0, 0, 1, 0, 0, 0], (40, 1)))  # the rest of the goal's pose
    ant = mjcf.make(1, ANT, reset_noise=0.3, observe=["qpos"])
    out = StepBuffers.allocate(ant.spec, 1)
    ant.reset([0], [3], out)
    quaternion = out.observation["state"][0, 3:7]
    assert np.linalg.norm(quaternion) == pytest.approx(1.0, abs=1e-6)
    assert abs(quaternion[0]) < 1.0


CONTINUE = """
import hashlib, sys
from pathlib import Path
import numpy as np
from embodied_rl.sim.robots import mjcf
from embodied_rl.types import StepBuffers
task, snapshot, actions = sys.argv[1:]
sim = mjcf.make(2, task, reset_noise=0.1)
sim.restore(1, Path(snapshot).read_bytes())
out, digest = StepBuffers.allocate(sim.spec, 2), hashlib.blake2b()
for action in np.load(actions):
    sim.step([1], action[None], out)
    digest.update(np.concatenate([sim.data[1].qpos, sim.data[1].qvel, sim.data[1].qacc_warmstart]).tobytes())
print(digest.hexdigest(), sim._elapsed[1])
"""


def test_snapshots_continue_bit_by_bit_in_another_slot_and_another_process(tmp_path: Path) -> None:
    """The ant has contacts, so the solver's warm start counts; positions, velocities and warm start in double precision, 200 steps."""
    sim = mjcf.make(2, ANT, reset_noise=0.1)
    out, actions = StepBuffers.allocate(sim.spec, 2), actions_for(sim, 260)
    sim.reset([0], [3], out)
    for action in actions[:60]:
        sim.step([0], action[None], out)
    saved = sim.snapshot(0)
    assert sim.snapshot(0) == saved
    sim.restore(1, saved)
    digests, contacts = [hashlib.blake2b(), hashlib.blake2b()], 0
    for action in actions[60:]:
        sim.step([0, 1], np.stack([action, action]), out)
        contacts += sim.data[0].ncon
        for data, digest in zip(sim.data, digests, strict=True):
            digest.update(np.concatenate([data.qpos, data.qvel, data.qacc_warmstart]).tobytes())
    assert digests[0].hexdigest() == digests[1].hexdigest()
    assert contacts > 50
    (tmp_path / "snapshot").write_bytes(saved)
    np.save(tmp_path / "actions.npy", actions[60:])
    command = [sys.executable, "-c", CONTINUE, ANT, str(tmp_path / "snapshot"), str(tmp_path / "actions.npy")]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert other == [digests[0].hexdigest(), "260"]


def test_snapshots_of_another_model_are_refused(cart: str, tmp_path: Path) -> None:
    lighter = tmp_path / "lighter.xml"
    lighter.write_text(CART.replace('mass="2"', 'mass="1.9"'), encoding="utf-8")
    sim, other = mjcf.make(1, cart), mjcf.make(1, str(lighter))
    sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
    with pytest.raises(SnapshotError, match="not taken from the model"):
        other.restore(0, sim.snapshot(0))


def test_broken_physics_shows(cart: str) -> None:
    """By default MuJoCo would set the model back to its start, silently."""
    sim = mjcf.make(1, cart, randomise=function("break_physics"))
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    sim.step([0], np.zeros((1, 1), np.float32), out)
    assert np.isnan(out.observation["state"][0, 0])


@pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")
def test_pictures_show_the_cart_where_it_is(cart: str) -> None:
    sim = mjcf.make(1, cart, camera="side", image_size=64, render_camera="side", render_size=64, frame_skip=20)
    assert sim.spec.tensors["rgb"] == TensorSpec((64, 64, 3), "uint8")
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    columns = []
    for _ in range(2):
        frame = out.observation["rgb"][0].astype(int)
        red = (frame[..., 0] > 40) & (frame[..., 1] < frame[..., 0] / 3)
        columns.append(np.nonzero(red)[1].mean())
        np.testing.assert_array_equal(sim.render(0), out.observation["rgb"][0])
        sim.step([0], np.full((1, 1), 4.0, np.float32), out)
    assert columns[0] == pytest.approx(31.5, abs=1), "the camera looks at the middle"
    assert columns[1] > columns[0] + 1, "pushed to the right"
    sim.close()


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        (("ctrlrange", "user"), {}, "no limits: push. Give each a ctrlrange"),
        (("<motor", "<!-- <motor"), {}, "cannot load"),
        (('<motor name="push" joint="slide" gear="3" ctrlrange="-2 4"/>', ""), {}, "no actuator"),
        (("", ""), {"keyframe": "ahed"}, "no keyframe 'ahed'. Did you mean 'ahead'"),
        (("", ""), {"keyframe": 1}, "no keyframe '1'"),
        (("", ""), {"camera": "sid"}, "Camera 'sid' is not known. Did you mean 'side'"),
        (("", ""), {"observe": ["qpos", "qval"]}, "'qval' cannot be observed.*Did you mean 'qvel'"),
        (("", ""), {"reward": "tests.sim.robots.test_mjcf:rewards"}, "Did you mean 'reward'"),
        (("", ""), {"reward": "tests.sim.robots.test_mjcf:CART"}, "not a function of .model, data. but a str"),
        (("", ""), {"frame_skip": 0}, "frame_skip must be a whole number >= 1, got 0"),
        (("", ""), {"frame_skip": 1.5}, "frame_skip must be a whole number >= 1, got 1.5"),
        (("", ""), {"reset_noise": float("nan")}, "reset_noise must be a finite number >= 0, got nan"),
        (("", ""), {"max_episode_steps": 0}, "needs max_episode_steps of at least 1, or none, got 0"),
        (("", ""), {"render_camera": 9}, "Camera '9' is not known. Known: side"),
        (("", ""), {"fram_skip": 2}, "does not take 'fram_skip'. Did you mean 'frame_skip'"),
    ],
)
def test_mistakes_are_named(changes: tuple[str, str], arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "cart.xml"
    path.write_text(CART.replace(*changes) if changes[0] else CART, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        SimFactory("embodied_rl.sim.robots.mjcf:make", str(path), arguments).make(1)


def test_scenes_of_the_package_go_by_name() -> None:
    assert "pixel_reach" in mjcf.tasks()
    assert mjcf.make(1, "pixel_reach").spec.action.dim == 2
    with pytest.raises(UserError, match="Did you mean 'pixel_reach'"):
        mjcf.make(1, "pixel_rech")
