"""TextWorld (Côté et al. 2018, arXiv:1806.11532): adventures generated from a seed, played by TextWorld's own logic.

This needs neither a Z-machine nor a download: a game is made on the first use of its seed, and kept for later episodes. TextWorld compiles
its sentences into a Z-machine's program only, so `describe` writes them from the facts.
"""

from __future__ import annotations

import importlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError, from_extra, require_known
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn

if TYPE_CHECKING:
    from textworld import GameState

_KEPT_GAMES = 64
_DIRECTIONS = ("north", "east", "south", "west")


def tasks() -> list[str]:
    return ["TextWorld"]


def make(
    num_envs: int,
    task: str = "TextWorld",
    num_rooms: int = 3,
    num_objects: int = 6,
    quest_length: int = 3,
    num_games: int | None = None,
    show_commands: bool = True,
    max_turns: int = 30,
    observation_bytes: int = 2**16,
) -> TextSim:
    """`num_envs` adventures in this process.

    Args:
        quest_length: actions of the shortest solution.
        num_games: number of training games that repeat (making one takes a second); None: a new one for every seed. Held-out seeds
            have separate games.

    Raises MissingExtraError; UserError: a value out of its range.
    """
    require_known(task, tasks(), f"Task '{task}' is not known.")
    for name, value in (("num_rooms", num_rooms), ("num_objects", num_objects), ("quest_length", quest_length), ("num_games", num_games)):
        if value is not None and value < 1:
            raise UserError(f"TextWorld: {name} must be >= 1, got {value}.")
    with from_extra("TextWorld", "textworld"):
        importlib.import_module("textworld")
    return TextSim(
        task,
        lambda: WorldGame(num_rooms, num_objects, quest_length, num_games, show_commands),
        num_envs,
        max_turns=max_turns,
        observation_bytes=observation_bytes,
    )


class CommandGame(TextGame):
    """A game of TextWorld's engine."""

    _hidden: frozenset[str]
    """Commands that are not listed."""
    _state: GameState

    def __init__(self, show_commands: bool) -> None:
        self._env: Any = None
        self._show_commands = show_commands

    def sample_action(self, random: np.random.Generator) -> str:
        commands = sorted(self._state["admissible_commands"])
        return commands[int(random.integers(len(commands)))]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _play(self, action: str) -> tuple[float, bool, bool]:
        """Play a command; returns (the game's score, whether it is over, whether the command was possible)."""
        command = " ".join(action.split())
        valid = command in (self._state["admissible_commands"] or [])
        self._state, score, done = self._env.step(command)
        return float(score), bool(done) or bool(self._state["won"]), valid

    def _text(self, description: str) -> str:
        commands = sorted(set(self._state["admissible_commands"] or []) - self._hidden)
        shown = f"\nPossible commands: {', '.join(commands)}" if self._show_commands and commands else ""
        return description.strip() + shown


class WorldGame(CommandGame):
    """One player."""

    _hidden = frozenset({"look", "inventory"})  # the text contains both anyway

    def __init__(self, num_rooms: int, num_objects: int, quest_length: int, num_games: int | None, show_commands: bool) -> None:
        super().__init__(show_commands)
        textworld = importlib.import_module("textworld")
        self._size = {"nb_rooms": num_rooms, "nb_objects": num_objects, "quest_length": quest_length}
        self._num_games = num_games
        infos = textworld.EnvInfos(admissible_commands=True, facts=True, feedback=True, objective=True, won=True, lost=True, score=True)
        self._env = importlib.import_module("textworld.envs").TextWorldEnv(infos)
        self._folder = tempfile.TemporaryDirectory(prefix="textworld")
        self._files: OrderedDict[int, Path] = OrderedDict()
        self._score = 0.0

    def reset(self, seed: int) -> str:
        number = seed if self._num_games is None or seed >= HELD_OUT_START else seed % self._num_games
        self._env.load(str(self._file(number)))
        self._state, self._score = self._env.reset(), 0.0
        return self._text(f"Task: {self._state['objective']}\n{describe(self._state['facts'])}")

    def step(self, action: str) -> TextTurn:
        score, over, valid = self._play(action)
        # The game reports the score so far; the reward is the difference.
        reward, self._score = score - self._score, score
        return TextTurn(
            self._text(("" if valid else "That is not possible. ") + describe(self._state["facts"])),
            reward,
            terminated=over or bool(self._state["lost"]),
            success=bool(self._state["won"]),
            info={"valid": valid, "score": score},
        )

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def _file(self, number: int) -> Path:
        """File of a game, made on first use."""
        if number not in self._files:
            options = importlib.import_module("textworld").GameOptions()
            options.seeds = number % 65535  # TextWorld takes 16 bits
            for name, value in self._size.items():
                setattr(options, name, value)
            game = importlib.import_module("textworld.generator").make_game(options)
            path = Path(self._folder.name) / f"{number}.json"
            game.save(str(path))
            self._files[number] = path
            if len(self._files) > _KEPT_GAMES:
                self._files.popitem(last=False)[1].unlink()
        self._files.move_to_end(number)
        return self._files[number]


def describe(facts: Iterable[Any]) -> str:
    """Player's view and inventory in sentences, from TextWorld's facts (propositions with readable names)."""
    parsed = [(fact.name, [(part.name, str(part.type)) for part in fact.arguments]) for fact in facts]
    here = next(parts[1][0] for name, parts in parsed if name == "at" and parts[0][1] == "P")
    state = {parts[0][0]: name for name, parts in parsed if name in ("open", "closed", "locked")}

    def inside(holder: str) -> str:
        held = sorted(parts[0][0] for name, parts in parsed if name in ("in", "on") and parts[1][0] == holder)
        return ", ".join(held)

    seen = []
    for thing, kind in sorted(parts[0] for name, parts in parsed if name == "at" and parts[0][1] != "P" and parts[1][0] == here):
        known = state.get(thing, "")
        hidden = kind == "c" and known != "open"
        held = "" if hidden else inside(thing)
        where = " with " + held if held else ""
        seen.append(f"{thing}{f' ({known})' if known else ''}{where}")
    doors = {parts[2][0]: parts[1][0] for name, parts in parsed if name == "link" and parts[0][0] == here}
    exits = []
    for name, parts in parsed:
        if name.endswith("_of") and parts[1][0] == here and (direction := name.removesuffix("_of")) in _DIRECTIONS:
            door = doors.get(parts[0][0])
            exits.append(f"{direction}{f' through the {state.get(door, str())} {door}' if door else ''}")
    carried = sorted(parts[0][0] for name, parts in parsed if name == "in" and parts[1][1] == "I")
    return (
        f"You are in the {here}. You see: {', '.join(seen) or 'nothing'}. Exits: {', '.join(sorted(exits)) or 'none'}. "
        f"You carry: {', '.join(carried) or 'nothing'}."
    )
