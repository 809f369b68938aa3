"""A token backend in a separate process on this machine, ``python -m embodied_rl.roles.token_process SOCKET``, and handles of such hosts.

```
 worker's process (handle)                              host's process
 submit, abort ── socket (JSON, plain arrays) ────────▶ between two decode steps
 completions   ◀───────────────────────────────────────┘ as they end
 load(version) ═══ shared memory, two buffers ═════════▶ between two decode steps
```
"""

from __future__ import annotations

import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from embodied_rl.config import TrainConfig
from embodied_rl.distributed.channel import can_be_read
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, Failure, GenerationRequest, TokenBackend, check_new_ids, refuse_structures
from embodied_rl.learning.devices import resolve_device, set_compute_threads
from embodied_rl.methods.language_player import ModelFiles, blank_backend, write_model_files
from embodied_rl.roles.role_process import RoleProcess, run_role
from embodied_rl.roles.wire import RoleLink, register

for _kind in (GenerationRequest, Completion, Failure):
    register(_kind)

_MOMENT_S = 0.05
"""Seconds that a host samples before it answers a poll."""
_NAP_S = 0.002


class TokensElsewhere(TokenBackend):
    """Token backends in other processes, whose methods `_ask` calls by name."""

    version: int = 0
    """Version of the weights that sample now."""
    can_constrain: bool = False
    """See `TokenBackend`; known when the other process has started."""

    def restore_memory(self) -> None:
        self._ask("restore_memory")

    def forget(self) -> None:
        self._ask("forget")

    @abstractmethod
    def _ask(self, what: str, **arguments: object) -> Any:
        """Call a method and wait for its answer."""

    def _check(self, requests: Sequence[GenerationRequest], in_flight: set[int]) -> None:
        """Raise UserError for requests that cannot be submitted; add the others to those in flight."""
        check_new_ids(requests, in_flight)
        if not self.can_constrain:
            refuse_structures(requests)
        in_flight.update(request.request_id for request in requests)


class Call(Protocol):
    """A call of a method elsewhere that may be under way."""

    def is_over(self, timeout_s: float) -> bool:
        """Whether its answer has come; waits at most so long for it."""

    def value(self) -> Any:
        """Wait for the answer. Raises RoleLost, and any exception of the method."""


class HostTokens(TokensElsewhere):
    """A token backend in another process, or in an actor, which samples while its caller does other things.

    All requests since the last poll are sent together: those that came later would join the others at a step that the clock decides.
    """

    can_free_memory: bool = False
    """See `TokenBackend`, also for the attribute below; known when the other process has started."""
    device: str = "cpu"

    def __init__(self, begin: Callable[..., Call]) -> None:
        """`begin(what, **arguments)`: begins a call of the backend's method `what`; calls are executed in their order."""
        self._begin = begin
        self._outbox: list[GenerationRequest] = []
        self._in_flight: set[int] = set()
        self._sent: list[Call] = []
        """Submissions whose answers have not been read."""
        self._polled: Call | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `TokenBackend.submit`; a later call raises the error of an invalid request."""
        self._check(requests, self._in_flight)
        self._outbox += requests

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        """See `TokenBackend.poll`; with 0 it waits a moment if there is no `fileno`, since the caller could only poll again."""
        deadline = None if timeout_s is None else time.monotonic() + max(timeout_s, _NAP_S if self.fileno() < 0 else 0.0)
        ready: list[Completion] = []
        self._send()
        while len(ready) < max(min_ready, 1) and self._in_flight:
            polled = self._sample(max(min_ready, 1) - len(ready))
            if deadline is not None and not polled.is_over(max(deadline - time.monotonic(), 0.0)):
                break
            self._polled = None  # first: a poll that failed has no other answer
            found: list[Completion] = polled.value()
            self._check_sent()
            self._in_flight.difference_update(completion.request_id for completion in found)
            ready += found
        self.flush()
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        if wanted := [number for number in request_ids if number in self._in_flight]:
            self._ask("abort", request_ids=wanted)

    def flush(self) -> None:
        """Send submitted requests, many in one message, and let the host sample."""
        self._send()
        if self._in_flight:
            self._sample(1)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, what: str, **arguments: object) -> Any:
        self._send()
        value = self._begin(what, **arguments).value()
        self._check_sent()
        return value

    def _send(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests:
            self._sent.append(self._begin("submit", requests=requests))

    def _check_sent(self) -> None:
        """Raise the error of a submission, after the answer to a later call."""
        sent, self._sent = self._sent, []
        for call in sent:
            call.value()

    def _sample(self, min_ready: int) -> Call:
        self._polled = self._polled or self._begin("poll", min_ready=min_ready, timeout_s=_MOMENT_S)
        return self._polled


class TokenProcess(HostTokens):
    """Handle of the process; several handles can `load` the weights that one of them `put`."""

    def __init__(self, config: TrainConfig, files: ModelFiles, *, gpu: str | None = None, num_threads: int = 1) -> None:
        """Start the process; `started` waits until it accepts requests.

        Args:
            files: files of the model; its weights are random until some are loaded.
            gpu: the only GPU that it sees; None: the same GPUs as this process.
            num_threads: CPU threads of its computation.
        """
        begin = {"config": config.to_dict(), "files": dict(files), "num_threads": num_threads}
        self._role = RoleProcess("embodied_rl.roles.token_process", "A process that generates", gpu=gpu, **begin)
        super().__init__(self._role.begin)
        self.process, self.put = self._role.process, self._role.put
        self._loading: list[Call] = []

    def started(self) -> None:
        """Wait until the backend is ready. Raises UserError for a model that it cannot run, and RoleLost."""
        self.can_constrain = self._role.call("can_constrain")

    def fileno(self) -> int:
        """File descriptor of the socket for `select`: readable when a message has come."""
        return self._role.socket.fileno()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        self.load(version, self.put(version, dict(tensors))[0])
        self.loaded(version)

    def load(self, version: int, path: str) -> None:
        """Start loading the weights published at `path`; sampling goes on meanwhile. `loaded` waits for the end."""
        self._send()
        self._loading.append(self._begin("load", version=version, tensors=path))

    def loaded(self, version: int) -> None:
        """Wait until the weights from `load` sample."""
        self._loading.pop().value()
        self.version = version

    def release_memory(self) -> int:
        """Free the cache if the backend can; nothing may be in flight. Returns 0: the bytes are the other process's."""
        self._ask("release_memory")
        return 0

    def close(self) -> None:
        self._role.close()


class _Host:
    """The backend in its process. Implements `Role`; it samples between requests, too."""

    def __init__(self, link: RoleLink, config: dict[str, Any], files: ModelFiles, num_threads: int) -> None:
        set_compute_threads(num_threads, num_threads)
        own = TrainConfig.from_dict(config)
        # The backend reads all files when it is built, so a killed process leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="embodied_rl_host_") as name:
            write_model_files(files, Path(name))
            self.backend = blank_backend(own, Path(name), resolve_device(own.hybrid.device))
        self._link = link
        self._in_flight: set[int] = set()
        self._ready: list[Completion] = []
        self.asked: dict[str, Callable[..., Any]] = {
            "can_constrain": lambda: self.backend.can_constrain,
            "submit": self._submit,
            "poll": self._poll,
            "abort": self.backend.abort,
            "load": self.backend.load_weights,
            "release_memory": self.backend.release_memory,
            "restore_memory": self.backend.restore_memory,
            "forget": self.backend.forget,
        }
        self.works_after = self.asked.keys()

    def pump(self) -> bool:
        if not self._in_flight:
            return False
        found = self.backend.poll(1, 0.0)
        self._in_flight.difference_update(completion.request_id for completion in found)
        self._ready += found
        return True

    def close(self) -> None:
        self.backend.close()

    def _poll(self, min_ready: int, timeout_s: float) -> list[Completion]:
        """See `TokenBackend.poll`; the next request ends it, too."""
        until, socket = time.monotonic() + timeout_s, self._link.socket.fileno()
        while len(self._ready) < min_ready and (left_s := until - time.monotonic()) > 0 and not self._link.has_message():
            if not self.pump():
                can_be_read(socket, timeout_s=left_s)
        ready, self._ready = self._ready, []
        return ready

    def _submit(self, requests: list[GenerationRequest]) -> None:
        self._in_flight.update(request.request_id for request in requests)
        self.backend.submit([request for request in requests if request.structure is None])
        for request in requests:
            if request.structure is not None:
                self._submit_structured(request)

    def _submit_structured(self, request: GenerationRequest) -> None:
        """Submit a request with a structure from an agent program's client; an invalid one must not end the run."""
        try:
            self.backend.submit([request])
        except UserError as error:
            self._in_flight.discard(request.request_id)
            self._ready.append(Completion.failed(request.request_id, Failure("rejected", str(error))))


if __name__ == "__main__":
    run_role(int(sys.argv[1]), _Host)
