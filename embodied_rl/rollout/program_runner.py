"""Agent programs side by side: each plays in a separate process, with its own session at the agent proxy.

```
   start ──▶ process ──HTTP──▶ AgentProxy ──▶ token backend        a program ends by itself, runs out of time, or is stopped;
     ▲          │                  │                               only one that ended well and was judged gives an episode,
   caller ◀── wait ◀── exit ◀── session's turns, rewards           everything else is a `ProgramFault`, never a reward
```
One that stays (`ProgramOptions.stays`) replies instead of ending, and is given the next episode.
"""

from __future__ import annotations

import enum
import select
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from embodied_rl.sandbox.launch import NOT_STARTED
from embodied_rl.serving.agents.app import AgentProxy
from embodied_rl.serving.agents.captured import CapturedSession
from embodied_rl.serving.agents.sessions import SessionSampling
from embodied_rl.sim.text.program import (
    FAILURE_STATUS,
    ProgramOptions,
    RunningProgram,
    TaskBook,
    episode_line,
    lasting_environment,
    program_box,
    program_environment,
)
from embodied_rl.sim.text.served_program import ProgramEnding, ProgramPool, ServedEpisode
from embodied_rl.stopping import waiting

_LINES = 6
"""Of a program's last words that a fault keeps."""


class ProgramFaultKind(enum.Enum):
    """Why a program's episode is none."""

    NOT_STARTED = "not_started"
    CRASHED = "crashed"
    """Ended with a status that means neither success nor failure, by a signal, or with an exception that it replied with."""
    TIMED_OUT = "timed_out"
    NO_REWARD = "no_reward"
    """Ended well, but without a reward from the program or through its session."""
    NO_TURNS = "no_turns"
    """Never asked the model, or was never answered."""
    NOT_TRAINABLE = "not_trainable"
    """The backend gave no log-probabilities."""


@dataclass(frozen=True)
class ProgramFault:
    """A typed record of an episode that failed."""

    kind: ProgramFaultKind
    seed: int
    task: Mapping[str, Any]
    exit_status: int | None
    """Minus the signal's number where one ended it; None: it never ran, or stays."""
    num_turns: int
    """Answers that it had been given."""
    seconds: float
    detail: str
    """The end of what it printed."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**{name: value for name, value in vars(self).items() if name != "kind"}, "kind": self.kind.value}

    def __str__(self) -> str:
        """One line for people and for the queue's reasons."""
        last = (self.detail.strip().splitlines() or [""])[-1]
        status = "" if self.exit_status is None else f" (status {self.exit_status})"
        return f"the program {self.kind.value.replace('_', ' ')}{status}{': ' + last if last else ''}"


@dataclass(frozen=True)
class Played:
    """How one program ended."""

    tag: Hashable
    """The caller's name for it."""
    seed: int
    task: Mapping[str, Any]
    seconds: float
    """From its start to its end, or from an episode's task to its reply."""
    outcome: CapturedSession | ProgramFault
    reward: float = 0.0
    """All rewards; 0 for a fault."""


@dataclass
class _Running:
    tag: Hashable
    seed: int
    task: Mapping[str, Any]
    session: str
    process: RunningProgram | ServedEpisode
    started_s: float


class ProgramRunner:
    """Runs programs against a proxy that has a token, so that only the sessions opened here exist. For one thread."""

    def __init__(self, options: ProgramOptions, proxy: AgentProxy, model: str) -> None:
        """
        Args:
            model: its name at the proxy.

        Raises:
            UserError: this machine's sandbox is weaker than the options ask for, or a task file cannot be read.
        """
        self.options, self.proxy, self.model = options, proxy, model
        self.tasks = TaskBook(options)
        self._box = program_box(options, proxy.base_url)
        self._pool: ProgramPool | None = None
        if options.stays:
            words = options.words({}, 0, model)
            self._pool = ProgramPool(words, lasting_environment(options, proxy.base_url, model), options.serve_limits, self._box)
        self._running: dict[Hashable, _Running] = {}
        self._failed_to_start: list[Played] = []
        self._put_aside: dict[str, CapturedSession] = {}  # sessions that their programs ended themselves

    @property
    def tags(self) -> list[Hashable]:
        """Of the programs that run."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._failed_to_start)

    def start(self, tag: Hashable, seed: int, sampling: SessionSampling) -> None:
        """Start the program of an episode; one that cannot be started comes back from `wait` as a fault."""
        assert tag not in self._running, "a program has one name"
        task, started = self.tasks.task(seed), time.monotonic()
        session = ""
        try:
            session, key = self.proxy.open_session({"seed": seed, "task": dict(task)}, sampling)
            line = episode_line(base_url=self.proxy.base_url, key=key, session=session, model=self.model, task=task, seed=seed)
            process = self._begin(line)
        except (OSError, ValueError) as error:
            if session:
                self.proxy.end_session(session)
            fault = ProgramFault(ProgramFaultKind.NOT_STARTED, seed, task, None, 0, 0.0, f"{type(error).__name__}: {error}")
            self._failed_to_start.append(Played(tag, seed, task, 0.0, fault))
            return
        self._running[tag] = _Running(tag, seed, task, session, process, started)

    def wait(self, timeout_s: float) -> list[Played]:
        """Programs that have ended since the last call, after a wait of at most `timeout_s` for the first; in the order of starting."""
        ended, self._failed_to_start = self._failed_to_start, []
        now = time.monotonic()
        nearest = min((one.process.wake_s for one in self._running.values()), default=now)
        poll = select.poll()
        for one in self._running.values():
            for descriptor, events in one.process.watched():
                poll.register(descriptor, events)
        wait_s = 0.0 if ended or not self._running else max(0.0, min(timeout_s, nearest - now))
        with waiting:
            poll.poll(1000 * wait_s)
        for one in list(self._running.values()):
            over = one.process.is_over()
            if over or time.monotonic() >= one.process.deadline:
                ended.append(self._finish(one, late=not over))
        return ended

    def num_turns(self, tag: Hashable) -> int:
        """Answers that a running program has been given."""
        return self.proxy.num_turns(self._running[tag].session)

    def stop(self, tag: Hashable) -> None:
        """End a program that is not needed any more; `wait` does not return it."""
        one = self._running.pop(tag)
        one.process.end()
        self.proxy.end_session(one.session)
        self._ended_by_client(one.session)

    def stop_all(self) -> None:
        """End all; a program that stays and has nothing to do is kept for `start`."""
        for tag in self.tags:
            self.stop(tag)
        self._failed_to_start = []

    def close(self) -> None:
        """End all, and the programs that stay."""
        self.stop_all()
        if self._pool is not None:
            self._pool.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, line: Mapping[str, Any]) -> RunningProgram | ServedEpisode:
        if self._pool is not None:
            return self._pool.begin(line)
        words = self.options.words(line["task"], line["seed"], self.model)
        return RunningProgram(words, program_environment(self.options, line), self.options.timeout_s, self._box)

    def _finish(self, one: _Running, *, late: bool) -> Played:
        del self._running[one.tag]
        ending = one.process.end()
        if ending.reward is not None and self.options.reward == "http":
            said = f"It replied with reward {ending.reward:g}, and sim.kwargs.reward=http takes posted ones: set sim.kwargs.reward=return."
            ending = replace(ending, output=f"{ending.output}\n{said}", failed=True)
        seconds = time.monotonic() - one.started_s
        # A program may end its session itself: then the proxy has put it aside.
        captured = self.proxy.end_session(one.session) or self._ended_by_client(one.session)
        num_turns = 0 if captured is None else len(captured.turns)
        kind = self._fault_kind(captured, ending, late)
        if kind is not None or captured is None:
            detail = "\n".join(ending.output.strip().splitlines()[-_LINES:])
            fault = ProgramFault(kind or ProgramFaultKind.NO_TURNS, one.seed, one.task, ending.status, num_turns, seconds, detail)
            return Played(one.tag, one.seed, one.task, seconds, fault)
        own = float(ending.status == 0) if self.options.reward == "exit" else ending.reward or 0.0
        return Played(one.tag, one.seed, one.task, seconds, captured, captured.total_reward + own)

    def _fault_kind(self, captured: CapturedSession | None, ending: ProgramEnding, late: bool) -> ProgramFaultKind | None:
        by_exit = self.options.reward == "exit"
        if ending.status == NOT_STARTED and "sandbox: " in ending.output:
            return ProgramFaultKind.NOT_STARTED
        if late:
            return ProgramFaultKind.TIMED_OUT
        lost = self._pool is not None and ending.status is not None  # one that stays has no reason to end, whatever its status
        if ending.failed or lost or (ending.status not in (None, 0) and not (by_exit and ending.status == FAILURE_STATUS)):
            return ProgramFaultKind.CRASHED
        if captured is None or not any(len(turn.sampled_ids) for turn in captured.turns):
            return ProgramFaultKind.NO_TURNS
        if not by_exit and captured.num_rewards == 0 and ending.reward is None:
            return ProgramFaultKind.NO_REWARD
        trainable = all(bool((turn.log_prob <= 0).all()) for turn in captured.turns)  # NaN is not
        return None if trainable else ProgramFaultKind.NOT_TRAINABLE

    def _ended_by_client(self, session: str) -> CapturedSession | None:
        for captured in self.proxy.take_finished():
            self._put_aside[captured.session] = captured
        return self._put_aside.pop(session, None)
