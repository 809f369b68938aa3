"""Fitted-Q evaluation against linear solves of the same recorded steps, closed forms, and its own promises."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from embodied_rl.algorithms.fitted_q import FittedQConfig, FlatAdam, QEnsemble, RecordedSteps, fit_q

GAMMA, NUM_STATES, NUM_CHOICES = 0.9, 4, 2
LINEAR = FittedQConfig(hidden_sizes=(), num_steps=1000, learning_rate=0.05, num_members=3, batch_size=256)


class Tabular:
    """Episodes of a random process with few states, one-hot features, and the exact value of whatever was recorded."""

    def __init__(self, seed: int = 0, num_episodes: int = 80, limit: int = 12) -> None:
        rng = np.random.default_rng(seed)
        transition = rng.dirichlet(np.ones(NUM_STATES), (NUM_STATES, NUM_CHOICES))
        reward = rng.normal(size=(NUM_STATES, NUM_CHOICES))
        ends = rng.uniform(0, 0.2, (NUM_STATES, NUM_CHOICES))
        behaviour = rng.dirichlet(np.full(NUM_CHOICES, 3.0), NUM_STATES)
        self.target = rng.dirichlet(np.ones(NUM_CHOICES), NUM_STATES)
        self.steps: list[tuple[int, int, int, float, int, bool, bool]] = []  # episode, time, state, reward, next, terminated, truncated
        self.choices: list[int] = []
        for episode in range(num_episodes):
            state = int(rng.integers(NUM_STATES))
            for time in range(limit):
                choice = int(rng.choice(NUM_CHOICES, p=behaviour[state]))
                following = int(rng.choice(NUM_STATES, p=transition[state, choice]))
                terminated = bool(rng.random() < ends[state, choice])
                truncated = not terminated and time == limit - 1
                self.steps.append((episode, time, state, float(reward[state, choice]), following, terminated, truncated))
                self.choices.append(choice)
                state = following
                if terminated:
                    break
        self.num_episodes, self.limit = num_episodes, limit

    def rows(self, *, timed: bool) -> RecordedSteps:
        """One-hot states, or with `timed` one-hot pairs of state and time, whose episodes end where they are cut."""
        features, state, first = [], [], []
        size = NUM_STATES * (self.limit + 1) if timed else NUM_STATES
        row = 0
        for index, (episode, time, before, _, after, terminated, truncated) in enumerate(self.steps):
            if time == 0:
                first.append(row)
            state.append(row)
            features.append(before + NUM_STATES * time * timed)
            row += 1
            if terminated or truncated:
                features.append(after + NUM_STATES * (time + 1) * timed)
                row += 1
                assert index == len(self.steps) - 1 or self.steps[index + 1][0] == episode + 1
        states = np.array(features) % NUM_STATES
        return RecordedSteps(
            features=torch.from_numpy(np.eye(size, dtype=np.float32)[features]),
            state=torch.tensor(state),
            next_state=torch.tensor(state) + 1,
            action=torch.tensor(self.choices)[:, None],
            reward=torch.tensor([step[3] for step in self.steps], dtype=torch.float32),
            continues=torch.tensor([not step[5] and not (timed and step[6]) for step in self.steps]),
            episode=torch.tensor([step[0] for step in self.steps]),
            first_state=torch.tensor(first),
            probability=torch.from_numpy(self.target[states].astype(np.float32)),
        )

    def exact(self, counts: np.ndarray, *, timed: bool) -> float:
        """Value of the first states in the process that the episodes, repeated `counts` times, would be drawn from exactly.

        Q solves Q = r̂ + γ P̂ E_π Q over pairs of state (and time) and choice, r̂ and P̂ the recorded means.
        """
        size = NUM_STATES * (self.limit + 1) if timed else NUM_STATES
        weight, rewards = np.zeros((size, NUM_CHOICES)), np.zeros((size, NUM_CHOICES))
        moves = np.zeros((size, NUM_CHOICES, size))
        first = np.zeros(size)
        for (episode, time, before, reward, after, terminated, truncated), choice in zip(self.steps, self.choices, strict=True):
            here, there = before + NUM_STATES * time * timed, after + NUM_STATES * (time + 1) * timed
            weight[here, choice] += counts[episode]
            rewards[here, choice] += counts[episode] * reward
            if not terminated and not (timed and truncated):
                moves[here, choice, there] += counts[episode]
            first[here] += counts[episode] * (time == 0)
        known = np.maximum(weight, 1e-12)
        policy = self.target[np.arange(size) % NUM_STATES]
        onward = np.einsum("sct,td->sctd", moves / known[..., None], policy).reshape(size * NUM_CHOICES, size * NUM_CHOICES)
        q = np.linalg.solve(np.eye(size * NUM_CHOICES) - GAMMA * onward, (rewards / known).ravel()).reshape(size, NUM_CHOICES)
        return float(first @ (policy * q).sum(axis=1) / first.sum())


@pytest.fixture(scope="module")
def tabular() -> Tabular:
    return Tabular()


def test_every_member_solves_its_own_resample_exactly(tabular: Tabular) -> None:
    """Terminated steps count their reward alone; truncated ones are continued by the value of the state that they led to."""
    fitted = fit_q(tabular.rows(timed=False), GAMMA, LINEAR)
    expected = [tabular.exact(counts, timed=False) for counts in fitted.counts]
    np.testing.assert_allclose(fitted.values, expected, atol=0.05)
    assert np.ptp(expected) > 0.3, "the resamples differ by more than the tolerance"
    # What a wrong reading of the ends would give lies far away.
    assert abs(np.mean(expected) - np.mean([tabular.exact(counts, timed=True) for counts in fitted.counts])) > 0.2
    assert abs(fitted.drift) < 0.05


def test_episodes_that_end_where_they_are_cut() -> None:
    """With the time as part of the state: backward induction over the recorded means. A short limit, so that pairs repeat."""
    tabular = Tabular(seed=1, num_episodes=150, limit=3)
    fitted = fit_q(tabular.rows(timed=True), GAMMA, LINEAR)
    expected = [tabular.exact(counts, timed=True) for counts in fitted.counts]
    np.testing.assert_allclose(fitted.values, expected, atol=0.05)
    # gamma = 1 is no difficulty there: every episode ends.
    assert np.isfinite(fit_q(tabular.rows(timed=True), 1.0, FittedQConfig(num_steps=20)).values).all()


def test_a_network_finds_the_same_values(tabular: Tabular) -> None:
    fitted = fit_q(tabular.rows(timed=False), GAMMA, FittedQConfig(num_members=3, num_steps=1000, hidden_sizes=(32, 32)))
    expected = [tabular.exact(counts, timed=False) for counts in fitted.counts]
    np.testing.assert_allclose(fitted.values, expected, atol=0.15)


def test_the_same_seed_gives_the_same_values(tabular: Tabular) -> None:
    first, again, other = (
        fit_q(tabular.rows(timed=False), GAMMA, FittedQConfig(num_members=2, num_steps=40, seed=seed)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.values, again.values)
    np.testing.assert_array_equal(first.q, again.q)
    assert (first.values != other.values).all()


def test_values_for_robust_estimates_come_from_those_who_have_not_seen_the_episode() -> None:
    """One state, one choice, episodes of one step whose rewards are 0, 1, …, 9: a member says the mean of its own resample, and about
    an episode the members without it are asked."""
    rewards = torch.arange(10.0)
    steps = RecordedSteps(
        features=torch.zeros(20, 1),
        state=torch.arange(0, 20, 2),
        next_state=torch.arange(1, 20, 2),
        action=torch.zeros(10, 1, dtype=torch.int64),
        reward=rewards,
        continues=torch.zeros(10, dtype=torch.bool),
        episode=torch.arange(10),
        first_state=torch.arange(0, 20, 2),
        probability=torch.ones(20, 1),
    )
    fitted = fit_q(steps, GAMMA, FittedQConfig(num_members=6, num_steps=300, learning_rate=0.02, hidden_sizes=(8,), batch_size=256))
    means = fitted.counts @ np.arange(10.0) / fitted.counts.sum(axis=1)
    np.testing.assert_allclose(fitted.values, means, atol=0.1)
    assert (fitted.counts == 0).any(axis=0).all(), "every episode is unknown to somebody"
    for episode in range(10):
        expected = means[fitted.counts[:, episode] == 0].mean()
        assert fitted.q[episode] == pytest.approx(expected, abs=0.1)
        assert fitted.v[2 * episode] == pytest.approx(expected, abs=0.1)
    assert np.ptp(fitted.q) > 0.5


def test_vectors_are_averaged_over_the_targets_draws() -> None:
    """One step, reward a²; the target draws −1, 0 and 1 in the first state: V = 2/3. Its mode alone, 0.5: V = 1/4."""
    rng = np.random.default_rng(0)
    action = torch.from_numpy(rng.uniform(-1, 1, (400, 1)).astype(np.float32))

    def rows(draws: list[float]) -> RecordedSteps:
        return RecordedSteps(
            features=torch.zeros(800, 1),
            state=torch.arange(0, 800, 2),
            next_state=torch.arange(1, 800, 2),
            action=action,
            reward=action[:, 0] ** 2,
            continues=torch.zeros(400, dtype=torch.bool),
            episode=torch.arange(400),
            first_state=torch.arange(0, 800, 2),
            draws=torch.tensor(draws)[None, :, None].expand(800, -1, 1),
        )

    config = FittedQConfig(num_members=2, num_steps=600, hidden_sizes=(32, 32))
    assert fit_q(rows([-1.0, 0.0, 1.0]), GAMMA, config).values == pytest.approx([2 / 3] * 2, abs=0.05)
    assert fit_q(rows([0.5]), GAMMA, config).values == pytest.approx([0.25] * 2, abs=0.05)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_a_linear_quadratic_process_has_its_closed_form() -> None:
    """s' = ½ s + ¼ a, r = −s² − a², a ~ N(−½ s, 0.2²): V(s) = −p s² − c.

    With a = −½ s + n: s' = ⅜ s + ¼ n; p = 1 + ¼ + γ (⅜)² p, c = σ² + γ (p σ²/16 + c).
    """
    sigma, gamma = 0.2, 0.8
    p = 1.25 / (1 - gamma * 0.375**2)
    c = (sigma**2 + gamma * p * sigma**2 / 16) / (1 - gamma)
    rng, num, length = np.random.default_rng(0), 150, 8
    states = np.zeros((num, length + 1))
    states[:, 0] = rng.uniform(-1, 1, num)
    actions = rng.uniform(-1, 1, (num, length))
    for t in range(length):
        states[:, t + 1] = 0.5 * states[:, t] + 0.25 * actions[:, t]
    features = torch.from_numpy(states.reshape(-1, 1).astype(np.float32))
    state = (np.arange(num)[:, None] * (length + 1) + np.arange(length)).ravel()
    draws = -0.5 * states.reshape(-1, 1) + sigma * rng.standard_normal((states.size, 16))
    steps = RecordedSteps(
        features=features,
        state=torch.from_numpy(state),
        next_state=torch.from_numpy(state + 1),
        action=torch.from_numpy(actions.reshape(-1, 1).astype(np.float32)),
        reward=torch.from_numpy((-(states[:, :-1] ** 2) - actions**2).ravel().astype(np.float32)),
        continues=torch.ones(num * length, dtype=torch.bool),
        episode=torch.from_numpy(np.repeat(np.arange(num), length)),
        first_state=torch.from_numpy(np.arange(num) * (length + 1)),
        draws=torch.from_numpy(draws[:, :, None].astype(np.float32)),
    )
    fitted = fit_q(steps, gamma, FittedQConfig(num_members=3, num_steps=1200))
    # States at the very edge are few; the members that judge an episode have not seen it.
    error = np.abs(fitted.v + p * states.ravel() ** 2 + c)
    assert np.quantile(error, 0.95) < 0.12
    expected = fitted.counts @ (-p * states[:, 0] ** 2 - c) / fitted.counts.sum(axis=1)
    np.testing.assert_allclose(fitted.values, expected, atol=0.04)


def test_the_ensemble_is_so_many_networks_side_by_side() -> None:
    ensemble = QEnsemble(3, (5, 7, 2), torch.Generator().manual_seed(0))
    x = torch.randn(3, 11, 5)
    together = ensemble(x)
    for member in range(3):
        hidden = torch.nn.functional.silu(x[member] @ ensemble.weights[0][member] + ensemble.biases[0][member])
        torch.testing.assert_close(together[member], hidden @ ensemble.weights[1][member] + ensemble.biases[1][member])


def test_targets_stay_within_what_is_reachable(tabular: Tabular) -> None:
    rows = tabular.rows(timed=False)
    bounded = fit_q(rows, GAMMA, FittedQConfig(num_members=2, num_steps=200), reachable=(-0.1, 0.1))
    assert np.abs(bounded.values).max() < 0.3
    assert np.abs(fit_q(rows, GAMMA, FittedQConfig(num_members=2, num_steps=200)).values).max() > 0.5


def test_what_has_no_value_is_refused(tabular: Tabular) -> None:
    rows = tabular.rows(timed=False)
    with pytest.raises(ValueError, match="gamma must be below 1"):
        fit_q(rows, 1.0, LINEAR)
    with pytest.raises(ValueError, match="either draws"):
        RecordedSteps(rows.features, rows.state, rows.next_state, rows.action, rows.reward, rows.continues, rows.episode, rows.first_state)
    with pytest.raises(ValueError, match="num_members must be between 2 and 1,000,000, got 1"):
        FittedQConfig(num_members=1)
    huge = dataclasses.replace(rows, reward=1e38 * (1.0 + rows.reward))
    with pytest.raises(FloatingPointError, match="diverged"):
        fit_q(huge, GAMMA, FittedQConfig(num_steps=60, learning_rate=1000.0, num_members=2))


def test_one_flat_tensor_is_optimised_as_torchs_adam_does() -> None:
    generator = torch.Generator().manual_seed(0)
    ensemble, theirs = QEnsemble(2, (3, 4, 1), generator), QEnsemble(2, (3, 4, 1), generator)
    theirs.load_state_dict(ensemble.state_dict())
    ours, reference = FlatAdam(ensemble.flat), torch.optim.Adam(theirs.parameters())
    x = torch.randn(2, 5, 3, generator=generator)
    for rate in (1e-2, 1e-3, 1e-3):
        reference.param_groups[0]["lr"] = rate
        for network in (ensemble, theirs):
            network.zero_grad()
            network(x).square().sum().backward()
        ours.step(torch.cat([p.grad.flatten() for p in ensemble.parameters() if p.grad is not None]), rate)
        reference.step()
    for mine, other in zip(ensemble.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
