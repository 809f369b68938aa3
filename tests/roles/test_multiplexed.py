"""Hosts that are lent to training and come back, in real runs: nothing is lost, begun again or consumed twice, and ages are exact."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.config import TrainConfig
from embodied_rl.config.rules import resolve
from embodied_rl.errors import UserError
from embodied_rl.methods.language_player import make_language_policy, model_files
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.roles.device_lease import DeviceLease, HostPlan, plan_hosts
from embodied_rl.roles.multiplexed import MultiplexedSimulators
from embodied_rl.roles.worker import RolloutWorker
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.trainer import Trainer
from embodied_rl.types import Episode, Rollout
from tests.roles.runs import GROUPS, QUICK, ROLLOUTS, TEXTS, TWO_POLES, Naps, configured, curve, groups_of, trained

pytestmark = pytest.mark.usefixtures("forked")

SHARED = "hybrid.placement=multiplexed"
ONE_BEHIND = "algorithm.groups.max_staleness=1"


# ---- robots: simulators' slots move ---------------------------------------------------------------------------------


def weights_of(player: RolloutWorker) -> list[tuple[str, Any]]:
    acting: Any = player.acting
    policies = {f"{name}/" if name else "": own.policy for name, own in acting.policies.items()}
    return [(f"{place}{name}", tensor.clone()) for place, policy in policies.items() for name, tensor in policy.state_dict().items()]


def played(
    config: TrainConfig, num_batches: int, between: int, until_moved: bool = False
) -> tuple[dict[tuple[int, int], Episode], RolloutWorker]:
    """{(group, place): episode} of batches that a player in this process plays with the same weights always, and the player, closed.

    `between` rounds are played between a batch and the next publication, as while training. `until_moved` plays on, for 60 batches at
    most, until episodes have moved: how many wait for an action when a host is lent, and of which domain, is a matter of time.
    """
    player = RolloutWorker(config)
    found: dict[tuple[int, int], Episode] = {}
    try:
        player.take_models({})
        weights = weights_of(player)
        player.load(0, iter(weights))
        assert player.queue is not None
        player.restart(0, player.queue.state_dict())
        for version in range(60 if until_moved else num_batches):
            if version >= num_batches and player.lease is not None and any_moved(player.lease):
                break
            for group in player.play(version).groups:
                assert group.number not in {number for number, _ in found}, "consumed twice"
                found |= {(group.number, place): episode for place, episode in enumerate(group.episodes)}
            check_lent(player)
            for _ in range(between):
                player.pump()
                check_lent(player)
            player.load(version + 1, iter(weights))
            assert player.lease is None or all(hosts.active == [0, 1] for hosts in player.lease.multiplexers)
    finally:
        player.close()
    return found, player


def any_moved(lease: DeviceLease) -> bool:
    return any(hosts.counts().moves > 0 for hosts in lease.multiplexers)


def check_lent(player: RolloutWorker) -> None:
    """What is lent stands empty, and the multiplexers of all domains count what the queue counts."""
    if player.lease is None:
        return
    managers = [stream.pump.manager for stream in player.streams]  # type: ignore[attr-defined]
    assert all(isinstance(simulators, MultiplexedSimulators) for simulators in managers)
    assert player.lease.is_lent
    assert player.lease.vacated
    assert not any(list(multiplexer.hosts[0].running) for multiplexer in player.lease.multiplexers), "host 0 is lent"
    assert player.queue is not None
    counts, episodes = [multiplexer.counts() for multiplexer in player.lease.multiplexers], player.queue.episode_counts()
    assert all(one.add_up for one in counts)
    waiting = sum(len(stream.pump.manager._waiting) + len(stream.pump._to_restore) for stream in player.streams)  # type: ignore[attr-defined]
    assert sum(one.started for one in counts) + waiting == episodes.started
    assert sum(one.running + one.parked for one in counts) + waiting == episodes.running
    assert sum(one.finished for one in counts) == episodes.accepted + episodes.failed + episodes.timed_out + episodes.abandoned


SHORT = [*GROUPS, "sim.max_episode_steps=40", "sim.num_workers=2"]
SHORT_DOMAINS = [f"domains.{name}.sim.{key}" for name in ("near", "far") for key in ("max_episode_steps=40", "num_workers=2")]
WITHIN = [
    *("experiment=initialized_sampling", *QUICK, "algorithm.groups.group_size=3", "algorithm.groups.groups_per_step=2"),
    *("sim.num_workers=2", "policy.hidden_sizes=[16]", "algorithm.initialized={mode: parallel, share: 0.7, expert_episodes: 2}"),
]
"""Groups that start inside an expert's episodes."""


@pytest.mark.parametrize(
    "task", [pytest.param(SHORT, id="one"), pytest.param([*TWO_POLES, *SHORT_DOMAINS], id="domains"), pytest.param(WITHIN, id="starts")]
)
def test_episodes_that_move_are_those_that_stay(tmp_path: Path, task: list[str]) -> None:
    """Group by group what one host plays without a pause: an episode is what its seeds, its start and the weights make it, in each domain.
    Where it starts inside another it waits for room as it would at its beginning."""
    alone, _ = played(configured(tmp_path / "alone", *task), num_batches=5, between=0)
    moved, player = played(configured(tmp_path / "shared", *task, SHARED, ONE_BEHIND), num_batches=5, between=7, until_moved=True)
    assert player.lease is not None
    assert player.lease.num_shrinks >= 5
    assert any_moved(player.lease), "nothing moved in 60 batches"
    both = {number for number, _ in alone} & {number for number, _ in moved}
    assert len(both) >= 8
    assert (task is WITHIN) == any(episode.metadata.get("start", {}).get("step") for (group, _), episode in moved.items() if group in both)
    for number in both:
        # Members are taken in the order in which they end.
        mine, theirs = (
            sorted(
                (episode for (group, _), episode in some.items() if group == number), key=lambda episode: episode.action.ravel().tolist()
            )
            for some in (moved, alone)
        )
        for one, other in zip(mine, theirs, strict=True):
            # A forward pass of some rows differs from one of all in its last bits.
            np.testing.assert_allclose(one.action, other.action, atol=1e-5)
            np.testing.assert_allclose(one.reward, other.reward, atol=1e-5)
            for key, seen in one.observation.items():
                np.testing.assert_allclose(seen, other.observation[key], atol=1e-5)
            np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-5)
            assert (one.seed, one.metadata.get("start")) == (other.seed, other.metadata.get("start"))
            assert sorted(one.policy_version.tolist()) == one.policy_version.tolist(), "weights only become newer"


def test_a_robots_run_trains_while_the_other_half_plays(tmp_path: Path) -> None:
    check_a_robots_run(tmp_path)


def queue_of(trainer: Trainer) -> Any:
    """With Ray of the method whose learning half is elsewhere."""
    method: Any = trainer.method
    return getattr(method, "inner", method).queue


def check_a_robots_run(tmp_path: Path, *words: str) -> None:
    """Also of what hosts that are actors play (tests/roles/test_ray.py)."""
    config = configured(tmp_path, *GROUPS, SHARED, ONE_BEHIND, "total_steps=700", "profile=true", "algorithm.groups.redundancy=1", *words)
    ages: list[int] = []
    numbers: list[int] = []
    naps = Naps(0.2)
    with Trainer(config, tmp_path, command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            ages.extend(group.age(trainer.iteration) for group in groups_of(experience))
            numbers.extend(group.number for group in groups_of(experience))
            naps.take(1 in ages)
            return prepare(experience)

        method.prepare = note
        trainer.run()
        counts, iterations = queue_of(trainer).counts(), trainer.iteration
    assert set(ages) == {0, 1}, "1 is missing: nothing was played while training"
    assert len(numbers) == len(set(numbers)) == counts.consumed == 2 * iterations
    assert counts.add_up
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] == iterations
    assert rows[-1]["multiplex/moved"] >= 0
    assert sum(row["multiplex/overlap_s"] for row in rows) > 0, "nobody played while training"
    assert all(0 <= row["multiplex/bubble"] <= 1 for row in rows)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    bars = {(event["cat"], event["name"]) for event in events if event.get("ph") == "X"}
    assert {("host 0", "generation"), ("host 0", "training"), ("host 1", "generation")} <= bars
    assert ("host 1", "training") not in bars, "it was not lent"


def test_what_the_hosts_do_not_have_room_for_waits(tmp_path: Path) -> None:
    """Three of four hosts leave: most episodes are parked, and go on when they come back."""
    config = configured(tmp_path, *GROUPS, "hybrid.placement={kind: multiplexed, num_hosts: 4, num_train_gpus: 3}", ONE_BEHIND)
    with pytest.warns(UserWarning, match="more than the"):
        player = RolloutWorker(config)
    player.take_models({})
    try:
        weights = weights_of(player)
        player.load(0, iter(weights))
        assert player.queue is not None
        assert player.lease is not None
        player.restart(0, player.queue.state_dict())
        parked = []
        for version in range(4):
            player.play(version)
            check_lent(player)
            for _ in range(5):
                player.pump()
            parked.append(player.lease.multiplexers[0].counts().parked)
            check_lent(player)
            player.load(version + 1, iter(weights))
            assert player.lease.multiplexers[0].counts().parked == 0
        assert max(parked) >= 1
        player.evaluate(4, 0)  # gives up what is being played
        counts = player.lease.multiplexers[0].counts()
        assert (counts.running, counts.parked) == (0, 0)
        assert counts.started == counts.finished
    finally:
        player.close()


def test_an_action_that_was_held_is_played_when_the_host_is_back() -> None:
    """Also where nothing else is in flight that would come back first."""
    factory = SimFactory("tests.sim.toy:CountingSim", kwargs={"length": 9})
    with EnvManager(factory, 2, num_workers=2, autoreset=False) as manager:
        simulators = MultiplexedSimulators(manager, DeviceLease(HostPlan(2, 1, 2)))
        simulators.begin([0, 1], [5, 6])
        seen: dict[int, list[float]] = {}
        while len(seen) < 2:
            batch = simulators.recv(min_ready=1, timeout_s=60.0)
            seen |= dict(zip(batch.slots.tolist(), batch.observation["state"].tolist(), strict=True))
        assert seen == {0: [5.0, 0.0, 0.0], 1: [6.0, 0.0, 0.0]}
        lease = simulators.lease
        lease.shrink()
        assert (lease.vacated, lease.multiplexers[0].counts().parked) == (True, 1), "host 1 is full"
        lease.lend()
        (parked,) = lease.multiplexers[0].parked
        simulators.send([parked], np.full((1, 1), 2.0))
        assert simulators.recv(min_ready=1, timeout_s=0.01).slots.tolist() == []
        lease.take_back()
        batch = simulators.recv(min_ready=1, timeout_s=60.0)
        while not batch.slots.size:
            batch = simulators.recv(min_ready=1, timeout_s=60.0)
        assert batch.slots.tolist() == [parked]
        assert batch.observation["state"].tolist() == [[5.0 + parked, 1.0, 2.0]]
        simulators.discard()
        counts = lease.multiplexers[0].counts()
        assert (counts.started, counts.finished, counts.running) == (2, 2, 0)


def test_episodes_are_taken_up_in_their_own_slots_on_whatever_host() -> None:
    factory = SimFactory("tests.sim.toy:CountingSim", kwargs={"length": 9})
    with EnvManager(factory, 4, num_workers=2, autoreset=False) as manager:
        simulators = MultiplexedSimulators(manager, DeviceLease(HostPlan(2, 1, 2)))
        simulators.begin(range(4), [5, 6, 7, 8])
        seen = simulators.recv()
        assert simulators.room() == 0
        saved = simulators.snapshot(range(4))
        batch = simulators.restore(range(4), saved)
        assert batch.slots.tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(batch.observation["state"], seen.observation["state"])
        assert len({simulators._multiplexer.host_of(key) for key in simulators._playing}) == 2
        others = simulators.restore([3, 1], [saved[0], saved[2]])
        assert dict(zip(others.slots.tolist(), others.observation["state"][:, 0].tolist(), strict=True)) == {1: 7.0, 3: 5.0}


# ---- fixed rollouts: slots wait while their host is lent -------------------------------------------------------------


def rollouts_of(config: TrainConfig, num_rollouts: int, between: int) -> tuple[list[Rollout], RolloutWorker, list[int]]:
    """Rollouts that a worker in this process plays with the same weights always, the worker, closed, and how many slots were parked."""
    worker = RolloutWorker(config)
    found, parked = [], []
    try:
        worker.take_models({})
        weights = weights_of(worker)
        worker.load(0, iter(weights))
        worker.restart(0)
        for version in range(num_rollouts):
            rollout = worker.play(version).rollouts[""]
            assert rollout is not None
            found.append(rollout)
            for _ in range(between):
                worker.pump()
            if worker.lease is not None:
                hosts = worker.lease.multiplexers[0]
                assert hosts.vacated == (between > 0)
                parked.append(hosts.counts().parked)
            worker.load(version + 1, iter(weights))
    finally:
        worker.close()
    return found, worker, parked


@pytest.mark.parametrize("task", ["sim=pendulum", "sim=cartpole", "sim=pixel_tasks policy=tiny_vla hybrid.device=cpu"])
def test_rollouts_of_slots_that_waited_are_those_of_slots_that_did_not(tmp_path: Path, task: str) -> None:
    """Half of the slots stand still while training, and each draws and sees what it would have without; so do cut episodes' last looks."""
    own = [*task.split(), *QUICK, "algorithm.rollout_steps=16", "algorithm.minibatch_size=16", "sim.max_episode_steps=11"]
    apart, _, _ = rollouts_of(configured(tmp_path / "apart", *own, "hybrid=disaggregated", "sim.pipeline_groups=1"), 2, 0)
    shared, worker, parked = rollouts_of(configured(tmp_path / "shared", *own, SHARED, "algorithm.max_staleness=1"), 2, 40)
    assert parked == [2, 2], "the slots of the lent host wait"
    assert worker.lease is not None
    assert worker.lease.num_shrinks == 2
    for mine, theirs in zip(shared, apart, strict=True):
        np.testing.assert_array_equal(mine.truncated, theirs.truncated)
        np.testing.assert_array_equal(mine.terminated, theirs.terminated)
        # A forward pass of some rows differs from one of all in its last bits.
        for name in ("action", "reward", "log_prob"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), atol=1e-4)
        for name in ("observation", "last_observation", "final_observation"):
            for key, seen in getattr(mine, name).items():
                other = getattr(theirs, name)[key]
                if seen.dtype == object:  # texts
                    assert seen.tolist() == other.tolist()
                else:
                    np.testing.assert_allclose(seen, other, atol=1e-4)
        assert len(mine.final_observation[next(iter(mine.observation))]) > 0
        one, other = (sorted((episode.seed, episode.length, episode.slot) for episode in some.episodes) for some in (mine, theirs))
        assert one == other
    assert {int(age) for number, rollout in enumerate(shared) for age in (number - rollout.policy_version).ravel()} == {0, 1}


def test_rollouts_are_filled_while_training_has_a_host(tmp_path: Path) -> None:
    config = configured(tmp_path, *ROLLOUTS, SHARED, "algorithm.max_staleness=1", "total_steps=640")
    naps = Naps(0.2)
    late: list[float] = []
    with Trainer(config, tmp_path, command="test") as trainer:
        update = trainer.method.update

        def nap(prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
            late.append(trainer.method.metrics()["rollout/age_max"])
            naps.take(1.0 in late)
            return update(prepared, iteration=iteration, steps=steps)

        trainer.method.update = nap  # type: ignore[method-assign]
        trainer.run()
    assert set(late) == {0.0, 1.0}, "1 is missing: nothing was played while training"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] == trainer.iteration == 5
    assert rows[-1]["multiplex/moved"] > 0


def test_rollouts_in_turns_are_those_of_one_player_elsewhere(tmp_path: Path) -> None:
    """Without staleness hosts and training take turns: the run is the disaggregated one, bit for bit, and goes on within its episodes."""
    within = ["checkpoint.within_episodes=true", "checkpoint.every_steps=128", "checkpoint.keep_last=9", "total_steps=384"]
    trained(tmp_path / "apart", *ROLLOUTS, *within, "hybrid=disaggregated", "sim.pipeline_groups=1")
    with pytest.warns(UserWarning, match=r"Set algorithm\.max_staleness=1"):
        trained(tmp_path / "shared", *ROLLOUTS, *within, SHARED)
    middle = tmp_path / "resumed" / "checkpoints" / "step_000000128"
    shutil.copytree(tmp_path / "shared" / "checkpoints" / middle.name, middle)
    with pytest.warns(UserWarning, match="take turns"):
        trained(tmp_path / "resumed", *ROLLOUTS, *within, SHARED, "resume=auto")
    assert curve(tmp_path / "shared") == curve(tmp_path / "apart")
    first, second, third = (load_checkpoint(tmp_path / name).policy for name in ("apart", "shared", "resumed"))
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name])
        np.testing.assert_array_equal(tensor, third[name])


# ---- language agents: answers move ----------------------------------------------------------------------------------


def run_texts(run_dir: Path, *overrides: str, kill: Callable[[Any], None] | None = None) -> tuple[list[AgentEpisode], Any]:
    """What was trained on, and the trainer, which has ended. `kill` ends a host of the manager's while the second update is prepared."""
    task = [*TEXTS, SHARED, ONE_BEHIND, "algorithm.warm_start=null", "agent.max_new_tokens=12", "total_steps=400", *overrides]
    config = configured(run_dir, *task)
    run_dir.mkdir(exist_ok=True)
    found: list[AgentEpisode] = []
    late: list[int] = []
    numbers: list[int] = []
    naps = Naps(0.3)
    with Trainer(config, run_dir, command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            for group in groups_of(experience):
                numbers.append(group.number)
                for episode in group.episodes:
                    behind = trainer.iteration - np.concatenate([turn.version for turn in episode.turns])
                    assert set(behind.tolist()) <= {0, 1}
                    found.append(episode)
                    late.extend(behind.tolist())
            if kill is not None and trainer.iteration == 1:
                kill(trainer.manager)
            naps.take(1 in late)
            return prepare(experience)

        method.prepare = note
        trainer.run()
        counts = queue_of(trainer).counts()
        assert len(numbers) == len(set(numbers)) == counts.consumed == 4 * trainer.iteration
        assert counts.add_up
    return found, trainer


def children_of(pid: int, module: str) -> list[int]:
    """Processes of a module that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            if parent == pid and module in command:
                found.append(int(folder.name))
    return sorted(found)


def test_answers_that_move_keep_every_token(tmp_path: Path) -> None:
    """With the same weights always: hosts and policy find the same log-probabilities, and multiplexer and queue the same counts."""
    config = configured(tmp_path, *TEXTS, SHARED, ONE_BEHIND, "algorithm.warm_start=null", "agent.max_new_tokens=16")
    player: Any = RolloutWorker(config)
    try:
        policy = make_language_policy(config, player.manager, tmp_path, None)
        weights = dict(policy.named_weights())
        player.take_models({"": model_files(policy)})
        player.load(0, weights.items())
        player.restart(0, player.queue.state_dict())
        hosts, turns = player.lease.multiplexers[0], []
        for version in range(60):
            if version >= 3 and hosts.counts().moves:  # whether there is an answer to move just then is a matter of time
                break
            turns += [turn for group in player.play(version).groups for episode in group.episodes for turn in episode.turns]
            assert player.lease.is_lent
            assert not list(hosts.hosts[0].running)
            for _ in range(4):
                player.pump()
                assert not list(hosts.hosts[0].running), "host 0 is lent"
            assert hosts.counts().add_up
            # An episode has at most one answer at a time.
            assert hosts.counts().running <= player.queue.episode_counts().running
            player.load(version + 1, weights.items())
        assert hosts.counts().moves > 0
        player.restart(version, player.queue.state_dict())
        assert (hosts.counts().running, hosts.counts().parked) == (0, 0), "what was given up is answered no more"
        assert hosts.counts().started == hosts.counts().finished
    finally:
        player.close()
    assert len(turns) > 50
    for turn in turns:
        sequence = TokenSequence.of(turn.prompt_ids, turn.token_ids, ())
        with torch.no_grad():
            own = policy.evaluate([sequence]).log_prob[0, np.flatnonzero(sequence.mask)].numpy()
        np.testing.assert_allclose(turn.log_prob, own, atol=1e-4)
        assert sorted(turn.version.tolist()) == turn.version.tolist()
        assert 0 < len(turn.token_ids) <= 16, "what was sampled before a move counts"


@pytest.mark.slow
def test_an_agents_run_trains_while_the_other_host_answers(tmp_path: Path) -> None:
    episodes, trainer = run_texts(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] == trainer.iteration
    assert sum(row["multiplex/overlap_s"] for row in rows) > 0, "nobody answered while training"
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(len(turn.version) == len(turn.token_ids) == len(turn.log_prob) for turn in turns)
    assert all(sorted(turn.version.tolist()) == turn.version.tolist() for turn in turns), "a version of the past came back"
    # What training recomputes with weights of the same version or the next one: far off where tokens went astray.
    assert all(abs(row["train/log_prob_difference"]) < 0.2 for row in rows if "train/log_prob_difference" in row)


@pytest.mark.slow
def test_a_generating_process_that_is_killed_is_replaced(tmp_path: Path) -> None:
    def kill(manager: Any) -> None:
        os.kill(children_of(manager._handle.process.pid, "token_process")[0], signal.SIGKILL)

    _, trainer = run_texts(tmp_path, "total_steps=400", kill=kill)
    assert trainer.manager.num_restarts == 1


@pytest.mark.slow
def test_taking_turns_without_staleness_is_a_function_of_the_seed(tmp_path: Path) -> None:
    """Nothing may be played while training, so that nothing moves; two runs are one."""
    curves = []
    for name in ("one", "other"):
        config = configured(tmp_path / name, *TEXTS, SHARED, "total_steps=150", "algorithm.warm_start=null")
        (tmp_path / name).mkdir()
        with pytest.warns(UserWarning, match="take turns"), Trainer(config, tmp_path / name, command="test") as trainer:
            trainer.run()
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        untimed = ("time", "speed", "roles", "multiplex/bubble", "multiplex/overlap_s", "multiplex/vacate_s")
        curves.append([{key: value for key, value in row.items() if not key.startswith(untimed)} for row in rows])
    assert curves[0] == curves[1]
    assert curves[0][-1]["multiplex/shrinks"] == 0


@pytest.mark.slow
def test_vllm_engines_as_hosts(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    _, trainer = run_texts(tmp_path, "generation=vllm", "total_steps=300")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] == trainer.iteration


def test_robots_and_texts_share_the_hosts(tmp_path: Path) -> None:
    """Each has its part of every host, and all parts of a lent one stand empty while training."""
    from tests.methods.test_multi_domain import COMMON, DOMAINS

    pole = "domains.pole.sim.num_workers=2"
    config = configured(tmp_path, *COMMON, *DOMAINS, pole, SHARED, ONE_BEHIND, "total_steps=300", "algorithm.groups.redundancy=1")
    ages: set[tuple[str, int]] = set()
    naps = Naps(0.3)
    with Trainer(config, tmp_path, command="test") as trainer:
        method: Any = trainer.method
        prepare = method.prepare

        def note(experience: Any) -> Any:
            ages.update((group.domain, group.age(trainer.iteration)) for group in groups_of(experience))
            naps.take({age for _, age in ages} == {0, 1})
            return prepare(experience)

        method.prepare = note
        trainer.run()
        counts, iterations = method.queue.counts(), trainer.iteration
    assert {age for _, age in ages} == {0, 1}, "1 is missing: nothing was played while training"
    assert {domain for domain, _ in ages} == {"lake", "sums", "pole"}
    assert counts.consumed == 6 * iterations
    assert counts.add_up
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["multiplex/shrinks"] == iterations
    assert sum(row["multiplex/overlap_s"] for row in rows) > 0


# ---- what is planned and refused ------------------------------------------------------------------------------------


def test_simulators_that_episodes_cannot_leave_are_refused(tmp_path: Path) -> None:
    lease = DeviceLease(HostPlan(2, 1, 2))
    factory = SimFactory("tests.sim.toy:CountingSim", kwargs={"length": 5})
    with (
        EnvManager(factory, 1, num_workers=1, autoreset=False) as one,
        pytest.raises(UserError, match=r"choice: sim\.num_slots=2 sim\.num_workers=2"),
    ):
        MultiplexedSimulators(one, lease)
    three = "hybrid.placement={kind: multiplexed, num_hosts: 3}"
    config = configured(tmp_path, *GROUPS, three, ONE_BEHIND, "sim.num_slots=2", "sim.num_workers=2")
    with pytest.raises(UserError, match=r"2 workers with 2 slots.*choice: sim\.num_slots=3 sim\.num_workers=3"):
        played(config, 1, 0)


def test_hosts_and_threads_of_this_machine() -> None:
    config = load_train_config(["sim=cartpole", "algorithm=grpo", SHARED])
    assert plan_hosts(config.hybrid, num_gpus=0, num_cores=8) == HostPlan(2, 1, 8)
    assert plan_hosts(config.hybrid, num_gpus=0, num_cores=8).train_threads == 4
    four = load_train_config(["sim=cartpole", "algorithm=grpo", "hybrid.placement={kind: multiplexed, num_hosts: 4, num_train_gpus: 3}"])
    plan = plan_hosts(four.hybrid, num_gpus=0, num_cores=8)
    assert (plan.train_on, plan.threads_per_host, plan.train_threads) == ([0, 1, 2], 2, 6)
    gpus = plan_hosts(config.hybrid, num_gpus=4, num_cores=8)
    assert (gpus.num_hosts, gpus.train_on) == (4, [0])
    assert [gpus.gpu(number) for number in range(4)] == ["0", "1", "2", "3"]
    assert plan.gpu(0) is None
    with pytest.raises(UserError, match=r"num_hosts must be between 2 and 65,536"):
        load_train_config(["sim=cartpole", "hybrid.placement={kind: multiplexed, num_hosts: 1}"])
    assert resolve(load_train_config(["sim=cartpole", "algorithm=grpo"])).hybrid.num_threads is None
    with pytest.warns(UserWarning, match=r"no episode may use older weights\. Set algorithm\.groups\.max_staleness=1"):
        assert resolve(config).hybrid.num_threads is not None
    with pytest.raises(UserError, match=r"at least 2 GPUs.*collocated"):
        plan_hosts(config.hybrid, num_gpus=1, num_cores=8)
    with pytest.raises(UserError, match="each GPU is one host"):
        plan_hosts(four.hybrid, num_gpus=2, num_cores=8)
    sharded = load_train_config(
        ["sim=cartpole", "algorithm=grpo", "hybrid=fsdp2", "hybrid.placement={kind: multiplexed, num_train_gpus: 1}"]
    )
    with pytest.raises(UserError, match="num_train_gpus=2"):
        plan_hosts(sharded.hybrid, num_gpus=4, num_cores=8)
