"""Fitted-Q evaluation: ours and d3rlpy's, on the same recorded steps, for the same target policies, against the true value.

The targets are the modes of checkpoints (d3rlpy evaluates deterministic policies alone), the value is discounted and goes on where
episodes were cut. d3rlpy wants a gymnasium of its own and so an interpreter of its own, which needs no part of this package:

    python -m venv peer && peer/bin/pip install d3rlpy==2.8.1
    python benchmarks/fqe_d3rlpy.py runs/offline_calibration --python peer/bin/python

The folder is that of `offline_calibration.py`, whose checkpoints are used (and trained where they are missing).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

GAMMA = 0.97
PEER_STEPS = 10_000
PEER_FITS = 3
"""d3rlpy gives no interval: its is that of the mean of so many fits from different seeds, with the spread of the first states' values."""
STUDENT_T = 4.303
"""Of two degrees of freedom, 97.5%."""
SEEN = {"cartpole": (2_000, 4_000, 6_000), "pendulum": (28_000, 52_000, 76_000)}
"""{task: environment steps of the targets} whose true values were known when our number of regression steps was raised from 2,000 to
6,000: they flatter us. d3rlpy's settings were fixed before the first run and never touched."""
HELD_OUT = {"cartpole": (10_000, 12_000), "pendulum": (16_000, 40_000, 64_000), "reacher": (24_000, 72_000, 104_000)}
"""Targets, judged from recordings of other seeds, that no setting was chosen by: those to compare by. Reacher is a robot's arm."""
TARGETS = {"held_out": (HELD_OUT, 7_000_000), "seen": (SEEN, 1_000_000)}
"""{choice: (targets, first seed of the recording)}."""


# ---- the peer's side: numpy, torch and d3rlpy alone ---------------------------------------------------------------------


def peer(file: Path) -> None:
    """Fit d3rlpy's FQE to the steps in `file`, for each seed; print the first states' mean value and its 95% interval as JSON."""
    import warnings

    warnings.filterwarnings("ignore")
    import d3rlpy
    import torch
    from d3rlpy.models.encoders import VectorEncoderFactory
    from d3rlpy.ope import FQE, DiscreteFQE, FQEConfig

    torch.set_num_threads(1)
    data = np.load(file)
    discrete, first = bool(data["discrete"]), data["first"]

    class Mode:
        """The target, as d3rlpy asks for it."""

        def predict_best_action(self, x: torch.Tensor) -> torch.Tensor:
            """[B] choices, or [B, A] vectors."""
            observation = x * torch.from_numpy(data["std"]) + torch.from_numpy(data["centre"])
            hidden = (observation - torch.from_numpy(data["mean"])) * torch.from_numpy(data["inverse_std"])
            hidden = hidden.clamp(-float(data["clip"]), float(data["clip"]))
            for layer in range(int(data["layers"])):
                hidden = hidden @ torch.from_numpy(data[f"weight{layer}"]).T + torch.from_numpy(data[f"bias{layer}"])
                hidden = torch.tanh(hidden) if layer < int(data["layers"]) - 1 else hidden
            return hidden.argmax(dim=1) if discrete else hidden.clamp(-1, 1)

    class Target:
        impl = Mode()

    dataset = d3rlpy.dataset.MDPDataset(
        data["observations"], data["actions"], data["rewards"], data["terminals"], data["timeouts"],
        action_space=d3rlpy.ActionSpace.DISCRETE if discrete else d3rlpy.ActionSpace.CONTINUOUS, action_size=int(data["action_size"]),
    )  # fmt: skip
    quick_batches(dataset)
    config = FQEConfig(
        learning_rate=1e-3,
        encoder_factory=VectorEncoderFactory([64, 64]),
        batch_size=256,
        gamma=float(data["gamma"]),
        target_update_interval=50,
    )
    values = np.zeros((PEER_FITS, len(first)))
    for seed in range(PEER_FITS):
        d3rlpy.seed(seed)
        fqe = (DiscreteFQE if discrete else FQE)(Target(), config)
        silent = d3rlpy.logging.NoopAdapterFactory()
        fqe.fit(dataset, n_steps=PEER_STEPS, n_steps_per_epoch=PEER_STEPS, show_progress=False, logger_adapter=silent)
        values[seed] = fqe.predict_value(first, Mode().predict_best_action(torch.from_numpy(first)).numpy())
    between_fits, between_states = values.mean(axis=1).var(ddof=1) / PEER_FITS, values.mean(axis=0).var(ddof=1) / len(first)
    half, mean = STUDENT_T * float(np.sqrt(between_fits + between_states)), float(values.mean())
    print(json.dumps({"value": mean, "low": mean - half, "high": mean + half, "version": d3rlpy.__version__}))


def quick_batches(dataset: Any) -> None:
    """The dataset gives the batches that it would give, for the same draws of numpy's generator, from arrays of all its transitions.

    d3rlpy gathers a batch transition by transition, which is most of a fit's time.
    """
    from d3rlpy.dataset import TransitionMiniBatch

    buffer = dataset.buffer
    picked = [dataset.transition_picker(*buffer[index]) for index in range(buffer.transition_count)]
    whole = vars(TransitionMiniBatch.from_transitions(picked)) | {"transitions": []}

    def batch(size: int) -> TransitionMiniBatch:
        rows = np.random.randint(len(picked), size=size)  # noqa: NPY002  # the generator that d3rlpy seeds and draws from
        return TransitionMiniBatch(**{name: part[rows] if len(part) else part for name, part in whole.items()})

    dataset.sample_transition_batch = batch


# ---- ours ---------------------------------------------------------------------------------------------------------------


def write_for_peer(path: Path, episodes: Sequence[Any], checkpoint: Any) -> None:
    """The recorded steps and the target's network as plain arrays."""
    from torch import nn

    from embodied_rl.policies.actor_critic import build_policy

    policy = build_policy(checkpoint.config.policy, checkpoint.spec)
    policy.load_state_dict(checkpoint.policy)
    layers = [layer for layer in policy.actor if isinstance(layer, nn.Linear)]
    size = layers[0].in_features
    mean, inverse_std = (np.zeros(size, np.float32), np.ones(size, np.float32))
    if policy.normalizer is not None:
        mean, inverse_std = (part.numpy() for part in policy.normalizer.scale())
    action = checkpoint.spec.action
    observations = np.concatenate([episode.observation["state"][:-1] for episode in episodes]).astype(np.float32)
    # Both sides regress on standardised observations; the target undoes it.
    centre, std = observations.mean(axis=0), observations.std(axis=0)
    arrays: dict[str, Any] = {
        "discrete": action.kind == "discrete",
        "action_size": action.num_actions or action.dim,
        "gamma": GAMMA,
        "layers": len(layers),
        "mean": mean,
        "inverse_std": inverse_std,
        "clip": 1e9 if policy.normalizer is None else policy.normalizer.clip,
        "centre": centre,
        "std": std,
        "observations": (observations - centre) / std,
        "actions": np.concatenate([action.normalise(episode.action) for episode in episodes]),
        "rewards": np.concatenate([episode.reward for episode in episodes])[:, None],
        "terminals": np.concatenate([episode.terminated for episode in episodes]).astype(np.float32),
        "timeouts": np.concatenate([episode.truncated & ~episode.terminated for episode in episodes]).astype(np.float32),
        "first": (np.stack([episode.observation["state"][0] for episode in episodes]).astype(np.float32) - centre) / std,
    }
    for index, layer in enumerate(layers):
        arrays |= {f"weight{index}": layer.weight.detach().numpy(), f"bias{index}": layer.bias.detach().numpy()}
    np.savez(path, **arrays)


def true_value(checkpoint: Any, env_id: str, num_episodes: int) -> tuple[float, float]:
    """(mean, standard error) of the discounted return of the checkpoint's mode in episodes long enough for the discount to vanish."""
    import gymnasium

    from embodied_rl.commands.evaluate import make_generator

    generator, action = make_generator(checkpoint, checkpoint.spec), checkpoint.spec.action
    limit = int(np.log(1e-4) / np.log(GAMMA))
    envs = [gymnasium.make(env_id, max_episode_steps=limit) for _ in range(num_episodes)]
    observation = np.stack([env.reset(seed=20_000_000 + index)[0] for index, env in enumerate(envs)]).astype(np.float32)
    returns, alive = np.zeros(num_episodes), np.arange(num_episodes)
    for step in range(limit):
        generator.send(alive, {"state": observation[alive]}, None)
        taken, going = action.denormalise(generator.recv().action), []
        for row, index in enumerate(alive):
            observation[index], reward, terminated, _, _ = envs[index].step(int(taken[row, 0]) if action.kind == "discrete" else taken[row])
            returns[index] += GAMMA**step * float(reward)
            if not terminated:
                going.append(index)
        alive = np.array(going, int)
        if not going:
            break
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(num_episodes))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/offline_calibration"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has d3rlpy, numpy and torch")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="+", choices=sorted(HELD_OUT), default=sorted(HELD_OUT))
    parser.add_argument("--targets", choices=sorted(TARGETS), default="held_out", help="see SEEN and HELD_OUT in this file")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--true-episodes", type=int, default=1000)
    chosen = parser.parse_args(argv)
    if chosen.peer is not None:
        peer(chosen.peer)
        return
    found = subprocess.run([chosen.python, "-c", "import d3rlpy"], capture_output=True, text=True)
    if found.returncode != 0:
        print(
            f"skipped: {chosen.python} has no d3rlpy ({(found.stderr.strip().splitlines() or ['?'])[-1]}); --python names one that has it"
        )
        return
    _compare(chosen)


def _compare(chosen: argparse.Namespace) -> None:
    import torch
    from offline_calibration import TASKS, MemoryRecording, checkpoints_of, play
    from tables import provenance, text_table

    from embodied_rl.episodes.assessment import Assumptions
    from embodied_rl.episodes.recording import RecordingInfo
    from embodied_rl.evaluation.offline_study import OfflineSettings, study_recording

    torch.set_num_threads(1)
    cases, first_seed = TARGETS[chosen.targets]
    rows, errors = [], []
    for name in [name for name in chosen.tasks if name in cases]:
        task = TASKS[name]
        checkpoints = checkpoints_of(task, chosen.folder / name)
        behaviour = checkpoints[task.behaviour]
        _, episodes = play(behaviour, task, chosen.episodes, first_seed, keep=True)
        info = RecordingInfo(behaviour.spec, {"max_episode_steps": task.limit}, {"kind": "checkpoint", "sample": True})
        settings = OfflineSettings(given=Assumptions(gamma=GAMMA), estimators=("fqe",), target="mode", truncation="bootstrap")
        for step in cases[name]:
            checkpoint = checkpoints[step]
            truth, error = true_value(checkpoint, task.env_id, chosen.true_episodes)
            study = study_recording(MemoryRecording(info, episodes), [(str(step), checkpoint)], settings)
            ours = study.policies[0].estimate("fqe")
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "steps.npz"
                write_for_peer(file, episodes, checkpoint)
                printed = subprocess.run([chosen.python, __file__, "--peer", str(file)], capture_output=True, text=True, check=True).stdout
            theirs = json.loads(printed.splitlines()[-1])
            if ours.value is None or ours.bootstrap is None:
                rows.append((f"{task.name}, step {step}", f"{truth:.2f} ± {error:.2f}", "refused", ours.refused, *_told(theirs), "no"))
                continue
            low, high = ours.bootstrap.low, ours.bootstrap.high
            agree = max(low, theirs["low"]) <= min(high, theirs["high"])
            shown = (f"{ours.value:.2f}", f"{low:.2f} to {high:.2f}")
            rows.append((f"{task.name}, step {step}", f"{truth:.2f} ± {error:.2f}", *shown, *_told(theirs), "yes" if agree else "no"))
            errors.append((abs(ours.value - truth) / abs(truth), abs(theirs["value"] - truth) / abs(truth)))
            print(rows[-1], flush=True)
    print(provenance())
    print(text_table(("target", "truth ± s.e.", "ours", "95%", f"d3rlpy {theirs['version']}", "95%", "intervals meet"), rows))
    met = sum(row[-1] == "yes" for row in rows)
    mine, peers = (100 * float(np.mean(column)) for column in zip(*errors, strict=True))
    of = f"{len(errors)} {chosen.targets} targets"
    print(f"figure: the two intervals meet for {met} of {len(rows)} {chosen.targets} targets")
    print(f"figure: mean error of fitted-Q evaluation relative to the truth: ours {mine:.1f}%, d3rlpy {peers:.1f}% ({of})")


def _told(theirs: dict[str, Any]) -> tuple[str, str]:
    return f"{theirs['value']:.2f}", f"{theirs['low']:.2f} to {theirs['high']:.2f}"


if __name__ == "__main__":
    main()
