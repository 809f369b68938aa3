"""Play episodes with a bare `SimEnv` and keep them as arrays, to compare two of them bit by bit.

`embodied_rl.sim.check` uses this in its own process and in the new interpreters that it starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied_rl.sim.env import SimEnv
from embodied_rl.specs import PartValue
from embodied_rl.types import SimSpec, StepBuffers

SCALARS = ("reward", "terminated", "truncated", "success")


@dataclass(frozen=True)
class Part:
    """One environment's seed and fixed actions."""

    seed: int
    actions: np.ndarray
    """[T, A] in the simulator's units, or an object array [T] of `str`."""


@dataclass
class Trajectory:
    """Everything that one environment put out. Observations begin with the reset's, or, after a restore, with the first step's."""

    observation: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """{key: [rows]}; of parts of varying size, see `_canonical`."""
    scalars: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SCALARS})
    """{reward, terminated, truncated, success: one per step}."""

    @property
    def num_steps(self) -> int:
        return len(self.scalars["reward"])

    @property
    def ended(self) -> bool:
        """Whether the last step ended the episode."""
        return self.num_steps > 0 and bool(self.scalars["terminated"][-1] or self.scalars["truncated"][-1])

    def tail(self, steps: int) -> Trajectory:
        """Steps after the first `steps`, as a restored environment shows them."""
        return Trajectory(
            {key: rows[steps + 1 :] for key, rows in self.observation.items()}, {name: rows[steps:] for name, rows in self.scalars.items()}
        )

    def flat(self, row: int) -> np.ndarray:
        """[D] float64: all numbers of one observation, in parts of fixed size."""
        parts = [rows[row] for _, rows in sorted(self.observation.items())]
        return np.concatenate([np.zeros(0), *(part.astype(np.float64).ravel() for part in parts if part.dtype.kind != "S")])

    def same_observation(self, row: int, other: Trajectory, other_row: int) -> bool:
        return all(rows[row].tobytes() == other.observation[key][other_row].tobytes() for key, rows in self.observation.items())


@dataclass(frozen=True)
class Difference:
    """First difference between two episodes."""

    what: str
    step: int
    """Step of the difference; 0 is the reset."""
    drift: float
    """Largest absolute difference of any observed number or reward over the steps that both have."""

    def __str__(self) -> str:
        place = "at the reset" if self.step == 0 else f"at step {self.step}"
        return f"{self.what} differs first {place}; largest difference {self.drift:.2g}"


def difference(expected: Trajectory, actual: Trajectory, first_step: int = 0) -> Difference | None:
    """Compare bit by bit; None if nothing differs. `first_step`: number of the first observation."""
    found: list[tuple[int, str]] = []
    drift, shift = 0.0, max(first_step, 1)
    pairs = [(f"observation '{key}'", first_step, rows, actual.observation[key]) for key, rows in expected.observation.items()]
    pairs += [(f"'{name}'", shift, rows, actual.scalars[name]) for name, rows in expected.scalars.items()]
    for what, first, rows, others in pairs:
        both = list(zip(rows, others, strict=False))
        if parted := [row for row, (a, b) in enumerate(both) if a.tobytes() != b.tobytes()]:
            found.append((first + parted[0], what))
            if what.startswith("observation") or what == "'reward'":
                drift = max(drift, *(_distance(*both[row]) for row in parted))
    if not found and expected.num_steps != actual.num_steps:
        return Difference(f"the length, {actual.num_steps} steps instead of {expected.num_steps},", shift + actual.num_steps, drift)
    if not found:
        return None
    step, what = min(found, key=lambda one: one[0])  # of differences in one step, the observation's comes first
    return Difference(what, step, drift)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind == "S":
        return math.inf
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0.0))


def _canonical(value: PartValue) -> np.ndarray:
    """A value of varying size as one byte string; these are equal exactly if the values are."""
    if isinstance(value, np.ndarray):
        return np.array(f"{value.dtype.str}{value.shape}".encode() + value.tobytes() + b"=")
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=repr)
    return np.array(text.encode("utf-8", "surrogatepass") + b"=")  # numpy drops zeros at the end


def random_actions(spec: SimSpec, num_steps: int, seed: int) -> np.ndarray:
    """Actions within the simulator's bounds: [num_steps, A], or an object array of short texts."""
    rng, action = np.random.default_rng(seed), spec.action
    if action.kind == "text":
        texts = (f"\\boxed{{{rng.integers(0, 10)}}}" if rng.random() < 0.9 else str(rng.integers(0, 100)) for _ in range(num_steps))
        return np.fromiter(texts, object, num_steps)
    if action.kind == "discrete":
        return rng.integers(0, action.num_actions, (num_steps, 1))
    low, high = np.nan_to_num(action.low, neginf=-1.0), np.nan_to_num(action.high, posinf=1.0)  # the check "spec" reports infinite bounds
    return rng.uniform(low, high, (num_steps, action.dim)).astype(np.float32)


class Player:
    """Plays `Part`s in the environments of one simulator. It stops stepping an environment whose episode has ended.

    A simulator that steps all environments together gets all in every step; those without a `Part` or a running episode are unrecorded.

    Args:
        out: rows for the simulator to fill; None: plain memory.
        before: called with the rows before every reset and step.
        after_step: called after every step with the simulator's actions, which it must not have kept.
    """

    def __init__(
        self,
        sim: SimEnv,
        num_envs: int,
        out: StepBuffers | None = None,
        *,
        before: Callable[[StepBuffers], object] | None = None,
        after_step: Callable[[np.ndarray], object] | None = None,
    ) -> None:
        self.sim, self.num_envs = sim, num_envs
        self.out = out if out is not None else StepBuffers.allocate(sim.spec, num_envs)
        self._before, self._after_step = before, after_step
        self._parts: dict[int, Part] = {}
        self._position: dict[int, int] = {}
        self._live: dict[int, Trajectory] = {}
        self.trajectories: dict[int, Trajectory] = {}

    def reset(self, parts: Mapping[int, Part], options: Mapping[str, Any] | None = None) -> None:
        """Begin the episodes of `parts` in their order; forget earlier ones."""
        chosen = dict(parts)
        if self.sim.spec.steps_together:
            length = len(next(iter(parts.values())).actions)
            others = {i: 900_001 + i for i in range(self.num_envs) if i not in chosen}
            chosen |= {i: Part(seed, random_actions(self.sim.spec, length, seed)) for i, seed in others.items()}
        self._parts, self._position = chosen, dict.fromkeys(chosen, 0)
        if self._before is not None:
            self._before(self.out)
        self.sim.reset(list(chosen), [part.seed for part in chosen.values()], self.out, options)
        self.trajectories = {i: Trajectory() for i in parts}
        self._live = dict(self.trajectories)
        for i, trajectory in self.trajectories.items():
            self._record_observation(i, trajectory)

    def adopt(self, env_id: int, part: Part, position: int) -> None:
        """Record an environment that was restored after `position` steps of `part`; forget the others."""
        self._parts = {**(self._parts if self.sim.spec.steps_together else {}), env_id: part}
        self._position[env_id] = position
        self.trajectories = {env_id: Trajectory({key: [] for key in self.sim.spec.observation})}
        self._live = dict(self.trajectories)

    def run(self, num_steps: int) -> dict[int, Trajectory]:
        """Step up to `num_steps` times, until every episode has ended or run out of actions."""
        for _ in range(num_steps):
            self._live = {i: t for i, t in self._live.items() if not t.ended and self._position[i] < len(self._parts[i].actions)}
            if not self._live:
                break
            self.step(list(self._parts) if self.sim.spec.steps_together else [i for i in self._parts if i in self._live])
        return self.trajectories

    def play(self, parts: Mapping[int, Part], num_steps: int, options: Mapping[str, Any] | None = None) -> dict[int, Trajectory]:
        """`reset` and `run`."""
        self.reset(parts, options)
        return self.run(num_steps)

    def step(self, ids: list[int]) -> None:
        rows = [self._parts[i].actions[self._position[i] % len(self._parts[i].actions)] for i in ids]
        actions = np.fromiter(rows, object) if self.sim.spec.action.kind == "text" else np.stack(rows)
        if self._before is not None:
            self._before(self.out)
        self.sim.step(ids, actions, self.out)
        if self._after_step is not None:
            self._after_step(actions)
        for i in ids:
            self._position[i] += 1
            if (trajectory := self._live.get(i)) is not None:
                for name, values in trajectory.scalars.items():
                    values.append(self.out.scalars[name][i].copy())
                self._record_observation(i, trajectory)
        if self.sim.spec.steps_together:
            # Restart finished episodes, as a manager would.
            over = [i for i in ids if self.out.terminated[i] or self.out.truncated[i]]
            if over and any(not t.ended for t in self._live.values()):
                self.sim.reset(over, [self._parts[i].seed for i in over], self.out)

    def _record_observation(self, i: int, trajectory: Trajectory) -> None:
        for key, rows in self.out.observation.items():
            row = _canonical(rows[i]) if key in self.sim.spec.variables else np.array(rows[i])
            trajectory.observation.setdefault(key, []).append(row)


# ---- shared by all checks ---------------------------------------------------------------------------------------------


class Failed(Exception):
    """A property does not hold; the message is the report's line."""


class Skipped(Exception):
    """A property cannot be checked; the message says why."""


@dataclass(eq=False)
class Session:
    """The simulator under test, and its first episodes, the reference for every comparison.

    Raises what the simulator raises while it is built, reset and stepped for the first time.
    """

    build: Callable[[int], SimEnv]
    num_envs: int
    steps: int
    continuation_steps: int
    longest_episode: int
    seed: int
    elsewhere: Callable[..., dict[int, Trajectory]]
    """See `embodied_rl.sim.check._play_elsewhere`, whose first arguments are bound."""
    broken: set[str] = field(default_factory=set)
    options: dict[str, Any] | None = None
    """Reset options with which a used environment begins an episode that is independent of earlier ones."""
    played_out: dict[int, tuple[Part, Trajectory]] | None = None
    """Episodes of up to `longest_episode` steps; None until a check needs them."""

    def __post_init__(self) -> None:
        self.sim = self.build(self.num_envs)
        self.spec: SimSpec = self.sim.spec
        self.parts = {i: self.part(i) for i in range(self.num_envs)}
        try:
            self.reference = Player(self.sim, self.num_envs).play(self.parts, self.steps)
        except BaseException:
            with suppress(Exception):
                self.sim.close()
            raise

    def part(self, number: int, length: int | None = None) -> Part:
        """The `number`-th episode of this check."""
        seed = 1000 * (self.seed + 1) + number
        return Part(seed, random_actions(self.spec, length or self.steps, seed))

    @contextmanager
    def fresh(self) -> Iterator[SimEnv]:
        """A simulator that has not played yet."""
        sim = self.build(self.num_envs)
        try:
            yield sim
        finally:
            sim.close()

    @contextmanager
    def exact(
        self, *, before: Callable[[StepBuffers], object] | None = None, after_step: Callable[[np.ndarray], object] | None = None
    ) -> Iterator[Player]:
        """Player whose episodes can be compared with the reference: of the used simulator, or of a new one if its history shows."""
        if "history" in self.broken:
            with self.fresh() as sim:
                yield Player(sim, self.num_envs, before=before, after_step=after_step)
        else:
            yield Player(self.sim, self.num_envs, before=before, after_step=after_step)

    def same_again(self, parts: Mapping[int, Part], what: str, **watched: Callable[[Any], object]) -> None:
        """Play `parts` with `exact`. Raises Failed if an episode of the reference differs; other environments may play anything."""
        with self.exact(**watched) as player:
            played = player.play(parts, self.steps, self.options)
        same(self.reference, {i: played[i] for i in played if parts[i] is self.parts[i]}, what)

    def described(self, trajectories: Mapping[int, Trajectory]) -> str:
        lengths = [trajectory.num_steps for trajectory in trajectories.values()]
        total = f"{min(lengths)}–{max(lengths)}" if min(lengths) != max(lengths) else f"{lengths[0]}"
        return f"{len(lengths)} episode{'s' if len(lengths) > 1 else ''} of {total} steps, bit by bit"


def same(expected: Mapping[int, Trajectory], actual: Mapping[int, Trajectory], what: str) -> None:
    """Raise Failed for the first difference."""
    for i, trajectory in actual.items():
        found = difference(expected[i], trajectory)
        if found is not None:
            raise Failed(f"{what}: environment {i}: {found}")
