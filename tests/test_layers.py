"""The house's floors: imports run downward only, nothing runs in a circle, and simulators stay free of torch.

The imports are read from the source (module level and inside functions; those for type checkers alone do not run and do
not count), so that a lazy import is no way around a floor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import embodied_rl

PACKAGE = Path(embodied_rl.__file__).parent

GROUND = {
    "",
    "errors",
    "types",
    "registry",
    "bounds",
    "files",
    "memory",
    "progress",
    "reading",
    "specs",
    "statistics",
    "stopping",
    "timeline",
    "trust",
    "versions",
}
"""Open to everybody; "" is the package itself, which holds the version."""

FLOORS: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "versions": {""},
    "bounds": set(),
    "specs": {"errors"},
    "types": {"specs"},
    "registry": {"errors"},
    "files": {"errors"},
    "memory": {"errors"},
    "reading": {"errors"},
    "trust": {"errors", "files", "reading", "registry"},
    "timeline": {"errors", "files"},
    "statistics": {"errors"},
    "stopping": set(),
    "progress": set(),
    "config": GROUND,
    "video": GROUND,
    "sandbox": {"errors"},
    "distributed": {""},
    "compose": {"config"},
    "sim": GROUND | {"config", "distributed", "sandbox", "video"},
    "policies": GROUND | {"config"},
    "algorithms": GROUND | {"config"},
    "episodes": GROUND | {"video"},
    "checkpoint": GROUND | {"config"},
    "loggers": GROUND | {"config", "video"},
    "generation": GROUND | {"config", "policies"},
    "serving": {"bounds", "distributed", "errors", "reading"},
    "serving.environments": GROUND | {"config", "distributed", "serving", "sim"},
    "serving.agents": GROUND | {"config", "generation", "policies", "serving"},
    "agents": GROUND | {"config", "generation", "sandbox", "sim"},
    "rollout": GROUND | {"agents", "config", "episodes", "generation", "sandbox", "serving.agents", "sim"},
    "learning": GROUND | {"config", "distributed", "episodes", "policies", "algorithms"},
    "hybrid": GROUND | {"config", "generation", "learning", "policies", "algorithms", "sim"},
    "reporting": GROUND | {"checkpoint", "config", "loggers"},
    "run_folder": GROUND | {"config", "checkpoint", "loggers"},
    "methods": GROUND | {"agents", "config", "algorithms", "episodes", "generation", "learning", "policies", "rollout", "sim"},
    "roles": GROUND
    | {"agents", "algorithms", "config", "distributed", "generation", "hybrid", "learning", "methods", "policies", "rollout", "sim"},
    "config.facts": GROUND | {"algorithms", "config", "hybrid", "learning", "methods", "roles", "sim"},
    "config.rules": GROUND | {"algorithms", "config", "config.facts", "episodes", "methods", "policies", "roles"},
    "resuming": GROUND | {"config", "checkpoint", "learning", "methods", "policies"},
    "trainer": GROUND
    | {
        "checkpoint",
        "config",
        "config.rules",
        "episodes",
        "generation",
        "hybrid",
        "loggers",
        "methods",
        "policies",
        "reporting",
        "resuming",
        "roles",
    }
    | {"rollout", "run_folder", "sim"},
    # The outer ring: nothing above imports it.
    "lerobot": GROUND | {"policies"},
    "planning": GROUND | {"config", "hybrid", "methods", "sim", "trainer"},
    "media": GROUND | {"agents", "config", "episodes", "generation", "policies", "rollout", "serving.agents", "sim", "video"},
    "evaluation": GROUND
    | {"algorithms", "checkpoint", "config", "episodes", "generation", "policies", "reporting", "resuming", "rollout", "sim"},
    "reports": GROUND | {"checkpoint", "config", "episodes", "evaluation", "loggers", "reporting", "video"},
}
"""{room: rooms it may import}. A room is a package or module directly below embodied_rl."""

COMMAND_LINES = {"commands", "train", "evaluate", "render", "record", "replay", "offline_eval", "catalog", "doctor", "report", "plan"}
COMMAND_LINES |= {"serve_envs", "serve_agent", "tune", "__main__"}
"""The roof: they may import everything, each other too; nobody below may import them."""

TORCH_FREE = (
    "distributed",
    "sim",
    "serving",
    "serving.environments",
    "sandbox",
    "specs",
    "types",
    "errors",
    "bounds",
    "registry",
    "config",
    "files",
)


def modules() -> dict[str, Path]:
    """{dotted name: file} of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """A package's ``__main__`` is a command line, whatever room it stands in; a floor of two names holds a part of a room."""
    parts = module.split(".")
    if parts[-1] == "__main__":
        return "__main__"
    return part if (part := ".".join(parts[1:3])) in FLOORS else [*parts, ""][1]


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement, at any depth, for type checkers too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def names_of(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    """Dotted names that an import statement may load: the modules, and what is taken from them (which may be modules)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        kept = len(parts) - node.level + (1 if is_package else 0)
        base = ".".join([*parts[:kept], *([base] if base else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def own_imports(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of this package that `module` imports, at any depth and for type checkers too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {name for node in imports_of(tree) for name in names_of(node, module, path.name == "__init__.py")}
    found = named & known.keys()
    # `from embodied_rl.sim import manager` names two modules; the package counts only when something else is taken from it.
    return {name for name in found if name != module and not any(other.startswith(f"{name}.") for other in found)}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    assert len(known) > 20, "the walk found too little to mean anything"
    found = {module: own_imports(module, path, known) for module, path in known.items()}
    return {**found, "embodied_rl": set()}  # the package's door: what it names for type checkers it loads when first asked


def test_every_room_has_a_floor(graph: dict[str, set[str]]) -> None:
    unknown = {room_of(module) for module in graph} - FLOORS.keys() - COMMAND_LINES
    assert not unknown, f"give these a floor in FLOORS (see CONTRIBUTING.md): {sorted(unknown)}"


def test_imports_run_downward(graph: dict[str, set[str]]) -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph.items()
        if room_of(module) not in COMMAND_LINES
        for target in sorted(targets)
        if room_of(target) != room_of(module) and room_of(target) not in FLOORS.get(room_of(module), set())
    ]
    assert not upward, "\n".join(upward)


def test_floors_themselves_are_acyclic() -> None:
    assert find_cycle(FLOORS) is None


def test_sim_and_policies_never_meet() -> None:
    assert not reachable(FLOORS, "sim") & {"policies", "algorithms", "generation", "hybrid", "learning", "rollout"}
    assert not reachable(FLOORS, "policies") & {"sim", "hybrid", "rollout"}
    assert "hybrid" not in reachable(FLOORS, "rollout")
    assert "rollout" not in reachable(FLOORS, "hybrid")


def test_no_cycle_between_modules(graph: dict[str, set[str]]) -> None:
    cycle = find_cycle(graph)
    assert cycle is None, " -> ".join(cycle or [])


WRITTEN_IN_TORCH = "embodied_rl.sim.robots.maniskill_batch."
"""Modules about ManiSkill's own tensors; they are imported inside functions, when ManiSkill, and torch with it, is there already."""


@pytest.mark.parametrize("room", TORCH_FREE)
def test_simulator_side_names_no_torch_at_module_level(room: str) -> None:
    offenders = []
    for module, path in modules().items():
        if room_of(module) != room:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = names_of(node, module, path.name == "__init__.py")
                if not module.startswith(WRITTEN_IN_TORCH):
                    batch = [name for name in names if name.startswith(WRITTEN_IN_TORCH) and name in modules()]
                    torch = [name for name in names if name.split(".")[0] in ("torch", "torchvision", "transformers")]
                    offenders += [f"{module}: {name}" for name in [*batch, *torch]]
    assert not offenders


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Some cycle as a path that ends where it begins; None when there is none."""
    finished: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return None
        for target in sorted(edges.get(node, ())):
            cycle = walk(target, [*path, node])
            if cycle is not None:
                return cycle
        finished.add(node)
        return None

    return next((cycle for node in sorted(edges) if (cycle := walk(node, [])) is not None), None)


def reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    queue = [start]
    while queue:
        for target in edges.get(queue.pop(), ()):
            if target not in seen:
                seen.add(target)
                queue.append(target)
    return seen


# --- the walker itself -----------------------------------------------------------------------------------------------


def test_walker_sees_lazy_relative_and_type_only_imports() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import embodied_rl.trainer
else:
    pass
from .sibling import thing
from .. import cousin
def lazy():
    if True:
        try:
            from embodied_rl.sim import manager
        except ImportError:
            import torch
"""
    found = [name for node in imports_of(ast.parse(source)) for name in names_of(node, "embodied_rl.sim.worker", is_package=False)]
    assert set(found) >= {"embodied_rl.trainer", "embodied_rl.sim.sibling", "embodied_rl.cousin", "embodied_rl.sim.manager", "torch"}


def test_cycle_finder_finds_one_and_only_one_where_it_is() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
