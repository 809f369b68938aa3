"""Gymnasium's toy games as text games: FrozenLake, CliffWalking, Taxi and Blackjack, with their own rules and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embodied_rl.errors import require_known
from embodied_rl.sim.text.grid_games import GridGame, GridSim, Outcome, draw_board

WORDS = {
    "FrozenLake-v1": ("left", "down", "right", "up"),
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "Taxi-v4": ("down", "up", "right", "left", "pickup", "dropoff"),
    "Blackjack-v1": ("stick", "hit"),
}
"""{task: words of its actions, in gymnasium's order}"""
LIMITS = {"FrozenLake-v1": 100, "CliffWalking-v1": 100, "Taxi-v4": 200, "Blackjack-v1": 22}
"""{task: steps of an episode}; gymnasium's own limit if it has one."""
GAMES = {
    "FrozenLake-v1": "P is you. Walk over the ice (F) to G and keep out of the holes (H); the ice is slippery.",
    "CliffWalking-v1": "P is you. Walk to G; the cliff (C) throws you back to the start.",
    "Taxi-v4": "T is your taxi. Pick the passenger up and drop them off at their destination; walls are | between cells.",
    "Blackjack-v1": "Get closer to 21 than the dealer without going over.",
}
COLOURS = {
    ".": (214, 234, 248),
    "F": (214, 234, 248),
    "S": (235, 235, 235),
    "H": (52, 73, 94),
    "C": (52, 73, 94),
    "G": (130, 224, 170),
    "P": (245, 176, 65),
    "T": (245, 176, 65),
    "R": (231, 76, 60),
    "Y": (244, 208, 63),
    "B": (93, 173, 226),
    "|": (90, 90, 90),
}
_STATE = ("s", "taxi_orientation", "fickle_step", "player", "dealer")
"""Attributes that an episode changes and the rest of it depends on; each game has some of them."""


def tasks() -> list[str]:
    return list(WORDS)


def make(num_envs: int, task: str = "Taxi-v4", render_size: int = 256, **kwargs: Any) -> GridSim:
    """`num_envs` games in this process. A word that is no action costs a step and does nothing else.

    `**kwargs`: gymnasium's own, such as ``is_slippery`` and ``map_name`` of FrozenLake. Raises UserError: an unknown task.
    """
    require_known(task, WORDS, f"Task '{task}' is not a toy game.")
    words = WORDS[task]
    instruction = f"{GAMES[task]} Answer with one word: {', '.join(words[:-1])} or {words[-1]}."
    return GridSim(task, num_envs, lambda: ToyGame(task, kwargs), max_turns=LIMITS[task], instruction=instruction, render_size=render_size)


class ToyGame(GridGame):
    """One game."""

    colours = COLOURS

    def __init__(self, task: str, kwargs: Mapping[str, Any]) -> None:
        import gymnasium

        self._task, self.words = task, WORDS[task]
        self._env: Any = gymnasium.make(task, disable_env_checker=True, **kwargs).unwrapped
        self._env.reset(seed=0)

    def begin(self, seed: int) -> None:
        self._env.reset(seed=seed)

    def play(self, word: str) -> Outcome:
        if word not in self.words:
            return Outcome(0.0, False, False, False)
        _, reward, terminated, _, _ = self._env.step(self.words.index(word))
        won = terminated and (self._task in ("CliffWalking-v1", "Taxi-v4") or float(reward) > 0)
        return Outcome(float(reward), bool(terminated), bool(won), True)

    def text(self) -> str:
        """See `GridGame.text`; for Taxi the board and a line about the passenger, for Blackjack only lines."""
        if self._task == "Blackjack-v1":
            return self._cards()
        if self._task == "Taxi-v4":
            return self._taxi()
        if self._task == "CliffWalking-v1":
            rows, columns = self._env.shape
            letters = np.where(self._env._cliff, "C", ".")
            letters[rows - 1, columns - 1] = "G"
        else:
            letters = self._env.desc.astype(str).copy()
            columns = self._env.ncol
        letters[divmod(int(self._env.s), columns)] = "P"
        return "\n".join("".join(row) for row in letters)

    def draw(self, size: int) -> np.ndarray:
        """See `GridGame.draw`: the board's lines as tiles; for Blackjack the words."""
        from embodied_rl.sim.instrumented import text_panel

        board = "\n".join(line for line in self.text().splitlines() if " " not in line)
        return draw_board(board, COLOURS, size) if board else text_panel(self.text(), size)

    def state(self) -> dict[str, Any]:
        own = vars(self._env)
        kept = {name: own[name] for name in _STATE if name in own}
        plain = {name: [int(card) for card in value] if isinstance(value, list) else int(value) for name, value in kept.items()}
        return {"game": {**plain, "random": self._env.np_random.bit_generator.state}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        vars(self._env).update({name: value for name, value in state["game"].items() if name in _STATE})
        self._env.np_random.bit_generator.state = state["game"]["random"]

    def _taxi(self) -> str:
        row, column, passenger, destination = self._env.decode(self._env.s)
        letters = self._env.desc.astype(str)[1:-1, 1:-1].copy()
        letters[letters == ":"] = "."
        letters[letters == " "] = "."
        letters[row, 2 * column] = "T"
        names = ("R", "G", "Y", "B")
        where = f"at {names[passenger]}" if passenger < len(names) else "in the taxi"
        return "\n".join("".join(line) for line in letters) + f"\nThe passenger is {where} and wants to go to {names[destination]}."

    def _cards(self) -> str:
        from gymnasium.envs.toy_text.blackjack import sum_hand, usable_ace

        hand, ace = self._env.player, "a usable ace" if usable_ace(self._env.player) else "no usable ace"
        return f"Your cards: {' '.join(map(str, hand))}; {sum_hand(hand)} in all, {ace}.\nThe dealer shows {self._env.dealer[0]}."


def player(observation: str) -> str:
    """Scripted player of Blackjack: sticks from 17 on. Raises ValueError for another game's observation."""
    return "stick" if int(observation.split(";")[1].split()[0]) >= 17 else "hit"
