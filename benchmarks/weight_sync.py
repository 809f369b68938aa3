"""How fast weights reach another process, in multiples of a memory copy that is measured in the same run.

``python benchmarks/weight_sync.py``: tensors in the shapes of a transformer's layers, published through shared memory to a process that
reads all of them. Sides take turns in each round; medians over rounds.

- memory copy: one large block to another, `torch.Tensor.copy_`, in this process: the limit of any publication that copies once;
- publish: `SharedWeightsPublisher.publish`, until the version is there for readers;
- publish + read: until the other process has copied it into a model of its own and said so;
- only changed: nine tenths of the tensors are as before; GB/s of the model, not of what was written;

``--device cuda`` (the default where there is a GPU): trained and generating weights lie on the GPU. The limit is then one pinned copy from
the device, and one more side is measured: in place, the trained float32 weights copied into those that generate, on the same device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from tables import provenance, text_table
from torch import Tensor

from embodied_rl.hybrid.shared_weights import SharedWeightsPublisher, SharedWeightsReader
from embodied_rl.hybrid.weight_sync import NamedTensors

COPY = "memory copy"


def make_weights(megabytes: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Layers of a transformer of this width until `megabytes` (10^6 bytes) are reached."""
    shapes = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden // 4, hidden),
        "v_proj": (hidden // 4, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (3 * hidden, hidden),
        "up_proj": (3 * hidden, hidden),
        "down_proj": (hidden, 3 * hidden),
        "norm": (hidden,),
    }
    weights: dict[str, Tensor] = {}
    layer = 0
    while sum(tensor.nbytes for tensor in weights.values()) < megabytes * 10**6:
        weights |= {f"layers.{layer}.{name}": torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
        layer += 1
    return weights


def seconds_of(action: Callable[[], object]) -> float:
    """Wall-clock of one call."""
    synchronise()
    started = time.perf_counter()
    action()
    synchronise()
    return time.perf_counter() - started


def synchronise() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Reader:
    """A process that copies every version into a model of its own."""

    def __init__(self, path: str, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--read", path, "--device", device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait()

    def wait(self) -> int:
        """The version that it has read."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reading process ended with status {self._process.wait()}")
        return int(json.loads(line))

    def read(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Copied:
    """A model of one's own that takes every version."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.own: dict[str, Tensor] = {}

    def load_weights(self, version: int, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            if name in self.own:
                self.own[name].copy_(tensor, non_blocking=True)
            else:
                self.own[name] = tensor.to(self.device, copy=True)
        synchronise()


def load_newest(reader: SharedWeightsReader, model: Copied) -> int:
    """As a rollout worker does; returns the version."""
    with reader.hold() as held:
        model.load_weights(held.version, held.tensors.items())
        return held.version


def read_forever(path: str, device: str) -> None:
    """The other process."""
    torch.set_num_threads(1)
    reader, model = SharedWeightsReader(path), Copied(device)
    load_newest(reader, model)
    print(-1, flush=True)
    for _ in sys.stdin:
        print(load_newest(reader, model), flush=True)


def measure(weights: dict[str, Tensor], rounds: int, device: str) -> Iterator[dict[str, float]]:
    """Seconds by side, once for each round."""
    size, pinned = sum(tensor.nbytes for tensor in weights.values()), device == "cuda"
    source, target = torch.ones(size, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    trained = {name: tensor.float() for name, tensor in weights.items()} if pinned else {}
    publisher = SharedWeightsPublisher(weights)
    for version in (0, 1):  # both buffers' pages are there from now on
        publisher.publish(version, weights.items())
    reader = Reader(publisher.path, device)
    changed = dict(list(weights.items())[::10])
    version = 1
    try:
        for _ in range(rounds):
            seconds = {COPY: seconds_of(lambda: target.copy_(source))}
            version += 1
            seconds["publish"] = seconds_of(lambda number=version: publisher.publish(number, weights.items()))
            seconds["publish + read"] = seconds["publish"] + seconds_of(reader.read)
            for tensor in changed.values():
                tensor.add_(1)
            version += 1
            seconds["only changed"] = seconds_of(lambda number=version: publisher.publish(number, weights.items(), only_changed=True))
            if reader.read() != version:
                raise RuntimeError("the reader has another version than the one that was published")
            if pinned:
                seconds["in place"] = seconds_of(lambda: [weights[name].copy_(tensor) for name, tensor in trained.items()])
            yield seconds
    finally:
        reader.close()
        publisher.close()


def report(measured: list[dict[str, float]], size: int) -> str:
    """The table and the figure, medians over rounds; `size` in bytes."""
    rows, ratios = [], {}
    for side in measured[0]:
        seconds = statistics.median(one[side] for one in measured)
        ratios[side] = statistics.median(one[COPY] / one[side] for one in measured)
        rows.append([side, f"{1e3 * seconds:.2f}", f"{size / seconds / 1e9:.2f}", f"{ratios[side]:.2f}x"])
    table = text_table([f"{size / 1e6:.0f} MB", "ms", "GB/s", "of a memory copy"], rows)
    gb_per_s = size / statistics.median(one["publish"] for one in measured) / 1e9
    return (
        f"{table}\n\nfigure: weights published at {gb_per_s:.1f} GB/s, {ratios['publish']:.2f} of a memory copy; published and read by "
        f"another process {ratios['publish + read']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.read:
        read_forever(arguments.read, device)
        return
    torch.set_num_threads(1)  # the memory copy too: what one core can move
    print(provenance())
    weights = make_weights(arguments.megabytes, arguments.hidden_size, getattr(torch, arguments.dtype), device)
    measured = list(measure(weights, arguments.rounds, device))
    print(f"\n{report(measured, sum(tensor.nbytes for tensor in weights.values()))}")


if __name__ == "__main__":
    main()
