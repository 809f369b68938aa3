"""Table of advantages: what each needs, and its source. Importing this loads no tensor library.

The names are those of ``algorithm.advantage`` in the configuration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from embodied_rl.algorithms.catalogue import MethodInfo, described
from embodied_rl.errors import UserError
from embodied_rl.registry import Registry

Need = Literal["critic", "groups", "greedy_baseline", "anchors", "trajectories", "chunks"]
"""critic: values of states. groups: several episodes from the same initial state. greedy_baseline: one more episode per initial state,
played by the mode of the policy. anchors: observations that can be compared for equality. trajectories: each row knows its episode
and its step in it. chunks: actions are executed several at a time, or tokens belong to turns. No advantage needs behaviour
log-probabilities: the loss does."""

Unit = Literal["step", "chunk", "token", "episode"]


@dataclass(frozen=True)
class AdvantageInfo(MethodInfo):
    """One method of credit assignment."""

    unit: Unit = "episode"
    """Unit that gets its own advantage: a step, a chunk, a token, or a whole episode, whose action units share one."""

    @property
    def layout(self) -> Literal["time", "rows"]:
        """time: arrays [T, N] of slots. rows: scores [B] or rewards [B, L]."""
        return "time" if _OVER_TIME & {*self.inputs, *self.optional_inputs} else "rows"

    @property
    def returns_value_target(self) -> bool:
        """Whether it returns ``(advantage, returns)``; the second is the critic's target."""
        return "value" in (*self.inputs, *self.optional_inputs)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(need for array in (*self.inputs, *self.optional_inputs) for need in _NEEDS.get(array, ()))


_NEEDS: dict[str, tuple[Need, ...]] = {
    "value": ("critic",),
    "group": ("groups",),
    "greedy_score": ("greedy_baseline",),
    "executed": ("chunks",),
    "chunk_id": ("chunks",),
    "trajectory": ("trajectories",),
    "step_return": ("anchors", "trajectories"),
    "anchor_group": ("anchors", "trajectories"),
}
"""{array: what a run must provide for an advantage that takes it}"""
_TIME = ("terminated", "truncated")
_GAE = ("reward", "value", "last_value", *_TIME, "final_value")
_OVER_TIME = {*_GAE} - {"reward"}
"""Arrays of steps over time only."""
_CHUNKS: dict[str, Any] = {"inputs": ("reward", "executed", *_GAE[1:]), "optional_inputs": ()}
_DISCOUNT: dict[str, Any] = {"options": ("gamma",), "required_options": ("gamma",)}
_MASK = ("mask",)
_GROUPED, _TIMED = "embodied_rl.algorithms.grouped", "embodied_rl.algorithms.advantages"


def _of_critic(name: str, function: str, summary: str, source: str, unit: Unit, **own: Any) -> AdvantageInfo:
    """A method of GAE's family; `own` overrides the family's fields."""
    options = ("gamma", "gae_lambda")
    family: dict[str, Any] = {"inputs": _GAE, "optional_inputs": _MASK, "options": options, "required_options": options}
    return AdvantageInfo(name, f"{_TIMED}:{function}", summary, source, **{**family, **own}, unit=unit)


def _of_groups(name: str, summary: str, source: str, *, function: str = "", **own: Any) -> AdvantageInfo:
    """A comparison of the scores of a group; `own` overrides the family's fields."""
    family: dict[str, Any] = {"inputs": ("score", "group"), "optional_inputs": _MASK, "options": ("alone",)}
    return AdvantageInfo(name, f"{_GROUPED}:{function or name}", summary, source, **{**family, **own})


_ADVANTAGES = (
    _of_critic(
        "gae",
        "gae",
        "A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t",
        "Schulman et al. 2016, arXiv:1506.02438",
        "step",
    ),
    _of_critic(
        "gae_chunk",
        "chunk_gae",
        "gae between chunks of K' executed steps: R_t = sum gamma^k r_k, gamma^K' for gamma",
        "Schulman et al. 2016, arXiv:1506.02438; Sutton, Precup and Singh 1999, Artificial Intelligence 112",
        "chunk",
        **_CHUNKS,
    ),
    _of_critic(
        "gae_action",
        "action_gae",
        "gae through the executed steps of chunks, a value for each action of a chunk",
        "Zang et al. 2025 (RLinf-VLA), arXiv:2510.06710",
        "step",
        **_CHUNKS,
    ),
    AdvantageInfo(
        "reinforce",
        f"{_TIMED}:returns_to_go",
        "R_t = r_t + gamma R_(t+1)",
        "Williams 1992, Machine Learning 8",
        inputs=("reward", *_TIME),
        optional_inputs=("last_value", "final_value", "mask"),
        **_DISCOUNT,
        unit="step",
    ),
    AdvantageInfo(
        "reinforce_token",
        f"{_TIMED}:token_returns",
        "G_l = r_l + gamma G_(l+1) along the row",
        "Williams 1992, Machine Learning 8",
        inputs=("reward",),
        optional_inputs=_MASK,
        **_DISCOUNT,
        unit="token",
    ),
    AdvantageInfo(
        "reinforce_plus_plus",
        f"{_GROUPED}:reinforce_plus_plus",
        "G_l = r_l + gamma G_(l+1), whitened over the batch",
        "Hu et al. 2025, arXiv:2501.03262",
        inputs=("reward",),
        optional_inputs=_MASK,
        options=("gamma",),
        unit="token",
    ),
    _of_groups(
        "reinforce_plus_plus_baseline",
        "s - mean of the group, whitened over the batch",
        "Hu et al. 2025, arXiv:2501.03262",
        inputs=("score", "group", "mask"),
        optional_inputs=(),
    ),
    _of_groups("grpo", "(s - mean) / (std + 1e-6) of the group", "Shao et al. 2024, arXiv:2402.03300", fixed={"std": True}),
    _of_groups("dr_grpo", "s - mean of the group", "Liu et al. 2025, arXiv:2503.20783", function="grpo", fixed={"std": False}),
    _of_groups("rloo", "s - mean of the others of the group", "Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740"),
    _of_groups(
        "remax",
        "s - score of the greedy rollout",
        "Li et al. 2023, arXiv:2310.10505",
        inputs=("score", "greedy_score"),
        options=(),
    ),
    _of_groups(
        "opo",
        "s - sum(l s) / sum(l) of the group, l the rows' lengths",
        "Hao et al. 2025, arXiv:2505.23585",
        optional_inputs=("mask", "length"),
    ),
    _of_groups(
        "gpg",
        "(s - mean of the group) · B / number of rows that are not 0",
        "Chu et al. 2025, arXiv:2504.02546",
        options=("nonzero", "alone"),
    ),
    _of_groups(
        "pass_at_k",
        "best row of the group: best - second best; 0 for the others",
        "Tang et al. 2025, arXiv:2503.19595",
        options=("std",),
    ),
    AdvantageInfo(
        "gigpo",
        "embodied_rl.algorithms.anchors:gigpo",
        "grpo of episodes + w · grpo of the steps taken from equal observations of the group",
        "Feng et al. 2025, arXiv:2505.10978",
        inputs=("episode_return", "step_return", "group", "trajectory", "anchor_group"),
        optional_inputs=_MASK,
        options=("step_weight", "statistics", "normalize", "alone"),
        unit="step",
    ),
    AdvantageInfo(
        "segment_returns",
        f"{_GROUPED}:segment_returns",
        "G_k = r_k + gamma G_(k+1) over the turns of a row, shared by a turn's tokens",
        "Wang et al. 2025 (ROLL), arXiv:2506.06122",
        inputs=("reward", "mask"),
        optional_inputs=("chunk_id",),
        **_DISCOUNT,
        unit="chunk",
    ),
    AdvantageInfo(
        "ipa",
        f"{_GROUPED}:chunk_returns",
        "G_k = gamma^(distance to the last chunk) · R_final, shared by a chunk's tokens",
        "Wang et al. 2025 (ROME), arXiv:2512.24873",
        inputs=("score", "mask"),
        optional_inputs=("chunk_id",),
        **_DISCOUNT,
        unit="chunk",
    ),
)

ADVANTAGES: dict[str, AdvantageInfo] = {info.name: info for info in _ADVANTAGES}
"""{name: advantage}; a configuration names one."""

_NAMES = Registry("advantage", "advantages", {name: info.target for name, info in ADVANTAGES.items()})


def advantage_info(name: str) -> AdvantageInfo:
    """The advantage of that name, from an installed package (entry points ``embodied_rl.advantages``), or at ``package.module:function``.
    Raises UserError with the nearest name, or with what a user's own function lacks."""
    return ADVANTAGES[name] if name in ADVANTAGES else _own(name, _NAMES.target(name))


@functools.cache
def _own(name: str, target: str) -> AdvantageInfo:
    """Describe a user's own function by its arguments: over time if it takes ends or values, with a critic if it takes ``value``."""
    of_rows = {"score", "group", "length", "chunk_id", "greedy_score", "episode_return", "step_return", "trajectory", "anchor_group"}
    fields = described(name, target, arrays=_OVER_TIME | of_rows | {"reward", "mask"})
    taken = {*fields["inputs"], *fields["optional_inputs"]}
    if taken & _OVER_TIME and taken & of_rows:
        mixed = f"{sorted(taken & _OVER_TIME)[0]} [T, N] and {sorted(taken & of_rows)[0]} [B]"
        raise UserError(f"'{target}' takes {mixed}: an advantage must take either steps over time or rows, not both.")
    if not taken - {"mask"}:
        raise UserError(f"'{target}' must take at least one array of an advantage: reward, score, group, value, ….")
    return AdvantageInfo(**fields, unit="step" if taken & (_OVER_TIME | {"step_return", "anchor_group"}) else "episode")
