"""The role that plays for a language agent: text environments, the agent with its tools, and the token backend.

It begins before there is a model: a tiny model's tokenizer is made of what the environments say, so that the trainer asks for the
texts first and then says what the model is.

```
 trainer ──── texts ───▶ player        first observations
         ── take_model ─▶              configuration and tokenizer; weights come as they are published
         ── demonstrate ▶              a warm start's scripted episodes
```
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from embodied_rl.agents.turns import AgentEpisode
from embodied_rl.config import LanguageConfig, TrainConfig
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.learning.devices import resolve_device
from embodied_rl.methods.agents import make_agent_collector
from embodied_rl.methods.groups import make_group_queue
from embodied_rl.methods.language_apart import ModelFiles, blank_backend, merged_there, read_model, write_model_files
from embodied_rl.methods.language_player import make_agent
from embodied_rl.methods.warm_start import play_script
from embodied_rl.roles.hosts import plan_here
from embodied_rl.roles.multiplexed_tokens import start_token_hosts
from embodied_rl.roles.player import Player, make_scorer
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.groups import WHOLE, Share
from embodied_rl.rollout.scoring import Scorer
from embodied_rl.sim.instrumented import plain_spec
from embodied_rl.types import SimSpec

MakeBackend = Callable[[TrainConfig, Path, ModelFiles], TokenBackend]
"""(configuration, folder of the model's files, these files) → the backend, whose `load_weights` takes what is published."""


def hosted_backend(config: TrainConfig, folder: Path, files: ModelFiles) -> TokenBackend:
    """Backend whose hosts are separate processes; some are lent to training. Raises UserError as `blank_backend` does."""
    hosts: Any = start_token_hosts(config, files, plan_here(config))
    return merged_there(config, hosts, folder)


def own_backend(config: TrainConfig, folder: Path, files: ModelFiles) -> TokenBackend:
    """In the player's process. Raises UserError as `blank_backend` does."""
    return merged_there(config, blank_backend(config, folder, resolve_device(config.hybrid.device)), folder)


class OwnAgent:
    """An agent with a backend that others' weights are loaded into. Implements `Acting`."""

    def __init__(self, config: TrainConfig, spec: SimSpec, folder: Path, backend: TokenBackend) -> None:
        """`folder`: of the model's files. Raises UserError as `Agent` does."""
        assert isinstance(config.policy, LanguageConfig), "policy.name says so"
        self.generator = AgentGenerator(make_agent(config.agent, read_model(config.policy, folder), spec), backend)

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `Acting.load`: (name, tensor) as `LanguagePolicy.named_weights` gives them; requests in flight go on with them."""
        self.generator.backend.load_weights(version, tensors)
        self.generator.version = version


class AgentPlayer(Player):
    """Plays groups of text episodes; see `Player`."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        make_backend: MakeBackend = own_backend,
        make_scoring: Callable[[TrainConfig], Scorer | None] = make_scorer,
        share: Share = WHOLE,
    ) -> None:
        """Start the environments; `share`: of the groups. Raises UserError as `EnvManager` does."""
        self._share = share
        self._make_backend, self._make_scoring = make_backend, make_scoring
        self._agent: OwnAgent | None = None
        self._start(config)

    def texts(self) -> list[str]:
        """First observations, which a tiny model's tokenizer must know; before any episode."""
        return self.manager.texts()

    def take_model(self, files: ModelFiles) -> None:
        """What the model is; its weights come with `load`. Once. Raises UserError for one that the backend or the agent cannot use."""
        assert self._agent is None, "a player has one model"
        spec = plain_spec(self.manager.spec)
        # All of it is read when this is over: a player that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="embodied_rl_player_") as name:
            folder = Path(name)
            write_model_files(files, folder)
            backend = self._make_backend(self.config, folder, files)
            self.lease = getattr(backend, "lease", None)
            try:
                self._agent = OwnAgent(self.config, spec, folder, backend)
            except BaseException:
                backend.close()
                raise
        self.acting = self._agent
        self.queue = make_group_queue(self.config, spec.task, self._share)
        collector = make_agent_collector(self.config, self.manager, self._agent.generator, self.queue)
        self.collector = collector
        self.scorer = self._make_scoring(self.config)
        collector.score_with(self.scorer)

    def demonstrate(self) -> list[AgentEpisode]:
        """See `play_script`; what was being played is lost, so that `restart` must follow."""
        assert self._agent is not None, "take_model comes first"
        self._give_up_episodes()
        return play_script(self.config, self.manager, self._agent.generator.agent)

    def close(self) -> None:
        """End the environments, the backend and the tools."""
        try:
            if self._agent is not None:
                self._agent.generator.close()
        finally:
            super().close()
