"""Saves and restores MuJoCo's state so that what follows is equal bit by bit.

``mjSTATE_INTEGRATION`` makes the physics continue exactly, and yet the first reward after it may differ: Ant's and Humanoid's
rewards read positions that were derived *before* the last integration step. So every array of MjData whose size is fixed is
saved, 10 to 60 kB. What depends on the number of contacts lives in MjData's arena and is computed anew by the next step.

Some tasks change their model when they reset (Meta-World moves bodies and sites). Of the model's arrays, those are saved that differ
from a copy taken when the environment was made.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from embodied_rl.sim.snapshots import SnapshotError

_ARENA = ("efc_", "island_", "dof_island", "tendon_efcadr", "contact", "iefc_", "iM_", "iLD", "idof_", "map_")
"""Arrays of MjData whose sizes follow the contacts."""
_BOOKKEEPING = ("maxuse_", "solver_", "plugin_data", "mapM", "mapD", "bvh_", "timer", "warning")
"""Statistics, pointers, index maps that follow from the model, and the collision tree, which every step rebuilds."""
_INDICES = ("_colind", "_rowadr", "_rownnz", "_rowsuper")
_ASSETS = ("mesh_", "tex_", "bvh_", "skin_", "hfield_", "flex_", "oct_", "names_map", "text_", "key_", "paths")
"""Megabytes of a model that no task changes while it runs."""


class DataState:
    """Captures and restores one MjData.

    Args:
        data: kept; its arrays' addresses are looked up once.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.regions: dict[str, np.ndarray] = {}
        """The saved arrays, as bytes, by name."""
        self._stops: list[int] = []
        layout, size = [], 0
        for name, array in _arrays(data):
            skipped = name.startswith((*_ARENA, *_BOOKKEEPING)) or name.endswith(_INDICES) or name == "plugin"
            if skipped or array.size == 0:
                continue
            self.regions[f"data.{name}"] = array.reshape(-1).view(np.uint8)
            size += array.nbytes
            self._stops.append(size)
            layout.append(f"{name}{array.dtype.str}{array.shape}")
        self._size, self._layout = size, zlib.crc32(";".join(layout).encode())

    def capture(self) -> dict[str, Any]:
        """A tree for `encode_state`."""
        return {"layout": self._layout, "time": float(self._data.time), "arrays": np.concatenate(list(self.regions.values()))}

    def restore(self, state: dict[str, Any]) -> None:
        """Set what `capture` gave; no MuJoCo function is called, since each would change the solver's warm start.

        Raises:
            SnapshotError: the state is of another model or of another version of MuJoCo.
        """
        content = state["arrays"]
        if state["layout"] != self._layout or content.nbytes != self._size:
            raise SnapshotError(
                "Snapshot was taken from another MuJoCo model or by another version of MuJoCo. Restore it into the same task, made with "
                "the same arguments and packages."
            )
        self._data.time = state["time"]
        start = 0
        for view, stop in zip(self.regions.values(), self._stops, strict=True):
            view[:] = content[start:stop]
            start = stop


class ModelChanges:
    """Captures and restores what an environment changes in its MjModel after it was made.

    Args:
        model: an MjModel as its environment's constructor left it.
        shared: contents of arrays that other environments of this process hold already, by name; equal ones are held once.
    """

    def __init__(self, model: Any, shared: dict[str, bytes] | None = None) -> None:
        self._options = model.opt
        self._option_names = [name for name in dir(self._options) if not name.startswith("_")]
        self._views = {name: array for name, array in _arrays(model) if array.size and not name.startswith(_ASSETS)}
        self.regions = {f"model.{name}": array.reshape(-1).view(np.uint8) for name, array in self._views.items()}
        """The watched arrays, as bytes, by name."""
        shared = {} if shared is None else shared
        self._original: dict[str, bytes] = {}
        for name, content in self._contents():
            held = shared.setdefault(name, content)
            self._original[name] = held if held == content else content
        # Sizes and names, not values: the last bits of derived values may differ between machines.
        sizes = ";".join(f"{name}{view.shape}" for name, view in self._views.items())
        self._layout = zlib.crc32(sizes.encode() + model.names)

    def capture(self) -> dict[str, Any]:
        """A tree for `encode_state`: the arrays that differ from the model as it was made."""
        changed = {name: content for name, content in self._contents() if content != self._original[name]}
        return {"layout": self._layout, "changed": changed}

    def restore(self, state: dict[str, Any]) -> None:
        """Set what `capture` gave, and everything else back to what the model was made with.

        Raises:
            SnapshotError: the state is of another model.
        """
        if state["layout"] != self._layout:
            raise SnapshotError(
                "Snapshot was taken from another MuJoCo model. Restore it into the same task, made with the same arguments."
            )
        changed = state["changed"]
        for name, content in self._contents():
            wanted = changed.get(name, self._original[name])
            if content != wanted:
                self._set(name, wanted)

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        for name, view in self._views.items():
            yield name, view.tobytes()
        for name in self._option_names:
            yield f"opt.{name}", np.asarray(getattr(self._options, name)).tobytes()

    def _set(self, name: str, content: bytes) -> None:
        if not name.startswith("opt."):
            view = self._views[name]
            view[...] = np.frombuffer(content, view.dtype).reshape(view.shape)
            return
        option = name.removeprefix("opt.")
        present = np.asarray(getattr(self._options, option))
        value = np.frombuffer(content, present.dtype).reshape(present.shape)
        setattr(self._options, option, value if value.ndim else value.item())


def _arrays(structure: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name in dir(structure):
        if not name.startswith("_"):
            value = getattr(structure, name)
            if isinstance(value, np.ndarray):
                yield name, value
