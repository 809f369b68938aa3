"""What a recorded episode holds, whatever file it came from; numpy only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from embodied_rl.trust import RECORDING, sign
from embodied_rl.types import Observation, SimSpec

FORMAT_VERSION = 1
Value = npt.ArrayLike | Mapping[str, object] | None
"""A row of a column: an array or a number, a text, or what JSON can hold."""
STEP_COLUMNS = ("action", "reward", "terminated", "truncated", "success")
"""Columns per step that every episode has, and …"""
OPTIONAL_COLUMNS = ("sampled_action", "log_prob", "value", "policy_version", "chunk")
"""… those that it may lack."""


@dataclass(frozen=True, eq=False)
class RecordedEpisode:
    """T steps of one environment between two resets, and the T + 1 observations around them.

    Raises ValueError when the lengths do not agree.
    """

    seed: int
    """Of the reset."""
    observation: Observation
    """{key: [T + 1, ...]} before each step, and after the last; parts of varying size are object arrays."""
    action: np.ndarray
    """[T, A] float32 (int64 [T, 1] for discrete, an object array [T] of str for text): what the simulator was given."""
    reward: np.ndarray
    """[T] float32"""
    terminated: np.ndarray
    """[T] bool; only the last can be True."""
    truncated: np.ndarray
    """[T] bool; only the last can be True."""
    success: np.ndarray
    """[T] bool: success at this step."""
    sampled_action: np.ndarray | None = None
    """[T, A] normalised and unclipped, as the policy drew it: what `log_prob` is the log-probability of. None: not known."""
    log_prob: np.ndarray | None = None
    """[T, L] under the policy that acted, of `sampled_action` (of `action` where the choice is discrete); None: not known."""
    value: np.ndarray | None = None
    """[T] the acting policy's estimate before each step; None: not known."""
    policy_version: np.ndarray | None = None
    """[T] int64 version of the weights that acted."""
    state: Mapping[str, np.ndarray] | None = None
    """{name: [T + 1, ...]} the simulator's physical state around the steps, where it was recorded."""
    snapshots: Mapping[int, bytes] = field(default_factory=dict)
    """{step t: `EnvManager.snapshot` before step t}, for the steps that were asked for."""
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    """{camera: [T + 1, H, W, 3] uint8} pictures for people, which no policy saw."""
    chunk: np.ndarray | None = None
    """[T] int64 number of the message (action chunk or turn) that each step belongs to; None: every step is one."""
    task: str | None = None
    """Of a recording with several tasks; None: the recording's only one."""
    instruction: str | None = None
    """Language instruction; None: the recording's, if any."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, JSON-able (reset options, final info, the player's name, …)."""
    same_lengths: InitVar[bool] = False
    """The caller has checked that the lengths agree, so that they are not checked again."""

    def __post_init__(self, same_lengths: bool) -> None:
        if not same_lengths:
            self._require_lengths()
        ends = (self.terminated | self.truncated)[:-1]
        if ends.any():
            raise ValueError(f"The episode ends at step {int(np.argmax(ends))}, but has {self.num_steps} steps.")

    def _require_lengths(self) -> None:
        steps = self.num_steps
        wrong = {name: len(rows) for name, rows in self.columns().items() if len(rows) != steps + ("." in name)}
        if steps < 1 or wrong:
            raise ValueError(f"An episode of {steps} steps has {steps} rows, and {steps + 1} of observations and states; got {wrong}.")

    def columns(self) -> dict[str, np.ndarray]:
        """{name: all its rows}: [T, ...] by the field's name, [T + 1, ...] as ``observation.KEY``, ``state.NAME``, ``images.CAMERA``."""
        columns = {f"observation.{key}": rows for key, rows in self.observation.items()}
        columns |= self.per_step()
        columns |= {f"state.{name}": rows for name, rows in (self.state or {}).items()}
        return columns | {f"images.{camera}": rows for camera, rows in self.images.items()}

    def per_step(self) -> dict[str, np.ndarray]:
        """{name: rows [T, ...]} of `STEP_COLUMNS`, and of those of `OPTIONAL_COLUMNS` that are known."""
        rows = {
            "action": self.action,
            "reward": self.reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "success": self.success,
            "sampled_action": self.sampled_action,
            "log_prob": self.log_prob,
            "value": self.value,
            "policy_version": self.policy_version,
            "chunk": self.chunk,
        }
        return {name: column for name, column in rows.items() if column is not None}

    @property
    def num_steps(self) -> int:
        """T"""
        return len(self.reward)

    @property
    def episode_return(self) -> float:
        """Sum of rewards, undiscounted."""
        return float(self.reward.sum(dtype=np.float64))

    @property
    def success_once(self) -> bool:
        return bool(self.success.any())

    @property
    def success_at_end(self) -> bool:
        return bool(self.success[-1])

    @property
    def complete(self) -> bool:
        """Whether the episode came to an end; a recorder that was stopped can leave one that did not."""
        return bool(self.terminated[-1] or self.truncated[-1])


@dataclass(frozen=True)
class RecordingInfo:
    """What all episodes of a recording share, and everything needed to play them again."""

    spec: SimSpec
    sim: Mapping[str, Any]
    """The simulator's configuration (`SimConfig` as a dictionary); empty for a recording that was imported from elsewhere."""
    policy: Mapping[str, Any]
    """Who acted: ``kind`` (checkpoint, expert, random, imported, training) and what identifies it (path, step, hash of the weights)."""
    command: str = ""
    """How the recording was made."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of Python, this package and the simulator's."""
    created: str = ""
    """ISO 8601, UTC."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    signature: str | None = None
    """Of `sim`, by the user whose run recorded it (`signed`); it goes along where a recording is copied."""

    def signed(self) -> RecordingInfo:
        """For the run that records `sim` itself: with this user's signature, which lets `sim` name code of the user's own later."""
        return replace(self, signature=sign(RECORDING, self.sim_bytes))

    @property
    def sim_bytes(self) -> bytes:
        """`sim` as it is signed: the same after it was written and read."""
        return json.dumps(self.sim, sort_keys=True, separators=(",", ":")).encode()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format": "embodied_rl episodes",
            "format_version": FORMAT_VERSION,
            "spec": self.spec.to_dict(),
            "sim": dict(self.sim),
            "policy": dict(self.policy),
            "command": self.command,
            "versions": dict(self.versions),
            "created": self.created,
            "metadata": dict(self.metadata),
            "signature": self.signature,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RecordingInfo:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for anything else."""
        if data.get("format") != "embodied_rl episodes" or data.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format {data.get('format')!r} version {data.get('format_version')!r}; this is 'embodied_rl episodes' {FORMAT_VERSION}"
            )
        fields = ("sim", "policy", "command", "versions", "created", "metadata")
        return RecordingInfo(SimSpec.from_dict(data["spec"]), **{name: data[name] for name in fields}, signature=data.get("signature"))
