"""An agent's episodes as a page to read: what it saw, what it answered token by token, and what came of it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from embodied_rl.agents.parsing import InvalidAction
from embodied_rl.agents.turns import AgentEpisode, Turn
from embodied_rl.files import write_atomic

_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "section{border:1px solid #ccc;border-radius:8px;padding:.5rem 1rem;margin:1rem 0}"
    "h2{font-size:1rem;margin:.3rem 0}pre{background:#f4f4f4;padding:.4rem .6rem;border-radius:4px;overflow-x:auto;margin:.4rem 0}"
    ".token{border-radius:3px;padding:0 1px;white-space:pre-wrap}.told{color:#666;font-size:.85rem}.bad{color:#b00020}"
)


def write_dialogues(path: Path, episodes: Sequence[AgentEpisode], decode: Callable[[Sequence[int]], str], title: str) -> Path:
    """Write one HTML page, complete in itself.

    Args:
        decode: tokens to text, special ones included.
        title: of the page.

    Raises:
        UserError: the file cannot be written.
    """
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>'
    ]
    parts.append(f"<body><h1>{html.escape(title)}</h1>")
    parts.append('<p class="told">The paler a token, the less likely it was; its log-probability is shown under the pointer.</p>')
    parts += [_episode(number, episode, decode) for number, episode in enumerate(episodes, 1)]
    write_atomic(path, "\n".join([*parts, "</body></html>\n"]))
    return path


def _episode(number: int, episode: AgentEpisode, decode: Callable[[Sequence[int]], str]) -> str:
    outcome = "success" if episode.success else "cut off" if episode.truncated else "no success"
    head = f"Episode {number}: {outcome}, return {episode.game_return:g}, {len(episode.turns)} turns, seed {episode.seed}"
    turns = "".join(_turn(index, turn, decode) for index, turn in enumerate(episode.turns, 1))
    final = f"<pre>{html.escape(str(episode.final_observation['text']))}</pre>"
    return f"<section><h2>{head}</h2>{turns}{final}</section>"


def _turn(index: int, turn: Turn, decode: Callable[[Sequence[int]], str]) -> str:
    tokens = "".join(_token(decode([int(token)]), float(score)) for token, score in zip(turn.token_ids, turn.log_prob, strict=True))
    score = float(turn.log_prob.sum(dtype="float64"))
    told = [f"turn {index}", f"log-probability {score:.2f}", f"reward {turn.reward:g}"]
    if isinstance(turn.parsed, InvalidAction):
        told.append(f'<span class="bad">no action: {turn.parsed.reason}</span>')
    if turn.dropped is not None:
        told.append(f"{turn.dropped.num_turns} earlier turns were left out")
    return f'<pre>{html.escape(turn.observation)}</pre><p>{tokens}<br><span class="told">{" · ".join(told)}</span></p>'


def _token(text: str, log_prob: float) -> str:
    strength = 0.15 + 0.6 * math.exp(min(log_prob, 0.0))
    return f'<span class="token" style="background:rgba(66,133,244,{strength:.2f})" title="{log_prob:.3f}">{html.escape(text)}</span>'
