"""Kinds of arrays, chunks of actions, returns-to-go, and whitening over parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms import advantages
from tests.algorithms.arrays import on_arrays
from tests.algorithms.test_advantages import column, flags, random_rollout

action_gae, chunk_gae, gae = map(on_arrays, (advantages.action_gae, advantages.chunk_gae, advantages.gae))
returns_to_go, sum_chunks, token_returns = map(on_arrays, (advantages.returns_to_go, advantages.sum_chunks, advantages.token_returns))
whiten = on_arrays(advantages.whiten)

DTYPES = [np.float32, np.float64]
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
"""Absolute, on numbers of order 1."""


def holes(shape: tuple[int, ...], seed: int, share: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) >= share


def test_advantages_are_constants() -> None:
    given = {name: torch.from_numpy(array) for name, array in random_rollout().items()}
    given["value"].requires_grad_(True)
    assert not any(found.requires_grad for found in gae(**given, gamma=0.97, gae_lambda=0.9))


def test_memory_layout_does_not_matter() -> None:
    arrays = random_rollout()
    strided = {name: np.asfortranarray(array) if array.ndim == 2 else array for name, array in arrays.items()}
    np.testing.assert_array_equal(gae(**strided, gamma=0.9, gae_lambda=0.8)[0], gae(**arrays, gamma=0.9, gae_lambda=0.8)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_gives_the_same(dtype: Any) -> None:
    arrays = random_rollout(dtype)
    on_gpu = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}
    for expected, found in zip(gae(**arrays, gamma=0.97, gae_lambda=0.9), gae(**on_gpu, gamma=0.97, gae_lambda=0.9), strict=True):
        assert found.is_cuda
        np.testing.assert_allclose(found.cpu().numpy(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    reward = torch.from_numpy(arrays["reward"])
    torch.testing.assert_close(
        token_returns(reward=reward.cuda(), gamma=0.9).cpu(), token_returns(reward=reward, gamma=0.9), atol=TOLERANCE[dtype], rtol=1e-6
    )


# ---- what must not matter -------------------------------------------------------------------------------------------


def test_slots_do_not_know_each_other() -> None:
    arrays = random_rollout()
    order = np.random.default_rng(3).permutation(7)
    final = np.zeros((40, 7))
    final[arrays["truncated"] & ~arrays["terminated"]] = arrays["final_value"]
    permuted = {name: array[..., order] for name, array in arrays.items() if name != "final_value"}
    permuted["final_value"] = final[:, order][permuted["truncated"] & ~permuted["terminated"]]
    expected = gae(**arrays, gamma=0.97, gae_lambda=0.9)[0]
    np.testing.assert_array_equal(gae(**permuted, gamma=0.97, gae_lambda=0.9)[0], expected[:, order])


def test_nothing_comes_over_from_the_next_episode() -> None:
    # Whatever happens after step 1, which ends an episode, leaves the first two steps as they are.
    before = np.random.default_rng(0).normal(size=(2, 1))
    for after in (0.0, 1e6):
        advantage, _ = gae(
            reward=np.vstack([before, column(after, after)]),
            value=np.vstack([before, column(after, after)]),
            last_value=np.array([after]),
            terminated=flags(0, 0, 0, 0),
            truncated=flags(0, 1, 0, 0),
            final_value=np.array([2.0]),
            gamma=1.0,
            gae_lambda=1.0,
        )
        # A1 = r1 + 2 - v1 = 2 (r = v); A0 = r0 + v1 - v0 + A1 = v1 + 2
        np.testing.assert_allclose(advantage[:2, 0], [before[1, 0] + 2.0, 2.0])


def test_scaling_rewards_and_values_scales_advantages() -> None:
    arrays = random_rollout()
    scaled = {name: array * 1000.0 if array.dtype == np.float64 else array for name, array in arrays.items()}
    np.testing.assert_allclose(
        gae(**scaled, gamma=0.97, gae_lambda=0.9)[0], 1000.0 * gae(**arrays, gamma=0.97, gae_lambda=0.9)[0], rtol=1e-9, atol=1e-9
    )


def test_inserting_masked_steps_changes_nothing() -> None:
    arrays = random_rollout()
    rows = np.sort(np.random.default_rng(8).choice(60, 40, replace=False))
    padded: dict[str, np.ndarray] = {"last_value": arrays["last_value"], "final_value": arrays["final_value"]}
    for name in ("reward", "value", "terminated", "truncated"):
        padded[name] = np.full((60, 7), np.nan if arrays[name].dtype == np.float64 else False, arrays[name].dtype)
        padded[name][rows] = arrays[name]
    padded["mask"] = np.zeros((60, 7), bool)
    padded["mask"][rows] = True
    found, expected = gae(**padded, gamma=0.9, gae_lambda=0.8), gae(**arrays, gamma=0.9, gae_lambda=0.8)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one[rows], other)
        assert (one[~padded["mask"]] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_gives_nothing(shape: tuple[int, int]) -> None:
    empty = {name: np.zeros(shape) for name in ("reward", "value")} | {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}
    given = {**empty, "last_value": np.zeros(shape[1:]), "final_value": np.zeros(0)}
    assert gae(**given, gamma=0.9, gae_lambda=0.9)[0].shape == shape


def test_types_are_checked() -> None:
    arrays = random_rollout()
    for name, wrong, message in (
        ("terminated", arrays["terminated"].astype(np.uint8), "must be bool, got torch.uint8"),
        ("reward", arrays["reward"].astype(np.float16), "float32 or float64, got torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            gae(**{**arrays, name: wrong}, gamma=0.9, gae_lambda=0.9)


# ---- chunks ---------------------------------------------------------------------------------------------------------


def test_chunk_level_by_hand() -> None:
    # One slot, two chunks of K = 3, gamma 0.5, lambda 0.5. Chunk 0 executes all three, chunk 1 two and terminates there.
    # R0 = 4 + .5*2 + .25*8 = 7, discount .125; R1 = 2 + .5*6 = 5, discount .25 (the 99 was not executed).
    # A1 = 5 + 0 - 3 = 2; A0 = 7 + .125*3 - 1 + .125*.5*2 = 6.375 + .125 = 6.5. Returns 6.5 + 1 and 2 + 3.
    advantage, returns = chunk_gae(
        reward=np.array([[[4.0, 2, 8]], [[2, 6, 99]]]),
        executed=np.array([[[1, 1, 1]], [[1, 1, 0]]], bool),
        value=column(1, 3),
        last_value=np.array([77.0]),
        terminated=flags(0, 1),
        truncated=flags(0, 0),
        final_value=np.zeros(0),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantage[:, 0].tolist() == [6.5, 2.0]
    assert returns[:, 0].tolist() == [7.5, 5.0]


def test_success_inside_a_chunk_is_not_lost_and_what_follows_does_not_count() -> None:
    # The only reward comes at step 1 of 4, where the episode ends; the rest of the chunk holds NaN.
    advantage, _ = chunk_gae(
        reward=np.array([[[0.0, 1.0, np.nan, np.nan]]]),
        executed=np.array([[[1, 1, 0, 0]]], bool),
        value=column(0.25),
        last_value=np.array([np.nan]),
        terminated=flags(1),
        truncated=flags(0),
        final_value=np.zeros(0),
        gamma=0.5,
        gae_lambda=0.9,
    )
    # 0 + .5*1 - .25
    assert advantage[0, 0] == 0.25


def test_truncated_chunk_bootstraps_over_the_steps_it_executed() -> None:
    # One executed step of two: 1 + .5 * final 8 - 2 = 3, not .25 * 8.
    advantage, _ = chunk_gae(
        reward=np.array([[[1.0, 5.0]]]),
        executed=np.array([[[True, False]]]),
        value=np.array([[2.0]]),
        last_value=np.array([100.0]),
        terminated=np.array([[False]]),
        truncated=np.array([[True]]),
        final_value=np.array([8.0]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert float(advantage[0, 0]) == 3.0


def random_chunks(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """9 chunks of up to 4 steps in 5 slots; ends cut chunks short, and some chunks were not executed at all."""
    rng = np.random.default_rng(11)
    arrays: dict[str, np.ndarray] = {
        "reward": rng.normal(size=(9, 5, 4)),
        "value": rng.normal(size=(9, 5)),
        "last_value": rng.normal(size=5),
    }
    executed = np.ones((9, 5, 4), bool)
    arrays["terminated"], arrays["truncated"] = rng.random((9, 5)) < 0.15, rng.random((9, 5)) < 0.25
    done = arrays["terminated"] | arrays["truncated"]
    for t, n in np.argwhere(done):
        executed[t, n, rng.integers(1, 5) :] = False
    for t, n in np.argwhere(~done & (rng.random((9, 5)) < 0.2)):
        executed[t, n] = False
    num_cut = int((arrays["truncated"] & ~arrays["terminated"]).sum())
    assert num_cut > 4
    arrays["final_value"] = rng.normal(size=num_cut)
    arrays = {name: array.astype(dtype) if array.dtype == np.float64 else array for name, array in arrays.items()}
    arrays["reward"][~executed] = np.nan
    return {**arrays, "executed": executed}


def naive_chunks(a: dict[str, np.ndarray], gamma: float, gae_lambda: float) -> np.ndarray:
    """Slot by slot, in Python numbers."""
    final = {tuple(place): k for k, place in enumerate(np.argwhere(a["truncated"] & ~a["terminated"]).tolist())}
    advantage = np.zeros(a["value"].shape)
    for n in range(a["value"].shape[1]):
        following, carried = float(a["last_value"][n]), 0.0
        for t in reversed(range(a["value"].shape[0])):
            gained = [float(r) for r, ran in zip(a["reward"][t, n], a["executed"][t, n], strict=True) if ran]
            if not gained:
                continue
            total = sum(gamma**k * r for k, r in enumerate(gained))
            if a["terminated"][t, n]:
                following, carried = 0.0, 0.0
            elif a["truncated"][t, n]:
                following, carried = float(a["final_value"][final[t, n]]), 0.0
            step_gamma, value = gamma ** len(gained), float(a["value"][t, n])
            carried = total + step_gamma * following - value + step_gamma * gae_lambda * carried
            advantage[t, n], following = carried, value
    return advantage


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_level_equals_plain_python(dtype: Any) -> None:
    arrays = random_chunks(dtype)
    expected = naive_chunks(arrays, 0.9, 0.8)
    advantage, returns = chunk_gae(**arrays, gamma=0.9, gae_lambda=0.8)
    ran = arrays["executed"].any(-1)
    assert (~ran).any()
    tolerance = 4e-6 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(advantage, expected, atol=tolerance)
    np.testing.assert_allclose(returns, np.where(ran, expected + arrays["value"], 0), atol=tolerance)


def test_chunks_of_one_step_are_steps() -> None:
    arrays = random_rollout()
    expected = gae(**arrays, gamma=0.9, gae_lambda=0.8)
    single = {**arrays, "reward": arrays["reward"][..., None], "executed": np.ones((40, 7, 1), bool)}
    for one, other in zip(chunk_gae(**single, gamma=0.9, gae_lambda=0.8), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    single["value"] = arrays["value"][..., None]
    for one, other in zip(action_gae(**single, gamma=0.9, gae_lambda=0.8), expected, strict=True):
        np.testing.assert_array_equal(one[..., 0], other)


def test_action_level_equals_steps_laid_out_one_by_one() -> None:
    """Each slot's executed steps, written one below the other as `gae` wants them."""
    arrays = random_chunks()
    values = np.where(arrays["executed"], np.random.default_rng(4).normal(size=(9, 5, 4)), np.nan)
    advantage, returns = action_gae(**{**arrays, "value": values}, gamma=0.9, gae_lambda=0.8)
    final = {tuple(place): k for k, place in enumerate(np.argwhere(arrays["truncated"] & ~arrays["terminated"]).tolist())}
    for n in range(5):
        steps = np.argwhere(arrays["executed"][:, n])
        lasts = [index + 1 == len(steps) or steps[index + 1][0] != t for index, (t, _) in enumerate(steps)]
        ended = [bool(arrays["terminated"][t, n]) and last for (t, _), last in zip(steps, lasts, strict=True)]
        cut = [bool(arrays["truncated"][t, n]) and last for (t, _), last in zip(steps, lasts, strict=True)]
        after = [arrays["final_value"][final[int(t), n]] for (t, _), a, b in zip(steps, ended, cut, strict=True) if b and not a]
        expected = gae(
            reward=column(*(arrays["reward"][t, n, k] for t, k in steps)),
            value=column(*(values[t, n, k] for t, k in steps)),
            last_value=arrays["last_value"][n : n + 1],
            terminated=flags(*ended),
            truncated=flags(*cut),
            final_value=np.array(after),
            gamma=0.9,
            gae_lambda=0.8,
        )
        places = tuple(steps.T)
        np.testing.assert_allclose(advantage[:, n][places], expected[0][:, 0], atol=1e-12)
        np.testing.assert_allclose(returns[:, n][places], expected[1][:, 0], atol=1e-12)
    assert (advantage[~arrays["executed"]] == 0).all()


def test_sums_of_chunks_by_hand() -> None:
    # gamma .5; a step in the middle was not executed: 1 + .5*4 = 3, .5^2; nothing executed: 0 and 1.
    reward, executed = np.array([[1.0, np.inf, 4.0], [np.nan] * 3]), np.array([[1, 0, 1], [0, 0, 0]], bool)
    total, discount = sum_chunks(reward=reward, executed=executed, gamma=0.5)
    assert total.tolist() == [3.0, 0.0]
    assert discount.tolist() == [0.25, 1.0]


def test_chunks_of_wrong_shapes_are_refused() -> None:
    arrays = random_chunks()
    with pytest.raises(ValueError, match=r"must be \[T, N, K\]"):
        chunk_gae(**{**arrays, "executed": arrays["executed"][..., 0]}, gamma=0.9, gae_lambda=0.9)
    with pytest.raises(ValueError, match="Use chunk_gae"):
        action_gae(**arrays, gamma=0.9, gae_lambda=0.9)


# ---- returns --------------------------------------------------------------------------------------------------------


def test_returns_to_go_by_hand() -> None:
    # gamma .5: 4 (terminated); 2 + .5*4 = 4; 1 (truncated; what comes after is unknown: 0); 8 + .5*1 = 8.5
    given: dict[str, Any] = {"reward": column(8, 1, 2, 4), "terminated": flags(0, 0, 0, 1), "truncated": flags(0, 1, 0, 0)}
    assert returns_to_go(**given, gamma=0.5)[:, 0].tolist() == [8.5, 1.0, 4.0, 4.0]
    # With a critic: 1 + .5*6 = 4; 8 + .5*4 = 10.
    assert returns_to_go(**given, gamma=0.5, final_value=np.array([6.0]))[:, 0].tolist() == [10.0, 4.0, 4.0, 4.0]
    # Not ended, 2 to come: 4 + .5*2 = 5; 2 + .5*5 = 4.5
    open_end = {**given, "terminated": flags(0, 0, 0, 0)}
    assert returns_to_go(**open_end, gamma=0.5, last_value=np.array([2.0]))[:, 0].tolist() == [8.5, 1.0, 4.5, 5.0]


def naive_token_returns(reward: np.ndarray, gamma: float, mask: np.ndarray) -> np.ndarray:
    returns = np.zeros(reward.shape)
    for b in range(reward.shape[0]):
        counted = [unit for unit in range(reward.shape[1]) if mask[b, unit]]
        for rank, unit in enumerate(counted):
            returns[b, unit] = sum(gamma**distance * float(reward[b, later]) for distance, later in enumerate(counted[rank:]))
    return returns


def test_token_returns_by_hand() -> None:
    # gamma .5, a hole in the middle: 4; 2 + .5*4 = 4; the hole; 1 + .5*4 = 3
    reward, mask = torch.tensor([[1.0, torch.nan, 2.0, 4.0]]), torch.tensor([[True, False, True, True]])
    assert token_returns(reward=reward, gamma=0.5, mask=mask).tolist() == [[3.0, 0.0, 4.0, 4.0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_returns_equal_plain_python(dtype: Any) -> None:
    rng = np.random.default_rng(6)
    reward, mask = rng.normal(size=(6, 33)).astype(dtype), holes((6, 33), 7)
    mask[2] = False
    reward[~mask] = np.nan
    expected = naive_token_returns(reward, 0.9, mask)
    found = token_returns(reward=reward, gamma=0.9, mask=mask)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# ---- whitening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_whitening_has_mean_zero_and_deviation_one(dtype: Any) -> None:
    rng = np.random.default_rng(9)
    x, mask = (100 + rng.normal(size=(6, 5))).astype(dtype), holes((6, 5), 3)
    x[~mask] = np.nan
    whole = whiten(x, mask)
    np.testing.assert_allclose(whole[mask].mean(), 0, atol=1e-5)
    np.testing.assert_allclose(whole[mask].std(ddof=1), 1, rtol=1e-6)


def test_equal_entries_become_exactly_zero() -> None:
    for count in (1, 3, 7):
        assert whiten(np.full(count, 0.1)).tolist() == [0.0] * count


def test_whitening_forgets_scale_and_shift() -> None:
    x = np.random.default_rng(0).normal(size=50)
    np.testing.assert_allclose(whiten(1000 * x + 5), whiten(x), atol=1e-7)
