"""The learner of whole episodes for any policy: action units of chunks, learning rates of its parts, micro-batches, mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.composition import Composition
from embodied_rl.algorithms.episodes import Credit, EpisodeBatch, EpisodeValues
from embodied_rl.algorithms.units import at_level, mask_at_level
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid.episode_learner import EpisodeLearner
from embodied_rl.hybrid.loss_terms import Divisors
from embodied_rl.hybrid.policy_updater import PolicyUpdater, Precision
from embodied_rl.hybrid.threads import compute_threads
from embodied_rl.policies.base import Policy

_ROWS = 512
"""Decisions of one forward without gradients at most."""
_OF_DECISIONS = ("value", "returns")
"""Inputs that stay [B, T] whatever a ratio belongs to."""


class PolicyEpisodeLearner(EpisodeLearner):
    """As `EpisodeLearner`, with an entry for each unit of `algorithm.ratio`.

    T decisions of U units are T·U entries of a row: U is 1 (chunk), K (action) or L (token). Entries whose step was not executed are
    masked, so that ``seq-mean-token-mean`` divides by what an episode really did.
    """

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        composition: Composition,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(policy, config, composition, device, num_threads)  # type: ignore[arg-type]
        self._adam: PolicyUpdater = PolicyUpdater(policy, config, self.device, precision)
        self.precision, self._steps = precision, self._adam.steps
        self.units = {"chunk": 1, "action": self._adam.layout.chunk_size, "token": self._adam.layout.num_units}[config.ratio]
        """U"""
        self._entries: dict[str, Tensor] = {}

    # ---- without gradients ------------------------------------------------------------------------------------------

    def values(self, batch: EpisodeBatch) -> EpisodeValues:
        """See `EpisodeLearner.values`."""
        rows, longest = batch.shape
        if not self.composition.needs_critic:
            return EpisodeValues(torch.zeros(rows, longest), torch.zeros(rows))
        with compute_threads(self.compute_threads):
            flat, final = self._adam.prepared_values(batch.observation), self._adam.prepared_values(batch.final_observation)
        return EpisodeValues(batch.scatter(torch.from_numpy(flat)), torch.from_numpy(final))

    @torch.no_grad()
    def _log_prob(self, policy: Policy, batch: EpisodeBatch) -> Tensor:
        """[B, T] of whole decisions; those of their units are kept for the update."""
        parts = []
        with compute_threads(self.compute_threads), self._autocast():
            for start in range(0, len(batch.action), _ROWS):
                seen = {key: part[start : start + _ROWS].to(self.device) for key, part in batch.observation.items()}
                parts.append(policy.evaluate(seen, batch.action[start : start + _ROWS].to(self.device)).log_prob.float().cpu())
        flat = torch.cat(parts)
        self._entries["reference" if policy is self.reference else "present"] = flat
        return batch.scatter(at_level(flat, "chunk", batch.unit_mask, self._steps.cpu()))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    # ---- the update -------------------------------------------------------------------------------------------------

    def _inputs(self, batch: EpisodeBatch, credit: Credit, log_prob: Tensor | None, reference: Tensor | None) -> dict[str, Tensor]:
        inputs = super()._inputs(batch, credit, log_prob, reference)
        inputs |= {"decisions": credit.mask}
        if self.config.ratio == "chunk":
            return inputs
        steps = self._steps.cpu()
        assert batch.unit_log_prob is not None, "the batch was made from episodes"
        own = {"behaviour_log_prob": batch.unit_log_prob}
        own |= {name: self._entries["present"] for name in ("old_log_prob", "proximal_log_prob") if name in inputs}
        own |= {name: self._entries["reference"] for name in ("reference_log_prob",) if name in inputs}
        for name, value in inputs.items():
            if value.dim() == 2 and name not in (*_OF_DECISIONS, "decisions"):
                inputs[name] = value.repeat_interleave(self.units, dim=1)
        for name, flat in own.items():
            inputs[name] = self._scatter(batch, at_level(flat, self.config.ratio, batch.unit_mask, steps))
        if batch.unit_mask is not None:
            there = mask_at_level(batch.unit_mask, self.config.ratio, steps)
            assert there is not None, "there is a mask"
            inputs["mask"] = inputs["mask"] & self._scatter(batch, there)
        return inputs

    def _scatter(self, batch: EpisodeBatch, flat: Tensor) -> Tensor:
        """[M, U] → [B, T·U] with zeros elsewhere."""
        whole = torch.zeros((*batch.shape, self.units), dtype=flat.dtype)
        whole[batch.row, batch.column] = flat
        return whole.flatten(1)

    def _step(self, batch: EpisodeBatch, inputs: dict[str, Tensor], rows: np.ndarray, kl_coef: float) -> dict[str, float]:
        """One step of the optimizer for these episodes, in parts of about `micro_batch_size` decisions."""
        masks = inputs["mask"][torch.from_numpy(rows)]
        decisions = inputs["decisions"][torch.from_numpy(rows)]
        divisors = Divisors(
            loss=self.aggregation.count(masks).clamp(min=1).item(),
            decisions=decisions.sum().clamp(min=1).item(),
            entries=masks.sum().clamp(min=1).item(),
        )
        self._adam.optimizer.zero_grad(set_to_none=True)
        figures: dict[str, float] = {}
        total = 0.0
        for chosen in self._parts(rows, decisions):
            part = {name: value[torch.from_numpy(chosen)].to(self.device) for name, value in inputs.items()}
            longest = int(part["decisions"].sum(1).max())
            part = {name: self._cut(name, value, longest) for name, value in part.items()}
            loss, metrics = self._part_objective(batch, torch.from_numpy(chosen), part, kl_coef, divisors)
            loss.backward()
            total += float(loss.detach())
            for name, value in metrics.items():
                figures[name] = figures.get(name, 0.0) + float(value)
        norm = nn.utils.clip_grad_norm_(self._adam.parameters.values(), self.config.max_grad_norm)
        figures["grad_norm"] = float(norm)
        if not (np.isfinite(figures["grad_norm"]) and np.isfinite(total)):
            raise self._not_finite(total, float(norm), rows, {name: value[torch.from_numpy(rows)] for name, value in inputs.items()})
        self._adam.optimizer.step()
        return figures

    def _cut(self, name: str, value: Tensor, longest: int) -> Tensor:
        if value.dim() != 2:
            return value
        return value[:, :longest] if name in (*_OF_DECISIONS, "decisions") else value[:, : longest * self.units]

    def _parts(self, rows: np.ndarray, decisions: Tensor) -> Iterator[np.ndarray]:
        """Episodes side by side, about `micro_batch_size` decisions at a time, at least one episode."""
        size = self.config.micro_batch_size
        if size is None:
            yield rows
            return
        begun = np.cumsum(decisions.sum(1).numpy()) - decisions.sum(1).numpy()
        for part in np.unique(begun // size):
            yield rows[begun // size == part]

    def _part_objective(
        self, batch: EpisodeBatch, chosen: Tensor, part: dict[str, Tensor], kl_coef: float, divisors: Divisors
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the episodes `chosen` add to the loss and the metrics of their minibatch."""
        place = torch.full((batch.shape[0],), -1)
        place[chosen] = torch.arange(len(chosen))
        at = (place[batch.row] >= 0).nonzero().squeeze(-1)
        row, column = place[batch.row[at]].to(self.device), batch.column[at].to(self.device)
        with self._autocast():
            evaluation = self.policy.evaluate(
                {key: value[at].to(self.device) for key, value in batch.observation.items()}, batch.action[at].to(self.device)
            )
        unit_mask = None if batch.unit_mask is None else batch.unit_mask[at].to(self.device)
        return self._terms.of_evaluation(
            part, evaluation, (row, column), unit_mask=unit_mask, steps=self._steps, divisors=divisors, kl_coef=kl_coef
        )
