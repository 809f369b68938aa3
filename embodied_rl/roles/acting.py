"""What acts in the process of a rollout worker: policies and token backends of its own, into which published weights are loaded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from embodied_rl.config import LanguageConfig, TrainConfig
from embodied_rl.generation import make_generator
from embodied_rl.generation.base import Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.learning.devices import resolve_device
from embodied_rl.methods.building import Acting
from embodied_rl.methods.language_apart import ModelFiles, blank_backend, merged_there, read_model, write_model_files
from embodied_rl.methods.streams import Stream
from embodied_rl.policies.base import layout_of
from embodied_rl.policies.build import build_policy
from embodied_rl.roles.device_lease import DeviceLease
from embodied_rl.roles.hosts import plan_here
from embodied_rl.roles.multiplexed_tokens import start_token_hosts
from embodied_rl.types import ActionLayout, SimSpec


class OwnPolicy:
    """A robot's policy in this process, with its generator."""

    def __init__(self, config: TrainConfig, spec: SimSpec) -> None:
        torch.manual_seed(config.seed)
        self.policy = build_policy(config.policy, spec)
        self.policy.eval()
        self.generator = make_generator(config.generation, self.policy)
        self.layout = layout_of(self.policy)
        # As in one process: small policies act as a copy on the CPU, large ones where they are.
        self.policy.to(resolve_device(config.hybrid.device))

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Act with the policy's whole state as `version` from now on."""
        self.policy.load_state_dict(dict(tensors))
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
        assert isinstance(self.config.policy, LanguageConfig), "the configuration was checked"
        with tempfile.TemporaryDirectory(prefix="embodied_rl_model_") as name:
            self.files, self.folder = files, Path(name)
            write_model_files(files, self.folder)
            self.speaking = read_model(self.config.policy, self.folder)
            yield

    def load(self, version: int, tensors: Any) -> None:
        """Act with these weights as `version` from now on."""
        raise NotImplementedError


class LoadedActing(WorkerActing):
    """In this process; token backends of a multiplexed run are hosts in separate processes."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.policies: dict[str, OwnPolicy] = {}
        self.backends: dict[str, TokenBackend] = {}

    def policy(self, name: str, config: TrainConfig, spec: SimSpec) -> OwnPolicy:
        """Build the policy `name` for a simulator."""
        own = self.policies[name] = OwnPolicy(config, spec)
        return own

    def generator(self, stream: Stream) -> tuple[Generator, ActionLayout]:
        """See `Acting.generator`."""
        own = self.policy(stream.policy, stream.config, stream.spec)
        return own.generator, own.layout

    def tokens(self, config: TrainConfig) -> TokenBackend:
        """See `Acting.tokens`. Raises UserError as `blank_backend` does."""
        if config.hybrid.placement.kind == "multiplexed":
            hosts = start_token_hosts(config, self.files, plan_here(config))
            self.lease, backend = hosts.lease, merged_there(config, hosts, self.folder)
        else:
            backend = merged_there(config, blank_backend(config, self.folder, resolve_device(config.hybrid.device)), self.folder)
        self.backends[config.generation.backend] = backend
        return backend

    def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `WorkerActing.load`: of a run with several policies their names stand before those of the tensors (`RunPolicies`)."""
        for name, named in _by_policy(tensors).items() if self.config.domains else [("", tensors)]:
            if name in self.policies:
                self.policies[name].load(version, named)
            else:
                for backend in self.backends.values():
                    backend.load_weights(version, named)


def _by_policy(tensors: Iterable[tuple[str, Any]]) -> dict[str, Iterable[tuple[str, Any]]]:
    """{policy: (name, tensor) of each}."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors:
        policy, _, own = name.partition("/")
        found.setdefault(policy, {})[own] = tensor
    return {policy: named.items() for policy, named in found.items()}
