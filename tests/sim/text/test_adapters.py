"""Text environments: the ones that run anywhere are played; those whose packages or data are missing say what to fetch."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_rl.config import group_names, load_sim_config
from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError
from embodied_rl.sim.check import check_sim
from embodied_rl.sim.factory import SimFactory
from embodied_rl.sim.seeding import HELD_OUT_START
from embodied_rl.sim.text import alfworld, appworld, opponents, search_qa, webshop
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn
from embodied_rl.types import StepBuffers

ADAPTERS = ("textarena", "textworld", "alfworld", "webshop", "search_qa", "appworld")


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


needs_textarena = pytest.mark.skipif(not installed("textarena"), reason="textarena is not installed: pip install embodied-rl[textarena]")
needs_textworld = pytest.mark.skipif(not installed("textworld"), reason="textworld is not installed: pip install embodied-rl[textworld]")


def started(sim: Any, *seeds: int) -> StepBuffers:
    out = StepBuffers.allocate(sim.spec, len(seeds))
    sim.reset(list(range(len(seeds))), list(seeds), out)
    return out


def say(sim: Any, out: StepBuffers, *actions: str) -> list[str]:
    sim.step(list(range(len(actions))), list(actions), out)
    return [str(text) for text in out.observation["text"]]


# ---- search -----------------------------------------------------------------------------------------------------------


def test_search_qa_by_hand() -> None:
    sim = search_qa.make(2)
    out = started(sim, HELD_OUT_START + 6, HELD_OUT_START)
    assert "Where was Marie Curie born?" in out.observation["text"][0]
    shown = say(sim, out, "I look it up. <search>Marie Curie</search>", "no tag at all")
    assert "[1] Marie Curie: Marie Curie was born in Warsaw" in shown[0]
    assert "No <search> and no <answer>" in shown[1]
    assert [info["kind"] for info in out.info if info] == ["search", "invalid"]
    say(sim, out, "<answer>The Warsaw!</answer>", "<ANSWER>pacific ocean</ANSWER>")
    assert out.reward.tolist() == [1.0, 0.0]
    assert out.success.tolist() == out.reward.astype(bool).tolist()
    assert out.terminated.all()
    # "pacific ocean" and "atlantic ocean" have one of two words in common: precision and recall 1/2.
    assert [info["f1"] for info in out.info if info] == [1.0, 0.5]


def test_search_qa_counts_words_and_turns() -> None:
    sim = search_qa.make(1, reward="f1", max_turns=2)
    out = started(sim, HELD_OUT_START)
    say(sim, out, "<search>ocean</search>")
    assert not out.truncated[0]
    say(sim, out, "hm")
    assert out.truncated[0]
    assert search_qa.word_f1("in the great city of Warsaw", "Warsaw") == pytest.approx(2 * (1 / 5) * 1 / (1 / 5 + 1))
    assert search_qa.normalised("The  Atlantic-Ocean, a sea.") == "atlanticocean sea"
    assert (search_qa.word_f1("", ""), search_qa.word_f1("a", "x")) == (1.0, 0.0)


def test_every_sample_question_can_be_answered_from_the_corpus() -> None:
    """The words of each question find a text that holds one of its answers."""
    sim = search_qa.make(1)
    for number in range(24):
        out = started(sim, HELD_OUT_START + number)
        question = str(out.observation["text"][0]).partition("Question: ")[2]
        (shown,) = say(sim, out, f"<search>{question}</search>")
        game: Any = sim._games[0]
        assert any(answer.lower() in shown.lower() or answer == "by a dance" for answer in game.question.answers) or "one" in shown, (
            question
        )


def test_search_qa_takes_files_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "cat.txt").write_text("The cat is called Tom.")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "What is the cat called?", "golden_answers": ["Tom"]}) + "\n")
    sim = search_qa.make(1, "mine", corpus=str(tmp_path / "texts"), questions=str(tmp_path / "q.jsonl"))
    out = started(sim, 3)
    assert "called Tom" in say(sim, out, "<search>cat</search>")[0]
    say(sim, out, "<answer>tom</answer>")
    assert out.success[0]
    (tmp_path / "bad.jsonl").write_text('{"question": "x"}')
    with pytest.raises(UserError, match="line 1"):
        search_qa.make(1, "mine", corpus=str(tmp_path / "texts"), questions=str(tmp_path / "bad.jsonl"))
    with pytest.raises(MissingAssetsError, match="does not exist"):
        search_qa.make(1, "mine", corpus=str(tmp_path / "nowhere"), questions=str(tmp_path / "q.jsonl"))
    with pytest.raises(MissingAssetsError, match="PeterJinGo"):
        search_qa.make(1, "nq")


def test_search_qa_is_well_behaved() -> None:
    report = check_sim(SimFactory("embodied_rl.sim.text.search_qa:make", "sample"), num_envs=3, steps=40, seed=0)
    assert report.ok, str(report)


# ---- what adapters share ----------------------------------------------------------------------------------------------


class Counting(TextGame):
    """Counts to a number drawn from the process's generators."""

    def __init__(self) -> None:
        self.goal = self.count = 0

    def reset(self, seed: int) -> str:
        self.goal, self.count = int(np.random.randint(2, 6)), 0  # noqa: NPY002  (what it draws from is the subject)
        return str(self.goal)

    def step(self, action: str) -> TextTurn:
        self.count += int(action)
        return TextTurn(
            str(self.count), 0.5, terminated=self.count >= self.goal, success=self.count == self.goal, info={"count": self.count}
        )

    def sample_action(self, random: np.random.Generator) -> str:
        return str(int(random.integers(3)))

    def close(self) -> None:
        self.goal = -1


def counting(num_envs: int, max_turns: int | None = 4) -> TextSim:
    return TextSim("Counting", Counting, num_envs, max_turns=max_turns)


def test_games_have_random_numbers_of_their_own_and_limits() -> None:
    sim = counting(2)
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    goals = started(sim, 11, 12).observation["text"].tolist()
    out = started(sim, 12, 11)
    assert out.observation["text"].tolist() == goals[::-1]
    assert np.random.get_state()[1].tolist() == state, "the process's generator was touched"  # noqa: NPY002
    for _ in range(3):
        say(sim, out, "0", "9")
    assert (out.truncated.tolist(), out.terminated.tolist()) == ([False, False], [False, True])
    say(sim, out, "0", "0")
    assert (out.truncated.tolist(), out.terminated.tolist()) == ([True, False], [False, True])
    assert out.reward.tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match="max_turns must be >= 1"):
        counting(1, 0)


# ---- opponents --------------------------------------------------------------------------------------------------------


def test_offered_moves() -> None:
    board = "[GAME] Board\nAvailable Moves: '[0]', '[2]'\n[Player 1] [2]\nAvailable Moves: '[5]', '[7, 1]'"
    assert opponents.offered_moves(board) == ["[5]", "[7, 1]"]
    assert opponents.offered_moves("[GAME] say [roll] or [hold] [Player 0]") == ["[roll]", "[hold]"]
    assert opponents.random_move("nothing", np.random.default_rng(0)) == ""
    drawn = {opponents.random_move(board, np.random.default_rng(seed)) for seed in range(20)}
    assert drawn == {"[5]", "[7, 1]"}


def echo(observation: str) -> str:
    return f"[{len(observation)}]"


def test_opponents_by_kind() -> None:
    assert opponents.make_opponent("scripted", {"target": "tests.sim.text.test_adapters:echo"})(0)("four") == "[4]"
    random = opponents.make_opponent("random", {})
    one, other = random(3), random(3)
    text = "Available moves: [1] [2] [3] [4]"
    assert [one(text) for _ in range(8)] == [other(text) for _ in range(8)]
    for kind, options, message in (
        ("randon", {}, "Did you mean 'random'"),
        ("random", {"model": "x"}, "does not take 'model'"),
        ("scripted", {}, "needs opponent_options.target"),
        ("openai", {"model": "x"}, "needs opponent_options.base_url"),
        ("openai", {"model": "x", "base_url": "file:///etc"}, "http://"),
    ):
        with pytest.raises(UserError, match=message):
            opponents.make_opponent(kind, options)


@contextmanager
def chat_server(statuses: list[int]) -> Iterator[tuple[str, list[Any]]]:
    """Answers with these statuses in turn, the last one for ever, and 0 with no HTTP; what was asked is kept."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.headers.get("Authorization"), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            status = statuses[min(len(asked), len(statuses)) - 1]
            if status == 0:
                self.wfile.write(b"no answer of HTTP\r\n")
                self.close_connection = True
                return
            body = json.dumps({"choices": [{"message": {"content": "[3]"}}]} if status == 200 else {"error": "busy"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_model_behind_a_server_as_opponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "_WAIT_S", 0.01)
    monkeypatch.setenv("MY_KEY", "sk-1")
    with chat_server([503, 0, 200]) as (url, asked):
        player = opponents.make_opponent("openai", {"base_url": url, "model": "m", "api_key_env": "MY_KEY"})(0)
        assert player("your move") == "[3]"
    assert [key for key, _ in asked] == ["Bearer sk-1"] * 3
    assert asked[2][1]["messages"] == [{"role": "user", "content": "your move"}]
    with chat_server([400]) as (url, asked), pytest.raises(ConnectionError, match="status 400"):
        opponents.make_opponent("openai", {"base_url": url, "model": "m"})(0)("x")
    assert len(asked) == 1, "what is wrong is not asked again"


# ---- packages ---------------------------------------------------------------------------------------------------------


@needs_textarena
@pytest.mark.parametrize("task", ["TicTacToe-v0", "GuessTheNumber-v0", "KuhnPoker-v0", "ConnectFour-v0"])
def test_textarena_is_well_behaved(task: str) -> None:
    report = check_sim(SimFactory("embodied_rl.sim.text.textarena:make", task), num_envs=3, steps=30, seed=0)
    # Board games open alike whatever the seed, and a secret number does not show: cards do.
    assert set(report.failed) <= (set() if task == "KuhnPoker-v0" else {"seeds"}), str(report)


@needs_textarena
def test_tic_tac_toe_against_a_script() -> None:
    from embodied_rl.sim.text import textarena

    options = {"target": "tests.sim.text.test_adapters:last_free"}
    sim = textarena.make(1, opponent="scripted", opponent_options=options, seat=0)
    out = started(sim, 1)
    assert "You are Player 0" in out.observation["text"][0]
    for move in ("[0]", "[1]"):
        say(sim, out, move)
        assert not out.terminated[0]
    say(sim, out, "I win with [2].")  # the other one has 8 and 7
    assert (out.terminated[0], out.reward[0], out.success[0]) == (True, 1.0, True)
    out = started(sim, 1)
    for move in ("[0]", "[1]", "[3]"):
        say(sim, out, move)  # 8, 7, 6: the other one wins
    assert (out.terminated[0], out.reward[0], out.success[0]) == (True, -1.0, False)


def last_free(observation: str) -> str:
    return opponents.offered_moves(observation)[-1]


@needs_textarena
def test_textarena_says_what_is_missing() -> None:
    from embodied_rl.sim.text import textarena

    assert "TicTacToe-v0" in textarena.tasks()
    with pytest.raises(UserError, match=r"no game 'TicTacTo-v0'. Did you mean 'TicTacToe-v0'"):
        textarena.make(1, "TicTacTo-v0")
    with pytest.raises(UserError, match="does not take 'sise'"):
        textarena.make(1, "TicTacToe-v0", sise=3)
    with pytest.raises(UserError, match="seat must be"):
        textarena.make(1, seat=2)


@needs_textworld
def test_textworld_is_solved_by_its_walkthrough() -> None:
    from embodied_rl.sim.text import textworld

    sim = textworld.make(1, num_rooms=2, num_objects=4, quest_length=3)
    for seed in (7, HELD_OUT_START + 1):
        out = started(sim, seed)
        game: Any = sim._games[0]
        walkthrough = game._env._game.metadata["walkthrough"]
        assert len(walkthrough) == 3
        assert "You are in the" in out.observation["text"][0]
        total = 0.0
        for command in walkthrough:
            assert command in out.observation["text"][0], "a command that solves it is offered"
            say(sim, out, command)
            total += float(out.reward[0])
        assert (out.terminated[0], out.success[0], total) == (True, True, 1.0)
    out = started(sim, 7)
    assert "That is not possible." in say(sim, out, "fly away")[0]


@needs_textworld
def test_textworld_is_well_behaved() -> None:
    kwargs = {"num_rooms": 2, "num_objects": 3, "quest_length": 2, "num_games": 2}
    report = check_sim(SimFactory("embodied_rl.sim.text.textworld:make", "TextWorld", kwargs), num_envs=2, steps=20, seed=0)
    assert report.ok, str(report)


@pytest.mark.skipif(installed("textarena") or installed("textworld"), reason="the packages are here")
def test_packages_that_are_missing_are_named() -> None:
    for name in ("textarena", "textworld"):
        with pytest.raises(MissingExtraError, match=rf"embodied-rl\[{name}\]"):
            SimFactory(f"embodied_rl.sim.text.{name}:make", None).make(1)


def test_data_that_is_missing_is_named_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(MissingAssetsError, match="alfworld-download"):
        alfworld.make(1, data=str(tmp_path))
    with pytest.raises(UserError, match="Did you mean 'valid_seen'"):
        alfworld.make(1, split="valid_sen", data=str(tmp_path))
    if not installed("web_agent_site"):
        with pytest.raises(MissingAssetsError, match="git clone https://github"):
            webshop.make(1)
    if not installed("appworld"):
        with pytest.raises(MissingExtraError, match=r"embodied-rl\[appworld\]"):
            appworld.make(1)
    with pytest.raises(UserError, match="Did you mean 'train'"):
        appworld.make(1, "tran")


def test_alfworld_chooses_its_games(tmp_path: Path) -> None:
    """Only solvable games of the wanted kind, without the ones that ALFWorld leaves out."""
    kinds = {"a": ("pick_two_obj_and_place", True), "b": ("pick_two_obj_and_place", False), "movable_c": ("pick_two_obj_and_place", True)}
    kinds["d"] = ("look_at_obj_in_light", True)
    for name, (kind, solvable) in kinds.items():
        folder = tmp_path / "json_2.1.1" / "train" / name
        folder.mkdir(parents=True)
        (folder / "traj_data.json").write_text(json.dumps({"task_type": kind}))
        (folder / "game.tw-pddl").write_text(json.dumps({"solvable": solvable}))
    assert [path.parent.name for path in alfworld.game_files(tmp_path, "train", "all")] == ["a", "d"]
    assert [path.parent.name for path in alfworld.game_files(tmp_path, "train", "look_at_obj_in_light")] == ["d"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("print(1)", "print(1)"),
        ("Let me see:\n```python\nx = 1\nprint(x)\n```\nDone.", "x = 1\nprint(x)\n"),
        ("```print(2)```", "print(2)"),
    ],
)
def test_code_of_an_answer(answer: str, code: str) -> None:
    assert appworld.code_of(answer) == code


@pytest.mark.parametrize("name", ADAPTERS)
def test_configurations_name_adapters_that_take_their_arguments(name: str) -> None:
    import inspect

    from embodied_rl.registry import load_target

    assert name in group_names("sim")
    config = load_sim_config(name)
    taken = inspect.signature(load_target(config.target)).parameters
    assert set(config.kwargs) <= set(taken)
