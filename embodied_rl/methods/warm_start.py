"""Warm starts: behaviour cloning of a language agent's scripted player, measured before and after, or of a robot task's expert or recorded
episodes."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.agents.turns import AgentEpisode, agent_episodes, rows_of
from embodied_rl.config import CloningConfig, GroupsConfig, HybridConfig, RecordedConfig, TrainConfig
from embodied_rl.episodes.dataset import EpisodeDataset
from embodied_rl.errors import UserError
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import GenerationRequest, ScriptedTokens, TokenBackend
from embodied_rl.learning.learner import make_learner
from embodied_rl.learning.recorded import CloningObjective, read_statistics, step_rows
from embodied_rl.methods.cloning import mean_figures
from embodied_rl.methods.demonstrations import Demonstrations, expert_of
from embodied_rl.methods.streams import Stream, of_name, prefixed
from embodied_rl.policies.base import Policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.progress import progress_bar
from embodied_rl.registry import load_target
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.collector import Collector
from embodied_rl.rollout.domains import DomainMixture
from embodied_rl.rollout.evaluation import evaluate
from embodied_rl.rollout.groups import GroupQueue
from embodied_rl.rollout.programs import ProgramCollector, ProgramGenerator
from embodied_rl.sim.instrumented import instrumented
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.text.program import ProgramOptions, is_program

_SEEDS = 2**29
"""Held-out seeds of the measurements: neither those of interim nor those of final evaluations."""
_TRIES = 4
"""Episodes that the player may play per wanted successful one."""

NO_START: dict[str, Any] = {"done": True, "figures": {}}
"""State of a warm start that is not configured."""


class WarmStart:
    """Warm start of one domain, once, before the first episode of a run that configures it (`algorithm.warm_start`)."""

    def __init__(self, stream: Stream, generator: Generator) -> None:
        """`generator`: acts in the stream's simulators; ignored if these play by themselves."""
        options = stream.config.algorithm.warm_start
        assert options is not None, "the domain has a warm start"
        self.options = options
        self._stream, self._generator = stream, generator
        self._episodes: list[AgentEpisode] = []
        self.figures: dict[str, float] = {}
        """Success on held-out seeds before and after, and the amount of data learned from."""
        self.wanted = True
        """Whether there is something to clone that was not cloned yet."""

    def sequences(self) -> list[TokenSequence]:
        """Token rows of the player's successful episodes.
        Raises UserError: there is no such player, or it does not succeed; SimFault: see EnvManager."""
        # If another process plays, the agent is there.
        self._episodes = self._stream.manager.demonstrate() if self._stream.agent is None else play_script(self._stream)
        return [TokenSequence(row.token_ids, row.mask, row.images) for episode in self._episodes for row in rows_of(episode.turns)]

    def note(self, before: float, after: float, loss: float) -> None:
        """Note that cloning is done, and its results."""
        self.figures = {
            "success_before": before,
            "success_after": after,
            "episodes": float(len(self._episodes)),
            "turns": float(sum(episode.num_messages for episode in self._episodes)),
            "loss": loss,
        }
        self.wanted, self._episodes = False, []

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a resume needs."""
        return {"done": not self.wanted, "figures": prefixed("warm_start", self.figures)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.wanted, self.figures = not state["done"], of_name("warm_start", state["figures"])

    def success(self) -> float:
        """Share of held-out episodes that succeed now."""
        episodes = evaluate(self._stream.manager, self._generator, self.options.measured_episodes, first_seed=_SEEDS)
        return float(np.mean([episode.success_once for episode in episodes]))


def play_script(stream: Stream) -> list[AgentEpisode]:
    """Successful episodes of a stream's scripted player, through a collector as in training; its simulators' running episodes are lost.
    Raises UserError: there is no such player, or it does not succeed; SimFault: see EnvManager."""
    config, manager, options = stream.config, stream.manager, stream.config.algorithm.warm_start
    assert options is not None, "there is a warm start"
    wanted, played = options.episodes, 0
    queue = GroupQueue(
        GroupsConfig(group_size=1, groups_per_step=min(wanted, 4 * manager.num_slots)),
        seed=config.seed,
        domains=DomainMixture.single(f"{manager.spec.task}/warm start"),
    )
    found: list[AgentEpisode] = []
    with ExitStack() as stack:
        collector, backend = _scripted(stream, queue, stack)
        collector.restart(queue)
        while len(found) < wanted:
            if played >= _TRIES * wanted:
                raise UserError(
                    f"The player algorithm.warm_start.player={options.player} succeeded in {len(found)} of {played} episodes, but {wanted} "
                    "successful ones are needed (algorithm.warm_start.episodes)."
                )
            groups = collector.next_groups(queue.version)
            played += len(groups)
            found += [episode for episode in agent_episodes(groups) if episode.success]
            backend.load_weights(queue.version + 1, ())
            queue.published(queue.version + 1)
    return found[:wanted]


def _scripted(stream: Stream, queue: GroupQueue, stack: ExitStack) -> tuple[Collector, TokenBackend]:
    """Collector that fills the queue with a stream's episodes as its scripted player answers them; `stack` closes what it starts."""
    config, manager, agent, options = stream.config, stream.manager, stream.agent, stream.config.algorithm.warm_start
    assert options is not None, "there is a warm start"
    assert agent is not None, "a domain of text that is played here"
    assert options.player is not None, "the configuration was checked"
    player: Callable[[str], str] = load_target(options.player)  # an observation's text to an action's
    in_words = is_program(config.sim)  # a program reads the answer itself

    def script(request: GenerationRequest) -> list[int]:
        assert request.messages is not None, "requests hold what was asked"
        said = player(str(request.messages[-1]["content"]))
        return [*agent.tokenizer.encode(said).tolist(), *agent.stop_ids[:1]] if in_words else agent.answer_ids(said)

    backend = ScriptedTokens(script)
    if not in_words:
        return AgentCollector(manager, agent, backend, queue, seed=config.seed), backend
    served = ProgramGenerator(agent, agent.tokenizer, backend, None, secrets.token_urlsafe(24), tells_messages=True)
    stack.callback(served.close)
    runner = served.runner(ProgramOptions.of(config.sim))
    sampling = served.sampling(1.0)
    return ProgramCollector(runner, queue, agent.tokenizer, num_slots=manager.num_slots, seed=config.seed, sampling=sampling), backend


# ---- robots' policies -----------------------------------------------------------------------------------------------


def clone_experts(
    configs: Mapping[str, TrainConfig], policy: Policy, run_dir: Path, is_over: Callable[[], bool], *, shown: bool
) -> dict[str, dict[str, float]]:
    """Clone `algorithm.warm_start.episodes` successful episodes, of `recording`, or of the expert, which ``run_dir`` records first.

    The expert plays in separate simulators, which end with it; the run's own stay unchanged.

    Args:
        configs: {domain: its own} of the domains that the policy plays, cloned together so that none is forgotten; a single one is ``""``.
        is_over: checked between the expert's rounds, where True is an error, and between epochs after the first.

    Returns for each domain ``loss`` of the last epoch, ``episodes``, ``steps`` that were learned from, and ``minibatches``.

    Raises:
        UserError: the task has no expert, none of its episodes succeeded, a recording does not fit, or the time was over.
        SimFault: see EnvManager.
    """
    sets: dict[str, EpisodeDataset] = {}
    for domain, own in configs.items():
        sim = own.sim if own.recording else instrumented(own.sim, expert=expert_of(own), reconfigure=False)
        with EnvManager.from_config(sim, EpisodeSeeds.given(0), autoreset=False) as manager:
            demonstrations = Demonstrations(_cloning_of(own), manager, policy, run_dir, domain=domain, is_over=is_over, shown=shown)
            episodes = demonstrations.load()
        # No episode is held out: the success on held-out seeds measures the result.
        data = sets[domain] = EpisodeDataset(episodes, demonstrations.spec, demonstrations.options(), seed=own.seed)
        read_statistics(policy, data)
    config = next(iter(configs.values()))
    cloning, options = _cloning_of(config), config.algorithm.warm_start
    assert options is not None, "the run has a warm start"
    # In this process, where the policy is; the run's own ranks wait.
    hybrid = HybridConfig(device="cuda" if next(policy.parameters()).is_cuda else "cpu", num_threads=config.hybrid.num_threads or 1)
    learner = make_learner(CloningObjective(policy, cloning.algorithm), policy, cloning.algorithm, hybrid)
    figures: dict[str, float] = {}
    minibatches = 0
    with progress_bar("cloning, epochs", options.num_epochs, shown=shown) as advance:
        for epoch in range(options.num_epochs):
            if epoch > 0 and is_over():
                break
            share = 1.0 - 0.9 * epoch / max(options.num_epochs - 1, 1)
            turns = itertools.zip_longest(*(data.epoch(epoch, options.minibatch_rows) for data in sets.values()))
            batches = (batch for turn in turns for batch in turn if batch is not None)
            taken = [learner.step(step_rows(policy, batch), share * options.learning_rate) for batch in batches]
            figures, minibatches = mean_figures(taken), minibatches + len(taken)
            advance(1, f"loss {figures['imitation_loss']:.4g}")
    common = {"loss": figures["imitation_loss"], "minibatches": float(minibatches)}
    return {name: {**common, "episodes": float(data.num_episodes), "steps": float(data.num_steps)} for name, data in sets.items()}


def _cloning_of(config: TrainConfig) -> TrainConfig:
    """The run's configuration, changed to clone."""
    options = config.algorithm.warm_start
    assert options is not None, "the run has a warm start"
    recorded: RecordedConfig = dataclasses.replace(
        config.algorithm.recorded, expert_episodes=options.episodes, max_episodes=options.episodes, only_success=True
    )
    changes: dict[str, Any] = {"groups": None, "off_policy": None, "warm_start": None, "recorded": recorded}
    algorithm = dataclasses.replace(
        config.algorithm, **changes, cloning=CloningConfig(), learning_rate=options.learning_rate, adam_eps=1e-8, max_grad_norm=1.0
    )
    return dataclasses.replace(config, algorithm=algorithm)
