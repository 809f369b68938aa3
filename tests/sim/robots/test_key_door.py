"""KeyDoor: its walls, its key and its expert."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.robots.key_door import GOAL_M, KEY_M, KeyDoor, KeyDoorExpert
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import StepBuffers
from tests.sim.robots.trajectories import assert_depends_on_seed_alone


def placed(x: float, y: float, key: bool = False) -> tuple[KeyDoor, StepBuffers]:
    """One environment with its robot at a place."""
    sim = KeyDoor(1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    state = decode_state(sim.snapshot(0))
    state["state"][:3] = (x, y, float(key))
    sim.restore(0, encode_state(state))
    return sim, out


def step(sim: KeyDoor, out: StepBuffers, *action: float) -> np.ndarray:
    """Position in metres, and whether the robot has the key."""
    sim.step([0], np.array([action], np.float32), out)
    x, y, key = out.observation["state"][0]
    return np.array([x + 1.0, (y + 1.0) / 2, (key + 1) / 2])


@pytest.mark.parametrize(
    ("x", "y", "key", "action", "after"),
    [
        (0.5, 0.5, False, (1.0, -0.5), (0.54, 0.48, 0)),  # 4 cm at action 1
        (0.5, 0.5, False, (9.0, -9.0), (0.54, 0.46, 0)),  # and no more
        (0.01, 0.99, False, (-1.0, 1.0), (0.0, 1.0, 0)),  # the floor ends at 0 and 1 m
        (0.98, 0.5, False, (1.0, 1.0), (0.98, 0.54, 0)),  # the door is closed; along the wall there is way
        (0.98, 0.5, True, (1.0, 1.0), (1.02, 0.54, 1)),  # the key opens it
        (1.02, 0.5, True, (-1.0, 0.0), (0.98, 0.5, 1)),  # both ways
        (0.98, 0.7, True, (1.0, 0.0), (0.98, 0.7, 1)),  # beside the door is wall
        (0.15, 0.74, False, (0.0, 1.0), (0.15, 0.78, 1)),  # the key is 7 cm away, within 10
        (0.15, 0.70, False, (0.0, 1.0), (0.15, 0.74, 0)),  # 11 cm
    ],
)
def test_a_step_by_hand(x: float, y: float, key: bool, action: tuple[float, float], after: tuple[float, float, float]) -> None:
    sim, out = placed(x, y, key)
    np.testing.assert_allclose(step(sim, out, *action), after, atol=1e-6)
    assert not out.reward[0]
    assert not out.terminated[0]


def test_the_goal_ends_the_episode_and_the_clock_cuts_it() -> None:
    sim, out = placed(GOAL_M[0], GOAL_M[1] + 0.13, True)
    step(sim, out, 0.0, -1.0)  # 13 cm - 4 cm = 9 cm
    assert (out.reward[0], out.success[0], out.terminated[0], out.truncated[0]) == (1.0, True, True, False)
    sim, out = placed(0.5, 0.5)
    for number in range(1, 161):
        step(sim, out, 0.0, 0.0)
        assert out.truncated[0] == (number == 160)
        assert not out.terminated[0]


def test_the_expert_solves_what_random_motion_does_not() -> None:
    sim, num_envs = KeyDoor(64), 64
    out = StepBuffers.allocate(sim.spec, num_envs)
    everybody, experts = list(range(num_envs)), [KeyDoorExpert() for _ in range(num_envs)]
    rng = np.random.default_rng(0)
    solved, keys = {}, {}
    for name in ("expert", "random"):
        sim.reset(everybody, everybody, out)
        solved[name] = np.zeros(num_envs, bool)
        for number in range(160):
            rows = [{"state": out.observation["state"][i].copy()} for i in everybody]
            if name == "expert":
                action = np.stack([expert(row) for expert, row in zip(experts, rows, strict=True)])
            else:
                action = rng.uniform(-1, 1, (num_envs, 2))
            sim.step(everybody, action, out)
            solved[name] |= out.terminated & (name == "random" or number < 62)
        keys[name] = out.observation["state"][:, 2] > 0
    # The key is 0.6 to 0.8 m up, the goal 1.7 m right: at least 15 + 42 steps of 4 cm less what the reach of 10 cm saves.
    assert solved["expert"].all()
    assert not solved["random"].any()
    assert keys["random"].mean() < 0.2


def test_it_keeps_its_promises() -> None:
    assert_depends_on_seed_alone(KeyDoor(2))
    report = check_sim(SimFactory("embodied_rl.sim.robots.key_door:KeyDoor", "KeyDoor"), steps=60)
    assert report.ok, report


def test_the_picture_shows_what_is_there() -> None:
    sim, _ = placed(0.5, 0.5)
    frame = sim.render(0)
    assert frame.shape == (128, 256, 3)

    def colour(x: float, y: float) -> tuple[int, ...]:
        return tuple(int(value) for value in sim.render(0)[int((1 - y) * 128), int(x * 128)])

    assert colour(0.5, 0.5) == (50, 90, 200)
    assert colour(*KEY_M) == (230, 190, 40)
    assert colour(*GOAL_M) == (90, 180, 90)
    assert colour(1.0, 0.9) == (60, 60, 60)
    assert colour(1.0, 0.5) == (200, 60, 60)
    sim, _ = placed(0.5, 0.5, key=True)
    assert colour(*KEY_M) == (235, 235, 235)
    assert colour(1.0, 0.5) == (190, 220, 190)


def test_mistakes() -> None:
    with pytest.raises(UserError, match="Task 'KeyDor' is not known"):
        KeyDoor(1, "KeyDor")
    with pytest.raises(SnapshotError, match="cannot be restored into task 'KeyDoor'"):
        KeyDoor(1).restore(0, encode_state({"task": "other", "state": np.zeros(4)}))
