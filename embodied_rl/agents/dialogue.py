"""An agent's episodes as a page to read: prompts, answers token by token, and results; failures first."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from embodied_rl.agents.parsing import InvalidAction
from embodied_rl.agents.turns import AgentEpisode, Turn
from embodied_rl.files import write_atomic

_STYLE = (
    ":root{color-scheme:light dark;--line:#ccc;--box:#f4f4f4;--soft:#666;--ink:#222;--page:#fff;--bad:#b00020}"
    "@media (prefers-color-scheme:dark){:root{--line:#2c3442;--box:#191e28;--soft:#9aa4b6;--ink:#e6e9f0;--page:#11141b;--bad:#ff7b72}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:var(--ink);background:var(--page)}"
    "section{border:1px solid var(--line);border-radius:8px;padding:.5rem 1rem;margin:1rem 0}h2{font-size:1rem;margin:.3rem 0}"
    "pre{background:var(--box);padding:.4rem .6rem;border-radius:4px;overflow-x:auto;margin:.4rem 0;white-space:pre-wrap}"
    ".token{border-radius:3px;padding:0 1px;white-space:pre-wrap}.note,summary{color:var(--soft);font-size:.85rem}.bad{color:var(--bad)}"
    "summary{cursor:pointer}"
)
_LEGEND = (0.01, 0.1, 0.5, 0.9, 1.0)
Decode = Callable[[Sequence[int]], str]


def write_dialogues(path: Path, episodes: Sequence[AgentEpisode], decode: Decode, title: str) -> Path:
    """Write one self-contained HTML page: episodes without success first, and lower returns before higher ones.

    `decode`: function from tokens to text, special ones included.

    Raises UserError: the file cannot be written.
    """
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    ordered = sorted(episodes, key=lambda episode: (episode.success, episode.game_return))
    failures = sum(not episode.success for episode in ordered)
    counted = f"{len(ordered)} episodes: {failures} without success first, then {len(ordered) - failures} with success."
    parts = [f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{html.escape(title)}</h1>', f"<p>{counted}</p>", _legend()]
    parts += [_episode(number, episode, decode) for number, episode in enumerate(ordered, 1)]
    # Simulators and tools may send half of a surrogate pair.
    return write_atomic(path, "\n".join([*parts, "</body></html>\n"]).encode("utf-8", "replace"))


def _legend() -> str:
    shown = " ".join(_token(f" {share:.0%} ", math.log(share)) for share in _LEGEND)
    return (
        f'<p class="note">How likely each token of an answer was: {shown}; its log-probability is shown under the pointer. '
        "“Prompt” opens what the model read, token for token.</p>"
    )


def _episode(number: int, episode: AgentEpisode, decode: Decode) -> str:
    outcome = "success" if episode.success else "cut off" if episode.truncated else "no success"
    head = f"Episode {number}: {outcome}, return {episode.game_return:g}, {len(episode.turns)} turns, seed {episode.seed}"
    turns, known = [], np.zeros(0, np.int64)
    for index, turn in enumerate(episode.turns, 1):
        turns.append(_turn(index, turn, decode, known))
        known = np.concatenate([turn.prompt_ids, turn.token_ids])
    final = f'<p class="note">at the end</p><pre>{html.escape(str(episode.final_observation["text"]))}</pre>'
    colour = "" if episode.success else ' class="bad"'
    return f"<section><h2{colour}>{head}</h2>{''.join(turns)}{final}</section>"


def _turn(index: int, turn: Turn, decode: Decode, known: np.ndarray) -> str:
    """A turn in HTML; of a prompt that continues the previous turn (`known`, that turn's tokens) only the new part."""
    tokens = "".join(_token(decode([int(token)]), float(score)) for token, score in zip(turn.token_ids, turn.log_prob, strict=True))
    score = float(turn.log_prob.sum(dtype="float64"))
    notes = [f"turn {index}", f"log-probability {score:.2f}", f"reward {turn.reward:g}"]
    if isinstance(turn.parsed, InvalidAction):
        notes.append(f'<span class="bad">no action: {turn.parsed.reason}</span>')
    if turn.dropped:
        notes.append(f"{turn.dropped} earlier turns were left out")
    continues = len(known) and np.array_equal(turn.prompt_ids[: len(known)], known)
    new = turn.prompt_ids[len(known) :] if continues else turn.prompt_ids
    what = f"Prompt: {len(turn.prompt_ids):,} tokens" + (f", the last {len(new):,} after all of the turn before" if continues else "")
    prompt = f"<details><summary>{what}</summary><pre>{html.escape(decode([int(token) for token in new]))}</pre></details>"
    return f'<pre>{html.escape(turn.observation)}</pre>{prompt}<p>{tokens}<br><span class="note">{" · ".join(notes)}</span></p>'


def _token(text: str, log_prob: float) -> str:
    strength = 0.15 + 0.6 * math.exp(min(log_prob, 0.0))
    return f'<span class="token" style="background:rgba(66,133,244,{strength:.2f})" title="{log_prob:.3f}">{html.escape(text)}</span>'
