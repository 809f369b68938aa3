"""Builds a run from its streams: policies, generators, collectors and the method that learns."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.agents.agent import Agent
from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.config import TrainConfig
from embodied_rl.config.run import LANGUAGE, SHARED, PlayerConfig, model_place
from embodied_rl.errors import UserError
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.random_backend import RandomGenerator, WrappedGenerator
from embodied_rl.generation.tokens import RandomTokens, TokenBackend, TokenCache, TokenView
from embodied_rl.learning.devices import training_device
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.methods.agents import TokenLearner
from embodied_rl.methods.cloning import CloningLearner
from embodied_rl.methods.groups import EpisodeLearner
from embodied_rl.methods.iteration import StreamsMethod
from embodied_rl.methods.language_player import MODEL_FOLDER, Speaking, make_agent, make_backend, make_language_policy, model_files
from embodied_rl.methods.learners import PolicyLearner
from embodied_rl.methods.off_policy import CriticLearner
from embodied_rl.methods.rollout import RolloutLearner
from embodied_rl.methods.starts import Starts, give_starts
from embodied_rl.methods.stored import StoredLearner
from embodied_rl.methods.streams import Stream, make_collector, make_queue, of_name
from embodied_rl.methods.warm_start import WarmStart
from embodied_rl.policies.base import Policy, TrainedModule
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.rollout.agent_collector import AgentCollector
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.collector import RolloutCollector
from embodied_rl.rollout.group_collector import GroupCollector
from embodied_rl.rollout.groups import WHOLE, GroupQueue, Share, group_seed
from embodied_rl.rollout.initialized import StartLibrary
from embodied_rl.rollout.programs import ProgramCollector, ProgramGenerator
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import ProgramOptions, is_program
from embodied_rl.types import ActionLayout, Observation, SimSpec

PROGRAM_FAULTS = "program_faults.jsonl"
"""File in a run's folder with one line per failed agent program."""
Hosted = Callable[[Stream, Generator], tuple[Simulators, Generator]]
"""(stream, its generator) → simulators and generator of a robot's collector."""


class RunPolicies(TrainedModule):
    """The policies of several domains as one module, for checkpoints and statistics."""

    has_description = True

    def __init__(self, policies: Mapping[str, TrainedModule], languages: Mapping[str, LanguagePolicy], of: Mapping[str, str]) -> None:
        """`languages`: the language policies among them; `of`: {domain: its policy}."""
        super().__init__()
        self.roles = nn.ModuleDict(dict(policies))  # the name of their tensors in checkpoints
        self._named, self._of, self._languages = dict(policies), dict(of), dict(languages)

    def acting_in(self, domain: str) -> Policy:
        return self._named[self._of[domain]].acting_in("")

    def update_statistics(self, observation: Mapping[str, Tensor]) -> None:
        """See `Policy.update_statistics`; keys are ``policy/key``."""
        for name, policy in self._named.items():
            if own := of_name(name, observation):
                policy.update_statistics(own)

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(``policy/name``, tensor) of the weights that act: of a language policy only the model, with any adapter merged."""
        return ((f"{name}/{key}", tensor) for name, policy in self._named.items() for key, tensor in policy.named_weights())

    def unmerged_weights(self, *, base: bool) -> Iterable[tuple[str, Tensor]]:
        """See `TrainedModule.unmerged_weights`; names as in `named_weights`."""
        return ((f"{name}/{key}", tensor) for name, policy in self._named.items() for key, tensor in policy.unmerged_weights(base=base))

    def save_description(self, folder: Path) -> None:
        """Write what each language policy is built from, into a checkpoint's folder ``model`` (`model_place`)."""
        for name, language in self._languages.items():
            own = folder / model_place(name)
            own.mkdir(exist_ok=True)
            language.save_config(own)
            language.save_description(own)

    def exported_names(self) -> dict[str, tuple[str, str]]:
        """See `TrainedModule.exported_names`: those of the language policies."""
        exported: dict[str, tuple[str, str]] = {}
        for name, language in self._languages.items():
            places = language.exported_names().items()
            exported |= {f"roles.{name}.{key}": (str(PurePosixPath(model_place(name), file)), stored) for key, (file, stored) in places}
        return exported


@dataclasses.dataclass(frozen=True)
class RunComponents:
    """A run's policy, the generator that acts with it, and the method that trains it."""

    policy: TrainedModule
    generator: Generator
    method: StreamsMethod
    languages: Mapping[str, LanguagePolicy] = dataclasses.field(default_factory=dict)
    """{name: policy} of the language policies."""


# ---- generators and backends --------------------------------------------------------------------------------------------


class Acting:
    """Supplies what acts in the streams: a generator for a robot's policy, token backends for a language policy's agents."""

    speaking: Mapping[str, Speaking]
    """{name: language policy}, or its description if its weights are in another process."""

    def weights(self, policy: str) -> Callable[[], Iterable[tuple[str, Any]]] | None:
        """Reader of a language policy's weights, if they are in this process; else None."""
        return None

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        """Generator of the stream's own policy, and its action layout."""
        raise NotImplementedError

    def tokens(self, policy: str, name: str, config: TrainConfig) -> TokenBackend:
        """Make the backend that samples with a language policy's weights, as `config.generation` says; called once per backend name of a
        policy. Raises UserError."""
        raise NotImplementedError

    def weights_go_through(self, policy: str, name: str, backend: TokenBackend) -> None:
        """Note that the policy's backend `name` runs in its own thread and takes its weights from `backend`."""


class ActingHere(Acting):
    """Acts with the trained policies themselves."""

    def __init__(self, policies: Mapping[str, Any], languages: Mapping[str, LanguagePolicy], run_dir: Path) -> None:
        """`policies`: {name: policy} (`Stream.policy`); `languages`: the language policies among them."""
        self._policies, self._languages, self._run_dir = policies, languages, run_dir
        self._generators: dict[str, Generator] = {}
        self.speaking = languages

    def weights(self, policy: str) -> Callable[[], Iterable[tuple[str, Any]]]:
        return self._languages[policy].named_weights

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        policy = self._policies[stream.policy]
        if stream.policy not in self._generators:
            self._generators[stream.policy] = make_generator(stream.config.generation, policy)
        return self._generators[stream.policy], policy.action_layout

    def tokens(self, policy: str, name: str, config: TrainConfig) -> TokenBackend:
        folder = self._run_dir / MODEL_FOLDER / own if (own := model_place(policy)) else self._run_dir
        return make_backend(config.generation, self._languages[policy], folder, seed=config.seed)


@dataclasses.dataclass(frozen=True)
class Playing:
    """What `let_play` set up for a process's streams."""

    backends: dict[tuple[str, str], TokenBackend]
    """{(policy, name): backend} of the backends that sample with a policy's weights."""
    close: Callable[[], None]
    """Closes tools and backends."""


def let_play(
    streams: Sequence[Stream],
    acting: Acting,
    queue: GroupQueue | None,
    run_dir: Path,
    hosted: Hosted = lambda stream, generator: (stream.manager, generator),
    share: Share = WHOLE,
) -> Playing:
    """Give every stream its generator and its collector, which fills `queue`, or rollouts.

    Args:
        run_dir: folder for the failures of agent programs (`PROGRAM_FAULTS`).
        hosted: replaces the stream's own simulators and generator.
        share: share of a rollout's slots, if other workers play the rest.

    Raises:
        UserError: as `Agent` and the backends do.
    """
    backends: dict[tuple[str, str], TokenBackend] = {}
    views: dict[tuple[str, str], TokenView] = {}
    sampled = [(stream.policy, _kind_of(stream)) for stream in streams]
    with ExitStack() as stack:
        for stream, key in zip(streams, sampled, strict=True):
            if stream.config.policy.name != "language":
                _let_robot_play(stream, acting, queue, hosted, share)
                continue
            assert queue is not None, "the configuration was checked"
            speaking = acting.speaking[stream.policy]
            agent = stream.agent = make_agent(stream.config.agent, speaking, stream.spec)  # raises before an engine is started
            stack.callback(agent.close)
            if is_program(stream.config.sim):
                served = _let_programs_play(stream, agent, acting, queue, run_dir)
                stack.callback(served.close)
                backends[stream.policy, stream.name] = served.backend
                continue
            if not key[1]:
                backend = _others_backend(stream, agent, speaking)
                stack.callback(backend.close)
            else:
                if key not in backends:
                    backends[key] = acting.tokens(*key, with_backend(stream.config, key[1]))
                    stack.callback(backends[key].close)
                if sampled.count(key) == 1:
                    backend = backends[key]
                else:
                    backend = views[key] = TokenView(backends[key], views.get(key))
            _let_agent_play(stream, agent, backend, queue, acting)
        close = stack.pop_all().close
    return Playing(backends, close)


def _let_robot_play(stream: Stream, acting: Acting, queue: GroupQueue | None, hosted: Hosted, share: Share) -> None:
    stream.generator, layout = acting.generator(stream)
    if not stream.config.algorithm.plays:
        return
    simulators, generator = hosted(stream, stream.generator)
    if not stream.plays_groups:
        stream.rollouts = make_rollout_collector(
            stream.config, simulators, generator, layout, share.of(stream.domain), stream.starts, stream.domain
        )
        return
    assert queue is not None, "it asks for groups"
    stream.pump = GroupCollector(
        simulators,
        generator,
        queue,
        seed=stream.config.seed,
        min_ready=_min_ready(stream.config),
        starts=stream.starts,
        layout=layout,
    )


def _let_agent_play(stream: Stream, agent: Agent, backend: TokenBackend, queue: GroupQueue, acting: Acting) -> None:
    stream.pump = AgentCollector(
        stream.manager,
        agent,
        backend,
        queue,
        seed=stream.config.seed,
        min_ready=_min_ready(stream.config),
        trained=stream.trained,
        has_critic=stream.trained and advantage_info(stream.config.algorithm.advantage).returns_value_target,
        temperature=None if stream.other is None else stream.other.temperature,
        starts=stream.starts,
    )
    if stream.is_own:
        # Requests of final evaluations in a run's only domain draw the same in every run, so that results compare.
        stream.generator = AgentGenerator(agent, backend, acting.weights(stream.policy), seed=stream.config.seed if stream.domain else 0)


def _let_programs_play(stream: Stream, agent: Agent, acting: Acting, queue: GroupQueue, run_dir: Path) -> ProgramGenerator:
    """For a stream of agent programs: the proxy that serves them, with its own backend, and their collector."""
    config, policy = stream.config, stream.policy
    backend = acting.tokens(policy, stream.name, config)
    served = ProgramGenerator(agent, acting.speaking[policy].tokenizer, backend, acting.weights(policy), secrets.token_urlsafe(24))
    acting.weights_go_through(policy, stream.name, served.backend)
    stream.generator = served
    stream.pump = ProgramCollector(
        served.runner(ProgramOptions.of(config.sim)),
        queue,
        served.tokenizer,
        num_slots=stream.manager.num_slots,
        seed=config.seed,
        sampling=served.sampling(config.agent.temperature),
        faults_file=run_dir / PROGRAM_FAULTS,
    )
    return served


def _kind_of(stream: Stream) -> str:
    """Kind of backend that samples the stream's tokens; empty: none, another model's, or the stream's own backend."""
    if stream.config.policy.name != "language" or is_program(stream.config.sim):
        return ""
    if stream.other is None:
        return stream.config.generation.backend
    return stream.other.backend if stream.other.is_policy else ""


def _min_ready(config: TrainConfig) -> int | None:
    groups = config.algorithm.groups
    assert groups is not None, "a method on groups"
    return 1 if groups.max_staleness else None


def with_backend(config: TrainConfig, kind: str) -> TrainConfig:
    """The configuration with another kind of token backend."""
    generation = dataclasses.replace(config.generation, backend=kind)  # type: ignore[arg-type]  # a kind of tokens
    return dataclasses.replace(config, generation=generation)


def _others_backend(stream: Stream, agent: Agent, speaking: Speaking) -> TokenBackend:
    player, seed = stream.other, stream.config.seed
    assert player is not None, "the run's own policy has a kind of backend"
    agent.writes_messages = player.backend == "openai" and player.api == "chat"
    if player.backend == "random":
        return RandomTokens(choices=[agent.answer_ids(action) for action in agent.config.actions], seed=seed)
    return served_tokens(player, speaking.tokenizer, seed)


def served_tokens(player: PlayerConfig, tokenizer: ChatTokenizer, seed: int) -> TokenBackend:
    """Backend of a server with OpenAI's interface."""
    from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens

    assert player.base_url is not None, "the configuration was checked"
    assert player.model is not None, "the configuration was checked"
    options = OpenAIOptions(
        player.base_url, player.model, api=player.api, api_key_env=player.api_key_env, timeout_s=player.timeout_s, seed=seed
    )
    return OpenAITokens(options, tokenizer)


class SwitchedGenerator(WrappedGenerator):
    """Acts with `generator`; with random actions if `way` is "random", and without noise if it is "mode"."""

    def __init__(self, generator: Generator, spec: SimSpec) -> None:
        super().__init__(generator)
        self._random = RandomGenerator(spec)

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        self._random.version = self.version
        self._present().send(slots, observation, None if self.way == "mode" else noise)

    def recv(self) -> ActedBatch:
        return self._present().recv()

    def _present(self) -> Generator:
        return self._random if self.way == "random" else self._generator


def make_rollout_collector(
    config: TrainConfig,
    manager: Simulators,
    generator: Generator,
    layout: ActionLayout,
    share: Share = WHOLE,
    starts: StartLibrary | None = None,
    domain: str = "",
) -> RolloutCollector:
    """Build the collector that a configuration describes, in the simulators' process; `share`: share of the slots. Methods with stored
    steps set how it acts (`Collector.draw`). Each named domain draws its own seeds and noise."""
    has_hosts, max_staleness = config.hybrid.placement.kind == "multiplexed", config.algorithm.max_staleness
    return RolloutCollector(
        manager,
        generator if config.algorithm.on_policy else SwitchedGenerator(generator, manager.spec),
        rollout_steps=share.rollout_steps or config.algorithm.rollout_steps,
        num_groups=1 if has_hosts else config.sim.num_groups,
        seed=group_seed(config.seed, domain, 0) if domain else config.seed,
        layout=layout,
        max_staleness=max_staleness,
        min_ready=1 if has_hosts and max_staleness else None,
        share=share,
        starts=starts,
    )


# ---- learning -----------------------------------------------------------------------------------------------------------


def build_run(
    config: TrainConfig,
    streams: Sequence[Stream],
    run_dir: Path,
    checkpoint: Path | None = None,
    base: Path | None = None,
    *,
    here: bool = False,
    generator: Generator | None = None,
    languages: Mapping[str, LanguagePolicy] = MappingProxyType({}),
    ranks: RankHost | None = None,
    starts: Starts | None = None,
    kind: Callable[..., StreamsMethod] = StreamsMethod,
) -> RunComponents:
    """Build what learns from streams, and with `here` what plays them; otherwise another process plays, and the connection to it sets the
    method's `collector`.

    Args:
        checkpoint: folder of the checkpoint that the run continues from.
        base: folder of the model that its adapter belongs to.
        generator: publishes to the process that plays; None: another process runs warm starts and publishes.
        languages: language policies that are already built.
        starts: start libraries of the streams' episodes, which the rollout worker has too.
        kind: maker of the method.

    Raises:
        UserError: as the makers of policies, learners and backends do.
    """
    if here:
        give_starts(streams)
    policies, speaking = _policies(streams, run_dir, checkpoint, base, languages)
    queue = None
    if here:
        for language in speaking.values():  # now, because a token backend samples where its policy is when the backend is made
            language.to(training_device(config.hybrid, language, 0, None if ranks is None else ranks.device_index(0)))
        queue = make_queue(config, streams) if config.algorithm.groups is not None else None
        with torch.random.fork_rng(devices=[]):  # so that learning starts from the same weights if another process plays
            playing = let_play(streams, ActingHere(policies, speaking, run_dir), queue, run_dir)
        # A run's only stream keeps its own generator, which knows its backend.
        generator = StreamGenerators(streams, speaking, playing) if streams[0].domain else streams[0].generator
        assert generator is not None, "all streams play here"
    divided = max(policies, key=lambda name: (name in speaking, sum(part.numel() for part in policies[name].parameters())))
    learners: dict[str, PolicyLearner] = {}
    stored: dict[str, StoredLearner[Any]] = {}
    for name, policy in policies.items():
        own = [stream for stream in streams if stream.is_own and stream.policy == name]
        # A policy of several domains learns with the run's configuration, and a policy of one domain with that domain's.
        of_update = config if name in ("", LANGUAGE, SHARED) else own[0].config
        if name != divided:
            of_update = dataclasses.replace(of_update, hybrid=dataclasses.replace(of_update.hybrid, sharding=None))
        if name in speaking:
            if ranks is not None and name == divided:
                ranks.take_model(model_files(speaking[name]))
            learners[name] = _token_learner(of_update, streams, speaking[name], name, generator, ranks)
        elif not of_update.algorithm.on_policy:
            keep = CriticLearner if of_update.algorithm.cloning is None else CloningLearner
            learners[name] = stored[name] = keep(of_update, own, policy, run_dir, ranks)
        else:
            learn = RolloutLearner if of_update.algorithm.groups is None else EpisodeLearner
            learners[name] = learn(of_update, {stream.domain: stream.config for stream in own}, policy, ranks)
    of = {stream.domain: stream.policy for stream in streams}
    trained = RunPolicies(policies, speaking, of) if streams[0].domain else policies[""]
    method = kind(config, streams, learners, stored, run_dir, queue, divided=divided)
    acting = [stream.generator for stream in streams if stream.generator is not None and not stream.plays_groups]
    method.play_by(make_collector(streams, queue), acting)
    if starts is not None:
        method.starts = starts
    return RunComponents(trained, generator or Generator(), method, speaking)


class StreamGenerators(Generator):
    """The generators of several streams as one, for the engine to publish to."""

    caches: Sequence[TokenCache] = ()

    def __init__(self, streams: Sequence[Stream], languages: Mapping[str, LanguagePolicy], playing: Playing) -> None:
        self._languages, self._playing, self.version = languages, playing, 0
        self._robots = dict.fromkeys(stream.generator for stream in streams if stream.generator is not None and stream.agent is None)
        self.caches = tuple(playing.backends.values())

    def publish(self, version: int) -> None:
        for (policy, _), backend in self._playing.backends.items():
            backend.load_weights(version, self._languages[policy].named_weights())
        for generator in self._robots:
            generator.publish(version)
        self.version = version

    def close(self) -> None:
        self._playing.close()


def _token_learner(
    config: TrainConfig, streams: Sequence[Stream], policy: LanguagePolicy, name: str, generator: Generator | None, ranks: RankHost | None
) -> TokenLearner:
    """The learner of the language policy `name`, with its warm starts if this process publishes (`generator`)."""
    own = [stream for stream in streams if stream.is_own and stream.policy == name]
    sampling = {(stream.other or stream.config.generation).backend for stream in streams if stream.trained and stream.policy == name}
    learner = TokenLearner(config, {stream.domain: stream.config for stream in own}, policy, sampling, ranks)
    if generator is not None:
        learner.generator = generator
        wanted = [stream for stream in own if stream.config.algorithm.warm_start is not None]
        learner.warm_starts = {stream.domain: WarmStart(stream, stream.generator or generator) for stream in wanted}
    return learner


def _policies(
    streams: Sequence[Stream],
    run_dir: Path,
    checkpoint: Path | None,
    base: Path | None,
    given: Mapping[str, LanguagePolicy],
) -> tuple[dict[str, Any], dict[str, LanguagePolicy]]:
    """({name: policy}, the language policies), all built before anything else draws random numbers, so that initial weights do not depend
    on where domains are played. `given`: policies that are already built."""
    own = [stream for stream in streams if stream.is_own]
    speaking = [stream for stream in own if stream.config.policy.name == "language"]
    languages = dict(given)
    for name in dict.fromkeys(stream.policy for stream in speaking):
        first, *others = (stream for stream in speaking if stream.policy == name)
        further = [(stream.config.agent, stream.manager) for stream in others]
        if name not in languages:
            place = model_place(name)
            languages[name] = make_language_policy(first.config, first.manager, run_dir, checkpoint, base, further, place)
    robots: dict[str, Policy] = {}
    for stream in own:
        if stream in speaking:
            continue
        if stream.policy not in robots:
            robots[stream.policy] = build_policy(stream.config.policy, stream.spec)
        _check_shared(robots[stream.policy], stream)
    return languages | robots, languages


def _check_shared(policy: Policy, stream: Stream) -> None:
    """Raise UserError if a domain's policy, built for another domain's simulators, cannot play this one."""
    ours, theirs = policy.spec, stream.spec
    differing = [key for key in policy.observation_keys if ours.observation[key] != theirs.observation.get(key)]
    if differing or ours.action != theirs.action:
        what = f"observation '{differing[0]}'" if differing else "action"
        raise UserError(
            f"domains.{stream.domain} shares policy={stream.config.policy.name} with other domains, but its {what} differs from task "
            f"'{ours.task}': give it a separate policy (domains.{stream.domain}.policy)."
        )
