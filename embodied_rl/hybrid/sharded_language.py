"""The learner of language agents on several ranks: each minibatch's rows are divided over them, its denominator is the whole's."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from embodied_rl.algorithms.composition import Composition
from embodied_rl.config import AlgorithmConfig, HybridConfig
from embodied_rl.hybrid.language_learner import LanguageLearner, check_cloning
from embodied_rl.hybrid.rank_group import RankGroup
from embodied_rl.hybrid.token_objective import ReferenceLogProbs, TokenBatch
from embodied_rl.hybrid.token_rank import TokenRank, TokenStep, divide_rows, of_cloning, pack_tokens, step_of
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence


class ShardedLanguageLearner(LanguageLearner):
    """`LanguageLearner` over the ranks of `hybrid.sharding`; log-probabilities before the update are the whole policy's."""

    def __init__(
        self,
        policy: LanguagePolicy,
        config: AlgorithmConfig,
        composition: Composition,
        hybrid: HybridConfig,
        *,
        trust_sampled: bool = False,
    ) -> None:
        """Start the ranks. Raises as `RankGroup`."""
        super().__init__(policy, config, composition, hybrid.device, hybrid.rank_threads, trust_sampled=trust_sampled)
        self.sharded = RankGroup(policy, config, hybrid, self.device)
        self._own = TokenRank(self.sharded.rank)

    def clone(self, *args: Any, **kwargs: Any) -> float:
        """See `LanguageLearner.clone`; the whole policy has the cloned weights afterwards."""
        loss = super().clone(*args, **kwargs)
        self.sharded.write_back(self.policy)
        return loss

    def state_tensors(self) -> dict[str, Tensor]:
        """See `LanguageLearner.state_tensors`."""
        return {**self.sharded.state_tensors(), **self._reference_tensors()}

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """See `LanguageLearner.load_state_tensors`."""
        self.sharded.load_state_tensors(self._take_reference(state))

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _step(self, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: np.ndarray, rate: float, kl_coef: float) -> dict[str, float]:
        denominator = float(self._denominator(batch, rows))
        figures = self._together(batch, log_probs, rows, TokenStep([], denominator, kl_coef, rate))
        self._check_finite(batch, rows, figures["loss"], figures["grad_norm"])
        return figures

    def _clone_step(self, sequences: list[TokenSequence], rate: float, rows: np.ndarray) -> float:
        count = float(sum(int(sequence.mask.sum()) for sequence in sequences))
        step = TokenStep([], count, 0.0, rate, clone=True)
        figures = self._together(of_cloning(sequences), ReferenceLogProbs(None, None), np.arange(len(sequences)), step)
        check_cloning(figures["loss"], figures["grad_norm"], rows)
        return figures["loss"]

    def _together(self, batch: TokenBatch, log_probs: ReferenceLogProbs, rows: np.ndarray, step: TokenStep) -> dict[str, float]:
        """One step of all ranks on these rows; the figures of the whole, ``loss`` and ``grad_norm`` among them."""
        sharded = self.sharded
        sequences = [batch.sequences[row] for row in rows]
        plans = divide_rows(self.policy, sequences, sharded.num_parts, sharded.sharding.micro_batch_size)

        def part_of(index: int) -> tuple[TokenStep, dict[str, Tensor]]:
            own, micro = plans[index]
            filler = int(rows[0]) if any(-1 in part for part in micro) else None
            return step_of(step, micro, len(own)), pack_tokens(batch, log_probs, rows[own], filler=filler)

        sharded.send_parts("tokens", part_of)
        own_step, tensors = part_of(0)
        with sharded.blaming_workers():
            figures, _ = self._own.step(tensors, own_step)
        return figures

    def _forget_moments(self) -> None:
        self.sharded.forget_moments()
