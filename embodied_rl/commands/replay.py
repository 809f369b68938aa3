"""``python -m embodied_rl.replay recording=DIR``: replay recorded episodes and report how far they deviate."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from embodied_rl.bounds import Coefficient, Episodes, PictureSize
from embodied_rl.commands.cli import Argument, Command, WrittenFile, WrittenFolder, as_command, command_line, fail, print_tables
from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.episodes.folder import RECORDING_FILE
from embodied_rl.episodes.layout import VIDEO_FORMATS, VideoFormat
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, Recording
from embodied_rl.episodes.sink import EpisodeSink
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.errors import UserError
from embodied_rl.files import next_free, write_atomic
from embodied_rl.progress import figure_table, progress_bar
from embodied_rl.rollout.replaying import EpisodeReplay, KeyDrift, Replayer, check_fits, require_replayable
from embodied_rl.sim.instrumented import instrumented, plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.sim.text.program import is_program
from embodied_rl.trust import RECORDING, require_trusted, trusted_names
from embodied_rl.versions import provenance

if TYPE_CHECKING:
    from rich.table import Table


_SHOWN = 10
"""Episodes with their own row in the table."""

COMMAND = Command(
    name="replay",
    summary="Play recorded episodes again in their simulator, compare every observation, and check that success is the same.",
    arguments=(
        Argument("recording", str, "recording: a native folder, or a file of another format"),
        Argument(
            "by",
            str,
            "action: start at the seed and play the actions. state: restore each recorded state and play one action",
            "action",
            ("action", "state"),
        ),
        Argument("num_episodes", Episodes, "number of episodes to replay, from the first; default: all", None),
        Argument("tolerance", Coefficient, "also fail if an observation differs by more; default: only success decides", None),
        Argument("render", bool, "render a picture of every step, and write the episodes with pictures into output", False),
        Argument("size", PictureSize, "longer side of a picture in pixels", 256),
        Argument("video", str, "storage of pictures", "mp4", VIDEO_FORMATS),
        Argument("sim", str, "simulator; default: the recording's own", None),
        Argument("trust", str, "code that the recording may name beside registered code: package.module:Attribute, or a list", None),
        Argument("report", WrittenFile, "JSON file for the report; default: replay-BY.json in the recording's folder", None),
        Argument("output", WrittenFolder, "with render=true: the new recording; default: the recording's name with -rendered", None),
    ),
    prefixes={"sim.": "change a value of the simulator's configuration, e.g. sim.num_slots=4"},
    examples=(
        "recording=recordings/pickcube",
        "recording=recordings/pickcube_states by=state tolerance=0.05",
        "recording=recordings/pickcube render=true size=224 num_episodes=20",
    ),
)


@dataclass(frozen=True)
class ReplayReport:
    """Result of all episodes."""

    recording: Path
    task: str
    by: str
    episodes: Sequence[EpisodeReplay]
    """Ascending by number."""
    rendered: Path | None
    """The new recording; None: nothing was drawn."""
    wall_clock_s: float

    @property
    def mismatched(self) -> list[EpisodeReplay]:
        """Episodes whose success differs from the recorded one, or that could not be played to their end."""
        return [episode for episode in self.episodes if not episode.success_matches]


def replay(
    recording: Recording,
    *,
    by: Literal["action", "state"] = "action",
    num_episodes: int | None = None,
    sim: SimConfig | None = None,
    image_size: int | None = None,
    output: Path | None = None,
    video: VideoFormat = "mp4",
) -> ReplayReport:
    """Replay episodes of a recording.

    Args:
        by: "action": reset to the seed and apply the recorded actions; "state": restore the recorded state before each step.
        num_episodes: number of episodes from the first on; None: all.
        sim: the simulator; None: the recording's own.
        image_size: size in pixels of pictures to draw; None: no pictures.
        output: with `image_size`: a new recording of the same episodes with these pictures.

    Raises:
        UserError: the recording does not name its simulator, does not fit it, or lacks states; nothing can be drawn.
        SimFault: the simulator failed and its configuration says to stop.
    """
    started = time.perf_counter()
    wanted = sim_of(recording) if sim is None else sim
    if is_program(wanted):
        raise UserError(f"'{recording.path}' has dialogues of an agent program, which cannot be reset to a seed and replayed.")
    count = len(recording) if num_episodes is None else min(num_episodes, len(recording))
    if count == 0:
        raise UserError(f"'{recording.path}' has no episodes.")
    # Checked before any simulator is started; the first episode represents all, and each is checked again in its turn.
    require_replayable(0, first := recording.episode(0), by)
    physics = by == "state" and first.state is not None
    shown = instrumented(wanted, physics=physics, image_size=image_size)
    played: list[EpisodeReplay] = []
    with EnvManager.from_config(shown, EpisodeSeeds.given(0), num_slots=min(wanted.num_slots, count), autoreset=False) as manager:
        check_fits(recording.spec, plain_spec(manager.spec))
        with ExitStack() as stack:
            writer: RecordingWriter | None = None
            if image_size is not None and output is not None:
                metadata = {**recording.info.metadata, "rendered_from": str(recording.path), "image_size": image_size}
                info = dataclasses.replace(recording.info, metadata=metadata)
                writer = stack.enter_context(RecordingWriter(output, info, video=video, duplicates="allow"))
            replayer = Replayer(manager, by, None if writer is None else _sinks(writer))
            advance = stack.enter_context(progress_bar(f"replaying {recording.spec.task}", count))
            for episode in replayer.run((number, recording.episode(number)) for number in range(count)):
                played.append(episode)
                matched = sum(one.success_matches for one in played)
                advance(1, f"success as recorded {matched / len(played):.0%}")
    played.sort(key=lambda episode: episode.number)
    rendered = None if writer is None else writer.folder
    return ReplayReport(recording.path, recording.spec.task, by, played, rendered, time.perf_counter() - started)


def sim_of(recording: Recording, trust: Sequence[str] = (), replaced: Sequence[str] = ()) -> SimConfig:
    """Simulator of a recording.

    Args:
        trust, replaced: code that it may name in addition to registered code, and keys that the caller replaces; see
            `embodied_rl.checkpoint.load_checkpoint`.

    Raises:
        UserError: the recording does not name it.
        UntrustedCode: it names other code, and this user did not record it on this machine. Nothing of it was imported.
    """
    if not recording.info.sim:
        raise UserError(
            f"'{recording.path}' does not name its simulator (task '{recording.spec.task}'). Give it, for example sim=maniskill_pushcube."
        )
    info = recording.info
    named, signature = {"sim": info.sim}, info.signature
    require_trusted(named, file=recording.path, what=RECORDING, content=info.sim_bytes, signature=signature, trust=trust, replaced=replaced)
    return SimConfig.from_dict(info.sim)


def chosen_sim(recording: Recording, name: str | None, overrides: Mapping[str, Any], trust: Sequence[str]) -> SimConfig:
    """Recording's simulator, or the named one, with overrides. Raises UserError as `sim_of`, and for an unknown key."""
    from embodied_rl.commands.evaluate import override_sim

    return override_sim(sim_of(recording, trust, list(overrides)) if name is None else load_sim_config(name), overrides)


def _sinks(writer: RecordingWriter) -> Callable[[RecordedEpisode], EpisodeSink]:
    def open_sink(episode: RecordedEpisode) -> EpisodeSink:
        return EpisodeSink(writer, episode.seed, task=episode.task, instruction=episode.instruction, metadata=episode.metadata)

    return open_sink


def document_of(report: ReplayReport, command: str) -> dict[str, Any]:
    return {
        "recording": str(report.recording),
        "task": report.task,
        "by": report.by,
        "num_episodes": len(report.episodes),
        "num_exact": sum(episode.is_exact for episode in report.episodes),
        "num_success_matched": sum(episode.success_matches for episode in report.episodes),
        "max_drift": max(episode.max_drift for episode in report.episodes),
        "rendered": None if report.rendered is None else str(report.rendered),
        "wall_clock_s": round(report.wall_clock_s, 2),
        **provenance(command),
        "episodes": [_episode_document(episode) for episode in report.episodes],
    }


def _episode_document(episode: EpisodeReplay) -> dict[str, Any]:
    def of(drift: KeyDrift) -> dict[str, Any]:
        return {"max": drift.max_abs, "mean": drift.mean_abs, "first_step": drift.first_step, "per_step": drift.per_step.tolist()}

    return {
        "number": episode.number,
        "seed": episode.seed,
        "num_steps": episode.num_steps,
        "num_replayed": episode.num_replayed,
        "exact": episode.is_exact,
        "max_drift": episode.max_drift,
        "first_step": episode.first_step,
        "success_once": dict(zip(("recorded", "replayed"), episode.success_once, strict=True)),
        "success_at_end": dict(zip(("recorded", "replayed"), episode.success_at_end, strict=True)),
        "ends_match": episode.ends_match,
        "failure": episode.failure,
        "reward": of(episode.reward),
        "observation": {key: of(drift) for key, drift in episode.observation.items()},
    }


def tables(report: ReplayReport) -> list[Table]:
    """Tables of the command's output: a row per part of the observation, and one per episode that deviates most."""
    count, exact = len(report.episodes), sum(episode.is_exact for episode in report.episodes)
    title = (
        f"{report.task}, replayed by {report.by}: {count} episodes, {exact} exact, success as recorded in {count - len(report.mismatched)}"
    )
    parts = figure_table(title, ("", "largest difference", "mean", "first step that differs", "episodes that differ"))
    rows: dict[str, list[KeyDrift]] = {
        key: [episode.observation[key] for episode in report.episodes] for key in report.episodes[0].observation
    }
    rows["reward"] = [episode.reward for episode in report.episodes]
    for name, drifts in rows.items():
        firsts = [drift.first_step for drift in drifts if drift.first_step is not None]
        largest = max(drift.max_abs for drift in drifts)
        mean = float(np.mean([drift.mean_abs for drift in drifts]))
        parts.add_row(name, f"{largest:.3g}", f"{mean:.3g}", str(min(firsts)) if firsts else "–", str(len(firsts)))
    worst = sorted((episode for episode in report.episodes if not episode.is_exact), key=lambda e: (e.success_matches, -e.max_drift))
    if not worst:
        return [parts]
    title = f"Largest differences{f' ({_SHOWN} of {len(worst)})' if len(worst) > _SHOWN else ''}"
    columns = ("episode", "seed", "steps", "largest difference", "first step that differs", "success recorded", "replayed")
    single, yes = figure_table(title, columns, leading=0), {True: "yes", False: "no"}
    for episode in worst[:_SHOWN]:
        single.add_row(
            str(episode.number),
            str(episode.seed),
            f"{episode.num_replayed} of {episode.num_steps}",
            f"{episode.max_drift:.3g}",
            "–" if episode.first_step is None else str(episode.first_step),
            yes[episode.success_once[0]],
            yes[episode.success_once[1]] if episode.failure is None else episode.failure,
        )
    return [parts, single]


@as_command
def main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)

    if not values["render"] and (unused := COMMAND.changed(values, "output", "size", "video")):
        raise UserError(f"{unused[0]} needs render=true. Without pictures, replay writes only the report (report=…).")
    with progress_bar(f"replaying {values['recording']}: starting simulators"):
        recording = open_recording(Path(values["recording"]))
        sim = chosen_sim(recording, values["sim"], overrides, trusted_names(values["trust"]))
        output = _output(values, recording) if values["render"] else None
        report = replay(
            recording,
            by=values["by"],
            num_episodes=values["num_episodes"],
            sim=sim,
            image_size=values["size"] if values["render"] else None,
            output=output,
            video=values["video"],
        )
    beside = recording.path if recording.path.is_dir() else recording.path.parent
    path = Path(values["report"]) if values["report"] else beside / f"replay-{report.by}.json"
    try:
        write_atomic(path, json.dumps(document_of(report, command_line("replay", argv)), indent=1, allow_nan=False) + "\n")
    finally:  # neither a file that cannot be written nor a reader that closes the pipe costs the figures
        print_tables(*tables(report))
    print(f"{report.wall_clock_s:.1f} s. Every step: {path}")
    if report.rendered is not None:
        print(f"With pictures: {report.rendered}")
    _judge(report, values["tolerance"])


def _judge(report: ReplayReport, tolerance: float | None) -> None:
    """Exit with status 1 if success differs, or a deviation exceeds the tolerance."""
    if report.mismatched:
        seeds = [episode.seed for episode in report.mismatched]
        shown = f"{seeds[:_SHOWN]}{' and more' if len(seeds) > _SHOWN else ''}"
        fail(f"Success is not as recorded in {len(seeds)} of {len(report.episodes)} episodes: seeds {shown}.", 1)
    if tolerance is not None:
        if cut := [episode for episode in report.episodes if episode.num_replayed < episode.num_steps]:
            steps = f"{cut[0].num_replayed} of {cut[0].num_steps} steps of seed {cut[0].seed}"
            fail(f"{len(cut)} of {len(report.episodes)} episodes ended before their recorded end: {steps}.", 1)
        far = [episode for episode in report.episodes if episode.max_drift > tolerance]
        if far:
            largest = max(episode.max_drift for episode in far)
            fail(f"{len(far)} of {len(report.episodes)} episodes differ by more than {tolerance:g} (largest: {largest:.3g}).", 1)


def _output(values: Mapping[str, Any], recording: Recording) -> Path:
    if values["output"] is None:
        path = recording.path.absolute()  # "." has no name
        return next_free(path.with_name(f"{path.stem}-rendered"))
    folder = Path(values["output"])
    if (folder / RECORDING_FILE).exists():
        raise UserError(f"'{folder}' already has a recording. Choose another output=….")
    return folder
