"""``python -m embodied_rl.serve_envs``: simulators behind HTTP, each environment in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from embodied_rl.bounds import Megabytes, Port, Processes, Seconds
from embodied_rl.cli import Argument, Command, run_command, serve_until_stopped

COMMAND = Command(
    name="serve_envs",
    summary="Offer registered simulators over HTTP: make, reset, step, snapshot, restore, render and close, alone or in batches.",
    arguments=(
        Argument("host", str, "address to listen on; one that other machines can reach needs a token in EMBODIED_RL_TOKEN", "127.0.0.1"),
        Argument("port", Port, "0 takes a free one", 8700),
        Argument("sims", str, "names to offer, separated by commas; all: every simulator of the catalogue", "all"),
        Argument("max_environments", Processes, "environments at a time", 64),
        Argument("memory_mb", Megabytes, "resident memory of one environment's process, beyond which it is ended", 4096.0),
        Argument("cpu_s", Seconds, "CPU seconds of one environment's process in all; default: no limit", None),
        Argument("idle_s", Seconds, "an environment that nobody asks anything of for so long is closed", 600.0),
        Argument("step_timeout_s", Seconds, "a step that takes longer ends its environment", 60.0),
        Argument("start_timeout_s", Seconds, "the same for building a simulator", 180.0),
        Argument("max_body_mb", Megabytes, "size of one request (2**20 bytes)", 32.0),
    ),
    examples=(
        "",
        "sims=gem_guess_number,cartpole max_environments=16 memory_mb=1000",
        "host=0.0.0.0 port=8700",
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    run_command(lambda: _main(arguments))


def _main(argv: Sequence[str]) -> None:
    values, _ = COMMAND.parse(argv)
    service = start(values)
    serve_until_stopped(service.close, f"Serving {len(service.hub.names)} simulators at {service.url}")


def start(values: dict[str, Any]) -> Any:
    """The service (`EnvironmentService`) that the arguments describe, listening. Raises UserError."""
    from embodied_rl.http_server import ServerLimits, token_from
    from embodied_rl.service.app import TOKEN_VARIABLE, EnvironmentService, offered_simulators
    from embodied_rl.service.environment import ServiceLimits

    names = None if values["sims"] == "all" else tuple(name.strip() for name in values["sims"].split(","))
    limits = {name: values[name] for name in ("max_environments", "memory_mb", "cpu_s", "idle_s", "step_timeout_s", "start_timeout_s")}
    return EnvironmentService(
        offered_simulators(names),
        host=values["host"],
        port=values["port"],
        token=token_from(TOKEN_VARIABLE),
        limits=ServiceLimits(**limits),
        http=ServerLimits(max_body_mb=values["max_body_mb"]),
    )


if __name__ == "__main__":
    main()
