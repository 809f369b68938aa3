"""Runs that go on within their episodes (`checkpoint.within_episodes`), in every placement: a resumed run is the uninterrupted one."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.episodes.reader import open_recording
from embodied_rl.errors import UserError
from embodied_rl.roles.worker import RolloutWorker
from tests.roles.runs import GROUPS, POLE, ROLLOUTS, TEXTS, assert_same_run, configured, curve, trained

pytestmark = pytest.mark.usefixtures("forked")

WITHIN = ["checkpoint.within_episodes=true", "checkpoint.every_steps=128", "checkpoint.keep_last=9", "evaluation.interim_episodes=4"]
PPO = [*ROLLOUTS[1:], "sim=cartpole", *WITHIN, "total_steps=512", "evaluation.every_steps=256"]
GRPO = [*GROUPS, *WITHIN, "total_steps=500", "evaluation.every_steps=250"]
SAC = [
    *(
        "sim=pendulum",
        "sim.max_episode_steps=40",
        "algorithm=sac",
        "policy.distribution=squashed",
        *ROLLOUTS[1:6],
        *WITHIN,
        "hybrid.device=cpu",
        "hybrid.num_threads=1",
    ),
    *("algorithm.off_policy.warmup_steps=64", "total_steps=320", "evaluation.every_steps=128", "algorithm.minibatch_size=16"),
    *("algorithm.rollout_steps=8", "algorithm.off_policy.updates_per_step=0.25"),
]
AGENT = [*TEXTS, *WITHIN, "algorithm.warm_start=null", "total_steps=300"]
RANKS = ["hybrid=fsdp2", "hybrid.device=cpu"]


def check(tmp_path: Path, task: list[str], placement: list[str], like: list[str] | None = None) -> None:
    """The run, and what goes on from its second checkpoint but one, end with the same curve and weights; so does the run `like` it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*take turns.*")
        whole = trained(tmp_path / "whole", *task, *placement)
        if like is not None:
            assert_same_run(trained(tmp_path / "like", *task, *like), whole)
        middle = sorted((whole / "checkpoints").glob("step_*"))[1]
        resumed = tmp_path / "resumed"
        shutil.copytree(middle, resumed / "checkpoints" / middle.name)
        shutil.copy(whole / "metrics.jsonl", resumed)
        assert_same_run(whole, trained(resumed, *task, *placement, "resume=auto"))


@pytest.mark.parametrize("task", [pytest.param(GRPO, id="groups"), pytest.param(SAC, id="off_policy")])
def test_here(tmp_path: Path, task: list[str]) -> None:
    check(tmp_path, task, [])


@pytest.mark.parametrize("key", ["checkpoint.within_episodes=true", "hybrid.offload=[simulators]"])
@pytest.mark.parametrize("placement", [[], ["hybrid=disaggregated"]], ids=["here", "apart"])
def test_episodes_that_cannot_be_saved_are_refused_before_any_is_played(tmp_path: Path, placement: list[str], key: str) -> None:
    task = ["sim=custom", "sim.name=forgotten", "sim.target=tests.sim.toy:ForgottenSim", "policy.observation_key=state", *ROLLOUTS[1:]]
    with pytest.raises(UserError, match=rf"^{re.escape(key)}: running episodes are saved"):
        trained(tmp_path / "run", *task, key, *placement)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not curve(tmp_path / "run")


@pytest.mark.parametrize("task", [pytest.param(PPO, id="rollouts"), pytest.param(GRPO, id="groups")])
def test_in_another_process(tmp_path: Path, task: list[str]) -> None:
    """As in this one, with evaluations in between; and when it is resumed by another worker from one of its checkpoints."""
    check(tmp_path, task, ["hybrid=disaggregated"], like=[])


@pytest.mark.parametrize(
    ("steps", "placement", "like"),
    [
        pytest.param(2, [], None, id="here"),
        pytest.param(1, ["hybrid=disaggregated"], [], id="another process"),
        # Products of fewer rows than all slots have differ in their last bits.
        pytest.param(1, ["hybrid=disaggregated", "hybrid.players=2", "sim.num_workers=2"], None, id="two players", marks=pytest.mark.slow),
    ],
)
def test_rollouts_that_were_played_ahead(tmp_path: Path, steps: int, placement: list[str], like: list[str] | None) -> None:
    """They are in the checkpoint, wherever they were played."""
    check(tmp_path, [*PPO, f"algorithm.max_staleness={steps}"], placement, like)


@pytest.mark.parametrize(
    ("placement", "staleness", "evaluates"), [("multiplexed", 0, False), ("disaggregated", 1, False), ("disaggregated", 1, True)]
)
def test_a_checkpoint_does_not_show_how_fast_the_worker_was(tmp_path: Path, placement: str, staleness: int, evaluates: bool) -> None:
    """A worker that plays on between the trainer's requests and one that has no time to: the same episodes are saved and recorded, also
    where an evaluation gives up what runs."""

    def saved(name: str, pumps: int) -> tuple[list[bytes], list[tuple[int, int]]]:
        task = [*PPO, f"hybrid.placement={placement}", f"algorithm.max_staleness={staleness}", "record.share=0.7"]
        worker = RolloutWorker(configured(tmp_path / name, *task))
        try:
            worker.take_models({})
            worker.record(str(tmp_path / name), "test")
            weights = list(worker.acting.policies[""].policy.state_dict().items())  # type: ignore[attr-defined]
            worker.load(0, iter(weights))
            worker.restart(0)
            for version in range(3):
                worker.play(version)
                for _ in range(pumps):
                    worker.pump()
                worker.load(version + 1, iter(weights))
                for _ in range(pumps):
                    worker.pump()
            if evaluates:
                worker.evaluate(2, 0)
            episodes = [] if evaluates else [episode.tobytes() for episode in worker.episodes()]
        finally:
            worker.close()
        return episodes, [(episode.seed, episode.num_steps) for episode in open_recording(tmp_path / name / "episodes")]

    slow, quick = saved("slow", 0), saved("quick", 200)
    assert len(slow[1]) > 3
    assert quick == slow


def test_an_evaluation_resets_the_simulators_of_rollouts_beside_groups_once(tmp_path: Path) -> None:
    """Giving up the groups in flight frees their simulators; those of rollouts are free, and are reset for the evaluation."""
    task = [
        *(word for word in GROUPS if not word.startswith(("sim", "algorithm.kl"))),
        *(f"+domains.{name}.{part}" for name in ("near", "far") for part in (f"sim={POLE}", "policy={hidden_sizes: [8]}")),
        *("+algorithm@domains.far.algorithm=ppo", "domains.far.algorithm.rollout_steps=8", "domains.far.algorithm.minibatch_size=8"),
        "hybrid=disaggregated",
    ]
    worker: Any = RolloutWorker(configured(tmp_path, *task))
    resets: list[str] = []

    def counting(name: str, reset: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (resets.append(name), reset(*arguments, **options))[1]

    try:
        worker.take_models({})
        policies = worker.acting.policies.items()
        weights = [(f"{name}/{key}", part) for name, own in policies for key, part in own.policy.state_dict().items()]
        worker.load(0, iter(weights))
        worker.restart(0, worker.queue.state_dict())
        worker.play(0)
        for stream in worker.streams:
            stream.manager.reset = counting(stream.name, stream.manager.reset)
        worker.evaluate(2, 0)
        assert sorted(resets) == ["far", "near"]
        worker.load(1, iter(weights))
        worker.restart(1, worker.queue.state_dict())
        assert worker.play(1).rollouts.keys() == {"far"}
    finally:
        worker.close()
    assert sorted(resets) == ["far", "far", "near"]


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param(PPO, id="rollouts"), pytest.param(GRPO, id="groups")])
def test_on_ranks(tmp_path: Path, task: list[str]) -> None:
    check(tmp_path, task, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [pytest.param([], id="here"), pytest.param(["hybrid=multiplexed"], id="multiplexed")])
def test_language_agents(tmp_path: Path, placement: list[str]) -> None:
    check(tmp_path, AGENT, placement)


@pytest.mark.slow
def test_groups_in_turns_with_hosts(tmp_path: Path) -> None:
    check(tmp_path, GRPO, ["hybrid=multiplexed"])


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param(PPO, id="rollouts"), pytest.param(GRPO, id="groups")])
def test_with_ray(tmp_path: Path, session: object, task: list[str]) -> None:
    check(tmp_path, task, ["hybrid=ray", "hybrid.device=cpu"], like=["hybrid.device=cpu"])
