"""Checks that an episode is a function of its seed and actions. Each returns a line, or raises `Failed` or `Skipped`."""

from __future__ import annotations

import itertools
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from embodied_rl.sim.checks.episodes import Difference, Failed, Part, Player, Session, Skipped, Trajectory, difference, random_actions, same
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.factory import SimWrapper
from embodied_rl.sim.snapshots import SnapshotError
from embodied_rl.types import StepBuffers

RECONFIGURE = {"reconfigure": True}
LARGE_SEED = 2**31 - 2
_HELD_OUT_SEED = 2**30 + 7


def deterministic(s: Session) -> str:
    with s.fresh() as sim:
        again = Player(sim, s.num_envs).play(s.parts, s.steps)
    same(s.reference, again, "a second simulator with the same seeds and actions")
    return f"two simulators: {s.described(s.reference)}"


def deterministic_elsewhere(s: Session) -> str:
    same(s.reference, s.elsewhere(s.parts, s.steps), "a new process with the same seeds and actions")
    return f"a new process: {s.described(s.reference)}"


def independent_of_history(s: Session) -> str:
    """Try plain resets first. If they drift, try "reconfigure", with which the other checks then begin episodes."""

    def again(options: dict[str, Any] | None) -> Difference | None:
        for number, length in ((100, 2 * s.steps), (200, min(s.steps, 7))):  # a long episode, and one that is left in the middle
            Player(s.sim, s.num_envs).play({i: s.part(number + i, length) for i in range(s.num_envs)}, length, options)
        played = Player(s.sim, s.num_envs).play(s.parts, s.steps, options)
        found = [difference(s.reference[i], trajectory) for i, trajectory in played.items()]
        return max((one for one in found if one is not None), key=lambda one: one.drift, default=None)

    plain = again(None)
    if plain is None:
        return f"after other episodes: {s.described(s.reference)}"
    rebuilt = again(RECONFIGURE)
    if rebuilt is not None:
        raise Failed(f"after other episodes {plain}; options={{'reconfigure': True}} does not mend it")
    s.options = dict(RECONFIGURE)
    return f"exact with options={{'reconfigure': True}}; after a plain reset {plain}"


def resets_after_its_end(s: Session) -> str:
    ended = _play_to_the_end(s)
    with s.exact() as player:
        player.play(ended, s.longest_episode, s.options)
        same(s.reference, player.play({i: s.parts[i] for i in ended}, s.steps, s.options), "after an episode that ended by itself")
    return f"{len(ended)} environment{'s' if len(ended) > 1 else ''} ended by themselves and began again as if new"


def _play_to_the_end(s: Session) -> dict[int, Part]:
    """Parts whose episodes end within `longest_episode` steps."""
    if s.played_out is None:
        parts = {i: s.part(300 + i, s.longest_episode) for i in range(s.num_envs)}
        with s.exact() as player:
            played = player.play(parts, s.longest_episode, s.options)
        s.played_out = {i: (parts[i], trajectory) for i, trajectory in played.items()}
    ended = {i: part for i, (part, trajectory) in s.played_out.items() if trajectory.ended}
    if not ended:
        raise Skipped(f"no episode ended within {s.longest_episode} steps of random actions")
    return ended


def keeps_its_limit(s: Session) -> str:
    """A spec that names a limit promises that the simulator truncates there."""
    limit = s.spec.max_episode_steps
    if limit is None:
        raise Skipped("the spec has no max_episode_steps; sim.max_episode_steps truncates episodes if it is set")
    if limit > s.longest_episode:
        raise Skipped(f"the limit of {limit} steps is larger than the {s.longest_episode} played steps")
    with suppress(Skipped):
        _play_to_the_end(s)
    assert s.played_out is not None
    for i, (_, trajectory) in s.played_out.items():
        if trajectory.num_steps > limit or (trajectory.num_steps == limit and not trajectory.ended):
            raise Failed(f"the spec says max_episode_steps={limit}, but environment {i} continues after step {limit}")
    return f"no episode is longer than {limit} steps"


def never_resets_by_itself(s: Session) -> str:
    """The last observation must belong to the episode that ended.

    Two signs show a new episode instead, both only if the next step does not end too: the last observation looks like a first one while the
    one before does not, or (for episodes cut by a limit) it is the same whatever was done before.
    """
    ended = _play_to_the_end(s)
    first = [s.reference[i].flat(0) for i in s.reference]
    player = Player(s.sim, s.num_envs)
    for number in range(12):
        player.reset({i: s.part(400 + number * s.num_envs + i) for i in range(s.num_envs)}, s.options)
        first += [trajectory.flat(0) for trajectory in player.trajectories.values()]
    low, high = np.min(first, axis=0), np.max(first, axis=0)
    low, high = low - (high - low), high + (high - low)

    def looks_new(observation: np.ndarray) -> bool:
        return bool(((low <= observation) & (observation <= high)).all())

    for i, part in ended.items():
        with s.exact() as player:
            played = player.play({i: part}, s.longest_episode, s.options)[i]
            if not _goes_on(player, i):
                continue
            length = played.num_steps
            if length > 1 and looks_new(played.flat(length)) and not looks_new(played.flat(length - 1)):
                raise Failed(f"the observation of environment {i} at its end (step {length}) is the first of another episode")
            other = Part(part.seed, random_actions(s.spec, len(part.actions), part.seed + 1))
            again = player.play({i: other}, s.longest_episode, s.options)[i]
        cut = bool(played.scalars["truncated"][-1] and again.ended and again.num_steps == length > 1)
        if cut and played.same_observation(length, again, length) and not played.same_observation(length - 1, again, length - 1):
            raise Failed(f"the observation of environment {i} at its limit (step {length}) owes nothing to its actions: another episode's")
    return "the last observation is the episode's own"


def _goes_on(player: Player, env_id: int) -> bool:
    """Whether a step after the end is an ordinary one; a simulator may refuse it."""
    together = player.sim.spec.steps_together
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns about this step
            player.step(list(range(player.num_envs)) if together else [env_id])
    except Exception:
        return False
    return not (player.out.terminated[env_id] or player.out.truncated[env_id])


def seeds_matter(s: Session) -> str:
    seeds = [s.parts[0].seed, s.parts[0].seed + 1, _HELD_OUT_SEED, LARGE_SEED]
    played: list[Trajectory] = []
    for seed in seeds:
        with s.exact() as player:
            played.append(player.play({0: Part(seed, s.parts[0].actions)}, s.steps, s.options)[0])
    pairs = list(itertools.combinations(zip(seeds, played, strict=True), 2))
    alike = [(seed, other) for (seed, one), (other, another) in pairs if difference(one, another) is None]
    if len(alike) == len(pairs):
        raise Failed(f"seeds {', '.join(map(str, seeds))} all give the same episode: `reset` does not use its seed")
    if alike:
        raise Failed(f"seeds {alike[0][0]} and {alike[0][1]} give the same episode")
    return f"seeds {', '.join(map(str, seeds))} give different episodes"


def independent_of_siblings(s: Session) -> str:
    # If all are stepped together, the others play something else.
    s.same_again({0: s.parts[0]}, "beside other neighbours" if s.spec.steps_together else "without its neighbours")
    others = {i: s.part(500 + i) for i in range(1, s.num_envs)}
    s.same_again({0: s.parts[0], **others}, "beside neighbours that play other episodes")
    return "environment 0 alone and beside other episodes: the same"


def independent_of_order(s: Session) -> str:
    s.same_again(dict(reversed(s.parts.items())), "reset and stepped in reverse order")
    return "reset and stepped in reverse order: the same"


def independent_of_place(s: Session) -> str:
    place = {i: (i + 1) % s.num_envs for i in range(s.num_envs)}
    with s.exact() as player:
        moved = player.play({place[i]: part for i, part in s.parts.items()}, s.steps, s.options)
    same(s.reference, {i: moved[place[i]] for i in s.parts}, "played by the next environment of the process")
    return "each episode played by another environment: the same"


def independent_of_global_random(s: Session) -> str:
    counter = iter(range(10**9))

    def disturb(_: StepBuffers) -> None:
        state = next(counter)
        np.random.seed(state)  # noqa: NPY002
        random.seed(state)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            torch.default_generator.manual_seed(state)  # `torch.manual_seed` takes a millisecond, for absent devices too
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(state)

    s.same_again(s.parts, "with the process-wide random generators seeded anew before every call", before=disturb)
    return "numpy.random and random seeded anew before every call: the same"


# ---- observations that are left out change nothing --------------------------------------------------------------------


EVERY = 4
"""Steps of a chunk; an observation is made after each chunk and at an episode's end."""


class _InChunks(SimWrapper):
    """Observes a simulator after every `EVERY`-th step of an episode and at its end, twice each."""

    def __init__(self, sim: SimEnv, num_envs: int) -> None:
        super().__init__(sim)
        self._elapsed = np.zeros(num_envs, int)

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int], out: StepBuffers, options: Mapping[str, Any] | None = None) -> None:
        super().reset(env_ids, seeds, out, options)
        self._elapsed[list(env_ids)] = 0

    def step(self, env_ids: Sequence[int], actions: np.ndarray, out: StepBuffers) -> None:
        self._sim.advance(env_ids, actions, out)
        self._elapsed[list(env_ids)] += 1
        due = [i for i in env_ids if self._elapsed[i] % EVERY == 0 or out.terminated[i] or out.truncated[i]]
        for _ in range(2):  # the second call must write the same, and change nothing
            if due:
                self._sim.observe(due, out)


def unread_observations_change_nothing(s: Session) -> str:
    with s.exact() as player:
        actual = Player(_InChunks(player.sim, s.num_envs), s.num_envs).play(s.parts, s.steps, s.options)
    expected = {i: _read(s.reference[i]) for i in actual}
    same(expected, {i: _read(trajectory) for i, trajectory in actual.items()}, f"observed only after every {EVERY} steps")
    return f"observed after every {EVERY} steps and at their ends: {s.described(actual)}"


def _read(episode: Trajectory) -> Trajectory:
    """Episode in which every observation is the one that was made last."""
    made = [step - step % EVERY for step in range(episode.num_steps + 1)]
    if episode.ended:
        made[-1] = episode.num_steps
    return Trajectory({key: [rows[step] for step in made] for key, rows in episode.observation.items()}, episode.scalars)


# ---- episodes resume as the spec says: each check returns a line, or raises `Failed` or `Skipped` -----------------------------


_MOST_EPISODES = 50


def continued(
    player: Player, env_id: int, data: bytes, part: Part, position: int, num_steps: int, options: Mapping[str, Any] | None
) -> list[Trajectory]:
    """Restore an episode that was saved after `position` steps of `part`, and play on; see `_onward`."""
    player.sim.restore(env_id, data)
    player.adopt(env_id, part, position)
    return _onward(player, env_id, part, num_steps, options)


def _onward(player: Player, env_id: int, part: Part, num_steps: int, options: Mapping[str, Any] | None) -> list[Trajectory]:
    """Play `num_steps` steps: the rest of the episode and the next ones, because a restored environment must also reset well."""
    first = player.trajectories[env_id]
    already = first.num_steps
    player.run(num_steps)
    episodes, left = [first], num_steps - (first.num_steps - already)
    while left > 0 and episodes[-1].ended and len(episodes) < _MOST_EPISODES:
        episodes.append(player.play({env_id: Part(part.seed + len(episodes), part.actions)}, left, options)[env_id])
        left -= episodes[-1].num_steps
    return episodes


class _Saved:
    """An episode interrupted by a snapshot, and its continuation."""

    def __init__(self, s: Session) -> None:
        if s.spec.snapshots not in ("exact", "approximate"):
            raise Skipped(f"the spec says snapshots={s.spec.snapshots!r}")
        kind = type(s.sim)
        if kind._saved is SimEnv._saved and (kind.snapshot is SimEnv.snapshot or kind.restore is SimEnv.restore):
            raise Failed(f"the spec says snapshots={s.spec.snapshots!r}, but the methods `snapshot` and `restore` are missing")
        self.sim = s.sim
        total = 20 + s.continuation_steps
        candidates = [s.part(600 + 100 * number, total) for number in range(4)]
        lengths = [Player(s.sim, s.num_envs).play({0: part}, total, s.options)[0].num_steps for part in candidates]
        best = int(np.argmax(lengths))
        self.part, self.position = candidates[best], min(20, lengths[best] // 2)
        player = Player(s.sim, s.num_envs)
        player.play({0: self.part}, self.position, s.options)
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
    saved = _Saved(s)
    if not isinstance(saved.data, bytes):
        raise Failed(f"`snapshot` must return bytes, got {type(saved.data).__name__}")

    def restored(player: Player, env_id: int) -> Difference | None:
        return saved.compare(continued(player, env_id, saved.data, saved.part, saved.position, s.continuation_steps, s.options))

    drifts: dict[str, Difference | None] = {}
    for where, env_id in (("the same environment", 0), ("another environment", s.num_envs - 1)):
        player = Player(s.sim, s.num_envs)
        player.play({env_id: s.part(700, 20 + s.continuation_steps)}, 3, s.options)
        drifts[where] = restored(player, env_id)
    with s.fresh() as sim:
        player = Player(sim, s.num_envs)
        if s.spec.steps_together:
            player.reset(s.parts)
        drifts["a new simulator"] = restored(player, 0)
    _refuses_garbage(saved)
    return _judged(s.spec.snapshots, drifts, f"{saved.length}; {len(saved.data):,} bytes, saved in {saved.save_ms:.1f} ms")


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
        raise Failed(f"`restore` of bytes that are not a snapshot raises {type(error).__name__}, not SnapshotError") from error
    raise Failed("`restore` accepts bytes that are not a snapshot")


def snapshots_travel(s: Session) -> str:
    saved = _Saved(s)
    actual = s.elsewhere({0: saved.part}, s.continuation_steps, s.options, (saved.data, saved.position))
    return _judged(s.spec.snapshots, {"a new process": saved.compare([actual[number] for number in sorted(actual)])}, saved.length)


def replays(s: Session) -> str:
    """Replaying the actions from the seed restores an episode, in a used environment and in a new process."""
    if s.spec.snapshots != "replay":
        raise Skipped(f"the spec says snapshots={s.spec.snapshots!r}")
    total = 20 + s.continuation_steps
    part = s.part(800, total)
    with s.fresh() as sim:
        expected = Player(sim, s.num_envs).play({0: part}, total)[0]
    with s.exact() as player:
        again = {"another environment": player.play({s.num_envs - 1: part}, total, s.options)[s.num_envs - 1]}
    with suppress(Skipped):
        again["a new process"] = s.elsewhere({0: part}, total)[0]
    for where, played in again.items():
        if (found := difference(expected, played)) is not None:
            raise Failed(f"played again in {where}: {found}; if that cannot be mended, say snapshots='none' in the spec")
    return f"{expected.num_steps} steps again from the seed in {' and '.join(again)}, bit by bit"
