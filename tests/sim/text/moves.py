"""Winning moves of GEM's games, worked out from the problem by programs of our own."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any


def answers(task: str, env: Any) -> list[str]:
    """Moves that win, worked out here from the problem."""
    if "GuessTheNumber" in task:
        return [str(env.game_number)]
    if "Mastermind" in task:
        return [" ".join(map(str, env.game_code))]
    if "TowerofHanoi" in task:

        def hanoi(n: int, source: str, target: str, spare: str) -> list[str]:
            return [] if n == 0 else [*hanoi(n - 1, source, spare, target), f"{source} {target}", *hanoi(n - 1, spare, target, source)]

        return hanoi(env.num_disks, "A", "C", "B")
    if "Sudoku" in task:
        return solve_sudoku(env.board)
    if "FifteenPuzzle" in task:
        return solve_sliding_puzzle(env.board)
    if "Crosswords" in task:
        return [
            f"{row} {column} {env.solution[row][column]}"
            for row, line in enumerate(env.board)
            for column, cell in enumerate(line)
            if cell == "_"
        ]
    raise AssertionError(task)


def solve_sudoku(board: list[list[int]]) -> list[str]:
    """The one filling of a 4 x 4 board, by trying all rows."""
    rows = [
        [p for p in itertools.permutations((1, 2, 3, 4)) if all(given in (0, own) for given, own in zip(line, p, strict=True))]
        for line in board
    ]
    for grid in itertools.product(*rows):
        columns_fit = all(len({line[c] for line in grid}) == 4 for c in range(4))
        boxes = [{grid[r + i][c + j] for i in (0, 1) for j in (0, 1)} for r in (0, 2) for c in (0, 2)]
        if columns_fit and all(len(box) == 4 for box in boxes):
            return [f"{r + 1} {c + 1} {grid[r][c]}" for r in range(4) for c in range(4) if board[r][c] == 0]
    raise AssertionError("no solution")


def solve_sliding_puzzle(board: list[list[int | None]]) -> list[str]:
    """Breadth-first search over the 2 x 2 board; the named tile direction is found by what GEM's board does, not assumed."""
    goal = ((1, 2), (3, None))
    start = tuple(map(tuple, board))
    moves = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
    queue, seen = deque([(start, [])]), {start}
    while queue:
        state, path = queue.popleft()
        if state == goal:
            return path
        row, column = next((r, c) for r in range(2) for c in range(2) if state[r][c] is None)
        for name, (down, right) in moves.items():
            r, c = row + down, column + right
            if 0 <= r < 2 and 0 <= c < 2:
                grid = [list(line) for line in state]
                grid[row][column], grid[r][c] = grid[r][c], None
                after = tuple(map(tuple, grid))
                if after not in seen:
                    seen.add(after)
                    queue.append((after, [*path, name]))
    return []
