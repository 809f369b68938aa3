"""One rank's part of a step on rows of tokens: how the rows are divided, what a rank is sent, and the step itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embodied_rl.algorithms.composition import compose
from embodied_rl.hybrid import fsdp
from embodied_rl.hybrid.rank import Rank
from embodied_rl.hybrid.token_objective import ReferenceLogProbs, TokenBatch, TokenObjective, cloning_objective
from embodied_rl.policies.language import LanguagePolicy
from embodied_rl.policies.packing import TokenSequence

_IMAGE, _PRESENT, _REFERENCE = "image.", "present", "reference"


@dataclass(frozen=True)
class TokenStep:
    """One optimizer step on rows of tokens as a rank sees it."""

    parts: list[list[int]]
    """Rows of each micro-batch, among those that the rank was sent; as many micro-batches on every rank."""
    denominator: float
    """What the loss is divided by: the aggregation's count of the whole minibatch."""
    kl_coef: float
    learning_rate: float
    clone: bool = False
    """Cross-entropy, instead of the loss that the algorithm names."""


class TokenRank:
    """One rank's steps on tokens; every method is collective."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.objective = TokenObjective(rank.config, compose(rank.config), rank.device)

    def step(self, tensors: Mapping[str, Tensor], step: TokenStep) -> tuple[dict[str, float], bool]:
        """Take one step on this rank's rows (`pack_tokens`); metrics of the whole minibatch, with ``grad_norm`` and ``loss``.

        Returns:
            The metrics, and whether the step was finite and therefore taken.
        """
        rank = self.rank
        batch, log_probs = unpack_tokens(tensors)
        sums: dict[str, Tensor] = {}

        def loss_of(part: list[int]) -> Tensor:
            rows = torch.tensor(part)
            if step.clone:
                loss, metrics = cloning_objective(rank.policy, batch, rows, step.denominator)
            else:
                count = torch.tensor(step.denominator, device=rank.device)
                loss, metrics = self.objective(rank.policy, batch, log_probs, rows, count, step.kl_coef)
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
            return loss

        rank.set_learning_rate(step.learning_rate)
        rank.optimizer.zero_grad(set_to_none=True)
        fsdp.accumulate(rank.policy, [lambda part=part: loss_of(part) for part in step.parts])  # type: ignore[misc]
        names = sorted(sums)
        totals = rank.summed(torch.stack([sums[name] for name in names]))
        figures = dict(zip(names, totals.tolist(), strict=True))
        figures["grad_norm"] = fsdp.clip_gradients(rank.parameters.values(), rank.config.max_grad_norm)
        finite = bool(np.isfinite([figures["loss"], figures["grad_norm"]]).all())
        if finite:
            rank.optimizer.step()
        rank.optimizer.zero_grad(set_to_none=True)
        return figures, finite


def divide_rows(
    policy: LanguagePolicy, sequences: Sequence[TokenSequence], num_parts: int, most_rows: int | None
) -> list[tuple[list[int], list[list[int]]]]:
    """Rows and micro-batches of each part: (indices of sequences, micro-batches as positions in these indices).

    Each part gets about as many tokens: the longest row first, to the part that has fewest. All parts have equally many micro-batches,
    because their ranks gather parameters together; what is missing is filled with the first sequence, whose position is -1.

    Args:
        most_rows: of one micro-batch; None: as many as `policy.micro_batches` allows.
    """
    loads, owned = [0] * num_parts, [[] for _ in range(num_parts)]  # type: ignore[var-annotated]
    for index in sorted(range(len(sequences)), key=lambda index: (-len(sequences[index]), index)):
        part = loads.index(min(loads))
        loads[part] += len(sequences[index])
        owned[part].append(index)
    planned = []
    for rows in owned:
        micro = policy.micro_batches([sequences[row] for row in rows]) if rows else []
        size = most_rows or max(len(rows), 1)
        planned.append([part[start : start + size] for part in micro for start in range(0, len(part), size)])
    most = max(len(micro) for micro in planned)
    return [(rows, [*micro, *([[-1]] * (most - len(micro)))]) for rows, micro in zip(owned, planned, strict=True)]


def pack_tokens(batch: TokenBatch, log_probs: ReferenceLogProbs, rows: np.ndarray, *, filler: int | None = None) -> dict[str, Tensor]:
    """Some rows of a batch as named tensors; `filler` is the number of one more row that counts for nothing, the last."""
    numbers = rows.tolist() + ([] if filler is None else [filler])
    chosen = torch.tensor(numbers)
    sequences = [batch.sequences[number] for number in numbers]
    mask = batch.mask[chosen].clone()
    if filler is not None:
        mask[-1] = False
    found = {
        "lengths": torch.tensor([len(sequence) for sequence in sequences]),
        "token_ids": torch.from_numpy(np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)),
        "evaluated": torch.from_numpy(np.concatenate([sequence.mask for sequence in sequences])),
        "mask": mask,
        **{name: getattr(batch, name)[chosen] for name in ("advantage", "behaviour_log_prob", "chunk_id", "positive")},
    }
    for name, value in ((_PRESENT, log_probs.present), (_REFERENCE, log_probs.reference)):
        if value is not None:
            found[name] = value[chosen]
    for row, sequence in enumerate(sequences):
        found |= {f"{_IMAGE}{row}.{number}": torch.from_numpy(image) for number, image in enumerate(sequence.images)}
    return found


def unpack_tokens(tensors: Mapping[str, Tensor]) -> tuple[TokenBatch, ReferenceLogProbs]:
    """The batch that `pack_tokens` took apart."""
    lengths = tensors["lengths"].tolist()
    token_ids, evaluated = (np.split(tensors[name].numpy(), np.cumsum(lengths)[:-1]) for name in ("token_ids", "evaluated"))
    images: list[list[np.ndarray]] = [[] for _ in lengths]
    pictures = sorted((tuple(map(int, name.removeprefix(_IMAGE).split("."))), name) for name in tensors if name.startswith(_IMAGE))
    for (row, _), name in pictures:
        images[row].append(tensors[name].numpy())
    sequences = tuple(TokenSequence(ids, mask, tuple(own)) for ids, mask, own in zip(token_ids, evaluated, images, strict=True))
    named = {name: tensors[name] for name in ("mask", "advantage", "behaviour_log_prob", "chunk_id", "positive")}
    return TokenBatch(sequences, **named), ReferenceLogProbs(tensors.get(_PRESENT), tensors.get(_REFERENCE))


def of_cloning(sequences: Sequence[TokenSequence]) -> TokenBatch:
    """Sequences whose masked tokens are to be imitated, as a batch."""
    width = max(len(sequence) for sequence in sequences)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        mask[row, : len(sequence)] = torch.from_numpy(sequence.mask)
    nothing = torch.zeros(mask.shape)
    return TokenBatch(tuple(sequences), mask, nothing, nothing, nothing.long(), mask.any(1))


def step_of(step: TokenStep, micro: list[list[int]], num_rows: int) -> TokenStep:
    """The step of a part with `num_rows` rows, whose filler is the last of what it is sent."""
    return replace(step, parts=[[num_rows if position < 0 else position for position in part] for part in micro])
