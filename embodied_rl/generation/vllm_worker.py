"""Code inside vLLM's worker: loads weights in place, and reports both log-probabilities of every token.

vLLM imports this module before it loads the model (``worker_extension_cls``). On CPUs vLLM would pack linear layers for fast products, and
packed layers cannot be reloaded, so this module switches packing off. A mixture's experts are packed after each load, and kept as loaded.
Importing it changes vLLM for the whole process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
import vllm.v1.worker.gpu_model_runner
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from embodied_rl.generation.vllm_tokens import OWN_COLUMN, SAMPLING_COLUMN

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False

if current_platform.is_cpu():
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    _pack = CPUUnquantizedExperts.process_weights_after_loading

    def _keep_and_pack(self: Any, layer: Any) -> None:
        layer.embodied_loaded, layer.embodied_pack = (layer.w13_weight, layer.w2_weight), functools.partial(_pack, self, layer)
        _pack(self, layer)

    setattr(CPUUnquantizedExperts, "process_weights_after_loading", _keep_and_pack)  # noqa: B010  # as `Sampler.forward` below

_forward = Sampler.forward
_unmasked: list[Tensor] = []
"""Logits of the current step, if some of its answers have a structure."""


def _mask_and_keep(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Tensor) -> None:
    _unmasked[:] = [logits.clone()]
    apply_grammar_bitmask(scheduler_output, grammar_output, input_batch, logits)


setattr(vllm.v1.worker.gpu_model_runner, "apply_grammar_bitmask", _mask_and_keep)  # noqa: B010  # as `Sampler.forward` below


def _columns(own: Tensor, unmasked: Tensor, log_probs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The sampled token's log-probability before any structure, under the model's own distribution and under the sampling distribution, and
    those of the likeliest tokens. vLLM's own function sorts the vocabulary and compiles a rank count, half a minute on a CPU, for ranks
    that are never read.
    """
    drawn, top = token_ids[:, None].long(), unmasked.topk(num_logprobs - 2)
    named = [torch.full_like(drawn.int(), column) for column in (OWN_COLUMN, SAMPLING_COLUMN)]
    names = torch.cat([drawn.int(), *named, top.indices.int()], dim=1)
    values = torch.cat([*(part.gather(-1, drawn) for part in (unmasked, own, log_probs)), top.values], dim=1)
    return LogprobsTensors(names, values, torch.zeros_like(token_ids))


def _forward_with_both(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """Sampler output with two more log-probability columns: under the model's own and under the sampling distribution."""
    unmasked = _unmasked.pop() if _unmasked else logits
    if (excluded := getattr(self, "embodied_excluded", None)) is not None:
        logits[:, excluded] = unmasked[:, excluded] = float("-inf")
    if not sampling_metadata.max_num_logprobs or args or kwargs.get("logprobs_mode_override") is not None:
        return _forward(self, logits, sampling_metadata, *args, **kwargs)
    # Taken first, because sampling overwrites the logits.
    own = logits.float().log_softmax(dim=-1)
    likely = own if unmasked is logits else unmasked.float().log_softmax(dim=-1)
    inner = self.topk_topp_sampler
    modes = self.logprobs_mode, inner.logprobs_mode
    self.logprobs_mode = inner.logprobs_mode = "processed_logprobs"
    self.gather_logprobs = functools.partial(_columns, own, likely)
    try:
        return _forward(self, logits, sampling_metadata, **kwargs)
    finally:
        self.logprobs_mode, inner.logprobs_mode = modes
        del self.gather_logprobs


setattr(Sampler, "forward", _forward_with_both)  # noqa: B010  # an assignment is an error to type checkers that see vLLM


class WorkerExtension:
    """Mixin of vLLM's worker; called through ``collective_rpc``."""

    model_runner: Any

    def embodied_load_tensors(self, tensors: Iterable[tuple[str, Any]]) -> int:
        """Write tensors over the model's; return the number of model parameters that they named.

        It uses the model's `load_weights`, not vLLM's ``reload_weights``, which leaves tied embeddings wrong.
        """
        model = self.model_runner.model
        packed = [part for part in model.modules() if hasattr(part, "embodied_pack")]
        for part in packed:
            part.w13_weight, part.w2_weight = part.embodied_loaded
        count = len(model.load_weights(iter(tensors)))
        for part in packed:
            part.embodied_pack()
        return count

    def embodied_cache_bytes(self) -> int:
        """Size of this worker's keys and values; layers may share a tensor's memory."""
        caches = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self.model_runner.kv_caches}
        return sum(caches.values())

    def embodied_exclude_token(self, token_id: int) -> None:
        """Never sample this token again; see `VisionInputs.exclude`."""
        self.model_runner.sampler.embodied_excluded = token_id
