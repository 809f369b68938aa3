"""Several domains whose language policy is divided over two ranks: the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from embodied_rl.compose import load_train_config
from embodied_rl.errors import UserError
from embodied_rl.methods import check_method
from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_multi_domain import COMMON, DOMAINS

HERE = tuple(word for word in COMMON if not word.startswith(("hybrid.", "checkpoint.", "video.", "logger", "evaluation.")))


@pytest.mark.slow
def test_domains_move_between_one_and_two_ranks(tmp_path: Path) -> None:
    """A robot's own network trains beside the ranks; both go on from checkpoints of either kind."""
    check_moves(tmp_path, (*HERE, *DOMAINS, "agent.evaluation_temperature=1.0", "algorithm.kl.coef=0.05"), 300, 600)


def test_without_a_language_policy_there_is_nothing_to_divide() -> None:
    alone = [word for word in HERE if not word.startswith(("policy", "agent.", "generation"))]
    config = load_train_config([*alone, DOMAINS[-1], "hybrid=fsdp2", "video.enabled=no", "policy=mlp", "run_dir=x"])
    with pytest.raises(UserError, match=r"divides the run's language policy, and every domain has its own policy: set hybrid=local"):
        check_method(config)
