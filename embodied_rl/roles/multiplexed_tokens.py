"""One token backend made of several hosts, some of which are lent to training and come back; answers move between them."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.generation.tokens import Completion, GenerationRequest, TokenBackend, check_new_ids, refuse_structures
from embodied_rl.hybrid.shared_weights import SharedWeightsPublisher
from embodied_rl.methods.language_player import ModelFiles
from embodied_rl.roles.device_lease import DeviceLease
from embodied_rl.roles.token_process import TokenProcess
from embodied_rl.rollout.migration import PartialAnswer, TokenHost

LoadAll = Callable[[int, Iterable[tuple[str, Any]]], None]


class MultiplexedTokens(TokenBackend):
    """Implements `TokenBackend`; a request goes to the emptiest host. Called by one thread, the collector's."""

    version: int = 0
    """Of the weights that sample now."""
    can_constrain: bool = False
    """See `TokenBackend`: where all hosts do."""

    def __init__(
        self,
        backends: Sequence[TokenBackend],
        lease: DeviceLease,
        capacity: int,
        load_all: LoadAll,
        *,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            backends: of the hosts. Those with a ``fileno()`` are waited for; others work inside `poll`.
            lease: of the run's hosts.
            capacity: requests of one host at a time.
            load_all: `load_weights` of all of them.
            at_close: called when they have ended.

        Raises UserError as `Multiplexer` does.
        """
        self.backends = list(backends)
        self._hosts = [TokenHost(backend, capacity) for backend in backends]
        self.lease = lease
        self._multiplexer = lease.share(self._hosts, self._release, self._restore)
        self._load_all, self._at_close = load_all, at_close
        self.can_constrain = all(backend.can_constrain for backend in self.backends)
        self._waiting: deque[GenerationRequest] = deque()
        self._ready: list[Completion] = []
        self._in_flight: set[int] = set()
        """Ids of what was submitted and has not ended."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        check_new_ids(requests, self._in_flight)
        if not self.can_constrain:
            refuse_structures(requests)
        self._in_flight.update(request.request_id for request in requests)
        self._waiting.extend(requests)
        self._place()

    def poll(self, min_ready: int = 1, timeout_s: float | None = None) -> list[Completion]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._place()
        while True:
            for host in self._hosts:
                if host.running:
                    self._end(host.poll(1, 0.0))
            self._place()
            left_s = None if deadline is None else deadline - time.monotonic()
            if len(self._ready) >= max(min_ready, 1) or not self._in_flight or (left_s is not None and left_s <= 0):
                break
            self._wait(left_s)
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Iterable[int]) -> None:
        """See `TokenBackend.abort`: whatever these had, wherever they were, is ready when this returns."""
        wanted = self._in_flight & set(request_ids)
        unasked = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        self._ready += [_aborted(PartialAnswer(request)) for request in unasked]
        wanted -= {request.request_id for request in unasked}
        for host in self._hosts:
            here = sorted(wanted & set(host.movable()))
            for key, part in host.take(here).items() if here else ():
                self._multiplexer.finished(key)
                self._ready.append(_aborted(part))
            if len(host.running) > len(host.movable()):  # some had just ended
                self._end(host.poll(1, 0.0))
        for number in sorted(wanted):
            if number in self._multiplexer.parked:
                self._ready.append(_aborted(self._multiplexer.give_up(number)))
        self._in_flight -= {completion.request_id for completion in self._ready}
        self._place()

    def pause(self) -> None:
        for backend in self.backends:
            backend.pause()

    def resume(self) -> None:
        for backend in self.backends:
            backend.resume()

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; of all hosts, also those that train at the moment."""
        self._load_all(version, tensors)
        self.version = version

    def close(self) -> None:
        """End all hosts. May be called twice."""
        for backend in self.backends:
            backend.close()
        self._at_close()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Give waiting requests to hosts with room, and let moves happen."""
        self._multiplexer.settle()
        while self._waiting and (number := self._multiplexer.room()) is not None:
            request = self._waiting.popleft()
            self._hosts[number].submit([request])
            self._multiplexer.started(request.request_id, number)
        self.lease.note()

    def _end(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._multiplexer.finished(completion.request_id)
            self._in_flight.discard(completion.request_id)
        self._ready += completions

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until a host has something to report; hosts without a socket work when they are polled."""
        playing = [host.backend for host in self._hosts if host.running]
        for backend in playing:
            backend.flush()
        sockets = [backend.fileno() for backend in playing]
        if min(sockets, default=0) >= 0:
            select.select(sockets, [], [], timeout_s)

    def _release(self, hosts: Iterable[int]) -> None:
        for number in hosts:
            self.backends[number].release_memory()

    def _restore(self, hosts: Iterable[int]) -> None:
        for number in hosts:
            self.backends[number].restore_memory()


def start_token_hosts(config: TrainConfig, files: ModelFiles, lease: DeviceLease) -> MultiplexedTokens:
    """A process for each host of `lease`. Raises UserError as `blank_backend` does, and RoleLost."""
    plan = lease.plan
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    processes: list[TokenProcess] = []
    publishers: list[SharedWeightsPublisher] = []  # one, from the first publication on

    def load_all(version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        named = dict(tensors)
        if not publishers:
            publishers.append(SharedWeightsPublisher(named))
        publishers[0].publish(version, named.items())
        # All take them at the same time.
        for process in processes:
            process.load(version, publishers[0].path)
        for process in processes:
            process.loaded(version)

    def at_close() -> None:
        for publisher in publishers:
            publisher.close()

    try:
        for number in range(plan.num_hosts):
            gpu = plan.gpu(number, visible)
            processes.append(TokenProcess(config, files, gpu=gpu, num_threads=plan.threads_per_host))
        for process in processes:
            process.started()
        # Those that stay have room for all that play.
        capacity = -(-config.sim.num_slots // (plan.num_hosts - plan.num_lent))
        return MultiplexedTokens(processes, lease, capacity, load_all, at_close=at_close)
    except BaseException:
        for process in processes:
            process.close()
        raise


def _aborted(part: PartialAnswer) -> Completion:
    return part.whole(Completion.of(part.request.request_id, [], [], [], [], "aborted"))
