"""Weights of language policies: LoRA, names and merged tensors for generators, adapters and folders on disk."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError, from_extra
from embodied_rl.files import replace_folder, reset_mode
from embodied_rl.policies.base import TrainedModule
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.model_folder import first_line, save_state, weight_files
from embodied_rl.policies.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
VALUE_HEAD = "value_head/value_head.safetensors"
"""In a folder of its own, because vLLM loads every safetensors file beside the model's; until 2026-11-27 it lay there."""
_ADAPTER = "default"
"""peft's name of the only adapter."""


def with_lora(model: nn.Module, config: LanguageConfig) -> nn.Module:
    """Return the model with a stored or new adapter, or unchanged. With an adapter, all other weights are frozen.

    Raises:
        UserError: the adapter's folder is incomplete or another model's; no layer has one of the target names.
        MissingExtraError: peft is not installed.
    """
    if config.adapter is None and config.lora_rank == 0:
        return model
    with from_extra("LoRA", "language"):
        import peft
    if config.adapter is not None:
        found = _read_adapter(peft, model, Path(config.adapter))
    else:
        targets = list(config.lora_targets)
        settings = peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft divides by it; any number serves
            lora_dropout=0.0,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            task_type="CAUSAL_LM",
        )
        try:
            found = peft.get_peft_model(model, settings)
        except ValueError as error:
            linear = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
            raise UserError(
                f"policy.lora_targets={targets} fits no layer of this model. Its linear layers: {', '.join(linear)}."
            ) from error
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return found


def _read_adapter(peft: ModuleType, model: nn.Module, folder: Path) -> nn.Module:
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"'{folder}' has no adapter_config.json, so it is not a peft adapter.")
    files = weight_files(folder, "adapter_model")
    try:
        found = peft.PeftModel.from_pretrained(model, str(folder), adapter_name=_ADAPTER, is_trainable=True, local_files_only=True)
        stored = {name for file in files for name in load_file(file)}
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise UserError(f"The adapter in '{folder}' does not fit this model: {first_line(error)}") from error
    # peft only warns of them, and trains a new adapter in place of what is missing.
    wanted = set(peft.get_peft_model_state_dict(found, adapter_name=_ADAPTER, save_embedding_layers=False))
    if missing := sorted(wanted - stored) or sorted(name for name in stored - wanted if ".lora_" in name):
        fault = "lacks" if missing[0] in wanted else "has too much:"
        raise UserError(f"The adapter in '{folder}' does not fit this model: it {fault} {len(missing)} tensors, '{missing[0]}' first.")
    return found


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model, without its peft wrapper."""
    return cast("PreTrainedModel", cast("PeftModel", model).get_base_model() if hasattr(model, "peft_config") else model)


@torch.no_grad()
def load_named_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Copy tensors into a plain model in place, by name; return how many. A tied head follows its embedding.
    Raises UserError: a name or shape is not the model's; earlier tensors are already loaded."""
    own = model.state_dict()
    count = 0
    for name, tensor in tensors:
        if name not in own:
            raise UserError(f"The model that generates has no weight '{name}': the trained model is another one.")
        if own[name].shape != tensor.shape:
            raise UserError(f"Weight '{name}' is {list(tensor.shape)}, but the model that generates has {list(own[name].shape)}.")
        own[name].copy_(tensor)
        count += 1
    return count


def as_in_files(config: PretrainedConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a mixture of experts as transformers' files have them, under other names or expert by expert; others as they are. What
    differs only in that experts are joined stays as it is, too: vLLM knows it, and thousands of tensors would take long."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    found = get_checkpoint_conversion_mapping(config.model_type) or []
    patterns = [pattern for conversion in found for pattern in conversion.source_patterns]
    if not any(isinstance(conversion, WeightConverter) for conversion in found) or all(one.endswith("_proj.weight") for one in patterns):
        yield from tensors
        return
    model: Any = SimpleNamespace(config=config, _weight_conversions=found)  # what it reads of one
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()


class LanguageWeights(TrainedModule):
    """A causal language model with its tokenizer, as weights: their names, merged copies, and folders on disk."""

    has_description = True
    model: PreTrainedModel
    """Or a peft model, which forwards missing attributes."""
    config: LanguageConfig
    tokenizer: ChatTokenizer
    vision: VisionInputs | None
    value_head: nn.Module | None

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model, without its peft wrapper."""
        return base_of(self.model)

    @property
    def has_lora(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def adapted(self) -> PeftModel:
        """The model with its adapter."""
        assert self.has_lora, "only with an adapter"
        return cast("PeftModel", self.model)

    @property
    def base_folder(self) -> Path | None:
        """Folder of LoRA's base model; None without LoRA."""
        return Path(self.config.folder) if self.has_lora else None

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the plain model's state, tensor) with LoRA merged in, one at a time; tied tensors once."""
        merged = {f"{name}.weight": part for name, part in self.base.named_modules() if hasattr(part, "get_delta_weight") and part.lora_A}
        given: set[int] = set()
        for name, tensor in self.base.state_dict(keep_vars=True).items():
            if ".lora_" in name:
                continue
            # An embedding that is also the output layer is one tensor under two names; the embedding comes first.
            if tensor.numel() and tensor.data_ptr() in given:
                continue
            given.add(tensor.data_ptr())
            plain = name.replace(".base_layer.", ".")
            value = tensor.detach()
            if plain in merged:
                value = value + merged[plain].get_delta_weight(_ADAPTER).to(value.dtype)
            yield plain, value

    def generation_model(self) -> PreTrainedModel:
        """Copy of the current weights as a plain transformers model with LoRA merged in, from which a torch backend samples."""
        copied = self._plain_copy()
        nn.Module.to(copied, self.base.device)  # transformers narrows the signature
        return copied

    def _plain_copy(self) -> PreTrainedModel:
        """`generation_model` on the host."""
        base = self.base
        # Copied too: a generator that chooses another attention would otherwise change the trained model's.
        config = copy.deepcopy(base.config)
        copied = type(base)._from_config(config, attn_implementation=config._attn_implementation, dtype=base.dtype)
        load_named_weights(copied, self.named_weights())
        return copied.eval().requires_grad_(False)

    def save_model(self, folder: str | Path) -> Path:
        """Write an ordinary Hugging Face folder with LoRA merged in, the tokenizer, and the value head beside them; it replaces any old
        one as a whole."""

        def write(beside: Path) -> None:
            self._plain_copy().save_pretrained(beside)
            self.tokenizer.save(beside)
            for name in ("preprocessor_config.json", "processor_config.json"):
                if (Path(self.config.folder) / name).is_file():
                    shutil.copyfile(Path(self.config.folder) / name, beside / name)

        return self._save(Path(folder), write)

    def save_adapter(self, folder: str | Path) -> Path:
        """Write the LoRA adapter in peft's format, and the value head. Raises UserError if there is no LoRA."""
        if not self.has_lora:
            raise UserError("No LoRA adapter to save (policy.lora_rank=0): use save_model.")
        return self._save(Path(folder), lambda beside: self.adapted.save_pretrained(str(beside), safe_serialization=True))

    def _save(self, folder: Path, write: Callable[[Path], None]) -> Path:
        beside = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"Cannot write '{folder}': {error.strerror or error}. Choose another folder.") from error
        write(beside)
        if self.value_head is not None:
            (beside / VALUE_HEAD).parent.mkdir()
            save_state(self.value_head.state_dict(), beside / VALUE_HEAD)
        reset_mode(beside)
        return replace_folder(beside, folder)

    def save_config(self, folder: str | Path) -> None:
        """Write config.json and generation_config.json, with the class and number format of the current weights."""
        config = copy.deepcopy(self.base.config)
        config.architectures, config.dtype = [type(self.base).__name__], self.base.dtype
        config.save_pretrained(str(folder))
        if self.base.generation_config is not None:
            self.base.generation_config.save_pretrained(str(folder))

    def save_description(self, folder: str | Path) -> None:
        """Write configuration, tokenizer and image processor without weights, for `build_language_policy(…, weights=False)`.

        With a ``base_folder``, it writes the adapter's configuration, which names that folder, instead of the model's: transformers and
        peft take a folder with both for a whole model.
        """
        if self.has_lora:
            config = copy.deepcopy(self.adapted.peft_config[_ADAPTER])
            config.base_model_name_or_path, config.inference_mode = str(Path(self.config.folder).resolve()), True
            config.save_pretrained(str(folder))
        else:
            self.save_config(folder)
        self.tokenizer.save(folder)
        if self.vision is not None:
            self.vision.save(folder)

    def exported_names(self) -> dict[str, tuple[str, str]]:
        """Name of each tensor for transformers, peft and `build_language_policy`; see `TrainedModule`."""
        prefix = "model." if self.base is self.model else "model.base_model.model."
        tensors = self.base.state_dict()
        stored = _names_on_disk(self.base, {name.replace(".base_layer.", "."): tensors[name] for name in tensors if ".lora_" not in name})
        first: dict[int, str] = {}
        exported: dict[str, tuple[str, str]] = {}
        for name, tensor in tensors.items():
            if ".lora_" in name:
                exported[prefix + name] = (ADAPTER, f"base_model.model.{name}".replace(f".{_ADAPTER}.", "."))
                continue
            # A tied pair stores only its first, the embedding; transformers and vLLM restore the head from it.
            own = first.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
            exported[prefix + name] = (MODEL, stored[own.replace(".base_layer.", ".")])
        return exported | {
            f"value_head.{name}": (VALUE_HEAD, name) for name in ([] if self.value_head is None else self.value_head.state_dict())
        }

    def load_value_head(self, folder: Path) -> bool:
        """Fill the value head from a folder; False if the folder has none. Raises UserError if it is damaged or another model's."""
        path = next((path for path in (folder / VALUE_HEAD, folder / Path(VALUE_HEAD).name) if path.is_file()), None)
        if path is None or self.value_head is None:
            return False
        try:
            self.value_head.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"The value head in '{path}' does not fit this policy: {first_line(error)}") from error
        return True


def _names_on_disk(base: PreTrainedModel, plain: dict[str, Tensor]) -> dict[str, str]:
    """{name in the model: transformers' name in files}. If transformers would split the tensors differently (some mixtures of experts), the
    model's own names, which transformers also reads."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in plain.items()}
    written = {id(tensor): name for name, tensor in revert_weight_conversion(base, shapes).items()}
    found = {name: written.get(id(tensor)) for name, tensor in shapes.items()}
    return {name: new or name for name, new in found.items()} if all(found.values()) else {name: name for name in plain}
