from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embodied_rl.algorithms import advantages
from tests.algorithms.arrays import on_arrays

gae, whiten = on_arrays(advantages.gae), on_arrays(advantages.whiten)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[:, None]


def flags(*values: int) -> np.ndarray:
    return np.array(values, bool)[:, None]


def test_by_hand_with_termination_and_truncation() -> None:
    # gamma 0.5, lambda 0.5, so gamma lambda = 0.25. Rows: running, truncated (final value 8), terminated, running (last value 4).
    # A3 = 1 + .5*4 - 2           = 1
    # A2 = 3 + 0    - 1           = 2          (terminated: nothing comes after, nothing is carried)
    # A1 = 2 + .5*8 - 4           = 2          (truncated: the final observation's value 8, not V2 = 1; nothing is carried)
    # A0 = 1 + .5*4 - 6 + .25*A1  = -2.5       (V1 = 4)
    advantage, returns = gae(
        reward=column(1, 2, 3, 1),
        value=column(6, 4, 1, 2),
        last_value=np.array([4.0]),
        terminated=flags(0, 0, 1, 0),
        truncated=flags(0, 1, 0, 0),
        final_value=np.array([8.0]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantage[:, 0].tolist() == [-2.5, 2.0, 2.0, 1.0]
    assert returns[:, 0].tolist() == [3.5, 6.0, 3.0, 3.0]


def test_terminated_wins_over_truncated() -> None:
    advantage, _ = gae(
        reward=column(1),
        value=column(0),
        last_value=np.array([100.0]),
        terminated=flags(1),
        truncated=flags(1),
        final_value=np.zeros(0),
        gamma=0.9,
        gae_lambda=0.9,
    )
    assert advantage[0, 0] == 1.0


def test_masked_steps_carry_value_and_advantage_through() -> None:
    # gamma = lambda = 1/2; the middle step does not count: A2 = 4 + .5*2 - 1 = 4; A0 = 1 + .5*V2 - 3 + .25*A2 = 1 + .5 - 3 + 1 = -.5
    advantage, returns = gae(
        reward=column(1, 77, 4),
        value=column(3, 55, 1),
        last_value=np.array([2.0]),
        terminated=flags(0, 0, 0),
        truncated=flags(0, 0, 0),
        final_value=np.zeros(0),
        gamma=0.5,
        gae_lambda=0.5,
        mask=flags(1, 0, 1),
    )
    assert advantage[:, 0].tolist() == [-0.5, 0.0, 4.0]
    assert returns[:, 0].tolist() == [2.5, 0.0, 5.0]


def naive(arrays: dict[str, np.ndarray], gamma: float, gae_lambda: float) -> np.ndarray:
    """Forward sums instead of a recursion: A_t = sum_k (gamma lambda)^k delta_(t+k) to the end of the episode, slot by slot."""
    steps, slots = arrays["reward"].shape
    final = {tuple(place): k for k, place in enumerate(np.argwhere(arrays["truncated"] & ~arrays["terminated"]))}
    deltas = np.empty((steps, slots))
    for t in range(steps):
        for n in range(slots):
            following = arrays["value"][t + 1, n] if t + 1 < steps else arrays["last_value"][n]
            if arrays["truncated"][t, n] and not arrays["terminated"][t, n]:
                following = arrays["final_value"][final[t, n]]
            if arrays["terminated"][t, n]:
                following = 0.0
            deltas[t, n] = arrays["reward"][t, n] + gamma * following - arrays["value"][t, n]
    advantage = np.zeros((steps, slots))
    for n in range(slots):
        for t in range(steps):
            for k in range(t, steps):
                advantage[t, n] += (gamma * gae_lambda) ** (k - t) * deltas[k, n]
                if arrays["terminated"][k, n] or arrays["truncated"][k, n]:
                    break
    return advantage


def random_rollout(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=(40, 7)).astype(dtype) for name in ("reward", "value")}
    arrays["terminated"], arrays["truncated"] = rng.random((40, 7)) < 0.1, rng.random((40, 7)) < 0.15
    arrays["last_value"] = rng.normal(size=7).astype(dtype)
    num_cut = int((arrays["truncated"] & ~arrays["terminated"]).sum())
    assert num_cut > 20
    return {**arrays, "final_value": rng.normal(size=num_cut).astype(dtype)}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_forward_sums(dtype: Any) -> None:
    arrays = random_rollout(dtype)
    advantage, returns = gae(**arrays, gamma=0.97, gae_lambda=0.9)
    assert advantage.dtype == returns.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(advantage, naive(arrays, 0.97, 0.9), atol=tolerance)
    np.testing.assert_allclose(returns, advantage + arrays["value"], atol=tolerance)


@pytest.mark.parametrize("cut_share", [0.0, 0.004, 0.5, 1.0])
def test_sums_are_those_of_the_formula_bit_for_bit(cut_share: float) -> None:
    """Slot by slot in Python's floats, in the order in which the formula is written; 9 · 67 steps are no multiple of 64."""
    rng = np.random.default_rng(6)
    shape, gamma, gae_lambda = (9, 67), 0.97, 0.9
    reward, value = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    last = rng.normal(size=shape[1]).astype(np.float32)
    terminated, truncated = rng.random(shape) < 0.1, rng.random(shape) < cut_share
    cut = truncated & ~terminated
    after = np.zeros(shape, np.float32)
    after[cut] = rng.normal(size=int(cut.sum()))
    expected = np.empty(shape, np.float32)
    for slot in range(shape[1]):
        carried, following = 0.0, float(last[slot])
        for step in reversed(range(shape[0])):
            bootstrap = 0.0 if terminated[step, slot] else float(after[step, slot]) if cut[step, slot] else following
            carry = 0.0 if terminated[step, slot] or truncated[step, slot] else carried
            carried = float(reward[step, slot]) + gamma * bootstrap - float(value[step, slot]) + gamma * gae_lambda * carry
            expected[step, slot], following = carried, float(value[step, slot])
    found, returns = gae(
        reward=reward,
        value=value,
        last_value=last,
        terminated=terminated,
        truncated=truncated,
        final_value=after[cut],
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    assert found.tobytes() == expected.tobytes()
    assert returns.tobytes() == (expected + value).tobytes()


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    shape, cut_share = (4096, 257), 0.01
    terminated, truncated = rng.random(shape) < 0.01, rng.random(shape) < cut_share
    cut = truncated & ~terminated
    final = np.zeros(shape, np.float32)
    final[cut] = rng.normal(size=int(cut.sum()))
    floats = {name: rng.normal(size=shape).astype(np.float32) for name in ("reward", "value")}
    last = rng.normal(size=shape[1]).astype(np.float32)

    def of(first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        part = np.s_[:, first:stop]
        given = {name: array[part] for name, array in (*floats.items(), ("terminated", terminated), ("truncated", truncated))}
        return gae(**given, last_value=last[first:stop], final_value=final[part][cut[part]], gamma=0.9, gae_lambda=0.8)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    advantage, returns = of(0, 257)  # enough for three threads; one slot by itself is not
    for slot in (0, 85, 86, 171, 172, 256):
        alone = of(slot, slot + 1)
        np.testing.assert_array_equal(advantage[:, slot], alone[0][:, 0])
        np.testing.assert_array_equal(returns[:, slot], alone[1][:, 0])


def test_limits_of_lambda() -> None:
    arrays = random_rollout()
    arrays["terminated"][:], arrays["truncated"][:] = False, False
    arrays["final_value"] = np.zeros(0)
    following = np.vstack([arrays["value"][1:], arrays["last_value"]])
    one_step, _ = gae(**arrays, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_allclose(one_step, arrays["reward"] + 0.9 * following - arrays["value"], atol=1e-12)
    # lambda 1: returns are the discounted sum of all rewards and the last value.
    _, returns = gae(**arrays, gamma=0.9, gae_lambda=1.0)
    powers = 0.9 ** np.arange(40)
    np.testing.assert_allclose(returns[0], powers @ arrays["reward"] + 0.9**40 * arrays["last_value"], atol=1e-12)


def test_wrong_shapes_are_refused() -> None:
    arrays = random_rollout()
    with pytest.raises(ValueError, match="one value for each of the"):
        gae(**{**arrays, "final_value": arrays["final_value"][1:]}, gamma=0.9, gae_lambda=0.9)
    with pytest.raises(ValueError, match="last_value"):
        gae(**{**arrays, "last_value": arrays["last_value"][1:]}, gamma=0.9, gae_lambda=0.9)


def test_whiten_by_hand() -> None:
    # mean 2, unbiased variance (1 + 0 + 1) / 2 = 1
    np.testing.assert_allclose(whiten(np.array([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0], atol=1e-7)
    masked = whiten(np.array([1.0, np.nan, 2.0, 3.0]), np.array([True, False, True, True]))
    np.testing.assert_allclose(masked, [-1.0, 0.0, 0.0, 1.0], atol=1e-7)
    assert whiten(np.array([5.0])).tolist() == [0.0]
    assert whiten(np.full(4, 0.1, np.float32)).tolist() == [0.0] * 4
