"""Which advantages there are, what each needs and where it comes from; importing this loads no tensor library.

The names are those of ``algorithm.advantage`` in the configuration.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from embodied_rl.algorithms.catalogue import MethodInfo, described
from embodied_rl.errors import UserError
from embodied_rl.registry import Registry

Need = Literal["critic", "groups", "greedy_baseline", "anchors", "trajectories", "chunks"]
"""critic: values of states. groups: several episodes from the same initial state. greedy_baseline: one more episode per initial state,
played by the mode of the policy. anchors: observations that can be compared for equality. trajectories: each row knows its episode
and its place in it. chunks: actions are executed several at a time, or tokens belong to turns. None needs behaviour log-probabilities:
these are a matter of the loss."""

Unit = Literal["step", "chunk", "token", "episode"]


@dataclass(frozen=True)
class AdvantageInfo(MethodInfo):
    """One way to assign credit."""

    unit: Unit = "episode"
    """What gets a separate number: a step, a chunk, a token, or a whole episode, whose action units then share one."""
    layout: Literal["time", "rows"] = "rows"
    """time: arrays [T, N] of slots. rows: scores [B] or rewards [B, L]."""
    returns_value_target: bool = False
    """Gives ``(advantage, returns)``: the second is the critic's target."""
    needs: frozenset[Need] = frozenset()


_TIME = ("terminated", "truncated")
_GAE = ("reward", "value", "last_value", *_TIME, "final_value")
_GROUP = frozenset[Need]({"groups"})
_SINGLE = ("alone",)
_GROUPED = "embodied_rl.algorithms.grouped"
_OVER_TIME = "embodied_rl.algorithms.advantages"

_ADVANTAGES = (
    AdvantageInfo(
        name="gae",
        target=f"{_OVER_TIME}:gae",
        summary="A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t",
        source="Schulman et al. 2016, arXiv:1506.02438",
        inputs=_GAE,
        optional_inputs=("mask",),
        options=("gamma", "gae_lambda"),
        required_options=("gamma", "gae_lambda"),
        unit="step",
        layout="time",
        returns_value_target=True,
        needs=frozenset({"critic"}),
    ),
    AdvantageInfo(
        name="gae_chunk",
        target=f"{_OVER_TIME}:chunk_gae",
        summary="gae between chunks of K' executed steps: R_t = sum gamma^k r_k, gamma^K' for gamma",
        source="Schulman et al. 2016, arXiv:1506.02438; Sutton, Precup and Singh 1999, Artificial Intelligence 112",
        inputs=("reward", "executed", *_GAE[1:]),
        options=("gamma", "gae_lambda"),
        required_options=("gamma", "gae_lambda"),
        unit="chunk",
        layout="time",
        returns_value_target=True,
        needs=frozenset({"critic", "chunks"}),
    ),
    AdvantageInfo(
        name="gae_action",
        target=f"{_OVER_TIME}:action_gae",
        summary="gae through the executed steps of chunks, a value for each action of a chunk",
        source="Zang et al. 2025 (RLinf-VLA), arXiv:2510.06710",
        inputs=("reward", "executed", *_GAE[1:]),
        options=("gamma", "gae_lambda"),
        required_options=("gamma", "gae_lambda"),
        unit="step",
        layout="time",
        returns_value_target=True,
        needs=frozenset({"critic", "chunks"}),
    ),
    AdvantageInfo(
        name="reinforce",
        target=f"{_OVER_TIME}:returns_to_go",
        summary="R_t = r_t + gamma R_(t+1)",
        source="Williams 1992, Machine Learning 8",
        inputs=("reward", *_TIME),
        optional_inputs=("last_value", "final_value", "mask"),
        options=("gamma",),
        required_options=("gamma",),
        unit="step",
        layout="time",
    ),
    AdvantageInfo(
        name="reinforce_token",
        target=f"{_OVER_TIME}:token_returns",
        summary="G_l = r_l + gamma G_(l+1) along the row",
        source="Williams 1992, Machine Learning 8",
        inputs=("reward",),
        optional_inputs=("mask",),
        options=("gamma",),
        required_options=("gamma",),
        unit="token",
    ),
    AdvantageInfo(
        name="reinforce_plus_plus",
        target=f"{_GROUPED}:reinforce_plus_plus",
        summary="G_l = r_l + gamma G_(l+1), whitened over the batch",
        source="Hu et al. 2025, arXiv:2501.03262",
        inputs=("reward",),
        optional_inputs=("mask",),
        options=("gamma",),
        unit="token",
    ),
    AdvantageInfo(
        name="reinforce_plus_plus_baseline",
        target=f"{_GROUPED}:reinforce_plus_plus_baseline",
        summary="s - mean of the group, whitened over the batch",
        source="Hu et al. 2025, arXiv:2501.03262",
        inputs=("score", "group", "mask"),
        options=_SINGLE,
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="grpo",
        target=f"{_GROUPED}:grpo",
        summary="(s - mean) / (std + 1e-6) of the group",
        source="Shao et al. 2024, arXiv:2402.03300",
        inputs=("score", "group"),
        optional_inputs=("mask",),
        options=_SINGLE,
        fixed={"std": True},
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="dr_grpo",
        target=f"{_GROUPED}:grpo",
        summary="s - mean of the group",
        source="Liu et al. 2025, arXiv:2503.20783",
        inputs=("score", "group"),
        optional_inputs=("mask",),
        options=_SINGLE,
        fixed={"std": False},
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="rloo",
        target=f"{_GROUPED}:rloo",
        summary="s - mean of the others of the group",
        source="Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740",
        inputs=("score", "group"),
        optional_inputs=("mask",),
        options=_SINGLE,
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="remax",
        target=f"{_GROUPED}:remax",
        summary="s - score of the greedy rollout",
        source="Li et al. 2023, arXiv:2310.10505",
        inputs=("score", "greedy_score"),
        optional_inputs=("mask",),
        needs=frozenset({"greedy_baseline"}),
    ),
    AdvantageInfo(
        name="opo",
        target=f"{_GROUPED}:opo",
        summary="s - sum(l s) / sum(l) of the group, l the rows' lengths",
        source="Hao et al. 2025, arXiv:2505.23585",
        inputs=("score", "group"),
        optional_inputs=("mask", "length"),
        options=_SINGLE,
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="gpg",
        target=f"{_GROUPED}:gpg",
        summary="(s - mean of the group) · B / number of rows that are not 0",
        source="Chu et al. 2025, arXiv:2504.02546",
        inputs=("score", "group"),
        optional_inputs=("mask",),
        options=("nonzero", "alone"),
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="pass_at_k",
        target=f"{_GROUPED}:pass_at_k",
        summary="best row of the group: best - second best; 0 for the others",
        source="Tang et al. 2025, arXiv:2503.19595",
        inputs=("score", "group"),
        optional_inputs=("mask",),
        options=("std",),
        needs=_GROUP,
    ),
    AdvantageInfo(
        name="gigpo",
        target="embodied_rl.algorithms.anchors:gigpo",
        summary="grpo of episodes + w · grpo of the steps taken from equal observations of the group",
        source="Feng et al. 2025, arXiv:2505.10978",
        inputs=("episode_return", "step_return", "group", "trajectory", "anchor_group"),
        optional_inputs=("mask",),
        options=("step_weight", "statistics", "normalize", "alone"),
        unit="step",
        needs=frozenset({"groups", "anchors", "trajectories"}),
    ),
    AdvantageInfo(
        name="segment_returns",
        target="embodied_rl.algorithms.segments:segment_returns",
        summary="G_k = r_k + gamma G_(k+1) over the turns of a row, shared by a turn's tokens",
        source="Wang et al. 2025 (ROLL), arXiv:2506.06122",
        inputs=("reward", "mask"),
        optional_inputs=("chunk_id",),
        options=("gamma",),
        required_options=("gamma",),
        unit="chunk",
        needs=frozenset({"chunks"}),
    ),
    AdvantageInfo(
        name="ipa",
        target="embodied_rl.algorithms.segments:chunk_returns",
        summary="G_k = gamma^(distance to the last chunk) · R_final, shared by a chunk's tokens",
        source="Wang et al. 2025 (ROME), arXiv:2512.24873",
        inputs=("score", "mask"),
        optional_inputs=("chunk_id",),
        options=("gamma",),
        required_options=("gamma",),
        unit="chunk",
        needs=frozenset({"chunks"}),
    ),
)

ADVANTAGES: dict[str, AdvantageInfo] = {info.name: info for info in _ADVANTAGES}
"""{name: advantage}; a configuration takes one."""


_NEEDS: dict[str, tuple[Need, ...]] = {
    "value": ("critic",),
    "group": ("groups",),
    "greedy_score": ("greedy_baseline",),
    "chunk_id": ("chunks",),
    "trajectory": ("trajectories",),
    "step_return": ("anchors", "trajectories"),
    "anchor_group": ("anchors", "trajectories"),
}
"""{array: what a run has to bring for an advantage of the user's own that takes it}"""

_NAMES = Registry("advantage", "advantages", {name: info.target for name, info in ADVANTAGES.items()})


def advantage_info(name: str) -> AdvantageInfo:
    """The advantage of that name, of an installed package (entry points ``embodied_rl.advantages``), or at ``package.module:function``.

    Raises UserError with the nearest name, or with what a function of the user's own lacks.
    """
    return ADVANTAGES[name] if name in ADVANTAGES else _own(name, _NAMES.target(name))


@functools.cache
def _own(name: str, target: str) -> AdvantageInfo:
    """What a function takes says what it is: of time where it takes ends or values, with a critic where it takes ``value``."""
    over_time = {*_GAE, "terminated", "truncated"} - {"reward"}
    of_rows = {"score", "group", "length", "chunk_id", "greedy_score", "episode_return", "step_return", "trajectory", "anchor_group"}
    fields = described(name, target, arrays=over_time | of_rows | {"reward", "mask"})
    taken = {*fields["inputs"], *fields["optional_inputs"]}
    if taken & over_time and taken & of_rows:
        mixed = f"{sorted(taken & over_time)[0]} [T, N] and {sorted(taken & of_rows)[0]} [B]"
        raise UserError(f"'{target}' takes {mixed}: an advantage sees either steps over time or rows.")
    if not taken - {"mask"}:
        raise UserError(f"'{target}' takes none of the arrays that an advantage is made of: reward, score, group, value, ….")
    steps = bool(taken & (over_time | {"step_return", "anchor_group"}))
    return AdvantageInfo(
        **fields,
        unit="step" if steps else "episode",
        layout="time" if taken & over_time else "rows",
        returns_value_target="value" in taken,
        needs=frozenset(need for array in taken for need in _NEEDS.get(array, ())),
    )
