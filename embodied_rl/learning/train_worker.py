"""A process with one rank of sharded training: ``python -m embodied_rl.learning.train_worker SOCKET``.

It executes rank 0's requests in order, until the connection ends.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from embodied_rl.config import AlgorithmConfig, AnyPolicyConfig, LanguageConfig, ShardingConfig
from embodied_rl.config.building import build, convert
from embodied_rl.distributed.channel import ChannelClosed, Link
from embodied_rl.distributed.processes import started
from embodied_rl.learning.ranks import Rank, join
from embodied_rl.policies.base import TrainedModule
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.language import build_language_policy
from embodied_rl.policies.q_ensemble import ActorWithCritics
from embodied_rl.types import SimSpec


def main(descriptor: int) -> None:
    """Serve until rank 0 has ended."""
    link, server = Link(socket.socket(fileno=descriptor)), RankServer()
    try:
        while True:
            answer = server.do(*link.recv())
            if answer is not None:
                link.send({}, answer)
    except ChannelClosed:
        # Rank 0 ended. Leaving the process group in order would wait for it.
        os._exit(0)
    except BaseException:
        # An exchange fails too if rank 0 was killed. The interpreter's own end would wait for a checkpoint that rank 0 no longer finishes.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class RankServer:
    """One rank: executes the requests of the `RankExecutor` in order. ``build`` comes first, then ``join``."""

    def __init__(self) -> None:
        self._join: Callable[[str], Rank] | None = None
        self._rank: Rank | None = None

    def do(self, message: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Execute a request. Returns the answer that rank 0 waits for (perhaps empty), or None if it does not wait."""
        what = message["do"]
        if what == "build":
            self._join = _built(message, tensors)
            started()
            return {}
        if what == "join":
            assert self._join is not None, "build comes first"
            self._rank, self._join = self._join(message["store"]), None
            return {}
        assert self._rank is not None, "join comes first"
        return self._rank.serve(message, tensors)


def _built(setup: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Callable[[str], Rank]:
    """Build the policy; return the function that joins the other ranks at a store."""
    torch.set_num_threads(setup["num_threads"])
    algorithm = build(AlgorithmConfig, setup["algorithm"], "algorithm")
    policy = build_described(setup, algorithm)
    policy.load_state_dict(dict(weights))

    def joined(store: str) -> Rank:
        sharding = build(ShardingConfig, setup["sharding"], "hybrid.sharding")
        device = torch.device("cuda", int(setup["device_index"])) if setup["device"] == "cuda" else torch.device("cpu")
        join(store, int(setup["rank"]), sharding.num_ranks, device, setup["timeout_s"])
        return Rank(policy, algorithm, sharding, device)

    return joined


def build_described(description: Mapping[str, Any], algorithm: AlgorithmConfig) -> TrainedModule:
    """Build the module of a description of `TrainedModule.describe`; its weights are to be replaced. Raises UserError."""
    config = convert(AnyPolicyConfig, description["policy"], "policy")
    if isinstance(config, LanguageConfig):
        language = build_language_policy(config, weights=False)
        # The real weights have shown whether the model keeps packed sequences apart.
        language.lay_out(description["layout"], description["apart"])
        return language
    policy = build_policy(config, SimSpec.from_dict(description["spec"]))
    if algorithm.off_policy is None:
        return policy
    return ActorWithCritics(policy, algorithm.off_policy)


if __name__ == "__main__":
    main(int(sys.argv[1]))
