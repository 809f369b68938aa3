"""``python -m embodied_rl.render checkpoint=PATH``: an mp4 and a GIF of policies or recorded episodes, side by side."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.bounds import FilmRate, HeldOutSeed, PictureSize, PlayedEpisodes, ShownEpisodes
from embodied_rl.checkpoint import Checkpoint
from embodied_rl.commands.cli import Argument, Command, Written, WrittenFolder, as_command
from embodied_rl.commands.replay import chosen_sim, sim_of
from embodied_rl.config import SimConfig
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode, Recording
from embodied_rl.errors import UserError, require_known
from embodied_rl.evaluation.output import labels
from embodied_rl.generation.base import Generator
from embodied_rl.loggers import LoggerGroup
from embodied_rl.loggers.trackers import TensorBoardLogger, WandbLogger
from embodied_rl.media.episodes import (
    FilmedEpisode,
    PictureSink,
    Selection,
    choose_cameras,
    from_pictures,
    recorded_cameras,
    stride_of,
    summaries,
)
from embodied_rl.media.episodes import film as film_seeds
from embodied_rl.media.overlays import FORMATS, Film, Overlays, Pictures, Row, file_name, parse_overlays, write_videos
from embodied_rl.progress import progress_bar
from embodied_rl.rollout.replaying import Replayer, check_fits
from embodied_rl.sim.faults import SimFault
from embodied_rl.sim.instrumented import filmed, instrumented, plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds
from embodied_rl.trust import trusted_names
from embodied_rl.types import EpisodeSummary, Observation, SimSpec

LOGGERS = ("tensorboard", "wandb")
_MAX_SLOTS = 4

COMMAND = Command(
    name="render",
    summary="Film policies on held-out seeds, or show recorded episodes, side by side in one mp4 and one GIF.",
    arguments=(
        Argument("checkpoint", str, "folder of a run (its last checkpoint) or of a checkpoint", None),
        Argument("domain", str, "domain to film, if the run has several", None),
        Argument("against", str, "also film the same seeds with this checkpoint, or with 'random', in a row below", None),
        Argument("recording", str, "show recorded episodes instead; episodes without pictures are replayed in the simulator", None),
        Argument("tokenizer", str, "folder of the served model, for captured sessions of serve_agent", None),
        Argument("num_episodes", ShownEpisodes, "episodes to show; default: as many as select says, or 4", None),
        Argument("select", str, "episodes to show: first, best, worst or random; best:9 shows nine", "first"),
        Argument("among", PlayedEpisodes, "episodes to select from; default: four times the number shown, or the whole recording", None),
        Argument("seed", HeldOutSeed, "the held-out seeds are 2**30 + seed, 2**30 + seed + 1, …; also the seed of select=random", 0),
        Argument(
            "cameras", str, "cameras of the simulator or the recording, separated by commas; an unknown name lists the cameras", "default"
        ),
        Argument(
            "overlay",
            str,
            "text in the pictures: task, instruction, step, reward, value, actions, answer, success; default, all or none",
            "default",
        ),
        Argument("output", WrittenFolder, "folder to write to; default: videos in the run's folder, or beside the recording", None),
        Argument("size", PictureSize, "side of each picture in pixels", 384),
        Argument("fps", FilmRate, "pictures per second, one per control step; short episodes (< 2 s) are played slower", 20),
        Argument("format", str, "mp4, gif or both, separated by a comma", "mp4,gif"),
        Argument("log", str, "also add the video to the run's logs: tensorboard, wandb or both", None),
        Argument(
            "policy", str, "the checkpoint's policy, or random actions for comparison", "checkpoint", choices=("checkpoint", "random")
        ),
        Argument("sim", str, "simulator with the same spaces; default: the checkpoint's own", None),
        Argument("trust", str, "code that the file may name beside registered code: package.module:Attribute, or a list", None),
    ),
    prefixes={"sim.": "change a value of the simulator's configuration, e.g. sim.kwargs.camera_name=track"},
    examples=(
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1",
        "checkpoint=runs/halfcheetah/20260101-120000-seed1 num_episodes=1 format=gif",
        "checkpoint=runs/fetch_reach/20260101-120000-seed1 select=worst:4 among=50 overlay=all",
        "checkpoint=runs/metaworld_reach/20260101-120000-seed1 against=random cameras=corner,gripperPOV",
        "recording=recordings/pickcube select=best:9",
        "recording=captured tokenizer=models/qwen3-0.6b",
    ),
)


# ---- policies -------------------------------------------------------------------------------------------------------


def render_videos(
    checkpoint: Checkpoint,
    output: Path,
    *,
    num_episodes: int = 4,
    size: int = 384,
    fps: int = 20,
    seed: int = 0,
    formats: Sequence[str] = FORMATS,
    policy: str = "checkpoint",
    sim: SimConfig | None = None,
) -> list[Path]:
    """Film held-out episodes of one policy and write one video per format: `film_players` with the usual settings.

    A language policy uses the torch backend, because the vLLM engine of the training is still loaded, and two may not fit.
    """
    if checkpoint.config.generation.backend == "vllm":
        generation = dataclasses.replace(checkpoint.config.generation, backend="tokens_torch")
        checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, generation=generation))
    film = Film(num_episodes=num_episodes, size=size, fps=fps, seed=seed, formats=tuple(formats))
    return film_players([(checkpoint, policy)], output, film, sim=sim)


def film_players(players: Sequence[tuple[Checkpoint, str]], output: Path, film: Film, *, sim: SimConfig | None = None) -> list[Path]:
    """Film the same held-out seeds with one policy or two and write one video per format; earlier videos stay, new ones get a number. For
    language agents, also write their prompts and answers as pages.

    For two policies, the first one's results select the seeds.

    Args:
        players: (checkpoint, "checkpoint" or "random"), one or two; policies act with their mode.
        sim: another simulator configuration; None: the first checkpoint's.

    Returns the files, in the order of `film.formats`; then the pages.

    Raises:
        UserError: the task or this machine cannot render, or the files cannot be written.
        IncompatibleCheckpointError: a checkpoint does not fit the simulator.
    """
    from embodied_rl.commands.evaluate import one_thread_acts

    wanted = players[0][0].config.sim if sim is None else sim
    try:
        with one_thread_acts(checkpoint.config.policy.name for checkpoint, policy in players if policy == "checkpoint"):
            spec, rows = _play(players, wanted, film)
    except SimFault as error:
        # A graphics driver may end a process without an exception.
        raise UserError(
            f"Filming failed: simulator worker {error.worker} {error.kind.value} ({_cause(error)}). `python -m embodied_rl.doctor` tests "
            "each renderer and names the packages to install."
        ) from error
    base = output / _name(players, spec, film)
    return [*write_videos(_pictures(rows, spec, film, film.cameras), base, film), *_write_dialogues(players, rows, base)]


def _write_dialogues(players: Sequence[tuple[Checkpoint, str]], rows: Sequence[Row], base: Path) -> list[Path]:
    """Write a page with every token for each language agent."""
    if any(checkpoint.config.policy.name != "language" for checkpoint, _ in players):
        return []
    from embodied_rl.media.dialogues import write_filmed_dialogues
    from embodied_rl.policies.chat_tokenizer import ChatTokenizer

    words = [ChatTokenizer.read(checkpoint.model_folder) for checkpoint, _ in players]
    decode = [functools.partial(one.decode, skip_special_tokens=False) for one in words]
    return write_filmed_dialogues(base, rows, decode)


def _play(players: Sequence[tuple[Checkpoint, str]], sim: SimConfig, film: Film) -> tuple[SimSpec, list[Row]]:
    selection = film.selection()
    positions: Sequence[int] = selection.positions(film.seed) if selection.is_known_before else range(selection.among)
    seeds = [HELD_OUT_START + film.seed + position for position in positions]
    config = filmed(sim, film.size, film.cameras)
    with EnvManager.from_config(
        config, EpisodeSeeds.held_out(film.seed), num_slots=min(len(seeds), _MAX_SLOTS), autoreset=False
    ) as manager:
        if not manager.spec.can_render:
            raise UserError(f"Task '{manager.spec.task}' has no pictures (no render mode 'rgb_array'), so it cannot be filmed.")
        actors = [_actor(checkpoint, policy, sim, manager, film) for checkpoint, policy in players]
        shown = [_film_one(manager, *actors[0], seeds, film, selection)]
        chosen = [episode.seed for episode in shown[0]]
        everything = Selection("first", len(chosen), len(chosen))
        shown += [_film_one(manager, *actor, chosen, film, everything) for actor in actors[1:]]
        return manager.spec, _rows(players, shown, manager.spec)


def _film_one(
    manager: EnvManager,
    generator: Generator,
    estimate: Callable[[Observation], np.ndarray] | None,
    seeds: Sequence[int],
    film: Film,
    selection: Selection,
) -> list[FilmedEpisode]:
    with progress_bar(f"filming {manager.spec.task}", len(seeds), shown=film.show_progress) as advance:
        finished: list[EpisodeSummary] = []

        def on_episode(episode: EpisodeSummary) -> None:
            finished.append(episode)
            rate = sum(one.success_once for one in finished) / len(finished)
            advance(1, f"success {rate:.0%}" if manager.spec.reports_success else "")

        return film_seeds(
            manager,
            generator,
            seeds,
            size=film.size,
            num_cameras=max(1, len(film.cameras)),
            selection=selection,
            estimate=estimate,
            on_episode=on_episode,
        )


def _actor(
    checkpoint: Checkpoint, policy: str, sim: SimConfig, manager: EnvManager, film: Film
) -> tuple[Generator, Callable[[Observation], np.ndarray] | None]:
    """Generator of a policy, and its value estimates if they are drawn."""
    from embodied_rl.commands.evaluate import acting, is_own_task, make_generator, make_policy, value_estimate

    same_task = is_own_task(checkpoint, sim)
    if policy == "random" or checkpoint.config.policy.name == "language":
        return make_generator(checkpoint, manager.spec, policy=policy, same_task=same_task, seed=film.seed), None
    module = make_policy(checkpoint, manager.spec, same_task=same_task)
    return acting(module), value_estimate(module) if "value" in parse_overlays(film.overlay) else None


def _rows(players: Sequence[tuple[Checkpoint, str]], shown: Sequence[Sequence[FilmedEpisode]], spec: SimSpec) -> list[Row]:
    """Each policy's episodes, labelled with their results."""
    rows = []
    for label, episodes in zip(labels(players), shown, strict=True):
        outcomes = [episode.finished for episode in episodes]
        mean = sum(outcome.episode_return for outcome in outcomes) / len(outcomes)
        success = f"   success {sum(outcome.success_once for outcome in outcomes)} of {len(outcomes)}" if spec.reports_success else ""
        rows.append(Row(f"{label}{success}   mean return {mean:.2f}", episodes))
    return rows


def _name(players: Sequence[tuple[Checkpoint, str]], spec: SimSpec, film: Film) -> str:
    """Name of the files, without number and suffix."""
    (checkpoint, policy), *others = players
    parts = [file_name(spec.task), f"step{checkpoint.step:09d}", *(["random"] if policy == "random" else [])]
    kind = film.selection().kind
    parts += [] if kind == "first" else [kind]
    for other, its_policy in others:
        run = "" if other.run_dir == checkpoint.run_dir else f"{file_name(other.run_dir.name)}-"
        parts += ["against", "random" if its_policy == "random" else f"{run}step{other.step:09d}"]
    return "_".join(parts)


# ---- recordings -----------------------------------------------------------------------------------------------------


def film_recording(
    recording: Recording, output: Path, film: Film, *, sim: SimConfig | None = None, trust: Sequence[str] = ()
) -> list[Path]:
    """Show episodes of a recording and write one video per format; earlier videos stay, new ones get a number.

    Recorded pictures are used if there are any. Otherwise the simulator replays the episodes, by their states if recorded, else by actions.

    Args:
        film: settings; ``cameras`` are recorded ones.
        sim: the simulator for a replay; None: the recording's own.
        trust: code that the recording's own simulator may name, see `embodied_rl.commands.replay.sim_of`.

    Raises UserError: there is no episode; a replay is needed but impossible; the files cannot be written.
    """
    if len(recording) == 0:
        raise UserError(f"'{recording.path}' has no episodes.")
    selection = film.selection(len(recording))
    numbers = selection.positions(film.seed) if selection.is_known_before else selection.ranked(summaries(recording)[: selection.among])
    known = recorded_cameras(recording.episode(numbers[0]))
    cameras = choose_cameras(film.cameras, known, recording) if known or film.cameras not in ((), ("default",)) else ()
    stride = stride_of([int(recording.lengths[number]) for number in numbers], 3 * film.size**2 * max(1, len(cameras)))
    episodes = []
    if cameras:
        with progress_bar(f"reading {recording.spec.task}", len(numbers), shown=film.show_progress) as advance:
            for number in numbers:
                episode = recording.episode(number)
                found = recorded_cameras(episode)
                if missing := [camera for camera in cameras if camera not in found]:
                    raise UserError(f"Episode {number} of '{recording.path}' has no pictures of camera '{missing[0]}'.")
                views = {camera: found[camera] for camera in cameras}
                episodes.append(from_pictures(recording, number, views, episode, size=film.size, stride=stride))
                advance(1)
    else:
        episodes = _replayed(recording, numbers, film, stride, sim_of(recording, trust) if sim is None else sim)
    kind = "" if selection.kind == "first" else f"_{selection.kind}"
    name = f"{file_name(recording.spec.task)}_{file_name(recording.path.stem)}{kind}"
    return write_videos(_pictures([Row("", episodes)], recording.spec, film, cameras), output / name, film)


def _replayed(recording: Recording, numbers: Sequence[int], film: Film, stride: int, sim: SimConfig) -> list[FilmedEpisode]:
    """Replay these episodes, and keep the simulator's pictures."""
    first = recording.episode(numbers[0])
    shown = instrumented(sim, physics=first.state is not None, image_size=film.size)
    sinks: list[PictureSink] = []

    def open_sink(episode: RecordedEpisode) -> Any:
        sinks.append(PictureSink(recording, numbers[len(sinks)], episode, film.size, stride))
        return sinks[-1]

    slots = min(len(numbers), _MAX_SLOTS)
    with EnvManager.from_config(shown, EpisodeSeeds.given(0), num_slots=slots, autoreset=False) as manager:
        check_fits(recording.spec, plain_spec(manager.spec))
        replayer = Replayer(manager, "state" if first.state is not None or first.snapshots else "action", open_sink)
        with progress_bar(f"replaying {recording.spec.task}", len(numbers), shown=film.show_progress) as advance:
            different = 0
            for replay in replayer.run((number, recording.episode(number)) for number in numbers):
                different += not replay.success_matches
                advance(1)
    if different and film.show_progress:
        print(f"{different} of {len(numbers)} episodes differ from the recording when replayed: see embodied_rl.replay.", file=sys.stderr)
    return [sink.filmed for sink in sinks]


# ---- files ----------------------------------------------------------------------------------------------------------


def _pictures(rows: Sequence[Row], spec: SimSpec, film: Film, cameras: Sequence[str]) -> Pictures:
    overlays = Overlays(parse_overlays(film.overlay), spec.action, tuple(cameras))
    return Pictures(rows, overlays, reports_success=spec.reports_success)


def log_videos(checkpoint: Checkpoint, paths: Sequence[Path], names: Sequence[str]) -> None:
    """Add a video to the logs of the checkpoint's run, at its step. Raises MissingExtraError: a logger's packages are missing."""
    run_dir, config = checkpoint.run_dir, checkpoint.config.logger
    # W&B continues the run to which training logged.
    of_wandb = run_dir, config.wandb_project, config.wandb_mode, checkpoint.config.to_dict(), checkpoint.step
    for name in names:
        with LoggerGroup([TensorBoardLogger(run_dir, beside=True) if name == "tensorboard" else WandbLogger(*of_wandb)]) as group:
            group.log_video(checkpoint.step, paths[0])


def _cause(fault: SimFault) -> str:
    """Most informative line: of a traceback the last, else the first (the signal, or the elapsed time)."""
    lines = fault.detail.strip().splitlines() or ["no details"]
    return lines[-1 if fault.kind.name == "RAISED" else 0].strip().rstrip(".")


# ---- command line ---------------------------------------------------------------------------------------------------


@as_command
def main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)
    film = Film(
        **{name: values[name] for name in ("num_episodes", "select", "among", "seed", "overlay", "size", "fps")},
        cameras=() if values["cameras"] == "default" else tuple(name.strip() for name in values["cameras"].split(",")),
        formats=_words(values["format"]) or (values["format"],),
        show_progress=True,
    )
    with progress_bar(f"filming {values['recording'] or values['checkpoint']}: starting simulators"):
        paths = _film_recording(values, overrides, film) if values["recording"] else _film_checkpoints(values, overrides, film)
    for path in paths:
        print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")


def _film_checkpoints(values: Mapping[str, Any], overrides: Mapping[str, Any], film: Film) -> list[Path]:
    from embodied_rl.commands.evaluate import choose_sim, load_to_play

    if values["checkpoint"] is None:
        raise UserError("Nothing to film: give checkpoint=… (for example the folder of a run) or recording=…. See --help.")
    if values["tokenizer"] is not None:
        raise UserError("tokenizer= is for recording=…, a folder of sessions that serve_agent captured.")
    logs = _words(values["log"] or "")
    for word in logs:
        require_known(word, LOGGERS, f"log={values['log']}: '{word}' is not a choice.")
    trust = trusted_names(values["trust"])
    load = functools.partial(load_to_play, domain=values["domain"], sim=values["sim"], overrides=overrides, trust=trust, logs=bool(logs))
    checkpoint = load(values["checkpoint"])
    players = [(checkpoint, values["policy"])]
    if values["against"] is not None:
        random = values["against"] == "random"
        other = None if random else load(values["against"], against=True)
        players.append((checkpoint, "random") if other is None else (other, "checkpoint"))
        if len({(player.path, policy) for player, policy in players}) == 1:
            raise UserError(f"against={values['against']} is the same policy; give another one.")
    output = _writable(values["output"], checkpoint.run_dir / "videos" / (values["domain"] or ""))
    paths = film_players(players, output, film, sim=choose_sim(checkpoint, values["sim"], overrides))
    if logs:
        log_videos(checkpoint, paths, logs)
    return paths


def _film_recording(values: Mapping[str, Any], overrides: Mapping[str, Any], film: Film) -> list[Path]:
    from embodied_rl.media.dialogues import film_captured, is_captured

    if unused := COMMAND.changed(values, "checkpoint", "against", "domain", "log", "policy"):
        raise UserError(f"{unused[0]} cannot be used with recording=, which shows the recorded episodes unchanged.")
    folder = Path(values["recording"])
    if is_captured(folder):
        if unused := [*COMMAND.changed(values, "sim", "trust", "cameras"), *(f"{key}={value}" for key, value in overrides.items())]:
            raise UserError(f"{unused[0]} cannot be used with captured sessions, which no simulator plays.")
        output = Path(values["output"]) if values["output"] else folder.resolve().parent / "videos"
        return film_captured(folder, values["tokenizer"], output, film)
    recording = open_recording(values["recording"])
    try:
        if values["tokenizer"] is not None:
            raise UserError(f"tokenizer= is for sessions that serve_agent captured, and '{folder}' is not a folder of them.")
        trust = trusted_names(values["trust"])
        sim = None if values["sim"] is None and not overrides else chosen_sim(recording, values["sim"], overrides, trust)
        output = _writable(values["output"], recording.path.resolve().parent / "videos")
        return film_recording(recording, output, film, sim=sim, trust=trust)
    finally:
        recording.close()


def _writable(named: str | None, default: Path) -> Path:
    """Folder of the films. Raises UserError before anything is played if it cannot be written."""
    Written("folder").check("output", named or str(default))
    return Path(named or default)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
