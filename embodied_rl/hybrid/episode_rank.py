"""One rank's part of a step on whole episodes: the objective with the whole minibatch's denominators, and what a rank is sent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.composition import compose
from embodied_rl.algorithms.episodes import EpisodeBatch
from embodied_rl.config import AlgorithmConfig
from embodied_rl.hybrid import fsdp
from embodied_rl.hybrid.loss_terms import Divisors, LossTerms
from embodied_rl.hybrid.rank import EpisodeStep, Rank

INPUT, OBSERVATION = "input.", "observation."
OF_DECISIONS = ("value", "returns", "decisions")
"""Inputs that stay [n, T] whatever a ratio belongs to."""


class EpisodeObjective:
    """Any loss of the table on some episodes of a minibatch, divided by the whole minibatch's counts: parts add up, metrics too.

    T decisions of U units are T·U entries of a row, as of `PolicyEpisodeLearner`.
    """

    def __init__(self, config: AlgorithmConfig, steps: Tensor) -> None:
        """`steps`: [L] step of the chunk that each action unit belongs to."""
        self.config, self.steps = config, steps
        self._terms = LossTerms(config, compose(config).loss)

    def __call__(self, policy: nn.Module, tensors: Mapping[str, Tensor], step: EpisodeStep) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and metrics of the episodes of `pack_episodes`, of which `tensors` holds some rows."""
        evaluation = policy.evaluate(below(tensors, OBSERVATION), tensors["action"])  # type: ignore[operator]
        return self._terms.of_evaluation(
            below(tensors, INPUT),
            evaluation,
            (tensors["row"], tensors["column"]),
            unit_mask=tensors.get("unit_mask"),
            steps=self.steps,
            divisors=Divisors(loss=step.num_units, decisions=step.num_steps, entries=step.num_entries or step.num_steps),
            kl_coef=step.kl_coef,
        )


class EpisodeRank:
    """One rank's steps on episodes; every method is collective."""

    def __init__(self, rank: Rank) -> None:
        assert rank.objective is not None, "a policy that acts by itself"
        self.rank, self.objective = rank, EpisodeObjective(rank.config, rank.objective.steps)

    def step(self, tensors: Mapping[str, Tensor], step: EpisodeStep) -> tuple[dict[str, float], bool]:
        """Take one step on this rank's episodes (`pack_episodes`); metrics of the whole minibatch, with ``grad_norm`` and ``loss``.

        Returns:
            The metrics, and whether the step was finite and therefore taken.
        """
        rank = self.rank
        moved = {name: tensor.to(rank.device) for name, tensor in tensors.items()}
        sums: dict[str, Tensor] = {}

        def loss_of(start: int, stop: int) -> Tensor:
            loss, metrics = self.objective(rank.policy, episodes_between(moved, start, stop), step)
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double().cpu()
            return loss

        rank.set_learning_rate(step.learning_rate)
        rank.optimizer.zero_grad(set_to_none=True)
        fsdp.accumulate(rank.policy, [lambda start=start, stop=stop: loss_of(start, stop) for start, stop in step.parts])  # type: ignore[misc]
        names = sorted(sums)
        totals = rank.summed(torch.stack([sums[name] for name in names]))
        figures = dict(zip(names, totals.tolist(), strict=True))
        figures["grad_norm"] = fsdp.clip_gradients(rank.parameters.values(), rank.config.max_grad_norm)
        finite = bool(np.isfinite([figures["loss"], figures["grad_norm"]]).all())
        if finite:
            rank.optimizer.step()
        return figures, finite


def pack_episodes(
    batch: EpisodeBatch, inputs: Mapping[str, Tensor], chosen: np.ndarray, counts: np.ndarray, keys: tuple[str, ...]
) -> dict[str, Tensor]:
    """Some episodes as named tensors: ``input.<name>`` [n, L] or [n], and flat over their m steps ``observation.<key>``, ``action``,
    ``row`` (0 … n − 1), ``column`` and ``unit_mask``. An episode may come twice; what does not count has an empty mask."""
    own = {name: value[torch.from_numpy(chosen)] for name, value in inputs.items()}
    for name in ("mask", "decisions"):
        own[name] = own[name] & torch.from_numpy(counts)[:, None]
    steps = [(batch.row == int(episode)).nonzero().squeeze(-1) for episode in chosen]
    flat = torch.cat(steps)
    row = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(part) for part in steps]))
    tensors = {f"{INPUT}{name}": value for name, value in own.items()}
    tensors |= {f"{OBSERVATION}{key}": batch.observation[key][flat] for key in keys}
    if batch.unit_mask is not None:
        tensors["unit_mask"] = batch.unit_mask[flat]
    return {**tensors, "action": batch.action[flat], "row": row, "column": batch.column[flat]}


def episodes_between(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Episodes `start` to `stop` of what `pack_episodes` made, cut to the longest of them."""
    inside = ((tensors["row"] >= start) & (tensors["row"] < stop)).nonzero().squeeze(-1)
    longest = int(tensors["column"][inside].max()) + 1 if len(inside) else 1
    units = tensors[f"{INPUT}mask"].shape[1] // tensors[f"{INPUT}decisions"].shape[1]
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(INPUT):
            width = longest if name.removeprefix(INPUT) in OF_DECISIONS else longest * units
            found[name] = tensor[start:stop, :width] if tensor.dim() == 2 else tensor[start:stop]
        else:
            found[name] = tensor[inside] - start if name == "row" else tensor[inside]
    return found


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What is named ``<prefix>…``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
