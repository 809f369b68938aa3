"""FrozenLake and Sokoban against rules worked out by hand, and their scripted players against a search of another kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from embodied_rl.config import load_sim_config
from embodied_rl.errors import UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.sim.text import frozenlake, sokoban
from embodied_rl.sim.text.grid_games import MOVES, GridSim
from embodied_rl.types import StepBuffers

GAMES = {"frozenlake": frozenlake, "sokoban": sokoban}


def play(sim: GridSim, seed: int, choose: Callable[[str], str]) -> tuple[list[str], StepBuffers]:
    """Texts seen in one episode, and the buffers as they are at its end."""
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [seed], out)
    seen = [str(out.observation["text"][0])]
    while not (out.terminated[0] or out.truncated[0]):
        sim.step([0], [choose(seen[-1])], out)
        seen.append(str(out.observation["text"][0]))
    return seen, out


@pytest.mark.parametrize("name", sorted(GAMES))
def test_the_simulator_is_well_behaved(name: str) -> None:
    config = load_sim_config(name)
    report = check_sim(SimFactory(config.target, config.task, config.kwargs), num_envs=2, steps=40)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", sorted(GAMES))
def test_scripted_players_always_win(name: str) -> None:
    module: ModuleType = GAMES[name]
    sim = module.make(1)
    boards = set()
    for seed in range(40):
        seen, out = play(sim, seed, module.player)
        boards.add(seen[0])
        assert out.success[0]
        assert out.terminated[0]
        assert out.reward[0] == 1.0
    assert len(boards) == 40


# ---- FrozenLake -----------------------------------------------------------------------------------------------------


def lake(board: str, **options: object) -> frozenlake.FrozenLake:
    """A lake that looks like this."""
    letters = np.array([list(row) for row in board.split()])

    def find(letter: str) -> tuple[int, int]:
        ((row,), (column,)) = np.nonzero(letters == letter)
        return int(row), int(column)

    game = frozenlake.FrozenLake(len(letters), **options)  # type: ignore[arg-type]
    game.begin(0)
    game.set_state({"game": {**game.state()["game"], "holes": letters == "H", "player": find("P"), "goal": find("G")}})
    assert game.text() == board
    return game


LAKE = "P.H.\n....\nH..G\n...."


def test_frozenlake_moves_ends_and_borders() -> None:
    game = lake(LAKE)
    assert game.play("left").valid  # against the border: nothing moves, and it is a move
    assert game.text() == LAKE
    assert not game.play("north").valid
    assert game.text() == LAKE
    outcomes = [game.play(word) for word in ("down", "right", "right", "down", "right")]
    assert [outcome.reward for outcome in outcomes] == [0, 0, 0, 0, 1]
    assert [outcome.terminated for outcome in outcomes] == [False] * 4 + [True]
    drowned = lake(LAKE).play("right"), (falling := lake(LAKE)).play("down"), falling.play("down")
    punished = lake(LAKE, hole_reward=-0.5)
    assert [punished.play(word).reward for word in ("down", "down")] == [0.0, -0.5]
    assert [(o.terminated, o.success, o.reward) for o in drowned] == [(False, False, 0.0), (False, False, 0.0), (True, False, 0.0)]


def test_shortest_paths_are_those_of_an_exhaustive_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        holes = rng.random((4, 4)) < 0.3
        holes[0, 0] = holes[3, 2] = False
        path = frozenlake.shortest_path(holes, (0, 0), (3, 2))
        # Distances by relaxing every edge as often as there are cells (Bellman-Ford).
        distance = np.full((6, 6), np.inf)
        distance[1, 1] = 0
        for _ in range(16):
            around = np.minimum.reduce([distance[:-2, 1:-1], distance[2:, 1:-1], distance[1:-1, :-2], distance[1:-1, 2:]])
            distance[1:-1, 1:-1] = np.where(holes, np.inf, np.minimum(distance[1:-1, 1:-1], around + 1))
        assert (np.inf if path is None else len(path)) == distance[4, 3]


def test_slippery_ice_turns_two_moves_of_three_aside() -> None:
    board = ".....\n.....\n..P..\n.....\nG...."
    ends = []
    for seed in range(600):
        game = lake(board, slippery=True)
        game._random = np.random.default_rng(seed)
        game.play("up")
        ends.append(game.text().replace("\n", "").index("P"))
    shares = {place: ends.count(place) / len(ends) for place in set(ends)}
    assert set(shares) == {7, 11, 13}  # up, left, right of the middle; never down
    assert all(abs(share - 1 / 3) < 0.06 for share in shares.values())  # three standard deviations


def test_hints_say_what_stands_on_the_board() -> None:
    game = lake(LAKE)
    assert game.hint() == "up # down . left # right . goal down 2 right 3"
    for word in ("down", "right", "right"):
        game.play(word)
    assert game.hint() == "up H down . left . right . goal down 1 right 1"
    sim = frozenlake.make(1, hints=True)
    seen, out = play(sim, 3, frozenlake.player)
    assert out.success[0]
    assert seen[0].splitlines()[:4] == play(frozenlake.make(1), 3, frozenlake.player)[0][0].splitlines()
    board = warehouse("######\n#P...#\n#.XX.#\n#.O.O#\n#....#\n######")
    assert board.hint() == "up ## down .. left ## right .. box down 1 right 1 goal down 1 right 0"
    assert play(sokoban.make(1, hints=True), 5, sokoban.player)[1].success[0]


def test_a_few_maps_come_back_whatever_the_seed() -> None:
    sim = frozenlake.make(1, num_maps=3)
    assert len({play(sim, seed, frozenlake.player)[0][0] for seed in range(20)}) == 3


def test_limit_and_words() -> None:
    sim = frozenlake.make(1, size=(4, 8))
    assert sim.spec.max_episode_steps == 32
    seen, out = play(sim, 3, lambda text: "wait")
    assert len(seen) == 33
    assert out.truncated[0]
    assert out.info[0] == {"valid": False}
    sides = {len(play(sim, seed, lambda text: "wait")[0][0].splitlines()) for seed in range(40)}
    assert sides == {4, 5, 6, 7, 8}
    out = StepBuffers.allocate(sim.spec, 1)
    sim.step([0], [" UP \n"], out)
    assert out.info[0] == {"valid": True}


@pytest.mark.parametrize(
    ("module", "options", "told"),
    [
        (frozenlake, {"size": 3}, "size must be between 4 and 8"),
        (frozenlake, {"size": 4.5}, "size must be between 4 and 8, or a pair of these, got 4.5"),
        (frozenlake, {"size": [4, 5, 6]}, "size must be between 4 and 8"),
        (sokoban, {"size": []}, "size must be between 5 and 10"),
        (frozenlake, {"hole_share": 0.9}, "hole_share must be between 0 and 0.5, got 0.9"),
        (frozenlake, {"task": "Lake"}, "Known: FrozenLake"),
        (sokoban, {"num_boxes": 4}, "num_boxes must be between 1 and 3, got 4"),
        (sokoban, {"size": (5, 12)}, "size must be between 5 and 10"),
        (sokoban, {"num_pulls": 0}, "num_pulls >= 1"),
    ],
)
def test_wrong_options_are_one_line(module: ModuleType, options: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        module.make(1, **options)


# ---- Sokoban --------------------------------------------------------------------------------------------------------


def warehouse(board: str) -> sokoban.Sokoban:
    level, (player_at, boxes) = sokoban.read(board)
    game = sokoban.Sokoban()
    game.set_state({"game": {"walls": level.walls, "goals": sorted(level.goals), "player": player_at, "boxes": sorted(boxes)}})
    assert game.text() == board
    return game


def test_sokoban_pushes_walls_and_goals() -> None:
    board = "######\n#P...#\n#.XX.#\n#.O.O#\n#....#\n######"
    game = warehouse(board)
    assert game.play("up").valid
    assert game.text() == board  # a wall
    game.play("down")
    game.play("right")
    assert game.text() == board.replace("P", ".", 1).replace("#.XX.#", "#PXX.#")  # two boxes in a row do not move
    outcomes = [game.play(word) for word in ("up", "right", "down")]
    assert game.text() == "######\n#....#\n#.PX.#\n#.V.O#\n#....#\n######"
    assert [outcome.reward for outcome in outcomes] == [0, 0, 0]
    outcomes = [game.play(word) for word in ("right", "up", "right", "right", "down")]
    assert game.text() == "######\n#....#\n#...P#\n#.V.V#\n#....#\n######"
    assert [(o.reward, o.terminated, o.success) for o in outcomes] == [(0, False, False)] * 4 + [(1, True, True)]


def test_box_rewards_are_given_and_taken_back() -> None:
    game = sokoban.Sokoban(box_reward=0.25)
    level, (player_at, boxes) = sokoban.read("#######\n#PXO..#\n#..X.O#\n#.....#\n#######")
    game.set_state({"game": {"walls": level.walls, "goals": sorted(level.goals), "player": player_at, "boxes": sorted(boxes)}})
    assert [game.play("right").reward for _ in range(2)] == [0.25, -0.25]


def test_solutions_are_as_short_as_an_exhaustive_search_finds() -> None:
    game = sokoban.Sokoban(size=5, num_boxes=1, wall_share=0.0, num_pulls=2)
    for seed in range(6):
        game.begin(seed)
        level, start = sokoban.read(game.text())
        found = sokoban.solve(level, start)
        assert found is not None

        def wins(words: tuple[str, ...], level: sokoban.Level = level, position: sokoban.Position = start) -> bool:
            for word in words:
                position = sokoban.push(level, position, MOVES[word]) or position
            return position[1] == level.goals

        shortest = (
            next(length for length in itertools.count(1) if any(wins(words) for words in itertools.product(MOVES, repeat=length)))
            if len(found) <= 5
            else len(found)
        )
        assert len(found) == shortest


def test_a_box_in_a_corner_is_hopeless_and_the_player_still_answers() -> None:
    board = "######\n#X..O#\n#..P.#\n#....#\n######"
    assert sokoban.solve(*sokoban.read(board)) is None
    assert sokoban.player(board) == "up"


def test_levels_of_every_number_of_boxes_can_be_solved() -> None:
    for boxes, size in ((1, 6), (2, 7), (3, 7)):
        game = sokoban.Sokoban(size=size, num_boxes=boxes, num_pulls=4 * boxes)
        for seed in range(4):
            game.begin(seed)
            text = game.text()
            assert text.count("X") + text.count("V") == boxes
            assert text.count("V") == 0
            assert sokoban.solve(*sokoban.read(text)) is not None


def test_pictures_show_the_board() -> None:
    sim = frozenlake.make(1, render_size=80)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [5], out)
    frame = sim.render(0)
    assert frame.shape == (80, 80, 3)
    rows = str(out.observation["text"][0]).splitlines()
    for row, column in itertools.product(range(4), range(4)):
        corner = frame[20 * row + 3, 20 * column + 3]
        np.testing.assert_array_equal(corner, frozenlake.COLOURS[rows[row][column]])


def test_snapshots_of_another_game_are_refused() -> None:
    out = StepBuffers.allocate(frozenlake.make(1).spec, 1)
    (lake_sim := frozenlake.make(1)).reset([0], [0], out)
    with pytest.raises(SnapshotError, match="FrozenLake"):
        sokoban.make(1).restore(0, lake_sim.snapshot(0))
