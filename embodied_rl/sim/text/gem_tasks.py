"""GEM's registry, and which of its environments run with what is on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from embodied_rl.errors import MissingAssetsError, MissingExtraError, UserError, did_you_mean

OFFLINE_FAMILIES = ("game", "rg")
"""Environments that make their own problems: GEM's games, and the procedural data sets of reasoning-gym. The others (math, code,
qa, logic, eval) read data sets from a model hub."""

NEEDS_WORD_LIST = ("Wordle", "Hangman", "WordSearch")
"""Games that read nltk's corpus "words", which no package brings."""

NEEDS_SAT_SOLVER = "rg:zebra_puzzles"
"""Solves with pycosat, which comes as source code in C."""

BROKEN = {
    "game:Crosswords-v0-random": "GEM 0.1.0 looks for words before it has drawn how hard they are",
    "game:FifteenPuzzle-v0-random": "GEM 0.1.0 computes with its number of rows before it has drawn one",
    "rg:composite": "reasoning-gym asks for a list of data sets here, and GEM 0.1.0 has no way to give one",
}
"""Registered ids that cannot be made, and why."""


HASH_ORDERED = frozenset({"rg:isomorphic_strings", "rg:polynomial_multiplication", "rg:ransom_note"})
"""Tasks whose questions follow the order of sets of strings, which every Python process shuffles in its own way unless
PYTHONHASHSEED is fixed."""


def registered() -> Mapping[str, Any]:
    """GEM's registry, id → specification. Raises MissingExtraError where GEM is not installed. The first call takes a second."""
    if not has_sat_solver():
        sys.modules.setdefault("pycosat", ModuleType("pycosat"))  # reasoning-gym imports it for the one task that solves with it
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import gem.envs
        from gem.envs.registration import ENV_REGISTRY
    except ImportError as error:
        version = "GEM" if sys.version_info < (3, 12) else "GEM, which wants Python 3.11 or older,"
        raise MissingExtraError(version, "text", error) from error
    finally:
        # Importing GEM configures the process's logging, which is not a library's to decide.
        root.handlers[:] = handlers
        root.setLevel(level)
    assert gem.envs
    return ENV_REGISTRY


def tasks() -> list[str]:
    """Ids of the environments that need nothing which is not here, sorted. Raises MissingExtraError where GEM is not installed."""
    known = registered()
    without = () if word_list_installed() else NEEDS_WORD_LIST
    solvable = has_sat_solver()
    return sorted(
        task
        for task in known
        if task.partition(":")[0] in OFFLINE_FAMILIES
        and task not in BROKEN
        and not any(name in task for name in without)
        and (solvable or task != NEEDS_SAT_SOLVER)
    )


def same_in_every_process(task: str) -> bool:
    """Whether a seed means the same question in another process as in this one."""
    return task not in HASH_ORDERED or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random")


def has_sat_solver() -> bool:
    """Whether pycosat itself is here, and not what stands in for it."""
    found = sys.modules.get("pycosat")
    return importlib.util.find_spec("pycosat") is not None if found is None else hasattr(found, "itersolve")


def word_list_installed() -> bool:
    """Whether nltk finds its corpus "words", without asking the network (GEM's games would)."""
    import nltk

    for place in ("corpora/words", "corpora/words.zip"):
        try:
            nltk.data.find(place)
        except LookupError:
            continue
        return True
    return False


def require(task: str) -> None:
    """Refuse a task that cannot be made here.

    Raises:
        MissingExtraError: GEM is not installed.
        MissingAssetsError: a word list or data set is missing; the message holds what brings it.
        UserError: the id is unknown, or known not to work.
    """
    known = registered()
    if task not in known:
        raise UserError(f"GEM task '{task}' is not known.{did_you_mean(task, known)}")
    if task in BROKEN:
        raise UserError(f"GEM task '{task}' cannot be made: {BROKEN[task]}. `embodied_rl.sim.text.gem.tasks()` lists those that can.")
    if task == NEEDS_SAT_SOLVER and not has_sat_solver():
        raise MissingAssetsError(f"GEM task '{task}' needs a package that is compiled where it is installed: pip install pycosat")
    if any(name in task for name in NEEDS_WORD_LIST) and not word_list_installed():
        raise MissingAssetsError(f"GEM task '{task}' needs nltk's list of English words. Get it: python -m nltk.downloader words")
    if task.partition(":")[0] not in OFFLINE_FAMILIES and importlib.util.find_spec("datasets") is None:
        name = known[task].kwargs.get("dataset_name")
        raise MissingAssetsError(
            f"GEM task '{task}' reads the data set '{name}' with a package that is not installed: pip install datasets"
        )
