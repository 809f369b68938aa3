from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from embodied_rl.algorithms.losses import ppo_clip_loss
from embodied_rl.algorithms.ratios import log_ratio_at, segment_mean
from embodied_rl.algorithms.sequence_losses import gspo_loss, ipa_loss
from tests.algorithms.loss_cases import log_prob_of, make_case


def double(*values: object) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


# --- ratios ----------------------------------------------------------------------------------------------------------


def test_levels_by_hand() -> None:
    new = double([0.3, -0.1, 0.4, 9.0], [1.0, 2.0, 3.0, 4.0])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    chunk = torch.tensor([[7, 7, -1, -1], [5, 2, 5, 2]])

    def at(level: str) -> list[list[float]]:
        result = log_ratio_at(level, log_prob=new, old_log_prob=torch.zeros_like(new), mask=mask, chunk_id=chunk)  # type: ignore[arg-type]
        return [[round(x, 12) for x in row] for row in result.tolist()]

    assert at("token") == [[0.3, -0.1, 0.4, 0.0], [1.0, 2.0, 3.0, 4.0]]
    # 0.3 - 0.1 + 0.4 = 0.6 over three entries; 1 + 2 + 3 + 4 = 10 over four.
    assert at("sequence") == [[0.6, 0.6, 0.6, 0.0], [10.0] * 4]
    assert at("geometric") == [[0.2, 0.2, 0.2, 0.0], [2.5] * 4]
    # Chunks {0.3, -0.1} and {0.4} (its other entry is hidden); {1, 3} and {2, 4}, which are not adjacent.
    assert at("chunk") == [[0.1, 0.1, 0.4, 0.0], [2.0, 3.0, 2.0, 3.0]]


def test_chunks_of_two_rows_never_mix() -> None:
    x = double([1.0, 1.0], [5.0, 5.0])
    assert segment_mean(x, chunk_id=torch.zeros(2, 2, dtype=torch.int64)).tolist() == [[1.0, 1.0], [5.0, 5.0]]


def test_log_ratios_are_clamped_after_they_are_summed() -> None:
    # +30 and -25 make 5; clamped one by one they would make 0.
    new = double([[30.0, -25.0]])
    assert log_ratio_at("sequence", log_prob=new, old_log_prob=0 * new).tolist() == [[5.0, 5.0]]
    assert log_ratio_at("token", log_prob=new, old_log_prob=0 * new).tolist() == [[20.0, -20.0]]
    assert log_ratio_at("sequence", log_prob=10 * new, old_log_prob=0 * new).tolist() == [[20.0, 20.0]]


def test_levels_refuse_what_is_missing() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="Did you mean 'geometric'"):
        log_ratio_at("geometrc", log_prob=x, old_log_prob=x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs chunk_id"):
        log_ratio_at("chunk", log_prob=x, old_log_prob=x)
    with pytest.raises(ValueError, match=r"needs \[B, L\], got shape \(2,\)"):
        segment_mean(x[:, 0])
    with pytest.raises(ValueError, match="chunk_id must be integers of shape"):
        segment_mean(x, chunk_id=torch.zeros(2, 2, dtype=torch.int64))


# --- GSPO ------------------------------------------------------------------------------------------------------------


def test_gspo_by_hand() -> None:
    # Row 0: ratios 2 and 0.5, geometric mean 1: inside, A = 3 → -3. Row 1: ratios 1.5 and 1.5, s = 1.5, A = 2 → clipped to -2·1.1.
    # Row 2: s = 1.5, A = -2 → 3 (the unclipped is worse). Mean over sequences: (-3 - 2.2 + 3) / 3.
    ratios = double([2.0, 0.5], [1.5, 1.5], [1.5, 1.5])
    loss, metrics = gspo_loss(
        log_prob=ratios.log(), old_log_prob=torch.zeros(3, 2), advantage=double(3.0, 2.0, -2.0), clip_low=0.1, clip_high=0.1
    )
    assert loss.item() == pytest.approx((-3.0 - 2.2 + 3.0) / 3)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)


def sequence_form(theta: Tensor, case: dict[str, Tensor], low: float, high: float) -> Tensor:
    """GSPO as the paper writes it, (1/B) sum of max(-A s, -A clip(s)), with s differentiated as it stands: no stop-gradient at all."""
    new, losses = log_prob_of(theta, case), []
    for i in range(len(case["advantage"])):
        entries = case["mask"][i]
        if entries.any():
            s = (new[i][entries] - case["old_log_prob"][i][entries]).mean().exp()
            a = case["advantage"][i]
            losses.append(torch.maximum(-a * s, -a * s.clamp(1 - low, 1 + high)))
    return torch.stack(losses).mean()


def test_gspo_stop_gradient_trick_is_the_sequence_form() -> None:
    case = make_case(seed=5)
    theta, reference = (case["theta"].clone().requires_grad_() for _ in range(2))
    loss, metrics = gspo_loss(
        log_prob=log_prob_of(theta, case),
        old_log_prob=case["old_log_prob"],
        advantage=case["advantage"],
        clip_low=0.02,
        clip_high=0.03,
        mask=case["mask"],
    )
    loss.backward()
    expected = sequence_form(reference, case, 0.02, 0.03)
    expected.backward()
    assert 0.2 < metrics["clip_fraction"].item() < 0.95, "both branches must be taken for this to mean anything"
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(theta.grad, reference.grad, rtol=1e-11, atol=1e-14)


def test_gspo_of_single_entries_is_ppo_also_beyond_the_clamp() -> None:
    new, advantage = double([[0.1], [-0.4], [30.0], [25.0]]), double(1.0, -1.0, -1.0, 1.0)
    grads = []
    for loss_function in (gspo_loss, ppo_clip_loss):
        leaf = new.clone().requires_grad_()
        loss, _ = loss_function(log_prob=leaf, old_log_prob=0 * new, advantage=advantage, clip_low=0.2, clip_high=0.2)
        loss.backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]
    assert grads[0] is not None
    assert grads[0][2].item() == 0.0, "no gradient beyond the clamp"


# --- IPA -------------------------------------------------------------------------------------------------------------


def test_ipa_by_hand() -> None:
    # One row per case, two chunks of two entries each; log-probabilities -1 throughout, so that each term is weight · G · 1.
    log_prob = torch.full((3, 4), -1.0, dtype=torch.float64, requires_grad=True)
    chunk_id = torch.tensor([[0, 0, 1, 1]]).expand(3, 4)
    # pi / pi_old: chunk 0 of row 1: sqrt(4 · 1) = 2 → 1; chunk 1: sqrt(0.25 · 1) = 0.5 → 0.5. Row 0 succeeded: no ratio.
    ratio = double([4.0, 1.0, 0.25, 1.0], [4.0, 1.0, 0.25, 1.0], [1.0, 1.0, 1.0, 1.0])
    old = -1.0 - ratio.log()
    # pi_old / behaviour: sqrt(4 · 1) = 2 > H = 1.5 in chunk 1 of row 2 alone; sqrt(4 · 0.25) = 1 in chunk 0 is kept.
    behaviour = old - double([1.0] * 4, [1.0] * 4, [4.0, 0.25, 4.0, 1.0]).log()
    gain = double([0.9, 0.9, 1.0, 1.0], [-0.9, -0.9, -1.0, -1.0], [-0.9, -0.9, -1.0, -1.0])
    loss, metrics = ipa_loss(
        log_prob=log_prob, old_log_prob=old, behaviour_log_prob=behaviour, advantage=gain, chunk_id=chunk_id, max_mismatch=1.5
    )
    # -w G log pi = w G: row 0: 0.9·2 + 1·2; row 1: -(0.9·2·1 + 1·2·0.5); row 2: -(0.9·2) and its second chunk dropped.
    # Divided by all 12 entries, not by the 10 that were kept.
    assert loss.item() == pytest.approx((3.8 - 2.8 - 1.8) / 12)
    assert metrics["chunk_rejected_fraction"].item() == pytest.approx(2 / 12)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 12)
    loss.backward()
    weights = double([1, 1, 1, 1], [1, 1, 0.5, 0.5], [1, 1, 0, 0])
    torch.testing.assert_close(log_prob.grad, -weights * gain / 12)


def test_ipa_success_is_told_by_the_trajectory_where_it_is_given() -> None:
    # A return of 0.5 in a trajectory that failed after all: the ratio of 2 is clipped to 1, that of 0.5 stays.
    arguments = {
        "log_prob": double([[-1.0], [-1.0]]),
        "old_log_prob": double([[-1.0 - math.log(0.5)], [-1.0 - math.log(2.0)]]),
        "behaviour_log_prob": double([[-1.0 - math.log(0.5)], [-1.0 - math.log(2.0)]]),
        "advantage": double(0.5, 0.5),
        "max_mismatch": 2.0,
    }
    assert ipa_loss(**arguments)[0].item() == pytest.approx((0.5 + 0.5) / 2)  # type: ignore[arg-type]
    failed = torch.tensor([False, False])
    assert ipa_loss(**arguments, positive=failed)[0].item() == pytest.approx((0.25 + 0.5) / 2)  # type: ignore[arg-type]


def test_ipa_refuses_nonsense() -> None:
    x = torch.zeros(2, 3)
    same = {"log_prob": x, "old_log_prob": x, "behaviour_log_prob": x, "advantage": torch.ones(2)}
    with pytest.raises(ValueError, match="max_mismatch"):
        ipa_loss(**same, max_mismatch=0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be \[B, L\]"):
        ipa_loss(**{key: torch.zeros(2) for key in same}, max_mismatch=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive must be bool"):
        ipa_loss(**same, max_mismatch=2.0, positive=torch.ones(2))  # type: ignore[arg-type]
