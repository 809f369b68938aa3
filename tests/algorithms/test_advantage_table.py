"""The table says what the functions are."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from embodied_rl.algorithms.advantage_table import ADVANTAGES, AdvantageInfo, advantage_info
from embodied_rl.errors import UserError


@pytest.mark.parametrize("info", ADVANTAGES.values(), ids=list(ADVANTAGES))
def test_arguments_are_those_of_the_function(info: AdvantageInfo) -> None:
    parameters = inspect.signature(info.load()).parameters
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    listed = {*info.inputs, *info.optional_inputs, *info.options, *info.fixed}
    unlisted = {"discount"} if info.name == "gae" else set()
    assert listed == parameters.keys() - unlisted
    required = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    assert required == {*info.inputs, *info.required_options}


@pytest.mark.parametrize("info", ADVANTAGES.values(), ids=list(ADVANTAGES))
def test_needs_are_visible_in_the_arguments(info: AdvantageInfo) -> None:
    arrays = {*info.inputs, *info.optional_inputs}
    assert ("critic" in info.needs) == info.returns_value_target == ("value" in arrays)
    assert ("groups" in info.needs) == ("group" in arrays)
    assert ("anchors" in info.needs) == ("anchor_group" in arrays)
    assert ("trajectories" in info.needs) == ("trajectory" in arrays)
    assert ("greedy_baseline" in info.needs) == ("greedy_score" in arrays)
    assert ("chunks" in info.needs) == bool({"executed", "chunk_id"} & arrays)
    assert (info.layout == "time") == ("terminated" in arrays)
    assert info.source
    assert info.summary


def test_every_method_of_the_plan_is_there() -> None:
    wanted = "gae gae_chunk reinforce reinforce_plus_plus reinforce_plus_plus_baseline grpo dr_grpo rloo remax opo gpg pass_at_k gigpo"
    assert {*wanted.split(), "segment_returns", "ipa"} <= ADVANTAGES.keys()


def test_unknown_names_get_the_nearest() -> None:
    assert advantage_info("rloo").name == "rloo"
    with pytest.raises(UserError, match="Did you mean 'gigpo'"):
        advantage_info("gipgo")


def test_the_table_is_cheap() -> None:
    code = "import sys, embodied_rl.algorithms.advantage_table; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
