"""GEM (Liu et al. 2025, "GEM: A Gym for Agentic LLMs", arXiv:2510.01051): games and reasoning tasks in text.

An observation is the part ``text``, an action a string of which only the contents of ``\\boxed{}`` count. This module needs neither torch
nor a tokenizer. `make_rock` runs the games in ROCK's sandboxes ("ROCK", Alibaba 2025) instead, through the routes ``POST
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
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError, require_known
from embodied_rl.registry import load_target
from embodied_rl.sim.private_random import PrivateRandom
from embodied_rl.sim.remote_client import Answer, JsonClient, RemoteFault
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.text.turns import TextTurn, TurnSim

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
    known = registered()
    without = () if word_list_installed() else NEEDS_WORD_LIST
    solvable = has_sat_solver()
    return sorted(
        task
        for task in known
        if task.partition(":")[0] in OFFLINE_FAMILIES
        and task not in BROKEN
        and not any(name in task for name in without)
        and (solvable or task != NEEDS_SAT_SOLVER)
    )


def same_in_every_process(task: str) -> bool:
    """Whether a seed gives the same question in every process."""
    return task not in HASH_ORDERED or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random")


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


def require(task: str) -> None:
    """Reject a task that cannot be made here.

    Raises MissingExtraError, MissingAssetsError; UserError: the id is unknown, or known not to work.
    """
    known = registered()
    require_known(task, known, f"GEM task '{task}' is not known.")
    if task in BROKEN:
        raise UserError(f"GEM task '{task}' cannot be made: {BROKEN[task]}. `embodied_rl.sim.text.gem.tasks()` lists those that can.")
    if task == NEEDS_SAT_SOLVER and not has_sat_solver():
        raise MissingAssetsError(f"GEM task '{task}' needs a package that must be compiled: pip install pycosat")
    if any(name in task for name in NEEDS_WORD_LIST) and not word_list_installed():
        raise MissingAssetsError(f"GEM task '{task}' needs nltk's list of English words. Get it: python -m nltk.downloader words")
    if task.partition(":")[0] not in OFFLINE_FAMILIES and importlib.util.find_spec("datasets") is None:
        name = known[task].kwargs.get("dataset_name")
        raise MissingAssetsError(
            f"GEM task '{task}' reads the data set '{name}' with a package that is not installed: pip install datasets"
        )


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
) -> GemSim:
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
    require(task)
    return GemSim(task, num_envs, history, success_return, kwargs, observation_bytes=observation_bytes, action_bytes=action_bytes)


@dataclass
class _Episode:
    """Adapter's data about one environment's running episode."""

    replies: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    total: float = 0.0
    """Sum of rewards."""


class GemSim(TurnSim):
    """GEM environments; see `make`. An episode is a function of its seed and actions: GEM draws from the process-wide random generators, so
    every environment has its own state of these, and `GemSim` first resets what an environment carries over from earlier episodes.

    ``terminated`` is GEM's. Its turn limits are rules of the game that the player reads, so they terminate the episode: ``truncated`` is
    set only if GEM truncates without terminating.
    """

    def __init__(self, task: str, num_envs: int, history: str, success_return: float, kwargs: Mapping[str, Any], **room_bytes: Any) -> None:
        """`room_bytes`: sizes of texts, see `TurnSim`."""
        self._random = [PrivateRandom() for _ in range(num_envs)]
        self._history, self._success_return = history, success_return
        self._family = task.partition(":")[0]
        self.envs = [self._make_one(task, kwargs, generator) for generator in self._random]
        self._episodes = [_Episode() for _ in range(num_envs)]
        super().__init__(
            task,
            num_envs,
            max_turns=_turn_limit(self._family, self.envs[0]),
            cuts=False,
            snapshots="exact" if self._family == "game" else "replay" if same_in_every_process(task) else "none",
            **room_bytes,
        )

    def sample_action(self, env_id: int, seed: int) -> str:
        """Random action in the task's format; does not change the episode.

        Games: a move that may break a rule. reasoning-gym: the right answer of a random question of the data set. Others: nothing boxed.
        """
        with PrivateRandom().active(seed), redirect_stdout(io.StringIO()):
            return _random_action(self.envs[env_id])

    def _begin(self, env_id: int, seed: int) -> str:
        env, seed = self.envs[env_id], seed % 2**31  # numpy takes 32 bits, and Sokoban adds to the seed
        if hasattr(env, "idx"):
            env.idx = 0  # reasoning-gym's adapter makes another data set after as many episodes as the first has questions
        with self._random[env_id].active(seed), redirect_stdout(io.StringIO()):  # some print dots while they search
            reply, info = env.reset(seed=seed)
        self._episodes[env_id] = _Episode(replies=[reply])
        return self._text(env_id, info)

    def _play(self, env_id: int, action: str) -> TextTurn:
        with self._random[env_id].active():
            reply, reward, terminated, truncated, info = self.envs[env_id].step(action)
        episode = self._episodes[env_id]
        episode.replies.append(reply)
        episode.actions.append(action)
        episode.total += float(reward)
        success = (terminated or truncated) and episode.total >= self._success_return - _TOLERANCE
        shown = {key: value for key, value in info.items() if key not in ("prefix", "suffix")}
        return TextTurn(self._text(env_id, info), reward, terminated, truncated, success, shown)

    def _saved(self, env_id: int) -> dict[str, Any]:
        """The game's state, its random generators and the conversation."""
        self._require_snapshots()
        env, episode = self.envs[env_id], self._episodes[env_id]
        return {
            "gem": version("gem-llm"),
            "env": {key: value for key, value in vars(env).items() if key not in _FIXED},
            "random": self._random[env_id].state,
            "replies": episode.replies,
            "actions": episode.actions,
            "total": episode.total,
        }

    def _take_up(self, env_id: int, saved: Mapping[str, Any]) -> None:
        """Restore a saved game. Raises SnapshotError for another version of GEM, or an invalid state."""
        self._require_snapshots()
        if saved["gem"] != version("gem-llm"):
            raise SnapshotError(f"Snapshot is of GEM {saved['gem']} and cannot be restored into GEM {version('gem-llm')}.")
        own, taken = vars(self.envs[env_id]), saved["env"]
        if not self._episodes[env_id].replies and taken.keys() - own.keys():  # a new environment lacks attributes that its first reset sets
            with self._random[env_id].active(0), redirect_stdout(io.StringIO()):
                self.envs[env_id].reset(seed=0)
        if strange := taken.keys() - (own.keys() - _FIXED):
            raise SnapshotError(f"Snapshot of '{self.spec.task}' sets {sorted(strange)[0]!r:.80}, which is not part of this game's state.")
        own.update(taken)
        self._random[env_id].state = saved["random"]
        self._episodes[env_id] = _Episode(saved["replies"], saved["actions"], saved["total"])

    def close(self) -> None:
        self.envs = []

    def _make_one(self, task: str, kwargs: Mapping[str, Any], generator: PrivateRandom) -> Env | Sandbox:
        specification = registered()[task]
        _check_arguments(task, specification, kwargs)
        import gem

        try:
            with generator.active(0):  # games draw a first problem in their constructor
                return gem.make(task, **kwargs)
        except Exception as error:
            if self._family in OFFLINE_FAMILIES or isinstance(error, (UserError, MemoryError)):
                raise
            name = specification.kwargs.get("dataset_name")
            raise MissingAssetsError(
                f"GEM task '{task}' needs the data set '{name}', which cannot be loaded here ({type(error).__name__}: {error}). Get "
                f"it on a machine with network access: python -c \"import datasets; datasets.load_dataset('{name}')\""
            ) from error

    def _require_snapshots(self) -> None:
        if self.spec.snapshots != "exact":
            raise SnapshotError(f"GEM task '{self.spec.task}' has no snapshots: an episode is restored from its seed and actions.")

    def _text(self, i: int, info: Mapping[str, Any]) -> str:
        """Replies on separate lines, then the suffix, which contains the board in games that have one."""
        episode = self._episodes[i]
        if self._history == "conversation":
            lines = [text for pair in zip(episode.replies, [*episode.actions, ""], strict=True) for text in pair]
        else:
            lines = episode.replies if self._history == "observations" else episode.replies[-1:]
        ended = [text if text.endswith("\n") else text + "\n" for text in lines if text]
        return "".join([info.get("prefix", ""), *ended, info.get("suffix", "")])


def _turn_limit(family: str, env: Env | Sandbox) -> int | None:
    """Most steps of an episode; None if each episode draws it."""
    if family == "rg":
        return 1
    own = vars(env)
    limit = own.get("max_turns")
    return None if limit is None or own.get("_is_random", False) else int(limit)


def _check_arguments(task: str, specification: EnvSpec, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError naming unknown arguments, which GEM's environments ignore."""
    import inspect

    entry = specification.entry_point
    if isinstance(entry, str):
        entry = load_target(entry)
    named = [name for name, parameter in inspect.signature(entry).parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    for name in kwargs:
        require_known(name, named, f"GEM task '{task}' does not take '{name}'.")


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


def make_rock(
    client: JsonClient,
    task: str | None,
    num_envs: int,
    history: str = "none",
    success_return: float = 1.0,
    observation_bytes: int = 2**16,
    action_bytes: int = 2**14,
) -> RockSim:
    """`num_envs` sandboxes with one GEM environment each; see `embodied_rl.sim.text.gem.make` for the arguments.

    Raises UserError: no task, or the server cannot be reached or refuses it.
    """
    if not task:
        raise UserError("protocol=rock needs the environment's id: for example sim.task=game:GuessTheNumber-v0-easy.")
    require_known(history, HISTORIES, f"ROCK: history='{history}' is not a choice.")
    return RockSim(client, task, num_envs, history, success_return, observation_bytes=observation_bytes, action_bytes=action_bytes)


class RockSim(GemSim):
    """`GemSim` whose environments are sandboxes. See `make_rock`.

    ROCK's routes have no request numbers, so a lost answer fails the worker, and the manager resumes its episodes.
    """

    def __init__(self, client: JsonClient, task: str, num_envs: int, history: str, success_return: float, **room_bytes: Any) -> None:
        self._client = client
        self._sandboxes: list[Sandbox] = []
        try:
            super().__init__(task, num_envs, history, success_return, {}, **room_bytes)
        except BaseException:
            self.close()
            raise
        # A game restarts from its seed; for other environments this is unknown.
        self.spec = replace(self.spec, snapshots="replay" if self._family == "game" else "none", max_episode_steps=None)

    def sample_action(self, env_id: int, seed: int) -> str:
        """Raises UserError: the game, which knows its moves, runs elsewhere."""
        raise UserError(f"ROCK cannot draw a random move of '{self.spec.task}': the game is behind {self._client.url}.")

    def close(self) -> None:
        """Close the sandboxes; unreachable ones are left to the server."""
        sandboxes, self._sandboxes, self.envs = self._sandboxes, [], []
        for sandbox in sandboxes:
            try:
                sandbox.close()
            except RemoteFault:
                break
        self._client.close()

    def _make_one(self, task: str, kwargs: Mapping[str, Any], generator: PrivateRandom) -> Sandbox:
        sandbox = Sandbox(self._client, task)
        self._sandboxes.append(sandbox)
        return sandbox


class Sandbox:
    """One environment of the service, with GEM's own interface."""

    def __init__(self, client: JsonClient, task: str) -> None:
        """Make the environment. Raises UserError if the server refuses."""
        self._client = client
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
            raise RemoteFault("bad_response", f"A step's answer of {self._client.url} is malformed: {error!r}") from error

    def close(self) -> None:
        """Close the environment. Raises RemoteFault if the server is unreachable."""
        self._client.call("POST", f"{_ROUTES}/close", {"sandbox_id": self.sandbox_id}, deadline_s=2.0)

    def _ask(self, route: str, body: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        answer = self._client.call("POST", f"{_ROUTES}/{route}", {"sandbox_id": self.sandbox_id, **body}, repeat=repeat)
        found = _result(answer)
        if answer.status != 200 or "observation" not in found:
            what = f"{route} of sandbox '{self.sandbox_id}' at {self._client.url} failed"
            raise RemoteFault(answer.kind or "bad_response", f"{what}: status {answer.status}, {answer.message}")
        return found


def _result(answer: Answer) -> dict[str, Any]:
    """Content of an answer, which newer servers put into ``result`` beside a status."""
    inner = answer.body.get("result")
    return inner if isinstance(inner, dict) else answer.body
