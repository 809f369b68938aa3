"""Recorded episodes as training data: minibatches of steps, drawn by a seed, and transitions for learning with a critic.

Shape legend: T units of one sequence (steps, or messages of several steps), S parallel slots, B transitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied_rl.episodes.recording import STEP_COLUMNS, EpisodeBlock, Recording, RecordingError, joined
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.specs import spec_differences
from embodied_rl.types import ActionSpec, Observation, Rollout, SimSpec

RewardKind = Literal["recorded", "success"]
"""recorded: the simulator's reward. success: 1 at a successful step, after which nothing counts, else 0."""


@dataclass(frozen=True)
class Transitions:
    """Transitions for a critic: Q(observation, action) ≈ reward + discount · V(next_observation)."""

    observation: Observation
    """Observations {key: [B, ...]} before the actions."""
    action: np.ndarray
    """Actions [B, A] float32 normalised, within [-1, 1]; int64 [B, 1] for discrete. Messages: [B, K, A], 0 if not executed."""
    reward: np.ndarray
    """[B] float32 discounted sum of rewards until the next observation."""
    discount: np.ndarray
    """[B] float32 γ to the power of the number of steps, 0 after a terminated step."""
    next_observation: Observation
    """{key: [B, ...]}; for a truncated episode its final observation. Undefined where discount is 0."""
    executed: np.ndarray | None = None
    """[B, K] bool: which of the actions [B, K, A] exist; None: actions are single steps."""

    @property
    def num_rows(self) -> int:
        """Number of transitions, B."""
        return len(self.reward)

    def columns(self) -> dict[str, np.ndarray]:
        """``observation.<key>``, ``next_observation.<key>``, ``action``, ``reward``, ``discount`` and, for chunks, ``executed``."""
        own = {"action": self.action, "reward": self.reward, "discount": self.discount}
        own |= {} if self.executed is None else {"executed": self.executed}
        before = {f"observation.{key}": part for key, part in self.observation.items()}
        return {**before, **{f"next_observation.{key}": part for key, part in self.next_observation.items()}, **own}

    @staticmethod
    def of_columns(columns: Mapping[str, np.ndarray]) -> Transitions:
        """Inverse of `columns`."""

        def below(side: str) -> Observation:
            return {name.removeprefix(f"{side}."): part for name, part in columns.items() if name.startswith(f"{side}.")}

        own = (columns["action"], columns["reward"], columns["discount"], below("next_observation"), columns.get("executed"))
        return Transitions(below("observation"), *own)

    @staticmethod
    def concatenate(parts: list[Transitions]) -> Transitions:
        """Concatenate at least one set of transitions."""
        if len(parts) == 1:
            return parts[0]
        first, *others = [part.columns() for part in parts]
        return Transitions.of_columns({name: np.concatenate([rows, *(other[name] for other in others)]) for name, rows in first.items()})


@dataclass(frozen=True)
class Windows:
    """Returns of the n units that begin at each unit of a sequence."""

    reward: np.ndarray
    """[T, ...] float32: r_t + c_t r_{t+1} + c_t c_{t+1} r_{t+2} + …, with the units' discounts c."""
    end: np.ndarray
    """[T, ...] int64 last unit of the window; the next observation follows it."""
    discount: np.ndarray
    """[T, ...] float32 product of the window's c, 0 if its last unit terminated."""


def n_step_windows(reward: np.ndarray, factor: np.ndarray | float, terminated: np.ndarray, truncated: np.ndarray, n: int) -> Windows:
    """Returns over n units; windows are cut at the end of an episode and of the sequence, where they bootstrap earlier.

    The n-step return of Sutton and Barto, Reinforcement Learning (2018), eq. 7.1. A shorter window is an equally valid target: nothing is
    omitted, and nothing of another episode is included.

    Args:
        reward: [T, ...] reward of each unit.
        factor: [T, ...] or one number: discount over each unit, γ for a step, γ^m for a message of m steps.
        terminated, truncated: [T, ...] bool: the episode ends with this unit.
        n: at least 1.
    """
    length = len(reward)
    factors = np.broadcast_to(np.asarray(factor, np.float64), reward.shape)
    total, discount = np.zeros(reward.shape), np.ones(reward.shape)
    end = np.broadcast_to(np.arange(length).reshape(-1, *[1] * (reward.ndim - 1)), reward.shape).copy()
    alive = np.ones(reward.shape, bool)
    stops = terminated | truncated
    for ahead in range(min(n, length)):
        rest = length - ahead
        going = alive[:rest]
        total[:rest] += np.where(going, discount[:rest] * reward[ahead:], 0.0)
        discount[:rest] *= np.where(going, factors[ahead:] * ~terminated[ahead:], 1.0)
        end[:rest] += going & (ahead > 0)
        going &= ~stops[ahead:]
        alive[max(rest - 1, 0) :] = False  # the sequence ends here
    return Windows(total.astype(np.float32), end, discount.astype(np.float32))


@dataclass(frozen=True)
class SeenRewards:
    """Transforms the rewards and ends of steps for a learner."""

    kind: RewardKind = "recorded"
    shaped: Callable[[np.ndarray], np.ndarray] = lambda reward: reward
    """Function from step rewards of any shape to the learner's rewards (`StepRewards.of_steps`)."""

    def __call__(self, reward: np.ndarray, terminated: np.ndarray, success: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return (rewards, ends). Raises ValueError if success is needed and unknown."""
        if self.kind == "recorded":
            return self.shaped(reward), terminated
        if success is None:
            raise ValueError("reward='success' needs the success of each step.")
        return self.shaped(success.astype(np.float32)), terminated | success


AS_RECORDED = SeenRewards()


def rollout_transitions(
    rollout: Rollout,
    keys: tuple[str, ...],
    action: np.ndarray,
    *,
    gamma: float,
    n_step: int = 1,
    rewards: SeenRewards = AS_RECORDED,
) -> Transitions:
    """Convert all decisions of a rollout [T, N] to B = T·N transitions, time-major; windows are cut at the rollout's end.

    A chunk is one decision: its discounted rewards are summed up to its last executed step, and what follows is discounted by γ to the
    power of its steps.

    `action`: [B, A] in the critics' form, or chunks [B, K, A]; steps that were not executed are set to 0.
    """
    steps, slots = rollout.reward.shape
    units, executed = decisions(rollout, gamma, rewards), None
    windows = n_step_windows(units.reward, units.factor, units.terminated, units.truncated, n_step)
    slot = np.broadcast_to(np.arange(slots), (steps, slots))
    final = np.argwhere(rollout.truncated & ~rollout.terminated)
    after: Observation = {}
    for key in keys:
        following = np.concatenate([rollout.observation[key][1:], rollout.last_observation[key][None]])
        following[final[:, 0], final[:, 1]] = rollout.final_observation[key]
        after[key] = following[windows.end, slot].reshape(steps * slots, *following.shape[2:])
    if rollout.executed is not None:
        executed = rollout.executed.reshape(steps * slots, -1)
        action = np.where(executed[..., None], action, 0).astype(action.dtype)
    return Transitions(
        {key: rollout.observation[key].reshape(steps * slots, *rollout.observation[key].shape[2:]) for key in keys},
        action,
        windows.reward.reshape(-1),
        windows.discount.reshape(-1),
        after,
        executed,
    )


@dataclass(frozen=True)
class Units:
    """Rewards and ends of the units of a sequence; all [T, ...]."""

    reward: np.ndarray
    """Discounted sum of rewards over the unit's steps."""
    factor: np.ndarray
    """γ to the power of the number of steps."""
    terminated: np.ndarray
    truncated: np.ndarray


def decisions(rollout: Rollout, gamma: float, seen: SeenRewards) -> Units:
    """Units of a rollout's decisions. With success rewards, a chunk counts up to its first success."""
    if rollout.executed is None or rollout.chunk_reward is None:
        rewards, terminated = seen(rollout.reward, rollout.terminated, rollout.success)
        return Units(rewards, np.full(rewards.shape, float(gamma)), terminated, rollout.truncated)
    rewards, over, counted = _of_chunks(rollout, rollout.executed, rollout.chunk_reward, seen)
    return _discounted(rewards, over, counted, rollout.terminated, rollout.truncated, gamma)


def _discounted(
    rewards: np.ndarray, over: np.ndarray, counted: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, gamma: float
) -> Units:
    """Units of several steps, from what each step of them [..., K] earned, whether it ends the episode, and whether it counts."""
    powers = np.power(float(gamma), np.arange(rewards.shape[-1]))
    factor = np.power(float(gamma), counted.sum(-1))
    return Units((rewards.astype(np.float64) * counted) @ powers, factor, terminated | (over & counted).any(-1), truncated)


def rewards_of_steps(rollout: Rollout, seen: SeenRewards) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(rewards, ends, mask of those that count or None) [T, N] of a rollout's steps, or [T·K, N] of those of its chunks, for running
    statistics as `EpisodeDataset.rewards`."""
    if rollout.executed is None or rollout.chunk_reward is None:
        rewards, over = seen(rollout.reward, rollout.terminated, rollout.success)
        return rewards, over | rollout.truncated, None
    rewards, over, counted = _of_chunks(rollout, rollout.executed, rollout.chunk_reward, seen)
    last = counted & (counted[..., ::-1].cumsum(-1)[..., ::-1] == 1)
    over = over | last & (rollout.terminated | rollout.truncated)[..., None]
    rewards, over, counted = (part.swapaxes(1, 2).reshape(-1, part.shape[1]) for part in (rewards * counted, over & counted, counted))
    return rewards, over, counted


def _of_chunks(rollout: Rollout, executed: np.ndarray, reward: np.ndarray, seen: SeenRewards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rewards, successes that end, steps that count) [T, N, K] of a rollout's chunks."""
    rewards, over = seen(reward, np.zeros_like(executed), rollout.chunk_success)
    return rewards, over, executed & ~_after_first(over)


def _after_first(over: np.ndarray) -> np.ndarray:
    """[..., K] whether an earlier step of the unit was the last."""
    return np.cumsum(over, axis=-1) - over > 0


class ReplayBuffer:
    """A ring of `capacity` transitions; new ones overwrite the oldest. Memory use grows as it fills."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_added = 0
        """Number of transitions ever added; the next one goes to this number modulo capacity."""
        self._columns: dict[str, np.ndarray] = {}
        """{name of `Transitions.columns`: [capacity, ...]}, allocated with the first transitions."""

    def __len__(self) -> int:
        return min(self.num_added, self.capacity)

    def add(self, transitions: Transitions) -> None:
        """Append B transitions; if more than the capacity, only the last ones."""
        rows = (self.num_added + np.arange(transitions.num_rows)) % self.capacity
        kept = slice(max(0, transitions.num_rows - self.capacity), None)
        given = transitions.columns()
        if not self._columns:
            self._make(given)
        for name, column in self._columns.items():
            column[rows[kept]] = given[name][kept]
        self.num_added += transitions.num_rows

    def _make(self, like: Mapping[str, np.ndarray]) -> None:
        # The system allocates pages of np.empty on the first write.
        try:
            self._columns = {name: np.empty((self.capacity, *part.shape[1:]), part.dtype) for name, part in like.items()}
        except MemoryError as error:
            row = sum(part[:1].nbytes for part in like.values())
            raise UserError(
                f"algorithm.off_policy.replay_capacity={self.capacity} transitions of {row:,} bytes each do not fit into memory: reduce it."
            ) from error

    def sample(self, rng: np.random.Generator, size: int) -> Transitions:
        """Draw B = size transitions with replacement. Raises ValueError if the buffer is empty."""
        rows = rng.integers(len(self), size=size)
        return Transitions.of_columns({name: column[rows] for name, column in self._columns.items()})

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Filled rows and their count: the complete state for resuming."""
        return {"num_added": np.array(self.num_added, np.int64), **{name: column[: len(self)] for name, column in self._columns.items()}}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the state exactly. Raises KeyError or ValueError for another buffer's state."""
        self.num_added = int(state["num_added"])
        rest = {name: part for name, part in state.items() if name != "num_added"}
        if self.num_added and not self._columns:
            self._make(rest)
        for name, column in self._columns.items():
            column[: len(self)] = rest[name]


EpisodeRef = tuple[Recording, int]
"""(recording, number of one of its episodes)"""
_TEXT_BYTES = 128
"""Estimated memory of a text."""
_SAMPLE, _ORDER, _EPOCH, _CHOICE = 11, 12, 13, 14
"""Streams of randomness, each for one purpose."""


@dataclass(frozen=True)
class DatasetOptions:
    """Options for the data made of recorded steps."""

    observation_keys: tuple[str, ...]
    """Parts of the observation that the learner reads."""
    gamma: float = 1.0
    n_step: int = 1
    rewards: SeenRewards = AS_RECORDED
    unit: Literal["step", "message"] = "step"
    """Unit of a transition. message: one action chunk that the recorded policy sent; its actions are [K, A]."""
    window: int | None = None
    """Window size K for cloning action chunks: a step's actions are the next K ones [K, A], as far as the episode has them."""
    action_margin: float = 0.0
    """See `ActionSpec.normalise`."""


@dataclass(frozen=True, eq=False)
class TransitionTable:
    """All transitions of some episodes in memory; observations are stored once and gathered by row.

    U units (steps or messages) of E episodes; R = rows of observations, T + 1 of each episode.
    """

    observation: Observation
    """Observations {key: [R, ...]}."""
    row: np.ndarray
    """[U] int64 row of the observation before each unit."""
    next_row: np.ndarray
    """[U] int64 row of the observation that the unit's target bootstraps from."""
    action: np.ndarray
    """[U, A], or [U, K, A] for messages, with the longest K."""
    executed: np.ndarray
    """[U] bool True, or [U, K] whether a message's step was executed."""
    reward: np.ndarray
    discount: np.ndarray

    @staticmethod
    def read(episodes: Sequence[EpisodeRef], action: ActionSpec, options: DatasetOptions) -> TransitionTable:
        """Read the episodes. Raises RecordingError for NaN or infinity in the training data."""
        seen = [f"observation.{key}" for key in options.observation_keys]
        blocks, parts, num_steps = list[EpisodeBlock](), list[np.ndarray](), 0
        # Neighbouring episodes of one recording are read at once.
        for run in _runs_of_one_recording(episodes):
            recording = run[0][0]
            block = recording.read_many([number for _, number in run], [*seen, *STEP_COLUMNS])
            bad = block.first_not_finite([*seen, "action", "reward"])
            if bad is not None:
                raise RecordingError(f"Recording '{recording.path}', episode {bad[0]}: NaN or infinity in {bad[1]}.")
            blocks.append(block)
            parts.append(num_steps + (np.arange(block.num_steps) if options.unit == "step" else _message_starts(recording, block)))
            num_steps += block.num_steps
        starts, lengths = np.concatenate(parts), np.concatenate([block.lengths for block in blocks])
        columns = {name: joined([block.columns[name] for block in blocks]) for name in STEP_COLUMNS}
        ends, stops = np.cumsum(lengths), np.append(starts[1:], num_steps)
        rewards, terminated = options.rewards(columns["reward"], columns["terminated"], columns["success"])
        acted = action.normalise(columns["action"].reshape(num_steps, -1), margin=options.action_margin)
        # An episode without an end counts as truncated: the next row belongs to another one.
        truncated = columns["truncated"].copy()
        truncated[ends - 1] = True
        units = _sum_units(starts, rewards, terminated, truncated, options.gamma)
        windows = n_step_windows(units.reward, units.factor, units.terminated, units.truncated, options.n_step)
        if options.window is not None:
            chunks, executed = _ahead(acted, starts, np.repeat(ends, lengths)[starts], options.window)
        elif options.unit == "step":
            chunks, executed = acted, np.ones(len(acted), bool)
        else:
            chunks, executed = _ahead(acted, starts, stops, int((stops - starts).max()))
        # An episode has one more observation than steps.
        before = np.repeat(np.arange(len(lengths)), lengths)[starts]
        observation = {key: _own([block.columns[f"observation.{key}"] for block in blocks]) for key in options.observation_keys}
        return TransitionTable(
            observation, starts + before, (stops + before)[windows.end], chunks, executed, windows.reward, windows.discount
        )

    @property
    def num_units(self) -> int:
        """Number of units, U."""
        return len(self.row)

    def gather(self, units: np.ndarray) -> Transitions:
        """The transitions of these units [B] int64."""
        row, next_row = self.row[units], self.next_row[units]
        return Transitions(
            {key: part[row] for key, part in self.observation.items()},
            self.action[units],
            self.reward[units],
            self.discount[units],
            {key: part[next_row] for key, part in self.observation.items()},
            self.executed[units] if self.action.ndim == 3 else None,
        )


def _message_starts(recording: Recording, block: EpisodeBlock) -> np.ndarray:
    """[U] int64 first step of each message; in episodes without message numbers, every step is one."""
    starts = []
    for number, first, length in zip(block.numbers.tolist(), block.step_starts.tolist(), block.lengths.tolist(), strict=True):
        chunk = recording.episode(number).chunk
        starts.append(first + (np.arange(length) if chunk is None else np.flatnonzero(np.append(True, np.diff(chunk) != 0))))
    return np.concatenate(starts)


def _sum_units(starts: np.ndarray, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, gamma: float) -> Units:
    """Discounted rewards within each unit. A unit that terminates early (a success that ends the episode) counts up to that step."""
    if len(starts) == len(reward):
        return Units(reward.astype(np.float64), np.full(len(reward), float(gamma)), terminated, truncated)
    stops = np.append(starts[1:], len(reward))
    steps, there = _ahead(np.stack([reward.astype(np.float64), terminated, truncated], axis=1), starts, stops, int((stops - starts).max()))
    over = steps[..., 1] > 0
    ended = np.zeros(len(starts), bool)
    return _discounted(steps[..., 0], over, there & ~_after_first(over), ended, np.asarray((steps[..., 2] > 0).any(-1)), gamma)


def _ahead(action: np.ndarray, starts: np.ndarray, stops: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[U, K, A] the next `size` actions from each start on, 0 from its stop on, and [U, K] bool where an action exists."""
    steps = starts[:, None] + np.arange(size)
    there = steps < stops[:, None]
    chunks = np.where(there[..., None], action[np.minimum(steps, len(action) - 1)], 0).astype(action.dtype)
    return chunks, there


def _runs_of_one_recording(episodes: Sequence[EpisodeRef]) -> Iterator[list[EpisodeRef]]:
    return (list(run) for _, run in itertools.groupby(episodes, key=lambda ref: id(ref[0])))


def _own(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate copies: parts may be views into files that will be closed."""
    return parts[0] if len(parts) == 1 and parts[0].flags.owndata else np.concatenate(parts)


class EpisodeDataset:
    """Steps of recorded episodes, in minibatches that depend only on (seed, number): nothing to save for a resume.

    Episodes that do not fit into `memory_mb` are read in windows: random sets of episodes that fit, new ones in each round over the
    recording. A single episode that is larger is its own window.
    """

    def __init__(
        self, episodes: Sequence[EpisodeRef], spec: SimSpec, options: DatasetOptions, *, seed: int, memory_mb: float = 1024.0
    ) -> None:
        """Prepare the dataset without reading. Raises UserError without any episode."""
        if not episodes:
            raise UserError("No recorded episodes to learn from.")
        self.spec, self.options = spec, options
        self._episodes, self._seed = list(episodes), seed
        self._steps = np.array([int(recording.lengths[number]) for recording, number in self._episodes], np.int64)
        self._bytes = (self._steps + 1) * _bytes_per_step(spec, options)
        self._budget = memory_mb * 2**20
        self._round: tuple[int, list[list[int]], np.ndarray] | None = None
        """The round that was used last, its windows, and the step of the round at which each of them ends."""
        self._loaded: tuple[list[int], TransitionTable] | None = None

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    @property
    def num_steps(self) -> int:
        return int(self._steps.sum())

    @property
    def fits(self) -> bool:
        """Whether all data are in memory."""
        return bool(self._bytes.sum() <= self._budget)

    def sample(self, number: int, size: int) -> Transitions:
        """Minibatch `number` of B = size transitions, drawn with replacement; each window has its share of the minibatches."""
        turn, place = divmod(number * self.num_steps // max(1, self.num_steps // size), self.num_steps)
        windows, stops = self._windows(turn)
        table = self._table(windows[int(np.searchsorted(stops, place, side="right"))])
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, _SAMPLE, number]))
        return table.gather(rng.integers(table.num_units, size=size))

    def epoch(self, number: int, size: int) -> Iterator[Transitions]:
        """Yield every unit once, in a new order for each epoch, in minibatches of about `size`, never a tiny rest."""
        for index, window in enumerate(self._windows(number)[0]):
            table = self._table(window)
            rng = np.random.default_rng(np.random.SeedSequence([self._seed, _EPOCH, number, index]))
            order = rng.permutation(table.num_units)
            for part in np.array_split(order, -(-len(order) // size)):
                yield table.gather(part)

    def observations(self) -> Iterator[Observation]:
        """Yield the observations {key: [n, ...]} before each unit, each once, for normalisation statistics."""
        for window in self._windows(0)[0]:
            table = self._table(window)
            yield {key: part[table.row] for key, part in table.observation.items()}

    def rewards(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rewards [n, 1], ends [n, 1] bool) of every recorded step once, episode by episode, for running statistics."""
        for run in _runs_of_one_recording(self._episodes):
            block = run[0][0].read_many([number for _, number in run], STEP_COLUMNS)
            reward, over = self.options.rewards(*(block.columns[name] for name in ("reward", "terminated", "success")))
            over = over.copy()
            over[np.cumsum(block.lengths) - 1] = True
            yield reward[:, None], over[:, None]

    # ---- windows ----------------------------------------------------------------------------------------------------

    def _table(self, window: list[int]) -> TransitionTable:
        if self._loaded is None or self._loaded[0] is not window:
            self._loaded = None  # release the old part before the new one is read
            self._loaded = (window, TransitionTable.read([self._episodes[index] for index in window], self.spec.action, self.options))
        return self._loaded[1]

    def _windows(self, turn: int) -> tuple[list[list[int]], np.ndarray]:
        """Windows of round `turn`, and the step of the round at which each ends. Each round has a new order of all episodes, cut into
        windows that fit; if all fit, it is one window."""
        if self._round is None or (self._round[0] != turn and not self.fits):
            rng, windows, size = np.random.default_rng(np.random.SeedSequence([self._seed, _ORDER, turn + 1])), list[list[int]](), 0
            order = np.arange(self.num_episodes) if self.fits else rng.permutation(self.num_episodes)
            for index in order.tolist():
                if not windows or size + self._bytes[index] > self._budget:
                    windows.append([])
                    size = 0
                windows[-1].append(index)
                size += int(self._bytes[index])
            self._round = turn, windows, np.cumsum([self._steps[window].sum() for window in windows])
        return self._round[1:]


def split_episodes(episodes: Sequence[EpisodeRef], share: float, *, seed: int) -> tuple[list[EpisodeRef], list[EpisodeRef]]:
    """Split whole episodes by the seed into (training, validation), with at least one of each if there are two and share > 0."""
    wanted = min(max(round(share * len(episodes)), 1), len(episodes) - 1) if share > 0 else 0
    chosen = set(np.random.default_rng(np.random.SeedSequence([seed, _ORDER])).permutation(len(episodes))[:wanted].tolist())
    return [e for i, e in enumerate(episodes) if i not in chosen], [episodes[i] for i in sorted(chosen)]


def choose_episodes(
    recordings: Sequence[Recording], *, only_success: bool = False, max_episodes: int | None = None, seed: int = 0
) -> list[EpisodeRef]:
    """The episodes to learn from, in the order of their recordings; of more than `max_episodes`, so many that the seed draws.
    Raises UserError, with the reason, if there is none."""
    names = ", ".join(f"'{recording.path}'" for recording in recordings)
    found = [(recording, number) for recording in recordings for number in range(len(recording))]
    if not found:
        raise UserError(f"Recording {names} has no episodes. Record some: python -m embodied_rl.record.")
    if only_success:
        good = [(recording, number) for recording, number in found if bool(recording.success_once[number])]
        if not good:
            silent = not any(recording.spec.reports_success for recording in recordings)
            reason = "its simulator does not report success" if silent else f"none of its {len(found)} episodes succeeded"
            raise UserError(
                f"Recording {names} has no successful episode: {reason}. "
                "Record a better policy, or learn from all episodes: algorithm.recorded.only_success=false, or no algorithm.warm_start."
            )
        found = good
    order = np.random.default_rng(np.random.SeedSequence([seed, _CHOICE])).permutation(len(found))
    return [found[index] for index in sorted(order[:max_episodes].tolist())]


def check_recording(recording: Recording, spec: SimSpec, keys: Sequence[str], *, same_task: bool) -> None:
    """Check that a policy of a simulator can learn from a recording.

    `same_task`: also require the same task name.

    Raises RecordingError: names every part that differs, or the observation that was not recorded.
    """
    missing = [key for key in keys if key not in recording.spec.observation]
    if missing:
        raise RecordingError(
            f"Recording '{recording.path}' has no observation '{missing[0]}', which the policy reads."
            f"{did_you_mean(missing[0], recording.spec.observation)} Record with it, or set policy.observation_key."
        )
    if differences := spec_differences(recording.spec, spec, same_task=same_task, keys=keys):
        own = recording.info.sim.get("name")
        raise RecordingError(
            f"Recording '{recording.path}' is of another simulator: {'; '.join(differences)} (recording ≠ simulator)."
            + (f" Its own is sim={own}." if own else "")
        )


def _bytes_per_step(spec: SimSpec, options: DatasetOptions) -> int:
    """Bytes of a table per step, with its bookkeeping."""
    parts = [spec.tensors[key] for key in options.observation_keys if key in spec.tensors]
    seen = sum(int(np.prod(part.shape, dtype=np.int64)) * np.dtype(part.dtype).itemsize for part in parts)
    seen += _TEXT_BYTES * (len(options.observation_keys) - len(parts))
    return seen + 8 * max(spec.action.dim, 1) * (options.window or 1) + 4 * np.dtype(np.float64).itemsize
