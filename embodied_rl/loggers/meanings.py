"""Meaning of each figure of a run, in one sentence, and its name in other libraries: for the console, the report, W&B and TensorBoard."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace

SUCCESS_ENDS = "Success ends an episode here. A better policy has shorter episodes, so its return may fall while it improves."
"""Caption below return and length if success ends an episode."""


@dataclass(frozen=True)
class Meaning:
    """Meaning of one metric, or of all metrics with a common prefix."""

    text: str
    """One sentence; empty if unknown (a user's own metric)."""
    label: str = ""
    """Label on the console and above charts; empty: the metric's own name."""
    alias: str = ""
    """Name of the same figure in stable-baselines3's logs."""


REWARD_PER_STEP = "episode/reward_per_step"
"""Derived, not measured; see `derived`."""

MEANINGS = {
    "episode/success": Meaning(
        "Share of the last 100 training episodes with success at any step; actions are sampled.", "success", "rollout/success_rate"
    ),
    "episode/return": Meaning("Mean sum of rewards over the last 100 training episodes.", "return", "rollout/ep_rew_mean"),
    REWARD_PER_STEP: Meaning(
        "Return divided by length over the last 100 training episodes; comparable between short and long episodes.", "reward per step"
    ),
    "episode/length": Meaning("Mean number of steps of the last 100 training episodes.", "length", "rollout/ep_len_mean"),
    "eval/success": Meaning(
        "Interim evaluation: share of episodes with success on held-out seeds that neither training nor the final evaluation uses.",
        "interim success",
        "eval/success_rate",
    ),
    "eval/return": Meaning(
        "Interim evaluation: mean return on the same held-out seeds as the interim success.", "interim return", "eval/mean_reward"
    ),
    "speed/steps_per_s": Meaning("Environment steps per second of the iteration, training time included.", "steps/s", "time/fps"),
    "speed/wall_clock_s": Meaning("Seconds since the command, start-up and evaluations included.", "wall clock", "time/time_elapsed"),
    "time/simulate_s": Meaning("Seconds of the iteration spent waiting for simulators.", "simulate"),
    "time/act_s": Meaning("Seconds of the iteration spent computing actions.", "act"),
    "time/update_s": Meaning("Seconds of the iteration spent on the update and on everything else.", "update"),
    "train/loss": Meaning("The loss that the optimizer minimises.", alias="train/loss"),
    "train/policy_loss": Meaning(
        "The policy's part of the loss. It is near zero and noisy by design, and need not fall.", alias="train/policy_gradient_loss"
    ),
    "train/value_loss": Meaning("Squared error of the predicted returns.", alias="train/value_loss"),
    "train/entropy": Meaning("Randomness of the sampled actions; it falls as the policy becomes more certain."),
    "train/approx_kl": Meaning("How far an update moves the policy; 0.01 to 0.05 is typical of PPO.", alias="train/approx_kl"),
    "train/behaviour_kl": Meaning("Distance of the policy from the policy that acted."),
    "train/kl": Meaning("Distance of the policy from the reference model, per token or step."),
    "train/clip_fraction": Meaning("Share of samples whose ratio was outside the clip range.", alias="train/clip_fraction"),
    "train/grad_norm": Meaning("Norm of the gradient before clipping."),
    "train/explained_variance": Meaning(
        "Share of the returns' variance that the critic explains: 1 all, 0 nothing, below 0 worse than their mean.",
        alias="train/explained_variance",
    ),
    "train/epochs_done": Meaning("Passes over the data of the iteration; fewer than num_epochs if the KL limit stopped them."),
    "train/learning_rate": Meaning("Current learning rate of the optimizer.", alias="train/learning_rate"),
    "train/weight_mean": Meaning("Mean weight of samples: for the policy that acted (1 means no difference), or by advantage (iql, awac)."),
    "train/weight_bounded_fraction": Meaning("Share of these weights at their bound."),
    "train/chunk_rejected_fraction": Meaning("Share of action chunks rejected because the policy has moved too far from them."),
    "train/log_prob_difference": Meaning(
        "Mean absolute difference between the generator's and the trainer's log-probabilities; it should be near 0."
    ),
    "train/validation_loss": Meaning("Cloning loss on validation episodes; cloning ends when it rises."),
    "train/imitation_loss": Meaning("Cloning loss of the expert's actions; lower is closer to the expert."),
    "train/critic_loss": Meaning("Squared error of the critics against their targets.", alias="train/critic_loss"),
    "train/advantage_mean": Meaning("Mean advantage: how much better actions were than expected."),
    "train/value_mean": Meaning("Mean of the predicted returns."),
    "train/q_mean": Meaning("Mean of the critics' predicted returns."),
    "train/q_spread": Meaning("Disagreement of the critics; large where data is scarce."),
    "train/kl_coef": Meaning("Weight of the KL term after the update."),
    "train/kl_penalty": Meaning("Mean penalty for the distance from the reference model that was taken from the rewards."),
    "train/rejected_fraction": Meaning("Share of samples rejected because the policy is too far from the one that acted."),
    "train/entropy_coef": Meaning("Current weight of the entropy in the targets of critics and policy."),
    "train/validation_mae": Meaning(
        "Mean distance of the policy's mode from the actions of validation episodes, in halves of their range."
    ),
    "train/validation_accuracy": Meaning("Share of the actions of validation episodes that the policy's mode equals."),
    "train/grad_norm_critics": Meaning("Norm of the critics' gradient before clipping."),
    "train/grad_norm_policy": Meaning("Norm of the policy's gradient before clipping."),
    "train/minibatches": Meaning("Gradient steps of the iteration."),
    "train/tokens": Meaning("Sampled tokens that the iteration learned from."),
    "train/updates": Meaning("Critics' gradient steps of the whole run."),
    "warm_start/success_before": Meaning("Share of held-out episodes with success before the warm start.", "success before cloning"),
    "warm_start/success_after": Meaning(
        "Share of the same episodes with success after cloning, before reinforcement learning.", "success after cloning"
    ),
    "warm_start/loss": Meaning("Cloning loss after the warm start.", "cloning loss"),
    "warm_start/episodes": Meaning("Number of cloned expert episodes, all successful.", "expert episodes"),
    "warm_start/steps": Meaning("Number of steps of the cloned episodes.", "expert steps"),
    "warm_start/turns": Meaning("Answers of the cloned episodes.", "expert turns"),
    "groups/consumed": Meaning("Groups of episodes that were trained on."),
    "groups/filtered": Meaning("Groups that the filters removed, for example because all their episodes had equal returns."),
    "groups/stale": Meaning("Groups dropped because their weights were too old."),
    "groups/failed": Meaning("Groups dropped because an episode failed more often than it may be retried."),
    "groups/in_flight": Meaning("Groups with episodes still being played."),
    "groups/": Meaning("Counts of groups (episodes from the same initial state) by outcome."),
    "agent/turns": Meaning("Number of the iteration's answers."),
    "agent/": Meaning("Statistics of the language agent: shares of its answers, tool calls, and means per answer or program."),
    "reward_worker/": Meaning("Episodes that the reward worker scored, and their waiting times."),
    "rollout/": Meaning("Age of the played steps when they are learned from, in versions of the weights."),
    "domains/": Meaning("Figures of one domain: of each batch's episodes, of its agent, starts and stored steps."),
    "players/": Meaning("Figures of the episodes of one of several players."),
    "sim/faults": Meaning("Simulator workers that failed and were replaced."),
    "sim/episodes_given_up": Meaning("Episodes lost to failing simulators."),
    "data/": Meaning("Recorded and fresh steps used for training."),
    "initialized/": Meaning("Episodes that start inside recorded ones."),
    "residency/": Meaning("Bytes of weights and simulators on and off the device, and the time to move them."),
    "roles/": Meaning("Times of playing, scoring and publishing, by process."),
    "multiplex/": Meaning("Hosts lent to training: episodes that moved or were parked, and idle and shared time."),
    "utilisation/": Meaning("Shares of time that devices worked or waited."),
}
"""{metric, or prefix of metrics up to a slash: its meaning}"""


FIGURES = {
    "success": "Share of the final evaluation's episodes with success at any step; nothing else in the run uses its held-out seeds.",
    "success (once)": "Share of episodes with success at any step.",
    "success at the end": "Share of episodes whose last step is a success; lower if the policy does not keep the success.",
    "at end": "Share of episodes whose last step is a success.",
    "95% interval": "95% confidence interval: Wilson's for shares, bootstrap over the episodes for means.",
    "return": "Mean sum of rewards per episode.",
    "reward per step": "Return divided by steps; comparable between short and long episodes.",
    "steps of an episode": "Mean number of steps per episode; fewer is better if success ends an episode.",
    "length": "Mean number of steps per episode.",
    "environment steps": "Simulator steps for training, without evaluations.",
    "wall-clock": "Time from the command to the end of the final evaluation, start-up included; without films and report.",
    "after cloning": "Success on held-out seeds after cloning the expert, before reinforcement learning.",
    "pairs": "Seeds that both policies played.",
    "p": "Probability of a difference at least this large by chance, if the policies are equal.",
    "seeds": "Held-out episodes that were played.",
    "share": "Share of the run's wall-clock time.",
    "mean success": "Mean over the runs' final evaluations; the bar spans the worst to the best run.",
    "mean return": "Mean over the runs' final evaluations.",
}
"""{figure of an evaluation or a run's end: its meaning}"""


OFFLINE = {
    "value": "Estimated return of the policy, discounted by gamma, from the recorded episodes.",
    "bootstrap": "Confidence interval from resampling the episodes; for fitted values, from the spread over the fits.",
    "concentration": "Confidence interval that holds for any weights if rewards lie in reward_range; it is wide.",
    "ESS": "Effective sample size: the number of equally weighted episodes with the same precision.",
    "largest weight": "Largest importance weight of an episode; if it is large, one episode decides the estimate.",
    "mean weight": "Mean importance weight; expected: 1. Far below 1, the recording lacks episodes that matter for the policy.",
    "best in": "Share of the bootstrap resamples, the same for all policies, in which this policy is the best.",
    "behaviour": "The recorded policy itself: the mean of its returns.",
    "is": "Importance sampling: returns weighted by the probability ratio of target to recorded policy.",
    "wis": "Importance sampling with weights that sum to 1: less variance, biased towards the recorded policy.",
    "pdis": "Per-decision importance sampling: each reward weighted only by the decisions before it.",
    "wpdis": "pdis with weights that sum to 1 at each step.",
    "dr": "Doubly robust: fitted values, corrected by importance weights.",
    "wdr": "dr with weights that sum to 1 at each step.",
    "fqe": "Fitted-Q evaluation: a regression on the recorded steps, without weights.",
    "MSE": "Mean squared distance of predicted from recorded actions, in the simulator's units.",
    "MAE": "Mean distance of predicted from recorded actions, in the simulator's units.",
    "explained": "Share of the recorded actions' variance that the prediction explains; predicting their mean explains 0.",
    "same bin": "Share of predictions in the recorded action's bin (bins as in policies with action tokens).",
    "accuracy": "Share of decisions equal to the recorded ones.",
    "always the most frequent": "The same figure for always predicting the most frequent action or bin.",
    "log-likelihood per step": "Mean log-likelihood of the recorded actions under the policy, per step; higher is closer.",
}
"""{figure of an offline evaluation: its meaning}"""


def explain_text(width: int) -> str:
    """All figures and their meanings, in lines of at most `width` characters: ``--explain``."""

    def rows(title: str, entries: Mapping[str, str]) -> list[str]:
        lines = ["", f"{title}:"]
        for name, text in entries.items():
            lines += [f"  {name}", *textwrap.indent(textwrap.fill(text, width - 6, break_on_hyphens=False), " " * 6).splitlines()]
        return lines

    console: dict[str, str] = {}
    for name in MEANINGS:
        if not name.endswith("/"):
            console[f"{meaning_of(name).label}  ({name})"] = MEANINGS[name].text
    return "\n".join(
        [
            *rows("While a run trains", console),
            *textwrap.wrap(SUCCESS_ENDS, width),
            *rows("Evaluations, and the end of a run", FIGURES),
            *rows("Offline evaluations", OFFLINE),
        ]
    ).lstrip()


def meaning_of(name: str) -> Meaning:
    """Meaning of a metric; its text is empty if unknown. For several domains' metrics (``train/robot/entropy``): that of the last part."""
    group, _, rest = name.partition("/")
    found = MEANINGS.get(name) or MEANINGS.get(f"{group}/{rest.rpartition('/')[2]}") or MEANINGS.get(f"{group}/") or Meaning("")
    return found if found.label and name in MEANINGS else replace(found, label=rest.removesuffix("_s").replace("_", " "))


def derived(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` with the reward per step after the return, if return and length are there: the ratio of their means, which is those
    episodes' rewards divided by their steps."""
    total, length = metrics.get("episode/return"), metrics.get("episode/length")
    if total is None or not length:
        return dict(metrics)
    shown = {}
    for name, value in metrics.items():
        shown[name] = value
        if name == "episode/return":
            shown[REWARD_PER_STEP] = total / length
    return shown


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """`derived` metrics, plus those with a name in stable-baselines3 under that name, so that its users' boards show them."""
    aliases = {meaning.alias: metrics[name] for name, meaning in MEANINGS.items() if meaning.alias and name in metrics}
    return {**aliases, **derived(metrics)}
