"""Our walkers against gymnasium's own step, bit for bit."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from embodied_rl.sim.robots.gymnasium import GymnasiumSim, make_one
from embodied_rl.sim.robots.mujoco import LocomotionSim, is_known, make
from embodied_rl.types import StepBuffers

TASKS: list[tuple[str, dict[str, Any]]] = [
    ("HalfCheetah-v5", {}),
    ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "forward_reward_weight": 0.3, "ctrl_cost_weight": 0.7}),
    ("Hopper-v5", {}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_reward": 0.25, "max_episode_steps": 60}),
    ("Walker2d-v5", {}),
    ("Ant-v5", {}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "contact_force_range": (-0.5, 0.25), "main_body": "torso", "frame_skip": 3}),
]


def play(sim: GymnasiumSim, num_steps: int) -> list[dict[str, Any]]:
    """Random actions, sometimes of some environments only; an episode that ends is begun again."""
    random, count = np.random.default_rng(3), len(sim.envs)
    out, seeds, history = StepBuffers.allocate(sim.spec, count), iter(range(10**6)), []
    sim.reset(range(count), [next(seeds) for _ in range(count)], out)
    for number in range(num_steps):
        ids = list(range(count)) if number % 3 else sorted(random.choice(count, 2, replace=False).tolist())
        actions = random.uniform(-1, 1, (len(ids), sim.spec.action.dim)).astype(np.float32)
        sim.step(ids, actions, out)
        history.append(
            {
                "observation": out.observation["state"].copy(),
                "reward": out.reward.copy(),
                "ends": np.stack([out.terminated, out.truncated, out.success]),
                "info": [{key: float(value) for key, value in (out.info[i] or {}).items()} for i in ids],
            }
        )
        for i in np.flatnonzero(out.terminated | out.truncated):
            sim.reset([i], [next(seeds)], out)
            out.terminated[i] = out.truncated[i] = False
    return history


@pytest.mark.parametrize(("task", "options"), TASKS)
def test_equals_gymnasium_bit_for_bit(task: str, options: dict[str, Any]) -> None:
    ours = make(task, 3, **options)
    assert isinstance(ours, LocomotionSim)
    plain = GymnasiumSim([make_one(task, **options) for _ in range(3)], task=task)
    ends = 0
    for mine, theirs in zip(play(ours, 200), play(plain, 200), strict=True):
        np.testing.assert_array_equal(mine["observation"], theirs["observation"])
        np.testing.assert_array_equal(mine["reward"], theirs["reward"])
        np.testing.assert_array_equal(mine["ends"], theirs["ends"])
        ends += int(mine["ends"].any())
        for one, other in zip(mine["info"], theirs["info"], strict=True):
            assert one.keys() == other.keys()
            assert one == pytest.approx(other, rel=1e-12, abs=1e-12)
    assert ends > 0 or task == "HalfCheetah-v5", "no episode ended, so their ends were not compared"


def test_the_step_limit_is_gymnasiums() -> None:
    sim = make("HalfCheetah-v5", 2, max_episode_steps=5)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [0, 1], out)
    for _ in range(4):
        sim.step([0, 1], np.zeros((2, 6), np.float32), out)
        assert not out.truncated.any()
    sim.step([1], np.zeros((1, 6), np.float32), out)
    assert out.truncated.tolist() == [False, True]
    sim.reset([1], [2], out)
    sim.step([1], np.zeros((1, 6), np.float32), out)
    assert not out.truncated[1]


def test_snapshots_continue_the_same_way_in_both() -> None:
    """A snapshot of ours goes on in gymnasium's own step, and the other way round."""
    kinds = [make("Ant-v5", 1), GymnasiumSim([make_one("Ant-v5", width=256, height=256)], task="Ant-v5", exact_snapshots=True)]
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 1, 8)).astype(np.float32)
    for first, second in (kinds, kinds[::-1]):
        results = []
        out = StepBuffers.allocate(first.spec, 1)
        first.reset([0], [7], out)
        for action in actions[:20]:
            first.step([0], action, out)
        saved = first.snapshot(0)
        for sim in (first, second):
            sim.reset([0], [99], out)
            sim.restore(0, saved)
            for action in actions[20:]:
                sim.step([0], action, out)
            results.append((out.observation["state"].copy(), out.reward.copy()))
        np.testing.assert_array_equal(results[0][0], results[1][0])
        np.testing.assert_array_equal(results[0][1], results[1][1])


def test_only_the_known_tasks_in_the_registrys_wrappers_are_taken_over() -> None:
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    class Own(HalfCheetahEnv):
        pass

    assert is_known(make_one("HalfCheetah-v5"))
    assert not is_known(gymnasium.wrappers.RescaleAction(make_one("HalfCheetah-v5"), 0.0, 1.0))
    assert not is_known(make_one("HalfCheetah-v4")) if "HalfCheetah-v4" in gymnasium.registry else True
    assert not is_known(make_one("Humanoid-v5"))
    assert not is_known(Own())
    assert not isinstance(make("Swimmer-v5", 1), LocomotionSim)
