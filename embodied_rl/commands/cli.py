"""Shared parts of the command lines: `key=value` arguments, printed tables, errors as one line, exit statuses.

Exit status 0 is success, 2 a mistake of the user (one line on stderr, no traceback), 1 a failed simulator, bad numbers or output that could
not be written, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import glob
import io
import os
import queue
import resource
import shlex
import shutil
import signal
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from embodied_rl.bounds import Port, bounds_of
from embodied_rl.errors import NonFiniteError, UserError, brief, did_you_mean, shown
from embodied_rl.progress import progress_bar, wrapped_lines

if TYPE_CHECKING:
    from rich.table import Table


def terminal_width() -> int:
    """Width of a line: that of the terminal (or of COLUMNS), at most 100; 100 without either."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def columns(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Names beside their meanings in lines of at most `width` characters; a long name gets its own line."""
    left = min(max(len(name) for name, _ in rows), width // 3)
    lines = []
    for name, text in rows:
        room = wrapped_lines(text, width - left - 4)
        if len(name) > left:
            lines.append(f"  {name}")
            name = ""
        lines += [f"  {name if number == 0 else '':<{left}}  {part}" for number, part in enumerate(room or [""])]
    return lines


def print_tables(*tables: Table) -> None:
    """Print tables. A table wider than the terminal is printed row by row, as ``name: heading value, …``. Into a pipe or file go the title
    and one line per row, with tabs between its cells."""
    from rich.console import Console

    if not sys.stdout.isatty():
        for table in tables:
            rows = ["\t".join(row).rstrip("\t") for row in _cells(table)]
            print("\n".join([*_text(table.title), *rows, *_text(table.caption)]))
        return
    console = Console(highlight=False)
    for table in tables:
        if all(column.no_wrap for column in table.columns) and Console(width=1000).measure(table).maximum > console.width:
            print("\n".join(_as_rows(table, console.width)))
        else:
            console.print(table)


def _cells(table: Table) -> list[list[str]]:
    """The headings, then the rows, without markup."""
    from rich.text import Text

    def plain(cell: object) -> str:
        return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain

    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [[str(column.header) for column in table.columns], *([plain(cell) for cell in row] for row in rows)]


def _as_rows(table: Table, width: int) -> list[str]:
    headings, *rows = _cells(table)
    lines = wrapped_lines(str(table.title or ""), width)
    for name, *cells in rows:
        shown = ", ".join(f"{heading} {cell}" for heading, cell in zip(headings[1:], cells, strict=True) if cell)
        lines += wrapped_lines(f"  {name or headings[0]}: {shown}", width, 6)
    return [*lines, *(part for line in _text(table.caption) for part in wrapped_lines(line, width))]


def _text(heading: object) -> list[str]:
    """A table's title or caption, if it has one."""
    return [str(heading)] if heading else []


_USERS_FILES = {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP}
"""Problems with a user's file or folder, unless a closer handler has reported them."""


_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "bad_alloc", "failed to map segment", "Cannot allocate memory")
"""Words of torch, of C++, of the loader of libraries and of the system."""


# At its end the interpreter searches all of torch for garbage: half a second, for memory that the system reclaims anyway.
atexit.register(gc.freeze)


@contextmanager
def loading(title: str, *, shown: bool = True) -> Iterator[None]:
    """Around a phase of imports: without garbage collection, which takes an eighth of their time and frees almost nothing. If this process
    is the command's own, imported objects are never scanned later."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with progress_bar(f"loading {title}", shown=shown):
            yield
    finally:
        if _running:
            gc.freeze()
        if collecting:
            gc.enable()


class _Lasting(io.TextIOWrapper):
    """Output that may lose its reader (``… | head``) or its disk's space: the work goes on, and further text is dropped."""

    fault = ""
    """What ended the output; empty: nothing, or only a reader who had seen enough."""

    def write(self, text: str, /) -> int:
        with self._unread():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._unread():
            super().flush()

    @contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.fault = error.strerror or str(error)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


_replaced: list[TextIO] = []
"""Streams that would close their files if they were collected as garbage."""


def _lasting(stream: TextIO | None) -> TextIO:
    """This stream without its errors: a terminal's encoding may lack letters that we print, files may hold halves of surrogate pairs, a
    pipe may lose its reader, and a service may have no stream at all."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if type(stream) is not io.TextIOWrapper:  # a notebook's, or ours already
        return stream
    stream.flush()
    _replaced.append(stream)
    flushes = stream.write_through  # with PYTHONUNBUFFERED
    return _Lasting(stream.buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering, write_through=flushes)


_running: list[Callable[[], object]] = []
"""Bodies of commands that run in this process; empty: the process is a Python caller's."""


class _Terminated(KeyboardInterrupt):
    """The first SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Inside, SIGTERM ends the work in order, and a second one at once, unless the work or the calling program handles it."""

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_command(body: Callable[[], object]) -> None:
    """Call `body` and turn its errors into one message on stderr and an exit status (SystemExit); returns on success.

    Our own warnings become one line without Python's file and source text.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    before, warnings.formatwarning = warnings.formatwarning, _format_warning
    _running.append(body)
    try:
        with _ending_in_order():
            body()
        _require_written()
    except SystemExit as ended:
        if not ended.code:
            _require_written()
        raise
    except UserError as error:
        fail(str(error), 2)
    except NonFiniteError as error:
        fail("\n".join([str(error), *vars(error).get("__notes__", [])]), 1)
    except _Terminated:
        fail("Terminated.", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        fail("Interrupted.", 130)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _USERS_FILES and error.filename is not None:
            fail(f"{brief(error.filename)}: {error.strerror}.", 2)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            fail(f"{error.strerror}: this process may have {limit:,}. Raise that (ulimit -n 4096), or use fewer workers.", 1)
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            fail(f"This machine has too little memory: {brief(error) or 'an allocation failed'}. Use fewer slots or smaller batches.", 1)
        # A simulator's fault has the worker's own traceback, which ours would hide. If one was raised, its module is loaded.
        faults = sys.modules.get("embodied_rl.sim.faults")
        if faults is None or not isinstance(error, faults.SimFault):
            raise
        fail(str(error), 1)
    finally:
        _running.pop()
        warnings.formatwarning = before


def _require_written() -> None:
    """Raise SystemExit if the output is not complete, because its disk is full for example."""
    sys.stdout.flush()
    if isinstance(sys.stdout, _Lasting) and sys.stdout.fault:
        fail(f"The output could not be written completely: {sys.stdout.fault}.", 1)


def as_command(body: Callable[[Sequence[str]], object]) -> Callable[..., None]:
    """A command's ``main``: called with words, or without them for this process's; see `run_command`."""

    @functools.wraps(body)
    def main(argv: Sequence[str] | None = None) -> None:
        arguments = sys.argv[1:] if argv is None else list(argv)
        run_command(lambda: body(arguments))

    return main


_format_elsewhere = warnings.formatwarning


def _format_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """``warning: …`` for this package's warnings; Python's own format for those of libraries."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {message}\n"
    return _format_elsewhere(message, category, filename, lineno, line)


def serve_until_stopped(close: Callable[[], object], message: str, new_token: str | None, for_what: str) -> None:
    """Print that a server is running, and its new token (`for_what`: who needs it); serve until Ctrl-C or SIGTERM, then `close` it."""
    if new_token is not None:
        from embodied_rl.serving.http_server import TOKEN_VARIABLE

        print(f"{for_what}:\nexport {TOKEN_VARIABLE}={new_token}")
    ended = queue.SimpleQueue[None]()  # an Event's lock may be held by the `wait` that the signal interrupts
    signal.signal(signal.SIGTERM, lambda *_: ended.put(None))
    print(f"{message}  (Ctrl-C to stop)", flush=True)
    try:
        ended.get()
    finally:
        close()


def expand_paths(text: str, what: str, example: str, keep: Callable[[str], bool] = lambda path: True) -> list[str]:
    """Paths of ``A``, ``A,B`` or shell patterns, each once; of a pattern only those for which `keep` is true. Raises UserError if a pattern
    matches nothing, naming `what` was expected and an `example`."""
    if Path(text).exists():  # a name may contain a comma or a bracket
        return [text]
    paths: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        is_pattern = any(letter in word for letter in "*?[") and not Path(word).exists()
        found = [path for path in sorted(glob.glob(word)) if keep(path)] if is_pattern else [word]
        if not found:
            raise UserError(f"No {what} matches '{word}'. Patterns follow the shell, for example {example}.")
        paths += found
    return list(dict.fromkeys(paths))


def explain() -> None:
    """``--explain``: print the meaning of each figure of a run and of an evaluation."""
    from embodied_rl.loggers.meanings import explain_text

    print(explain_text(terminal_width()))


def fail(message: str, status: int) -> None:
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def command_line(name: str, arguments: Sequence[str]) -> str:
    """The command as a user would type it: ``python -m embodied_rl.<name> …``."""
    return shlex.join(["python", "-m", f"embodied_rl.{name}", *arguments])


@dataclass(frozen=True)
class Written:
    """Type of an argument that is written to, so that a mistake is reported before the work starts."""

    kind: Literal["file", "folder"]

    def check(self, name: str, text: str) -> None:
        """Raise UserError if a file is where a folder is to be written, or the reverse, or if nothing may be written there."""
        path = Path(text)
        if self.kind == "file" and path.is_dir():
            raise UserError(f"{name} must be a file, but {brief(text)} is a folder. Name a file in it: {name}={brief(path / 'NAME')}")
        if self.kind == "file" and path.exists() and not path.is_file():
            raise UserError(f"{name} must be a file, but {brief(text)} is a device or a pipe. Choose another name.")
        if self.kind == "folder" and path.exists() and not path.is_dir():
            raise UserError(f"{name} must be a folder, but {brief(text)} is a file. Choose another folder.")
        folder = path.absolute() if self.kind == "folder" else path.absolute().parent
        there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"{name}: cannot write '{brief(text)}': {there} is not a folder that this user may write to.")


WrittenFile = Annotated[str, Written("file")]
WrittenFolder = Annotated[str, Written("folder")]


REQUIRED: Any = object()
"""Default of an argument that must be given."""


@dataclass(frozen=True)
class Argument:
    """One ``name=value`` of a command."""

    name: str
    kind: Any
    """str, bool, a file or folder to write (`WrittenFile`), or a number with its bounds (`embodied_rl.bounds`)."""
    help: str
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind not in (int, float), f"{self.name} needs bounds"

    @property
    def plain(self) -> Any:
        """Value of type int, float, str or bool."""
        return bounds_of(self.kind)[0]


def server_arguments(port: int) -> tuple[Argument, ...]:
    """Arguments of every server; default port `port`."""
    meaning = "none: no token is required; default: the value of EMBODIED_RL_TOKEN, or a new token, which is printed"
    return (
        Argument("host", str, "address to listen on; beyond this machine it needs a token in EMBODIED_RL_TOKEN", "127.0.0.1"),
        Argument("port", Port, "port to listen on; 0: any free port", port),
        Argument("token", str, meaning, None, ("none",)),
    )


@dataclass(frozen=True)
class Command:
    """A command line: ``python -m embodied_rl.<name> key=value …``."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...] = ()
    prefixes: Mapping[str, str] | None = None
    """Families of further keys: {"sim.": their meaning}; `parse` returns their values under their full name."""
    paths: tuple[Argument, ...] = ()
    """Files and folders given without a key, in this order."""
    many_paths: bool = False
    """Whether the last of `paths` takes all further ones too, as a list."""

    def parse(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the arguments; ``--help`` prints the usage and exits.

        Returns (values of all arguments by name, further values of the prefixes by full name).

        Raises UserError: an unknown key (with the nearest one), a missing or malformed value.
        """
        if any(word in ("--help", "-h") for word in argv):
            print(self.usage())
            raise SystemExit(0)
        if "--explain" in argv:
            explain()
            raise SystemExit(0)
        known = {argument.name: argument for argument in self.arguments}
        values: dict[str, Any] = {argument.name: argument.default for argument in (*self.paths, *self.arguments)}
        further: dict[str, Any] = {}
        places, given = list(self.paths), dict[str, str]()
        for word in argv:
            key, equals, text = word.partition("=")
            if word.startswith("--"):
                name = key.lstrip("-").replace("-", "_")
                typed = " Type: " + shlex.quote(f"{name}={text or 'VALUE'}") if name in known else did_you_mean(name, known)
                raise UserError(f"Argument {shown(key)} is not of the form key=value, without dashes.{typed}")
            # Folders of runs have names like lr=3e-4: an existing path is a path, unless it begins with a known key.
            if places and (not equals or (key not in known and Path(word).exists())):
                word = at_home(word)
                if self.many_paths and len(places) == 1:
                    taken = values[places[0].name]
                    values[places[0].name] = [word] if taken is REQUIRED else [*taken, word]
                else:
                    values[places.pop(0).name] = word
                continue
            if not equals:
                typed = (
                    f"Type: {shlex.quote(f'{self.arguments[0].name}={word}')}." if Path(word).exists() and not self.paths else self._keys()
                )
                raise UserError(f"Argument '{word}' is not of the form key=value. {typed} See --help.")
            if given.setdefault(key, text) != text:
                raise UserError(f"{shown(key)} is given twice: {shown(given[key])} and {shown(text)}. Remove one.")
            if any(key.startswith(prefix) and key != prefix for prefix in self.prefixes or {}):
                further[key] = value_of(key, text)
            elif key in known:
                values[key] = _convert(known[key], text)
            else:
                raise UserError(f"Argument '{key}' is not known.{did_you_mean(key, [*known, *(f'{p}…' for p in self.prefixes or {})])}")
        missing = [argument.name.upper() for argument in self.paths if values[argument.name] is REQUIRED]
        missing += [f"{argument.name}=…" for argument in self.arguments if values[argument.name] is REQUIRED]
        if missing:
            raise UserError(f"Argument {' and '.join(missing)} is missing. {self._keys()} See --help.")
        return values, further

    def changed(self, values: Mapping[str, Any], *names: str) -> list[str]:
        """``name=value`` of those arguments whose value is not the default."""
        defaults = {argument.name: argument.default for argument in self.arguments}
        return [f"{name}={values[name]}" for name in names if values[name] != defaults[name]]

    def usage(self) -> str:
        rows = [(a.name.upper(), a.help) for a in self.paths]
        rows += [(f"{a.name}={'|'.join(a.choices) or a.plain.__name__.upper()}", a.help + _default_text(a)) for a in self.arguments]
        rows += [(f"{prefix}KEY=VALUE", text) for prefix, text in (self.prefixes or {}).items()]
        width = terminal_width()
        words = " ".join([self.name, *(a.name.upper() for a in self.paths), *(["…"] if self.many_paths else []), "key=value …"])
        lines = [f"usage: python -m embodied_rl.{words}", "", *wrapped_lines(self.summary, width), "", "arguments:", *columns(rows, width)]
        if self.examples:
            lines += ["", "examples:", *(f"  python -m embodied_rl.{self.name} {example}".rstrip() for example in self.examples)]
        return "\n".join(lines)

    def _keys(self) -> str:
        return f"Known: {', '.join([*(a.name.upper() for a in self.paths), *(a.name for a in self.arguments)])}."


def _default_text(argument: Argument) -> str:
    if argument.default is REQUIRED:
        return " (required)"
    shown = str(argument.default).lower() if argument.kind is bool else argument.default
    return "" if argument.default is None else f" (default: {shown})"


def _convert(argument: Argument, text: str) -> Any:
    if argument.kind is bool:
        if text.lower() in ("true", "yes", "1"):
            return True
        if text.lower() in ("false", "no", "0"):
            return False
        raise UserError(f"{argument.name} must be true or false, got '{text}'.")
    if text == "":
        raise UserError(f"{argument.name} must have a value, got nothing after '='.")
    plain, bounds = bounds_of(argument.kind)
    text = at_home(text)
    try:
        value = plain(text.replace("_", "") if plain is int else text)
        if bounds is not None and not text.isascii():
            raise ValueError
    except ValueError:
        raise UserError(f"{argument.name} must be {'an integer' if plain is int else 'a number'}, got {shown(text)}.") from None
    if bounds is not None and not bounds.hold(value):
        raise UserError(f"{argument.name} must be {bounds}, got {shown(value)}.")
    for note in typing.get_args(argument.kind):
        if isinstance(note, Written):
            note.check(argument.name, text)
    if argument.choices and value not in argument.choices:
        raise UserError(f"{argument.name}={text} is not a choice.{did_you_mean(text, argument.choices)}")
    return value


def at_home(text: str) -> str:
    """Expand ``~/…``, which shells leave unchanged after a ``=``."""
    return str(Path(text).expanduser()) if text == "~" or text.startswith("~/") else text


def value_of(key: str, text: str) -> Any:
    """Value of a configuration's key, read as `train` reads it. Raises UserError."""
    from embodied_rl.config.compose import check_form, hydra_overrides, parsed, quoted_value

    (word,) = hydra_overrides([f"{key}={text}"])
    found = parsed(word)
    if found is not None and found.is_sweep_override():  # one command is one run, so commas are text
        found = parsed(word := f"{key}={quoted_value(text)}")
    check_form(word, (), sweep=False)
    return None if found is None else found.value()
