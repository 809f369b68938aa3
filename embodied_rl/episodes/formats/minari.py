"""Minari 0.5's data sets in HDF5 (Younis et al. 2024, https://minari.farama.org).

``data/main_data.hdf5``: ``episode_i`` with ``observations`` [T + 1, …] (an array, or nested groups), ``actions``, ``rewards``,
``terminations``, ``truncations`` [T] and ``infos``; ``data/metadata.json``: spaces, totals and authors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.episodes.formats import base
from embodied_rl.episodes.formats.hdf5 import H5File, H5Recording, new_file, read_column, read_extras, write_array, write_extras
from embodied_rl.episodes.pictures import decode_picture
from embodied_rl.episodes.recording import (
    FieldNote,
    RecordedEpisode,
    Recording,
    RecordingError,
    RecordingInfo,
    damaged,
    raised_as_damage,
)
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec

if TYPE_CHECKING:
    import h5py


MIN_PICTURE = 32
"""Smallest side in pixels of a uint8 Box of 0 … 255 that Minari treats as a picture."""


@dataclass(frozen=True)
class Leaf:
    """One part of an observation space."""

    key: str
    """Key of the part here: ``state`` or ``rgb`` if it is the whole observation, else the keys joined by dots."""
    path: tuple[str, ...]
    """Names of its groups below ``observations``."""
    spec: TensorSpec | VariableSpec
    is_picture: bool = False
    """Whether Minari may have stored it as JPEG files."""


def leaves_of(space: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the parts of a serialised observation space. Raises KeyError, TypeError or ValueError if it is invalid."""
    kind = space["type"]
    if kind == "Dict":
        for key, inner in space["subspaces"].items():
            yield from leaves_of(inner, (*path, str(key)))
    elif kind == "Tuple":
        for index, inner in enumerate(space["subspaces"]):
            yield from leaves_of(inner, (*path, f"_index_{index}"))
    elif kind == "Text":
        yield Leaf(_key(path, "text"), path, VariableSpec("text"))
    elif kind == "Box":
        shape, dtype = tuple(int(size) for size in space["shape"]), str(np.dtype(space["dtype"]))
        wide = dtype == "uint8" and len(shape) in (2, 3) and min(shape[:2]) >= MIN_PICTURE
        picture = wide and bool(np.all(np.asarray(space["low"]) == 0) and np.all(np.asarray(space["high"]) == 255))
        yield Leaf(_key(path, "rgb" if picture and len(shape) == 3 else "state"), path, TensorSpec(shape, dtype), picture)
    elif kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        yield Leaf(_key(path, "state"), path, TensorSpec(_integer_shape(space), "int64"))
    else:
        raise ValueError(f"{kind} is not among Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text and Tuple")


def _key(path: tuple[str, ...], single: str) -> str:
    return ".".join(step.removeprefix("_index_") for step in path) or single


def _integer_shape(space: Mapping[str, Any]) -> tuple[int, ...]:
    if space["type"] == "Discrete":
        return ()
    if space["type"] == "MultiDiscrete":
        return tuple(np.shape(space["nvec"]))
    n = space["n"]
    return tuple(int(size) for size in n) if isinstance(n, list) else (int(n),)


def action_spec_of(space: Mapping[str, Any]) -> ActionSpec | None:
    """Action spec of a serialised action space; None for a Box without finite bounds.
    Raises KeyError, TypeError or ValueError for an unsupported space."""
    kind = space["type"]
    if kind == "Discrete":
        if space.get("start", 0) != 0:
            raise ValueError(f"actions begin at {space['start']}, not at 0")
        return ActionSpec.discrete(int(space["n"]))
    if kind == "Text":
        return ActionSpec.text()
    if kind != "Box":
        raise ValueError(f"actions of kind {kind}; Box, Discrete and Text are read")
    low, high = np.asarray(space["low"], np.float64).ravel(), np.asarray(space["high"], np.float64).ravel()
    if not low.size == high.size == math.prod(space["shape"]):
        raise ValueError("action bounds of another shape than the actions")
    return ActionSpec.continuous(low, high) if np.isfinite(low).all() and np.isfinite(high).all() else None


def observation_space_of(parts: Mapping[str, TensorSpec | VariableSpec], texts: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """Serialised space of observations: the Box itself for a single ``state``, else a Dict.

    Args:
        parts: {key: spec}; only texts may vary in size.
        texts: {key: (longest text, letters)}.
    """
    spaces = {key: _text(texts[key]) if isinstance(part, VariableSpec) else _box(part) for key, part in parts.items()}
    return spaces["state"] if tuple(parts) == ("state",) else {"type": "Dict", "subspaces": spaces}


def action_space_of(spec: ActionSpec, text: tuple[int, str] | None) -> dict[str, Any]:
    """Serialised space of actions; `text`: (longest text, letters) of text actions."""
    if spec.kind == "discrete":
        return {"type": "Discrete", "dtype": "int64", "start": 0, "n": spec.num_actions}
    if text is not None:
        return _text(text)
    return {"type": "Box", "dtype": "float32", "shape": [spec.dim], "low": list(spec.low), "high": list(spec.high)}


def _text(text: tuple[int, str]) -> dict[str, Any]:
    return {"type": "Text", "max_length": max(1, text[0]), "min_length": 0, "charset": text[1]}


def _box(part: TensorSpec) -> dict[str, Any]:
    dtype = np.dtype(part.dtype)
    if dtype.kind == "f":
        low, high = -math.inf, math.inf
    elif dtype.kind == "b":
        low, high = 0, 1
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    full = np.full(part.shape, low).tolist(), np.full(part.shape, high).tolist()
    return {"type": "Box", "dtype": part.dtype, "shape": list(part.shape), "low": full[0], "high": full[1]}


DATA_FILE, METADATA_FILE = "main_data.hdf5", "metadata.json"
WRITTEN_VERSION = "0.5.4"
"""Version of Minari's format that is written."""
_EPISODE = re.compile(r"episode_(\d+)")
_SUCCESS = ("success", "is_success")
_ABOUT = ("algorithm_name", "author", "author_email", "code_permalink", "dataset_id", "description", "env_spec", "minari_version")


def folder_of(path: Path) -> Path:
    """Folder with `METADATA_FILE`: `path` or ``data`` in it."""
    return path / "data" if (path / "data" / METADATA_FILE).is_file() else path


# ---- reading --------------------------------------------------------------------------------------------------------


class MinariRecording(H5Recording):
    """Reads one data set. Raises RecordingError if it is damaged or inconsistent."""

    format = "minari"

    def __init__(self, path: Path) -> None:
        folder = folder_of(path)
        self._meta_path = folder / METADATA_FILE
        self._meta = base.read_json(self._meta_path)
        if self._meta.get("data_format", "hdf5") != "hdf5":
            raise damaged(self._meta_path, f"is '{self._meta['data_format']}'; of Minari's storages only hdf5 is read", field="data_format")
        self._leaves, self._action_spec = self._spaces()
        super().__init__(folder / DATA_FILE, folder)

    def _open(self, notes: base.NoteBook) -> tuple[int, RecordingInfo | None]:
        file, side = self._file, self._meta.get(base.SIDE_ENTRY)
        found = [match for name in file.names(file.root) if (match := _EPISODE.fullmatch(name))]
        self._numbers = sorted(int(match.group(1)) for match in found)
        total = self._meta.get("total_episodes", len(self._numbers))
        if not self._numbers or total != len(self._numbers):
            raise damaged(file.path, f"holds {len(self._numbers)} episodes, {METADATA_FILE} says {total}")
        info = None if side is None else base.parse_side_info(self._meta_path, side)
        names = {leaf.key for leaf in self._leaves} if info is None else info.spec.observation
        if len(names) != len(self._leaves):
            raise damaged(self._meta_path, "names other observations than the space", field=base.SIDE_ENTRY)
        action = self._action_spec if info is None else info.spec.action
        self._discrete = action is not None and action.kind == "discrete"
        return len(self._numbers), info

    def _episode(self, number: int) -> RecordedEpisode:
        notes = base.NoteBook()
        file, group = self._file, self._group(number)
        fields = self._flags(number, notes)
        rows = len(fields["reward"]) + 1
        leaves = zip(self.spec.observation, self._leaves, strict=True)
        fields["observation"] = {key: self._leaf(group, leaf, number, rows) for key, leaf in leaves}
        options = {name.partition("/")[2]: file.attribute(group, name, number) for name in group.attrs if name.startswith("options/")}
        fields.setdefault("metadata", {"reset_options": options} if options else {})
        return base.finish_episode(file.path, number, fields)

    def _spaces(self) -> tuple[tuple[Leaf, ...], ActionSpec | None]:
        parsed = {}
        for name in ("observation_space", "action_space"):
            space = self._meta.get(name)
            if space is None:
                raise damaged(self._meta_path, "is missing, and is not looked up by making the environment", field=name)
            parsed[name] = base.parse_json(self._meta_path, space, name) if isinstance(space, str) else space
        with raised_as_damage(self._meta_path, field="spaces", said="holds a space that cannot be read"):
            return tuple(leaves_of(parsed["observation_space"])), action_spec_of(parsed["action_space"])

    def _group(self, number: int) -> h5py.Group:
        return self._file.group(self._file.root, f"episode_{self._numbers[number]}", number)

    def _flags(self, number: int, notes: base.NoteBook) -> dict[str, Any]:
        file, group = self._file, self._group(number)
        reward = file.array(group, "rewards", number)
        length = self._length(reward, "rewards", "total_steps", file.attribute(group, "total_steps", number), number)
        fields: dict[str, Any] = {
            "reward": base.as_float32(reward.reshape(length), "reward", notes),
            "action": self._action(group, number, length, notes),
        }
        fields |= self._ends(group, number, length, {"terminated": "terminations", "truncated": "truncations"}, notes)
        fields["success"] = self._success(group, number, length, notes)
        seed = base.seed_or_unknown(file.attribute(group, "seed", number), number, notes, "not every episode has one")
        return fields | {"seed": seed} | read_extras(file, group, number, length)

    def _action(self, group: h5py.Group, number: int, length: int, notes: base.NoteBook) -> np.ndarray:
        action = read_column(self._file, group, "actions", number, length)
        if action.dtype == object:
            return action
        if self._discrete:
            return action.astype(np.int64).reshape(length, 1)
        return base.as_float32(action.reshape(length, -1), "action", notes)

    def _success(self, group: h5py.Group, number: int, length: int, notes: base.NoteBook) -> np.ndarray:
        """Success from the infos, which begin with the reset's in Minari's own recorder."""
        file = self._file
        infos = file.group(group, "infos", number) if file.has(group, "infos") else None
        name = next((name for name in _SUCCESS if infos is not None and file.has(infos, name)), None)
        if infos is None or name is None or file.is_group(infos, name, number):
            return base.filled("success", length, notes, "the file has none")
        values = file.array(infos, name, number)
        if len(values) not in (length, length + 1):
            raise damaged(file.path, f"has {len(values)} rows instead of {length} or {length + 1}", number, f"infos/{name}")
        return values[-length:].astype(bool).reshape(length)

    def _leaf(self, group: h5py.Group, leaf: Leaf, number: int, rows: int) -> np.ndarray:
        """One part of the observation, [T + 1, …]."""
        file, parent, name = self._file, group, "observations"
        for step in leaf.path:
            parent, name = file.group(parent, name, number), step
        dataset = file.dataset(parent, name, number, kinds="biufOS")
        if isinstance(leaf.spec, VariableSpec):
            return file.strings(parent, name, number, rows)
        field = f"observations/{'/'.join(leaf.path)}".rstrip("/")
        shape = leaf.spec.shape
        if leaf.is_picture and (dataset.dtype.kind == "O" or dataset.ndim == 2):
            return _decode_jpegs(file, dataset, leaf.spec, number, rows, field)
        part = file.array(parent, name, number, rows)
        if part.shape[1:] != shape and part.size != rows * int(np.prod(shape)):
            raise damaged(file.path, f"has rows of {list(part.shape[1:])}, the space says {list(shape)}", number, field)
        return part.astype(leaf.spec.dtype, copy=False).reshape(rows, *shape)

    def _foreign_info(self, bounds: base.ActionBounds, notes: base.NoteBook) -> RecordingInfo:
        action, meta, env = self._action_spec or bounds.spec(notes), self._meta, {}
        if isinstance(meta.get("env_spec"), str):
            env = base.parse_json(self._meta_path, meta["env_spec"], "env_spec")
        limit = env.get("max_episode_steps")
        if not env.get("id"):
            notes.add("spec.task", "filled", "the file names no environment; the data set's name")
        notes.add("spec.control_hz", "filled", "the file does not say; not known")
        spec = SimSpec(
            task=str(env.get("id") or meta.get("dataset_id") or self._meta_path.parent.name),
            observation={leaf.key: leaf.spec for leaf in self._leaves},
            action=action,
            max_episode_steps=limit if type(limit) is int else None,
            reports_success="success" not in {note.field for note in notes},
        )
        about = {name: meta[name] for name in _ABOUT if name in meta}
        return RecordingInfo(spec, sim={}, policy=base.IMPORTED, metadata={"format": self.format, **about})


def _decode_jpegs(file: H5File, dataset: h5py.Dataset, spec: TensorSpec, number: int, rows: int, field: str) -> np.ndarray:
    """Decode Minari's pictures: JPEG files, each an array of bytes."""
    if len(dataset) != rows:
        raise damaged(file.path, f"has {len(dataset)} rows instead of {rows}", number, field)
    pictures = []
    for row in range(rows):
        with raised_as_damage(file.path, number, field, said=f"row {row}"):
            pictures.append(decode_picture(np.asarray(dataset[row], np.uint8).tobytes(), spec.shape, ["JPEG"]))
    return np.stack(pictures)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(recording: Recording, folder: Path, target: Path, advance: base.Advance) -> tuple[FieldNote, ...]:
    """Write ``data`` into an empty folder; the data set's id is `dataset_id`.

    Raises:
        RecordingError: the recording contains data that the format cannot, or is damaged; or `target` is no location for a Minari data set.
        OSError: the files cannot be written.
    """
    spec, notes, name = recording.spec, base.NoteBook(), dataset_id(target)
    kept: dict[str, TensorSpec | VariableSpec] = {}
    for key, part in spec.observation.items():
        if isinstance(part, VariableSpec) and part.kind != "text":
            notes.add(f"observation.{key}", "lost", "Minari has no space for parts of varying size but text")
        else:
            kept[key] = part
            notes.add(f"observation.{key}", "kept")
    if not kept:
        raise RecordingError("Minari's format has no space for any part of these observations. Choose native or lerobot.")
    for field in ("action", "reward", "terminated", "truncated"):
        notes.add(field, "kept")
    notes.add("success", "kept", "infos/success")
    seen: _Texts = {}
    (folder / "data").mkdir()
    data = folder / "data" / DATA_FILE
    _write_h5(data, recording, kept, notes, seen, advance)
    metadata = _metadata(recording, kept, name, seen) | {"dataset_size": round(data.stat().st_size / 1e6, 1)}
    (data.parent / METADATA_FILE).write_text(json.dumps(metadata), encoding="utf-8")
    return tuple(notes)


def dataset_id(target: Path) -> str:
    """Minari's id of the data set in the folder `target`. Below Minari's folder ($MINARI_DATASETS_PATH, else ``~/.minari/datasets``) the id
    is the path from there, ``namespace/name-v0``; elsewhere it is the folder's name, with ``-v0`` if that has no version.
    Raises RecordingError: an invalid id below Minari's folder, which would make Minari fail to list any data set.
    """
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets").resolve()
    if not target.is_relative_to(root):
        name = re.sub(r"[^-\w]", "_", target.name, flags=re.ASCII)
        return name if re.search(r"-v\d+$", name) else f"{name}-v0"
    found = target.relative_to(root).as_posix()
    if not re.fullmatch(r"(?:[-\w]+/)*[-\w]+-v\d+", found, re.ASCII):
        better = "/".join(re.sub(r"[^-\w]", "_", part, flags=re.ASCII) for part in found.split("/"))
        better = better if re.search(r"-v\d+$", better) else f"{better}-v0"
        place = f"output={root / better}"
        raise RecordingError(f"Minari finds data sets by their folder, NAMESPACE/NAME-v0; '{found}' is none. Type: {place}")
    return found


_Texts = dict[str, tuple[int, frozenset[str]]]
"""Requirements on text spaces, longest text and letters, by observation key (`_ACTION` for actions)."""
_ACTION = "\0action"


def _note_texts(seen: _Texts, key: str, texts: np.ndarray) -> None:
    longest, letters = seen.get(key, (0, frozenset()))
    seen[key] = max(longest, *map(len, texts)), letters.union(*texts)


def _write_h5(
    path: Path,
    recording: Recording,
    kept: Mapping[str, TensorSpec | VariableSpec],
    notes: base.NoteBook,
    seen: _Texts,
    advance: base.Advance,
) -> None:
    with new_file(path, advance, track_order=True) as (file, advanced):
        for number, episode in enumerate(recording):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["total_steps"] = number, episode.num_steps
            if episode.seed >= 0:
                group.attrs["seed"] = episode.seed
            for key, part in kept.items():
                write_array(group, "observations" if tuple(kept) == ("state",) else f"observations/{key}", episode.observation[key])
                if isinstance(part, VariableSpec):
                    _note_texts(seen, key, episode.observation[key])
            kind = recording.spec.action.kind
            write_array(group, "actions", episode.action.reshape(-1) if kind == "discrete" else episode.action)
            if kind == "text":
                _note_texts(seen, _ACTION, episode.action)
            write_array(group, "rewards", episode.reward)
            write_array(group, "terminations", episode.terminated)
            write_array(group, "truncations", episode.truncated)
            # Minari's recorder also keeps the reset's info: T + 1 rows.
            write_array(group, "infos/success", np.concatenate([[False], episode.success]))
            write_extras(group, episode, notes, with_state=True, own=("seed",))
            advanced(1)


def _metadata(recording: Recording, kept: Mapping[str, TensorSpec | VariableSpec], name: str, seen: _Texts) -> dict[str, Any]:
    info = recording.info
    about = {name: info.metadata[name] for name in _ABOUT if name in info.metadata} if info.metadata.get("format") == "minari" else {}
    texts = {key: (longest, "".join(sorted(letters))) for key, (longest, letters) in seen.items()}
    return {
        **about,
        "dataset_id": name,
        "minari_version": WRITTEN_VERSION,
        "total_episodes": len(recording),
        "total_steps": recording.num_steps,
        "data_format": "hdf5",
        # Otherwise Minari would expect JPEG files, which are not exact.
        "jpeg_encoding": False,
        "observation_space": json.dumps(observation_space_of(kept, texts)),
        "action_space": json.dumps(action_space_of(info.spec.action, texts.get(_ACTION))),
        "algorithm_name": about.get("algorithm_name") or str(info.policy.get("kind", "unknown")),
        base.SIDE_ENTRY: base.side_info(info, kept),
    }
