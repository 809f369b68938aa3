"""``python -m embodied_rl.record checkpoint=PATH`` or ``sim=NAME policy=expert``: play seeds and record the episodes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from embodied_rl.bounds import Episodes, HeldOutSeed, Seed, whole_number
from embodied_rl.checkpoint import Checkpoint
from embodied_rl.commands.cli import Argument, Command, WrittenFolder, as_command, command_line, fail
from embodied_rl.config import SimConfig, load_sim_config
from embodied_rl.episodes.folder import RECORDING_FILE
from embodied_rl.episodes.layout import VIDEO_FORMATS, Films, VideoFormat, films_folder, keep_films
from embodied_rl.episodes.recording import RecordingInfo
from embodied_rl.episodes.writer import GATHER_S, RecordingWriter
from embodied_rl.errors import UserError, brief
from embodied_rl.files import next_free
from embodied_rl.generation.random_backend import RandomGenerator
from embodied_rl.progress import progress_bar
from embodied_rl.rollout.filmed import films_of, with_films
from embodied_rl.rollout.recording import ExpertPlayer, GeneratorPlayer, Player, Recorder, RecordingPlan, RecordingResult
from embodied_rl.sim.instrumented import instrumented, plain_spec
from embodied_rl.sim.manager import EnvManager
from embodied_rl.sim.robots.experts import expert_target
from embodied_rl.sim.seeding import EpisodeSeeds
from embodied_rl.trust import trusted_names
from embodied_rl.types import EpisodeSummary, SimSpec
from embodied_rl.versions import machine, versions

POLICIES = ("checkpoint", "expert", "random")

COMMAND = Command(
    name="record",
    summary="Play seeds with a checkpoint's policy, a scripted expert or random actions, and write the episodes into a folder.",
    arguments=(
        Argument("checkpoint", str, "folder of a run (its last checkpoint) or of a checkpoint, whose policy plays its simulator", None),
        Argument("domain", str, "domain to play, if the checkpoint's run has several", None),
        Argument("sim", str, "simulator; default: the checkpoint's own", None),
        Argument("policy", str, "default: the checkpoint's policy; without a checkpoint the expert", None, POLICIES),
        Argument("expert", str, "your own expert, package.module:Attribute; default: the built-in expert of the task", None),
        Argument("sample", bool, "sample actions and record their log-probabilities; false: the most likely actions", False),
        Argument("num_episodes", Episodes, "episodes to record, one per seed", 100),
        Argument("seed", HeldOutSeed, "the seeds are seed, seed + 1, …", 0),
        Argument("held_out", bool, "add 2**30 to the seeds: the held-out seeds of evaluate and render, which training never uses", False),
        Argument("only_success", bool, "keep only successful episodes, and play until there are num_episodes of them", False),
        Argument("max_seeds", Episodes, "with only_success: stop after this many seeds; default: 10 times num_episodes", None),
        Argument("states", str, "simulator state to record: none, physics, or snapshots:K (one every K steps)", "none"),
        Argument("images", str, "a picture of every step, for viewing: none, or the longer side in pixels", "none"),
        Argument("cameras", str, "cameras for images=SIZE, separated by commas; an unknown name lists the cameras", "default"),
        Argument("video", str, "storage of pictures; mp4 keeps the policy's own observations exact", "mp4", VIDEO_FORMATS),
        Argument("noise_seed", Seed, "seed of random and sampled actions", 0),
        Argument("resume", bool, "continue the recording in output: recorded seeds are not played again", False),
        Argument("output", WrittenFolder, "folder of the recording; default: the next free recordings/SIM-POLICY", None),
        Argument("trust", str, "code that the checkpoint may name beside registered code: package.module:Attribute, or a list", None),
    ),
    prefixes={"sim.": "change a value of the simulator's configuration, e.g. sim.kwargs.control_mode=pd_ee_delta_pos"},
    examples=(
        "sim=maniskill_pickcube policy=expert num_episodes=200 only_success=true output=recordings/pickcube",
        "checkpoint=runs/maniskill_pushcube/20260101-120000-seed1 sample=true num_episodes=500",
        "sim=metaworld_drawer_open states=snapshots:10 images=224",
    ),
)


@dataclass(frozen=True)
class Showing:
    """What a recording contains in addition to the simulator's own observations."""

    physics: bool = False
    snapshot_every: int | None = None
    image_size: int | None = None
    cameras: tuple[str, ...] = ()
    """Names of cameras; empty: the default one."""

    @staticmethod
    def parse(states: str, images: str, cameras: str = "default") -> Showing:
        """Parse ``states=none|physics|snapshots:K``, ``images=none|SIZE`` and ``cameras=NAME,NAME``. Raises UserError."""
        every: int | None = None
        kind, _, number = states.partition(":")
        if kind == "snapshots":
            every = whole_number(number)
            if not every:
                raise UserError(f"states={states} needs the number of steps between snapshots, for example states=snapshots:10.")
        elif states not in ("none", "physics"):
            raise UserError(f"states={states} is not a choice. Known: none, physics, snapshots:K.")
        if images != "none" and not 16 <= (whole_number(images) or 0) <= 2048:
            raise UserError(f"images={images} must be none, or the longer side of a picture in pixels, between 16 and 2048.")
        names = tuple(name.strip() for name in cameras.split(","))
        if not all(names) or len(set(names)) < len(names):
            raise UserError(f"cameras={cameras} must be different names separated by commas.")
        if names != ("default",) and images == "none":
            raise UserError(f"cameras={cameras} needs images=SIZE, the longer side of their pictures in pixels.")
        return Showing(states == "physics", every, None if images == "none" else int(images), () if names == ("default",) else names)


@dataclass(frozen=True)
class Recorded:
    """A finished recording."""

    folder: Path
    spec: SimSpec
    result: RecordingResult
    wall_clock_s: float


def record(
    sim: SimConfig,
    folder: Path,
    plan: RecordingPlan,
    *,
    policy: Literal["checkpoint", "expert", "random"],
    checkpoint: Checkpoint | None = None,
    expert: str | None = None,
    sample: bool = False,
    showing: Showing | None = None,
    video: VideoFormat = "mp4",
    resume: bool = False,
    command: str = "",
) -> Recorded:
    """Play and record the seeds of `plan`.

    Args:
        policy: the player: `checkpoint`'s policy, an expert, or random actions.
        expert: ``package.module:Attribute``; None: the task's known expert.
        sample: draw the policy's actions, and keep their log-probabilities; False: its mode.
        showing: what to record in addition to the observations; None: nothing.

    Raises:
        UserError: the task has no expert, state or pictures of the requested kind; the folder contains another recording.
        IncompatibleCheckpointError: the checkpoint does not fit the simulator.
        SimFault: the simulator failed and its configuration says to stop.
    """
    from embodied_rl.commands.evaluate import one_thread_acts

    started, showing = time.perf_counter(), showing or Showing()
    acting = [] if checkpoint is None or policy != "checkpoint" else [checkpoint.config.policy.name]
    target = (expert or expert_target(sim)) if policy == "expert" else None
    shown = instrumented(sim, expert=target, physics=showing.physics, image_size=showing.image_size, cameras=showing.cameras)
    videos = films_folder(folder) if video == "mp4" else None
    if videos is not None:
        shown = with_films(shown, videos)
    # Slots without an episode would start simulators in vain.
    slots = min(sim.num_slots, plan.num_episodes)
    with EnvManager.from_config(shown, EpisodeSeeds.given(0), num_slots=slots, autoreset=False) as manager:
        spec = plain_spec(manager.spec)
        if plan.only_success and not spec.reports_success:
            raise UserError(f"Task '{spec.task}' reports no success: only_success=true would keep no episode.")
        player, who = _player(policy, spec, sim, checkpoint=checkpoint, expert=target, sample=sample, noise_seed=plan.noise_seed)
        about: dict[str, Any] = {"plan": dataclasses.asdict(plan), "showing": dataclasses.asdict(showing), "machine": machine()}
        about |= {} if checkpoint is None else {"checkpoint": str(checkpoint.path)}
        info = RecordingInfo(
            spec=spec,
            sim=dataclasses.asdict(sim),
            policy=who,
            command=command,
            versions=versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            # Every episode began as in a fresh simulator; a replay needs the same.
            metadata={"reconfigure": True, **about},
        ).signed()
        films = None if videos is None else films_of(manager.spec, videos)
        writing = RecordingWriter(folder, info, video=video, resume=resume, gather_s=GATHER_S)
        with writing as writer, keep_films(films.folder) if films else nullcontext(), one_thread_acts(acting):
            result = _play(manager, player, writer, plan, num_groups=min(sim.num_groups, slots), films=films)
    return Recorded(folder, spec, result, time.perf_counter() - started)


def _play(
    manager: EnvManager, player: Player, writer: RecordingWriter, plan: RecordingPlan, *, num_groups: int, films: Films | None
) -> RecordingResult:
    successes = num_played = counted = 0
    with progress_bar(f"recording {manager.spec.task}", plan.num_episodes) as advance:

        def on_episode(episode: EpisodeSummary) -> None:
            nonlocal successes, num_played, counted
            successes, num_played = successes + episode.success_once, num_played + 1
            new, counted = recorder.num_recorded - counted, recorder.num_recorded
            advance(new, f"success {successes / num_played:.0%}" if manager.spec.reports_success else "")

        recorder = Recorder(manager, player, writer, plan, num_groups=num_groups, on_episode=on_episode, films=films)
        counted = recorder.num_recorded
        advance(counted)
        return recorder.run()


def _player(
    policy: str,
    spec: SimSpec,
    sim: SimConfig,
    *,
    checkpoint: Checkpoint | None,
    expert: str | None,
    sample: bool,
    noise_seed: int,
) -> tuple[Player, dict[str, Any]]:
    """Player, and its description in the recording."""
    from embodied_rl.commands.evaluate import acting, is_own_task, make_policy

    if policy == "expert":
        return ExpertPlayer(), {"kind": "expert", "target": expert}
    if policy == "random":
        if spec.action.kind == "text":
            raise UserError(f"Task '{spec.task}' needs text answers, which cannot be random. Give an expert: expert=….")
        return GeneratorPlayer(RandomGenerator(spec), spec.action, draws=True), {"kind": "random", "noise_seed": noise_seed}
    assert checkpoint is not None, "a policy comes from a checkpoint"
    if checkpoint.config.policy.name == "language":
        raise UserError("record cannot store the tokens of policy.name='language'. Use evaluate or render.")
    module = make_policy(checkpoint, spec, same_task=is_own_task(checkpoint, sim))
    layout = module.action_layout if module.translates else None
    version = int(checkpoint.state.get("iteration", 0))
    who: dict[str, Any] = {"kind": "checkpoint", "step": checkpoint.step, "version": version, "sha256": checkpoint.weights_sha256()}
    who |= {"sample": sample, **({"noise_seed": noise_seed} if sample else {})}
    if layout is not None:
        who |= layout.about_units()  # what was drawn is not a vector in [-1, 1]
    has_critic = getattr(module, "value_head", True) is not None
    return GeneratorPlayer(acting(module, version), spec.action, draws=sample, layout=layout, values=has_critic), who


@as_command
def main(argv: Sequence[str]) -> None:
    values, overrides = COMMAND.parse(argv)

    policy = _policy_of(values)
    with progress_bar(f"recording {values['num_episodes']} episodes of {values['checkpoint'] or values['sim']}: starting simulators"):
        showing = Showing.parse(values["states"], values["images"], values["cameras"])
        checkpoint, sim = _choose(values, overrides)
        plan = RecordingPlan(
            num_episodes=values["num_episodes"],
            first_seed=values["seed"] + (2**30 if values["held_out"] else 0),
            only_success=values["only_success"],
            max_seeds=values["max_seeds"],
            noise_seed=values["noise_seed"],
            snapshot_every=showing.snapshot_every,
        )
        recorded = record(
            sim,
            _folder(values, sim, policy),
            plan,
            policy=cast("Literal['checkpoint', 'expert', 'random']", policy),
            checkpoint=checkpoint,
            expert=values["expert"],
            sample=values["sample"],
            showing=showing,
            video=values["video"],
            resume=values["resume"],
            command=command_line("record", argv),
        )
    _tell(recorded, plan)


def _policy_of(values: Mapping[str, Any]) -> str:
    """Kind of player. Raises UserError for contradictory arguments."""
    if values["checkpoint"] is None and values["sim"] is None:
        raise UserError("Give checkpoint=… (its policy plays its simulator) or sim=… (an expert or random actions play it). See --help.")
    if values["domain"] is not None and values["checkpoint"] is None:
        raise UserError(f"domain={values['domain']} needs checkpoint=…: the folder of a run with several domains, or of its checkpoint.")
    policy = values["policy"] or ("expert" if values["expert"] is not None or values["checkpoint"] is None else "checkpoint")
    if policy == "checkpoint" and values["checkpoint"] is None:
        raise UserError("policy=checkpoint needs checkpoint=…: the folder of a run or of a checkpoint.")
    for name, needed in (("expert", "expert"), ("sample", "checkpoint")):
        if values[name] and policy != needed:
            raise UserError(f"{name}={str(values[name]).lower()} needs policy={needed}, got policy={policy}.")
    if policy != "random" and not values["sample"] and (unused := COMMAND.changed(values, "noise_seed")):
        raise UserError(f"{unused[0]} needs policy=random or sample=true: other players draw nothing.")
    if values["max_seeds"] is not None:
        if not values["only_success"]:
            raise UserError("max_seeds needs only_success=true. Otherwise each seed gives one recorded episode.")
        if values["max_seeds"] < values["num_episodes"]:
            raise UserError(f"max_seeds must be at least num_episodes ({values['num_episodes']}), got {values['max_seeds']}.")
    if values["resume"] and values["output"] is None:
        raise UserError("resume=true needs output=…: the folder of the recording to continue.")
    return policy


def _choose(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Checkpoint | None, SimConfig]:
    from embodied_rl.commands.evaluate import choose_sim, load_to_play, override_sim

    if values["checkpoint"] is None:
        return None, override_sim(load_sim_config(values["sim"]), overrides)

    trust = trusted_names(values["trust"])
    checkpoint = load_to_play(values["checkpoint"], domain=values["domain"], sim=values["sim"], overrides=overrides, trust=trust)
    return checkpoint, choose_sim(checkpoint, values["sim"], overrides)


def _folder(values: Mapping[str, Any], sim: SimConfig, policy: str) -> Path:
    """Folder of the recording. Raises UserError if it contains a recording that is not to be continued."""
    if values["output"] is None:
        return next_free(Path("recordings") / f"{sim.name}-{policy}")
    folder = Path(values["output"])
    if (folder / RECORDING_FILE).exists() and not values["resume"]:
        raise UserError(f"'{folder}' already has a recording. Continue it with resume=true, or choose another output=….")
    if folder.is_dir() and not values["resume"] and (other := sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))):
        raise UserError(f"'{folder}' holds other files ({brief(', '.join(other), 60)}). Choose another output=….")
    return folder


def _tell(recorded: Recorded, plan: RecordingPlan) -> None:
    """Print one line, and set the exit status: whether the recording is complete."""
    result = recorded.result
    rate = (
        f", {result.num_successful / result.num_played:.1%} of them successful"
        if result.num_played and recorded.spec.reports_success
        else ""
    )
    print(
        f"{recorded.folder}: {result.num_recorded} of {plan.num_episodes} episodes of {recorded.spec.task}. "
        f"Played now: {result.num_played}{rate}, {result.num_steps} steps, {recorded.wall_clock_s:.1f} s."
    )
    if result.missing:
        fail(
            f"The simulator failed {plan.max_retries + 1} times in {len(result.missing)} episodes, which were not recorded: seeds "
            f"{list(result.missing)}. resume=true tries them again.",
            1,
        )
    if not result.complete:
        fail(f"Only {result.num_recorded} of {plan.seed_limit} seeds succeeded. Increase max_seeds, and add resume=true.", 1)
