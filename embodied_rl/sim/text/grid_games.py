"""Games on a grid as text: the shared parts of our own text games. Numpy only; Pillow draws the pictures."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn
from embodied_rl.types import StepBuffers, VariableSpec

Node = TypeVar("Node", bound=Hashable)
Cell = tuple[int, int]
"""(row, column) from the upper left corner."""

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""{word: change of (row, column)}"""

_TEXT_BYTES = 2**12


@dataclass(frozen=True)
class Outcome:
    """Result of one move."""

    reward: float
    terminated: bool
    success: bool
    valid: bool
    """Whether the word was a move; False: nothing happened."""


class GridGame(TextGame):
    """Rules of one game, and its board in letters. `state` is ``{"game": …}``.

    An action is one word; surrounding spaces and case do not matter. Other words cost a step, and set ``info["valid"]`` to False.
    """

    words: Sequence[str] = tuple(MOVES)
    """Words that `sample_action` draws from."""
    colours: Mapping[str, tuple[int, int, int]]
    """{letter of `text`: colour of its tile} for pictures."""
    hints: bool = False
    """Whether `hint` is shown below the board."""

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Begin the game of this seed."""

    @abstractmethod
    def play(self, word: str) -> Outcome:
        """Play one word; one that is no move changes nothing."""

    @abstractmethod
    def text(self) -> str:
        """Board with one line per row."""

    def hint(self) -> str:
        """Player's surroundings and the goal's position in one line with spaces; empty if the board shows everything."""
        return ""

    def draw(self, size: int) -> np.ndarray:
        """See `TextGame.draw`: a coloured tile with its letter for each cell of the board."""
        return draw_board(self.text(), self.colours, size)

    def reset(self, seed: int) -> str:
        self.begin(seed)
        return self._shown()

    def step(self, action: str) -> TextTurn:
        found = self.play(action.strip().lower())
        return TextTurn(self._shown(), found.reward, found.terminated, success=found.success, info={"valid": found.valid})

    def sample_action(self, random: np.random.Generator) -> str:
        return self.words[int(random.integers(len(self.words)))]

    def _shown(self) -> str:
        return f"{self.text()}\n{self.hint()}" if self.hints else self.text()


class GridSim(TextSim):
    """`num_envs` grid games in this process, and their pictures."""

    def __init__(
        self,
        task: str,
        num_envs: int,
        make: Callable[[], GridGame],
        *,
        max_turns: int,
        instruction: str,
        render_size: int = 256,
        picture_size: int | None = None,
    ) -> None:
        """`picture_size`: also observe ``rgb``, a picture whose longer side has about so many pixels; None: no picture."""
        if picture_size is not None and not 8 <= picture_size <= 1024:
            raise UserError(f"picture_size must be between 8 and 1024 pixels or null, got {picture_size}.")
        self._render_size, self._picture_size = render_size, picture_size
        super().__init__(
            task,
            make,
            num_envs,
            max_turns=max_turns,
            instruction=instruction,
            snapshots="exact",
            observation_bytes=_TEXT_BYTES,
            action_bytes=_TEXT_BYTES,
            # A tile has at least four pixels a side, whatever the requested size.
            parts=None if picture_size is None else {"rgb": VariableSpec("array", 3 * max(picture_size, 64) ** 2)},
            can_render=True,
            isolated=False,
        )

    def render(self, env_id: int) -> np.ndarray:
        """See `GridGame.draw`."""
        return self._games[env_id].draw(self._render_size)

    def _show(self, env_id: int, text: str, out: StepBuffers) -> None:
        super()._show(env_id, text, out)
        if self._picture_size is not None:
            out.observation["rgb"][env_id] = self._games[env_id].draw(self._picture_size)


def draw_board(text: str, colours: Mapping[str, tuple[int, int, int]], size: int) -> np.ndarray:
    """Picture [H, W, 3] uint8 of a board of letters whose longer side has about `size` pixels; letters without a colour are grey."""
    from PIL import Image, ImageDraw, ImageFont

    rows = text.splitlines()
    tile = max(4, size // max(len(rows), max(len(row) for row in rows)))
    image = Image.new("RGB", (tile * max(len(row) for row in rows), tile * len(rows)), (40, 40, 40))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(max(8, tile // 2))
    for y, row in enumerate(rows):
        for x, letter in enumerate(row):
            box = (x * tile + 1, y * tile + 1, (x + 1) * tile - 2, (y + 1) * tile - 2)
            ground = colours.get(letter, (128, 128, 128))
            draw.rectangle(box, fill=ground)
            if letter.isalpha():
                ink = (20, 20, 20) if sum(ground) > 300 else (240, 240, 240)
                draw.text(((x + 0.5) * tile, (y + 0.5) * tile), letter, fill=ink, font=font, anchor="mm")
    return np.asarray(image, np.uint8).copy()


def board_of(observation: str) -> np.ndarray:
    """[H, W] letters of a shown board, without the hint."""
    return np.array([list(line) for line in observation.splitlines() if line and " " not in line])


def look_around(letters: np.ndarray, here: Cell, distance: int = 1) -> str:
    """``up .. down H# left .. right .G``: the next letters on each side, # beyond the board."""
    seen = []
    for word, (down, right) in MOVES.items():
        cells = [(here[0] + step * down, here[1] + step * right) for step in range(1, distance + 1)]
        inside = [0 <= row < letters.shape[0] and 0 <= column < letters.shape[1] for row, column in cells]
        seen.append(f"{word} {''.join(letters[cell] if known else '#' for cell, known in zip(cells, inside, strict=True))}")
    return " ".join(seen)


def way_to(here: Cell, there: Cell) -> str:
    """``down 2 left 1``, with ``down 0`` for no distance."""
    rows, columns = there[0] - here[0], there[1] - here[1]
    return f"{'up' if rows < 0 else 'down'} {abs(rows)} {'left' if columns < 0 else 'right'} {abs(columns)}"


def add(cell: Cell, move: Cell) -> Cell:
    """The neighbouring cell."""
    return cell[0] + move[0], cell[1] + move[1]


def shortest_way(start: Node, arrived: Callable[[Node], bool], after: Callable[[Node, Cell], Node | None]) -> list[str] | None:
    """Words of a shortest path, found breadth first; None: there is none. `after`: result of a move; None: it is impossible."""
    came_from: dict[Node, tuple[Node, str]] = {}
    queue, seen = deque([start]), {start}
    while queue:
        here = queue.popleft()
        if arrived(here):
            words: list[str] = []
            while here != start:
                here, word = came_from[here]
                words.append(word)
            return words[::-1]
        for word, move in MOVES.items():
            there = after(here, move)
            if there is not None and there not in seen:
                seen.add(there)
                came_from[there] = (here, word)
                queue.append(there)
    return None


def choose_size(size: int | Sequence[int], random: np.random.Generator, *, least: int, most: int, name: str) -> int:
    """A number, or one drawn from (smallest, largest). Raises UserError outside `least` … `most`."""
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides) or not least <= sides[0] <= sides[1] <= most:
        raise UserError(f"{name}: size must be between {least} and {most}, or a pair of these, got {size}.")
    low, high = sides
    return low if low == high else int(random.integers(low, high + 1))


def largest(size: int | Sequence[int]) -> int:
    """Largest side that `choose_size` may draw."""
    return size if isinstance(size, int) else int(size[-1])
