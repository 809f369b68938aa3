"""Reads files of others: regular files only, and JSON, YAML and .npy within limits. Faults raise OSError or ValueError."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from embodied_rl.errors import UserError, brief

if TYPE_CHECKING:
    import yaml

MAX_YAML_NODES = 10**6
"""Most nodes of a document with its aliases expanded; a configuration has some hundreds."""
_MAX_JSON_DEPTH = 200
"""Python's own parser fails at about a thousand levels, and so deep a value cannot be copied or written again."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else: a pipe or a device would never end."""
    # Without blocking, because opening a pipe waits for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """A file's bytes. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def require_model_folder(folder: Path) -> None:
    """Raise UserError if there is no folder for a model."""
    if not folder.is_dir():
        raise UserError(f"Model folder '{folder}' does not exist. Download the model there, or give the path of a local model.")


def parse_json(data: str | bytes, *, finite: bool = False, depth: int = _MAX_JSON_DEPTH) -> Any:
    """Parse JSON. `finite`: without NaN and infinite numbers, which JSON lacks and Python takes.
    Raises ValueError, in one short line: it is no JSON, or lists and mappings are nested more than `depth` levels."""
    try:
        found = json.loads(data, parse_constant=_no_constant, parse_float=_finite_float) if finite else json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no {error.encoding}: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(brief(error)) from None
    require_shallow(found, depth)
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is out of range for a number")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def json_lines(path: Path, what: str) -> list[tuple[str, Any]]:
    """(location, value) of every non-empty line of a .jsonl file.
    Raises UserError, which begins with `what`: the file cannot be read, or a line is not JSON."""
    try:
        lines = read_regular(path).decode().split("\n")  # `splitlines` would also split at U+2028, which a JSON text may hold
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} '{path}' cannot be read: {error}. Give a .jsonl file.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"'{path}', line {number}"
            try:
                found.append((where, json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{what} {where} is not JSON: {error}.") from error
    return found


def require_shallow(value: object, depth: int = _MAX_JSON_DEPTH) -> None:
    """Raise ValueError if lists and mappings are nested more than `depth` levels."""
    level = [value]
    for _ in range(depth):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"it is nested too deeply, beyond {depth} levels")


def _inside(value: object) -> Iterator[object]:
    """The lists and mappings among a list's or a mapping's values."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (inner for inner in values if isinstance(inner, (dict, list)))


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML with YAML's own types only, by libyaml if PyYAML has it (a fifth of the time).
    Raises ValueError, in one short line: it is no YAML, or its aliases expand too far."""
    import yaml

    loader_of = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader_of):  # checked first: libyaml's nodes would overflow the C stack
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_JSON_DEPTH:
                raise ValueError("it is nested too deeply")
        loader = loader_of(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _expanded(root, {}) > MAX_YAML_NODES:
            raise ValueError("its aliases expand to more than a million values")
        found = loader.construct_document(root)
        require_shallow(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError) as error:  # from invalid dates, numbers and keys
        raise ValueError(brief(error)) from None
    return found


def yaml_text(value: object, **style: Any) -> str:
    """Plain values as YAML, keys in their order; by libyaml if PyYAML has it, which takes a tenth of the time."""
    import yaml

    dumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper
    return str(yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, **style))


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Nodes below a YAML node, with each alias expanded; infinite if an alias contains itself."""
    if (count := known.get(id(node))) is not None:
        return count
    known[id(node)] = math.inf
    inner = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))] if isinstance(node.value, list) else []
    known[id(node)] = 1 + sum(_expanded(part, known) for part in inner)
    return known[id(node)]


def read_npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether in Fortran order, dtype) of an .npy file of version 1.0, which is then positioned at its data. Raises ValueError."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError, tokenize.TokenError) as error:
        raise ValueError(f"is not an .npy file ({brief(error) or type(error).__name__})") from None
    if any(not 0 <= size < 2**63 for size in shape):
        raise ValueError(f"is not an .npy file: its shape is {brief(list(shape))}")
    return shape, fortran, dtype


def parse_npy(data: bytes) -> np.ndarray:
    """The array of an .npy file. Raises ValueError, also if it claims more data than there is, before allocating anything of that size."""
    file = io.BytesIO(data)
    shape, fortran, dtype = read_npy_header(file)
    claimed, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
    if dtype.hasobject:
        raise ValueError("is an .npy file of objects, which are not read")
    if claimed != there:
        raise ValueError(f"is not an .npy file: its header says {claimed} bytes of data, but it has {there}")
    return np.frombuffer(data, dtype, math.prod(shape), file.tell()).reshape(shape, order="F" if fortran else "C").copy()
