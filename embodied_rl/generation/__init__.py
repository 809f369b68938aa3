"""Backends that turn observations into actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodied_rl.config import GenerationConfig
    from embodied_rl.generation.base import Generator
    from embodied_rl.policies.base import Policy


def make_generator(config: GenerationConfig, policy: Policy) -> Generator:
    """Make the backend that the configuration names."""
    if config.backend == "random":
        from embodied_rl.generation.random_backend import RandomGenerator

        return RandomGenerator(policy.spec)
    from embodied_rl.generation.torch_backend import TorchGenerator

    return TorchGenerator(policy)
