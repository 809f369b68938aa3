"""Runs that are asked to end while they wait for a server that does not answer: they save, end, and go on later."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from embodied_rl.config.compose import load_train_config
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import ServiceLimits
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.stopping import Stopper, WaitStopped, waiting
from embodied_rl.train import train
from embodied_rl.trainer import Trainer
from tests.forks import Fork, start_forked
from tests.roles.runs import GROUPS, QUICK, TEXTS
from tests.short_run import last_of

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240.0
PATIENT = ["sim.step_timeout_s=9000", "sim.start_timeout_s=9000"]
PATIENT += ["+sim.kwargs.attempt_s=9000", "+sim.kwargs.deadline_s=8000", "+sim.kwargs.start_timeout_s=8000"]
"""Nothing but the signal ends the wait."""

SMALL = [*QUICK, "sim.num_workers=1", "sim.num_slots=2", "evaluation.every_steps=null", "policy.hidden_sizes=[16]"]
STEPS = ["sim=remote", *SMALL, "algorithm.rollout_steps=64", "algorithm.minibatch_size=64"]
EPISODES = ["sim=remote", *SMALL, "algorithm=grpo", "algorithm.groups.group_size=2", "algorithm.groups.groups_per_step=2"]


class SilentProxy:
    """Passes bytes on to a server, until it is silent: then connections stay and nothing comes."""

    def __init__(self, port: int | None) -> None:
        """`port`: None: silent from the beginning."""
        self._port = port
        self.is_silent = port is None
        self.kept_waiting = threading.Event()
        """Somebody has asked and is not answered."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = None if self._port is None else socket.create_connection(("127.0.0.1", self._port))
                self._open += [one for one in (client, server) if one is not None]
                for source, sink in ((client, server), (server, client)):
                    if source is not None:
                        threading.Thread(target=self._pass, args=(source, sink, source is client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket | None, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if asks and self.is_silent:
                    self.kept_waiting.set()
                elif sink is not None:
                    sink.sendall(data)


@pytest.fixture
def service() -> Iterator[EnvironmentService]:
    made = EnvironmentService({"cartpole": load_train_config(["sim=cartpole"]).sim}, token="none", limits=ServiceLimits())
    yield made
    made.close()


@pytest.fixture
def proxies() -> Iterator[list[SilentProxy]]:
    made: list[SilentProxy] = []
    yield made
    for proxy in made:
        proxy.close()


def started(folder: Path, *overrides: str) -> Fork:
    """A command in a process of its own, which writes beside `folder`: see `printed`."""
    with open(folder.with_name("printed"), "wb") as output:
        return start_forked("embodied_rl.train", *last_of(overrides), f"run_dir={folder}", output=output, collects=True, folder=ROOT)


def printed(folder: Path) -> str:
    return folder.with_name("printed").read_text(encoding="utf-8")


def wait_for(condition: Any, process: Fork) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, "it has ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("number", "task"),
    [
        (signal.SIGTERM, [*STEPS, "hybrid=collocated"]),
        pytest.param(signal.SIGINT, [*STEPS, "hybrid=disaggregated"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [*STEPS, "hybrid=ray"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [*EPISODES, "hybrid=collocated"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [*EPISODES, "hybrid=disaggregated", "hybrid.players=2"], marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, [*EPISODES, "hybrid=disaggregated", "algorithm.groups.max_staleness=1"], marks=pytest.mark.slow),
    ],
    ids=["collocated", "disaggregated", "ray", "groups", "players", "ahead"],
)
def test_a_simulator_behind_a_server_that_falls_silent(
    tmp_path: Path, service: EnvironmentService, proxies: list[SilentProxy], number: signal.Signals, task: list[str]
) -> None:
    proxies.append(SilentProxy(int(service.url.rpartition(":")[2])))
    folder = tmp_path / "run"
    words = [*task, *PATIENT, f"sim.kwargs.url={proxies[0].url}", "total_steps=1000000", "checkpoint.every_steps=null"]
    process = started(folder, *words)
    wait_for(lambda: len(rows(folder)) > 0, process)
    proxies[0].is_silent = True
    wait_for(proxies[0].kept_waiting.is_set, process)
    os.kill(process.pid, number)
    status, errors = process.wait(DEADLINE_S), printed(folder)
    assert status == 0, errors
    assert "Interrupted and saved" in errors
    assert "Traceback" not in errors
    steps = json.loads((folder / "checkpoints/last/state.json").read_text())["step"]
    assert steps == rows(folder)[-1]["step"] > 0
    proxies.append(SilentProxy(int(service.url.rpartition(":")[2])))  # another server: it answers
    further = [f"sim.kwargs.url={proxies[1].url}", f"total_steps={steps + 128}"]
    train(load_train_config(["sim=remote", f"resume={folder}", f"run_dir={folder}", *further]), overrides=further)
    found = [row["step"] for row in rows(folder)]
    assert found == sorted(found)
    assert found[-1] >= steps + 128


@pytest.mark.slow
def test_an_agent_behind_a_server_that_never_answers(tmp_path: Path, proxies: list[SilentProxy]) -> None:
    proxies.append(SilentProxy(None))
    player = f'{{other: {{share: 0.5, backend: openai, base_url: "{proxies[0].url}/v1", model: some}}}}'
    folder = tmp_path / "run"
    process = started(folder, *TEXTS, "algorithm.warm_start=null", f"generation.mix={player}", "total_steps=100000")
    wait_for(proxies[0].kept_waiting.is_set, process)
    os.kill(process.pid, signal.SIGTERM)
    status, errors = process.wait(DEADLINE_S), printed(folder)
    assert status == 0, errors
    assert "Interrupted and saved at" in errors
    assert (folder / "checkpoints/last/model/model.safetensors").is_file()


def test_a_player_that_takes_no_weights_costs_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still when weights are published: the update before is counted and saved."""
    monkeypatch.setattr("embodied_rl.trainer._PATIENCE_S", 0.5)
    folder = tmp_path / "run"
    folder.mkdir()
    config = load_train_config([*GROUPS, "hybrid=disaggregated", "total_steps=100000", f"run_dir={folder}"])
    with Trainer(config, folder, command="test") as trainer:
        method, manager = cast(Any, trainer.method), cast(Any, trainer.manager)
        pid, update = manager._handle.process.pid, method.update

        def stop_after(prepared: Any, *, iteration: int, steps: int) -> dict[str, float]:
            stats = update(prepared, iteration=iteration, steps=steps)
            if iteration == 1:
                os.kill(pid, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGTERM)
            return dict(stats)

        method.update = stop_after
        try:
            trainer.run()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (trainer.interrupted, trainer.iteration) == (True, 2)
        steps = trainer.steps
    state = json.loads((folder / "checkpoints/last/state.json").read_text())
    assert (state["step"], state["state"]["iteration"]) == (steps, 2)
    assert [row["step"] for row in rows(folder)][-1] == steps
    further = [f"total_steps={steps + 50}"]
    train(load_train_config([*GROUPS, f"resume={folder}", f"run_dir={folder}", *further]), overrides=further)
    assert rows(folder)[-1]["step"] >= steps + 50


def test_waits_alone_are_ended() -> None:
    stopper, done = Stopper(0.02), []

    def work_and_wait() -> None:
        stopper.stop()
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            done.append("busy: not to be cut in the middle")
        done.append("whole")
        with waiting:
            threading.Event().wait(DEADLINE_S)
        done.append("too late")

    with pytest.raises(WaitStopped), stopper.stoppable():
        work_and_wait()
    assert done[-1] == "whole"
    # What was stopped stays so: the next wait ends too.
    with pytest.raises(WaitStopped), stopper.stoppable(), waiting:
        threading.Event().wait(DEADLINE_S)


def test_a_wait_whose_system_call_begins_a_moment_after_the_signal_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    knock, knocks = signal.pthread_kill, []

    def too_early(thread: int, number: int) -> None:
        knocks.append(number)
        if len(knocks) > 1:  # the first has been handled before the wait slept: nothing interrupts it
            knock(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", too_early)
    stopper = Stopper(0.02)
    stopper.stop()
    with pytest.raises(WaitStopped), stopper.stoppable(), waiting:
        threading.Event().wait(20.0)
    assert knocks == [signal.SIGURG, signal.SIGURG]


def test_who_uses_the_clock_of_the_process_keeps_it() -> None:
    """Limits of tests are such a clock."""
    handler, clock = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    rung: list[bool] = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        stopper = Stopper(0.0)
        with stopper.stoppable(), waiting:
            until = time.monotonic() + DEADLINE_S
            while not rung and time.monotonic() < until:
                time.sleep(0.01)
            # It is no stop, nor is a knock that nobody here asked for.
            signal.raise_signal(signal.SIGURG)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *clock)
    assert rung == [True]


def test_a_stop_that_comes_too_late_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGURG)
    stopper = Stopper(0.05)
    with stopper.stoppable():
        stopper.stop()
    assert signal.getsignal(signal.SIGURG) == before
    another = Stopper(60.0)
    with another.stoppable(), waiting:
        assert not threading.Event().wait(0.2)


def test_a_simulator_that_is_reset_may_be_silent_too(tmp_path: Path) -> None:
    """As whoever is to come back, of which `settle` waits."""
    config = load_train_config(["sim=cartpole", "sim.num_workers=1", *PATIENT[:2]]).sim
    stopper = Stopper(0.1)
    with EnvManager.from_config(config, EpisodeSeeds.training(0), autoreset=False) as manager:
        (pid,) = manager.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        try:
            stopper.stop()
            with pytest.raises(WaitStopped), stopper.stoppable():
                manager.reset()
        finally:
            os.kill(pid, signal.SIGCONT)


def test_without_a_signal_nothing_is_ended() -> None:
    stopper = Stopper(0.0)
    with stopper.stoppable(), waiting:
        assert not threading.Event().wait(0.05)
    with waiting, pytest.raises(ValueError, match="own"):
        raise ValueError("own")
    assert waiting.depth == 0
    found: list[str] = []

    def elsewhere() -> None:
        with stopper.stoppable(), waiting:
            found.append("went on")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(DEADLINE_S)
    assert found == ["went on"]
