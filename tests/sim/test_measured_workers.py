"""`sim.num_workers=auto`: what is chosen of given rates, by hand; what is measured, in real workers; that it changes nothing but time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from embodied_rl.config import PolicyConfig, SimConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.generation.torch_backend import TorchGenerator
from embodied_rl.policies.actor_critic import build_policy
from embodied_rl.roles.components import timed_policy
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.sim import core_binding, measured_workers, worker_choice
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.topology import Topology
from embodied_rl.sim.worker_choice import Acting, Setting, TimedPolicy, WorkerChoice, remember, remembered
from embodied_rl.train import train
from embodied_rl.types import ActionSpec, Observation, Rollout, SimSpec, TensorSpec

SEEDS = EpisodeSeeds.training(3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_choice, "available_cores", lambda: 2)
    monkeypatch.setattr(measured_workers, "_LONGEST_START_S", 60.0)  # a busy machine starts slowly
    monkeypatch.setattr(core_binding.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(core_binding, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(core_binding.OthersLoad, "since", lambda self: (1.0, 1.0))


def toy(name: str = "CountingSim", **kwargs: Any) -> SimConfig:
    return SimConfig(name="toy", target=f"tests.sim.toy:{name}", kwargs=kwargs, num_slots=4)


def measured(rates: dict[int, float], sim: str = "toy", num_slots: int = 4, together: dict[int, float] | None = None) -> WorkerChoice:
    """{workers: steps per second} in two turns, and of slots that are stepped together."""
    turns = {2: rates, **({1: together} if together else {})}
    return WorkerChoice(sim, num_slots, {Setting(number, each): rate for each, own in turns.items() for number, rate in own.items()})


def three_steps(manager: EnvManager) -> list[bytes]:
    """Observations of a reset and of three steps with given actions."""
    seen = [manager.reset().observation["state"].tobytes()]
    return seen + [manager.step(np.full((4, 1), 0.5 + step, np.float32)).observation["state"].tobytes() for step in range(3)]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({1: 100.0, 2: 102.0}, 1),  # 2% are not worth a process
        ({1: 100.0, 2: 104.0}, 2),
        ({1: 100.0, 4: 150.0, 8: 152.0}, 4),
        ({1: 100.0, 4: 90.0, 8: 120.0}, 8),
        ({1: 100.0, 2: 60.0}, 1),
    ],
)
def test_fewest_workers_that_no_more_of_them_beat_by_three_percent(rates: dict[int, float], chosen: int) -> None:
    choice = measured(rates)
    assert choice.setting == Setting(chosen, 2)
    assert choice.gain(1) == pytest.approx(rates[chosen] / 100.0)


def test_slots_are_stepped_together_where_that_is_faster() -> None:
    choice = WorkerChoice("toy", 8, {Setting(1, 1): 10_000.0, Setting(1, 2): 9_000.0, Setting(2, 1): 8_000.0, Setting(2, 2): 10_200.0})
    assert choice.setting == Setting(1, 1)  # 10,200 with two workers are not worth a process
    assert dataclasses.replace(choice, steps_per_s={**choice.steps_per_s, Setting(2, 1): 11_000.0}).setting == Setting(2, 1)


def test_bound_workers_are_taken_where_they_are_five_percent_faster_than_any_others() -> None:
    rates = {Setting(1, 2): 100.0, Setting(2, 1): 90.0, Setting(2, 1, True): 104.0, Setting(2, 2, True): 101.0}
    assert WorkerChoice("toy", 8, rates).setting == Setting(1, 2)
    choice = WorkerChoice("toy", 8, {**rates, Setting(2, 1, True): 108.0})
    assert choice.setting == Setting(2, 1, True)
    line = "sim.num_workers=auto: 2 workers for 8 slots of toy, 1.08 times as fast as 1; sim.pipeline_groups=auto: stepped together, "
    line += "1.07 times as fast as in two groups; sim.placement=auto: each worker on its own cores, 1.20 times as fast as where they may "
    assert str(choice) == line + "move when it was measured here."
    assert [Setting.read(str(each)) for each in rates] == list(rates)


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing else ran here."""
    if len(Topology.read(with_gpus=False).physical_cores) < 2:
        pytest.skip("needs two physical cores")
    monkeypatch.setattr(core_binding.OthersLoad, "since", lambda self: (0.0, 1.0))


@pytest.mark.usefixtures("free_cores")
def test_a_remembered_binding_holds_only_while_the_cores_are_free() -> None:
    rates = {Setting(number, turns): 100.0 * number for number in (1, 2) for turns in (1, 2)}
    bound = {Setting(2, 1, True): 500.0, Setting(2, 2, True): 400.0}
    remember(toy(), WorkerChoice("toy", 4, {**rates, **bound}), small=True)
    with start_measured(toy(), SEEDS, tell=lambda line: None, small=True) as manager:
        first, second = (os.sched_getaffinity(pid) for pid in manager.worker_pids())
        assert not first & second
        assert manager.num_turns == 1
        seen, told = three_steps(manager), list[str]()
        with start_measured(toy(), SEEDS, tell=told.append, small=True) as other:  # another run, whose workers may move
            assert [os.sched_getaffinity(pid) for pid in other.worker_pids()] == [os.sched_getaffinity(0)] * 2
            assert seen == three_steps(other)
        assert "placement" not in told[0]
    with start_measured(dataclasses.replace(toy(), placement="none"), SEEDS, tell=told.append, small=True) as manager:
        assert manager.core_binding is None
    assert remembered(toy(), small=True, turns=(1, 2), may_bind=lambda number: number > 1) is not None
    remember(toy(), WorkerChoice("toy", 4, rates), small=True)
    assert remembered(toy(), small=True, turns=(1, 2), may_bind=lambda number: number > 1) is None  # to be measured, now that it can be


@pytest.mark.usefixtures("free_cores")
def test_bound_workers_are_measured_and_let_go_of_where_they_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Setting] = []

    def noted(sim: str, num_slots: int, rates: Mapping[Setting, float]) -> WorkerChoice:
        compared.extend(rates)
        return WorkerChoice(sim, num_slots, {each: 100.0 + each.num_workers for each in rates})

    monkeypatch.setattr(measured_workers, "WorkerChoice", noted)
    with start_measured(toy(), SEEDS, tell=lambda line: None, small=True) as manager:
        assert manager.num_workers == 1
        assert manager.core_binding is None
        assert os.sched_getaffinity(manager.worker_pids()[0]) == os.sched_getaffinity(0)
    assert sorted(map(str, compared)) == ["1x1", "1x2", "2x1", "2x1b", "2x2", "2x2b"]
    binding = core_binding.CoreBinding.take()
    assert binding is not None
    binding.release()


@pytest.mark.parametrize(("in_turns", "turns"), [(104.0, 1), (106.0, 2)])
def test_slots_are_stepped_in_turns_where_that_is_five_percent_faster(in_turns: float, turns: int) -> None:
    assert WorkerChoice("toy", 8, {Setting(2, 1): 100.0, Setting(2, 2): in_turns}).setting == Setting(2, turns)


def test_small_gaussian_networks_act_for_all_slots_in_one_call() -> None:
    continuous, discrete = ActionSpec.continuous([-1.0], [1.0]), ActionSpec.discrete(3)
    small, other = Acting.of(True, continuous, 2), Acting.of(True, discrete, 2)
    assert small.think_s(1) == small.think_s(2) < other.think_s(2)
    assert other.think_s(1) == 2 * other.think_s(2)
    assert Acting.of(False, continuous, 2) == Acting.of(None, continuous, 2) == other
    slow = Acting.of(False, continuous, 2, call_s=0.004)
    assert (slow.think_s(1), slow.think_s(2)) == (0.008, 0.004)
    assert Acting.of(False, continuous, 2, call_s=3.0).think_s(2) == Acting.LONGEST_S


def test_line_says_what_was_chosen_and_what_it_gained() -> None:
    line = "sim.num_workers=auto: 2 workers for 8 slots of toy, 1.50 times as fast as 1 when it was measured here."
    assert str(measured({1: 100.0, 2: 150.0}, num_slots=8)) == line
    line = "sim.num_workers=auto: 1 worker for 8 slots of toy, 1.25 times as fast as 2 when it was measured here."
    assert str(measured({1: 100.0, 2: 80.0}, num_slots=8)) == line
    both = measured({1: 100.0, 2: 150.0}, num_slots=8, together={1: 90.0, 2: 180.0})
    line = "sim.num_workers=auto: 2 workers for 8 slots of toy, 1.80 times as fast as 1; sim.pipeline_groups=auto: stepped together, "
    assert str(both) == line + "1.20 times as fast as in two groups when it was measured here."
    only = WorkerChoice("toy", 8, {Setting(1, 1): 80.0, Setting(1, 2): 100.0})
    line = "sim.pipeline_groups=auto: 8 slots of toy are stepped in two groups, 1.25 times as fast as together when it was measured here."
    assert str(only) == line


@pytest.mark.parametrize("autoreset", [True, False])
def test_measured_workers_go_on_as_if_they_had_just_begun(autoreset: bool) -> None:
    told: list[str] = []
    with start_measured(toy(), SEEDS, tell=told.append, autoreset=autoreset, small=True if autoreset else None) as manager:
        seen = three_steps(manager)
        assert manager.num_turns in ((1, 2) if autoreset else (None,))
        assert ("pipeline_groups" in told[0]) == autoreset
        chosen = manager.num_workers
    other = 3 - chosen
    with EnvManager.from_config(SimConfig(**{**vars(toy()), "num_workers": other}), SEEDS, autoreset=autoreset) as fresh:
        assert fresh.num_workers == other
        assert seen == three_steps(fresh)
    (line,) = told
    assert line.startswith(f"sim.num_workers=auto: {chosen} worker")


def test_policies_that_take_long_are_timed_with_what_a_group_sees() -> None:
    asked: list[tuple[str, list[int]]] = []

    def call_s(spec: SimSpec, observation: Observation) -> float:
        asked.append((spec.task, [len(part) for part in observation.values()]))
        return 0.002

    config = dataclasses.replace(toy(), placement="none")  # where workers may be bound too, is not what is asked
    for _ in range(2):  # the second finds what the first remembered
        with start_measured(config, SEEDS, tell=print, small=False, timed=TimedPolicy("slow", call_s)):
            pass
        task, rows = asked[0]
        assert (task, set(rows)) == ("count", {2})
        if remembered(config, small=False, policy="slow") is None:
            pytest.skip("other work on the machine made the measurement unsteady, and nothing was remembered")
    assert len(asked) == 1
    assert remembered(config, small=False) == remembered(config, small=False, policy="slow")
    assert remembered(config, small=False, policy="another") is None


def test_timing_a_policy_leaves_the_random_numbers_where_they_are() -> None:
    config = load_train_config(["sim=pendulum", "policy.distribution=squashed", "hybrid.device=cpu", "sim.num_slots=4"])
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with EnvManager.from_config(config.sim, SEEDS) as manager:
        seconds = timed_policy(config).call_s(manager.spec, manager.reset().observation)
    assert 0.0 < seconds < 1.0
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_whose_past_shows_are_started_anew() -> None:
    with start_measured(toy("RememberingSim"), SEEDS, tell=lambda line: None) as manager:
        first = manager.reset().observation["state"]
    assert first[:, 0].tolist() == [1.0] * 4  # each group of slots has a simulator of its own


def test_what_was_measured_is_remembered_until_the_slots_or_the_machine_change(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = measured({1: 300.0, 2: 200.0})
    remember(toy(), choice)
    assert remembered(toy()) == choice
    assert remembered(toy(), turns=(1, 2)) is None  # groups of episodes were played here, and nothing was stepped together
    monkeypatch.setattr(measured_workers, "_measured", lambda *_: pytest.fail("it is known"))
    told: list[str] = []
    with start_measured(toy(), SEEDS, tell=told.append) as manager:
        assert manager.num_workers == 1
        assert manager.num_turns is None
    assert told == [str(choice)]
    more = measured({1: 300.0, 2: 200.0}, together={1: 250.0, 2: 400.0})
    remember(toy(), more, small=True)
    assert remembered(toy(), small=False) is None
    with start_measured(toy(), SEEDS, tell=told.append, small=True) as manager:
        assert (manager.num_workers, manager.num_turns) == (2, 1)
    with EnvManager.from_config(toy(), SEEDS) as manager:  # evaluation, recording, …: what training found
        assert manager.num_workers == 2
    assert remembered(toy(length=6)) is None
    monkeypatch.setattr(worker_choice, "available_cores", lambda: 4)
    assert remembered(toy()) is None


def test_slow_start_is_the_simulators_only_where_it_used_the_processor() -> None:
    with EnvManager.from_config(toy(), SEEDS) as manager:  # a toy: well under a second of processor time
        longest = measured_workers._LONGEST_START_S
        assert not measured_workers._starts_slowly(manager, longest)
        assert not measured_workers._starts_slowly(manager, 3 * longest)  # the machine was busy
        assert measured_workers._starts_slowly(manager, 5 * longest)


def test_nothing_is_chosen_where_the_simulator_fails_or_takes_text() -> None:
    told: list[str] = []
    failing = toy(misbehave="raise", at=2)
    with start_measured(failing, SEEDS, tell=told.append) as manager:
        assert manager.num_workers == 2
        assert manager.reset().observation["state"][:, 1].tolist() == [0.0] * 4
    with start_measured(toy("TalkingSim"), SEEDS, tell=told.append):
        pass
    assert told == []
    assert remembered(failing) is None


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", "{}", '{"1x2": 1.0, "9x2": 2.0}', '{"1x2": 1.0, "2x2": -1}', '{"1x2": [], "2x2": 1}', '{"1": 1}']
)
def test_damaged_memory_is_none(damage: str, tmp_path: Path) -> None:
    remember(toy(), measured({1: 300.0, 2: 200.0}))
    (path,) = (tmp_path / "cache").rglob("*.json")
    path.write_text(damage)
    assert remembered(toy()) is None


SHORT = ("sim.num_workers=auto", "sim.num_slots=16", "hybrid.device=cpu", "algorithm.rollout_steps=16", "total_steps=768")
EPOCHS = ("algorithm.num_epochs=2", "algorithm.minibatch_size=64", "policy.hidden_sizes=[16,16]")
MODES = {
    "numpy": (*SHORT, *EPOCHS, "sim=pendulum", "policy.normalize_observation=true"),
    "torch": (*SHORT, *EPOCHS, "sim=cartpole"),
    "off policy": (
        *SHORT,
        "sim=pendulum",
        "policy.distribution=squashed",
        "algorithm=sac",
        "algorithm.off_policy.hidden_sizes=[16]",
        "algorithm.off_policy.warmup_steps=300",
    ),
}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode == "numpy" else pytest.mark.slow) for mode in MODES])
def test_weights_do_not_depend_on_the_choice(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker or two, slots stepped in turns or together: not a bit of what is learned is another."""
    found, groups, collect = [], [], RolloutCollector.next_rollout

    def noted(self: RolloutCollector, version: int) -> Rollout:
        groups.append(len(self._groups))
        return collect(self, version)

    monkeypatch.setattr(RolloutCollector, "next_rollout", noted)
    for number, together in ((1, False), (1, True), (2, True)):
        folder = f"run_dir={tmp_path / f'{number}{together}'}"
        config = load_train_config([*MODES[mode], "video.enabled=no", "logger=quiet", "evaluation.num_episodes=2", folder])
        rates = {1: 100.0, 2: 50.0 if number == 1 else 150.0}
        given = measured(rates, num_slots=16, together={each: rate * (2.0 if together else 0.5) for each, rate in rates.items()})
        for small in (True, False):
            remember(config.sim, given, small=small)
        run = train(config, command="python -m embodied_rl.train")
        (path,) = (run / "checkpoints" / "last").resolve().glob("policy*.safetensors")
        found.append(load_file(path))
    assert groups == [2] * 3 + [1] * 6  # three rollouts of each run
    first, *others = found
    for weights in others:
        assert first.keys() == weights.keys()
        assert all(np.array_equal(first[name], weights[name]) for name in first)


def test_parts_are_acted_for_as_if_by_themselves() -> None:
    """Bit for bit, by numpy's actor in one call and by torch's in one for each part, of uneven parts too."""
    spec = SimSpec("Toy", {"state": TensorSpec((17,))}, ActionSpec.continuous([-1.0] * 6, [1.0] * 6))
    rng = np.random.default_rng(0)
    observation, noise = {"state": rng.normal(size=(13, 17)).astype(np.float32)}, rng.normal(size=(13, 6)).astype(np.float32)
    parts = [slice(0, 7), slice(7, 13)]
    for distribution in ("gaussian", "squashed"):
        torch.manual_seed(0)
        generator = TorchGenerator(build_policy(PolicyConfig(hidden_sizes=(64, 64), distribution=distribution), spec))  # type: ignore[arg-type]
        acted = generator.act_in_parts(np.arange(13), observation, noise, parts)
        assert acted.slots.tolist() == list(range(13))
        for part in parts:
            generator.send(np.arange(13)[part], {"state": observation["state"][part]}, noise[part])
            own = generator.recv()
            assert own.action.tobytes() == acted.action[part].tobytes()
            assert own.log_prob.tobytes() == acted.log_prob[part].tobytes()


def test_auto_is_the_default_and_only_where_workers_are_simulators() -> None:
    assert load_train_config(["sim=cartpole"]).sim.num_workers == "auto"
    assert toy().fixed_workers is None
    assert (toy().pipeline_groups, toy().num_groups) == ("auto", 2)
    assert dataclasses.replace(toy(), num_slots=1).num_groups == 1
    assert dataclasses.replace(toy(), pipeline_groups=4).num_groups == 4
    with pytest.raises(UserError, match=r"sim.num_workers='atuo' is not a choice. Did you mean 'auto'"):
        load_train_config(["sim=cartpole", "sim.num_workers=atuo"])
    with pytest.raises(UserError, match=r"runs one process for each GPU. Give their number: sim.num_workers=1 for one GPU"):
        start_measured(load_train_config(["sim=maniskill_pushcube_gpu", "sim.num_workers=auto"]).sim, SEEDS, tell=print)
    with pytest.raises(UserError, match=r"needs a number of workers, or None for one per core, got 'auto'"):
        EnvManager(SimFactory("tests.sim.toy:CountingSim"), 2, num_workers="auto")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"num_workers must be an integer, got 'auto'"):
        load_train_config(
            ["sim=cartpole", "algorithm=grpo", "hybrid.reward_worker={target: 'embodied_rl.rollout.scoring:x', num_workers: auto}"]
        )
