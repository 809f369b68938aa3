"""One frozen type per stage of the data's way; numpy only, so that simulator processes stay free of torch.

Shape legend: T steps of a rollout, N slots, n slots of one message, A action dimensions (1 for a discrete action),
L action units whose log-probabilities are kept (here L = A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Observation = dict[str, np.ndarray]
"""Named arrays with the slot as first axis. ``state`` is the flat vector, ``rgb`` an image [n, H, W, 3] uint8."""


@dataclass(frozen=True)
class TensorSpec:
    """One named part of an observation."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TensorSpec:
        return TensorSpec(tuple(int(size) for size in data["shape"]), str(data["dtype"]))


@dataclass(frozen=True)
class VariableSpec:
    """One named part of an observation whose size varies: rows hold Python values and travel beside the tensors.

    Handed out as an object array [n] of `str` ("text"), of what JSON holds ("json": numbers, strings, lists, dictionaries), or
    of numpy arrays of any shape and numeric dtype ("array": images of varying size, say).
    """

    kind: Literal["text", "json", "array"]
    max_bytes: int = 2**16
    """Room of one slot. A value that needs more is an error that names the key and both sizes; it is never cut. Room that is not
    used costs no memory."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "max_bytes": self.max_bytes}


def part_spec_from_dict(data: Mapping[str, Any]) -> TensorSpec | VariableSpec:
    """The inverse of `TensorSpec.to_dict` and `VariableSpec.to_dict`."""
    return VariableSpec(data["kind"], int(data["max_bytes"])) if "kind" in data else TensorSpec.from_dict(data)


@dataclass(frozen=True)
class ActionSpec:
    """What a simulator takes: a bounded vector, one of ``num_actions`` choices, or text.

    Policies speak in normalised actions, [-1, 1] per dimension; `denormalise` maps these onto [low, high].
    """

    kind: Literal["continuous", "discrete", "text"]
    dim: int
    """A: vector length; 1 for a discrete action; 0 for text."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    num_actions: int = 0
    """Number of choices of a discrete action; 0 for others."""
    max_bytes: int = 0
    """Room for one text action; 0 for others."""

    @staticmethod
    def continuous(low: Sequence[float] | np.ndarray, high: Sequence[float] | np.ndarray) -> ActionSpec:
        lows, highs = np.asarray(low, np.float64).ravel(), np.asarray(high, np.float64).ravel()
        return ActionSpec("continuous", lows.size, tuple(lows.tolist()), tuple(highs.tolist()))

    @staticmethod
    def discrete(num_actions: int) -> ActionSpec:
        return ActionSpec("discrete", 1, num_actions=int(num_actions))

    @staticmethod
    def text(max_bytes: int = 2**16) -> ActionSpec:
        """Actions are strings: `EnvManager.send` takes a sequence of `str`, `SimEnv.step` gets a list of them."""
        return ActionSpec("text", 0, max_bytes=max_bytes)

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"

    def denormalise(self, action: np.ndarray) -> np.ndarray:
        """Clip normalised actions [..., A] to [-1, 1] and map them onto the simulator's bounds; discrete ones pass through."""
        if self.kind != "continuous":
            return action
        clipped = np.clip(action, -1.0, 1.0)
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        if (low == -1.0).all() and (high == 1.0).all():
            return clipped
        return low + (clipped + 1.0) * (0.5 * (high - low))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "dim": self.dim,
            "low": list(self.low),
            "high": list(self.high),
            "num_actions": self.num_actions,
            "max_bytes": self.max_bytes,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ActionSpec:
        return ActionSpec(
            data["kind"],
            int(data["dim"]),
            tuple(data["low"]),
            tuple(data["high"]),
            int(data["num_actions"]),
            int(data.get("max_bytes", 0)),
        )


@dataclass(frozen=True)
class ActionLayout:
    """What a policy's actions look like where they are recorded, and what randomness they take."""

    width: int
    """W: numbers of one recorded action. A, or what the policy needs to score it again (token ids, a denoising)."""
    dtype: str
    num_units: int
    """L: log-probabilities of one action."""
    noise_width: int
    noise_kind: Literal["normal", "uniform"]
    """normal: standard normal. uniform: in [0, 1)."""
    chunk_size: int = 1
    """K: steps that the simulator plays of one action."""

    @staticmethod
    def of(action: ActionSpec) -> ActionLayout:
        """Of a policy that gives the simulator's own action, normalised, step by step."""
        noise: Literal["normal", "uniform"] = "normal" if action.kind == "continuous" else "uniform"
        return ActionLayout(action.dim, action.dtype, action.dim, action.dim, noise)

    def unit_steps(self, action_dim: int) -> np.ndarray:
        """[L] int64: the step of the chunk that each action unit belongs to, of A dimensions a step."""
        return (np.arange(self.num_units) // max(action_dim, 1)) % self.chunk_size

    def noise(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """[*shape, noise_width] float32"""
        whole = (*shape, self.noise_width)
        draw = generator.standard_normal if self.noise_kind == "normal" else generator.random
        return draw(whole, dtype=np.float32)


SnapshotKind = Literal["exact", "approximate", "replay", "none"]
"""exact: `snapshot` and `restore` of the simulator continue bit by bit. approximate: they exist, and what follows drifts (check_sim
measures by how much). replay: no simulator state is saved; the episode is played again from its seed, which is exact where the
simulator is deterministic. none: an episode cannot be taken up again."""


@dataclass(frozen=True)
class SimSpec:
    """What a simulator offers; slabs are laid out from it, policies are built from it, checkpoints keep it."""

    task: str
    observation: Mapping[str, TensorSpec | VariableSpec]
    action: ActionSpec
    max_episode_steps: int | None = None
    control_hz: float | None = None
    instruction: str | None = None
    """Language instruction of the task, where it has one."""
    reports_success: bool = False
    """Whether `success` means anything for this task."""
    can_render: bool = False
    snapshots: SnapshotKind = "replay"
    """How an episode can be taken up again elsewhere: see `SnapshotKind`."""
    steps_together: bool = False
    """All environments of a process advance in one call, whichever were asked for (a GPU simulation, a VectorEnv)."""
    spaces: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """{"observation", "action"}: an adapted gymnasium environment's own, as `embodied_rl.sim.robots.spaces.describe` writes them;
    empty for a simulator that has none. Only views for other libraries read them; everything here is built from the parts above."""

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The parts of fixed size."""
        return {key: part for key, part in self.observation.items() if isinstance(part, TensorSpec)}

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """The parts of varying size."""
        return {key: part for key, part in self.observation.items() if isinstance(part, VariableSpec)}

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "observation": {key: spec.to_dict() for key, spec in self.observation.items()},
            "action": self.action.to_dict(),
            "max_episode_steps": self.max_episode_steps,
            "control_hz": self.control_hz,
            "instruction": self.instruction,
            "reports_success": self.reports_success,
            "can_render": self.can_render,
            "snapshots": self.snapshots,
            "steps_together": self.steps_together,
            **({"spaces": dict(self.spaces)} if self.spaces else {}),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SimSpec:
        return SimSpec(
            **{
                **data,
                "observation": {key: part_spec_from_dict(spec) for key, spec in data["observation"].items()},
                "action": ActionSpec.from_dict(data["action"]),
            }
        )


@dataclass(frozen=True)
class StepBuffers:
    """Rows that a simulator fills in place, one per environment of its process (often shared memory; never keep them)."""

    observation: Observation
    """{key: [n, *shape]}; parts of varying size are object arrays [n]."""
    reward: np.ndarray
    """[n] float32"""
    terminated: np.ndarray
    """[n] bool: the task's own end; nothing comes after, so its value is 0."""
    truncated: np.ndarray
    """[n] bool: cut by a limit; the value of the final observation still counts."""
    success: np.ndarray
    """[n] bool: success at this step; False where the simulator has no notion of it."""
    info: list[Mapping[str, Any] | None]
    """[n] the simulator's own info of this step; like the rows it may change with the next step."""

    @staticmethod
    def allocate(spec: SimSpec, num_envs: int) -> StepBuffers:
        """Plain memory of the right shapes: for tests, checks and simulators used without a manager."""
        return StepBuffers(
            observation={
                **{key: np.zeros((num_envs, *part.shape), part.dtype) for key, part in spec.tensors.items()},
                **{key: np.full(num_envs, None, dtype=object) for key in spec.variables},
            },
            reward=np.zeros(num_envs, np.float32),
            terminated=np.zeros(num_envs, bool),
            truncated=np.zeros(num_envs, bool),
            success=np.zeros(num_envs, bool),
            info=[None] * num_envs,
        )


@dataclass(frozen=True)
class EpisodeSummary:
    """One finished episode, as the worker counted it."""

    slot: int
    index: int
    """How many episodes this slot had finished before."""
    seed: int
    episode_return: float
    """Sum of the simulator's rewards, undiscounted and not normalised."""
    length: int
    """Steps taken."""
    success_once: bool
    """Success at any step; the figure we report as success."""
    success_at_end: bool
    terminated: bool
    final_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepBatch:
    """What `EnvManager.recv` hands out. Arrays are views into shared memory, valid until their slots are sent again."""

    slots: np.ndarray
    """[n] int64, ascending."""
    observation: Observation
    """{key: [n, ...]}; after an episode's end, the first observation of the next one (autoreset)."""
    reward: np.ndarray
    """[n] float32"""
    terminated: np.ndarray
    """[n] bool"""
    truncated: np.ndarray
    """[n] bool"""
    success: np.ndarray
    """[n] bool"""
    final_observation: Observation
    """{key: [n, ...]}; the episode's last observation where terminated or truncated, stale elsewhere."""
    episodes: tuple[EpisodeSummary, ...]
    """Episodes that ended with this step, ascending by slot."""
    aborted: np.ndarray | None = None
    """[n] bool: the episode was given up because its simulator failed; its step counts as truncated with reward 0, and it is in no
    `episodes` but in the manager's fault records. None where no slot of the batch was."""
    chunk_reward: np.ndarray | None = None
    """[n, K] float32, 0 where not executed; None unless the manager was made with chunk_size. `reward` is then their sum."""
    chunk_success: np.ndarray | None = None
    """[n, K] bool, False where not executed. `success` is then whether any step of the chunk succeeded."""
    executed: np.ndarray | None = None
    """[n, K] bool: a chunk is cut at its episode's end."""

    @property
    def done(self) -> np.ndarray:
        """[n] bool: terminated or truncated."""
        return self.terminated | self.truncated


@dataclass(frozen=True)
class Rollout:
    """T lockstep decisions of N slots, time-major: what the collector gives to the learner."""

    observation: Observation
    """{key: [T, N, ...]} what the policy saw before acting."""
    action: np.ndarray
    """[T, N, A] normalised and unclipped, as sampled (int64 [T, N, 1] for discrete); [T, N, W] where the policy has an `ActionLayout`."""
    log_prob: np.ndarray
    """[T, N, L] under the policy that acted."""
    reward: np.ndarray
    """[T, N] float32"""
    terminated: np.ndarray
    """[T, N] bool"""
    truncated: np.ndarray
    """[T, N] bool"""
    last_observation: Observation
    """{key: [N, ...]} after the last step: where the value is bootstrapped from."""
    final_observation: Observation
    """{key: [K, ...]} last observations of the K truncated episodes, in the order of np.argwhere(truncated & ~terminated)."""
    policy_version: np.ndarray
    """[T, N] int64 version of the weights that acted."""
    episodes: tuple[EpisodeSummary, ...]
    success: np.ndarray | None = None
    """[T, N] bool: success at each step; None: not kept."""
    chunk_reward: np.ndarray | None = None
    """[T, N, K] of each step of a chunk, 0 where not executed; `reward` is their sum. None: decisions are single steps."""
    executed: np.ndarray | None = None
    """[T, N, K] bool: steps of a chunk that were taken before the episode's end; None: decisions are single steps."""

    def age(self, version: int) -> int:
        """How many versions the oldest action is behind `version`."""
        return version - int(self.policy_version.min())

    @property
    def num_steps(self) -> int:
        """Environment steps."""
        return int(self.reward.size) if self.executed is None else int(np.count_nonzero(self.executed))


@dataclass(frozen=True, eq=False)
class Episode:
    """One finished episode as its T messages: what was seen, what was answered, what came of it.

    A message is one decision: a step of a robot, a chunk of K steps, or a turn of a language agent. Raises ValueError when the
    shapes do not agree or an action unit that counts carries no number.
    """

    observation: Observation
    """{key: [T, ...]} what the policy saw before each message; parts of varying size are object arrays [T]."""
    action: np.ndarray
    """[T, ...] as sampled: normalised and unclipped vectors, choices, token ids, or texts (object array)."""
    log_prob: np.ndarray
    """[T, L] under the policy that acted; 0.0 where mask is False."""
    reward: np.ndarray
    """[T] of a whole message: a chunk's rewards summed."""
    terminated: bool
    """The task's own end: nothing comes after."""
    truncated: bool
    """Cut by a limit: the value of the final observation still counts."""
    success: bool
    """At any step; False where the simulator has no notion of it."""
    seed: int
    """Of the reset; equal within a group."""
    domain: str
    """Task or data set that the episode belongs to."""
    policy_version: np.ndarray
    """[T] int64 version of the weights that sampled each message, or [T, L] of each action unit where weights change within one."""
    final_observation: Observation
    """{key: [...]} after the last message, without the axis T."""
    mask: np.ndarray | None = None
    """[T, L] bool: action units that the policy chose itself; None: all."""
    executed: np.ndarray | None = None
    """[T, K] bool: steps of a chunk that were taken before the episode's end; None: messages are single steps."""
    chunk_reward: np.ndarray | None = None
    """[T, K] reward of each step of a chunk, 0 where not executed; None: messages are single steps."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Nested mappings of what else is known (task, difficulty, a judge's score, …); filters and reward keys reach into it by dotted
    paths such as ``metadata.task.difficulty``."""

    def __post_init__(self) -> None:
        length = self.num_messages
        shapes: dict[str, tuple[int, ...]] = {f"observation.{key}": part.shape[:1] for key, part in self.observation.items()}
        shapes |= {"action": self.action.shape[:1], "reward": self.reward.shape, "log_prob": self.log_prob.shape[:1]}
        shapes |= {"policy_version": self.policy_version.shape[:1]}
        shapes |= {name: part.shape[:1] for name in ("mask", "executed", "chunk_reward") if (part := getattr(self, name)) is not None}
        wrong = {name: shape for name, shape in shapes.items() if shape != (length,)}
        if length < 1 or wrong:
            raise ValueError(f"An episode of {length} messages needs at least one, and this first axis everywhere; got {wrong}.")
        units = self.log_prob.shape
        if len(units) != 2 or self.policy_version.shape not in (units, units[:1]) or (self.mask is not None and self.mask.shape != units):
            given = [units, self.policy_version.shape, None if self.mask is None else self.mask.shape]
            raise ValueError(f"log_prob and mask must be [T, L], policy_version [T] or [T, L]; got {given}.")
        for name in ("executed", "chunk_reward"):
            part = getattr(self, name)
            if part is not None and part.ndim != 2:
                raise ValueError(f"{name} must be [T, K], got {part.shape}.")

    @property
    def num_messages(self) -> int:
        """T"""
        return int(self.reward.shape[0])

    @property
    def num_steps(self) -> int:
        """Environment steps: those executed of every chunk, else one per message."""
        return self.num_messages if self.executed is None else int(np.count_nonzero(self.executed))

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of rewards, in float64."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def oldest_version(self) -> int:
        """Smallest version among the action units that count (all of them, should none count)."""
        return int(self._counted_versions().min())

    @property
    def is_finite(self) -> bool:
        """Whether every reward, and every log-probability that counts, is a finite number."""
        counted = self.log_prob if self.mask is None else self.log_prob[self.mask]
        return bool(np.isfinite(self.reward).all() and np.isfinite(counted).all())

    def _counted_versions(self) -> np.ndarray:
        if self.mask is None or not self.mask.any():
            return self.policy_version
        return self.policy_version[self.mask if self.policy_version.ndim == 2 else self.mask.any(axis=1)]


@dataclass(frozen=True, eq=False)
class EpisodeGroup:
    """G episodes from the same initial state: what advantages are compared within, and what a training batch consists of.

    Raises ValueError when there is none, or when seeds or domains differ: episodes of several groups were mixed.
    """

    number: int
    """Counts the groups of a run; the seed and the domain follow from it."""
    domain: str
    seed: int
    created_version: int
    """Version of the weights when the group was admitted."""
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        origins = {(episode.domain, episode.seed) for episode in self.episodes}
        if origins != {(self.domain, self.seed)}:
            raise ValueError(
                f"Group {self.number} must hold episodes of domain '{self.domain}' and only seed {self.seed}, got {sorted(origins)}."
            )

    @property
    def num_episodes(self) -> int:
        """G"""
        return len(self.episodes)

    @property
    def num_messages(self) -> int:
        return sum(episode.num_messages for episode in self.episodes)

    @property
    def scores(self) -> np.ndarray:
        """[G] float64 returns, undiscounted."""
        return np.array([episode.episode_return for episode in self.episodes], np.float64)

    @property
    def mean_score(self) -> float:
        return float(self.scores.mean())

    @property
    def success_rate(self) -> float:
        return float(np.mean([episode.success for episode in self.episodes]))

    @property
    def oldest_version(self) -> int:
        return min(episode.oldest_version for episode in self.episodes)

    def age(self, version: int) -> int:
        """Versions between the oldest action unit and the weights `version` that it would train now."""
        return version - self.oldest_version
