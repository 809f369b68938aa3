"""``python -m tests.chaos minutes=10``: attack every door in turn; exit status 1 and a reproduction per failure where one gave way."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

from embodied_rl.bounds import Bounds, Positive, Seed
from embodied_rl.commands.cli import Argument, Command, run_command
from embodied_rl.errors import UserError, did_you_mean
from tests.chaos.harness import ATTACKS, run_attack

COMMAND = Command(
    "chaos",
    "Attack commands, files, requests, sockets and processes with generated mistakes; every failure is printed with what repeats it.",
    (
        Argument("minutes", Positive, "time for all attacks together", 10.0),
        Argument("attacks", str, f"comma-separated: {', '.join(ATTACKS)}", ",".join(ATTACKS)),
        Argument("seed", Seed, "where the attempts are drawn from", 0),
        Argument("only", Annotated[int, Bounds(0, 10**9)], "repeat this attempt alone", None),
    ),
)


def main() -> None:
    values, _ = COMMAND.parse(sys.argv[1:])
    names = values["attacks"].split(",")
    for name in names:
        if name not in ATTACKS:
            raise UserError(f"Attack '{name}' is not known.{did_you_mean(name, ATTACKS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for name in names:
            tally = run_attack(
                name, Path(folder) / name, seed=values["seed"], seconds=values["minutes"] * 60 / len(names), only=values["only"]
            )
            print("\n".join([tally.line(), *tally.reproductions()]), flush=True)
            failed = failed or bool(tally.failures)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_command(main)
