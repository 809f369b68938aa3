"""Several domains whose language policy is divided over two ranks: the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.learning.test_sharded_runs import check_moves
from tests.methods.test_multi_domain import COMMON, DOMAINS

HERE = tuple(word for word in COMMON if not word.startswith(("hybrid.", "checkpoint.", "video.", "logger", "evaluation.")))


@pytest.mark.slow
def test_domains_move_between_one_and_two_ranks(tmp_path: Path) -> None:
    """A robot's own network trains beside the ranks; both go on from checkpoints of either kind."""
    check_moves(tmp_path, (*HERE, *DOMAINS, "agent.evaluation_temperature=1.0", "algorithm.kl.coef=0.05"), 300, 600)
