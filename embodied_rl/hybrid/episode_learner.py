"""The learner for whole episodes: any loss of the table, over minibatches of episodes with one denominator for each step."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.composition import Composition
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.losses import explained_variance
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid.learner import resolve_device
from embodied_rl.hybrid.loss_terms import Divisors, LossTerms
from embodied_rl.hybrid.threads import compute_threads
from embodied_rl.hybrid.updater import AutogradUpdater, Minibatches, NonFiniteLossError
from embodied_rl.policies.actor_critic import ActorCritic

_ROWS = 4096
"""Steps of one forward without gradients at most."""


class EpisodeLearner:
    """Trains a policy with Adam on minibatches of whole episodes.

    A minibatch holds as many episodes as have about ``minibatch_size`` steps, and its loss is divided by what it holds in all: the
    aggregation's count of the whole minibatch.
    """

    def __init__(
        self,
        policy: ActorCritic,
        config: AlgorithmConfig,
        composition: Composition,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
    ) -> None:
        self.policy, self.config, self.composition = policy, config, composition
        self.device = resolve_device(device)
        policy.to(self.device)
        self.compute_threads = num_threads or 1
        self._adam = AutogradUpdater(policy, config, self.device)
        self.reference: ActorCritic | None = copy.deepcopy(policy).eval() if config.kl.coef > 0 else None
        self._terms = LossTerms(config, composition.loss)
        self.aggregation = self._terms.aggregation

    # ---- without gradients ------------------------------------------------------------------------------------------

    def values(self, batch: EpisodeBatch) -> EpisodeValues:
        """The critic's values, or zeros where the method has no critic."""
        rows, longest = batch.shape
        if not self.composition.needs_critic:
            return EpisodeValues(torch.zeros(rows, longest), torch.zeros(rows))
        with compute_threads(self.compute_threads):
            flat = self._adam.values({key: batch.observation[key].numpy() for key in self.policy.observation_keys})
            final = self._adam.values({key: batch.final_observation[key].numpy() for key in self.policy.observation_keys})
        return EpisodeValues(batch.scatter(torch.from_numpy(flat)), torch.from_numpy(final))

    def log_probs(self, batch: EpisodeBatch) -> tuple[Tensor | None, Tensor | None]:
        """[B, L] of the present policy and of the reference, as far as they are needed."""
        present = self._log_prob(self.policy, batch) if self.composition.needs_proximal or self.reference is not None else None
        return present, None if self.reference is None else self._log_prob(self.reference, batch)

    @torch.no_grad()
    def _log_prob(self, policy: ActorCritic, batch: EpisodeBatch) -> Tensor:
        parts = []
        for start in range(0, len(batch.action), _ROWS):
            seen = {key: batch.observation[key][start : start + _ROWS].to(self.device) for key in policy.observation_keys}
            parts.append(policy.evaluate(seen, batch.action[start : start + _ROWS].to(self.device)).log_prob.sum(-1).cpu())
        return batch.scatter(torch.cat(parts))

    # ---- the update -------------------------------------------------------------------------------------------------

    def update(
        self,
        batch: EpisodeBatch,
        credit: Credit,
        log_prob: Tensor | None,
        reference: Tensor | None,
        *,
        progress: float,
        seed: list[int],
        kl_coef: float,
    ) -> dict[str, float]:
        """Run the epochs; return metrics averaged over the minibatches.

        Args:
            log_prob, reference: see `log_probs`; taken before the first step.
            progress: share of the run that is over, for the learning rate's schedule.
            seed: of the shuffling.
            kl_coef: present coefficient of a KL term in the loss.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite; the parameters were not stepped with it.
        """
        config = self.config
        rate = config.learning_rate * (max(1.0 - progress, 0.0) if config.lr_schedule == "linear" else 1.0)
        for group in self._adam.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        inputs = self._inputs(batch, credit, log_prob, reference)
        generator = np.random.default_rng(np.random.SeedSequence(seed))
        rows = credit.mask.any(1).nonzero().squeeze(-1).numpy()
        size = max(1, round(config.minibatch_size * len(rows) / max(int(credit.mask.sum()), 1)))
        figures: list[dict[str, float]] = []
        with compute_threads(self.compute_threads):
            for _ in range(config.num_epochs):
                minibatches = Minibatches.shuffle(generator, len(rows), size)
                epoch = [self._step(batch, inputs, rows[minibatches.permutation[a:b]], kl_coef) for a, b in minibatches.bounds]
                figures += epoch
                if config.target_kl is not None and np.mean([figure["approx_kl"] for figure in epoch]) > config.target_kl:
                    break
        means = {name: float(np.mean([figure[name] for figure in figures])) for name in figures[0]}
        if credit.returns is not None:
            means["explained_variance"] = explained_variance(value=credit.value[credit.mask], returns=credit.returns[credit.mask])
        return {**means, **credit.metrics, "learning_rate": rate, "minibatches": float(len(figures))}

    def _inputs(self, batch: EpisodeBatch, credit: Credit, log_prob: Tensor | None, reference: Tensor | None) -> dict[str, Tensor]:
        """{name: [B, L] or [B]} that losses ask for by name."""
        columns = torch.arange(batch.shape[1]).expand(batch.shape)
        inputs = {
            "advantage": credit.advantage,
            "behaviour_log_prob": batch.behaviour_log_prob,
            "chunk_id": columns,
            "positive": credit.positive,
            "mask": credit.mask,
            "value": credit.value,
        }
        optional = {"old_log_prob": log_prob, "proximal_log_prob": log_prob, "reference_log_prob": reference, "returns": credit.returns}
        return {**inputs, **{name: value for name, value in optional.items() if value is not None}}

    def _step(self, batch: EpisodeBatch, inputs: dict[str, Tensor], rows: np.ndarray, kl_coef: float) -> dict[str, float]:
        chosen = torch.from_numpy(rows)
        part = {name: value[chosen].to(self.device) for name, value in inputs.items()}
        longest = int(part["mask"].sum(1).max())
        part = {name: value[:, :longest] if value.dim() == 2 else value for name, value in part.items()}
        loss, metrics = self._objective(batch, chosen, part, kl_coef)
        self._adam.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._adam.parameters.values(), self.config.max_grad_norm)
        figures = {name: float(value) for name, value in metrics.items()} | {"grad_norm": float(norm)}
        if not (np.isfinite(figures["grad_norm"]) and bool(torch.isfinite(loss))):
            raise self._not_finite(float(loss.detach()), float(norm), rows, part)
        self._adam.optimizer.step()
        return figures

    def _objective(self, batch: EpisodeBatch, chosen: Tensor, part: dict[str, Tensor], kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        mask = part["mask"]
        place = torch.full((batch.shape[0],), -1)
        place[chosen] = torch.arange(len(chosen))
        steps = (place[batch.row] >= 0).nonzero().squeeze(-1)
        row, column = place[batch.row[steps]].to(self.device), batch.column[steps].to(self.device)
        evaluation = self.policy.evaluate(
            {key: batch.observation[key][steps].to(self.device) for key in self.policy.observation_keys},
            batch.action[steps].to(self.device),
        )

        def scatter(flat: Tensor) -> Tensor:
            return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).index_put((row, column), flat)

        return self._terms(
            part,
            log_prob=scatter(evaluation.log_prob.sum(-1)),
            entropy=scatter(evaluation.entropy.sum(-1)),
            value=scatter(evaluation.value) if "returns" in part else None,
            mask=mask,
            decisions=mask,
            divisors=Divisors(entries=mask.sum()),
            kl_coef=kl_coef,
        )

    def _not_finite(self, loss: float, norm: float, rows: np.ndarray, part: dict[str, Tensor]) -> NonFiniteLossError:
        error = NonFiniteLossError(f"The {self.config.loss} loss is {loss} and its gradient's norm {norm} on {len(rows)} episodes.", rows)
        error.batch = {name: value.detach().cpu().numpy() for name, value in part.items()}
        return error

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state, and the reference policy where there is one."""
        reference = (
            {} if self.reference is None else {f"reference.{name}": value.clone() for name, value in self.reference.state_dict().items()}
        )
        return {**self._adam.state_tensors(), **reference}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue exactly. Raises KeyError when the state is another policy's."""
        if self.reference is not None:
            self.reference.load_state_dict(
                {name.removeprefix("reference."): v for name, v in state.items() if name.startswith("reference.")}
            )
        self._adam.load_state_tensors({name: value for name, value in state.items() if not name.startswith("reference.")})
