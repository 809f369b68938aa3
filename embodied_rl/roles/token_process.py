"""A token backend in a separate process on this machine, ``python -m embodied_rl.roles.token_process SOCKET``, and its handle.

```
 worker's process (handle)                              host's process
 submit, abort ── socket (JSON, plain arrays) ────────▶ between two decode steps
 completions   ◀───────────────────────────────────────┘ as they end
 load(version) ═══ shared memory, two buffers ═════════▶ between two decode steps
```
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.distributed.channel import ChannelClosed, Link, can_be_read
from embodied_rl.distributed.processes import started
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import Completion, Failure, GenerationRequest, TokenBackend, check_new_ids, refuse_structures
from embodied_rl.hybrid.shared_weights import AnnouncedWeights
from embodied_rl.learning.devices import compute_threads, resolve_device
from embodied_rl.methods.language_player import ModelFiles, blank_backend, write_model_files
from embodied_rl.roles.role_process import RoleProcess
from embodied_rl.roles.wire import encode_error, pack, register, unpack

for _kind in (GenerationRequest, Completion, Failure):
    register(_kind)

_NAP_S = 0.001


class TokensElsewhere(TokenBackend):
    """Token backends in other processes, whose methods `_ask` calls by name."""

    version: int = 0
    """Version of the weights that sample now."""
    can_constrain: bool = False
    """See `TokenBackend`; known when the other process has started."""

    def pause(self) -> None:
        self._ask("pause")

    def resume(self) -> None:
        self._ask("resume")

    def restore_memory(self) -> None:
        self._ask("restore_memory")

    def forget(self) -> None:
        self._ask("forget")

    @abstractmethod
    def _ask(self, what: str, *arguments: object) -> Any:
        """Call a method and wait for its answer."""

    def _check(self, requests: Sequence[GenerationRequest], in_flight: set[int]) -> None:
        """Raise UserError for requests that cannot be submitted; add the others to those in flight."""
        check_new_ids(requests, in_flight)
        if not self.can_constrain:
            refuse_structures(requests)
        in_flight.update(request.request_id for request in requests)


class TokenProcess(TokensElsewhere):
    """Handle of the process; several handles can `load` the weights that one of them `put`."""

    def __init__(self, config: TrainConfig, files: ModelFiles, *, gpu: str | None = None, num_threads: int = 1) -> None:
        """Start the process; `started` waits until it accepts requests.

        Args:
            files: files of the model; its weights are random until some are loaded.
            gpu: the only GPU that it sees; None: the same GPUs as this process.
            num_threads: CPU threads of its computation.
        """
        self._role = RoleProcess("embodied_rl.roles.token_process", "A process that generates", gpu=gpu)
        self.process, self.put = self._role.process, self._role.put
        self._outbox: list[GenerationRequest] = []
        self._in_flight: set[int] = set()
        self._ready: list[Completion] = []
        self._answered = 0
        self._asked = 0
        self._role.tell("begin", config=config.to_dict(), files=dict(files), num_threads=num_threads)
        self._asked += 1

    def started(self) -> None:
        """Wait until the backend is ready. Raises UserError for a model that it cannot run, and RoleLost."""
        self._until_answered()

    def fileno(self) -> int:
        """File descriptor of the socket for `select`: readable when a message has come."""
        return self._role.socket.fileno()

    # ---- TokenBackend -----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `TokenBackend.submit`. A later call raises the error of an invalid request; a structure that cannot be compiled ends its
        request as ``failed`` (rejected)."""
        self._check(requests, self._in_flight)
        self._outbox += requests

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        self.flush()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._ready) < max(min_ready, 1) and self._in_flight:
            wait_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not can_be_read(self.fileno(), timeout_s=wait_s):
                break
            self._read()
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        wanted = [number for number in request_ids if number in self._in_flight]
        if wanted:
            self.flush()
            self._role.tell("abort", ids=wanted)

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        self.load(version, self.put(version, dict(tensors))[0])
        self.loaded(version)

    def load(self, version: int, path: str) -> None:
        """Start loading the weights published at `path`; sampling goes on meanwhile. `loaded` waits for the end."""
        self.flush()
        self._role.tell("load", version=version, path=path)
        self._asked += 1

    def loaded(self, version: int) -> None:
        """Wait until the weights from `load` sample."""
        self._until_answered()
        self.version = version

    def release_memory(self) -> int:
        """Free the cache if the backend can; nothing may be in flight. Returns 0: the bytes are the other process's."""
        self._ask("release_memory")
        return 0

    def close(self) -> None:
        self._role.close()

    def flush(self) -> None:
        """Send submitted requests, many in one message."""
        if self._outbox:
            requests, self._outbox = self._outbox, []
            self._role.tell("submit", requests=requests)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, what: str, *arguments: object) -> None:
        self.flush()
        self._role.tell(what)
        self._asked += 1
        self._until_answered()

    def _until_answered(self) -> None:
        while self._answered < self._asked:
            self._read()

    def _read(self) -> None:
        message, tensors = self._role.recv()
        if "completions" in message:
            completions: list[Completion] = unpack(message["completions"], tensors)
            self._ready += completions
            self._in_flight.difference_update(completion.request_id for completion in completions)
        else:
            self._answered += 1
            self.can_constrain = message.get("can_constrain", self.can_constrain)


class _Host:
    """The backend and its connection."""

    def __init__(self, link: Link, descriptor: int, backend: TokenBackend) -> None:
        self._link, self._descriptor, self.backend = link, descriptor, backend
        self._in_flight: set[int] = set()
        self._stands = False
        self._weights = AnnouncedWeights()
        self._asked: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "load": self._load,
            **{name: functools.partial(self._do, name) for name in ("pause", "resume", "release_memory", "restore_memory", "forget")},
        }
        """Requests that may be made, by name."""

    def serve(self) -> None:
        """Sample, and serve requests between two steps, until the other end is gone (ChannelClosed)."""
        while True:
            wait_s = None if not self._in_flight else _NAP_S if self._stands else 0.0
            if can_be_read(self._descriptor, timeout_s=wait_s):
                message, tensors = self._link.recv()
                self._asked[message["do"]](**unpack(message["with"], tensors))
            elif not self._stands:
                self._send(self.backend.poll(1, 0.0))

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
            self._send([Completion.failed(request.request_id, Failure("rejected", str(error)))])

    def _abort(self, ids: list[int]) -> None:
        self.backend.abort(ids)
        if not self._stands:
            self._send(self.backend.poll(1, 0.0))

    def _do(self, what: str) -> None:
        methodcaller(what)(self.backend)
        self._stands = what == "pause" or (self._stands and what != "resume")
        self._done()

    def _load(self, version: int, path: str) -> None:
        with self._weights.hold(version, path) as held:
            self.backend.load_weights(version, held.tensors.items())
        self._done()

    def _done(self) -> None:
        self._link.send({"done": True})

    def _send(self, completions: list[Completion]) -> None:
        if completions:
            self._in_flight.difference_update(completion.request_id for completion in completions)
            message, tensors = pack(completions)
            self._link.send({"completions": message}, tensors)


def main(descriptor: int) -> None:
    """Serve requests until the worker's process closes the socket."""
    link = Link(socket.socket(fileno=descriptor))
    message, tensors = link.recv()
    begin = unpack(message["with"], tensors)
    config = TrainConfig.from_dict(begin["config"])
    backend: TokenBackend | None = None
    try:
        with compute_threads(begin["num_threads"]):
            # The backend reads all files when it is built, so a killed process leaves nothing behind.
            with tempfile.TemporaryDirectory(prefix="embodied_rl_host_") as name:
                write_model_files(begin["files"], Path(name))
                backend = blank_backend(config, Path(name), resolve_device(config.hybrid.device))
            started()
            link.send({"done": True, "can_constrain": backend.can_constrain})
            _Host(link, descriptor, backend).serve()
    except ChannelClosed:
        pass
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            link.send({"error": encode_error(error)})
    finally:
        if backend is not None:
            backend.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
