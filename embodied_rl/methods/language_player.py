"""Builds a language agent from a configuration: its model's folder, the policy, the token backend, and the agent. Also the model's
description without weights, for processes that speak through it or train it elsewhere."""

from __future__ import annotations

import dataclasses
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from embodied_rl.agents.agent import TEXT_ONLY, Agent, ImageInputs
from embodied_rl.agents.parsing import response_text, tools_text
from embodied_rl.agents.tools.builtin import make_toolbox
from embodied_rl.config import AgentConfig, GenerationConfig, LanguageConfig, TrainConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.generation.tokens import RandomTokens, TokenBackend
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.model_folder import import_transformers, is_vision_language, max_context
from embodied_rl.policies.vision_inputs import VisionInputs
from embodied_rl.rollout.agent_generator import AgentGenerator
from embodied_rl.rollout.programs import ProgramGenerator
from embodied_rl.sim.simulators import Simulators
from embodied_rl.sim.text.program import is_program
from embodied_rl.types import SimSpec

MODEL_FOLDER = "model"
"""Folder in a run's folder with the tiny model as it was made; in a checkpoint, with the model's configuration and tokenizer. Several
domains' models have subfolders with the domains' names."""


def make_language_policy(
    config: TrainConfig,
    manager: Simulators,
    run_dir: Path,
    checkpoint: Path | None,
    base: Path | None = None,
    further: Sequence[tuple[AgentConfig, Simulators]] = (),
    place: str = "",
) -> LanguagePolicy:
    """Make a run's language policy; the caller loads a resumed run's weights.

    Args:
        manager: shows the texts that a tiny model's tokenizer must know; its running episodes are lost.
        checkpoint: folder of the checkpoint that the run continues from.
        base: the model's folder, if that checkpoint holds only an adapter.
        further: agents and simulators of other domains that the policy plays.
        place: see `model_place`.

    Raises MissingExtraError; UserError: the simulator is not one of text, or the model cannot be loaded.
    """
    language = config.language
    for _, speaking in ((config.agent, manager), *further):
        _check_texts(speaking.spec)
    if checkpoint is not None:
        return read_language_policy(config, checkpoint / MODEL_FOLDER / place, base=base)
    if language.model is None:
        from embodied_rl.policies.tiny_language import TinyShape, make_tiny_model, word_tokenizer

        tokenizer = word_tokenizer(text for agent, speaking in ((config.agent, manager), *further) for text in _texts(agent, speaking))
        folder, shape = run_dir / MODEL_FOLDER / place, TinyShape(**vars(language.tiny))
        made = make_tiny_model(folder, (), shape=shape, seed=config.seed, tokenizer=tokenizer)
        language = dataclasses.replace(language, model=str(made))
    return build_language_policy(language)


def read_language_policy(config: TrainConfig, folder: Path, *, base: Path | None = None) -> LanguagePolicy:
    """The policy that a checkpoint's model folder describes, with random weights, or with those of the model in `base`.
    Raises IncompatibleCheckpointError: the folder is not a language policy's."""
    language = config.language
    if base is not None:
        return build_language_policy(dataclasses.replace(language, model=str(base)))
    if not (folder / "config.json").is_file():
        raise IncompatibleCheckpointError(f"A checkpoint is incomplete: {folder / 'config.json'} is missing.")
    return build_language_policy(dataclasses.replace(language, model=str(folder)), weights=False)


def make_agent(config: AgentConfig, policy: Speaking, spec: SimSpec) -> Agent:
    """Make the agent that speaks through a policy's tokenizer. Raises UserError as `Agent` does, and for pictures that it cannot see."""
    image_inputs = _image_inputs(policy, spec)
    context = max_context(policy.hf_config)
    most_bytes = spec.action.max_bytes - 1  # a byte tells a text from none
    agent = Agent(config, policy.tokenizer, instruction=spec.instruction, max_context=context, action_bytes=most_bytes)
    agent.image_inputs = image_inputs
    return agent


def _image_inputs(policy: Speaking, spec: SimSpec) -> ImageInputs:
    """Inputs for the pictures of `LanguageConfig.images`."""
    keys = policy.config.images
    if not keys:
        return TEXT_ONLY
    if policy.vision is None:
        raise UserError(
            f"policy.images={list(keys)}: model '{policy.config.model or 'tiny'}' ({policy.hf_config.model_type}) reads only texts. "
            "Choose a vision-language model (policy.model=…: Qwen2-VL and its successors, LLaVA-1.5), or set policy.images=[]."
        )
    for key in keys:
        if key not in spec.observation or not spec.observation[key].is_picture:
            known = ", ".join(spec.observation)
            raise UserError(f"policy.images: '{key}' is not a picture [H, W, 3] uint8 of task '{spec.task}', which has: {known}.")
    vision = policy.vision
    placeholder = policy.tokenizer.decode(vision.placeholder_ids(), skip_special_tokens=False) + "\n"
    return ImageInputs(tuple(keys), placeholder, vision.image_token_id, vision.expand)


def make_agent_generator(config: TrainConfig, policy: LanguagePolicy, spec: SimSpec, run_dir: Path) -> AgentGenerator:
    """Make the agent with its own token backend, which `publish` fills with the policy's weights."""
    agent = make_agent(config.agent, policy, spec)  # first, so that it raises before an engine is started
    backend = make_backend(config.generation, policy, run_dir, seed=config.seed)
    if is_program(config.sim):
        return ProgramGenerator(agent, policy.tokenizer, backend, policy.named_weights, secrets.token_urlsafe(24))
    return AgentGenerator(agent, backend, policy.named_weights)


def make_random_agent(config: AgentConfig, policy: LanguagePolicy, spec: SimSpec, seed: int) -> AgentGenerator:
    """Agent that answers with one of the listed actions, all equally likely. Raises UserError if none are listed."""
    agent = make_agent(config, policy, spec)
    if not config.actions:
        raise UserError("policy=random needs a list of actions, and agent.actions is empty (any text): 'agent.actions=[up,down]'.")
    backend = RandomTokens(choices=[agent.answer_ids(action) for action in config.actions], seed=seed)
    return AgentGenerator(agent, backend, temperature=1.0, seed=seed)


def make_backend(config: GenerationConfig, policy: LanguagePolicy, run_dir: Path, *, seed: int) -> TokenBackend:
    if config.backend == "vllm":
        from embodied_rl.generation.vllm_tokens import VLLMOptions, VLLMTokens

        folder = policy.save_model(run_dir / "generation_model")
        options = VLLMOptions(
            str(folder),
            dtype=str(policy.base.dtype).removeprefix("torch."),
            max_batch=config.max_batch,
            gpu_memory_share=config.gpu_memory_share,
            compiled=config.compiled,
            seed=seed,
            on_update=config.on_update,
        )
        return VLLMTokens(options)
    from embodied_rl.generation.torch_tokens import TorchTokens

    return TorchTokens(
        policy.generation_model(),
        max_batch=config.max_batch,
        seed=seed,
        on_update=config.on_update,
        vision=policy.vision,
        tokenizer=policy.tokenizer,
    )


def _check_texts(spec: SimSpec) -> None:
    """Raise UserError for a simulator that a language agent cannot play."""
    text = spec.variables.get("text")
    if spec.action.kind != "text" or text is None or text.kind != "text":
        raise UserError(
            f"policy.name=language reads and writes text, and task '{spec.task}' does not: choose a simulator that does "
            "(sim=frozenlake, sokoban, gem_sudoku, …)."
        )


def _about_tools(agent: AgentConfig) -> list[str]:
    """Texts about tools that the agent reads and writes."""
    if not agent.tools:
        return []
    tools = make_toolbox(agent.tools, agent.tool_options)
    try:
        return [tools_text(tools.schemas()), response_text(["error: there is no tool"])]
    finally:
        tools.close()


def _texts(agent: AgentConfig, manager: Simulators) -> Iterable[str]:
    """Texts that the agent reads and writes: first observations, instruction, templates and actions, in small letters too."""
    texts = [*manager.texts(), manager.spec.instruction or "", agent.system, agent.template, agent.memory_item, *agent.actions]
    texts += [f"<{tag}></{tag}>" for tag in (agent.tag, agent.summary_tag)]
    texts += _about_tools(agent)
    return [*texts, *(action.lower() for action in agent.actions)]


# ---- A model's description without its weights ----------------------------------------------------------------------


ModelFiles = Mapping[str, np.ndarray]
"""{path in the model's folder: its bytes, [n] uint8} of configuration, tokenizer and image processor."""


@dataclasses.dataclass(frozen=True)
class ModelReader:
    """A language policy without weights."""

    config: LanguageConfig
    tokenizer: ChatTokenizer
    hf_config: Any
    vision: VisionInputs | None


Speaking = LanguagePolicy | ModelReader
"""What an agent speaks through."""


def model_files(policy: LanguagePolicy) -> dict[str, np.ndarray]:
    """Configuration, tokenizer and image processor, in a form that can be sent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy.save_config(folder)
        policy.save_description(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): np.frombuffer(path.read_bytes(), np.uint8) for path in files}


def write_model_files(files: ModelFiles, folder: Path) -> None:
    """Write the files into a folder. Raises ValueError for a path that leaves the folder."""
    for name, content in files.items():
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise ValueError(f"a model file cannot have the name {name!r}")
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())


def read_model(config: LanguageConfig, folder: Path) -> ModelReader:
    """Read a folder of `write_model_files`. Raises UserError if it is not a model's."""
    transformers = import_transformers()
    try:
        hf_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"Cannot read the model's configuration in '{folder}': {error}") from error
    vision = VisionInputs.read(folder, hf_config) if is_vision_language(hf_config) else None
    return ModelReader(config, ChatTokenizer.read(folder, hf_config), hf_config, vision)


def blank_policy(config: LanguageConfig, folder: Path) -> LanguagePolicy:
    """Policy of a folder of `write_model_files`, with random weights, for a state to be loaded. Raises UserError as its builder does."""
    return build_language_policy(dataclasses.replace(config, model=str(folder)), weights=False)


def blank_backend(config: TrainConfig, folder: Path, device: torch.device) -> TokenBackend:
    """The token backend of a configuration, with random weights; `load_weights` takes the whole policy's `LanguagePolicy.named_weights`.
    `folder`: a folder of `write_model_files`; vLLM writes its model into it. Raises UserError: the backend cannot run this model, or is not
    installed."""
    # Published weights have their adapter merged in.
    plain = dataclasses.replace(config.language, model=str(folder), adapter=None, lora_rank=0, value_head="none")
    # vLLM reads files; a policy on its GPU would only take memory while it starts.
    where = "cpu" if config.generation.backend == "vllm" else device
    policy = build_language_policy(plain, where, weights=False)
    return make_backend(config.generation, policy, folder, seed=config.seed)
