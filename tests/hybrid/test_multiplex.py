"""Hosts that leave for training and come back: no episode is lost, begun again or played twice, whatever happens when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.errors import UserError
from embodied_rl.hybrid.multiplex import Multiplexer


class PaperHost:
    """Episodes as {key: messages still to be played}; one whose message is under way cannot be moved."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.left: dict[int, int] = {}
        self.under_way: set[int] = set()
        self.played: dict[int, int] = {}
        self.num_looks = 0

    @property
    def running(self) -> Sequence[int]:
        self.num_looks += 1
        return list(self.left)

    def movable(self) -> list[int]:
        return [key for key in self.left if key not in self.under_way]

    def take(self, keys: Sequence[int]) -> dict[int, Any]:
        assert not self.under_way & set(keys)
        return {key: (self.left.pop(key), self.played.pop(key)) for key in keys}

    def give(self, states: Mapping[int, Any]) -> None:
        assert len(self.left) + len(states) <= self.capacity
        assert not self.left.keys() & states.keys()
        for key, (left, played) in states.items():
            self.left[key], self.played[key] = left, played

    def begin(self, key: int, length: int) -> None:
        assert len(self.left) < self.capacity
        self.left[key], self.played[key] = length, 0


def test_stragglers_move_and_come_to_an_end() -> None:
    hosts = [PaperHost(3), PaperHost(2), PaperHost(2)]
    multiplexer = Multiplexer(hosts, train_on=[1, 2])
    for key in range(5):
        number = multiplexer.room()
        assert number is not None
        hosts[number].begin(key, 4)
        multiplexer.started(key, number)
    # The emptiest first, ties to the smaller number: 0, 0, 1, 2, 0 (free: 3-2-2, 2-2-2, 1-2-2, 1-1-2, 1-1-1).
    assert [multiplexer.host_of(key) for key in range(5)] == [0, 0, 1, 2, 0]
    hosts[2].under_way = {3}
    multiplexer.shrink()
    assert not multiplexer.vacated, "a step is under way on host 2"
    # Host 0 is full: the episode of host 1 is parked.
    assert (hosts[1].running, multiplexer.host_of(2)) == ([], None)
    hosts[2].under_way = set()
    multiplexer.settle()
    assert multiplexer.vacated
    assert multiplexer.room() is None
    assert (multiplexer.counts().running, multiplexer.counts().parked) == (3, 2)
    with pytest.raises(ValueError, match="leaving for training"):
        multiplexer.started(9, 1)
    with pytest.raises(ValueError, match="parked and cannot have finished"):
        multiplexer.finished(2)
    # Room on host 0: a parked episode goes on there, with what it had.
    hosts[0].take([0])
    multiplexer.finished(0)
    assert multiplexer.host_of(2) == 0
    assert hosts[0].left[2] == 4
    multiplexer.expand()
    assert multiplexer.host_of(3) in (1, 2)
    assert multiplexer.counts().add_up
    assert multiplexer.counts().moves == 2


@settings(max_examples=150, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    leaving=st.integers(1, 4),
    events=st.lists(st.sampled_from(["begin", "begin", "send", "receive", "receive", "shrink", "expand"]), max_size=120),
    data=st.data(),
)
def test_random_schedules_lose_nothing(capacities: list[int], leaving: int, events: list[str], data: st.DataObject) -> None:
    hosts = [PaperHost(capacity) for capacity in capacities]
    train_on = range(max(1, len(hosts) - leaving), len(hosts))
    multiplexer = Multiplexer(hosts, list(train_on))
    length: dict[int, int] = {}
    played: dict[int, int] = {}

    def receive(number: int) -> None:
        host = hosts[number]
        for key in sorted(host.under_way):
            host.under_way.discard(key)
            host.left[key] -= 1
            host.played[key] += 1
            if host.left[key] == 0:
                played[key] = host.played[key]
                del host.left[key], host.played[key]
                multiplexer.finished(key)
        multiplexer.settle()

    def send(number: int) -> None:
        if number in multiplexer.active:
            hosts[number].under_way |= set(hosts[number].left)

    def check() -> None:
        counts = multiplexer.counts()
        assert counts.add_up
        assert (counts.started, counts.finished) == (len(length), len(played))
        assert sum(len(host.left) for host in hosts) == counts.running
        if multiplexer.vacated:
            assert all(not hosts[number].left for number in train_on)
        # Nothing is parked while there is room.
        assert not counts.parked or all(len(hosts[n].left) == hosts[n].capacity for n in multiplexer.active)

    for event in events:
        number = data.draw(st.integers(0, len(hosts) - 1))
        if event == "begin" and (where := multiplexer.room()) is not None:
            key = len(length)
            length[key] = data.draw(st.integers(1, 5))
            hosts[where].begin(key, length[key])
            multiplexer.started(key, where)
        elif event == "send":
            send(number)
        elif event == "receive":
            receive(number)
        elif event == "shrink":
            multiplexer.shrink()
        elif event == "expand":
            multiplexer.expand()
        check()
    for _ in range(8 * len(length) + 8):
        for number in range(len(hosts)):
            send(number)
            receive(number)
        check()
    assert played == length, "every episode was played to its end, once, message by message"
    assert multiplexer.counts().parked == multiplexer.counts().running == 0


def test_a_host_that_refuses_loses_nothing() -> None:
    class Refusing(PaperHost):
        def give(self, states: Mapping[int, Any]) -> None:
            raise ConnectionError

    hosts = [Refusing(2), PaperHost(3)]
    multiplexer = Multiplexer(hosts, train_on=[1])
    hosts[1].begin(7, 3)
    multiplexer.started(7, 1)
    with pytest.raises(ConnectionError):
        multiplexer.shrink()
    assert (multiplexer.counts().parked, multiplexer.host_of(7)) == (1, None)
    multiplexer.expand()
    assert hosts[1].left == {7: 3}


def test_episodes_that_nobody_needs_are_given_up_wherever_they_are() -> None:
    hosts = [PaperHost(1), PaperHost(2)]
    multiplexer = Multiplexer(hosts, train_on=[1])
    for key, number in ((0, 0), (1, 1), (2, 1)):
        hosts[number].begin(key, 3)
        multiplexer.started(key, number)
    multiplexer.shrink()
    assert list(multiplexer.parked) == [1, 2]
    assert multiplexer.give_up(1) == (3, 0), "its state: three messages left, none played"
    assert (multiplexer.counts().parked, multiplexer.counts().finished) == (1, 1)
    # Its host has forgotten it, and the next settling gives its room away.
    del hosts[0].left[0], hosts[0].played[0]
    multiplexer.give_up(0)
    assert (list(hosts[0].left), multiplexer.counts().running) == ([], 0)
    multiplexer.settle()
    assert list(hosts[0].left) == [2]
    multiplexer.give_up(2)
    counts = multiplexer.counts()
    assert (counts.started, counts.finished, counts.running, counts.parked) == (3, 3, 0, 0)
    with pytest.raises(ValueError, match="not being played"):
        multiplexer.give_up(2)


@pytest.mark.parametrize("train_on", [[], [0, 1], [2], [-1]])
def test_which_hosts_may_leave(train_on: list[int]) -> None:
    with pytest.raises(UserError, match="at least one and not all"):
        Multiplexer([PaperHost(1), PaperHost(1)], train_on)


def test_thousands_of_episodes_move_in_a_few_messages() -> None:
    """What is done for each host and not for each episode: hosts may be processes."""
    hosts = [PaperHost(2000), PaperHost(1000)]
    multiplexer = Multiplexer(hosts, train_on=[1])
    for key in range(1500):
        number = key % 2
        hosts[number].begin(key, 1)
        multiplexer.started(key, number)
    before = sum(host.num_looks for host in hosts)
    multiplexer.shrink()
    assert sum(host.num_looks for host in hosts) - before < 20
    assert (multiplexer.vacated, multiplexer.counts().moves) == (True, 750)
    assert np.all([multiplexer.host_of(key) == 0 for key in range(1500)])
