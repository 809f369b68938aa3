"""The sandbox of agent programs: their own files, the proxy's port, and what the configuration opens."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import embodied_rl
from embodied_rl.sandbox.box import Box, is_below
from embodied_rl.sandbox.levels import protection
from embodied_rl.sim.text.program import ProgramOptions
from embodied_rl.sim.text.served_program import with_absolute_files

_MEMORY_MB, _SCRATCH_MB, _PROCESSES, _OPEN_FILES = 8192, 1024, 256, 1024


def program_box(options: ProgramOptions, base_url: str) -> Box:
    """Of a program that talks to `base_url`. Raises UserError: this machine's protection is weaker than `options.sandbox`."""
    address = urlsplit(base_url)
    return Box(
        protection(options.sandbox, "sim.kwargs.sandbox"),
        "open" if options.network == "open" else "ports",
        ports=(address.port or (443 if address.scheme == "https" else 80),),
        readable=tuple(dict.fromkeys([*own_files(options), *map(_absolute, options.readable)])),
        writable=tuple(map(_absolute, options.writable)),
        memory_mb=options.memory_mb or _MEMORY_MB,
        address_mb=options.memory_mb or 0,
        processes=_PROCESSES,
        open_files=_OPEN_FILES,
        scratch_mb=_SCRATCH_MB,
    )


def own_files(options: ProgramOptions) -> list[str]:
    """What a command needs to be read: the folder of each file that it names, or the file itself where that folder holds the user's home;
    a Python environment; the package of a function."""
    words = with_absolute_files(options.words({}, 0, "model"))
    found: list[str] = [str(Path(embodied_rl.__file__).parent)]
    program = shutil.which(words[0])
    if program is not None and words[0] != sys.executable:
        found += _of_program(os.path.abspath(program))
    for word in words[1:]:
        path = word.rpartition(":")[0] if word.rpartition(":")[0].endswith(".py") else word
        if os.path.isabs(path) and os.path.exists(path):
            found += _folder_of(path)
    if options.function is not None and not options.function.rpartition(":")[0].endswith(".py"):
        spec = importlib.util.find_spec(options.function.rpartition(":")[0].partition(".")[0])
        if spec is not None:
            found += spec.submodule_search_locations or [spec.origin or ""]
    return [path for path in found if path]


def _of_program(path: str) -> list[str]:
    """The file; and where it belongs to a virtual environment, that and the Python that it was made of."""
    found = []
    for place in dict.fromkeys((path, os.path.realpath(path))):
        folder = os.path.dirname(os.path.dirname(place))
        is_python = os.path.basename(place).startswith("python") and not _holds_home(folder)
        found.append(folder if os.path.exists(f"{folder}/pyvenv.cfg") or is_python else place)
    return found


def _folder_of(path: str) -> list[str]:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    found = [path if _holds_home(folder) and path != folder else folder]
    real = os.path.realpath(found[0])
    return [place for place in dict.fromkeys((found[0], real)) if not _holds_home(place)]


def _holds_home(folder: str) -> bool:
    home = os.path.expanduser("~")
    return is_below(home, folder) or is_below(os.path.realpath(home), folder)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
