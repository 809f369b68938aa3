"""Runs that are asked to end while they wait for a server that does not answer: they save, end, and go on later."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from embodied_rl.compose import load_train_config
from embodied_rl.service.app import EnvironmentService
from embodied_rl.service.environment import ServiceLimits
from embodied_rl.stopping import Stopper, WaitStopped, waiting
from embodied_rl.train import train
from tests.roles.runs import QUICK, TEXTS

DEADLINE_S = 240.0
PATIENT = ["sim.step_timeout_s=9000", "sim.start_timeout_s=9000"]
PATIENT += ["+sim.kwargs.attempt_s=9000", "+sim.kwargs.deadline_s=8000", "+sim.kwargs.start_timeout_s=8000"]
"""Nothing but the signal ends the wait."""


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
    made = EnvironmentService({"cartpole": load_train_config(["sim=cartpole"]).sim}, limits=ServiceLimits())
    yield made
    made.close()


@pytest.fixture
def proxies() -> Iterator[list[SilentProxy]]:
    made: list[SilentProxy] = []
    yield made
    for proxy in made:
        proxy.close()


def started(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "embodied_rl.train", *overrides, f"run_dir={folder}"]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("number", "hybrid"),
    [
        (signal.SIGTERM, "collocated"),
        pytest.param(signal.SIGINT, "disaggregated", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "ray", marks=pytest.mark.slow),
    ],
    ids=["collocated", "disaggregated", "ray"],
)
def test_a_simulator_behind_a_server_that_falls_silent(
    tmp_path: Path, service: EnvironmentService, proxies: list[SilentProxy], number: signal.Signals, hybrid: str
) -> None:
    proxies.append(SilentProxy(int(service.url.rpartition(":")[2])))
    task = ["sim=remote", *QUICK, "sim.num_workers=1", "sim.num_slots=2", f"sim.kwargs.url={proxies[0].url}", f"hybrid={hybrid}"]
    task += [
        "algorithm.rollout_steps=64",
        "algorithm.minibatch_size=64",
        "evaluation.every_steps=null",
        "policy.hidden_sizes=[16]",
        *PATIENT,
    ]
    folder = tmp_path / "run"
    process = started(folder, *task, "total_steps=1000000", "checkpoint.every_steps=null")
    wait_for(lambda: len(rows(folder)) > 0, process)
    proxies[0].is_silent = True
    wait_for(proxies[0].kept_waiting.is_set, process)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "Interrupted and saved" in errors
    assert "Traceback" not in errors
    steps = json.loads((folder / "checkpoints/last/state.json").read_text())["step"]
    assert steps == rows(folder)[-1]["step"] > 0
    proxies.append(SilentProxy(int(service.url.rpartition(":")[2])))  # another server: it answers
    further = [f"sim.kwargs.url={proxies[1].url}", f"total_steps={steps + 128}"]
    train(load_train_config(["sim=remote", f"resume={folder}", f"run_dir={folder}", *further]), overrides=further)
    assert rows(folder)[-1]["step"] == steps + 128


@pytest.mark.slow
def test_an_agent_behind_a_server_that_never_answers(tmp_path: Path, proxies: list[SilentProxy]) -> None:
    proxies.append(SilentProxy(None))
    player = f'{{other: {{share: 0.5, backend: openai, base_url: "{proxies[0].url}/v1", model: some}}}}'
    folder = tmp_path / "run"
    process = started(folder, *TEXTS, "algorithm.warm_start=null", f"generation.mix={player}", "total_steps=100000")
    wait_for(proxies[0].kept_waiting.is_set, process)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert "Interrupted and saved at" in errors
    assert (folder / "checkpoints/last/policy.safetensors").is_file()


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
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


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
