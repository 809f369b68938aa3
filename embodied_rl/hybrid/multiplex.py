"""Generation and training on the same devices at the same time: some hosts leave for training, and their episodes move to the others.

```
 generating:   hosts 0 1 2 3      all play
  shrink():     hosts 0 1 │ 2 3    episodes waiting on 2 and 3 move to 0 and 1; running steps end first; those without room are parked
  vacated:      hosts 0 1 │ train  2 and 3 are empty: training begins there, while 0 and 1 continue to play
  expand():     hosts 0 1 2 3      parked episodes continue first, then new ones begin
```
(Train-rollout multiplexing as in ROME, Wang et al. 2025, arXiv:2512.24873.) No episode is restarted or lost: at every moment

    started = finished + running + parked

which is asserted after each transition. A *host* plays episodes: simulators' slots (`roles.multiplexed.SimHost`), or a token
backend (`roles.multiplexed.TokenHost`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from embodied_rl.errors import UserError

Key: TypeAlias = Any
"""Key of an episode: any hashable value."""


class Host(Protocol):
    """Plays up to `capacity` episodes."""

    @property
    def capacity(self) -> int: ...

    @property
    def running(self) -> Collection[Key]:
        """Episodes that are played here."""

    def movable(self) -> Collection[Key]:
        """The `running` episodes that can be taken now, without waiting."""

    def take(self, keys: Sequence[Key]) -> Mapping[Key, Any]:
        """Remove these and return their states for another host, except episodes that have just finished: they end here."""

    def give(self, states: Mapping[Key, Any]) -> None:
        """Continue episodes of another host."""


@dataclass(frozen=True)
class MultiplexCounts:
    """Numbers of episodes by outcome."""

    started: int = 0
    finished: int = 0
    running: int = 0
    parked: int = 0
    """Episodes taken from a host that had to leave, which wait for room on another."""
    moves: int = 0
    """Moves from host to host, with or without parking in between."""

    @property
    def add_up(self) -> bool:
        return self.started == self.finished + self.running + self.parked


class Multiplexer:
    """Decides which hosts generate, and moves episodes when that changes. Called by the thread that plays (the collector's)."""

    def __init__(self, hosts: Sequence[Host], train_on: Sequence[int]) -> None:
        """
        Args:
            hosts: all hosts; all generate at first.
            train_on: numbers of the hosts that leave while training.

            Raises UserError: a host does not exist, there is none, or none would be left.
        """
        leaving = set(train_on)
        if not leaving or not leaving < set(range(len(hosts))):
            raise UserError(
                f"train_on={sorted(leaving)} must name at least one and not all of the {len(hosts)} hosts (0-{len(hosts) - 1}): with all "
                "of them, generation and training take turns (hybrid.placement=collocated)."
            )
        self.hosts, self.train_on = list(hosts), frozenset(leaving)
        self.shrunk = False
        self._where: dict[Key, int] = {}
        self._parked: dict[Key, Any] = {}
        self._started = self._finished = self._moves = 0

    # ---- the collector's side ---------------------------------------------------------------------------------------

    def room(self) -> int | None:
        """Number of the emptiest generating host, for a new episode; None: no host has room.

        Parked episodes come first; while there are some, no new episode begins.
        """
        self.settle()
        return None if self._parked else self._roomiest()

    @property
    def num_free(self) -> int:
        """Number of episodes that may begin before `room` is None."""
        return 0 if self._parked else sum(self._free(number) for number in self.active)

    def started(self, key: Key, host: int) -> None:
        """Note that an episode began on a host. Raises ValueError for a key in use, and for a host that must leave."""
        if key in self._where or key in self._parked:
            raise ValueError(f"Episode {key!r} is being played already.")
        if host not in self.active:
            raise ValueError(f"Episode {key!r} was begun on host {host}, which is leaving for training.")
        self._where[key] = host
        self._started += 1
        self._check()

    def finished(self, key: Key) -> None:
        """Note that an episode ended, wherever it was. Raises ValueError for an episode that is not played."""
        if key not in self._where:
            raise ValueError(f"Episode {key!r} is {'parked' if key in self._parked else 'not known'} and cannot have finished.")
        del self._where[key]
        self._finished += 1
        self.settle()

    def settle(self) -> None:
        """Move what can be moved now; call it after each step. Costs nothing while all hosts generate and no episode is parked."""
        if self.shrunk:
            for number in sorted(self.train_on):
                self._vacate(number)
        self._unpark()
        self._check()

    def give_up(self, key: Key) -> Any:
        """Drop an episode that is parked, or that its host has forgotten; it counts as finished, and nothing moves before `settle`.
        Returns the state of a parked one. Raises ValueError for an unknown episode."""
        if self.host_of(key) is not None:
            del self._where[key]
        state = self._parked.pop(key, None)
        self._finished += 1
        self._check()
        return state

    def host_of(self, key: Key) -> int | None:
        """Number of the host that plays an episode; None: it is parked. Raises ValueError for an unknown episode."""
        if key in self._parked:
            return None
        if key not in self._where:
            raise ValueError(f"Episode {key!r} is not being played.")
        return self._where[key]

    # ---- the trainer's side -----------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Vacate the hosts of `train_on`; training may begin there once `vacated`. Does nothing if they are already leaving."""
        self.shrunk = True
        self.settle()

    def expand(self) -> None:
        """Let all hosts generate again."""
        self.shrunk = False
        self.settle()

    @property
    def parked(self) -> Collection[Key]:
        """Episodes that wait for room."""
        return self._parked.keys()

    @property
    def vacated(self) -> bool:
        """Whether the hosts that must leave play nothing any more."""
        return self.shrunk and all(not self.hosts[number].running for number in self.train_on)

    @property
    def active(self) -> list[int]:
        """Hosts that may play."""
        return [number for number in range(len(self.hosts)) if not (self.shrunk and number in self.train_on)]

    def counts(self) -> MultiplexCounts:
        """Counts over the whole run."""
        return MultiplexCounts(self._started, self._finished, len(self._where), len(self._parked), self._moves)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _vacate(self, number: int) -> None:
        host = self.hosts[number]
        keys = [key for key in host.movable() if self._where.get(key) == number]
        if not keys:
            return
        for key, state in host.take(keys).items():
            # Parked first, so that nothing is lost if the next host fails.
            del self._where[key]
            self._parked[key] = state

    def _unpark(self) -> None:
        while self._parked and (number := self._roomiest()) is not None:
            host = self.hosts[number]
            keys = list(self._parked)[: self._fair_share(number)]
            host.give({key: self._parked[key] for key in keys})
            for key in keys:
                del self._parked[key]
                self._where[key] = number
            self._moves += len(keys)

    def _fair_share(self, number: int) -> int:
        """Number of parked episodes for a host: few are spread over all hosts with room, many go in few messages."""
        free = [self._free(other) for other in self.active if self._free(other) > 0]
        return max(1, min(self._free(number), -(-len(self._parked) // len(free))))

    def _free(self, number: int) -> int:
        host = self.hosts[number]
        return host.capacity - len(host.running)

    def _roomiest(self) -> int | None:
        free = [(self._free(number), -number) for number in self.active]
        most, negative = max(free)
        return -negative if most > 0 else None

    def _check(self) -> None:
        assert self.counts().add_up, self.counts()
        assert not self._parked.keys() & self._where.keys(), "an episode is played and parked at the same time"


# ---- times of each host's states -------------------------------------------------------------------------------------


HostState = Literal["generation", "training", "idle"]
Span: TypeAlias = tuple[str, str, int, int]
"""(role, name, begin, end) in nanoseconds of `time.perf_counter_ns`, which is one clock for all processes of a machine."""


class HostTimes:
    """Adds up the time of each state, over all hosts; call `note` at every change."""

    def __init__(self, num_hosts: int, *, keep_spans: bool = False, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """`keep_spans`: keep spans for a timeline, which `take_spans` returns."""
        self._clock_ns, self._keep_spans = clock_ns, keep_spans
        self._states: list[HostState] = ["idle"] * num_hosts
        self._since_ns = [clock_ns()] * num_hosts
        self._last_ns = clock_ns()
        self._of = Counter[HostState]()
        self._both_ns = 0
        self._spans: list[Span] = []

    def note(self, states: Sequence[HostState]) -> None:
        """Note the hosts' states from now on."""
        now = self._clock_ns()
        passed, self._last_ns = now - self._last_ns, now
        for state in self._states:
            self._of[state] += passed
        if {"generation", "training"} <= set(self._states):
            self._both_ns += passed
        for number, (before, after) in enumerate(zip(self._states, states, strict=True)):
            if before != after:
                self._keep(number, before, now)
        self._states = list(states)

    def take(self) -> dict[str, float]:
        """Figures since the last call: ``multiplex/overlap_s`` (time in which some hosts generated while others trained), and
        ``multiplex/bubble`` (idle share of all hosts' time)."""
        self.note(self._states)
        bubble = self._of["idle"] / self._of.total() if self._of.total() else 0.0
        figures = {"multiplex/overlap_s": self._both_ns / 1e9, "multiplex/bubble": bubble}
        self._of, self._both_ns = Counter(), 0
        return figures

    def take_spans(self) -> list[Span]:
        """Spans that ended since the last call; running states are cut here, so that no span is late."""
        self.note(self._states)
        for number, state in enumerate(self._states):
            self._keep(number, state, self._last_ns)
        spans, self._spans = self._spans, []
        return spans

    def _keep(self, number: int, state: HostState, now_ns: int) -> None:
        if self._keep_spans and state != "idle" and now_ns > self._since_ns[number]:
            self._spans.append((f"host {number}", state, self._since_ns[number], now_ns))
        self._since_ns[number] = now_ns
