"""How a language agent sees an episode and how its answers become actions."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from embodied_rl.bounds import (
    Bounds,
    Coefficient,
    Episodes,
    Epochs,
    LearningRate,
    PositiveShare,
    Processes,
    Rows,
    Seconds,
    Size,
    Temperature,
    Tokens,
)
from embodied_rl.config.building import Config, convert, require

TEMPLATE_FIELDS = ("observation", "instruction", "step", "memory", "summary")
MEMORY_FIELDS = ("observation", "action", "step")


@dataclass(frozen=True)
class ToolsConfig(Config, place="agent.tool_options"):
    """How the tools that `agent.tools` names may be used."""

    max_calls_per_turn: Size = 4
    """Before an action; an answer that calls a tool when none is left is no action (`tool_limit`)."""
    max_calls: Size = 32
    """Of an episode."""
    max_chars: Annotated[int, Bounds(100, 100_000_000)] = 2000
    """Of one result; the middle of a longer one is left out."""
    threads: Processes = 8
    """Answers whose tools run at a time."""
    describe: bool = True
    """The tools' names, arguments and how they are called stand before `agent.system`; false: the prompt says it itself."""
    corpus: str | None = None
    """search: a folder of .txt and .md files, or a .jsonl file of {"title", "text"}."""
    python_timeout_s: Seconds = 10.0
    """python: of one program."""
    python_memory_mb: Annotated[int, Bounds(1, 100_000_000)] = 512
    """python: memory of all processes of a program together, and address space of each."""
    python_network: bool = False
    """python: programs may use the network; all else is held back as without."""
    python_sandbox: Literal["namespaces", "landlock", "prlimit"] = "landlock"
    """python: the weakest protection that will do (docs/sandbox.md); where the machine has less, a run does not begin."""
    mcp: tuple[dict[str, Any], ...] = ()
    """mcp: servers to start, each ``{command: [program, arguments], env: {NAME: value}, timeout_s: 30}``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, server in enumerate(self.mcp):
            where = f"agent.tool_options.mcp[{number}]"
            known = isinstance(server, Mapping) and set(server) <= {"command", "env", "timeout_s"}
            require(known, where, "a mapping of command, env and timeout_s", server)
            command = server.get("command")
            is_list = isinstance(command, (list, tuple)) and len(command) > 0 and all(isinstance(word, str) for word in command)
            require(is_list, f"{where}.command", "a list of words: the program and its arguments", command)
            env = server.get("env") or {}
            is_env = isinstance(env, Mapping) and all(isinstance(value, str) for value in env.values())
            require(is_env, f"{where}.env", "a mapping of names to texts", env)
            convert(Seconds, server.get("timeout_s", 30.0), f"{where}.timeout_s")


@dataclass(frozen=True)
class AgentConfig(Config, place="agent"):
    """A conversation strategy, its templates, and what an answer must look like. Only for policy=language."""

    strategy: Literal["full", "last_k", "memory", "summarised"] = "memory"
    """full: the whole conversation so far. last_k: its last turns. memory: one message that holds the past as `memory_item`s.
    summarised: one message that holds the summary which the last answer gave."""
    last_turns: Annotated[int, Bounds(0, 1_000_000)] = 4
    """Earlier turns in a prompt (last_k, memory); 0: only the present observation."""
    chat: bool = True
    """Prompts go through the model's chat template; false: texts stand plainly behind one another."""
    system: str = ""
    """What comes first; may name {instruction}. Empty: nothing."""
    template: str = "{observation}"
    """Of one message: {observation}, {instruction}, {step} (from 1), {memory}, {summary}. Braces themselves are doubled. What is remembered
    (memory, summarised) stands before a template that does not name it."""
    memory_item: str = "{observation}\n{action}\n"
    """Of each earlier turn in {memory}: {observation}, {action}, {step}."""
    answer: Literal["word", "tag"] = "tag"
    """word: the answer is the action. tag: it stands in <action>…</action>, and anything may stand before."""
    tag: str = "action"
    """Name of the tag around an action, with answer=tag."""
    summary_tag: str = "summary"
    """summarised: the answer's <summary>…</summary> is what the next prompt holds."""
    summary_chars: Annotated[int, Bounds(1, 100_000_000)] = 500
    """Of a summary that are kept, from its beginning."""
    actions: tuple[str, ...] = ()
    """What may be answered, whatever its case; empty: any text."""
    invalid_penalty: Coefficient = 0.0
    """Taken from the reward of a turn whose answer was no action. The simulator gets the empty text then."""
    max_new_tokens: Tokens = 64
    """Of an answer."""
    temperature: Temperature = 1.0
    """In training."""
    evaluation_temperature: Temperature = 0.0
    """In evaluation and films; 0 takes the likeliest token. A player without a memory may walk in circles for ever without chance."""
    top_p: PositiveShare = 1.0
    """Tokens are drawn from the likeliest that have this probability together."""
    top_k: Annotated[int, Bounds(0, 100_000_000)] = 0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    """Tokens that end an answer, beside the model's own end of sequence."""
    max_prompt_tokens: Tokens | None = None
    """Of a prompt; null: what the model's context leaves beside max_new_tokens."""
    overflow: Literal["drop_oldest", "end_episode"] = "drop_oldest"
    """A prompt that is too long loses its oldest turns, or the episode ends there (truncated). Both are counted."""
    tools: tuple[Literal["calculator", "search", "python", "mcp"], ...] = ()
    """What an answer may call before it acts (docs/agent_tools.md); mcp: the tools of `tool_options.mcp`'s servers."""
    tool_options: ToolsConfig = field(default_factory=ToolsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(set(self.tools)) == len(self.tools), "agent.tools", "different names", self.tools)
        options = self.tool_options
        require("search" not in self.tools or options.corpus is not None, "agent.tool_options.corpus", "given for tools=[search]", None)
        require("mcp" not in self.tools or len(options.mcp) > 0, "agent.tool_options.mcp", "given for tools=[mcp]", options.mcp)
        require(len({word.lower() for word in self.actions}) == len(self.actions), "agent.actions", "different words", self.actions)
        for name, fields in (("system", ("instruction",)), ("template", TEMPLATE_FIELDS), ("memory_item", MEMORY_FIELDS)):
            _check_template(f"agent.{name}", vars(self)[name], fields)


@dataclass(frozen=True)
class WarmStartConfig(Config, place="algorithm.warm_start"):
    """Behaviour cloning before a policy plays by itself: of a scripted player (language agents), or of the task's expert or the run's
    `recording` (robots). Success is measured before and after."""

    player: str | None = None
    """Language agents: ``package.module:function`` from an observation's text to an action's, such as
    embodied_rl.sim.text.frozenlake:player. Robots: null."""
    episodes: Episodes = 200
    """Successful ones that are learned from."""
    num_epochs: Epochs = 2
    """Passes over the cloned episodes."""
    minibatch_rows: Rows = 64
    """Rows of a gradient step."""
    learning_rate: LearningRate = 1e-3
    """Falls linearly to a tenth."""
    measured_episodes: Episodes = 100
    """Held-out ones, before and after."""


def _check_template(where: str, text: str, fields: tuple[str, ...]) -> None:
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        require(False, where, f"a template (double the braces that are meant as such: {error})", text)
        return
    allowed = ", ".join(f"{{{field}}}" for field in fields)
    require(named <= set(fields), where, f"a template of {allowed}", text)
