"""A rollout worker in a separate process on this machine, ``python -m embodied_rl.roles.worker_process SOCKET``, and its handle."""

from __future__ import annotations

import dataclasses
import os
import select
import sys
import threading
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.learning.devices import set_compute_threads
from embodied_rl.roles.role_process import RoleProcess, run_role
from embodied_rl.roles.wire import RoleLink
from embodied_rl.roles.worker import RolloutWorker
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
        begin = {"config": config.to_dict(), "share": list(dataclasses.astuple(share))}
        super().__init__("embodied_rl.roles.worker_process", "The process that plays", gpu=gpu, **begin)
        self.only_changed = config.hybrid.publish == "changed"


def _worker(link: RoleLink, config: dict[str, Any], share: list[Any]) -> RolloutWorker:
    _end_with_trainer(link.socket.fileno())
    worker = RolloutWorker(TrainConfig.from_dict(config), share=Share(*share))
    set_compute_threads(1, 1)  # the simulators use the other cores
    return worker


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
    run_role(int(sys.argv[1]), _worker)
