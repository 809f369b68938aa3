from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.hybrid.engine import HybridEngine
from embodied_rl.learning.devices import _openblas, compute_threads, set_compute_threads
from embodied_rl.roles import ray_roles
from tests.learning.samples import CONFIG, make_batch, make_policy, rollout_learner, update
from tests.roles.runs import ROLLOUTS, configured


def make_engine() -> HybridEngine:
    policy = make_policy()
    return HybridEngine(policy, TorchGenerator(policy))


def test_generation_sees_new_weights_at_publish_alone() -> None:
    engine = make_engine()
    observation = {"state": np.ones((2, 11), np.float32)}

    def act() -> tuple[np.ndarray, int]:
        with engine.generation():
            engine.generator.send(np.arange(2), observation, None)
            acted = engine.generator.recv()
        return acted.action, acted.version

    engine.publish(7)
    before, version = act()
    assert version == 7
    with engine.training():
        update(rollout_learner(engine.policy, CONFIG), make_batch(engine.policy), 0, 1, 0)
    assert np.array_equal(act()[0], before)
    engine.publish(8)
    after, version = act()
    assert version == 8
    with torch.no_grad():
        expected = engine.policy.act({"state": torch.ones(2, 11)}, None).action.numpy()
    assert not np.array_equal(after, before)
    np.testing.assert_allclose(after, expected, atol=1e-6)


def test_turns_do_not_overlap_and_end_after_an_error() -> None:
    engine = make_engine()
    with engine.generation(), pytest.raises(RuntimeError, match="inside generation"), engine.training():
        pass

    def fail() -> None:
        with engine.training():
            assert engine.phase == "training"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert engine.phase is None


def test_an_actor_that_generates_has_one_thread_for_good(tmp_path: Path) -> None:
    functions, before = _openblas(), set_compute_threads(3, 2)
    try:
        ray_roles.GenerationWorker(configured(tmp_path, *ROLLOUTS))
        gc.collect()
        assert torch.get_num_threads() == 1
        assert functions is None or functions[0]() == 1
    finally:
        set_compute_threads(*before)


def test_threads_are_limited_inside_and_restored_after() -> None:
    functions = _openblas()
    before = torch.get_num_threads()
    with compute_threads(3):
        outer = functions[0]() if functions else 0
        with compute_threads(1):
            assert torch.get_num_threads() == 1
            assert functions is None or functions[0]() == 1
        assert torch.get_num_threads() == 3
        assert functions is None or functions[0]() == outer
    assert torch.get_num_threads() == before
