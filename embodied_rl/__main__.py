"""``embodied-rl train …``, the same as ``python -m embodied_rl.train …``; also ``python -m embodied_rl train …``."""

from __future__ import annotations

import runpy
import sys

from embodied_rl.commands.cli import run_command
from embodied_rl.errors import require_known

COMMANDS = {
    "train": "train a policy",
    "tune": "search configuration values with Optuna, one training run per trial",
    "evaluate": "play a checkpoint on held-out seeds, or compare two",
    "render": "film episodes of a checkpoint",
    "record": "record episodes of a checkpoint, an expert or random actions",
    "replay": "play a recording's actions again in its simulator",
    "episodes": "inspect, check, convert, merge and split recordings",
    "offline_eval": "estimate a checkpoint's return from a recording, without a simulator",
    "report": "write the report page of one or several runs",
    "plan": "find the fastest placement on the devices of a cluster",
    "catalog": "list simulators, policies and algorithms; check a simulator",
    "doctor": "check what this machine can run and what is missing",
    "serve_envs": "serve simulators over HTTP",
    "serve_agent": "serve a language model to agent programs over HTTP",
}


_COMPLETION = 'Tab completes after: eval "$(embodied-rl completion bash)"; zsh and fish likewise.'


def main() -> None:
    run_command(_run)


def _run() -> None:
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else "help"
    if name in ("help", "__help", "_h"):
        print(usage())
        return
    if name == "__version":
        from embodied_rl import __version__

        print(__version__)
        return
    if name in ("completion", "__complete"):
        from embodied_rl.commands.completion import completions, script

        given = sys.argv[2] if len(sys.argv) > 2 else ""
        print(script(given) if name == "completion" else "\n".join(completions(given, [*COMMANDS, "completion"])))
        return
    require_known(name, COMMANDS, f"Command '{sys.argv[1]}' is not known.")
    del sys.argv[1]
    # As `python -m` does, so that worker processes find the same main module.
    runpy.run_module(f"embodied_rl.{name}", run_name="__main__", alter_sys=True)


def usage() -> str:
    rows = [f"  {name:<14}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: embodied-rl COMMAND key=value …", "", *rows, "", "Options: embodied-rl COMMAND --help", _COMPLETION])


if __name__ == "__main__":
    main()
