"""Rows of forwards: worked out by hand, and that nothing is lost or doubled."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.policies.packing import Layout, TokenSequence, pack, plan_micro_batches

LAYOUTS: tuple[Layout, ...] = ("packed", "right", "left")
FIRST = TokenSequence.of(np.array([11, 12]), np.array([13]))
SECOND = TokenSequence.of(np.array([21]), np.array([22, 23]))
LONG = TokenSequence.of(np.array([31, 32, 33]), np.array([34]))


def test_packed_row_by_hand() -> None:
    rows = pack([FIRST, SECOND], "packed")
    assert rows.token_ids.tolist() == [[11, 12, 13, 21, 22, 23]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert rows.attention_mask is None
    # 13 is predicted at place 1, 22 and 23 at places 3 and 4: the tokens before them.
    assert rows.target.tolist() == [13, 22, 23]
    assert rows.row.tolist() == [0, 0, 0]
    assert rows.place.tolist() == [1, 3, 4]
    assert rows.sequence.tolist() == [0, 1, 1]
    assert rows.column.tolist() == [2, 1, 2]


@pytest.mark.parametrize(("layout", "tokens", "places"), [("right", [11, 12, 13, 0], [1, 2]), ("left", [0, 11, 12, 13], [2, 2])])
def test_padded_rows_by_hand(layout: Layout, tokens: list[int], places: list[int]) -> None:
    rows = pack([FIRST, LONG], layout)
    assert rows.token_ids[0].tolist() == tokens
    assert rows.attention_mask is not None
    assert rows.attention_mask[0].tolist() == [token != 0 for token in tokens]
    assert rows.position_ids[0].tolist() == ([0, 1, 2, 0] if layout == "right" else [0, 0, 1, 2])
    assert rows.place.tolist() == places
    assert rows.row.tolist() == [0, 1]
    assert rows.column.tolist() == [2, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_predicted_stands_behind_its_place(layout: Layout) -> None:
    rows = pack([FIRST, SECOND, LONG], layout)
    assert (rows.token_ids[rows.row, rows.place + 1] == rows.target).all()


def test_packing_by_hand() -> None:
    # Longest first: 7 opens a row of 10 and 5 another; 4 fits behind 5, 3 behind 7 (first fit), and the last 3 opens a third.
    assert plan_micro_batches([3, 7, 4, 5, 3], 10, "packed") == [[1, 0], [3, 2], [4]]


def test_padded_by_hand() -> None:
    # Longest first: 7 alone (2 x 7 > 10), 5 and 4 together (2 x 5), 3, 3 together (3 x 3 would be possible, nothing is left).
    assert plan_micro_batches([3, 7, 4, 5, 3], 10, "right") == [[1], [3, 2], [0, 4]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sequence_once_and_no_row_too_long(layout: Layout) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 60, int(rng.integers(1, 40))).tolist()
        limit = int(rng.integers(20, 100))
        batches = plan_micro_batches(lengths, limit, layout)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        for batch in batches:
            own = [lengths[index] for index in batch]
            size = sum(own) if layout == "packed" else len(own) * max(own)
            assert size <= limit or len(batch) == 1


def test_packing_needs_fewer_columns_than_padding() -> None:
    lengths = np.random.default_rng(1).geometric(0.05, 200).tolist()
    packed = sum(sum(lengths[i] for i in batch) for batch in plan_micro_batches(lengths, 256, "packed"))
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan_micro_batches(lengths, 256, "right"))
    assert packed == sum(lengths)
    assert padded > packed


def test_first_token_cannot_be_evaluated() -> None:
    with pytest.raises(ValueError, match="nothing precedes it"):
        TokenSequence(np.array([1, 2]), np.array([True, True]))
    with pytest.raises(ValueError, match="first token"):
        TokenSequence(np.zeros(0, np.int64), np.zeros(0, bool))
    with pytest.raises(ValueError, match="must be integers"):
        TokenSequence(np.array([1.0, 2.0]), np.array([False, True]))
