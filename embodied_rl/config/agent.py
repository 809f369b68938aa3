"""How a language agent sees an episode and how its answers become actions."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from embodied_rl.config.building import require

TEMPLATE_FIELDS = ("observation", "instruction", "step", "memory", "summary")
MEMORY_FIELDS = ("observation", "action", "step")


@dataclass(frozen=True)
class ToolsConfig:
    """How the tools that `agent.tools` names may be used."""

    max_calls_per_turn: int = 4
    """Before an action; an answer that calls a tool when none is left is no action (`tool_limit`)."""
    max_calls: int = 32
    """Of an episode."""
    max_chars: int = 2000
    """Of one result; the middle of a longer one is left out."""
    threads: int = 8
    """Answers whose tools run at a time."""
    describe: bool = True
    """The tools' names, arguments and how they are called stand before `agent.system`; false: the prompt says it itself."""
    corpus: str | None = None
    """search: a folder of .txt and .md files, or a .jsonl file of {"title", "text"}."""
    python_timeout_s: float = 10.0
    """python: of one program."""
    python_memory_mb: int = 512
    """python: address space of each process."""
    python_network: bool = False
    """python: run programs with a network, also where it cannot be cut off."""
    mcp: tuple[dict[str, Any], ...] = ()
    """mcp: servers to start, each ``{command: [program, arguments], env: {NAME: value}, timeout_s: 30}``."""

    def __post_init__(self) -> None:
        for name in ("max_calls_per_turn", "max_calls", "threads", "python_memory_mb"):
            require(getattr(self, name) >= 1, f"agent.tool_options.{name}", ">= 1", getattr(self, name))
        require(self.max_chars >= 100, "agent.tool_options.max_chars", ">= 100", self.max_chars)
        require(self.python_timeout_s > 0, "agent.tool_options.python_timeout_s", "> 0", self.python_timeout_s)
        for number, server in enumerate(self.mcp):
            where = f"agent.tool_options.mcp[{number}]"
            known = isinstance(server, Mapping) and set(server) <= {"command", "env", "timeout_s"}
            require(known, where, "a mapping of command, env and timeout_s", server)
            command = server.get("command")
            is_list = isinstance(command, (list, tuple)) and len(command) > 0 and all(isinstance(word, str) for word in command)
            require(is_list, f"{where}.command", "a list of words: the program and its arguments", command)
            env, timeout_s = server.get("env") or {}, server.get("timeout_s", 30.0)
            is_env = isinstance(env, Mapping) and all(isinstance(value, str) for value in env.values())
            require(is_env, f"{where}.env", "a mapping of names to texts", env)
            require(isinstance(timeout_s, (int, float)) and timeout_s > 0, f"{where}.timeout_s", "> 0", timeout_s)


@dataclass(frozen=True)
class AgentConfig:
    """A conversation strategy, its templates, and what an answer must look like. For policy=language alone."""

    strategy: Literal["full", "last_k", "memory", "summarised"] = "memory"
    """full: the whole conversation so far. last_k: its last turns. memory: one message that holds the past as `memory_item`s.
    summarised: one message that holds the summary which the last answer gave."""
    last_turns: int = 4
    """Earlier turns in a prompt (last_k, memory); 0: the present observation alone."""
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
    summary_tag: str = "summary"
    """summarised: the answer's <summary>…</summary> is what the next prompt holds."""
    summary_chars: int = 500
    """Of a summary that are kept, from its beginning."""
    actions: tuple[str, ...] = ()
    """What may be answered, whatever its case; empty: any text."""
    invalid_penalty: float = 0.0
    """Taken from the reward of a turn whose answer was no action. The simulator gets the empty text then."""
    max_new_tokens: int = 64
    temperature: float = 1.0
    """In training."""
    evaluation_temperature: float = 0.0
    """In evaluation and films; 0 takes the likeliest token. A player without a memory may walk in circles for ever without chance."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    """Tokens that end an answer, beside the model's own end of sequence."""
    max_prompt_tokens: int | None = None
    """Of a prompt; null: what the model's context leaves beside max_new_tokens."""
    overflow: Literal["drop_oldest", "end_episode"] = "drop_oldest"
    """A prompt that is too long loses its oldest turns, or the episode ends there (truncated). Both are counted."""
    tools: tuple[Literal["calculator", "search", "python", "mcp"], ...] = ()
    """What an answer may call before it acts (docs/agent_tools.md); mcp: the tools of `tool_options.mcp`'s servers."""
    tool_options: ToolsConfig = field(default_factory=ToolsConfig)

    def __post_init__(self) -> None:
        require(self.last_turns >= 0, "agent.last_turns", ">= 0", self.last_turns)
        require(self.max_new_tokens >= 1, "agent.max_new_tokens", ">= 1", self.max_new_tokens)
        for name in ("temperature", "evaluation_temperature"):
            require(getattr(self, name) >= 0, f"agent.{name}", ">= 0", getattr(self, name))
        require(0 < self.top_p <= 1, "agent.top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "agent.top_k", ">= 0", self.top_k)
        require(self.invalid_penalty >= 0, "agent.invalid_penalty", ">= 0", self.invalid_penalty)
        require(self.summary_chars >= 1, "agent.summary_chars", ">= 1", self.summary_chars)
        limit = self.max_prompt_tokens
        require(limit is None or limit >= 1, "agent.max_prompt_tokens", ">= 1 or null", limit)
        require(len(set(self.tools)) == len(self.tools), "agent.tools", "different names", self.tools)
        options = self.tool_options
        require("search" not in self.tools or options.corpus is not None, "agent.tool_options.corpus", "given for tools=[search]", None)
        require("mcp" not in self.tools or len(options.mcp) > 0, "agent.tool_options.mcp", "given for tools=[mcp]", options.mcp)
        require(len({word.lower() for word in self.actions}) == len(self.actions), "agent.actions", "different words", self.actions)
        for name, fields in (("system", ("instruction",)), ("template", TEMPLATE_FIELDS), ("memory_item", MEMORY_FIELDS)):
            _check_template(f"agent.{name}", getattr(self, name), fields)


@dataclass(frozen=True)
class WarmStartConfig:
    """Behaviour cloning before a policy plays by itself: of a scripted player (language agents), or of the task's expert or the run's
    `recording` (robots). Success is measured before and after."""

    player: str | None = None
    """Language agents: ``package.module:function`` from an observation's text to an action's, such as
    embodied_rl.sim.text.frozenlake:player. Robots: null."""
    episodes: int = 200
    """Successful ones that are learned from."""
    num_epochs: int = 2
    minibatch_rows: int = 64
    learning_rate: float = 1e-3
    """Falls linearly to a tenth."""
    measured_episodes: int = 100
    """Held-out ones, before and after."""

    def __post_init__(self) -> None:
        for name in ("episodes", "num_epochs", "minibatch_rows", "measured_episodes"):
            require(getattr(self, name) >= 1, f"algorithm.warm_start.{name}", ">= 1", getattr(self, name))
        require(self.learning_rate > 0, "algorithm.warm_start.learning_rate", "> 0", self.learning_rate)


def _check_template(where: str, text: str, fields: tuple[str, ...]) -> None:
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        require(False, where, f"a template (double the braces that are meant as such: {error})", text)
        return
    allowed = ", ".join(f"{{{field}}}" for field in fields)
    require(named <= set(fields), where, f"a template of {allowed}", text)
