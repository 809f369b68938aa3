"""The domains of a run that are played in another process, as seen from where they are learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import TrainConfig
from embodied_rl.methods.multi_domain import Seat, is_trained, seats_of
from embodied_rl.sim.simulators import SimulatorsElsewhere
from embodied_rl.types import EpisodeSummary, SimSpec


class PlayerElsewhere(Protocol):
    """What a player in another process can be asked about a domain (`RemotePlayer`)."""

    @property
    def specs(self) -> Sequence[SimSpec]:
        """Of the simulators of every seat, in the order of `seats_of`."""
        ...

    def texts_of(self, domain: str) -> list[str]: ...

    def demonstrate_in(self, domain: str) -> list[AgentEpisode]: ...

    def evaluate_in(self, domain: str, num_episodes: int, first_seed: int) -> list[EpisodeSummary]: ...


class SpecsElsewhere:
    """A `PlayerElsewhere` of which only the simulators are known: where policies are trained, nothing else is asked of it."""

    def __init__(self, specs: Sequence[SimSpec]) -> None:
        self.specs = specs

    def texts_of(self, domain: str) -> list[str]:
        raise AssertionError("the process of the training loop asks")

    def demonstrate_in(self, domain: str) -> list[AgentEpisode]:
        raise AssertionError("the process of the training loop asks")

    def evaluate_in(self, domain: str, num_episodes: int, first_seed: int) -> list[EpisodeSummary]:
        raise AssertionError("the process of the training loop asks")


class DomainElsewhere(SimulatorsElsewhere):
    """Simulators of a seat in another process."""

    def __init__(self, domain: str, spec: SimSpec, player: PlayerElsewhere) -> None:
        super().__init__(spec)
        self.domain, self.player = domain, player

    def texts(self) -> list[str]:
        """What the first observations say."""
        return [str(text) for text in self.player.texts_of(self.domain)]

    def demonstrate(self) -> list[AgentEpisode]:
        """Successful episodes of a warm start's scripted player."""
        return list(self.player.demonstrate_in(self.domain))

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """Held-out episodes, with the weights that were published last."""
        return list(self.player.evaluate_in(self.domain, num_episodes, first_seed))


def seats_elsewhere(config: TrainConfig, player: PlayerElsewhere) -> list[Seat]:
    """Seats without generator and collector."""
    return [
        Seat(domain, name, config.domains[domain].sim, DomainElsewhere(domain, spec, player), trained=is_trained(config, name))
        for (domain, name), spec in zip(seats_of(config), player.specs, strict=True)
    ]
