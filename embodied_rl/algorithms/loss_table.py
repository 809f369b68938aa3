"""Table of losses: what each needs, and its source. Importing this loads no tensor library.

``algorithm.loss`` in the configuration takes these names. `LossInfo.load` imports the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from embodied_rl.algorithms.catalogue import MethodInfo, described
from embodied_rl.errors import UserError
from embodied_rl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["critic", "groups", "old_log_prob", "behaviour_log_prob", "reference_log_prob", "chunk_id", "demonstrations"]


@dataclass(frozen=True)
class LossInfo(MethodInfo):
    """One loss, and what a configuration must provide for it.

    Its function takes keyword arguments only and returns ``(loss, metrics)``; beside `inputs`, every loss takes mask, denominator and
    aggregation. Formulas: r = pi / pi_old, sg = a constant, A = advantage.
    """

    unit: Literal["entry", "chunk", "sequence"] = "entry"
    """Unit of a ratio. An entry is a token, an action dimension, or a whole action if log-probabilities are summed first."""
    needs: frozenset[Need] = frozenset()
    default_aggregation: str = "token-mean"

    def load(self) -> Callable[..., Any]:
        """The function, without `fixed`; the results of a user's own function are checked."""
        function = super().load()
        return functools.partial(_checked, function, self.target) if self.own else function


_CLIP = ("clip_low", "clip_high")
_RATIO: dict[str, Any] = {"inputs": ("log_prob", "old_log_prob", "advantage"), "needs": frozenset({"old_log_prob"})}
_PPO: dict[str, Any] = {**_RATIO, "options": (*_CLIP, "dual_clip"), "required_options": _CLIP}
_MODULE = "embodied_rl.algorithms"

_POLICY_LOSSES = (
    LossInfo(
        "ppo_clip",
        f"{_MODULE}.losses:ppo_clip_loss",
        "max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); A < 0: at most -A dual_clip",
        "Schulman et al. 2017, arXiv:1707.06347; Ye et al. 2020, arXiv:1912.09729; Yu et al. 2025, arXiv:2503.14476",
        **_PPO,
    ),
    LossInfo(
        "gspo",
        f"{_MODULE}.sequence_losses:gspo_loss",
        "ppo_clip with r = sg(s) pi / sg(pi), s the geometric mean of the sequence's ratios",
        "Zheng et al. 2025, arXiv:2507.18071",
        **_PPO,
        unit="sequence",
        default_aggregation="seq-mean-token-mean",
    ),
    LossInfo(
        "cispo",
        f"{_MODULE}.off_policy:cispo_loss",
        "-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
        "MiniMax 2025, arXiv:2506.13585",
        **_RATIO,
        options=_CLIP,
        required_options=("clip_high",),
    ),
    LossInfo(
        "policy_gradient",
        f"{_MODULE}.losses:policy_gradient_loss",
        "-A log pi",
        "Williams 1992, Machine Learning 8",
        ("log_prob", "advantage"),
    ),
    LossInfo(
        "gpg",
        f"{_MODULE}.losses:policy_gradient_loss",
        "-A log pi, with GPG's advantages",
        "Chu et al. 2025, arXiv:2504.02546",
        ("log_prob", "advantage"),
        needs=frozenset({"groups"}),
    ),
    LossInfo(
        "topr",
        f"{_MODULE}.off_policy:topr_loss",
        "A >= 0: -A log pi; A < 0: -sg(clip(pi / behaviour, 0, 1)) A log pi, the ratio that of the sequence",
        "Le Roux et al. 2025, arXiv:2503.14286",
        ("log_prob", "behaviour_log_prob", "advantage"),
        optional_inputs=("chunk_id", "positive"),
        options=("ratio_low", "ratio_high", "level", "sign"),
        unit="sequence",
        needs=frozenset({"behaviour_log_prob"}),
    ),
    LossInfo(
        "ipa",
        f"{_MODULE}.sequence_losses:ipa_loss",
        "success: -G m log pi; else -sg(clip(rho_c, 0, 1)) G m log pi, rho_c and m those of the chunk",
        "Wang et al. 2025 (ROME), arXiv:2512.24873",
        ("log_prob", "old_log_prob", "behaviour_log_prob", "advantage"),
        optional_inputs=("chunk_id", "positive"),
        options=("max_mismatch",),
        required_options=("max_mismatch",),
        unit="chunk",
        needs=frozenset({"old_log_prob", "behaviour_log_prob", "chunk_id"}),
    ),
    LossInfo(
        "behaviour_cloning",
        f"{_MODULE}.losses:behaviour_cloning_loss",
        "-log pi of demonstrated actions",
        "Pomerleau 1991, Neural Computation 3",
        ("log_prob",),
        optional_inputs=("weight",),
        needs=frozenset({"demonstrations"}),
    ),
)

_TERMS = (
    LossInfo(
        "value",
        f"{_MODULE}.losses:value_loss",
        "(V - R)^2 or Huber's, clipped to old value ± clip where asked",
        "Schulman et al. 2017, arXiv:1707.06347",
        ("value", "returns"),
        optional_inputs=("old_value",),
        options=("clip", "kind", "huber_delta"),
        needs=frozenset({"critic"}),
    ),
    LossInfo("entropy", f"{_MODULE}.losses:entropy_bonus", "-H[pi]", "Williams and Peng 1991, Connection Science 3", ("entropy",)),
    LossInfo(
        "kl",
        f"{_MODULE}.kl:kl_loss",
        "KL(pi || reference) by k2 or k3, or by k1 with the gradient of k2",
        "Schulman 2020, Approximating KL divergence; Tang and Munos 2025, arXiv:2506.09477",
        ("log_prob", "reference_log_prob"),
        options=("kind", "straight_through"),
        needs=frozenset({"reference_log_prob"}),
    ),
)

LOSSES: dict[str, LossInfo] = {info.name: info for info in _POLICY_LOSSES}
"""{name: loss of the policy}; a configuration names one."""

LOSS_TERMS: dict[str, LossInfo] = {info.name: info for info in _TERMS}
"""{name: term}; a configuration adds any of them with a coefficient."""


ARRAYS = ("log_prob", "old_log_prob", "behaviour_log_prob", "advantage", "chunk_id", "positive")
"""Names of the arrays that a user's own loss may take; `LossInfo.inputs` of the table show their use."""
SHARED = ("mask", "denominator", "aggregation")
"""Arguments of every loss, so that parts of a batch add up, also over ranks."""

_NAMES = Registry("loss", "losses", {name: info.target for name, info in LOSSES.items()})


def loss_info(name: str) -> LossInfo:
    """The policy loss of that name, from an installed package (entry points ``embodied_rl.losses``), or at ``package.module:function``.
    Raises UserError with the nearest name, or with what a user's own function lacks."""
    return LOSSES[name] if name in LOSSES else _own(name, _NAMES.target(name))


@functools.cache
def _own(name: str, target: str) -> LossInfo:
    info = LossInfo(**described(name, target, arrays=ARRAYS, shared=SHARED))
    if "log_prob" not in info.inputs:
        raise UserError(f"'{target}' does not take 'log_prob', the log-probabilities [B, L] that a loss differentiates.")
    return info


def _checked(function: Callable[..., Any], target: str, **arguments: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Check the results of a user's own loss: one number with a gradient, and metrics, which are detached."""
    import torch

    result = function(**arguments)
    right = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor) and isinstance(result[1], Mapping)
    if not right or result[0].dim() != 0:
        raise UserError(f"'{target}' must return (loss, metrics): a tensor of one number and a mapping of names to numbers.")
    loss, metrics = result
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"The loss of '{target}' has no gradient: it must be computed from log_prob, which must not be detached.")
    for key, value in metrics.items():
        if value.numel() != 1 if isinstance(value, torch.Tensor) else not isinstance(value, Real):
            raise UserError(f"The metrics of '{target}' must be numbers, and {key!r} is none.")
    own = {str(key): torch.as_tensor(value, device=loss.device).detach() for key, value in metrics.items()}
    return loss, {"policy_loss": loss.detach(), **own}
