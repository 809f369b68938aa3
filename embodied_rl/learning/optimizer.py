"""Adam over named parameters, whole or sharded over ranks: its step, its clipping, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from embodied_rl.config import AlgorithmConfig
from embodied_rl.learning import fsdp
from embodied_rl.policies.base import Role, TrainedModule

BETAS = (0.9, 0.999)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Adam (Kingma and Ba 2014), AdamW (Loshchilov and Hutter 2017) with `weight_decay`, for these parameters only.

    The state is named ``step``, ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``. On ranks (`fsdp.shard`) each rank holds its part,
    and reading or writing the whole state is a collective call.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        eps: float,
        max_grad_norm: float,
        weight_decay: float = 0.0,
        scales: Mapping[str, float] | None = None,
        only: bool = False,
        prefix: str = "",
    ) -> None:
        """
        Args:
            max_grad_norm: largest global norm of the gradients; larger gradients are scaled down.
            scales: {parameter: factor of the schedule's rate}; 1 for others.
            only: compute no gradients for other parameters that the losses depend on.
            prefix: begins the names of the state.
        """
        self.parameters, self._prefix = dict(parameters), prefix
        self.inputs: list[Tensor] | None = list(self.parameters.values()) if only else None
        """Parameters that a backward pass computes gradients for; None: all that a loss depends on."""
        self._max_grad_norm, self._eps, self._weight_decay = max_grad_norm, eps, weight_decay
        self._scaled: dict[float, list[str]] = {}
        for name in self.parameters:
            self._scaled.setdefault((scales or {}).get(name, 1.0), []).append(name)
        self._state: dict[str, dict[str, Tensor]] = {}
        """Moments and step count of each parameter, from its first gradient on."""
        self._is_cut = any(fsdp.is_cut(parameter) for parameter in self.parameters.values())

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale the gradients down to `max_grad_norm`; return their global norm before, over all ranks, a scalar."""
        if self._is_cut:
            return torch.tensor(fsdp.clip_gradients(self.parameters.values(), self._max_grad_norm), dtype=torch.float64)
        return nn.utils.clip_grad_norm_(self.parameters.values(), self._max_grad_norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Step with the parameters' gradients, at the schedule's rate."""
        for scale, names in self._scaled.items():
            # torch's function, because its class imports the compiler, which adds a second to every run's start.
            # It steps the rank's own parts, which may be on the host although the mesh is one of GPUs: it picks the kernel of their device.
            moved = [(parameter, self._state_of(name)) for name in names if (parameter := self.parameters[name]).grad is not None]
            adamw(
                [fsdp.local_part(parameter) for parameter, _ in moved],
                [fsdp.local_part(parameter.grad) for parameter, _ in moved if parameter.grad is not None],
                [fsdp.local_part(state["exp_avg"]) for _, state in moved],
                [fsdp.local_part(state["exp_avg_sq"]) for _, state in moved],
                [],
                [state["step"] for _, state in moved],
                foreach=False,
                fused=True,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=learning_rate * scale,
                weight_decay=self._weight_decay,
                eps=self._eps,
                maximize=False,
            )

    def forget(self) -> None:
        """Clear the moments and the step count."""
        self._state.clear()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, for moving them between devices."""
        return [tensor for state in self._state.values() for tensor in state.values()]

    # ---- the state as named tensors ---------------------------------------------------------------------------------

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Whole copies on the host."""
        return {name: fsdp.whole(tensor).cpu().clone() for name, tensor in self.parts().items()}

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Load a whole state, on any number of ranks. Raises KeyError or ValueError for a state of other parameters."""
        self.forget()
        own = self.parts()
        for name, part in own.items():
            fsdp.fill(part, state[name])
        self.take_parts(own)

    def parts(self) -> dict[str, Tensor]:
        """The state under its names, each tensor sharded as its parameter is; zeros before the first step."""
        step = torch.zeros((), dtype=torch.int64)
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            entry = self._state.get(name, {})
            found |= {f"{self._prefix}{key}.{name}": (entry[key] if entry else torch.zeros_like(parameter)).detach() for key in _MOMENTS}
            if entry:  # parameters that the loss does not touch have fewer steps
                step = torch.maximum(step, fsdp.local_part(entry["step"]).detach().cpu().to(torch.int64))
        return {f"{self._prefix}step": step, **found}

    def take_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Continue from parts that are sharded as these parameters are, such as those of `parts` after `forget`, filled."""
        for name, parameter in self.parameters.items():
            # The fused kernel needs each parameter's step count on its device, as float32.
            step = parts[f"{self._prefix}step"].to(fsdp.local_part(parameter).device, torch.float32, copy=True)
            self._state[name] = {"step": step, **{key: parts[f"{self._prefix}{key}.{name}"] for key in _MOMENTS}}

    def _state_of(self, name: str) -> dict[str, Tensor]:
        """State of a parameter that is to be stepped; zeros before its first step."""
        if name not in self._state:
            parameter = self.parameters[name]
            step = torch.zeros((), dtype=torch.float32, device=fsdp.local_part(parameter).device)
            self._state[name] = {"step": step, **{key: torch.zeros_like(parameter) for key in _MOMENTS}}
        return self._state[name]


def optimizers_of(module: TrainedModule, config: AlgorithmConfig) -> dict[str, Optimizer]:
    """One optimizer for each of a module's parameter groups; an objective says which of them step.

    Each role of a parameter has its learning rate (`algorithm.head_learning_rate`, `.value_learning_rate`). State names are the optimizer's
    own for the group ``""``, and ``adam.<group>.<name>`` for other groups.
    """
    rates: dict[Role, float | None] = {"backbone": None, "head": config.head_learning_rate, "value": config.value_learning_rate}
    return {
        group: Optimizer(
            parameters,
            eps=config.adam_eps,
            max_grad_norm=config.max_grad_norm,
            weight_decay=0.0 if config.cloning is None else config.cloning.weight_decay,
            scales={name: (rates[module.role_of(name)] or config.learning_rate) / config.learning_rate for name in parameters},
            only=group != "",
            prefix=f"adam.{group}." if group else "",
        )
        for group, parameters in module.parameter_groups().items()
    }
