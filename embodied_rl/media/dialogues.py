"""Dialogues to read and to watch: of a language agent's filmed episodes, and of sessions captured by the agent proxy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from embodied_rl.agents.dialogue import Decode, write_dialogues
from embodied_rl.agents.turns import AgentEpisode, episode_of
from embodied_rl.errors import UserError
from embodied_rl.media.episodes import FilmedEpisode, Moment
from embodied_rl.media.overlays import Film, Overlays, Pictures, Row, free_names, parse_overlays, write_videos
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.rollout.programs import episode_of_session
from embodied_rl.serving.agents.sessions import CapturedSession, read_captured
from embodied_rl.sim.instrumented import text_panel
from embodied_rl.types import ActionSpec, EpisodeSummary


def write_filmed_dialogues(base: Path, rows: Sequence[Row], decode: Sequence[Decode]) -> list[Path]:
    """Write one page for each row of filmed episodes with a language agent; `base` is its path without number and suffix.
    `decode`: function from tokens to text for each row. Raises UserError: a file cannot be written."""
    written = []
    for row, to_text in zip(rows, decode, strict=True):
        episodes = [_episode(episode) for episode in row.episodes if episode.spoken]
        if episodes:
            (path,) = free_names(base.with_name(f"{base.name}_dialogues"), ["html"])
            written.append(write_dialogues(path, episodes, to_text, f"{row.episodes[0].task}: {row.label}"))
    return written


def _episode(filmed: FilmedEpisode) -> AgentEpisode:
    finished = filmed.finished
    return episode_of(
        filmed.spoken,
        terminated=finished.terminated,
        truncated=not finished.terminated,
        success=finished.success_once,
        seed=filmed.seed,
        domain=filmed.task,
        final_text=filmed.final_text,
        greedy=False,
    )


# ---- captured sessions ----------------------------------------------------------------------------------------------


def is_captured(path: Path) -> bool:
    """Whether a folder contains sessions of an agent proxy rather than recorded episodes."""
    first = next(iter(sorted(path.glob("[!.]*.json"))), None) if path.is_dir() else None
    return first is not None and '"completion_id"' in first.read_text(encoding="utf-8", errors="replace")


def film_captured(folder: Path, tokenizer: str | None, output: Path, film: Film) -> list[Path]:
    """Show an agent proxy's sessions in a folder: videos with a frame per answer, and a page with every token.

    Args:
        tokenizer: folder of the served model, to turn tokens into text.
        film: settings; sessions are selected as episodes are.

    Raises UserError: no tokenizer, no session with an answer, or the files cannot be written.
    """
    if tokenizer is None:
        raise UserError(
            f"recording={folder} has captured sessions, which are tokens: give the folder of the served model, tokenizer=models/…."
        )
    words = ChatTokenizer.read(tokenizer)
    sessions = [session for session in read_captured(folder) if any(len(turn.sampled_ids) for turn in session.turns)]
    if not sessions:
        raise UserError(f"'{folder}' has no captured session with an answer.")
    summaries = [_summary(number, session) for number, session in enumerate(sessions)]
    selection = film.selection(len(sessions))
    numbers = selection.positions(film.seed) if selection.is_known_before else selection.ranked(summaries[: selection.among])
    episodes = [
        episode_of_session(
            sessions[number],
            words,
            reward=sessions[number].total_reward,
            success=summaries[number].success_once,
            seed=number,
            domain="captured",
        )
        for number in numbers
    ]
    filmed = [_filmed(sessions[number], episode, summaries[number], film.size) for number, episode in zip(numbers, episodes, strict=True)]
    overlays = Overlays(parse_overlays(film.overlay), ActionSpec.text())
    base = output / f"{folder.resolve().name}{'' if selection.kind == 'first' else '_' + selection.kind}"
    paths = write_videos(Pictures([Row("", filmed)], overlays, reports_success=True), base, film)
    (page,) = free_names(base.with_name(f"{base.name}_dialogues"), ["html"])
    to_text = partial(words.decode, skip_special_tokens=False)
    return [*paths, write_dialogues(page, episodes, to_text, f"{folder}: {len(episodes)} sessions")]


def _summary(number: int, session: CapturedSession) -> EpisodeSummary:
    reward, success = session.total_reward, session.total_reward > 0
    return EpisodeSummary(
        slot=0,
        index=number,
        seed=number,
        episode_return=reward,
        length=len(session.turns),
        success_once=success,
        success_at_end=success,
        terminated=True,
    )


def _filmed(session: CapturedSession, episode: AgentEpisode, summary: EpisodeSummary, size: int) -> FilmedEpisode:
    """A frame for each answer: the question, and the answer with its score below."""
    filmed = FilmedEpisode(seed=summary.seed, task=session.session, summary=summary)
    total = 0.0
    for step, turn in enumerate(episode.turns, 1):
        total += turn.reward
        filmed.frames.append(text_panel(f"{turn.observation}\n\n> {turn.answer.strip()}", size))
        filmed.moments.append(
            Moment(
                step=step,
                reward=turn.reward,
                episode_return=total,
                success=summary.success_once and step == len(episode.turns),
                answer=turn.answer,
                log_prob=float(turn.log_prob.sum(dtype=np.float64)),
            )
        )
    return filmed
