"""An engine of vLLM that sleeps: its weights wait in the host's memory, its key-value cache is gone, and requests in flight stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from embodied_rl.generation.tokens import TokenCache

Call = Callable[..., Any]
"""(name of a method of the engine, arguments …) → what it returns, once it has."""


class Sleeper:
    """Puts an engine to sleep and wakes it.

    On GPUs this frees the memory (vLLM's sleep level 1). Its build for processors keeps it: there sleeping only stops the engine, and
    `frees` is False.
    """

    def __init__(self, call: Call, *, on_processors: bool) -> None:
        self.frees = not on_processors
        self.device = torch.device("cpu" if on_processors else "cuda")
        self.asleep = False
        self._call, self._weights_are_here = call, True
        self._bytes = sum(call("collective_rpc", "embodied_cache_bytes"))

    @property
    def cache_bytes(self) -> int:
        """What keys and values take now, on all workers together."""
        return 0 if self.asleep and self.frees else self._bytes

    def sleep(self) -> int:
        """Sample nothing until `wake`; returns the bytes of keys and values that were freed. They are recomputed afterwards."""
        if self.asleep:
            return 0
        before = self.cache_bytes
        self._call("sleep", level=1, mode="keep")
        self.asleep, self._weights_are_here = True, False
        return before - self.cache_bytes

    def wake_weights(self) -> None:
        """New weights are about to be written over the old ones, which must be there for that."""
        if not self._weights_are_here:
            self._call("wake_up", tags=["weights"])
            self._weights_are_here = True

    def wake(self) -> None:
        """Go on where `sleep` stopped."""
        if self.asleep:
            self._call("wake_up", tags=["kv_cache"] if self._weights_are_here else None)
            self.asleep, self._weights_are_here = False, True


class Sleeps(TokenCache):
    """What a backend whose engine can sleep reports about it."""

    _sleeper: Sleeper

    @property
    def can_free_memory(self) -> bool:
        """Whether `release_memory` gives memory back: on GPUs."""
        return self._sleeper.frees

    @property
    def device(self) -> torch.device:
        """Where the model and its cache lie."""
        return self._sleeper.device

    @property
    def cache_bytes(self) -> int:
        """What keys and values take now."""
        return self._sleeper.cache_bytes
