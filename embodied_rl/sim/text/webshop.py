"""WebShop (Yao et al. 2022, arXiv:2207.01206): find and buy what an instruction describes, in a shop of a million products.

WebShop is not a package: its repository contains the shop (``web_agent_site``), its products and a search engine, all in one process.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from embodied_rl.errors import MissingAssetsError, UserError, require_known
from embodied_rl.sim.seeding import chosen
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn

_FETCH = (
    "git clone https://github.com/princeton-nlp/WebShop && cd WebShop && ./setup.sh -d small (or -d all), then put the folder on "
    "PYTHONPATH. It needs Java 11, pyserini and faiss"
)
HELD_OUT_GOALS = 500
"""Number of first goals that form WebShop's own test set; training uses the others."""


def tasks() -> list[str]:
    return ["WebShop"]


def make(
    num_envs: int,
    task: str = "WebShop",
    observation_mode: str = "text",
    num_products: int | None = 1000,
    human_goals: bool = True,
    show_actions: bool = True,
    max_turns: int = 15,
    observation_bytes: int = 2**17,
) -> TextSim:
    """`num_envs` customers of one shop in this process.

    Args:
        observation_mode: text or text_rich.
        num_products: size of the shop, as its set-up prepared it; None: all.
        human_goals: instructions written by people; False: generated ones.
        show_actions: list what can be clicked.

    Raises MissingAssetsError: WebShop, its products or its search index are missing; UserError: an unknown task or mode.
    """
    require_known(task, tasks(), f"Task '{task}' is not known.")
    if observation_mode not in ("text", "text_rich"):
        raise UserError(f"WebShop: observation_mode must be text or text_rich, got '{observation_mode}'.")
    shop = Shop(observation_mode=observation_mode, num_products=num_products, human_goals=human_goals)
    return TextSim(
        task, lambda: ShopGame(shop.customer(), show_actions), num_envs, max_turns=max_turns, observation_bytes=observation_bytes
    )


class Shop:
    """Products, goals and search engine, read once for all customers of a process."""

    def __init__(self, **options: Any) -> None:
        """Raises MissingAssetsError if ``WebAgentTextEnv`` cannot be imported."""
        try:
            for name in ("engine", "goal"):
                # They print with rich, whose styles draw from the generator of the prices, in a process's first shop only.
                vars(importlib.import_module(f"web_agent_site.engine.{name}"))["print"] = lambda *words: None
            self._cls = importlib.import_module("web_agent_site.envs.web_agent_text_env").WebAgentTextEnv
        except (ImportError, OSError) as error:
            raise MissingAssetsError(f"WebShop is not here ({type(error).__name__}: {error}). Fetch it: {_FETCH}.", _FETCH) from error
        self._options, self._server = options, None
        self._num_customers = 0

    def customer(self) -> Any:
        """A ``WebAgentTextEnv`` with its own sessions. Raises MissingAssetsError if products or index cannot be read."""
        try:
            env = self._cls(**self._options, server=self._server, session_prefix=f"{self._num_customers}-")
        except (OSError, KeyError, AssertionError) as error:
            raise MissingAssetsError(f"WebShop's products or index cannot be read ({error!r}). Fetch them: {_FETCH}.", _FETCH) from error
        self._server = env.server
        self._num_customers += 1
        return env


class ShopGame(TextGame):
    """One customer."""

    def __init__(self, env: Any, show_actions: bool) -> None:
        self._env, self._show_actions = env, show_actions

    def reset(self, seed: int) -> str:
        """Begin an episode: held-out seeds use the first 500 goals in order, others one of the rest."""
        goals = len(self._env.server.goals)
        border = min(HELD_OUT_GOALS, goals // 2)
        observation, _ = self._env.reset(session=chosen(seed, range(border, goals), range(max(border, 1))))
        return self._text(observation)

    def step(self, action: str) -> TextTurn:
        """See `TextGame.step`: ``search[words]`` or ``click[name]``; the reward is WebShop's score of what was bought, 0 to 1."""
        observation, reward, done, info = self._env.step(action.strip())
        return TextTurn(self._text(observation), float(reward), terminated=bool(done), success=float(reward) >= 1.0, info=dict(info or {}))

    def sample_action(self, random: np.random.Generator) -> str:
        """Something that can be clicked, or a search for the instruction."""
        available = self._env.get_available_actions()
        if available["has_search_bar"]:
            return f"search[{self._env.get_instruction_text()}]"
        clickables = [name for name in available["clickables"] if name != "search"]
        return f"click[{clickables[int(random.integers(len(clickables)))]}]"

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: str) -> str:
        if not self._show_actions:
            return observation
        available = self._env.get_available_actions()
        actions = (["search[<words>]"] if available["has_search_bar"] else []) + [f"click[{name}]" for name in available["clickables"]]
        return f"{observation}\nPossible actions: {', '.join(actions)}"
