"""Shell completion after ``embodied-rl tr<TAB>``: commands, keys and the names that a key accepts."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import fields

from embodied_rl.commands.cli import Argument, Command
from embodied_rl.config import TrainConfig, group_names
from embodied_rl.errors import UserError, did_you_mean

_BASH = """\
_embodied_rl() {
    local word="${COMP_LINE:0:COMP_POINT}"; word="${word##* }"
    mapfile -t COMPREPLY < <(embodied-rl __complete "${COMP_LINE:0:COMP_POINT}")
    # Bash takes "=" for the border of a word, and wants what follows it.
    [[ $word == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _embodied_rl embodied-rl
"""
_ZSH = """\
_embodied_rl() {
    local -a found
    found=("${(@f)$(embodied-rl __complete "$BUFFER[1,CURSOR]")}")
    [[ -n $found[1] ]] && compadd -S '' -- $found || _files
}
compdef _embodied_rl embodied-rl
"""
_FISH = 'complete -c embodied-rl -a "(embodied-rl __complete (commandline -cp))"\n'
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""{shell: script that it runs once, with eval or source}"""


def script(shell: str) -> str:
    """Completion script of a shell. Raises UserError for an unsupported shell."""
    if shell not in SCRIPTS:
        typed = 'Type: eval "$(embodied-rl completion bash)"'
        raise UserError(f"embodied-rl completion {shell}: this shell is not supported.{did_you_mean(shell, SCRIPTS)} {typed}")
    return SCRIPTS[shell]


def completions(line: str, commands: Sequence[str]) -> list[str]:
    """Words that can stand at the end of `line`, a command line up to the cursor; empty: the shell should offer files."""
    words = line.split(" ")
    word, before = words[-1], [found for found in words[:-1] if found]
    if len(before) < 2:
        offered: Iterable[str] = commands
    elif before[1] == "train":
        offered = _settings(word)
    elif before[1] == "completion":
        offered = SCRIPTS
    else:
        offered = (choice for argument in _arguments(before[1].replace("-", "_")) for choice in _of_argument(argument, word))
    return sorted({found for found in offered if found.startswith(word)})


def _settings(word: str) -> list[str]:
    key, equals, _ = word.partition("=")
    if equals:
        return [f"{key}={name}" for name in group_names(key)] if key.isidentifier() else []
    if "." not in word:
        return [f"{found.name}=" for found in fields(TrainConfig)] + [
            f"{group}=" for group in ("experiment", "cluster") if group_names(group)
        ]
    from embodied_rl.config.compose import compose_config

    here: object = compose_config([])
    *path, _ = word.split(".")
    for part in path:
        here = here.get(part) if isinstance(here, dict) else None
    prefix = ".".join(path)
    return (
        [f"{prefix}.{name}" + ("." if isinstance(value, dict) else "=") for name, value in here.items()] if isinstance(here, dict) else []
    )


def _arguments(command: str) -> tuple[Argument, ...]:
    try:
        module = importlib.import_module(f"embodied_rl.commands.{command}")
    except ImportError:
        return ()
    found = vars(module).get("COMMAND")
    return found.arguments if isinstance(found, Command) else ()


def _of_argument(argument: Argument, word: str) -> list[str]:
    if not word.startswith(f"{argument.name}="):
        return [f"{argument.name}="]
    if argument.plain is bool:
        return [f"{argument.name}=true", f"{argument.name}=false"]
    names = argument.choices or (group_names(argument.name) if argument.name in ("sim", "experiment", "protocol", "generation") else ())
    return [f"{argument.name}={name}" for name in names]
