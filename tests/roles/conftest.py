"""What tests of roles share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from embodied_rl.config import RayConfig
from tests.roles.runs import BARE


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """One cluster for the module: runs find it and leave it."""
    from embodied_rl.roles.ray_cluster import prepare

    pytest.importorskip("ray")
    ray = prepare(RayConfig())
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **BARE})
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
    made.shutdown()
