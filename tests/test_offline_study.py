"""Checkpoints held against recordings: ratios and open-loop figures by hand, estimates against played episodes, and every refusal."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.fitted_q import FittedQConfig
from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.episodes.assessment import Assumptions
from embodied_rl.episodes.recording import RecordedEpisode
from embodied_rl.errors import IncompatibleCheckpointError, UserError
from embodied_rl.evaluation.offline_policy import (
    TargetPolicy,
    deterministic_behaviour,
    load_target,
    played_episode,
    score_episode,
    score_recording,
)
from embodied_rl.evaluation.offline_study import OfflineSettings, OfflineStudy, outside_share, recorded_steps, study_recording
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec
from tests.episodes.episode_toys import make_episode
from tests.episodes.learning_samples import MemoryRecording
from tests.offline_toys import CHOICES, LIMIT, VECTORS, info_of, play, policy_of, save_policy

QUICK = FittedQConfig(num_members=3, num_steps=300, hidden_sizes=(32,), learning_rate=0.01)
WEIGHTED = ("is", "wis", "pdis", "wpdis")


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy that plays, and two others: one that keeps to the middle, one that runs off to the right."""
    folder = tmp_path_factory.mktemp("choices")
    made = {"behaviour": (0.0, 0.5), "steady": (0.0, 2.0), "right": (0.8, 0.0)}
    return {name: save_policy(folder, CHOICES, step, bias, weight=weight) for step, (name, (bias, weight)) in enumerate(made.items())}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vectors")
    made = {"behaviour": (0.0, 0.3, -0.3), "near": (0.1, 0.5, -0.4), "far": (3.0, 0.0, -2.0)}
    return {
        name: save_policy(folder, VECTORS, n, bias, weight=weight, log_std=std)
        for n, (name, (bias, weight, std)) in enumerate(made.items())
    }


@pytest.fixture(scope="module")
def recorded(choices: dict[str, Path]) -> list[RecordedEpisode]:
    return play(choices["behaviour"], 150)


def study(
    spec: SimSpec,
    episodes: list[RecordedEpisode],
    paths: dict[str, Path],
    *names: str,
    policy: dict[str, object] | None = None,
    **changes: object,
) -> OfflineStudy:
    checkpoints = [(name, load_checkpoint(paths[name], with_learner=False)) for name in names]
    given = Assumptions(gamma=1.0, num_samples=200, reward_range=(0.0, 1.0))
    settings = OfflineSettings(**{"given": given, "fitted_q": QUICK, "num_draws": 4, **changes})  # type: ignore[arg-type]
    info = info_of(spec, **(policy or {}))
    return study_recording(MemoryRecording(info, episodes), checkpoints, settings)


def test_importance_sampling_by_a_loop_over_steps(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    found = study(CHOICES, recorded, choices, "steady", estimators=WEIGHTED).policies[0]
    weights, returns, decided = [], [], []
    for episode in recorded:
        weight, per_decision = 1.0, 0.0
        for t in range(episode.num_steps):
            # Logit of choice 1: −2 x for the target, −x/2 for who played.
            x, right = float(episode.observation["state"][t, 0]), int(episode.action[t, 0]) == 1
            target, behaviour = (1 / (1 + math.exp(k * x * (1 if right else -1))) for k in (2.0, 0.5))
            weight *= target / behaviour
            per_decision += weight * float(episode.reward[t])
        weights.append(weight), returns.append(float(episode.reward.sum())), decided.append(per_decision)
    w, g = np.array(weights), np.array(returns)
    assert found.estimate("is").value == pytest.approx((w * g).mean(), rel=1e-4)
    assert found.estimate("wis").value == pytest.approx((w * g).sum() / w.sum(), rel=1e-4)
    assert found.estimate("pdis").value == pytest.approx(np.mean(decided), rel=1e-4)
    weights_of = found.estimate("wis").weights
    assert weights_of is not None
    assert weights_of.ess == pytest.approx(w.sum() ** 2 / (w**2).sum(), rel=1e-4)
    assert weights_of.largest == pytest.approx(w.max(), rel=1e-4)
    assert found.ess_by_step is not None
    assert found.ess_by_step[-1] == pytest.approx(weights_of.ess)


def test_a_policy_that_judges_itself_has_weights_of_one(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    found = study(CHOICES, recorded, choices, "behaviour", estimators=WEIGHTED)
    mean = np.mean([episode.episode_return for episode in recorded])
    assert found.behaviour is not None
    assert found.behaviour.value == pytest.approx(mean)
    for name in WEIGHTED:
        estimate = found.policies[0].estimate(name)
        assert estimate.value == pytest.approx(mean, rel=1e-4)
        assert estimate.weights is not None
        assert estimate.weights.ess == pytest.approx(150, rel=1e-4)


def test_estimates_meet_what_playing_shows_and_rank_the_policies(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    found = study(CHOICES, recorded, choices, "right", "steady")
    truth = {name: np.mean([e.episode_return for e in play(choices[name], 300, seed=5)]) for name in ("right", "steady")}
    assert truth["steady"] > truth["right"] + 1
    for policy in found.policies:
        for estimate in policy.estimates:
            assert estimate.bootstrap is not None
            width = estimate.bootstrap.high - estimate.bootstrap.low
            assert estimate.value == pytest.approx(truth[policy.label], abs=max(width, 0.4)), (policy.label, estimate.estimator)
            if estimate.concentration is not None:
                assert estimate.concentration.covers(float(truth[policy.label]))
    assert found.ranked_by == "wdr"
    assert found.ranking == ("steady", "right")
    assert found.best_share == {"right": 0.0, "steady": 1.0}
    assert found.settings.given.horizon == LIMIT, "the step limit came from the recording"


def test_vectors_against_played_episodes(vectors: dict[str, Path]) -> None:
    episodes = play(vectors["behaviour"], 200)
    found = study(VECTORS, episodes, vectors, "near").policies[0]
    truth = np.mean([e.episode_return for e in play(vectors["near"], 300, seed=5)])
    for estimate in found.estimates:
        assert estimate.value == pytest.approx(truth, abs=0.6), estimate.estimator


def test_a_policy_that_does_what_was_never_done_is_refused(vectors: dict[str, Path]) -> None:
    episodes = play(vectors["behaviour"], 60)
    found = study(VECTORS, episodes, vectors, "far")
    for name in (*WEIGHTED, "dr", "wdr"):
        assert found.policies[0].estimate(name).value is None
        assert "support mismatch: the mean single-step ratio" in found.policies[0].estimate(name).refused
    assert found.ranked_by == "fqe"
    # The simulator cuts what the policy draws at 3 ± 0.1 to the bound, which the recorded actions reach too, so that there are fitted
    # values; but the states that it runs off to were hardly seen. That it is much worse than who played can be told, not how much.
    fqe = found.policies[0].estimate("fqe")
    assert found.behaviour is not None
    assert found.behaviour.value is not None
    assert fqe.value is not None
    assert fqe.value < found.behaviour.value - 2
    assert any("these values are extrapolated" in note for note in fqe.notes)
    inner = [dataclasses.replace(e, action=np.clip(e.action, -0.5, 0.5)) for e in episodes]
    refused = study(VECTORS, inner, vectors, "far", estimators=("fqe",)).policies[0].estimate("fqe").refused
    assert refused == "support mismatch: 100% of the target policy's actions lie outside the recorded range"


def test_modes_have_no_weights_but_choices_do(choices: dict[str, Path], vectors: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    found = study(VECTORS, play(vectors["behaviour"], 60), vectors, "near", target="mode")
    assert "the target is the policy's most likely action, which has no density" in found.policies[0].estimate("wis").refused
    assert found.policies[0].estimate("fqe").value is not None
    # The mode of choices has probabilities 0 and 1: the weight is 1 / μ(a) as long as every choice is the mode's.
    own = study(
        CHOICES,
        recorded,
        choices,
        "right",
        target="mode",
        estimators=("is",),
        given=Assumptions(gamma=1.0, min_ess=0.0, num_samples=50),
        horizon=2,
    )
    products = []
    for episode in recorded:
        assert episode.log_prob is not None
        first = episode.action[:2, 0]
        products.append(float((first == 1).all()) / math.exp(float(episode.log_prob[:2].sum())) * float(episode.reward[:2].sum()))
    assert own.policies[0].estimate("is").value == pytest.approx(np.mean(products), rel=1e-5)


REFUSALS = [
    ("mode", {"kind": "checkpoint", "sample": False}, "deterministic behaviour: the recording says"),
    ("one", {"kind": "imported"}, "deterministic behaviour: every recorded choice has probability 1"),
    ("none", {"kind": "imported"}, "150 of 150 episodes were recorded without log-probabilities"),
    ("some", {"kind": "imported"}, "1 of 150 episodes were recorded without log-probabilities"),
]


@pytest.mark.parametrize(("kind", "policy", "reason"), REFUSALS)
def test_recordings_that_support_no_weights(
    choices: dict[str, Path], recorded: list[RecordedEpisode], kind: str, policy: dict[str, object], reason: str
) -> None:
    changed = [
        {
            "mode": episode,
            "one": dataclasses.replace(episode, log_prob=np.zeros((episode.num_steps, 1), np.float32)),
            "none": dataclasses.replace(episode, log_prob=None),
            "some": dataclasses.replace(episode, log_prob=None) if index == 3 else episode,
        }[kind]
        for index, episode in enumerate(recorded)
    ]
    found = study(CHOICES, changed, choices, "steady", policy=policy)
    for name in (*WEIGHTED, "dr", "wdr"):
        assert reason in found.policies[0].estimate(name).refused
    fqe = found.policies[0].estimate("fqe")
    # What nobody drew is no ground for other actions' values either; where it is not known how it was drawn, that is said.
    assert (fqe.value is None) == (kind in ("mode", "one"))
    if fqe.value is not None:
        assert any("it is unknown how" in note for note in fqe.notes)


def test_a_recording_of_successes_alone_supports_nothing(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    found = study(CHOICES, recorded, choices, "steady", policy={"metadata": {"plan": {"only_success": True}}})
    assert all("keeps only successful episodes" in estimate.refused for estimate in found.policies[0].estimates)
    assert found.policies[0].open_loop.accuracy.mean > 0


def test_vectors_need_what_was_drawn_and_are_deterministic_where_their_density_never_changes(vectors: dict[str, Path]) -> None:
    episodes = play(vectors["behaviour"], 30)
    without = [dataclasses.replace(episode, sampled_action=None) for episode in episodes]
    assert "has no sampled_action" in study(VECTORS, without, vectors, "near", estimators=("wis",)).policies[0].estimate("wis").refused
    # The mode's density, −log σ − log √2π with log σ = −0.3, at every step; and the uniform density ½, which is no mode's.
    for density, expected in ((0.3 - 0.9189385, "every recorded action has the density of its distribution's mode"), (math.log(0.5), "")):
        same = [dataclasses.replace(e, log_prob=np.full((e.num_steps, 1), density, np.float32)) for e in episodes]
        played = [played_episode(episode, 0, VECTORS, episode.num_steps) for episode in same]
        assert deterministic_behaviour(info_of(VECTORS, kind="imported"), played) == expected


def test_cut_episodes_and_their_continuation(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    given = Assumptions(gamma=0.9, num_samples=50)
    found = study(CHOICES, recorded, choices, "steady", truncation="bootstrap", given=given)
    assert "were cut with up to 43% of their discount left" in found.policies[0].estimate("wis").refused  # 0.9⁸ = 0.43
    # Episodes that go on for ever: about 0.9 a step for a policy that keeps near the middle: much more than of eight steps.
    continued = found.policies[0].estimate("fqe").value
    ended = study(CHOICES, recorded, choices, "steady", given=given).policies[0].estimate("fqe").value
    assert continued is not None
    assert ended is not None
    assert continued > ended + 1
    undiscounted = study(CHOICES, recorded, choices, "steady", truncation="bootstrap", estimators=("fqe",))
    assert "gamma must be below 1" in undiscounted.policies[0].estimate("fqe").refused


def test_a_horizon_cuts_everything(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    assert [episode.seed for episode in recorded] == sorted(episode.seed for episode in recorded)
    # A recording has the order in which episodes ended: its first ones are short, those of the lowest seeds are a fair sample.
    found = study(CHOICES, recorded[::-1], choices, "behaviour", horizon=3, estimators=("wis",), max_episodes=40)
    assert found.num_episodes == 40
    assert found.num_steps == sum(min(3, episode.num_steps) for episode in recorded[:40])
    assert found.policies[0].estimate("wis").value == pytest.approx(np.mean([e.reward[:3].sum() for e in recorded[:40]]), rel=1e-4)
    assert found.settings.given.horizon == 3


def test_episodes_without_an_end_are_in_the_open_loop_figures_alone(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    stopped = dataclasses.replace(
        recorded[0], truncated=np.zeros(recorded[0].num_steps, bool), terminated=np.zeros(recorded[0].num_steps, bool)
    )
    found = study(CHOICES, [stopped, *recorded[1:]], choices, "behaviour", estimators=("wis",))
    assert (found.num_episodes, found.num_incomplete) == (149, 1)
    assert found.policies[0].open_loop.num_episodes == 150
    assert found.policies[0].estimate("wis").value == pytest.approx(np.mean([e.episode_return for e in recorded[1:]]), rel=1e-4)
    assert any("1 unfinished episodes" in note for note in found.notes)
    with pytest.raises(UserError, match="No recorded episode ends"):
        study(CHOICES, [stopped], choices, "behaviour")
    alone = study(CHOICES, [stopped], choices, "behaviour", estimators=())
    assert alone.behaviour is None
    assert alone.policies[0].estimates == ()


def test_tasks_are_told_apart(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    mixed = [dataclasses.replace(episode, task="even" if index % 2 == 0 else "odd") for index, episode in enumerate(recorded)]
    assert any("mixes 2 tasks (even, odd)" in note for note in study(CHOICES, mixed, choices, "behaviour", estimators=("wis",)).notes)
    odd = study(CHOICES, mixed, choices, "behaviour", estimators=("wis",), task="odd")
    assert odd.num_episodes == 75
    with pytest.raises(UserError, match=r"The recording has no episode of task 'od'. Did you mean 'odd'\?"):
        study(CHOICES, mixed, choices, "behaviour", task="od")


def test_open_loop_figures_of_vectors_by_hand(vectors: dict[str, Path]) -> None:
    episodes = play(vectors["behaviour"], 20)
    loop = study(VECTORS, episodes, vectors, "near", estimators=()).policies[0].open_loop
    errors, likelihoods = [], []
    for episode in episodes:
        assert episode.sampled_action is not None
        x = episode.observation["state"][:-1, 0].astype(np.float64)
        mean = 0.1 - 0.5 * x  # normalised; the simulator takes twice as much
        errors.append(np.mean((np.clip(2 * mean, -2, 2) - episode.action[:, 0]) ** 2))
        z = (episode.sampled_action[:, 0] - mean) / math.exp(-0.4)
        likelihoods.append(np.mean(-0.5 * z**2 + 0.4 - 0.5 * math.log(2 * math.pi)))
    assert loop.mse is not None
    assert loop.mse.mean == pytest.approx(np.mean(errors), rel=1e-4)
    assert loop.log_likelihood.mean == pytest.approx(np.mean(likelihoods), rel=1e-4)


def test_a_squashed_policy_never_leaves_its_bounds(tmp_path: Path) -> None:
    path = save_policy(tmp_path, VECTORS, 0, 0.2, distribution="squashed")
    target = load_target(load_checkpoint(path, with_learner=False), "squashed", info_of(VECTORS))
    observation = {"state": np.zeros((3, 2), np.float32)}
    log_prob = target.log_prob(observation, np.array([[[0.5]], [[1.2]], [[-1.0001]]], np.float32))
    assert np.isfinite(log_prob[0]).all()
    assert np.isneginf(log_prob[1:]).all()


class Chunked:
    """A policy of horizon 3 that says −x, 0 and x of the state that it was asked in; unit normal around that."""

    observation_keys = ("state",)

    def prepare(self, observation: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(part) for key, part in observation.items()}

    def act(self, observation: dict[str, torch.Tensor], noise: torch.Tensor | None) -> object:
        x = observation["state"][:, :1]
        return type("Output", (), {"action": torch.cat([-x, 0 * x, x], dim=1)})

    def evaluate(self, observation: dict[str, torch.Tensor], action: torch.Tensor) -> object:
        z = action - self.act(observation, None).action  # type: ignore[attr-defined]
        return type("Evaluation", (), {"log_prob": -0.5 * z**2 - 0.5 * math.log(2 * math.pi)})


def test_a_policy_that_decides_several_steps_at_once() -> None:
    target = TargetPolicy("chunks", Chunked(), VECTORS, horizon=3)  # type: ignore[arg-type]
    states = np.array([[0.1, 1], [0.2, 1], [0.3, 1], [0.4, 1], [0.5, 1]], np.float32)
    episode = RecordedEpisode(
        seed=0,
        observation={"state": states},
        action=np.array([[0.2], [0.0], [-0.4], [1.0]], np.float32),
        reward=np.ones(4, np.float32),
        terminated=np.array([False, False, False, True]),
        truncated=np.zeros(4, bool),
        success=np.zeros(4, bool),
        sampled_action=np.array([[0.1], [0.0], [-0.2], [0.5]], np.float32),
    )
    score = score_episode(target, played_episode(episode, 0, VECTORS, 4), {"state": states}, 2, np.random.default_rng(0))
    # Asked before steps 0 and 3 alone; the simulator takes twice what the policy says.
    np.testing.assert_allclose(score.predicted[:, 0], [-0.2, 0.0, 0.2, -0.8], atol=1e-6)
    means = np.array([-0.1, 0.0, 0.1, -0.4])
    expected = -0.5 * (np.array([0.1, 0.0, -0.2, 0.5]) - means) ** 2 - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(score.log_prob[:, 0], expected, rtol=1e-5)
    assert score.draws is None


def test_rows_for_the_regression(choices: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    target = load_target(load_checkpoint(choices["steady"], with_learner=False), "steady", info_of(CHOICES))
    episodes, all_scores = score_recording(MemoryRecording(info_of(CHOICES), recorded[:3]), [target])
    scores = all_scores["steady"]
    for truncation in ("end", "bootstrap"):
        rows = recorded_steps(episodes, scores, truncation=truncation, limit=LIMIT)
        assert rows.probability is not None
        at = 0
        for number, episode in enumerate(recorded[:3]):
            steps = np.flatnonzero(rows.episode.numpy() == number)
            assert rows.first_state[number] == rows.state[steps[0]]
            np.testing.assert_allclose(rows.features[rows.state[steps], 0], episode.observation["state"][:-1, 0])
            np.testing.assert_allclose(rows.features[rows.next_state[steps], 0], episode.observation["state"][1:, 0])
            expected = np.ones(episode.num_steps, bool)
            expected[-1] = truncation == "bootstrap" and not episode.terminated[-1]
            np.testing.assert_array_equal(rows.continues[steps], expected)
            if truncation == "end":
                np.testing.assert_allclose(rows.features[rows.state[steps], 2], np.arange(episode.num_steps) / LIMIT)
            x = episode.observation["state"][:, 0]
            np.testing.assert_allclose(rows.probability[at : at + len(x), 1], 1 / (1 + np.exp(2 * x)), rtol=1e-5)
            at += len(x)
    assert outside_share(episodes, scores) == 0.0
    once = [dataclasses.replace(e, scaled_action=np.ones_like(e.scaled_action)) for e in episodes]
    mass = np.concatenate([score.probability[:, 0] for score in scores if score.probability is not None])
    assert outside_share(once, scores) == pytest.approx(mass.mean())


def test_pictures_are_judged_by_the_policys_own_features(tmp_path: Path) -> None:
    from embodied_rl.checkpoint import save_checkpoint
    from embodied_rl.policies.actor_critic import build_policy
    from tests.sample_run import make_config

    spec = SimSpec("look", {"rgb": TensorSpec((16, 16, 3), "uint8")}, ActionSpec.discrete(2), max_episode_steps=3)
    small = {"encoder": "cnn", "observation_key": "rgb", "cnn_channels": [4], "cnn_kernels": [4], "cnn_strides": [4], "hidden_sizes": [8]}
    config = make_config(tmp_path, policy=small, sim={"name": "look", "task": "look"})
    policy = build_policy(config.policy, spec)
    save_checkpoint(tmp_path, 1, policy=policy.state_dict(), learner={}, state={}, config=config, spec=spec, metrics={}, command="")
    rng = np.random.default_rng(0)
    episodes = [
        RecordedEpisode(
            seed=number,
            observation={"rgb": rng.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)},
            action=rng.integers(0, 2, (3, 1)),
            reward=np.ones(3, np.float32),
            terminated=np.zeros(3, bool),
            truncated=np.array([False, False, True]),
            success=np.zeros(3, bool),
            log_prob=np.full((3, 1), math.log(0.5), np.float32),
        )
        for number in range(20)
    ]
    checkpoint = load_checkpoint(tmp_path, with_learner=False)
    found = study_recording(
        MemoryRecording(info_of(spec), episodes),
        [("cnn", checkpoint)],
        OfflineSettings(given=Assumptions(gamma=1.0, num_samples=50), fitted_q=QUICK),
    )
    # Three steps of reward 1, whatever one does.
    for estimate in found.policies[0].estimates:
        assert estimate.value == pytest.approx(3.0, abs=0.35), estimate.estimator


def test_what_does_not_fit_is_refused(choices: dict[str, Path], vectors: dict[str, Path], recorded: list[RecordedEpisode]) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=r"action continuous\(1\).* ≠ discrete\(2\)"):
        study(CHOICES, recorded, vectors, "near")
    with pytest.raises(UserError, match=r"estimators: 'wiss' is not a choice. Did you mean 'wis'\?"):
        study(CHOICES, recorded, choices, "steady", estimators=("wiss",))
    text = dataclasses.replace(CHOICES, action=ActionSpec.text())
    with pytest.raises(UserError, match="actions are texts"):
        load_target(load_checkpoint(choices["steady"], with_learner=False), "x", info_of(text))
    broken = dataclasses.replace(recorded[2], log_prob=np.where(np.arange(recorded[2].num_steps) == 1, np.nan, -0.7)[:, None])
    with pytest.raises(UserError, match=rf"Episode 2 \(seed {recorded[2].seed}\) has a non-finite log_prob at step 1"):
        study(CHOICES, [*recorded[:2], broken], choices, "steady")


def test_the_toy_plays_as_its_checkpoint_says(choices: dict[str, Path]) -> None:
    _, policy = policy_of(choices["steady"])
    with torch.no_grad():
        evaluation = policy.evaluate({"state": torch.tensor([[0.5, 1.0]])}, torch.tensor([[1]]))
    assert float(evaluation.log_prob[0, 0]) == pytest.approx(-math.log(1 + math.exp(1.0)), rel=1e-5)


def test_actions_without_finite_bounds_are_refused_and_those_without_extent_are_zero() -> None:
    fixed = SimSpec("any", {"state": TensorSpec((1,))}, ActionSpec.continuous([2], [2]))
    episode = make_episode(fixed, 0, 3)
    np.testing.assert_array_equal(played_episode(episode, 0, fixed, 3).scaled_action, np.zeros((3, 1)), "as cloning scales it")
    endless = dataclasses.replace(fixed, action=ActionSpec.continuous([-np.inf], [np.inf]))
    with pytest.raises(UserError, match="bounds are not finite"):
        played_episode(episode, 0, endless, 3)
