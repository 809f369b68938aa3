"""Whether an episode can be taken up again as the spec says: each check returns a line, or raises `Failed` or `Skipped`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from embodied_rl.sim.checks.episodes import Difference, Failed, Part, Player, Session, Skipped, Trajectory, difference
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.snapshots import SnapshotError

_MOST_EPISODES = 50


def continued(
    player: Player, env_id: int, data: bytes, part: Part, position: int, num_steps: int, options: Mapping[str, Any] | None
) -> list[Trajectory]:
    """Restore an episode that was saved after `position` steps of `part`, and play on; see `_onward`."""
    player.sim.restore(env_id, data)
    player.adopt(env_id, part, position)
    return _onward(player, env_id, part, num_steps, options)


def _onward(player: Player, env_id: int, part: Part, num_steps: int, options: Mapping[str, Any] | None) -> list[Trajectory]:
    """`num_steps` steps: the rest of the episode, and then the next ones, for a restored environment must also reset well."""
    first = player.trajectories[env_id]
    already = first.num_steps
    player.run(num_steps)
    episodes, left = [first], num_steps - (first.num_steps - already)
    while left > 0 and episodes[-1].ended and len(episodes) < _MOST_EPISODES:
        player.reset({env_id: Part(part.seed + len(episodes), part.actions)}, options)
        episodes.append(player.run(left)[env_id])
        left -= episodes[-1].num_steps
    return episodes


class _Saved:
    """An episode interrupted by a snapshot, and how it went on."""

    def __init__(self, s: Session) -> None:
        kind = type(s.sim)
        if kind._saved is SimEnv._saved and (kind.snapshot is SimEnv.snapshot or kind.restore is SimEnv.restore):
            raise Failed(f"the spec says snapshots={s.spec.snapshots!r}, and there are no methods `snapshot` and `restore`")
        self.sim = s.sim
        total = 20 + s.continuation_steps
        candidates = [s.part(600 + 100 * number, total) for number in range(4)]
        lengths = []
        for part in candidates:
            player = Player(s.sim, s.num_envs)
            player.reset({0: part}, s.options)
            lengths.append(player.run(total)[0].num_steps)
        best = int(np.argmax(lengths))
        self.part, self.position = candidates[best], min(20, lengths[best] // 2)
        player = Player(s.sim, s.num_envs)
        player.reset({0: self.part}, s.options)
        player.run(self.position)
        started = time.perf_counter()
        self.data = self.sim.snapshot(0)
        self.save_ms = 1e3 * (time.perf_counter() - started)
        first, *others = _onward(player, 0, self.part, s.continuation_steps, s.options)
        self.expected = [first.tail(self.position), *others]

    @property
    def length(self) -> str:
        num_steps, more = sum(episode.num_steps for episode in self.expected), len(self.expected) - 1
        return f"{num_steps} steps from step {self.position} on{f', {more} further episodes among them' if more else ''}"

    def compare(self, actual: list[Trajectory]) -> Difference | None:
        found = difference(self.expected[0], actual[0], self.position + 1)
        if found is not None:
            return found
        for number, (expected, episode) in enumerate(zip(self.expected[1:], actual[1:], strict=True), start=1):
            if (found := difference(expected, episode)) is not None:
                return Difference(f"in episode {number} after the restored one, {found.what}", found.step, found.drift)
        return None


def snapshots_continue(s: Session) -> str:
    kind = s.spec.snapshots
    if kind not in ("exact", "approximate"):
        raise Skipped(f"the spec says snapshots={kind!r}")
    saved = _Saved(s)
    if not isinstance(saved.data, bytes):
        raise Failed(f"`snapshot` must return bytes, got {type(saved.data).__name__}")

    def restored(player: Player, env_id: int) -> Difference | None:
        return saved.compare(continued(player, env_id, saved.data, saved.part, saved.position, s.continuation_steps, s.options))

    drifts: dict[str, Difference | None] = {}
    for where, env_id in (("the same environment", 0), ("another environment", s.num_envs - 1)):
        player = Player(s.sim, s.num_envs)
        player.reset({env_id: s.part(700, 20 + s.continuation_steps)}, s.options)
        player.run(3)
        drifts[where] = restored(player, env_id)
    with s.fresh() as sim:
        player = Player(sim, s.num_envs)
        if s.spec.steps_together:
            player.reset(s.parts)
        drifts["a new simulator"] = restored(player, 0)
    _refuses_garbage(saved)
    return _judged(kind, drifts, f"{saved.length}; {len(saved.data):,} bytes, saved in {saved.save_ms:.1f} ms")


def _judged(kind: str, drifts: Mapping[str, Difference | None], line: str) -> str:
    apart = {where: found for where, found in drifts.items() if found is not None}
    if kind == "exact" and apart:
        where, found = next(iter(apart.items()))
        raise Failed(f"restored in {where}: {found}; the spec says 'exact'")
    if not apart:
        return f"bit by bit in {', '.join(drifts)}: {line}"
    where, found = max(apart.items(), key=lambda item: item[1].drift)
    return f"approximate, as the spec says: in {where} {found}; {line}"


def _refuses_garbage(saved: _Saved) -> None:
    try:
        saved.sim.restore(0, b"not a snapshot")
    except SnapshotError:
        return
    except Exception as error:
        raise Failed(f"`restore` of bytes that are no snapshot raises {type(error).__name__}, not SnapshotError") from error
    raise Failed("`restore` accepts bytes that are no snapshot")


def snapshots_travel(s: Session) -> str:
    kind = s.spec.snapshots
    if kind not in ("exact", "approximate"):
        raise Skipped(f"the spec says snapshots={kind!r}")
    saved = _Saved(s)
    actual = s.elsewhere({0: saved.part}, s.continuation_steps, s.options, (saved.data, saved.position))
    return _judged(kind, {"a new process": saved.compare([actual[number] for number in sorted(actual)])}, saved.length)


def replays(s: Session) -> str:
    """Playing the actions again from the seed takes up an episode: in a used environment, and in a new process."""
    if s.spec.snapshots != "replay":
        raise Skipped(f"the spec says snapshots={s.spec.snapshots!r}")
    total = 20 + s.continuation_steps
    part = s.part(800, total)
    with s.fresh() as sim:
        player = Player(sim, s.num_envs)
        player.reset({0: part})
        expected = player.run(total)
    mend = "; if that cannot be mended, say snapshots='none' in the spec"
    with s.exact() as player:
        player.reset({s.num_envs - 1: part}, s.options)
        again = {0: player.run(total)[s.num_envs - 1]}
    if (found := difference(expected[0], again[0])) is not None:
        raise Failed(f"played again in another environment: {found}{mend}")
    where = "another environment"
    with suppress(Skipped):
        found = difference(expected[0], s.elsewhere({0: part}, total)[0])
        if found is not None:
            raise Failed(f"played again in a new process: {found}{mend}")
        where += " and a new process"
    return f"{expected[0].num_steps} steps again from the seed in {where}, bit by bit"
