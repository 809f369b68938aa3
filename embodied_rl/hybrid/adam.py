"""Adam over named parameters, whose state is named tensors too."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embodied_rl.hybrid.updater import BETAS

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdam:
    """Adam (Kingma and Ba 2014), AdamW (Loshchilov and Hutter 2017) with `weight_decay`, for these parameters alone."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, learning_rate: float, eps: float, max_grad_norm: float, weight_decay: float = 0.0
    ) -> None:
        self.parameters = dict(parameters)
        self._max_grad_norm = max_grad_norm
        trained = list(self.parameters.values())
        self.optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, eps=eps, weight_decay=weight_decay, fused=True)

    def step(self, loss: Tensor, learning_rate: float) -> float:
        """Take the step that `loss` asks for; returns the gradient's norm before clipping.

        Where the loss or the norm is not finite nothing is stepped: the caller looks at both.
        """
        trained = list(self.parameters.values())
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = None if gradient is None else _laid_out_as(parameter, gradient)
        norm = float(nn.utils.clip_grad_norm_(trained, self._max_grad_norm))
        if math.isfinite(norm) and bool(torch.isfinite(loss)):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """``step``, ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``."""
        state = {"step": torch.zeros((), dtype=torch.int64)}
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state.get(parameter)
            for key in _MOMENTS:
                state[f"{key}.{name}"] = entry[key].detach().cpu().clone() if entry else torch.zeros(parameter.shape, dtype=parameter.dtype)
            if entry:  # parameters that the loss does not touch stay behind
                state["step"] = torch.maximum(state["step"], entry["step"].detach().cpu().to(torch.int64))
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly. Raises KeyError or ValueError when the state is of other parameters."""
        for name, parameter in self.parameters.items():
            moments = {key: state[f"{key}.{name}"] for key in _MOMENTS}
            if any(moment.shape != parameter.shape for moment in moments.values()):
                raise ValueError(f"the optimizer state of '{name}' is of another shape than {tuple(parameter.shape)}")
            self.optimizer.state[parameter] = {
                "step": state["step"].to(parameter.device, torch.float32).clone(),
                **{key: moment.to(parameter.device, copy=True) for key, moment in moments.items()},
            }


def _laid_out_as(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, as `backward` would have left it.

    PyTorch's fused kernel walks both as plain memory. A convolution over channels-last images gives its weight a channels-last gradient:
    each entry would be stepped by another one's gradient.
    """
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
