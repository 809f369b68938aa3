"""Options of methods, and that every configuration file names mathematics that exist (combinations: tests/test_rules.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_rl.algorithms.advantage_table import advantage_info
from embodied_rl.algorithms.composition import check_methods, method_options
from embodied_rl.algorithms.loss_table import loss_info
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, CorrectionConfig, GroupsConfig, group_names
from embodied_rl.errors import UserError

GRPO = AlgorithmConfig(advantage="grpo", groups=GroupsConfig())


@pytest.mark.parametrize("name", group_names("algorithm"))
def test_every_algorithm_file_makes_sense(name: str) -> None:
    config = load_train_config(["sim=cartpole", f"algorithm={name}"])
    check_methods(config.algorithm)
    assert config.algorithm.name == name
    assert advantage_info(config.algorithm.advantage).returns_value_target == (config.algorithm.advantage == "gae")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            replace(GRPO, loss="topr", loss_options={"ratio_high": 1e10}),
            "algorithm.loss_options.ratio_high must be above 0 and at most 1,000,000,000, got 10000000000",
        ),
        (replace(GRPO, loss="topr", loss_options={"ratio_low": -1}), "algorithm.loss_options.ratio_low must be between 0 and"),
        (replace(GRPO, loss="topr", loss_options={"level": "word"}), "algorithm.loss_options.level='word' is not a choice"),
        (
            replace(GRPO, advantage="gigpo", advantage_options={"step_weight": "1"}),
            "algorithm.advantage_options.step_weight must be a number",
        ),
        (replace(GRPO, advantage_options={"alon": "zero"}), "is not an option of 'grpo'. Did you mean 'alone'"),
        (replace(GRPO, loss_options={"clip_low": 0.1}), "set algorithm.clip_low"),
    ],
)
def test_options_that_do_not_exist_or_do_not_fit(config: AlgorithmConfig, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_methods(config)


def test_options_come_from_the_configuration_and_the_user() -> None:
    config = replace(GRPO, advantage_options={"alone": "zero"}, clip_high=0.28)
    assert method_options(advantage_info(config.advantage), config.advantage_options, config) == {"alone": "zero", "std": True}
    assert method_options(loss_info(config.loss), config.loss_options, config) == {"clip_low": 0.2, "clip_high": 0.28}


def test_decoupled_ppo_is_short_for_a_correction() -> None:
    words = ["sim=cartpole", "algorithm=grpo", "algorithm.loss=decoupled_ppo"]
    options = [f"algorithm.loss_options.{option}" for option in ("weight_high=3", "weight_mode=clamp", "weight_level=sequence")]
    config = load_train_config([*words, *options]).algorithm
    assert (config.loss, config.loss_options) == ("ppo_clip", {})
    assert config.correction == CorrectionConfig(mode="clamp", high=3.0, level="sequence")
    with pytest.raises(UserError, match="has its own importance weights"):
        load_train_config([*words, *options, "algorithm.correction.reject=2"])
    with pytest.raises(UserError, match=r"needs algorithm\.loss_options\.weight_high"):
        load_train_config(words)
