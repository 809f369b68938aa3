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


SnapshotKind = Literal["exact", "approximate", "replay", "none"]
"""exact: `snapshot` and `restore` of the simulator continue bit by bit. approximate: they exist, and what follows drifts (check_sim
measures by how much). replay: no state of its own is saved; the episode is played again from its seed, which is exact where the
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
    info: list[dict[str, Any] | None]
    """[n] the simulator's own info of this step."""

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
    """T lockstep transitions of N slots, time-major: what the collector gives to the learner."""

    observation: Observation
    """{key: [T, N, ...]} what the policy saw before acting."""
    action: np.ndarray
    """[T, N, A] normalised and unclipped, as sampled (int64 [T, N, 1] for discrete)."""
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
    policy_version: int
    """Version of the weights that acted."""
    episodes: tuple[EpisodeSummary, ...]

    @property
    def num_steps(self) -> int:
        return int(self.reward.size)
