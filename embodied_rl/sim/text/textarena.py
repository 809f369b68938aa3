"""TextArena (Guertler et al. 2025, "TextArena", arXiv:2504.11442): text games for one player or several.

The agent is one player; opponents play the others inside the step, so that an episode is a sequence of the agent's own turns. Moves are
written in square brackets.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embodied_rl.errors import MissingAssetsError, UserError, from_extra, require_known
from embodied_rl.sim.text.opponents import Player, make_opponent, random_move
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn, check_arguments

if TYPE_CHECKING:
    from textarena import Env

NEEDS_DATA = {
    "words of nltk (python -m nltk.downloader words averaged_perceptron_tagger_eng)": (
        "Codenames",
        "Crosswords",
        "DontSayIt",
        "GuessWho",
        "Hangman",
        "LetterAuction",
        "SpellingBee",
        "WordChains",
        "WordLadder",
        "WordSearch",
        "Wordle",
    ),
    "judges at openrouter.ai (OPENROUTER_API_KEY)": ("Debate", "ScenarioPlanning", "TwentyQuestions", "Taboo", "CharacterConclave"),
}
"""{data that games need beside the package: names of the games, without "-v0"}."""
BROKEN = {"Chess": "TextArena 0.7.4 writes it in a way that only Python 3.12 can read"}
_MOST_PLAYERS = 15
_OTHERS_TURNS = 200
"""Most turns of opponents after one of the agent's: a game that never returns is an error, not a hang."""


def tasks() -> list[str]:
    """Ids of the games that need only the package, without variants of their presentation. Raises MissingExtraError."""
    away = {name for names in NEEDS_DATA.values() for name in names} | set(BROKEN)
    shown = ("-raw", "-train")
    return sorted(task for task in registered() if task.partition("-v")[0] not in away and not task.endswith(shown))


@functools.cache
def registered() -> Mapping[str, Any]:
    """TextArena's registry. Raises MissingExtraError if the package is not installed."""
    with from_extra("TextArena", "textarena"):
        import nltk

        # Games download word lists while they are imported or made. Here a missing list is an error, and no game waits for the network.
        nltk.download = lambda *_, **__: False
        importlib.import_module("textarena")
        return importlib.import_module("textarena.envs.registration").ENV_REGISTRY


def make(
    num_envs: int,
    task: str = "SimpleNegotiation-v0",
    opponent: str = "random",
    opponent_options: Mapping[str, Any] | None = None,
    seat: int | Literal["alternate"] = "alternate",
    num_players: int | None = None,
    max_turns: int = 50,
    success_reward: float = 1.0,
    observation_bytes: int = 2**16,
    action_bytes: int = 2**14,
    **kwargs: Any,
) -> TextSim:
    """`num_envs` games of one TextArena id in this process.

    Args:
        task: "TicTacToe-v0", "ConnectFour-v0", "GuessTheNumber-v0", …; "-train" is a shorter form, "-raw" unformatted.
        opponent: player of the other seats: random, scripted or openai.
        opponent_options: see `embodied_rl.sim.text.opponents.make_opponent`.
        seat: the agent's player number, from 0; alternate: the seed chooses.
        num_players: number of players; None: the fewest that the game allows.
        max_turns: turns of the agent after which an episode is truncated.
        success_reward: an episode succeeds if the agent's reward at its end reaches this.

    Raises MissingExtraError, MissingAssetsError; UserError: an unknown id or argument.
    """
    require_known(task, registered(), f"TextArena has no game '{task}' (`python -m embodied_rl.catalog tasks textarena` lists them).")
    if (family := task.partition("-v")[0]) in BROKEN:
        raise UserError(f"TextArena's '{task}' cannot be played: {BROKEN[family]}.")
    opponents = make_opponent(opponent, opponent_options or {})
    players = num_players or _least_players(task, kwargs)
    if seat != "alternate" and not (isinstance(seat, int) and 0 <= seat < players):
        raise UserError(f"TextArena: seat must be 'alternate' or between 0 and {players - 1}, got {seat!r}.")
    return TextSim(
        task,
        lambda: ArenaGame(task, players, seat, opponents, success_reward, kwargs),
        num_envs,
        max_turns=max_turns,
        snapshots="none" if opponent == "openai" else "replay",
        observation_bytes=observation_bytes,
        action_bytes=action_bytes,
    )


@dataclass(eq=False)
class ArenaGame(TextGame):
    """One game."""

    task: str
    players: int
    seat_rule: int | str
    opponents: Callable[[int], Player]
    """Function from a seed to a player of one of the other seats."""
    success_reward: float
    kwargs: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._env: Env
        self._others: list[Player] = []
        self._seat, self._text = 0, ""

    def reset(self, seed: int) -> str:
        self._seat = seed % self.players if self.seat_rule == "alternate" else int(self.seat_rule)
        # TextArena's wrappers keep the last episode's views of the players and show them in the next one.
        self._env = _made(self.task, self.kwargs)
        self._others = [self.opponents(seed * _MOST_PLAYERS + number) for number in range(self.players)]
        with _data_of(self.task):
            self._env.reset(num_players=self.players, seed=seed % 2**31)
        if self._let_others_play():
            raise RuntimeError(f"TextArena's '{self.task}' ended before seat {self._seat} had a turn.")
        return self._text

    def step(self, action: str) -> TextTurn:
        done, _ = self._env.step(action=action)
        if not (done or self._let_others_play()):
            return TextTurn(self._text)
        rewards, infos = self._env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        mine = dict((infos or {}).get(self._seat, {}))
        reason = str(mine.get("reason") or "The game is over.")
        return TextTurn(
            text=f"{reason} Reward {reward:g}.",
            reward=reward,
            terminated=True,
            success=reward >= self.success_reward,
            info={"seat": self._seat, "invalid_move": bool(mine.get("invalid_move", False)), "reason": reason},
        )

    def sample_action(self, random: np.random.Generator) -> str:
        return random_move(self._text, random)

    def _let_others_play(self) -> bool:
        """Let others play until it is the agent's turn, and keep its observation; returns True if the game ended first."""
        for _ in range(_OTHERS_TURNS):
            player, observation = self._env.get_observation()
            if player == self._seat:
                self._text = str(observation).strip()
                return False
            done, _ = self._env.step(action=self._others[player](str(observation)))
            if done:
                return True
        raise RuntimeError(f"TextArena's '{self.task}' did not return to seat {self._seat} within {_OTHERS_TURNS} turns of the others.")


def _least_players(task: str, kwargs: Mapping[str, Any]) -> int:
    env = _made(task, kwargs)
    for players in range(1, _MOST_PLAYERS + 1):
        try:
            with _data_of(task):
                env.reset(num_players=players, seed=0)
        except AssertionError:  # games reject a number of players this way
            continue
        return players
    raise UserError(f"TextArena's '{task}' takes none of 1 to {_MOST_PLAYERS} players.")


def _made(task: str, kwargs: Mapping[str, Any]) -> Env:
    check_arguments(registered()[task].entry_point, kwargs, f"TextArena's '{task}'")
    with _data_of(task):
        return importlib.import_module("textarena").make(task, **kwargs)


@contextmanager
def _data_of(task: str) -> Iterator[None]:
    """Turn what nltk raises for missing data into a MissingAssetsError."""
    try:
        yield
    except LookupError as error:
        family = task.partition("-v")[0]
        what = next((what for what, names in NEEDS_DATA.items() if family in names), "data that is not on this machine")
        first = next((line for line in str(error).splitlines() if line.strip(" *")), type(error).__name__)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", first).strip()
        raise MissingAssetsError(f"TextArena's '{task}' needs {what} ({plain}).") from error
