"""The page of dialogues, read back by an HTML parser."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from embodied_rl.agents.dialogue import write_dialogues
from embodied_rl.agents.parsing import InvalidAction, ValidAction
from embodied_rl.agents.turns import Turn
from tests.agents.samples import make_episode


class Reader(HTMLParser):
    """Texts by tag, and the titles of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.titles: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self._open.append(tag)
        self.titles += [value for name, value in attrs if name == "title" and value is not None]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((self._open[-1], data))


def test_a_page_tells_observations_answers_scores_and_outcomes(tmp_path: Path) -> None:
    ids = np.array([60, 98, 62])  # "<b>": text of a model must not become markup
    scores, version = np.array([-0.5, -1.25, 0.0], np.float32), np.zeros(3, np.int64)
    said = Turn("a <wall> & P", np.array([1]), ids, scores, version, "<b>", ValidAction("<b>"), 1.0, 1.0, 2)
    wrong = Turn("board\ud83d", np.array([1]), ids[:1], scores[:1], version[:1], "<", InvalidAction("unknown_action", "<"), -0.1, 0.0)
    episode = make_episode([wrong, said], seed=77, success=True)
    path = write_dialogues(tmp_path / "d.html", [episode], lambda tokens: "".join(map(chr, tokens)), "Lake & more")
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.titles[:5] == ["-4.605", "-2.303", "-0.693", "-0.105", "0.000"], "the legend: logarithms of its probabilities"
    assert reader.titles[5:] == ["-0.500", "-0.500", "-1.250", "0.000"]
    assert [text for tag, text in reader.texts if tag == "pre"] == ["board?", "\x01", "a <wall> & P", "\x01", "end"]
    assert [text for tag, text in reader.texts if tag == "summary"] == ["Prompt: 1 tokens"] * 2
    told = "".join(text for _, text in reader.texts)
    assert "Episode 1: success, return 1, 2 turns, seed 77" in told
    assert "log-probability -1.75 · reward 1 · 2 earlier turns were left out" in told
    assert "log-probability -0.50 · reward -0.1" in told
    assert "no action: unknown_action" in told
    assert ("h1", "Lake & more") in reader.texts


def test_failures_come_first_and_prompts_that_go_on_are_written_once(tmp_path: Path) -> None:
    def spoke(observation: str, prompt: str, answer: str, reward: float) -> Turn:
        ids, prompt_ids = np.array([ord(letter) for letter in answer]), np.array([ord(letter) for letter in prompt])
        scores, version = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int64)
        return Turn(observation, prompt_ids, ids, scores, version, answer, ValidAction(answer), reward, reward)

    won = make_episode([spoke("good", "system: good", "up", 1.0)], seed=1, success=True)
    poor = make_episode([spoke("bad", "system: bad", "left", 0.25)], seed=2, success=False)
    turns = [spoke("one", "system: one", " up", -1.0), spoke("two", "system: one up. two", "up", 0.0)]
    worst = make_episode(turns, seed=3, success=False)
    path = write_dialogues(tmp_path / "d.html", [won, poor, worst], lambda tokens: "".join(map(chr, tokens)), "Lake")
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    heads = [text for tag, text in reader.texts if tag == "h2"]
    assert [head.rpartition(" ")[2] for head in heads] == ["3", "2", "1"], "seeds: the lowest return first, success last"
    assert ("p", "3 episodes: 2 without success first, then 1 with success.") in reader.texts
    prompts = [text for tag, text in reader.texts if tag == "pre"]
    assert prompts[:4] == ["one", "system: one", "two", ". two"], "what the second prompt repeats of the first turn is left out"
    told = [text for tag, text in reader.texts if tag == "summary"]
    assert told[:2] == ["Prompt: 11 tokens", "Prompt: 19 tokens, the last 5 after all of the turn before"]
