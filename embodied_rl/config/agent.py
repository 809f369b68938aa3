"""Configuration of language agents: their prompts, and how their answers become actions."""

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
from embodied_rl.config.building import Checks, Config, convert

TEMPLATE_FIELDS = ("observation", "instruction", "step", "memory", "summary")
MEMORY_FIELDS = ("observation", "action", "step")


@dataclass(frozen=True)
class ToolsConfig(Config, place="agent.tool_options"):
    """Limits and settings of the tools that `agent.tools` names."""

    max_calls_per_turn: Size = 4
    """Tool calls before an action. An answer that calls a further tool is no action (`tool_limit`)."""
    max_calls: Size = 32
    """Tool calls of an episode."""
    max_chars: Annotated[int, Bounds(100, 100_000_000)] = 2000
    """Characters of one result; the middle of a longer result is left out."""
    threads: Processes = 8
    """Answers whose tools run at the same time."""
    describe: bool = True
    """Describe the tools, their arguments and their call syntax before `agent.system`; false: the prompt does so."""
    corpus: str | None = None
    """search: a folder of .txt and .md files, or a .jsonl file of {"title", "text"}."""
    python_timeout_s: Seconds = 10.0
    """python: timeout of one program."""
    python_memory_mb: Annotated[int, Bounds(1, 100_000_000)] = 512
    """python: memory of all processes of a program together, and address space of each process."""
    python_network: bool = False
    """python: programs may use the network; everything else stays restricted."""
    python_sandbox: Literal["namespaces", "landlock", "prlimit"] = "landlock"
    """python: weakest protection that you accept (docs/sandbox.md); the run does not start on a machine with less."""
    mcp: tuple[dict[str, Any], ...] = ()
    """mcp: servers to start, each ``{command: [program, arguments], env: {NAME: value}, timeout_s: 30}``."""

    def checks(self) -> Checks:
        for number, server in enumerate(self.mcp):
            where = f"mcp[{number}]"
            known = isinstance(server, Mapping) and set(server) <= {"command", "env", "timeout_s"}
            yield known, where, "a mapping of command, env and timeout_s", server
            command = server.get("command")
            is_list = isinstance(command, (list, tuple)) and len(command) > 0 and all(isinstance(word, str) for word in command)
            yield is_list, f"{where}.command", "a list of words: the program and its arguments", command
            env = server.get("env") or {}
            is_env = isinstance(env, Mapping) and all(isinstance(value, str) for value in env.values())
            yield is_env, f"{where}.env", "a mapping of names to texts", env
            convert(Seconds, server.get("timeout_s", 30.0), self._key(f"{where}.timeout_s"))


@dataclass(frozen=True)
class AgentConfig(Config, place="agent"):
    """Conversation strategy, templates and answer format. Only for policy=language."""

    strategy: Literal["full", "last_k", "memory", "summarised"] = "memory"
    """full: the whole conversation so far. last_k: its last turns. memory: one message with the past as `memory_item`s. summarised: one
    message with the summary that the last answer gave."""
    last_turns: Annotated[int, Bounds(0, 1_000_000)] = 4
    """Earlier turns in a prompt (last_k, memory); 0: only the present observation."""
    chat: bool = True
    """Format prompts with the model's chat template; false: concatenate the plain texts."""
    system: str = ""
    """First message; may contain {instruction}. Empty: none."""
    template: str = "{observation}"
    """Template of one message: {observation}, {instruction}, {step} (from 1), {memory}, {summary}. Double braces for a literal brace. If a
    template does not name {memory} or {summary} (memory, summarised), it comes before the template."""
    memory_item: str = "{observation}\n{action}\n"
    """Template of each earlier turn in {memory}: {observation}, {action}, {step}."""
    answer: Literal["word", "tag"] = "tag"
    """word: the whole answer is the action. tag: the action is in <action>…</action>, after any other text."""
    tag: str = "action"
    """Name of the tag around an action, with answer=tag."""
    summary_tag: str = "summary"
    """summarised: tag of the summary in an answer, <summary>…</summary>, which goes into the next prompt."""
    summary_chars: Annotated[int, Bounds(1, 100_000_000)] = 500
    """Characters of a summary that are kept, from its beginning."""
    actions: tuple[str, ...] = ()
    """Allowed answers, in any letter case; empty: any text."""
    invalid_penalty: Coefficient = 0.0
    """Subtracted from the reward of a turn whose answer is no action. The simulator then gets the empty text."""
    max_new_tokens: Tokens = 64
    """Tokens of an answer, at most."""
    temperature: Temperature = 1.0
    """Sampling temperature in training. The distribution at this temperature is the one that is trained."""
    evaluation_temperature: Temperature = 0.0
    """Temperature in evaluation and films; 0 takes the likeliest token. An agent without memory may then walk in circles forever."""
    top_p: PositiveShare = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Bounds(0, 100_000_000)] = 0
    """Sample from this many likeliest tokens; 0: all tokens."""
    stop: tuple[str, ...] = ()
    """Tokens that end an answer, beside the model's own end of sequence."""
    max_prompt_tokens: Tokens | None = None
    """Tokens of a prompt, at most; null: the model's context minus max_new_tokens."""
    overflow: Literal["drop_oldest", "end_episode"] = "drop_oldest"
    """For a prompt that is too long: drop its oldest turns, or end the episode there (truncated). The run counts both."""
    tools: tuple[Literal["calculator", "search", "python", "mcp"], ...] = ()
    """Tools that an answer may call before it acts (docs/agent_tools.md); mcp: the tools of `tool_options.mcp`'s servers."""
    tool_options: ToolsConfig = field(default_factory=ToolsConfig)

    def checks(self) -> Checks:
        yield len(set(self.tools)) == len(self.tools), "tools", "different names", self.tools
        options = self.tool_options
        same = self.strategy == "summarised" and self.answer == "tag" and self.tag.lower() == self.summary_tag.lower()
        yield not same, "summary_tag", "another tag than agent.tag, which is around actions", self.summary_tag
        yield "search" not in self.tools or options.corpus is not None, "tool_options.corpus", "given for tools=[search]", None
        yield "mcp" not in self.tools or len(options.mcp) > 0, "tool_options.mcp", "given for tools=[mcp]", options.mcp
        yield len({word.lower() for word in self.actions}) == len(self.actions), "actions", "different words", self.actions
        for name, fields in (("system", ("instruction",)), ("template", TEMPLATE_FIELDS), ("memory_item", MEMORY_FIELDS)):
            yield from _of_template(name, vars(self)[name], fields)


@dataclass(frozen=True)
class WarmStartConfig(Config, place="algorithm.warm_start"):
    """Behaviour cloning before a policy plays: of a scripted player (language agents), or of the task's expert or the run's `recording`
    (robots). The run measures success before and after."""

    player: str | None = None
    """Language agents: ``package.module:function`` that maps an observation's text to an action's, such as
    embodied_rl.sim.text.frozenlake:player. Robots: null."""
    episodes: Episodes = 200
    """Successful episodes to learn from."""
    num_epochs: Epochs = 2
    """Passes over the cloned episodes."""
    minibatch_rows: Rows = 64
    """Rows of a gradient step."""
    learning_rate: LearningRate = 1e-3
    """Learning rate; falls linearly to a tenth."""
    measured_episodes: Episodes = 100
    """Held-out episodes to measure success, before and after."""


def _of_template(key: str, text: str, fields: tuple[str, ...]) -> Checks:
    try:
        named = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
        if named <= set(fields):  # their forms fit too: not {step:s}
            text.format_map({name: 1 if name == "step" else "" for name in fields})
    except (ValueError, LookupError, AttributeError) as error:
        yield False, key, f"a template (double the braces that are meant as such: {error})", text
    else:
        yield named <= set(fields), key, f"a template of {', '.join(f'{{{field}}}' for field in fields)}", text
