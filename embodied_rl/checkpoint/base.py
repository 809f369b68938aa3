"""Checkpoints of adapters: only what was trained, with a note of the model that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_rl.checkpoint.checksums import fault_of, sums_of
from embodied_rl.errors import IncompatibleCheckpointError

if TYPE_CHECKING:
    from embodied_rl.checkpoint.folder import Checkpoint

_WEIGHTS = ("*.safetensors", "config.json")
"""Of a model's folder: what makes it the model that it is."""


def note_base(folder: Path | str, run_dir: Path | str) -> dict[str, Any]:
    """What a checkpoint keeps about the model of its adapter: the folder's path, as seen from the run where it lies within, and the
    SHA-256 of its weights (about a second for two gigabytes)."""
    place, run = Path(folder).resolve(), Path(run_dir).resolve()
    files = [path for pattern in _WEIGHTS for path in place.glob(pattern)]
    within = place.is_relative_to(run)
    return {"path": str(place.relative_to(run) if within else place), "within_run": within, "files": sums_of(place, files)}


def base_of(checkpoint: Checkpoint, given: str | None = None, *, verify: bool = True) -> Path | None:
    """The folder of the model that a checkpoint's adapter belongs to; None where the checkpoint is whole.

    Args:
        given: the folder that the configuration names; the noted one where there is none.
        verify: read the files, and compare them with those that were trained on.

    Raises:
        IncompatibleCheckpointError: the model is not there, or is another one than that which was trained on.
    """
    if checkpoint.base is None:
        return None
    base: Mapping[str, Any] = checkpoint.base
    noted = checkpoint.run_dir / base["path"] if base["within_run"] else Path(base["path"])
    folder = noted if given is None or not Path(given).is_dir() else Path(given)
    who = f"Checkpoint '{checkpoint.path}' holds only an adapter"
    if not folder.is_dir():
        raise IncompatibleCheckpointError(
            f"{who}, and its base model is not there: '{folder}'. Put that folder back (a link will do), or resume with policy.model "
            "(policy.path of a vision-language-action model) naming where it lies now."
        )
    for name, told in base["files"].items() if verify else ():
        if (fault := fault_of(folder / name, told)) is not None:
            raise IncompatibleCheckpointError(
                f"{who}, and '{folder}' is not the base model that it was trained on: of '{name}', {fault}. Give the folder of that model."
            )
    return folder
