"""How fast training's memory leaves the device and comes back: GB/s against what the link between host and GPU gives in the same run.

``python benchmarks/offload.py``: a module with AdamW's state is moved out (`Residency.begin("generation")`) and in again, through pinned
buffers on a stream of its own. The limit is one pinned copy of as many bytes in the same direction. Without a GPU there is no such link:
the script says so, and measures the bookkeeping on the CPU alone, against a plain copy in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tables import provenance, text_table
from torch import nn

from embodied_rl.hybrid.residency import Gradients, Residency, Tensors


def make_training(megabytes: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module whose parameters and AdamW state take about `megabytes` (10^6 bytes) together, after one step."""
    width = 1024
    layers = max(round(megabytes * 10**6 / 3 / 4 / width**2), 1)
    module = nn.Sequential(*[nn.Linear(width, width, bias=False, device=device) for _ in range(layers)])
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module(torch.randn(2, width, device=device)).square().mean().backward()
    optimizer.step()
    return module, optimizer


def seconds_of(action: Callable[[], object], device: str) -> float:
    """Wall-clock until the device has done it."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(megabytes: int, rounds: int, device: str) -> tuple[dict[str, list[float]], int, int]:
    """{side: seconds of each round}, bytes that move, and bytes that the allocator got back (0 on a CPU)."""
    module, optimizer = make_training(megabytes, device)
    residency = Residency()
    residency.register("parameters", Tensors(module.parameters))
    residency.register("optimizer", Tensors(lambda: [part for state in optimizer.state.values() for part in state.values()]))
    residency.register("gradients", Gradients(module.parameters))
    optimizer.zero_grad(set_to_none=True)
    size = sum(n for row in residency.memory_usage().values() for place, n in row.items() if place != "host")
    block, host = torch.empty(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    checksum = sum(float(p.detach().double().sum()) for p in module.parameters())
    seconds: dict[str, list[float]] = {"one copy out": [], "offload": [], "one copy in": [], "onload": []}
    freed = 0
    for number in range(rounds + 1):  # the first makes the pinned buffers
        found = [seconds_of(lambda: host.copy_(block, non_blocking=True), device)]
        allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
        found.append(seconds_of(lambda: residency.begin("generation"), device))
        freed = allocated - torch.cuda.memory_allocated() if device == "cuda" else 0
        found.append(seconds_of(lambda: block.copy_(host, non_blocking=True), device))
        found.append(seconds_of(lambda: residency.begin("training"), device))
        if number:
            for side, value in zip(seconds, found, strict=True):
                seconds[side].append(value)
    if checksum != sum(float(p.detach().double().sum()) for p in module.parameters()):
        raise RuntimeError("the parameters that came back are not those that went out")
    return seconds, size, freed


def report(seconds: dict[str, list[float]], size: int, freed: int, device: str) -> str:
    """The table and the figure, medians over rounds."""
    middle = {side: statistics.median(values) for side, values in seconds.items()}
    rows = [[side, f"{1e3 * value:.2f}", f"{size / value / 1e9:.2f}"] for side, value in middle.items()]
    table = text_table([f"{size / 1e6:.0f} MB", "ms", "GB/s"], rows)
    out = statistics.median(a / b for a, b in zip(seconds["one copy out"], seconds["offload"], strict=True))
    back = statistics.median(a / b for a, b in zip(seconds["one copy in"], seconds["onload"], strict=True))
    if device == "cuda":
        figure = (
            f"figure: offload at {size / middle['offload'] / 1e9:.1f} GB/s, {out:.2f} of one pinned copy; "
            f"onload at {size / middle['onload'] / 1e9:.1f} GB/s, {back:.2f}; {freed / 1e6:.0f} MB given back"
        )
    else:
        figure = (
            f"figure: no GPU here, so no figure of the link; on the CPU offload runs at {out:.2f} and onload at {back:.2f} of a plain copy"
        )
    return f"{table}\n\n{figure}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(provenance())
    if device == "cpu":
        torch.set_num_threads(1)
        print("There is no GPU on this machine: what follows is the bookkeeping on the CPU, not the speed of a link between host and GPU.")
    else:
        print(f"GPU: {torch.cuda.get_device_name()}")
    print(f"\n{report(*measure(arguments.megabytes, arguments.rounds, device), device)}")


if __name__ == "__main__":
    main()
