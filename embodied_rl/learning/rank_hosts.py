"""Where the ranks of training beside the first live, and how rank 0 reaches them: processes of this machine by default."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from embodied_rl.distributed.channel import Link
from embodied_rl.distributed.processes import end_process, start_module
from embodied_rl.errors import UserError

_END_S = 10.0
_TCP = "tcp://"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class TrainWorkerError(RuntimeError):
    """Another rank of the training ended."""


class RankLink(Protocol):
    """The way to one rank; see `Link`, which is one."""

    def send(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None: ...

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


class RankHost(Protocol):
    """What holds the ranks 1, 2, … of one `RankExecutor`, and perhaps the first too; each of them is a `train_worker.RankServer`."""

    @property
    def first(self) -> RankLink | None:
        """Of rank 0; None: it is in the process of the `RankExecutor`."""

    @property
    def links(self) -> list[RankLink]:
        """Of rank 1, 2, …"""

    def start(self, num_ranks: int, device: torch.device) -> None:
        """Begin them. Raises UserError where there are too few devices."""

    def take_model(self, files: Mapping[str, np.ndarray]) -> None:
        """Before a language policy is divided: the files that it is built from, for ranks on other machines."""
        ...

    def device_type(self, own: torch.device) -> str:
        """Where ranks compute, cpu or cuda; `own`: what the `RankExecutor` was given."""

    def device_index(self, rank: int) -> int:
        """Which of the GPUs that a rank's process sees is its own."""

    def meeting(self, num_ranks: int, timeout_s: float) -> contextlib.AbstractContextManager[tuple[str, Store]]:
        """(address that the others `open_store`, rank 0's own store), until all have joined; the store is there until `close`: NCCL's
        ranks meet in it once more, before their first exchange."""

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send the same to every rank."""

    def ended(self, patience_s: float) -> Exception | None:
        """What is to be raised for a rank that has ended, or ends within the time; None: all go on."""

    def close(self) -> None:
        """Let them go; those of them that do not end are ended. May be called twice."""


class LocalRanks:
    """Processes of this machine. Implements `RankHost`."""

    first: RankLink | None = None

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        """`gpus`: of each rank, the first included; none: the first ones."""
        self._gpus = gpus
        self.links: list[RankLink] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, num_ranks: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
            raise UserError(
                f"hybrid.sharding has {num_ranks} ranks, and this machine {torch.cuda.device_count()} GPUs: each rank needs one of its "
                "own. Choose smaller num_shards, or hybrid.device=cpu."
            )
        for _ in range(1, num_ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                self.processes.append(start_module("embodied_rl.learning.train_worker", theirs.fileno(), pass_fds=(theirs.fileno(),)))
            self.links.append(Link(ours, begins=True))

    def take_model(self, files: Mapping[str, np.ndarray]) -> None:
        """See `RankHost.take_model`: they lie on this machine."""

    def device_type(self, own: torch.device) -> str:
        return own.type

    def device_index(self, rank: int) -> int:
        """See `RankHost.device_index`: all see all GPUs."""
        return self._gpus[rank] if self._gpus else rank

    @contextlib.contextmanager
    def meeting(self, num_ranks: int, timeout_s: float) -> Iterator[tuple[str, Store]]:
        """See `RankHost.meeting`: a file."""
        self._folder = tempfile.TemporaryDirectory(prefix="embodied_ranks_")
        where = str(Path(self._folder.name) / "store")
        yield where, open_store(where, num_ranks, timeout_s)

    def tell(self, message: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        for link in self.links:
            link.send(message, tensors)

    def ended(self, patience_s: float) -> Exception | None:
        """See `RankHost.ended`: a connection closes a little before its process is gone."""
        deadline = time.monotonic() + patience_s
        while self.processes and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if process.poll() is not None:
                    return TrainWorkerError(f"Train worker of rank {index + 1} ended with status {process.returncode}.")
            time.sleep(0.01)
        return None

    def close(self) -> None:
        for link in self.links:
            link.close()  # type: ignore[attr-defined]
        for process in self.processes:
            end_process(process, _END_S)
        if self._folder is not None:
            self._folder.cleanup()


# ---- where ranks meet ---------------------------------------------------------------------------------------------------


def listening_store(address: str, num_ranks: int, timeout_s: float) -> tuple[str, Store]:
    """(what others `open_store`, the store), on a free port of this one address: torch by itself would listen on all of a machine's.

    Raises OSError: the address is none of this machine's.
    """
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
    return f"{_TCP}{address}:{port}", store


def open_store(where: str, num_ranks: int, timeout_s: float) -> Store:
    """The store at what `RankHost.meeting` gave: a file, or ``tcp://address:port``. Raises RuntimeError when no server answers in time."""
    if where.startswith(_TCP):
        address, _, port = where.removeprefix(_TCP).rpartition(":")
        return TCPStore(address, int(port), num_ranks, is_master=False, timeout=timedelta(seconds=timeout_s))
    return FileStore(where, num_ranks)


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IP address, on which gloo is to listen; None: no interface of this machine."""
    import psutil

    if address.startswith("127."):
        address = "127.0.0.1"
    for name, parts in psutil.net_if_addrs().items():
        if any(part.address.partition("%")[0] == address for part in parts):
            return str(name)
    return None


def listen_on(address: str) -> None:
    """Have this process's gloo use the interface of an address, unless the environment names one already.

    Raises UserError: no interface has it: gloo would give the other ranks an address that they cannot reach.
    """
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
