"""ManiSkill's registry, and which of its tasks have their meshes and data sets on this machine."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from embodied_rl.errors import MissingAssetsError, UserError, did_you_mean, from_extra
from embodied_rl.sim.factory import named

UNDECLARED_NEEDS = ("SceneManipulation", "OpenCabinetDoor", "DrawSVG", "PushT", "WidowXAI")
"""Tasks that need more than ManiSkill's registry declares (scene data sets, svgpathtools, a renderer, a robot); `tasks` omits them."""

_SELDOM_USED = {
    "cv2": "Install it: pip install opencv-python",
    "h5py": "Install it: pip install h5py",
    "IPython": "Install it: pip install ipython",
    "IPython.display": "Install it: pip install ipython",
}
"""{module of ManiSkill's digital twins, recordings and notebooks: how to install it}."""


def registered_tasks() -> Mapping[str, Any]:
    """ManiSkill's registry, id → specification. Raises MissingExtraError if it is not installed. The first call takes seconds."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # some of its modules import GitPython, which requires a git command
    with from_extra("ManiSkill", "maniskill"), _placeholders(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Failed to find system libvulkan": true and harmless; we report it when it matters
        import mani_skill.envs
        from mani_skill.utils.logging_utils import logger
        from mani_skill.utils.registration import REGISTERED_ENVS
    assert mani_skill.envs
    logger.setLevel("ERROR")  # its tasks warn about their own scenes, one line per object
    return REGISTERED_ENVS


@contextmanager
def _placeholders() -> Iterator[None]:
    """Replace modules that ManiSkill imports with all its tasks, but few tasks use, by placeholders if they are not installed."""
    absent = [name for name in _SELDOM_USED if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: _Placeholder(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


class _Placeholder(ModuleType):
    """Replaces a module that is not installed; calling anything in it raises an error that says so."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise UserError(f"ManiSkill uses {self.__name__}.{name} here, which is not installed. {_SELDOM_USED[self.__name__]}")

        return missing


def missing_assets(task: str) -> list[str]:
    """Data sources of the task and its default robot that are not on this machine, sorted."""
    from mani_skill.agents.registration import REGISTERED_AGENTS
    from mani_skill.utils import assets

    registered = registered_tasks()[task]
    wanted = list(registered.asset_download_ids or [])
    robots = inspect.signature(registered.cls.__init__).parameters.get("robot_uids")
    default = robots.default if robots is not None else ()
    for robot in (default,) if isinstance(default, str) else default or ():
        wanted += REGISTERED_AGENTS[robot].asset_download_ids if robot in REGISTERED_AGENTS else []
    sources: set[str] = set()
    for name in wanted:
        sources |= set(assets.expand_data_group_into_individual_data_source_ids(name)) if name in assets.DATA_GROUPS else {name}
    return sorted(name for name in sources if not assets.is_data_source_downloaded(name))


def require_known(task: str) -> None:
    """Raise UserError with the nearest id if ManiSkill has no such task, and MissingExtraError if it is not installed."""
    if task not in (registered := registered_tasks()):
        raise UserError(f"ManiSkill task '{task}' is not known.{did_you_mean(task, registered)}")


def require_assets(task: str) -> None:
    """Raise MissingAssetsError with the command that fetches what `missing_assets` names."""
    if missing := missing_assets(task):
        raise MissingAssetsError(assets_message(task, missing))


def assets_message(task: str, missing: Sequence[str]) -> str:
    """The error message for `missing_assets`, with the command that fetches them."""
    named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return (
        f"ManiSkill task '{task}' needs assets that are not on this machine: {named}. "
        f"Get them: python -m mani_skill.utils.download_asset {task}"
    )


def check_arguments(task: str, made: Mapping[str, Any]) -> None:
    """Raise UserError for a ``reward_mode`` that the task lacks, or ``robot_uids`` (one name or several) that ManiSkill lacks."""
    cls, mode = registered_tasks()[task].cls, str(made["reward_mode"])
    if made["reward_mode"] not in cls.SUPPORTED_REWARD_MODES:
        raise UserError(f"ManiSkill task '{task}' has no reward_mode '{mode}'.{did_you_mean(mode, cls.SUPPORTED_REWARD_MODES)}")
    if (robots := made.get("robot_uids")) is None:
        return
    from mani_skill.agents.registration import REGISTERED_AGENTS

    for name in named(robots) if isinstance(robots, Iterable) else [robots]:
        if name not in REGISTERED_AGENTS:
            supported = cls.SUPPORTED_ROBOTS or REGISTERED_AGENTS
            choices = {robot for entry in supported for robot in ((entry,) if isinstance(entry, str) else entry)}
            raise UserError(f"ManiSkill has no robot '{name}' (robot_uids) for task '{task}'.{did_you_mean(str(name), choices)}")
