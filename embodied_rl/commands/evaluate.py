"""``python -m embodied_rl.evaluate``: success and return on held-out seeds, of checkpoints or untrained policies, compared seed by seed."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.bounds import Episodes, HeldOutSeed, Temperature
from embodied_rl.checkpoint import Checkpoint, base_of, check_compatible, load_checkpoint, note_base
from embodied_rl.checkpoint.folder import domain_part
from embodied_rl.commands.cli import Argument, Command, WrittenFile, as_command, command_line, expand_paths, print_tables
from embodied_rl.config import PlayerConfig, SimConfig, TrainConfig, config_file, group_names, load_sim_config
from embodied_rl.config.building import build
from embodied_rl.config.compose import load_train_config
from embodied_rl.config.policy import draws_tokens
from embodied_rl.errors import UserError, did_you_mean, shown
from embodied_rl.evaluation import output
from embodied_rl.files import next_free, write_atomic
from embodied_rl.generation.base import Generator
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.progress import progress_bar
from embodied_rl.sim.simulators import Simulators
from embodied_rl.trust import trusted_names
from embodied_rl.types import Observation, SimSpec

if TYPE_CHECKING:
    from embodied_rl.policies.base import Policy
    from embodied_rl.policies.language import LanguagePolicy


EVALUATION_FILE, COMPARISON_FILE = "evaluation.json", "comparison.json"
MAX_CHECKPOINTS = 64

COMMAND = Command(
    name="evaluate",
    summary="Play held-out seeds with policies from checkpoints, model folders or servers, and report success and return.",
    arguments=(
        Argument(
            "checkpoint", str, "folder of a run (its last checkpoint) or of a checkpoint; several: separated by commas, or a pattern", None
        ),
        Argument("against", str, "also play the same seeds with this checkpoint, or with 'random', and compare seed by seed", None),
        Argument("domain", str, "domain to play, if the run has several", None),
        Argument("num_episodes", Episodes, "episodes per policy, one per seed; default: 100, or the protocol's number", None),
        Argument("seed", HeldOutSeed, "the held-out seeds are 2**30 + seed, 2**30 + seed + 1, …", 0),
        Argument(
            "policy",
            str,
            "with a checkpoint: checkpoint or random. Without: random, openai (a server), or a kind of policy (openvla, openvla_oft, "
            "pi0, language, …) with its folder in policy.path or policy.model",
            None,
        ),
        Argument("sim", str, "simulator; with a checkpoint: one with the same spaces, default: the checkpoint's own", None),
        Argument("protocol", str, "evaluation protocol: libero, libero_published, maniskill_rl4vla, …", None),
        Argument(
            "temperature",
            Temperature,
            "temperature of action tokens; 0: most likely; default: the run's or protocol's",
            None,
        ),
        Argument("trust", str, "code that the checkpoints may name beside registered code: package.module:Attribute, or a list", None),
        Argument("experiment", str, "without a checkpoint: experiment to take simulator, policy and prompts from", None),
        Argument("generation", str, "without a checkpoint: sampling backend of a language model, tokens_torch or vllm", None),
        Argument(
            "output",
            WrittenFile,
            "JSON file to write, with a CSV file of all episodes beside it; default: evaluation.json in the run's folder, or for several "
            "policies the next free comparison.json",
            None,
        ),
    ),
    prefixes={
        "sim.": "change a value of the simulator's configuration, e.g. sim.num_slots=4",
        "policy.": "without a checkpoint: change a value of the policy's configuration, e.g. policy.path=checkpoints/openvla-7b",
        "agent.": "without a checkpoint: change a value of a language agent's configuration, e.g. agent.answer=tag",
        "openai.": "with policy=openai: base_url, model, api (chat or completions), api_key_env, timeout_s",
        "hybrid.": "without a checkpoint: the device, e.g. hybrid.device=cuda",
    },
    examples=(
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1",
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1/checkpoints/best num_episodes=500 seed=1000",
        "checkpoint=runs/fetch_reach/20260101-120000-seed1 against=runs/fetch_reach/20260101-120000-seed2",
        "'checkpoint=runs/fetch_reach/20260101-120000-seed1/checkpoints/step_*' against=random",
        "sim=libero_spatial protocol=libero_published policy=openvla policy.path=checkpoints/openvla-7b-libero policy.image_recipe=libero",
        "sim=frozenlake policy=openai openai.base_url=http://127.0.0.1:8000/v1 openai.model=my-model 'agent.actions=[up,down,left,right]'",
    ),
)


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    num_episodes: int,
    *,
    seed: int = 0,
    sim: SimConfig | None = None,
    policy: str = "checkpoint",
) -> output.EvaluationResult:
    """Play `num_episodes` held-out seeds, each once, with the policy's mode (or with random actions).

    Args:
        seed: the seeds are 2**30 + seed + 0 … num_episodes - 1.
        sim: another simulator configuration; None: the checkpoint's.
        policy: "checkpoint" or "random".

    Raises:
        IncompatibleCheckpointError: the simulator's spaces differ from those of the policy's training.
        UserError, SimFault: from the simulator.
    """
    (result,) = evaluate_players([(checkpoint, policy)], num_episodes, seed=seed, sim=sim)
    return result


def evaluate_players(
    players: Sequence[tuple[Checkpoint, str]],
    num_episodes: int,
    *,
    seed: int,
    sim: SimConfig | None,
    temperature: float | None = None,
) -> list[output.EvaluationResult]:
    """Play the same held-out seeds with each of `players`, (checkpoint, "checkpoint" or "random"), in the same simulators.

    Args:
        players: at least one; if `sim` is None, the first one's simulator is used.
        seed: the seeds are 2**30 + seed + 0 … num_episodes - 1.
        temperature: for drawn action tokens, 0 for the likeliest; None: that of each checkpoint's evaluation.

    Returns one result each, in their order.

    Raises:
        IncompatibleCheckpointError: the simulator's spaces differ from those of a policy's training.
        UserError, SimFault: from the simulator.
    """
    wanted = players[0][0].config.sim if sim is None else sim

    def contestant(label: str, checkpoint: Checkpoint, policy: str) -> output.Contestant:
        def make(manager: Simulators) -> Generator:
            return make_generator(checkpoint, manager.spec, policy=policy, same_task=is_own_task(checkpoint, wanted), seed=seed)

        def origin(folder: Path) -> Mapping[str, Any]:
            return output.origin_of(checkpoint)

        trained = checkpoint.config
        if policy == "random":
            return output.Contestant(policy, label, trained, make, origin)
        own = trained.evaluation.temperature if temperature is None and draws_tokens(trained.policy) else temperature or None
        return output.Contestant(policy, label, trained, make, origin, str(checkpoint.step), own)

    contestants = [contestant(label, *player) for label, player in zip(output.labels(players), players, strict=True)]
    longest = max(checkpoint.config.policy.chunk_size for checkpoint, _ in players)
    with one_thread_acts(checkpoint.config.policy.name for checkpoint, policy in players if policy == "checkpoint"):
        return output.play(contestants, wanted, num_episodes, seed=seed, chunk_size=longest)


def one_thread_acts(policies: Iterable[str]) -> AbstractContextManager[None]:
    """Around acting with policies of these kinds: use one thread, as in training, since the simulators use the other cores. Language models
    use all cores, because text simulators step in no time."""
    if not set(policies) - {"language"}:
        return nullcontext()
    from embodied_rl.learning.devices import compute_threads

    return compute_threads(1)


def is_own_task(checkpoint: Checkpoint, sim: SimConfig) -> bool:
    """Whether `sim` is the task of the policy's training; otherwise the user requested a transfer, and equal spaces suffice."""
    trained = checkpoint.config.sim
    return (sim.name, sim.task) == (trained.name, trained.task)


def make_generator(
    checkpoint: Checkpoint, spec: SimSpec, *, policy: str = "checkpoint", same_task: bool = True, seed: int = 0
) -> Generator:
    """Generator of the checkpoint's policy with its weights loaded, or of random actions drawn from `seed`. Raises
    IncompatibleCheckpointError: the policy does not fit the simulator `spec`, or the tensors do not fit the policy."""
    if checkpoint.config.policy.name == "language":
        return _language_generator(checkpoint, spec, policy, same_task, seed)
    if policy == "random":
        return RandomGenerator(spec, seed)  # also for callers that give no noise
    return acting(make_policy(checkpoint, spec, same_task=same_task))


def acting(policy: Policy, version: int = 0) -> Generator:
    """Generator that acts with a policy's present weights, as a `version`."""
    from embodied_rl.generation.torch_backend import TorchGenerator

    generator = TorchGenerator(policy)
    generator.publish(version)
    return generator


def _language_generator(checkpoint: Checkpoint, spec: SimSpec, policy: str, same_task: bool, seed: int) -> Generator:
    """An agent with the checkpoint's model, or one that answers with random allowed actions."""
    from embodied_rl.methods.language_player import make_random_agent, read_language_policy
    from embodied_rl.resuming import load_policy

    check_compatible(checkpoint, spec, same_task=same_task)
    base = base_of(checkpoint, vars(checkpoint.config.policy).get("model"), verify=False)
    module = read_language_policy(checkpoint.config, checkpoint.model_folder, base=base)
    if policy == "random":
        return make_random_agent(checkpoint.config.agent, module, spec, seed)
    load_policy(module, checkpoint)
    return _speaking(checkpoint.config, module, spec, checkpoint.run_dir)


def _speaking(config: TrainConfig, policy: LanguagePolicy, spec: SimSpec, folder: Path) -> Generator:
    """A language agent with its own model's present weights."""
    from embodied_rl.methods.language_player import make_agent_generator

    generator = make_agent_generator(config, policy, spec, folder)
    generator.publish(0)
    return generator


def make_policy(checkpoint: Checkpoint, spec: SimSpec, *, same_task: bool = True) -> Policy:
    """The checkpoint's policy with its weights loaded.
    Raises IncompatibleCheckpointError: the policy does not fit the simulator `spec`, or the tensors do not fit the policy."""
    from embodied_rl.policies.build import build_policy
    from embodied_rl.resuming import load_policy

    check_compatible(checkpoint, spec, same_task=same_task)
    module = build_policy(checkpoint.config.policy, spec)
    load_policy(module, checkpoint)
    module.train(False)
    return module


def value_estimate(policy: Policy) -> Callable[[Observation], np.ndarray]:
    """Value function of the policy: {key: [n, ...]} → [n] values; for a chunk of values, that of the first step."""
    import torch

    from embodied_rl.policies.base import prepare_observation

    def estimate(observation: Observation) -> np.ndarray:
        with torch.inference_mode():
            value = policy.value(prepare_observation(policy, observation))
        return (value if value.dim() == 1 else value[:, 0]).numpy()

    return estimate


def load_to_play(
    path: Path | str,
    *,
    domain: str | None = None,
    sim: str | None = None,
    overrides: Iterable[str] = (),
    trust: Sequence[str] = (),
    logs: bool = False,
    against: bool = False,
) -> Checkpoint:
    """Load a checkpoint, or one domain's part of it, to play in the simulator that `choose_sim` makes of the same arguments.

    Args:
        overrides: keys such as ``sim.target``; values that they replace need no trust, and neither does the simulator if `sim` is given.
        trust: see `load_checkpoint`.
        logs: whether the checkpoint's own loggers will be used.
        against: it is only compared with another checkpoint, to which `domain` belongs; its own run may have one domain.
    """
    keys = [*overrides, *([] if logs else ["logger"])]

    def load(replaced: Sequence[str]) -> Checkpoint:
        everywhere = [*replaced, *(f"domains.{domain}.{key}" for key in replaced if domain is not None)]
        found = load_checkpoint(path, with_learner=False, trust=trust, replaced=everywhere)
        return domain_part(found, None if against and not found.config.domains else domain)

    loaded = load(keys if sim is None else [*keys, "sim"])
    return load(keys) if sim == loaded.config.sim.name else loaded


def choose_sim(checkpoint: Checkpoint, name: str | None, overrides: Mapping[str, Any]) -> SimConfig:
    """Checkpoint's simulator configuration, or the named one, with overrides: see `override_sim`."""
    base = checkpoint.config.sim if name is None or name == checkpoint.config.sim.name else load_sim_config(name)
    return override_sim(base, overrides)


def override_sim(base: SimConfig, overrides: Mapping[str, Any]) -> SimConfig:
    """A simulator configuration with overrides such as ``{"sim.num_slots": 4}``.

    Workers and groups shrink with the number of slots unless they are overridden too. Raises UserError: an unknown simulator, key or value.
    """
    data = dataclasses.asdict(base)
    for key, value in overrides.items():
        _, first, *rest = key.split(".")
        if not rest:
            data[first] = value
        elif first == "kwargs" and len(rest) == 1:
            if not isinstance(data["kwargs"], dict):
                raise UserError(f"sim.kwargs must be a mapping of keys to values, got {shown(data['kwargs'])}.")
            data["kwargs"] = {**data["kwargs"], rest[0]: value}
        else:
            raise UserError(f"Configuration key '{key}' is not known: only sim.KEY and sim.kwargs.KEY can be changed.")
    slots = data["num_slots"]
    if isinstance(slots, int) and slots >= 1:
        for limited in ("num_workers", "pipeline_groups"):
            if f"sim.{limited}" not in overrides and isinstance(data[limited], int):
                data[limited] = min(data[limited], slots)
    return SimConfig.from_dict(data).with_target()


def expand_checkpoints(text: str) -> list[str]:
    """Paths of ``A``, ``A,B`` or a pattern such as ``runs/*/checkpoints/step_*``, each once. Raises UserError: no path, a pattern without
    matches, or more than `MAX_CHECKPOINTS`."""
    paths = expand_paths(text, "checkpoint", "runs/fetch_reach/*, …/checkpoints/step_*")
    if not 1 <= len(paths) <= MAX_CHECKPOINTS:
        raise UserError(f"checkpoint={text} names {len(paths)} checkpoints; one evaluation plays 1 to {MAX_CHECKPOINTS}.")
    return paths


@as_command
def main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)
    if values["checkpoint"] is None:
        player = choose_untrained(argv, values, overrides)
        results, default = [play_untrained(player)], next_free(Path("runs") / player.config.sim.name / f"evaluation-{player.kind}.json")
    else:
        with progress_bar(f"evaluating {values['checkpoint']}"):
            results, default = _play(values, overrides)
    _tell(results, _output(values, default), command_line("evaluate", argv), against=values["against"] is not None)


def _play(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[list[output.EvaluationResult], Path]:
    """Results of the checkpoints' policies, and the file for them if none is named."""
    if values["policy"] not in (None, "checkpoint", "random"):
        choices = ("checkpoint", "random")
        raise UserError(f"policy={values['policy']} is not a choice.{did_you_mean(values['policy'], choices)} (With checkpoint=….)")
    own = [name for name in ("experiment", "generation") if values[name] is not None]
    own += [key for key in overrides if not key.startswith("sim.")]
    if own:
        raise UserError(f"{own[0]}=… has no effect with checkpoint=…, which has its own. Only the simulator can be changed: sim.KEY=VALUE.")
    trust = trusted_names(values["trust"])
    measured = read_protocol(values["protocol"])
    changed = {**measured.sim, **overrides}
    load = partial(load_to_play, domain=values["domain"], sim=values["sim"], overrides=changed, trust=trust)
    players = _players(values["checkpoint"], values["policy"] or "checkpoint", values["against"], load)
    for player, kind in players:
        _check_temperature(values["temperature"], player.config, kind)
    sim = choose_sim(players[0][0], values["sim"], changed)
    number = values["num_episodes"] or measured.num_episodes or 100
    temperature = measured.temperature if values["temperature"] is None else values["temperature"]
    results = evaluate_players(players, number, seed=values["seed"], sim=sim, temperature=temperature)
    name = EVALUATION_FILE if values["domain"] is None else f"evaluation-{values['domain']}.json"
    run_dir = players[0][0].run_dir
    return results, run_dir / name if len(players) == 1 else next_free(run_dir / COMPARISON_FILE)


def _check_temperature(given: float | None, config: TrainConfig, kind: str) -> None:
    """Raise UserError for a temperature of action tokens if the player is a language agent, which has its own."""
    if given is not None and kind != "random" and config.policy.name == "language":
        own = {"openai": "openai.temperature", "checkpoint": "agent.evaluation_temperature of its run"}
        raise UserError(f"temperature= is for action tokens. A language agent uses {own.get(kind, 'agent.evaluation_temperature')}.")


@dataclass(frozen=True)
class Measured:
    """Evaluation settings of a protocol; None: not set."""

    sim: Mapping[str, Any]
    """{"sim.max_episode_steps": 80, …}"""
    num_episodes: int | None = None
    temperature: float | None = None


def read_protocol(name: str | None) -> Measured:
    """Read a file of ``configs/protocol``. Raises UserError with the nearest name."""
    import yaml

    if name is None:
        return Measured({})
    path = config_file("protocol", name)
    if path is None:
        raise UserError(f"Protocol '{name}' is not known.{did_you_mean(name, group_names('protocol'))}")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    sim = dict(data.get("sim") or {})
    kwargs = sim.pop("kwargs", {})
    evaluation = data.get("evaluation") or {}
    changed = {f"sim.{key}": value for key, value in sim.items()} | {f"sim.kwargs.{key}": value for key, value in kwargs.items()}
    return Measured(changed, evaluation.get("num_episodes"), evaluation.get("temperature"))


def _players(checkpoint: str, policy: str, against: str | None, load: Callable[..., Checkpoint]) -> list[tuple[Checkpoint, str]]:
    """Players, with the one to compare against last."""
    loaded = {found.path: found for found in map(load, expand_checkpoints(checkpoint))}
    players = [(found, policy) for found in loaded.values()]
    if policy == "random" and len(players) > 1:
        raise UserError(f"policy=random plays the same actions for each of {len(players)} checkpoints: give one, or against=random.")
    if against is None:
        return players
    other = (players[0][0], "random") if against == "random" else (load(against, against=True), "checkpoint")
    # If a pattern includes it too, it is only compared against.
    players = [player for player in players if (player[0].path, player[1]) != (other[0].path, other[1])]
    if not players:
        raise UserError(f"checkpoint={checkpoint} and against={against} are the same; give two that differ.")
    return [*players, other]


def _output(values: Mapping[str, Any], default: Path) -> Path:
    if values["output"] is None:
        return default
    path = Path(values["output"])
    return path.with_suffix(".json") if path.suffix in (".json", ".csv") else path.with_name(f"{path.name}.json")  # eval-t0.1 has no suffix


def _tell(results: Sequence[output.EvaluationResult], path: Path, command: str, *, against: bool) -> None:
    try:
        document = output.document_of(results, command, path.parent, against=against)
        write_atomic(path, json.dumps(document, indent=1) + "\n")
        write_atomic(path.with_suffix(".csv"), output.episodes_csv(results))
    finally:  # neither a file that cannot be written nor a reader that closes the pipe costs the figures
        print_tables(*output.tables_of(results, against=against))
        if len(results) == 1 and (shares := results[0].answers):
            named = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
            print(f"Answers: {named}")
    seconds = sum(result.wall_clock_s for result in results)
    print(f"{seconds:.1f} s. Every episode: {path} and {path.with_suffix('.csv').name}")


_OWN = ("num_episodes", "seed", "output", "temperature")
"""Arguments of the command that are not overrides of a configuration."""
_SERVER_CONTEXT = 2**17
"""Tokens of a prompt for a server with its own limit."""


@dataclass(frozen=True)
class Untrained:
    """An untrained player and its task."""

    config: TrainConfig
    """Configuration, with `evaluation` from the arguments."""
    kind: str
    """random, openai, or a policy's name."""
    server: PlayerConfig | None = None
    """Server of kind openai."""

    @property
    def folder(self) -> str | None:
        """Folder of the policy's weights; None: there are none."""
        if self.kind in ("random", "openai"):
            return None
        named = vars(self.config.policy)
        folder: str | None = named.get("path") or named.get("model")
        return folder

    def origin(self, folder: Path) -> dict[str, Any]:
        """Source of its weights, for a file in `folder`."""
        origin: dict[str, Any] = {} if self.folder is None else {"model": note_base(self.folder, folder)}
        return origin if self.server is None else {**origin, "server": dataclasses.asdict(self.server)}

    @property
    def label(self) -> str:
        if self.server is not None:
            return f"openai ({self.server.model})"
        if self.kind == "random":
            return self.kind
        return f"{self.kind} ({self.folder})" if self.folder else f"untrained {self.kind}"


def choose_untrained(argv: Sequence[str], values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Untrained:
    """Player from the command's words and their parsed values. Raises UserError."""
    from embodied_rl.config.facts import Run
    from embodied_rl.config.rules import EVALUATION, refuse

    kind, experiment = values["policy"], values["experiment"]
    if values["sim"] is None and experiment is None:
        raise UserError("Argument checkpoint=… is missing. Without one, name a simulator and a policy: sim=… policy=…. See --help.")
    for name in ("against", "domain"):
        if values[name] is not None:
            raise UserError(f"{name}={values[name]} needs checkpoint=….")
    if kind != "openai" and (served := [key for key in overrides if key.startswith("openai.")]):
        raise UserError(f"{served[0]}=… needs policy=openai.")
    known = [*group_names("policy"), "openai", "random"]
    if kind not in (None, *known) or (kind is None and experiment is None):
        given = "is missing" if kind is None else f"'{kind}' is not known"
        raise UserError(f"policy=… {given}.{did_you_mean(kind or '', known)}")
    words = [word for word in argv if word.partition("=")[0] not in (*_OWN, "policy") and not word.startswith("openai.")]
    if kind == "openai" or (kind == "random" and experiment is None):
        words.append("policy=language")  # a language policy for text simulators makes the prompts
    elif kind not in (None, "random"):
        words.append(f"policy={kind}")
    if kind == "openai" and not any(word.startswith(("policy.model=", "policy.tiny.max_context=")) for word in words):
        words.append(f"policy.tiny.max_context={_SERVER_CONTEXT}")
    typed = {word.partition("=")[0] for word in argv}
    words += [f"evaluation.{name}={values[name]}" for name in ("num_episodes", "seed") if name in typed]
    if values["temperature"] is not None:
        words.append(f"evaluation.temperature={values['temperature'] or 'null'}")
    elif kind in ("random", "openai"):
        words.append("evaluation.temperature=null")
    config = load_train_config(words)
    refuse(EVALUATION, Run(config))
    _check_temperature(values["temperature"], config, kind or config.policy.name)
    if config.domains:
        raise UserError(f"experiment={experiment} has several domains: evaluate one of them by its simulator, sim=….")
    return Untrained(config, kind or config.policy.name, _server(overrides) if kind == "openai" else None)


def _server(overrides: Mapping[str, Any]) -> PlayerConfig:
    given = {key.removeprefix("openai."): value for key, value in overrides.items() if key.startswith("openai.")}
    missing = [f"openai.{name}=…" for name in ("base_url", "model") if name not in given]
    if missing:
        raise UserError(f"policy=openai needs {' and '.join(missing)}: the server's address, with its version, and its name of the model.")
    return build(PlayerConfig, {"share": 0.5, "backend": "openai", **given}, "openai")


def play_untrained(player: Untrained) -> output.EvaluationResult:
    """Play the episodes and compute their figures. Raises UserError: the policy does not fit or is incomplete, or no server answers."""
    import torch

    config, wanted = player.config, player.config.evaluation
    torch.manual_seed(config.seed)
    with tempfile.TemporaryDirectory(prefix="embodied_rl_") as folder:
        make = partial(_generator, player, Path(folder))
        contestant = output.Contestant(player.label, player.label, config, make, player.origin, temperature=wanted.temperature)
        with one_thread_acts([] if player.kind == "random" else [config.policy.name]):
            (result,) = output.play([contestant], config.sim, wanted.num_episodes, seed=wanted.seed, chunk_size=config.policy.chunk_size)
    return result


def _generator(player: Untrained, folder: Path, manager: Simulators) -> Generator:
    config, spec = player.config, manager.spec
    if config.policy.name == "language" and (player.kind != "random" or spec.action.kind == "text"):
        return _untrained_agent(player, manager, folder)
    if player.kind == "random":
        return RandomGenerator(spec, config.seed)
    from embodied_rl.learning.devices import resolve_device
    from embodied_rl.policies.build import build_policy

    policy = build_policy(config.policy, spec)
    policy.to(resolve_device(config.hybrid.device))
    policy.train(False)
    return acting(policy)


def _untrained_agent(player: Untrained, manager: Simulators, folder: Path) -> Generator:
    """A language agent with its own model, a server's, or random answers."""
    from embodied_rl.learning.devices import resolve_device
    from embodied_rl.methods.language_player import make_agent, make_language_policy, make_random_agent

    config = player.config
    policy = make_language_policy(config, manager, folder, None)
    if player.kind == "random":
        return make_random_agent(config.agent, policy, manager.spec, config.seed)
    if player.server is None:
        policy.to(resolve_device(config.hybrid.device))
        return _speaking(config, policy, manager.spec, folder)
    from embodied_rl.methods.building import served_tokens
    from embodied_rl.rollout.agent_generator import AgentGenerator

    server = player.server
    agent = make_agent(config.agent, policy, manager.spec)
    agent.writes_messages = server.api == "chat"
    return AgentGenerator(agent, served_tokens(server, policy.tokenizer, config.seed), temperature=server.temperature, seed=config.seed)
