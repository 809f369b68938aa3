"""Drawing without a screen has to be chosen before MuJoCo is imported, and what simulators do again and again is done once."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from pathlib import Path

import pytest

from embodied_rl.sim.rendering import configure_rendering

configure_rendering()

import mujoco  # noqa: E402

_compile, _compile_text = mujoco.MjModel.from_xml_path, mujoco.MjModel.from_xml_string


@functools.lru_cache(maxsize=8)
def _compiled(path: str, written_ns: int) -> mujoco.MjModel:
    return _compile(path)


def _compile_once(filename: str, assets: dict[str, bytes] | None = None) -> mujoco.MjModel:
    return _compile(filename, assets) if assets else copy.copy(_compiled(filename, Path(filename).stat().st_mtime_ns))


@functools.lru_cache(maxsize=4)
def _compiled_text(xml: str) -> mujoco.MjModel:
    return _compile_text(xml)


def _compile_text_once(xml: str, assets: dict[str, bytes] | None = None) -> mujoco.MjModel:
    return _compile_text(xml, assets) if assets else copy.copy(_compiled_text(xml))


mujoco.MjModel.from_xml_path = staticmethod(_compile_once)
mujoco.MjModel.from_xml_string = staticmethod(_compile_text_once)


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_stays() -> None:
    """The collector need not look through what the tests before imported: ManiSkill runs it whenever it clears a scene."""
    if "mani_skill" in sys.modules:
        gc.collect()
        gc.freeze()
