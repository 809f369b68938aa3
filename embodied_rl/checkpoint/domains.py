"""One domain of a checkpoint of several, as the checkpoint of a separate run: to evaluate it, to film it, to record it."""

from __future__ import annotations

from dataclasses import replace

from embodied_rl.checkpoint.folder import Checkpoint
from embodied_rl.errors import IncompatibleCheckpointError, UserError, did_you_mean
from embodied_rl.types import SimSpec

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
    if domain not in domains:
        raise UserError(f"domain={domain} is not known.{did_you_mean(domain, domains)}")
    prefix = role_prefix(SHARED_ROLE if domains[domain].policy is None else domain)
    try:
        spec = SimSpec.from_dict(checkpoint.state["algorithm"]["specs"][domain])
    except (KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(f"Checkpoint '{checkpoint.path}' says nothing of domain '{domain}' ({error!r}).") from error
    tensors = {name.removeprefix(prefix): tensor for name, tensor in checkpoint.policy.items() if name.startswith(prefix)}
    return replace(checkpoint, config=checkpoint.config.for_domain(domain), policy=tensors, learner={}, spec=spec)
