"""A socket between manager and worker for what is rare or of varying size: set-up, resets, pictures, tracebacks."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("<II")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """JSON messages, each with an optional block of raw bytes; nothing is pickled."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: dict[str, Any], payload: bytes = b"", timeout_s: float | None = None) -> None:
        """Raises ChannelClosed, also when the other end does not take the message in time."""
        text = json.dumps(message).encode()
        self.socket.settimeout(timeout_s)
        try:
            self.socket.sendall(_HEADER.pack(len(text), len(payload)) + text + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Raises ChannelClosed when the other end is gone and TimeoutError when nothing whole came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        text_size, payload_size = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        text = self._exactly(text_size, deadline)
        return json.loads(text), self._exactly(payload_size, deadline)

    def has_message(self) -> bool:
        """Whether something, or the news of the other end's death, can be read without waiting."""
        return bool(select.select([self.socket], [], [], 0)[0])

    def send_fd(self, fd: int) -> None:
        """Raises ChannelClosed as `send`."""
        try:
            socket.send_fds(self.socket, [b"f"], [fd])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def recv_fd(self) -> int:
        self.socket.settimeout(None)
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not fds:
            raise ChannelClosed("no descriptor came")
        return fds[0]

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        parts, missing = [], size
        while missing:
            # 1 ms at least: what has already arrived is taken even when the time is up.
            self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            try:
                part = self.socket.recv(min(missing, 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other end closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
