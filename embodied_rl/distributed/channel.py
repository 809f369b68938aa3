"""The one form of messages between processes of a run: JSON and a block of raw bytes, or tensors, on a socket. Nothing is pickled.

What is frequent has its own ways: steps go through shared memory, weights through shared memory or Ray's object store.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_HEADER = struct.Struct("<8sQIQ")
"""Key of the channel, number of the request, bytes of the text, bytes of the payload."""
_MOST_TEXT = 1 << 28
_MOST_PAYLOAD = 1 << 36
_JOINED = 1 << 16
"""A payload up to so many bytes is sent with its header in one call."""
_SLOWEST = 1 << 20
"""Bytes a second: a message that comes more slowly is none."""


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class ChannelGarbled(ValueError):
    """What came is no message of the other end's: nothing that comes later can be trusted either."""


class Messages:
    """A connected socket of numbered messages.

    Every message carries a key, which the end that begins draws and the first message brings, and a number that the other end expects. So
    foreign bytes, and messages out of turn, are detected at once.
    """

    stall_s: float = 10.0
    """A message that has begun and does not go on for so long was cut off."""

    def __init__(self, connection: socket.socket, *, begins: bool) -> None:
        """`begins`: this end sends the first message."""
        self.socket = connection
        self._key = secrets.token_bytes(8) if begins else None

    def has_message(self) -> bool:
        """Whether something, or the news of the other end's death, can be read without waiting."""
        return can_be_read(self.socket.fileno(), timeout_s=0.0)

    def close(self) -> None:
        self.socket.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _send(
        self, number: int, message: Mapping[str, Any], payload: bytes, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> None:
        text = json.dumps(message).encode()
        assert self._key is not None, "the first message brings the key"
        data, rest = _HEADER.pack(self._key, number, len(text), len(payload)) + text, payload
        if len(payload) <= _JOINED:
            data, rest = data + payload, b""
        self.socket.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self.socket, [data[: _HEADER.size]], fds) if fds else 0
            self.socket.sendall(memoryview(data)[sent:])
            if rest:
                self.socket.sendall(rest)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _recv(self, number: int, timeout_s: float | None) -> tuple[dict[str, Any], bytes, list[int]]:
        """A whole message of this number and the descriptors that came with it; none stay open when it raises."""
        fds: list[int] = []
        try:
            header = self._begin(timeout_s, fds)
            key, got, text_size, payload_size = _HEADER.unpack(header + self._exactly(_HEADER.size - len(header)))
            if key != (self._key or key) or text_size > _MOST_TEXT or payload_size > _MOST_PAYLOAD:
                raise ChannelGarbled(f"a message of {text_size:,} + {payload_size:,} bytes that is none of ours")
            if got != number:
                raise ChannelGarbled(f"a message of number {got} instead of {number}")
            message = _parsed(self._exactly(text_size))
            payload = self._exactly(payload_size)
        except BaseException:
            _close_all(fds)
            raise
        self._key = key
        return message, payload, fds

    def _begin(self, timeout_s: float | None, fds: list[int]) -> bytes:
        """The first bytes of a header, all of it as a rule. 1 ms at least: what has already arrived is taken even when the time is up."""
        self.socket.settimeout(None if timeout_s is None else max(timeout_s, 0.001))
        try:
            data, came, _, _ = socket.recv_fds(self.socket, _HEADER.size, 8)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        fds += came
        if not data:
            raise ChannelClosed("the other end closed the connection")
        if self._key is not None and not data.startswith(self._key[: len(data)]):
            raise ChannelGarbled(f"bytes that are no message: {data[:16].hex(' ')} …")
        return data

    def _exactly(self, size: int) -> bytes:
        """The rest of a message that has begun."""
        parts, missing = [], size
        until = time.monotonic() + self.stall_s + size / _SLOWEST
        while missing:
            self.socket.settimeout(min(self.stall_s, max(until - time.monotonic(), 0.001)))
            try:
                part = self.socket.recv(min(missing, 1 << 20))
            except TimeoutError:
                raise ChannelGarbled(f"a message was cut off: {missing} of {size} bytes did not come in time") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("the other end closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


class Channel(Messages):
    """Requests one way, each with one answer; both carry the request's number."""

    def __init__(self, connection: socket.socket, *, asks: bool = False) -> None:
        """`asks`: this end sends the requests."""
        super().__init__(connection, begins=asks)
        self.number = 0
        """Of the last request."""

    def ask(self, message: dict[str, Any], payload: bytes = b"", *, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send the next request, and file descriptors along with it. Raises ChannelClosed as `answer`."""
        self.number += 1
        self._send(self.number, message, payload, fds, timeout_s)

    def answer(self, message: dict[str, Any], payload: bytes = b"", timeout_s: float | None = None) -> None:
        """Answer the last request. Raises ChannelClosed, also when the other end does not take the message in time."""
        self._send(self.number, message, payload, (), timeout_s)

    def next_answer(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The answer to the last request.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelGarbled: something else came, or a message was cut off.
            TimeoutError: nothing came in time.
        """
        message, payload, fds = self._recv(self.number, timeout_s)
        _close_all(fds)
        return message, payload

    def next_request(self, *, num_fds: int = 0) -> tuple[dict[str, Any], bytes, list[int]]:
        """Wait for the next request; (message, payload, as many descriptors as were to come). Raises ChannelClosed or ChannelGarbled."""
        message, payload, fds = self._recv(self.number + 1, None)
        self.number += 1
        if len(fds) != num_fds:
            _close_all(fds)
            raise ChannelGarbled(f"{len(fds)} file descriptors came instead of {num_fds}")
        return message, payload, fds


def can_be_read(*descriptors: int, timeout_s: float | None) -> bool:
    """Whether one can within the time; None waits. (`select.select` knows no descriptors above 1023.)"""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * max(timeout_s, 0.0)))


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChannelGarbled(f"a message that is no JSON ({type(error).__name__}): {text[:40]!r}") from None
    if not isinstance(message, dict):
        raise ChannelGarbled(f"a message that is a {type(message).__name__} instead of an object: {text[:40]!r}")
    return message


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- Messages with arrays -------------------------------------------------------------------------------------------


class Link(Messages):
    """A connected socket that carries JSON messages with named tensors, both ways at any time; each direction counts its own."""

    stall_s = 120.0  # a process that computes on all cores may let a large message wait

    def __init__(self, connection: socket.socket, *, begins: bool = False) -> None:
        """`begins`: this end sends the first message."""
        super().__init__(connection, begins=begins)
        self._num_sent = self._num_received = 0

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send; tensors are copied to the host. Raises ChannelClosed."""
        from safetensors.torch import save  # not before: simulators' processes hold no torch

        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in (tensors or {}).items()}
        self._num_sent += 1
        self._send(self._num_sent, message, save(plain) if plain else b"")

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The next message and its tensors, which lie on the host.
        Raises ChannelClosed: the other end is gone, or what came is none of its messages; TimeoutError: nothing came in time.
        """
        from safetensors.torch import load

        try:
            message, payload, _ = self._recv(self._num_received + 1, timeout_s)
        except ChannelGarbled as error:
            raise ChannelClosed(str(error)) from error
        self._num_received += 1
        return message, load(payload) if payload else {}

    def close(self) -> None:
        """May be called while another thread waits for a message: that thread and the other end get ChannelClosed at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        super().close()
