"""Sokoban as a text game: push every box onto a goal; a new level for every seed, made by playing backwards from its solution.

Letters: ``#`` wall, ``.`` floor, O goal, X box, V box on a goal, P player, S player on a goal.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, require_known
from embodied_rl.sim.text import grid_games as grid

INSTRUCTION = (
    "P is you (S on a goal). Push every box (X, V on a goal) onto a goal (O); you cannot pull, and # is a wall. "
    "Answer with one word: up, down, left or right."
)
COLOURS = {
    "#": (93, 109, 126),
    ".": (244, 246, 247),
    "O": (171, 235, 198),
    "X": (211, 153, 84),
    "V": (88, 214, 141),
    "P": (133, 193, 233),
    "S": (133, 193, 233),
}
STEPS_PER_BOX = 20
_TRIES = 2000
_CACHED = 50_000


def tasks() -> list[str]:
    return ["Sokoban"]


def make(
    num_envs: int,
    task: str = "Sokoban",
    size: int | Sequence[int] = 6,
    num_boxes: int = 1,
    wall_share: float = 0.1,
    num_pulls: int = 6,
    box_reward: float = 0.0,
    hints: bool = False,
    render_size: int = 256,
) -> grid.GridSim:
    """`num_envs` warehouses in this process.

    Args:
        size: cells of a side, including walls, 5 to 10; a pair draws it anew for each episode.
        num_boxes: 1 to 3.
        wall_share: probability that a cell inside is a wall.
        num_pulls: backward moves of boxes with which a level is made; at most so many pushes solve it.
        box_reward: for a box that comes onto a goal, and taken back for one that leaves it; the last box gives 1 in addition.
        hints: add a line below the board with the next two cells on each side of the player, the position of the nearest box that is
            not on a goal, and the nearest free goal from there.

    Raises UserError: a value out of its range.
    """
    require_known(task, tasks(), f"Task '{task}' is not known.")
    if not 1 <= num_boxes <= 3:
        raise UserError(f"Sokoban: num_boxes must be between 1 and 3, got {num_boxes}.")
    if not 0.0 <= wall_share <= 0.4 or num_pulls < 1:
        raise UserError(f"Sokoban: wall_share must be between 0 and 0.4 and num_pulls >= 1, got {wall_share} and {num_pulls}.")
    grid.choose_size(size, np.random.default_rng(0), least=5, most=10, name="Sokoban")
    return grid.GridSim(
        task,
        num_envs,
        lambda: Sokoban(size, num_boxes, wall_share, num_pulls, box_reward, hints),
        max_turns=STEPS_PER_BOX * num_boxes + 2 * grid.largest(size),
        instruction=INSTRUCTION,
        render_size=render_size,
    )


@dataclass(frozen=True)
class Level:
    """Walls and goals of a level, which never move."""

    walls: np.ndarray
    """[H, W] bool"""
    goals: frozenset[grid.Cell]

    def free(self, cell: grid.Cell, boxes: frozenset[grid.Cell]) -> bool:
        """Whether a cell has neither wall nor box."""
        return not self.walls[cell] and cell not in boxes


Position = tuple[grid.Cell, frozenset[grid.Cell]]


def push(level: Level, position: Position, move: grid.Cell) -> Position | None:
    """Position after a move; None: it is blocked."""
    player_at, boxes = position
    there = grid.add(player_at, move)
    if level.walls[there]:
        return None
    if there not in boxes:
        return there, boxes
    beyond = grid.add(there, move)
    return (there, (boxes - {there}) | {beyond}) if level.free(beyond, boxes) else None


@dataclass(eq=False)
class Sokoban(grid.GridGame):
    """One warehouse. Reward 1 when every box is on a goal, which ends the game."""

    colours = COLOURS

    size: int | Sequence[int] = 6
    num_boxes: int = 1
    wall_share: float = 0.1
    num_pulls: int = 6
    box_reward: float = 0.0
    hints: bool = False

    def __post_init__(self) -> None:
        self._level = Level(np.ones((5, 5), bool), frozenset())
        self._position: Position = ((0, 0), frozenset())

    def begin(self, seed: int) -> None:
        """Make a level in which no box is on a goal."""
        random = np.random.default_rng(seed)
        size = grid.choose_size(self.size, random, least=5, most=10, name="Sokoban")
        for _ in range(_TRIES):
            made = _make_level(random, size, self.num_boxes, self.wall_share, self.num_pulls)
            if made is not None:
                self._level, self._position = made
                return
        raise UserError(f"Sokoban: no level of size {size} with {self.num_boxes} boxes was found. Use a larger size or fewer walls.")

    def play(self, word: str) -> grid.Outcome:
        if word not in grid.MOVES:
            return grid.Outcome(0.0, False, False, valid=False)
        before = len(self._position[1] & self._level.goals)
        self._position = push(self._level, self._position, grid.MOVES[word]) or self._position
        stored = len(self._position[1] & self._level.goals)
        solved = stored == len(self._level.goals)
        return grid.Outcome(self.box_reward * (stored - before) + float(solved), solved, solved, valid=True)

    def text(self) -> str:
        return write(self._level, self._position)

    def hint(self) -> str:
        """See `GridGame.hint`: ``up .. down X. left ## right .# box down 1 right 0 goal down 2 right 0``."""
        player_at, boxes = self._position
        letters = grid.board_of(self.text())
        around = grid.look_around(letters, player_at, 2)
        left, free = boxes - self._level.goals, self._level.goals - boxes
        if not left:
            return around
        box = min(left, key=lambda cell: (_distance(player_at, cell), cell))
        goal = min(free, key=lambda cell: (_distance(box, cell), cell))
        return f"{around} box {grid.way_to(player_at, box)} goal {grid.way_to(box, goal)}"

    def state(self) -> dict[str, Any]:
        player_at, boxes = self._position
        return {"game": {"walls": self._level.walls, "goals": sorted(self._level.goals), "player": player_at, "boxes": sorted(boxes)}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        found = state["game"]
        self._level = Level(found["walls"], frozenset(map(tuple, found["goals"])))
        self._position = tuple(found["player"]), frozenset(map(tuple, found["boxes"]))


def _distance(one: grid.Cell, other: grid.Cell) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


# ---- text -----------------------------------------------------------------------------------------------------------


def write(level: Level, position: Position) -> str:
    """Board with one line per row."""
    player_at, boxes = position
    letters = np.where(level.walls, "#", ".").astype("<U1")
    for cell in level.goals:
        letters[cell] = "O"
    for cell in boxes:
        letters[cell] = "V" if cell in level.goals else "X"
    letters[player_at] = "S" if player_at in level.goals else "P"
    return "\n".join("".join(row) for row in letters)


def read(text: str) -> tuple[Level, Position]:
    """Parse the text of `write`, without the hint. Raises ValueError for a text that is not a board."""
    letters = grid.board_of(text)

    def cells(which: str) -> list[grid.Cell]:
        return [(int(row), int(column)) for row, column in zip(*np.nonzero(np.isin(letters, list(which))), strict=True)]

    (player_at,) = cells("PS")
    return Level(letters == "#", frozenset(cells("OVS"))), (player_at, frozenset(cells("XV")))


# ---- levels ---------------------------------------------------------------------------------------------------------


def _make_level(random: np.random.Generator, size: int, num_boxes: int, wall_share: float, num_pulls: int) -> tuple[Level, Position] | None:
    """Put the boxes on their goals and pull them away; None if the walls leave no room."""
    walls = np.ones((size, size), bool)
    walls[1:-1, 1:-1] = random.random((size - 2, size - 2)) < wall_share
    floor = [(int(row), int(column)) for row, column in zip(*np.nonzero(~walls), strict=True)]
    if len(floor) < num_boxes + 2:
        return None
    chosen = [floor[int(place)] for place in random.permutation(len(floor))[: num_boxes + 1]]
    goals = frozenset(chosen[1:])
    level, position = Level(walls, goals), (chosen[0], goals)
    for _ in range(num_pulls):
        choices = list(_pulls(level, position))
        if not choices:
            break
        position = choices[int(random.integers(len(choices)))]
    if position[1] & goals:
        return None
    around = sorted(_reachable(level, *position))
    return level, (around[int(random.integers(len(around)))], position[1])


def _pulls(level: Level, position: Position) -> Iterator[Position]:
    """Every position from which one push leads to this one, after any walk of the player."""
    player_at, boxes = position
    around = _reachable(level, player_at, boxes)
    for box in sorted(boxes):
        for move in grid.MOVES.values():
            beside = grid.add(box, move)
            if beside in around and level.free(further := grid.add(beside, move), boxes):
                yield further, (boxes - {box}) | {beside}


def _reachable(level: Level, start: grid.Cell, boxes: frozenset[grid.Cell]) -> set[grid.Cell]:
    queue, seen = deque([start]), {start}
    while queue:
        here = queue.popleft()
        for move in grid.MOVES.values():
            there = grid.add(here, move)
            if there not in seen and level.free(there, boxes):
                seen.add(there)
                queue.append(there)
    return seen


# ---- the scripted player --------------------------------------------------------------------------------------------


def solve(level: Level, start: Position) -> list[str] | None:
    """Words of a shortest solution in moves; None: unsolvable."""

    def after(here: Position, move: grid.Cell) -> Position | None:
        there = push(level, here, move)
        return None if there is None or (there[1] != here[1] and _is_stuck(level, there[1] - here[1])) else there

    return grid.shortest_way(start, lambda here: here[1] == level.goals, after)


def _is_stuck(level: Level, moved: frozenset[grid.Cell]) -> bool:
    """Whether one of these boxes is in a corner without a goal, from which it never comes out."""
    for cell in moved - level.goals:
        blocked = [bool(level.walls[grid.add(cell, move)]) for move in grid.MOVES.values()]
        if (blocked[0] or blocked[1]) and (blocked[2] or blocked[3]):
            return True
    return False


_known: OrderedDict[str, str] = OrderedDict()
"""{board: next word}; successive positions of a solution are usually requested in order."""


def player(observation: str) -> str:
    """Scripted player: the next word of a shortest solution of the shown board; "up" if there is none."""
    board = write(*read(observation))
    if board not in _known:
        level, position = read(board)
        for word in solve(level, position) or ["up"]:
            _known[write(level, position)] = word
            position = push(level, position, grid.MOVES[word]) or position
        while len(_known) > _CACHED:
            _known.popitem(last=False)
    return _known[board]
