"""The arithmetic of the group queue, as pure functions: how many groups may run ahead, which of them make the next batch, and
which seed a group gets.

Version v counts the batches that were trained on. A group holds its place from its admission until the batch it is part of has
been trained on and its weights are published; there are (S + 1) · groups_per_step places, S being `max_staleness`. This is the same
bound as AReaL's, (S + version + 1) · groups_per_step − (accepted + running), where accepted counts the whole run (Fu et al. 2025,
arXiv:2505.24298): each version has consumed groups_per_step of the accepted ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from embodied_rl.errors import UserError, did_you_mean

Overtaking = Literal["never", "bounded", "free"]
"""never: batches hold the groups in the order of their numbers. bounded: a finished group may overtake slower ones as long as all of
them can still be consumed in time; where all places are taken, that leaves almost the order of numbers. free: whatever is finished
goes, and what gets too old meanwhile is dropped as stale: the fastest, but it prefers short episodes, which biases what is learned."""

REJECTED_PER_PLACE = 10
"""Groups that may be rejected for each one of a batch, where the configuration gives no limit; DAPO's number of attempts."""


@dataclass(frozen=True)
class GroupQueueConfig:
    """How episodes are grouped, admitted and dropped. Raises UserError for an impossible setting."""

    group_size: int
    """Episodes from the same initial state that make a group."""
    groups_per_step: int
    """Groups of one training batch."""
    redundancy: int = 0
    """Further episodes that are started for each group; the first `group_size` to finish win, the others are stopped. Short episodes
    are preferred by this: choose it where length says little about success."""
    max_staleness: int = 0
    """S: largest age (in versions) of anything that is trained on. 0: synchronous, and with redundancy 0 deterministic."""
    overtaking: Overtaking = "bounded"
    max_concurrent_groups: int | None = None
    """Groups that may be unfinished at a time; null: as many as staleness allows."""
    max_retries: int = 2
    """How often one episode is begun again after a failure or a timeout."""
    max_rejected_per_step: int | None = None
    """Groups that may be filtered, stale or failed between two batches before the run stops; null: 10 × groups_per_step."""
    step_timeout_s: float | None = None
    """An episode whose messages stand still for so long is given up (see `GroupQueue.progressed`); null: never."""
    episode_timeout_s: float | None = None
    """An episode that takes longer is given up; null: never."""
    batch_timeout_s: float | None = None
    """A trainer that waits longer for a batch gets an error that says for what; null: it waits for ever."""

    def __post_init__(self) -> None:
        at_least = {"group_size": 1, "groups_per_step": 1, "redundancy": 0, "max_staleness": 0, "max_retries": 0}
        at_least |= {"max_concurrent_groups": 1, "max_rejected_per_step": 0}
        optional = ("max_concurrent_groups", "max_rejected_per_step")
        for name, least in at_least.items():
            value = vars(self)[name]
            if (value is not None or name not in optional) and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UserError(f"groups.{name} must be a whole number >= {least}{' or null' * (name in optional)}, got {value!r}.")
        for name in ("step_timeout_s", "episode_timeout_s", "batch_timeout_s"):
            value = vars(self)[name]
            if value is not None and not value > 0:
                raise UserError(f"groups.{name} must be > 0 or null, got {value!r}.")
        if self.overtaking not in get_args(Overtaking):
            raise UserError(
                f"groups.overtaking={self.overtaking!r} is not a choice.{did_you_mean(str(self.overtaking), get_args(Overtaking))}"
            )

    @property
    def num_places(self) -> int:
        """(S + 1) · groups_per_step: groups between admission and publication."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def rollouts_per_group(self) -> int:
        return self.group_size + self.redundancy

    @property
    def rejected_limit(self) -> int:
        return REJECTED_PER_PLACE * self.groups_per_step if self.max_rejected_per_step is None else self.max_rejected_per_step


def free_places(config: GroupQueueConfig, *, num_held: int, num_unfinished: int) -> int:
    """Groups that may be admitted now.

    Args:
        num_held: groups between admission and publication: unfinished, finished, and in the batch that is being trained on.
        num_unfinished: those of them whose episodes still run.
    """
    by_age = config.num_places - num_held
    by_load = by_age if config.max_concurrent_groups is None else config.max_concurrent_groups - num_unfinished
    return max(0, min(by_age, by_load))


def choose_batch(config: GroupQueueConfig, *, version: int, ready: Mapping[int, int], unfinished: Mapping[int, int]) -> list[int] | None:
    """Numbers of the groups that make the batch of `version`, ascending; None: wait.

    With ``bounded``, the finished groups with the nearest deadlines are taken (a group's deadline is its oldest version + S). That
    leaves enough room for the rest exactly if at most k · groups_per_step of them have their deadline within the next k versions,
    for each k from 0 to S; otherwise the batch waits for slower groups. Waiting stops where it cannot help, which is so only when
    versions were skipped.

    Args:
        ready: {number: oldest version} of finished groups, none of them stale at `version`.
        unfinished: {number: oldest version that its running episodes may carry}.
    """
    size, staleness = config.groups_per_step, config.max_staleness
    if len(ready) < size:
        return None
    if config.overtaking == "never":
        first = sorted([*ready, *unfinished])[:size]
        return first if all(number in ready for number in first) else None
    batch = _by_deadline(ready, size)
    if config.overtaking == "bounded":
        everything = {**ready, **unfinished}
        ideal = _due(everything, set(_by_deadline(everything, size)), version, staleness)
        due = _due(everything, set(batch), version, staleness)
        if any(due[k] > max(k * size, ideal[k]) for k in range(staleness + 1)):
            return None
    return sorted(batch)


def _by_deadline(groups: Mapping[int, int], size: int) -> list[int]:
    return sorted(groups, key=lambda number: (groups[number], number))[:size]


def _due(groups: Mapping[int, int], taken: set[int], version: int, staleness: int) -> list[int]:
    """Number of groups left whose deadline is at most version + k, for k = 0 … staleness."""
    deadlines = [oldest + staleness - version for number, oldest in groups.items() if number not in taken]
    return [sum(deadline <= k for deadline in deadlines) for k in range(staleness + 1)]


def group_seed(run_seed: int, domain: str, number: int) -> int:
    """Seed in [0, 2**30) of a group's initial state: a hash of only (run seed, domain, group number).

    Held-out seeds begin at 2**30 (`embodied_rl.sim.seeding`), so that training never meets them; and a resumed run asks for the same
    episodes, whatever had finished before.
    """
    digest = hashlib.blake2b(f"group/{run_seed}/{domain}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2
