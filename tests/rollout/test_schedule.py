"""Admission, the choice of a batch, and seeds: by hand, and against exhaustive search."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_rl.compose import load_train_config
from embodied_rl.config import GroupsConfig
from embodied_rl.errors import UserError
from embodied_rl.methods.streams import make_queue, streams_elsewhere
from embodied_rl.rollout.groups import choose_batch, free_places, group_seed
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec


def test_places_by_hand() -> None:
    config = GroupsConfig(group_size=4, groups_per_step=8, max_staleness=2, redundancy=1, max_concurrent_groups=10)
    assert config.num_places == 24
    assert config.rejected_limit == 80
    # 24 - 20 = 4 by age, 10 - 9 = 1 by load; then load is no limit; then there is none by age.
    assert free_places(config, num_held=20, num_unfinished=9) == 1
    assert free_places(config, num_held=20, num_unfinished=0) == 4
    assert free_places(config, num_held=24, num_unfinished=3) == 0
    assert free_places(config, num_held=5, num_unfinished=10) == 0


@given(
    staleness=st.integers(0, 4),
    size=st.integers(1, 5),
    version=st.integers(0, 50),
    max_concurrent=st.integers(1, 30),
    data=st.data(),
)
def test_places_are_those_of_areal(staleness: int, size: int, version: int, max_concurrent: int, data: st.DataObject) -> None:
    config = GroupsConfig(group_size=1, groups_per_step=size, max_staleness=staleness, max_concurrent_groups=max_concurrent)
    running = data.draw(st.integers(0, min(max_concurrent, config.num_places)))
    ready = data.draw(st.integers(0, config.num_places - running))
    # AReaL, StalenessManager: every version consumed one batch of what was accepted.
    accepted = version * size + ready
    by_staleness = (staleness + version + 1) * size - (accepted + running)
    expected = min(max(1, max_concurrent) - running, by_staleness)
    assert free_places(config, num_held=running + ready, num_unfinished=running) == expected


def choose(overtaking: str, staleness: int, size: int, version: int, ready: dict[int, int], unfinished: dict[int, int]) -> list[int] | None:
    config = GroupsConfig(group_size=1, groups_per_step=size, max_staleness=staleness, overtaking=overtaking)  # type: ignore[arg-type]
    return choose_batch(config, version=version, ready=ready, unfinished=unfinished)


def test_overtaking_by_hand() -> None:
    # S = 1, two groups a step, all begun at version 0. Groups 2 and 3 are finished first: 0 and 1 can still be consumed at version 1.
    assert choose("bounded", 1, 2, 0, {2: 0, 3: 0}, {0: 0, 1: 0}) == [2, 3]
    assert choose("never", 1, 2, 0, {2: 0, 3: 0}, {0: 0, 1: 0}) is None
    # At version 1, groups 4 and 5 (begun then) are finished before 0 and 1, whose last chance this is: wait, or let them go stale.
    assert choose("bounded", 1, 2, 1, {4: 1, 5: 1}, {0: 0, 1: 0}) is None
    assert choose("free", 1, 2, 1, {4: 1, 5: 1}, {0: 0, 1: 0}) == [4, 5]
    # One of the two has come; the other must still be waited for. Then both go, before the younger ones.
    assert choose("bounded", 1, 2, 1, {0: 0, 4: 1, 5: 1}, {1: 0}) is None
    assert choose("bounded", 1, 2, 1, {0: 0, 1: 0, 4: 1, 5: 1}, {}) == [0, 1]
    # S = 2, one group a step, at version 1: taking 3 would leave 1 and 2, both due at version 2, which has room for one.
    assert choose("bounded", 2, 1, 1, {3: 1}, {1: 0, 2: 0}) is None
    assert choose("bounded", 2, 1, 1, {3: 1}, {1: 0}) == [3]
    # Skipped versions: three groups due now and room for two. Waiting for nothing would be for ever.
    assert choose("bounded", 1, 2, 5, {0: 4, 1: 4, 2: 4}, {}) == [0, 1]


def feasible(groups: dict[int, int], version: int, staleness: int, size: int) -> bool:
    """Whether some order consumes all groups in time, `size` at each version from `version` on: tried one by one."""
    order = list(groups)
    return any(
        all(version + place // size <= groups[number] + staleness for place, number in enumerate(permutation))
        for permutation in itertools.permutations(order)
    )


@settings(max_examples=150, deadline=None)
@given(staleness=st.integers(0, 2), size=st.integers(1, 2), data=st.data())
def test_bounded_waits_exactly_when_some_group_would_be_late(staleness: int, size: int, data: st.DataObject) -> None:
    version = 3
    oldest = st.integers(version - staleness, version)
    versions = data.draw(st.lists(oldest, min_size=size, max_size=min(6, size * (staleness + 1))))
    groups = dict(enumerate(versions))
    finished = data.draw(st.sets(st.sampled_from(sorted(groups)), min_size=size))
    ready, unfinished = {n: groups[n] for n in finished}, {n: v for n, v in groups.items() if n not in finished}
    if not feasible(groups, version, staleness, size):
        return  # late whatever is done; the hand-made case above
    chosen = choose("bounded", staleness, size, version, ready, unfinished)
    options = [
        batch
        for batch in itertools.combinations(sorted(ready), size)
        if feasible({n: v for n, v in groups.items() if n not in batch}, version + 1, staleness, size)
    ]
    assert (chosen is None) == (not options)
    assert chosen is None or tuple(chosen) in options


def test_seed_is_the_documented_hash_and_a_training_seed() -> None:
    digest = hashlib.blake2b(b"group/7/libero/12", digest_size=4).digest()
    assert group_seed(7, "libero", 12) == int.from_bytes(digest, "little") // 4
    seeds = {group_seed(run, domain, number) for run in range(3) for domain in ("a", "b") for number in range(500)}
    assert max(seeds) < HELD_OUT_START
    # 3000 draws out of 2**30: 3000**2 / 2**31 = 0.004 collisions expected.
    assert len(seeds) == 3000


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"group_size": 0}, "algorithm.groups.group_size must be between 1 and 1,000,000, got 0"),
        ({"max_staleness": -1}, "algorithm.groups.max_staleness must be between 0 and 1,000,000, got -1"),
        ({"redundancy": 1.5}, "redundancy"),
        ({"max_retries": None}, "max_retries"),
        ({"episode_timeout_s": 0.0}, "algorithm.groups.episode_timeout_s must be above 0"),
        ({"overtaking": "bound"}, "algorithm.groups.overtaking"),
    ],
)
def test_impossible_settings_are_refused(setting: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        GroupsConfig.from_dict({"group_size": 4, "groups_per_step": 2, **setting})


def test_a_run_sets_all_of_them() -> None:
    settings = ["overtaking=free", "max_concurrent_groups=3", "step_timeout_s=20", "episode_timeout_s=30", "batch_timeout_s=40"]
    config = load_train_config(["sim=cartpole", "algorithm=grpo", *(f"algorithm.groups.{word}" for word in settings)])
    spec = SimSpec("count", {"state": TensorSpec((3,))}, ActionSpec.discrete(2))
    own = make_queue(config, streams_elsewhere(config, [spec])).config
    assert (own.overtaking, own.max_concurrent_groups) == ("free", 3)
    assert (own.step_timeout_s, own.episode_timeout_s, own.batch_timeout_s) == (20.0, 30.0, 40.0)
