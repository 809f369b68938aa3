"""Generation as an actor of a Ray cluster: `GenerationWorker` holds the policies that act, and the token backends."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.config import TrainConfig
from embodied_rl.generation.base import ActedBatch, Generator
from embodied_rl.generation.tokens import TokenBackend
from embodied_rl.hybrid.weight_sync import DeltaSink, NamedTensors
from embodied_rl.hybrid.weight_transports import ray_tensors
from embodied_rl.learning.devices import compute_threads, resolve_device
from embodied_rl.methods.domain_playing import with_backend
from embodied_rl.methods.language_apart import ModelFiles, blank_backend, merged_there, write_model_files
from embodied_rl.roles.domain_player import RolesHere
from embodied_rl.roles.player import OwnGenerator, PlayingGenerator
from embodied_rl.roles.ray_calls import Outcome, outcome_of, value_of
from embodied_rl.types import ActionLayout, Observation, SimSpec

_ROLE = "GenerationWorker"


class GenerationWorker:
    """Policies that act for simulators elsewhere, and token backends that answer for language agents: one of them, or each domain's."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._acting: dict[str, OwnGenerator] = {}
        self._backends: dict[str, TokenBackend] = {}
        self._sink = DeltaSink()

    def begin(self, spec: Mapping[str, Any], domain: str) -> Outcome:
        """Build the policy for a simulator; the layout of its actions. `domain`: whose policy; empty: the run has one."""

        def build() -> ActionLayout:
            _one_thread()
            config = self._config.for_domain(domain) if domain else self._config
            acting = self._acting[domain] = OwnGenerator(config, SimSpec.from_dict(dict(spec)))
            return acting.layout

        return outcome_of(build)

    def begin_tokens(self, files: ModelFiles, kind: str) -> Outcome:
        """Build the token backend of a kind (`generation.backend`) for a model."""

        def build() -> None:
            _one_thread()
            with tempfile.TemporaryDirectory(prefix="embodied_rl_model_") as name:
                write_model_files(files, Path(name))
                config = with_backend(self._config, kind)
                backend = blank_backend(config, Path(name), resolve_device(config.hybrid.device))
                self._backends[kind] = merged_there(config, backend, Path(name))

        return outcome_of(build)

    def tokens(self, kind: str, what: str, *arguments: Any) -> Outcome:
        """What the method `what` of a token backend returns."""
        return outcome_of(lambda: getattr(self._backends[kind], what)(*arguments))

    def act(self, domain: str, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> Outcome:
        """See `Generator.send` and `Generator.recv`."""

        def answer() -> ActedBatch:
            generator = self._acting[domain].generator
            generator.send(slots, observation, noise)
            return generator.recv()

        return outcome_of(answer)

    def load(self, version: int, references: list[Any]) -> Outcome:
        """Act with the weights that a `RayPublisher` published."""

        def take() -> None:
            tensors: NamedTensors = ray_tensors(references)
            if self._config.hybrid.publish == "changed":
                tensors = self._sink.take(version, tensors).items()
            if self._config.domains:
                RolesHere(self._backends.values(), self._acting).load(version, tensors)
            elif self._backends:
                (backend,) = self._backends.values()
                backend.load_weights(version, tensors)
            else:
                self._acting[""].load(version, tensors)

        return outcome_of(take)


class RayGenerator(Generator):
    """A `GenerationWorker` as the collector sees it. Implements `PlayingGenerator`."""

    def __init__(self, worker: Any, spec: SimSpec, domain: str = "") -> None:
        """`domain`: whose policy; empty: the run has one."""
        self._worker, self._domain = worker, domain
        self.generator = self
        self.layout: ActionLayout = value_of(worker.begin.remote(spec.to_dict(), domain), _ROLE)
        self.version = 0
        self._asked: deque[Any] = deque()

    def send(self, slots: np.ndarray, observation: Observation, noise: np.ndarray | None) -> None:
        """See `Generator.send`; what is sent is copied into the object store."""
        self._asked.append(self._worker.act.remote(self._domain, slots, observation, noise))

    def recv(self) -> ActedBatch:
        """See `Generator.recv`."""
        acted: ActedBatch = value_of(self._asked.popleft(), _ROLE)
        return acted

    def load(self, version: int, tensors: list[Any]) -> None:
        """See `PlayingGenerator.load`; `tensors` are references of a `RayPublisher`."""
        value_of(self._worker.load.remote(version, tensors), _ROLE)
        self.version = version

    def publish(self, version: int) -> None:
        raise RuntimeError("Weights come from the trainer: see load.")


class RayRoles:
    """The weights of all roles go to one `GenerationWorker`, whose players know their version here. Implements `LoadsWeights`."""

    def __init__(self, worker: Any, backends: Iterable[Any], acting: Mapping[str, PlayingGenerator]) -> None:
        """`backends`: `RayTokens`; `acting`: `RayGenerator` of each domain."""
        self._worker = worker
        self._players: list[Any] = [*backends, *acting.values()]

    def load(self, version: int, tensors: list[Any]) -> None:
        """See `LoadsWeights.load`; `tensors` are references of a `RayPublisher`."""
        value_of(self._worker.load.remote(version, tensors), _ROLE)
        for player in self._players:
            player.version = version


def _one_thread() -> None:
    """Of an actor that generates, for as long as it lives."""
    compute_threads(1).__enter__()
