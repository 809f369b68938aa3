"""The learner: values of a rollout, and PPO's epochs over a batch."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor, nn

from embodied_rl.algorithms.batch import Batch
from embodied_rl.algorithms.losses import explained_variance
from embodied_rl.algorithms.ppo import RolloutValues
from embodied_rl.config import AlgorithmConfig
from embodied_rl.errors import IncompatibleCheckpointError, UserError, shown
from embodied_rl.hybrid.policy_updater import ROWS, PolicyUpdater, Precision, chosen_rows, is_needed
from embodied_rl.hybrid.threads import compute_threads
from embodied_rl.hybrid.updater import METRICS, AutogradUpdater, Minibatches, NonFiniteLossError, Updater
from embodied_rl.policies.actor_critic import ActorCritic
from embodied_rl.policies.base import Policy
from embodied_rl.types import Rollout

WIDE_LAYER = 128
"""From this width on, a second thread for the critic is worth its hand-overs."""
VERY_WIDE_LAYER = 512
"""From this width on, single matrix products are worth more than one thread."""


class Learner:
    """Trains a policy with Adam on minibatches of a batch.

    A small Gaussian MLP on the CPU is trained by `FusedMlpUpdater`, everything else by `AutogradUpdater`; both give the same
    parameters up to rounding.
    """

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        device: str | torch.device = "cpu",
        num_threads: int | None = None,
        *,
        allow_fused: bool = True,
        updater: Updater | None = None,
        precision: Precision = "float32",
    ) -> None:
        """
        Args:
            num_threads: threads of the CPU's linear algebra; None: as many as there are cores to run on.
            allow_fused: False takes autograd always (for comparison).
            precision: of matrix products on the way to the gradient.
            updater: the inner loop, where it is not one of this process alone (`ShardedUpdater`).
        """
        self.policy = policy
        self.config = config
        self.device = resolve_device(device)
        policy.to(self.device)
        self.num_threads = num_threads or _num_cores()
        self._widest = max(layer.out_features for layer in policy.modules() if isinstance(layer, nn.Linear))
        self._precision = precision
        self.compute_threads = self.num_threads
        """Threads of one operation."""
        self._updater = updater if updater is not None else self._make_updater(allow_fused)

    def _make_updater(self, allow_fused: bool) -> Updater:
        """Choose the implementation and the threads: those that small operations do not repay only wait for one another."""
        if not isinstance(self.policy, ActorCritic) or is_needed(self.config, self._precision):
            return PolicyUpdater(self.policy, self.config, self.device, self._precision)
        if allow_fused:
            from embodied_rl.hybrid.fused_mlp import FusedMlpUpdater

            if FusedMlpUpdater.supports(self.policy, self.device):
                self.compute_threads = max(1, self.num_threads // 2) if self._widest >= VERY_WIDE_LAYER else 1
                side_by_side = self.num_threads >= 2 and self._widest >= WIDE_LAYER
                return FusedMlpUpdater(self.policy, self.config, side_by_side=side_by_side)
        if self.policy.trunk is None and self._widest < WIDE_LAYER:
            self.compute_threads = 1
        return AutogradUpdater(self.policy, self.config, self.device)

    def values(self, rollout: Rollout) -> RolloutValues:
        """The critic's values of everything the rollout saw, in one pass."""
        steps, slots = rollout.reward.shape
        flat = {}
        for key in self.policy.observation_keys:
            seen = rollout.observation[key]
            rows = seen.reshape(steps * slots, *seen.shape[2:])
            flat[key] = np.concatenate([rows, rollout.last_observation[key], rollout.final_observation[key]])
        with compute_threads(self.compute_threads):
            values = self._updater.values(flat)
        value, last, final = np.split(values, [steps * slots, (steps + 1) * slots])
        if values.ndim == 2:  # of each step of a chunk: what comes after begins with the first
            return RolloutValues(value.reshape(steps, slots, -1), last[:, 0].copy(), final[:, 0].copy())
        return RolloutValues(value.reshape(steps, slots), last, final)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """[B, L] float32 of the batch's actions under the present policy."""
        parts = []
        with compute_threads(self.compute_threads):
            for start in range(0, batch.num_rows, ROWS):
                rows = slice(start, start + ROWS)
                seen = {key: part[rows].to(self.device) for key, part in batch.observation.items() if key in self.policy.observation_keys}
                parts.append(self.policy.evaluate(seen, batch.action[rows].to(self.device)).log_prob.float().cpu())
        return torch.cat(parts)

    def learning_rate(self, iteration: int, num_iterations: int) -> float:
        """Constant, or falling linearly to 0 over the run's iterations."""
        share = 1.0 - iteration / num_iterations if self.config.lr_schedule == "linear" else 1.0
        return self.config.learning_rate * max(share, 0.0)

    def update(self, batch: Batch, *, iteration: int, num_iterations: int, seed: int) -> dict[str, float]:
        """Run the epochs of one iteration; return metrics averaged over the minibatches that were stepped on.

        Rows are shuffled anew each epoch by a generator made from (seed, iteration) alone, so that a resumed run goes on with
        the same bits. Before each further epoch, the mean KL divergence of the one before is held against ``target_kl``.

        Raises:
            NonFiniteLossError: a loss or gradient is not finite; the parameters were not stepped with it, and the error
                carries the minibatch. Its rows are counted among those that the mask keeps.
        """
        if batch.mask is not None:
            # Rows that do not count are left out here, once, rather than weighed in every sum.
            kept = batch.mask.nonzero().squeeze(-1)
            batch = chosen_rows(batch.replaced(mask=None), kept)
        rate = self.learning_rate(iteration, num_iterations)
        generator = np.random.default_rng(np.random.SeedSequence([seed, iteration]))
        try:
            with compute_threads(self.compute_threads):
                epochs = self._epochs(batch, rate, generator)
        except NonFiniteLossError as error:
            error.batch = _to_numpy(chosen_rows(batch, torch.from_numpy(error.rows)))
            raise
        means = np.concatenate(epochs).mean(axis=0)
        return {
            **dict(zip(METRICS, means.tolist(), strict=True)),
            "explained_variance": explained_variance(value=batch.value, returns=batch.returns),
            "learning_rate": rate,
            "epochs_done": float(len(epochs)),
        }

    def _epochs(self, batch: Batch, rate: float, generator: np.random.Generator) -> list[np.ndarray]:
        config = self.config
        epochs: list[np.ndarray] = []
        self._updater.begin(batch)
        for _ in range(config.num_epochs):
            minibatches = Minibatches.shuffle(generator, batch.num_rows, config.minibatch_size)
            epochs.append(self._updater.epoch(minibatches, rate))
            if config.target_kl is not None and epochs[-1][:, METRICS.index("approx_kl")].mean() > config.target_kl:
                break
        return epochs

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state as flat named tensors: ``step``, ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``."""
        return self._updater.state_tensors()

    def load_state_tensors(self, state: dict[str, Tensor]) -> None:
        """Continue exactly. Raises IncompatibleCheckpointError when names or shapes are not this policy's."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.state_tensors().items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if given != expected:
            wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
            raise IncompatibleCheckpointError(
                f"The optimizer state is not that of this policy: {', '.join(wrong[:4])} differ (of {len(wrong)}). "
                "Resume with the policy configuration that the checkpoint was made with."
            )
        self._updater.load_state_tensors(state)


def resolve_device(device: str | torch.device) -> torch.device:
    """``auto`` is the first GPU where there is one, else the CPU. Raises UserError for a device that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={shown(device)} is not a device: write cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UserError(f"device={device}: torch finds {count} GPUs here (python -m embodied_rl.doctor says why). Use device=cpu or auto.")
    return found


def _num_cores() -> int:
    """Cores that this process may run on; all there are where the system cannot say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _to_numpy(batch: Batch) -> dict[str, np.ndarray]:
    fields = {name: getattr(batch, name) for name in ("action", "log_prob", "advantage", "returns", "value")}
    fields |= {f"observation.{key}": part for key, part in batch.observation.items()}
    return {name: tensor.cpu().numpy() for name, tensor in fields.items()}
