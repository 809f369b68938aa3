"""Critics of actions: an ensemble of networks Q(s, a), evaluated together, and a policy that trains with one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from embodied_rl.config import OffPolicyConfig
from embodied_rl.errors import UserError
from embodied_rl.memory import TRAINED, parameter_bytes, require_memory
from embodied_rl.policies.base import Policy, TrainedModule
from embodied_rl.types import ActionSpec

Result = TypeVar("Result")


class QEnsemble(nn.Module):
    """E independent MLPs with ReLU from features and an action to a number, as batched matrix products: [B, D], [B, A] → [E, B].

    With `layer_norm`, hidden layers are normalised before the activation (Ball et al. 2023, arXiv:2302.02948, section 4.2): values of
    actions outside the data stay bounded by the norm of the weights.
    """

    def __init__(
        self,
        num_features: int,
        action: ActionSpec,
        hidden_sizes: tuple[int, ...],
        num_critics: int,
        *,
        layer_norm: bool = True,
        chunk_size: int = 1,
    ) -> None:
        """Weights come from torch's global generator. `chunk_size`: steps of an action, which is one decision."""
        super().__init__()
        self._num_choices = action.num_actions if action.kind == "discrete" else 0
        size = num_features + (self._num_choices or action.dim * chunk_size)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        for width in (*hidden_sizes, 1):
            # Initialisation of torch's linear layer for each member.
            bound = 1.0 / math.sqrt(size)
            self.weights.append(nn.Parameter(torch.empty(num_critics, size, width).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(num_critics, 1, width).uniform_(-bound, bound)))
            size = width
        for width in hidden_sizes if layer_norm else ():
            self.scales.append(nn.Parameter(torch.ones(num_critics, 1, width)))
            self.shifts.append(nn.Parameter(torch.zeros(num_critics, 1, width)))

    def forward(self, features: Tensor, action: Tensor) -> Tensor:
        """[B, D] float, [B, A] normalised, [B, K, A] for chunks (int64 [B, 1] for discrete) → [E, B]."""
        if self._num_choices:
            action = nn.functional.one_hot(action.squeeze(-1), self._num_choices)
        x = torch.cat([features, action.flatten(1).to(features.dtype)], dim=-1).expand(len(self.weights[0]), -1, -1)
        last = len(self.weights) - 1
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if layer < last:
                if len(self.scales):
                    x = torch.addcmul(self.shifts[layer], nn.functional.layer_norm(x, x.shape[-1:]), self.scales[layer])
                x = torch.relu(x)
        return x.squeeze(-1)


class ActorWithCritics(TrainedModule):
    """A policy with critics Q(s, a) of its actions, their target networks, and the entropy coefficient.

    The critics read the policy's `features` (a normalised state, or a trunk's features, which the critics' loss trains) and an action,
    which is a whole chunk if the policy acts in chunks. The policy's own critic V(s) is implicit Q-learning's state value; other updates do
    not use it.
    """

    def __init__(self, policy: Policy, options: OffPolicyConfig) -> None:
        """The critics' weights come from torch's global generator.
        Raises UserError: the policy has no features, or the critics need more memory than available."""
        super().__init__()
        self.policy, self.options = policy, options
        action, size, chunk_size = policy.spec.action, policy.num_features, policy.chunk_size
        if size is None:
            raise UserError(
                f"algorithm.off_policy: critics of actions need features of the policy, and {type(policy).__name__} has none "
                "(num_features, features, state_value, drawn): use ppo, grpo, bc or dagger."
            )

        def critics() -> QEnsemble:
            shape = (options.hidden_sizes, options.num_critics)
            return QEnsemble(size, action, *shape, layer_norm=options.layer_norm, chunk_size=chunk_size)

        with torch.device("meta"):  # shapes without memory, and without drawing random numbers
            parts = parameter_bytes(critics(), copies=TRAINED + 1)  # the last copy is the targets
        require_memory(f"algorithm.off_policy: critics of hidden_sizes={list(options.hidden_sizes)}", parts, "hidden_sizes or num_critics")
        self.critics = critics()
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_entropy_coef = nn.Parameter(torch.tensor([math.log(options.init_entropy_coef)]))
        self.target_entropy = -float(action.dim * chunk_size) if options.target_entropy is None else options.target_entropy

    def gathered(self, compute: Callable[[], Result]) -> Result:
        """Result of `compute` with these networks. On ranks their shards are gathered for it (`embodied_rl.learning.fsdp`)."""
        return compute()

    @torch.no_grad()
    def move_targets(self) -> None:
        """Move the targets by `target_rate` towards the critics."""
        torch._foreach_lerp_(_local(self.targets), _local(self.critics), self.options.target_rate)

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """See `TrainedModule.parameter_groups`: critics, policy, value and entropy, if the update has them."""
        policy, update = self.policy, self.options.update
        groups: dict[str, dict[str, nn.Parameter]] = {
            "critics": {f"critics.{name}": parameter for name, parameter in self.critics.named_parameters()},
            "policy": {},
            "value": {},
            "entropy": {"log_entropy_coef": self.log_entropy_coef} if update == "sac" else {},
        }
        for name, parameter in sorted(policy.named_parameters(), key=lambda named: named[0].partition(".")[0]):
            of_value = policy.role_of(name) == "value"
            group = "critics" if name.startswith(policy.critics_train) else "value" if of_value else "policy"
            if parameter.requires_grad and (group != "value" or update == "iql"):
                groups[group][name] = parameter
        return {group: parameters for group, parameters in groups.items() if parameters}

    def changing(self) -> set[str]:
        return super().changing() | {f"targets.{name}" for name, _ in self.targets.named_parameters()}

    def beside(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("policy.")}

    def describe(self) -> dict[str, Any]:
        """See `TrainedModule.describe`: the policy's description, with an algorithm that has `off_policy`."""
        return self.policy.describe()


def _local(module: nn.Module) -> list[Tensor]:
    """The parameters in this process: targets are sharded like the critics."""
    from torch.distributed.tensor import DTensor

    return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in module.parameters()]
