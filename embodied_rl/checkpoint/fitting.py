"""Whether a checkpoint fits what it is to be used with: a simulator, a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from embodied_rl.checkpoint.card import show, show_action
from embodied_rl.checkpoint.folder import CONFIG_FILE, Checkpoint
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.types import SimSpec

if TYPE_CHECKING:
    from torch import Tensor


def check_compatible(checkpoint: Checkpoint, spec: SimSpec, *, same_task: bool = True) -> None:
    """Make sure that the checkpoint's policy fits a simulator.

    Args:
        checkpoint: what was loaded.
        spec: of the simulator at hand.
        same_task: also insist on the task's name; False for a deliberate transfer to a task with equal spaces.

    Raises:
        IncompatibleCheckpointError: naming every part that differs.
    """
    ours, theirs = checkpoint.spec, spec
    differences = []
    if same_task and ours.task != theirs.task:
        differences.append(f"task {ours.task} ≠ {theirs.task}")
    for key in sorted({*ours.observation, *theirs.observation}):
        mine, other = ours.observation.get(key), theirs.observation.get(key)
        if mine != other:
            differences.append(f"observation '{key}' {show(mine)} ≠ {show(other)}")
    if ours.action != theirs.action:
        shown = show_action(ours), show_action(theirs)
        differences.append(
            f"action {shown[0]} ≠ {shown[1]}" if shown[0] != shown[1] else f"bounds of single dimensions of the action {shown[0]}"
        )
    if differences:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' was made for another simulator: {'; '.join(differences)} (checkpoint ≠ simulator). "
            f"Its own is sim={checkpoint.config.sim.name}."
        )


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Make sure that the checkpoint's policy tensors have the names and shapes of `expected` (a policy's state_dict).

    Raises:
        IncompatibleCheckpointError: naming the tensors that are missing, unknown or of another shape.
    """
    found = checkpoint.policy
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    reshaped = [
        f"{name} {list(found[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    parts = [
        f"{label} {_first(names)}"
        for label, names in (("lacks", missing), ("has unknown", unknown), ("has another shape:", reshaped))
        if names
    ]
    if parts:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' does not fit the policy: it {'; it '.join(parts)}. "
            f"Build the policy from the checkpoint's own {CONFIG_FILE}, or use another checkpoint."
        )


def _first(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
