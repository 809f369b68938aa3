"""Vision-language models behind vLLM: arguments of the engine, how pictures reach it, and what is checked.

vLLM prepares pictures with the model's own transformers processor. Its own implementations of vision-language models import torchvision;
its transformers implementation does not, and is what serves them here: log-probabilities are the trainer's.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.generation.tokens import GenerationRequest
from embodied_rl.policies.model_folder import check_tokenizer, import_transformers, is_vision_language
from embodied_rl.policies.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WITHOUT_TORCHVISION = ("llava",)
"""Model types whose processor handles no videos, for which transformers needs torchvision."""


class VLLMVision:
    """Of one model folder."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        """Raises UserError where vLLM could not prepare this model's pictures on this machine."""
        self.inputs, self._config = VisionInputs.read(folder, config), config
        if config.model_type not in _WITHOUT_TORCHVISION and importlib.util.find_spec("torchvision") is None:
            raise UserError(
                f"vLLM cannot serve '{folder}': the processor of vision-language models of type '{config.model_type}' needs torchvision, "
                f"which is not installed here. Without it vLLM serves {', '.join(_WITHOUT_TORCHVISION)}; take the torch backend "
                "(generation=tokens_torch), which serves all that train."
            )
        self._folder = folder

    @staticmethod
    def of(folder: Path) -> VLLMVision | None:
        """Of a model folder; None: it reads only text. Raises UserError as the constructor."""
        config = import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not is_vision_language(config):
            return None
        check_tokenizer(folder)  # vLLM's processor of pictures writes their placeholders with it
        return VLLMVision(folder, config)

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        arguments: dict[str, Any] = {
            "model_impl": "transformers",
            # The processor needs the tokenizer.
            "skip_tokenizer_init": False,
            # Pictures of the largest size would be tried out when the engine starts.
            "skip_mm_profiling": True,
            # Prepared pictures are not worth their memory: an episode's next prompt is answered by the cache of prefixes.
            "mm_processor_cache_gb": 0,
        }
        if self._config.model_type == "llava":
            arguments["mm_processor_kwargs"] = self._llava_processor()
        return arguments

    def _llava_processor(self) -> dict[str, Any]:
        """What a folder's processor_config.json says where there is one; the model's configuration says the same."""
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        return {
            "patch_size": self._config.vision_config.patch_size,
            "vision_feature_select_strategy": self._config.vision_feature_select_strategy,
            # CLIP's own token, which the strategy "default" leaves out.
            "num_additional_image_tokens": 1,
            "image_token": tokenizer.convert_ids_to_tokens(self.inputs.image_token_id),
        }

    def check(self, request: GenerationRequest) -> None:
        """Raises UserError when the image tokens of the prompt are not those of its images."""
        self.inputs.check(request.prompt_ids, request.images)

    def prompt(self, request: GenerationRequest) -> dict[str, Any]:
        """vLLM's prompt: one placeholder for each picture, which its processor makes as many as `check_read` wants to see."""
        from PIL import Image

        return {
            "prompt_token_ids": self._collapsed(request),
            "multi_modal_data": {"image": [Image.fromarray(image) for image in request.images]},
        }

    def _collapsed(self, request: GenerationRequest) -> list[int]:
        lengths = iter(self.inputs.num_tokens(request.images))
        ids, found, place = request.prompt_ids, [], 0
        while place < len(ids):
            found.append(int(ids[place]))
            place += next(lengths) if ids[place] == self.inputs.image_token_id else 1
        return found

    def check_read(self, request: GenerationRequest, read: list[int] | None) -> None:
        """Raises UserError where vLLM has read another prompt than the trainer will: its processor counts otherwise."""
        if read is not None and not np.array_equal(np.asarray(read), request.prompt_ids):
            raise UserError(
                f"vLLM reads the prompt of request {request.request_id} as {len(read)} tokens, and training as {len(request.prompt_ids)}: "
                f"the processor files in '{self._folder}' do not fit its config.json. Take the torch backend (generation=tokens_torch)."
            )


def keep_transformers_classes() -> None:
    """Call before an engine in this process loads a model through transformers' code.

    vLLM would decorate transformers' own classes for compilation, and the policy that is trained in this process is made of the same.
    """
    import vllm.model_executor.models.transformers.base as base

    setattr(base, "support_torch_compile", lambda **_: lambda cls: cls)  # noqa: B010  # an assignment is an error to type checkers
