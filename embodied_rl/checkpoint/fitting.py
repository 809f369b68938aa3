"""Whether a checkpoint, or one domain's part of it, fits what it is to be used with: a simulator, a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from embodied_rl.checkpoint.card import show, show_action
from embodied_rl.checkpoint.folder import CONFIG_FILE, Checkpoint
from embodied_rl.errors import IncompatibleCheckpointError, UserError, require_known
from embodied_rl.types import SimSpec

if TYPE_CHECKING:
    from torch import Tensor


SHARED_ROLE = "language"
"""Whose tensors the domains without a policy of their own share."""


def role_prefix(role: str) -> str:
    """What the names of a role's tensors begin with."""
    return f"roles.{role}."


def domain_part(checkpoint: Checkpoint, domain: str | None) -> Checkpoint:
    """The checkpoint of a run with one domain as it is; of a run with several, the part of one of them.

    Raises:
        UserError: a run with several domains and none is named, or one that there is not.
        IncompatibleCheckpointError: the checkpoint says nothing of the domain.
    """
    domains = checkpoint.config.domains
    if not domains:
        if domain is not None:
            raise UserError(f"domain={domain}: checkpoint '{checkpoint.path}' is of a run with one domain. Leave it out.")
        return checkpoint
    if domain is None:
        raise UserError(f"Checkpoint '{checkpoint.path}' is of a run with several domains: choose domain={' or domain='.join(domains)}.")
    require_known(domain, domains, f"domain={domain} is not known.")
    prefix = role_prefix(SHARED_ROLE if domains[domain].policy is None else domain)
    try:
        spec = SimSpec.from_dict(checkpoint.state["algorithm"]["specs"][domain])
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(f"Checkpoint '{checkpoint.path}' says nothing of domain '{domain}' ({error!r}).") from error
    tensors = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.policy.items() if name.startswith(prefix)}
    return replace(checkpoint, config=checkpoint.config.for_domain(domain), policy=tensors, learner={}, spec=spec)


def check_compatible(checkpoint: Checkpoint, spec: SimSpec, *, same_task: bool = True) -> None:
    """Make sure that the checkpoint's policy fits a simulator.

    Args:
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
    Raises IncompatibleCheckpointError: naming the tensors that are missing, unknown or of another shape."""
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
