from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied_rl.algorithms.aggregation import AGGREGATION_MODES, Aggregation, visible_entries
from embodied_rl.algorithms.losses import policy_gradient_loss, ppo_clip_loss
from tests.algorithms.loss_cases import AGGREGATIONS, NUM_ROWS, OPTIONS, global_denominator, gradient, make_case, run, select
from tests.forks import start_forked


def by_mode(aggregations: tuple[Aggregation, ...] = AGGREGATIONS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("aggregation", aggregations, ids=[aggregation.mode for aggregation in aggregations])


X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, float("nan"), float("nan")], [float("nan")] * 4])
MASK = torch.tensor([[True, True, False, True], [True, True, False, False], [False] * 4])


def test_every_mode_by_hand() -> None:
    # Rows: 1 + 2 + 4 = 7 of 3 entries; 10 + 20 = 30 of 2 entries; the third is empty and no sequence.
    assert Aggregation("token-mean").reduce(X, MASK).item() == pytest.approx((7 + 30) / 5)
    assert Aggregation("seq-mean-token-sum").reduce(X, MASK).item() == pytest.approx((7 + 30) / 2)
    assert Aggregation("seq-mean-token-mean").reduce(X, MASK).item() == pytest.approx((7 / 3 + 30 / 2) / 2)
    assert Aggregation("seq-mean-token-sum-norm", horizon=10).reduce(X, MASK).item() == pytest.approx((7 + 30) / 10 / 2)
    assert [Aggregation(mode, 10 if mode.endswith("norm") else None).count(MASK).item() for mode in AGGREGATION_MODES] == [5, 2, 2, 2]  # type: ignore[arg-type]


@by_mode()
def test_explicit_denominator_and_no_mask(aggregation: Aggregation) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    everything = torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(aggregation.reduce(x), aggregation.reduce(x, everything))
    count = aggregation.count(everything)
    torch.testing.assert_close(aggregation.reduce(x, everything, 4 * count), aggregation.reduce(x) / 4)
    assert aggregation.reduce(x, ~everything).item() == 0.0


@by_mode()
def test_figures_are_means_whatever_the_loss_is(aggregation: Aggregation) -> None:
    assert aggregation.mean(torch.ones(3, 4), MASK).item() == pytest.approx(1.0)


@by_mode()
def test_rows_of_one_entry_need_no_second_axis(aggregation: Aggregation) -> None:
    x, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
    assert aggregation.count(mask).item() == 2
    torch.testing.assert_close(aggregation.reduce(x, mask), aggregation.reduce(x[:, None], mask[:, None]))
    torch.testing.assert_close(aggregation.reduce(x[:2]), aggregation.reduce(x[:2, None]))


def test_token_mean_does_not_grow_with_the_number_of_units() -> None:
    # The trap of a loss that is K·D times too large: a row's advantage at each of its 56 action units is still one row.
    log_prob, advantage = torch.full((4, 1), -0.5), torch.tensor([1.0, 2.0, 3.0, 4.0])
    once, _ = policy_gradient_loss(log_prob=log_prob, advantage=advantage)
    often, _ = policy_gradient_loss(log_prob=log_prob.expand(4, 56), advantage=advantage)
    assert once.item() == pytest.approx(0.5 * 2.5)
    assert often.item() == pytest.approx(once.item())


@by_mode()
@pytest.mark.parametrize("name", OPTIONS)
def test_micro_batches_give_the_gradient_of_one_batch(name: str, aggregation: Aggregation) -> None:
    case = make_case()
    whole_loss, whole = gradient(name, [case], aggregation=aggregation, denominator=None)
    parts = [select(case, slice(start, start + 8)) for start in range(0, NUM_ROWS, 8)]
    denominator = global_denominator([part["mask"] for part in parts], aggregation)
    split_loss, split = gradient(name, parts, aggregation=aggregation, denominator=denominator)
    assert whole.abs().max() > 1e-3, "a gradient of nothing would agree with anything"
    torch.testing.assert_close(split_loss, whole_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)
    # In float32 to 5e-6, and not without the common denominator: these masks are ragged.
    single = [{key: x.float() if x.is_floating_point() else x for key, x in part.items()} for part in parts]
    torch.testing.assert_close(
        gradient(name, single, aggregation=aggregation, denominator=denominator)[1].double() / whole.abs().max(),
        whole / whole.abs().max(),
        rtol=0,
        atol=5e-6,
    )


def test_means_of_means_are_something_else() -> None:
    # What goes wrong without the global denominator; it must be visible in this data, or the test above shows nothing.
    case = make_case()
    _, whole = gradient("ppo_clip", [case], aggregation=AGGREGATIONS[0], denominator=None)
    parts = [select(case, slice(start, start + 8)) for start in range(0, NUM_ROWS, 8)]
    _, naive = gradient("ppo_clip", parts, aggregation=AGGREGATIONS[0], denominator=None)
    assert (naive / 8 - whole).abs().max() > 1e-3


@by_mode()
@pytest.mark.parametrize("name", OPTIONS)
def test_figures_add_up_over_micro_batches(name: str, aggregation: Aggregation) -> None:
    case = make_case()
    _, whole = run(name, case, aggregation=aggregation)
    parts = [select(case, slice(start, start + 8)) for start in range(0, NUM_ROWS, 8)]
    denominator = global_denominator([part["mask"] for part in parts], aggregation)
    metrics = [run(name, part, aggregation=aggregation, denominator=denominator)[1] for part in parts]
    for key, value in whole.items():
        torch.testing.assert_close(sum(figures[key] for figures in metrics), value)
        assert not value.requires_grad


def test_two_ranks_give_the_gradient_of_one_batch(tmp_path: Path) -> None:
    outputs = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    told, where = tmp_path / "told.txt", {"GLOO_SOCKET_IFNAME": "lo"}
    with told.open("wb") as output:
        started = [(rank, 2, tmp_path / "store", outputs[rank]) for rank in range(2)]
        ranks = [start_forked("tests.algorithms.gloo_rank", *words, environment=where, output=output) for words in started]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0], told.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    results = [torch.load(output, weights_only=True) for output in outputs]
    case = make_case()
    for aggregation in AGGREGATIONS:
        count = aggregation.count(case["mask"]).item()
        for result in results:
            assert result[f"denominator {aggregation.mode}"].item() == count
        for name in OPTIONS:
            loss, whole = gradient(name, [case], aggregation=aggregation, denominator=None)
            for result in results:
                torch.testing.assert_close(result[f"{aggregation.mode} {name} loss"], loss, rtol=0, atol=1e-6)
                torch.testing.assert_close(result[f"{aggregation.mode} {name} gradient"], whole, rtol=0, atol=1e-6)
        _, whole = gradient("ppo_clip", [case], aggregation=aggregation, denominator=None)
        for result in results:
            torch.testing.assert_close(result[f"{aggregation.mode} ddp"], whole, rtol=0, atol=1e-6)


def test_a_mode_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'token-mean'"):
        Aggregation("token_mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs horizon >= 1"):
        Aggregation("seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="has no effect"):
        Aggregation("token-mean", horizon=4)


def test_shapes_are_never_broadcast_in_silence() -> None:
    column, row = torch.zeros(3, 1), torch.zeros(3)
    with pytest.raises(ValueError, match=r"old_log_prob must have shape \(3,\), got \(3, 1\)"):
        ppo_clip_loss(log_prob=row, old_log_prob=column, advantage=row, clip_low=0.2, clip_high=0.2)
    # [B] beside [B, L] is a number per row, also where B = L and a plain broadcast would go along the wrong axis.
    square = torch.zeros(3, 3)
    _, advantage = visible_entries(None, log_prob=square, advantage=torch.tensor([1.0, 2.0, 3.0]))
    assert advantage.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    with pytest.raises(ValueError, match="mask must be bool"):
        visible_entries(torch.ones(3, 3), log_prob=square)


def test_half_precision_is_reckoned_in_single() -> None:
    log_prob = torch.full((2, 3), -1.0, dtype=torch.bfloat16)
    loss, _ = policy_gradient_loss(log_prob=log_prob, advantage=torch.ones(2))
    assert loss.dtype == torch.float32
