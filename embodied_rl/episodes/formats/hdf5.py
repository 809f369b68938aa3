"""Untrusted HDF5 files of other programs, and shared writing code of the HDF5 formats.

The reader refuses anything that reaches outside the file or requires objects to be built: links, external and virtual datasets, object and
region references, compound and opaque types.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from embodied_rl.episodes.formats import base
from embodied_rl.episodes.recording import (
    OPTIONAL_COLUMNS,
    RecordedEpisode,
    RecordingError,
    damaged,
    raised_as_damage,
)
from embodied_rl.errors import brief, from_extra
from embodied_rl.types import SimSpec, TensorSpec

if TYPE_CHECKING:
    import h5py

MAX_RATIO = 1100
"""Largest accepted ratio of a field's size to its bytes in the file: deflate reaches 1,032 with zeros, HDF5's other filters less with real
data. A field that claims more, and more than `SMALL_BYTES`, counts as false."""
SMALL_BYTES = 2**24
_BLOCK_BYTES = 2**26
"""Number of bytes read at once."""
_NUMBERS = "biuf"


def import_h5py() -> Any:
    """Import h5py. Raises MissingExtraError with the pip line."""
    with from_extra("Reading and writing HDF5 files", "formats"):
        import h5py
    return h5py


class H5File:
    """An open HDF5 file. Every method raises RecordingError naming the file, the episode and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._h5py = import_h5py()
        if not path.is_file():
            raise damaged(path, "is missing")
        self._size = path.stat().st_size
        with raised_as_damage(path, said="cannot be opened as HDF5: it is damaged, cut short, or another kind of file"):
            self.root: h5py.Group = self._h5py.File(path, "r")

    def close(self) -> None:
        self.root.file.close()

    def has(self, group: h5py.Group, name: str) -> bool:
        # `in group` would follow links.
        return bool(group.id.links.exists(name.encode()))

    def group(self, parent: h5py.Group, name: str, episode: int | None = None) -> h5py.Group:
        """A group directly below `parent`."""
        found = self._child(parent, name, episode)
        if not isinstance(found, self._h5py.Group):
            raise damaged(self.path, "must be a group, is a dataset", episode, _field(parent, name))
        return found

    def is_group(self, parent: h5py.Group, name: str, episode: int | None = None) -> bool:
        """Whether the existing child `name` of `parent` is a group."""
        return isinstance(self._child(parent, name, episode), self._h5py.Group)

    def names(self, group: h5py.Group) -> list[str]:
        """Names directly below a group, in the order of creation if the file keeps it."""
        with raised_as_damage(self.path, None, group.name):
            return list(group.keys())

    def dataset(self, parent: h5py.Group, name: str, episode: int | None = None, kinds: str = _NUMBERS) -> h5py.Dataset:
        """A dataset directly below `parent`, with a dtype of one of numpy's `kinds` ("O": strings, or arrays of bytes)."""
        found, field = self._child(parent, name, episode), _field(parent, name)
        if not isinstance(found, self._h5py.Dataset):
            raise damaged(self.path, "must be a dataset, is a group", episode, field)
        with raised_as_damage(self.path, episode, field):
            stored = found.id.get_create_plist()
            if stored.get_external_count() or stored.get_layout() == self._h5py.h5d.VIRTUAL:
                raise damaged(self.path, "keeps its data in another file, which is not followed", episode, field)
            dtype = found.dtype
            if dtype.kind == "O":
                inner = self._h5py.check_vlen_dtype(dtype)
                # A reference is an object too, and following it would leave the requested field.
                plain = self._h5py.check_string_dtype(dtype) is not None or (inner is not None and np.dtype(inner).kind in "iu")
                if not plain:
                    raise damaged(self.path, "holds objects or references, which are not read", episode, field)
            if dtype.kind not in kinds:
                raise damaged(self.path, f"must hold {'numbers' if kinds == _NUMBERS else 'text'}, holds {dtype}", episode, field)
            self._require_honest(found, episode, field)
        return found

    def _require_honest(self, found: h5py.Dataset, episode: int | None, field: str) -> None:
        """Check, before allocating memory, that a dataset claims no more than its bytes in the file can contain."""
        if found.size is None:
            raise damaged(self.path, "claims None values: it is empty", episode, field)
        stored = min(found.id.get_storage_size(), self._size)
        # HDF5 allocates a whole chunk, however little of it is read.
        claimed = found.dtype.itemsize * max(found.size, math.prod(found.chunks or ()))
        if claimed > max(SMALL_BYTES, MAX_RATIO * stored):
            what = f"claims {brief(list(found.shape), 60)} values of {found.dtype}, {claimed:,} bytes, and has {stored:,} in the file"
            raise damaged(self.path, what, episode, field)
        if claimed > psutil.virtual_memory().available:
            raise damaged(self.path, f"takes {claimed / 2**30:.1f} GiB, more than this machine has free", episode, field)

    def array(self, parent: h5py.Group, name: str, episode: int | None = None, length: int | None = None) -> np.ndarray:
        """Numbers [T, ...]; `length`: required T."""
        found = self.dataset(parent, name, episode)
        field = _field(parent, name)
        if found.ndim < 1:
            raise damaged(self.path, "must have a row per step, is a single number", episode, field)
        if length is not None and found.shape[0] != length:
            raise damaged(self.path, f"has {found.shape[0]} rows instead of {length}", episode, field)
        with raised_as_damage(self.path, episode, field):
            values = np.empty(found.shape, found.dtype)
            rows = max(1, _BLOCK_BYTES // max(1, found.dtype.itemsize * math.prod(found.shape[1:])))
            for first in range(0, len(values) if values.size else 0, rows):
                values[first : first + rows] = found[first : first + rows]
            return values

    def strings(self, parent: h5py.Group, name: str, episode: int | None = None, length: int | None = None) -> np.ndarray:
        """Texts as an object array [T] of str."""
        found = self.dataset(parent, name, episode, kinds="OS")
        field = _field(parent, name)
        if found.ndim > 1:
            raise damaged(self.path, f"must hold a text a step, holds {brief(list(found.shape), 60)}", episode, field)
        if length is not None and found.size != length:
            raise damaged(self.path, f"has {found.size} rows instead of {length}", episode, field)
        with raised_as_damage(self.path, episode, field):
            texts = (value.decode("utf-8") if isinstance(value, bytes) else str(value) for value in self._values(found, episode, field))
            return np.fromiter(texts, object, found.size)

    def _values(self, found: h5py.Dataset, episode: int | None, field: str) -> Iterator[Any]:
        """Yield texts block by block: rows may all point to one long text, so a few bytes in the file may be millions in memory."""
        if not found.ndim:
            yield found[()]
            return
        total, rows = 0, max(1, min(1024, _BLOCK_BYTES // max(1, self._size)))
        for first in range(0, len(found), rows):
            for value in found[first : first + rows]:
                total += len(value)
                if total > max(SMALL_BYTES, 4 * self._size):
                    raise damaged(self.path, f"holds more than {total:,} bytes of text, and the file has {self._size:,}", episode, field)
                yield value

    def leaves(
        self, group: h5py.Group, episode: int | None = None, joint: str = "/", seen: frozenset[int] = frozenset()
    ) -> dict[str, tuple[h5py.Group, str]]:
        """{name below the group, levels joined by `joint`: (parent, name there)} of all datasets below a group."""
        found: dict[str, tuple[h5py.Group, str]] = {}
        with raised_as_damage(self.path, episode, group.name):
            seen |= {self._h5py.h5o.get_info(group.id).addr}
        for name in self.names(group):
            child = self._child(group, name, episode)
            if isinstance(child, self._h5py.Group):
                if self._h5py.h5o.get_info(child.id).addr in seen:
                    raise damaged(self.path, "is a group that lies within itself", episode, _field(group, name))
                found |= {f"{name}{joint}{inner}": place for inner, place in self.leaves(child, episode, joint, seen).items()}
            else:
                found[name] = (group, name)
        return found

    def arrays(self, group: h5py.Group, episode: int | None = None, length: int | None = None) -> dict[str, np.ndarray]:
        """{name below the group, levels joined by "/": numbers [length, ...]} of all datasets below a group."""
        return {name: self.array(*place, episode, length) for name, place in self.leaves(group, episode).items()}

    def attribute(self, owner: h5py.HLObject, name: str, episode: int | None = None) -> Any:
        """Numbers or a text as plain Python objects; None if the attribute is missing."""
        with raised_as_damage(self.path, episode, f"{owner.name}@{name}"):
            if name not in owner.attrs:
                return None
            dtype = owner.attrs.get_id(name).dtype
            if dtype.kind == "O" and self._h5py.check_string_dtype(dtype) is None:
                raise damaged(self.path, "holds objects or references, which are not read", episode, f"{owner.name}@{name}")
            if owner.attrs.get_id(name).get_storage_size() > self._size:
                raise damaged(self.path, "claims more than the file has", episode, f"{owner.name}@{name}")
            value = owner.attrs[name]
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def _child(self, parent: h5py.Group, name: str, episode: int | None) -> Any:
        field = _field(parent, name)
        with raised_as_damage(self.path, episode, field):
            if not self.has(parent, name):
                raise damaged(self.path, "is missing", episode, field)
            kind = parent.id.links.get_info(name.encode()).type
            if kind != self._h5py.h5l.TYPE_HARD:
                raise damaged(self.path, "is a link to somewhere else, which is not followed", episode, field)
            return parent[name]


class H5Recording(base.ForeignRecording):
    """Episodes as groups in one HDF5 file, whose small columns are read once on opening."""

    def __init__(self, file: Path, path: Path | None = None) -> None:
        """Open `file` for the recording at `path` (None: the file itself)."""
        self._file = H5File(file)
        try:
            super().__init__(path or file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _length(self, rows: np.ndarray, field: str, name: str, claimed: object, number: int) -> int:
        """Number of steps of an episode, T: that of the `rows` [T, ...] of a field. Raises RecordingError if `name` claims another one."""
        if len(rows) < 1 or (claimed is not None and claimed != len(rows)):
            raise damaged(self._file.path, f"holds {len(rows)} rows, {name} says {claimed}", number, field)
        return len(rows)

    def _ends(self, group: h5py.Group, number: int, length: int, names: Mapping[str, str], notes: base.NoteBook) -> dict[str, np.ndarray]:
        """{field: [T] flags} from the file's, which `names` names; only the last counts."""
        read = {field: self._file.array(group, name, number, length).astype(bool) for field, name in names.items()}
        return {field: base.split_ends(flags, field, notes) for field, flags in read.items()}


def _field(parent: h5py.Group, name: str) -> str:
    return f"{parent.name.rstrip('/')}/{name}"


# ---- writing --------------------------------------------------------------------------------------------------------


class _Disk(io.FileIO):
    """A file whose writes never fail for HDF5, which crashes when it closes a file after a failed write."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._attempt(lambda: super(_Disk, self).write(data) == size)
        return size

    def truncate(self, size: int | None = None) -> int:
        self._attempt(lambda: super(_Disk, self).truncate(size) == size)
        return size or 0

    def _attempt(self, write: Callable[[], bool]) -> None:
        if self.failure is None:
            try:
                if not write():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.failure = error


@contextmanager
def new_file(path: Path, advance: base.Advance, **options: Any) -> Iterator[tuple[h5py.Group, base.Advance]]:
    """Yield a new HDF5 file, and `advance` for every episode in it. Both raise OSError if the file cannot be written."""
    with _Disk(path, "w+") as disk:

        def checked(count: int) -> None:
            if disk.failure is not None:
                raise disk.failure
            advance(count)

        try:
            with import_h5py().File(disk, "w", **options) as file:
                yield file, checked
        finally:
            if disk.failure is not None:
                raise disk.failure


def require_numbers(spec: SimSpec, project: str, notes: base.NoteBook) -> Mapping[str, TensorSpec]:
    """Observations that a format of numbers can store; notes the others. Raises RecordingError if it cannot store the recording."""
    if spec.action.kind == "text":
        raise RecordingError(f"{project}'s format holds actions as numbers, and these are text. Choose native, lerobot or minari.")
    for key in spec.variables:
        notes.add(f"observation.{key}", "lost", "parts of varying size have no place in this format")
    if not spec.tensors:
        raise RecordingError(f"{project}'s format holds observations as numbers, and these have none. Choose native, lerobot or minari.")
    return spec.tensors


def write_array(group: h5py.Group, name: str, array: np.ndarray) -> None:
    """Write numbers, or an object array of str; pictures are compressed, one per chunk, so that each can be read alone."""
    options: dict[str, Any] = {"data": array}
    if array.dtype == object:
        for row, text in enumerate(array):
            if not is_storable(text):
                raise RecordingError(
                    f"{group.name}/{name}, row {row}: HDF5 files cannot store text with NUL or half a surrogate pair, as {text!r:.80}."
                )
        options = {"data": list(array), "dtype": import_h5py().string_dtype("utf-8")}
    elif array.dtype == np.uint8 and array.ndim == 4 and array.size:
        options |= {"chunks": (1, *array.shape[1:]), "compression": "gzip", "compression_opts": 4}
    try:
        group.create_dataset(name, **options)
    except (TypeError, ValueError) as error:  # a name that is the beginning of another one, say
        raise RecordingError(f"{group.name}/{name}: HDF5 files cannot store it ({brief(error)}).") from error


def is_storable(value: object) -> bool:
    """Whether an HDF5 file can store it as text, which has neither NUL nor half a surrogate pair."""
    return isinstance(value, str) and "\0" not in value and value == value.encode("utf-8", "replace").decode()


def write_extras(
    group: h5py.Group, episode: RecordedEpisode, notes: base.NoteBook, with_state: bool, flags: Sequence[str] = (), own: Sequence[str] = ()
) -> None:
    """Write data without a place in the format into ``embodied_rl`` below an episode's group, and note it.

    Args:
        with_state: whether to include the simulator's states.
        flags: which of terminated, truncated and success to include.
        own: fields of `base.side_episode` that the format itself stores.
    """
    extras = {name: part for name, part in episode.per_step().items() if name in (*OPTIONAL_COLUMNS, *flags)}
    extras |= {f"images/{camera}": pictures for camera, pictures in episode.images.items()}
    if with_state:
        extras |= {f"state/{name}": part for name, part in (episode.state or {}).items()}
    ours = group.create_group(base.SIDE_ENTRY, track_order=True)
    ours.attrs["episode"] = json.dumps(base.side_episode(episode))
    for name, part in extras.items():
        write_array(ours, name, part)
        field = name.split("/")[0]
        notes.add(field if field == "state" else name.replace("/", "."), "extra", f"{base.SIDE_ENTRY}/{name.split('/')[0]}")
    base.note_side_episode(episode, notes, f"{base.SIDE_ENTRY}@episode", own)


def read_extras(file: H5File, group: h5py.Group, number: int, length: int) -> dict[str, Any]:
    """Fields of `RecordedEpisode` from `write_extras`; empty for a file of another program. Raises RecordingError."""
    if not file.has(group, base.SIDE_ENTRY):
        return {}
    ours = file.group(group, base.SIDE_ENTRY, number)
    fields = base.parse_side_episode(
        file.path, base.parse_json(file.path, file.attribute(ours, "episode", number), base.SIDE_ENTRY, number), number
    )
    for name in (*OPTIONAL_COLUMNS, "terminated", "truncated", "success"):
        if file.has(ours, name):
            fields[name] = read_column(file, ours, name, number, length)
    for name in ("images", "state"):
        if file.has(ours, name):
            fields[name] = file.arrays(file.group(ours, name, number), number, length + 1)
    return fields


def read_column(file: H5File, group: h5py.Group, name: str, number: int, length: int) -> np.ndarray:
    """Numbers [T, ...] or texts [T] of a column."""
    if file.dataset(group, name, number, kinds="biufOS").dtype.kind in "OS":
        return file.strings(group, name, number, length)
    return file.array(group, name, number, length)
