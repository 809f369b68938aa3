"""Rows other than a rollout's decisions (`algorithms.batch.Batch`): stored steps, whole episodes and texts of tokens. `adjust_rows` makes
their number divisible among ranks and micro-batches (ROLL's batch adjustment)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.batch import Rows
from embodied_rl.errors import UserError
from embodied_rl.policies.packing import KeptStructure, TokenSequence

_IMAGE, _STRUCTURES = "image.", "structures"
VALUED = "valued"
"""Input of episodes, [B, T] bool: decisions with returns, the critic's targets. Absent: all have returns, or none."""


class StoredRows(Rows):
    """Stored steps, each with an action."""

    action: Tensor
    mask: Tensor | None
    """[B] bool: rows that count; None: all rows."""

    @property
    def num_rows(self) -> int:
        """B: number of rows."""
        return int(self.action.shape[0])

    @property
    def device(self) -> torch.device:
        return self.action.device

    def filler(self) -> Self:
        first = self.mapped(lambda tensor: tensor[:1])
        return first.replaced(mask=torch.zeros(1, dtype=torch.bool, device=self.device))


@dataclass(frozen=True)
class StepRows(StoredRows):
    """B steps whose actions are imitated."""

    observation: dict[str, Tensor]
    """{key: [B, ...]} as the policy prepared it."""
    action: Tensor
    """[B, A] normalised, int64 [B, 1] for discrete; chunks [B, K, A]."""
    executed: Tensor | None = None
    """[B, K] bool: steps of chunks that exist; None: all steps."""
    cloning_noise: Tensor | None = None
    """[B, …] from `Policy.cloning_noise`."""
    mask: Tensor | None = None


@dataclass(frozen=True)
class TransitionRows(StoredRows):
    """B transitions, and the random numbers of one update."""

    observation: dict[str, Tensor]
    """{key: [B, ...]}"""
    next_observation: dict[str, Tensor]
    """{key: [B, ...]}; ignored where `discount` is 0."""
    action: Tensor
    """[B, A] normalised, int64 [B, 1] for discrete; chunks [B, K, A], 0 where not executed."""
    reward: Tensor
    """[B] discounted sum of rewards until the next observation."""
    discount: Tensor
    """[B] discount of the next state's value, 0 after a terminated step."""
    members: Tensor
    """[M] int64: the critics whose smallest value is the target."""
    executed: Tensor | None = None
    """[B, K] bool: steps of chunks that exist; None: all steps."""
    noise: Tensor | None = None
    """[B, noise_width] noise of the policy's actions; None: no action is drawn."""
    next_noise: Tensor | None = None
    """[B, noise_width] noise of its actions at `next_observation`."""
    cloning_noise: Tensor | None = None
    """[B, …] from `Policy.cloning_noise`."""
    mask: Tensor | None = None

    of_all: ClassVar[frozenset[str]] = frozenset({"members"})


@dataclass(frozen=True)
class EpisodeRows(Rows):
    """B episodes of at most T decisions, M decisions in all. A decision has U entries, the units of `algorithm.ratio`."""

    inputs: dict[str, Tensor]
    """{name: [B, T·U], [B, T] or [B]} that losses request by name, with ``mask`` [B, T·U] and ``decisions`` [B, T]. With a critic that
    values each step of a chunk, ``value``, ``returns`` and ``valued`` are [B, T·K]."""
    observation: dict[str, Tensor]
    """{key: [M, ...]}, one episode after another."""
    action: Tensor
    """[M, A]"""
    row: Tensor
    """[M] int64 episode of each decision."""
    column: Tensor
    """[M] int64 index of each decision in its episode."""
    unit_mask: Tensor | None = None
    """[M, L] bool: action units that were executed; None: all units."""

    @classmethod
    def joined(cls, parts: Sequence[EpisodeRows]) -> EpisodeRows:
        """Concatenate parts, padded to the longest."""
        if len(parts) == 1:
            return parts[0]
        if len({"returns" in part.inputs for part in parts}) > 1:
            parts = [part.with_targets() for part in parts]
        longest = max(part.inputs["decisions"].shape[1] for part in parts)

        def padded(part: EpisodeRows, name: str) -> Tensor:
            value, steps = part.inputs[name], part.inputs["decisions"].shape[1]
            missing = 0 if value.dim() < 2 else (longest - steps) * (value.shape[1] // steps)
            return torch.nn.functional.pad(value, (0, missing)) if missing else value

        before = np.cumsum([0, *(part.num_rows for part in parts)]).tolist()
        masks = [part.unit_mask for part in parts if part.unit_mask is not None]
        return cls(
            inputs={name: torch.cat([padded(part, name) for part in parts]) for name in parts[0].inputs},
            observation={key: torch.cat([part.observation[key] for part in parts]) for key in parts[0].observation},
            action=torch.cat([part.action for part in parts]),
            row=torch.cat([part.row + first for part, first in zip(parts, before, strict=False)]),
            column=torch.cat([part.column for part in parts]),
            unit_mask=torch.cat(masks) if masks else None,
        )

    @property
    def num_rows(self) -> int:
        """B: number of rows."""
        return int(self.inputs["decisions"].shape[0])

    @property
    def device(self) -> torch.device:
        return self.action.device

    def with_targets(self) -> EpisodeRows:
        """Add a critic's inputs, whether or not there are returns to learn."""
        decisions = self.inputs["decisions"]
        returns = self.inputs.get("returns", torch.zeros(decisions.shape))
        return replace(self, inputs={**self.inputs, "returns": returns, VALUED: decisions & ("returns" in self.inputs)})

    def without_advantages(self) -> EpisodeRows:
        return replace(self, inputs={**self.inputs, "advantage": torch.zeros_like(self.inputs["advantage"])})

    def episodes_of(self, num_decisions: int) -> int:
        """Number of episodes that together have about `num_decisions` decisions that count."""
        decisions = self.inputs["decisions"]
        return round(num_decisions * int(decisions.any(1).sum()) / max(int(decisions.sum()), 1))

    def chosen(self, rows: Tensor) -> EpisodeRows:
        """See `Rows.chosen`; cut to the longest chosen episode. Each episode may be chosen once."""
        place = torch.full((self.num_rows,), -1)
        place[rows] = torch.arange(len(rows))
        flat = (place[self.row] >= 0).nonzero().squeeze(-1)
        column = self.column[flat]
        longest, steps = int(column.max()) + 1 if len(column) else 1, self.inputs["decisions"].shape[1]
        inputs = {}
        for name, value in self.inputs.items():
            part = value[rows]
            inputs[name] = part[:, : longest * (part.shape[1] // steps)] if part.dim() == 2 else part
        return EpisodeRows(
            inputs=inputs,
            observation={key: part[flat] for key, part in self.observation.items()},
            action=self.action[flat],
            row=place[self.row[flat]],
            column=column,
            unit_mask=None if self.unit_mask is None else self.unit_mask[flat],
        )

    def filler(self) -> EpisodeRows:
        first = self.chosen(torch.zeros(1, dtype=torch.int64))
        nothing = {name: torch.zeros_like(first.inputs[name]) for name in ("mask", "decisions", VALUED) if name in first.inputs}
        return replace(first, inputs={**first.inputs, **nothing})

    @property
    def counts(self) -> Tensor:
        return self.inputs["decisions"].any(1)

    def staged(self, device: torch.device) -> EpisodeRows:
        """See `Rows.staged`: they stay on the host."""
        return self


@dataclass(frozen=True)
class TokenBatch(Rows):
    """R rows of at most S tokens with the inputs of losses; entries are 0 where `mask` is False."""

    sequences: tuple[TokenSequence, ...]
    mask: Tensor
    """[R, S] bool: sampled tokens that are learned from."""
    advantage: Tensor
    """[R, S]"""
    behaviour_log_prob: Tensor
    """[R, S] log-probabilities under the policy that sampled."""
    chunk_id: Tensor
    """[R, S] int64 number of the token's turn in its episode."""
    positive: Tensor
    """[R] bool: rows of episodes that succeeded."""
    present: Tensor | None = None
    """[R, S] log-probabilities under the policy at the start of the update; None: neither the loss nor a KL term needs them."""
    reference: Tensor | None = None
    """[R, S] log-probabilities under the policy that the run began with; None: there is no KL term."""
    returns: Tensor | None = None
    """[R, S] the critic's targets where `valued`; None, as the two below: there is no critic."""
    value: Tensor | None = None
    """[R, S] values that the returns were computed with."""
    valued: Tensor | None = None
    """[R, S] bool: first token of each turn, which carries the value of the state before the turn."""

    @staticmethod
    def of_cloning(sequences: Sequence[TokenSequence]) -> TokenBatch:
        """Make rows from sequences whose masked tokens are imitated."""
        mask = torch.zeros(len(sequences), max(len(sequence) for sequence in sequences), dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            mask[row, : len(sequence)] = torch.from_numpy(sequence.mask)
        nothing = torch.zeros(mask.shape)
        return TokenBatch(tuple(sequences), mask, nothing, nothing, nothing.long(), mask.any(1))

    @classmethod
    def joined(cls, parts: Sequence[TokenBatch]) -> TokenBatch:
        """Concatenate parts, padded to the widest; fields that only some parts have (a critic's) are 0 in the others."""
        if len(parts) == 1:
            return parts[0]
        width, named = max(part.mask.shape[1] for part in parts), [Rows.tensors(part) for part in parts]

        def whole(name: str, like: Tensor) -> Tensor:
            found = [own.get(name, torch.zeros_like(own["mask"], dtype=like.dtype)) for own in named]
            return torch.cat([value if value.dim() < 2 else nn.functional.pad(value, (0, width - value.shape[1])) for value in found])

        every = {name: value for own in named for name, value in own.items()}
        sequences = tuple(sequence for part in parts for sequence in part.sequences)
        return cls(sequences, **{name: whole(name, value) for name, value in every.items()})

    def without_advantages(self) -> TokenBatch:
        return replace(self, advantage=torch.zeros_like(self.advantage))

    @property
    def num_rows(self) -> int:
        """R: number of rows."""
        return len(self.sequences)

    def chosen(self, rows: Tensor) -> TokenBatch:
        """See `Rows.chosen`; the width stays."""
        named = {name: value[rows] for name, value in super().tensors().items()}
        return TokenBatch(tuple(self.sequences[int(number)] for number in rows), **named)

    def filler(self) -> TokenBatch:
        first = self.chosen(torch.zeros(1, dtype=torch.int64))
        nothing = torch.zeros_like(first.mask)
        return replace(first, mask=nothing, valued=None if first.valued is None else nothing)

    @property
    def counts(self) -> Tensor:
        return self.mask.any(1)

    @property
    def device(self) -> torch.device:
        return self.mask.device

    def moved(self, device: torch.device) -> TokenBatch:
        """See `Rows.moved`: the policy moves them."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        found = {
            "lengths": torch.tensor([len(sequence) for sequence in self.sequences]),
            "token_ids": torch.from_numpy(np.concatenate([sequence.token_ids for sequence in self.sequences]).astype(np.int64)),
            "evaluated": torch.from_numpy(np.concatenate([sequence.mask for sequence in self.sequences])),
            **super().tensors(),
        }
        if any(sequence.temperature != 1.0 for sequence in self.sequences):
            found["temperature"] = torch.tensor([sequence.temperature for sequence in self.sequences], dtype=torch.float64)
        if any(sequence.structures for sequence in self.sequences):
            text = json.dumps([sequence.structures for sequence in self.sequences])
            found[_STRUCTURES] = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        for row, sequence in enumerate(self.sequences):
            found |= {f"{_IMAGE}{row}.{number}": torch.from_numpy(image) for number, image in enumerate(sequence.images)}
        return found

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> TokenBatch:
        lengths = tensors["lengths"].tolist()
        token_ids, evaluated = (np.split(tensors[name].numpy(), np.cumsum(lengths)[:-1]) for name in ("token_ids", "evaluated"))
        images: list[list[np.ndarray]] = [[] for _ in lengths]
        pictures = sorted((tuple(map(int, name.removeprefix(_IMAGE).split("."))), name) for name in tensors if name.startswith(_IMAGE))
        for (row, _), name in pictures:
            images[row].append(tensors[name].numpy())
        kept: list[tuple[KeptStructure, ...]] = [() for _ in lengths]
        if _STRUCTURES in tensors:
            saved = json.loads(tensors[_STRUCTURES].numpy().tobytes())
            kept = [tuple((first, end, text, tuple(stops)) for first, end, text, stops in own) for own in saved]
        temperatures = tensors["temperature"].tolist() if "temperature" in tensors else [1.0] * len(lengths)
        parts = zip(token_ids, evaluated, map(tuple, images), kept, temperatures, strict=True)
        sequences = tuple(TokenSequence(*part) for part in parts)
        return cls(sequences, **{field.name: tensors[field.name] for field in fields(cls) if field.name in tensors})


Adjustment = Literal["copy", "delete", "auto", "random_sample"]
"""copy: add copies of random rows. delete: drop random rows. auto: the smaller change of the two; copy if they are equal or if delete would
leave no row. random_sample: draw the largest multiple of random rows without replacement; with fewer rows than one multiple, keep all and
add copies drawn with replacement. A divisible number of rows stays as it is in every mode."""


def adjust_rows(num_rows: int, *, divisors: Sequence[int], mode: Adjustment, seed: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Choose rows so that their number is a multiple of D, the least common multiple of `divisors` (such as ranks × micro-batch).

    With rem = num_rows mod D: ``copy`` adds D − rem copies, ``delete`` drops rem, ``random_sample`` draws num_rows − rem rows without
    replacement, in random order, or fills fewer than D up to D with replacement. rem = 0: the batch stays as it is.

    Args:
        divisors: numbers that the number of rows must be divisible by.
        seed: the result depends only on it and the other arguments; pass (run seed, iteration).

    Returns [n] int64 rows of the batch (kept rows stay in their order, copies come last), and [n] float32 weights: 1.0, or 0.0 for copies.

    Raises UserError: ``delete`` would leave no row.
    """
    multiple = math.lcm(*divisors)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    rest = num_rows % multiple
    rows = np.arange(num_rows)
    if rest == 0:
        return rows, np.ones(num_rows, np.float32)
    missing = multiple - rest
    if mode == "random_sample" and num_rows > multiple:
        return rng.permutation(num_rows)[rest:], np.ones(num_rows - rest, np.float32)
    if mode in ("copy", "random_sample") or (mode == "auto" and (missing <= rest or num_rows < multiple)):
        copies = rng.integers(num_rows, size=missing) if mode == "random_sample" else _spread_draw(rng, num_rows, missing)
        return np.concatenate([rows, copies]), np.repeat(np.array([1, 0], np.float32), [num_rows, missing])
    if num_rows < multiple:
        raise UserError(
            f"Deleting rows of a batch of {num_rows} until {multiple} (the least common multiple of {list(divisors)}) divides their number "
            "leaves none: set algorithm.adjust_batch=copy or auto, a larger algorithm.groups.groups_per_step, or a smaller minibatch_size."
        )
    kept = np.sort(rng.permutation(num_rows)[rest:])
    return kept, np.ones(kept.size, np.float32)


def _spread_draw(rng: np.random.Generator, num_rows: int, count: int) -> np.ndarray:
    """`count` random rows [count] int64; each row is drawn at most once more often than any other."""
    rounds = [rng.permutation(num_rows) for _ in range(-(-count // num_rows))]
    return np.concatenate(rounds)[:count]
