"""An advantage, a loss and what surrounds them, put together from a configuration; what makes no sense together is refused here."""

from __future__ import annotations

from dataclasses import dataclass

from embodied_rl.algorithms.advantage_table import AdvantageInfo, advantage_info
from embodied_rl.algorithms.catalogue import MethodInfo
from embodied_rl.algorithms.loss_table import LossInfo, loss_info
from embodied_rl.config import AlgorithmConfig, CorrectionConfig, RewardConfig
from embodied_rl.config.building import check_arguments
from embodied_rl.errors import UserError, did_you_mean
from embodied_rl.registry import load_target

OF_CONFIG = {"gamma", "gae_lambda", "clip_low", "clip_high", "dual_clip"}
"""Options that have a key of their own in the configuration."""
OF_ROLLOUTS = {"log_prob", "old_log_prob", "advantage"}
"""What a loss on fixed rollouts may ask for: old is the policy that acted, or with a correction the one that the update began with."""


@dataclass(frozen=True)
class Composition:
    """Which functions a run uses. Built by `compose`."""

    advantage: AdvantageInfo
    loss: LossInfo
    correction: CorrectionConfig

    @property
    def needs_critic(self) -> bool:
        return self.advantage.returns_value_target

    @property
    def needs_proximal(self) -> bool:
        """Log-probabilities of the policy as it is when the update begins."""
        return needs_present(self.loss, self.correction)


def compose(config: AlgorithmConfig) -> Composition:
    """Look up and check. Raises UserError with the reason where names or combinations make no sense."""
    advantage, loss = advantage_info(config.advantage), loss_info(config.loss)
    _check_options(advantage, config.advantage_options, "algorithm.advantage_options", config)
    _check_options(loss, config.loss_options, "algorithm.loss_options", config)
    if config.groups is None:
        _check_without_groups(config, advantage, loss)
    else:
        _check_with_groups(config, advantage, loss)
    _check_correction(config, loss)
    return Composition(advantage, loss, config.correction)


def needs_present(loss: LossInfo, correction: CorrectionConfig) -> bool:
    """Whether an update reads log-probabilities of the policy as it is when the update begins."""
    return "proximal_log_prob" in loss.inputs or "old_log_prob" in loss.inputs or correction.enabled


def correction_of(config: AlgorithmConfig) -> CorrectionConfig:
    """What weighs the rows of fixed rollouts: `algorithm.correction`, or decoupled PPO's options, which say the same."""
    if config.loss != "decoupled_ppo":
        return config.correction
    names = {"weight_low": "low", "weight_high": "high", "weight_mode": "mode"}
    given = {own: config.loss_options[name] for name, own in names.items() if name in config.loss_options}
    return CorrectionConfig(**{"mode": "mask", **given})


def method_options(info: MethodInfo, given: dict[str, object], config: AlgorithmConfig) -> dict[str, object]:
    """The keyword arguments of a method: its fixed ones, those with a key in the configuration, and what the user gave."""
    own = {name: getattr(config, name) for name in info.options if name in OF_CONFIG and getattr(config, name) is not None}
    return {**own, **given, **info.fixed}


def _check_options(info: MethodInfo, given: dict[str, object], where: str, config: AlgorithmConfig) -> None:
    allowed = [name for name in info.options if name not in OF_CONFIG]
    for name in given:
        if name in OF_CONFIG:
            raise UserError(f"{where}.{name} has its own key: set algorithm.{name}.")
        if name not in allowed:
            raise UserError(f"{where}.{name} is no option of '{info.name}'.{did_you_mean(str(name), allowed)}")
    missing = [name for name in info.required_options if name not in OF_CONFIG and name not in given]
    if missing:
        raise UserError(f"'{info.name}' needs {where}.{missing[0]}.")
    if given:
        check_arguments(load_target(info.target), given, where)


def _check_without_groups(config: AlgorithmConfig, advantage: AdvantageInfo, loss: LossInfo) -> None:
    """Fixed rollouts are PPO's: a critic, and a ratio for each step."""
    if advantage.name not in ("gae", "gae_chunk", "gae_action") and not (advantage.own and advantage.returns_value_target):
        raise UserError(
            f"algorithm.advantage='{advantage.name}' works on whole episodes, and algorithm.groups is null: "
            "choose a method with groups (algorithm=grpo, say), or advantage=gae."
        )
    if advantage.name == "gae_action" and config.ratio == "chunk":
        raise UserError(
            "algorithm.advantage='gae_action' gives each step of a chunk its own advantage, and algorithm.ratio=chunk has one ratio "
            "for all of them: set algorithm.ratio=action or token."
        )
    if advantage.name == "gae_action" and config.normalize_reward:
        raise UserError("algorithm.normalize_reward is about decisions, and advantage=gae_action about their steps: set it false.")
    _check_loss_of_rollouts(config, loss)
    if loss.name == "decoupled_ppo" or config.correction.enabled:
        _check_weighed_rollouts(config)
    if config.kl.coef > 0:
        raise UserError("algorithm.kl is offered on whole episodes: set algorithm.groups, or algorithm.kl.coef=0.")
    if config.reward != RewardConfig():
        raise UserError("algorithm.reward is about whole episodes, and algorithm.groups is null: use algorithm.normalize_reward instead.")


def _check_loss_of_rollouts(config: AlgorithmConfig, loss: LossInfo) -> None:
    """A loss on fixed rollouts sees each decision by itself, under the policy that acted and under the one in training."""
    if loss.name == "decoupled_ppo":
        return
    missing = [name for name in loss.inputs if name not in OF_ROLLOUTS]
    if missing or loss.unit != "entry" or loss.needs & {"groups", "demonstrations"}:
        why = f"it reads {missing[0]}" if missing else f"its ratio is that of a {loss.unit}" if loss.unit != "entry" else "it needs groups"
        raise UserError(
            f"algorithm.loss='{loss.name}' is offered on whole episodes ({why}): set algorithm.groups, or take a loss of single decisions "
            "(ppo_clip, decoupled_ppo, cispo, one of your own)."
        )
    if "old_log_prob" not in loss.inputs and (config.max_staleness or config.num_epochs > 1):
        raise UserError(
            f"algorithm.loss='{loss.name}' has no ratio and takes old decisions for new ones: set algorithm.num_epochs=1 and "
            "algorithm.max_staleness=0, or take ppo_clip or cispo."
        )


def _check_correction(config: AlgorithmConfig, loss: LossInfo) -> None:
    if not config.correction.enabled:
        return
    if loss.name == "decoupled_ppo":
        raise UserError("algorithm.loss='decoupled_ppo' brings its own weights: set loss=ppo_clip with algorithm.correction, or mode=none.")
    if config.ratio != "chunk":
        raise UserError(
            f"algorithm.correction weighs whole decisions, and algorithm.ratio={config.ratio} tells apart what they are made of: "
            "set algorithm.ratio=chunk."
        )


def _check_weighed_rollouts(config: AlgorithmConfig) -> None:
    """A decision of a fixed rollout has one weight."""
    level = config.loss_options.get("weight_level", "token")
    wrong = {
        f"algorithm.ratio={config.ratio}": config.ratio != "chunk",
        "algorithm.normalize_advantage=minibatch": config.normalize_advantage == "minibatch",
        f"algorithm.loss_options.weight_level={level}": level != "token",
    }
    weighs = "algorithm.correction" if config.correction.enabled else "algorithm.loss='decoupled_ppo'"
    for what, given in wrong.items():
        if given:
            raise UserError(
                f"{weighs} on fixed rollouts weighs whole decisions, and {what} does not: set algorithm.ratio=chunk, "
                "algorithm.normalize_advantage=batch and leave weight_level out."
            )


def _check_with_groups(config: AlgorithmConfig, advantage: AdvantageInfo, loss: LossInfo) -> None:
    groups = config.groups
    assert groups is not None
    if config.max_staleness:
        raise UserError("algorithm.max_staleness is about fixed rollouts; with groups set algorithm.groups.max_staleness instead.")
    if config.normalize_reward:
        raise UserError("algorithm.normalize_reward is about fixed rollouts; with groups set algorithm.reward.scale or .std instead.")
    if config.critic_warmup:
        raise UserError("algorithm.critic_warmup is about fixed rollouts, and algorithm.groups is set: set algorithm.critic_warmup=0.")
    if advantage.name in ("gae_chunk", "gae_action"):
        raise UserError(f"algorithm.advantage='{advantage.name}' needs a policy that acts in chunks; this one acts step by step: take gae.")
    if "groups" in advantage.needs and groups.group_size < 2:
        raise UserError(
            f"algorithm.advantage='{advantage.name}' compares the episodes of a group, and algorithm.groups.group_size is "
            f"{groups.group_size}: set it to 2 or more, or take an advantage without groups (reinforce, gae)."
        )
    if "greedy_baseline" in advantage.needs and (groups.redundancy or groups.group_size < 2):
        raise UserError(
            "algorithm.advantage='remax' plays one episode of each group by the policy's mode and needs it: "
            "set algorithm.groups.redundancy=0 and group_size to 2 or more."
        )
    if "demonstrations" in loss.needs:
        raise UserError(f"algorithm.loss='{loss.name}' learns from demonstrations, and the episodes of a run are its own.")
    if loss.name == "gpg" and advantage.name != "gpg":
        raise UserError(f"algorithm.loss='gpg' is a policy gradient with GPG's advantages: set advantage=gpg, not '{advantage.name}'.")
    if loss.name == "ipa" and advantage.name != "ipa":
        raise UserError(f"algorithm.loss='ipa' reads success from the sign of IPA's returns: set advantage=ipa, not '{advantage.name}'.")
    if config.kl.coef > 0 and config.kl.place == "loss" and config.kl.kind == "k1" and not config.kl.straight_through:
        raise UserError("algorithm.kl.kind='k1' as a loss has the gradient 0: take k2 or k3, or kl.place=reward.")
    if config.anchor_similarity is not None and "anchors" not in advantage.needs:
        raise UserError(f"algorithm.anchor_similarity is about equal observations, which advantage='{advantage.name}' does not compare.")
    if groups.max_staleness > 0 and loss.name in ("policy_gradient", "gpg"):
        raise UserError(
            f"algorithm.loss='{loss.name}' has no ratio and takes old episodes for new ones: set algorithm.groups.max_staleness=0, "
            "or take ppo_clip, decoupled_ppo or topr."
        )
    if (config.aggregation == "seq-mean-token-sum-norm") != (config.horizon is not None):
        raise UserError(
            "algorithm.aggregation=seq-mean-token-sum-norm divides by algorithm.horizon, the most steps that an episode may have, and "
            f"no other aggregation does: got aggregation={config.aggregation} and horizon={config.horizon}."
        )
    if config.kl.target is not None and config.kl.coef == 0:
        raise UserError("algorithm.kl.target adapts a coefficient that starts at algorithm.kl.coef=0: give one above 0.")
