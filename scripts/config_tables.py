"""Writes the tables of docs/configuration.md from the dataclasses of embodied_rl/config, between the markers there.

Use: `.venv/bin/python scripts/config_tables.py`; a test fails when the page and the code disagree.
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from pathlib import Path
from typing import Any

from embodied_rl import config
from embodied_rl.config.building import bounds_in, type_hints

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
START, END = "<!-- tables: written by scripts/config_tables.py -->\n", "<!-- end of tables -->"
GROUPS = {
    "": "TrainConfig",
    "sim": "SimConfig",
    "policy": "PolicyConfig",
    "policy (tiny_vla)": "TinyVLAConfig",
    "policy (openvla)": "OpenVLAPolicyConfig",
    "policy (openvla_oft, beside openvla's)": "OpenVLAOFTPolicyConfig",
    "policy (flow and pi0: denoising)": "FlowOptions",
    "policy (flow: networks)": "FlowNetworkConfig",
    "policy (flow: other defaults)": "FlowPolicyConfig",
    "policy (pi0)": "PI0PolicyConfig",
    "policy (policy=language)": "LanguageConfig",
    "policy (policy=custom)": "CustomPolicyConfig",
    "policy.tiny (policy=language)": "TinyModelConfig",
    "algorithm": "AlgorithmConfig",
    "algorithm.warm_start": "WarmStartConfig",
    "agent": "AgentConfig",
    "agent.tool_options": "ToolsConfig",
    "algorithm.initialized": "InitializedConfig",
    "algorithm.recorded": "RecordedConfig",
    "algorithm.cloning": "CloningConfig",
    "algorithm.off_policy": "OffPolicyConfig",
    "generation": "GenerationConfig",
    "generation.mix.NAME": "PlayerConfig",
    "domains.NAME": "DomainConfig",
    "hybrid": "HybridConfig",
    "hybrid.placement": "PlacementConfig",
    "hybrid.ray": "RayConfig",
    "hybrid.ray.cpus": "RayCpusConfig",
    "hybrid.ray.gpus": "RayGpusConfig",
    "hybrid.reward_worker": "RewardWorkerConfig",
    "hybrid.sharding": "ShardingConfig",
    "evaluation": "EvaluationConfig",
    "checkpoint": "CheckpointConfig",
    "record": "RecordConfig",
    "video": "VideoConfig",
    "logger": "LoggerConfig",
}


def tables() -> str:
    """The tables as Markdown."""
    sources = {sys.modules[getattr(config, name).__module__] for name in GROUPS.values()}
    nodes = [node for source in sources for node in ast.parse(inspect.getsource(source)).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    parts = []
    for group, name in GROUPS.items():
        hints = type_hints(getattr(config, name))
        rows = [
            _row(group.partition(" ")[0], field, hints[ast.unparse(field.target)], documentation)
            for field, documentation in _fields(classes[name])
            if not _is_group(field)
        ]
        parts.append(f"### {group or 'The run'}\n\n| Key | Type | Bounds | Default | |\n|---|---|---|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def rewritten(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables()}\n{END}{after}"


def _fields(node: ast.ClassDef) -> list[tuple[ast.AnnAssign, str]]:
    """Fields of a dataclass, each with the string below it."""
    found = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            constant = following.value if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else None
            found.append((statement, " ".join(str(constant.value).split()) if constant is not None else ""))
    return found


def _is_group(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.annotation).endswith("Config")


def _row(group: str, field: ast.AnnAssign, hint: Any, documentation: str) -> str:
    key = ".".join(filter(None, [group, ast.unparse(field.target)]))
    bounds = next((str(bounds) for bounds in bounds_in(hint)), "")
    # The name of a quantity says less to a reader than its type and bounds do.
    kind = _kind(hint) if bounds else ast.unparse(field.annotation).replace(" | None", " or null").replace("|", "\\|")
    default = "required" if field.value is None else ast.unparse(field.value).replace("None", "null")
    default = {"field(default_factory=dict)": "{}", "True": "true", "False": "false"}.get(default, default)
    default = default if field.value is None else f"`{default}`"
    return f"| `{key}` | {kind} | {bounds} | {default} | {documentation.replace('``', '`')} |\n"


def _kind(hint: Any) -> str:
    """int, float or null, tuple[int, ...]"""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return " or ".join(repr(word) for word in arguments)
    if origin is tuple:
        return f"tuple[{_kind(arguments[0])}, ...]"
    if arguments:
        return " or ".join("null" if argument is type(None) else _kind(argument) for argument in arguments)
    return str(hint.__name__)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
