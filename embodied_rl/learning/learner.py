"""The learner: plans an update, for every objective and every executor.

```
 rows ─▶ epochs ─▶ minibatches ─▶ Executor.step ─▶ Objective ─▶ gradients, Adam
             ▲ KL stop    ▲ (seed, iteration)   └ not finite: NonFiniteError, nothing was stepped
```
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.batch import Rows
from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.errors import IncompatibleCheckpointError, NonFiniteError
from embodied_rl.learning.devices import VERY_WIDE_LAYER, compute_threads, keep_freed_memory, num_cores, training_device
from embodied_rl.learning.episode_objectives import TokenCloning
from embodied_rl.learning.executors import Executor, Figures, LocalExecutor, forward_rows, forwards, is_finite, norm_name
from embodied_rl.learning.objectives import Objective
from embodied_rl.learning.rank_hosts import RankHost
from embodied_rl.learning.ranks import RankExecutor
from embodied_rl.learning.rows import TokenBatch, adjust_rows
from embodied_rl.policies.base import TrainedModule
from embodied_rl.policies.packing import TokenSequence

if TYPE_CHECKING:
    from embodied_rl.policies.language import LanguagePolicy

WIDE_LAYER = 128
"""Width from which autograd's operations are worth more than one thread."""
LEAST_IMAGES = 32
"""Least number of a minibatch's images that is worth another thread."""
_REFERENCE = "reference."
_ADJUST = 31
"""Stream of randomness for `adjust_batch`."""


def shuffled(generator: np.random.Generator, num_rows: int, minibatch_size: int) -> list[np.ndarray]:
    """Minibatches of one epoch, as rows [n]: as few as keep each within `minibatch_size`. Their sizes differ by at most one, so that no
    step is taken on a tiny rest."""
    edges = np.linspace(0, num_rows, -(-num_rows // minibatch_size) + 1).astype(np.int64).tolist()
    permutation = generator.permutation(num_rows)
    return [permutation[start:stop] for start, stop in itertools.pairwise(edges)]


def scheduled(config: AlgorithmConfig, progress: float) -> float:
    """The learning rate after a share `progress` of the run: constant, or falling linearly to 0."""
    return config.learning_rate * (max(1.0 - progress, 0.0) if config.lr_schedule == "linear" else 1.0)


class Learner:
    """Trains a policy with Adam on minibatches of rows, with an objective and an executor."""

    def __init__(
        self,
        policy: TrainedModule,
        config: AlgorithmConfig,
        objective: Objective[Any, Any],
        executor: Executor,
        compute_threads: int,
        ranks: RankExecutor | None = None,
    ) -> None:
        """`compute_threads`: threads of one operation on the CPU. See `make_learner`."""
        self.policy, self.config, self.objective, self.executor = policy, config, objective, executor
        self.ranks = ranks
        """The executor, if `hybrid.sharding` divides the policy; None: it is trained whole in this process."""
        self.compute_threads = compute_threads
        self.has_reference = False
        """Whether the policy keeps a reference for a KL term."""

    # ---- the update -------------------------------------------------------------------------------------------------

    def update(self, rows: Rows, *, minibatch_rows: int, progress: float, seed: Sequence[int], kl_coef: float = 0.0) -> dict[str, float]:
        """Run the epochs of one iteration; return metrics averaged over the minibatches that were stepped on.

        Each epoch shuffles the rows anew, with a generator seeded by `seed` only, so that a resumed run continues with the same bits. The
        update stops before a further epoch if the last one's mean KL divergence exceeds ``target_kl``. If no row counts, it takes no step.

        Args:
            minibatch_rows: approximate rows of one step.
            progress: share of the run that is over, for the learning rate's schedule.
            seed: seed of the shuffling.
            kl_coef: present coefficient of the KL term in the loss.

        Raises NonFiniteError if a loss or gradient is not finite; the parameters were not stepped with it. Its `batch` is the
        minibatch, under the names of `Rows.tensors`.
        """
        config, rate = self.config, scheduled(self.config, progress)
        generator = np.random.default_rng(np.random.SeedSequence(list(seed)))
        epochs: list[list[Figures]] = []
        counted = rows.counted()
        if counted.num_rows == 0:
            return {"minibatches": 0.0, "learning_rate": rate}
        with compute_threads(self.compute_threads):
            self.executor.begin(self.objective, counted)
            minibatch_rows = max(minibatch_rows, 1)
            indices, weight = np.arange(counted.num_rows), np.ones(counted.num_rows, np.float32)
            if config.adjust_batch is not None:
                divisors = [minibatch_rows, self.executor.num_parts * (config.micro_batch_size or 1)]
                indices, weight = adjust_rows(counted.num_rows, divisors=divisors, mode=config.adjust_batch, seed=[*seed, _ADJUST])
            for _ in range(config.num_epochs):
                minibatches = shuffled(generator, len(indices), minibatch_rows)
                chosen = [own for places in minibatches if len(own := indices[places][weight[places] > 0])]
                epochs.append([self._step(self.objective, counted, own, rate, kl_coef) for own in chosen])
                if config.target_kl is not None and np.mean([figures["approx_kl"] for figures in epochs[-1]]) > config.target_kl:
                    break
        taken = list(itertools.chain.from_iterable(epochs))
        shown = [name for name in taken[0] if name != "loss" or self.objective.shows_loss]
        means = {name: float(np.mean([figures[name] for figures in taken])) for name in shown}
        return {**means, **self.objective.summary(rows, len(epochs), len(taken)), "learning_rate": rate}

    def clone(self, sequences: Sequence[TokenSequence], *, num_epochs: int, minibatch_rows: int, learning_rate: float, seed: int) -> float:
        """Learn the masked tokens by cross-entropy; return the last epoch's mean loss. The optimizer's state is cleared afterwards.
        Raises NonFiniteError as `update` does."""
        rows, objective = TokenBatch.of_cloning(sequences), TokenCloning(cast("LanguagePolicy", self.policy), self.config)
        generator = np.random.default_rng(np.random.SeedSequence([seed, len(sequences)]))
        total = num_epochs * -(-len(sequences) // minibatch_rows)
        losses: list[float] = []
        for epoch in range(num_epochs):
            chosen = shuffled(generator, len(sequences), minibatch_rows)
            rates = [learning_rate * (1.0 - 0.9 * (epoch * len(chosen) + done) / total) for done in range(len(chosen))]
            minibatches = (rows.chosen(torch.from_numpy(own)) for own in chosen)
            losses = [self.step(own, rate, [objective])["loss"] for own, rate in zip(minibatches, rates, strict=True)]
        self.executor.forget()
        self.executor.write_back()
        return float(np.mean(losses))

    def step(self, rows: Rows, learning_rate: float, objectives: Sequence[Objective[Any, Any]] = ()) -> Figures:
        """Take one step of each objective, in order, on all of these rows, for methods that learn from a stream of minibatches.
        `objectives`: empty: the learner's own. Returns the figures of all; ``loss`` only if an objective shows it. Raises
        NonFiniteError as `update` does; earlier steps were taken."""
        taken: Figures = {}
        with compute_threads(self.compute_threads):
            for objective in objectives or (self.objective,):
                self.executor.begin(objective, rows)
                taken |= self._step(objective, rows, None, learning_rate, 0.0)
                if not objective.shows_loss:
                    del taken["loss"]
        return taken

    def _step(self, objective: Objective[Any, Any], rows: Rows, chosen: np.ndarray | None, rate: float, kl_coef: float) -> Figures:
        self.executor.meanwhile()
        figures = self.executor.step(chosen, rate, kl_coef=kl_coef)
        if is_finite(figures):
            return figures
        own = np.arange(rows.num_rows) if chosen is None else chosen
        norms = " and ".join(str(figures[norm_name(group)]) for group in objective.groups)
        what = objective.what or f"{self.config.loss} loss"
        text = f"The {what} is {figures['loss']} and its gradient's norm {norms} on {len(own)} {objective.unit}."
        error = NonFiniteError(text)
        error.batch = {name: tensor.cpu().numpy() for name, tensor in rows.chosen(torch.from_numpy(own)).tensors().items()}
        raise error

    # ---- without gradients ------------------------------------------------------------------------------------------

    def values(self, ready: dict[str, Tensor]) -> np.ndarray:
        """[B] float32, or [B, K], state values of prepared observations."""
        with compute_threads(self.compute_threads):
            return self.executor.values(ready)

    def log_probs(self, ready: dict[str, Tensor], action: Tensor, *, of_reference: bool = False) -> Tensor:
        """[B, L] float32 log-probabilities of actions under the present policy, or under the reference."""
        policy, parts = self.policy.reference[0] if of_reference else self.policy, []
        with torch.no_grad(), compute_threads(self.compute_threads):
            for part in forwards({**ready, "": action}, forward_rows(self.policy, self.config)):
                moved = {key: tensor.to(self.executor.device) for key, tensor in part.items()}
                action = moved.pop("")
                parts.append(self.objective.evaluate(policy, moved, action).log_prob.cpu())
        return torch.cat(parts)

    def token_log_probs(self, sequences: Sequence[TokenSequence], *, of_reference: bool = False) -> Tensor:
        """[R, S] float32 log-probabilities of tokens under the present policy, or under the reference."""
        policy = cast("LanguagePolicy", self.policy)
        with torch.no_grad(), compute_threads(self.compute_threads):
            found = policy.reference_log_prob(sequences) if of_reference else policy.evaluate(sequences).log_prob
            return found.cpu()

    def token_values(self, sequences: Sequence[TokenSequence]) -> tuple[Tensor, Tensor]:
        """[R, S] float32 each: `token_log_probs`, and the value head's values of the states that tokens are sampled in."""
        with torch.no_grad(), compute_threads(self.compute_threads):
            found = cast("LanguagePolicy", self.policy).evaluate(sequences)
        assert found.value is not None, "the configuration was checked"
        return found.log_prob.cpu(), found.value.cpu()

    # ---- the reference ----------------------------------------------------------------------------------------------

    @property
    def needs_present(self) -> bool:
        """Whether an update reads log-probabilities of the policy at its start."""
        return self.objective.needs_present or self.has_reference

    def keep_reference(self) -> None:
        """Keep the present weights as the KL term's reference, if there is such a term and none is kept yet."""
        if self.config.kl.coef == 0 or self.has_reference:
            return
        self.policy.keep_reference()
        self.has_reference = True

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state (``step``, ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``), the module's `beside`, and ``reference.<name>`` if
        one is kept."""
        beside = {}
        if self.policy.beside():
            self.executor.write_back()
            beside = {name: tensor.detach().cpu().clone() for name, tensor in self.policy.beside().items()}
        return {
            **beside,
            **self.executor.state_tensors(),
            **{f"{_REFERENCE}{name}": value for name, value in self.policy.reference_state().items()},
        }

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_tensors` returned. Raises IncompatibleCheckpointError if names or shapes are not this policy's."""
        if self.config.kl.coef > 0:
            self.keep_reference()
            kept = {name.removeprefix(_REFERENCE): value for name, value in state.items() if name.startswith(_REFERENCE)}
            if not kept and self.policy.reference_state():
                raise IncompatibleCheckpointError(
                    f"algorithm.kl.coef={self.config.kl.coef:g} now, but 0 in the checkpoint, which holds no first policy to compare with. "
                    "Resume with algorithm.kl.coef=0."
                )
            self.policy.load_reference_state(kept)
        own = {name: value for name, value in state.items() if not name.startswith(_REFERENCE)}
        beside = self.policy.beside()
        wanted = {**beside, **self.executor.state_tensors()}
        # Checkpoints from before November 2026 hold the entropy coefficient without a dimension.
        own |= {name: own[name].reshape(1) for name, here in wanted.items() if name in own and here.dim() == 1 and own[name].dim() == 0}
        shapes = [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (wanted, own)]
        if shapes[0] != shapes[1]:
            wrong = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
            raise IncompatibleCheckpointError(
                f"The optimizer state belongs to another policy: {', '.join(wrong[:4])} differ (of {len(wrong)}). Resume with the "
                "checkpoint's policy configuration."
            )
        with torch.no_grad():
            for name, tensor in beside.items():
                tensor.copy_(own.pop(name))
        self.executor.load_state_tensors(own)


def make_learner(
    objective: Objective[Any, Any],
    policy: TrainedModule,
    config: AlgorithmConfig,
    hybrid: HybridConfig,
    *,
    allow_fused: bool = True,
    one_thread: bool = False,
    ranks: RankHost | None = None,
) -> Learner:
    """Build the learner of a configuration: on the ranks of `hybrid.sharding`, else with hand-derived gradients if they exist, or autograd.

    Args:
        allow_fused: False always takes autograd (for comparison).
        one_thread: use one thread per autograd operation if no number is configured, because minibatches are small.
        ranks: host of the ranks beside the first; None: processes on this machine.

    Raises UserError if the device is not available, or the policy cannot be divided.
    """
    widest = max((layer.out_features for layer in policy.modules() if isinstance(layer, nn.Linear)), default=0)
    device = training_device(hybrid, policy, widest, None if ranks is None else ranks.device_index(0))
    policy.to(device)
    if device.type == "cpu" and any(isinstance(layer, nn.Conv2d) for layer in policy.modules()):
        keep_freed_memory()
    num_threads = hybrid.rank_threads or num_cores()
    executor = _fused(objective, policy, config, device, num_threads) if allow_fused and hybrid.sharding is None else None
    if one_thread and executor is None:
        num_threads = hybrid.rank_threads or 1
    if hybrid.sharding is not None:
        divided = RankExecutor(policy, config, hybrid, device, ranks)
        return Learner(policy, config, objective, divided, num_threads, divided)
    if executor is not None:
        num_threads = max(1, num_threads // 2) if widest >= VERY_WIDE_LAYER else 1
    else:
        parts = 1
        if policy.work == "vectors" and widest < WIDE_LAYER:
            # Small operations do not repay threads, which would only wait for one another.
            num_threads = 1
        elif policy.work == "pictures" and device.type == "cpu":
            parts = max(1, min(num_threads, config.minibatch_size // LEAST_IMAGES))
            num_threads = max(1, num_threads // parts)
        executor = LocalExecutor(policy, config, device, objective.precision, side_by_side=parts)
    return Learner(policy, config, objective, executor, num_threads)


def _fused(
    objective: Objective[Any, Any], policy: TrainedModule, config: AlgorithmConfig, device: torch.device, num_threads: int
) -> Executor | None:
    """The executor with hand-derived gradients; None if it does not support something that is configured."""
    rates = config.value_learning_rate is not None or config.head_learning_rate is not None
    if rates or config.micro_batch_size is not None or objective.precision != "float32":
        return None
    wanted = ("rollouts", "ppo_clip", "mse", "chunk", None)
    ppo = (objective.name, config.loss, config.value_loss, config.ratio, config.horizon) == wanted
    sac = objective.name == "critics" and config.off_policy is not None and config.off_policy.update == "sac"
    if not sac and (not ppo or (config.kl.coef > 0 and config.kl.place == "loss")):
        return None
    from embodied_rl.learning.fused import FusedCritics, FusedExecutor

    if sac:
        return FusedCritics(policy, config, side_by_side=num_threads >= 2) if FusedCritics.supports(policy, device) else None
    return FusedExecutor(policy, config, side_by_side=num_threads >= 2) if FusedExecutor.supports(policy, device) else None
