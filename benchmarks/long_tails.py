"""Episodes whose lengths have a long tail, and what decoding and training them takes on some GPUs: shared by two benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied_rl.config import GroupsConfig
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.groups import Assignment, GroupQueue
from embodied_rl.types import Episode


@dataclass(frozen=True)
class LongTail:
    """One run's work. All seconds are of the scaled-down benchmark."""

    num_gpus: int = 8
    group_size: int = 4
    groups_per_step: int = 16
    num_slots: int = 96
    """Episodes that are played at a time, in all."""
    median: float = 16.0
    """Messages of an episode."""
    sigma: float = 0.9
    most: int = 150
    round_base_s: float = 0.004
    """A message of every episode on a GPU: what reading the weights takes …"""
    round_per_row_s: float = 0.00005
    """… and each further episode there."""
    train_per_message_s: float = 0.0004
    """On one GPU."""
    seed: int = 0

    @property
    def episodes_per_step(self) -> int:
        return self.group_size * self.groups_per_step

    def length(self, assignment: Assignment) -> int:
        """Of an episode: a function of its group and member alone, so that all sides play the same ones."""
        rng = np.random.default_rng([self.seed, assignment.group, assignment.member])
        return int(np.clip(round(self.median * np.exp(self.sigma * rng.standard_normal())), 1, self.most))

    def round_s(self, rows: float) -> float:
        """Of one GPU with so many episodes."""
        return self.round_base_s + self.round_per_row_s * rows

    def train_s(self, messages: int, gpus: int) -> float:
        return self.train_per_message_s * messages / gpus

    def queue(self, max_staleness: int, num_slots: int) -> GroupQueue:
        """The project's own."""
        config = GroupsConfig(
            group_size=self.group_size,
            groups_per_step=self.groups_per_step,
            max_staleness=max_staleness,
            max_concurrent_groups=max(num_slots // self.group_size, 1),
        )
        return GroupQueue(config, seed=self.seed, domains=DomainMixture.single("only"))


def episode_of(assignment: Assignment, length: int, version: int) -> Episode:
    """What the queue gets: nothing but its length and versions."""
    versions = np.full(length, version, np.int64)
    versions[0] = assignment.version
    return Episode(
        observation={"state": np.zeros((length, 1), np.float32)},
        action=np.zeros((length, 1), np.float32),
        log_prob=np.zeros((length, 1), np.float32),
        reward=np.zeros(length, np.float32),
        terminated=True,
        truncated=False,
        success=False,
        seed=assignment.seed,
        domain=assignment.domain,
        policy_version=versions,
        final_observation={"state": np.zeros(1, np.float32)},
    )
