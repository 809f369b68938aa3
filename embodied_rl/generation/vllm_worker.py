"""What runs inside vLLM's worker: weights taken over in place, and both log-probabilities of every token.

vLLM imports this before it loads the model (``worker_extension_cls``). On CPUs its linear layers would be packed for fast products and
could not be loaded again, so packing is switched off here. Importing this changes vLLM for the whole process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from safetensors import safe_open
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from embodied_rl.generation.vllm_tokens import SAMPLING_COLUMN

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False

_forward = Sampler.forward


def _of_sampled(log_probs: Any, num_logprobs: int, token_ids: Any) -> Any:
    """Both columns hold the sampled token's log-probability. vLLM's own sorts the vocabulary and compiles a count of ranks, half a minute
    on a CPU, for ranks that are never read.
    """
    found = log_probs.gather(-1, token_ids[:, None])
    return LogprobsTensors(token_ids[:, None].int().repeat(1, 2), found.repeat(1, 2), torch.zeros_like(token_ids))


def _forward_with_both(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """The sampler's output with two columns of log-probabilities: the model's own, and that of the distribution drawn from."""
    if (excluded := getattr(self, "embodied_excluded", None)) is not None:
        logits[:, excluded] = float("-inf")
    if sampling_metadata.max_num_logprobs != 1 or args or kwargs.get("logprobs_mode_override") is not None:
        return _forward(self, logits, sampling_metadata, *args, **kwargs)
    # Taken before, because sampling works in the logits' memory.
    own = logits.float().log_softmax(dim=-1)
    inner = self.topk_topp_sampler
    modes = self.logprobs_mode, inner.logprobs_mode
    self.logprobs_mode = inner.logprobs_mode = "processed_logprobs"
    self.gather_logprobs = _of_sampled
    try:
        output = _forward(self, logits, sampling_metadata, **kwargs)
    finally:
        self.logprobs_mode, inner.logprobs_mode = modes
        del self.gather_logprobs
    found: Any = output.logprobs_tensors
    found.logprobs[:, 0] = own.gather(-1, output.sampled_token_ids[:, :1].long()).squeeze(-1)
    found.logprob_token_ids[:, 1] = SAMPLING_COLUMN
    return output


setattr(Sampler, "forward", _forward_with_both)  # noqa: B010  # an assignment is an error to type checkers that see vLLM


class WorkerExtension:
    """Mixed into vLLM's worker; called through ``collective_rpc``."""

    model_runner: Any

    def embodied_load_tensors(self, tensors: Iterable[tuple[str, Any]]) -> int:
        """Write tensors over the model's; returns how many of the model's own parameters were named by them.

        `load_weights` of the model is used, not vLLM's ``reload_weights``, which leaves tied embeddings wrong.
        """
        return len(self.model_runner.model.load_weights(iter(tensors)))

    def embodied_cache_bytes(self) -> int:
        """Of this worker's keys and values; layers may share a tensor's memory."""
        caches = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self.model_runner.kv_caches}
        return sum(caches.values())

    def embodied_exclude_token(self, token_id: int) -> None:
        """Sample it never more; see `VisionInputs.exclude`."""
        self.model_runner.sampler.embodied_excluded = token_id

    def embodied_load_file(self, path: str) -> int:
        """The same from a safetensors file, which several workers may read at once."""
        with safe_open(path, framework="pt") as file:
            return self.embodied_load_tensors((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  # no mapping
