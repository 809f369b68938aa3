"""Meaning of each figure of a run, in one sentence, and its name in other libraries: for the console, the report, W&B and TensorBoard."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

SUCCESS_ENDS = (
    "Success ends an episode here: the better the policy, the shorter its episodes, so that the return may fall while it improves."
)
"""Caption below return and length if success ends an episode."""


@dataclass(frozen=True)
class Meaning:
    """Meaning of one metric, or of all metrics with a common prefix."""

    label: str
    """Label on the console and above charts; empty: the metric's own name."""
    text: str
    """One sentence; empty if unknown (a user's own metric)."""
    alias: str = ""
    """Name of the same figure in stable-baselines3's logs."""


REWARD_PER_STEP = "episode/reward_per_step"
"""Derived, not measured; see `derived`."""

MEANINGS = {
    "episode/success": Meaning(
        "success", "Share of the last 100 training episodes with success at any step; actions are sampled.", "rollout/success_rate"
    ),
    "episode/return": Meaning("return", "Sum of the rewards of an episode, mean of the last 100 training episodes.", "rollout/ep_rew_mean"),
    REWARD_PER_STEP: Meaning("reward per step", "Return over length of the last 100 training episodes: short and long ones compare."),
    "episode/length": Meaning("length", "Steps of an episode, mean of the last 100 training episodes.", "rollout/ep_len_mean"),
    "eval/success": Meaning(
        "interim success",
        "Interim evaluation: share of episodes with success on held-out seeds that neither training nor the final evaluation uses.",
        "eval/success_rate",
    ),
    "eval/return": Meaning(
        "interim return", "Interim evaluation: mean return on the same held-out seeds as the interim success.", "eval/mean_reward"
    ),
    "speed/steps_per_s": Meaning("steps/s", "Environment steps of the iteration over its seconds, training included.", "time/fps"),
    "speed/wall_clock_s": Meaning("wall clock", "From the command to now, start-up and evaluations included.", "time/time_elapsed"),
    "time/simulate_s": Meaning("simulate", "Seconds of the iteration in which it waited for simulators."),
    "time/act_s": Meaning("act", "Seconds of the iteration in which the policy chose actions."),
    "time/update_s": Meaning("update", "Seconds of the iteration in which the policy learned, and all that is neither of the others."),
    "train/loss": Meaning("", "What the optimizer makes smaller.", "train/loss"),
    "train/policy_loss": Meaning(
        "", "The policy's part of the loss; near zero and noisy by design, it need not fall.", "train/policy_gradient_loss"
    ),
    "train/value_loss": Meaning("", "Squared error of the predicted returns.", "train/value_loss"),
    "train/entropy": Meaning("", "How random the sampled actions are; it falls as the policy makes up its mind."),
    "train/approx_kl": Meaning("", "How far an update moves the policy; PPO is at ease around 0.01 to 0.05.", "train/approx_kl"),
    "train/behaviour_kl": Meaning("", "How far the policy is from the one that acted."),
    "train/kl": Meaning("", "How far the policy is from the reference model, for each token or step."),
    "train/clip_fraction": Meaning("", "Share of samples whose update was cut off by the clip range.", "train/clip_fraction"),
    "train/grad_norm": Meaning("", "Length of the gradient before it is clipped."),
    "train/explained_variance": Meaning(
        "",
        "How much of the returns the value network predicts: 1 all, 0 nothing, below 0 worse than their mean.",
        "train/explained_variance",
    ),
    "train/epochs_done": Meaning("", "Passes over the data of the iteration; fewer than asked for where the KL limit ended them."),
    "train/learning_rate": Meaning("", "Step size of the optimizer now.", "train/learning_rate"),
    "train/weight_mean": Meaning("", "Mean importance weight of samples that an older policy took; 1 means no difference."),
    "train/weight_bounded_fraction": Meaning("", "Share of importance weights that hit their bound."),
    "train/chunk_rejected_fraction": Meaning("", "Share of action chunks left out because the policy has moved too far from them."),
    "train/log_prob_difference": Meaning(
        "", "Mean distance between the log-probabilities that the generator gave and those that the trainer computes; near 0 is right."
    ),
    "train/validation_loss": Meaning("", "The cloning loss on episodes that are held back; training ends when it rises."),
    "train/imitation_loss": Meaning("", "How unlikely the expert's actions are under the policy."),
    "train/critic_loss": Meaning("", "Squared error of the critics against their targets.", "train/critic_loss"),
    "train/advantage_mean": Meaning("", "Mean of how much better actions were than expected."),
    "train/value_mean": Meaning("", "Mean of the predicted returns."),
    "train/q_mean": Meaning("", "Mean of the critics' predicted returns."),
    "train/q_spread": Meaning("", "How far the critics are apart; large where data are scarce."),
    "train/kl_coefficient": Meaning("", "Weight of the distance from the reference model, as it is adapted."),
    "warm_start/success_before": Meaning("success before cloning", "Share of held-out episodes with success before the warm start."),
    "warm_start/success_after": Meaning("success after cloning", "The same seeds after cloning, before reinforcement learning."),
    "warm_start/loss": Meaning("cloning loss", "How unlikely the expert's actions are under the policy after cloning."),
    "warm_start/episodes": Meaning("expert episodes", "Successful episodes of the expert that were cloned."),
    "warm_start/steps": Meaning("expert steps", "Steps of the cloned episodes."),
    "warm_start/turns": Meaning("expert turns", "Answers of the cloned episodes."),
    "groups/consumed": Meaning("", "Groups of episodes that were trained on."),
    "groups/filtered": Meaning("", "Groups left out because all of their episodes did equally well, so that there is nothing to learn."),
    "groups/stale": Meaning("", "Groups left out because the policy had moved on too far."),
    "groups/failed": Meaning("", "Groups given up because a simulator failed."),
    "groups/in_flight": Meaning("", "Groups whose episodes are still played."),
    "groups/": Meaning("", "What became of groups of episodes from the same initial state."),
    "episodes/": Meaning("", "What became of the run's episodes."),
    "agent/turns": Meaning("", "Answers of an episode, mean."),
    "agent/": Meaning("", "What the language agent's turns were like."),
    "tools/": Meaning("", "How often the agent's tools were used, and what came of it."),
    "reward_worker/": Meaning("", "Episodes that the reward worker scored, and how long they waited."),
    "sim/faults": Meaning("", "Simulator workers that failed and were replaced."),
    "sim/episodes_given_up": Meaning("", "Episodes lost to failing simulators."),
    "data/": Meaning("", "Recorded and fresh steps that are learned from."),
    "initialized/": Meaning("", "Episodes that begin inside recorded ones."),
    "residency/": Meaning("", "Bytes of weights and simulators on and off the device, and the time of moving them."),
    "roles/": Meaning("", "Times of the processes that play, score and publish."),
    "multiplex/": Meaning("", "How simulators of several kinds share the slots."),
    "utilisation/": Meaning("", "Shares of the time in which devices worked or waited."),
}
"""{metric, or prefix of metrics up to a slash: its meaning}"""


FIGURES = {
    "success": "Share of the final evaluation's episodes with success at any step; its held-out seeds are used by nothing else in the run.",
    "success (once)": "Share of episodes with success at any step.",
    "success at the end": "Share of episodes whose last step is a success: lower where the policy does not hold what it reached.",
    "at end": "Share of episodes whose last step is a success.",
    "95% interval": "Where the figure lies with 95% confidence: Wilson's interval for shares, bootstrap over the episodes for means.",
    "return": "Sum of the rewards of an episode, mean over the episodes.",
    "reward per step": "Rewards of the episodes over their steps: short and long episodes compare.",
    "steps of an episode": "Mean over the episodes; shorter is better where success ends them.",
    "length": "Steps of an episode, mean over the episodes.",
    "environment steps": "Steps that simulators took for training, evaluations left out.",
    "wall-clock": "From the command to the end of the final evaluation, start-up included; films and the report come after it.",
    "after cloning": "Success on held-out seeds when the expert was cloned and nothing was learned by reinforcement yet.",
    "pairs": "Seeds that both policies played.",
    "p": "How often a difference as large as this comes about by chance, where there is none.",
    "seeds": "Held-out episodes that were played.",
    "share": "Of the run's wall-clock.",
    "mean success": "Of the runs' final evaluations; the bar goes from the worst run to the best.",
    "mean return": "Of the runs' final evaluations.",
}
"""{figure of an evaluation or a run's end: its meaning}"""


OFFLINE = {
    "value": "What an episode of the policy would earn, its rewards discounted by gamma: an estimate from the recorded episodes.",
    "bootstrap": "Where the value lies with the given confidence, by resampling episodes; of fitted values, by the spread over the fits.",
    "concentration": "An interval that is guaranteed for any weights, given that rewards lie in reward_range: wide.",
    "ESS": "Effective sample size of the importance weights: as many episodes of equal weight would be as good.",
    "largest weight": "Of an episode's importance weights: a large one is an episode that decides the estimate by itself.",
    "mean weight": "1 is expected; far below, the episodes that matter for the policy were not recorded.",
    "best in": "Share of the resamples of the episodes, the same for all policies, in which the policy is the best.",
    "behaviour": "The recorded policy itself: the mean of its returns.",
    "is": "Importance sampling: returns weighted by how much likelier the policy would have acted so.",
    "wis": "The same with weights that sum to one: biased towards the recorded policy, and steadier.",
    "pdis": "Each reward weighted by the decisions before it only.",
    "wpdis": "The same with weights that sum to one at each step.",
    "dr": "Doubly robust: fitted values, corrected by weights where they were wrong.",
    "wdr": "The same with weights that sum to one at each step.",
    "fqe": "Fitted-Q evaluation: a regression on the recorded steps, without weights.",
    "MSE": "Mean squared distance of predicted from recorded actions, in the simulator's units.",
    "MAE": "Mean distance of predicted from recorded actions, in the simulator's units.",
    "explained": "Share of the recorded actions' variance that the prediction explains; saying their mean explains none.",
    "same bin": "Share of predictions that fall into the recorded action's bin, as policies count that say actions in tokens.",
    "accuracy": "Share of decisions that are the recorded ones.",
    "always the most frequent": "What saying the most frequent action, or bin, every time would reach.",
    "log-likelihood per step": "Of the recorded actions under the policy, mean over steps: higher is nearer.",
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
    found = MEANINGS.get(name) or MEANINGS.get(f"{group}/{rest.rpartition('/')[2]}") or MEANINGS.get(f"{group}/") or Meaning("", "")
    return found if found.label and name in MEANINGS else Meaning(rest.removesuffix("_s").replace("_", " "), found.text, found.alias)


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
