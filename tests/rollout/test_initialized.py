"""Where groups start: rollback, parallel places, crucial chunks, which own episodes are kept, and resuming."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import InitializedConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.rollout.initialized import Outcome, SourceEpisode, Start, StartLibrary, chunk_effects, success_difference


def source(length: int = 10, *, origin: Any = "expert", seed: int = 5, score: float = 1.0, success: bool = True) -> SourceEpisode:
    return SourceEpisode(origin, seed, tuple(np.array([float(step)], np.float32) for step in range(length)), score, success)


def library(*sources: SourceEpisode, seed: int = 3, **settings: Any) -> StartLibrary:
    defaults: dict[str, Any] = {"share": 1.0, "sources": ("success",), "chunk_steps": 3, "min_episodes": 4, "threshold": 0.5}
    made = StartLibrary(InitializedConfig(**{**defaults, **settings}), seed=seed)
    made.add(sources)
    return made


def play(
    starts: StartLibrary, group: int, successes: Sequence[bool], candidate: SourceEpisode | None = None, in_flight: Collection[int] = ()
) -> Start | None:
    """One group from admission to publication."""
    start = starts.start_of(group)
    for member, success in enumerate(successes):
        starts.finished(Outcome(group, member, start, success, candidate))
    starts.commit(in_flight)
    return start


# ---- sequential rollback --------------------------------------------------------------------------------------------


def test_the_start_moves_back_by_a_chunk_where_success_reaches_the_threshold() -> None:
    # 10 messages in chunks of 3: starts after 9 (the last chunk), 6 and 3 messages; 0 is the beginning.
    starts = library(source(10))
    assert play(starts, 0, [True, False, False, False]) == Start(0, 9)  # 1/4 < 0.5: stays
    assert play(starts, 1, [True, True, False]) == Start(0, 9)  # 3 episodes are fewer than min_episodes: not judged yet
    assert play(starts, 2, [True]) == Start(0, 9)  # with it 3/4 >= 0.5: moves
    assert play(starts, 3, [True, True, False, False]) == Start(0, 6)  # 2/4 reaches the threshold
    assert starts.metrics()["initialized/position"] == pytest.approx(0.3)
    assert play(starts, 4, [True] * 4) == Start(0, 3)
    assert starts.metrics()["initialized/rolled_back"] == 1
    assert [play(starts, group, [True] * 4) for group in range(5, 30)] == [None] * 25
    # What was seen from each start: 9: 4/8, 6: 2/4, 3: 4/4. Tenths: 0.9, 0.6, 0.3.
    assert starts.sources[0].counts() == {3: (4, 4), 6: (2, 4), 9: (4, 8)}
    told = starts.metrics()
    assert [told[f"initialized/success_from_0.{tenth}"] for tenth in (3, 6, 9)] == [1.0, 0.5, 0.5]


def test_rollback_of_many_sources_equals_a_plain_loop() -> None:
    lengths = [7, 12, 31, 2]
    starts = library(*(source(length, seed=index) for index, length in enumerate(lengths)), chunk_steps=2, min_episodes=5, threshold=0.6)
    # The independent account: position, and outcomes since the last judgement, of each source.
    positions, latest = [6, 10, 30, 0], [[], [], [], []]  # type: ignore[var-annotated]
    rng = np.random.default_rng(0)
    for update in range(60):
        groups = [3 * update + offset for offset in range(3)]
        for group in groups:
            start = starts.start_of(group)
            if not any(positions):
                assert start is None
                continue
            assert start is not None
            assert start.step == positions[start.source] > 0
            for member in range(3):
                success = bool(rng.random() < 0.8)
                starts.finished(Outcome(group, member, start, success, None))
                latest[start.source].append(success)
        starts.commit(())
        for index in range(4):
            if len(latest[index]) >= 5:
                if sum(latest[index]) / len(latest[index]) >= 0.6:
                    positions[index] -= 2
                latest[index] = []
        assert [starts.sources[key].position for key in range(4)] == positions
    assert positions == [0, 0, 0, 0], "60 updates are more than enough"


def test_what_is_in_flight_does_not_count_and_the_order_of_arrival_does_not_show() -> None:
    def after(order: Sequence[int]) -> tuple[StartLibrary, str]:
        starts = library(source(10), source(13, seed=6))
        outcomes = [Outcome(g, m, starts.start_of(g), (g + m) % 3 > 0, None) for g in range(4) for m in range(4)]
        for index in order:
            starts.finished(outcomes[index])
        starts.commit({3})
        return starts, json.dumps(starts.state_dict({3}), sort_keys=True)

    first, state = after(range(16))
    _, other = after(np.random.default_rng(1).permutation(16).tolist())
    assert state == other
    assert sum(episodes for tracked in first.sources.values() for _, episodes in tracked.counts().values()) == 12
    first.commit(())
    assert sum(episodes for tracked in first.sources.values() for _, episodes in tracked.counts().values()) == 16
    again, _ = after(range(16))
    again.discard()  # group 3 is played again
    again.commit(())
    assert sum(episodes for tracked in again.sources.values() for _, episodes in tracked.counts().values()) == 12


# ---- which group, which start ---------------------------------------------------------------------------------------


def test_the_share_is_kept_and_follows_from_seed_and_number() -> None:
    episodes = [source(40, seed=seed) for seed in range(3)]
    given = [library(*episodes, share=0.3, mode="parallel").start_of(number) for number in range(3000)]
    in_one = library(*episodes, share=0.3, mode="parallel")
    assert [in_one.start_of(number) for number in reversed(range(3000))] == given[::-1]
    initialized = [start for start in given if start is not None]
    # Binomial with p = 0.3: 900 ± 4 · √(3000 · 0.3 · 0.7) = 900 ± 100; a third of them in each source.
    assert abs(len(initialized) - 900) < 100
    for key in range(3):
        assert abs(sum(start.source == key for start in initialized) - len(initialized) / 3) < 70
    assert [library(*episodes, share=0.3, mode="parallel", seed=4).start_of(number) for number in range(100)] != given[:100]
    assert library(share=1.0).start_of(0) is None, "nothing to start in"


def test_parallel_places() -> None:
    def steps(**settings: Any) -> set[int]:
        starts = library(source(40), mode="parallel", **settings)
        return {start.step for number in range(600) if (start := starts.start_of(number)) is not None}

    # 40 messages in chunks of 3: 3, 6, …, 39. Four evenly spaced of these 13: numbers 0, 4, 8 and 12.
    assert steps(anchors="random") == set(range(3, 40, 3))
    assert steps(anchors="uniform", num_anchors=4) == {3, 15, 27, 39}
    assert steps(anchors="uniform", num_anchors=99) == set(range(3, 40, 3))
    assert steps(anchors="crucial") == set(range(3, 40, 3)), "nothing is known yet"


def test_starts_gather_before_the_crucial_chunk() -> None:
    starts = library(source(16), mode="parallel", anchors="crucial", min_episodes=8)
    # From 3 and 6 one in eight succeeds, from 9, 12 and 15 seven: the chunk from 6 to 9 decides.
    for number, (step, successes) in enumerate({3: 1, 6: 1, 9: 7, 12: 7, 15: 7}.items()):
        for member in range(8):
            starts.finished(Outcome(number, member, Start(0, step), member < successes, None))
    starts.commit(())
    assert {starts.start_of(number) for number in range(10, 60)} == {Start(0, 6)}
    assert starts.metrics()["initialized/crucial_chunks"] == 1
    (chunk,) = [one for one in starts.effects(starts.sources[0]) if one.is_crucial]
    assert (chunk.first, chunk.stop, chunk.effect) == (6, 9, 0.75)


# ---- crucial chunks -------------------------------------------------------------------------------------------------


def test_difference_of_rates_by_hand_and_as_published() -> None:
    # 0 of 8, then 8 of 8. Wilson: [0, z²/(n + z²)] = [0, 3.8415/11.8415] = [0, 0.32441] and [0.67559, 1].
    # low = 1 - √(0.32441² + 0.32441²) = 1 - 0.45878; high = 1 + √(0 + 0), cut at 1.
    assert success_difference((0, 8), (8, 8)) == pytest.approx((1.0, 0.54122, 1.0), abs=1e-5)
    # Newcombe (1998), table II, method 10: 56/70 against 48/80 gives 0.2 (0.0524 to 0.3339).
    assert success_difference((48, 80), (56, 70)) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    # Exchanged, the interval is mirrored.
    assert success_difference((56, 70), (48, 80)) == pytest.approx((-0.2, -0.3339, -0.0524), abs=5e-5)
    with pytest.raises(ValueError, match="got 0 before and 3 after"):
        success_difference((0, 0), (1, 3))


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    # Over rates drawn at random; for one pair of rates alone it jumps with the few values that a count can take.
    rng = np.random.default_rng(0)
    covered = 0
    for before, after in rng.uniform(0, 1, (2000, 2)):
        _, low, high = success_difference((int(rng.binomial(25, before)), 25), (int(rng.binomial(25, after)), 25))
        covered += low <= after - before <= high
    assert 0.93 < covered / 2000 < 0.98


def test_a_chunk_is_crucial_when_it_matters_much_and_surely() -> None:
    outcomes = {0: (0, 8), 5: (1, 8), 10: (7, 8), 15: (8, 8), 20: (8, 8), 25: (1, 1)}
    found = chunk_effects(outcomes, min_episodes=8, effect=0.3)
    assert [(one.first, one.stop) for one in found] == [(0, 5), (5, 10), (10, 15), (15, 20)], "25 was played from once only"
    assert [one.is_crucial for one in found] == [False, True, False, False]
    # 4/8 after 1/8: the estimate 0.375 is enough, the interval (-0.07 to 0.67) is not; with ten times as many both are.
    assert not chunk_effects({0: (1, 8), 5: (4, 8)})[0].is_crucial
    assert chunk_effects({0: (10, 80), 5: (40, 80)})[0].is_crucial
    # Surely, but little: 0.2 is below the 0.3 that is asked for.
    assert not chunk_effects({0: (400, 1000), 5: (600, 1000)})[0].is_crucial
    assert chunk_effects({0: (400, 1000), 5: (600, 1000)}, effect=0.1)[0].is_crucial


# ---- own episodes ---------------------------------------------------------------------------------------------------


def test_own_successes_fill_the_room_and_go_when_they_are_of_no_more_use() -> None:
    starts = library(max_sources=2, min_episodes=1)
    assert starts.wants(True)
    assert not starts.wants(False)
    for number, length in enumerate((8, 11, 14)):
        play(starts, number, [True], source(length, origin="own", seed=number))
    assert [tracked.source.num_messages for tracked in starts.sources.values()] == [8, 11], "no room for the third"
    number = 10
    while starts.starts_of(starts.sources[0]):
        play(starts, number := number + 1, [True])
    play(starts, 99, [], None)
    starts.finished(Outcome(100, 0, None, True, source(20, origin="own", seed=9)))
    starts.commit(())
    assert 20 in [tracked.source.num_messages for tracked in starts.sources.values()]
    assert len(starts.sources) == 2


def test_the_best_episodes_are_kept_one_for_each_seed() -> None:
    starts = library(max_sources=2, sources=("best",), mode="parallel")
    assert starts.wants(False)
    for number, (seed, score, length) in enumerate(
        [(1, 0.1, 9), (2, 0.5, 9), (3, 0.4, 9), (2, 0.5, 7), (2, 0.3, 9), (4, 0.0, 9), (5, 9.0, 3)]
    ):
        starts.finished(Outcome(number, 0, None, False, source(length, origin="own", seed=seed, score=score)))
    starts.commit(())
    # 3 replaces 1; the shorter one of seed 2 replaces the longer; 5 is too short to start in (3 messages, a chunk of 3).
    kept = {(tracked.source.seed, tracked.source.episode_return, tracked.source.num_messages) for tracked in starts.sources.values()}
    assert kept == {(3, 0.4, 9), (2, 0.5, 7)}


def test_a_source_stays_while_a_group_in_flight_starts_in_it() -> None:
    starts = library(source(9, origin="own", seed=1, score=0.1), max_sources=1, sources=("best",), mode="parallel")
    held = starts.start_of(0)
    assert held is not None
    starts.finished(Outcome(1, 0, None, True, source(9, origin="own", seed=2, score=5.0)))
    starts.commit({0})
    assert held.source in starts.sources
    starts.finished(Outcome(2, 0, None, True, source(9, origin="own", seed=2, score=5.0)))
    starts.commit(())
    starts.finished(Outcome(3, 0, None, True, source(9, origin="own", seed=2, score=5.0)))
    starts.commit(())
    assert [tracked.source.seed for tracked in starts.sources.values()] == [2]


def test_success_by_return() -> None:
    assert library(success_return=2.5).is_success(False, 2.5)
    assert not library(success_return=2.5).is_success(True, 2.4)
    assert library().is_success(True, 0.0)


# ---- episodes as snapshots, and resuming ----------------------------------------------------------------------------


def test_a_snapshot_goes_on_from_the_last_recorded_state() -> None:
    base = {"sim": b"state", "counters": {"lengths": 6}, "observation": {"state": np.array([6.0])}}
    episode = SourceEpisode("expert", 77, tuple(range(10)), 1.0, True, {6: base}, {3: {"state": np.array([3.0])}})
    early, at, late = (episode.snapshot(step, task="t") for step in (3, 6, 8))
    assert (early.seed, early.base, early.actions) == (77, None, (0, 1, 2))
    assert early.observation["state"] == 3.0
    assert (at.base, at.actions, dict(at.observation)) == (base, (), base["observation"])
    assert (late.base, late.actions, dict(late.observation)) == (base, (6, 7), {})
    for step in (-1, 10):
        with pytest.raises(ValueError, match="An episode of 10 messages has no start"):
            episode.snapshot(step, task="t")


@pytest.mark.parametrize("mode", ["rollback", "parallel"])
def test_a_resumed_library_gives_the_same_starts(mode: Any) -> None:
    texts = SourceEpisode("own", 9, ("look", "gehe zur Tür", "open"), 0.5, True, {1: {"sim": b"\x00\xff", "counters": {"lengths": 1}}})
    starts = library(source(31), source(40, seed=6), texts, share=0.7, mode=mode, chunk_steps=1)
    in_flight = {number: starts.start_of(number) for number in range(12, 18)}
    assert None in in_flight.values()
    for number in range(12):
        play(starts, number, [(number + member) % 3 > 0 for member in range(4)], in_flight=in_flight)
    starts.add([source(24, seed=8)])
    assert {number: starts._choose(number) for number in in_flight} != in_flight, "now they would start elsewhere"
    for number in (12, 13):
        starts.finished(Outcome(number, 0, in_flight[number], True, None))
    state = json.loads(json.dumps(starts.state_dict(in_flight)))
    resumed = library(share=0.7, mode=mode, chunk_steps=1)
    resumed.load_state_dict(state)
    assert resumed.sources[2].source.actions == texts.actions
    assert resumed.sources[2].source.states == texts.states
    np.testing.assert_array_equal(np.stack(resumed.sources[0].source.actions), np.stack(starts.sources[0].source.actions))
    starts.discard()
    assert {number: resumed.start_of(number) for number in in_flight} == in_flight
    for number in range(18, 60):
        assert play(starts, number, [number % 2 > 0] * 4) == play(resumed, number, [number % 2 > 0] * 4)
    assert starts.metrics() == resumed.metrics()


def test_a_group_that_began_ordinarily_before_there_was_a_source_does_so_again() -> None:
    starts = library()
    assert starts.start_of(0) is None
    starts.finished(Outcome(1, 0, starts.start_of(1), True, source(10, origin="own")))
    starts.commit({0})
    resumed = library()
    resumed.load_state_dict(json.loads(json.dumps(starts.state_dict({0}))))
    assert resumed.start_of(0) is None
    assert resumed.start_of(2) == Start(0, 9)


def test_another_seed_or_chunk_is_refused() -> None:
    state = library(source(10)).state_dict(())
    for other, message in ((library(seed=4), "seed=3, this run 4"), (library(chunk_steps=2), "chunk_steps=3, this run 2")):
        with pytest.raises(IncompatibleCheckpointError, match=message):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.5}, r"algorithm\.initialized\.share must be between 0 and 1, got 1\.5"),
        ({"chunk_steps": 0}, r"algorithm\.initialized\.chunk_steps must be between 1 and 1,000,000, got 0"),
        ({"sources": ()}, "sources must be some of expert, success, best"),
        ({"share": 0.5, "sources": ("expert",)}, r"algorithm\.initialized\.expert must be given"),
        ({"threshold": math.nan}, "threshold must be between 0 and 1"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        InitializedConfig(**settings)


def test_every_setting_can_be_overridden() -> None:
    from embodied_rl.compose import load_train_config

    defaults = load_train_config([]).algorithm.initialized
    assert defaults == InitializedConfig()
    for field in dataclasses.fields(InitializedConfig):
        load_train_config([f"algorithm.initialized.{field.name}={_yaml(getattr(defaults, field.name))}"])


def _yaml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
