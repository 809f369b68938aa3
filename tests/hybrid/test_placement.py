"""What a placement means on a described cluster, and what is refused with which way out."""

from __future__ import annotations

from typing import Any

import pytest

from embodied_rl.config.hybrid import ClusterConfig, NodesConfig, PlacementConfig, WorkloadConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.placement import Cluster, Placement, describe, resolve


def cluster(*nodes: NodesConfig) -> Cluster:
    return Cluster(ClusterConfig(nodes or (NodesConfig(gpus=8, cores=64),)))


def names(placement: Placement) -> dict[str, list[str]]:
    return {role: describe(devices) for role, devices in placement.roles.items() if role != "reward"}


def placed(value: Any, where: Cluster | None = None, **options: Any) -> dict[str, list[str]]:
    return names(resolve(PlacementConfig.from_value(value), where or cluster(), **options))


def test_kinds_on_eight_gpus() -> None:
    all_gpus = ["0/gpu:0-7"]
    assert placed("collocated") == {"env": ["0/cpu"], "generation": all_gpus, "train": all_gpus}
    assert placed("collocated", simulator="gpu") == {"env": all_gpus, "generation": all_gpus, "train": all_gpus}
    apart = {"kind": "disaggregated", "num_env_gpus": 2, "num_train_gpus": 2}
    assert placed(apart, simulator="gpu") == {"env": ["0/gpu:0-1"], "generation": ["0/gpu:2-5"], "train": ["0/gpu:6-7"]}
    hybrid = {"kind": "hybrid", "num_env_gpus": 4, "num_pipeline_stages": 2}
    assert placed(hybrid, simulator="gpu") == {"env": ["0/gpu:0-3"], "generation": ["0/gpu:4-7"], "train": all_gpus}
    resolved = resolve(PlacementConfig.from_value(hybrid), cluster(), simulator="gpu")
    assert resolved.simulates_apart
    assert not resolved.trains_apart
    assert resolved.label == "hybrid, 2 stages"
    multiplexed = resolve(PlacementConfig("multiplexed", num_train_gpus=6), cluster())
    assert (names(multiplexed)["train"], multiplexed.num_takeover) == (["0/gpu:2-7"], 6)


def test_heterogeneous_and_explicit() -> None:
    mixed = cluster(NodesConfig(count=2, gpus=4), NodesConfig(count=3, cores=96))
    assert placed("disaggregated", mixed)["env"] == ["0-4/cpu"]
    explicit = {"env": "2-4/cpu", "generation": ["0/gpu:*", "1/gpu:0-1"], "train": ["1/gpu:2-3"], "num_pipeline_stages": 2}
    resolved = resolve(PlacementConfig.from_value(explicit), mixed)
    assert names(resolved) == {"env": ["2-4/cpu"], "generation": ["0/gpu:0-3", "1/gpu:0-1"], "train": ["1/gpu:2-3"]}
    assert resolved.trains_apart
    assert resolved.num_pipeline_stages == 2
    # What is printed can be given again.
    again = resolve(PlacementConfig.from_value(resolved.to_dict()), mixed)
    assert again == resolved
    # By roles alone, some devices that generate and train would only take turns.
    lends = resolve(PlacementConfig("multiplexed", num_train_gpus=3), mixed)
    assert lends.to_dict() == {"kind": "multiplexed", "num_train_gpus": 3, "num_pipeline_stages": 1}
    assert resolve(PlacementConfig.from_value(lends.to_dict()), mixed) == lends


def test_without_gpus_machines_compute() -> None:
    two = cluster(NodesConfig(count=2, cores=4))
    assert placed("collocated", two) == {"env": ["0-1/cpu"], "generation": ["0-1/cpu"], "train": ["0-1/cpu"]}
    assert placed("disaggregated", two)["train"] == ["1/cpu"]


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("disaggregatd", {}, "Did you mean 'disaggregated'"),
        ({"kind": "disaggregated", "num_train_gpus": 8}, {}, r"8 for training .* has 8 GPUs\. Nearest valid choice"),
        ({"kind": "hybrid", "num_env_gpus": 8}, {"simulator": "gpu"}, "needs a device for generation"),
        ("multiplexed", {"simulator": "gpu"}, "valid choice: hybrid"),
        (
            {"env": "0/cpu", "generation": "0/gpu:0-8", "train": "0/gpu:*"},
            {},
            r"'0/gpu:8' does not exist.* existing device: '0/gpu:7'",
        ),
        ({"env": "0/cpu", "generation": "3/gpu:1", "train": "0/gpu:*"}, {}, r"'3/gpu:1' does not exist.*'0/gpu:1'"),
        ({"env": "0/cpu", "generation": "gpu3", "train": "0/gpu:*"}, {}, "is not a device: write node/kind:index"),
        ({"env": "0/gpu:0", "generation": "0/gpu:1", "train": "0/gpu:2"}, {}, r"runs on CPUs, but role env .* Possible: env: \['0/cpu'\]"),
        (
            {"env": "0/cpu", "generation": "0/gpu:0-5", "train": "0/gpu:2-7"},
            {},
            r"train: \['0/gpu:0-7'\], or train: \['0/gpu:6-7'\]",
        ),
        ({"env": "0/cpu", "generation": "0/gpu:0-1", "train": ["0/gpu:1", "0/cpu"]}, {}, "mixes GPUs and CPUs"),
        ({"env": "0/cpu", "generation": ["0/gpu:0", "0/gpu:0"], "train": "0/gpu:1"}, {}, "twice"),
        ({"env": "0/cpu", "generation": "0/gpu:3-1", "train": "0/gpu:1"}, {}, "smaller number first"),
        ({"env": "0/cpu", "generation": "0/gpu:1", "train": "0/gpu:1", "judge": "0/cpu"}, {}, "role 'judge' is not known"),
        ({"kind": "explicit"}, {}, "roles must be given"),
        ({"kind": "collocated", "num_pipeline_stages": 0}, {}, "num_pipeline_stages must be between 1 and"),
    ],
)
def test_refusals_name_the_way_out(value: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed(value, **options)


def test_too_few_devices() -> None:
    one = cluster(NodesConfig(gpus=1))
    for kind in ("disaggregated", "multiplexed"):
        with pytest.raises(UserError, match=r"at least 2 GPUs, and 'cluster' has 1\. Nearest valid choice: collocated"):
            placed(kind, one)
    with pytest.raises(UserError, match="at least 3 GPUs"):
        placed("disaggregated", cluster(NodesConfig(gpus=2)), simulator="gpu")
    with pytest.raises(UserError, match="runs on GPUs and 'cluster' has none"):
        placed("collocated", cluster(NodesConfig()), simulator="gpu")


def test_configurations_are_checked() -> None:
    with pytest.raises(UserError, match=r"nodes\.count must be between 1 and"):
        NodesConfig(count=0)
    with pytest.raises(UserError, match=r"'cluster\.nods' is not known"):
        ClusterConfig.from_dict({"nods": []})
    with pytest.raises(UserError, match="either rollout_steps or episodes_per_iteration"):
        WorkloadConfig.from_dict({"num_slots": 4, "act": {"base_s": 1}, "train_per_decision_s": 1})
    fields = {"num_slots": 4, "act": {"base_s": 1}, "train_per_decision_s": 1, "episodes_per_iteration": 6, "group_size": 4}
    with pytest.raises(UserError, match="multiple of group_size"):
        WorkloadConfig.from_dict(fields)
