"""What tests of roles share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from embodied_rl.config import RayConfig


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """One cluster for the module: runs find it and leave it."""
    from embodied_rl.roles.ray_cluster import prepare

    pytest.importorskip("ray")
    ray = prepare(RayConfig())
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
