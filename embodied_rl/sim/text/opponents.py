"""Opponents in a text game: random moves, the user's own function, or a model behind an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, require_known
from embodied_rl.registry import load_target

_MOVE = re.compile(r"\[([^\[\]\n]{1,40})\]")
_OFFERS = re.compile(r"(?:available|valid|legal)[^\n:]*:([^\n]*)", re.IGNORECASE)
_NOT_MOVES = re.compile(r"game|player.*", re.IGNORECASE)
_TRIES, _WAIT_S = 4, 1.0


Player = Callable[[str], str]
"""An opponent in one episode: from the observation's text to its action."""


def make_opponent(kind: str, options: Mapping[str, Any]) -> Callable[[int], Player]:
    """Function from an episode's seed to an opponent of the given kind.

    Args:
        kind: random, scripted or openai.
        options: scripted: ``target``, ``package.module:function`` from the observation's text to an action. openai: ``base_url``,
            ``model``, and ``api_key_env``, ``temperature``, ``max_tokens``, ``timeout_s``.

    Raises UserError: an unknown or missing kind or option.
    """
    known: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # (needed options, others)
        "random": ((), ()),
        "scripted": (("target",), ()),
        "openai": (("base_url", "model"), ("api_key_env", "temperature", "max_tokens", "timeout_s")),
    }
    require_known(kind, known, f"opponent='{kind}' is not a choice.")
    needed, others = known[kind]
    for name in options:
        require_known(name, (*needed, *others), f"opponent={kind} does not take '{name}'.")
    for name in needed:
        if not options.get(name):
            raise UserError(f"opponent={kind} needs opponent_options.{name}.")
    if kind == "random":
        return lambda seed: partial(random_move, random=np.random.default_rng([seed, 1]))
    play = OpenAIPlayer(**options).act if kind == "openai" else load_target(options["target"])
    return lambda seed: lambda observation: str(play(observation))


def offered_moves(observation: str) -> list[str]:
    """Moves in brackets that the end of an observation offers (``Available Moves: '[0]', '[1]'``); else everything in brackets."""
    offers = _OFFERS.findall(observation)
    found = _MOVE.findall(offers[-1]) if offers else []
    found = found or [move for move in _MOVE.findall(observation) if not _NOT_MOVES.fullmatch(move)]
    return [f"[{move}]" for move in dict.fromkeys(found)]


def random_move(observation: str, random: np.random.Generator) -> str:
    """One of the offered moves, uniformly; the empty text if none is offered."""
    moves = offered_moves(observation)
    return moves[int(random.integers(len(moves)))] if moves else ""


class OpenAIPlayer:
    """Plays with a model behind a server with OpenAI's chat completions."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        temperature: float = 1.0,
        max_tokens: int = 256,
        timeout_s: float = 60.0,
    ) -> None:
        """`api_key_env`: environment variable with the key; if it is unset, no key is sent."""
        if not base_url.startswith(("http://", "https://")):
            raise UserError(f"opponent_options.base_url must begin with http:// or https://, got '{base_url}'.")
        self._url, self._key, self._timeout_s = f"{base_url.rstrip('/')}/chat/completions", os.environ.get(api_key_env), timeout_s
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}

    def act(self, observation: str) -> str:
        """Next action. Raises ConnectionError if several attempts get no answer; the episode then has no result."""
        body = json.dumps({**self._body, "messages": [{"role": "user", "content": observation}]}).encode()
        headers = {"Content-Type": "application/json"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"})
        reason = ""
        for attempt in range(_TRIES):
            try:
                with urllib.request.urlopen(urllib.request.Request(self._url, body, headers), timeout=self._timeout_s) as response:
                    return str(json.load(response)["choices"][0]["message"]["content"] or "")
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {error.read(300).decode('utf-8', 'replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            time.sleep(_WAIT_S * 2**attempt if attempt + 1 < _TRIES else 0.0)
        raise ConnectionError(f"The opponent at {self._url} does not answer: {reason}")
