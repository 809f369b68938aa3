"""``python -m embodied_rl.render checkpoint=PATH``: an mp4 and a GIF of a checkpoint's policy, several episodes side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied_rl.cli import Argument, Command, run_command

if TYPE_CHECKING:
    from embodied_rl.checkpoint import Checkpoint
    from embodied_rl.config import SimConfig
    from embodied_rl.generation.base import Generator
    from embodied_rl.sim.faults import SimFault
    from embodied_rl.sim.manager import EnvManager
    from embodied_rl.types import EpisodeSummary, SimSpec

FORMATS = ("mp4", "gif")
MAX_STEPS_SHOWN = 250
"""Steps of an episode that have a picture; when one lasts longer, all are shown faster: every second step, every fourth, …"""
HOLD_S = 1.0
"""How long the end of the last episode stays."""
_MAX_SLOTS = 4

COMMAND = Command(
    name="render",
    summary="Film a checkpoint's policy on held-out seeds: one mp4 and one GIF with all episodes side by side.",
    arguments=(
        Argument("checkpoint", str, "a run's folder (its last checkpoint), or a checkpoint's"),
        Argument("num_episodes", int, "episodes to film, one per seed", 4),
        Argument("seed", int, "the held-out seeds are 2**30 + seed, 2**30 + seed + 1, …", 0),
        Argument("output", str, "folder to write to; default: videos in the run's folder", None),
        Argument("size", int, "pixels a side of each episode's picture", 256),
        Argument("fps", int, "pictures a second, one for each control step; episodes shorter than two seconds are played slower", 20),
        Argument("format", str, "mp4, gif or both, separated by a comma", "mp4,gif"),
        Argument(
            "policy", str, "the checkpoint's policy, or random actions for comparison", "checkpoint", choices=("checkpoint", "random")
        ),
        Argument("sim", str, "another simulator with the same spaces; default: the checkpoint's own", None),
    ),
    prefixes={"sim.": "change a value of the simulator's configuration, e.g. sim.kwargs.camera_name=track"},
    examples=(
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1",
        "checkpoint=runs/halfcheetah/20260101-120000-seed1 num_episodes=1 format=gif",
    ),
)


@dataclass
class FilmedEpisode:
    """One episode's pictures."""

    seed: int
    frames: list[np.ndarray] = field(default_factory=list)
    """Each [size, size, 3] uint8, with text; the last one is the episode's last moment."""
    steps: list[int] = field(default_factory=list)
    """After how many steps each picture was taken."""
    summary: EpisodeSummary | None = None
    """None while it is running."""

    def thin(self, stride: int) -> None:
        """Keep the pictures of every `stride`-th step, and the last one of an episode that has ended."""
        last = len(self.steps) - 1 if self.summary is not None else None
        kept = [index for index, step in enumerate(self.steps) if step % stride == 0 or index == last]
        self.frames, self.steps = [self.frames[index] for index in kept], [self.steps[index] for index in kept]


def render_videos(
    checkpoint: Checkpoint,
    output: Path,
    *,
    num_episodes: int = 4,
    size: int = 256,
    fps: int = 20,
    seed: int = 0,
    formats: Sequence[str] = FORMATS,
    policy: str = "checkpoint",
    sim: SimConfig | None = None,
) -> list[Path]:
    """Film held-out episodes and write them as one video per format; earlier videos are kept, new ones numbered.

    Args:
        checkpoint: whose policy acts (with its mode).
        output: folder for the videos.
        num_episodes: of the seeds 2**30 + seed + 0, 1, …
        size: pixels a side of each episode's picture.
        fps: pictures a second, one per control step (one for several steps where an episode is longer than `MAX_STEPS_SHOWN`;
            short ones are played slower, so that one can follow them).
        seed: see `num_episodes`.
        formats: "mp4", "gif" or both.
        policy: "checkpoint" or "random".
        sim: another simulator configuration; None: the checkpoint's.

    Returns:
        The files, in the order of `formats`.

    Raises:
        UserError: the task or this machine cannot render, or the files cannot be written.
        IncompatibleCheckpointError: the checkpoint does not fit the simulator.
    """
    from embodied_rl.video import play_rate, write_gif, write_mp4

    wanted = checkpoint.config.sim if sim is None else sim
    spec, episodes = _play(checkpoint, wanted, num_episodes=num_episodes, size=size, seed=seed, policy=policy)
    frames = side_by_side(episodes, reports_success=spec.reports_success)
    rate = play_rate(len(frames), fps)
    base = output / f"{_file_name(spec.task)}_step{checkpoint.step:09d}{'_random' if policy == 'random' else ''}"
    paths = _free_names(base, formats)
    for path in paths:
        if path.suffix == ".mp4":
            write_mp4(path, frames, rate, HOLD_S)
        else:
            write_gif(path, frames, rate, HOLD_S)
    return paths


def _play(
    checkpoint: Checkpoint, sim: SimConfig, *, num_episodes: int, size: int, seed: int, policy: str
) -> tuple[SimSpec, list[FilmedEpisode]]:
    from embodied_rl.errors import UserError
    from embodied_rl.evaluate import is_own_task, make_generator
    from embodied_rl.sim.faults import SimFault
    from embodied_rl.sim.film import filmed
    from embodied_rl.sim.manager import EnvManager
    from embodied_rl.sim.seeding import EpisodeSeeds

    slots = min(num_episodes, _MAX_SLOTS)
    try:
        with EnvManager.from_config(filmed(sim, size), EpisodeSeeds.held_out(seed), num_slots=slots) as manager:
            spec = manager.spec
            if not spec.can_render:
                raise UserError(f"Task '{spec.task}' offers no pictures (no render mode 'rgb_array'), so it cannot be filmed.")
            generator = make_generator(checkpoint, spec, policy=policy, same_task=is_own_task(checkpoint, sim), seed=seed)
            return spec, film(manager, generator, num_episodes, first_seed=seed, size=size)
    except SimFault as error:
        # Graphics drivers end a process in ways that no exception tells.
        raise UserError(
            f"Filming failed: simulator worker {error.worker} {error.kind.value} ({_cause(error)}). "
            "`python -m embodied_rl.doctor` tries every way of drawing and names the packages to install."
        ) from error


def film(manager: EnvManager, generator: Generator, num_episodes: int, *, first_seed: int, size: int) -> list[FilmedEpisode]:
    """Play held-out seeds as `rollout.evaluation.evaluate` does, with the policy's mode, and keep a picture of every step.

    Of episodes longer than `MAX_STEPS_SHOWN` every second (fourth, …) step is kept, and of all others too: they run side by side.

    Args:
        manager: of a `FilmedSim`, whose slots are then left in the middle of episodes.
        generator: what acts.
        num_episodes: seeds 2**30 + first_seed + 0 … num_episodes - 1, each once.
        first_seed: see `num_episodes`.
        size: pixels a side of the pictures.

    Returns:
        One per seed, ascending.
    """
    from embodied_rl.sim.seeding import HELD_OUT_START, EpisodeSeeds

    num_slots, spec = manager.num_slots, manager.spec
    start = manager.reset(EpisodeSeeds.held_out(first_seed))
    observation = {key: part.copy() for key, part in start.observation.items()}
    stride = 1
    episodes = [FilmedEpisode(HELD_OUT_START + first_seed + index) for index in range(num_episodes)]
    # Slot s plays episodes s, s + num_slots, …
    current = list(range(num_slots))
    returns, lengths, success = np.zeros(num_slots), np.zeros(num_slots, int), np.zeros(num_slots, bool)

    def take(slot: int) -> None:
        episode = episodes[current[slot]]
        (picture,) = manager.render([slot])
        episode.frames.append(_annotate(picture, size, spec.task, episode.seed, lengths[slot], returns[slot], bool(success[slot])))
        episode.steps.append(int(lengths[slot]))

    for slot in current:
        take(slot)
    slots = np.arange(num_slots)
    while True:
        active = np.flatnonzero(np.array(current) < num_episodes)
        if active.size == 0:
            return episodes
        generator.send(slots, observation, None)
        actions = spec.action.denormalise(generator.recv().action)
        manager.send(active, actions[active])
        outcome = manager.recv(active)
        for key, part in outcome.observation.items():
            observation[key][active] = part
        returns[active] += outcome.reward
        lengths[active] += 1
        success[active] |= outcome.success
        ended = {summary.slot: summary for summary in outcome.episodes}
        for slot in active.tolist():
            if slot in ended or lengths[slot] % stride == 0:
                take(slot)
            if slot in ended:
                episodes[current[slot]].summary = ended[slot]
                current[slot] += num_slots
                returns[slot], lengths[slot], success[slot] = 0.0, 0, False
                if current[slot] < num_episodes:
                    take(slot)
        stride = _thinned(episodes, stride)


def _thinned(episodes: Sequence[FilmedEpisode], stride: int) -> int:
    """Once an episode has too many pictures, drop every second one of all; returns the steps from one picture to the next."""
    if max(len(episode.frames) for episode in episodes) > MAX_STEPS_SHOWN + 1:
        stride *= 2
        for episode in episodes:
            episode.thin(stride)
    return stride


def side_by_side(episodes: Sequence[FilmedEpisode], *, reports_success: bool) -> list[np.ndarray]:
    """Pictures with all episodes next to each other; one that has ended keeps its last moment in a green or red frame.

    Args:
        episodes: finished ones.
        reports_success: False: the frame is grey, for the task has no notion of success.
    """
    from embodied_rl.video import GREEN, GREY, RED, add_border, tile

    finals = []
    for episode in episodes:
        assert episode.summary is not None, "the episode has not ended"
        colour = GREY if not reports_success else GREEN if episode.summary.success_once else RED
        finals.append(add_border(episode.frames[-1], colour))
    longest = max(len(episode.frames) for episode in episodes)
    pairs = list(zip(episodes, finals, strict=True))
    return [
        tile([episode.frames[index] if index < len(episode.frames) - 1 else final for episode, final in pairs]) for index in range(longest)
    ]


def _cause(fault: SimFault) -> str:
    """The line that tells most: of a traceback the last one, else the first (the signal or the time that passed)."""
    lines = fault.detail.strip().splitlines() or ["nothing more is known"]
    return lines[-1 if fault.kind.name == "RAISED" else 0].strip().rstrip(".")


def _annotate(picture: np.ndarray, size: int, task: str, seed: int, step: int, episode_return: float, success: bool) -> np.ndarray:
    from embodied_rl.video import fit_square, overlay

    bottom = f"seed {seed}   step {step}   return {episode_return:.2f}"
    return overlay(fit_square(picture, size), task, bottom, "success" if success else "")


def _free_names(base: Path, formats: Sequence[str]) -> list[Path]:
    """One number for all formats of a video."""
    number = 1
    while True:
        name = base.name if number == 1 else f"{base.name}_{number}"
        paths = [base.with_name(f"{name}.{suffix}") for suffix in formats]
        if not any(path.exists() for path in paths):
            return paths
        number += 1


def _file_name(task: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in task)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    run_command(lambda: _main(arguments))


def _main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)
    from embodied_rl.checkpoint import load_checkpoint
    from embodied_rl.errors import UserError, did_you_mean
    from embodied_rl.evaluate import choose_sim

    for name, least, most in (("num_episodes", 1, 64), ("size", 16, 2048), ("fps", 1, 120), ("seed", 0, 2**29 - 1)):
        if not least <= values[name] <= most:
            raise UserError(f"{name} must be between {least} and {most}, got {values[name]}.")
    formats = [word.strip() for word in values["format"].split(",") if word.strip()]
    for word in formats or [values["format"]]:
        if word not in FORMATS:
            raise UserError(f"format={values['format']}: '{word}' is not a choice.{did_you_mean(word, FORMATS)}")
    checkpoint = load_checkpoint(values["checkpoint"], with_learner=False)
    paths = render_videos(
        checkpoint,
        Path(values["output"]) if values["output"] else checkpoint.run_dir / "videos",
        num_episodes=values["num_episodes"],
        size=values["size"],
        fps=values["fps"],
        seed=values["seed"],
        formats=list(dict.fromkeys(formats)),
        policy=values["policy"],
        sim=choose_sim(checkpoint, values["sim"], overrides),
    )
    for path in paths:
        print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
