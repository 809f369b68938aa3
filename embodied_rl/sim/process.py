"""Start, watch and end one worker process, with timeouts for its answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from embodied_rl.distributed.channel import Channel, ChannelClosed, ChannelGarbled, can_be_read
from embodied_rl.distributed.processes import Output, start_module
from embodied_rl.errors import UserError
from embodied_rl.sim.affinity import thread_variables
from embodied_rl.sim.faults import FaultKind, NonFiniteSimulationError, SimFault
from embodied_rl.stopping import waiting

Answer = TypeVar("Answer")

_OUTPUT_TAIL_BYTES, _OUTPUT_BYTES = 6000, 2**20
"""Bytes of a fault's output, and those beyond which earlier output is dropped: what simulators print over days must not fill the disk."""
_SEND_TIMEOUT_S = 30.0
_STACK_S = 1.0
"""Seconds that a hanging worker has to write its stack."""
_STACK_ENDS = (b" in _run_module_as_main\n", b"\n  ...\n")
"""Endings of a complete stack: the outermost call of ``python -m``, or the marker of a shortened one."""
_READY_S = 60.0
"""Seconds that a keeper has to start its worker, on a busy machine."""
_KEEPER_S = 10.0
"""Seconds that a keeper has to end a worker and its descendants."""
_REAP_S = 10.0
"""Seconds that a process with a closed socket has to end, on a busy machine; its status tells why it ended."""


class WorkerProcess:
    """One ``embodied_rl.sim.worker`` with its socket, its output and the means to end it.

    The process is a fresh interpreter, never a fork of ours: simulators hold threads, locks and graphics contexts. Its own process group
    keeps Ctrl-C to the manager. The worker and all its descendants die with the manager, even after a SIGKILL, because its keeper
    (`embodied_rl.sim.keeper`), our child, stands between the two.
    """

    def __init__(self, index: int, setup: dict[str, Any], threads: int = 1, module: str = "embodied_rl.sim.worker") -> None:
        """Call `main` of `module`, with its ends of the socket and of the pipe that closes with us in ``sys.argv``."""
        self.index = index
        self.num_envs: list[int] = setup["num_envs"]
        self._output = Output()
        self._pid: int | None = None
        # Some simulators iterate over sets of strings; without a fixed hash seed each process would play another episode for a seed.
        environment = {**thread_variables(threads), "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ours.callback(self._output.file.close)
            connection, other_end = socket.socketpair()
            theirs.callback(other_end.close)
            ours.callback(connection.close)
            life_read, self._life_write = os.pipe()
            theirs.callback(os.close, life_read)
            ours.callback(os.close, self._life_write)
            self._ready, ready_write = os.pipe()
            theirs.callback(os.close, ready_write)
            ours.callback(os.close, self._ready)
            handed = (other_end.fileno(), life_read, ready_write)
            keeper = ("embodied_rl.sim.keeper", module, os.getpid(), *handed)
            self._process = start_module(*keeper, pass_fds=handed, environment=environment, output=self._output.file)
            ours.pop_all()  # they live as long as the process
        self.channel = Channel(connection, asks=True)
        # A process that died before it read this is found dead when its first message is awaited.
        with contextlib.suppress(ChannelClosed):
            self.channel.ask({**setup, "sys_path": sys.path})

    @property
    def pid(self) -> int:
        """Id of the process that runs the simulator; the keeper's id if the keeper ended or stalled before it started that process."""
        if self._pid is None:
            answer = os.read(self._ready, 32) if can_be_read(self._ready, timeout_s=_READY_S) else b""
            self._pid = int(answer or self._process.pid)
        return self._pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def request(self, message: dict[str, Any], payload: bytes = b"", *, fds: Sequence[int] = ()) -> None:
        """Send a message and descriptors. Raises SimFault if the worker is gone or accepts nothing for half a minute."""
        self._output.cut(_OUTPUT_BYTES, _OUTPUT_TAIL_BYTES)
        try:
            self.channel.ask(message, payload, fds=fds, timeout_s=_SEND_TIMEOUT_S)
        except ChannelClosed:
            raise self._death() from None

    def receive(self, timeout_s: float, doing: str, read: Callable[[dict[str, Any], bytes], Answer]) -> Answer:
        """Receive the answer to the last request, decoded by `read`. Raises SimFault: the worker failed, died, was too slow at `doing`, or
        sent no valid answer; UserError: the worker refuses."""
        try:
            with waiting:
                message, payload = self.channel.next_answer(timeout_s)
            if (kind := message.get("kind")) in ("user_error", "fault"):
                raise self._reported(message)
            if kind != "done":
                raise ChannelGarbled(f"a message of kind {kind!r:.40}")
        except ChannelClosed:
            raise self._death() from None
        except TimeoutError:
            raise self.timed_out(timeout_s, doing) from None
        except ChannelGarbled as error:
            raise self._garbled(str(error), doing) from None
        try:
            return read(message, payload)
        except Exception as error:  # whatever `read` raises, this is not the expected answer
            raise self._garbled(f"{type(error).__name__}: {error}", doing) from None

    def check(self, failed: bool) -> None:
        """Raise the worker's failure, if there is one; `failed` is its own flag in shared memory."""
        self._output.cut(_OUTPUT_BYTES, _OUTPUT_TAIL_BYTES)
        if failed:
            self.receive(5.0, "report a failure", no_answer)
        if not self.alive():
            # Its last message may still be in the socket.
            try:
                self.receive(0.5, "report its end", no_answer)
            except SimFault as fault:
                if fault.kind is not FaultKind.GARBLED:
                    raise
            raise self._death()

    def timed_out(self, timeout_s: float, doing: str) -> SimFault:
        """Fault of a live worker that does not answer, with the place where it hangs."""
        if self.alive() and hasattr(signal, "SIGUSR1"):
            before, until = self._output.size(), time.monotonic() + _STACK_S
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            # The stack is written call by call, so the first read may be incomplete.
            while not self._output.read(before).endswith(_STACK_ENDS) and time.monotonic() < until:
                time.sleep(0.005)
        return SimFault(
            FaultKind.TIMED_OUT, self.index, f"No answer within {timeout_s:.4g} s while it should {doing}.\n{self._output_tail()}"
        )

    def release(self) -> None:
        """Tell the process that the manager has let go: it ends within about a second, whatever it is doing."""
        if self._life_write >= 0:
            # Send a byte as well as close the pipe: a process forked from ours since then keeps our end open.
            with contextlib.suppress(OSError):
                os.write(self._life_write, b"x")
            os.close(self._life_write)
            self._life_write = -1

    def end_at_once(self) -> None:
        """SIGKILL the process; its keeper kills the descendants. Does not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once and wait until it is gone, after which it cannot write to shared memory."""
        self.end_at_once()
        try:
            self._process.wait(_KEEPER_S)
        except subprocess.TimeoutExpired:  # the keeper was stopped, and the worker dies with it
            self._process.kill()
            self._process.wait()
        self.close()

    def resident_mb(self) -> float:
        """Resident memory in MB (2**20 bytes); 0 if unknown."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        except (OSError, IndexError, ValueError):
            return 0.0

    def close(self, grace_s: float = 2.0) -> None:
        """End the process gracefully, else by SIGKILL. May be called twice."""
        self.release()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._ready >= 0:
            worker = self.pid
            os.close(self._ready)
            self._ready = -1
            if self._process.returncode < 0 and worker != self._process.pid:  # the keeper was killed: kill what is left of its group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker, signal.SIGKILL)
        self.channel.close()
        self._output.file.close()

    def _reported(self, message: Mapping[str, Any]) -> UserError | SimFault:
        """Failure that a worker reports. Raises ChannelGarbled if the message is not a failure."""
        try:
            if message["kind"] == "user_error":
                return UserError(str(message["message"]))
            kind = FaultKind[message["fault"]]
            error = NonFiniteSimulationError if kind is FaultKind.NON_FINITE else SimFault
            where = {key: [int(number) for number in message[key]] for key in ("slots", "seeds", "steps") if key in message}
            return error(kind, self.index, str(message["detail"]), **where)
        except (KeyError, TypeError, ValueError) as error:
            raise ChannelGarbled(f"a failure report without content ({error!r})") from None

    def _garbled(self, what: str, doing: str) -> SimFault:
        return SimFault(FaultKind.GARBLED, self.index, f"While it should {doing}, it sent {what[:400]}.\n{self._output_tail()}")

    def _death(self) -> SimFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        code = self._process.returncode
        number = 0 if code is None else -code if code < 0 else code - 128  # signal that ended the keeper or the worker
        how = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit status {code}"
        if code is None:
            how = f"closed its connection, and still ran {_REAP_S:g} s later"
        return SimFault(FaultKind.DIED, self.index, f"{how}\n{self._output_tail()}")

    def _output_tail(self) -> str:
        return self._output.read(self._output.size() - _OUTPUT_TAIL_BYTES).decode(errors="replace")


def no_answer(message: Mapping[str, Any], payload: bytes) -> None:
    """Reader for a request that only a failure can answer. Raises ValueError."""
    raise ValueError("an answer to a request that was answered")


def done(message: Mapping[str, Any], payload: bytes) -> None:
    """Reader for an answer without content."""


def close_all(workers: list[WorkerProcess]) -> None:
    """Release all workers, then wait for each, so that closing takes as long as the slowest one; empties the list."""
    for worker in workers:
        worker.release()
    for worker in workers:
        worker.close()
    workers.clear()


# ---- how long an answer may take --------------------------------------------------------------------------------------


_FACTOR = 10.0
"""Factor of a reset's timeout over the longest reset so far, or before the first over the build time: machines and seeds differ."""
_FLOOR_S = 20.0
_FIRST_FLOOR_S = 60.0
"""Shortest timeout in seconds until every worker has reset once: a first reset may build a scene, and one worker may build it for all."""


class Patience:
    """Timeout for answers: `longest_s`. With `built_s`, the seconds that building the simulators took, it is learned from earlier answers:
    ten times the longest (before the first: of `built_s`), at least 20 s (60 s until each of `num_workers` has answered)."""

    def __init__(self, longest_s: float, num_workers: int = 0, built_s: float | None = None) -> None:
        self._most_s, self._num_workers, self._built_s = longest_s, num_workers, built_s
        self._seen, self._longest_s = 0, 0.0

    def limit_s(self) -> float:
        """Seconds after a request when its answer is late."""
        if self._built_s is None:
            return self._most_s
        floor = _FLOOR_S if self._seen >= self._num_workers else _FIRST_FLOOR_S
        return min(self._most_s, max(floor, _FACTOR * (self._longest_s if self._seen else self._built_s)))

    def took(self, seconds: float) -> None:
        """Record that an answer took `seconds`."""
        self._seen, self._longest_s = self._seen + 1, max(self._longest_s, seconds)
