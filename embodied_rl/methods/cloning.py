"""Behaviour cloning, and DAgger: supervised learning of an expert's actions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_rl.config import HybridConfig
from embodied_rl.episodes.dataset import EpisodeDataset, Transitions, split_episodes
from embodied_rl.errors import UserError
from embodied_rl.learning.devices import compute_threads
from embodied_rl.learning.executors import Figures
from embodied_rl.learning.learner import make_learner, scheduled
from embodied_rl.learning.recorded import CloningObjective, read_statistics, step_rows
from embodied_rl.methods.acting import PlayingMethod, finished_in
from embodied_rl.methods.base import Experience
from embodied_rl.methods.demonstrations import Demonstrations, KeptRun, RecordedMethod, nothing_seen
from embodied_rl.sim.instrumented import EXPERT
from embodied_rl.types import Rollout

_LABELS = 17
"""Stream of randomness."""
_VALIDATION_ROWS = 4096
_BEST, _BEST_LOSS = "best.", "best_loss"
"""Names of tensors."""


def single_threaded(hybrid: HybridConfig) -> HybridConfig:
    """With one thread where no number is given: minibatches of recorded steps are small."""
    return dataclasses.replace(hybrid, num_threads=hybrid.num_threads or 1)


def mean_figures(taken: Sequence[Figures]) -> dict[str, float]:
    """The mean of each figure over the steps that have it."""
    names = dict.fromkeys(name for figures in taken for name in figures)
    return {name: float(np.mean([figures[name] for figures in taken if name in figures])) for name in names}


class CloningMethod(RecordedMethod[None]):
    """Behaviour cloning (Pomerleau 1991): epochs over recorded episodes until the validation loss rises.

    One iteration is `num_epochs` epochs; steps are gradient steps. Normalisation statistics are those of the recorded observations.
    """

    def __init__(self, run: KeptRun) -> None:
        config, policy, cloning = run.config, run.policy, run.config.algorithm.cloning
        assert cloning is not None, "the configuration was checked"
        if cloning.loss == "mse" and policy.spec.action.kind == "discrete":
            raise UserError("algorithm.cloning.loss=mse is for continuous actions; those of this task are choices: set loss=nll.")
        if cloning.loss == "mse" and policy.translates:
            raise UserError(f"algorithm.cloning.loss=mse: policy.name='{config.policy.name}' has its own cloning loss: set loss=nll.")
        self.config, self.policy, self.options = config, policy, cloning
        self.objective = CloningObjective(policy, config.algorithm, config.hybrid.precision)
        self.learner = make_learner(self.objective, policy, config.algorithm, single_threaded(config.hybrid), ranks=run.ranks)
        self.best_loss = math.inf
        """Lowest validation loss so far."""
        self._best: dict[str, Tensor] = {}
        self.demonstrations = Demonstrations(config, run.manager, policy, run.run_dir)
        self.train: EpisodeDataset | None = None
        self.validation: EpisodeDataset | None = None
        self._finished = False
        self._epochs = self._waited = 0
        self._has_statistics = False

    @property
    def finished(self) -> bool:
        """Whether the validation loss has risen for long enough."""
        return self._finished

    def collect(self, iteration: int) -> Experience[Rollout | None]:
        """Nothing is played: the recorded steps are there."""
        assert self.train is not None, "restart() comes first"
        steps = self.config.algorithm.num_epochs * self.train.num_minibatches(self.config.algorithm.minibatch_size)
        return Experience(steps, [], nothing_seen(self.policy), None)

    def prepare(self, experience: Experience[Rollout | None]) -> None:
        """The recorded steps are ready."""

    def update(self, prepared: None, *, iteration: int, steps: int) -> dict[str, float]:
        algorithm = self.config.algorithm
        rate = scheduled(algorithm, steps / self.config.total_steps)
        figures = []
        for _ in range(algorithm.num_epochs):
            figures.append(self._epoch(rate))
            self._epochs += 1
            figures[-1] |= self._validate()
            if self._finished:
                break
        means = {name: float(np.mean([figure[name] for figure in figures])) for name in figures[-1]}
        return {**means, "learning_rate": rate, "epochs": float(self._epochs)}

    def _epoch(self, rate: float) -> dict[str, float]:
        """One step for each minibatch; figures averaged over them, and their number."""
        taken = [self.learner.step(step_rows(self.policy, batch), rate) for batch in self._minibatches(self._epochs)]
        return {**mean_figures(taken), "minibatches": float(len(taken))}

    def _minibatches(self, epoch: int) -> Iterator[Transitions]:
        assert self.train is not None
        return self.train.epoch(epoch, self.config.algorithm.minibatch_size)

    def _validate(self) -> dict[str, float]:
        """Figures of the episodes that are not trained on; with patience, the best weights are kept, and the end is seen."""
        if self.validation is None:
            return {}
        learner = self.learner
        learner.executor.write_back()
        held = (step_rows(self.policy, batch).moved(learner.device) for batch in self.validation.epoch(0, _VALIDATION_ROWS))
        with compute_threads(learner.compute_threads):
            figures = self.objective.validate(self.policy, held)
        if self.options.patience is not None:
            self._waited = 0 if self._keep_if_best(figures["validation_loss"]) else self._waited + 1
            self._finished = self._waited >= self.options.patience
        return figures

    def _keep_if_best(self, loss: float) -> bool:
        """Remember the present weights where no validation loss was lower."""
        if loss >= self.best_loss:
            return False
        self.best_loss = loss
        self._best = {name: value.detach().cpu().clone() for name, value in self.policy.state_dict().items()}
        return True

    def finish(self) -> None:
        """Take the weights with the lowest validation loss."""
        if self._best:
            self.policy.load_state_dict(self._best)
            self.learner.executor.take_weights()

    def _read_recordings(self) -> None:
        """Once: those to learn from, and those to look at."""
        if self.train is not None:
            return
        recorded, config = self.config.algorithm.recorded, self.config
        options = self.demonstrations.options(action_margin=self.options.action_margin if self.policy.squashed else 0.0)
        episodes, held = split_episodes(self.demonstrations.load(), self.options.validation_share, seed=config.seed)

        def dataset(chosen: list) -> EpisodeDataset:
            return EpisodeDataset(chosen, self.demonstrations.spec, options, seed=config.seed, memory_mb=recorded.memory_mb)

        self.train, self.validation = dataset(episodes), dataset(held) if held else None
        if self.validation is None and self.options.patience is not None and self.options.validation_share > 0:
            raise UserError("One recorded episode cannot be split: set algorithm.cloning.validation_share=0, or record more.")
        if not self._has_statistics:
            read_statistics(self.policy, self.train)
            self._has_statistics = True

    def metrics(self) -> dict[str, float]:
        assert self.train is not None
        held = 0 if self.validation is None else self.validation.num_episodes
        return {"data/recorded_episodes": float(self.train.num_episodes + held), "data/recorded_steps": float(self._recorded_steps())}

    def _recorded_steps(self) -> int:
        return sum(part.num_steps for part in (self.train, self.validation) if part is not None)

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's, and the weights that validated best."""
        best = {f"{_BEST}{name}": value.clone() for name, value in self._best.items()}
        return {**self.learner.state_tensors(), **best, _BEST_LOSS: torch.tensor(self.best_loss, dtype=torch.float64)}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        self.best_loss = float(state[_BEST_LOSS])
        self._best = {name.removeprefix(_BEST): value.clone() for name, value in state.items() if name.startswith(_BEST)}
        own = {name: value for name, value in state.items() if name != _BEST_LOSS and not name.startswith(_BEST)}
        self.learner.load_state_tensors(own)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "waited": self._waited, "finished": self._finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epochs, self._waited, self._has_statistics = int(state["epochs"]), int(state["waited"]), True
        # A finished run that is resumed was given more steps, and with them more patience.
        self._finished = False
        if state["finished"]:
            self._waited = 0


class DaggerMethod(PlayingMethod[Rollout | None, None], CloningMethod):
    """DAgger (Ross, Gordon and Bagnell 2011, arXiv:1011.0686, algorithm 3.1 with β_1 = 1 and β_i = 0 after).

    The first iteration clones the recorded episodes; each later one lets the policy play `rollout_steps` steps of every slot by its
    mode, adds what the expert would have done in each state, and learns from all of it. Steps are environment steps. Of a policy that
    acts in chunks the expert is asked where a chunk begins, and answers for its first step: what it would do next depends on that one.
    """

    def __init__(self, run: KeptRun) -> None:
        super().__init__(run)
        policy, manager = run.policy, run.manager
        self.play_in(manager, run.generator, policy.action_layout)
        texts = {key: np.empty(0, object) for key in policy.observation_keys if key not in policy.spec.tensors}
        self._observation: dict[str, np.ndarray] = texts | {key: part.numpy() for key, part in nothing_seen(policy).items()}
        self._action = np.zeros((0, manager.spec.action.dim), manager.spec.action.dtype)

    def collect(self, iteration: int) -> Experience[Rollout | None]:
        if iteration == 0:
            return Experience(0, [], nothing_seen(self.policy), None)
        self._draw()
        rollout = self.next_rollouts(iteration)[""]
        return Experience(rollout.num_steps, finished_in(rollout), nothing_seen(self.policy), rollout)

    def prepare(self, experience: Experience[Rollout | None]) -> None:
        """Add the expert's answers to the data."""
        rollout = experience.data
        if rollout is None:
            return
        assert self.train is not None
        asked = rollout.reward.size
        answers = rollout.observation[EXPERT].reshape(asked, -1)
        margin = self.train.options.action_margin
        self._action = np.concatenate([self._action, self.policy.spec.action.normalise(answers, margin=margin)])
        for key, part in self._observation.items():
            seen = rollout.observation[key].reshape(asked, *part.shape[1:])
            self._observation[key] = np.concatenate([part.astype(seen.dtype), seen])

    def _minibatches(self, epoch: int) -> Iterator[Transitions]:
        """Recorded and answered steps, in each minibatch as in the whole."""
        assert self.train is not None
        answered, recorded = len(self._action), self.train.num_steps
        if not answered:
            yield from super()._minibatches(epoch)
            return
        parts = -(-(answered + recorded) // self.config.algorithm.minibatch_size)
        order = np.random.default_rng(np.random.SeedSequence([self.config.seed, epoch, _LABELS])).permutation(answered)
        fresh = (self._answered(rows) for rows in np.array_split(order, parts))
        for one, other in itertools.zip_longest(self.train.epoch(epoch, -(-recorded // parts)), fresh):
            yield Transitions.concatenate([part for part in (one, other) if part is not None and part.num_rows])

    def _answered(self, rows: np.ndarray) -> Transitions:
        observation = {key: part[rows] for key, part in self._observation.items()}
        nothing, action, executed = np.zeros(len(rows), np.float32), self._action[rows], None
        assert self.train is not None
        if (chunk := self.train.options.window) is not None:
            action = np.pad(action[:, None], ((0, 0), (0, chunk - 1), (0, 0)))
            executed = np.arange(chunk) < np.ones((len(rows), 1))
        return Transitions(observation, action, nothing, nothing, observation, executed)

    def finish(self) -> None:
        """The last weights have seen the most answers."""

    def restart(self, iteration: int) -> None:
        super().restart(iteration)
        self._draw()
        self.collector.restart(seed_round=iteration)

    def _draw(self) -> None:
        self.collector.draw("mode", first=1)  # the first iteration clones what is recorded

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "data/labels": float(self._recorded_steps() + len(self._action))}

    def state_tensors(self) -> dict[str, Tensor]:
        vectors = {key: part for key, part in self._observation.items() if part.dtype != object}
        answered = {f"answered.observation.{key}": torch.from_numpy(part) for key, part in vectors.items()}
        return {**super().state_tensors(), **answered, "answered.action": torch.from_numpy(self._action)}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        super().load_state_tensors({name: value for name, value in state.items() if not name.startswith("answered.")})
        vectors = [key for key, part in self._observation.items() if part.dtype != object]
        self._observation |= {key: state[f"answered.observation.{key}"].numpy() for key in vectors}
        self._action = state["answered.action"].numpy()

    def state_dict(self) -> dict[str, Any]:
        """Texts are in no tensor: an answer's instruction is its number among those that were seen."""
        known = {key: list(dict.fromkeys(part.tolist())) for key, part in self._observation.items() if part.dtype == object}
        texts = {key: {"known": texts, "number": [texts.index(one) for one in self._observation[key]]} for key, texts in known.items()}
        return {**super().state_dict(), "texts": texts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for key, column in state.get("texts", {}).items():
            self._observation[key] = np.array([*column["known"], None], object)[column["number"]]
