"""``python -m embodied_rl.serve_envs``: simulators behind HTTP, each environment in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embodied_rl.bounds import Megabytes, Processes, Seconds
from embodied_rl.commands.cli import Argument, Command, as_command, serve_until_stopped, server_arguments
from embodied_rl.progress import progress_bar
from embodied_rl.serving.environments.app import EnvironmentService
from embodied_rl.serving.environments.hub import ServiceLimits, offered_simulators
from embodied_rl.serving.http_server import ServerLimits

COMMAND = Command(
    name="serve_envs",
    summary="Serve registered simulators over HTTP: make, reset, step, snapshot, restore, render and close, singly or in batches.",
    arguments=(
        *server_arguments(8700),
        Argument("sims", str, "simulators to serve, separated by commas; all: every simulator whose arguments name no code", "all"),
        Argument("max_environments", Processes, "most environments at a time", 64),
        Argument("memory_mb", Megabytes, "end an environment's process above this resident memory", 4096.0),
        Argument("cpu_s", Seconds, "end an environment's process after this many CPU seconds; default: no limit", None),
        Argument("idle_s", Seconds, "close an environment after this long without a request", 600.0),
        Argument("step_timeout_s", Seconds, "close an environment whose step takes longer", 60.0),
        Argument("start_timeout_s", Seconds, "close an environment whose simulator takes longer to build", 180.0),
        Argument("max_body_mb", Megabytes, "largest size of a request, in units of 2**20 bytes", 32.0),
    ),
    examples=(
        "",
        "sims=gem_guess_number,cartpole max_environments=16 memory_mb=1000",
        "host=0.0.0.0 port=8700",
    ),
)


@as_command
def main(argv: Sequence[str]) -> None:
    values, _ = COMMAND.parse(argv)
    with progress_bar(f"starting the service of sims={values['sims']} on port {values['port']}"):
        service, token = start(values)
    message = f"Serving {len(service.hub.names)} simulators at {service.url}"
    serve_until_stopped(service.close, message, token, "Token for clients")


def start(values: dict[str, Any]) -> tuple[EnvironmentService, str | None]:
    """Start the service of the arguments; returns (the listening service, its token if it is new). Raises UserError."""
    listed = values["sims"].removeprefix("[").removesuffix("]")
    names = None if listed == "all" else tuple(name.strip() for name in listed.split(","))
    limits = {name: values[name] for name in ("max_environments", "memory_mb", "cpu_s", "idle_s", "step_timeout_s", "start_timeout_s")}
    service = EnvironmentService(
        offered_simulators(names),
        host=values["host"],
        port=values["port"],
        token=values["token"],
        limits=ServiceLimits(**limits),
        http=ServerLimits(max_body_mb=values["max_body_mb"]),
    )
    return service, service.token if service.token_is_new else None
