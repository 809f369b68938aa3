"""SIGKILL and SIGSTOP at random: of workers, of their parents, of managers' processes, and of training runs that go on afterwards."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

from embodied_rl.compose import load_train_config
from embodied_rl.sim.faults import FaultPolicy
from embodied_rl.train import train
from tests import forks
from tests.chaos.harness import Attack
from tests.sim.runs import Trace, assert_same, play_asynchronously
from tests.sim.test_chaos import SLOTS, Chaos, accounts, make
from tests.sim.test_keeper import SCRIPT
from tests.test_killed_runs import PPO, check_killed_against

MESSAGES = 60
"""Of each slot in an attempt on workers."""
TINY = (*PPO, "total_steps=640", "algorithm.num_epochs=1", "evaluation.every_steps=null")
LEFT_S = 10.0
"""For the processes of what was killed to be gone."""
_MARK = "EMBODIED_RL_CHAOS"
"""In the environment of every process of an attempt, and of all that those start."""


class Kills(Attack):
    """In turns: workers and their parents while episodes are played; a process with a manager; a training run."""

    name = "kills"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        forks.server("torch")  # training runs are forks of it, and it outlives every attempt: not to have a mark
        self._clean: Trace | None = None
        self._whole: Path | None = None
        self._kills = self._episodes = self._left = 0

    def attempt(self, number: int, chance: random.Random) -> str | None:
        attack = (self._workers, self._manager, self._workers, self._training)[number % 4]
        os.environ[_MARK] = mark = secrets.token_hex(8)
        problem: str | None = None
        try:
            attack(number, chance)
        except (Exception, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"[:1000].replace("\n", " ")
        finally:
            del os.environ[_MARK]
        if left := still_running(mark, LEFT_S):
            self._left += len(left)
            problem = f"{problem or ''} left running: {', '.join(' '.join(process.cmdline())[:80] for process in left)}"
            for process in left:
                process.kill()
        return None if problem is None else f"{attack.__name__.strip('_')}: {problem}"

    def count(self) -> dict[str, int]:
        return {"kills survived": self._kills, "episodes accounted for": self._episodes, "processes left": self._left}

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _workers(self, number: int, chance: random.Random) -> None:
        """What is played is what is played without."""
        patient = FaultPolicy(max_restarts=1000, backoff_s=0.0)
        if self._clean is None:
            with make(patient) as manager:
                manager.reset()
                self._clean = play_asynchronously(manager, MESSAGES)
        with make(patient) as manager:
            manager.reset()
            chaos = Chaos(manager, every=chance.randrange(20, 60), seed=chance.randrange(2**31), parents=True)
            trace = play_asynchronously(manager, MESSAGES, between=chaos, timeout_s=1.0)
            records = chaos.noticed()
            accounts(trace, manager)
            assert {record.pid for record in records} >= set(chaos.kills), "a death that was not noticed"
            assert all(slot.outcome == "restored" and slot.drift in (None, 0.0) for record in records for slot in record.slots)
        assert_same(trace, self._clean)
        assert len(trace) == SLOTS
        self._kills += chaos.attacks
        self._episodes += sum(1 for steps in trace.values() for step in steps if step[5])

    def _manager(self, number: int, chance: random.Random) -> None:
        """Nothing is left of its workers, nor of what these started; it is looked for by the caller."""
        folder = self.folder / f"started-{number}"
        folder.mkdir()
        script = textwrap.dedent(SCRIPT).format(begin="begin()")
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        if chance.random() < 0.5:  # once it plays; else somewhere on its way there
            process.stdout.readline()
        else:
            time.sleep(chance.uniform(0.0, 3.0))
        if chance.random() < 0.3:
            process.send_signal(signal.SIGSTOP)
        process.kill()
        process.wait()
        process.stdout.close()
        self._kills += 1

    def _training(self, number: int, chance: random.Random) -> None:
        """The run that is taken up again is the unbroken one, bit for bit."""
        if self._whole is None:
            self._whole = train(load_train_config([*TINY, f"run_dir={self.folder / 'whole'}"]))
        self._kills += check_killed_against(self._whole, self.folder / f"killed-{number}", TINY, chance, chance.randrange(1, 3))


def still_running(mark: str, within_s: float) -> list[psutil.Process]:
    """Processes with this mark in their environment that are still there when the time is over."""
    until, wanted = time.monotonic() + within_s, f"{_MARK}={mark}".encode()
    while (left := [process for process in psutil.process_iter() if _has(process, wanted)]) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _has(process: psutil.Process, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{process.pid}/environ").read_bytes() and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False
