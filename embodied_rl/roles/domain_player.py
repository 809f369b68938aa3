"""The role that plays several domains: all their simulators, one group queue, and a generator or agent for each domain.

As an agent's player it begins before there is a model: what acts is built by ``take_model``, whether or not there is a language policy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import LanguageConfig, TrainConfig
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.methods.domain_building import LANGUAGE
from embodied_rl.methods.domain_playing import seat_agents
from embodied_rl.methods.domain_roles import of_roles
from embodied_rl.methods.groups import make_group_collector
from embodied_rl.methods.language_apart import ModelFiles, read_model, write_model_files
from embodied_rl.methods.multi_domain import OWN_PLAYER, DomainManagers, Seat, make_domain_collector, make_domain_queue
from embodied_rl.methods.warm_start import play_script
from embodied_rl.roles.agent_player import MakeBackend, own_backend
from embodied_rl.roles.player import OwnGenerator, Player, PlayingGenerator, make_scorer
from embodied_rl.rollout.scoring import Scorer
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.types import EpisodeSummary, SimSpec

MakeActing = Callable[[TrainConfig, SimSpec, str], PlayingGenerator]
"""(a domain's own configuration, its simulator, its name) → the generator that acts there, whose `load` takes the policy's whole state."""


class LoadsWeights(Protocol):
    """Receives published weights: those of all roles (`RolePolicies.named_weights`)."""

    def load(self, version: int, tensors: Any) -> None:
        """Act with these weights as `version` from now on."""
        ...


class RolesHere:
    """The roles' weights go to each role's own players, in this process. Implements `LoadsWeights`."""

    def __init__(self, backends: Iterable[TokenBackend], acting: Mapping[str, PlayingGenerator]) -> None:
        self._backends, self._acting = list(backends), dict(acting)

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `LoadsWeights.load`."""
        for role, named in of_roles(tensors).items():
            if role == LANGUAGE:
                for backend in self._backends:
                    backend.load_weights(version, named.items())
            else:
                self._acting[role].load(version, named.items())


def acting_here(config: TrainConfig, spec: SimSpec, domain: str) -> PlayingGenerator:
    """In the player's process."""
    return OwnGenerator(config, spec)


class DomainPlayer(Player):
    """Plays groups of several domains; see `Player`."""

    manager: DomainManagers

    def __init__(
        self,
        config: TrainConfig,
        *,
        make_backend: MakeBackend = own_backend,
        make_acting: MakeActing = acting_here,
        make_roles: Callable[[Iterable[TokenBackend], Mapping[str, PlayingGenerator]], LoadsWeights] = RolesHere,
        make_scoring: Callable[[TrainConfig], Scorer | None] = make_scorer,
    ) -> None:
        """Start the simulators. Raises UserError as `EnvManager` does.

        Args:
            config: the run's.
            make_backend: samples tokens, once for each kind of backend.
            make_acting: makes the acting policy of a domain that has its own.
            make_roles: from these two, makes the object that loads published weights.
            make_scoring: makes the reward workers, where the configuration asks for some.
        """
        self._make_backend, self._make_acting, self._make_roles = make_backend, make_acting, make_roles
        self._make_scoring = make_scoring
        self._roles: LoadsWeights | None = None
        self._start(config)

    def _simulate(self, config: TrainConfig) -> DomainManagers:
        return DomainManagers.start(config)

    # ---- what may be asked ------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """See `Player.describe`; ``specs`` are of all seats, in the order of `seats_of`."""
        return {
            "spec": self.manager.spec.to_dict(),
            "num_slots": self.manager.num_slots,
            "worker_pids": self.manager.worker_pids(),
            "specs": [plain_spec(seat.manager.spec).to_dict() for seat in self.manager.seats],
        }

    def texts(self, domain: str) -> list[str]:
        """First observations of a domain, which a tiny model's tokenizer must know; before any episode."""
        return self._seat(domain).manager.texts()

    def take_model(self, files: ModelFiles) -> None:
        """What the language model is, no files where there is none; weights come with `load`. Once.

        Raises:
            UserError: the backends or the agents cannot use the model.
        """
        assert self._roles is None, "a player has one model"
        config = self.config
        backends = self._seat_language(files) if files else {}
        acting: dict[str, PlayingGenerator] = {}
        self.queue = make_domain_queue(config)
        for seat in self.manager.seats:
            if config.domains[seat.domain].policy is not None:
                own = config.for_domain(seat.domain)
                acts = acting[seat.domain] = self._make_acting(own, plain_spec(seat.manager.spec), seat.domain)
                seat.generator = acts.generator
                seat.collector = make_group_collector(own, seat.manager, acts.generator, self.queue, acts.layout)
        self._roles = self._make_roles(backends.values(), acting)
        self.collector = make_domain_collector(config, self.manager.seats, self.queue)
        self.scorer = self._make_scoring(config)
        self.collector.score_with(self.scorer)

    def load(self, version: int, tensors: Any) -> None:
        """See `Player.load`: the weights of all roles."""
        assert self._roles is not None, "take_model comes first"
        assert self.queue is not None
        self._roles.load(version, tensors)
        if version > self.queue.version:
            self.queue.published(version)

    def demonstrate(self, domain: str) -> list[AgentEpisode]:
        """See `play_script`; what was being played is lost, so that `restart` must follow."""
        self._give_up_episodes()
        seat = self._seat(domain)
        assert seat.agent is not None, "take_model comes first"
        return play_script(self.config.for_domain(domain), seat.manager, seat.agent)

    def evaluate(self, num_episodes: int, first_seed: int, domain: str | None = None) -> list[EpisodeSummary]:
        """See `DomainManagers.evaluate`; what was being played is lost, so that `restart` must follow."""
        self._give_up_episodes()
        return self.manager.evaluate(None, num_episodes, first_seed, domain=domain)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _seat_language(self, files: ModelFiles) -> dict[str, TokenBackend]:
        assert isinstance(self.config.policy, LanguageConfig), "the configuration was checked"
        # All of it is read when this is over: a player that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="embodied_rl_player_") as name:
            folder = Path(name)
            write_model_files(files, folder)
            speaking = read_model(self.config.policy, folder)
            return seat_agents(self.config, self.manager, speaking, lambda own: self._make_backend(own, folder, files))

    def _seat(self, domain: str) -> Seat:
        """Where the run's own policy plays a domain."""
        return next(seat for seat in self.manager.seats if (seat.domain, seat.player) == (domain, OWN_PLAYER))
