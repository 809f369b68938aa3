"""The learner of language agents: any loss of the table on rows of tokens, in micro-batches with one denominator for each step.

Shapes: R rows of at most S tokens; an entry is a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.composition import Composition
from embodied_rl.algorithms.losses import behaviour_cloning_loss
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid.adam import NamedAdam
from embodied_rl.hybrid.learner import resolve_device
from embodied_rl.hybrid.threads import compute_threads
from embodied_rl.hybrid.token_objective import ReferenceLogProbs, TokenBatch, TokenObjective
from embodied_rl.hybrid.updater import Minibatches, NonFiniteLossError
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence

__all__ = ["LanguageLearner", "ReferenceLogProbs", "TokenBatch"]

_REFERENCE = "reference."


class LanguageLearner:
    """Trains a language policy with AdamW.

    A minibatch is cut into micro-batches that fit a forward (`LanguagePolicy.micro_batches`); each part's loss is divided by the count
    of the whole minibatch, so that the gradients add up to that of the minibatch in one piece.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        config: AlgorithmConfig,
        composition: Composition,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
        *,
        trust_sampled: bool = False,
    ) -> None:
        """
        Args:
            trust_sampled: the log-probabilities of sampled tokens are those of the policy as it is when an update begins (the generator
                computes as the trainer does, and nothing is stale), so that they need not be computed again.
        """
        self.policy, self.config, self.composition = policy, config, composition
        self.trust_sampled = trust_sampled
        self.device = resolve_device(device)
        policy.to(self.device)
        self.compute_threads = num_threads or torch.get_num_threads()
        self._adam = NamedAdam(
            {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad},
            learning_rate=config.learning_rate,
            eps=config.adam_eps,
            max_grad_norm=config.max_grad_norm,
        )
        self._objective = TokenObjective(config, composition, self.device)
        self.aggregation = self._objective.aggregation
        self._has_reference = False

    # ---- without gradients ------------------------------------------------------------------------------------------

    def keep_reference(self) -> None:
        """Take the present weights as the reference of the KL term, where there is one."""
        if self.config.kl.coef > 0 and not self._has_reference:
            self.policy.keep_reference()
            self._has_reference = True

    def log_probs(self, batch: TokenBatch) -> ReferenceLogProbs:
        """What the loss and the KL term need beside the batch."""
        with torch.no_grad(), compute_threads(self.compute_threads):
            if not self.composition.needs_proximal and not self._has_reference:
                present = None
            elif self.trust_sampled:
                present = batch.behaviour_log_prob
            else:
                present = self.policy.evaluate(batch.sequences).log_prob.cpu()
            reference = self.policy.reference_log_prob(batch.sequences).cpu() if self._has_reference else None
        return ReferenceLogProbs(present, reference)

    # ---- the update -------------------------------------------------------------------------------------------------

    def update(
        self, batch: TokenBatch, log_probs: ReferenceLogProbs, *, minibatch_rows: int, progress: float, seed: list[int], kl_coef: float
    ) -> dict[str, float]:
        """Run the epochs; return metrics averaged over the minibatches.

        Args:
            minibatch_rows: rows of one step, nearly.
            progress: share of the run that is over, for the learning rate's schedule.
            seed: of the shuffling.
            kl_coef: present coefficient of a KL term in the loss.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite; the parameters were not stepped with it.
        """
        config = self.config
        rate = config.learning_rate * (max(1.0 - progress, 0.0) if config.lr_schedule == "linear" else 1.0)
        generator = np.random.default_rng(np.random.SeedSequence(seed))
        rows = batch.mask.any(1).nonzero().squeeze(-1).numpy()
        figures: list[dict[str, float]] = []
        with compute_threads(self.compute_threads):
            for _ in range(config.num_epochs):
                minibatches = Minibatches.shuffle(generator, len(rows), max(minibatch_rows, 1))
                epoch = [
                    self._step(batch, log_probs, rows[minibatches.permutation[start:stop]], rate, kl_coef)
                    for start, stop in minibatches.bounds
                ]
                figures += epoch
                if config.target_kl is not None and np.mean([figure["approx_kl"] for figure in epoch]) > config.target_kl:
                    break
        means = {name: float(np.mean([figure[name] for figure in figures])) for name in figures[0]}
        means |= _mismatch(batch, log_probs)
        return {**means, "learning_rate": rate, "minibatches": float(len(figures)), "tokens": float(batch.mask.sum())}

    def gradient(self, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: np.ndarray, kl_coef: float = 0.0) -> dict[str, float]:
        """Add the gradient of one minibatch (row numbers [n]) to the parameters' ``grad``, micro-batch by micro-batch; its metrics."""
        denominator = self._denominator(batch, rows)
        total: dict[str, float] = {}
        for part in self.policy.micro_batches([batch.sequences[row] for row in rows]):
            loss, metrics = self._objective(self.policy, batch, log_probs, torch.from_numpy(rows[part]), denominator, kl_coef)
            loss.backward()
            for name, value in (metrics | {"loss": loss.detach()}).items():
                total[name] = total.get(name, 0.0) + float(value)
        return total

    def _denominator(self, batch: TokenBatch, rows: np.ndarray) -> Tensor:
        """What the loss of a minibatch is divided by. This process knows the whole of it, also where ranks divide it."""
        return self.aggregation.count(batch.mask[torch.from_numpy(rows)]).clamp(min=1)

    def _step(self, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: np.ndarray, rate: float, kl_coef: float) -> dict[str, float]:
        self._adam.optimizer.zero_grad(set_to_none=True)
        figures = self.gradient(batch, log_probs, rows, kl_coef)
        norm = self._apply(figures["loss"], rate)
        self._check_finite(batch, rows, figures["loss"], norm)
        return {**figures, "grad_norm": norm}

    def _check_finite(self, batch: TokenBatch, rows: np.ndarray, loss: float, norm: float) -> None:
        if math.isfinite(norm) and math.isfinite(loss):
            return
        error = NonFiniteLossError(
            f"The {self.config.loss} loss is {loss} and its gradient's norm {norm} on {len(rows)} rows of tokens.", rows
        )
        chosen = torch.from_numpy(rows)
        error.batch = {name: getattr(batch, name)[chosen].numpy() for name in ("mask", "advantage", "behaviour_log_prob", "chunk_id")}
        raise error

    def _apply(self, loss: float, rate: float) -> float:
        """Clip and step with the gradients that lie in the parameters, unless something is not finite; the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self._adam.parameters.values(), self.config.max_grad_norm))
        if math.isfinite(norm) and math.isfinite(loss):
            for group in self._adam.optimizer.param_groups:
                group["lr"] = rate
            self._adam.optimizer.step()
        self._adam.optimizer.zero_grad(set_to_none=True)
        return norm

    # ---- behaviour cloning ------------------------------------------------------------------------------------------

    def clone(self, sequences: Sequence[TokenSequence], *, num_epochs: int, minibatch_rows: int, learning_rate: float, seed: int) -> float:
        """Learn the masked tokens by cross-entropy; the mean loss of the last epoch. The optimizer's state is forgotten afterwards.

        Raises:
            NonFiniteLossError: as `update`.
        """
        generator = np.random.default_rng(np.random.SeedSequence([seed, len(sequences)]))
        losses: list[float] = []
        with compute_threads(self.compute_threads):
            total = num_epochs * -(-len(sequences) // minibatch_rows)
            done = 0
            for _ in range(num_epochs):
                minibatches = Minibatches.shuffle(generator, len(sequences), minibatch_rows)
                losses = []
                for start, stop in minibatches.bounds:
                    rows = minibatches.permutation[start:stop]
                    losses.append(self._clone_step([sequences[row] for row in rows], learning_rate * (1.0 - 0.9 * done / total), rows))
                    done += 1
        self._forget_moments()
        return float(np.mean(losses))

    def _forget_moments(self) -> None:
        self._adam.optimizer.state.clear()

    def _clone_step(self, sequences: list[TokenSequence], rate: float, rows: np.ndarray) -> float:
        count = float(sum(int(sequence.mask.sum()) for sequence in sequences))
        self._adam.optimizer.zero_grad(set_to_none=True)
        value = 0.0
        for part in self.policy.micro_batches(sequences):
            evaluation = self.policy.evaluate([sequences[index] for index in part])
            loss, _ = behaviour_cloning_loss(log_prob=evaluation.log_prob, mask=evaluation.mask, denominator=count)
            loss.backward()
            value += float(loss.detach())
        norm = self._apply(value, rate)
        check_cloning(value, norm, rows)
        return value

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state, and the reference model where one is kept."""
        return {**self._adam.state_tensors(), **self._reference_tensors()}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue exactly. Raises KeyError or ValueError when the state is another policy's."""
        self._adam.load_state_tensors(self._take_reference(state))

    def _reference_tensors(self) -> dict[str, Tensor]:
        kept = self.policy.reference_state() if self._has_reference else {}
        return {f"{_REFERENCE}{name}": tensor for name, tensor in kept.items()}

    def _take_reference(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the reference model out of a state; what is left is the optimizer's."""
        if self.config.kl.coef > 0:
            self.keep_reference()
            kept = {name.removeprefix(_REFERENCE): value for name, value in state.items() if name.startswith(_REFERENCE)}
            self.policy.load_reference_state(kept)
        return {name: value for name, value in state.items() if not name.startswith(_REFERENCE)}


def check_cloning(loss: float, norm: float, rows: np.ndarray) -> None:
    """Raises NonFiniteLossError unless both are finite."""
    if not (math.isfinite(norm) and math.isfinite(loss)):
        raise NonFiniteLossError(f"The cross-entropy is {loss} and its gradient's norm {norm} on {len(rows)} rows of tokens.", rows)


def _mismatch(batch: TokenBatch, log_probs: ReferenceLogProbs) -> dict[str, float]:
    """How far the generator's log-probabilities are from the trainer's, for tokens of any age."""
    if log_probs.present is None or log_probs.present is batch.behaviour_log_prob:
        return {}
    difference = (log_probs.present - batch.behaviour_log_prob).abs()[batch.mask]
    return {"log_prob_difference": float(difference.mean()) if len(difference) else 0.0}
