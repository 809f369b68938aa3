"""Messages between the process that runs the training loop and its train workers: JSON and plain arrays, nothing is pickled."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

_HEADER = struct.Struct("<QQ")


class LinkClosed(ConnectionError):
    """The other process is gone."""


class Link:
    """A connected socket that carries a JSON message with named tensors."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send; tensors are copied to the host. Raises LinkClosed."""
        text = json.dumps(message).encode()
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in (tensors or {}).items()}
        payload = save(plain) if plain else b""
        try:
            self._socket.sendall(_HEADER.pack(len(text), len(payload)) + text)
            self._socket.sendall(payload)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next message and its tensors, which lie on the host.

        Raises:
            LinkClosed: the other end is gone.
            TimeoutError: nothing came in time.
        """
        self._socket.settimeout(timeout_s)
        text_size, payload_size = _HEADER.unpack(self._exactly(_HEADER.size))
        message = json.loads(self._exactly(text_size))
        return message, load(self._exactly(payload_size)) if payload_size else {}

    def close(self) -> None:
        """May be called while another thread waits for a message: that thread and the other end get LinkClosed at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if count == 0:
                raise LinkClosed("the other end closed the connection")
            done += count
        return bytes(buffer)
