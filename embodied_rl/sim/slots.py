"""Slots of one worker process: steps, counts, cuts and resets their episodes, and resumes them after a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.seeding import EpisodeSeeds, SeedStream
from embodied_rl.sim.transport import (
    ABORTED,
    ENDED,
    IDLE,
    INFO_BUFFER,
    OBSERVATIONS,
    PENDING,
    READY,
    Marks,
    Slab,
    VariableLengthBuffers,
    fence,
    observation_buffers,
    plain_info,
)
from embodied_rl.specs import PartValue, Rows
from embodied_rl.types import StepBuffers, VariableSpec

CHUNK_FIELDS = ("chunk_length", "chunk_reward", "chunk_success", "executed", "watched")


class NonFiniteOutput(Exception):
    """The simulator returned NaN or infinity in the environments `rows`."""

    def __init__(self, rows: list[int], what: str) -> None:
        super().__init__(what)
        self.rows = rows


class ReplayEnded(Exception):
    """A replayed episode ended before its actions did: the simulator is not deterministic."""


_ONLY_PENDING = bytes(int(mark == PENDING) for mark in range(256))


class _Part:
    """Some environments of a worker with their views, made once: ten fancy indices per step cost more than a small simulator's step."""

    def __init__(self, runner: SlotRunner, ids: list[int]) -> None:
        """Raises UserError for a part of a simulator that steps all its environments together."""
        if runner.sim.spec.steps_together and len(ids) < runner.num_envs:
            raise UserError(
                f"'{runner.sim.spec.task}' steps its {runner.num_envs} environments together, but only {len(ids)} were requested: set "
                "sim.pipeline_groups=1."
            )
        self.ids = ids
        contiguous = ids == list(range(ids[0], ids[-1] + 1))
        self.rows: Rows = slice(ids[0], ids[-1] + 1) if contiguous else np.asarray(ids)
        self.is_view = contiguous
        if contiguous:
            out, first, last = runner.out, ids[0], ids[-1] + 1
            rows = slice(first, last)
            self.reward, self.terminated, self.truncated, self.success = (part[rows] for part in out.scalars.values())
            self.returns, self.lengths, self.success_once = runner.returns[rows], runner.lengths[rows], runner.success_once[rows]
            self.is_whole = len(ids) == runner.num_envs
            self._flags = [flags.data.cast("B") for flags in (self.terminated, self.truncated)]
            self._successes = self.success.data.cast("B")
            self._no_flag = bytes(len(ids))
            self._rewards, self._no_reward = self.reward.data.cast("B"), bytes(self.reward.nbytes)
            self.marks = Marks(runner.whole_state, [range(runner.start + first, runner.start + last)])
            self.action = runner.action[rows]
            self.floats = [part[rows].reshape(-1) for part in runner._floats]
            self.floats_rewarded = [self.reward, *self.floats]

    def any_reward(self) -> bool:
        """Whether any of them has a reward now. This check costs a tenth of adding zeros."""
        return self._rewards.tobytes() != self._no_reward

    def any_success(self) -> bool:
        """Whether any of them reports success now. Comparing bytes costs a fifth of numpy's functions."""
        return self._successes.tobytes() != self._no_flag

    def ended(self) -> bool:
        """Whether the episode of any of them has ended."""
        terminated, truncated = self._flags
        return terminated.tobytes() != self._no_flag or truncated.tobytes() != self._no_flag


class SlotRunner:
    """Runs slots [start, stop) of a slab. `step_pending` executes the manager's requests and leaves the results in the slab."""

    def __init__(self, sim: SimEnv, slab: Slab, setup: Mapping[str, Any], start: int, stop: int) -> None:
        self.sim = sim
        self._reports_success = sim.spec.reports_success
        self.start, self.stop = start, stop
        self.num_envs, self.num_slots, self.index = self.stop - self.start, setup["num_slots"], setup["worker"]
        self.max_episode_steps: int | None = setup["max_episode_steps"]
        self.success_ends_episode: bool = setup["success_ends_episode"]
        self.chunk_size: int = setup["chunk_size"]
        arrays, rows = slab.arrays, slice(self.start, self.stop)
        self.whole_state = arrays["slot_state"]
        self.state = self.whole_state[rows]
        self.state_bytes = self.state.data
        self._begin, self._begin_seed = arrays["begin"][rows], arrays["begin_seed"][rows]
        self._begin_bytes = self._begin.data
        self._autoreset: bool = setup["autoreset"]
        self.action = arrays["action"][rows]
        spec = sim.spec
        self._tensors = slab.group("observation", self.start, self.stop)
        observation = {**self._tensors, **{key: np.full(self.num_envs, None, dtype=object) for key in spec.variables}}
        self.out = StepBuffers(
            observation={key: observation[key] for key in spec.observation},
            reward=arrays["reward"][rows],
            terminated=arrays["terminated"][rows],
            truncated=arrays["truncated"][rows],
            success=arrays["success"][rows],
            info=[None] * self.num_envs,
        )
        self._final_tensors = slab.group("final_observation", self.start, self.stop)
        self._buffers, self._final_buffers = (observation_buffers(name, spec, arrays, start, stop) for name in OBSERVATIONS)
        self._final_info = VariableLengthBuffers("final_info", INFO_BUFFER, arrays, start, stop)
        text = spec.action.part
        self._action_buffer = VariableLengthBuffers("action", text, arrays, start, stop) if isinstance(text, VariableSpec) else None
        self._chunk = {name: arrays[name][rows] for name in CHUNK_FIELDS if name in arrays}
        self._inner, inner = slab.group("inner_observation", start, stop), self.chunk_size - 1
        self._inner_buffers = observation_buffers("inner_observation", spec, arrays, start * inner, stop * inner) if inner else {}
        ends = ("return", "length", "seed", "index", "success_once", "success_at_end")
        self._reported = [arrays[f"episode_{name}"][rows] for name in ends]
        self._progress = arrays["progress"][self.index, :1].data.cast("B").cast("I")
        self._stepping = arrays["stepping"][self.index]
        # State of the running episodes:
        self.returns = np.zeros(self.num_envs, np.float64)
        self._lengths, self._owed = np.zeros(self.num_envs, np.int64), 0
        self.success_once = np.zeros(self.num_envs, bool)
        self.episode_seed = np.zeros(self.num_envs, np.int64)
        self.episode_index = np.zeros(self.num_envs, np.int64)
        self.streams: list[SeedStream] = [
            SeedStream(EpisodeSeeds.training(0), 0, self.start + env_id, self.num_slots) for env_id in range(self.num_envs)
        ]
        self._floats = [part for part in self._tensors.values() if part.dtype.kind == "f"]
        self._all = list(range(self.num_envs))
        self._part = lru_cache(256)(lambda pending: _Part(self, [env_id for env_id, on in enumerate(pending) if on]))
        self._marks_before = b""
        self._part_before: _Part
        self._free_steps = 0
        """Steps that neighbours can certainly take before `max_episode_steps` cuts an episode."""
        self._none_begin = bytes(self.num_envs)
        self._abort_due: set[int] = set()
        self._cautious = False

    @property
    def lengths(self) -> np.ndarray:
        """[num_envs] steps of the running episodes. Steps common to all environments are added on reading."""
        if self._owed:
            self._lengths += self._owed
            self._owed = 0
        return self._lengths

    def _counters(self) -> dict[str, np.ndarray]:
        """Counters of the running episodes that a snapshot keeps."""
        return {"returns": self.returns, "lengths": self.lengths, "success_once": self.success_once}

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def step_pending(self) -> bool:
        """Step every marked slot. Returns True if there was one; the worker then rings the manager's doorbell."""
        marks = self.state_bytes.tobytes()
        fence()
        if PENDING not in marks:
            return False
        if not self._abort_due and not self._cautious and self._begin_bytes.tobytes() == self._none_begin:
            if marks != self._marks_before:
                self._marks_before, self._part_before = marks, self._part(marks.translate(_ONLY_PENDING))
            self._step(self._part_before)
        else:
            self._step_some([env_id for env_id, mark in enumerate(marks) if mark == PENDING])
        self._progress[0] = (self._progress[0] + 1) & 0xFFFFFFFF
        return True

    def _step_some(self, ids: list[int]) -> None:
        # After a fault: one at a time, with a mark that outlives this process, so that a second failure reveals the culprit.
        if self._cautious and not self.sim.spec.steps_together:
            for env_id in ids:
                self.mark_stepping(env_id)
                self._step_these([env_id])
            self.mark_stepping(None)
        else:
            self._step_these(ids)
        self._cautious = False

    def _step_these(self, ids: list[int]) -> None:
        # New episodes first: an abort that was pending in their slots is void.
        if beginning := [env_id for env_id in ids if self._begin[env_id]]:
            self._abort_due.difference_update(beginning)
            self._begin_given(beginning)
            ids = [env_id for env_id in ids if env_id not in beginning]
        for env_id in [env_id for env_id in ids if env_id in self._abort_due]:
            self._abort(env_id)
            ids.remove(env_id)
        if ids:
            self._step(_Part(self, ids))

    def _step(self, part: _Part) -> None:
        out, ids, rows = self.out, part.ids, part.rows
        done: np.ndarray | None
        if self.chunk_size > 1:
            done = self._advance_chunk(ids, rows)
        elif part.is_view:
            self.sim.step(ids, part.action if self._action_buffer is None else self._action_buffer.read_all(ids), out)
            for flat in self._count_part(part):
                if not math.isfinite(flat.dot(flat)):
                    self._check_finite(rows)
                    break
            done = part.terminated | part.truncated if part.ended() else None
        else:
            self.sim.step(ids, self._actions(ids, rows), out)
            self._count(rows)
            self._check_finite(rows)
            done = out.terminated[rows] | out.truncated[rows]
        marks: np.ndarray | None = None
        if done is not None and np.count_nonzero(done):
            ended = [env_id for env_id, over in zip(ids, done.tolist(), strict=True) if over]
            if self.chunk_size == 1:
                self._keep_final(ended)
            if self._autoreset:
                self._begin_next(ended)
            # In one store: a slot that has ENDED must never be seen as READY.
            marks = np.where(done, np.uint8(ENDED), np.uint8(READY))
        if self._buffers:
            self._publish_buffers(ids)
        fence()
        if marks is None and part.is_view:
            part.marks.write(READY)
        else:
            self._mark(ids, [READY] * len(ids) if marks is None else marks.tolist())

    def _mark(self, ids: list[int], marks: list[int]) -> None:
        """Write one byte after the other, each in one store (see `Marks`)."""
        for env_id, mark in zip(ids, marks, strict=True):
            self.state_bytes[env_id] = mark

    def _actions(self, ids: list[int], rows: Rows) -> np.ndarray:
        return self.action[rows] if self._action_buffer is None else self._action_buffer.read_all(ids)

    def _advance_chunk(self, ids: list[int], rows: Rows) -> np.ndarray:
        """Play each row's chunk until it or the episode ends; sums go to `out`, single steps to the chunk's arrays. Returns done [n].

        Observations are made only if they are read: at an episode's end, after the chunk, and after every step of a watched chunk.
        """
        chunk, out = self._chunk, self.out
        self._clear_chunk(rows)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        active = list(ids)
        for step in range(int(chunk["chunk_length"][rows].max())):
            active = [i for i in active if step < chunk["chunk_length"][i] and not (terminated[i] or truncated[i])]
            if not active:
                break
            # If all step together, all move; the results of the others are ignored, and a reset follows.
            moved = np.asarray(self._all if self.sim.spec.steps_together else active)
            self.sim.advance(moved.tolist(), self.action[moved, step], out)
            at = np.asarray(active)
            self._count(at)
            self._check_finite(at)
            chunk["chunk_reward"][at, step], chunk["chunk_success"][at, step] = out.reward[at], out.success[at]
            chunk["executed"][at, step] = True
            terminated[at], truncated[at] = out.terminated[at], out.truncated[at]
            ended = [i for i in active if terminated[i] or truncated[i]]
            if ended:
                self._observe(ended)
                self._keep_final(ended)
            if shown := [i for i in active if chunk["watched"][i] and i not in ended and step + 1 < chunk["chunk_length"][i]]:
                self._observe(shown)
                self._keep_inner(shown, step)
        if going := [i for i in ids if not (terminated[i] or truncated[i])]:
            self._observe(going)
        out.reward[rows] = chunk["chunk_reward"][rows].sum(axis=1)
        out.success[rows] = chunk["chunk_success"][rows].any(axis=1)
        out.terminated[rows], out.truncated[rows] = terminated[rows], truncated[rows]
        return (terminated | truncated)[rows]

    def _clear_outcome(self, rows: np.ndarray) -> None:
        for part in self.out.scalars.values():
            part[rows] = 0
        self._clear_chunk(rows)

    def _clear_chunk(self, rows: Rows) -> None:
        for name in self._chunk.keys() & {"chunk_reward", "chunk_success", "executed"}:
            self._chunk[name][rows] = 0

    def _keep_inner(self, ids: list[int], step: int) -> None:
        for key, rooms in self._inner.items():
            rooms[ids, step] = self._tensors[key][ids]
        for key, buffers in self._inner_buffers.items():
            for env_id in ids:
                buffers.write(env_id * (self.chunk_size - 1) + step, self.out.observation[key][env_id])

    def _observe(self, ids: list[int]) -> None:
        self.sim.observe(ids, self.out)
        self._check_finite(np.asarray(ids))

    def _count_part(self, part: _Part) -> list[np.ndarray]:
        """`_count` for neighbours, in place, because this runs in every step. Returns the numbers that must be finite."""
        floats = part.floats
        if part.any_reward():
            np.add(part.returns, part.reward, out=part.returns)
            floats = part.floats_rewarded
        if part.is_whole:
            self._owed += 1
        else:
            part.lengths += 1
        if self._reports_success and part.any_success():
            np.logical_or(part.success_once, part.success, out=part.success_once)
            if self.success_ends_episode:
                np.logical_or(part.truncated, part.success & ~part.terminated, out=part.truncated)
        if self.max_episode_steps is not None:
            self._free_steps -= 1
            if self._free_steps < 0:
                longest = int(self.lengths.max())  # the pending steps are now part of `part.lengths`
                over = part.lengths >= self.max_episode_steps
                np.logical_or(part.truncated, over & ~part.terminated, out=part.truncated)
                self._free_steps = self.max_episode_steps - 1 - longest
        return floats

    def _count(self, rows: Rows, out: StepBuffers | None = None) -> None:
        """Add the step to the running episodes of `rows`, and cut those that reach our limits."""
        out = out or self.out
        self.returns[rows] += out.reward[rows]
        self.lengths[rows] += 1
        self._free_steps -= 1
        self.success_once[rows] |= out.success[rows]
        if self.success_ends_episode:
            out.truncated[rows] |= out.success[rows] & ~out.terminated[rows]
        if self.max_episode_steps is not None:
            out.truncated[rows] |= (self.lengths[rows] >= self.max_episode_steps) & ~out.terminated[rows]

    def _check_finite(self, rows: Rows) -> None:
        # One dot product turns every NaN and infinity into one number; the exact check runs only if that is not finite.
        for part in (self.out.reward, *self._floats):
            flat = part.reshape(-1)
            if not math.isfinite(np.dot(flat, flat)):
                bad = ~np.isfinite(part.reshape(self.num_envs, -1)).all(axis=1)
                touched = np.arange(self.num_envs)[rows]
                culprits = [int(row) for row in touched if bad[row]]
                if culprits:
                    what = "reward" if part is self.out.reward else "observation"
                    raise NonFiniteOutput(culprits, f"NaN or infinity in the {what}: {part[culprits[0]]!r}")

    # ---- episodes ---------------------------------------------------------------------------------------------------

    def reset_all(self, seeds: EpisodeSeeds, seed_round: int, reconfigure: bool) -> None:
        """Begin new episodes in all slots, counted from 0."""
        self.streams = [SeedStream(seeds, seed_round, self.start + env_id, self.num_slots) for env_id in self._all]
        self.episode_index[:] = 0
        self._abort_due.clear()
        self._clear_outcome(np.asarray(self._all))
        self._reset(self._all, {"reconfigure": True} if reconfigure else {})
        if self._buffers:
            self._publish_buffers(self._all)
        self.state[:] = IDLE

    def _keep_final(self, ended: list[int]) -> None:
        """Save the last observation and info of the ended episodes."""
        self.sim.episodes_ended(ended)
        rows = np.asarray(ended)
        for key, part in self._final_tensors.items():
            part[rows] = self._tensors[key][rows]
        for key, buffers in self._final_buffers.items():
            for env_id in ended:
                buffers.write(env_id, self.out.observation[key][env_id])
        for env_id in ended:
            self._final_info.write(env_id, plain_info(self.out.info[env_id]))
        ends = (self.returns, self.lengths, self.episode_seed, self.episode_index, self.success_once, self.out.success)
        for reported, values in zip(self._reported, ends, strict=True):
            reported[rows] = values[rows]

    def _begin_given(self, ids: list[int]) -> None:
        """Begin new episodes with the manager's seeds; publishes only their first observation."""
        for env_id in ids:
            seeds = EpisodeSeeds.given(int(self._begin_seed[env_id]))
            self.streams[env_id] = SeedStream(seeds, 0, self.start + env_id, self.num_slots)
            self.episode_index[env_id] = 0
        self._reset(ids, {})
        self._clear_outcome(np.asarray(ids))
        self._publish_buffers(ids)
        self._begin[np.asarray(ids)] = 0
        fence()
        self._mark(ids, [READY] * len(ids))

    def _begin_next(self, ids: list[int]) -> None:
        self.episode_index[np.asarray(ids)] += 1
        self._reset(ids, {})

    def _reset(self, ids: list[int], options: dict[str, Any]) -> None:
        self._start_counting(ids)
        self.sim.reset(ids, [int(self.episode_seed[env_id]) for env_id in ids], self.out, options)
        self._check_finite(np.asarray(ids))

    def _start_counting(self, ids: list[int]) -> None:
        rows = np.asarray(ids)
        self.episode_seed[rows] = [self.streams[env_id].seed(int(self.episode_index[env_id])) for env_id in ids]
        self.returns[rows], self.lengths[rows], self.success_once[rows] = 0.0, 0, False

    def _publish_buffers(self, ids: list[int]) -> None:
        for key, buffers in self._buffers.items():
            for env_id in ids:
                buffers.write(env_id, self.out.observation[key][env_id])

    def _abort(self, env_id: int) -> None:
        """Give up the running episode: its step counts as truncated with reward 0 after the last good observation."""
        self._abort_due.discard(env_id)
        last = {key: part[env_id].copy() for key, part in self._tensors.items()}
        self._begin_next([env_id])
        for key, part in self._final_tensors.items():
            finite = last[key].dtype.kind != "f" or np.isfinite(last[key]).all()
            part[env_id] = last[key] if finite else self._tensors[key][env_id]
        for key, buffers in self._buffers.items():
            buffers.copy_row(env_id, self._final_buffers[key])
        self._final_info.write(env_id, {})
        self._clear_outcome(np.asarray([env_id]))
        self.out.truncated[env_id] = True
        self._publish_buffers([env_id])
        fence()
        self._mark([env_id], [ABORTED])

    # ---- snapshots and recovery -------------------------------------------------------------------------------------

    def render(self, env_id: int) -> np.ndarray:
        return np.ascontiguousarray(self.sim.render(env_id), np.uint8)

    def snapshot(self, env_id: int) -> dict[str, Any]:
        """The simulator's own state and the counters of the running episode."""
        data = self.sim.snapshot(env_id)
        return {"sim": data, "counters": {name: counts[env_id].item() for name, counts in self._counters().items()}}

    def resume(self, item: Mapping[str, Any]) -> float | None:
        """Resume an episode as the manager describes it (see `episode_log.EpisodeLog.resume_item`).

        Returns:
            The largest difference between the observation that the manager last saw and the one now; None if there is none to compare.

        Raises ReplayEnded: the simulator is not deterministic.
        """
        env_id, self._free_steps = int(item["slot"]) - self.start, 0
        self.streams[env_id] = SeedStream.from_dict(item["stream"])
        self.episode_index[env_id] = item["index"]
        self._abort_due.discard(env_id)
        self._cautious = bool(item["cautious"])
        self._start_counting([env_id])
        if item["abort"]:
            self._abort_due.add(env_id)
            return None
        scratch = StepBuffers.allocate(self.sim.spec, self.num_envs)
        base = item["base"]
        if base is None:
            self.sim.reset([env_id], [int(self.episode_seed[env_id])], scratch, item["options"])
        else:
            self.sim.restore(env_id, base["sim"])
            for name, value in base["counters"].items():
                self._counters()[name][env_id] = value
            for key, value in base["observation"].items():
                scratch.observation[key][env_id] = value
        for action in item["actions"]:
            self._replay(env_id, action, scratch)
        if item["actions"]:
            self.sim.observe([env_id], scratch)
        if item["publish"]:
            for key, part in scratch.observation.items():
                self.out.observation[key][env_id] = part[env_id]
            self._publish_buffers([env_id])
        seen = item["observation"]
        if seen is None:
            return None
        return max((_difference(scratch.observation[key][env_id], value) for key, value in seen.items()), default=0.0)

    def _replay(self, env_id: int, action: np.ndarray | str, scratch: StepBuffers) -> None:
        steps: Sequence[np.ndarray | str] | np.ndarray = action if self.chunk_size > 1 else [action]
        for number, step in enumerate(steps):
            self.sim.advance([env_id], np.array([step], object if isinstance(step, str) else None), scratch)
            self._count(np.asarray([env_id]), scratch)
            if scratch.terminated[env_id] or scratch.truncated[env_id]:
                raise ReplayEnded(
                    f"slot {self.start + env_id}: the episode of seed {self.episode_seed[env_id]} ended after {number + 1} steps"
                )

    def where(self, rows: list[int]) -> dict[str, Any]:
        """Slots, episode seeds and step numbers of environments, for a fault report."""
        return {
            "slots": [self.start + row for row in rows],
            "seeds": [int(self.episode_seed[row]) for row in rows],
            "steps": [int(self.lengths[row]) for row in rows],
        }

    def mark_stepping(self, env_id: int | None) -> None:
        """Record in shared memory which environment is being stepped; None: no single one."""
        self._stepping[0] = -1 if env_id is None else self.start + env_id

    def stepping(self) -> list[int]:
        """Environments that were being stepped."""
        if self.start <= self._stepping[0] < self.stop:
            return [int(self._stepping[0]) - self.start]
        return [row for row in self._all if self.state[row] == PENDING] or self._all


def _difference(now: PartValue, before: PartValue) -> float:
    if isinstance(before, np.ndarray) and before.dtype.kind in "biuf":
        if np.asarray(now).shape != before.shape:
            return math.inf
        return float(np.max(np.abs(np.asarray(now, np.float64) - before.astype(np.float64)), initial=0.0))
    return 0.0 if now == before else math.inf
