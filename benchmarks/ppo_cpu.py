"""PPO or SAC end to end on a CPU, steps per second: ours, stable-baselines3 (Dummy and Subproc), CleanRL's published structure, and others.

Same task, same hyper-parameters: HalfCheetah-v5, 8 environments x 256 steps, MLP 64x64, 10 epochs, minibatches of 256; no side
normalises observations or rewards, all normalise advantages by minibatch. All contenders are alive, one at a time trains, and
they take turns within each round; medians over rounds. Threads are each side's own default; stable-baselines3 takes part a
third time with one thread of torch, which small networks like better where the cores are busy.

With `--task sac_halfcheetah` or `sac_pendulum`: soft actor-critic, one environment, one update a step in turns of 16, MLPs 256x256.

    python benchmarks/ppo_cpu.py
    python benchmarks/ppo_cpu.py --contenders all                                     # the peers, each in an environment of its own
    python benchmarks/ppo_cpu.py --task pixel_reach_84                                # a CNN, ours against stable-baselines3's
    python benchmarks/ppo_cpu.py --task sac_halfcheetah --iterations 20               # soft actor-critic
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path

import peer_environments
from gate import PHASES, GatedProcess, Segment
from peer_environments import MissingPeerError
from ppo_contenders import (
    EAGER,
    NAMES,
    OURS,
    OUTSIDE,
    PIXEL_NAMES,
    SAC_NAMES,
    SB3_DUMMY,
    SB3_DUMMY_ONE,
    SB3_SUBPROC,
    command_of,
    run_contender,
)
from tables import provenance, text_table

from embodied_rl.compose import load_train_config

EQUAL = (
    "algorithm.normalize_reward=false",
    "algorithm.normalize_advantage=minibatch",
    "algorithm.lr_schedule=constant",
    "algorithm.target_kl=null",
    "evaluation.every_steps=null",
    "checkpoint.every_steps=null",
    "logger=quiet",
)
"""What makes an experiment something that all sides can do alike."""
NATURE = ("policy.cnn_channels=[32,64,64]", "policy.cnn_kernels=[8,4,3]", "policy.cnn_strides=[4,2,1]", "policy.hidden_sizes=[512]")
"""The network of Mnih et al. (2015), which is stable-baselines3's own."""
SAC = (
    *("algorithm=sac", "policy.hidden_sizes=[256,256]", "policy.activation=relu", "policy.normalize_observation=false", "sim.num_slots=1"),
    *("algorithm.rollout_steps=16", "algorithm.off_policy.warmup_steps=256"),
)
TASKS = {
    "halfcheetah": ("experiment=halfcheetah", "policy.normalize_observation=false"),
    "sac_halfcheetah": ("sim=halfcheetah", *SAC),
    "sac_pendulum": ("sim=pendulum", *SAC),
    "pixel_reach": ("experiment=pixel_reach",),
    "pixel_reach_84": ("experiment=pixel_reach", "sim.kwargs.image_size=84", *NATURE),
}
"""{name: what is trained, beside `EQUAL`}."""
BUSY = 1.5
"""Where one thread makes stable-baselines3 so much faster than its default, something else was using the cores."""


def measure(
    names: list[str], overrides: list[str], *, rounds: int, iterations: int, warmup: int
) -> tuple[dict[str, list[Segment]], dict[str, dict]]:
    """{contender: its segments, one per round} and {contender: what it said about itself}."""
    script = str(Path(__file__).resolve())
    started: list[GatedProcess] = []
    try:
        # One after another: ours measures how its slots are best stepped, and a neighbour that imports would take a core from it.
        for name in names:
            started.append(GatedProcess(name, command_of(name, script, overrides)))
            started[-1].wait_until_ready()
        for contender in started:
            contender.run(warmup)
        segments: dict[str, list[Segment]] = {name: [] for name in names}
        for _ in range(rounds):
            for contender in started:
                segments[contender.name].append(contender.run(iterations))
        return segments, {contender.name: contender.facts for contender in started}
    finally:
        for contender in started:
            contender.close()


def speeds(segments: list[Segment], steps_per_iteration: int) -> list[float]:
    """Environment steps per second of each segment, everything included."""
    return [steps_per_iteration * segment.iterations / segment.seconds for segment in segments]


def report(segments: dict[str, list[Segment]], facts: dict[str, dict], steps_per_iteration: int) -> str:
    """The table; phases are medians of seconds per iteration. For ours, environment is the time spent waiting for simulators."""
    medians = {name: statistics.median(speeds(own, steps_per_iteration)) for name, own in segments.items()}
    best = best_peer(medians)
    rows = []
    for name in sorted(segments, key=lambda name: -medians[name]):
        own = speeds(segments[name], steps_per_iteration)
        phases = [statistics.median(segment.phases[phase] / segment.iterations for segment in segments[name]) for phase in PHASES]
        said = [str(facts[name].get(key, "?")) for key in ("threads", "processes")]
        ratio = f"{medians[name] / best:.2f}x" if best else "-"
        rows.append([name, f"{medians[name]:.0f}", f"{min(own):.0f}", f"{max(own):.0f}", ratio, *(f"{s:.3f}" for s in phases), *said])
    header = ["end to end", "steps/s", "min", "max", "to best peer", "environment s", "policy s", "update s", "torch threads", "processes"]
    return text_table(header, rows)


def peers_in(names: Iterable[str]) -> list[str]:
    """Of these contenders, the libraries as they come: neither ours, nor a setting that is not a default, nor a script of our own."""
    return [name for name in (SB3_DUMMY, SB3_SUBPROC, *OUTSIDE) if name in names]


def best_peer(medians: dict[str, float]) -> float:
    """The fastest of the libraries as they come; 0 where none took part."""
    return max((medians[name] for name in peers_in(medians)), default=0.0)


def figure(segments: dict[str, list[Segment]], steps_per_iteration: int) -> str:
    """The figure we quote: the ratio of medians, with the range of the ratios within the rounds."""
    own = {name: speeds(parts, steps_per_iteration) for name, parts in segments.items()}
    medians = {name: statistics.median(values) for name, values in own.items()}
    if OURS not in own or not best_peer(medians):
        return "figure: none, for either ours or every peer did not take part"
    by_round = [ours / best_peer({name: own[name][i] for name in own}) for i, ours in enumerate(own[OURS])]
    short = {SB3_DUMMY: "SB3 Dummy", SB3_SUBPROC: "SB3 Subproc"}
    peers = ", ".join(short.get(name, name) for name in (SB3_DUMMY, SB3_SUBPROC, *(name for name in OUTSIDE if name in own)))
    ratio = medians[OURS] / best_peer(medians)
    return f"figure: ours / max({peers}) = {ratio:.2f}x (rounds {min(by_round):.2f} to {max(by_round):.2f})"


def beside(segments: dict[str, list[Segment]], steps_per_iteration: int) -> str:
    """The same ratio to whatever of stable-baselines3 was fastest, settings that are not its default included."""
    medians = {name: statistics.median(speeds(parts, steps_per_iteration)) for name, parts in segments.items()}
    theirs = [name for name in (SB3_DUMMY, SB3_SUBPROC, SB3_DUMMY_ONE) if name in medians]
    if OURS not in medians or not theirs:
        return "ours to stable-baselines3 at its best: not measured"
    fastest = max(theirs, key=lambda name: medians[name])
    text = f"ours to stable-baselines3 at its best ({fastest}): {medians[OURS] / medians[fastest]:.2f}x"
    if SB3_DUMMY in medians and medians[fastest] > BUSY * medians[SB3_DUMMY]:
        # OpenMP's threads wait by spinning: when one of two is kept from its core, the other burns time at every operation.
        text += f"\ncaution: that is {medians[fastest] / medians[SB3_DUMMY]:.1f} times its default, so the cores were busy; "
        text += "repeat this on a quiet machine"
    return text


def main() -> None:
    arguments = _arguments()
    if arguments.contender:
        run_contender(arguments.contender, arguments.overrides)
        return
    equal = [word for word in EQUAL if TASKS[arguments.task][-len(SAC) :] != SAC or not word.startswith("algorithm.")]
    overrides = [*TASKS[arguments.task], *equal, *arguments.overrides]
    config = load_train_config(overrides)
    off_policy, warmup = config.algorithm.off_policy, arguments.warmup
    names = arguments.only or list(SAC_NAMES if off_policy else NAMES if config.policy.encoder == "mlp" else PIXEL_NAMES)
    if off_policy:
        warmup += -(-off_policy.warmup_steps // config.steps_per_iteration)
    missing = []
    if arguments.peers:
        peer_environments.folder = Path(arguments.peers)
    for name in arguments.contenders:
        try:
            OUTSIDE[name].python()
            names.append(name)
        except MissingPeerError as error:
            missing.append(str(error))
    segments, facts = measure(names, overrides, rounds=arguments.rounds, iterations=arguments.iterations, warmup=warmup)
    print(provenance("mujoco", "stable-baselines3"))
    print(f"{config.sim.task}, {config.sim.num_slots} environments x {config.algorithm.rollout_steps} steps\n")
    print(report(segments, facts, config.steps_per_iteration))
    print(f"\nmedians of {arguments.rounds} interleaved rounds of {arguments.iterations} iterations; phases are seconds per iteration.")
    for line in missing:
        print(f"not installed: {line}")
    print("Ours steps one half of the environments while the policy acts for the other: its environment phase is waiting.")
    if SB3_DUMMY_ONE in segments:
        print(f"'{SB3_DUMMY_ONE}' is not a default, so the figure leaves it out; the line above the figure does not.")
    if EAGER in segments:
        print("CleanRL's structure: our own script; SyncVectorEnv, tensors as storage, eager updates, truncated episodes not bootstrapped.")
    for name, own in segments.items():
        per_step = [segment.processor_s / segment.iterations / config.steps_per_iteration for segment in own]
        print(f"processor time of {name}, without simulators in processes of their own: {1e3 * statistics.median(per_step):.2f} ms a step")
    print(beside(segments, config.steps_per_iteration))
    print(figure(segments, config.steps_per_iteration))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--task", choices=TASKS, default="halfcheetah", help="pixel_reach: 48 x 48; pixel_reach_84: 84 x 84, Mnih et al.'s network"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=5, help="iterations of each contender in each round")
    parser.add_argument("--warmup", type=int, default=2, help="iterations before the first round")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"contenders: {', '.join(NAMES)}")
    parser.add_argument(
        "--contenders",
        type=_outside,
        default=[],
        metavar="NAME,NAME",
        help=f"further ones, installed when missing, or all: {', '.join(OUTSIDE)}",
    )
    parser.add_argument("--peers", metavar="FOLDER", help="in which the further contenders' environments lie; ~/.cache/embodied_rl/peers")
    parser.add_argument("--contender", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="+", default=[], help="of the configuration, for all sides: algorithm.num_epochs=4")
    arguments = parser.parse_args()
    if arguments.contenders and arguments.task != "halfcheetah":
        parser.error("--contenders are for --task halfcheetah: they train networks over flat states")
    return arguments


def _outside(text: str) -> list[str]:
    names = list(OUTSIDE) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in OUTSIDE]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(OUTSIDE)}")
    return names


if __name__ == "__main__":
    main()
