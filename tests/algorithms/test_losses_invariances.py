"""What holds for every loss of the table: masks, padding, order of rows, constants, and a plain loop that gives the same number."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from embodied_rl.algorithms.loss_table import LOSS_TERMS, LOSSES, loss_info
from embodied_rl.errors import UserError
from tests.algorithms.loss_cases import AGGREGATIONS, OPTIONS, Case, gradient, log_prob_of, make_case, run

TOKEN_MEAN, _, SEQUENCE_MEAN, _ = AGGREGATIONS
every_loss = pytest.mark.parametrize("name", OPTIONS)


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo_term(ratio: float, a: float, o: dict) -> float:
    term = max(-a * ratio, -a * clamp(ratio, 1 - o["clip_low"], 1 + o["clip_high"]))
    return min(term, -a * o["dual_clip"]) if a < 0 and o.get("dual_clip") else term


def entry(name: str, case: dict, i: int, t: int) -> float:
    """The loss of one entry in plain Python: scalars and math alone."""
    o, mask = OPTIONS[name], case["mask"]
    new, old, behaviour = (case[key] for key in ("log_prob", "old_log_prob", "behaviour_log_prob"))
    a, lp = case["advantage"][i], new[i][t]
    row = [u for u in range(len(mask[i])) if mask[i][u]]
    chunk = [u for u in row if case["chunk_id"][i][u] == case["chunk_id"][i][t]]
    if name == "ppo_clip":
        return ppo_term(math.exp(lp - old[i][t]), a, o)
    if name == "gspo":
        return ppo_term(math.exp(sum(new[i][u] - old[i][u] for u in row) / len(row)), a, o)
    if name == "cispo":
        return -clamp(math.exp(lp - old[i][t]), 1 - o["clip_low"], 1 + o["clip_high"]) * a * lp
    if name in ("policy_gradient", "gpg"):
        return -a * lp
    if name == "topr":
        return -(1.0 if a >= 0 else clamp(math.exp(sum(new[i][u] - behaviour[i][u] for u in row)), 0.0, 1.0)) * a * lp
    if name == "ipa":
        mismatch = math.exp(sum(old[i][u] - behaviour[i][u] for u in chunk) / len(chunk))
        rho = math.exp(sum(new[i][u] - old[i][u] for u in chunk) / len(chunk))
        return -(1.0 if case["positive"][i] else min(rho, 1.0)) * a * lp * (mismatch <= o["max_mismatch"])
    assert name == "behaviour_cloning"
    return -lp


@every_loss
def test_equals_a_loop_over_entries(name: str) -> None:
    case = make_case(seed=3)
    lists = {key: x.tolist() for key, x in {**case, "log_prob": log_prob_of(case["theta"], case)}.items()}
    weights = lists["weight"] if "weight" in LOSSES[name].optional_inputs else torch.ones_like(case["weight"]).tolist()
    terms = [[entry(name, lists, i, t) * weights[i][t] for t in range(len(units)) if units[t]] for i, units in enumerate(lists["mask"])]
    count = sum(len(row) for row in terms)
    filled = [row for row in terms if row]
    loss, _ = run(name, case, aggregation=TOKEN_MEAN)
    assert loss.item() == pytest.approx(math.fsum(sum(row) for row in terms) / count, rel=1e-12)
    loss, _ = run(name, case, aggregation=SEQUENCE_MEAN)
    assert loss.item() == pytest.approx(math.fsum(sum(row) / len(row) for row in filled) / len(filled), rel=1e-12)


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e30])
def test_nothing_behind_the_mask_leaks_into_value_or_gradient(name: str, dtype: torch.dtype, poison: float) -> None:
    case = make_case(dtype=dtype)
    mask = case["mask"]
    log_prob = log_prob_of(case["theta"], case)
    expected, figures = run(name, case, aggregation=SEQUENCE_MEAN)
    poisoned = {key: torch.where(mask, x, poison) if key.endswith("log_prob") or key == "weight" else x for key, x in case.items()}
    poisoned["advantage"] = torch.where(mask, case["advantage"][:, None], poison)
    poisoned["chunk_id"] = torch.where(mask, case["chunk_id"], -(2**62))
    leaf = torch.where(mask, log_prob, poison).requires_grad_()
    loss, metrics = run(name, poisoned, aggregation=SEQUENCE_MEAN, log_prob=leaf)
    loss.backward()
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert all(torch.equal(metrics[key], value) for key, value in figures.items())
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert leaf.grad[~mask].abs().max() == 0.0
    assert leaf.grad[mask].abs().max() > 0.0


@every_loss
def test_order_of_rows_and_padding_do_not_matter(name: str) -> None:
    case = make_case()
    expected_loss, expected = gradient(name, [case], aggregation=SEQUENCE_MEAN, denominator=None)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    shuffled = {key: x if key == "theta" else x[order] for key, x in case.items()}

    def pad(x: torch.Tensor) -> torch.Tensor:
        # Two more columns to the right, one to the left, and three more rows, all outside the mask.
        wider = torch.cat([x[:, :1], x, x[:, :1], x[:, :1]], 1) if x.dim() > 1 else x
        return torch.cat([wider, wider[:3]])

    padded = {key: x if key == "theta" else pad(x) for key, x in case.items()}
    padded["mask"] = torch.zeros(67, 10, dtype=torch.bool)
    padded["mask"][:64, 1:8] = case["mask"]
    for other in (shuffled, padded):
        loss, grad = gradient(name, [other], aggregation=SEQUENCE_MEAN, denominator=None)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "advantage" in LOSSES[name].inputs])
def test_scaling_advantages_scales_loss_and_gradient(name: str) -> None:
    case = make_case()
    loss, grad = gradient(name, [case], aggregation=TOKEN_MEAN, denominator=None)
    scaled_loss, scaled = gradient(name, [{**case, "advantage": 3.0 * case["advantage"]}], aggregation=TOKEN_MEAN, denominator=None)
    torch.testing.assert_close(scaled_loss, 3.0 * loss)
    torch.testing.assert_close(scaled, 3.0 * grad)


@every_loss
def test_everything_but_the_policy_is_a_constant(name: str) -> None:
    case = make_case()
    constants = ("old_log_prob", "behaviour_log_prob", "advantage", "weight")
    leaves: Case = {key: case[key].clone().requires_grad_() for key in constants}
    theta = case["theta"].clone().requires_grad_()
    loss, metrics = run(name, {**case, **leaves, "theta": theta}, aggregation=TOKEN_MEAN)
    loss.backward()
    assert theta.grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())
    assert not any(value.requires_grad for value in metrics.values())


@every_loss
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(name: str) -> None:
    # Where all policies are one, every ratio is 1, nothing is clipped, and d(loss) = -mean A d(log pi).
    # (Behaviour cloning: with A = 1.)
    case = make_case()
    same = log_prob_of(case["theta"], case)
    case |= dict.fromkeys(("old_log_prob", "behaviour_log_prob"), same) | {"weight": torch.ones_like(case["weight"])}
    _, grad = gradient(name, [case], aggregation=SEQUENCE_MEAN, denominator=None)
    reference = {**case, "advantage": torch.ones_like(case["advantage"])} if name == "behaviour_cloning" else case
    _, expected = gradient("policy_gradient", [reference], aggregation=SEQUENCE_MEAN, denominator=None)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@every_loss
def test_runaway_ratios_stay_finite(name: str) -> None:
    case = make_case(dtype=torch.float32)
    leaf = torch.where(torch.arange(64)[:, None] % 2 == 0, -900.0, 900.0).expand(64, 7).clone().requires_grad_()
    loss, metrics = run(name, case, aggregation=TOKEN_MEAN, log_prob=leaf)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value) for value in metrics.values())
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


@every_loss
def test_no_row_in_the_mask_is_a_loss_of_zero(name: str) -> None:
    case = make_case()
    case["mask"] = torch.zeros_like(case["mask"])
    loss, grad = gradient(name, [case], aggregation=SEQUENCE_MEAN, denominator=None)
    assert loss.item() == 0.0
    assert grad.abs().max() == 0.0


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_loss_of_the_table_is_tested_here() -> None:
    assert LOSSES.keys() == OPTIONS.keys()


@pytest.mark.parametrize("info", [*LOSSES.values(), *LOSS_TERMS.values()], ids=lambda info: info.name)
def test_table_tells_the_truth_about_signatures(info) -> None:  # type: ignore[no-untyped-def]
    parameters = inspect.signature(info.load()).parameters
    common = {"mask", "denominator", "aggregation"}
    assert common | {*info.inputs, *info.optional_inputs, *info.options} == parameters.keys()
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    without_default = {key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    assert without_default == {*info.inputs, *info.required_options}
    assert parameters["aggregation"].default.mode == info.default_aggregation
    assert info.source
    for need in ("old_log_prob", "behaviour_log_prob", "reference_log_prob", "chunk_id"):
        assert (need in info.needs) <= (need in info.inputs + info.optional_inputs)
        assert (need in info.inputs) <= (need in info.needs)


def test_unknown_loss_offers_the_nearest() -> None:
    assert loss_info("gspo").unit == "sequence"
    with pytest.raises(UserError, match=r"Loss 'ppo_clp' is not known. Did you mean 'ppo_clip'\?"):
        loss_info("ppo_clp")
