"""Which combinations are refused, with what reason; and that every configuration file names mathematics that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_rl.algorithms.composition import compose, method_options
from embodied_rl.compose import load_train_config
from embodied_rl.config import AlgorithmConfig, CorrectionConfig, GroupsConfig, KlConfig, RewardConfig, group_names
from embodied_rl.errors import UserError

GRPO = AlgorithmConfig(advantage="grpo", groups=GroupsConfig())


@pytest.mark.parametrize("name", group_names("algorithm"))
def test_every_algorithm_file_makes_sense(name: str) -> None:
    config = load_train_config(["sim=cartpole", f"algorithm={name}"])
    composition = compose(config.algorithm)
    assert config.algorithm.name == name
    assert composition.needs_critic == (composition.advantage.name == "gae")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(GRPO, advantage="grpoo"), "Did you mean 'grpo'"),
        (replace(GRPO, loss="ppo"), "Loss 'ppo' is not known. Did you mean 'topr'|Loss 'ppo' is not known"),
        (replace(GRPO, groups=None), "works on whole episodes, and algorithm.groups is null"),
        (AlgorithmConfig(loss="gspo"), "is offered on whole episodes"),
        (AlgorithmConfig(kl=KlConfig(coef=0.1)), "algorithm.kl is offered on whole episodes"),
        (AlgorithmConfig(reward=RewardConfig(std="batch")), "use algorithm.normalize_reward instead"),
        (replace(GRPO, normalize_reward=True), "set algorithm.reward.scale or .std instead"),
        (replace(GRPO, critic_warmup=3), "set algorithm.critic_warmup=0"),
        (replace(GRPO, groups=GroupsConfig(group_size=1)), "compares the episodes of a group, and algorithm.groups.group_size is 1"),
        (replace(GRPO, advantage="remax", groups=GroupsConfig(redundancy=1)), "set algorithm.groups.redundancy=0"),
        (replace(GRPO, advantage="gae_chunk"), "needs a policy that acts in chunks"),
        (replace(GRPO, loss="behaviour_cloning"), "learns from demonstrations"),
        (replace(GRPO, loss="gpg"), "set advantage=gpg"),
        (replace(GRPO, loss="ipa", loss_options={"max_mismatch": 2.0}), "set advantage=ipa"),
        (replace(GRPO, kl=KlConfig(coef=0.1, kind="k1")), "take k2 or k3, or kl.place=reward"),
        (replace(GRPO, kl=KlConfig(target=0.1)), "give one above 0"),
        (replace(GRPO, loss="policy_gradient", groups=GroupsConfig(max_staleness=1)), "takes old episodes for new ones"),
        (replace(GRPO, loss="decoupled_ppo"), "'decoupled_ppo' needs algorithm.loss_options.weight_high"),
        (
            replace(GRPO, loss="decoupled_ppo", loss_options={"weight_high": 1e10}),
            "algorithm.loss_options.weight_high must be above 0 and at most 1,000,000,000, got 10000000000",
        ),
        (replace(GRPO, loss="topr", loss_options={"ratio_low": -1}), "algorithm.loss_options.ratio_low must be between 0 and"),
        (replace(GRPO, loss="topr", loss_options={"level": "word"}), "algorithm.loss_options.level='word' is not a choice"),
        (
            replace(GRPO, advantage="gigpo", advantage_options={"step_weight": "1"}),
            "algorithm.advantage_options.step_weight must be a number",
        ),
        (replace(GRPO, advantage_options={"alon": "zero"}), "is no option of 'grpo'. Did you mean 'alone'"),
        (replace(GRPO, loss_options={"clip_low": 0.1}), "set algorithm.clip_low"),
        (replace(GRPO, anchor_similarity=0.9), "which advantage='grpo' does not compare"),
        (replace(GRPO, correction=CorrectionConfig(mode="mask"), ratio="token"), "weighs whole decisions"),
        (
            replace(GRPO, correction=CorrectionConfig(reject=2.0), loss="decoupled_ppo", loss_options={"weight_high": 2.0}),
            "brings weights of its own",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(config: AlgorithmConfig, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        compose(config)


def test_options_come_from_the_configuration_and_the_user() -> None:
    config = replace(GRPO, advantage_options={"alone": "zero"}, clip_high=0.28)
    composition = compose(config)
    assert method_options(composition.advantage, config.advantage_options, config) == {"alone": "zero", "std": True}
    assert method_options(composition.loss, config.loss_options, config) == {"clip_low": 0.2, "clip_high": 0.28}
