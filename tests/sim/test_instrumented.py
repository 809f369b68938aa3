"""What is added to a simulator's observation is what the simulator holds, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import EXPERT, encode_physics, expert_maker, instrumented, needs_simulator, plain_spec, split
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers, TensorSpec

KEY_DOOR = load_sim_config("key_door")
EXPERT_TARGET = "embodied_rl.sim.robots.key_door:KeyDoorExpert"


def make(config: SimConfig, num_envs: int = 2, **shown: Any) -> tuple[Any, StepBuffers]:
    shown_config = instrumented(config, **shown)
    sim = SimFactory(shown_config.target, shown_config.task, shown_config.kwargs, shown_config.extra).make(num_envs)
    return sim, StepBuffers.allocate(sim.spec, num_envs)


def test_parts_are_added_and_taken_apart_again() -> None:
    sim, out = make(KEY_DOOR, expert=EXPERT_TARGET, physics=True, image_size=50)
    assert {key: part for key, part in sim.spec.observation.items() if key != "state"} == {
        "physics/robot": TensorSpec((3,), "float64"),
        # KeyDoor draws twice as wide as high: 50 pixels wide, and 25 high made even.
        "image/render": TensorSpec((24, 50, 3), "uint8"),
        "expert_action": TensorSpec((2,), "float32"),
    }
    assert plain_spec(sim.spec) == SimFactory(KEY_DOOR.target, KEY_DOOR.task).make(1).spec
    sim.reset([0, 1], [3, 4], out)
    parts = split(out.observation)
    assert list(parts.observation) == ["state"]
    # state = (x - 1, 2 y - 1, ±1), so x and y follow from it.
    np.testing.assert_allclose(parts.state["robot"][:, 0], out.observation["state"][:, 0] + 1, atol=1e-6)
    np.testing.assert_allclose(parts.state["robot"][:, 1], (out.observation["state"][:, 1] + 1) / 2, atol=1e-6)
    assert parts.images["render"].std() > 10
    # The key is above the start, more than a step away: straight up at full speed, x by what is left of the spread.
    assert parts.expert_action is not None
    np.testing.assert_array_equal(parts.expert_action[:, 1], [1.0, 1.0])
    assert parts.task is None


def test_episodes_are_the_plain_simulators() -> None:
    sim, out = make(KEY_DOOR, expert=EXPERT_TARGET, physics=True, image_size=32)
    plain = SimFactory(KEY_DOOR.target, KEY_DOOR.task).make(2)
    own = StepBuffers.allocate(plain.spec, 2)
    sim.reset([0, 1], [5, 6], out)
    plain.reset([0, 1], [5, 6], own)
    rng = np.random.default_rng(0)
    for _ in range(30):
        actions = rng.uniform(-1, 1, (2, 2)).astype(np.float32)
        sim.step([0, 1], actions, out)
        plain.step([0, 1], actions, own)
        np.testing.assert_array_equal(out.observation["state"], own.observation["state"])
        np.testing.assert_array_equal(out.reward, own.reward)


def test_only_the_asked_environments_rows_are_written() -> None:
    sim, out = make(KEY_DOOR, expert=EXPERT_TARGET, physics=True)
    sim.reset([0, 1], [5, 6], out)
    before = {key: part[0].copy() for key, part in out.observation.items()}
    sim.step([1], np.ones((1, 2), np.float32), out)
    for key, part in before.items():
        np.testing.assert_array_equal(part, out.observation[key][0])


def test_a_snapshot_is_the_plain_simulators_and_physics_can_be_restored() -> None:
    sim, out = make(KEY_DOOR, physics=True, expert=EXPERT_TARGET)
    plain: Any = SimFactory(KEY_DOOR.target, KEY_DOOR.task).make(1)
    sim.reset([0, 1], [5, 6], out)
    for _ in range(5):
        sim.step([0, 1], np.ones((2, 2), np.float32), out)
    plain.restore(0, sim.snapshot(1))
    np.testing.assert_array_equal(plain.physics(0)["robot"], out.observation["physics/robot"][1])
    wanted = np.array([0.5, 0.25, 1.0])
    sim.restore(0, encode_physics({"robot": wanted}))
    sim.step([0], np.zeros((1, 2), np.float32), out)
    np.testing.assert_array_equal(out.observation["physics/robot"][0], wanted)
    with pytest.raises(SnapshotError, match=r"has the parts \{'qpos': \(2,\)\}; task 'KeyDoor' has \{'robot': \(3,\)\}"):
        sim.restore(0, encode_physics({"qpos": np.zeros(2)}))


@pytest.mark.parametrize("name", ["halfcheetah", "fetch_push", "cartpole", "pixel_reach"])
def test_physics_set_in_another_episode_goes_on_alike(name: str) -> None:
    """The state of one episode, set in the same episode of another environment that has gone elsewhere."""
    config = load_sim_config(name)
    if name == "pixel_reach":
        config = SimConfig(name=name, target=config.target, task=config.task, kwargs={"pixels": False})
    sim: Any = SimFactory(config.target, config.task, config.kwargs, config.extra).make(2)
    out = StepBuffers.allocate(sim.spec, 2)
    rng = np.random.default_rng(0)

    def random() -> np.ndarray:
        if sim.spec.action.kind == "discrete":
            return rng.integers(0, 2, (1, 1))
        return rng.uniform(sim.spec.action.low, sim.spec.action.high, (1, sim.spec.action.dim)).astype(np.float32)

    sim.reset([0, 1], [7, 7], out)
    for _ in range(8):
        sim.step([0], random(), out)
        sim.step([1], random(), out)
    assert any(not np.array_equal(part, sim.physics(1)[key]) for key, part in sim.physics(0).items())
    state = sim.physics(0)
    sim.set_physics(1, state)
    for key, part in sim.physics(1).items():
        np.testing.assert_array_equal(part, state[key], err_msg=key)
    for _ in range(3):
        action = random()
        sim.step([0], action, out)
        sim.step([1], action, out)
        # Bit by bit: mjSTATE_INTEGRATION's parts are all there is.
        np.testing.assert_array_equal(out.observation["state"][0], out.observation["state"][1])
    sim.close()


def test_each_task_of_a_set_is_named() -> None:
    pytest.importorskip("metaworld")
    config = SimConfig(name="mt", target="embodied_rl.sim.robots.metaworld:make", task="mine", kwargs={"tasks": ["reach-v3", "push-v3"]})
    sim, out = make(config, expert="embodied_rl.sim.robots.experts:MetaWorldExpert")
    sim.reset([0, 1], [4, 5], out)  # seed % 2 chooses
    assert split(out.observation).task is not None
    assert out.observation["episode_task"].tolist() == ["reach-v3", "push-v3"]
    assert out.observation[EXPERT].shape == (2, 4)
    assert "episode_task" not in plain_spec(sim.spec).observation


def test_what_cannot_be_shown_is_one_line() -> None:
    with pytest.raises(UserError, match=r"Task 'talk' does not expose its physical state .* states=none"):
        make(SimConfig(name="talk", target="tests.sim.toy:TalkingSim"), physics=True)
    with pytest.raises(UserError, match=r"Task 'no-op' has no pictures"):
        make(SimConfig(name="no-op", target="tests.sim.toy:NoOpSim"), image_size=64)
    with pytest.raises(UserError, match="Task 'count' cannot be drawn here"):
        make(SimConfig(name="toy", target="tests.sim.toy:CountingSim", kwargs={"misbehave": "blind"}), image_size=64)
    with pytest.raises(
        UserError, match=r"must take no argument, or the simulator and the environment's number; it takes first, second, third"
    ):
        expert_maker("tests.rollout.recording_toys:wants_three")
    assert not needs_simulator(EXPERT_TARGET)
    assert needs_simulator("embodied_rl.sim.robots.experts:PixelReachExpert")


def test_each_camera_has_a_picture_of_its_own() -> None:
    config = SimConfig(name="two", target="tests.sim.test_film:TwoSizes")
    sim, out = make(config, image_size=30, cameras=("default", "large", "small"))
    sim.reset([0, 1], [3, 4], out)
    images = split(out.observation).images
    # The longer side has 30 pixels: 40 x 60 becomes 20 x 30, and 20 x 20 becomes 30 x 30.
    assert {name: part.shape[1:3] for name, part in images.items()} == {"render": (16, 30), "large": (20, 30), "small": (30, 30)}
    assert (images["large"] == 1).all()
    assert (images["small"] == 2).all()
    assert images["render"].std() > 10
    with pytest.raises(UserError, match="Task 'KeyDoor' has no camera 'top': it has only one view"):
        make(KEY_DOOR, image_size=30, cameras=("top",))


def test_an_expert_is_asked_at_every_step_of_a_chunk() -> None:
    """As in DAgger: experts may remember, and see what their simulator would otherwise leave out."""
    toys = "tests.rollout.recording_toys"
    config = SimConfig(name="painting", target=f"{toys}:SplitPaintingSim", kwargs={"length": 9}, num_slots=2, num_workers=1)
    shown = instrumented(config, expert=f"{toys}:Remembering", image_size=16)
    with EnvManager.from_config(shown, EpisodeSeeds.training(0), chunk_size=4) as manager:
        manager.reset()
        batches = [manager.step(np.ones((2, 4, 1))) for _ in range(2)]
        np.testing.assert_allclose(batches[-1].observation[EXPERT], [[9.08]] * 2, rtol=1e-6, err_msg="the reset, and eight steps")
        np.testing.assert_array_equal(batches[-1].observation["image/render"][:, 0, 0, 0], [80, 80])
        last = manager.step(np.ones((2, 4, 1)))
        np.testing.assert_allclose(last.final_observation[EXPERT], [[10.09]] * 2, rtol=1e-6)
