"""Processes of agent programs: one for an episode, or one that keeps running and gets one episode after another, as a line of JSON each.

```
to its input    {"episode": 7, "task": {…}, "seed": 3, "model": "policy", "base_url": "http://127.0.0.1:…/v1",
                 "api_key": "sk-…", "session_url": "http://…/sessions/…"}
from its output {"done": true}    {"done": true, "reward": 1.0}    {"error": "what went wrong"}
```
A reply may repeat ``episode``; other lines are ordinary output. A program that crashes or exceeds its timeout loses its present episode:
the next one gets a new process, after a pause that doubles with every further failure in a row. A program must end when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied_rl.distributed.channel import can_be_read
from embodied_rl.distributed.processes import Output
from embodied_rl.sandbox.box import Box, Sandboxed
from embodied_rl.sim.faults import FaultPolicy

_TAIL_BYTES = 4096
_MAX_LINE_BYTES = 2**20
"""Longest line in bytes; replies are short, and the beginning of a longer line is dropped."""
_GRACE_S = 5.0
"""Seconds that a process with closed output has to end and report its own status."""
_MAX_READS = 16
"""Most pieces of output that are read from one program in a row."""


@dataclass(frozen=True)
class ProgramEnding:
    """Outcome of a program's episode."""

    status: int | None
    """Exit status, or minus the number of the signal that ended it; None if the process lives on."""
    output: str
    """End of its output."""
    reward: float | None = None
    failed: bool = False
    """Whether the program reported a failure."""


class StartedProgram:
    """A program started in a sandbox, with all its descendants, and the end of its output."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], box: Box, *, has_pipes: bool) -> None:
        """`has_pipes`: its input and output are our pipes; otherwise it has no input, and its output is recorded with its error stream.
        Raises OSError if it cannot be started."""
        with contextlib.ExitStack() as undo:
            self._printed = Output()
            undo.callback(self._printed.file.close)
            self._started = Sandboxed(
                box,
                words=with_absolute_files(arguments),
                env=env,
                cwd=os.getcwd(),
                stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipes else self._printed.file,
                stderr=self._printed.file,
            )
            undo.callback(self._started.end)
            self._process = self._started.process
            self.ended = os.pidfd_open(self._process.pid)
            """Descriptor that is readable once the program has ended."""
            undo.pop_all()

    def tail(self) -> str:
        """End of its output."""
        return self._printed.read(self._printed.size() - _TAIL_BYTES).decode("utf-8", "replace")

    def kill(self) -> tuple[int, str]:
        """End the program and all its descendants; returns (exit status, end of its output)."""
        status, tail = self._started.end(), self.tail()
        for file in (self._process.stdin, self._process.stdout, self._printed.file):
            if file is not None:
                file.close()
        os.close(self.ended)
        return status, tail


class RunningProgram(StartedProgram):
    """A program that was started for one episode."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float, box: Box) -> None:
        """Start the program and keep its output for error messages. Raises OSError if it cannot be started."""
        super().__init__(arguments, env, box, has_pipes=False)
        self.deadline = time.monotonic() + timeout_s

    @property
    def wake_s(self) -> float:
        """Time on the monotonic clock at which something is due even without events."""
        return self.deadline

    def watched(self) -> list[tuple[int, int]]:
        """Descriptors and `select.poll` events that may mean progress."""
        return [(self.ended, select.POLLIN)]

    def is_over(self) -> bool:
        """Whether the program has ended; never waits."""
        return can_be_read(self.ended, timeout_s=0.0)

    def end(self) -> ProgramEnding:
        """End what still runs of the program, and wait."""
        return ProgramEnding(*self.kill())


class _Process(StartedProgram):
    """A program that keeps running and plays one episode at a time."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], box: Box) -> None:
        super().__init__(arguments, env, box, has_pipes=True)
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self._unsent, self._unread = b"", b""

    @property
    def wants_to_send(self) -> bool:
        return bool(self._unsent)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, line: Mapping[str, Any]) -> None:
        """Give it an episode; its earlier output is dropped."""
        self.lines()
        self._unread = b""
        self._printed.cut(0, 0)
        self._unsent = json.dumps(line).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Send as much of the episode's line as it accepts now."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.input, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has ended, which its output shows too
            self._unsent = b""

    def lines(self) -> tuple[list[bytes], bool]:
        """Complete lines that it has written since the last call, and whether its output is still open."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):  # a line that never ends would keep us here
                if not (part := os.read(self.output, 2**16)):
                    if self._unread:
                        self.print(self._unread)
                    self._unread = b""
                    return [], False
                *whole, rest = (self._unread + part).split(b"\n")
                self._unread = rest[-_MAX_LINE_BYTES:]
                if whole:
                    return whole, True
        return [], True

    def print(self, line: bytes) -> None:
        """Keep a line that is no reply with the output of its error stream."""
        self._printed.file.write(line[-_TAIL_BYTES:] + b"\n")


class ProgramPool:
    """Processes of one program, as many as there are episodes at a time. For one thread."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float, box: Box, faults: FaultPolicy | None = None
    ) -> None:
        """`timeout_s`: seconds for an episode, after which its process is ended. `faults`: pauses before starts after failures."""
        self._words, self._env, self.timeout_s, self._box, self._faults = arguments, env, timeout_s, box, faults or FaultPolicy()
        self._idle: list[_Process] = []
        self._failures = 0
        self._not_before_s = 0.0
        self._num_episodes = 0
        self.num_started = 0
        """Number of processes started so far."""

    def begin(self, episode: Mapping[str, Any]) -> ServedEpisode:
        """Play an episode in an idle process, or in a new one."""
        self._num_episodes += 1
        return ServedEpisode(self, {"episode": self._num_episodes, **episode}, self._not_before_s)

    def take(self) -> _Process:
        """A live process. Raises OSError if none can be started."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.kill()
        self.num_started += 1
        return _Process(self._words, self._env, self._box)

    def has_idle(self) -> bool:
        """Whether an episode can begin without a start."""
        return bool(self._idle)

    def came_back(self, process: _Process) -> None:
        """Return a process whose episode is over and that can play another one."""
        self._failures, self._not_before_s = 0, 0.0
        self._idle.append(process)

    def was_lost(self) -> None:
        """Record that a process ended in its episode: the next start waits longer."""
        self._failures += 1
        self._not_before_s = time.monotonic() + self._faults.pause_s(self._failures)

    def close(self) -> None:
        """End the idle processes; the pool can be used again."""
        while self._idle:
            self._idle.pop().kill()


class ServedEpisode:
    """An episode in a running program; has the interface of `RunningProgram`."""

    def __init__(self, pool: ProgramPool, line: Mapping[str, Any], not_before_s: float) -> None:
        self._pool, self._line, self._not_before_s = pool, line, not_before_s
        self._process: _Process | None = None
        self._ending: ProgramEnding | None = None
        self._closed_s: float | None = None
        self.deadline = max(time.monotonic(), 0.0 if pool.has_idle() else not_before_s) + pool.timeout_s
        self._start_when_due()

    @property
    def wake_s(self) -> float:
        """Time on the monotonic clock at which something is due even without events."""
        if self._process is None and self._ending is None:
            return min(self._not_before_s, self.deadline)
        return self.deadline if self._closed_s is None else min(self._closed_s + _GRACE_S, self.deadline)

    def watched(self) -> list[tuple[int, int]]:
        """Descriptors and `select.poll` events that may mean progress."""
        if self._process is None:
            return []
        if self._closed_s is not None:
            return [(self._process.ended, select.POLLIN)]
        sending = [(self._process.input, select.POLLOUT)] if self._process.wants_to_send else []
        return [(self._process.output, select.POLLIN), (self._process.ended, select.POLLIN), *sending]

    def is_over(self) -> bool:
        """Whether the program has replied or ended; never waits."""
        self._start_when_due()
        if self._ending is not None or self._process is None:
            return self._ending is not None
        if self._closed_s is not None:
            return self._has_ended()
        self._process.send()
        gone = not self._process.alive  # a child of the program may keep the output open
        for _ in range(_MAX_READS):  # other programs need their turn too
            lines, is_open = self._process.lines()
            for line in lines:
                if (ending := self._reply(line)) is not None:
                    self._ending = ending
                    return True
                self._process.print(line)
            if not is_open:
                self._closed_s = time.monotonic()
                return self._has_ended()
            if not lines and gone:
                self._ending = self._lose()
                return True
            if not lines:
                break
        return False

    def end(self) -> ProgramEnding:
        """Outcome of a finished episode. An unfinished one ends with its process, which counts as lost after a timeout."""
        if self._ending is None:
            late = time.monotonic() >= self.deadline
            self._ending = self._lose() if late else ProgramEnding(*self._kill())
        elif self._process is not None:
            self._pool.came_back(self._process)
            self._process = None
        return self._ending

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _start_when_due(self) -> None:
        if self._process is not None or self._ending is not None:
            return
        if not self._pool.has_idle() and time.monotonic() < self._not_before_s:
            return
        try:
            self._process = self._pool.take()
        except OSError as error:
            self._pool.was_lost()
            self._ending = ProgramEnding(None, f"{type(error).__name__}: {error}", failed=True)
            return
        self._process.begin(self._line)

    def _has_ended(self) -> bool:
        """Whether the program is gone after the end of its output, or had time enough to go."""
        assert self._process is not None, "it is asked while there is one"
        assert self._closed_s is not None, "it is asked after the end of the output"
        if self._process.alive and time.monotonic() < self._closed_s + _GRACE_S:
            return False
        self._ending = self._lose()
        return True

    def _kill(self) -> tuple[int, str]:
        if self._process is None:  # it was still waiting for its start
            return -int(signal.SIGKILL), ""
        process, self._process = self._process, None
        return process.kill()

    def _lose(self) -> ProgramEnding:
        self._pool.was_lost()
        return ProgramEnding(*self._kill())

    def _reply(self, line: bytes) -> ProgramEnding | None:
        """Outcome in a line; None: the line is ordinary output."""
        assert self._process is not None, "it wrote the line"
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or not (said.get("done") is True or "error" in said):
            return None
        if said.get("episode", self._line["episode"]) != self._line["episode"]:
            return None
        reward = said.get("reward")
        if "error" in said:
            return ProgramEnding(None, f"{self._process.tail()}\n{said['error']}", failed=True)
        if reward is not None and (
            isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max
        ):
            return ProgramEnding(None, f"{self._process.tail()}\nThe reply's reward is not a finite number: {reward!r:.80}", failed=True)
        return ProgramEnding(None, self._process.tail(), None if reward is None else float(reward))


def with_absolute_files(arguments: Sequence[str]) -> list[str]:
    """A command with absolute file names: a program may start in another folder than ours."""
    found = []
    for argument in arguments:
        path, function = file_of(argument)
        is_file = "/" in path or path.endswith(".py")
        moved = is_file and not os.path.isabs(path) and os.path.exists(path)
        found.append(os.path.abspath(path) + function if moved else argument)
    return found


def file_of(word: str) -> tuple[str, str]:
    """(``agent.py``, ``:play``) of ``agent.py:play``; (word, empty) of another word."""
    path, _, function = word.rpartition(":")
    return (path, f":{function}") if path.endswith(".py") else (word, "")
