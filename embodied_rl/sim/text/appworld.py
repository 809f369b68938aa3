"""AppWorld (Trivedi et al. 2024, arXiv:2407.18901): tasks in nine simulated apps, done by writing Python that calls their interfaces."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from embodied_rl.errors import MissingAssetsError, from_extra, require_known
from embodied_rl.sim.seeding import chosen
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn

DATASETS = ("train", "dev", "test_normal", "test_challenge")
_FETCH = 'pip install "embodied-rl[appworld]" && appworld install && appworld download data'
INSTRUCTION = (
    "Do the task by Python code that calls `apis.APP.NAME(...)`; what it prints is shown. `apis.api_docs` documents all apps, "
    "`apis.supervisor` knows passwords. Call `apis.supervisor.complete_task()` at the end."
)


def tasks() -> list[str]:
    return list(DATASETS)


def make(
    num_envs: int,
    task: str = "train",
    held_out: str = "dev",
    partial_reward: bool = False,
    max_turns: int = 40,
    observation_bytes: int = 2**17,
    experiment: str = "embodied_rl",
) -> TextSim:
    """`num_envs` supervisors' worlds in this process.

    Args:
        task: data set of training seeds.
        held_out: data set of held-out seeds.
        partial_reward: reward the share of a task's tests that pass; False: 1 if all do.
        max_turns: blocks of code after which an episode is truncated (and judged).
        experiment: name of AppWorld's folder of outputs.

    Raises MissingExtraError, MissingAssetsError; UserError: an unknown data set.
    """
    for name in (task, held_out):
        require_known(name, DATASETS, f"AppWorld has no data set '{name}'.")
    with from_extra("AppWorld", "appworld"):
        appworld = importlib.import_module("appworld")
    ids = {name: task_ids(appworld, name) for name in {task, held_out}}
    return TextSim(
        f"AppWorld/{task}",
        lambda: AppGame(appworld, ids[task], ids[held_out], partial_reward, max_turns, experiment),
        num_envs,
        max_turns=max_turns,
        instruction=INSTRUCTION,
        observation_bytes=observation_bytes,
    )


def task_ids(appworld: Any, dataset: str) -> list[str]:
    """Ids of a data set. Raises MissingAssetsError if it is missing."""
    try:
        found = list(appworld.load_task_ids(dataset))
    except Exception as error:  # AppWorld reports it in several ways
        raise MissingAssetsError(
            f"AppWorld's data set '{dataset}' cannot be read ({type(error).__name__}: {error}). Fetch it: {_FETCH}.", _FETCH
        ) from error
    if not found:
        raise MissingAssetsError(f"AppWorld's data set '{dataset}' is empty here. Fetch it: {_FETCH}.", _FETCH)
    return found


class AppGame(TextGame):
    """One supervisor's world."""

    def __init__(
        self, appworld: Any, training: Sequence[str], held_out: Sequence[str], partial_reward: bool, max_turns: int, experiment: str
    ) -> None:
        self._appworld, self._training, self._held_out = appworld, training, held_out
        self._partial_reward, self._max_turns, self._experiment = partial_reward, max_turns, experiment
        self._world: Any = None
        self._turns = 0

    def reset(self, seed: int) -> str:
        task = chosen(seed, self._training, self._held_out)
        self.close()
        self._world, self._turns = self._appworld.AppWorld(task_id=task, experiment_name=self._experiment), 0
        supervisor = self._world.task.supervisor
        who = f"{supervisor.first_name} {supervisor.last_name} ({supervisor.email})"
        return f"{INSTRUCTION}\nYour supervisor is {who}.\nTask: {self._world.task.instruction}"

    def step(self, action: str) -> TextTurn:
        """Run a block of code, with or without a Markdown fence."""
        self._turns += 1
        output = str(self._world.execute(code_of(action)))
        done = bool(self._world.task_completed())
        if not done and self._turns < self._max_turns:
            return TextTurn(output)
        judged = self._world.evaluate()
        success = bool(judged.success)
        share = judged.pass_count / max(judged.num_tests, 1)
        reward = float(share) if self._partial_reward else float(success)
        return TextTurn(output, reward, terminated=done, truncated=not done, success=success, info={"passed": float(share)})

    def sample_action(self, random: np.random.Generator) -> str:
        """An action that reads the documentation."""
        return "print(apis.api_docs.show_app_descriptions())"

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None


def code_of(action: str) -> str:
    """Code of an answer: the contents of its first Markdown fence, else the whole answer."""
    _, fence, rest = action.partition("```")
    if not fence:
        return action
    inner = rest.partition("```")[0]
    first, newline, body = inner.partition("\n")
    return body if newline and first.strip().lower() in ("", "python", "py") else inner
