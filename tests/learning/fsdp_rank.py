"""One rank of `test_fsdp.py`: a language model trained on this rank's sequences, in several settings, and a checkpoint read and written.

Usage: python fsdp_rank.py RANK NUM_RANKS STORE_FILE FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from embodied_rl.config import ShardingConfig
from embodied_rl.config.policy import LanguageConfig
from embodied_rl.learning import fsdp
from embodied_rl.learning.ranks import join
from embodied_rl.learning.sharded_checkpoint import load_sharded, save_sharded
from embodied_rl.policies.language import LanguagePolicy, build_language_policy
from embodied_rl.policies.tiny_language import TinyShape
from tests.learning.samples import prepare_optimizer, training_tensors
from tests.policies.language_models import random_sequences, tiny

SEQUENCES = [(4, 5), (3, 9), (6, 1), (2, 7), (5, 3), (4, 8)]
MICRO_BATCHES = [[0, 1], [2], [3, 4, 5]]
"""Of one step; of each, rank r of n takes every n-th sequence beginning with the r-th."""
MAX_NORM = 0.5

CASES: dict[str, dict[str, Any]] = {
    "float32": {"sharding": {}},
    "recomputed": {"sharding": {"checkpoint_activations": True, "reshard_after_forward": False}},
    "lora": {"sharding": {}, "language": {"lora_rank": 2, "lora_targets": ("q_proj", "down_proj")}},
    "bfloat16": {"sharding": {"precision": "bfloat16"}},
    "replicated": {"sharding": {"num_shards": 1, "num_replicas": 2}},
    "tensor": {"sharding": {"num_shards": 1, "num_tensor_shards": 2}},
}


def make_folder(folder: Path) -> None:
    """A model whose heads can be shared out between two ranks."""
    tiny(folder / "model", shape=TinyShape(hidden_size=32, num_heads=2, num_key_value_heads=2, intermediate_size=64, spread=0.2))


def make(folder: Path, **language: Any) -> LanguagePolicy:
    torch.manual_seed(0)
    policy = build_language_policy(LanguageConfig(str(folder / "model"), value_head="linear", **language))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # LoRA and value head begin at zero
        for name, parameter in policy.named_parameters():
            if ".lora_" in name or name.startswith("value_head"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def losses(policy: LanguagePolicy, rank: int, num_ranks: int) -> list[Callable[[], Tensor]]:
    """One per micro-batch: the sum over tokens of a made-up advantage times the log-probability, by the tokens of the whole step."""
    sequences = random_sequences(3, SEQUENCES)
    tokens = float(sum(answer for _, answer in SEQUENCES))

    def of(chosen: list[int]) -> Tensor:
        if not chosen:  # a rank without rows: gathers along, and adds nothing
            return 0.0 * sum_of(policy, [sequences[0]], [0.0])
        return sum_of(policy, [sequences[i] for i in chosen], [(-1.0) ** i * (1 + i) for i in chosen]) / tokens

    return [lambda own=micro[rank::num_ranks]: of(own) for micro in MICRO_BATCHES]  # type: ignore[misc]


def sum_of(policy: LanguagePolicy, sequences: list[Any], advantages: list[float]) -> Tensor:
    found = policy.evaluate(sequences)
    assert found.value is not None
    weights = torch.tensor(advantages)[:, None]
    return -(weights * found.log_prob).sum() + 0.5 * ((found.value - weights) ** 2 * found.mask).sum()


def train(policy: nn.Module, rank: int, num_ranks: int, steps: int = 3) -> tuple[list[float], torch.optim.Optimizer]:
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=1e-5, weight_decay=0.01)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        fsdp.accumulate(policy, losses(policy, rank, num_ranks))  # type: ignore[arg-type]
        norms.append(fsdp.clip_gradients(trained, MAX_NORM))
        optimizer.step()
    return norms, optimizer


def main(rank: int, num_ranks: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    join(store, rank, num_ranks, torch.device("cpu"), 120.0)
    sent = count_reductions()
    results: dict[str, Tensor] = {}
    for case, options in CASES.items():
        if case == "tensor" and num_ranks != 2:
            continue
        sharding = ShardingConfig(**{"num_shards": num_ranks, **options["sharding"]})
        mesh = fsdp.make_mesh(sharding, "cpu")
        policy = fsdp.shard(make(folder, **options.get("language", {})), mesh, sharding)
        before = len(sent)
        place = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")
        norms, optimizer = train(policy, place, mesh["replicate"].size() * mesh["shard"].size())
        results[f"{case}/norms"] = torch.tensor(norms, dtype=torch.float64)
        results[f"{case}/reductions"] = torch.tensor([len(sent) - before, len(fsdp.sharded_parts(policy))])
        results |= {f"{case}/{name}": tensor.clone() for name, tensor in fsdp.gather_named(policy)}
        if case in ("float32", "tensor"):
            check_checkpoints(case, policy, optimizer, folder, results)
    if rank == num_ranks - 1:
        save_file({name: tensor.contiguous().clone() for name, tensor in results.items()}, folder / f"results_{num_ranks}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def check_checkpoints(case: str, policy: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, results: dict[str, Tensor]) -> None:
    """Write what was trained, in the background while it is trained on; take up what one process wrote."""
    saving = save_sharded(folder / f"{case}_ranks", training_tensors(policy, optimizer), metadata={"step": 3}, asynchronous=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    saving.wait(60.0)
    prepare_optimizer(policy, optimizer)
    load_sharded(folder / "one_process", training_tensors(policy, optimizer))
    loaded = {name: fsdp.whole(tensor).clone() for name, tensor in training_tensors(policy, optimizer).items()}
    results |= {f"{case} loaded/{name}": tensor for name, tensor in loaded.items()}


def count_reductions() -> list[int]:
    """Grows whenever this process exchanges the gradients of one block."""
    seen: list[int] = []
    original = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    _fsdp_param_group.foreach_reduce = counted
    return seen


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
