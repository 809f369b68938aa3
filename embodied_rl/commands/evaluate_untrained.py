"""The part of ``python -m embodied_rl.evaluate`` that needs no checkpoint: a model folder's policy as it is, a server, or chance."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.commands.cli import command_line
from embodied_rl.commands.printing import print_tables

if TYPE_CHECKING:
    from embodied_rl.config import PlayerConfig, TrainConfig
    from embodied_rl.evaluation.output import EvaluationResult
    from embodied_rl.generation.base import Generator
from embodied_rl.sim.simulators import Simulators

_OWN = ("num_episodes", "seed", "output", "temperature")
"""Arguments of the command that are no overrides of a configuration."""
_SERVER_CONTEXT = 2**17
"""Tokens of a prompt for a server that keeps its own limit."""


@dataclass(frozen=True)
class Untrained:
    """Who plays what."""

    config: TrainConfig
    """With `evaluation` as the arguments say."""
    kind: str
    """random, openai, or a policy's name."""
    server: PlayerConfig | None = None
    """Of kind openai."""

    @property
    def folder(self) -> str | None:
        """Where the policy's weights are read from; None: nowhere."""
        if self.kind in ("random", "openai"):
            return None
        named = vars(self.config.policy)
        folder: str | None = named.get("path") or named.get("model")
        return folder

    @property
    def label(self) -> str:
        """For people."""
        if self.server is not None:
            return f"openai ({self.server.model})"
        if self.kind == "random":
            return self.kind
        return f"{self.kind} ({self.folder})" if self.folder else f"untrained {self.kind}"


def evaluate_untrained(argv: Sequence[str], values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Play, print and write what the arguments of the command ask for. Raises UserError."""
    player = choose_untrained(argv, values, overrides)
    result, told = play_untrained(player)
    _tell(player, result, told, values, command_line("evaluate", argv))


def choose_untrained(argv: Sequence[str], values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Untrained:
    """From the command's words, and from what they were parsed to. Raises UserError."""
    from embodied_rl.config import group_names
    from embodied_rl.config.compose import load_train_config
    from embodied_rl.config.facts import Run
    from embodied_rl.config.rules import EVALUATION, refuse
    from embodied_rl.errors import UserError, did_you_mean

    kind, experiment = values["policy"], values["experiment"]
    if values["sim"] is None and experiment is None:
        raise UserError("Argument checkpoint=… is missing. Without one, name a simulator and a policy: sim=… policy=…. See --help.")
    for name in ("against", "domain"):
        if values[name] is not None:
            raise UserError(f"{name}={values[name]} goes with checkpoint=…: what is compared, or chosen from, is a run.")
    known = [*group_names("policy"), "openai", "random"]
    if kind not in (None, *known) or (kind is None and experiment is None):
        given = "is missing" if kind is None else f"'{kind}' is not known"
        raise UserError(f"policy=… {given}.{did_you_mean(kind or '', known)}")
    words = [word for word in argv if word.partition("=")[0] not in (*_OWN, "policy") and not word.startswith("openai.")]
    if kind == "openai" or (kind == "random" and experiment is None):
        words.append("policy=language")  # speaks where the simulator does; prompts are made by it
    elif kind not in (None, "random"):
        words.append(f"policy={kind}")
    if kind == "openai" and not any(word.startswith(("policy.model=", "policy.tiny.max_context=")) for word in words):
        words.append(f"policy.tiny.max_context={_SERVER_CONTEXT}")
    for name, key in (("num_episodes", "num_episodes"), ("seed", "seed")):
        if any(word.startswith(f"{name}=") for word in argv):
            words.append(f"evaluation.{key}={values[name]}")
    if values["temperature"] is not None:
        words.append(f"evaluation.temperature={values['temperature'] or 'null'}")
    elif kind in ("random", "openai"):
        words.append("evaluation.temperature=null")
    config = load_train_config(words)
    refuse(EVALUATION, Run(config))
    if config.domains:
        raise UserError(f"experiment={experiment} has several domains: evaluate one of them by its simulator, sim=….")
    return Untrained(config, kind or config.policy.name, _server(overrides) if kind == "openai" else None)


def _server(overrides: Mapping[str, Any]) -> PlayerConfig:
    from embodied_rl.config import PlayerConfig
    from embodied_rl.config.building import build
    from embodied_rl.errors import UserError

    given = {key.removeprefix("openai."): value for key, value in overrides.items() if key.startswith("openai.")}
    missing = [f"openai.{name}=…" for name in ("base_url", "model") if name not in given]
    if missing:
        raise UserError(f"policy=openai needs {' and '.join(missing)}: where the server is, with its version, and its name of the model.")
    return build(PlayerConfig, {"share": 0.5, "backend": "openai", **given}, "openai")


def play_untrained(player: Untrained) -> tuple[EvaluationResult, dict[str, Any]]:
    """The episodes and their figures, and what is reported of the player beside them.

    Raises:
        UserError: the policy does not fit the simulator, its folder is incomplete, or a server does not answer.
    """
    import torch

    from embodied_rl.evaluation.play import play_and_sum_up
    from embodied_rl.progress import progress_bar
    from embodied_rl.rollout.program_manager import make_manager
    from embodied_rl.sim.seeding import EpisodeSeeds

    started, config = time.perf_counter(), player.config
    wanted = config.evaluation
    torch.manual_seed(config.seed)
    seeds, slots = EpisodeSeeds.held_out(wanted.seed), min(config.sim.num_slots, wanted.num_episodes)
    with (
        make_manager(config.sim, seeds, num_slots=slots, chunk_size=config.policy.chunk_size) as manager,
        _generator(player, manager) as generator,
        progress_bar(manager.spec.task, wanted.num_episodes) as advance,
    ):
        result = play_and_sum_up(
            manager,
            generator,
            advance,
            sim=config.sim,
            label=player.label,
            num_episodes=wanted.num_episodes,
            first_seed=wanted.seed,
            temperature=wanted.temperature,
            started=started,
        )
        shares = generator.figures()
    return result, {"answers": shares} if shares else {}


@contextmanager
def _generator(player: Untrained, manager: Simulators) -> Iterator[Generator]:
    """What acts, closed afterwards."""
    config, spec = player.config, manager.spec
    if config.policy.name == "language" and (player.kind != "random" or spec.action.kind == "text"):
        with tempfile.TemporaryDirectory(prefix="embodied_rl_") as folder:
            speaking = _speaking(player, manager, Path(folder))
            try:
                yield speaking
            finally:
                speaking.close()
        return
    if player.kind == "random":
        from embodied_rl.generation.random_backend import NoisyGenerator, RandomGenerator

        yield NoisyGenerator(RandomGenerator(spec), spec, config.seed)
        return
    from embodied_rl.generation.torch_backend import TorchGenerator
    from embodied_rl.learning.devices import resolve_device
    from embodied_rl.policies.build import build_policy

    policy = build_policy(config.policy, spec)
    policy.to(resolve_device(config.hybrid.device))
    policy.train(False)
    generator = TorchGenerator(policy)
    generator.publish(0)
    yield generator


def _speaking(player: Untrained, manager: Simulators, folder: Path) -> Any:
    """A language agent: with its own model, with a server's, or with chance."""
    from embodied_rl.learning.devices import resolve_device
    from embodied_rl.methods.language_player import make_agent, make_agent_generator, make_language_policy, make_random_agent

    config = player.config
    policy = make_language_policy(config, manager, folder, None)
    if player.kind == "random":
        return make_random_agent(config.agent, policy, manager.spec, config.seed)
    if player.server is None:
        policy.to(resolve_device(config.hybrid.device))
        generator = make_agent_generator(config, policy, manager.spec, folder)
        generator.publish(0)
        return generator
    from embodied_rl.generation.openai_tokens import OpenAIOptions, OpenAITokens
    from embodied_rl.rollout.agent_generator import AgentGenerator

    server = player.server
    assert server.base_url is not None, "the configuration was checked"
    assert server.model is not None, "the configuration was checked"
    options = OpenAIOptions(
        server.base_url, server.model, api=server.api, api_key_env=server.api_key_env, timeout_s=server.timeout_s, seed=config.seed
    )
    agent = make_agent(config.agent, policy, manager.spec)
    agent.writes_messages = server.api == "chat"
    return AgentGenerator(agent, OpenAITokens(options, policy.tokenizer), temperature=server.temperature, seed=config.seed)


def _tell(player: Untrained, result: EvaluationResult, told: dict[str, Any], values: Mapping[str, Any], command: str) -> None:
    """Tables on the console; JSON and CSV."""
    from embodied_rl.checkpoint import note_base
    from embodied_rl.evaluation.output import csv_of, document_of_untrained, result_table, task_table
    from embodied_rl.files import next_free, write_atomic

    # Shown first: a file that cannot be written must not cost the figures.
    print_tables(result_table(result))
    if (tasks := task_table([player.label], [result])) is not None:
        print_tables(tasks)
    if shares := told.get("answers"):
        named = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
        print(f"Of the answers: {named}")
    default = next_free(Path("runs") / player.config.sim.name / f"evaluation-{player.kind}.json")
    output = Path(values["output"]).with_suffix(".json") if values["output"] else default
    if player.folder is not None:
        told["model"] = note_base(player.folder, output.parent)
    if player.server is not None:
        told["server"] = dataclasses.asdict(player.server)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, json.dumps(document_of_untrained(player.config, result, command, told), indent=1) + "\n")
    write_atomic(output.with_suffix(".csv"), csv_of([player.label], [""], [result]))
    print(f"{result.wall_clock_s:.1f} s. Every episode: {output} and {output.with_suffix('.csv').name}")
