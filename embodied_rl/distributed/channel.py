"""Messages between processes of a run: JSON with a block of raw bytes, or with tensors, on a socket. Nothing is pickled.

Frequent data has its own channels: steps use shared memory, weights use shared memory or Ray's object store.
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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_HEADER = struct.Struct("<8sQIQ")
"""Key of the channel, request number, text bytes, payload bytes."""
_MOST_TEXT = 1 << 28
_MOST_PAYLOAD = 1 << 36
_JOINED = 1 << 16
"""Largest payload in bytes that is sent with its header in one call."""
_SLOWEST = 1 << 20
"""Lowest speed of a valid message, in bytes per second."""


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class ChannelGarbled(ValueError):
    """The received bytes are no message of the other end: nothing after them can be trusted either."""


class Messages:
    """A connected socket of numbered messages.

    Every message carries a key, which the end that begins draws and sends first, and the number that the other end expects. So foreign
    bytes and messages out of turn are detected at once.
    """

    stall_s: float = 10.0
    """Seconds without progress after which a message that has begun counts as cut off."""

    def __init__(self, connection: socket.socket, *, begins: bool) -> None:
        """`begins`: this end sends the first message."""
        self.socket = connection
        self._key = secrets.token_bytes(8) if begins else None

    def has_message(self) -> bool:
        """Whether a message, or the news of the other end's death, can be read without waiting."""
        return can_be_read(self.socket.fileno(), timeout_s=0.0)

    def close(self) -> None:
        self.socket.close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _send(
        self,
        number: int,
        message: Mapping[str, Any],
        payload: bytes,
        fds: Sequence[int] = (),
        timeout_s: float | None = None,
        read: Callable[[], object] | None = None,
    ) -> None:
        text = json.dumps(message).encode()
        assert self._key is not None, "the first message brings the key"
        data, rest = _HEADER.pack(self._key, number, len(text), len(payload)) + text, payload
        if len(payload) <= _JOINED:
            data, rest = data + payload, b""
        self.socket.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self.socket, [data[: _HEADER.size]], fds) if fds else 0
            self._send_all(memoryview(data)[sent:], read)
            if rest:  # to send nothing would fail if the other end has answered already and ended
                self._send_all(memoryview(rest), read)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _send_all(self, data: memoryview, read: Callable[[], object] | None) -> None:
        if read is None:
            self.socket.sendall(data)
            return
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | select.POLLOUT)
        while data:
            if poll.poll()[0][1] == select.POLLIN:
                read()
            else:
                data = data[self.socket.send(data, socket.MSG_DONTWAIT) :]

    def _recv(self, number: int, timeout_s: float | None) -> tuple[dict[str, Any], bytes, list[int]]:
        """Receive a whole message of this number and its descriptors; none stay open when it raises."""
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
        """Receive the first bytes of a header, usually all. Waits at least 1 ms: data that has arrived is read even if the time is up."""
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
            raise ChannelGarbled(f"bytes that are not a message: {data[:16].hex(' ')} …")
        return data

    def _exactly(self, size: int) -> bytes:
        """Receive the rest of a message that has begun."""
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
    """Requests in one direction, each with one answer; both carry the request's number."""

    def __init__(self, connection: socket.socket, *, asks: bool = False) -> None:
        """`asks`: this end sends the requests."""
        super().__init__(connection, begins=asks)
        self.number = 0
        """Number of the last request."""

    def ask(self, message: dict[str, Any], payload: bytes = b"", *, fds: Sequence[int] = (), timeout_s: float | None = None) -> None:
        """Send the next request, with file descriptors. Raises ChannelClosed as `answer`."""
        self.number += 1
        self._send(self.number, message, payload, fds, timeout_s)

    def answer(self, message: dict[str, Any], payload: bytes = b"", timeout_s: float | None = None) -> None:
        """Answer the last request. Raises ChannelClosed, also if the other end does not read the message in time."""
        self._send(self.number, message, payload, (), timeout_s)

    def next_answer(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Wait for the answer to the last request.

        Raises:
            ChannelClosed: the other end is gone.
            ChannelGarbled: the data is no answer, or a message was cut off.
            TimeoutError: nothing came in time.
        """
        message, payload, fds = self._recv(self.number, timeout_s)
        _close_all(fds)
        return message, payload

    def next_request(self, *, num_fds: int = 0) -> tuple[dict[str, Any], bytes, list[int]]:
        """Wait for the next request; return (message, payload, exactly `num_fds` descriptors). Raises ChannelClosed or ChannelGarbled."""
        message, payload, fds = self._recv(self.number + 1, None)
        self.number += 1
        if len(fds) != num_fds:
            _close_all(fds)
            raise ChannelGarbled(f"{len(fds)} file descriptors came instead of {num_fds}")
        return message, payload, fds


def can_be_read(*descriptors: int, timeout_s: float | None) -> bool:
    """Whether one becomes readable in time; None waits for ever. (`select.select` accepts no descriptors above 1023.)"""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * max(timeout_s, 0.0)))


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChannelGarbled(f"a message that is not JSON ({type(error).__name__}): {text[:40]!r}") from None
    if not isinstance(message, dict):
        raise ChannelGarbled(f"a message that is a {type(message).__name__} instead of an object: {text[:40]!r}")
    return message


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- Messages with arrays -------------------------------------------------------------------------------------------


class Link(Messages):
    """A connected socket for JSON messages with named tensors, in both directions at any time; each direction has its own count."""

    stall_s = 120.0  # a process that computes on all cores may delay a large message

    def __init__(self, connection: socket.socket, *, begins: bool = False) -> None:
        """`begins`: this end sends the first message."""
        super().__init__(connection, begins=begins)
        self._num_sent = self._num_received = 0

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message; tensors are copied to the host. Raises ChannelClosed."""
        from safetensors.torch import save  # not earlier: simulator processes load no torch

        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in (tensors or {}).items()}
        self.send_bytes(message, save(plain) if plain else b"")

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Receive the next message and its tensors, on the host.
        Raises ChannelClosed: the other end is gone, or the data is not its message; TimeoutError: nothing came in time.
        """
        from safetensors.torch import load

        message, payload = self.recv_bytes(timeout_s)
        return message, load(payload) if payload else {}

    def send_bytes(self, message: Mapping[str, Any], payload: bytes, read: Callable[[], object] | None = None) -> None:
        """`send` with any bytes beside the message. `read` receives a message while this one has to wait: two ends that only send would
        wait for each other for ever."""
        self._num_sent += 1
        self._send(self._num_sent, message, payload, read=read)

    def recv_bytes(self, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """`recv` of what `send_bytes` sent."""
        try:
            message, payload, _ = self._recv(self._num_received + 1, timeout_s)
        except ChannelGarbled as error:
            raise ChannelClosed(str(error)) from error
        self._num_received += 1
        return message, payload

    def close(self) -> None:
        """Close the socket, even while another thread waits for a message: it and the other end get ChannelClosed at once."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        super().close()
