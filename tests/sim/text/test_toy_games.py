"""Gymnasium's toy games in words against gymnasium itself, seed by seed and action by action."""

from __future__ import annotations

import re

import gymnasium
import numpy as np
import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.text import toy_games
from embodied_rl.types import StepBuffers


def told(task: str, text: str) -> object:
    """What gymnasium would have given for an observation in words."""
    if task == "Blackjack-v1":
        found = re.fullmatch(r"Your cards: [\d ]+; (\d+) in all, (a|no) usable ace\.\nThe dealer shows (\d+)\.", text)
        assert found is not None
        return int(found[1]), int(found[3]), int(found[2] == "a")
    lines = text.splitlines()
    if task != "Taxi-v4":
        (place,) = [(row, line.index("P")) for row, line in enumerate(lines) if "P" in line]
        return place[0] * len(lines[0]) + place[1]
    (row, column) = next((number, line.index("T") // 2) for number, line in enumerate(lines[:-1]) if "T" in line)
    found = re.fullmatch(r"The passenger is (at ([RGYB])|in the taxi) and wants to go to ([RGYB])\.", lines[-1])
    assert found is not None
    return ((row * 5 + column) * 5 + ("RGYB".index(found[2]) if found[2] else 4)) * 4 + "RGYB".index(found[3])


@pytest.mark.parametrize("task", toy_games.tasks())
def test_it_is_gymnasiums_game(task: str) -> None:
    theirs, ours = gymnasium.make(task), toy_games.make(1, task)
    out, words = StepBuffers.allocate(ours.spec, 1), toy_games.WORDS[task]
    for seed in range(6):
        observation, _ = theirs.reset(seed=seed)
        ours.reset([0], [seed], out)
        actions = np.random.default_rng(seed).integers(len(words), size=60)
        for number, action in enumerate(actions):
            assert told(task, str(out.observation["text"][0])) == observation
            observation, reward, terminated, _, _ = theirs.step(int(action))
            ours.step([0], [f" {words[action].upper()} "], out)
            assert (out.reward[0], out.terminated[0]) == (reward, terminated)
            assert out.truncated[0] == (not terminated and number + 1 == toy_games.LIMITS[task])
            if terminated or out.truncated[0]:
                break


def test_success_is_the_games_own() -> None:
    lake = toy_games.make(1, "FrozenLake-v1", is_slippery=False)
    out = StepBuffers.allocate(lake.spec, 1)
    lake.reset([0], [1], out)
    for word in ("down", "down", "right", "right", "nowhere", "down", "right"):  # the known way of the 4 x 4 map
        lake.step([0], [word], out)
        assert out.info[0]["valid"] == (word != "nowhere")
    assert (out.success[0], out.terminated[0], out.reward[0]) == (True, True, 1.0)
    # A careful hand wins about four games of ten.
    cards = toy_games.make(1, "Blackjack-v1")
    out, won = StepBuffers.allocate(cards.spec, 1), 0
    for seed in range(300):
        cards.reset([0], [seed], out)
        while True:
            cards.step([0], [toy_games.player(str(out.observation["text"][0]))], out)
            if out.terminated[0]:
                break
        won += bool(out.success[0])
        assert out.success[0] == (out.reward[0] > 0)
    assert 0.33 < won / 300 < 0.5


def test_the_simulator_is_well_behaved() -> None:
    report = check_sim(SimFactory("embodied_rl.sim.text.toy_games:make", "Taxi-v4"), num_envs=2, steps=40)
    assert report.ok, str(report)
    for task in toy_games.tasks():
        sim = toy_games.make(1, task)
        sim.reset([0], [0], StepBuffers.allocate(sim.spec, 1))
        assert max(sim.render(0).shape[:2]) >= 200


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="Taxi-v4"):
        toy_games.make(1, "Taxi-v3")
    with pytest.raises(UserError, match=r"'Blackjack-v1' cannot be made with .*unexpected keyword argument 'slippery'"):
        SimFactory("embodied_rl.sim.text.toy_games:make", "Blackjack-v1", {"slippery": True}).make(1)
