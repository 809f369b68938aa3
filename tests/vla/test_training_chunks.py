"""`record.share` of policies that act in chunks: it writes what `python -m embodied_rl.record` writes of the same policy and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import SimConfig
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import Recording
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.evaluation.offline_policy import drew_tokens
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.build import build_policy
from embodied_rl.rollout import recording as recordings
from embodied_rl.rollout.collector import action_noise
from embodied_rl.rollout.group_collector import EpisodeNoise
from embodied_rl.rollout.recording import GeneratorPlayer, Recorder, RecordingPlan
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.instrumented import instrumented
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.train import train
from tests.policies.openvla.conftest import checkpoint as checkpoint
from tests.policies.openvla.test_training import SPOON
from tests.policies.openvla.test_training import folder as folder
from tests.rollout.test_training_recording import curve, weights
from tests.vla.test_runs import GRPO, PPO, QUIET, SIM, TINY

pytestmark = pytest.mark.usefixtures("forked")

FLOW = ("policy=flow", "policy.chunk=3", "policy.hidden_sizes=[16]", "policy.num_steps=2")
ONE = ("sim.num_slots=1", "total_steps=1")
"""A single iteration, by the weights that the seed gives; each pass has one row, as in the recording that is compared."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The last bit of a product depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(run_dir: Path, *overrides: str) -> Path:
    return train(load_train_config([*SIM, *QUIET, *overrides, f"run_dir={run_dir}"]))


class Given:
    """The noise of one episode's decisions, known beforehand."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows: Iterator[np.ndarray] = iter(rows)

    def next(self) -> np.ndarray:
        return next(self._rows)


def recorded_again(run_dir: Path, written: Recording, noise: dict[int, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """What the recorder of `python -m embodied_rl.record` writes of the run's first weights, of its seeds and noise."""
    checkpoint = load_checkpoint(run_dir, with_learner=False)
    torch.manual_seed(checkpoint.config.seed)
    policy = build_policy(checkpoint.config.policy, checkpoint.spec)
    generator = TorchGenerator(policy.eval())
    generator.publish(0)
    player = GeneratorPlayer(generator, checkpoint.spec.action, draws=True, layout=policy.action_layout)
    monkeypatch.setattr(recordings, "EpisodeNoise", lambda layout, key: noise[key[1]])
    sim: SimConfig = instrumented(checkpoint.config.sim)
    with EnvManager.from_config(sim, EpisodeSeeds.training(0), autoreset=False) as manager, RecordingWriter(folder, written.info) as writer:
        for seed in noise:
            assert Recorder(manager, player, writer, RecordingPlan(1, first_seed=int(seed))).run().complete
    return open_recording(folder)


def assert_equal(written: Recording, again: Recording) -> None:
    """Bit for bit, every column that both have, and all that training writes."""
    of_seed = {episode.seed: episode for episode in written}
    assert len(again) > 0
    for other in again:
        episode = of_seed[other.seed]
        one, two = episode.per_step() | dict(episode.observation), other.per_step() | dict(other.observation)
        assert {"chunk", "action", "log_prob", "reward", "terminated", "truncated", "success", "instruction", "rgb", "state"} <= one.keys()
        for name, rows in one.items():
            assert rows.dtype == two[name].dtype, name
            np.testing.assert_array_equal(rows, two[name], err_msg=name)


@pytest.mark.parametrize("policy", [TINY, FLOW], ids=["tokens", "flow"])
def test_rollouts_are_recorded_as_record_does(policy: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = run(tmp_path / "run", *policy, *PPO, *ONE, "algorithm.rollout_steps=40", "record.share=1")
    written = open_recording(run_dir / "episodes")
    config = load_checkpoint(run_dir, with_learner=False).config
    layout = build_policy(config.policy, written.spec).action_layout
    drawn = action_noise(layout, (40, 1), config.seed, 0)[:, 0]
    noise, first = {}, 0
    for episode in written:  # one slot plays them one after another
        assert episode.chunk is not None
        noise[episode.seed] = Given(drawn[first:])
        first += int(episode.chunk[-1]) + 1
    assert_equal(written, recorded_again(run_dir, written, noise, tmp_path / "again", monkeypatch))
    assert drew_tokens(written.info)


@pytest.mark.parametrize("policy", [TINY, FLOW], ids=["tokens", "flow"])
def test_groups_are_recorded_as_record_does(policy: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Success ends an episode in the middle of a chunk, too.
    ends = ("sim.success_ends_episode=true",)
    run_dir = run(tmp_path / "run", *policy, *GRPO, *ONE, *ends, "record.share=0.6")
    written = open_recording(run_dir / "episodes")
    config = load_checkpoint(run_dir, with_learner=False).config
    layout = build_policy(config.policy, written.spec).action_layout
    assert any(length % 3 for length in written.lengths), "chunks that were cut"
    who = {episode.seed: episode.metadata["policy"] for episode in written}  # the last member of each group
    noise = {seed: EpisodeNoise(layout, (config.seed, one["group"], one["member"], 0, 2)) for seed, one in who.items()}
    again = recorded_again(run_dir, written, noise, tmp_path / "again", monkeypatch)
    assert len(again) == len(who)
    assert_equal(written, again)


@pytest.mark.slow
def test_openvla_oft_is_recorded_as_record_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (
        "policy=openvla_oft",
        "policy.chunk=2",
        f"policy.path={folder}",
        f"policy.instruction={SPOON}",
        "policy.unnorm_key=bridge_orig",
    )
    own = (*model, "policy.prompt_tokens=24", "policy.dtype=float32", "policy.freeze_vision=true", "sim.kwargs.dim=7", "sim.kwargs.size=24")
    rollouts = (*ONE, "algorithm.rollout_steps=12", "algorithm.minibatch_size=4", "algorithm.num_epochs=1")
    written = open_recording(run(tmp_path / "run", *own, *rollouts, "record.share=1") / "episodes")
    drawn = action_noise(build_policy(load_train_config([*SIM, *own]).policy, written.spec).action_layout, (12, 1), 1, 0)[:, 0]
    noise = {written.episode(0).seed: Given(drawn)}
    assert_equal(written, recorded_again(tmp_path / "run", written, noise, tmp_path / "again", monkeypatch))


@pytest.mark.parametrize("method", [PPO, GRPO], ids=["rollouts", "groups"])
def test_training_with_chunks_does_not_notice(method: tuple[str, ...], tmp_path: Path) -> None:
    plain, recorded = (run(tmp_path / share, *TINY, *method, f"record.share={share}") for share in ("0", "0.5"))
    assert len(curve(plain)) >= 2
    assert curve(plain) == curve(recorded)
    one, other = weights(plain), weights(recorded)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name])
    assert 0 < len(open_recording(recorded / "episodes")) < 20


@pytest.mark.parametrize(
    ("method", "placement"),
    [
        pytest.param((*PPO, "algorithm.max_staleness=1"), ("hybrid=multiplexed", "sim.num_workers=2"), id="rollouts, hosts"),
        pytest.param(GRPO, ("hybrid=multiplexed", "sim.num_workers=2"), id="groups, hosts", marks=pytest.mark.slow),
        pytest.param(PPO, ("hybrid=disaggregated",), id="rollouts, another process", marks=pytest.mark.slow),
    ],
)
def test_chunks_that_are_played_elsewhere_are_recorded(method: tuple[str, ...], placement: tuple[str, ...], tmp_path: Path) -> None:
    """Episodes move between hosts, and every recorded action leads from what was seen before it to what was seen after."""
    run_dir = run(tmp_path / "run", *TINY, *method, *placement, "record.share=1")
    recording = open_recording(run_dir / "episodes")
    assert len(recording) >= 4
    for episode in recording:
        x = episode.observation["state"][:, 0]
        moved = np.clip(x[:-1] + 0.2 * np.clip(np.asarray(episode.action)[:, 0], -1, 1), -1, 1)
        np.testing.assert_allclose(x[1:], moved, atol=1e-6)


def test_only_watched_slots_show_the_steps_inside_their_chunks() -> None:
    """By the simulator's arithmetic: 0.2 a step. Scattered slots, in any order, and slots of which none is watched show nothing else."""
    with EnvManager(SimFactory("tests.vla.toys:PointSim", None, {}), 4, num_workers=2, chunk_size=3) as manager:
        first = manager.reset()
        x = first.observation["state"][:, 0].copy()
        chunks = np.zeros((4, 3, 2), np.float32)
        chunks[..., 0] = np.array([[0.5, 0.5, 0.5], [-0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.1, 0.2, 0.3]])
        manager.send([3, 0], chunks[[3, 0]], [True, False])
        manager.send([1, 2], chunks[[1, 2]], [False, True])
        shown = manager.recv(range(4)).inner
        for slot in (2, 3):
            inner = x[slot] + 0.2 * np.cumsum(chunks[slot, :2, 0])
            np.testing.assert_allclose(shown["state"][slot, :, 0], inner, atol=1e-6)
            assert shown["instruction"][slot].tolist() == [str(first.observation["instruction"][slot])] * 2
        for slot in (0, 1):
            assert not shown["rgb"][slot].any(), "it was not observed there"
            assert shown["instruction"][slot].tolist() == [None, None]
        manager.send(range(4), chunks)
        assert manager.recv(range(4)).inner == {}
