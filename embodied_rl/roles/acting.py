"""What acts in the process of a rollout worker: its own policies and token backends, into which published weights are loaded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from embodied_rl.config import TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.learning.devices import resolve_device
from embodied_rl.methods.building import Acting
from embodied_rl.methods.language_player import ModelFiles, blank_backend, blank_policy, read_model, write_model_files
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import TrainedModule, saved_tensors
from embodied_rl.policies.build import build_policy
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.roles.device_lease import DeviceLease
from embodied_rl.roles.multiplexed_tokens import start_token_hosts
from embodied_rl.types import ActionLayout, SimSpec

Weights = Any
"""What is published: (name, tensor) pairs, or references to them in Ray's object store."""


class OwnPolicy:
    """A robot's policy in this process, with its generator."""

    def __init__(self, config: TrainConfig, spec: SimSpec) -> None:
        torch.manual_seed(config.seed)
        self.policy = build_policy(config.policy, spec)
        self.policy.eval()
        self.generator = make_generator(config.generation, self.policy)
        self.layout = self.policy.action_layout
        # As in one process: what acts as a copy says where (`ModuleActor`), a large policy acts where it is.
        self.policy.to(resolve_device(config.hybrid.device))

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Act with the policy's state as `version` from now on: whole, or as `TrainedModule.unmerged_weights` gives it."""
        _take(self.policy, tensors)
        self.generator.publish(version)


class WorkerActing(Acting):
    """What acts for a rollout worker; weights come by name, as `load` is given them."""

    lease: DeviceLease | None = None
    """Hosts that are lent to training, where it takes some over (placement multiplexed)."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.files: ModelFiles = {}
        self.folder = Path()

    @contextlib.contextmanager
    def reading(self, files: ModelFiles) -> Iterator[None]:
        """Inside, the language model's files lie in a folder; none where there is none. All of them are read when this is over: a process
        that is killed leaves nothing behind. Raises UserError where it is no model's folder."""
        if not files:
            yield
            return
        with tempfile.TemporaryDirectory(prefix="embodied_rl_model_") as name:
            self.files, self.folder = files, Path(name)
            write_model_files(files, self.folder)
            self.speaking = read_model(self.config.language, self.folder)
            yield

    def load(self, version: int, tensors: Weights) -> None:
        """Act with these weights as `version` from now on."""
        raise NotImplementedError


class LoadedActing(WorkerActing):
    """In this process; token backends of a multiplexed run are hosts in separate processes."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.policies: dict[str, OwnPolicy] = {}
        self.backends: dict[str, TokenBackend] = {}
        self._merging: LanguagePolicy | None = None
        """Holds what was loaded so far, where an adapter comes apart (the first time with its base model) and is merged here."""

    def policy(self, name: str, config: TrainConfig, spec: SimSpec) -> OwnPolicy:
        """The policy `name`, built for the first simulator that asks for it."""
        if name not in self.policies:
            self.policies[name] = OwnPolicy(config, spec)
        return self.policies[name]

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        own = self.policy(stream.policy, stream.config, stream.spec)
        return own.generator, own.layout

    def tokens(self, name: str, config: TrainConfig) -> TokenBackend:
        """See `Acting.tokens`. Raises UserError as `blank_backend` does."""
        backend: TokenBackend
        if self.lease is not None:
            backend = start_token_hosts(config, self.files, self.lease)
        else:
            backend = blank_backend(config, self.folder, resolve_device(config.hybrid.device))
        if config.hybrid.publish == "adapter" and self._merging is None:
            self._merging = blank_policy(config.language, self.folder)
        self.backends[name] = backend
        return backend

    def weights_go_through(self, name: str, backend: TokenBackend) -> None:
        self.backends[name] = backend

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `WorkerActing.load`: of a run with several policies their names stand before those of the tensors (`RunPolicies`)."""
        for name, named in _by_policy(tensors).items() if self.config.domains else [("", tensors)]:
            if name in self.policies:
                self.policies[name].load(version, named)
            else:
                if self._merging is not None:
                    _take(self._merging, named)
                for backend in self.backends.values():
                    backend.load_weights(version, named if self._merging is None else self._merging.named_weights())


def _take(policy: TrainedModule, tensors: Iterable[tuple[str, Any]]) -> None:
    """Load what `TrainedModule.unmerged_weights` gave. Raises ValueError where names differ."""
    missing, unknown = policy.load_state_dict(dict(tensors), strict=False)
    if differing := [*unknown, *(saved_tensors(policy).keys() & set(missing))]:
        raise ValueError(f"{differing[0]} is not a tensor of both the policy and what was published")


def _by_policy(tensors: Iterable[tuple[str, Any]]) -> dict[str, Iterable[tuple[str, Any]]]:
    """{policy: (name, tensor) of each}."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors:
        policy, _, own = name.partition("/")
        found.setdefault(policy, {})[own] = tensor
    return {policy: named.items() for policy, named in found.items()}
