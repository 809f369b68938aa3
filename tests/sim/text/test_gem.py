"""GEM's environments behind their adapter: the same texts and rewards as GEM's own, and episodes that follow from their seed alone."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state
from embodied_rl.sim.text import gem
from embodied_rl.types import ActionSpec, StepBuffers, VariableSpec
from tests.sim.text.moves import answers
from tests.sim.text.play import episode, go_on, outcome

ROOT = Path(__file__).resolve().parents[3]

SLOW_TO_MAKE = ("game:Sokoban-v0-hard", "game:Sokoban-v0-random", "rg:number_sequence")
"""Seconds to minutes for one problem, in GEM's and reasoning-gym's own search for a solvable one."""

SAMPLE = [
    "game:FifteenPuzzle-v0-easy",
    "game:Game2048-v0-random",
    "game:GuessTheNumber-v0-random",
    "game:Mastermind-v0-hard",
    "game:Minesweeper-v0-easy",
    "game:Sudoku-v0-easy",
    "game:TowerofHanoi-v0-easy",
    "rg:basic_arithmetic",
    "rg:chain_sum",
    "rg:graph_color",
    "rg:isomorphic_strings",
    "rg:ransom_note",
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        gem.tasks()
    except MissingExtraError as error:
        pytest.skip(str(error))


def in_a_new_process(wanted: dict[str, Any], hash_seed: str = "0") -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.text.play"],
        input=json.dumps({"episodes": [], "restored": [], **wanted}),
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def own(task: str) -> Any:
    import gem as library

    return library.make(task)


# ---- what the adapter hands on is GEM's own ----


def test_spec() -> None:
    spec = gem.make("game:GuessTheNumber-v0-easy", 1, observation_bytes=5000).spec
    assert spec.observation == {"text": VariableSpec("text", 5000)}
    assert spec.action == ActionSpec.text(2**14)
    assert (spec.max_episode_steps, spec.reports_success, spec.can_render, spec.snapshots) == (4, True, False, "exact")
    assert gem.make("game:GuessTheNumber-v0-random", 1).spec.max_episode_steps is None, "drawn anew for each episode"
    assert gem.make("game:GuessTheNumber-v0-easy", 1, max_turns=9).spec.max_episode_steps == 9
    reasoning = gem.make("rg:chain_sum", 1).spec
    assert (reasoning.max_episode_steps, reasoning.snapshots) == (1, "replay")


def test_tasks_without_the_word_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gem, "word_list_installed", lambda: False)
    found = gem.tasks()
    assert len([task for task in found if task.startswith("game:")]) == 26
    assert len([task for task in found if task.startswith("rg:")]) == 102 + gem.has_sat_solver()
    assert len(found) == 128 + gem.has_sat_solver()
    monkeypatch.setattr(gem, "word_list_installed", lambda: True)
    assert set(gem.tasks()) - set(found) == {
        f"game:{name}-v0-{level}" for name in ("Wordle", "Hangman", "WordSearch") for level in ("easy", "hard", "random")
    }


@pytest.mark.parametrize("task", ["game:GuessTheNumber-v0-hard", "game:Minesweeper-v0-easy", "game:Game2048-v0-easy", "rg:chain_sum"])
def test_texts_and_rewards_are_gems(task: str) -> None:
    """GEM's environment alone, seeded as GEM seeds; a neighbour and earlier episodes change nothing of ours."""
    sim, reference = gem.make(task, 2), own(task)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [3, 4], out)
    sim.step([0], [sim.sample_action(0, 0)], out)
    sim.reset([1], [11], out)
    question, info = reference.reset(seed=11)
    shown = f"{question}\n" if not question.endswith("\n") else question
    assert out.observation["text"][1] == shown + info.get("suffix", "")
    state = random.getstate(), np.random.get_state()  # noqa: NPY002
    for t in range(60):
        action = sim.sample_action(1, t)
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        reply, reward, terminated, truncated, info = reference.step(action)
        state = random.getstate(), np.random.get_state()  # noqa: NPY002
        sim.reset([0], [100 + t], out)
        sim.step([1, 0], [action, "\\boxed{1}"], out)
        assert out.observation["text"][1] == reply + "\n" + info.get("suffix", "")
        assert out.reward[1] == np.float32(reward)
        assert (out.terminated[1], out.truncated[1]) == (terminated, truncated and not terminated)
        if terminated:
            break
    else:
        pytest.fail("the game never ended")


def test_process_wide_generators_are_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    sim = gem.make("game:Game2048-v0-easy", 2)
    episode(sim, 0, 3)
    sim.sample_action(1, 0)
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002


@pytest.mark.parametrize("history", ["observations", "conversation"])
def test_history_is_what_gems_own_wrapper_makes_of_it(history: str) -> None:
    from gem.wrappers.observation_wrapper import ObservationWrapper

    sim = gem.make("game:Mastermind-v0-hard", 1, history=history)
    reference = ObservationWrapper(own("game:Mastermind-v0-hard"), history == "conversation", include_chat_template=False)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [2], out)
    assert out.observation["text"][0] == reference.reset(seed=2)[0]
    for t in range(8):
        action = sim.sample_action(0, t) + ("\n" if t % 2 else "")
        sim.step([0], [action], out)
        assert out.observation["text"][0] == reference.step(action)[0]
    before = len(out.observation["text"][0])
    sim.reset([0], [2], out)
    assert len(out.observation["text"][0]) < before, "the history begins anew with each episode"


# ---- success is a won game, and nothing else is ----


WON = [
    "GuessTheNumber-v0-hard",
    "Mastermind-v0-hard",
    "TowerofHanoi-v0-easy",
    "Sudoku-v0-easy",
    "FifteenPuzzle-v0-easy",
    "Crosswords-v0-easy",
]


@pytest.mark.parametrize("name", WON)
def test_a_won_game_is_a_success_with_return_one(name: str) -> None:
    task = f"game:{name}"
    sim = gem.make(task, 1, max_turns=40)
    out = StepBuffers.allocate(sim.spec, 1)
    for seed in range(20):
        sim.reset([0], [seed], out)
        moves = answers(task, sim._games[0].env)
        if moves:  # half of the 2 x 2 puzzles have no solution, and GEM gives them all the same
            break
    total = 0.0
    for t, move in enumerate(moves):
        sim.step([0], [f"I think \\boxed{{{move}}}"], out)
        total += float(out.reward[0])
        assert bool(out.success[0]) == bool(out.terminated[0]) == (t == len(moves) - 1), (t, move, out.observation["text"][0])
    assert total == pytest.approx(1.0, abs=1e-6)
    assert not out.truncated[0]
    won_in = len(moves)
    sim.reset([0], [seed], out)
    for _ in range(won_in - 1):  # the same game, one move short of it, then given up
        sim.step([0], [f"\\boxed{{{moves[_]}}}"], out)
    sim.step([0], ["no answer"], out)
    assert out.reward[0] == np.float32(-0.1)
    assert out.terminated[0]
    assert not out.success[0]


def test_a_turn_limit_is_the_games_own_end_and_no_success() -> None:
    """GEM pays for a near miss at the last turn: 1 - |guess - number| / (max - min)."""
    sim = gem.make("game:GuessTheNumber-v0-easy", 1)
    out = StepBuffers.allocate(sim.spec, 1)
    sim.reset([0], [0], out)
    number = sim._games[0].env.game_number
    wrong = [guess for guess in range(1, 11) if guess != number][:4]
    for guess in wrong:
        assert not out.terminated[0]
        sim.step([0], [f"\\boxed{{{guess}}}"], out)
    assert (out.terminated[0], out.truncated[0], out.success[0]) == (True, False, False)
    assert out.reward[0] == np.float32(1 - abs(wrong[-1] - number) / 9)


def test_reasoning_scores_the_answer() -> None:
    """The sum is computed here from the question's words."""
    sim = gem.make("rg:chain_sum", 1)
    out = StepBuffers.allocate(sim.spec, 1)
    questions = set()
    for seed in range(8):
        sim.reset([0], [seed], out)
        question = str(out.observation["text"][0])
        questions.add(question)
        terms = re.search(r"\d+(?: [-+] \d+)+", question)
        assert terms is not None, question
        result = sum(int(sign + number) for sign, number in re.findall(r"([-+]?) ?(\d+)", terms.group()))
        sim.step([0], [f"\\boxed{{{result + seed % 2}}}"], out)
        assert bool(out.success[0]) == (out.reward[0] == 1.0) == (seed % 2 == 0), (question, result)
        assert (out.terminated[0], out.truncated[0]) == (True, False)
    assert len(questions) > 1


def test_success_can_be_asked_for_less() -> None:
    half = gem.make("game:TowerofHanoi-v0-easy", 1, max_turns=1, success_return=1 / 3)
    out = StepBuffers.allocate(half.spec, 1)
    half.reset([0], [0], out)
    half.step([0], ["\\boxed{A C}"], out)  # one disk of three lies on C when the turns are over
    assert out.reward[0] == np.float32(1 / 3)
    assert out.success[0]


# ---- an episode follows from its seed and actions ----


def test_reasoning_does_not_count_the_episodes_before() -> None:
    """GEM's adapter changes the data set after as many episodes as it has questions, here three."""
    sim = gem.make("rg:chain_sum", 1, size=3)
    first = episode(sim, 0, 1)
    for seed in range(7):
        episode(sim, 0, seed)
        assert episode(sim, 0, 1) == first


@pytest.mark.parametrize("task", SAMPLE)
def test_neighbours_order_and_history_do_not_matter(task: str) -> None:
    sim = gem.make(task, 2)
    alone = episode(sim, 0, 21)
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([1, 0], [21, 22], out)
    rows: list[Any] = [str(out.observation["text"][1])]
    for t in range(200):
        sim.step([0], [sim.sample_action(0, t)], out)
        sim.reset([0], [t], out)
        sim.step([1], [sim.sample_action(1, 1000 + t)], out)
        rows.append(outcome(out, 1))
        if out.terminated[1]:
            break
    assert rows == alone
    assert any(episode(sim, 0, seed)[0] != alone[0] for seed in range(30, 40)) or "TowerofHanoi" in task or "2048" in task


def test_new_processes_play_the_same_episodes() -> None:
    """Two new processes with the same hash seed agree on every task; with different ones, on those that `spec` promises it for."""
    wanted = {"episodes": [[task, seed] for task in SAMPLE for seed in (3, 4)]}
    first, second, other = in_a_new_process(wanted), in_a_new_process(wanted), in_a_new_process(wanted, "1")
    assert first == second
    differ = {task for (task, _), a, b in zip(wanted["episodes"], first["episodes"], other["episodes"], strict=True) if a != b}
    assert differ <= gem.HASH_ORDERED
    assert first["heavy"] == [], "a simulator's process needs none of these"
    assert first["logging"] == [logging.WARNING, 0], "as Python's own"


def test_replay_is_promised_only_where_the_hash_seed_cannot_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert gem.make("rg:ransom_note", 1).spec.snapshots == "none"
    assert gem.make("rg:chain_sum", 1).spec.snapshots == "replay"
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert gem.make("rg:ransom_note", 1).spec.snapshots == "replay"


@pytest.mark.slow
def test_every_task_plays_the_same_in_a_new_process() -> None:
    tasks = [task for task in gem.tasks() if task not in SLOW_TO_MAKE]
    wanted = {"episodes": [[task, 4] for task in tasks]}
    first, other = in_a_new_process(wanted), in_a_new_process({"episodes": wanted["episodes"][::-1]}, "1")
    pairs = zip(tasks, first["episodes"], other["episodes"][::-1], strict=True)
    assert {task for task, a, b in pairs if a != b} <= gem.HASH_ORDERED
    assert first["printed"] == "", "a worker's output is for the user"
    assert not [task for task, played in zip(tasks, first["episodes"], strict=True) if len(played) < 2 or not played[0].strip()]


# ---- snapshots ----


def check_continuation(task: str, new_process: bool) -> None:
    """Random moves from a snapshot taken in mid-game: in the same slot, in another and in a new process."""
    sim = gem.make(task, 2)
    out = StepBuffers.allocate(sim.spec, 2)
    for seed in range(10, 40):
        sim.reset([0], [seed], out)
        if not go_on(sim, 0, out, limit=2)[-1][2]:
            break
    else:
        pytest.skip("every game ended within two moves")
    data = sim.snapshot(0)
    assert sim.snapshot(0) == data, "saving changes nothing"
    uninterrupted = go_on(sim, 0, out, 2)
    sim.restore(0, data)
    assert go_on(sim, 0, out, 2) == uninterrupted
    sim.reset([1], [99], out)
    go_on(sim, 1, out, limit=3)
    sim.restore(1, data)
    sim.reset([0], [98], out)
    assert go_on(sim, 1, out, 2) == uninterrupted
    if new_process:
        assert in_a_new_process({"restored": [[task, 2, data.hex()]]}, "7")["restored"] == [uninterrupted]


GAMES = [
    f"game:{name}"
    for name in ("FifteenPuzzle-v0-hard", "Game2048-v0-random", "Mastermind-v0-hard", "Minesweeper-v0-hard", "Sudoku-v0-easy")
]


@pytest.mark.parametrize("task", GAMES)
def test_continues_from_a_snapshot_bit_by_bit(task: str) -> None:
    check_continuation(task, new_process=task == "game:Game2048-v0-random")


@pytest.mark.slow
def test_every_game_continues_from_a_snapshot_bit_by_bit() -> None:
    games = [task for task in gem.tasks() if task.startswith("game:") and task not in SLOW_TO_MAKE]
    assert len(games) >= 24
    for task in games:
        check_continuation(task, new_process=True)


def test_snapshots_of_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guess, hanoi = gem.make("game:GuessTheNumber-v0-easy", 1), gem.make("game:TowerofHanoi-v0-easy", 1)
    out = StepBuffers.allocate(guess.spec, 1)
    guess.reset([0], [0], out)
    with pytest.raises(
        SnapshotError, match=r"of task 'game:GuessTheNumber-v0-easy' and cannot be restored into task 'game:TowerofHanoi-v0-easy'"
    ):
        hanoi.restore(0, guess.snapshot(0))
    data = guess.snapshot(0)
    for name in ("step", "word_list", "__class__"):  # a request may send any bytes
        state = decode_state(data)
        with pytest.raises(SnapshotError, match=f"sets '{name}', which is not part of this game's state"):
            guess.restore(0, encode_state({**state, "env": {**state["env"], name: 1}}))
    monkeypatch.setattr(gem, "version", lambda name: "9.9")
    with pytest.raises(SnapshotError, match=r"of GEM 0\.1\.\d+ and cannot be restored into GEM 9\.9"):
        guess.restore(0, data)
    with pytest.raises(SnapshotError, match="restored from its seed"):
        gem.make("rg:chain_sum", 1).snapshot(0)


# ---- mistakes ----


def test_errors_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"'game:GuessTheNumber-v0-esy' is not known. Did you mean 'game:GuessTheNumber-v0-easy'"):
        gem.make("game:GuessTheNumber-v0-esy", 1)
    with pytest.raises(UserError, match=r"does not take 'max_turn'. Did you mean 'max_turns'"):
        gem.make("game:GuessTheNumber-v0-easy", 1, max_turn=3)
    with pytest.raises(UserError, match=r"history='chat' is not a choice"):
        gem.make("game:GuessTheNumber-v0-easy", 1, history="chat")
    with pytest.raises(UserError, match=r"cannot be made: GEM 0.1.0 computes with its number of rows"):
        gem.make("game:FifteenPuzzle-v0-random", 1)
    with pytest.raises(UserError, match="no picture"):
        gem.make("rg:chain_sum", 1).render(0)
    monkeypatch.setattr(gem, "word_list_installed", lambda: False)
    with pytest.raises(MissingAssetsError, match=r"python -m nltk.downloader words"):
        gem.make("game:Wordle-v0-easy", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingAssetsError, match=r"'axon-rl/GSM-8k'.*pip install datasets"):
        gem.make("math:GSM8K", 1)


def test_one_task_alone_needs_the_solver_that_is_compiled() -> None:
    """Without pycosat everything else imports and plays."""
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "pycosat":
            raise ModuleNotFoundError("No module named 'pycosat'", name=name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "pycosat" else found(name, package)
sys.meta_path.insert(0, Hidden())
from embodied_rl.sim.text import gem
from tests.sim.text.moves import answers
from tests.sim.text.play import episode
print(len([task for task in gem.tasks() if task.startswith("rg:")]), len(episode(gem.make("rg:knights_knaves", 1), 0, 3)))
gem.make("rg:zebra_puzzles", 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert done.stdout.split() == ["102", "2"], done.stderr[-2000:]
    assert "MissingAssetsError" in done.stderr
    assert "pip install pycosat" in done.stderr


@pytest.mark.parametrize("task", sorted(gem.BROKEN))
def test_what_is_called_broken_is(task: str) -> None:
    """A version of GEM that mends one of these is noticed here."""
    with pytest.raises(Exception):  # noqa: B017
        own(task).reset(seed=0)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    monkeypatch.setitem(sys.modules, "gem.envs", None)
    with pytest.raises(MissingExtraError, match=r'pip install "embodied-rl\[text\]"'):
        gem.make("rg:chain_sum", 1)


def test_through_the_factory() -> None:
    sim = SimFactory("embodied_rl.sim.text.gem:make", "game:Sudoku-v0-easy", {"history": "conversation", "max_turns": 3}).make(2)
    assert sim.spec.max_episode_steps == 3
    out = StepBuffers.allocate(sim.spec, 2)
    sim.reset([0, 1], [1, 2], out)
    actions = np.array(["\\boxed{1 1 1}", "\\boxed{5 5 5}"], dtype=object)
    sim.step([0, 1], actions, out)
    assert "out of bounds" in out.observation["text"][1]
    assert "\\boxed{5 5 5}" in out.observation["text"][1]
    assert "\\boxed{5 5 5}" not in out.observation["text"][0]
