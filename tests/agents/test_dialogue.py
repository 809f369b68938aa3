"""The page of dialogues, read back by an HTML parser."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from embodied_rl.agents.dialogue import write_dialogues
from embodied_rl.agents.parsing import InvalidAction, ValidAction
from embodied_rl.agents.turns import Dropped, Turn
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
    said = Turn("a <wall> & P", np.array([1]), ids, scores, version, "<b>", ValidAction("<b>"), 1.0, 1.0, Dropped(2, 9))
    wrong = Turn("board", np.array([1]), ids[:1], scores[:1], version[:1], "<", InvalidAction("unknown_action", "<"), -0.1, 0.0)
    episode = make_episode([wrong, said], seed=77, success=True)
    path = write_dialogues(tmp_path / "d.html", [episode], lambda tokens: "".join(map(chr, tokens)), "Lake & more")
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.titles == ["-0.500", "-0.500", "-1.250", "0.000"]
    assert [text for tag, text in reader.texts if tag == "pre"] == ["board", "a <wall> & P", "end"]
    told = "".join(text for _, text in reader.texts)
    assert "Episode 1: success, return 1, 2 turns, seed 77" in told
    assert "log-probability -1.75 · reward 1 · 2 earlier turns were left out" in told
    assert "log-probability -0.50 · reward -0.1" in told
    assert "no action: unknown_action" in told
    assert ("h1", "Lake & more") in reader.texts
