"""Returns by chunks of a row: by hand, and against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.advantages import token_returns
from embodied_rl.algorithms.grouped import chunk_ranks, chunk_returns, segment_returns
from embodied_rl.errors import NonFiniteError

# Three turns of 2, 1 and 2 tokens with a tool's output between them.
MASK = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1]], dtype=torch.bool)


def test_runs_of_the_mask_are_chunks() -> None:
    ranks, count = chunk_ranks(mask=MASK)
    assert ranks.tolist() == [[0, 0, 0, 1, 0, 0, 2, 2]]
    assert count.tolist() == [3]
    ranks, count = chunk_ranks(mask=torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool))
    assert ranks.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert count.tolist() == [1, 0, 2]


def test_numbered_chunks_go_by_first_appearance_and_may_have_holes() -> None:
    # Chunk 9 first, with a hole, then 4, then 9 once more (one chunk, adjacent or not); chunk 5 is masked and does not count.
    chunk_id = torch.tensor([[9, 9, 5, 4, 9, 4]])
    ranks, count = chunk_ranks(mask=torch.tensor([[1, 0, 0, 1, 1, 1]], dtype=torch.bool), chunk_id=chunk_id)
    assert ranks.tolist() == [[0, 0, 0, 1, 0, 1]]
    assert count.tolist() == [2]


def test_segment_returns_by_hand() -> None:
    # gamma .5. Rewards of the turns: 1 + 2 = 3, 4, 8. G2 = 8; G1 = 4 + .5*8 = 8; G0 = 3 + .5*8 = 7.
    reward = torch.tensor([[1.0, 2.0, torch.nan, 4.0, torch.inf, 99.0, 8.0, 0.0]])
    assert segment_returns(reward=reward, gamma=0.5, mask=MASK).tolist() == [[7.0, 7.0, 0.0, 8.0, 0.0, 0.0, 8.0, 8.0]]


def test_chunk_returns_by_hand() -> None:
    # gamma .5, final reward 4: the last turn 4, the one before .5*4, the first .25*4.
    expected = [[1.0, 1.0, 0.0, 2.0, 0.0, 0.0, 4.0, 4.0]]
    assert chunk_returns(score=torch.tensor([4.0]), gamma=0.5, mask=MASK).tolist() == expected
    # The same by numbers: all eight units count, in two chunks.
    chunk_id = torch.tensor([[3, 3, 3, 3, 3, 1, 1, 1]])
    found = chunk_returns(score=torch.tensor([4.0]), gamma=0.5, mask=torch.ones_like(MASK), chunk_id=chunk_id)
    assert found.tolist() == [[2.0] * 5 + [4.0] * 3]
    # gamma 0 leaves the last chunk.
    assert chunk_returns(score=torch.tensor([4.0]), gamma=0.0, mask=MASK).tolist() == [[0.0] * 6 + [4.0, 4.0]]


def random_rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(3)
    mask = torch.from_numpy(rng.random((9, 20)) < 0.7)
    mask[4] = False
    reward = torch.tensor(rng.normal(size=(9, 20)), dtype=dtype)
    return torch.where(mask, reward, torch.nan), mask, torch.from_numpy(rng.integers(-2, 4, (9, 20)))


def naive(reward: Tensor, mask: Tensor, chunk_id: Tensor | None, gamma: float) -> np.ndarray:
    """Row by row with lists."""
    returns = np.zeros(tuple(reward.shape))
    for b in range(reward.shape[0]):
        chunks: dict[int, list[int]] = {}
        run = 0
        for unit in range(reward.shape[1]):
            if not mask[b, unit]:
                run += 1
                continue
            chunks.setdefault(run if chunk_id is None else int(chunk_id[b, unit]), []).append(unit)
        gained = [sum(float(reward[b, unit]) for unit in units) for units in chunks.values()]
        for rank, units in enumerate(chunks.values()):
            returns[b, units] = sum(gamma**distance * later for distance, later in enumerate(gained[rank:]))
    return returns


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_plain_python(dtype: torch.dtype, numbered: bool) -> None:
    reward, mask, chunk_id = random_rows(dtype)
    chunks = chunk_id if numbered else None
    found = segment_returns(reward=reward, gamma=0.9, mask=mask, chunk_id=chunks)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.numpy(), naive(reward, mask, chunks, 0.9), atol=3e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("numbered", [False, True])
def test_ipa_is_a_row_rewarded_at_its_end_alone(numbered: bool) -> None:
    _, mask, chunk_id = random_rows(torch.float64)
    score = torch.from_numpy(np.random.default_rng(1).normal(size=9))
    chunks = chunk_id if numbered else None
    ranks, count = chunk_ranks(mask=mask, chunk_id=chunks)
    in_last = mask & (ranks == count[:, None] - 1)
    first_of_last = in_last & (in_last.long().cumsum(1) == 1)
    reward = torch.where(first_of_last, score[:, None], 0.0)
    expected = segment_returns(reward=reward, gamma=0.8, mask=mask, chunk_id=chunks)
    torch.testing.assert_close(chunk_returns(score=score, gamma=0.8, mask=mask, chunk_id=chunks), expected)


def test_chunks_of_one_token_are_tokens() -> None:
    reward, mask, _ = random_rows(torch.float64)
    single = torch.arange(20).expand(9, 20)
    expected = token_returns(reward=reward, gamma=0.9, mask=mask)
    torch.testing.assert_close(segment_returns(reward=reward, gamma=0.9, mask=mask, chunk_id=single), expected)


def test_padding_and_numbers_outside_the_mask_do_not_matter() -> None:
    reward, mask, chunk_id = random_rows(torch.float64)
    expected = segment_returns(reward=reward, gamma=0.9, mask=mask, chunk_id=chunk_id)
    renumbered = torch.where(mask, 10 * chunk_id, 77)
    pad = torch.nn.functional.pad
    found = segment_returns(
        reward=pad(reward, (3, 2), value=torch.nan), gamma=0.9, mask=pad(mask, (3, 2)), chunk_id=pad(renumbered, (3, 2))
    )
    torch.testing.assert_close(found[:, 3:-2], expected)
    assert (found[:, :3] == 0).all()


def test_results_are_constants_and_rows_of_padding_may_be_nan() -> None:
    score = torch.tensor([1.0, torch.nan], requires_grad=True)
    mask = torch.tensor([[True], [False]])
    found = chunk_returns(score=score, gamma=0.5, mask=mask)
    assert found.tolist() == [[1.0], [0.0]]
    assert not found.requires_grad


def test_mistakes_are_told() -> None:
    with pytest.raises(ValueError, match=r"mask must be bool \[B, L\]"):
        chunk_ranks(mask=MASK.long())
    with pytest.raises(ValueError, match="chunk_id must be integers"):
        chunk_ranks(mask=MASK, chunk_id=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="reward and mask"):
        segment_returns(reward=torch.zeros(1, 7), gamma=0.9, mask=MASK)
    with pytest.raises(ValueError, match="score must be floating"):
        chunk_returns(score=torch.zeros(2), gamma=0.9, mask=MASK)
    with pytest.raises(NonFiniteError, match="score is NaN"):
        chunk_returns(score=torch.tensor([torch.nan]), gamma=0.9, mask=MASK)
