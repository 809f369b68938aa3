"""Training ranks as actors of a Ray cluster, on any of its nodes; messages go through the object store.

```
 TrainWorker (rank 0), or a method that keeps its steps   RankWorker (rank 1, 2, …; or all), on this node or another
 part of a minibatch ── Ray: call, object store ────────▶ the same step
        │  forward, backward ◀══ gloo or NCCL between the nodes: parameters, gradients ══▶
```
The driver creates and ends the actors; rank 0, or the driver itself, sends them messages.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from embodied_rl.distributed.channel import ChannelClosed
from embodied_rl.hybrid.weight_sync import pack_tensors, unpack_tensors
from embodied_rl.learning.rank_hosts import LOOPBACK, RankHost, TrainWorkerError, listen_on, listening_store
from embodied_rl.learning.train_worker import RankServer
from embodied_rl.methods.language_player import ModelFiles, write_model_files
from embodied_rl.roles.ray_calls import GONE, Actor, Outcome, Reference, first_line, outcome_of, value_of
from embodied_rl.roles.wire import RoleLost, decode_error

_LEAVE_S = 1.0
"""Time for a failed rank to report its error before it ends."""
_LOOK_S = 0.05
_CAUSE_S = 10.0


class RankWorker:
    """Actor of one rank."""

    def __init__(self) -> None:
        self._model: ModelFiles = {}
        self._server = RankServer()

    def take_model(self, files: ModelFiles) -> None:
        """See `RankHost.take_model`."""
        self._model = files

    def address(self) -> str:
        """Address of this actor's node."""
        return str(ray.util.get_node_ip_address())

    def listen(self, address: str | None) -> Outcome:
        """Set the address where the ranks meet; None: this actor's node."""
        return outcome_of(lambda: listen_on(address or self.address()))

    def do(self, message: dict[str, Any], text: bytes, payload: np.ndarray) -> Outcome:
        """See `RankServer.do`; tensors arrive and leave in the form of `pack_tensors`."""
        tensors = dict(unpack_tensors(text, torch.from_numpy(payload.copy()))) if len(payload) else {}  # Ray's arrays are read-only

        def task() -> tuple[bytes, Any] | None:
            if message["do"] == "build":
                self._build(message, tensors)
                return None
            answer = self._server.do(message, tensors)
            return None if answer is None else _packed(answer)

        outcome = outcome_of(task)
        if outcome[0] != "value":
            # Other ranks may wait for this one in a collective; the end of its process ends their wait.
            threading.Timer(_LEAVE_S, os._exit, (1,)).start()
        return outcome

    def _build(self, message: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if not self._model:
            self._server.do(message, tensors)
            return
        with tempfile.TemporaryDirectory(prefix="embodied_rl_rank_") as folder:
            write_model_files(self._model, Path(folder))
            self._server.do({**message, "policy": {**message["policy"], "model": folder}}, tensors)


class RayLink:
    """Link to one `RankWorker`. Implements `RankLink`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._sent: list[Any] = []
        """References to unfinished calls, in order."""

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `Link.send`."""
        self.send_packed(message, *_packed(tensors))

    def send_packed(self, message: Mapping[str, Any], text: bytes | Reference, payload: Tensor | Reference) -> None:
        """Send packed tensors; `text` and `payload`: from `pack_tensors`, or references to them. Raises ChannelClosed."""
        self._forget_done()
        self._sent.append(self._actor.do.remote(dict(message), text, payload))

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Answer to the last message. Raises as `Link.recv`, and UserError for a user's mistake on the other side."""
        try:
            outcome = ray.get(self._sent[-1], timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except GONE as error:
            raise ChannelClosed(first_line(error)) from error
        if outcome[0] != "value":
            raise _raised(outcome)
        if outcome[1] is None:
            return {}, {}
        text, payload = outcome[1]
        return {}, dict(unpack_tensors(text, torch.from_numpy(payload.copy())))

    def failure(self, patience_s: float) -> tuple[bool, str] | None:
        """(whether its process ended without an error, description) of a rank that failed within the time; None: it continues."""
        deadline = time.monotonic() + patience_s
        while self._sent:
            try:
                kind, value = ray.get(self._sent[0], timeout=max(deadline - time.monotonic(), 0.0))
            except GetTimeoutError:
                return None
            except GONE as error:
                return True, first_line(error)
            if kind != "value":
                return False, str(value["message"] if kind == "error" else value)
            self._sent.pop(0)
        return None

    def _forget_done(self) -> None:
        done = set(ray.wait(self._sent, num_returns=len(self._sent), timeout=0)[0]) if self._sent else set()
        for reference in done:
            try:
                outcome = ray.get(reference)
            except GONE as error:
                raise ChannelClosed(first_line(error)) from error
            if outcome[0] != "value":
                raise ChannelClosed(str(outcome[1]))
        self._sent = [reference for reference in self._sent if reference not in done]


class RayRanks(RankHost):
    """Rank actors, each on its node; created in the process of rank 0, or in the driver if all ranks are actors."""

    def __init__(self, actors: Sequence[Any], *, device: str | None = None) -> None:
        """`device`: device of all ranks, including rank 0 (cpu, cuda); None: the actors are ranks 1, 2, … and compute where rank 0 does."""
        self._actors, self._device = list(actors), device
        self._lowest = 1 if device is None else 0
        """Rank of the first actor; without a device, rank 0 is in this process."""
        self._links = [RayLink(actor) for actor in actors]
        self.links, self.first = self._links[1 - self._lowest :], None if device is None else self._links[0]
        self._addresses: list[str] = []
        self._address = LOOPBACK
        """Address where the ranks meet."""

    def start(self, num_ranks: int, device: torch.device) -> None:
        """See `RankHost.start`: the driver has already created them. Also raises UserError for a node that the others cannot reach."""
        assert num_ranks == len(self._actors) + self._lowest, "the driver makes as many as the configuration says"
        self._addresses = ray.get([actor.address.remote() for actor in self._actors])
        own = str(ray.util.get_node_ip_address())
        within = set(self._addresses) <= {own}
        self._address = LOOPBACK if within else own
        if self._device is None:
            listen_on(self._address)
        # Check here, where all actors are awaited: a rank that fails later, at the meeting, would keep the others waiting.
        for reference in [actor.listen.remote(LOOPBACK if within else None) for actor in self._actors]:
            value_of(reference, "RankWorker")

    def take_model(self, files: ModelFiles) -> None:
        """See `RankHost.take_model`; an actor executes its calls in order."""
        shared = ray.put(dict(files))
        for actor in self._actors:
            actor.take_model.remote(shared)

    def device_type(self, own: torch.device) -> str:
        return self._device or own.type

    def device_index(self, rank: int) -> int:
        """See `RankHost.device_index`: an actor sees only its own GPU."""
        return 0

    def meeting(self, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
        """See `RankHost.meeting`: at this node's address, or at loopback if all ranks are on one node."""
        return listening_store(self._address, num_ranks, timeout_s)

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """See `RankHost.tell`; the tensors are in the object store once."""
        text, payload = _packed(tensors)
        shared = ray.put(payload) if len(payload) else payload
        for link in self._links[1 - self._lowest :]:
            link.send_packed(message, text, shared)

    def ended(self, patience_s: float) -> Exception | None:
        """See `RankHost.ended`. RoleLost for a rank whose process or node is gone; the others then fail too."""
        failed: dict[int, str] = {}
        deadline = time.monotonic() + patience_s
        while len(failed) < len(self._links) and time.monotonic() < deadline:
            for index, link in enumerate(self._links, start=self._lowest):
                if index in failed or (found := link.failure(_LOOK_S)) is None:
                    continue
                gone, what = found
                if gone:
                    return RoleLost(f"{self._named(index)} has ended: {what}")
                if not failed:  # another rank's end may be the cause, and may not be known yet
                    deadline = min(deadline, time.monotonic() + _CAUSE_S)
                failed[index] = what
        return TrainWorkerError("\n".join(f"{self._named(index)}: {what}" for index, what in failed.items())) if failed else None

    def _named(self, index: int) -> str:
        return f"Rank {index} of training (node {self._addresses[index - self._lowest]})"

    def close(self) -> None:
        """See `RankHost.close`; the driver ends the actors."""
        self._links, self.links, self.first = [], [], None


def _packed(tensors: Mapping[str, Tensor] | None) -> tuple[bytes, Any]:
    text, payload = pack_tensors(list((tensors or {}).items()), torch.device("cpu"))
    return text, payload.numpy()


def _raised(outcome: Outcome) -> Exception:
    return ChannelClosed(str(outcome[1])) if outcome[0] == "lost" else decode_error(outcome[1])
