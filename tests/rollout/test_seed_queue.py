"""Which slot plays which seed, and which episodes are kept, whatever the order in which they finish."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.rollout.recording import Outcome, RecordingPlan, SeedQueue


def play(
    plan: RecordingPlan, good: np.ndarray, num_slots: int, rng: np.random.Generator, known: dict[int, Outcome]
) -> tuple[list[int], list[int]]:
    """Let slots finish in a random order; returns (numbers in the order in which they were written, all that were played)."""
    queue = SeedQueue(plan, num_slots, known)
    written: list[int] = []
    played: list[int] = []
    running: dict[int, int] = {}
    while not queue.done:
        for slot in range(num_slots):
            if slot not in running and (number := queue.take(slot)) is not None:
                assert number % num_slots == slot
                running[slot] = number
                played.append(number)
        assert running, "nobody plays and nothing is decided"
        slot = int(rng.choice(sorted(running)))
        number = running.pop(slot)
        written += queue.finished(number, "recorded" if good[number] or not plan.only_success else "unsuccessful")
    return written, played


@pytest.mark.parametrize("seed", range(20))
def test_the_first_successes_are_kept_in_the_order_of_their_seeds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    good = rng.random(200) < 0.4
    plan = RecordingPlan(15, only_success=True, max_seeds=200)
    written, played = play(plan, good, int(rng.integers(1, 7)), rng, {})
    assert written == np.flatnonzero(good)[:15].tolist()
    assert len(set(played)) == len(played), "a seed was played twice"
    # A number is begun only while fewer than 15 before it are kept, or may be: what is played in vain is bounded by what failed late.
    wasted = [number for number in played if number > written[-1]]
    assert len(wasted) <= sum(not good[number] for number in played if number < written[-1])


@pytest.mark.parametrize("num_slots", [1, 3, 8])
def test_nothing_is_played_in_vain_where_all_succeed(num_slots: int) -> None:
    written, played = play(RecordingPlan(12, only_success=True), np.ones(200, bool), num_slots, np.random.default_rng(0), {})
    assert written == sorted(played) == list(range(12))


@pytest.mark.parametrize("seed", range(5))
def test_without_a_choice_every_seed_is_played_and_written_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    written, played = play(RecordingPlan(40), rng.random(40) < 0.4, 6, rng, {})
    assert sorted(written) == sorted(played) == list(range(40))


@pytest.mark.parametrize("seed", range(10))
def test_what_is_known_is_not_played_again_and_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    good = rng.random(200) < 0.4
    plan = RecordingPlan(15, only_success=True, max_seeds=200)
    whole, _ = play(plan, good, 4, rng, {})
    # A first part that was stopped somewhere wrote some of them, and noted some that failed.
    kept, failed = whole[: int(rng.integers(0, 15))], [number for number in range(30) if not good[number] and rng.random() < 0.5]
    known: dict[int, Outcome] = dict.fromkeys(kept, "recorded") | dict.fromkeys(failed, "unsuccessful")
    rest, played = play(plan, good, 4, rng, known)
    assert kept + rest == whole
    assert not set(played) & known.keys()


def test_seeds_run_out() -> None:
    queue = SeedQueue(RecordingPlan(3, only_success=True, max_seeds=5), 1, {})
    outcomes: list[Outcome] = ["unsuccessful", "recorded", "unsuccessful", "given_up", "recorded"]
    written = [queue.finished(queue.take(0) or 0, outcome) for outcome in outcomes]
    assert written == [[], [1], [], [], [4]]
    assert queue.done
    assert queue.take(0) is None
    assert (queue.num_kept, queue.missing) == (2, [3])


def test_impossible_plans() -> None:
    for wrong in ({"num_episodes": 0}, {"num_episodes": 1, "first_seed": -1}, {"num_episodes": 5, "only_success": True, "max_seeds": 4}):
        with pytest.raises(ValueError, match="impossible size"):
            RecordingPlan(**wrong)
    assert RecordingPlan(7, only_success=True).seed_limit == 70
    assert RecordingPlan(7).seed_limit == 7
