"""GEM (Liu et al. 2025, "GEM: A Gym for Agentic LLMs", arXiv:2510.01051): games and reasoning tasks in text.

An observation is the part ``text``, an action a string of which only the contents of ``\\boxed{}`` count. This module needs neither torch
nor a tokenizer. `RockSim` runs the games in ROCK's sandboxes ("ROCK", Alibaba 2025) instead, through the routes ``POST
/apis/v1/envs/gem/{make,reset,step,close}``; texts, turns and successes are computed as for games in this process.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import random
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError, require_known
from embodied_rl.sim.remote_client import Answer, JsonClient, RemoteFault
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn, check_arguments

if TYPE_CHECKING:
    from gem.core import Env
    from gem.envs.registration import EnvSpec

# ---- the registry, and which environments run with what is on this machine --------------------------------------------


OFFLINE_FAMILIES = ("game", "rg")
"""Families that make their own problems: games, and reasoning-gym's procedural data sets. The others read data sets from a model hub."""

NEEDS_WORD_LIST = ("Wordle", "Hangman", "WordSearch")
"""Games that read nltk's corpus "words", which no package includes."""

NEEDS_SAT_SOLVER = "rg:zebra_puzzles"
"""Task that needs pycosat, which is distributed as C source."""

BROKEN = {
    "game:Crosswords-v0-random": "GEM 0.1.0 looks for words before it has drawn how hard they are",
    "game:FifteenPuzzle-v0-random": "GEM 0.1.0 computes with its number of rows before it has drawn one",
    "rg:composite": "reasoning-gym asks for a list of data sets here, and GEM 0.1.0 has no way to give one",
}
"""{registered id that cannot be made: the reason}."""


HASH_ORDERED = frozenset({"rg:isomorphic_strings", "rg:polynomial_multiplication", "rg:ransom_note"})
"""Tasks whose questions depend on the order of sets of strings, which differs between Python processes unless PYTHONHASHSEED is fixed."""


def registered() -> Mapping[str, EnvSpec]:
    """GEM's registry, id → specification. Raises MissingExtraError if GEM is not installed. The first call takes a second."""
    if not has_sat_solver():
        sys.modules.setdefault("pycosat", ModuleType("pycosat"))  # reasoning-gym imports it for a single task
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import gem.envs
        from gem.envs.registration import ENV_REGISTRY
    except ImportError as error:
        version = "GEM" if sys.version_info < (3, 12) else "GEM, which wants Python 3.11 or older,"
        raise MissingExtraError(version, "text", error) from error
    finally:
        # Importing GEM configures the process's logging; undo that.
        root.handlers[:] = handlers
        root.setLevel(level)
    assert gem.envs
    return ENV_REGISTRY


def tasks() -> list[str]:
    """Ids of the environments that run with what is installed, sorted. Raises MissingExtraError if GEM is not installed."""
    return sorted(task for task in registered() if task.partition(":")[0] in OFFLINE_FAMILIES and _obstacle(task) is None)


def has_sat_solver() -> bool:
    """Whether the real pycosat is installed, not its placeholder."""
    found = sys.modules.get("pycosat")
    return importlib.util.find_spec("pycosat") is not None if found is None else hasattr(found, "itersolve")


def word_list_installed() -> bool:
    """Whether nltk finds its corpus "words" locally (GEM's games would use the network)."""
    import nltk

    for place in ("corpora/words", "corpora/words.zip"):
        try:
            nltk.data.find(place)
        except LookupError:
            continue
        return True
    return False


def _obstacle(task: str) -> UserError | None:
    """Why a task cannot be made here; None: it can."""
    if task in BROKEN:
        return UserError(f"GEM task '{task}' cannot be made: {BROKEN[task]}. `embodied_rl.sim.text.gem.tasks()` lists those that can.")
    if task == NEEDS_SAT_SOLVER and not has_sat_solver():
        return MissingAssetsError(f"GEM task '{task}' needs a package that must be compiled: pip install pycosat")
    if any(name in task for name in NEEDS_WORD_LIST) and not word_list_installed():
        return MissingAssetsError(f"GEM task '{task}' needs nltk's list of English words. Get it: python -m nltk.downloader words")
    if task.partition(":")[0] not in OFFLINE_FAMILIES and importlib.util.find_spec("datasets") is None:
        name = registered()[task].kwargs.get("dataset_name")
        return MissingAssetsError(
            f"GEM task '{task}' reads the data set '{name}' with a package that is not installed: pip install datasets"
        )
    return None


# ---- the simulator ----------------------------------------------------------------------------------------------------


HISTORIES = ("none", "observations", "conversation")

_FIXED = frozenset({"env_id", "entry_point", "word_list", "words"})
"""Attributes of a game that its constructor sets and nothing changes."""

_TOLERANCE = 1e-6
"""Tolerance for the sum of a game's rewards, which are fractions and add up to 1 only up to rounding."""


def make(
    task: str,
    num_envs: int,
    history: str = "none",
    success_return: float = 1.0,
    observation_bytes: int = 2**16,
    action_bytes: int = 2**14,
    **kwargs: Any,
) -> TextSim:
    """`num_envs` environments of one GEM task in this process.

    Args:
        task: id such as "game:GuessTheNumber-v0-easy" or "rg:basic_arithmetic".
        history: contents of the text: "none", the reply to the last action (and the board, if the game shows one); "observations",
            all replies so far; "conversation", all replies and actions so far.
        success_return: an episode succeeds if the sum of its rewards reaches this at its end. GEM's games give 1 in all for
            a won game and less otherwise, reasoning-gym 1 for a right answer.
        **kwargs: GEM's own, such as ``max_turns`` of a game, or ``size`` and ``seed`` of a reasoning data set.

    Raises MissingExtraError, MissingAssetsError; UserError: unknown task or argument.
    """
    require_known(history, HISTORIES, f"GEM: history='{history}' is not a choice.")
    require_known(task, registered(), f"GEM task '{task}' is not known.")
    if (obstacle := _obstacle(task)) is not None:
        raise obstacle
    family = task.partition(":")[0]
    repeats = task not in HASH_ORDERED or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random")
    return TextSim(
        task,
        lambda: GemGame(family, _made(task, family, kwargs), history, success_return),
        num_envs,
        snapshots="exact" if family == "game" else "replay" if repeats else "none",
        observation_bytes=observation_bytes,
        action_bytes=action_bytes,
    )


class GemGame(TextGame):
    """One GEM environment. An episode is a function of its seed and actions: GEM draws from the process-wide random generators, and `reset`
    first clears what an environment carries over from earlier episodes.

    ``terminated`` is GEM's. Its turn limits are rules of the game that the player reads, so they terminate the episode: ``truncated`` is
    set only if GEM truncates without terminating.
    """

    def __init__(self, family: str, env: Env | Sandbox, history: str, success_return: float) -> None:
        self.env, self._history, self._success_return = env, history, success_return
        own = vars(env)
        limit = None if own.get("_is_random", False) else own.get("max_turns")  # a random game draws it in each episode
        self.max_turns = 1 if family == "rg" else None if limit is None else int(limit)
        self._replies, self._actions, self._total = list[str](), list[str](), 0.0

    def reset(self, seed: int) -> str:
        if hasattr(self.env, "idx"):
            self.env.idx = 0  # reasoning-gym's adapter makes another data set after as many episodes as the first has questions
        with redirect_stdout(io.StringIO()):  # some print dots while they search
            reply, info = self.env.reset(seed=seed % 2**31)  # numpy takes 32 bits, and Sokoban adds to the seed
        self._replies, self._actions, self._total = [reply], [], 0.0
        return self._text(info)

    def step(self, action: str) -> TextTurn:
        reply, reward, terminated, truncated, info = self.env.step(action)
        self._replies.append(reply)
        self._actions.append(action)
        self._total += float(reward)
        success = (terminated or truncated) and self._total >= self._success_return - _TOLERANCE
        shown = {key: value for key, value in info.items() if key not in ("prefix", "suffix")}
        return TextTurn(self._text(info), reward, terminated, truncated, success, shown)

    def sample_action(self, random: np.random.Generator) -> str:
        """Random action in the task's format, drawn from the process's generators.

        Games: a move that may break a rule. reasoning-gym: the right answer of a random question of the data set. Others: nothing boxed.
        """
        with redirect_stdout(io.StringIO()):
            return _random_action(self.env)

    def state(self) -> dict[str, Any]:
        """The game's state and the conversation."""
        env = {key: value for key, value in vars(self.env).items() if key not in _FIXED}
        return {"gem": version("gem-llm"), "env": env, "replies": self._replies, "actions": self._actions, "total": self._total}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved game. Raises SnapshotError for another version of GEM, or an invalid state."""
        if state["gem"] != version("gem-llm"):
            raise SnapshotError(f"Snapshot is of GEM {state['gem']} and cannot be restored into GEM {version('gem-llm')}.")
        own, taken = vars(self.env), state["env"]
        if not self._replies and taken.keys() - own.keys():  # a new environment lacks attributes that its first reset sets
            self.reset(0)
        if strange := taken.keys() - (own.keys() - _FIXED):
            raise SnapshotError(f"Snapshot of '{state['task']}' sets {sorted(strange)[0]!r:.80}, which is not part of this game's state.")
        own.update(taken)
        self._replies, self._actions, self._total = state["replies"], state["actions"], state["total"]

    def _text(self, info: Mapping[str, Any]) -> str:
        """Replies on separate lines, then the suffix, which contains the board in games that have one."""
        if self._history == "conversation":
            lines = [text for pair in zip(self._replies, [*self._actions, ""], strict=True) for text in pair]
        else:
            lines = self._replies if self._history == "observations" else self._replies[-1:]
        ended = [text if text.endswith("\n") else text + "\n" for text in lines if text]
        return "".join([info.get("prefix", ""), *ended, info.get("suffix", "")])


def _made(task: str, family: str, kwargs: Mapping[str, Any]) -> Env:
    specification = registered()[task]
    check_arguments(specification.entry_point, kwargs, f"GEM task '{task}'")
    import gem

    try:
        return gem.make(task, **kwargs)
    except Exception as error:
        if family in OFFLINE_FAMILIES or isinstance(error, (UserError, MemoryError)):
            raise
        name = specification.kwargs.get("dataset_name")
        raise MissingAssetsError(
            f"GEM task '{task}' needs the data set '{name}', which cannot be loaded here ({type(error).__name__}: {error}). Get "
            f"it on a machine with network access: python -c \"import datasets; datasets.load_dataset('{name}')\""
        ) from error


def _random_action(env: Env) -> str:
    if hasattr(env, "ds"):
        answer = str(env.ds[random.randrange(len(env.ds))]["answer"])  # None if a question has more than one
    elif type(env).__name__ == "SudokuEnv":
        answer = " ".join(str(random.randint(1, env.scale)) for _ in range(3))
    elif type(env).__name__ == "TowerofHanoiEnv":
        answer = " ".join(random.sample("ABC", 2))
    else:
        try:
            answer = env.sample_random_action().replace("[", "").replace("]", "")  # Crosswords and WordSearch box a list, and reject it
        except NotImplementedError:
            return ""
    return answer if "\\boxed{" in answer else f"\\boxed{{{answer}}}"


# ---- in ROCK's sandboxes -----------------------------------------------------------------------------------------------------


_ROUTES = "/apis/v1/envs/gem"
_MAKE_S = 170.0


class RockSim(TextSim):
    """GEM games whose environments are sandboxes: `num_envs` with one environment each; see `make` for the arguments.

    ROCK's routes have no request numbers, so a lost answer fails the worker, and the manager resumes its episodes.
    """

    def __init__(
        self,
        client: JsonClient,
        task: str | None,
        num_envs: int,
        history: str = "none",
        success_return: float = 1.0,
        observation_bytes: int = 2**16,
        action_bytes: int = 2**14,
    ) -> None:
        """Raises UserError: no task, or the server cannot be reached or refuses it."""
        if not task:
            raise UserError("protocol=rock needs the environment's id: for example sim.task=game:GuessTheNumber-v0-easy.")
        require_known(history, HISTORIES, f"ROCK: history='{history}' is not a choice.")
        self._client = client
        super().__init__(
            task,
            lambda: RockGame("rock", Sandbox(client, task), history, success_return),
            num_envs,
            # A game restarts from its seed; for other environments this is unknown.
            snapshots="replay" if task.partition(":")[0] == "game" else "none",
            observation_bytes=observation_bytes,
            action_bytes=action_bytes,
            isolated=False,
        )

    def close(self) -> None:
        """Close the sandboxes; unreachable ones are left to the server."""
        sandboxes = [game.env.sandbox_id for game in self._games if isinstance(game, RockGame)]
        self._games = []
        self._client.send_all("POST", [(f"{_ROUTES}/close", {"sandbox_id": sandbox_id}) for sandbox_id in sandboxes], deadline_s=2.0)
        self._client.close()


class RockGame(GemGame):
    """One game elsewhere."""

    env: Sandbox

    def sample_action(self, random: np.random.Generator) -> str:
        """Raises UserError: the game, which knows its moves, runs elsewhere."""
        raise UserError(f"ROCK cannot draw a random move of '{self.env.task}': the game is behind {self.env.client.url}.")


class Sandbox:
    """One environment of the service, with GEM's own interface."""

    def __init__(self, client: JsonClient, task: str) -> None:
        """Make the environment. Raises UserError if the server refuses."""
        self.client, self.task = client, task
        try:
            answer = client.call("POST", f"{_ROUTES}/make", {"env_id": task}, repeat=False, deadline_s=_MAKE_S)
        except RemoteFault as fault:
            raise UserError(f"ROCK's server at {client.url} cannot make '{task}': {fault}") from fault
        found = _result(answer)
        if answer.status != 200 or not found.get("sandbox_id"):
            raise UserError(f"ROCK's server at {client.url} cannot make '{task}': status {answer.status}, {answer.message}.")
        self.sandbox_id = str(found["sandbox_id"])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """(observation, info)"""
        found = self._ask("reset", {"seed": seed}, repeat=True)
        return str(found["observation"]), dict(found.get("info") or {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info)"""
        found = self._ask("step", {"action": action}, repeat=False)
        try:
            flags = bool(found["terminated"]), bool(found["truncated"])
            return str(found["observation"]), float(found["reward"]), *flags, dict(found.get("info") or {})
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteFault("bad_response", f"A step's answer of {self.client.url} is malformed: {error!r}") from error

    def _ask(self, route: str, body: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        answer = self.client.call("POST", f"{_ROUTES}/{route}", {"sandbox_id": self.sandbox_id, **body}, repeat=repeat)
        found = _result(answer)
        if answer.status != 200 or "observation" not in found:
            what = f"{route} of sandbox '{self.sandbox_id}' at {self.client.url} failed"
            raise RemoteFault(answer.kind or "bad_response", f"{what}: status {answer.status}, {answer.message}")
        return found


def _result(answer: Answer) -> dict[str, Any]:
    """Content of an answer, which newer servers put into ``result`` beside a status."""
    inner = answer.body.get("result")
    return inner if isinstance(inner, dict) else answer.body
