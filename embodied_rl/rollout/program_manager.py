"""What stands in a run of agent programs where other runs have an environment manager; and the generator that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from embodied_rl.agents.agent import Agent
from embodied_rl.config import SimConfig
from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.program_collector import episode_of_session
from embodied_rl.rollout.program_runner import Played, ProgramRunner
from embodied_rl.serving.agents.app import AgentProxy, ProxyOptions
from embodied_rl.serving.agents.captured import CapturedSession
from embodied_rl.serving.agents.sessions import SessionLimits, SessionSampling
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import ProgramOptions, TaskBook, is_program, program_spec
from embodied_rl.types import EpisodeSummary

MODEL_NAME = "policy"
"""What programs call the model."""

_NEVER_S = 1e9
"""A session ends with its program, however long that thinks."""


class ProgramGenerator(AgentGenerator):
    """Serves programs through its own agent proxy, which has the backend until `close`."""

    def __init__(
        self, agent: Agent, tokenizer: Any, backend: TokenBackend, weights: Callable[[], Iterable[tuple[str, Any]]] | None, token: str
    ) -> None:
        """
        Args:
            tokenizer: the model's `ChatTokenizer`.
            agent: how answers are sampled and how long they may be; its prompts are not used, for programs write their own.
            weights: what `publish` loads into the backend; None: others load it.
            token: opens sessions; a secret, so that programs have only the sessions that were opened for them.

        Raises:
            UserError: the model has no chat template.
        """
        self._own = backend
        self._runners: list[ProgramRunner] = []
        self.tokenizer = tokenizer
        options = ProxyOptions(model=MODEL_NAME, stop_ids=agent.stop_ids, max_new_tokens=agent.config.max_new_tokens)
        # Programs have their own time limits.
        self.proxy = AgentProxy(backend, tokenizer, options, token=token, limits=SessionLimits(max_sessions=4096, idle_s=_NEVER_S))
        # Of it, this process uses weights and cache: programs ask for their tokens through the proxy.
        super().__init__(agent, cast(TokenBackend, self.proxy.shared_backend), weights)

    def sampling(self, temperature: float, seed: int = 0) -> SessionSampling:
        """Of a session, by the agent's configuration."""
        config = self.agent.config
        return SessionSampling(seed, temperature, config.top_p, config.top_k)

    def runner(self, options: ProgramOptions) -> ProgramRunner:
        """Programs that talk to this proxy."""
        self._runners.append(ProgramRunner(options, self.proxy, MODEL_NAME))
        return self._runners[-1]

    def close(self) -> None:
        """End the programs that run, proxy and backend."""
        for runner in self._runners:
            runner.close()
        self.proxy.close()
        self._own.close()
        self.agent.close()


class ProgramManager(Simulators):
    """Holds the programs' options; there are no simulator processes behind it."""

    autoreset = False
    plays_itself = True

    def __init__(self, config: SimConfig, num_slots: int | None = None) -> None:
        """
        Args:
            num_slots: programs at a time; None: the configuration's.

        Raises:
            UserError: see `ProgramOptions.of` and `TaskBook`.
        """
        self.options = ProgramOptions.of(config)
        self.tasks = TaskBook(self.options)
        self.spec = program_spec(config)
        self.num_slots = num_slots or config.num_slots

    def texts(self) -> list[str]:
        """What a tiny model's tokenizer must know."""
        # Each text without and with a space before it: the tokenizer treats these as different words.
        return [*self.options.texts, *(space + text for text in self.tasks.texts for space in ("", " "))]

    def evaluate(
        self, generator: object, num_episodes: int, first_seed: int, on_episode: Callable[[EpisodeSummary], object] | None = None
    ) -> list[EpisodeSummary]:
        """See `embodied_rl.rollout.evaluation.evaluate`. A program that fails counts as an episode without success and without reward.

        Raises:
            UserError: the generator serves no programs.
        """
        if not isinstance(generator, ProgramGenerator):
            raise UserError("An agent program needs a language model behind the proxy; policy=random writes no text.")
        runner = generator.runner(self.options)
        waiting = list(range(num_episodes))[::-1]
        finished: dict[int, EpisodeSummary] = {}
        try:
            while len(finished) < num_episodes:
                while waiting and runner.num_running < self.num_slots:
                    number = waiting.pop()
                    seed = HELD_OUT_START + first_seed + number
                    runner.start(number, seed, generator.sampling(generator.temperature, seed))
                for played in runner.wait(1.0):
                    number = played.tag  # type: ignore[assignment]
                    finished[number] = self._summary(number, played, generator)
                    if on_episode is not None:
                        on_episode(finished[number])
        finally:
            runner.close()
        return [finished[number] for number in range(num_episodes)]

    def _summary(self, number: int, played: Played, generator: ProgramGenerator) -> EpisodeSummary:
        success, length, info = False, 0, {}
        if isinstance(played.outcome, CapturedSession):
            success = played.reward >= self.options.success_reward
            length = episode_of_session(
                played.outcome, generator.tokenizer, reward=played.reward, success=success, seed=played.seed, domain=self.spec.task
            ).num_messages
        else:
            length, info = played.outcome.num_turns, {"fault": played.outcome.kind.value}
        return EpisodeSummary(
            slot=number % self.num_slots,
            index=number // self.num_slots,
            seed=played.seed,
            episode_return=played.reward,
            length=length,
            success_once=success,
            success_at_end=success,
            terminated=isinstance(played.outcome, CapturedSession),
            final_info=info,
        )

    def __enter__(self) -> ProgramManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_manager(config: SimConfig, seeds: EpisodeSeeds, **options: Any) -> EnvManager | ProgramManager:
    """The environment manager of a configuration, or what stands in its place for agent programs; see `EnvManager.from_config`.

    Raises:
        UserError: the simulator's or the program's configuration cannot be used.
    """
    if is_program(config):
        return ProgramManager(config, options.get("num_slots"))
    return EnvManager.from_config(config, seeds, **options)
