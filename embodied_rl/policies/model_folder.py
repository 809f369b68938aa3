"""Hugging Face model folders: checks the files first, so that each missing one gives a one-line error; reads only safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied_rl.errors import UserError, from_extra
from embodied_rl.files import write_atomic_with
from embodied_rl.reading import parse_json, read_regular, require_model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_MESSAGE = 300
"""Number of characters shown of a library's message."""
_INDEX = "model.safetensors.index.json"
_SHOWN = 4


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Check that a folder contains a whole model, and return its parsed config.json.
    Raises UserError: the folder, its config.json, or safetensors are missing or damaged, or there are only pickles."""
    require_model_folder(folder)
    config = read_config(folder)
    weight_files(folder, "model")
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises UserError if it is missing, damaged, or names no model."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"'{folder}' has no config.json, so it is not a Hugging Face model folder.")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"'{path}' names no model_type, so transformers cannot identify the model.")
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError if the file is missing or contains anything else."""
    try:
        data = parse_json(read_regular(path))
    except OSError as error:
        raise UserError(f"Cannot read '{path}': {error.strerror or error}. A checkpoint folder needs it.") from error
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise UserError(f"'{path}' must hold a JSON object, got {type(data).__name__}.")
    return data


def weight_files(folder: Path, prefix: str) -> list[Path]:
    """The files ``{prefix}*.safetensors``, or those that an index names. Raises UserError if there are none, or a shard is missing."""
    index = folder / _INDEX
    if prefix == "model" and index.is_file():
        try:
            shards = set(parse_json(read_regular(index))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"'{index}' is damaged: {type(error).__name__}: {error}.") from error
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise UserError(f"'{folder}' lacks {len(missing)} of {len(shards)} shards that its index names, '{missing[0]}' first.")
        return [folder / shard for shard in sorted(shards)]
    if files := sorted(folder.glob(f"{prefix}*.safetensors")):
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"'{folder}' holds its weights as '{pickles[0]}', a pickle, which can run code when it is read, so it is not loaded. If you "
            "trust it, convert it: load it with transformers and call save_pretrained, which writes safetensors."
        )
    raise UserError(f"'{folder}' has no {prefix}*.safetensors. Is the download complete?")


def check_tokenizer(folder: Path) -> None:
    """Raise UserError if there is no tokenizer file. Cheap: call it before weights are loaded."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"Model folder '{folder}' has no tokenizer (none of {', '.join(_TOKENIZERS)}). Copy its files from the model that these "
            f"weights were trained from: hf download OWNER/MODEL --include 'tokenizer*' 'vocab*' 'merges*' --local-dir {folder}"
        )


def load_model(
    folder: str | Path,
    *,
    dtype: str = "auto",
    attention: str = "sdpa",
    device: str | torch.device = "cpu",
    weights: bool = True,
    kind: str | None = None,
) -> nn.Module:
    """Load the causal language model or vision-language model of a folder, in evaluation mode with every dropout at 0.

    With dropout, the trained policy would differ from the one that sampled.

    Args:
        dtype: "auto" (as stored) or a torch dtype's name.
        attention: transformers' ``attn_implementation``.
        weights: False makes the model of config.json with random weights; the folder then needs none.
        kind: transformers' class of the model; None: by its configuration.

    Raises MissingExtraError; UserError: see `check_model_folder`; also an unknown kind of model, or missing weights.
    """
    folder = Path(folder)
    model_type = (check_model_folder(folder) if weights else read_config(folder))["model_type"]
    failure = f"Cannot load the {model_type} model in '{folder}'"
    transformers = import_transformers()
    report: dict[str, Iterable[Any]] = {}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        auto = _auto_class(transformers, config) if kind is None else getattr(transformers, kind)
        if attention == "sdpa" and caps_attention(config):
            raise UserError(
                f"{failure}: it caps its attention (attn_logit_softcapping), and sdpa would leave that out without a word. "
                "Set policy.attention=eager."
            )
        _without_dropout(config)
        if weights:
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype if dtype == "auto" else torch_dtype(dtype),
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        else:
            chosen = config.dtype or torch.float32 if dtype == "auto" else torch_dtype(dtype)
            with torch.random.fork_rng(devices=[]):
                model = auto.from_config(config, dtype=chosen, attn_implementation=attention, trust_remote_code=False)
            if (folder / "generation_config.json").is_file():
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # for a wrong config.json transformers raises anything: its own validation's errors, ZeroDivisionError, …
        raise UserError(f"{failure}: {first_line(error)}") from error
    _check_report(folder, report)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ready: nn.Module = model.to(device).eval()
    return ready


def torch_dtype(name: str) -> torch.dtype:
    """torch dtype of a name in configurations and files. Raises UserError for an unknown name."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise UserError(f"'{name}' is not a dtype of torch: use float32 or bfloat16.")
    return found


def value_of(config: PretrainedConfig, name: str) -> Any:
    """Value that only some model families have, under this or another name (properties, `attribute_map`); None if it is missing."""
    return getattr(config, name, None)


def is_vision_language(config: PretrainedConfig) -> bool:
    """Whether a transformers configuration has a vision tower beside its language model."""
    return value_of(config, "vision_config") is not None


def caps_attention(config: PretrainedConfig) -> bool:
    """Whether scores are capped before the softmax (Gemma 2): transformers' sdpa leaves that out, and computes another model."""
    return value_of(text_config(config), "attn_logit_softcapping") is not None


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The language model's part of a transformers configuration."""
    return config.get_text_config(decoder=True)


def context_limit(config: PretrainedConfig) -> int | None:
    """Largest number of tokens, prompt and answer together, that a model's positions cover; None if its configuration names no limit."""
    text = text_config(config)
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"):
        value = value_of(text, name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def max_context(config: PretrainedConfig) -> int:
    """`context_limit`. Raises UserError if there is none."""
    limit = context_limit(config)
    if limit is None:
        raise UserError(f"The configuration of model type '{config.model_type}' does not say how long its context is; give context=.")
    return limit


def import_transformers() -> ModuleType:
    """Import transformers. Raises MissingExtraError if it is not installed."""
    with from_extra("A language policy", "language"):
        import transformers
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        # Keeps one-shard progress bars and sharding notes out of this program's output.
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    return transformers


def first_line(error: BaseException) -> str:
    """First line of a library's error, and the second if the first ends with a colon, to append to another message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    return text if len(text) <= _MESSAGE else text[:_MESSAGE] + "…"


def _auto_class(transformers: ModuleType, config: PretrainedConfig) -> type[_BaseAutoModelClass]:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        is_vision_auto = auto is transformers.AutoModelForImageTextToText
        if is_vision_auto == is_vision_language(config) and type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"Model type '{config.model_type}' is neither a causal language model nor a vision-language model of this transformers "
        f"{transformers.__version__}. Models with their own code are not supported."
    )


def _without_dropout(config: PretrainedConfig) -> None:
    for part in {id(part): part for part in (config, text_config(config))}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(part, name, 0.0)


def _check_report(folder: Path, report: dict[str, Iterable[Any]]) -> None:
    missing, wrong = sorted(map(str, report.get("missing_keys", ()))), sorted(map(str, report.get("mismatched_keys", ())))
    if missing or wrong:
        name = (missing or wrong)[0]
        fault = "lacks" if missing else "holds in another shape"
        raise UserError(
            f"'{folder}' {fault} {len(missing or wrong)} tensors that its config.json asks for, '{name}' first. transformers would fill "
            "them with random values. Is the download complete?"
        )


# ---- safetensors files ------------------------------------------------------------------------------------------------


def load_state(module: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """`load_state_dict`, strict, with a one-line error for mismatches. Raises UserError."""
    wanted = module.state_dict()
    check_names(source, wanted, state)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise UserError(f"'{source}' lacks {names_of(missing)}.")
    module.load_state_dict(dict(state), assign=True)


def read_safetensors(path: Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Read all tensors of a file. Raises UserError if it is missing, damaged, or a pickle."""
    if path.suffix in (".pt", ".pth", ".bin"):
        raise UserError(f"'{path}' is a pickle, which can run code when it is read. Convert it to safetensors (docs/openvla.md).")
    state = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                state[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot read '{path}': {error}. Is the file complete?") from error
    return state


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file, marked as PyTorch's so that transformers accepts it."""
    whole = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    write_atomic_with(path, lambda temporary: save_file(whole, temporary, metadata={"format": "pt"}))


def check_names(place: object, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise UserError for a tensor that a model does not have, or has in another shape."""
    unknown = [name for name in state if name not in wanted]
    if unknown:
        raise UserError(f"'{place}' holds {names_of(unknown)}, which this model does not have.")
    wrong = [name for name, tensor in state.items() if tensor.shape != wanted[name].shape]
    if wrong:
        name = wrong[0]
        raise UserError(f"'{place}': '{name}' is {list(state[name].shape)}, but this model has {list(wanted[name].shape)}.")


def names_of(names: list[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more
