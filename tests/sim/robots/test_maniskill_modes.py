"""ManiSkill's observation modes, cameras and tasks, and the simulator for GPUs as far as a machine without one can run it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.sim.rendering import configure_rendering
from embodied_rl.sim.robots import maniskill, maniskill_gpu
from embodied_rl.sim.robots.maniskill_gpu import HostBuffers
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers, TensorSpec
from tests.sim.robots.pictures import sapien_draws
from tests.sim.robots.trajectories import actions_for, assert_equal, episode

RECONFIGURE = {"reconfigure": True}
CARRIED_OVER = ("Empty-v1", "MS-AntRun-v1", "MS-AntWalk-v1")
"""Tasks whose plain reset leaves something of the episode before: the robot where it is, or the forces at the ant's feet."""

SAMPLE_TASKS = ("MS-AntWalk-v1", "MS-CartpoleBalance-v1", "StackCube-v1", "TwoRobotPickCube-v1")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    configure_rendering()
    try:
        maniskill.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def vulkan() -> None:
    if sapien_draws() is None:
        pytest.skip("no Vulkan device: pictures cannot be drawn here")


def started(sim: Any, seed: int = 5) -> StepBuffers:
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out, RECONFIGURE)
    return out


# ---- modes without pictures: no Vulkan needed ----


def test_state_dict_is_the_same_flat_state() -> None:
    flat, nested = maniskill.make("PickCube-v1", 1), maniskill.make("PickCube-v1", 1, obs_mode="state_dict")
    assert nested.spec.observation == flat.spec.observation == {"state": TensorSpec((42,))}
    assert_equal(*(episode(sim, 1, {0: 3}, 5, RECONFIGURE)[0] for sim in (flat, nested)))
    assert nested.cameras == ()


@pytest.mark.parametrize(
    ("mode", "words"),
    [("rgb+stat", "Did you mean 'state'"), ("none", "is not a choice"), ("sensor_data", "is not a choice"), ("rbg", "Did you mean 'rgb")],
)
def test_modes_that_cannot_be_adapted_are_named(mode: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"obs_mode='{mode.replace('+', '.')}' .*{words}"):
        maniskill.make("PickCube-v1", 1, obs_mode=mode)


def make_and_step(task: str) -> None:
    sim = maniskill.make(task, 1)
    try:
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [1], out)
        first = out.observation["state"].copy()
        assert np.isfinite(first).all()
        for t, action in enumerate(actions_for(sim, 3)):
            sim.step([0], action[None], out)
            assert np.isfinite(out.observation["state"]).all()
            assert np.isfinite(out.reward).all()
            assert not out.truncated[0]
            assert out.info[0] is not None
            assert out.info[0]["elapsed_steps"] == t + 1
        assert (out.observation["state"] != first).any(), "nothing moved"
        sim.reset([0], [1], out, RECONFIGURE if task in CARRIED_OVER else None)
        np.testing.assert_allclose(out.observation["state"], first, atol=1e-5, err_msg="the seed does not give the initial state")
        assert sim.spec.max_episode_steps is not None
    finally:
        sim.close()


@pytest.mark.parametrize("task", SAMPLE_TASKS)
def test_a_sample_of_the_tasks_runs_from_state(task: str) -> None:
    make_and_step(task)


@pytest.mark.slow
def test_every_task_that_needs_no_download_runs_from_state() -> None:
    tasks = maniskill.tasks()
    assert len(tasks) >= 44
    failed = {}
    for task in tasks:
        try:
            make_and_step(task)
        except Exception as error:
            failed[task] = f"{type(error).__name__}: {error}"
    assert not failed


# ---- pictures ----

SIZE = 48


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("rgb", {"state": ((29,), "float32"), "rgb": ((SIZE, SIZE, 3), "uint8")}),
        ("segmentation", {"state": ((29,), "float32"), "segmentation": ((SIZE, SIZE, 1), "int16")}),
        ("rgbd", {"state": ((29,), "float32"), "rgb": ((SIZE, SIZE, 3), "uint8"), "depth": ((SIZE, SIZE, 1), "int16")}),
        (
            "pointcloud",
            {
                "state": ((29,), "float32"),
                "pointcloud": ((SIZE * SIZE, 4), "float32"),
                "pointcloud.rgb": ((SIZE * SIZE, 3), "uint8"),
                "pointcloud.segmentation": ((SIZE * SIZE, 1), "int16"),
            },
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("vulkan")
def test_parts_of_each_mode(mode: str, parts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """PickCube-v1: 9 joints, their speeds, gripping, 7 numbers of the tool's pose, 3 of the goal; the cube's pose is not shown."""
    sim = maniskill.make("PickCube-v1", 1, obs_mode=mode, camera_size=SIZE)
    assert sim.spec.observation == {key: TensorSpec(shape, dtype) for key, (shape, dtype) in parts.items()}
    out = started(sim)
    for key in parts:
        assert out.observation[key].std() > 0, key
    sim.close()


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.usefixtures("vulkan")
def test_pictures_show_the_cube_where_geometry_says() -> None:
    """The cube's centre, projected by hand with the camera's matrices: red there, numbered as the cube there, and as far away."""
    sim = maniskill.make("PickCube-v1", 1, obs_mode="rgb+depth+segmentation+position+state", camera_size=SIZE)
    assert sim.cameras == ("base_camera",)
    assert set(sim.spec.observation) == {"state", "rgb", "depth", "segmentation", "position"}
    plain = maniskill.make("PickCube-v1", 1)
    names = sim.objects()
    (cube,) = [number for number, name in names.items() if name == "cube"]
    assert 0 not in names
    for seed in (1, 2, 3):
        out, without = started(sim, seed), started(plain, seed)
        np.testing.assert_array_equal(out.observation["state"], without.observation["state"], err_msg="pictures change no physics")
        env: Any = sim.envs[0]
        parameters = {key: value[0].numpy() for key, value in env.get_sensor_params()["base_camera"].items()}
        world = np.append(env.cube.pose.p[0].numpy(), 1.0)
        x, y, z = parameters["extrinsic_cv"] @ world  # metres in the camera's frame: right, down, forward
        u, v, w = parameters["intrinsic_cv"] @ (x, y, z)
        row, column = int(v / w), int(u / w)
        assert out.observation["segmentation"][0, row, column, 0] == cube
        red, green, blue = out.observation["rgb"][0, row, column].astype(int)
        assert red > green + 40
        assert red > blue + 40
        # The ray meets the cube (half a side: 20 mm) before its centre, by at most half its diagonal.
        depth_mm = int(out.observation["depth"][0, row, column, 0])
        assert 0 < 1000 * z - depth_mm < 20 * np.sqrt(3) + 1
        # OpenGL's camera looks along -z and its y points up.
        np.testing.assert_allclose(out.observation["position"][0, row, column], [1000 * x, -1000 * y, -depth_mm], atol=35)
    sim.close()


@pytest.mark.slow
@pytest.mark.usefixtures("vulkan")
def test_several_cameras_each_of_its_own_size() -> None:
    sim = maniskill.make(
        "TwoRobotPickCube-v1",
        1,
        obs_mode="rgb+segmentation",
        camera_size=32,
        sensor_configs={"panda_wristcam-1-hand_camera": {"width": 24, "height": 16}},
    )
    hands = ("panda_wristcam-0-hand_camera", "panda_wristcam-1-hand_camera")
    assert sim.cameras == ("base_camera", *hands)
    assert {key: part.shape for key, part in sim.spec.tensors.items() if key != "state"} == {
        "rgb": (32, 32, 3),
        "segmentation": (32, 32, 1),
        f"rgb.{hands[0]}": (32, 32, 3),
        f"segmentation.{hands[0]}": (32, 32, 1),
        f"rgb.{hands[1]}": (16, 24, 3),
        f"segmentation.{hands[1]}": (16, 24, 1),
    }
    out = started(sim)
    assert (out.observation["rgb"][0] != out.observation[f"rgb.{hands[0]}"][0]).any()
    seen = set(np.unique(out.observation["segmentation"])) - {0}
    assert seen <= set(sim.objects())
    assert {"panda_link0", "ground"} <= {sim.objects()[int(number)] for number in seen}
    sim.close()


@pytest.mark.slow
@pytest.mark.usefixtures("vulkan")
def test_steps_are_counted_from_each_reset_with_pictures_too() -> None:
    sim = maniskill.make("PushCube-v1", 1, obs_mode="rgb+state", camera_size=16, control_mode="pd_joint_delta_pos")
    out, zeros = StepBuffers.allocate(sim.spec, 1), np.zeros((1, 8), np.float32)
    for length in (7, 50):
        sim.reset([0], [length], out)
        for t in range(1, length + 1):
            sim.step([0], zeros, out)
            assert out.info[0] is not None
            assert out.info[0]["elapsed_steps"] == t
            assert bool(out.truncated[0]) == (t == 50)
    sim.close()


# ---- the simulator for GPUs ----


def cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_without_a_cuda_device_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"finds no CUDA device. embodied_rl.sim.robots.maniskill:make runs it on the CPU"):
        maniskill_gpu.make("PickSingleYCB-v1", 4)  # whose meshes must not be fetched in vain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"device='cuda:2' does not exist; there are 2, cuda:0 to cuda:1"):
        maniskill_gpu.make("PushCube-v1", 4, device="cuda:2")
    assert maniskill_gpu.physics_backend("PushCube-v1", "cuda:1", 4) == "physx_cuda:1"
    assert maniskill_gpu.physics_backend("PushCube-v1", "cuda", 4) == "physx_cuda"


def test_arguments_that_cannot_be_are_named() -> None:
    with pytest.raises(UserError, match=r"'PushCub-v1' is not known. Did you mean 'PushCube-v1'"):
        maniskill_gpu.make("PushCub-v1", 1, device="cpu")
    with pytest.raises(UserError, match="on a CPU a simulation has one environment, and 2 were requested"):
        maniskill_gpu.make("PushCube-v1", 2, device="cpu")
    with pytest.raises(UserError, match="device='tpu' is not a choice"):
        maniskill_gpu.make("PushCube-v1", 2, device="tpu")
    with pytest.raises(UserError, match="'sim_backend' is set by the simulator"):
        maniskill_gpu.make("PushCube-v1", 1, device="cpu", sim_backend="physx_cpu")
    with pytest.raises(UserError, match="obs_mode='none' is not a choice"):
        maniskill_gpu.make("PushCube-v1", 1, device="cpu", obs_mode="none")
    with pytest.raises(UserError, match=r"cannot be made with .*pd_joint_dlta"):
        maniskill_gpu.make("PushCube-v1", 1, device="cpu", control_mode="pd_joint_dlta")


def test_host_buffers_hand_over_values_and_keep_their_memory() -> None:
    import torch

    host = HostBuffers()
    first = {
        "state": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "rgb": torch.full((2, 4, 4, 3), 7, dtype=torch.uint8),
        "segmentation": torch.tensor([[-3], [300]], dtype=torch.int16),
        "/success": torch.tensor([True, False]),
    }
    arrays = host.fetch(first)
    assert {key: array.dtype.name for key, array in arrays.items()} == {
        "state": "float32",
        "rgb": "uint8",
        "segmentation": "int16",
        "/success": "bool",
    }
    assert arrays["state"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["segmentation"].tolist() == [[-3], [300]]
    assert (arrays["rgb"] == 7).all()
    first["state"] += 10
    assert arrays["state"][0, 0] == 0, "a copy"
    again = host.fetch({"state": first["state"]})
    assert np.shares_memory(again["state"], arrays["state"])
    assert again["state"].tolist() == [[10, 11, 12], [13, 14, 15]]
    columns = host.fetch({"turned": first["state"].T})["turned"]
    assert columns.tolist() == [[10, 13], [11, 14], [12, 15]], "strides are not values"
    with pytest.raises(AssertionError, match="state"):
        host.fetch({"state": torch.zeros(3, 3)})


def test_host_buffers_wait_for_the_device_that_they_copy_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for torch's present device: with ``device="cuda:1"`` rows were read before they had come."""
    import torch

    class OnGpu(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    host = HostBuffers()
    host._buffers["state"] = torch.empty(3)  # pinned memory needs a GPU
    assert host.fetch({"state": torch.ones(3).as_subclass(OnGpu)})["state"].tolist() == [1.0] * 3
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize("task", ["PushCube-v1", "TwoRobotPickCube-v1"])
def test_one_environment_on_the_cpu_is_bit_for_bit_the_cpu_simulator(task: str) -> None:
    together, single = maniskill_gpu.make(task, 1, device="cpu"), maniskill.make(task, 1)
    expected = {**single.spec.to_dict(), "snapshots": "approximate", "steps_together": True}
    assert together.spec.to_dict() == expected
    for seed in (3, 4):
        assert_equal(*(episode(sim, 1, {0: seed}, 20, RECONFIGURE)[0] for sim in (together, single)))
    out, other = StepBuffers.allocate(together.spec, 1), StepBuffers.allocate(single.spec, 1)
    together.reset([0], [9], out)
    single.reset([0], [9], other)
    together.step([0], zeros := np.zeros((1, single.spec.action.dim), np.float32), out)
    single.step([0], zeros, other)
    assert out.info == other.info
    together.close()


def test_a_scene_is_built_anew_for_all_environments_or_none() -> None:
    sim = maniskill_gpu.make("PushCube-v1", 1, device="cpu")
    out = StepBuffers.allocate(sim.spec, 1)
    with pytest.raises(UserError, match="must reset all of them"):
        sim.reset([], [], out, RECONFIGURE)
    sim.close()


def test_steps_are_counted_and_approximate_snapshots_carry_them() -> None:
    sim = maniskill_gpu.make("PushCube-v1", 1, device="cpu", control_mode="pd_joint_delta_pos")
    out = StepBuffers.allocate(sim.spec, 1)
    actions = 0.3 * actions_for(sim, 60)

    def play(first: int, last: int) -> np.ndarray:
        rows = []
        for t in range(first, last):
            sim.step([0], actions[t : t + 1], out)
            assert bool(out.truncated[0]) == (t + 1 >= 50)
            assert out.info[0] is not None
            assert out.info[0]["elapsed_steps"] == t + 1
            rows.append(out.observation["state"][0].copy())
        return np.array(rows)

    sim.reset([0], [2], out)
    play(0, 30)
    data = sim.snapshot(0)
    uninterrupted = play(30, 52)
    sim.reset([0], [8], out)
    play(0, 3)
    sim.restore(0, data)
    drift = np.abs(play(30, 52) - uninterrupted)
    # Positions: joints (0-8) and what follows from them; the controller's caches are not in the snapshot.
    assert drift[:, :9].max() < 0.02
    assert drift[0].max() < 0.2
    with pytest.raises(SnapshotError, match="of task 'PushCube-v1' and cannot be restored into task 'PullCube-v1'"):
        maniskill_gpu.make("PullCube-v1", 1, device="cpu").restore(0, data)
    sim.close()


def test_each_environment_draws_from_its_own_seed() -> None:
    """The CPU's physics holds one environment, so the scene is a stand-in here; reset's order and its generators are ManiSkill's own."""
    import torch
    from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

    class Scene:
        _reset_mask = torch.ones(4, dtype=torch.bool)

    class Env:
        scene = Scene()
        _batched_episode_rng = BatchedRNG.from_seeds([0, 1, 2, 3])
        _episode_rng = _batched_episode_rng[0]
        torch_draws, numpy_draws = torch.zeros(4), np.zeros(4)

        def reset(self, seeds: list[int], env_idx: torch.Tensor) -> None:
            self._batched_episode_rng = BatchedRNG.from_seeds(seeds)
            self._episode_rng = self._batched_episode_rng[0]
            self.scene._reset_mask = torch.zeros(4, dtype=torch.bool)
            self.scene._reset_mask[env_idx] = True
            with torch.random.fork_rng():
                torch.manual_seed(seeds[0])
                self._initialize_episode(env_idx, {})

        def _initialize_episode(self, env_idx: torch.Tensor, options: dict) -> None:
            self.torch_draws[self.scene._reset_mask] = torch.rand(len(env_idx))
            self.numpy_draws[env_idx.numpy()] = self._episode_rng.rand(len(env_idx))

    sim = object.__new__(maniskill_gpu.ManiSkillGpuSim)
    env = sim.env = Env()
    sim._torch, sim.num_envs, sim._seeds = torch, 4, np.array([10, 11, 12, 13])
    expected_torch = {seed: torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in range(10, 25)}
    with sim._own_draws([0, 1, 2, 3]):
        env.reset(sim._seeds.tolist(), torch.arange(4))
    assert env.torch_draws.tolist() == [expected_torch[seed] for seed in (10, 11, 12, 13)]
    assert env.numpy_draws.tolist() == [np.random.RandomState(seed).rand() for seed in (10, 11, 12, 13)]
    state = torch.random.get_rng_state()
    sim._seeds[[3, 1]] = 24, 21
    with sim._own_draws([3, 1]):
        env.reset(sim._seeds.tolist(), torch.tensor([3, 1]))
    assert env.torch_draws.tolist() == [expected_torch[seed] for seed in (10, 21, 12, 24)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert env.scene._reset_mask.tolist() == [False, True, False, True]
    # The second draw of environment 0 is the one that its own seed has in that place: its generator was not begun anew.
    assert env._batched_episode_rng[0].rand() == np.random.RandomState(10).rand(2)[1]


@pytest.mark.gpu
@pytest.mark.skipif(not cuda(), reason="no CUDA device")
def test_on_a_gpu_initial_states_follow_the_seeds_and_partial_resets_leave_the_others() -> None:
    sim, single = maniskill_gpu.make("PushCube-v1", 4), maniskill.make("PushCube-v1", 1)
    out = StepBuffers.allocate(sim.spec, 4)
    sim.reset([0, 1, 2, 3], [5, 6, 5, 7], out)
    first = out.observation["state"].copy()
    np.testing.assert_allclose(first[0], first[2], atol=1e-4)
    assert np.abs(first[0] - first[1]).max() > 1e-2
    alone = StepBuffers.allocate(single.spec, 1)
    single.reset([0], [6], alone)
    assert alone.observation["state"].shape[1] == first.shape[1]
    actions = actions_for(sim, 10)
    for action in actions:
        sim.step([3, 2, 1, 0], np.tile(action, (4, 1)), out)
    np.testing.assert_allclose(out.observation["state"][0, :9], out.observation["state"][2, :9], atol=1e-2)
    before = out.observation["state"].copy()
    sim.reset([1], [5], out)
    np.testing.assert_array_equal(out.observation["state"][[0, 2, 3]], before[[0, 2, 3]])
    np.testing.assert_allclose(out.observation["state"][1], first[0], atol=1e-3)
    data = sim.snapshot(0)
    sim.restore(3, data)
    sim.step([0, 1, 2, 3], np.zeros((4, sim.spec.action.dim), np.float32), out)
    np.testing.assert_allclose(out.observation["state"][3, :9], out.observation["state"][0, :9], atol=1e-2)
    assert [row["elapsed_steps"] for row in out.info if row is not None] == [11, 1, 11, 11]
    sim.close()
