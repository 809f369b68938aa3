"""The members of one group while they are being played: only the group queue uses them, except for `Assignment`."""

from __future__ import annotations

from dataclasses import dataclass, field

from embodied_rl.rollout.schedule import GroupQueueConfig
from embodied_rl.types import Episode, EpisodeGroup


@dataclass(frozen=True)
class Assignment:
    """One episode to play: what `GroupQueue.next_assignment` hands to the collector, and the collector hands back."""

    group: int
    """Number of the group; the run's randomness of actions may derive from (group, member, attempt)."""
    member: int
    """0 … group_size + redundancy − 1"""
    seed: int
    """Of the reset; the same for all members: they begin in the same state."""
    domain: str
    version: int
    """Of the weights when it was handed out: none of its action units is older."""
    attempt: int = 0
    """How often this member had failed before."""


@dataclass
class Attempt:
    """A running episode."""

    assignment: Assignment
    started_s: float
    progressed_s: float

    def overdue(self, now_s: float, step_timeout_s: float | None, episode_timeout_s: float | None) -> str | None:
        """Which limit it has passed; None: neither."""
        if episode_timeout_s is not None and now_s - self.started_s > episode_timeout_s:
            return f"episode longer than {episode_timeout_s:g} s"
        if step_timeout_s is not None and now_s - self.progressed_s > step_timeout_s:
            return f"no message for {step_timeout_s:g} s"
        return None


@dataclass
class OpenGroup:
    """A group that is admitted and not complete."""

    number: int
    domain: str
    seed: int
    created_version: int
    running: dict[int, Attempt] = field(default_factory=dict)
    """{member: attempt}"""
    accepted: dict[int, Episode] = field(default_factory=dict)
    """{member: episode}, in the order of arrival."""
    num_lost: int = 0
    """Members without a retry left."""

    def start(self, member: int, attempt: int, version: int, now_s: float) -> Assignment:
        assignment = Assignment(self.number, member, self.seed, self.domain, version, attempt)
        self.running[member] = Attempt(assignment, now_s, now_s)
        return assignment

    def accept(self, member: int, episode: Episode) -> None:
        del self.running[member]
        self.accepted[member] = episode

    def complete(self) -> EpisodeGroup:
        """Episodes in the order of members, so that the order of arrival does not show."""
        episodes = tuple(self.accepted[member] for member in sorted(self.accepted))
        return EpisodeGroup(self.number, self.domain, self.seed, self.created_version, episodes)

    def oldest_version(self, current: int) -> int:
        """The oldest version that anything of the group may carry when it is complete."""
        versions = [episode.oldest_version for episode in self.accepted.values()]
        return min([current, *versions, *(attempt.assignment.version for attempt in self.running.values())])

    def cannot_be_as_young_as(self, version: int, config: GroupQueueConfig) -> bool:
        """Whether the group will contain something older than `version` whatever happens: an accepted episode, or one that runs
        and is needed, since a running episode has acted with the weights that it was handed out with."""
        if any(episode.oldest_version < version for episode in self.accepted.values()):
            return True
        too_old = sum(attempt.assignment.version < version for attempt in self.running.values())
        return config.rollouts_per_group - self.num_lost - too_old < config.group_size
