"""Text tasks and dialogues as pictures and pages: of a trained agent's checkpoint, and of captured sessions."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from PIL import Image

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.commands import render
from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.evaluate import evaluate_checkpoint
from embodied_rl.media.dialogues import film_captured
from embodied_rl.media.episodes import FilmedEpisode, Moment
from embodied_rl.media.overlays import Film, Overlays, annotate, parse_overlays
from embodied_rl.serving.agents.sessions import CapturedSession, CapturedTurn
from embodied_rl.sim.instrumented import PAPER, text_panel
from embodied_rl.train import train
from embodied_rl.types import ActionSpec
from embodied_rl.video import border_width
from tests.agents.samples import tiny_folder


class Page(HTMLParser):
    """Texts by tag, and the titles of tokens (their log-probabilities)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.scores: list[float] = []
        """Without those of the legend."""
        self._in_episode = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_episode |= tag == "section"
        if self._in_episode:
            self.scores += [float(value) for name, value in attrs if name == "title" and value is not None]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# ---- panels -----------------------------------------------------------------------------------------------------------


def inked(picture: np.ndarray) -> np.ndarray:
    """[H, W] bool: what is not paper."""
    return (picture != np.array(PAPER, np.uint8)).any(-1)


def test_a_panel_shows_the_text_and_its_end() -> None:
    empty, short, board = text_panel("", 128), text_panel("go left", 128), text_panel("P..\n.H.\n..G", 128)
    assert empty.shape == (128, 128, 3)
    assert not inked(empty).any()
    assert inked(short).any()
    assert (text_panel("go left", 128) == short).all()
    # Letters of three lines stand in three rows of ink, one below the other.
    rows = np.flatnonzero(np.diff(inked(board).any(1).astype(int)) == 1)
    assert len(rows) >= 3
    # The end of a long text is shown, whatever stands before it.
    long, other = ("\n".join([*(f"{first} {n}" for n in range(200)), "the end"]) for first in ("line", "LINE"))
    same, different = text_panel(long, 96), text_panel(long.replace("the end", "THE END"), 96)
    assert (same != different).any()
    assert (text_panel("x\n" + long, 96) == same).all()
    assert (text_panel(other, 96) != same).any()


def test_an_answer_and_its_score_are_written_below() -> None:
    episode = FilmedEpisode(seed=3, task="t")
    frame = np.full((256, 256, 3), 200, np.uint8)
    overlays = Overlays(parse_overlays("answer"), ActionSpec.text())
    silent = annotate(frame, episode, Moment(1, 0.0, 0.0, False), overlays)
    assert (silent == frame).all()
    said = annotate(frame, episode, Moment(1, 0.0, 0.0, False, answer="left", log_prob=-1.25), overlays)
    surer = annotate(frame, episode, Moment(1, 0.0, 0.0, False, answer="left", log_prob=-0.25), overlays)
    np.testing.assert_array_equal(said[:256], frame)
    assert len(said) > 256, "the band is at the bottom"
    assert (said != surer).any()


# ---- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asking") / "run"
    overrides = [
        "sim=search_qa",
        "policy=language",
        "algorithm=grpo",
        "generation=tokens_torch",
        "logger=quiet",
        "policy.tiny={hidden_size: 32, num_heads: 1, num_key_value_heads: 1, num_layers: 1, intermediate_size: 32}",
        "agent={strategy: memory, chat: false, answer: word, max_new_tokens: 4}",
        "algorithm.groups={group_size: 2, groups_per_step: 1}",
        "sim.num_slots=2",
        "sim.num_workers=1",
        "sim.kwargs.max_turns=2",
        "evaluation.num_episodes=1",
        "evaluation.every_steps=null",
        "stop_at_success=null",
        "total_steps=1",
        "video.enabled=no",
        f"run_dir={folder}",
    ]
    return train(load_train_config(overrides))


def test_a_language_checkpoint_becomes_films_and_a_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.main([f"checkpoint={run}", "num_episodes=2", "size=128", "format=gif"])
    film, page = [Path(line.rpartition(" (")[0]) for line in capsys.readouterr().out.splitlines() if line.endswith("MB)")]
    assert (film.suffix, page.suffix) == (".gif", ".html")
    with Image.open(film) as image:
        assert image.size[0] == 2 * (128 + 2 * border_width(128)) + 4
        assert image.size[1] > 128, "what is written stands outside the pictures"
        assert getattr(image, "n_frames", 1) == 3  # before the first of two turns, and after each
    read = Page(page)
    told = "".join(read.texts)
    assert "Episode 2: cut off, return 0, 2 turns, seed 1073741825" in told
    assert "Question: Which ocean does the Amazon flow into?" in told
    assert told.count("turn 2 · log-probability") == 2
    assert 4 <= len(read.scores) <= 16
    assert all(score < 0 for score in read.scores)
    # The same episodes as evaluation plays: their number of turns and returns are those of the page.
    played = evaluate_checkpoint(load_checkpoint(run), 2).episodes
    for number, episode in enumerate(played, 1):
        assert f"Episode {number}: cut off, return {episode.episode_return:g}, {episode.length} turns, seed {episode.seed}" in told


# ---- captured sessions ------------------------------------------------------------------------------------------------


def captured(folder: Path, name: str, reward: float, words: Any) -> CapturedSession:
    prompt, said = words.encode("up"), words.encode("left")
    score = np.full(len(said), -0.5, np.float32)
    turn = CapturedTurn(
        completion_id="c",
        parent=None,
        prompt_ids=prompt,
        sampled_ids=said,
        log_prob=score,
        sampling_log_prob=score,
        version=np.zeros(len(said), np.int64),
        finish_reason="stop",
    )
    session = CapturedSession(session=name, turns=(turn,), reward=reward, ended_by="client", num_rewards=1)
    session.save(folder)
    return session


def test_captured_sessions_become_films_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from embodied_rl.policies.chat_tokenizer import ChatTokenizer

    model = tiny_folder(tmp_path / "model")
    words = ChatTokenizer.read(model)
    for number, reward in enumerate((0.0, 1.0, 0.5)):
        captured(tmp_path / "captured", f"s{number}", reward, words)
    where = [f"recording={tmp_path / 'captured'}", f"output={tmp_path / 'out'}", "size=64", "format=mp4"]
    render.main([*where, f"tokenizer={model}", "select=best:2"])
    film, page = [Path(line.rpartition(" (")[0]) for line in capsys.readouterr().out.splitlines() if line.endswith("MB)")]
    assert film == tmp_path / "out" / "captured_best.mp4"
    read = Page(page)
    told = "".join(read.texts)
    assert "success, return 0.5, 1 turns" in told.partition("success, return 1")[0], "a page shows lower returns first"
    assert "return 0," not in told
    assert set(read.scores) == {-0.5}
    assert "upleftturn 1" in told, "what was asked, what was answered"
    with pytest.raises(SystemExit):
        render.main(where)
    assert "tokenizer=models/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        render.main([*where, f"tokenizer={model}", "sim=cartpole"])
    assert "sim=cartpole cannot be used with captured sessions" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no captured session with an answer"):
        film_captured(tmp_path / "none", str(model), tmp_path / "out", Film())
