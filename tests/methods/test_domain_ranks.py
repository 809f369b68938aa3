"""Several domains of which one policy is divided over two ranks: the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.checkpoint import load_checkpoint
from embodied_rl.compose import load_train_config
from embodied_rl.trainer import Trainer
from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_multi_domain import COMMON, DOMAINS
from tests.short_run import last_of

pytestmark = pytest.mark.usefixtures("forked")

HERE = tuple(word for word in COMMON if not word.startswith(("hybrid.", "checkpoint.", "video.", "logger", "evaluation.")))


@pytest.mark.slow
def test_domains_move_between_one_and_two_ranks(tmp_path: Path) -> None:
    """A robot's own network trains beside the ranks; both go on from checkpoints of either kind."""
    check_moves(tmp_path, (*HERE, *DOMAINS, "agent.evaluation_temperature=1.0", "algorithm.kl.coef=0.05"), 300, 600)


def robots(*, shared: bool) -> list[str]:
    """Two domains of points and a pole, played by the run's network for pixels; or one of points with its own, and the pole."""
    points = "{name: points, target: 'tests.vla.toys:PointSim', num_slots: 3, num_workers: 1}"
    vla = "{name: tiny_vla, width: 16, num_heads: 2, num_layers: 1, conv_channels: [4], num_keypoints: 4, num_bins: 9, chunk: 3}"
    task = [word for word in COMMON if not word.startswith(("policy", "agent.", "generation"))]
    if shared:
        own = ["policy=tiny_vla", *(f"policy.{word.replace(': ', '=')}" for word in vla[1:-1].split(", ")[1:])]
        task += [*own, f"domains.points={{sim: {points}}}", f"domains.others={{sim: {points}, algorithm: {{gamma: 0.5}}}}"]
    else:
        task += ["policy=mlp", f"domains.points={{weight: 2, sim: {points}, policy: {vla}}}"]
    return [*task, DOMAINS[-1]]


def test_a_temperature_of_evaluation_is_that_of_the_domains_that_draw_tokens(tmp_path: Path) -> None:
    returns: list[dict[str, list[float]]] = []
    for temperature in ("null", "3.0"):
        words = [*robots(shared=False), "hybrid.device=cpu", f"evaluation.temperature={temperature}", f"run_dir={tmp_path / temperature}"]
        (tmp_path / temperature).mkdir()
        with Trainer(load_train_config(last_of(words)), tmp_path / temperature, command="test") as trainer:
            trainer.engine.publish(version=0)
            played = trainer.evaluate(6, first_seed=0)
        returns.append({task: [one.episode_return for one in played if one.final_info["task"] == task] for task in ("points", "pole")})
    mode, drawn = returns
    assert mode["pole"] == drawn["pole"], "of a network without tokens there is nothing to draw"
    assert mode["points"] != drawn["points"]


ROLLOUTS = ["algorithm=ppo", "algorithm.rollout_steps=8", "algorithm.minibatch_size=16", "algorithm.num_epochs=1"]


@pytest.mark.parametrize(
    ("shared", "method"),
    [
        pytest.param(False, [], id="own"),
        pytest.param(True, [], id="shared"),
        pytest.param(True, ROLLOUTS, id="rollouts", marks=pytest.mark.slow),
    ],
)
def test_without_a_language_policy_the_largest_is_divided(tmp_path: Path, shared: bool, method: list[str]) -> None:
    """A network for pixels that acts in chunks trains on two ranks, and the small one of the pole beside them, as in one process; also
    where it is the run's and plays two domains."""
    task = [*robots(shared=shared), "total_steps=100"]
    if method:
        task = [*(word for word in task if not word.startswith(("algorithm.groups", "algorithm.minibatch"))), *method]
    ranks = ["hybrid=fsdp2", "hybrid.device=cpu", "hybrid.num_threads=1"]
    states = []
    for name, more in (("here", ["hybrid.device=cpu"]), ("ranks", ranks)):
        config = load_train_config(last_of([*task, *more, f"run_dir={tmp_path / name}"]))
        (tmp_path / name).mkdir()
        with Trainer(config, tmp_path / name, command="test") as trainer:
            assert (trainer.method.sharded is not None) == (name == "ranks")
            trainer.run()
        states.append(load_checkpoint(tmp_path / name).policy)
    one, two = states
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor, atol=1e-5, rtol=1e-4)
