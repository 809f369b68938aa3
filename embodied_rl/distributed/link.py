"""Messages with tensors between the process that runs the training loop and its ranks, rollout workers and token processes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from embodied_rl.distributed.channel import ChannelClosed, ChannelGarbled, Messages

if TYPE_CHECKING:
    from torch import Tensor


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

        Raises:
            ChannelClosed: the other end is gone, or what came is none of its messages.
            TimeoutError: nothing came in time.
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
