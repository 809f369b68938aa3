"""A socket between manager and worker for what is rare or of varying size: set-up, resets, pictures, tracebacks."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct("<II")


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """JSON messages, each with an optional block of raw bytes; nothing is pickled."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: dict[str, Any], payload: bytes = b"") -> None:
        """Raises ChannelClosed."""
        text = json.dumps(message).encode()
        try:
            self.socket.sendall(_HEADER.pack(len(text), len(payload)) + text + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Raises ChannelClosed when the other end is gone and TimeoutError when nothing whole came in time."""
        self.socket.settimeout(timeout_s)
        text_size, payload_size = _HEADER.unpack(self._exactly(_HEADER.size))
        text = self._exactly(text_size)
        return json.loads(text), self._exactly(payload_size)

    def send_fd(self, fd: int) -> None:
        socket.send_fds(self.socket, [b"f"], [fd])

    def recv_fd(self) -> int:
        self.socket.settimeout(None)
        _, fds, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not fds:
            raise ChannelClosed("no descriptor came")
        return fds[0]

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
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
