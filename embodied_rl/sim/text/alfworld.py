"""ALFWorld (Shridhar et al. 2021, arXiv:2010.03768): household tasks as text, from ALFRED's scenes.

``alfworld-download`` fetches the games; TextWorld's PDDL engine plays them, one file per episode, chosen by the seed.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_rl.errors import MissingAssetsError, from_extra, require_known
from embodied_rl.sim.seeding import chosen
from embodied_rl.sim.text.textworld import CommandGame
from embodied_rl.sim.text.turns import TextSim, TextTurn

SPLITS = {"train": "train", "valid_seen": "valid_seen", "valid_unseen": "valid_unseen"}
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
_FETCH = 'pip install "embodied-rl[alfworld]" && alfworld-download   (2 GB, into $ALFWORLD_DATA or ~/.cache/alfworld)'


def tasks() -> list[str]:
    return ["all", *TASK_TYPES]


def make(
    num_envs: int,
    task: str = "all",
    data: str | None = None,
    split: str = "train",
    held_out_split: str = "valid_unseen",
    show_commands: bool = True,
    max_turns: int = 50,
    observation_bytes: int = 2**16,
) -> TextSim:
    """`num_envs` households in this process.

    Args:
        task: one of ALFRED's six kinds of tasks, or all.
        data: the folder that alfworld-download filled; None: $ALFWORLD_DATA, or ~/.cache/alfworld.
        split: train, valid_seen or valid_unseen, for training seeds.
        held_out_split: for held-out seeds.
        show_commands: list the possible commands, as verl-agent does.

    Raises MissingExtraError, MissingAssetsError; UserError: an unknown task or split.
    """
    require_known(task, tasks(), f"ALFWorld has no task '{task}'.")
    for name in (split, held_out_split):
        require_known(name, SPLITS, f"ALFWorld has no split '{name}'.")
    folder = Path(data or os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld")
    games = {name: game_files(folder, name, task) for name in {split, held_out_split}}
    import_engine()
    return TextSim(
        f"ALFWorld/{task}",
        lambda: HouseGame(games[split], games[held_out_split], show_commands),
        num_envs,
        max_turns=max_turns,
        observation_bytes=observation_bytes,
    )


def import_engine() -> Any:
    """alfworld's environments. Raises MissingExtraError if they, or the PDDL engine below them, are not installed."""
    with from_extra("ALFWorld", "alfworld"):
        importlib.import_module("fast_downward")
        return importlib.import_module("alfworld.agents.environment.alfred_tw_env")


def game_files(folder: Path, split: str, task: str) -> list[Path]:
    """Solvable games of a split, sorted by name. Raises MissingAssetsError if there is none."""
    root = folder / "json_2.1.1" / SPLITS[split]
    found = []
    for path in sorted(root.rglob("game.tw-pddl")):
        if "movable" in str(path) or "Sliced" in str(path):  # ALFWorld skips these too
            continue
        kind = json.loads((path.parent / "traj_data.json").read_text(encoding="utf-8")).get("task_type")
        if kind in (TASK_TYPES if task == "all" else (task,)) and json.loads(path.read_text(encoding="utf-8")).get("solvable"):
            found.append(path)
    if not found:
        raise MissingAssetsError(f"ALFWorld: no games of split '{split}' for task '{task}' below '{root}'. Fetch them: {_FETCH}.", _FETCH)
    return found


class HouseGame(CommandGame):
    """One household."""

    _hidden = frozenset({"help"})

    def __init__(self, training: Sequence[Path], held_out: Sequence[Path], show_commands: bool) -> None:
        super().__init__(show_commands)
        self._training, self._held_out = training, held_out
        self._textworld, self._alfred = importlib.import_module("textworld"), import_engine()
        self._infos = self._textworld.EnvInfos(won=True, lost=True, admissible_commands=True, feedback=True)

    def reset(self, seed: int) -> str:
        path = chosen(seed, self._training, self._held_out)
        self.close()
        self._env = self._textworld.start(str(path), self._infos, [self._alfred.AlfredDemangler(shuffle=False)])
        self._state = self._env.reset()
        return self._text(str(self._state["feedback"]))

    def step(self, action: str) -> TextTurn:
        """Play a command; a finished task gives reward 1."""
        _, over, valid = self._play(action)
        won = bool(self._state["won"])
        return TextTurn(self._text(str(self._state["feedback"])), float(won), terminated=over, success=won, info={"valid": valid})
