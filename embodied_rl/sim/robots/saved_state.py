"""Save and restore a gymnasium environment with all its wrappers: Python attributes, random generators and MuJoCo state.

Exact for environments whose state is in plain attributes, numpy arrays, random generators and MuJoCo's MjData and MjModel. This cannot be
seen from outside; it is tested for each family of tasks (tests/sim/robots/test_snapshots.py).

``mjSTATE_INTEGRATION`` makes the physics continue exactly, yet the next reward may differ: Ant's and Humanoid's rewards read positions
derived *before* the last integration step. So every array of MjData with a fixed size is saved, 10 to 60 kB. Arrays that depend on the
number of contacts are in MjData's arena, and the next step recomputes them.

Some tasks change their model on reset (Meta-World moves bodies and sites). Of the model's arrays, those are saved that differ from a copy
taken when the environment was made.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np

from embodied_rl.sim.snapshots import SnapshotError

if TYPE_CHECKING:
    from mujoco import MjData, MjModel

# ---- MuJoCo's memory --------------------------------------------------------------------------------------------------


_ARENA = ("efc_", "island_", "dof_island", "tendon_efcadr", "contact", "iefc_", "iM_", "iLD", "idof_", "map_")
"""Arrays of MjData whose sizes depend on the contacts."""
_BOOKKEEPING = ("maxuse_", "solver_", "plugin_data", "mapM", "mapD", "bvh_", "timer", "warning")
"""Statistics, pointers, index maps that follow from the model, and the collision tree, which every step rebuilds."""
_INDICES = ("_colind", "_rowadr", "_rownnz", "_rowsuper")
_ASSETS = ("mesh_", "tex_", "bvh_", "skin_", "hfield_", "flex_", "oct_", "names_map", "text_", "key_", "paths")
"""Megabytes of a model that no task changes at run time."""


class DataState:
    """Captures and restores one MjData. `data`: kept, because its arrays' addresses are looked up once."""

    def __init__(self, data: MjData) -> None:
        self._data = data
        arrays = {
            name: array
            for name, array in _arrays(data)
            if array.size and name != "plugin" and not name.startswith((*_ARENA, *_BOOKKEEPING)) and not name.endswith(_INDICES)
        }
        self.regions = {f"data.{name}": array.reshape(-1).view(np.uint8) for name, array in arrays.items()}
        """The saved arrays, as bytes, by name."""
        self._stops = np.cumsum([region.size for region in self.regions.values()])
        self._layout = zlib.crc32(";".join(f"{name}{array.dtype.str}{array.shape}" for name, array in arrays.items()).encode())

    def capture(self) -> dict[str, Any]:
        """State as a tree for `encode_state`."""
        return {"layout": self._layout, "time": float(self._data.time), "arrays": np.concatenate(list(self.regions.values()))}

    def restore(self, state: dict[str, Any]) -> None:
        """Set a captured state without calling MuJoCo, since each of its functions would change the solver's warm start.

        Raises SnapshotError: the state is of another model or of another version of MuJoCo.
        """
        content = state["arrays"]
        if state["layout"] != self._layout or content.nbytes != self._stops[-1]:
            raise SnapshotError(
                "Snapshot was taken from another MuJoCo model or by another version of MuJoCo. Restore it into the same task, made with "
                "the same arguments and packages."
            )
        self._data.time = state["time"]
        for view, saved in zip(self.regions.values(), np.split(content, self._stops[:-1]), strict=True):
            view[:] = saved


class ModelChanges:
    """Captures and restores an environment's changes to its MjModel.

    Args:
        model: an MjModel as its environment's constructor left it.
        shared: {name: contents} of arrays that other environments of this process keep already; equal ones are kept once.
    """

    def __init__(self, model: MjModel, shared: dict[str, bytes] | None = None) -> None:
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
        """Arrays that differ from the original model, as a tree for `encode_state`."""
        changed = {name: content for name, content in self._contents() if content != self._original[name]}
        return {"layout": self._layout, "changed": changed}

    def restore(self, state: dict[str, Any]) -> None:
        """Set captured changes, and reset everything else to the original model.

        Raises SnapshotError: the state is of another model.
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


def _arrays(structure: MjData | MjModel) -> Iterator[tuple[str, np.ndarray]]:
    for name in dir(structure):
        if not name.startswith("_"):
            value = getattr(structure, name)
            if isinstance(value, np.ndarray):
                yield name, value


# ---- an environment with its wrappers ---------------------------------------------------------------------------------


_CONSTANT = frozenset(
    {
        "_cached_spec",
        "_ezpickle_args",
        "_ezpickle_kwargs",
        "_saved_kwargs",
        "fullpath",
        "model_path",
        "metadata",
        "_metadata",
        "render_mode",
    }
)
"""Attributes that follow from the arguments (some contain this machine's paths)."""
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_OBJECTS = frozenset({"gymnasium.wrappers.utils.RunningMeanStd"})
"""Classes of attributes that consist of plain attributes."""
_NUMBERS = frozenset("biufcUS")

Regions = dict[str, np.ndarray]
AnyGenerator = np.random.Generator | np.random.RandomState | random.Random
Leaf = bool | int | float | str | bytes | np.generic | None
Node = tuple[Any, ...]
"""(kind, …): a value as `Packer` writes it; a `Leaf` represents itself."""


class EnvState:
    """Captures and restores one environment; make it before the first reset, while its MuJoCo model is as constructed.

    `shared`: see `ModelChanges`.
    """

    def __init__(self, env: gymnasium.Env, shared: dict[str, bytes] | None = None) -> None:
        self._layers = layers_of(env)
        self._names = [f"{type(layer).__module__}:{type(layer).__qualname__}" for layer in self._layers]
        self._data = [DataState(value) for value in unique_held(self._layers, "MjData")]
        self._models = [ModelChanges(value, shared) for value in unique_held(self._layers, "MjModel")]
        parts: list[DataState | ModelChanges] = [*self._data, *self._models]
        self._regions = {f"{number} {name}": region for number, part in enumerate(parts) for name, region in part.regions.items()}

    def capture(self) -> dict[str, Any]:
        packer = Packer(self._regions)
        return {
            "layers": self._names,
            "attributes": [packer.attributes(layer) for layer in self._layers],
            "data": [data.capture() for data in self._data],
            "models": [model.capture() for model in self._models],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set a captured state. Raises SnapshotError: the state is of another task, or of another version of its packages."""
        if state["layers"] != self._names:
            saved, present = " > ".join(state["layers"]), " > ".join(self._names)
            raise SnapshotError(f"Snapshot was taken from the environment {saved} and cannot be restored into {present}.")
        for model, saved_model in zip(self._models, state["models"], strict=True):
            model.restore(saved_model)
        for data, saved_data in zip(self._data, state["data"], strict=True):
            data.restore(saved_data)
        unpacker = Unpacker(self._regions)
        for layer, attributes in zip(self._layers, state["attributes"], strict=True):
            unpacker.attributes(layer, attributes)


def capture_generator(generator: AnyGenerator) -> Node:
    """State of a numpy Generator or RandomState or a `random.Random`, as a tree for `encode_state`."""
    if isinstance(generator, np.random.Generator):
        return ("generator", dict(generator.bit_generator.state))
    if isinstance(generator, np.random.RandomState):
        return ("random_state", dict(generator.get_state(legacy=False)))
    version, words, gauss = generator.getstate()
    return ("random", version, np.asarray(words, np.uint32), gauss)


def new_generator(state: Node) -> AnyGenerator:
    """Fresh generator with a state of `capture_generator`. Raises SnapshotError for a kind that numpy lacks."""
    kind, content, *rest = state
    if kind == "random":
        made = random.Random()
        made.setstate((content, tuple(rest[0].tolist()), rest[1]))
        return made
    bits = vars(np.random).get(content["bit_generator"])
    if not (isinstance(bits, type) and issubclass(bits, np.random.BitGenerator)):
        raise SnapshotError(f"Snapshot holds a random generator '{content['bit_generator']}' that this numpy does not have.")
    bit_generator = bits()
    bit_generator.state = content
    if kind == "generator":
        return np.random.Generator(bit_generator)
    return np.random.RandomState(bit_generator)


class Unsavable(Exception):
    """An attribute that is not saved: a renderer, a space, a function, a view into the simulator's own memory."""


class Packer:
    """Turns Python values into a tree of tuples, each beginning with its kind. Objects with several references are saved once, so that
    attributes which share an array or a list still share it after a restore.

    `regions`: memory of the simulator, by name; arrays that are views into it are saved as their position in it.
    """

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = regions or {}
        self._seen: dict[Any, int] = {}

    def attributes(self, owner: object) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        left: list[str] = []
        for name, value in vars(owner).items():
            known = len(self._seen)
            try:
                saved[name] = self._attribute(name, value)
            except Unsavable:
                left.append(name)
                while len(self._seen) > known:  # parts that were counted already
                    self._seen.popitem()
        return {"saved": saved, "left": left}

    def _attribute(self, name: str, value: object) -> Node | Leaf:
        if name in _CONSTANT:
            raise Unsavable
        if isinstance(value, gymnasium.spaces.Space):  # constant except for the generators that `sample` draws from
            generators = [space._np_random for space in _spaces(value)]
            return ("space", [None if generator is None else capture_generator(generator) for generator in generators])
        if f"{type(value).__module__}.{type(value).__qualname__}" in _PLAIN_OBJECTS:
            return ("object", {part: self.node(item) for part, item in vars(value).items()})
        return self.node(value)

    def node(self, value: object) -> Node | Leaf:
        if type(value) is complex:
            return ("complex", value.real, value.imag)
        if isinstance(value, np.generic) or type(value) in _SCALARS:
            return cast(Leaf, value)
        if type(value) is tuple:
            return ("tuple", [self.node(item) for item in value])
        if id(value) in self._seen:
            return ("same", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        special = self._special(value)
        if special is not None:
            return special
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            return capture_generator(value)
        return self._container(value)

    def _special(self, value: object) -> Node | None:
        """Node for a value that a subclass handles; None for others."""
        return None

    def _container(self, value: object) -> Node:
        if type(value) is dict:
            return ("dict", [(self.node(key), self.node(item)) for key, item in value.items()])
        if type(value) is list:
            return ("list", [self.node(item) for item in value])
        if type(value) is deque:
            return ("deque", [self.node(item) for item in value], value.maxlen)
        if type(value) is set and all(type(item) in _SCALARS and type(item) is not complex for item in value):
            return ("set", value)
        raise Unsavable

    def _array(self, array: np.ndarray) -> Node:
        """Memory behind the array, and the array's position in it."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if type(array) is not np.ndarray or array.dtype.kind not in _NUMBERS:
            raise Unsavable
        if type(root.base).__name__ == "PyCapsule":
            return self._view_of_region(array)
        if not (root.flags.c_contiguous or root.flags.f_contiguous):
            root = array = np.array(array)
        memory = self._memory(("memory", id(root)), lambda: root.tobytes(order="A"))
        return ("array", array.dtype.str, array.shape, array.strides, _address(array) - _address(root), memory)

    def _memory(self, key: tuple[str, int], content: Callable[[], bytes]) -> int | np.ndarray:
        """Bytes of memory met for the first time; later its number among the objects seen."""
        if key in self._seen:
            return self._seen[key]
        self._seen[key] = len(self._seen)
        return np.frombuffer(content(), np.uint8)

    def _view_of_region(self, array: np.ndarray) -> Node:
        for name, memory in self._regions.items():
            offset = _address(array) - _address(memory)
            if 0 <= offset < memory.nbytes:
                return ("view", array.dtype.str, array.shape, array.strides, offset, name)
        raise Unsavable


class Unpacker:
    """Inverse of `Packer`. Makes everything mutable anew, except for spaces and listed objects, which it changes in place."""

    packer: type[Packer] = Packer

    def __init__(self, regions: Regions | None = None) -> None:
        self._regions = regions or {}
        self._seen: list[Any] = []

    def attributes(self, owner: object, state: dict[str, Any]) -> None:
        present = vars(owner)
        for name, node in state["saved"].items():
            self._attribute(present, name, node)
        keep = {*state["saved"], *state["left"]}
        for name in [name for name, value in present.items() if name not in keep and self._savable(value)]:
            del present[name]  # an earlier episode of this environment added it, the saved one did not

    def _savable(self, value: object) -> bool:
        try:
            self.packer(self._regions).node(value)
        except Unsavable:
            return False
        return True

    def _attribute(self, present: dict[str, Any], name: str, node: Node | Leaf) -> None:
        if type(node) is tuple and node[0] == "space":
            for space, generator in zip(_spaces(present[name]), node[1], strict=True):
                vars(space)["_np_random"] = None if generator is None else new_generator(generator)
        elif type(node) is tuple and node[0] == "object":
            vars(present[name]).update({part: self.node(item) for part, item in node[1].items()})
        else:
            value = self.node(node)
            # A window, say, stays if the snapshot has None: the saved environment had not drawn yet.
            if value is not None or self._savable(present.get(name)):
                present[name] = value

    def node(self, node: Node | Leaf) -> Any:
        if type(node) is not tuple:
            return node
        kind = node[0]
        if kind == "complex":
            return complex(node[1], node[2])
        if kind == "tuple":
            return tuple([self.node(item) for item in node[1]])
        if kind == "same":
            return self._seen[node[1]]
        place = len(self._seen)
        self._seen.append(None)
        if kind in ("list", "dict", "deque"):
            return self._container(node, place)
        if kind == "array":
            value = self._array(*node[1:])
        elif kind == "view":
            value = np.ndarray(node[2], node[1], self._regions[node[5]], node[4], node[3])
        elif kind == "set":
            value = node[1]
        else:
            value = self._special(node)
        self._seen[place] = value
        return value

    def _special(self, node: Node) -> Any:
        """Read a node of a subclass's `Packer`; here, random generators."""
        return new_generator(node)

    def _container(self, node: Node, place: int) -> list[Any] | dict[Any, Any] | deque[Any]:
        # Registered before its items are read, since one of them may refer to it.
        value: list[Any] | dict[Any, Any] | deque[Any]
        value = deque(maxlen=node[2]) if node[0] == "deque" else {} if node[0] == "dict" else []
        self._seen[place] = value
        if isinstance(value, dict):
            for key, item in node[1]:
                value[self.node(key)] = self.node(item)
        else:
            value.extend(self.node(item) for item in node[1])
        return value

    def _array(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, memory: int | np.ndarray) -> np.ndarray:
        if isinstance(memory, np.ndarray):
            self._seen.append(memory)
        else:
            memory = cast(np.ndarray, self._seen[memory])
        if memory.size == 0:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, memory, offset, strides)


def layers_of(env: gymnasium.Env) -> list[Any]:
    """The environment, its wrappers from the outside in, and environments that one of them wraps (kitchen, mazes)."""
    found: list[Any] = []
    waiting: list[Any] = [env]
    while waiting:
        layer = waiting.pop(0)
        if not any(layer is other for other in found):
            found.append(layer)
            waiting += [value for value in vars(layer).values() if isinstance(value, gymnasium.Env)]
    return found


def unique_held(layers: Sequence[Any], kind: str) -> list[Any]:
    """MuJoCo's structures of one kind among the attributes of `layers_of` an environment, each once."""
    values = (value for layer in layers for value in vars(layer).values())
    found = {id(value): value for value in values if type(value).__name__ == kind and type(value).__module__.startswith("mujoco")}
    return list(found.values())


def _spaces(space: gymnasium.spaces.Space) -> Iterator[gymnasium.spaces.Space]:
    yield space
    inner: Iterable[gymnasium.spaces.Space] = ()
    if isinstance(space, gymnasium.spaces.Dict):
        inner = space.spaces.values()
    elif isinstance(space, (gymnasium.spaces.Tuple, gymnasium.spaces.OneOf)):
        inner = space.spaces
    for part in inner:
        yield from _spaces(part)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
