"""Handle of a role's process on this machine: ``python -m MODULE SOCKET``, with requests over the socket in JSON and arrays."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from embodied_rl.distributed.channel import ChannelClosed, Link
from embodied_rl.distributed.processes import end_process, start_module
from embodied_rl.hybrid.shared_weights import SharedWeightsPublisher
from embodied_rl.roles.wire import RoleLost, decode_error, pack
from embodied_rl.stopping import waiting

_END_S = 20.0


class RoleProcess:
    """Process of a role, started at once; ends with `close` or with this object."""

    def __init__(self, module: str, who: str, *, gpu: str | None = None) -> None:
        """
        Args:
            module: module to run; its argument is the number of its end of the socket.
            who: subject of the sentence that reports its end.
            gpu: the only GPU that it sees; None: the same GPUs as this process.
        """
        self.socket, theirs = socket.socketpair()
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with theirs:
            self.process = start_module(module, theirs.fileno(), pass_fds=(theirs.fileno(),), environment=environment)
        self._who, self._link = who, Link(self.socket, begins=True)
        self._finalizer = weakref.finalize(self, _end, self._link, self.process)
        self._weights: SharedWeightsPublisher | None = None
        self._names: set[str] = set()

    def tell(self, what: str, **arguments: object) -> None:
        """Send a request. Raises RoleLost."""
        message, tensors = pack(arguments)
        try:
            self._link.send({"do": what, "with": message}, tensors)
        except ChannelClosed as error:
            raise self._lost() from error

    def recv(self) -> tuple[Mapping[str, Any], Any]:
        """Receive the next message and its arrays. Raises RoleLost, and errors of the other side."""
        try:
            with waiting:
                message, tensors = self._link.recv()
        except ChannelClosed as error:
            raise self._lost() from error
        if "error" in message:
            raise decode_error(message["error"])
        return message, tensors

    def put(self, version: int, tensors: Mapping[str, Tensor], *, only_changed: bool = False) -> tuple[str, int]:
        """Write weights into shared memory; return (path for `AnnouncedWeights`, number of bytes written).
        Raises RoleLost: those who read them do not take them."""
        if self._weights is None or self._names != tensors.keys():  # after the whole policy, only its adapter
            # Create the new publisher before closing the old one: readers know a publisher by its path, so the paths must differ.
            publisher = SharedWeightsPublisher(tensors)
            self._end_publisher()
            self._weights, self._names = publisher, set(tensors)
        try:
            num_bytes = self._weights.publish(version, tensors.items(), only_changed=only_changed)
        except TimeoutError as error:
            raise RoleLost(f"{self._who} does not take weights: {error}") from error
        return self._weights.path, num_bytes

    def close(self) -> None:
        """End the process. May be called twice."""
        self._finalizer()
        self._end_publisher()

    def _end_publisher(self) -> None:
        if self._weights is not None:
            self._weights.close()

    def _lost(self) -> RoleLost:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes a little before the process ends
            self.process.wait(_END_S)
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return RoleLost(f"{self._who} {how}.")


def _end(link: Link, process: subprocess.Popen[bytes]) -> None:
    link.close()
    end_process(process, _END_S)
