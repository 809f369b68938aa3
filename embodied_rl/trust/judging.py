"""What a file may make this machine run: names that are registered here, what its user signed, and what the user says to trust.

A checkpoint and a recording hold a configuration, and a configuration names code: ``sim.target``, an environment's class, an expert,
the command of an agent program, a server that is sent an API key. `named_code` finds all of these in one walk, by their form, so that a
key that is added later is found too; `require_trusted` is called wherever a configuration is read from a file (docs/trust.md).
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from embodied_rl.errors import UserError
from embodied_rl.trust.folders import config_folder
from embodied_rl.trust.named import NamedCode, named_code, registered_code
from embodied_rl.trust.signing import is_signed

ALLOW_LIST = "trusted.yaml"
"""In the user's configuration folder: a list of what any file may name."""
MESSAGE_LENGTH = 400
_PLAIN = re.compile(r"[\w.]+:[\w.]+")
_PACKAGE = Path(__file__).resolve().parents[1]


class UntrustedCode(UserError):
    """A file names code that is not registered here, and whose user has not said to trust it."""

    def __init__(self, message: str, targets: Sequence[str]) -> None:
        super().__init__(message)
        self.targets = tuple(targets)
        """What ``trust=`` would take."""


def allowed() -> tuple[str, ...]:
    """The allow-list in the user's configuration folder; ``package.*`` stands for every target of a package.

    Raises:
        UserError: it is not a YAML list of texts.
    """
    import yaml

    folder = config_folder()
    path = None if folder is None else folder / ALLOW_LIST
    if path is None or not path.is_file():
        return ()
    try:
        names = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"'{path}' must be a YAML list of names such as '- my_package.my_module:MyEnv', got {names!r:.80}.")
    return tuple(names)


def require_trusted(
    plain: object,
    *,
    file: Path,
    what: str,
    content: bytes,
    signature: str | None,
    trust: Sequence[str] = (),
    replaced: Sequence[str] = (),
) -> None:
    """Raise UntrustedCode where a configuration from a file names code that may not run.

    Args:
        plain: the configuration.
        file: that it was read from.
        what: of the signature, see `signing.sign`.
        content: that was signed.
        signature: what the file says it was signed with; None: nothing.
        trust: what the user says this file may name.
        replaced: keys (``sim``, ``sim.kwargs.environment``) in whose place the caller puts the user's own values.

    Raises:
        UntrustedCode: naming the code, the file, and the command to type.
        UserError: the allow-list cannot be read.
    """
    found = [code for code in named_code(plain) if not any(code.key == key or code.key.startswith(f"{key}.") for key in replaced)]
    if not found or is_signed(what, content, signature):
        return
    given = (trust,) if isinstance(trust, str) else tuple(trust)
    registered = registered_code()
    strange = [code for code in found if (code.last, code.name) not in registered and code.name not in given]
    if strange:
        names = allowed()
        strange = [code for code in strange if not any(_covers(name, code.name) for name in names)]
    if strange:
        targets = list(dict.fromkeys(code.name for code in strange))
        raise UntrustedCode(_message(file, strange[0], targets, [*given, *targets]), targets)


def trusted_names(text: str | None) -> tuple[str, ...]:
    """The names of a ``trust=`` on a command line: one, or a list ``[a, b]``. Raises UserError."""
    import yaml

    if not text:
        return ()
    if not text.startswith("["):
        return (text,)
    try:
        names = yaml.safe_load(text)
    except yaml.YAMLError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"trust must be a name or a list of names, '[a.b:C, d.e:F]', got '{text[:80]}'.")
    return tuple(names)


def _covers(allowed_name: str, name: str) -> bool:
    if allowed_name.endswith(".*"):
        return name.startswith((allowed_name[:-1], f"{allowed_name[:-2]}:"))
    return allowed_name == name


def _message(file: Path, code: NamedCode, targets: Sequence[str], trust: Sequence[str]) -> str:
    others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    lead = f"'{file}' names code that is not registered here: {_shown(str(code), 160)}{others}. If you trust it: "
    typed, words = _typed(trust), _command()
    if all(name.isprintable() for name in trust):  # nothing that a terminal would obey is copied from a file
        choices = [typed if words is None else shlex.join([*words, typed]), f"add {shlex.quote(typed)} to this command"]
        for way in choices:
            if len(lead) + len(way) <= MESSAGE_LENGTH:
                return lead + way
    where = f"'{file}'" if len(str(file)) <= 120 else f"'…{str(file)[-120:]}'"
    return f"{where} names code that is not registered here: {_shown(str(code))}{others}. See docs/trust.md: trust=…."


def _typed(names: Sequence[str]) -> str:
    """For a command line, as `trusted_names` and Hydra read it."""
    if len(names) == 1 and _PLAIN.fullmatch(names[0]):
        return f"trust={names[0]}"
    return f"trust=[{','.join(name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False) for name in names)}]"


def _command() -> list[str] | None:
    """The words of the command that runs, without its ``trust=``; None where this is another program."""
    program = Path(sys.argv[0] if sys.argv else "").resolve()
    if program.suffix != ".py" or not program.is_relative_to(_PACKAGE):
        return None
    module = ".".join(program.relative_to(_PACKAGE.parent).with_suffix("").parts)
    return ["python", "-m", module.removesuffix(".__main__"), *(word for word in sys.argv[1:] if not word.startswith("trust="))]


def _shown(name: str, limit: int = 100) -> str:
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"
