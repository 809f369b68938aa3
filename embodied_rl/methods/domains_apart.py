"""The domains of a run that are played in another process, as seen from where they are learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import TrainConfig
from embodied_rl.methods.multi_domain import Seat, is_trained, seats_of
from embodied_rl.types import EpisodeSummary, SimSpec


class PlayerElsewhere(Protocol):
    """What a player in another process can be asked about a domain (`RemotePlayer`)."""

    @property
    def specs(self) -> Sequence[SimSpec]:
        """Of the simulators of every seat, in the order of `seats_of`."""
        ...

    def texts(self, domain: str | None = None) -> list[str]: ...

    def demonstrate(self, domain: str | None = None) -> list[AgentEpisode]: ...

    def evaluate(self, num_episodes: int, first_seed: int, domain: str | None = None) -> list[EpisodeSummary]: ...


@dataclass(frozen=True)
class SimulatorsElsewhere:
    """Simulators of a seat in another process."""

    domain: str
    spec: SimSpec
    player: Any
    """A `PlayerElsewhere`."""
    num_slots: int = 0
    """None of them are played in here."""

    def texts(self) -> list[str]:
        """What the first observations say."""
        return [str(text) for text in self.player.texts(domain=self.domain)]

    def demonstrate(self) -> list[AgentEpisode]:
        """Successful episodes of a warm start's scripted player."""
        return list(self.player.demonstrate(domain=self.domain))

    def evaluate(self, num_episodes: int, first_seed: int) -> list[EpisodeSummary]:
        """Held-out episodes, with the weights that were published last."""
        return list(self.player.evaluate(num_episodes, first_seed, domain=self.domain))


def seats_elsewhere(config: TrainConfig, player: PlayerElsewhere) -> list[Seat]:
    """Seats without generator and collector."""
    return [
        Seat(domain, name, config.domains[domain].sim, SimulatorsElsewhere(domain, spec, player), trained=is_trained(config, name))
        for (domain, name), spec in zip(seats_of(config), player.specs, strict=True)
    ]
