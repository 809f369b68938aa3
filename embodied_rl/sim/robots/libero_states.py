"""LIBERO's stored initial states: which of them are for training and which for evaluation, and how their files are read."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.seeding import HELD_OUT_START

NUM_STATES = 50
NUM_TRAIN_STATES = 40
INIT_STATES = ("split", "train", "test", "all")

_NAMES = ["numpy.core.multiarray _reconstruct", "numpy ndarray", "_codecs encode", "numpy dtype"]
_TEXTS = ["b", "latin1", "f8", "<"]


def chosen_states(which: str, seed: int) -> range:
    """Numbers of the states that an episode of this seed may start from.

    "train" are 0…39, "test" 40…49, "all" 0…49; "split" is "test" for held-out seeds and "train" for training seeds.
    """
    if which == "split":
        which = "test" if seed >= HELD_OUT_START else "train"
    return {"train": range(NUM_TRAIN_STATES), "test": range(NUM_TRAIN_STATES, NUM_STATES), "all": range(NUM_STATES)}[which]


def read_init_states(path: Path) -> np.ndarray:
    """[50, 1 + nq + nv] float64: time, positions and velocities of MuJoCo, a row for each state.

    The files were written by `torch.save`, a zip archive around one pickled array. Nothing is unpickled: the pickle's instructions are
    listed, must be those of a plain array of 64-bit floats, and the numbers are taken from their text.
    Raises UserError: the file is missing, damaged or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            content = archive.read(name)
        instructions = [(code.name, argument) for code, argument, _ in pickletools.genops(content)]
        return _plain_array(instructions)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"The initial states in '{path}' cannot be read ({error}). Install LIBERO anew: pip install --force-reinstall hf-libero"
        ) from error


def _plain_array(instructions: list[tuple[str, Any]]) -> np.ndarray:
    texts = [argument for name, argument in instructions if name == "BINUNICODE"]
    names = [argument for name, argument in instructions if name == "GLOBAL"]
    # 0 and 1 are placeholder and version, 3 and the rest belong to the type "<f8".
    first, version, rows, columns, *rest = [argument for name, argument in instructions if name.startswith("BININT")]
    order = [name for name, _ in instructions if name in ("NEWTRUE", "NEWFALSE")]
    plain = names == _NAMES and texts[:4] == _TEXTS and len(texts) == 5 and [first, version, *rest] == [0, 1, 3, -1, -1, 0]
    if not plain or order != ["NEWFALSE", "NEWTRUE", "NEWFALSE"]:  # the last: rows before columns
        raise ValueError("not a plain array of 64-bit floats")
    return np.frombuffer(texts[4].encode("latin1"), "<f8").reshape(rows, columns).astype(np.float64)
