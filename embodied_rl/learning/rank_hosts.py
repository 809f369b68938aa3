"""Hosts of the training ranks beside the first, and rank 0's connections to them: processes of this machine by default."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from embodied_rl.distributed.channel import Link
from embodied_rl.distributed.processes import end_process, start_module
from embodied_rl.errors import UserError

_END_S = 10.0
LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class TrainWorkerError(RuntimeError):
    """Another training rank ended."""


class RankLink(Protocol):
    """Connection to one rank; `Link` implements it."""

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None: ...

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


class RankHost:
    """Holds the ranks 1, 2, … of one `RankExecutor`, and possibly rank 0 too; each of them is a `train_worker.RankServer`."""

    first: RankLink | None = None
    """Link to rank 0; None: rank 0 is in the process of the `RankExecutor`."""
    links: Sequence[RankLink] = ()
    """Links to rank 1, 2, …"""

    def start(self, num_ranks: int, device: torch.device) -> None:
        """Start the ranks. Raises UserError if there are too few devices."""
        raise NotImplementedError

    def take_model(self, files: Mapping[str, np.ndarray]) -> None:
        """Take the files that a language policy is built from, for ranks on other machines; called before the policy is sharded."""

    def device_type(self, own: torch.device) -> str:
        """Device type of the ranks, cpu or cuda; `own`: the device given to the `RankExecutor`."""
        return own.type

    def device_index(self, rank: int) -> int:
        """Index of a rank's own GPU among those that its process sees."""
        return rank

    def meeting(self, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
        """(address for the others' `open_store`, rank 0's own store). The caller keeps the store as long as the ranks, because NCCL's ranks
        use it once more before their first exchange."""
        raise NotImplementedError

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send the same message to every rank beside the first."""
        for link in self.links:
            link.send(message, tensors)

    def ended(self, patience_s: float) -> Exception | None:
        """Exception to raise for a rank that has ended, or ends within the time; None: all ranks run."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the ranks; end those that do not end by themselves. May be called twice."""


class LocalRanks(RankHost):
    """Processes on this machine."""

    links: list[Link]

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        """`gpus`: GPU of each rank, the first included; empty: the first GPUs."""
        self._gpus = gpus
        self.links = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, num_ranks: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
            raise UserError(
                f"hybrid.sharding has {num_ranks} ranks, and this machine {torch.cuda.device_count()} GPUs: each rank needs its own GPU. "
                "Set a smaller num_shards, or hybrid.device=cpu."
            )
        for _ in range(1, num_ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                self.processes.append(start_module("embodied_rl.learning.train_worker", theirs.fileno(), pass_fds=(theirs.fileno(),)))
            self.links.append(Link(ours, begins=True))

    def device_index(self, rank: int) -> int:
        """See `RankHost.device_index`: all ranks see all GPUs."""
        return self._gpus[rank] if self._gpus else rank

    def meeting(self, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
        """See `RankHost.meeting`. No file, which a killed process would leave behind."""
        return listening_store(LOOPBACK, num_ranks, timeout_s)

    def ended(self, patience_s: float) -> Exception | None:
        """See `RankHost.ended`: a connection closes a little before its process has ended."""
        deadline = time.monotonic() + patience_s
        while True:
            ended = [(process.returncode, rank) for rank, process in enumerate(self.processes, start=1) if process.poll() is not None]
            if ended:  # others fail with a killed one, perhaps seen first
                status, rank = min(ended)
                return TrainWorkerError(f"Train worker of rank {rank} ended with status {status}.")
            if not self.processes or time.monotonic() >= deadline:
                return None
            time.sleep(0.01)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for process in self.processes:
            end_process(process, _END_S)


# ---- where ranks meet ---------------------------------------------------------------------------------------------------


def listening_store(address: str, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
    """(address for the others' `open_store`, the store), on a free port of this address only: torch would listen on all of a machine's.
    Raises OSError: the address does not belong to this machine."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    store = TCPStore(
        address,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return f"{address}:{port}", store


def open_store(where: str, num_ranks: int, timeout_s: float) -> Store:
    """Open the store of `RankHost.meeting` at ``address:port``. Raises RuntimeError if no server answers in time."""
    address, _, port = where.rpartition(":")
    return TCPStore(address, int(port), num_ranks, is_master=False, timeout=timedelta(seconds=timeout_s))


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IP address, for gloo to listen on; None: this machine has no such interface."""
    import psutil

    if address.startswith("127."):
        address = "127.0.0.1"
    for name, parts in psutil.net_if_addrs().items():
        if any(part.address.partition("%")[0] == address for part in parts):
            return str(name)
    return None


def listen_on(address: str) -> None:
    """Make this process's gloo use the interface of an address, unless the environment already names one.
    Raises UserError: no interface has it, so that gloo would give the other ranks an address that they cannot reach."""
    if os.environ.get(_INTERFACE):
        return
    name = interface_of(address)
    if name is not None:
        os.environ[_INTERFACE] = name
    elif not address.startswith("127."):
        raise UserError(
            f"Ranks of training on several nodes: no network interface of {socket.gethostname()} has {address}, its address in Ray. Start "
            f"Ray there with the address of an interface (ray start --node-ip-address=…), or with {_INTERFACE} set to its name."
        )
