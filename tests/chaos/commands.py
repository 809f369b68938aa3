"""Attack the command lines with mistakes made from the schema: each must end with status 2 and one short `error:` that names the key."""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
import shlex
import signal
import subprocess
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from embodied_rl.bounds import bounds_of
from embodied_rl.commands.cli import Argument, Command, Written, run_command
from embodied_rl.compose import compose_config
from embodied_rl.config import TrainConfig, group_names
from embodied_rl.config.compose import hydra_overrides
from embodied_rl.errors import LONGEST_MESSAGE, UserError
from tests.chaos.harness import Attack
from tests.chaos.mistakes import DEEP, LONG, MALFORMED, TEXTS, UNICODE, leaves, misspelt, takes_text, wrong_value

LIMIT_S = 30
"""Of one attempt; a compose takes a tenth of a second on a quiet machine."""
PROCESS_LIMIT_S = 120
EVERY = 50
"""One attempt of so many is a process of its own."""
TAKEN = "taken"
"""A file that is there, where a command is to write a folder."""
GROUPS = ("experiment", "sim", "algorithm", "policy", "hybrid", "generation", "logger")
WORDS = {
    "evaluate": ("evaluate", "COMMAND"),
    "render": ("render", "COMMAND"),
    "record": ("record", "COMMAND"),
    "replay": ("replay", "COMMAND"),
    "offline_eval": ("offline_eval", "COMMAND"),
    "plan": ("plan", "COMMAND"),
    "report": ("report", "COMMAND"),
    "serve_envs": ("serve_envs", "COMMAND"),
    "serve_agent": ("serve_agent", "COMMAND"),
}
EPISODES = ("info", "validate", "convert", "merge", "split")


@dataclass(frozen=True)
class Wrong:
    """A command that is a mistake."""

    module: str
    words: tuple[str, ...]
    names: str
    """What the message must name; empty: anything."""

    def __str__(self) -> str:
        words = [word if len(word) <= 120 else f"{word[:60]}…({len(word)} characters)" for word in self.words]
        return f"python -m embodied_rl.{self.module} {shlex.join(words)}"


class _TooLong(BaseException):
    pass


class Accepted(BaseException):
    """Training would begin."""


class Commands(Attack):
    """Commands with one mistake each: in process, and one of fifty as a user would type it."""

    name = "commands"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / TAKEN).touch()
        self.counts = {"in a process of their own": 0, "of train": 0}

    def attempt(self, number: int, chance: random.Random) -> str | None:
        wrong = wrong_command(chance)
        self.counts["of train"] += wrong.module == "train"
        if number % EVERY == EVERY - 1 and not any("\0" in word for word in wrong.words):
            self.counts["in a process of their own"] += 1
            status, output = self._process(wrong)
        else:
            with contextlib.chdir(self.folder):
                status, output = in_process(wrong)
        found = judge(wrong, status, output)
        return None if found is None else f"{wrong}: {found}"

    def _process(self, wrong: Wrong) -> tuple[int | str, str]:
        module = wrong.module.replace("episode_tools", "episodes")
        command = [sys.executable, "-m", f"embodied_rl.{module}", *wrong.words]
        try:
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "hang", ""
        return done.returncode, done.stderr

    def count(self) -> dict[str, int]:
        return self.counts


def judge(wrong: Wrong, status: int | str, output: str) -> str | None:
    """What is wrong with how the command ended; None where it is as it should be."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("warning:") and " · elapsed " not in line]
    if isinstance(status, str):
        return f"{status}: {lines[-1][:200] if lines else 'no word'}"
    if "Traceback" in output:
        return f"traceback: {lines[-1][:200]}"
    if status != 2:
        return f"status {status}, {output[-200:]!r}"
    if len(lines) != 1 or not lines[0].startswith("error: "):
        return f"not one line: {output[:300]!r}"
    if len(lines[0]) > LONGEST_MESSAGE + len("error: "):
        return f"{len(lines[0])} characters: {lines[0][:100]!r}…"
    return None if wrong.names.lower() in lines[0].lower() else f"does not name {wrong.names}: {lines[0]!r}"


def in_process(wrong: Wrong) -> tuple[int | str, str]:
    """(exit status or what happened instead, what stands on stderr) of the command's `main`, stopped where training would begin."""
    main: Callable[[], Any] = importlib.import_module(f"embodied_rl.commands.{wrong.module}").main
    errors = io.StringIO()

    def too_long(*_: object) -> None:
        raise _TooLong

    handler, timer = signal.signal(signal.SIGALRM, too_long), signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with (
            mock.patch.object(sys, "argv", [f"{wrong.module}.py", *wrong.words]),
            mock.patch("embodied_rl.commands.train.train", side_effect=Accepted),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(errors),
        ):
            run_command(lambda: sys.exit(main()))
        return "accepted", errors.getvalue()
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else "accepted"), errors.getvalue()
    except Accepted:
        return "accepted", errors.getvalue()
    except _TooLong:
        return "hang", errors.getvalue()
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


# ---- what is sent -----------------------------------------------------------------------------------------------------


def wrong_command(chance: random.Random) -> Wrong:
    """Two of three are of `train`, whose schema is the largest."""
    return wrong_train(chance) if chance.random() < 2 / 3 else wrong_other(chance)


def wrong_train(chance: random.Random) -> Wrong:
    base = _base(chance)
    # A path may be called 3 or [a]: what is wrong about paths is sent apart.
    keys = {key: hint for key, hint in schema(base).items() if not is_path(key)}
    key, hint = chance.choice(list(keys.items()))
    last = key.rpartition(".")[2]
    draw = chance.random()
    if draw < 0.72:
        return Wrong("train", (*base, f"{key}={wrong_value(hint, chance)}"), last)
    if draw < 0.84:
        return Wrong("train", (*base, f"{misspelt(key, set(keys), chance)}=1"), "")
    if draw < 0.92:
        forms = MALFORMED if takes_text(hint) else MALFORMED + TEXTS
        return Wrong("train", (*base, chance.choice(forms).format(key=key, value=3)), "")
    if draw < 0.95:
        return Wrong("train", (*base, chance.choice(["run_dir=", "run_dir=" + "x" * 300, "run_dir='  '", "run_dir=a\0b"])), "run_dir")
    group = chance.choice(GROUPS)
    name = chance.choice(group_names(group))
    value = chance.choice([misspelt(name.replace(".", "_"), set(group_names(group)), chance), f"[{name}]", f"{{{name}:1}}", "{a:1}", "",
                           f"{name},{name}", LONG, f"../{group}/{name}", "null", "'"])  # fmt: skip
    return Wrong("train", (f"{group}={value}",), "")


def is_path(key: str) -> bool:
    """Whether the command line takes a key's value as it is typed: Hydra alone would not read this one."""
    return hydra_overrides([f"{key}=a,b"]) != [f"{key}=a,b"]


def _base(chance: random.Random) -> tuple[str, ...]:
    group = chance.choice(GROUPS[:4])
    names = [name for name in group_names(group) if (group, name) != ("sim", "custom")]
    return (f"{group}={chance.choice(names)}",)


@cache
def schema(base: tuple[str, ...]) -> dict[str, Any]:
    """{key: type} of what a choice of files composes to."""
    try:
        plain = compose_config(base)
    except UserError:
        plain = compose_config(())
    return dict(leaves(TrainConfig, plain))


def commands() -> Iterator[tuple[str, tuple[str, ...], Command]]:
    """(module, words before the arguments, the command) of all command lines but train."""
    for module, (_, attribute) in WORDS.items():
        yield module, (), getattr(importlib.import_module(f"embodied_rl.commands.{module}"), attribute)
    from embodied_rl.commands.episode_tools import COMMANDS

    for name in EPISODES:
        yield "episode_tools", (name,), COMMANDS[name]


def wrong_other(chance: random.Random) -> Wrong:
    if chance.random() < 0.12:
        return _odd_words(chance)
    module, words, command = chance.choice(list(commands()))
    arguments = [argument for argument in command.arguments if wrong_texts(argument)]
    known = {argument.name for argument in command.arguments}
    if chance.random() < 0.25 or not arguments:
        key = misspelt(chance.choice(sorted(known)), known, chance)
        return Wrong(module, (*words, *_paths(command), f"{key}=1"), key)
    argument = chance.choice(arguments)
    text = chance.choice(wrong_texts(argument))
    return Wrong(module, (*words, *_paths(command), f"{argument.name}={text}"), argument.name)


def _paths(command: Command) -> tuple[str, ...]:
    return tuple("nowhere" for _ in command.paths)


def wrong_texts(argument: Argument) -> list[str]:
    """What the argument's declaration forbids."""
    kind, bounds = bounds_of(argument.kind)
    if bounds is not None:
        beyond = [str(int(bounds.most) + 1), str(int(bounds.least) - 1), *([f"{bounds.least}"] if bounds.above else [])]
        return ["", "word", "[1]", "{a:1}", UNICODE, "nan", "inf", "-inf", "1e400", LONG, "true", "null", DEEP, *beyond,
                *(["1.5", "1e3", str(10**20)] if kind is int else ["1e30"])]  # fmt: skip
    there = [{"file": ".", "folder": TAKEN}[note.kind] for note in typing.get_args(argument.kind) if isinstance(note, Written)]
    if there:
        return ["", *there]
    if kind is bool:
        return ["", "2", "word", "1.5", "[true]", "nan", LONG]
    return ["", *([argument.choices[0] + "x", "[" + argument.choices[0] + "]", LONG] if argument.choices else [])]


def _odd_words(chance: random.Random) -> Wrong:
    """Commands with words that are none, unknown names, and simulators with settings out of bounds."""
    sims = group_names("sim")
    sim_key, hint = chance.choice(
        [(key, hint) for key, hint in schema(("sim=cartpole",)).items() if re.fullmatch(r"sim\.(?!kwargs)\w+", key)]
    )
    value = wrong_value(hint, chance)
    choices: list[Sequence[str]] = [
        ("catalog", chance.choice(["nope", "simz", "check", "check nope", "tasks nope", "sims=1"])),
        ("doctor", chance.choice(["zz", "--nope", "--probe=nope", "a=b"])),
        ("evaluate", "sim=cartpole policy=random", f"{sim_key}={value}"),
        ("record", "sim=cartpole policy=random output=rec", f"{sim_key}={value}"),
        ("record", f"sim={misspelt(chance.choice(sims), set(sims), chance)} policy=random"),
        ("record", chance.choice(["sim=[cartpole] policy=random", "sim={a:1}", "sim=" + "x" * 5000])),
        (
            "episode_tools",
            chance.choice(["nope", "inf nowhere", "info", "info nowhere", "merge nowhere", "split nowhere output=o fractions=nan,1"]),
        ),
        ("report", "run=nowhere"),
        ("replay", "recording=nowhere"),
        ("offline_eval", "recording=nowhere checkpoint=nowhere"),
        (
            "plan",
            chance.choice(["cluster=nowhere workload=agents", "cluster={a:1} workload=agents", "workload=nope", "workload=" + "x" * 300]),
        ),
        ("serve_envs", chance.choice(["sims=nope", "host=nowhere.invalid", "nope"])),
    ]
    module, *words = chance.choice(choices)
    return Wrong(module, tuple(part for word in words for part in ([word] if "=" in word and " " not in word else word.split(" "))), "")
