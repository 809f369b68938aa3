"""The model card beside a checkpoint: what it is, how it was made and how to use it."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied_rl.config import TrainConfig
from embodied_rl.config.run import model_place
from embodied_rl.files import write_atomic
from embodied_rl.specs import show_action, show_part
from embodied_rl.types import SimSpec
from embodied_rl.versions import machine, versions

CARD_FILE = "MODEL_CARD.md"
_RESULT_HEADING = "## Result\n| metric | value |\n|---|---|\n"


def add_result_to_card(folder: Path, rows: Mapping[str, str]) -> None:
    """Put the held-out result, known only after the checkpoint was written, at the head of its model card's table of results."""
    path = folder / CARD_FILE
    head, heading, rest = path.read_text(encoding="utf-8").partition(_RESULT_HEADING)
    # Rows of an earlier evaluation of this checkpoint are replaced.
    kept = [line for line in rest.splitlines(keepends=True) if not any(line.startswith(f"| {name} |") for name in rows)]
    added = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    write_atomic(path, head + heading + added + "".join(kept))


def resume_command(command: str, path: Path | str, **changes: object) -> str:
    """The command that continues a run, with other values for the keys of `changes`; the checkpoint holds the configuration.

    From `command`, which started the run, it keeps what no checkpoint holds: ``trust=…`` and variables before ``python``.
    """
    kept = [word for word in shlex.split(command) if word.startswith("trust=")]
    given = [f"resume={path}", *(f"{key}={value}" for key, value in changes.items()), *kept]
    return f"{python_of(command)} -m embodied_rl.train {shlex.join(given)}"


def python_of(command: str) -> str:
    """``python``, after the variables before it in a run's command (``PYTHONPATH=…``, for code of a notebook)."""
    variables = itertools.takewhile(lambda word: "=" in word, shlex.split(command))
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, _, value in (word.partition("=") for word in variables)), "python"])


def model_card(final: Path, document: Mapping[str, Any], config: TrainConfig, written: str, spec: SimSpec) -> str:
    """The card's text; `document`: content of ``state.json``, `written`: the configuration as YAML."""
    metrics = "\n".join(f"| {name} | {value:.6g} |" for name, value in sorted(document["metrics"].items())) or "| (none yet) | |"
    installed = "\n".join(f"- {name} {version}" for name, version in versions().items())
    action = show_action(spec.action)
    given, python = shlex.quote(f"checkpoint={final}"), python_of(document["command"])
    domain = f", domain={next(iter(config.domains))!r}" if config.domains else ""
    given += f" domain={next(iter(config.domains))}" if config.domains else ""
    parts = {name: config.for_domain(name) for name in config.domains}
    policies = " and ".join(dict.fromkeys(part.policy.name for part in parts.values())) or config.policy.name
    one = f"- Simulator: `sim={config.sim.name}`, task {spec.task}{f', instruction “{spec.instruction}”' if spec.instruction else ''}"
    several = "\n".join(f"- Domain {name}: {_of_domain(config.policy_of(name), part)}" for name, part in parts.items())
    observation = ", ".join(f"{key} {show_part(part)}" for key, part in spec.observation.items())
    return f"""# {spec.task}: {policies} trained with {config.algorithm.name}

A policy of embodied_rl after {document["step"]:,} environment steps, saved {document["created"]}.

{several or one}
- Observation: {observation}; the policy reads {", ".join(f"`{key}`" for key in config.policy.reads)}
- Action: {action}
- Seed: {config.seed}

## Made with
```
{document["command"]}
```

{_RESULT_HEADING}{metrics}

## Use
```
{python} -m embodied_rl.evaluate {given} num_episodes=100
{python} -m embodied_rl.render {given} num_episodes=4
{resume_command(document["command"], final)}
```

In a control loop; `observation` is one step's or a batch, `action` in the simulator's units:
```python
import embodied_rl

policy = embodied_rl.load_policy({str(final)!r}{domain})
policy.reset()  # where an episode begins
action = policy.predict(observation)
```

## Configuration
```yaml
{written.rstrip()}
```

## Versions
{installed}
- machine: {machine()["cpu"]}, {machine()["cores"]} cores
"""


def _of_domain(role: str, config: TrainConfig) -> str:
    """One domain's simulator and policy, and the folder of its model for other tools."""
    place = f", in `{Path('model', model_place(role))}`" if config.policy.name == "language" else ""
    return f"`sim={config.sim.name}`, {config.policy.name}{place}"
