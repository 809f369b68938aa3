"""The benchmark of action chunks: what its sides draw, and the script with tiny sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.rendering import mujoco_backend
from embodied_rl.types import StepBuffers
from tests.test_benchmark_runs import run_script
from tests.test_benchmarks import agree, columns, over, printed, scripts_can_be_imported  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(mujoco_backend() is None, reason="MuJoCo cannot draw off-screen here")


def test_one_side_draws_at_every_step() -> None:
    from chunks import observing

    config = load_sim_config("pixel_tasks")
    always = observing(config)
    for made, draws in ((config, False), (always, True)):
        sim = SimFactory(made.target, made.task, made.kwargs, made.extra).make(1)
        assert (type(sim).observe is SimEnv.observe) == draws
        out = StepBuffers.allocate(sim.spec, 1)
        sim.reset([0], [3], out)
        first = out.observation["rgb"].copy()
        for _ in range(4):
            sim.advance([0], np.ones((1, 2), np.float32), out)
        assert np.any(out.observation["rgb"] != first) == draws
        sim.close()


@pytest.mark.slow
@pytest.mark.ci_sample
def test_chunks_runs() -> None:
    lines = run_script("chunks.py", "--rounds", "1", "--rollout-steps", "2", "sim.num_slots=4", "sim.num_workers=1")
    assert any("4 slots, 1 workers, 4 steps a chunk" in line and "equal bit by bit" in line for line in lines)
    rows = columns(lines, below="observation")
    assert set(rows) == {"drawn at every step", "drawn where it is read"}
    milliseconds = {name: printed(cells[0]) for name, cells in rows.items()}
    said = r"figure: rollouts where observations are drawn as they are read: ([\d.]+)x \(chunks of 4\); by processor time ([\d.]+)x"
    figure = re.fullmatch(said, lines[-1])
    assert figure is not None
    assert agree(printed(figure[1]), over(milliseconds["drawn at every step"], milliseconds["drawn where it is read"]))
