"""Who did what when: sums against arithmetic written out."""

from __future__ import annotations

import pytest

from embodied_rl.hybrid.multiplex import HostTimes


class Clock:
    """Nanoseconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_times_by_state_and_bars() -> None:
    clock = Clock()
    times = HostTimes(2, keep_spans=True, clock_ns=clock)
    clock.now = 1_000_000_000  # both idle: 2 host-seconds
    times.note(["generation", "generation"])
    clock.now = 3_000_000_000  # both generated for 2 s: 4 host-seconds
    times.note(["training", "generation"])
    clock.now = 8_000_000_000  # 5 s of training and generation at once
    times.note(["training", "idle"])
    clock.now = 10_000_000_000  # 2 s of training alone: 2 idle host-seconds
    figures = times.take()
    assert figures["multiplex/overlap_s"] == pytest.approx(5.0)
    assert figures["multiplex/bubble"] == pytest.approx((2 + 2) / 20)
    assert sorted(times.take_spans()) == [
        ("host 0", "generation", 1_000_000_000, 3_000_000_000),
        ("host 0", "training", 3_000_000_000, 10_000_000_000),
        ("host 1", "generation", 1_000_000_000, 8_000_000_000),
    ]
    clock.now = 11_000_000_000
    assert times.take() == {"multiplex/overlap_s": 0.0, "multiplex/bubble": pytest.approx(0.5)}, "counted from the last time on"
    assert times.take_spans() == [("host 0", "training", 10_000_000_000, 11_000_000_000)], "what goes on is told in pieces"
