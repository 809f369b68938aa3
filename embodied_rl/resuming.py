"""Saves and loads the parts of a run's checkpoint beside its method's own state: the policy, whole or as an adapter, the optimizer of
several ranks, and the random generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied_rl.checkpoint import Checkpoint, CheckpointWriter, base_of, check_tensors
from embodied_rl.errors import IncompatibleCheckpointError
from embodied_rl.policies.base import TrainedModule, load_saved, saved_tensors

if TYPE_CHECKING:  # offline evaluation loads policies without simulators
    from embodied_rl.learning.ranks import RankExecutor
    from embodied_rl.methods.base import Method

_RANDOM = "random."


def load_policy(policy: TrainedModule, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into a policy that was built from its configuration.
    Raises IncompatibleCheckpointError: the tensors are another policy's, or the base model is missing or different."""
    if checkpoint.base is None:
        check_tensors(checkpoint, policy.state_dict())
        policy.load_state_dict(checkpoint.policy)
        return
    folder = policy.base_folder
    if folder is None:
        raise IncompatibleCheckpointError(
            f"Checkpoint '{checkpoint.path}' holds only an adapter, and the policy has none: policy.lora_rank differs. Use the value of "
            "the checkpoint's configuration."
        )
    base_of(checkpoint, str(folder))
    check_tensors(checkpoint, saved_tensors(policy))
    load_saved(policy, checkpoint.policy)


def save_method(method: Method, writer: CheckpointWriter, step: int) -> tuple[dict[str, Tensor], Callable[[], Path] | None]:
    """A method's tensors for the checkpoint of `step`, and a function that waits for its ranks' folder; None without ranks."""
    sharded = _parted(method)
    if sharded is None:
        return method.state_tensors(), None
    parts = sharded.save_parts(writer.parts_folder(step))
    with sharded.apart():
        return method.state_tensors(), parts


def _parted(method: Method) -> RankExecutor | None:
    """The ranks of a method, if they write their own parts of a checkpoint."""
    return method.sharded if method.sharded is not None and method.sharded.writes_parts else None


def load_method(method: Method, checkpoint: Checkpoint) -> None:
    """Load a method's tensors, on one process or any number of ranks, whatever number wrote them.
    Raises IncompatibleCheckpointError, KeyError, ValueError: they are another run's, or damaged."""
    others = (_RANDOM, "episode.")  # see `random_states` and `Trainer.save`
    tensors = {name: tensor for name, tensor in checkpoint.learner.items() if not name.startswith(others)}
    sharded = _parted(method)
    if checkpoint.sharded is None:
        method.load_state_tensors(tensors)
    elif sharded is None:
        from embodied_rl.learning.sharded_checkpoint import read_whole  # half a second of torch.distributed

        method.load_state_tensors({**tensors, **method.of_ranks(read_whole(checkpoint.sharded))})
    else:
        with sharded.apart():
            method.load_state_tensors(tensors)
        sharded.load_parts(checkpoint.sharded)


def random_states() -> dict[str, Tensor]:
    """States of torch's global generators, which some policies' losses draw from. Everything else draws from (seed, iteration) or (seed,
    group, member, turn) and needs no state; simulators begin episodes with known seeds."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return {_RANDOM + name: state for name, state in states.items()}


def set_random_states(tensors: Mapping[str, Tensor]) -> None:
    """Restore what `random_states` returned; generators that a checkpoint does not hold (of GPUs that were absent) stay unchanged."""
    states = {name.removeprefix(_RANDOM): tensor for name, tensor in tensors.items() if name.startswith(_RANDOM)}
    if not states:
        return
    torch.set_rng_state(states["torch"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if (own := states.get(f"cuda.{index}")) is not None:
            torch.cuda.set_rng_state(own, index)
