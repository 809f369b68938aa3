"""Adam over named parameters, whole or cut over ranks: its step, its clipping, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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

    The state is named ``step``, ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``. On ranks (`fsdp.shard`) each holds its part; what
    reads or writes the whole state there is a collective call.
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
    ) -> None:
        """
        Args:
            max_grad_norm: gradients are scaled so that their global norm is this at most.
            scales: {parameter: what the schedule's rate is multiplied with}; 1 where it is not named.
            only: other parameters that have gradients take part in the losses, and get none of them.
        """
        self.parameters = dict(parameters)
        self.inputs: list[Tensor] | None = list(self.parameters.values()) if only else None
        """What a backward pass computes gradients for; None: all that a loss depends on."""
        self._max_grad_norm, self._eps, self._weight_decay = max_grad_norm, eps, weight_decay
        self._scaled: dict[float, list[str]] = {}
        for name in self.parameters:
            self._scaled.setdefault((scales or {}).get(name, 1.0), []).append(name)
        self._state: dict[str, dict[str, Tensor]] = {}
        """Moments and count of steps, from the first gradient on."""
        self._is_cut = any(fsdp.is_cut(parameter) for parameter in self.parameters.values())

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale the gradients to `max_grad_norm` at most; their global norm before, over all ranks, a scalar."""
        if self._is_cut:
            return torch.tensor(fsdp.clip_gradients(self.parameters.values(), self._max_grad_norm), dtype=torch.float64)
        return nn.utils.clip_grad_norm_(self.parameters.values(), self._max_grad_norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Step with the gradients that lie in the parameters, at the schedule's rate."""
        for scale, names in self._scaled.items():
            # By torch's function: its class imports the compiler, which takes a second of every run's start.
            # Of a rank's own parts, which may lie on the host while the mesh is one of GPUs: one kernel of where they lie.
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
        """Begin anew: no moments, no count of steps."""
        self._state.clear()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, for moving them."""
        return [tensor for state in self._state.values() for tensor in state.values()]

    # ---- the state as named tensors ---------------------------------------------------------------------------------

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Copies on the host, whole."""
        return {name: fsdp.whole(tensor).cpu().clone() for name, tensor in self.parts().items()}

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly, on any number of ranks. Raises KeyError or ValueError when the state is of other parameters."""
        for name, parameter in self.parameters.items():
            moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            for key, moment in moments.items():
                try:
                    fsdp.fill(moment, state[f"{key}.{name}"])
                except ValueError as error:
                    raise ValueError(f"the optimizer state of '{name}' is of another shape: {error}") from error
            self._state[name] = {"step": self._step_count(state["step"], parameter), **moments}

    def parts(self) -> dict[str, Tensor]:
        """The state under its names, each tensor as it is cut; zeros where nothing was stepped yet."""
        step = torch.zeros((), dtype=torch.int64)
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            entry = self._state.get(name, {})
            found |= {f"{key}.{name}": (entry[key] if entry else torch.zeros_like(parameter)).detach() for key in _MOMENTS}
            if entry:  # parameters that the loss does not touch stay behind
                step = torch.maximum(step, fsdp.local_part(entry["step"]).detach().cpu().to(torch.int64))
        return {"step": step, **found}

    def blank_parts(self) -> dict[str, Tensor]:
        """Zeros to be filled with what `parts` gave, for `take_parts`."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.parts().items()}

    def take_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Continue from parts that are cut as these parameters are."""
        for name, parameter in self.parameters.items():
            own = {key: parts[f"{key}.{name}"] for key in _MOMENTS}
            self._state[name] = {"step": self._step_count(parts["step"], parameter), **own}

    def _step_count(self, step: Tensor, parameter: nn.Parameter) -> Tensor:
        """Beside the parameter, as float32: where the fused kernel keeps it."""
        return step.to(fsdp.local_part(parameter).device, torch.float32).clone()

    def _state_of(self, name: str) -> dict[str, Tensor]:
        """Of a parameter that is to be stepped; zeros before its first step."""
        if name not in self._state:
            parameter = self.parameters[name]
            moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=fsdp.local_part(parameter).device)
            self._state[name] = {"step": step, **moments}
        return self._state[name]


class Optimizers:
    """One optimizer for each of a module's parameter groups; which of them step, an objective says.

    The state is theirs: under their names for the group ``""``, under ``adam.<group>.<name>`` for others.
    """

    def __init__(self, module: TrainedModule, config: AlgorithmConfig) -> None:
        """Each part of a policy has its learning rate (`algorithm.head_learning_rate`, `.value_learning_rate`)."""
        rates: dict[Role, float | None] = {"backbone": None, "head": config.head_learning_rate, "value": config.value_learning_rate}
        self.groups = {
            group: Optimizer(
                parameters,
                eps=config.adam_eps,
                max_grad_norm=config.max_grad_norm,
                weight_decay=0.0 if config.cloning is None else config.cloning.weight_decay,
                scales={name: (rates[module.role_of(name)] or config.learning_rate) / config.learning_rate for name in parameters},
                only=group != "",
            )
            for group, parameters in module.parameter_groups().items()
        }

    def forget(self) -> None:
        """Begin all anew."""
        for optimizer in self.groups.values():
            optimizer.forget()

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, for moving them."""
        return [tensor for optimizer in self.groups.values() for tensor in optimizer.tensors()]

    def state_tensors(self) -> dict[str, Tensor]:
        return self._named(lambda optimizer: optimizer.state_tensors())

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        for prefix, optimizer in self._prefixed():
            optimizer.load_state_tensors(_below(state, prefix))

    def parts(self) -> dict[str, Tensor]:
        return self._named(lambda optimizer: optimizer.parts())

    def blank_parts(self) -> dict[str, Tensor]:
        return self._named(lambda optimizer: optimizer.blank_parts())

    def take_parts(self, parts: Mapping[str, Tensor]) -> None:
        for prefix, optimizer in self._prefixed():
            optimizer.take_parts(_below(parts, prefix))

    def _named(self, read: Callable[[Optimizer], dict[str, Tensor]]) -> dict[str, Tensor]:
        return {f"{prefix}{name}": tensor for prefix, optimizer in self._prefixed() for name, tensor in read(optimizer).items()}

    def _prefixed(self) -> Iterator[tuple[str, Optimizer]]:
        return ((f"adam.{group}." if group else "", optimizer) for group, optimizer in self.groups.items())


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
