"""Checks of the simulator's spec and of what it writes into its rows. Each returns a line, or raises `Failed` or `Skipped`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.checks.episodes import Failed, Player, Session, Skipped, random_actions, same
from embodied_rl.sim.transport import VariableLengthBuffers, buffer_fields, plain_info
from embodied_rl.types import SimSpec, StepBuffers

# ---- rows that record how a simulator treats them, filled with impossible values --------------------------------------


SENTINEL = "(never written)"
"""Initial value of rows of parts of varying size."""


def poison_of(dtype: np.dtype[Any], which: int) -> Any:
    """One of two values (`which` 0 or 1) that fill a row before the simulator writes. An element that keeps both was not written."""
    if dtype.kind == "f":
        return (np.nan, 12345.0)[which]
    if dtype.kind == "b":
        return bool(which)
    return (17, 113)[which]  # both fit int8 and uint8


class WatchedRows(np.ndarray):
    """Array that records assignments which numpy accepts silently but which are mistakes. Its views share the record."""

    notes: list[str]
    label: str

    def __array_finalize__(self, source: object) -> None:
        self.notes, self.label = (source.notes, source.label) if isinstance(source, WatchedRows) else ([], "")

    def __setitem__(self, index: Any, value: Any) -> None:
        target, given = np.asarray(self)[index], np.asarray(value)
        if given.dtype.kind in "biuf":
            if given.shape == (1,) and np.ndim(target) and target.shape[-1] > 1:
                self.notes.append(f"{self.label}: a value of shape (1,) is stretched over {target.shape}")
            elif self.dtype.kind in "iu" and not _fits(given, self.dtype):
                self.notes.append(f"{self.label}: {given.dtype} values do not fit {self.dtype} and are cut")
        super().__setitem__(index, value)


def _fits(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    if values.dtype == dtype or values.size == 0:
        return True
    limits = np.iinfo(dtype)
    return bool(
        np.isfinite(values).all() and values.min() >= limits.min and values.max() <= limits.max and (values == np.round(values)).all()
    )


def watched_buffers(spec: SimSpec, num_envs: int) -> tuple[StepBuffers, list[str]]:
    """Buffers with arrays that watch assignments, and the list of what they notice."""
    notes: list[str] = []
    plain = StepBuffers.allocate(spec, num_envs)
    observation = {
        key: _watch(part, f"observation '{key}'", notes) if key in spec.tensors else part for key, part in plain.observation.items()
    }
    return StepBuffers(
        observation, _watch(plain.reward, "reward", notes), plain.terminated, plain.truncated, plain.success, plain.info
    ), notes


def _watch(array: np.ndarray, label: str, notes: list[str]) -> np.ndarray:
    watched = array.view(WatchedRows)
    watched.notes, watched.label = notes, label
    return watched


def poison(out: StepBuffers, which: int) -> None:
    """Fill every row with one of the two poisons."""
    for part in out.observation.values():
        part.fill(SENTINEL if part.dtype == object else poison_of(part.dtype, which))
    for part in (out.reward, out.terminated, out.truncated, out.success):
        part.fill(poison_of(part.dtype, which))


def copy_of(out: StepBuffers) -> dict[str, np.ndarray]:
    """{name: array} of everything but info; observations under ``observation 'key'``."""
    arrays = {f"observation '{key}'": np.array(part) for key, part in out.observation.items()}
    return arrays | {name: np.array(part) for name, part in out.scalars.items()}


def unwritten(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Elements that two equal runs over different poisons left unchanged: bool, of the arrays' shape."""
    if first.dtype == object:
        return np.array([a is SENTINEL or b is SENTINEL for a, b in zip(first, second, strict=True)], bool)
    kind = first.dtype
    was_first = np.isnan(first) if kind.kind == "f" else first == poison_of(kind, 0)
    return np.asarray(was_first & (second == np.asarray(poison_of(kind, 1), kind)))


# ---- the checks -------------------------------------------------------------------------------------------------------


def spec_is_sound(s: Session) -> str:
    spec, action = s.spec, s.spec.action
    if SimSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) != spec:
        raise Failed("the spec does not come back from JSON as it was: give plain numbers, strings and tuples")
    for key, part in spec.tensors.items():
        if np.dtype(part.dtype).kind not in "biuf":
            raise Failed(f"observation '{key}' has dtype {part.dtype}; bool, integers and floats can be shared")
        if key.split(".")[0] == "rgb" and (part.dtype != "uint8" or len(part.shape) != 3 or part.shape[-1] != 3):
            raise Failed(f"observation '{key}' must be [H, W, 3] uint8, the spec says {list(part.shape)} {part.dtype}")
    if action.kind == "continuous":
        low, high = np.array(action.low), np.array(action.high)
        if not (low.shape == high.shape == (action.dim,) and np.isfinite([low, high]).all() and (low < high).all()):
            raise Failed(f"action bounds must be finite, low < high, {action.dim} each; got low {low.tolist()}, high {high.tolist()}")
    elif action.kind == "discrete" and not (action.dim == 1 and action.num_actions >= 1):
        raise Failed(f"a discrete action has dim 1 and num_actions >= 1; got {action.dim} and {action.num_actions}")
    elif action.kind == "text" and action.max_bytes < 1:
        raise Failed("a text action needs max_bytes")
    parts = ", ".join(f"{key} {list(part.shape)} {part.dtype}" for key, part in spec.tensors.items())
    texts = ", ".join(f"{key} ({part.kind})" for key, part in spec.variables.items())
    return f"{', '.join(filter(None, (parts, texts)))}; action {action.kind} {action.num_actions or action.dim or ''}".rstrip()


def spaces_are_kept(s: Session) -> str:
    """Check shapes, dtypes, finite numbers, and that the same steps over two poisons overwrite every element."""
    spec, seen = s.spec, []
    out, notes = watched_buffers(spec, s.num_envs)
    for which in (0, 1):
        player = Player(s.sim, s.num_envs, out)
        poison(out, which)
        player.reset({i: s.parts[i] for i in range(s.num_envs)}, s.options)
        after_reset = copy_of(out)
        poison(out, which)
        player.step(list(range(s.num_envs)))
        seen.append((after_reset, copy_of(out)))
    for moment, first, second in (("reset", seen[0][0], seen[1][0]), ("step", seen[0][1], seen[1][1])):
        for name in first:
            asked = name.startswith("observation") or (moment == "step" and (name != "success" or spec.reports_success))
            if asked and (places := unwritten(first[name], second[name])).any():
                share = f" in {int(places.sum())} of {places.size} places" if places.size > s.num_envs else ""
                raise Failed(f"`{moment}` leaves {name} unwritten{share}")
            if asked and second[name].dtype.kind == "f" and not np.isfinite(second[name]).all():
                raise Failed(f"`{moment}` writes NaN or infinity into {name}")
    if notes:
        raise Failed(notes[0])
    for i, trajectory in s.reference.items():
        rows = {**{f"observation '{key}'": part for key, part in trajectory.observation.items()}, "reward": trajectory.scalars["reward"]}
        for name, values in rows.items():
            for step, value in enumerate(values):
                if np.asarray(value).dtype.kind == "f" and not np.isfinite(value).all():
                    raise Failed(f"NaN or infinity in {name} of environment {i} at step {step}")
    _variables_fit(spec, out)
    return "every element written, finite, of the spec's shape and dtype"


def _variables_fit(spec: SimSpec, out: StepBuffers) -> None:
    for key, part in spec.variables.items():
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in buffer_fields(key, part, 1).items()}
        buffer = VariableLengthBuffers(key, part, arrays, 0, 1)
        for value in out.observation[key]:
            try:
                buffer.write(0, value)
            except UserError as error:
                raise Failed(f"observation {error}") from error


def actions_are_accepted(s: Session) -> str:
    action, out = s.spec.action, StepBuffers.allocate(s.spec, s.num_envs)
    if action.kind == "continuous":
        low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
        tried: list[Any] = [low, high, (low + high) / 2, np.where(np.arange(action.dim) % 2, low, high)]
        words = "lowest, highest, middle and mixed bounds"
    elif action.kind == "discrete":
        tried = [np.array([choice]) for choice in sorted({*range(min(action.num_actions, 16)), action.num_actions - 1})]
        words = f"{len(tried)} of {action.num_actions} choices"
    else:
        tried = list(random_actions(s.spec, 4, s.seed))
        words = "4 texts"
    ids = list(range(s.num_envs))
    for value in tried:
        s.sim.reset(ids, [s.parts[i].seed for i in ids], out, s.options)
        rows = np.full(s.num_envs, value, object) if action.kind == "text" else np.stack([value] * s.num_envs)
        s.sim.step(ids, rows, out)
        if not (np.isfinite(out.reward).all() and all(np.isfinite(out.observation[key]).all() for key in s.spec.tensors)):
            raise Failed(f"action {value} gives NaN or infinity")
    return words


def other_rows_are_left_alone(s: Session) -> str:
    middle = s.num_envs // 2
    for which in (0, 1):
        player = Player(s.sim, s.num_envs)
        player.reset(s.parts, s.options)
        poison(player.out, which)
        before = copy_of(player.out)
        s.sim.reset([middle], [s.parts[middle].seed], player.out, s.options)
        _untouched(before, copy_of(player.out), middle, "reset", s.num_envs)
        if not s.spec.steps_together:
            poison(player.out, which)
            player.step([middle])
            _untouched(before, copy_of(player.out), middle, "step", s.num_envs)
    stepped = "" if s.spec.steps_together else " and `step`"
    return f"`reset`{stepped} of environment {middle} write no other row"


def _untouched(before: dict[str, np.ndarray], after: dict[str, np.ndarray], own: int, moment: str, num_envs: int) -> None:
    for name, rows in before.items():
        for i in range(num_envs):
            same_row = rows[i] is after[name][i] if rows.dtype == object else rows[i].tobytes() == after[name][i].tobytes()
            if i != own and not same_row:
                raise Failed(f"`{moment}` of environment {own} writes {name} of environment {i}")
            if i == own and moment == "reset" and not name.startswith("observation") and not same_row:
                raise Failed(f"`reset` writes {name}; it fills observations only")


def nothing_is_kept(s: Session) -> str:
    """Rows are shared memory: a simulator that keeps a reference to its observation or action later reads other values."""

    def spoil(actions: np.ndarray) -> None:
        actions.fill({"continuous": np.nan, "discrete": 0, "text": SENTINEL}[s.spec.action.kind])

    for which in (0, 1):
        s.same_again(s.parts, "with rows and actions overwritten between steps", before=partial(poison, which=which), after_step=spoil)
    return "rows and actions may be overwritten between steps"


def info_is_plain(s: Session) -> str:
    player, large = Player(s.sim, s.num_envs), set()
    player.reset(s.parts, s.options)
    player.out.info[:] = [None] * s.num_envs
    player.run(min(s.steps, 5))
    for i, info in enumerate(player.out.info):
        if info is None:
            continue
        if not isinstance(info, Mapping) or not all(isinstance(key, str) for key in info):
            raise Failed(f"info of environment {i} must be a dictionary with text keys, got {info!r:.80}")
        for key in info.keys() - plain_info(info).keys():
            if not isinstance(info[key], (np.ndarray, list, tuple, str, Mapping)):
                raise Failed(f"info '{key}' is a {type(info[key]).__name__}, which cannot travel as JSON")
            large.add(key)
    keys = sorted({key for info in player.out.info if info for key in info} - large)
    shown = f"keys {', '.join(keys[:8])}{', …' if len(keys) > 8 else ''}" if keys else "no info"
    return shown + (f"; too large to travel: {', '.join(sorted(large))}" if large else "")


def renders(s: Session) -> str:
    player = Player(s.sim, s.num_envs)
    player.reset(s.parts, s.options)
    if not s.spec.can_render:
        try:
            s.sim.render(0)
        except UserError as error:
            raise Skipped(f"cannot render: {error}") from error
        raise Failed("the spec says can_render=False, and `render` returns all the same; it must raise UserError")
    frame = s.sim.render(0)
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[-1] != 3:
        got = f"{list(frame.shape)} {frame.dtype}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise Failed(f"`render` must return [H, W, 3] uint8, got {got}")
    if not s.broken & {"determinism", "siblings"}:
        with s.exact() as player:
            player.reset({0: s.parts[0]}, s.options)
            for _ in range(min(s.steps, 5)):
                player.sim.render(0)
                player.run(1)
            same(s.reference, player.run(s.steps), "with frames drawn between steps")
    flat = " (all of one colour)" if (frame == frame[0, 0]).all() else ""
    return f"{list(frame.shape)} uint8{flat}; drawing changes nothing"


def closes_twice(s: Session) -> str:
    sim = s.build(1)
    sim.close()
    sim.close()
    return "may be closed twice"
