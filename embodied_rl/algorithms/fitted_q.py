"""Fitted-Q evaluation: the value of a target policy by regression on recorded steps, without importance weights.

Shape legend: N episodes, M steps in all, S = M + N states (those after the last steps included), D features of a state,
A dimensions of an action, C choices of a discrete one, K draws of the target policy at each state, E members of the ensemble, R rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.advantages import returns_to_go
from embodied_rl.bounds import LearningRate, Members, PositiveShare, Rows, Seed, Size
from embodied_rl.config.building import Config
from embodied_rl.memory import TRAINED, require_memory

_CHUNK_ROWS = 16_384
"""Rows of one forward pass over all data; affects only memory."""
_WARM_SHARE = 0.1
"""Share of the steps at the beginning that regress on the recorded returns (see `fit_q`)."""
_LAST_SHARE = 0.2
"""Share of the steps at the end over which drift and loss are measured."""
_LEAST_COOLING = 1000
"""Least number of steps in which the learning rate falls, so that the noise of the last batches does not widen the intervals."""
_NUM_CHECKS = 40
"""Number of checks, over all steps, whether the values still move."""
_LEAST_CHECKS = 6
_SETTLED = 0.25
"""Largest move of the values while the steps double, as a share of the members' spread, that counts as settled."""
_BETAS = 0.9, 0.999
_RESAMPLING = 0x0F17


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """Data of the regression: M steps between S states, and the target policy's actions in each state.

    Exactly one of `draws` and `probability` is given, for actions that are vectors or discrete choices.
    """

    features: Tensor
    """[S, D] float32"""
    state: Tensor
    """[M] int64 row of the state before each step."""
    next_state: Tensor
    """[M] int64 row of the state after each step."""
    action: Tensor
    """[M, A] float32 as the simulator took them, each dimension scaled to [-1, 1]; int64 [M, 1] for choices."""
    reward: Tensor
    """[M] float32"""
    continues: Tensor
    """[M] bool: whether the value of the next state counts. False after a terminated step, and after a truncated one if the value of
    episodes of limited length is estimated."""
    episode: Tensor
    """[M] int64 0 … N − 1, ascending; each episode's steps are in order."""
    first_state: Tensor
    """[N] int64 row of each episode's first state."""
    draws: Tensor | None = None
    """[S, K, A] float32 actions drawn from the target policy, scaled like `action`; a deterministic policy's mode with K = 1."""
    probability: Tensor | None = None
    """[S, C] float32 probability of each choice under the target policy."""

    def __post_init__(self) -> None:
        if (self.draws is None) == (self.probability is None):
            raise ValueError("give either draws (vectors) or probability (choices)")

    @property
    def num_episodes(self) -> int:
        return int(self.first_state.shape[0])


@dataclass(frozen=True)
class FittedQConfig(Config, place="fqe"):
    """Size and length of the regression."""

    hidden_sizes: tuple[Size, ...] = (64, 64)
    """() is a linear Q: exact for one-hot features of choices."""
    num_members: Members = 8
    """E; each member is fitted to its own resample of the episodes."""
    num_steps: Size = 6000
    """Most steps; fewer if the values settle earlier. The target network needs hundreds of its time constants (1 / `target_rate`) if
    much is bootstrapped; `FittedQ.drift` shows it."""
    batch_size: Rows = 128
    """Rows of each member in one step."""
    learning_rate: LearningRate = 3e-3
    """Learning rate; in the last steps it falls to a hundredth by a cosine."""
    target_rate: PositiveShare = 0.05
    """Share of the weights that the target network takes over at each step."""
    num_draws: Size = 2
    """Number of the K draws that enter one target."""
    seed: Seed = 0


@dataclass(frozen=True, eq=False)
class FittedQ:
    """The fitted values."""

    values: np.ndarray
    """[E] float64 each member's mean value of the first states in its own resample; their spread is the bootstrap's."""
    q: np.ndarray
    """[M] float64 Q of the recorded steps, from the same members as `v`."""
    v: np.ndarray
    """[S] float64 V of the states, only from members whose resample does not contain the state's episode: independent of it."""
    member_q: np.ndarray
    """[E, M] float64 Q of the recorded steps by each member."""
    member_v: np.ndarray
    """[E, S] float64 V of the states by each member: the estimates of fits to other episodes."""
    counts: np.ndarray
    """[E, N] number of times that each episode is in each member's resample."""
    drift: float
    """Change of the mean of `values` in the last steps, a fifth of `FittedQConfig.num_steps`."""
    loss: float
    """Mean squared error in the last steps, in units of reward²."""
    num_steps: int
    """Number of steps taken."""


class QEnsemble(nn.Module):
    """E networks of equal size in parallel, one batched product per layer."""

    def __init__(self, num_members: int, sizes: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for index, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            # He et al. (2015) before a nonlinearity. Biases are drawn too: with few inputs, kinks all at zero bend nothing elsewhere.
            bound = math.sqrt((6.0 if index < len(sizes) - 2 else 1.0) / fan_in)
            self.weights.append((torch.rand((num_members, fan_in, fan_out), generator=generator) * 2 - 1) * bound)
            self.biases.append((torch.rand((num_members, 1, fan_out), generator=generator) * 2 - 1) / math.sqrt(fan_in))
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])
        """All parameters, which are views into it: an update is one operation over all of them."""
        for parameter, part in zip(self.parameters(), self.flat.split([p.numel() for p in self.parameters()]), strict=True):
            parameter.data = part.view(parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[E, R, inputs] → [E, R, outputs]"""
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if index < last:
                # Smooth, so that no unit can die: a member of dead units would predict the mean everywhere.
                x = nn.functional.silu(x)
        return x


class FlatAdam:
    """Adam (Kingma & Ba 2015) with its usual coefficients, on one flat tensor. torch's own has a kernel for each of many small tensors, and
    its first step loads a compiler, which takes a second."""

    def __init__(self, flat: Tensor) -> None:
        self._flat, self._mean, self._square, self._step = flat, torch.zeros_like(flat), torch.zeros_like(flat), 0

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """`gradient` has the shape of the parameters."""
        self._step += 1
        self._mean.lerp_(gradient, 1 - _BETAS[0])
        self._square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        size = self._square.sqrt().div_(math.sqrt(1 - _BETAS[1] ** self._step)).add_(1e-8)
        self._flat.addcdiv_(self._mean, size, value=-learning_rate / (1 - _BETAS[0] ** self._step))


def fit_q(
    steps: RecordedSteps,
    gamma: float,
    config: FittedQConfig,
    *,
    reachable: tuple[float, float] | None = None,
    on_step: Callable[[int], object] | None = None,
) -> FittedQ:
    """Fitted-Q evaluation (Le, Voloshin & Yue 2019, "Batch policy learning under constraints", algorithm 3).

    Iterates Qₖ = argmin Σ (Q(s, a) − r − γ E_{a' ~ π} Qₖ₋₁(s', a'))², where the previous Q is a slowly following copy. The value is the
    mean over first states of E_{a ~ π} Q(s₀, a). Each member has its own resample of episodes (Hao et al. 2021, "Bootstrapping
    fitted Q-evaluation for off-policy inference"), so that their spread is the estimate's error from the choice of episodes;
    no interval contains the error of the function class. The first tenth of the steps regresses on the recorded returns, which is
    where the iteration starts, not where it ends. Once the values hardly move while the steps double, the learning rate falls and the
    regression ends; at the latest at `num_steps`.

    Args:
        gamma: discount; below 1, unless the fitted values continue no episode.
        reachable: (lowest, highest) possible value; targets are limited to it.
        on_step: called with the number of further steps done, of `config.num_steps`, for a progress bar.

    Raises:
        ValueError: gamma is 1 and values are bootstrapped at an episode's end, so that there may be no fixed point.
        FloatingPointError: the regression diverged.
    """
    if gamma >= 1 and bool((steps.continues & _is_last(steps.episode)).any()):
        raise ValueError("gamma must be below 1 where cut episodes are continued by the fitted values")
    with _one_thread():
        return _Regression(steps, gamma, config, reachable).run(on_step)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the products are small, and threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Regression:
    """One call of `fit_q`."""

    def __init__(self, steps: RecordedSteps, gamma: float, config: FittedQConfig, reachable: tuple[float, float] | None) -> None:
        self.steps, self.gamma, self.config, self.reachable = steps, gamma, config, reachable
        self.generator = torch.Generator().manual_seed(config.seed)
        mean, std = steps.features.mean(dim=0), steps.features.std(dim=0, correction=0)
        # A constant feature carries no information; it must not be scaled up either.
        self.features = (steps.features - mean) / torch.where(std > 1e-6, std, torch.ones_like(std))
        returns = _returns_to_go(steps, gamma)
        self.centre, self.scale = float(returns.mean()), max(float(returns.std(correction=0)), 1e-6)
        self.returns = returns
        self.counts = _resamples(steps.num_episodes, config.num_members, config.seed)
        rows = [_rows_of(counts, steps.episode) for counts in torch.from_numpy(self.counts)]
        # All members' rows in one array, so that a batch is one look-up.
        self.rows = torch.cat(rows)
        self.row_counts = torch.tensor([len(part) for part in rows])[:, None]
        self.row_starts = self.row_counts.cumsum(dim=0) - self.row_counts
        num_actions = 0 if steps.probability is None else int(steps.probability.shape[1])
        width = steps.features.shape[1] + (0 if num_actions else int(steps.action.shape[1]))
        sizes = (width, *config.hidden_sizes, num_actions or 1)
        layers = {f"[{config.num_members}, {fan_in}, {fan_out}]": (fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(sizes)}
        parts = {shape: (TRAINED + 1) * 4 * config.num_members * weights for shape, weights in layers.items()}  # float32, and the targets
        require_memory(f"fqe.hidden_sizes={list(config.hidden_sizes)}", parts, "fqe.hidden_sizes or fqe.num_members")
        self.online = QEnsemble(config.num_members, sizes, self.generator)
        self.target = QEnsemble(config.num_members, sizes, self.generator)
        self.target.flat.copy_(self.online.flat)

    def run(self, on_step: Callable[[int], object] | None) -> FittedQ:
        config = self.config
        parameters, optimizer = list(self.online.parameters()), FlatAdam(self.online.flat)
        warm, last = (max(1, int(share * config.num_steps)) for share in (_WARM_SHARE, _LAST_SHARE))
        cooling = min(max(last, _LEAST_COOLING), config.num_steps)
        checked = max(1, config.num_steps // _NUM_CHECKS)
        cools_at, end = config.num_steps - cooling, config.num_steps
        means: list[float] = []
        before, losses = 0.0, []
        for step in itertools.count():
            if warm < step < cools_at and step % checked == 0 and _settled(means, self._values(self.online)):
                cools_at, end = step, step + cooling
                if on_step is not None:
                    on_step(config.num_steps - end)
            if step == end - last:
                before = float(self._values(self.online).mean())
            if step == end:
                break
            cooled = max(0, step - cools_at) / cooling
            rate = config.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * cooled)))
            rows = self._batch()
            target = self._scaled(self.returns[rows] if step < warm else self._target(rows))
            loss = (self._recorded_q(self.online, rows) - target).square().mean(dim=1)
            gradient = torch.autograd.grad(loss.sum(), parameters)
            optimizer.step(torch.cat([part.flatten() for part in gradient]), rate)
            # The copy follows at once while the target is fixed, so that the iteration starts from the regression.
            self.target.flat.lerp_(self.online.flat, 1.0 if step < warm else config.target_rate)
            if step >= end - last:
                losses.append(float(loss.detach().mean()))
            if on_step is not None:
                on_step(1)
        return self._result(before, float(np.mean(losses)), end)

    def _batch(self) -> Tensor:
        """[E, R] rows of steps, drawn from each member's resample."""
        share = torch.rand((self.config.num_members, self.config.batch_size), generator=self.generator)
        # float32 may round the product up to the count itself.
        chosen = torch.minimum((share * self.row_counts).long(), self.row_counts - 1)
        return self.rows[self.row_starts + chosen]

    @torch.no_grad()
    def _target(self, rows: Tensor) -> Tensor:
        """[E, R] r + γ E_π Q(s', ·) by the following copy; r only where the next state does not count."""
        steps = self.steps
        if steps.draws is not None and self.config.num_draws < steps.draws.shape[1]:
            draw = torch.randint(steps.draws.shape[1], (*rows.shape, self.config.num_draws), generator=self.generator)
        else:
            draw = None
        following = self._unscaled(self._state_v(self.target, steps.next_state[rows], draw))
        target = steps.reward[rows] + self.gamma * following * steps.continues[rows]
        return target if self.reachable is None else target.clamp(*self.reachable)

    def _recorded_q(self, network: QEnsemble, rows: Tensor) -> Tensor:
        """[E, R] scaled Q of recorded steps."""
        steps, features = self.steps, self.features[self.steps.state[rows]]
        if steps.probability is not None:
            return network(features).gather(-1, steps.action[rows]).squeeze(-1)
        return network(torch.cat([features, steps.action[rows]], dim=-1)).squeeze(-1)

    def _state_v(self, network: QEnsemble, states: Tensor, draw: Tensor | None = None) -> Tensor:
        """[E, R] scaled V of states: over all draws, or over those of `draw` [E, R, k]."""
        features, steps = self.features[states], self.steps
        if steps.probability is not None:
            return (network(features) * steps.probability[states]).sum(dim=-1)
        assert steps.draws is not None
        actions = steps.draws[states] if draw is None else steps.draws[states[..., None], draw]
        members, num_rows, num_draws, _ = actions.shape
        inputs = torch.cat([features[..., None, :].expand(-1, -1, num_draws, -1), actions], dim=-1)
        return network(inputs.flatten(1, 2)).view(members, num_rows, num_draws).mean(dim=-1)

    @torch.no_grad()
    def _all(self, compute: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
        """[E, num_rows] unscaled `compute` of all rows, some at a time."""
        members = self.config.num_members
        size = max(1, _CHUNK_ROWS // members)
        parts = [
            compute(torch.arange(first, min(first + size, num_rows)).expand(members, -1)).double() for first in range(0, num_rows, size)
        ]
        return self._unscaled(torch.cat(parts, dim=1))

    @torch.no_grad()
    def _values(self, network: QEnsemble) -> np.ndarray:
        first = self.steps.first_state
        v = self._all(lambda index: self._state_v(network, first[index]), len(first)).numpy()
        return (v * self.counts).sum(axis=1) / self.counts.sum(axis=1)

    def _result(self, before: float, loss: float, num_steps: int) -> FittedQ:
        steps, values = self.steps, self._values(self.online)
        if not np.isfinite(values).all():
            raise FloatingPointError("the regression diverged")
        q = self._all(lambda rows: self._recorded_q(self.online, rows), len(steps.reward)).numpy()
        v = self._all(lambda states: self._state_v(self.online, states), len(steps.features)).numpy()
        outside = (self.counts == 0).astype(np.float64)
        outside[:, outside.sum(axis=0) == 0] = 1.0
        outside /= outside.sum(axis=0)
        by_step = outside[:, steps.episode.numpy()]
        by_state = np.empty((len(outside), len(steps.features)))
        by_state[:, steps.state.numpy()] = by_state[:, steps.next_state.numpy()] = by_step
        drift = float(values.mean()) - before
        loss *= self.scale**2
        return FittedQ(values, (q * by_step).sum(axis=0), (v * by_state).sum(axis=0), q, v, self.counts, drift, loss, num_steps)

    def _scaled(self, value: Tensor) -> Tensor:
        return (value - self.centre) / self.scale

    def _unscaled(self, value: Tensor) -> Tensor:
        return value * self.scale + self.centre


def _settled(means: list[float], values: np.ndarray) -> bool:
    """Append the mean of the members' values [E]; return whether it moved little since the check at half the steps."""
    means.append(float(values.mean()))
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return len(means) >= _LEAST_CHECKS and abs(means[-1] - means[len(means) // 2 - 1]) <= _SETTLED * spread


def _is_last(episode: Tensor) -> Tensor:
    """[M] bool: the last step of its episode."""
    return torch.cat([episode[1:] != episode[:-1], torch.ones(1, dtype=torch.bool)])


def _returns_to_go(steps: RecordedSteps, gamma: float) -> Tensor:
    """[M] Σ γᵏ r recorded from each step on."""
    ends = _is_last(steps.episode)[:, None]
    found = returns_to_go(reward=steps.reward.double()[:, None], terminated=ends, truncated=torch.zeros_like(ends), gamma=gamma)
    return found[:, 0].float()


def _resamples(num_episodes: int, num_members: int, seed: int) -> np.ndarray:
    """[E, N] number of times that each episode is in each member's resample.

    Each episode is left out of at least one member's resample, so that a member that has not seen it can judge it. With too few episodes
    or members for that, some episodes are in every resample.
    """
    # A separate random stream, because the data may have been made with the plain seed.
    random = np.random.default_rng([seed, _RESAMPLING])
    counts = random.multinomial(num_episodes, np.full(num_episodes, 1 / num_episodes), size=num_members).astype(np.float64)
    for episode in np.flatnonzero((counts > 0).all(axis=0)):
        nonempty_without = np.flatnonzero(counts.sum(axis=1) > counts[:, episode])
        if nonempty_without.size and num_members > 1:
            counts[random.choice(nonempty_without), episode] = 0.0
    return counts


def _rows_of(counts: Tensor, episode: Tensor) -> Tensor:
    """Rows of the steps in a resample [N], repeated as often as their episode is in it."""
    return torch.repeat_interleave(torch.arange(len(episode)), counts[episode].long())
