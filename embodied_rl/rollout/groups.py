"""The group queue: which episodes to play next, and which finished groups make the next training batch.

```
            next_assignment              finished / failed                    take(v)                  published(v + 1)
 (waiting) ────────────────▶ unfinished ───────────────────▶ ready ──────────────────────▶ training ─────────────────▶ gone
                                 │ failed, stale               │ filtered, stale            (consumed)
                                 └────────────▶ rejected ◀─────┘        a rejected group frees its place at once; a new one takes it
```

The collector *consumes* assignments and is *unblocked by* free places. There are (max_staleness + 1) · groups_per_step places, and a group
holds one from admission to publication. The trainer *consumes* batches and *waits for* groups. At every moment

    admitted = consumed + filtered + stale + failed + in flight

in groups, and started = accepted + failed + timed out + abandoned + running in episodes; both are asserted after each transition.

Version v counts the batches trained on so far. A group holds its place until its batch has been trained on and the weights are published.
With S = `max_staleness`, this bound equals AReaL's, (S + version + 1) · groups_per_step − (accepted + running), where accepted counts the
whole run (Fu et al. 2025, arXiv:2505.24298): each version has consumed groups_per_step of the accepted groups.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from embodied_rl.config import GroupsConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.stopping import uncounted_s
from embodied_rl.types import Episode, EpisodeGroup


def free_places(config: GroupsConfig, *, num_held: int, num_unfinished: int) -> int:
    """Number of groups that may be admitted now.

    Args:
        num_held: groups between admission and publication: unfinished, finished, and in the current training batch.
        num_unfinished: groups among them whose episodes still run.
    """
    by_age = config.num_places - num_held
    by_load = by_age if config.max_concurrent_groups is None else config.max_concurrent_groups - num_unfinished
    return max(0, min(by_age, by_load))


def choose_batch(config: GroupsConfig, *, version: int, ready: Mapping[int, int], unfinished: Mapping[int, int]) -> list[int] | None:
    """Numbers of the groups in the batch of `version`, ascending; None: wait.

    ``bounded`` takes the finished groups with the nearest deadlines; a group's deadline is its oldest version + S. The other groups fit
    exactly if, for each k from 0 to S, at most k · groups_per_step of them have their deadline within the next k versions. Otherwise the
    batch waits for slower groups. If waiting cannot help, which happens only after skipped versions, the batch does not wait.

    Args:
        ready: {number: oldest version} of finished groups, none stale at `version`.
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
    """For k = 0 … staleness: number of remaining groups whose deadline is at most version + k."""
    deadlines = [oldest + staleness - version for number, oldest in groups.items() if number not in taken]
    return [sum(deadline <= k for deadline in deadlines) for k in range(staleness + 1)]


def group_seed(run_seed: int, domain: str, number: int) -> int:
    """Seed in [0, 2**30) of a group's initial state: a hash of only (run seed, domain, group number).

    Held-out seeds begin at 2**30 (`embodied_rl.sim.seeding`), so training never meets them. A resumed run requests the same episodes,
    whichever had finished before.
    """
    digest = hashlib.blake2b(f"group/{run_seed}/{domain}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True)
class Assignment:
    """One episode to play: `GroupQueue.next_assignment` hands it to the collector, which hands it back."""

    group: int
    """Group number; action randomness may derive from (group, member, attempt)."""
    member: int
    """Index of the episode in its group, 0 … group_size + redundancy − 1."""
    seed: int
    """Seed of the reset, equal for all members: they begin in the same state."""
    domain: str
    version: int
    """Weight version when the queue handed the assignment out: no action unit is older."""
    attempt: int = 0
    """Number of this member's earlier failures."""
    greedy: bool = False
    """Whether the policy's mode plays the episode, as the baseline of its group."""


@dataclass
class Attempt:
    """Running episode."""

    assignment: Assignment
    started_s: float
    progressed_s: float

    def overdue(self, now_s: float, step_timeout_s: float | None, episode_timeout_s: float | None) -> str | None:
        """Name of the time limit that the episode has exceeded; None: neither."""
        if episode_timeout_s is not None and now_s - self.started_s > episode_timeout_s:
            return f"episode longer than {episode_timeout_s:g} s"
        if step_timeout_s is not None and now_s - self.progressed_s > step_timeout_s:
            return f"no message for {step_timeout_s:g} s"
        return None


@dataclass
class OpenGroup:
    """Group that is admitted and not complete."""

    number: int
    domain: str
    seed: int
    created_version: int
    running: dict[int, Attempt] = field(default_factory=dict)
    accepted: dict[int, Episode] = field(default_factory=dict)
    """{member: episode} in the order of arrival."""
    num_lost: int = 0
    """Number of members without a retry left."""
    greedy: bool = False
    """Whether member 0 plays the policy's mode and is certain of its place in the group."""

    def takes(self, member: int, group_size: int) -> bool:
        """Whether an episode of this member could still join the group."""
        kept = self.greedy and 0 not in self.accepted
        return (kept and member == 0) or len(self.accepted) + kept < group_size

    def start(self, member: int, attempt: int, version: int, now_s: float) -> Assignment:
        assignment = Assignment(self.number, member, self.seed, self.domain, version, attempt, self.greedy and member == 0)
        self.running[member] = Attempt(assignment, now_s, now_s)
        return assignment

    def accept(self, member: int, episode: Episode) -> None:
        del self.running[member]
        self.accepted[member] = episode

    def complete(self) -> EpisodeGroup:
        """Group with its episodes in the order of members, so the order of arrival does not show."""
        episodes = tuple(self.accepted[member] for member in sorted(self.accepted))
        return EpisodeGroup(self.number, self.domain, self.seed, self.created_version, episodes)

    def oldest_version(self, current: int) -> int:
        """Oldest version that any part of the complete group may carry."""
        versions = [episode.oldest_version for episode in self.accepted.values()]
        return min([current, *versions, *(attempt.assignment.version for attempt in self.running.values())])

    def cannot_be_as_young_as(self, version: int, config: GroupsConfig) -> bool:
        """Whether the group will certainly contain something older than `version`: an accepted episode, or a running episode that is needed
        and has acted with the weights of its assignment."""
        if any(episode.oldest_version < version for episode in self.accepted.values()):
            return True
        old = [attempt.assignment for attempt in self.running.values() if attempt.assignment.version < version]
        if any(assignment.greedy for assignment in old):
            return True
        return config.rollouts_per_group - self.num_lost - len(old) < config.group_size


_FORMAT_VERSION = 1


class BatchNeverFullError(UserError):
    """The batch will hardly ever fill: too many groups were rejected, or the trainer waited too long."""


@dataclass(frozen=True)
class GroupCounts:
    """Numbers of a run's groups by outcome."""

    admitted: int = 0
    consumed: int = 0
    """Number of groups handed to the trainer."""
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0
    """Number of groups that are unfinished, or finished and not yet consumed."""

    def figures(self, prefix: str = "groups/") -> dict[str, float]:
        return {f"{prefix}{name}": float(count) for name, count in vars(self).items() if name != "admitted"}

    @property
    def add_up(self) -> bool:
        return self.admitted == self.consumed + self.filtered + self.stale + self.failed + self.in_flight


@dataclass(frozen=True)
class EpisodeCounts:
    """Numbers of a run's episodes (attempts) by outcome."""

    started: int = 0
    accepted: int = 0
    """Number that finished in time to join their group, however the group ended."""
    failed: int = 0
    timed_out: int = 0
    abandoned: int = 0
    """Number that became superfluous while they ran: their group was complete without them, or gone."""
    running: int = 0

    @property
    def add_up(self) -> bool:
        return self.started == self.accepted + self.failed + self.timed_out + self.abandoned + self.running


@dataclass(frozen=True)
class Share:
    """Part of a run that one of several workers plays: the `index`-th of every `count` groups within each batch of `batch` groups, and its
    own slots of fixed rollouts."""

    index: int = 0
    count: int = 1
    slots_before: int = 0
    """Number of slots of the workers before this one."""
    all_slots: int | None = None
    """Number of slots of all workers; None: this worker has them all."""
    rollout_steps: int | None = None
    """Rollout steps of all workers; None: this worker has them all."""
    domains: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """{domain: (slots_before, all_slots, rollout_steps)} of a run with several domains."""
    batch: int | None = None
    """Number of groups that all workers together deliver per update."""

    def of(self, domain: str) -> Share:
        """This worker's share of a domain's slots."""
        before, whole, steps = self.domains.get(domain, (self.slots_before, self.all_slots, self.rollout_steps))
        return Share(self.index, self.count, before, whole, steps)

    def first_from(self, number: int) -> int:
        """Number of this worker's first group that is not smaller than `number`."""
        return next(own for own in range(number, number + (self.batch or self.count)) if self.player_of(own) == self.index)

    def player_of(self, number: int) -> int:
        """Index of the worker that plays a group."""
        return number % (self.batch or self.count) % self.count


WHOLE = Share()
"""Share of a worker that plays all groups and slots."""


class GroupQueue:
    """Groups of episodes between the collector and the trainer; see the picture at the top of this module. For use by one thread."""

    def __init__(
        self,
        config: GroupsConfig,
        *,
        seed: int,
        domains: DomainMixture,
        filters: Sequence[Callable[[EpisodeGroup], str | None]] = (),
        greedy: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        share: Share = WHOLE,
    ) -> None:
        """
        Args:
            seed: the run's seed; a group's seed depends only on it, the domain and the group number.
            filters: functions from a complete group to a reason to drop it, or None (`embodied_rl.algorithms.filters`).
            greedy: domains where member 0 of each group plays the policy's mode; it always belongs to the group.
            clock: returns seconds; only timeouts use it.
            share: the groups that this worker plays; all by default.
        """
        self.config = config
        self.seed = seed
        self.domains = domains
        self.version = 0
        """Version of the weights published last."""
        self._filters, self._greedy = tuple(filters), frozenset(greedy)
        self._clock = clock
        self._share = share
        self._open: dict[int, OpenGroup] = {}
        self._ready: dict[int, EpisodeGroup] = {}
        self._training: list[EpisodeGroup] = []
        self._waiting: list[tuple[int, int, int]] = []  # (group, member, attempt); entries of groups that are gone remain for a while
        self._redo: list[int] = []  # heap of group numbers that were in flight when the state was saved
        self._next_number = 0
        self._total = GroupCounts()
        self._by_domain: dict[str, GroupCounts] = {}
        self._episodes = EpisodeCounts()
        self._reasons: Counter[str] = Counter()  # rejection and failure reasons since the last batch
        self._rejected = 0  # rejected groups since the last batch
        self._waiting_since_s: float | None = None
        self._ticked_s = clock()

    # --- the collector's side ----------------------------------------------------------------------------------------

    def next_assignment(self, domain: str | None = None) -> Assignment | None:
        """The next episode to play, of `domain` if it is given; None: no place is free, ask again after any change.

        Admitted groups come first, by number: retries and members not yet begun. Raises BatchNeverFullError when more groups than allowed
        were rejected since the last batch.
        """
        while True:
            self._waiting = [entry for entry in self._waiting if self._is_wanted(entry)]
            own = [entry for entry in self._waiting if domain in (None, self._open[entry[0]].domain)]
            if own:
                break
            if not self._admit():
                return None
        number, member, attempt = chosen = min(own)
        self._waiting.remove(chosen)
        assignment = self._open[number].start(member, attempt, self.version, self._clock())
        self._count_episodes(started=1, running=1)
        return assignment

    def finished(self, assignment: Assignment, episode: Episode) -> bool:
        """Hand in a whole episode; False if it is no longer needed (`should_stop`). An episode with NaN or infinity counts as failed.
        Raises ValueError: the episode's seed or domain is not the assignment's; UserError: a filter cannot be applied to the group."""
        if (episode.seed, episode.domain) != (assignment.seed, assignment.domain):
            raise ValueError(
                f"The episode handed in for group {assignment.group} has seed {episode.seed} of domain '{episode.domain}', but seed "
                f"{assignment.seed} of domain '{assignment.domain}' was requested: episodes were mixed up."
            )
        if self.should_stop(assignment):
            return False
        if not episode.is_finite:
            self._lose(assignment, "failed", "a reward or log-probability is NaN or infinite")
            return False
        group = self._open[assignment.group]
        group.accept(assignment.member, episode)
        self._count_episodes(accepted=1, running=-1)
        if len(group.accepted) == self.config.group_size:
            self._complete(group)
        else:
            self._abandon(group, [member for member in group.running if not group.takes(member, self.config.group_size)])
        return True

    def failed(self, assignment: Assignment, reason: str) -> None:
        """Give up an episode that cannot be finished: retry it while retries last, otherwise its group may fail."""
        if not self.should_stop(assignment):
            self._lose(assignment, "failed", reason)

    def progressed(self, assignment: Assignment) -> None:
        """Note that an episode has moved on by a message; `step_timeout_s` counts from here."""
        if not self.should_stop(assignment):
            self._open[assignment.group].running[assignment.member].progressed_s = self._clock()

    def should_stop(self, assignment: Assignment) -> bool:
        """Whether an episode is no longer needed: its group is complete, gone or full without it, or this attempt was given up or handed
        in."""
        group = self._open.get(assignment.group)
        attempt = None if group is None else group.running.get(assignment.member)
        return attempt is None or attempt.assignment != assignment

    def tick(self) -> list[Assignment]:
        """Give up episodes that have timed out and return them, so that the collector stops their slots. Call it about every second.
        Raises BatchNeverFullError when the trainer has waited longer than `batch_timeout_s`; the message names the cause."""
        now, config = self._clock(), self.config
        since_tick_s, self._ticked_s = now - self._ticked_s, now

        def counted(since_s: float, limit_s: float | None) -> float:
            """A later time, by what the limit does not count: an update may have stopped playing, too."""
            return since_s if limit_s is None else min(now, since_s + uncounted_s(since_tick_s, limit_s))

        running = [attempt for group in self._open.values() for attempt in group.running.values()]
        for attempt in running:
            attempt.started_s = counted(attempt.started_s, config.episode_timeout_s)
            attempt.progressed_s = counted(attempt.progressed_s, config.step_timeout_s)
        if self._waiting_since_s is not None:
            self._waiting_since_s = counted(self._waiting_since_s, config.batch_timeout_s)
        late = [
            (attempt.assignment, what)
            for attempt in running
            if (what := attempt.overdue(now, config.step_timeout_s, config.episode_timeout_s)) is not None
        ]
        given_up = []
        for assignment, what in late:
            # Losing one episode may end its group, and with it others of this list.
            if not self.should_stop(assignment):
                self._lose(assignment, "timed_out", what)
                given_up.append(assignment)
        waited_s = 0.0 if self._waiting_since_s is None else now - self._waiting_since_s
        if config.batch_timeout_s is not None and waited_s > config.batch_timeout_s:
            raise BatchNeverFullError(
                f"The trainer has waited {waited_s:.0f} s for a batch (algorithm.groups.batch_timeout_s). {self.describe()}"
            )
        return given_up

    # --- the trainer's side ------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[EpisodeGroup] | None:
        """Take a full batch of `groups_per_step` groups for training now, ascending by number; None: wait.

        Everything in it is at most `max_staleness` versions old, measured here; older groups are dropped.

        Raises:
            ValueError: `version` is not the published one, or the previous batch was not published.
            BatchNeverFullError: more groups than allowed were rejected since the last batch.
        """
        if version != self.version:
            raise ValueError(f"take({version}), but the latest published version is {self.version}: call published first.")
        if self._training:
            raise ValueError(f"take({version}) again: the batch of version {version} is being trained on. Call published({version + 1}).")
        self._drop_stale()
        ready = {number: group.oldest_version for number, group in self._ready.items()}
        unfinished = {number: group.oldest_version(version) for number, group in self._open.items()}
        numbers = choose_batch(self.config, version=version, ready=ready, unfinished=unfinished)
        if numbers is None:
            if self._waiting_since_s is None:
                self._waiting_since_s = self._clock()
            self._raise_if_hopeless()
            return None
        for number in numbers:
            self._training.append(self._ready.pop(number))
            self._count(self._training[-1].domain, consumed=1, in_flight=-1)
        assert all(group.age(version) <= self.config.max_staleness for group in self._training)
        self._waiting_since_s, self._rejected = None, 0
        self._reasons.clear()
        return list(self._training)

    def published(self, version: int) -> None:
        """Note that the generator has the weights `version`: the batch they were trained on frees its places, and all waiting groups age.
        Raises ValueError when versions do not grow."""
        if version <= self.version:
            raise ValueError(f"published({version}), but version {self.version} was published before: versions must grow.")
        self.version = version
        self._training = []
        self._drop_stale()

    # --- what is going on --------------------------------------------------------------------------------------------

    def counts(self) -> GroupCounts:
        """Group counts over the whole run, including runs it resumed from."""
        return self._total

    def domain_counts(self) -> dict[str, GroupCounts]:
        """{domain: group counts} of the domains that had a group."""
        return dict(self._by_domain)

    def episode_counts(self) -> EpisodeCounts:
        """Episode counts over the whole run, including runs it resumed from."""
        return self._episodes

    def lengths(self) -> dict[str, int]:
        """Current numbers of groups: ``ready`` wait for a batch, ``held`` occupy a place (unfinished, ready and training)."""
        return {"ready": len(self._ready), "held": self._num_held}

    def describe(self, most: int = 5) -> str:
        """Describe in a few sentences what the queue waits for: counts, rejection reasons, and the longest-running episodes."""
        now = self._clock()
        running = sorted((a for g in self._open.values() for a in g.running.values()), key=lambda attempt: attempt.started_s)
        text = (
            f"Version {self.version}: {len(self._ready)} groups ready of the {self.config.groups_per_step} of a batch, "
            f"{len(self._open)} unfinished with {len(running)} episodes running; {self._rejected} rejected since the last batch. "
            f"{self._history(most)}"
        )
        if running:
            longest = (f"group {a.assignment.group} member {a.assignment.member} ({now - a.started_s:.0f} s)" for a in running[:most])
            text += " Running longest: " + ", ".join(longest) + "."
        return text

    def _history(self, most: int = 3) -> str:
        """Describe why groups were rejected, and the outcomes of all groups."""
        total = self._total
        reasons = "; ".join(f"{count} × {reason}" for reason, count in self._reasons.most_common(most))
        return (f"Reasons: {reasons}. " if reasons else "") + (
            f"Whole run: admitted {total.admitted} = consumed {total.consumed} + filtered {total.filtered} + stale {total.stale} "
            f"+ failed {total.failed} + in flight {total.in_flight}."
        )

    # --- resuming ----------------------------------------------------------------------------------------------------

    def state_dict(self, *, settled: bool = False) -> dict[str, Any]:
        """State for resuming, JSON-able, without episodes: a resumed run requests groups in flight and an unpublished batch again, with the
        same numbers and seeds, so nothing is lost silently.

        `settled`: count the last batch as consumed; the caller has it, so it is not requested again.
        """
        training = [] if settled else self._training
        counts = {}
        for domain, whole in self._by_domain.items():
            unpublished = sum(group.domain == domain for group in training)
            back = whole.in_flight + unpublished
            counts[domain] = asdict(replace(whole, admitted=whole.admitted - back, consumed=whole.consumed - unpublished, in_flight=0))
        episodes = replace(self._episodes, abandoned=self._episodes.abandoned + self._episodes.running, running=0)
        return {
            "format": _FORMAT_VERSION,
            "seed": self.seed,
            "weights": dict(self.domains.weights),
            "version": self.version,
            "next_number": self._next_number,
            "redo": sorted([*self._open, *self._ready, *self._redo, *(group.number for group in training)]),
            "counts": counts,
            "episodes": asdict(episodes),
            "rejected": self._rejected,
            "reasons": dict(self._reasons),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises IncompatibleCheckpointError if the run's seed or domain weights differ: other episodes would follow."""
        assert self._next_number == 0, "only a new queue can take up a saved state"
        found = {"format": _FORMAT_VERSION, "seed": self.seed, "weights": dict(self.domains.weights)}
        for name, value in found.items():
            if state[name] != value:
                raise IncompatibleCheckpointError(
                    f"The checkpoint's group queue has {name}={state[name]}, this run {value}, so it would request other episodes. "
                    "Resume with the checkpoint's setting."
                )
        self.version = int(state["version"])
        self._next_number = int(state["next_number"])
        self._redo = sorted(int(number) for number in state["redo"])
        self._by_domain = {domain: GroupCounts(**counts) for domain, counts in state["counts"].items()}
        self._total = _plus(GroupCounts(), *map(vars, self._by_domain.values()))
        self._episodes = EpisodeCounts(**state["episodes"])
        self._rejected = int(state["rejected"])
        self._reasons = Counter(state["reasons"])

    def mirror(self, state: Mapping[str, Any]) -> None:
        """Copy the state of another process's queue (its `state_dict`); what is in flight there is then requested from this one."""
        for part in (self._open, self._ready, self._training, self._waiting):
            part.clear()
        self._next_number = 0
        self.load_state_dict(state)

    # --- transitions -------------------------------------------------------------------------------------------------

    @property
    def _num_held(self) -> int:
        return len(self._open) + len(self._ready) + len(self._training)

    def _is_wanted(self, waiting: tuple[int, int, int]) -> bool:
        """Whether a waiting member can still join its group."""
        group = self._open.get(waiting[0])
        return group is not None and group.takes(waiting[1], self.config.group_size)

    def _admit(self) -> bool:
        """Open the next group, starting with those of a resumed run; False if no place is free."""
        if free_places(self.config, num_held=self._num_held, num_unfinished=len(self._open)) == 0:
            return False
        self._raise_if_hopeless()
        if self._redo:
            number = heapq.heappop(self._redo)
        else:
            number = self._share.first_from(self._next_number)
            self._next_number = number + 1
        domain = self.domains.domain_of(number)
        seed = group_seed(self.seed, domain, number)
        self._open[number] = OpenGroup(number, domain, seed, self.version, greedy=domain in self._greedy)
        for member in range(self.config.rollouts_per_group):
            self._waiting.append((number, member, 0))
        self._count(domain, admitted=1, in_flight=1)
        return True

    def _complete(self, group: OpenGroup) -> None:
        complete = group.complete()
        reason = next((reason for apply in self._filters if (reason := apply(complete)) is not None), None)
        if reason is not None:
            self._reject(group.number, "filtered", reason)
            return
        self._abandon(self._open.pop(group.number), list(group.running))
        self._ready[group.number] = complete
        self._count(group.domain)

    def _lose(self, assignment: Assignment, outcome: str, reason: str) -> None:
        """End one attempt without an episode; its group ends too when too few members are left."""
        group = self._open[assignment.group]
        del group.running[assignment.member]
        self._count_episodes(**{outcome: 1, "running": -1})
        self._reasons[f"episode {outcome}: {_first_line(reason)}"] += 1
        if assignment.attempt < self.config.max_retries:
            self._waiting.append((group.number, assignment.member, assignment.attempt + 1))
            return
        group.num_lost += 1
        if assignment.greedy:
            self._reject(group.number, "failed", "its greedy member lost")
        elif self.config.rollouts_per_group - group.num_lost < self.config.group_size:
            self._reject(group.number, "failed", f"{group.num_lost} members lost")

    def _reject(self, number: int, outcome: str, reason: str) -> None:
        """End a group that is unfinished or ready, and free its place."""
        if number in self._open:
            opened = self._open.pop(number)
            self._abandon(opened, list(opened.running))
            domain = opened.domain
        else:
            domain = self._ready.pop(number).domain
        self._rejected += 1
        self._reasons[f"group {outcome}: {_first_line(reason)}"] += 1
        self._count(domain, in_flight=-1, **{outcome: 1})

    def _drop_stale(self) -> None:
        """Reject ready groups that are too old, and unfinished ones that will certainly be."""
        oldest_allowed = self.version - self.config.max_staleness
        stale = [number for number, group in self._ready.items() if group.oldest_version < oldest_allowed]
        stale += [n for n, g in self._open.items() if g.cannot_be_as_young_as(oldest_allowed, self.config)]
        for number in sorted(stale):
            self._reject(number, "stale", f"older than {self.config.max_staleness} versions")

    def _abandon(self, group: OpenGroup, members: Sequence[int]) -> None:
        self._count_episodes(abandoned=len(members), running=-len(members))
        for member in members:
            del group.running[member]

    def _raise_if_hopeless(self) -> None:
        if self._rejected > self.config.rejected_limit:
            raise BatchNeverFullError(
                f"{self._rejected} groups were rejected since the last batch, more than algorithm.groups.max_rejected_per_step allows "
                f"({self.config.rejected_limit}). {self._history()} Loosen the filters, choose easier or harder tasks, fix the failures, "
                "or raise the limit."
            )

    def _count(self, domain: str, **changes: int) -> None:
        before = self._by_domain.get(domain, GroupCounts())
        self._by_domain[domain] = _plus(before, changes)
        self._total = _plus(self._total, changes)
        assert self._total.add_up, self._total
        assert self._total.in_flight == len(self._open) + len(self._ready), (self._total, len(self._open), len(self._ready))
        assert self._num_held <= self.config.num_places, (self._num_held, self.config)

    def _count_episodes(self, **changes: int) -> None:
        before = self._episodes
        self._episodes = _plus(before, changes)
        assert self._episodes.add_up, self._episodes
        assert self._episodes.running >= 0, self._episodes


_Counts = TypeVar("_Counts", GroupCounts, EpisodeCounts)


def _plus(counts: _Counts, *changes: Mapping[str, int]) -> _Counts:
    names = {name for change in changes for name in change}
    return replace(counts, **{name: vars(counts)[name] + sum(change.get(name, 0) for change in changes) for name in names})


def _first_line(text: str, most: int = 120) -> str:
    """First line of a reason, cut to `most` characters, so that tracebacks and addresses stay readable."""
    line = (text.strip().splitlines() or ["(no reason given)"])[0]
    return line if len(line) <= most else line[: most - 1] + "…"
