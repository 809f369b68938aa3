"""What every check has at hand: the simulator, the episodes that others are compared with, and how a check ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from embodied_rl.sim.checks.episodes import Part, Player, Trajectory, difference, random_actions
from embodied_rl.sim.env import SimEnv
from embodied_rl.types import SimSpec


class Failed(Exception):
    """A property that does not hold; the message is the report's line."""


class Skipped(Exception):
    """A property that cannot be asked for; the message says why."""


class Elsewhere(Protocol):
    """Plays in a new process; raises Skipped where that is not possible."""

    def __call__(
        self,
        parts: Mapping[int, Part],
        num_steps: int,
        options: Mapping[str, Any] | None,
        snapshot: tuple[bytes, int] | None,
    ) -> dict[int, Trajectory]: ...


class Session:
    """The simulator under test, and the episodes that everything is compared with: its first ones.

    Raises:
        whatever the simulator raises while it is built, reset and stepped for the first time.
    """

    def __init__(
        self,
        build: Callable[[int], SimEnv],
        num_envs: int,
        steps: int,
        continuation_steps: int,
        longest_episode: int,
        seed: int,
        elsewhere: Elsewhere,
    ) -> None:
        self.build, self.num_envs, self.steps, self.seed = build, num_envs, steps, seed
        self.continuation_steps, self.longest_episode = continuation_steps, longest_episode
        self._elsewhere = elsewhere
        self.broken: set[str] = set()
        self.options: dict[str, Any] | None = None
        """With which a used environment begins an episode that owes nothing to earlier ones."""
        self.played_out: dict[int, tuple[Part, Trajectory]] | None = None
        """Episodes of up to `longest_episode` steps, once a check has asked for them."""
        self.sim = build(num_envs)
        self.spec: SimSpec = self.sim.spec
        self.parts = {i: self.part(i) for i in range(num_envs)}
        try:
            player = Player(self.sim, num_envs)
            player.reset(self.parts)
            self.reference = player.run(steps)
        except BaseException:
            with suppress(Exception):
                self.sim.close()
            raise

    def part(self, number: int, length: int | None = None) -> Part:
        """The `number`-th episode of this check."""
        seed = 1000 * (self.seed + 1) + number
        return Part(seed, random_actions(self.spec, length or self.steps, seed))

    @contextmanager
    def fresh(self, num_envs: int | None = None) -> Iterator[SimEnv]:
        """A simulator that has played nothing yet."""
        sim = self.build(num_envs or self.num_envs)
        try:
            yield sim
        finally:
            sim.close()

    @contextmanager
    def exact(self, **hooks: Any) -> Iterator[Player]:
        """A player whose episodes can be compared with the reference: of the used simulator, or of a new one where histories show."""
        if "history" in self.broken:
            with self.fresh() as sim:
                yield Player(sim, self.num_envs, **hooks)
        else:
            yield Player(self.sim, self.num_envs, **hooks)

    def elsewhere(
        self,
        parts: Mapping[int, Part],
        num_steps: int,
        options: Mapping[str, Any] | None = None,
        snapshot: tuple[bytes, int] | None = None,
    ) -> dict[int, Trajectory]:
        return self._elsewhere(parts, num_steps, options, snapshot)

    def close(self) -> None:
        self.sim.close()

    def described(self, trajectories: Mapping[int, Trajectory]) -> str:
        lengths = [trajectory.num_steps for trajectory in trajectories.values()]
        total = f"{min(lengths)}–{max(lengths)}" if min(lengths) != max(lengths) else f"{lengths[0]}"
        return f"{len(lengths)} episode{'s' if len(lengths) > 1 else ''} of {total} steps, bit by bit"


def same(expected: Mapping[int, Trajectory], actual: Mapping[int, Trajectory], what: str) -> None:
    """Raises Failed for the first difference."""
    for i, trajectory in actual.items():
        found = difference(expected[i], trajectory)
        if found is not None:
            raise Failed(f"{what}: environment {i}: {found}")
