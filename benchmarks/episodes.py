"""Recorded episodes: what recording costs, how fast they are read, and what one step out of 10,000 episodes takes.

    python benchmarks/episodes.py

Recording: simulators are stepped with and without a recorder in turns, `--rounds` times `--seconds` of each; by the clock through
`EnvManager`, and by processor time in one process, which is the figure to trust on a machine that does other things. Reading: all arrays
of a recording against copying as many bytes out of a plain mapped file. Random access: steps drawn uniformly from 10,000 episodes.

The cases of recording take less than a minute each; `--cases` takes some of them. Where simulators take every core, whoever records
takes from them what it needs itself; two cases leave it a core.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from recording_loops import SIDES, Case, measure_recording
from tables import provenance, text_table

from embodied_rl.config import load_sim_config
from embodied_rl.episodes.reader import NativeRecording, open_recording
from embodied_rl.episodes.recording import RecordedEpisode, Recording, RecordingInfo
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.sim.factory import SimFactory
from embodied_rl.types import ActionSpec, SimSpec, StepBuffers, TensorSpec

VIDEO_REACH = 0.15
READ_REACH, ACCESS_REACH_MS = 0.5, 5.0
VIDEO: dict[str, Any] = {"pictures": True, "kwargs": {"image_size": 224}}
SPARE = max(1, (os.cpu_count() or 1) - 1)
"""Processes that simulate where a core is left to the process that records."""
CASES = (
    Case("halfcheetah", "states, HalfCheetah-v5", "halfcheetah"),
    Case("halfcheetah_bound", "states, HalfCheetah-v5, each process bound to a core", "halfcheetah", placement="spread"),
    Case("halfcheetah_8", "states, HalfCheetah-v5, 8 slots", "halfcheetah", num_slots=8),
    Case("halfcheetah_spare", "states, HalfCheetah-v5, a core to spare", "halfcheetah", num_workers=SPARE),
    Case("fetch_reach", "states, FetchReach", "fetch_reach"),
    Case("push_cube", "states, ManiSkill PushCube", "maniskill_pushcube"),
    Case("rendered", "224x224 lossless, PixelReach (rendered by MuJoCo)", "pixel_reach", reach=VIDEO_REACH, **VIDEO),
    Case("lossless", "224x224 lossless, PushT", "pusht_pixels", reach=VIDEO_REACH, **VIDEO),
    Case("lossless_spare", "224x224 lossless, PushT, a core to spare", "pusht_pixels", reach=VIDEO_REACH, num_workers=SPARE, **VIDEO),
    Case("yuv420p", "224x224 yuv420p, PushT", "pusht_pixels", camera=True, reach=VIDEO_REACH, **VIDEO),
)


# ---- recording ------------------------------------------------------------------------------------------------------


def overhead(recorded: Sequence[float], plain: Sequence[float]) -> float:
    """Median over rounds of recorded / plain, minus 1."""
    return statistics.median(_added(recorded, plain))


def spread(recorded: Sequence[float], plain: Sequence[float]) -> str:
    """Between which quartiles the rounds lie, as text."""
    low, high = np.quantile(_added(recorded, plain), (0.25, 0.75))
    return f"{low:+.1%} to {high:+.1%}"


def _added(recorded: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [ours / theirs - 1 for ours, theirs in zip(recorded, plain, strict=True)]


# ---- reading --------------------------------------------------------------------------------------------------------

STATE_SPEC = SimSpec("bench", {"state": TensorSpec((39,))}, ActionSpec.continuous([-1] * 4, [1] * 4), control_hz=20)


def write_states(path: Path, num_episodes: int, num_steps: int) -> None:
    """Episodes as a manipulation task with states gives them, with the policy's log-probabilities, values and the physical state."""
    rng = np.random.default_rng(0)
    state, qpos = rng.normal(size=(num_steps + 1, 39)).astype(np.float32), rng.normal(size=(num_steps + 1, 60))
    action, value = rng.uniform(-1, 1, (num_steps, 4)).astype(np.float32), rng.normal(size=num_steps).astype(np.float32)
    flags, last = np.zeros(num_steps, bool), np.arange(num_steps) == num_steps - 1
    with RecordingWriter(path, RecordingInfo(STATE_SPEC, {}, {"kind": "random"})) as writer:
        for seed in range(num_episodes):
            # So that a step read from the wrong place is seen.
            state[:, 0], state[:, 1] = seed, np.arange(num_steps + 1)
            episode = RecordedEpisode(
                seed,
                {"state": state},
                action,
                value,
                flags,
                last,
                flags,
                action,
                action,
                value,
                state={"qpos": qpos},
                metadata={"attempt": 0},
            )
            writer.add(episode)


def write_videos(path: Path, num_episodes: int, num_steps: int) -> None:
    """The same number of episodes with a 224×224 observation, of as many different ones as PushT gives in a minute; the rest are copies."""
    config = load_sim_config("pusht_pixels")
    sim = SimFactory(config.target, config.task, {**config.kwargs, "image_size": 224}, config.extra).make(1)
    out, rng = StepBuffers.allocate(sim.spec, 1), np.random.default_rng(0)
    originals = 4
    first = path.with_name(path.name + "-originals")
    with RecordingWriter(first, RecordingInfo(sim.spec, {}, {"kind": "random"})) as writer:
        for seed in range(originals):
            sim.reset([0], [seed], out)
            sink = EpisodeSink(writer, seed)
            sink.start({key: rows[0] for key, rows in out.observation.items()})
            for step in range(num_steps):
                if step % 8 == 0:
                    action = rng.uniform(sim.spec.action.low, sim.spec.action.high, (1, 2)).astype(np.float32)
                sim.step([0], action, out)
                end = step == num_steps - 1
                sink.step(
                    action=action[0],
                    reward=out.reward[0],
                    terminated=False,
                    truncated=end,
                    success=False,
                    observation={key: rows[0] for key, rows in out.observation.items()},
                )
            sink.finish()
    sim.close()
    with open_recording(first) as source, RecordingWriter(path, source.info) as writer:
        episodes = list(source)
        for seed in range(num_episodes):
            writer.add(dataclasses.replace(episodes[seed % originals], seed=seed))


COLUMNS = ("action", "sampled_action", "log_prob", "value", "reward", "terminated", "truncated", "success")
"""Of `write_states`, next to ``observation.state`` and ``state.qpos``."""


def read_episodes(recording: Recording, room: np.ndarray) -> int:
    """Copy every array of one episode after another into `room`; the number of bytes."""
    total = 0
    for episode in recording:
        assert episode.state is not None
        for part in (*(getattr(episode, name) for name in COLUMNS), *episode.observation.values(), *episode.state.values()):
            total += copy_into(room, part)
    return total


def read_columns(recording: NativeRecording, room: np.ndarray) -> int:
    """The same arrays, each for all episodes at once."""
    return sum(copy_into(room, rows) for name in (*COLUMNS, "observation.state", "state.qpos") for rows in recording.column(name))


def read_blocks(recording: Recording, room: np.ndarray) -> int:
    """The same arrays, each for as many episodes at a time as `Recording.blocks` hands out."""
    names = (*COLUMNS, "observation.state", "state.qpos")
    return sum(copy_into(room, rows) for block in recording.blocks(names) for rows in block.columns.values())


def copy_into(room: np.ndarray, rows: np.ndarray) -> int:
    """Copy an array's bytes, as much at a time as there is room for; their number."""
    data = rows.reshape(-1).view(np.uint8)
    for offset in range(0, data.size, room.size):
        chunk = data[offset : offset + room.size]
        room[: chunk.size] = chunk
    return data.size


def reload(file: Path) -> None:
    """Have a file's pages in the cache as reading brings them there: in large pieces, not in the small ones in which they were written."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.read(descriptor, 2**22):
            pass
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Reading:
    """GB/s, medians over rounds."""

    columns: float
    blocks: float
    episodes: float
    page_cache: float
    """Copying as many bytes out of a mapped file."""
    columns_ratio: float
    """Of `page_cache`, here and below."""
    blocks_ratio: float
    episodes_ratio: float


def measure_reading(path: Path, rounds: int) -> Reading:
    """All arrays of a recording, by column and by episode, against a plain file of as many bytes, in turns."""
    plain = path.with_name("plain.bin")
    room = np.empty(2**22, np.uint8)
    with open_recording(path) as recording:
        assert isinstance(recording, NativeRecording)
        total = read_columns(recording, room)
        np.random.default_rng(0).integers(0, 255, total, np.uint8).tofile(plain)
    for file in (plain, *(file for file in path.rglob("*") if file.is_file())):
        reload(file)
    sides: dict[str, list[float]] = {"columns": [], "blocks": [], "episodes": [], "page_cache": []}
    ways: dict[str, Callable[..., int]] = {"columns": read_columns, "blocks": read_blocks, "episodes": read_episodes}
    for _ in range(rounds):
        for name, speeds in sides.items():
            # Opened anew, for pages that are mapped already would be an advantage over the plain file.
            with open_recording(path) as recording:
                assert isinstance(recording, NativeRecording)
                start = time.perf_counter()
                if name == "page_cache":
                    read = copy_into(room, np.memmap(plain, np.uint8, "r"))
                else:
                    read = ways[name](recording, room)
                speeds.append(read / (time.perf_counter() - start) / 1e9)
            assert read == total, "not everything was read"
    ratios = {
        name: statistics.median(ours / theirs for ours, theirs in zip(sides[name], sides["page_cache"], strict=True)) for name in sides
    }
    medians = {name: statistics.median(speeds) for name, speeds in sides.items()}
    return Reading(**medians, **{f"{name}_ratio": ratios[name] for name in ways})


# ---- random access --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Access:
    """Random steps of a recording."""

    open_s: float
    median_ms: float
    p99_ms: float
    cpu_ms: float
    """Median of this process's processor time, which other work on the machine disturbs less."""
    rss_before_mb: float
    """Resident memory with the recording open, after a hundred steps."""
    rss_after_mb: float
    """After all of them."""


def measure_access(path: Path, num_reads: int, check: Callable[[int, int, Any], bool]) -> Access:
    """Steps drawn uniformly; fails where a step is not the one that was asked for."""
    start = time.perf_counter()
    recording = open_recording(path)
    open_s = time.perf_counter() - start
    rng, times, cpu, process, before = np.random.default_rng(1), [], [], psutil.Process(), 0
    with recording:
        for number in range(num_reads + 100):
            episode = int(rng.integers(len(recording)))
            step = int(rng.integers(recording.lengths[episode]))
            start, cpu_start = time.perf_counter(), time.process_time()
            found = recording.step(episode, step)
            times.append(1e3 * (time.perf_counter() - start))
            cpu.append(1e3 * (time.process_time() - cpu_start))
            if not check(episode, step, found):
                raise SystemExit(f"step {step} of episode {episode} is another one")
            if number == 100:
                before = process.memory_info().rss
        after = process.memory_info().rss
    p99 = float(np.quantile(times[100:], 0.99))
    return Access(open_s, statistics.median(times[100:]), p99, statistics.median(cpu[100:]), before / 1e6, after / 1e6)


@contextmanager
def scratch(where: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="episodes-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a side in a round of recording")
    parser.add_argument("--cases", nargs="+", choices=[case.key for case in CASES], help="of recording; by default all")
    parser.add_argument("--episodes", type=int, default=10_000, help="of the sets that random steps are drawn from")
    parser.add_argument("--steps", type=int, default=100, help="of each of these episodes")
    parser.add_argument("--reads", type=int, default=5_000, help="random steps")
    parser.add_argument("--only", nargs="+", choices=("recording", "reading", "access"), default=("recording", "reading", "access"))
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's folder for temporary files")
    arguments = parser.parse_args()
    print(provenance("mujoco", "gymnasium-robotics", "gym-pusht", "av"))
    figures = []
    with scratch(arguments.folder) as folder:
        if "recording" in arguments.only:
            cases = [case for case in CASES if arguments.cases is None or case.key in arguments.cases]
            figures += report_recording(cases, arguments.rounds, arguments.seconds, folder)
        if {"reading", "access"} & set(arguments.only):
            write_states(folder / "states", arguments.episodes, arguments.steps)
        if "reading" in arguments.only:
            figures += report_reading(folder, arguments.episodes, arguments.steps, arguments.rounds)
        if "access" in arguments.only:
            figures += report_access(folder, arguments.episodes, arguments.steps, arguments.reads)
    print("figure: " + "; ".join(figures))


def kept(holds: bool) -> str:
    return "kept" if holds else "missed"


def report_recording(cases: Sequence[Case], rounds: int, seconds: float, folder: Path) -> list[str]:
    rows, figures = [], []
    for case in cases:
        costs = measure_recording(case, rounds, seconds, folder)
        plain = costs["plain"]
        for side in SIDES:
            ours = costs[side]
            wall, cpu = overhead(ours.wall_us, plain.wall_us), overhead(ours.cpu_us, plain.cpu_us)
            fastest = min(ours.cpu_us) / min(plain.cpu_us) - 1
            shown = (f"{wall:+.1%}", spread(ours.wall_us, plain.wall_us), f"{cpu:+.1%}", f"{fastest:+.1%}")
            medians = (f"{statistics.median(values):.1f}" for values in (ours.wall_us, ours.cpu_us))
            rows.append((f"{case.name}: {side}", *medians, *(("",) * len(shown) if side == "plain" else shown)))
            if side == "recorded":
                figures.append(
                    f"recording {case.name} {wall:+.1%} wall, {cpu:+.1%} cpu, {fastest:+.1%} cpu in the fastest rounds "
                    f"(reach: {case.reach:.0%}, {kept(wall <= case.reach)})"
                )
    print(text_table(("recording", "µs/step", "cpu µs/step", "wall", "quartiles", "cpu", "cpu, fastest"), rows) + "\n")
    return figures


def report_reading(folder: Path, num_episodes: int, num_steps: int, rounds: int) -> list[str]:
    long_steps = 10 * num_steps
    write_states(folder / "long", max(1, num_episodes // 10), long_steps)
    rows, figures = [], []
    for name, path in ((f"{num_steps} steps", folder / "states"), (f"{long_steps} steps", folder / "long")):
        found = measure_reading(path, rounds)
        speeds = (found.columns, found.blocks, found.episodes, found.page_cache)
        rows.append((f"episodes of {name}", *(f"{speed:.2f}" for speed in speeds)))
        figures.append(
            f"reading / page cache, episodes of {name}: by column {found.columns_ratio:.2f}, by block {found.blocks_ratio:.2f} "
            f"(reach: {READ_REACH}, {kept(min(found.columns_ratio, found.blocks_ratio) >= READ_REACH)}), "
            f"by episode {found.episodes_ratio:.2f}"
        )
    print(text_table(("reading, GB/s", "by column", "by block", "by episode", "page cache"), rows) + "\n")
    return figures


def report_access(folder: Path, num_episodes: int, num_steps: int, num_reads: int) -> list[str]:
    def check(episode: int, step: int, found: Any) -> bool:
        return found.observation["state"][:2].tolist() == [episode, step] and found.next_observation["state"][1] == step + 1

    states = measure_access(folder / "states", num_reads, check)
    write_videos(folder / "videos", num_episodes, num_steps)
    videos = measure_access(folder / "videos", num_reads // 5, lambda _, __, found: found.observation["rgb"].shape == (224, 224, 3))
    rows = [
        (
            f"{num_episodes} episodes, {name}",
            f"{a.open_s:.3f}",
            f"{a.median_ms:.3f}",
            f"{a.p99_ms:.3f}",
            f"{a.cpu_ms:.3f}",
            f"{a.rss_before_mb:.0f}",
            f"{a.rss_after_mb:.0f}",
        )
        for name, a in (("states", states), ("224x224 lossless", videos))
    ]
    print(text_table(("random steps", "open, s", "median, ms", "p99, ms", "cpu, ms", "MB before", "MB after"), rows) + "\n")
    return [
        f"random step of {num_episodes} episodes {name} {access.median_ms:.2f} ms, p99 {access.p99_ms:.2f}, cpu {access.cpu_ms:.2f} "
        f"(reach: {ACCESS_REACH_MS:.0f} ms, {kept(access.p99_ms <= ACCESS_REACH_MS)}), "
        f"memory {access.rss_after_mb - access.rss_before_mb:+.0f} MB"
        for name, access in (("states", states), ("with video", videos))
    ]


if __name__ == "__main__":
    main()
