"""Which kind of player a configuration asks for, in one process."""

from __future__ import annotations

from embodied_rl.config import TrainConfig
from embodied_rl.roles.agent_player import AgentPlayer, hosted_backend, own_backend
from embodied_rl.roles.domain_player import DomainPlayer
from embodied_rl.roles.player import Player
from embodied_rl.rollout.groups import WHOLE, Share


def make_player(config: TrainConfig, share: Share = WHOLE) -> Player:
    """The player of this configuration in one process; `share`: of its groups. Raises UserError as `EnvManager` does."""
    if config.domains:
        return DomainPlayer(config)
    if config.policy.name == "language":
        multiplexed = config.hybrid.placement.kind == "multiplexed"
        return AgentPlayer(config, make_backend=hosted_backend if multiplexed else own_backend, share=share)
    return Player(config, share=share)
