"""Damage to files: of any kind by their bytes, and of the kinds that have a structure by what they claim."""

from __future__ import annotations

import io
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Files = dict[str, bytes]
"""{path within the folder: content}"""

WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 2**31, 2**40, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x00", "../../../etc/passwd", "/etc/passwd", "os:system", "é" * 3000, "|O", "<f4", "{0.__class__}", "%s%n"),
    *([], [[]], {}, {"a": {}}, [2**40, 2**40, 3], [-1], [0], ["x"] * 2000, {"type": "Box"}, [1e999]),
)
DEEP = 100_000


def damage(files: Files, folder: Path, chance: random.Random) -> str:
    """Change one of the files (or two), write all of them into `folder`. Returns what was done."""
    changed = dict(files)
    name = chance.choice(sorted(changed))
    ways: list[Callable[[Files, str, random.Random], str]] = [_flip, _cut, _zero, _noise, _splice, _swap, _empty, _remove, _extra, _double]
    by_suffix: dict[str, list[Callable[[Files, str, random.Random], str]]] = {
        ".json": [_json_value, _json_text],
        ".jsonl": [_json_value, _json_text],
        ".yaml": [_yaml_value, _yaml_text],
        ".npy": [_npy_header],
        ".h5": [_hdf5],
        ".hdf5": [_hdf5],
        ".parquet": [_parquet],
        ".safetensors": [_safetensors],
    }
    own = by_suffix.get(Path(name).suffix, [])
    # What claims something is attacked three times in four by its claims.
    way = chance.choice(own) if own and chance.random() < 0.75 else chance.choice([*ways, _special])
    if way is _special:
        write(changed, folder)
        return _special(folder, name, chance)
    told = way(changed, name, chance)
    write(changed, folder)
    return told


def write(files: Files, folder: Path) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def _flip(files: Files, name: str, chance: random.Random) -> str:
    data = bytearray(files[name])
    places = [chance.randrange(len(data)) for _ in range(chance.choice((1, 1, 2, 8, 64)))] if data else []
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    files[name] = bytes(data)
    return f"{name}: {len(places)} bits flipped"


def _cut(files: Files, name: str, chance: random.Random) -> str:
    size = chance.randrange(len(files[name]) + 1)
    files[name] = files[name][:size]
    return f"{name}: cut to {size} bytes"


def _zero(files: Files, name: str, chance: random.Random) -> str:
    data = bytearray(files[name])
    start, size, byte = chance.randrange(len(data) + 1), chance.randrange(1, 200), chance.choice((0, 255))
    data[start : start + size] = bytes([byte]) * len(data[start : start + size])
    files[name] = bytes(data)
    return f"{name}: {size} bytes of {byte} from {start}"


def _noise(files: Files, name: str, chance: random.Random) -> str:
    start, size = chance.randrange(len(files[name]) + 1), chance.randrange(1, 100)
    files[name] = files[name][:start] + chance.randbytes(size) + files[name][start:]
    return f"{name}: {size} random bytes put in at {start}"


def _splice(files: Files, name: str, chance: random.Random) -> str:
    other = chance.choice(sorted(files))
    start, begin = chance.randrange(len(files[name]) + 1), chance.randrange(len(files[other]) + 1)
    files[name] = files[name][:start] + files[other][begin:]
    return f"{name}: from {start} on the bytes of {other} from {begin} on"


def _swap(files: Files, name: str, chance: random.Random) -> str:
    other = chance.choice(sorted(files))
    files[name], files[other] = files[other], files[name]
    return f"{name} and {other}: swapped"


def _empty(files: Files, name: str, _: random.Random) -> str:
    files[name] = b""
    return f"{name}: empty"


def _remove(files: Files, name: str, _: random.Random) -> str:
    del files[name]
    return f"{name}: removed"


def _extra(files: Files, name: str, chance: random.Random) -> str:
    extra = str(Path(name).parent / chance.choice(("x", "part-1/x", f"copy-{Path(name).name}", "part-9", "step_9/state.json", "a.h5")))
    files[extra] = files[name]
    return f"{extra}: more than there should be"


def _double(files: Files, name: str, _: random.Random) -> str:
    files[name] = files[name] * 2
    return f"{name}: twice after itself"


def _special(folder: Path, name: str, chance: random.Random) -> str:
    """Something that is no file, in a file's place."""
    path = folder / name
    path.unlink()
    kind = chance.choice(("folder", "fifo", "/dev/zero", "/etc/passwd", "itself", "nowhere", "..", "unreadable"))
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_bytes(b"")
        path.chmod(0)
    else:
        path.symlink_to({"itself": path.name, "nowhere": "not/there"}.get(kind, kind))
    return f"{name}: {kind} in its place"


# ---- JSON and YAML --------------------------------------------------------------------------------------------------


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all parts below a value of JSON."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((*path, key), *places_of(value[key], (*path, key)))]


def change_value(value: Any, chance: random.Random) -> str:
    """Change, remove or add a part of what JSON holds, in place."""
    places = places_of(value)
    if not places:
        return "nothing"
    *path, last = chance.choice(places)
    inner = value
    for key in path:
        inner = inner[key]
    place = "/".join(map(str, (*path, last)))
    if (way := chance.random()) < 0.15:
        del inner[last]
        return f"{place} removed"
    if way < 0.25 and isinstance(inner, dict):
        inner[chance.choice(("x", "", "../x", "a" * 5000))] = inner.pop(last)
        return f"{place} renamed"
    if way < 0.45 and isinstance(inner[last], int) and not isinstance(inner[last], bool):
        inner[last] = chance.choice((inner[last] + 1, inner[last] - 1, inner[last] * 2**31, -inner[last], inner[last] * 1000))
    elif way < 0.5:
        inner[last] = [inner[last]]
    else:
        inner[last] = chance.choice(WRONG_VALUES)
    return f"{place} = {inner[last]!r:.60}"


def _json_value(files: Files, name: str, chance: random.Random) -> str:
    try:
        if name.endswith(".jsonl"):
            lines = files[name].decode().splitlines()
            number = chance.randrange(len(lines))
            value = json.loads(lines[number])
            told = change_value(value, chance)
            lines[number] = json.dumps(value)
            files[name] = ("\n".join(lines) + "\n").encode()
            return f"{name}: line {number}: {told}"
        value = json.loads(files[name])
        told = change_value(value, chance)
        files[name] = json.dumps(value).encode()
    except ValueError as error:
        return f"{name}: left as it was ({error})"
    return f"{name}: {told}"


def _json_text(files: Files, name: str, chance: random.Random) -> str:
    deep = {
        "lists": "[" * DEEP,
        "closed lists": "[" * DEEP + "]" * DEEP,
        "objects": '{"a":' * DEEP,
        "digits": "9" * 10_000,
        "an exponent": "1e" + "9" * 400,
        "NUL": "\x00",
        "half a pair": '"\\ud800"',
        "a list": "[]",
        "null": "null",
        "a string": '"x"',
    }
    kind = chance.choice(sorted(deep))
    text = files[name].decode("utf-8", "replace")
    if chance.random() < 0.5 and ":" in text:
        # In the place of a value, so that all around it is sound.
        cuts = [place for place, letter in enumerate(text) if letter == ":"]
        place = chance.choice(cuts) + 1
        ends = [found for found in (text.find(",", place), text.find("}", place), text.find("\n", place)) if found >= 0]
        text = text[:place] + deep[kind] + text[min(ends, default=len(text)) :]
    else:
        text = deep[kind]
    files[name] = text.encode("utf-8", "surrogatepass")
    return f"{name}: {kind}"


def _yaml_value(files: Files, name: str, chance: random.Random) -> str:
    import yaml

    value = yaml.safe_load(files[name])
    told = change_value(value, chance)
    files[name] = yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace")
    return f"{name}: {told}"


def _yaml_text(files: Files, name: str, chance: random.Random) -> str:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    merge = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    texts = {
        "an alias bomb": bomb,
        "a bomb of merges": merge,
        "itself": "&a [*a]",
        "itself as a key": "&a {*a : 1}",
        "deep lists": "[" * 5000,
        "deep mappings": "{a: " * 3000,
        "digits": "sim: " + "9" * 10_000,
        "a date": "sim: 2026-99-99",
        "base 60": "sim: " + "1:" * 3000 + "1",
        "code": "!!python/object/apply:os.system ['true']",
        "a list as a key": "[1, 2]: 3",
        "a binary": "sim: !!binary x",
        "two documents": "a: 1\n---\nb: 2\n",
        "a set": "sim: !!set {a, b}",
        "NUL": "sim: \x00",
    }
    kind = chance.choice(sorted(texts))
    files[name] = (files[name] if chance.random() < 0.5 else b"") + texts[kind].encode()
    return f"{name}: {kind}"


# ---- binary formats -------------------------------------------------------------------------------------------------


def _npy_header(files: Files, name: str, chance: random.Random) -> str:
    data = files[name]
    if not data.startswith(b"\x93NUMPY"):
        return _noise(files, name, chance)
    size = struct.unpack("<H", data[8:10])[0]
    header, body = data[10 : 10 + size].decode("latin-1"), data[10 + size :]
    new = chance.choice(
        (
            header.replace("False", "True"),
            header.replace("'<", "'>"),
            header.replace("'descr': '", "'descr': '|O#"),
            header.replace("(", "(9" + "9" * chance.choice((3, 9, 18, 30, 5000))),
            header.replace("(", "(-"),
            "(" * 9_000,
            "-" * 9_000 + "1",
            "[" * 60_000,
            "{'descr': [('a', '<f8', (1000000, 1000000))], 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (1e400,)}",
            "9" * 9_000,
            "__import__('os').system('true')",
            "",
        )
    )
    encoded = new.encode("latin-1")
    version = chance.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"))
    length = struct.pack("<H", len(encoded) & 0xFFFF) if version[0] == 1 else struct.pack("<I", chance.choice((len(encoded), 2**31)))
    files[name] = b"\x93NUMPY" + version + length + encoded + body
    return f"{name}: header {new[:60]!r}"


def _safetensors(files: Files, name: str, chance: random.Random) -> str:
    data = files[name]
    size = struct.unpack("<Q", data[:8])[0]
    if chance.random() < 0.3:
        claimed = chance.choice((0, 1, size - 1, 2**31, 2**60, 2**64 - 1))
        files[name] = struct.pack("<Q", claimed) + data[8:]
        return f"{name}: a header of {claimed} bytes"
    header = json.loads(data[8 : 8 + size])
    told = change_value(header, chance)
    text = json.dumps(header).encode()
    files[name] = struct.pack("<Q", len(text)) + text + data[8 + size :]
    return f"{name}: header {told}"


def _parquet(files: Files, name: str, chance: random.Random) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(files[name]))
    column = chance.choice(table.column_names)
    place = table.column_names.index(column)
    rows = table.num_rows
    kind = chance.choice(("removed", "strings", "nulls", "large", "negative", "nan", "lists", "bytes", "shorter", "shuffled", "twice"))
    columns: dict[str, Any] = {
        "strings": pa.array(["x"] * rows),
        "nulls": pa.nulls(rows, table.schema.field(place).type),
        "large": pa.array([2**62] * rows),
        "negative": pa.array([-5] * rows),
        "nan": pa.array([float("nan")] * rows),
        "lists": pa.array([[1] * (row + 1) for row in range(rows)]),
        "bytes": pa.array([b"\x89PNG\xff"] * rows),
    }
    if kind in columns:
        table = table.set_column(place, column, columns[kind])
    elif kind == "removed":
        table = table.remove_column(place)
    elif kind == "shorter":
        table = table.slice(0, rows - 1)
    elif kind == "shuffled":
        table = table.take(list(reversed(range(rows))))
    else:
        table = pa.concat_tables([table, table])
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    files[name] = buffer.getvalue()
    return f"{name}: column {column} {kind}"


def _hdf5(files: Files, name: str, chance: random.Random) -> str:
    import h5py

    buffer = io.BytesIO(files[name])
    with h5py.File(buffer, "r+") as file:
        found: list[Any] = []
        file.visititems(lambda _, item: found.append(item))
        datasets = [item for item in found if isinstance(item, h5py.Dataset)]
        groups = [file, *(item for item in found if isinstance(item, h5py.Group))]
        if chance.random() < 0.25:
            told = _hdf5_attribute(chance.choice([item for item in (file, *found) if len(item.attrs)]), chance)
        elif chance.random() < 0.2:
            told = _hdf5_group(chance.choice(groups), chance)
        else:
            told = _hdf5_dataset(chance.choice(datasets), chance)
    files[name] = buffer.getvalue()
    return f"{name}: {told}"


def _hdf5_attribute(owner: Any, chance: random.Random) -> str:
    import h5py

    key = chance.choice(sorted(owner.attrs))
    way = chance.choice(("removed", "json", "value", "deep", "array", "large", "reference", "bytes"))
    if way == "removed":
        del owner.attrs[key]
    elif way == "json" and isinstance(owner.attrs[key], str) and owner.attrs[key].startswith("{"):
        value = json.loads(owner.attrs[key])
        change_value(value, chance)
        owner.attrs[key] = json.dumps(value)
    elif way == "deep":
        owner.attrs[key] = "[" * 60_000
    elif way == "array":
        owner.attrs[key] = np.arange(1000)
    elif way == "large":
        owner.attrs[key] = 2**62
    elif way == "reference":
        owner.attrs.create(key, owner.ref, dtype=h5py.ref_dtype)
    elif way == "bytes":
        owner.attrs[key] = np.bytes_(b"\xff\xfe")
    else:
        owner.attrs[key] = chance.choice(("", "x", "null", "[]", "{}", "9" * 6000, '{"a": NaN}', -1.5, -3))
    return f"{owner.name}@{key} {way}"


def _hdf5_group(group: Any, chance: random.Random) -> str:
    import h5py

    name = chance.choice(sorted(group) or ["x"])
    way = chance.choice(("removed", "itself", "root", "soft", "external", "empty group", "many", "odd name"))
    if way not in ("many", "odd name") and name in group:
        del group[name]
    if way == "itself":
        group[name] = group
    elif way == "root":
        group[name] = group.file["/"]
    elif way == "soft":
        group[name] = h5py.SoftLink("/")
    elif way == "external":
        group[name] = h5py.ExternalLink("/etc/passwd", "/")
    elif way == "empty group":
        group.create_group(name)
    elif way == "many":
        for number in range(300):
            group.create_group(f"{name}_{number}")
    elif way == "odd name":
        group[chance.choice(("..", "é" * 300, "demo_99999999999999999999", "traj_x", "episode_7", "a\nb"))] = np.arange(3)
    return f"{group.name}/{name} {way}"


_DATASETS = (
    *("huge", "huge chunk", "bomb", "twice compressed", "text bomb", "strings", "vlen", "complex", "object", "compound", "nan", "empty"),
    *("scalar", "wide", "more", "shorter", "virtual", "external", "group", "removed", "large", "null", "float16"),
)
"""What becomes of a dataset."""


def _hdf5_dataset(dataset: Any, chance: random.Random) -> str:
    import h5py

    group, name = dataset.parent, dataset.name.rsplit("/", 1)[1]
    place, shape, dtype = dataset.name, dataset.shape, dataset.dtype
    values = dataset[()]
    del group[name]
    way = chance.choice(_DATASETS)
    rows = shape[:1] or (1,)
    if way == "huge":
        group.create_dataset(name, (*rows, 2**16, 2**18), dtype="f8", chunks=(1, 16, 16))
    elif way == "huge chunk":
        group.create_dataset(name, (*rows, 2**14, 2**13), dtype="f8", chunks=(1, 2**14, 2**13), fillvalue=1.0)
    elif way in ("bomb", "twice compressed"):
        made = group.create_dataset(name, (*rows, 2**23), dtype="u1", chunks=(1, 2**23), compression="gzip", shuffle=way != "bomb")
        made[0] = 0
    elif way == "text bomb":
        made = group.create_dataset(name, rows, dtype=h5py.string_dtype())
        made[0] = "x" * 10_000
    elif way == "virtual":
        layout = h5py.VirtualLayout(shape=(*rows, 3), dtype="f4")
        layout[:] = h5py.VirtualSource("/etc/passwd", "x", shape=(*rows, 3))
        group.create_virtual_dataset(name, layout)
    elif way == "external":
        group.create_dataset(name, rows, dtype="u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)])
    elif way == "object":
        group.create_dataset(name, rows, dtype=h5py.ref_dtype)
    elif way == "compound":
        group.create_dataset(name, rows, dtype=np.dtype([("a", "f4"), ("b", "i4")]))
    elif way == "vlen":
        group.create_dataset(name, rows, dtype=h5py.vlen_dtype(np.uint8))
    elif way == "null":
        group[name] = h5py.Empty("f4")
    elif way == "group":
        group.create_group(f"{name}/x")
    elif way != "removed":
        changed: dict[str, Any] = {
            "strings": lambda: ["x"] * rows[0],
            "complex": lambda: np.ones(shape, complex),
            "nan": lambda: np.full(shape, np.nan),
            "empty": lambda: np.zeros((0, *shape[1:])),
            "scalar": lambda: 3.0,
            "wide": lambda: np.zeros((*shape, 2)),
            "more": lambda: np.zeros((rows[0] + 1, *shape[1:])),
            "shorter": lambda: values[:-1] if shape else values,
            "large": lambda: np.full(shape, 1e300),
            "float16": lambda: np.zeros(shape, np.float16),
        }
        group[name] = changed[way]()
    return f"{place} {way} (was {dtype} {list(shape)})"
