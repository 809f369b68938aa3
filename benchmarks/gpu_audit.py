"""Do policies stay on their device? Every kind acts, evaluates, gives values and takes a training step; copies between devices are counted.

``python benchmarks/gpu_audit.py``. On a CUDA device the tensors are real. Elsewhere they are PyTorch's fake tensors on a device that exists
in name only ("virtual"): shapes and devices are worked out, nothing is computed, and an operation on tensors of two devices fails as it
would on a GPU. A copy in the middle of a step costs a GPU its queue, so each is printed with the line of ours that makes it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import provenance, text_table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from embodied_rl.algorithms.batch import Batch
from embodied_rl.config import AlgorithmConfig, AnyPolicyConfig, FlowPolicyConfig, OpenVLAPolicyConfig, PolicyConfig, TinyVLAConfig
from embodied_rl.learning.objectives import RolloutObjective
from embodied_rl.learning.optimizer import optimizers_of
from embodied_rl.policies.base import ActionOutput, Policy, prepare_observation
from embodied_rl.policies.build import build_policy
from embodied_rl.types import ActionLayout, ActionSpec, SimSpec, TensorSpec

ROOT = Path(__file__).resolve().parents[1]
VIRTUAL = "virtual"
ROWS, SIZE = 4, 48


def spec_of(action_dim: int = 3) -> SimSpec:
    """A simulator with a state, a picture and an instruction."""
    parts = {"state": TensorSpec((5,), "float32"), "rgb": TensorSpec((SIZE, SIZE, 3), "uint8")}
    ends = [1.0] * action_dim
    action = ActionSpec.continuous([-end for end in ends], ends)
    return SimSpec(task="Audit-v0", observation=parts, action=action, max_episode_steps=10, instruction="put the spoon on the towel")


def kinds(folder: Path) -> dict[str, tuple[AnyPolicyConfig, SimSpec]]:
    """{name: configuration and simulator}; OpenVLA is the tests' tiny reference model, written into `folder`."""
    sys.path.insert(0, str(ROOT))
    from tests.golden.runs import make_openvla

    path, spec = str(make_openvla(folder)), spec_of()
    openvla = OpenVLAPolicyConfig(path=path, unnorm_key="bridge_orig", dtype="float32", prompt_tokens=24)
    return {
        "mlp": (PolicyConfig(hidden_sizes=(16, 16)), spec),
        "mlp, normalised": (PolicyConfig(hidden_sizes=(16, 16), normalize_observation=True), spec),
        "cnn": (PolicyConfig(encoder="cnn", observation_key="rgb", hidden_sizes=(16,)), spec),
        "tiny_vla": (TinyVLAConfig(width=16, num_heads=2, num_layers=1, conv_channels=(4,), num_keypoints=4), spec),
        "flow": (FlowPolicyConfig(chunk=3, hidden_sizes=(16,), num_steps=2), spec),
        "openvla": (openvla, spec_of(7)),
    }


# ---- counting ---------------------------------------------------------------------------------------------------------


@dataclass
class Copies:
    """What crossed between devices in one stage."""

    to_device: Counter[str] = field(default_factory=Counter)
    """{file:line of ours: times}"""
    to_host: Counter[str] = field(default_factory=Counter)
    """The same; numbers that Python reads (`item`, `tolist`) among them: each waits for the device."""

    @property
    def count(self) -> int:
        return self.to_device.total() + self.to_host.total()


class CountCopies(TorchDispatchMode):
    """Counts operations whose result lies on another device than their arguments."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.copies = device, Copies()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "nonzero") and tensors_of(args)[0].device.type == self.device:
            self.copies.to_host[place()] += 1
        elif name in ("_to_copy", "copy_", "_copy_from"):
            ends = tensors_of(args)
            source = ends[-1].device.type
            goal = result.device.type if name == "_to_copy" else ends[0].device.type
            if source != goal:
                (self.copies.to_device if goal == self.device else self.copies.to_host)[place()] += 1
        return result


def tensors_of(args: Any) -> list[Tensor]:
    return [value for value in args if isinstance(value, Tensor)]


def place() -> str:
    """The innermost line of the package that is running."""
    frames = [frame for frame in traceback.extract_stack() if "/embodied_rl/" in frame.filename]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "outside the package"


# ---- the audit --------------------------------------------------------------------------------------------------------


def register_virtual() -> None:
    """Make `VIRTUAL` a device of this process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = types.ModuleType(VIRTUAL)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    module.is_autocast_enabled = module.is_initialized = module.is_available = lambda: False  # type: ignore[attr-defined]
    _setup_privateuseone_for_python_backend(VIRTUAL, module)


@contextmanager
def tensors_on(device: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yields what puts a tensor on the device; as a fake one on the device that exists in name only."""
    if device != VIRTUAL:
        yield lambda tensor: tensor.to(device)
        return
    with FakeTensorMode() as mode:
        yield lambda tensor: mode.from_tensor(tensor).to(device)


def put(policy: Policy, move: Callable[[Tensor], Tensor]) -> None:
    """Put a policy's weights and buffers on the device, as ``policy.to`` does."""
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(move(parameter).detach(), requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = move(buffer)


def audit(config: AnyPolicyConfig, spec: SimSpec, device: str) -> dict[str, Copies | str]:
    """{stage: what crossed between devices, or how the stage failed}"""
    policy = build_policy(config, spec)
    ready = prepare_observation(policy, {"state": np.zeros((ROWS, 5), np.float32), "rgb": np.zeros((ROWS, SIZE, SIZE, 3), np.uint8)})
    layout = policy.action_layout
    found: dict[str, Copies | str] = {}
    with tensors_on(device) as move:
        put(policy, move)
        observation = {key: move(part) for key, part in ready.items()}
        for name, stage in stages_of(policy, observation, layout, device).items():
            counting = CountCopies(device)
            try:
                with counting:
                    stage()
                found[name] = counting.copies
            except Exception as error:  # whatever a stage raises is the finding
                found[name] = f"{type(error).__name__} at {place_of(error)}: {' '.join(str(error).split())[:160]}"
    return found


def stages_of(policy: Policy, observation: dict[str, Tensor], layout: ActionLayout, device: str) -> dict[str, Callable[[], object]]:
    """What is audited, in an order in which each has what it needs of those before."""
    draw = torch.rand if layout.noise_kind == "uniform" else torch.randn
    noise = draw(ROWS, layout.noise_width, device=device)
    config = AlgorithmConfig(normalize_advantage="none")
    optimizer, objective = optimizers_of(policy, config)[""], RolloutObjective(policy, config)
    objective.steps(noise.device)  # lies there from the first step on
    acted: list[ActionOutput] = []
    value: list[Tensor] = []

    @torch.no_grad()
    def act() -> None:
        acted.append(policy.act(observation, noise))

    @torch.no_grad()
    def judge() -> None:
        value.append(policy.value(observation))

    def train() -> None:
        ones = torch.ones_like(value[0])
        advantage = ones[..., 0] if ones.ndim > 1 else ones
        rows = Batch(observation, acted[0].action, acted[0].log_prob, advantage, ones, value[0])
        # What `LocalExecutor.take` does, without its one transfer: the row numbers to the device, the figures back.
        minibatch, numbers = objective.begin(rows, kl_coef=0.0)
        optimizer.zero_grad()
        objective(policy, minibatch, numbers)[0].backward()
        optimizer.clip()
        optimizer.step(config.learning_rate)

    return {"act": act, "evaluate": lambda: policy.evaluate(observation, acted[0].action), "value": judge, "train": train}


def place_of(error: Exception) -> str:
    """The innermost line of the package that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/embodied_rl/" in frame.filename]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "outside the package"


def failures(results: dict[str, dict[str, Copies | str]]) -> list[str]:
    """One line for each stage that failed, or copied between devices."""
    lines = []
    for kind, stages in results.items():
        for stage, found in stages.items():
            if isinstance(found, str):
                lines.append(f"{kind}, {stage}: {found}")
            else:
                lines += [f"{kind}, {stage}: to the device {count}x at {where}" for where, count in found.to_device.items()]
                lines += [f"{kind}, {stage}: to the host {count}x at {where}" for where, count in found.to_host.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", VIRTUAL), help="default: cuda where there is one")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else VIRTUAL)
    print(provenance("transformers"))
    if device == VIRTUAL:
        register_virtual()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: audit(config, spec, device) for name, (config, spec) in kinds(Path(folder)).items()}
    rows = [
        [kind, *(str(part.count) if isinstance(part, Copies) else "failed" for part in found.values())] for kind, found in results.items()
    ]
    print(f"device: {device}; copies between host and device in\n")
    print(text_table(["policy", *next(iter(results.values()))], rows))
    lines = failures(results)
    print("\n".join(["", *lines, "", f"figure: {len(results)} policies, {len(lines)} copies or failures"]))
    raise SystemExit(1 if any(isinstance(part, str) for found in results.values() for part in found.values()) else 0)


if __name__ == "__main__":
    main()
