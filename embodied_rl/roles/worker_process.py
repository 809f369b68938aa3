"""A rollout worker in a separate process on this machine, ``python -m embodied_rl.roles.worker_process SOCKET``, and its handle.

Requests and answers are JSON and plain arrays over a socket; weights and their version go through shared memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from embodied_rl.config import TrainConfig
from embodied_rl.distributed.channel import ChannelClosed, Link, can_be_read
from embodied_rl.distributed.processes import started
from embodied_rl.hybrid.shared_weights import AnnouncedWeights
from embodied_rl.roles.role_process import RoleProcess
from embodied_rl.roles.wire import encode_error, pack, unpack
from embodied_rl.roles.worker import Inbox, RolloutWorker, serve
from embodied_rl.rollout.groups import WHOLE, Share

_END_S = 20.0


class WorkerProcess(RoleProcess):
    """The training process's handle. Implements `WorkerHandle`."""

    def __init__(self, config: TrainConfig, share: Share = WHOLE, *, gpu: str | None = None) -> None:
        """Start the process; `call("describe")` waits until it is ready.

        Args:
            share: groups and slots of this worker; other workers play the rest.
            gpu: the only GPU that it sees; None: the same GPUs as this process.
        """
        super().__init__("embodied_rl.roles.worker_process", "The process that plays", gpu=gpu)
        self._only_changed = config.hybrid.publish == "changed"
        self.tell("begin", config=config.to_dict(), share=list(dataclasses.astuple(share)))

    def call(self, what: str, **arguments: object) -> Any:
        """Call the worker's method `what`. Raises RoleLost, and any exception of the method."""
        self.tell(what, **arguments)
        message, tensors = self.recv()
        return unpack(message["value"], tensors)

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> int:
        """Write the weights into shared memory; the worker loads them before it serves any other request."""
        path, num_bytes = self.put(version, tensors, only_changed=self._only_changed)
        self.call("load", version=version, path=path)
        return num_bytes


class LentTensors:
    """(name, tensor) pairs of a publisher: its own memory until `give_back`, from which a GPU loads at the speed of its link; copies
    afterwards, unless they were read before."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self._were_read = tensors, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._were_read = True
        return iter(self._tensors.items())

    def give_back(self) -> None:
        self._tensors = {} if self._were_read else {name: tensor.clone() for name, tensor in self._tensors.items()}


class _LinkInbox(Inbox):
    """Requests from the socket."""

    def __init__(self, link: Link, descriptor: int) -> None:
        self._link, self._descriptor = link, descriptor
        self._announced = AnnouncedWeights()

    def take(self, wait: bool) -> tuple[str, dict[str, Any], Callable[[Any, BaseException | None], None]] | None:
        if not wait and not can_be_read(self._descriptor, timeout_s=0.0):
            return None
        try:
            message, tensors = self._link.recv()
        except ChannelClosed as error:
            raise EOFError from error
        arguments = unpack(message["with"], tensors)
        if message["do"] == "load":
            return "load", *self._load(**arguments)
        return message["do"], arguments, self._answer

    def _load(self, version: int, path: str) -> tuple[dict[str, Any], Callable[[Any, BaseException | None], None]]:
        hold = contextlib.ExitStack()
        lent = LentTensors(hold.enter_context(self._announced.hold(version, path)).tensors)

        def answer(value: object, error: BaseException | None) -> None:
            lent.give_back()
            hold.close()
            self._answer(value, error)

        return {"version": version, "tensors": lent}, answer

    def _answer(self, value: object, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._link.send({"error": encode_error(error)})
                return
            message, tensors = pack(value)
            self._link.send({"value": message}, tensors)
        except ChannelClosed as closed:
            raise EOFError from closed


def main(descriptor: int) -> None:
    """Serve until the trainer ends."""
    connection = socket.socket(fileno=descriptor)
    link = Link(connection)
    message, tensors = link.recv()
    worker: RolloutWorker | None = None
    _end_with_trainer(descriptor)
    inbox = _LinkInbox(link, descriptor)
    try:
        try:
            begin = unpack(message["with"], tensors)
            worker = RolloutWorker(TrainConfig.from_dict(begin["config"]), share=Share(*begin["share"]))
        except Exception as error:
            link.recv()  # the first request
            link.send({"error": encode_error(error)})
            return
        started()
        with contextlib.suppress(EOFError):
            serve(worker, inbox)
    except ChannelClosed:
        pass
    finally:
        if worker is not None:
            worker.close()


def _end_with_trainer(descriptor: int) -> None:
    """End this process with the trainer, even in the middle of an episode; simulators end with this process."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        poll.poll()
        # A serving loop that waits for a request ends without help; other work has a moment to finish.
        threading.Event().wait(_END_S / 4)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
