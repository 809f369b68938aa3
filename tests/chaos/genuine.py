"""Small genuine files of every kind that the project reads, and how each is read through its public door."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_rl.checkpoint import load_checkpoint, save_checkpoint
from embodied_rl.episodes.formats import write_foreign
from embodied_rl.episodes.reader import open_recording
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.episodes.writer import RecordingWriter
from embodied_rl.files import sum_of_document, sums_of
from embodied_rl.learning.sharded_checkpoint import read_whole, save_sharded
from embodied_rl.reading import read_regular
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec, VariableSpec
from embodied_rl.video import mp4_as_gif, write_mp4
from tests.episodes.episode_toys import info_of, make_episode, moving_square
from tests.sample_run import SPEC, make_config

Content = dict[str, Any]
"""What was read: {name: array, or a plain value}."""
_MIXED = SimSpec(
    "toy",
    {"state": TensorSpec((3,)), "text": VariableSpec("text"), "note": VariableSpec("json"), "points": VariableSpec("array")},
    ActionSpec.continuous([-1, -2], [1, 2]),
    reports_success=True,
)
_SEEN = SimSpec(
    "toy", {"state": TensorSpec((3,)), "rgb": TensorSpec((32, 40, 3), "uint8")}, ActionSpec.continuous([-1, -2], [1, 2]), control_hz=10.0
)


@dataclass(frozen=True)
class Kind:
    """One kind of file."""

    name: str
    make: Callable[[Path], object]
    """Writes into a folder that is not there yet."""
    read: Callable[[Path], Content]
    """Through the public door. Raises UserError."""
    forged: Callable[[Path], Content] | None = None
    """The same after the checksums were made to fit, as a forger would; None: the kind has none, and anything may be read."""


def _episode(spec: SimSpec, seed: int, num_steps: int) -> RecordedEpisode:
    fields: dict[str, Any] = {"images": {"front": moving_square(num_steps + 1, 32, 40)}} if spec is _MIXED else {}
    return make_episode(spec, seed, num_steps, snapshots={1: b"snapshot %d" % seed}, log_prob=np.ones((num_steps, 1), np.float32), **fields)


def _record(folder: Path, spec: SimSpec, video: Any) -> None:
    with RecordingWriter(folder, info_of(spec), video=video) as writer:
        for seed in range(3):
            writer.add(_episode(spec, seed, seed + 3))


def _convert(name: str, **options: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        source = folder.with_name(f"{folder.name}-source")
        _record(source, _SEEN, "raw")
        with open_recording(source) as recording:
            write_foreign(recording, folder, name, **options)

    return make


def read_recording(folder: Path, verify: bool = True) -> Content:
    """Every episode, pictures decoded, one step, and columns as training reads them."""
    content: Content = {}
    with open_recording(folder, verify=verify) as recording:
        for number in range(len(recording)):
            recording.step(number, 0)
            episode = recording.episode(number)
            for name, rows in episode.columns().items():
                content[f"{number}.{name}"] = [np.asarray(row).copy() for row in rows] if rows.dtype == object else np.array(rows)
            content |= {f"{number}.snapshot.{step}": data for step, data in episode.snapshots.items()}
            content[f"{number}.block"] = recording.read_many([number], ("action", "reward")).columns["action"].copy()
    return content


def _read_trusted(folder: Path) -> Content:
    return read_recording(folder, verify=False)


def _save(folder: Path) -> None:
    torch.manual_seed(0)
    tensors = {"actor.weight": torch.randn(3, 4), "actor.bias": torch.zeros(3)}
    learner = {"adam.step": torch.tensor(5), "rng": torch.get_rng_state()[:64].clone()}
    state = {"iteration": 3, "best": -np.inf, "recent": [[True, 1.5, 7]]}
    config = make_config("runs/one")
    command = "python -m embodied_rl.train"
    save_checkpoint(
        folder, 100, policy=tensors, learner=learner, state=state, config=config, spec=SPEC, metrics={"eval/success": 0.5}, command=command
    )


def read_checkpoint(folder: Path) -> Content:
    found = load_checkpoint(folder)
    content: Content = {f"policy.{name}": tensor.numpy() for name, tensor in found.policy.items()}
    content |= {f"learner.{name}": tensor.numpy() for name, tensor in found.learner.items()}
    return content | {"state": found.state, "config": found.config, "spec": found.spec, "step": found.step, "metrics": found.metrics}


def _read_forged_checkpoint(folder: Path) -> Content:
    for state in folder.glob("checkpoints/step_*/state.json"):
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            document = json.loads(read_regular(state))
            written = [path for path in state.parent.rglob("*") if path.is_file() and path.name not in ("state.json", "MODEL_CARD.md")]
            if isinstance(document.get("files"), dict):
                document["files"] |= sums_of(state.parent, written)
            document["sha256"] = sum_of_document(document)
            state.write_text(json.dumps(document))
    return read_checkpoint(folder)


def _read_forged_parts(folder: Path) -> Content:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        index = json.loads(read_regular(folder / "index.json"))
        for name in index["files"]:
            if (folder / name).is_file():
                index["files"][name] = sums_of(folder, [folder / name])[name]
        index["sha256"] = sum_of_document(index)
        (folder / "index.json").write_text(json.dumps(index))
    return read_parts(folder)


def _save_parts(folder: Path) -> None:
    torch.manual_seed(1)
    save_sharded(folder, {"weight": torch.randn(4, 3), "bias": torch.randn(3).half(), "step": torch.tensor(7)}, metadata={"step": 7})


def read_parts(folder: Path) -> Content:
    return {name: tensor.numpy() for name, tensor in read_whole(folder).items()}


def _film(folder: Path) -> None:
    folder.mkdir()
    write_mp4(folder / "film.mp4", list(moving_square(8, 32, 40)), fps=10)


def read_film(folder: Path) -> Content:
    return {"gif": mp4_as_gif(folder / "film.mp4")}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("native", lambda folder: _record(folder, _MIXED, "png"), read_recording, _read_trusted),
        Kind("filmed", lambda folder: _record(folder, _SEEN, "mp4"), read_recording, _read_trusted),
        Kind("maniskill", _convert("maniskill"), read_recording),
        Kind("robomimic", _convert("robomimic"), read_recording),
        Kind("minari", _convert("minari"), read_recording),
        Kind("lerobot", _convert("lerobot", video="mp4"), read_recording),
        Kind("checkpoint", _save, read_checkpoint, _read_forged_checkpoint),
        Kind("sharded", _save_parts, read_parts, _read_forged_parts),
        Kind("video", _film, read_film),
    )
}
"""{name: kind}"""


def same(found: Any, genuine: Any) -> bool:
    """Bit by bit, dtype included."""
    if isinstance(genuine, list):
        return isinstance(found, list) and len(found) == len(genuine) and all(map(same, found, genuine))
    if isinstance(genuine, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == genuine.dtype and bool(np.array_equal(found, genuine))
    return bool(found == genuine)
