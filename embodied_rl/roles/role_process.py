"""A role's own process on this machine, as its handle sees it: ``python -m MODULE SOCKET``, asked over the socket in JSON and arrays."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import embodied_rl
from embodied_rl.learning.link import Link, LinkClosed
from embodied_rl.roles.failures import RoleLost, decode_error
from embodied_rl.roles.wire import pack
from embodied_rl.stopping import waiting

_END_S = 20.0


class RoleProcess:
    """Started at once; ended by `close`, or with this object."""

    def __init__(self, module: str, who: str, *, gpu: str | None = None) -> None:
        """
        Args:
            module: what it runs; it gets the number of its end of the socket.
            who: begins the sentence of how it ended.
            gpu: the only one that it sees; None: as this process does.
        """
        self.socket, theirs = socket.socketpair()
        environment = os.environ.copy()
        path = [str(Path(embodied_rl.__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        # A separate process group: Ctrl-C reaches only the trainer, and the role ends with it.
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment, process_group=0)
        theirs.close()
        self._who, self._link = who, Link(self.socket)
        self._finalizer = weakref.finalize(self, _end, self._link, self.process)

    def tell(self, what: str, **arguments: Any) -> None:
        """Send a request. Raises RoleLost."""
        message, tensors = pack(arguments)
        try:
            self._link.send({"do": what, "with": message}, tensors)
        except LinkClosed as error:
            raise self._lost() from error

    def recv(self) -> tuple[Mapping[str, Any], Any]:
        """The next message and its arrays. Raises RoleLost, and what went wrong on the other side."""
        try:
            with waiting:
                message, tensors = self._link.recv()
        except LinkClosed as error:
            raise self._lost() from error
        if "error" in message:
            raise decode_error(message["error"])
        return message, tensors

    def close(self) -> None:
        """End the process. May be called twice."""
        self._finalizer()

    def _lost(self) -> RoleLost:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes a little before the process is gone
            self.process.wait(_END_S)
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return RoleLost(f"{self._who} {how}.")


def _end(link: Link, process: subprocess.Popen[bytes]) -> None:
    link.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
