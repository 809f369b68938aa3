"""check_sim(): play a simulator in this process and in new ones, and report which properties hold.

The environment manager relies on these properties (`embodied_rl.sim.env.SimEnv`): an episode depends only on its seed and its actions; the
simulator writes its own rows completely and no others; nothing resets unasked; a snapshot continues as its spec says. ``python -m
embodied_rl.catalog check SIM`` prints the report.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.checks import rows, seeds
from embodied_rl.sim.checks.episodes import Failed, Part, Player, Session, Skipped, Trajectory, random_actions
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimFactory, adapt, called, described
from embodied_rl.sim.private_random import process_state_kept
from embodied_rl.sim.snapshots import SnapshotError, decode_state, encode_state

Outcome = Literal["pass", "fail", "skip"]
_NEIGHBOURS = "num_envs >= 2"
_DETERMINISM, _EXACT, _ALONE = ("determinism",), ("determinism", "history"), ("determinism", "history", "siblings", "place")

CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[Session], str]], ...] = (
    ("spec", (), rows.spec_is_sound),
    ("determinism", (), seeds.deterministic),
    ("new_process", _DETERMINISM, seeds.deterministic_elsewhere),
    ("history", _DETERMINISM, seeds.independent_of_history),
    ("spaces", (), rows.spaces_are_kept),
    ("actions", ("spec", "spaces"), rows.actions_are_accepted),
    ("other_rows", (_NEIGHBOURS,), rows.other_rows_are_left_alone),
    ("kept_rows", ("determinism", "spaces"), rows.nothing_is_kept),
    ("info", (), rows.info_is_plain),
    ("seeds", (), seeds.seeds_matter),
    ("siblings", (*_DETERMINISM, _NEIGHBOURS), seeds.independent_of_siblings),
    ("order", (*_DETERMINISM, _NEIGHBOURS), seeds.independent_of_order),
    ("place", (*_DETERMINISM, _NEIGHBOURS), seeds.independent_of_place),
    ("global_random", _DETERMINISM, seeds.independent_of_global_random),
    ("step_limit", (), seeds.keeps_its_limit),
    ("reset_after_end", (*_EXACT, "spaces", "siblings"), seeds.resets_after_its_end),
    ("no_autoreset", (), seeds.never_resets_by_itself),
    ("render", (), rows.renders),
    ("unread", _EXACT, seeds.unread_observations_change_nothing),
    ("snapshot", _ALONE, seeds.snapshots_continue),
    ("snapshot_new_process", (*_ALONE, "new_process", "snapshot"), seeds.snapshots_travel),
    ("replay", (*_ALONE, "new_process"), seeds.replays),
    ("close", (), rows.closes_twice),
)
"""(name, names of checks that must not have failed (or `_NEIGHBOURS`), function), in the order of execution."""
_MARK = {"pass": "ok  ", "fail": "FAIL", "skip": "skip"}


@dataclass(frozen=True)
class CheckResult:
    """Result for one property."""

    name: str
    outcome: Outcome
    detail: str
    """One line: what was compared, or what went wrong and how to fix it."""
    seconds: float


@dataclass(frozen=True)
class CheckReport:
    """Result of `check_sim`; ``str()`` is a table."""

    task: str
    num_envs: int
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; skipped properties (no rendering, no snapshots) do not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the properties that do not hold."""
        return tuple(result.name for result in self.results if result.outcome == "fail")

    def __getitem__(self, name: str) -> CheckResult:
        return next(result for result in self.results if result.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, "num_envs": self.num_envs, "ok": self.ok, "results": [asdict(result) for result in self.results]}

    def __str__(self) -> str:
        width = max(len(result.name) for result in self.results)
        lines = [f"{self.task}, {self.num_envs} environments in one process"]
        lines += [f"  {_MARK[r.outcome]}  {r.name:<{width}}  {r.seconds:6.2f} s  {r.detail}" for r in self.results]
        count = {outcome: sum(result.outcome == outcome for result in self.results) for outcome in _MARK}
        lines.append(f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped.")
        return "\n".join(lines)


def check_sim(
    factory: SimFactory | Callable[..., Any],
    num_envs: int = 3,
    steps: int = 100,
    *,
    continuation_steps: int = 200,
    longest_episode: int = 1000,
    seed: int = 0,
    new_processes: bool = True,
    timeout_s: float = 300.0,
) -> CheckReport:
    """Play a simulator and check every property that can be checked.

    Every comparison covers observations, rewards, flags and success, bit by bit; a difference is reported with its first place and its
    size. Properties that depend on a failed one are skipped.

    Args:
        factory: as a worker would build it; or a class or function that `SimFactory.target` could name (it takes ``num_envs`` and
            returns a SimEnv or VectorEnv, or takes nothing and returns a gymnasium.Env).
        num_envs: environments in the process; below 2, checks that need neighbours are skipped.
        steps: longest compared episode.
        continuation_steps: most steps compared after a restored snapshot.
        longest_episode: most steps to wait for an episode's end.
        new_processes: also compare with new Python processes; not for a factory that they cannot import (a lambda).

    Raises:
        UserError: the simulator cannot be built because of the user's arguments, missing packages or assets.
        ValueError: an argument below 1.
    """
    for name, value in (("num_envs", num_envs), ("steps", steps), ("continuation_steps", continuation_steps)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    named = factory if isinstance(factory, SimFactory) else _importable(factory)

    def build(count: int) -> SimEnv:
        return factory.make(count) if isinstance(factory, SimFactory) else adapt(factory, count, None, {})

    elsewhere = functools.partial(_play_elsewhere, named if new_processes else "new processes were not requested", num_envs, timeout_s)
    started = time.perf_counter()
    try:
        session = Session(build, num_envs, steps, continuation_steps, longest_episode, seed, elsewhere)
    except UserError:
        raise
    except Exception as error:
        task = factory.target if isinstance(factory, SimFactory) else called(factory)
        return CheckReport(task, num_envs, (CheckResult("build", "fail", described(error), time.perf_counter() - started),))
    results = [CheckResult("build", "pass", f"{num_envs} environments", time.perf_counter() - started)]
    with _own_random_state():
        try:
            for name, needs, body in CHECKS:
                results.append(_run(name, needs, body, session, results))
        finally:
            with suppress(Exception):  # the check "close" has reported it
                session.sim.close()
    return CheckReport(session.spec.task, num_envs, tuple(results))


def _run(name: str, needs: tuple[str, ...], body: Callable[[Session], str], session: Session, earlier: list[CheckResult]) -> CheckResult:
    broken = [result.name for result in earlier if result.outcome == "fail" and result.name in needs]
    started = time.perf_counter()
    outcome: Outcome
    if broken:
        outcome, detail = "skip", f"skipped until '{broken[0]}' passes"
    elif _NEIGHBOURS in needs and session.num_envs < 2:
        outcome, detail = "skip", f"needs {_NEIGHBOURS}"
    else:
        try:
            outcome, detail = "pass", body(session)
        except Skipped as reason:
            outcome, detail = "skip", str(reason)
        except Failed as reason:
            outcome, detail = "fail", str(reason)
        except Exception as error:
            outcome, detail = "fail", described(error)
    if outcome == "fail":
        session.broken.add(name)
    return CheckResult(name, outcome, detail, time.perf_counter() - started)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Restore the process-wide generators afterwards, which the checks disturb on purpose."""
    torch = sys.modules.get("torch")
    with process_state_kept(), torch.random.fork_rng(devices=()) if torch is not None else nullcontext():
        yield


# ---- new processes --------------------------------------------------------------------------------------------------


def _importable(factory: Callable[..., Any]) -> SimFactory | str:
    """`SimFactory` with which another process can import this class or function, or the reason why none exists."""
    kwargs: dict[str, Any] = {}
    while isinstance(factory, functools.partial) and not factory.args:
        kwargs = {**factory.keywords, **kwargs}
        factory = factory.func
    module, name = factory.__module__, called(factory)
    if module == "__main__" or module not in sys.modules or not name.isidentifier() or vars(sys.modules[module]).get(name) is not factory:
        return "a new process cannot import this factory: give SimFactory('package.module:Name') to check there too"
    return SimFactory(f"{module}:{name}", kwargs=kwargs)


def _play_elsewhere(
    factory: SimFactory | str,
    num_envs: int,
    timeout_s: float,
    parts: Mapping[int, Part],
    num_steps: int,
    options: Mapping[str, Any] | None = None,
    snapshot: tuple[bytes, int] | None = None,
) -> dict[int, Trajectory]:
    """Play `parts` in a new interpreter. `snapshot` (bytes, position): restore the only environment of `parts` and play on; the keys of the
    result then count episodes. `factory` may be a text, the reason why there is none."""
    if isinstance(factory, str):
        raise Skipped(factory)
    try:
        made = {**vars(factory), "kwargs": dict(factory.kwargs)}
        asked = {i: (part.seed, part.actions.tolist(), str(part.actions.dtype)) for i, part in parts.items()}
        request = encode_state((made, num_envs, asked, num_steps, options, snapshot))
    except SnapshotError as error:
        raise Skipped(f"the simulator's arguments cannot be sent to a new process: {error}") from error
    with tempfile.TemporaryDirectory(prefix="check_sim-") as name:
        folder = Path(name)
        (folder / "request").write_bytes(request)
        # Another hash seed: an episode must not depend on the order of a set of strings.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONHASHSEED": "20231"}
        command = [sys.executable, "-m", "embodied_rl.sim.check", str(folder)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"a new process did not finish within {timeout_s:g} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["(it printed nothing)"]
            raise Failed(f"a new process ended with status {done.returncode}: {lines[-1][:300]}")
        return {number: Trajectory(**state) for number, state in decode_state((folder / "answer").read_bytes()).items()}


def _answer(folder: Path) -> None:
    """The new interpreter's side of `_play_elsewhere`."""
    factory, num_envs, asked, num_steps, options, snapshot = decode_state((folder / "request").read_bytes())
    sim, parts = SimFactory(**factory).make(num_envs), {i: Part(seed, np.array(rows, kind)) for i, (seed, rows, kind) in asked.items()}
    player = Player(sim, num_envs)
    if snapshot is None:
        played = player.play(parts, num_steps, options)
    else:
        ((env_id, part),) = parts.items()
        if sim.spec.steps_together:
            player.reset({env_id: Part(0, random_actions(sim.spec, len(part.actions), 0))})
        data, position = snapshot
        played = dict(enumerate(seeds.continued(player, env_id, data, part, position, num_steps, options)))
    (folder / "answer").write_bytes(encode_state({number: vars(trajectory) for number, trajectory in played.items()}))
    sim.close()


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # native libraries may hang in their exit handlers
