"""Every configuration in configs/sim makes its simulator, and steps it."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.config import group_names, load_sim_config
from embodied_rl.errors import MissingExtraError, UserError
from embodied_rl.paths import configs_dir
from embodied_rl.sim.env import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.types import StepBuffers


@pytest.mark.parametrize("name", [name for name in group_names("sim") if name != "custom"])  # custom: the user names the target
def test_configuration_makes_and_steps(name: str) -> None:
    config = load_sim_config(name)
    assert config.name == name
    header = (configs_dir() / "sim" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert header.startswith("# ")
    if name == "pixel_reach" and mujoco_backend() is None:
        pytest.skip("MuJoCo cannot draw off-screen here")
    try:
        sim = SimFactory(config.target, config.task, config.kwargs, config.extra).make(1)
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert sim.spec.task == config.task
    assert sim.spec.reports_success or not config.success_ends_episode
    assert sim.spec.max_episode_steps is not None
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [1], out)
    first = {key: part.copy() for key, part in out.observation.items()}
    action = np.ones((1, 1), np.int64) if sim.spec.action.kind == "discrete" else np.array([sim.spec.action.high], np.float32)
    for _ in range(3):
        sim.step([0], action, out)
    assert all(np.isfinite(part).all() for part in out.observation.values())
    assert np.isfinite(out.reward).all()
    assert any((out.observation[key] != first[key]).any() for key in first), "nothing moved"
    sim.close()


def test_unknown_argument_names_the_configuration_key() -> None:
    with pytest.raises(UserError, match="does not take 'image_sise'"):
        SimFactory("embodied_rl.sim.robots.pixel_reach:PixelReach", "PixelReach", {"image_sise": 3}).make(1)
