"""FrozenLake as a text game: walk over the ice to the goal without falling into a hole; a new map for every seed.

The rules are those of gymnasium's toy game; maps are random, 4 × 4 to 8 × 8, and solvable. Letters: P player, G goal, H hole, ``.`` ice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, require_known
from embodied_rl.sim.text import grid_games as grid

INSTRUCTION = "P is you. Walk over the ice (.) to G and keep out of the holes (H). Answer with one word: up, down, left or right."
COLOURS = {".": (214, 234, 248), "H": (52, 73, 94), "G": (130, 224, 170), "P": (245, 176, 65)}
STEPS_PER_SIDE = 4
"""Steps per cell of a side after which an episode is truncated."""
_TRIES = 1000


def tasks() -> list[str]:
    return ["FrozenLake"]


def make(
    num_envs: int,
    task: str = "FrozenLake",
    size: int | Sequence[int] = 4,
    hole_share: float = 0.2,
    slippery: bool = False,
    num_maps: int | None = None,
    hole_reward: float = 0.0,
    hints: bool = False,
    render_size: int = 256,
    picture_size: int | None = None,
) -> grid.GridSim:
    """`num_envs` lakes in this process.

    Args:
        size: cells of a side, 4 to 8; a pair draws it anew for each episode.
        hole_share: probability that a cell is a hole.
        slippery: a move goes in its direction in one of three cases, and to one of the two sides otherwise.
        num_maps: number of maps that repeat, whatever the seed; None: a new one for every seed.
        hole_reward: reward for falling into a hole; the goal gives 1.
        hints: add a line below the board with the cells on each side of the player, and the distance to the goal.
        picture_size: also observe ``rgb``, the board as a picture of about so many pixels a side; None: no picture.

    Raises UserError: a value out of its range.
    """
    require_known(task, tasks(), f"Task '{task}' is not known.")
    if num_maps is not None and num_maps < 1:
        raise UserError(f"FrozenLake: num_maps must be >= 1 or null, got {num_maps}.")
    if not 0.0 <= hole_share <= 0.5:
        raise UserError(f"FrozenLake: hole_share must be between 0 and 0.5, got {hole_share}.")
    grid.choose_size(size, np.random.default_rng(0), least=4, most=8, name="FrozenLake")
    return grid.GridSim(
        task,
        num_envs,
        lambda: FrozenLake(size, hole_share, slippery, num_maps, hole_reward, hints),
        max_turns=STEPS_PER_SIDE * grid.largest(size),
        instruction=INSTRUCTION,
        render_size=render_size,
        picture_size=picture_size,
    )


@dataclass(eq=False)
class FrozenLake(grid.GridGame):
    """One lake. Reward 1 at the goal, `hole_reward` in a hole, which ends the game, and 0 elsewhere."""

    colours = COLOURS

    size: int | Sequence[int] = 4
    hole_share: float = 0.2
    slippery: bool = False
    num_maps: int | None = None
    hole_reward: float = 0.0
    hints: bool = False

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._holes = np.zeros((4, 4), bool)
        self._player: grid.Cell = (0, 0)
        self._goal: grid.Cell = (3, 3)

    def begin(self, seed: int) -> None:
        """Draw a map whose goal is at least a side's length of steps away."""
        self._random = np.random.default_rng(seed if self.num_maps is None else seed % self.num_maps)
        size = grid.choose_size(self.size, self._random, least=4, most=8, name="FrozenLake")
        for _ in range(_TRIES):
            holes = self._random.random((size, size)) < self.hole_share
            start, goal = (divmod(int(number), size) for number in self._random.choice(size * size, 2, replace=False))
            holes[start] = holes[goal] = False
            path = shortest_path(holes, start, goal)
            if path is not None and len(path) >= size - 1:
                self._holes, self._player, self._goal = holes, start, goal
                return
        raise UserError(f"FrozenLake: no map with a way was found for hole_share={self.hole_share}. Lower it.")

    def play(self, word: str) -> grid.Outcome:
        if word not in grid.MOVES:
            return grid.Outcome(0.0, False, False, valid=False)
        move = grid.MOVES[word]
        if self.slippery:
            turn = int(self._random.integers(3)) - 1
            move = (turn * move[1], turn * move[0]) if turn else move
        there = grid.add(self._player, move)
        if all(0 <= place < side for place, side in zip(there, self._holes.shape, strict=True)):
            self._player = there
        arrived, drowned = self._player == self._goal, bool(self._holes[self._player])
        return grid.Outcome(self.hole_reward if drowned else float(arrived), arrived or drowned, arrived, valid=True)

    def text(self) -> str:
        letters = np.where(self._holes, "H", ".").astype("<U1")
        letters[self._goal] = "G"
        letters[self._player] = "P"
        return "\n".join("".join(row) for row in letters)

    def hint(self) -> str:
        """See `GridGame.hint`: ``up . down H left # right . goal down 2 right 1``."""
        return f"{grid.look_around(grid.board_of(self.text()), self._player)} goal {grid.way_to(self._player, self._goal)}"

    def state(self) -> dict[str, Any]:
        lake = {"holes": self._holes, "player": self._player, "goal": self._goal, "random": self._random.bit_generator.state}
        return {"game": lake}

    def set_state(self, state: Mapping[str, Any]) -> None:
        lake = state["game"]
        self._holes, self._player, self._goal = lake["holes"], tuple(lake["player"]), tuple(lake["goal"])
        self._random.bit_generator.state = lake["random"]


def shortest_path(holes: np.ndarray, start: grid.Cell, goal: grid.Cell) -> list[str] | None:
    """Words of a shortest path around the holes [H, W] bool; None: there is none."""

    def after(here: grid.Cell, move: grid.Cell) -> grid.Cell | None:
        there = grid.add(here, move)
        inside = all(0 <= place < side for place, side in zip(there, holes.shape, strict=True))
        return there if inside and not holes[there] else None

    return grid.shortest_way(start, lambda here: here == goal, after)


def player(observation: str) -> str:
    """Scripted player: the next word of a shortest path on the shown board. Raises ValueError for another text."""
    letters = grid.board_of(observation)
    (start,), (goal,) = (list(zip(*np.nonzero(letters == letter), strict=True)) for letter in "PG")
    path = shortest_path(letters == "H", (int(start[0]), int(start[1])), (int(goal[0]), int(goal[1])))
    if not path:
        raise ValueError(f"There is no way over this lake:\n{observation}")
    return path[0]
