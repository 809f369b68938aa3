"""Gymnasium environments that can leave an observation out: the hook through which a wrapper that draws in `step` is asked to."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import gymnasium
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from embodied_rl.sim.robots.saved_state import layers_of

_PASS_OBSERVATIONS_ON = (
    gymnasium.Wrapper.step,
    gymnasium.ActionWrapper.step,
    gymnasium.RewardWrapper.step,
    OrderEnforcing.step,
    TimeLimit.step,
)
"""What wrappers do in `step` that neither read nor change an observation."""


@runtime_checkable
class ObservesOnDemand(Protocol):
    """Two methods of a `gymnasium.Env` or wrapper that makes its observations at some cost (it draws them, say).

    They are used where every wrapper around it hands observations through as they are: those of `gymnasium.make`, and wrappers of
    actions and rewards. Around others (a stack of frames) every step is observed, unless the outer wrapper has the two methods as well.
    """

    def set_observing(self, observing: bool) -> None:
        """False: the observations of the steps that follow are not read, and `step` may return anything in their place, such as None.
        True: `step` observes again. Every `reset` happens while it observes, which is also how it begins."""
        ...

    def observe(self) -> Any:
        """The observation of the present state, as `step` would have returned it. It changes nothing and draws no random number."""
        ...


def on_demand(env: gymnasium.Env) -> ObservesOnDemand | None:
    """The outermost layer of an environment that observes on demand; None where there is none, or one around it needs every observation."""
    for layer in layers_of(env):
        if isinstance(layer, ObservesOnDemand):
            return layer
        if type(layer).step not in _PASS_OBSERVATIONS_ON:
            return None
    return None
