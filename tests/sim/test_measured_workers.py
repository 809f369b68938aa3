"""`sim.num_workers=auto`: what is chosen of given rates, by hand; what is measured, in real workers; that it changes nothing but time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied_rl.config import SimConfig
from embodied_rl.config.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.sim import measured_workers, worker_choice
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.measured_workers import start_measured
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.worker_choice import WorkerChoice, remember, remembered
from tests.short_run import train_shortly

SEEDS = EpisodeSeeds.training(3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_choice, "available_cores", lambda: 2)
    monkeypatch.setattr(measured_workers, "_LONGEST_START_S", 60.0)  # a busy machine starts slowly


def toy(name: str = "CountingSim", **kwargs: Any) -> SimConfig:
    return SimConfig(name="toy", target=f"tests.sim.toy:{name}", kwargs=kwargs, num_slots=4)


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
    choice = WorkerChoice.of("toy", 8, rates)
    assert choice.num_workers == chosen
    assert choice.gain == pytest.approx(rates[chosen] / 100.0)


def test_line_says_what_was_chosen_and_what_it_gained() -> None:
    line = "sim.num_workers=auto: 2 workers for 8 slots of toy, 1.50 times as fast as 1 when it was measured here."
    assert str(WorkerChoice.of("toy", 8, {1: 100.0, 2: 150.0})) == line
    line = "sim.num_workers=auto: 1 worker for 8 slots of toy, 1.25 times as fast as 2 when it was measured here."
    assert str(WorkerChoice.of("toy", 8, {1: 100.0, 2: 80.0})) == line


@pytest.mark.parametrize("autoreset", [True, False])
def test_measured_workers_go_on_as_if_they_had_just_begun(autoreset: bool) -> None:
    told: list[str] = []
    with start_measured(toy(), SEEDS, tell=told.append, autoreset=autoreset) as manager:
        measured = three_steps(manager)
        chosen = manager.num_workers
    other = 3 - chosen
    with EnvManager.from_config(SimConfig(**{**vars(toy()), "num_workers": other}), SEEDS, autoreset=autoreset) as fresh:
        assert fresh.num_workers == other
        assert measured == three_steps(fresh)
    (line,) = told
    assert line.startswith(f"sim.num_workers=auto: {chosen} worker")


def test_workers_whose_past_shows_are_started_anew() -> None:
    with start_measured(toy("RememberingSim"), SEEDS, tell=lambda line: None) as manager:
        first = manager.reset().observation["state"]
    assert first[:, 0].tolist() == [1.0] * 4  # each group of slots has a simulator of its own


def test_what_was_measured_is_remembered_until_the_slots_or_the_machine_change(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = WorkerChoice.of("toy", 4, {1: 300.0, 2: 200.0})
    remember(toy(), choice)
    assert remembered(toy()) == choice
    monkeypatch.setattr(measured_workers, "_measured", lambda *_: pytest.fail("it is known"))
    told: list[str] = []
    with start_measured(toy(), SEEDS, tell=told.append) as manager:
        assert manager.num_workers == 1
    assert told == [str(choice)]
    with EnvManager.from_config(toy(), SEEDS) as manager:  # evaluation, recording, …: what training found
        assert manager.num_workers == 1
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


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"sim": "toy", "num_slots": 4, "num_workers": 9, "steps_per_s": {"1": 1.0, "2": 2.0}}'])
def test_damaged_memory_is_none(damage: str, tmp_path: Path) -> None:
    remember(toy(), WorkerChoice.of("toy", 4, {1: 300.0, 2: 200.0}))
    (path,) = (tmp_path / "cache").rglob("*.json")
    path.write_text(damage)
    assert remembered(toy()) is None


def test_weights_do_not_depend_on_the_choice(tmp_path: Path) -> None:
    weights = []
    for number in (1, 2):
        overrides = ["sim=cartpole", "sim.num_workers=auto", "hybrid.device=cpu"]
        sim = load_train_config([*overrides, "sim.num_slots=4"]).sim
        remember(sim, WorkerChoice.of("cartpole", 4, {1: 100.0, 2: 50.0 if number == 1 else 150.0}))
        run = train_shortly(tmp_path / str(number), *overrides)
        (path,) = (run / "checkpoints" / "last").resolve().glob("policy*.safetensors")
        weights.append(load_file(path))
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_auto_is_the_default_and_only_where_workers_are_simulators() -> None:
    assert load_train_config(["sim=cartpole"]).sim.num_workers == "auto"
    assert toy().fixed_workers is None
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
