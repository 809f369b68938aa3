"""Behaviour cloning, and DAgger: supervised learning of an expert's actions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.config import TrainConfig
from embodied_rl.episodes.dataset import EpisodeDataset, Transitions, split_episodes
from embodied_rl.errors import UserError
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.executors import Figures
from embodied_rl.learning.learner import make_learner, scheduled
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.recorded import CloningObjective, step_rows
from embodied_rl.methods.demonstrations import Demonstrations
from embodied_rl.methods.stored import StoredLearner, StoredSteps
from embodied_rl.methods.streams import Stream, prefixed
from embodied_rl.policies.base import Policy
from embodied_rl.sim.instrumented import EXPERT
from embodied_rl.types import Rollout

_LABELS = 17
"""Stream of randomness for the order of the expert's answers."""
_VALIDATION_ROWS = 4096
_BEST, _BEST_LOSS = "best.", "best_loss"
"""Names of state tensors."""


def mean_figures(taken: Sequence[Figures]) -> dict[str, float]:
    """The mean of each figure over the steps that have it."""
    names = dict.fromkeys(name for figures in taken for name in figures)
    return {name: float(np.mean([figures[name] for figures in taken if name in figures])) for name in names}


class ClonedSteps(StoredSteps):
    """Steps to imitate: recorded ones and, for DAgger, the expert's answers in states that the policy reached."""

    recorded: EpisodeDataset

    def __init__(self, stream: Stream, policy: Policy, run_dir: Path) -> None:
        super().__init__(stream, policy, run_dir)
        cloning, shown, action = self.config.algorithm.cloning, policy.spec.tensors, self.spec.action
        assert cloning is not None, "the configuration was checked"
        self.options = cloning
        self._observation: dict[str, np.ndarray] = {
            key: np.zeros((0, *shown[key].shape), np.float32) if key in shown else np.empty(0, object) for key in policy.observation_keys
        }
        self._action = np.zeros((0, action.dim), action.dtype)
        """The expert's answers [n, A], normalised, and the observations of them."""

    @property
    def num_steps(self) -> int:
        """Number of recorded and answered steps."""
        return self.recorded.num_steps + len(self._action)

    def read(self, demonstrations: Demonstrations) -> None:
        config, cloning = self.config, self.options
        options = demonstrations.options(action_margin=cloning.action_margin if self.policy.squashed else 0.0)
        episodes, held = split_episodes(demonstrations.load(), cloning.validation_share, seed=config.seed)

        def dataset(chosen: list) -> EpisodeDataset:
            return EpisodeDataset(chosen, self.spec, options, seed=self.seed, memory_mb=config.algorithm.recorded.memory_mb)

        self.recorded, self.validation = dataset(episodes), dataset(held) if held else None
        if self.validation is None and cloning.patience is not None and cloning.validation_share > 0:
            raise UserError("One recorded episode cannot be split: set algorithm.cloning.validation_share=0, or record more.")

    def add(self, rollout: Rollout) -> None:
        """Add the expert's answers."""
        asked = rollout.reward.size
        answers, margin = rollout.observation[EXPERT].reshape(asked, -1), self.recorded.options.action_margin
        self._action = np.concatenate([self._action, self.policy.spec.action.normalise(answers, margin=margin)])
        for key, part in self._observation.items():
            seen = rollout.observation[key].reshape(asked, *part.shape[1:])
            self._observation[key] = np.concatenate([part.astype(seen.dtype), seen])

    def epoch(self, number: int, size: int) -> Iterator[Transitions]:
        """Every step once; each minibatch mixes recorded and answered steps as the whole does."""
        answered, recorded = len(self._action), self.recorded.num_steps
        if not answered:
            yield from self.recorded.epoch(number, size)
            return
        parts = -(-(answered + recorded) // size)
        order = np.random.default_rng(np.random.SeedSequence([self.seed, number, _LABELS])).permutation(answered)
        fresh = (self._answered(rows) for rows in np.array_split(order, parts))
        for one, other in itertools.zip_longest(self.recorded.epoch(number, -(-recorded // parts)), fresh):
            yield Transitions.concatenate([part for part in (one, other) if part is not None and part.num_rows])

    def passes(self, epoch: int, size: int, number: int) -> Iterator[Transitions]:
        """`number` minibatches of an epoch: one pass over all steps, and further passes if it is shorter."""
        length = -(-self.num_steps // size)
        first = epoch * -(-number // length)
        return itertools.islice(itertools.chain.from_iterable(self.epoch(one, size) for one in itertools.count(first)), number)

    def _answered(self, rows: np.ndarray) -> Transitions:
        observation = {key: part[rows] for key, part in self._observation.items()}
        nothing, action, executed = np.zeros(len(rows), np.float32), self._action[rows], None
        if (chunk := self.recorded.options.window) is not None:
            action = np.pad(action[:, None], ((0, 0), (0, chunk - 1), (0, 0)))
            executed = np.arange(chunk) < np.ones((len(rows), 1))
        return Transitions(observation, action, nothing, nothing, observation, executed)

    def metrics(self) -> dict[str, float]:
        figures = super().metrics()
        return {**figures, "labels": figures.get("recorded_steps", 0.0) + len(self._action)} if self.options.dagger else figures

    def state_arrays(self) -> dict[str, np.ndarray]:
        if not self.options.dagger:
            return {}
        vectors = {f"answered.observation.{key}": part for key, part in self._observation.items() if part.dtype != object}
        return {**vectors, "answered.action": self._action}

    def load_state_arrays(self, state: Mapping[str, np.ndarray]) -> None:
        if self.options.dagger:
            vectors = [key for key, part in self._observation.items() if part.dtype != object]
            self._observation |= {key: state[f"answered.observation.{key}"] for key in vectors}
            self._action = state["answered.action"]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, with texts, which tensors cannot hold: each answer stores the number of its instruction in a list."""
        if not self.options.dagger:
            return {}
        known = {key: list(dict.fromkeys(part.tolist())) for key, part in self._observation.items() if part.dtype == object}
        texts = {key: {"known": texts, "number": [texts.index(one) for one in self._observation[key]]} for key, texts in known.items()}
        return {"texts": texts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, column in state.get("texts", {}).items():
            self._observation[key] = np.array([*column["known"], None], object)[column["number"]]


class CloningLearner(StoredLearner[ClonedSteps]):
    """Behaviour cloning (Pomerleau 1991): epochs over recorded episodes until the validation loss rises.

    One iteration is `num_epochs` epochs; steps are gradient steps. Normalisation statistics come from the recorded observations.
    Several policies share the minibatches of an epoch by weight.

    With `dagger`, DAgger (Ross, Gordon and Bagnell 2011, arXiv:1011.0686, algorithm 3.1 with β_1 = 1 and β_i = 0 after). The first
    iteration clones the recorded episodes. Each later one lets the policy play `rollout_steps` steps of every slot by its mode, adds the
    expert's action for each state, and learns from all of it. Steps are environment steps. If the policy acts in chunks, the expert
    answers only for the first step of each chunk, because its next actions depend on that one.
    """

    first = 1

    def __init__(self, config: TrainConfig, streams: Sequence[Stream], policy: Policy, run_dir: Path, ranks: RankHost | None) -> None:
        cloning = config.algorithm.cloning
        assert cloning is not None, "the configuration was checked"
        if cloning.loss == "mse" and policy.spec.action.kind == "discrete":
            raise UserError("algorithm.cloning.loss=mse needs continuous actions, and this task has discrete ones: set loss=nll.")
        if cloning.loss == "mse" and policy.translates:
            raise UserError(f"algorithm.cloning.loss=mse: policy.name='{config.policy.name}' has its own cloning loss: set loss=nll.")
        self.options, self.num_rounds = cloning, config.algorithm.num_epochs
        self.objective = CloningObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(self.objective, policy, config.algorithm, config.hybrid, one_thread=True, ranks=ranks)
        super().__init__(config, policy, {stream.domain: ClonedSteps(stream, policy, run_dir) for stream in streams})
        self.best_loss = math.inf
        """Lowest validation loss so far."""
        self._best: dict[str, Tensor] = {}
        self._epochs = self._waited = 0

    @property
    def num_minibatches(self) -> int:
        return -(-sum(steps.num_steps for steps in self.steps.values()) // self.config.algorithm.minibatch_size)

    def way(self, iteration: int) -> dict[str, Any]:
        return {"way": "mode"}

    def update(self, prepared: int, *, iteration: int, progress: float) -> dict[str, float]:
        """Train epochs of `prepared` minibatches each."""
        rate = scheduled(self.config.algorithm, progress)
        figures = []
        for _ in range(self.num_rounds):
            taken = [self.learner.step(step_rows(self.policy, batch), rate) for batch in self._minibatches(prepared)]
            figures.append({**mean_figures(taken), "minibatches": float(len(taken))})
            self._epochs += 1
            figures[-1] |= self._validate()
            if self.finished:
                break
        means = {name: float(np.mean([figure[name] for figure in figures])) for name in figures[-1]}
        return {**means, "learning_rate": rate, "epochs": float(self._epochs)}

    def _minibatches(self, number: int) -> Iterator[Transitions]:
        """Minibatches of an epoch, with rows of every domain by weight."""
        epoch, size = self._epochs, self.config.algorithm.minibatch_size
        if len(self.steps) == 1 and number == self.num_minibatches:
            (steps,) = self.steps.values()
            return steps.epoch(epoch, size)  # one pass over all steps, read in any number of parts
        parts = [self.steps[domain].passes(epoch, rows, number) for domain, rows in self.rows(size).items() if rows]
        return (Transitions.concatenate(list(own)) for own in zip(*parts, strict=True))

    def _validate(self) -> dict[str, float]:
        """Figures of the episodes that are not trained on; with patience, also keep the best weights and decide whether to stop."""
        held = {domain: steps.validation for domain, steps in self.steps.items() if steps.validation is not None}
        if not held:
            return {}
        self.learner.executor.write_back()
        with compute_threads(self.learner.compute_threads):
            found = {domain: self.objective.validate(self.policy, part.epoch(0, _VALIDATION_ROWS)) for domain, part in held.items()}
        weights = [self.steps[domain].weight for domain in held]
        figures = {name: float(np.average([own[name] for own in found.values()], weights=weights)) for name in found[next(iter(found))]}
        if self.options.patience is not None:
            self._waited += 1
            if figures["validation_loss"] < self.best_loss:
                self.best_loss, self._waited = figures["validation_loss"], 0
                self._best = {name: value.detach().cpu().clone() for name, value in self.policy.state_dict().items()}
            self.finished = self._waited >= self.options.patience
        return figures | {name: value for domain, own in found.items() if len(found) > 1 for name, value in prefixed(domain, own).items()}

    def finish(self, run_dir: Path) -> None:
        """Load the weights with the lowest validation loss; DAgger keeps the last ones, which have seen the most answers."""
        if self._best and not self.options.dagger:
            self.policy.load_state_dict(self._best)
            self.learner.executor.take_weights()

    def state_tensors(self) -> dict[str, Tensor]:
        """State including the weights with the best validation loss."""
        best = {f"{_BEST}{name}": value.clone() for name, value in self._best.items()}
        return {**super().state_tensors(), **best, _BEST_LOSS: torch.tensor(self.best_loss, dtype=torch.float64)}

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        self.best_loss = float(state[_BEST_LOSS])
        self._best = {name.removeprefix(_BEST): value.clone() for name, value in state.items() if name.startswith(_BEST)}
        super().load_state_tensors({name: value for name, value in state.items() if not name.startswith((_BEST, _BEST_LOSS))})

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "waited": self._waited, "finished": self.finished, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._epochs, self._waited, self.finished = int(state["epochs"]), int(state["waited"]), bool(state["finished"])

    def go_on(self) -> None:
        self.finished, self._waited = False, 0
