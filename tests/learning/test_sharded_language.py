"""Language agents on two ranks against one process, through the learner's own door."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.config import AlgorithmConfig, GroupsConfig, HybridConfig, KlConfig, LanguageConfig, ShardingConfig
from embodied_rl.errors import NonFiniteError
from embodied_rl.learning.episode_objectives import TokenObjective
from embodied_rl.learning.learner import Learner, make_learner
from embodied_rl.learning.rows import TokenBatch
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from tests.policies.language_models import random_sequences, tiny

pytestmark = pytest.mark.usefixtures("forked")

LENGTHS = [(4, 5), (3, 9), (6, 1), (2, 7), (5, 3), (4, 8), (3, 3)]
CONFIG = AlgorithmConfig(
    groups=GroupsConfig(),
    advantage="grpo",
    loss="ppo_clip",
    num_epochs=2,
    entropy_coef=0.01,
    kl=KlConfig(coef=0.1, place="loss"),
    learning_rate=3e-3,
    max_grad_norm=0.3,
    lr_schedule="linear",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sharded") / "model")


def make_policy(folder: Path, **options: Any) -> LanguagePolicy:
    torch.manual_seed(0)
    policy = build_language_policy(LanguageConfig(str(folder), **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # LoRA begins at zero
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def make_batch(*, valued: bool = False) -> TokenBatch:
    sequences = random_sequences(3, LENGTHS)
    generator = torch.Generator().manual_seed(2)
    width = max(len(sequence) for sequence in sequences)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        mask[row, : len(sequence)] = torch.from_numpy(sequence.mask)
    mask[1, 5:8] = False  # sampled, and not learned from
    numbers = torch.randn(4, *mask.shape, generator=generator) * mask
    critic = {"returns": numbers[2], "value": numbers[3], "valued": mask & torch.cat([~mask[:, :1], ~mask[:, :-1]], dim=1)}
    return TokenBatch(tuple(sequences), mask, numbers[0], -2.0 + 0.3 * numbers[1], mask.long(), mask.any(1), **(critic if valued else {}))


def token_learner(policy: LanguagePolicy, sharding: ShardingConfig | None = None) -> Learner:
    return make_learner(TokenObjective(policy, CONFIG), policy, CONFIG, HybridConfig(device="cpu", num_threads=1, sharding=sharding))


def learn(learner: Learner, batch: TokenBatch, step: int) -> dict[str, float]:
    present, reference = (learner.token_log_probs(batch.sequences, of_reference=first) for first in (False, True))
    rows = dataclasses.replace(batch, present=present, reference=reference)
    return learner.update(rows, minibatch_rows=4, progress=0.1 * step, seed=[3, step], kl_coef=0.1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.slow),
        pytest.param({"lora_rank": 2, "lora_targets": ("q_proj", "down_proj")}, id="lora"),
        pytest.param({"layout": "right"}, id="padded", marks=pytest.mark.slow),
        pytest.param({"value_head": "mlp"}, id="critic", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(folder: Path, options: dict[str, Any], tmp_path: Path) -> None:
    # So few tokens a forward that the parts have several, and not equally many.
    alone, together = (make_policy(folder, max_tokens_per_micro_batch=24, **options) for _ in range(2))
    plain, learner = token_learner(alone), token_learner(together, ShardingConfig(num_shards=2))
    ranks = learner.ranks
    assert ranks is not None
    batch = make_batch(valued="value_head" in options)
    try:
        for each in (plain, learner):
            each.keep_reference()
        losses = [
            each.clone(random_sequences(5, LENGTHS[:5]), num_epochs=2, minibatch_rows=3, learning_rate=1e-3, seed=1)
            for each in (plain, learner)
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for step in range(2):
            wanted, found = learn(plain, batch, step), learn(learner, batch, step)
            assert ("value_loss" in wanted) == ("value_head" in options)
            assert found == pytest.approx(wanted, rel=1e-3, abs=1e-6)
            ranks.write_back()
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(dict(together.named_parameters())[name], parameter, rtol=0, atol=1e-5, msg=name)
        state = plain.state_tensors()
        found_state = learner.state_tensors()
        assert found_state.keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(found_state[name], tensor, rtol=1e-3, atol=1e-6, msg=name)
        # Parts on the disk, and back: exactly.
        ranks.save_parts(tmp_path / "parts")()
        ranks.forget()
        ranks.load_parts(tmp_path / "parts")
        again = learner.state_tensors()
        assert [name for name, tensor in found_state.items() if not torch.equal(again[name], tensor)] == []
        bad = TokenBatch(batch.sequences, batch.mask, batch.advantage * torch.nan, batch.behaviour_log_prob, batch.chunk_id, batch.positive)
        with pytest.raises(NonFiniteError, match="nan"):
            learn(learner, bad, 0)
    finally:
        ranks.close()


def test_rows_are_divided_by_tokens_and_every_part_has_as_many_forwards(folder: Path) -> None:
    policy = make_policy(folder, max_tokens_per_micro_batch=20)
    batch, objective = make_batch(), TokenObjective(policy, CONFIG)
    sequences = batch.sequences
    for num_parts in (1, 2, 3, 9):
        parts = objective.divide(policy, batch, num_parts, None)
        assert sorted(row for part in parts for row in part.rows) == list(range(len(sequences)))
        assert len({len(part.micro) for part in parts}) == 1
        loads = [sum(len(sequences[row]) for row in part.rows) for part in parts]
        assert max(loads) - min(loads) <= max(len(sequence) for sequence in sequences)
        for part in parts:
            assert sorted(place for places in part.micro for place in places if place >= 0) == list(range(len(part.rows)))
            forwards = [[sequences[part.rows[place]] for place in places] for places in part.micro if places != [-1]]
            assert all(len(policy.micro_batches(one)) == 1 for one in forwards)
    assert all(len(places) == 1 for part in objective.divide(policy, batch, 2, 1) for places in part.micro)


def test_a_batch_comes_out_of_its_parcel_as_it_was() -> None:
    batch = make_batch(valued=True)
    batch = dataclasses.replace(batch, present=batch.advantage + 1, reference=batch.advantage - 1)
    pictures = tuple(np.random.default_rng(place).integers(0, 256, (4 + place, 3, 3), dtype=np.uint8) for place in range(12))
    kept = ((2, 4, '{"type": "structural_tag"}', (2, 7)), (5, 6, "{}", ()))
    special = dataclasses.replace(batch.sequences[4], images=pictures, structures=kept, temperature=0.6)
    shown = [*batch.sequences[:4], special, *batch.sequences[5:]]
    batch = dataclasses.replace(batch, sequences=tuple(shown))
    found = TokenBatch.of_tensors(batch.chosen(torch.tensor([4, 1, 0])).tensors())
    for place, row in enumerate((4, 1, 0)):
        np.testing.assert_array_equal(found.sequences[place].token_ids, batch.sequences[row].token_ids)
        np.testing.assert_array_equal(found.sequences[place].mask, batch.sequences[row].mask)
        assert len(found.sequences[place].images) == len(batch.sequences[row].images)
        for name in ("advantage", "behaviour_log_prob", "chunk_id", "positive", "present", "reference", "returns", "value", "valued"):
            assert torch.equal(getattr(found, name)[place], getattr(batch, name)[row]), name
    assert all(np.array_equal(one, other) for one, other in zip(found.sequences[0].images, pictures, strict=True))
    assert [sequence.structures for sequence in found.sequences] == [kept, (), ()]
    assert [sequence.temperature for sequence in found.sequences] == [0.6, 1.0, 1.0]
    assert torch.equal(found.mask, batch.mask[[4, 1, 0]])
    filler = TokenBatch.of_tensors(batch.filler().tensors())
    assert filler.num_rows == 1
    assert filler.valued is not None
    assert not (filler.mask | filler.valued).any()
