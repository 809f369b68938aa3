"""Which losses there are, what each needs and where it comes from; importing this loads no tensor library.

The names are those of ``algorithm.loss`` in the configuration. `LossInfo.load` gives the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from embodied_rl.algorithms.catalogue import MethodInfo, described
from embodied_rl.errors import UserError
from embodied_rl.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Need = Literal["critic", "groups", "old_log_prob", "behaviour_log_prob", "reference_log_prob", "chunk_id", "demonstrations"]


@dataclass(frozen=True)
class LossInfo(MethodInfo):
    """One loss: what a configuration has to bring for it.

    Its function takes keyword arguments only and returns ``(loss, metrics)``; beside `inputs`, every loss takes mask, denominator and
    aggregation. Formulas: r = pi / pi_old, sg = a constant, A = advantage.
    """

    unit: Literal["entry", "chunk", "sequence"] = "entry"
    """What a ratio belongs to. An entry is a token, an action dimension, or a whole action where log-probabilities are summed first."""
    needs: frozenset[Need] = frozenset()
    default_aggregation: str = "token-mean"

    def load(self) -> Callable[..., Any]:
        """The function, without `fixed`; what one of the user's own returns is checked."""
        function = super().load()
        return functools.partial(_checked, function, self.target) if self.own else function


_PPO_OPTIONS = ("clip_low", "clip_high", "dual_clip")
_CLIP = ("clip_low", "clip_high")
_RATIO_INPUTS = ("log_prob", "old_log_prob", "advantage")

_POLICY_LOSSES = (
    LossInfo(
        name="ppo_clip",
        target="embodied_rl.algorithms.losses:ppo_clip_loss",
        summary="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); A < 0: at most -A dual_clip",
        unit="entry",
        inputs=_RATIO_INPUTS,
        options=_PPO_OPTIONS,
        required_options=_CLIP,
        needs=frozenset({"old_log_prob"}),
        source="Schulman et al. 2017, arXiv:1707.06347; Ye et al. 2020, arXiv:1912.09729; Yu et al. 2025, arXiv:2503.14476",
    ),
    LossInfo(
        name="gspo",
        target="embodied_rl.algorithms.sequence_losses:gspo_loss",
        summary="ppo_clip with r = sg(s) pi / sg(pi), s the geometric mean of the sequence's ratios",
        unit="sequence",
        inputs=_RATIO_INPUTS,
        options=_PPO_OPTIONS,
        required_options=_CLIP,
        needs=frozenset({"old_log_prob"}),
        default_aggregation="seq-mean-token-mean",
        source="Zheng et al. 2025, arXiv:2507.18071",
    ),
    LossInfo(
        name="cispo",
        target="embodied_rl.algorithms.off_policy:cispo_loss",
        summary="-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi",
        unit="entry",
        inputs=_RATIO_INPUTS,
        options=_CLIP,
        required_options=("clip_high",),
        needs=frozenset({"old_log_prob"}),
        source="MiniMax 2025, arXiv:2506.13585",
    ),
    LossInfo(
        name="policy_gradient",
        target="embodied_rl.algorithms.losses:policy_gradient_loss",
        summary="-A log pi",
        unit="entry",
        inputs=("log_prob", "advantage"),
        source="Williams 1992, Machine Learning 8",
    ),
    LossInfo(
        name="gpg",
        target="embodied_rl.algorithms.losses:policy_gradient_loss",
        summary="-A log pi, with GPG's advantages",
        unit="entry",
        inputs=("log_prob", "advantage"),
        needs=frozenset({"groups"}),
        source="Chu et al. 2025, arXiv:2504.02546",
    ),
    LossInfo(
        name="topr",
        target="embodied_rl.algorithms.off_policy:topr_loss",
        summary="A >= 0: -A log pi; A < 0: -sg(clip(pi / behaviour, 0, 1)) A log pi, the ratio that of the sequence",
        unit="sequence",
        inputs=("log_prob", "behaviour_log_prob", "advantage"),
        optional_inputs=("chunk_id", "positive"),
        options=("ratio_low", "ratio_high", "level", "sign"),
        needs=frozenset({"behaviour_log_prob"}),
        source="Le Roux et al. 2025, arXiv:2503.14286",
    ),
    LossInfo(
        name="ipa",
        target="embodied_rl.algorithms.sequence_losses:ipa_loss",
        summary="success: -G m log pi; else -sg(clip(rho_c, 0, 1)) G m log pi, rho_c and m those of the chunk",
        unit="chunk",
        inputs=("log_prob", "old_log_prob", "behaviour_log_prob", "advantage"),
        optional_inputs=("chunk_id", "positive"),
        options=("max_mismatch",),
        required_options=("max_mismatch",),
        needs=frozenset({"old_log_prob", "behaviour_log_prob", "chunk_id"}),
        source="Wang et al. 2025 (ROME), arXiv:2512.24873",
    ),
    LossInfo(
        name="behaviour_cloning",
        target="embodied_rl.algorithms.losses:behaviour_cloning_loss",
        summary="-log pi of demonstrated actions",
        unit="entry",
        inputs=("log_prob",),
        optional_inputs=("weight",),
        needs=frozenset({"demonstrations"}),
        source="Pomerleau 1991, Neural Computation 3",
    ),
)

_TERMS = (
    LossInfo(
        name="value",
        target="embodied_rl.algorithms.losses:value_loss",
        summary="(V - R)^2 or Huber's, clipped to old value ± clip where asked",
        unit="entry",
        inputs=("value", "returns"),
        optional_inputs=("old_value",),
        options=("clip", "kind", "huber_delta"),
        needs=frozenset({"critic"}),
        source="Schulman et al. 2017, arXiv:1707.06347",
    ),
    LossInfo(
        name="entropy",
        target="embodied_rl.algorithms.losses:entropy_bonus",
        summary="-H[pi]",
        unit="entry",
        inputs=("entropy",),
        source="Williams and Peng 1991, Connection Science 3",
    ),
    LossInfo(
        name="kl",
        target="embodied_rl.algorithms.kl:kl_loss",
        summary="KL(pi || reference) by k2 or k3, or by k1 with the gradient of k2",
        unit="entry",
        inputs=("log_prob", "reference_log_prob"),
        options=("kind", "straight_through"),
        needs=frozenset({"reference_log_prob"}),
        source="Schulman 2020, Approximating KL divergence; Tang and Munos 2025, arXiv:2506.09477",
    ),
)

LOSSES: dict[str, LossInfo] = {info.name: info for info in _POLICY_LOSSES}
"""{name: loss of the policy}; a configuration takes one."""

LOSS_TERMS: dict[str, LossInfo] = {info.name: info for info in _TERMS}
"""{name: term}; a configuration adds any of them with a coefficient."""


ARRAYS = ("log_prob", "old_log_prob", "behaviour_log_prob", "advantage", "chunk_id", "positive")
"""Arrays that a loss of the user's own takes by these names; `LossInfo.inputs` of the table say what they are."""
SHARED = ("mask", "denominator", "aggregation")
"""Arguments of every loss, so that parts of a batch add up, on ranks too."""

_NAMES = Registry("loss", "losses", {name: info.target for name, info in LOSSES.items()})


def loss_info(name: str) -> LossInfo:
    """The policy loss of that name, of an installed package (entry points ``embodied_rl.losses``), or at ``package.module:function``.

    Raises UserError with the nearest name, or with what a function of the user's own lacks.
    """
    return LOSSES[name] if name in LOSSES else _own(name, _NAMES.target(name))


@functools.cache
def _own(name: str, target: str) -> LossInfo:
    info = LossInfo(**described(name, target, arrays=ARRAYS, shared=SHARED))
    if "log_prob" not in info.inputs:
        raise UserError(f"'{target}' does not take 'log_prob', the log-probabilities [B, L] that a loss differentiates.")
    return info


def _checked(function: Callable[..., Any], target: str, **arguments: object) -> tuple[Tensor, dict[str, Tensor]]:
    """What a loss of the user's own returns: one number that has a gradient, and metrics, detached."""
    import torch

    result = function(**arguments)
    right = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor) and isinstance(result[1], Mapping)
    if not right or result[0].dim() != 0:
        raise UserError(f"'{target}' must return (loss, metrics): a tensor of one number and a mapping of names to numbers.")
    loss, metrics = result
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"The loss of '{target}' has no gradient: it must be computed from log_prob, which must not be detached.")
    own = {str(key): torch.as_tensor(value, device=loss.device).detach() for key, value in metrics.items()}
    return loss, {"policy_loss": loss.detach(), **own}
