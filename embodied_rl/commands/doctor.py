"""``python -m embodied_rl.doctor``: what this machine has, what it lacks, and how to install it.

Everything is tried: every drawing back end draws a frame, every simulator's package is imported (text environments play a turn), vLLM
computes and the encoder encodes. Each probe runs in its own process with a timeout, so that a crashing or hanging driver is a line in the
table. The probes are in `embodied_rl.commands.probes`. Exit status 0 if training can run here, else 1.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from embodied_rl.commands.cli import Argument, Command, print_tables
from embodied_rl.commands.probes import (
    DRAWING,
    SIMULATORS,
    TRAINING,
    Check,
    NotHere,
    Probe,
    Status,
    installed_version,
    package_checks,
    placement_checks,
    system_checks,
)
from embodied_rl.progress import progress_bar

PROBE_TIMEOUT_S = 120.0
"""Generous, because first imports from a cold disk are slow. The probes run in parallel, and all take about 10 s on two cores."""

COMMAND = Command(
    name="doctor",
    summary="Check what this machine can run, what is missing, and how to install it.",
    arguments=(
        Argument("json", bool, "print the report as JSON (--json does too)", False),
        Argument("export", bool, "print only the environment variables that rendering needs here, for a shell's eval", False),
    ),
    examples=("", "json=true", "export=true"),
)

_NOT_HERE = 3  # exit status of a probe that raised NotHere
_FIX = "what brings it: "

PROBES = (*TRAINING, *SIMULATORS, *DRAWING)


# --- the report ------------------------------------------------------------------------------------------------------


def examine(
    probes: Sequence[Probe] = PROBES, timeout_s: float = PROBE_TIMEOUT_S, *, on_probe: Callable[[str], object] | None = None
) -> list[Check]:
    """Run every check; the probes in parallel, two at a time or one per core.

    `on_probe` is called with the name of each finished probe.
    """
    from embodied_rl.sim.affinity import available_cores

    def tried_one(probe: Probe) -> Check:
        check = run_probe(probe, timeout_s)
        if on_probe is not None:
            on_probe(probe.name)
        return check

    with ThreadPoolExecutor(max_workers=max(2, min(available_cores(), len(probes)))) as pool:
        tried = list(pool.map(tried_one, probes))
    return [*system_checks(), *placement_checks(), *package_checks(), *_one_is_enough(tried, "MuJoCo EGL", "MuJoCo OSMesa")]


def _one_is_enough(checks: list[Check], *names: str) -> list[Check]:
    """Drop the fixes of failed alternatives if one of them works."""
    if not any(check.status == "ok" for check in checks if check.name in names):
        return checks
    return [replace(check, fix="") if check.name in names else check for check in checks]


def can_train(checks: Sequence[Check]) -> bool:
    """Whether everything that training requires is available."""
    return all(check.status == "ok" for check in checks if check.required)


def run_probe(probe: Probe, timeout_s: float = PROBE_TIMEOUT_S) -> Check:
    """Run one probe in a fresh process; a crash, a hang and an exception all become results."""
    needed = (probe.package,) if isinstance(probe.package, str) else probe.package or ()
    if needed and not any(map(installed_version, needed)):
        detail = f"{' or '.join(needed)} is not installed"
        return Check(probe.group, probe.name, "missing", detail, probe.package_fix or probe.fix, probe.required)
    command = [sys.executable, "-m", "embodied_rl.doctor", "--probe", probe.name]
    environment = {**os.environ, **dict(probe.environment)}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(probe.group, probe.name, "failed", f"no answer within {timeout_s:.0f} s", probe.fix, probe.required)
    if result.returncode == 0:
        return Check(probe.group, probe.name, "ok", result.stdout.strip().splitlines()[-1], required=probe.required)
    if result.returncode < 0:
        reason = f"the process died of signal {-result.returncode}"
    else:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    status: Status = "missing" if result.returncode == _NOT_HERE else "failed"
    fixes = [line.removeprefix(_FIX) for line in result.stdout.splitlines() if line.startswith(_FIX)]
    return Check(probe.group, probe.name, status, reason[:160], fixes[-1] if fixes else probe.fix, probe.required)


def _probe_here(name: str) -> int:
    """Child's side of `run_probe`: the detail on stdout, or the exception's line on stderr."""
    from embodied_rl.sim.rendering import configure_rendering

    gc.disable()  # it would take a fifth of the time, which is mostly imports
    configure_rendering()
    probe = next(probe for probe in PROBES if probe.name == name)
    try:
        detail = probe.run()
    except NotHere as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        print(f"{_FIX}{error.fix}" if error.fix else "", flush=True)
        status = _NOT_HERE
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        status = 1
    else:
        print(detail, flush=True)
        status = 0
    # Graphics libraries may crash during the interpreter's shutdown, after the result is known.
    os._exit(status)


def print_report(checks: Sequence[Check]) -> None:
    """The table, what is missing and the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    signs = {"ok": Text("ok", "green"), "missing": Text("missing", "yellow"), "failed": Text("failed", "yellow")}
    table = Table(title="embodied_rl doctor", title_justify="left", expand=False)
    for heading in ("", "check", "status", "detail"):
        table.add_column(heading, overflow="fold")
    group = ""
    for check in checks:
        if check.group != group and group:
            table.add_section()
        sign = Text(check.status, "bold red") if check.required and check.status != "ok" else signs[check.status]
        table.add_row(check.group if check.group != group else "", Text(check.name), sign, Text(check.detail))
        group = check.group
    print_tables(table)
    wanting = [check for check in checks if check.fix]
    if wanting:
        print("Missing, and how to install it:")
        for check in wanting:
            # A command stays on one line for copying.
            print(f"  {check.name}: {check.fix}")
    if can_train(checks):
        lacking = any(check.name == "ManiSkill" and check.status != "ok" for check in checks)
        which = " experiment=cartpole (the main job needs ManiSkill)" if lacking else ""
        Console(highlight=False, soft_wrap=True).print(Text(f"Training can run here: python -m embodied_rl.train{which}", "green"))
    else:
        broken = ", ".join(check.name for check in checks if check.required and check.status != "ok")
        Console(highlight=False, soft_wrap=True).print(Text(f"Training cannot run here: {broken}.", "bold red"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--probe"] and words[1:] in [[probe.name] for probe in PROBES]:  # the child process of one probe
        return _probe_here(words[1])
    values, _ = COMMAND.parse(["json=true" if word == "--json" else word for word in words])
    if values["export"]:
        from embodied_rl.sim.rendering import exports

        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports().items()))
        return 0
    with progress_bar("checking this machine", len(PROBES)) as advance:
        checks = examine(on_probe=lambda name: advance(1, name))
    if values["json"]:
        print(json.dumps({"can_train": can_train(checks), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print_report(checks)
    return 0 if can_train(checks) else 1
