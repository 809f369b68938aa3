"""Every configuration in configs/sim makes its simulator, and steps it."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.config import group_names, load_sim_config
from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.files import configs_dir
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.types import StepBuffers
from tests.sim.robots.pictures import sapien_draws


@pytest.mark.parametrize(
    "name", [name for name in group_names("sim") if name not in ("custom", "remote", "text_task", "judged", "code_tasks", "agent_program")]
)  # those need a target, a server, a sandbox, or are no simulators that could be stepped
def test_configuration_makes_and_steps(name: str) -> None:
    config = load_sim_config(name)
    assert config.name == name
    header = (configs_dir() / "sim" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert header.startswith("# ")
    if name in ("pixel_reach", "pixel_tasks") and mujoco_backend() is None:
        pytest.skip("MuJoCo cannot draw off-screen here")
    if config.kwargs.get("obs_mode", "state") != "state" and sapien_draws() is None:
        pytest.skip("no Vulkan device: pictures cannot be drawn here")
    if name.endswith("_gpu") and not _cuda():
        with pytest.raises(UserError, match="finds no CUDA device"):
            SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
        pytest.skip("no CUDA device")
    try:
        sim = SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
    except (MissingExtraError, MissingAssetsError) as error:
        pytest.skip(str(error))
    assert sim.spec.task.endswith(config.task)  # some write their family before it
    assert sim.spec.reports_success or not config.success_ends_episode
    assert sim.spec.max_episode_steps is not None
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [1], out)
    first = {key: part.copy() for key, part in out.observation.items()}
    action: np.ndarray = np.array([sim.spec.action.high], np.float32)
    if sim.spec.action.kind != "continuous":
        action = np.ones((1, 1), np.int64) if sim.spec.action.kind == "discrete" else np.array(["\\boxed{1}"], object)
    sample = getattr(sim, "sample_action", None) if sim.spec.action.kind == "text" else None  # words of the game's own
    moved = False
    for number in range(3 if sample is None else 12):
        sim.step([0], action if sample is None else [sample(0, number)], out)
        moved |= any((out.observation[key] != first[key]).any() for key in first)
        if out.terminated[0] or out.truncated[0]:
            break
    assert all(np.isfinite(out.observation[key]).all() for key in sim.spec.tensors)
    assert all(isinstance(out.observation[key][0], str) for key, part in sim.spec.variables.items() if part.kind == "text")
    assert np.isfinite(out.reward).all()
    assert moved, "nothing moved"
    sim.close()


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_unknown_argument_names_the_configuration_key() -> None:
    with pytest.raises(UserError, match="does not take 'image_sise'"):
        SimFactory("embodied_rl.sim.robots.pixel_reach:PixelReach", "PixelReach", {"image_sise": 3}).make(1)


@pytest.mark.parametrize(
    ("sim", "kwargs", "words"),
    [
        ("cartpole", {"max_episode_steps": 0}, "'CartPole-v1' cannot be made with .*positive, actually: 0 "),
        ("halfcheetah", {"frame_skip": 0}, "cannot be made with .*ZeroDivisionError"),
        ("halfcheetah", {"camera_name": "trak"}, "Camera 'trak' is not known. Did you mean 'track'"),
        ("aloha_insertion", {"max_target_step_rad": -1}, "max_target_step_rad must be above 0, or null for no limit, got -1"),
        ("mjcf", {"observe": []}, "'pixel_reach' has an empty observation"),
        ("halfcheetah", {"xml_file": "missing.xml"}, "cannot be made with .*missing.xml does not exist"),
        ("pixel_reach", {"image_size": -3}, r"sim\.kwargs\.image_size must be a whole number of pixels, at least 1, got -3"),
        ("pixel_tasks", {"image_size": 1.5}, "image_size must be a whole number of pixels"),
        ("fetch_reach", {"render_size": 0}, "render_size must be a whole number of pixels, at least 1, got 0"),  # MuJoCo ends the process
        ("mjcf", {"reward": 3}, "cannot be made with .*'reward': 3"),
        ("mjcf", {"observe": "qpoz"}, "'qpoz' cannot be observed of an MJCF model. Did you mean 'qpos'"),
        ("franka_kitchen", {"tasks_to_complete": "kettel"}, "The kitchen has no task 'kettel'. Did you mean 'kettle'"),
        ("pointmaze", {"maze_map": [[1, "c", 0]]}, r"sim\.kwargs\.maze_map needs for each goal"),  # its reset would never end
        ("antmaze", {"maze_map": [[1, 1]]}, r"sim\.kwargs\.maze_map needs for each goal"),
        ("metaworld_mt10", {"tasks": "reach-v2"}, "Meta-World task 'reach-v2' is not known. Did you mean 'reach-v3'"),
    ],
)
def test_an_argument_of_a_wrong_value_is_one_line(sim: str, kwargs: dict, words: str) -> None:
    config = load_sim_config(sim)
    factory = SimFactory(config.target, config.task, {**config.kwargs, **kwargs}, config.extra)
    with pytest.raises(UserError, match=words):
        factory.make(1)


def test_a_users_own_simulator_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        SimFactory("tests.sim.robots.test_configs:broken").make(1)


def broken() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("sim", "name", "value"),
    [("cartpole", "env", None), ("key_door", "state", np.zeros(3)), ("pixel_reach", "state", {}), ("metaworld_mt10", "episode", None)],
)
def test_a_snapshot_of_another_form_is_one_line(sim: str, name: str, value: object) -> None:
    config = load_sim_config(sim)
    made = SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
    made.reset([0], [0], StepBuffers.allocate(made.spec, 1))
    saved = decode_state(made.snapshot(0))
    for wrong in ({"task": saved["task"]}, {**saved, name: value}):
        with pytest.raises(SnapshotError, match="is of another simulator"):
            made.restore(0, encode_state(wrong))
    made.close()
