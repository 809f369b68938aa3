"""Snapshots of simulators: what follows a restore equals the uninterrupted run bit by bit, here, elsewhere and in a new process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one
from embodied_rl.sim.robots.saved_state import ModelChanges, Packer, Unpacker
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import StepBuffers
from tests.sim.robots.continuation import Subject, continue_elsewhere, differences, play, random_actions, start

WARM_STEPS = 37


def subject(target: str, task: str, **kwargs: Any) -> Subject:
    return Subject(f"{target}:make" if target != "pixel_reach" else "pixel_reach:PixelReach", task, kwargs)


SAMPLE = [
    subject("gymnasium", "CartPole-v1"),
    subject("gymnasium", "Acrobot-v1"),
    subject("mujoco", "Ant-v5"),
    subject("mujoco", "Humanoid-v5"),
    subject("mujoco", "Pusher-v5"),
    subject("gymnasium_robotics", "FetchPickAndPlace-v4"),
    subject("metaworld", "drawer-open-v3"),
    subject("metaworld", "basketball-v3"),  # keeps a view into MjData as its target
    subject("pixel_reach", "PixelReach", pixels=False),
]


def _remaining() -> list[Subject]:
    """Every other task with exact snapshots whose packages are here."""
    from embodied_rl.sim.robots import gymnasium as classic
    from embodied_rl.sim.robots import gymnasium_robotics, metaworld, mujoco

    found = []
    for name, module in (("gymnasium", classic), ("mujoco", mujoco), ("gymnasium_robotics", gymnasium_robotics), ("metaworld", metaworld)):
        try:
            found += [subject(name, task) for task in module.tasks()]
        except MissingExtraError:
            continue
    return [one for one in found if one not in SAMPLE and "TouchSensors" not in str(one.task)]  # 40 variants of eight hand tasks


def made(one: Subject, num_envs: int) -> Any:
    try:
        return one.make(num_envs)
    except MissingExtraError as error:
        pytest.skip(str(error))


def saved_midway(sim: Any, env_id: int = 0) -> bytes:
    start(sim, env_id, seed=5)
    play(sim, env_id, random_actions(sim.spec, WARM_STEPS, seed=1), next_seed=100)
    return sim.snapshot(env_id)


def check_here(one: Subject) -> None:
    """In the same process: the same environment, one that has played other episodes, and one that was never reset."""
    sim = made(one, 4)
    if one not in SAMPLE and sim.spec.snapshots == "replay":
        pytest.skip(f"{one.task} is replayed, not saved")
    assert isinstance(sim, SimEnv)
    assert sim.spec.snapshots == "exact"
    actions = random_actions(sim.spec)
    start(sim, 3, seed=5)
    play(sim, 3, random_actions(sim.spec, WARM_STEPS, seed=1), next_seed=100)
    uninterrupted = play(sim, 3, actions)
    assert len(np.unique(uninterrupted["state"], axis=0)) > 20, "it hardly moves: nothing is tested"

    data = saved_midway(sim)
    assert differences(uninterrupted, play(sim, 0, actions)) == [], "taking a snapshot disturbed the environment"
    start(sim, 1, seed=77)
    play(sim, 1, random_actions(sim.spec, 30, seed=9), next_seed=300)
    for env_id, who in enumerate(["the same environment", "one with another past", "one that was never reset"]):
        sim.restore(env_id, data)
        assert sim.snapshot(env_id) == data, f"{who}: the restored state is not the saved one"
        assert differences(uninterrupted, play(sim, env_id, actions)) == [], who
    sim.close()


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one.task)
def test_what_follows_is_the_uninterrupted_run(one: Subject) -> None:
    check_here(one)


@pytest.mark.slow
@pytest.mark.parametrize("one", _remaining(), ids=lambda one: one.task)
def test_what_follows_is_the_uninterrupted_run_in_every_task(one: Subject) -> None:
    check_here(one)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_in_a_new_process(tmp_path: Path) -> None:
    cases, expected = [], []
    for one in SAMPLE:
        sim = made(one, 1)
        cases.append((one, saved_midway(sim)))
        expected.append(play(sim, 0, random_actions(sim.spec)))
        sim.close()
    for (one, _), wanted, got in zip(cases, expected, continue_elsewhere(cases, tmp_path), strict=True):
        assert differences(wanted, got) == [], one.task


def test_while_the_arm_holds_an_object() -> None:
    """Meta-World's own expert picks a block up; the snapshot is taken with the block in the air."""
    sim = made(subject("metaworld", "pick-place-v3"), 2)
    from metaworld.policies import SawyerPickPlaceV3Policy

    expert, out = SawyerPickPlaceV3Policy(), StepBuffers.allocate(sim.spec, 2)
    sim.reset([0], [3], out)
    height = float(out.observation["state"][0, 6])
    for _ in range(120):
        sim.step([0], np.clip(expert.get_action(out.observation["state"][0].astype(np.float64)), -1, 1)[None].astype(np.float32), out)
        if out.observation["state"][0, 6] > height + 0.03:
            break
    else:
        pytest.fail("the expert did not lift the block")
    assert sim.envs[0].unwrapped.touching_main_object
    actions = random_actions(sim.spec)
    data = sim.snapshot(0)
    uninterrupted = play(sim, 0, actions)
    sim.restore(1, data)
    assert differences(uninterrupted, play(sim, 1, actions)) == []


def test_pictures_are_part_of_it() -> None:
    if mujoco_backend() is None:
        pytest.skip("MuJoCo cannot draw off-screen here")
    sim = made(subject("pixel_reach", "PixelReach", pixels=True, image_size=24), 2)
    data, actions = saved_midway(sim), random_actions(sim.spec, 40)
    uninterrupted = play(sim, 0, actions)
    sim.restore(1, data)
    assert uninterrupted["rgb"].std() > 0
    assert differences(uninterrupted, play(sim, 1, actions)) == []
    sim.close()


def test_wrappers_with_statistics_and_memories() -> None:
    """Running means, a window of frames and a sticky action's generator are part of an episode."""
    wrappers = gymnasium.wrappers

    def wrapped() -> gymnasium.Env:
        env = wrappers.StickyAction(make_one("Pendulum-v1"), repeat_action_probability=0.5)
        return wrappers.FrameStackObservation(wrappers.NormalizeReward(wrappers.NormalizeObservation(env)), 3)

    sim = GymnasiumSim([wrapped() for _ in range(2)], exact_snapshots=True)
    data, actions = saved_midway(sim), random_actions(sim.spec)
    uninterrupted = play(sim, 0, actions)
    start(sim, 1, seed=8)
    play(sim, 1, random_actions(sim.spec, 50, seed=4), next_seed=9)
    sim.restore(1, data)
    assert differences(uninterrupted, play(sim, 1, actions)) == []


class Dice(gymnasium.Env):
    """Draws from numpy's and Python's process-wide generators at every step."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._throw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        thrown = self._throw()
        return thrown, float(thrown[0]), bool(thrown[1] > 0.95), False, {}

    def _throw(self) -> np.ndarray:
        return np.array([np.random.random(), random.random()], np.float32)  # noqa: NPY002


def test_process_wide_generators_are_part_of_it() -> None:
    sim = GymnasiumSim([Dice(), Dice()], exact_snapshots=True)
    data, actions = saved_midway(sim), random_actions(sim.spec)
    uninterrupted = play(sim, 0, actions)
    assert uninterrupted["terminated"].any()
    sim.restore(1, data)
    assert differences(uninterrupted, play(sim, 1, actions)) == []


def test_attributes_that_share_memory_share_it_afterwards() -> None:
    owner = SimpleNamespace(base=np.arange(6.0), items=[1, {"k": (2,)}], window=deque([1, 2], maxlen=2), late=1, window_handle=object())
    owner.view, owner.same_items = owner.base.reshape(2, 3)[:, ::-2], owner.items
    owner.items.append(owner.items)
    owner.rng = owner.twin_rng = np.random.default_rng(3)
    state = decode_state(encode_state(Packer().attributes(owner)))

    handle = object()
    other = SimpleNamespace(window_handle=handle, late=None, acquired_later=5, acquired_object=handle)
    Unpacker().attributes(other, state)
    assert vars(other).keys() == vars(owner).keys() | {"acquired_object"}  # the plain one of another episode is gone
    assert other.window_handle is handle
    assert other.view.tolist() == [[2.0, 0.0], [5.0, 3.0]]
    other.base[2] = 20.0
    assert other.view[0, 0] == 20.0
    assert owner.base[2] == 2.0
    assert other.same_items is other.items is other.items[2]
    assert other.rng is other.twin_rng
    assert other.rng.random() == np.random.default_rng(3).random()
    assert other.window.maxlen == 2


def test_a_model_changed_since_it_was_made_is_set_back() -> None:
    model: Any = make_one("Hopper-v5").unwrapped.model  # type: ignore[attr-defined]
    changes = ModelChanges(model)
    original = changes.capture()
    assert original["changed"] == {}
    mass, gravity = float(model.body_mass[1]), model.opt.gravity.copy()
    model.body_mass[1] *= 2
    model.opt.gravity = [0, 0, -1]
    model.opt.timestep *= 2
    changed = decode_state(encode_state(changes.capture()))
    assert changed["changed"].keys() == {"body_mass", "opt.gravity", "opt.timestep"}
    changes.restore(original)
    assert model.body_mass[1] == mass
    assert (model.opt.gravity == gravity).all()
    changes.restore(changed)
    assert model.body_mass[1] == 2 * mass
    assert model.opt.gravity.tolist() == [0, 0, -1]


def test_snapshots_of_something_else_are_refused() -> None:
    hopper, walker = made(subject("mujoco", "Hopper-v5"), 1), made(subject("mujoco", "Walker2d-v5"), 1)
    data = saved_midway(hopper)
    with pytest.raises(SnapshotError, match=r"of task 'Hopper-v5'.*into task 'Walker2d-v5'"):
        walker.restore(0, data)
    tree = decode_state(data)
    with pytest.raises(SnapshotError, match=r"HopperEnv and cannot be restored into .*Walker2dEnv"):
        walker.restore(0, encode_state({**tree, "task": "Walker2d-v5"}))
    other = decode_state(saved_midway(walker))["env"]
    for part, message in (("data", "another MuJoCo model"), ("models", "another MuJoCo model")):
        with pytest.raises(SnapshotError, match=message):
            hopper.restore(0, encode_state({**tree, "env": {**tree["env"], part: other[part]}}))
    with pytest.raises(SnapshotError, match="not a snapshot"):
        hopper.restore(0, b"something")


def test_what_is_not_known_to_be_exact_does_not_say_so() -> None:
    lake = made(subject("gymnasium", "FrozenLake-v1"), 1)
    assert lake.spec.snapshots == "replay"
    with pytest.raises(SnapshotError, match="replayed, not saved"):
        lake.snapshot(0)
    push_t = made(subject("pusht", "PushT-v0"), 1)
    assert push_t.spec.snapshots == "replay"
    from embodied_rl.sim.robots.gymnasium import VectorEnvSim

    together = VectorEnvSim(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    assert (together.spec.snapshots, together.spec.steps_together) == ("none", True)


def test_the_table_of_costs_is_measured() -> None:
    """benchmarks/snapshot_table.py for real, on a task whose bytes can be counted here as well."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, str(root / "benchmarks" / "snapshot_table.py"), "--only", "PixelReach", "--repeats", "3"]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    row = [cell.strip() for cell in done.stdout.splitlines()[-2].strip("|").split("|")]
    sim = made(subject("pixel_reach", "PixelReach", pixels=False), 1)
    start(sim, 0, seed=1)
    assert row[:3] == ["pixel_reach", "PixelReach", "exact"]
    assert float(row[3]) == pytest.approx(len(sim.snapshot(0)) / 1000, abs=0.06)
    figure = done.stdout.splitlines()[-1].removeprefix("figure: snapshot and restore together, ms: PixelReach ")
    assert 0 < float(figure) == pytest.approx(float(row[4]) + float(row[5]), abs=0.011)  # each is rounded to 0.01
