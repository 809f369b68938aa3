"""GiGPO: step returns, clusters of observations, and both parts of the advantage."""

from __future__ import annotations

import statistics as python_statistics
from collections import defaultdict
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.anchors import anchor_groups, anchor_key, gigpo, step_returns
from embodied_rl.algorithms.grouped import chunk_returns
from embodied_rl.errors import NonFiniteError


def close(found: Tensor, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), atol=tolerance, rtol=tolerance)


# ---- step returns ---------------------------------------------------------------------------------------------------


def test_step_returns_by_hand() -> None:
    # gamma .5. Trajectory 5: rewards 1, 2, 4 at steps 0, 1, 2, its rows mixed with those of trajectory 3: 8, 0.
    # 4; 2 + .5*4 = 4; 1 + .5*4 = 3. 0; 8 + .5*0 = 8.
    found = step_returns(
        reward=torch.tensor([4.0, 8.0, 1.0, 0.0, 2.0]),
        trajectory=torch.tensor([5, 3, 5, 3, 5]),
        step=torch.tensor([2, 0, 0, 1, 1]),
        gamma=0.5,
    )
    assert found.tolist() == [4.0, 8.0, 3.0, 0.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_returns_equal_plain_python(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    trajectory = torch.from_numpy(rng.integers(0, 12, 50))
    step, rows = torch.from_numpy(rng.permutation(50)), torch.from_numpy(rng.random(50) < 0.8)
    reward = torch.where(rows, torch.tensor(rng.normal(size=50), dtype=dtype), torch.nan)
    found = step_returns(reward=reward, trajectory=trajectory, step=step, gamma=0.9, rows=rows)
    for row in range(50):
        later = [
            other for other in range(50) if rows[row] and rows[other] and trajectory[other] == trajectory[row] and step[other] >= step[row]
        ]
        later.sort(key=lambda other: int(step[other]))
        expected = sum(0.9**distance * float(reward[other]) for distance, other in enumerate(later))
        close(found[row], expected, 2e-6 if dtype == torch.float32 else 1e-12)


def test_chunks_that_are_rows_get_ipas_returns() -> None:
    reward = torch.tensor([0.0, 0.0, 4.0])
    found = step_returns(reward=reward, trajectory=torch.zeros(3, dtype=torch.long), step=torch.arange(3), gamma=0.5)
    in_one_row = chunk_returns(score=reward[2:], gamma=0.5, mask=torch.tensor([[1, 0, 1, 0, 1]], dtype=torch.bool))
    assert found.tolist() == in_one_row[0, ::2].tolist() == [1.0, 2.0, 4.0]


def test_two_rows_of_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="Two rows are step 1 of trajectory 7"):
        step_returns(reward=torch.zeros(3), trajectory=torch.tensor([7, 7, 7]), step=torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"must be \[B\]"):
        step_returns(reward=torch.zeros(3), trajectory=torch.tensor([7, 7]), step=torch.tensor([0, 1, 1]))


# ---- anchors --------------------------------------------------------------------------------------------------------


def test_equal_states_of_two_groups_are_never_merged() -> None:
    found = anchor_groups(anchor=["a", "b", "a", "a", "b"], group=torch.tensor([1, 1, 1, 2, 2]))
    assert found.tolist() == [0, 1, 0, 2, 3]


def test_arrays_are_compared_by_their_numbers() -> None:
    anchors = [
        np.array([1.0, 0.0]),
        np.array([1.0, -0.0]),
        np.array([1.0, 1e-9]),
        np.array([[1.0, 0.0]]),
        torch.tensor([1.0, 0.0]).double(),
    ]
    found = anchor_groups(anchor=anchors, group=torch.zeros(5, dtype=torch.long))
    # -0.0 is 0.0, another shape is another observation, and a tensor is what its array is.
    assert found.tolist() == [0, 0, 1, 2, 0]


def test_containers_are_compared_part_by_part() -> None:
    left = {"text": "door", "grid": np.array([1, 2]), "inventory": ["key", 2]}
    right = {"inventory": ["key", 2], "grid": np.array([1, 2]), "text": "door"}
    assert anchor_key(left) == anchor_key(right)
    assert anchor_key(left) != anchor_key({**right, "grid": np.array([2, 1])})
    assert anchor_key(left) != anchor_key({**right, "inventory": [2, "key"]})
    assert anchor_key(np.array([left, "x"], dtype=object)) == anchor_key(np.array([right, "x"], dtype=object))
    with pytest.raises(ValueError, match="got set"):
        anchor_key({1, 2})


def test_similarity_is_held_against_the_first_member() -> None:
    # ratio = 2 M / T over 10 + 10 letters. b shares 9 letters with a: .9. c shares 9 with b, but 8 with a: .8.
    a, b, c = "abcdefghij", "abcdefghiX", "abcdefghYX"
    assert [SequenceMatcher(None, x, y).ratio() for x, y in ((b, a), (c, b), (c, a))] == [0.9, 0.9, 0.8]
    group = torch.zeros(3, dtype=torch.long)
    # c is near b, but b is not the first of its cluster.
    assert anchor_groups(anchor=[a, b, c], group=group, similarity=0.9).tolist() == [0, 0, 1]
    assert anchor_groups(anchor=[b, a, c], group=group, similarity=0.9).tolist() == [0, 0, 0]
    assert anchor_groups(anchor=[a, b, c], group=group, similarity=0.8).tolist() == [0, 0, 0]
    assert anchor_groups(anchor=[a, b, c], group=group, similarity=1.0).tolist() == [0, 1, 2]
    # Never over groups, and the first cluster that fits is taken.
    assert anchor_groups(anchor=[a, a, b], group=torch.tensor([0, 1, 1]), similarity=0.5).tolist() == [0, 1, 1]


def test_similar_clusters_equal_a_plain_search() -> None:
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice(list("abcd"), 12)) for _ in range(40)]
    texts += texts[:10]
    owners = rng.integers(0, 2, 50).tolist()
    firsts: list[tuple[int, str]] = []
    expected = []
    for text, owner in zip(texts, owners, strict=True):
        near = [
            number
            for number, (other, first) in enumerate(firsts)
            if other == owner and SequenceMatcher(None, text, first, autojunk=False).ratio() >= 0.7
        ]
        if not near:
            firsts.append((owner, text))
        expected.append(near[0] if near else len(firsts) - 1)
    assert 5 < len(firsts) < 40
    assert anchor_groups(anchor=texts, group=torch.tensor(owners), similarity=0.7).tolist() == expected


def test_long_texts_keep_their_frequent_characters() -> None:
    """difflib's heuristic for strings over 200 would tell two screens apart that differ in one character at their beginning."""
    left, right = "1" + "north south east west " * 30, "2" + "north south east west " * 30
    assert SequenceMatcher(None, left, right).ratio() < 0.5
    group = torch.zeros(2, dtype=torch.long)
    assert anchor_groups(anchor=[left, right], group=group, similarity=0.95).tolist() == [0, 0]


def test_rows_that_do_not_count_are_alone() -> None:
    found = anchor_groups(
        anchor=["a", "a", None, "a"], group=torch.zeros(4, dtype=torch.long), rows=torch.tensor([True, False, False, True])
    )
    assert found.tolist() == [0, 1, 2, 0]


def test_mistakes_about_anchors_are_told() -> None:
    group = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="one anchor for each row"):
        anchor_groups(anchor=["a"], group=group)
    with pytest.raises(ValueError, match=r"in \(0, 1\] or None, got 95"):
        anchor_groups(anchor=["a", "b"], group=group, similarity=95)


# ---- the advantage --------------------------------------------------------------------------------------------------

# One group of two episodes: A (trajectory 0) takes three steps and returns 4, B (trajectory 1) one step and returns 0. Both begin
# in state s; A comes back to s at its third step, and was in u at its second.
EPISODES = {
    "episode_return": torch.tensor([4.0, 4.0, 4.0, 0.0], dtype=torch.float64),
    "step_return": torch.tensor([1.0, 2.0, 4.0, 1.0], dtype=torch.float64),
    "group": torch.tensor([9, 9, 9, 9]),
    "trajectory": torch.tensor([0, 0, 0, 1]),
    "anchor_group": torch.tensor([0, 1, 0, 0]),
}


def test_over_trajectories_by_hand() -> None:
    # A_E: mean of 4 and 0 is 2: +2 and -2. A_S in s: 1, 4, 1 with mean 2: -1, 2, -1; u is alone: 0.
    close(gigpo(**EPISODES, normalize="mean"), [2 - 1.0, 2 + 0.0, 2 + 2.0, -2 - 1.0])
    close(gigpo(**EPISODES, normalize="mean", step_weight=0.5), [1.5, 2.0, 3.0, -2.5])
    # Standard deviations: of 4 and 0 sqrt(8); of 1, 4, 1 sqrt((1 + 4 + 1) / 2) = sqrt(3).
    e, s = 2 / (8**0.5 + 1e-6), 1 / (3**0.5 + 1e-6)
    close(gigpo(**EPISODES), [e - s, e, e + 2 * s, -e - s])


def test_over_rows_by_hand() -> None:
    # 4, 4, 4, 0: mean 3, variance (1 + 1 + 1 + 9)/3 = 4, std 2. The long episode pulls the mean towards itself.
    close(gigpo(**EPISODES, normalize="mean", statistics="row", step_weight=0.0), [1.0, 1.0, 1.0, -3.0])
    close(gigpo(**EPISODES, statistics="row", step_weight=0.0), [1 / (2 + 1e-6)] * 3 + [-3 / (2 + 1e-6)])


def test_one_trajectory_alone() -> None:
    alone = {name: part[:3] for name, part in EPISODES.items()}
    close(gigpo(**alone, step_weight=0.0), [4.0, 4.0, 4.0])
    close(gigpo(**alone, step_weight=0.0, alone="zero"), [0.0, 0.0, 0.0])
    # s twice: 1 and 4, -1.5 and 1.5.
    close(gigpo(**alone, normalize="mean", alone="zero"), [-1.5, 0.0, 1.5])


def test_an_anchor_number_in_two_groups_is_two_clusters() -> None:
    twice = {name: torch.cat([part, part]) for name, part in EPISODES.items()}
    twice["group"] = torch.tensor([9] * 4 + [-1] * 4)
    twice["step_return"][4:] += 100.0
    close(gigpo(**twice)[4:], gigpo(**EPISODES))


def random_steps() -> dict[str, Any]:
    """60 steps of 2 groups of 4 episodes, mixed; masks with holes; rows 3 and 20 are padding."""
    rng = np.random.default_rng(8)
    group, trajectory = rng.integers(0, 2, 60), rng.integers(0, 4, 60)
    mask = rng.random((60, 5)) < 0.7
    mask[:, 1] = True
    mask[[3, 20]] = False
    episode_return, step_return = rng.normal(size=(2, 4))[group, trajectory], rng.normal(size=60)
    episode_return[[3, 20]], step_return[[3, 20]] = np.nan, np.nan
    arrays = {
        "episode_return": episode_return,
        "step_return": step_return,
        "group": group * 1000 - 5,
        "trajectory": trajectory,
        "anchor_group": rng.integers(0, 12, 60),
        "mask": mask,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def in_python(steps: dict[str, Any], statistics: str, normalize: str, weight: float) -> list[float]:
    """With dictionaries and the standard library, row by row."""
    rows = [row for row in range(60) if steps["mask"][row].any()]
    episodes: dict[int, dict[Any, float]] = defaultdict(dict)
    anchors: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        owner = int(steps["group"][row])
        key = int(steps["trajectory"][row]) if statistics == "trajectory" else ("row", row)
        episodes[owner][key] = float(steps["episode_return"][row])
        anchors[owner, int(steps["anchor_group"][row])].append(float(steps["step_return"][row]))

    def compare(x: float, others: list[float]) -> float:
        if len(others) == 1:
            return 0.0
        scale = python_statistics.stdev(others) + 1e-6 if normalize == "mean_std" else 1.0
        return (x - python_statistics.fmean(others)) / scale

    found = [0.0] * 60
    for row in rows:
        owner = int(steps["group"][row])
        episode = compare(float(steps["episode_return"][row]), list(episodes[owner].values()))
        step = compare(float(steps["step_return"][row]), anchors[owner, int(steps["anchor_group"][row])])
        found[row] = episode + weight * step
    return found


@pytest.mark.parametrize("normalize", ["mean_std", "mean"])
@pytest.mark.parametrize("statistics", ["trajectory", "row"])
def test_equals_plain_python(statistics: Any, normalize: Any) -> None:
    steps = random_steps()
    found = gigpo(**steps, statistics=statistics, normalize=normalize, step_weight=0.7)
    expected = torch.tensor(in_python(steps, statistics, normalize, 0.7), dtype=torch.float64)
    close(found, torch.where(steps["mask"], expected[:, None], 0.0), 1e-11)
    single = gigpo(**{n: p.float() if p.is_floating_point() else p for n, p in steps.items()}, statistics=statistics, normalize=normalize)
    assert single.dtype == torch.float32
    double = gigpo(**steps, statistics=statistics, normalize=normalize)
    close(single, double, 3e-5)


def test_order_of_rows_does_not_matter() -> None:
    steps = random_steps()
    order = torch.from_numpy(np.random.default_rng(0).permutation(60))
    close(gigpo(**{name: part[order] for name, part in steps.items()}), gigpo(**steps)[order])


def test_equal_returns_give_exactly_zero() -> None:
    same = {**EPISODES, "episode_return": torch.full((4,), 0.1), "step_return": torch.full((4,), 0.3)}
    assert gigpo(**same).tolist() == [0.0] * 4


def test_returns_are_constants() -> None:
    given = {**EPISODES, "step_return": EPISODES["step_return"].clone().requires_grad_(True)}
    assert not gigpo(**given).requires_grad


def test_mistakes_about_gigpo_are_told() -> None:
    with pytest.raises(ValueError, match="another row of the same trajectory 4"):
        gigpo(**{**EPISODES, "episode_return": torch.tensor([4.0, 4.0, 3.0, 0.0])})
    with pytest.raises(ValueError, match=r"statistics='episode' is not a choice\. Known: row, trajectory"):
        gigpo(**EPISODES, statistics="episode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalize='std' is not a choice"):
        gigpo(**EPISODES, normalize="std")  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="score is NaN"):
        gigpo(**{**EPISODES, "step_return": torch.full((4,), torch.nan)})
    with pytest.raises(ValueError, match="integer ids"):
        gigpo(**{**EPISODES, "trajectory": EPISODES["trajectory"].float()})
