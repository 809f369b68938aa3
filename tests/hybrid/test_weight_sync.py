"""Publishing weights: in this process, to other processes while they generate, and as differences."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.hybrid.shared_weights import SharedWeightsPublisher, SharedWeightsReader, _pin
from embodied_rl.hybrid.weight_sync import BASE, INDEX, DeltaSource, apply_delta, buckets, pack_tensors, unpack_tensors
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.packing import TokenSequence
from embodied_rl.sim.transport import Slab
from tests.forks import Fork, start_forked
from tests.policies.language_models import tiny


class Collects:
    """Takes weights."""

    def __init__(self) -> None:
        self.version, self.tensors = -1, {}  # type: ignore[var-annotated]

    def load_weights(self, version: int, tensors: Any) -> None:
        self.version, self.tensors = version, {name: tensor.clone() for name, tensor in tensors}


# ---- this process -------------------------------------------------------------------------------------------------------


def test_buckets_keep_the_order_and_the_bound() -> None:
    tensors = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate([40, 50, 20, 300, 10, 90, 1])]
    found = [[name for name, _ in bucket] for bucket in buckets(tensors, 100)]
    assert found == [["0", "1"], ["2"], ["3"], ["4", "5"], ["6"]]
    assert list(buckets([], 10)) == []
    with pytest.raises(ValueError, match="bucket_bytes"):
        next(buckets(tensors, 0))


def test_tensors_without_entries_are_packed_as_numpy_gives_them() -> None:
    text, payload = pack_tensors([("none", torch.zeros(0, 4)), ("of numpy", torch.from_numpy(np.arange(0)))])
    got = dict(unpack_tensors(text, payload.copy()))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in got.items()} == {
        "none": ((0, 4), torch.float32),
        "of numpy": ((0,), torch.int64),
    }


# ---- differences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_differences_are_exact_and_small(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "frozen": torch.randn(100, generator=generator).to(dtype),
        "trained": torch.randn(10, 100, generator=generator).to(dtype),
        "dense": torch.randn(50, generator=generator).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
    }
    source, target = DeltaSource(), {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    version = -1
    for following in (0, 1, 2):
        if following:
            weights["trained"][following, ::20] += 1
            weights["dense"] += 1
        if following == 2 and dtype.is_floating_point:
            weights["trained"][0, 0], weights["trained"][9, 9] = float("nan"), -0.0
        stream = list(source.stream(following, weights.items()))
        apply_delta(target, version, stream)
        version = following
        for name, tensor in weights.items():
            assert torch.equal(tensor.view(-1).view(torch.uint8), target[name].view(-1).view(torch.uint8)), name
        sent = {name for name, _ in stream}
        if following:
            assert "frozen" not in sent
            assert "trained" + INDEX in sent
            assert "dense" in sent
    with pytest.raises(ValueError, match="differences to version 2, but the present weights have version 0"):
        apply_delta(target, 0, source.stream(3, weights.items()))
    with pytest.raises(ValueError, match="tensor 'other' does not exist"):
        apply_delta(target, 3, [(BASE, torch.tensor([3])), ("other", torch.zeros(1))])


# ---- shared memory ------------------------------------------------------------------------------------------------------


def same(version: int) -> dict[str, Tensor]:
    """Tensors that say everywhere which version they are of."""
    return {"a": torch.full((300, 70), float(version)), "b": torch.full((5,), version, dtype=torch.int64), "empty": torch.empty(0)}


def test_versions_are_whole_and_held_ones_are_not_overwritten() -> None:
    publisher = SharedWeightsPublisher(same(0), timeout_s=0.2)
    reader = SharedWeightsReader(publisher.path)
    assert reader.version is None
    with pytest.raises(TimeoutError, match="no weights were published"), reader.hold(timeout_s=0.05):
        pass
    publisher.publish(10, same(10).items())
    with reader.hold() as held:
        assert (held.version, float(held.tensors["a"].min()), int(held.tensors["b"][0])) == (10, 10.0, 10)
        publisher.publish(11, same(11).items())
        assert reader.version == 11
        assert float(held.tensors["a"].max()) == 10.0
        with pytest.raises(TimeoutError, match="a reader still holds version 10"):
            publisher.publish(12, same(12).items())
    publisher.publish(12, same(12).items())
    with reader.hold() as held:
        assert (held.version, float(held.tensors["a"].mean())) == (12, 12.0)
    # A publication that fails half way is never seen.
    for bad, message in (
        ({"a": same(13)["a"]}, "were not published: b"),
        ({**same(13), "x": torch.zeros(1)}, "'x'"),
        ({**same(13), "b": torch.zeros(6)}, "'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            publisher.publish(13, bad.items())
        with reader.hold() as held:
            assert (held.version, float(held.tensors["a"].mean())) == (12, 12.0)
    # Only what differs from the version two before is written: the other buffer holds version 11, in part overwritten.
    publisher.publish(13, same(13).items())
    assert publisher.publish(14, {**same(14), "a": same(12)["a"]}.items(), only_changed=True) == 5 * 8
    publisher.close()
    assert reader.closed
    with reader.hold() as held:
        assert (float(held.tensors["a"].mean()), held.tensors["b"].tolist()) == (12.0, [14] * 5)
    reader.close()
    with pytest.raises(UserError, match="No weights are published"):
        SharedWeightsReader(publisher.path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "No weights are published"), (bytes(64), "has no published weights")], ids=["short", "other"]
)
def test_a_file_without_weights_is_closed_again(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UserError, match=message):
        SharedWeightsReader(str(tmp_path / "other"))
    assert str(tmp_path / "other") not in [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]


def start_reader(*arguments: str) -> tuple[Fork, IO[str]]:
    """The other process, and what it prints."""
    here, there = os.pipe()
    with open(there, "wb") as output:
        return start_forked("tests.hybrid.weight_reader", *arguments, output=output, collects=True), open(here, encoding="utf-8")


def finish(process: Fork, printed: IO[str]) -> Any:
    with printed:
        said = printed.read()
    assert process.wait(300) == 0, said[-4000:]
    return json.loads(said.splitlines()[-1])


def test_no_reader_ever_sees_half_a_model_and_a_dead_one_holds_nobody_up() -> None:
    tensors = {str(i): torch.zeros(64, 257) for i in range(20)}
    publisher = SharedWeightsPublisher(tensors, timeout_s=60.0)
    publisher.publish(0, tensors.items())
    holder, held = start_reader("hold", publisher.path)
    assert held.readline() == "holding 0\n"
    reader, seen_by = start_reader("watch", publisher.path)
    publisher.publish(1, ((name, torch.full((64, 257), 1.0)) for name in tensors))
    holder.kill()  # while it holds version 0, whose buffer is the next to be written
    holder.wait(60)
    held.close()
    version, deadline = 1, time.monotonic() + 120
    assert seen_by.readline() == "watching\n"
    # It has begun, and says when it has seen enough.
    while not select.select([seen_by], [], [], 0.0)[0]:
        assert time.monotonic() < deadline, "the reader gets hardly anything to see"
        version += 1
        publisher.publish(version, ((name, torch.full((64, 257), float(version))) for name in tensors))
    publisher.close()
    seen = finish(reader, seen_by)
    assert seen["torn"] == 0
    assert seen["reads"] > 50
    assert seen["versions"] > 5
    assert seen["last"] == version


def test_every_token_is_of_the_version_that_it_carries(tmp_path: Path) -> None:
    """A generator in another process goes on while weights are published; its log-probabilities are recomputed here."""
    folder = tiny(tmp_path / "model")
    policy = build_language_policy(LanguageConfig(str(folder)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    publisher = SharedWeightsPublisher(dict(policy.named_weights()))
    kept = {0: snapshot(policy)}
    publisher.publish(0, policy.named_weights())
    process, printed = start_reader("generate", publisher.path, str(folder), str(tmp_path / "tokens.npz"))
    for version in (1, 2, 3):
        printed.readline()  # a few tokens were sampled with the version before
        move(policy, version)
        kept[version] = snapshot(policy)
        publisher.publish(version, policy.named_weights())
    told = finish(process, printed)
    publisher.close()
    with np.load(tmp_path / "tokens.npz") as file:
        rows = [{name: file[f"{i}/{name}"] for name in ("prompt", "token_ids", "log_prob", "version")} for i in range(told["completions"])]
    versions = np.concatenate([row["version"] for row in rows])
    assert set(versions.tolist()) == {0, 1, 2, 3}
    assert any(len(set(row["version"].tolist())) > 1 for row in rows), "no answer crossed a publication"
    for version, weights in kept.items():
        policy.load_state_dict(weights)
        with torch.no_grad():
            found = policy.evaluate([TokenSequence.of(row["prompt"], row["token_ids"]) for row in rows]).log_prob.numpy()
        for number, row in enumerate(rows):
            first = len(row["prompt"])
            ours = found[number, first : first + len(row["token_ids"])]
            of_version = row["version"] == version
            np.testing.assert_allclose(row["log_prob"][of_version], ours[of_version], atol=2e-5)
            # And they are not another version's.
            assert (~of_version).sum() == 0 or np.abs(row["log_prob"][~of_version] - ours[~of_version]).max() > 1e-3
    torch.set_num_threads(before)


def snapshot(policy: LanguagePolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def move(policy: LanguagePolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_memory_that_cannot_be_pinned_leaves_no_error_to_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []

    def refuse(address: int, size: int, flags: int) -> int:
        pending.append(801)
        return 801

    def launch(*shape: int, device: str) -> None:
        if pending:
            raise RuntimeError(f"CUDA error {pending.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch, "ones", launch)
    assert _pin(Slab({"header": ((8,), "int64")})) == -1
    assert not pending


@pytest.mark.gpu
def test_weights_on_a_gpu_are_published_and_read_through_pinned_memory() -> None:
    weights = {f"layer.{number}": torch.randn(64, 33, device="cuda") for number in range(5)}
    specs = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()}
    publisher = SharedWeightsPublisher(specs)
    reader, collects = SharedWeightsReader(publisher.path), Collects()
    for version in range(3):
        publisher.publish(version, weights.items(), only_changed=version == 2)
        with reader.hold() as held:
            collects.load_weights(held.version, held.tensors.items())
        assert held.version == version
        for name, tensor in weights.items():
            torch.testing.assert_close(collects.tensors[name], tensor.to(torch.bfloat16).cpu(), rtol=0, atol=0)
        weights["layer.1"].add_(1.0)
    assert publisher._pinned > 0
    reader.close()
    publisher.close()
