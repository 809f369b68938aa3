"""`config.json` of an OpenVLA checkpoint, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from embodied_rl.bounds import Bounds, Layers, Size
from embodied_rl.config.building import build
from embodied_rl.errors import UserError, did_you_mean, from_extra, require_known
from embodied_rl.policies.model_folder import read_json

if TYPE_CHECKING:
    from transformers import LlamaConfig

ResizeStrategy = Literal["resize-naive", "resize-crop", "letterbox"]

VIT_KEY, OFT_KEY = "embodied_rl_vision", "embodied_rl_oft"
"""This package's entries in `config.json`: shapes of vision transformers that `VIT_SHAPES` does not name; OpenVLA-OFT's `OFTConfig`."""
Head = Literal["discrete", "l1"]
"""discrete: K·A independent categorical distributions over the action tokens, for RL. l1: regression, without probabilities."""
Variant = Literal["openvla-oft", "rlinf"]
"""openvla-oft: </s> follows the placeholders, as in the original's training. rlinf: no </s>, as in RLinf's checkpoints. A checkpoint of one
variant does not work with the other: every token sees </s>."""


@dataclass(frozen=True)
class ViTShape:
    """One vision transformer of the fused pair. Images are square, patches 14 × 14 pixels."""

    width: Size
    depth: Layers
    num_heads: Size
    mlp_width: Size
    num_registers: Annotated[int, Bounds(0, 1_000_000)] = 0
    """Number of register tokens; with any there is a class token too (DINOv2), otherwise neither (SigLIP)."""
    layer_scale: bool = False
    attention_pool: bool = False
    """Whether there is a pooling head; this model never runs it, but its weights are part of the checkpoint."""
    image_size: Size = 224
    patch_size: Size = 14

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


DINOV2_L = ViTShape(1024, 24, 16, 4096, num_registers=4, layer_scale=True)
SIGLIP_SO400M = ViTShape(1152, 27, 16, 4304, attention_pool=True)
VIT_SHAPES: dict[str, ViTShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": DINOV2_L,
    "vit_so400m_patch14_siglip_224": SIGLIP_SO400M,
}
"""{name in checkpoints: shape}"""


@dataclass(frozen=True)
class OFTConfig:
    """Training settings of a fine-tuned checkpoint, which its files do not contain."""

    chunk: int = 8
    """Steps of a chunk, K: 8 on LIBERO, 25 on ALOHA, 5 on Bridge."""
    action_dim: int = 7
    num_images: int = 1
    head: Head = "discrete"
    film: bool = False
    """Whether language scales and shifts the vision transformers' features."""
    proprio_dim: int | None = None
    """Size of the robot's state, if the model reads it: 8 on LIBERO, 14 on ALOHA."""
    variant: Variant = "openvla-oft"

    def __post_init__(self) -> None:
        sizes = {"chunk": self.chunk, "action_dim": self.action_dim, "num_images": self.num_images, "proprio_dim": self.proprio_dim}
        wrong = [f"{name}={size}" for name, size in sizes.items() if size is not None and size < 1]
        if wrong:
            raise UserError(f"OpenVLA-OFT: sizes must be at least 1, got {', '.join(wrong)}.")
        if self.film and self.variant == "rlinf":
            raise UserError("OpenVLA-OFT: film=true belongs to variant='openvla-oft'; RLinf's checkpoints have no FiLM.")

    @property
    def num_units(self) -> int:
        """Number of action units, L."""
        return self.chunk * self.action_dim

    @property
    def parts(self) -> str:
        """Names of the modules that OpenVLA lacks, for messages."""
        parts = {"the action head": self.head == "l1", "the robot state's projector": self.proprio_dim is not None, "FiLM": self.film}
        return " and ".join(name for name, present in parts.items() if present)


@dataclass(frozen=True)
class OpenVLAConfig:
    """A checkpoint's architecture, tokens and action statistics."""

    text: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig."""
    vision: tuple[ViTShape, ViTShape]
    """The DINOv2-like `featurizer` and the SigLIP-like `fused_featurizer`."""
    resize: ResizeStrategy = "resize-naive"
    num_action_bins: int = 256
    pad_to_multiple_of: int = 64
    """Number of rows by which the embedding exceeds the tokenizer's vocabulary."""
    pad_token_id: int = 32000
    norm_stats: Mapping[str, Any] = field(default_factory=dict)
    """{data set: {"action": {"q01": [A], "q99": [A], "mask": [A], …}, "proprio": {…}}}"""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The whole `config.json`, so that saving keeps unknown entries."""

    def __post_init__(self) -> None:
        require_known(self.resize, get_args(ResizeStrategy), f"image_resize_strategy='{self.resize}' is not known.")
        if self.vision[0].num_patches != self.vision[1].num_patches or self.vision[0].image_size != self.vision[1].image_size:
            raise UserError(f"Both vision transformers must see the same patches, got {self.vision[0]} and {self.vision[1]}.")

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the text tokenizer: the embedding's rows without padding."""
        return int(self.text["vocab_size"]) - self.pad_to_multiple_of

    @property
    def hidden_size(self) -> int:
        """Width of the language model, D."""
        return int(self.text["hidden_size"])

    @property
    def vision_width(self) -> int:
        """Width of the concatenated patch features."""
        return self.vision[0].width + self.vision[1].width

    @property
    def num_patches(self) -> int:
        """Number of patch tokens of one image."""
        return self.vision[0].num_patches

    @property
    def image_size(self) -> int:
        """Pixels of the square image that both transformers see."""
        return self.vision[0].image_size

    def noted_oft(self, directory: Path) -> OFTConfig | None:
        """The settings that `VisionLanguageModel.save_pretrained` wrote; None: there are none. Raises UserError if they are damaged."""
        return build(OFTConfig, self.raw[OFT_KEY], f"{directory.name}/config.json: {OFT_KEY}") if OFT_KEY in self.raw else None

    def llama(self) -> LlamaConfig:
        """The language model's configuration, with torch's fused attention. Raises MissingExtraError without transformers."""
        with from_extra("OpenVLA", "language"):
            from transformers import LlamaConfig
        config = LlamaConfig(**self.text)
        config._attn_implementation = "sdpa"
        return config

    def to_json(self) -> dict[str, Any]:
        """Content of `config.json`: the original entries with this model's changes."""
        raw = dict(self.raw) or _fresh_json(self)
        raw |= {"text_config": dict(self.text), "norm_stats": dict(self.norm_stats), "image_resize_strategy": self.resize}
        if any(name not in VIT_SHAPES for name in raw.get("timm_model_ids", ())):
            raw[VIT_KEY] = [asdict(shape) for shape in self.vision]
        return raw

    @staticmethod
    def openvla_7b() -> OpenVLAConfig:
        """Configuration of the published 7B model, without any data set's statistics."""
        text = {
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "pad_token_id": 32000,
            "tie_word_embeddings": False,
        }
        return OpenVLAConfig(text=text, vision=(DINOV2_L, SIGLIP_SO400M))

    @staticmethod
    def read(directory: Path, vision: tuple[ViTShape, ViTShape] | None = None) -> OpenVLAConfig:
        """Read `config.json` of a checkpoint.

        `vision` gives the shapes of transformers whose names are not in `VIT_SHAPES`. A `dataset_statistics.json` in the same folder, as in
        fine-tuned checkpoints, replaces the statistics of the same data sets.
        Raises UserError: the file is missing, is not JSON or not an OpenVLA's, or names an unknown vision transformer.
        """
        raw = read_json(directory / "config.json")
        if raw.get("model_type") != "openvla":
            raise UserError(f"'{directory}/config.json' has model_type={raw.get('model_type')!r}; an OpenVLA checkpoint has 'openvla'.")
        if not raw.get("use_fused_vision_backbone", True):
            raise UserError(f"'{directory}/config.json' has a single vision backbone; only the fused DINOv2 + SigLIP pair is supported.")
        statistics = directory / "dataset_statistics.json"
        try:
            norm_stats = dict(raw.get("norm_stats") or {}) | (read_json(statistics) if statistics.exists() else {})
            return OpenVLAConfig(
                text=dict(raw["text_config"]),
                vision=vision or _vision(raw, directory),
                resize=raw.get("image_resize_strategy", "resize-naive"),
                num_action_bins=int(raw.get("n_action_bins", 256)),
                pad_to_multiple_of=int(raw.get("pad_to_multiple_of", 64)),
                pad_token_id=int(raw.get("pad_token_id", 32000)),
                norm_stats=norm_stats,
                raw=raw,
            )
        except KeyError as error:
            raise UserError(f"'{directory}/config.json' has no entry {error}. Is it the config.json of an OpenVLA checkpoint?") from error
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"'{directory}/config.json' is damaged: {error}. Is it the config.json of an OpenVLA checkpoint?") from error


def shapes_of(given: Sequence[Mapping[str, Any]]) -> tuple[ViTShape, ViTShape] | None:
    """`policy.vision` as shapes; None if empty. Raises UserError if a shape lacks an entry or has a wrong one."""
    if not given:
        return None
    first, second = (build(ViTShape, shape, f"policy.vision[{index}]") for index, shape in enumerate(given))
    return first, second


def _vision(raw: Mapping[str, Any], directory: Path) -> tuple[ViTShape, ViTShape]:
    if VIT_KEY in raw:
        first, second = raw[VIT_KEY]
        return ViTShape(**first), ViTShape(**second)
    names = tuple(raw["timm_model_ids"])
    unknown = [name for name in names if name not in VIT_SHAPES]
    if unknown or len(names) != 2:
        problem = f"vision transformer '{unknown[0]}' is not known.{did_you_mean(unknown[0], VIT_SHAPES)}" if unknown else f"got {names}."
        shape = "{width: 1024, depth: 24, num_heads: 16, mlp_width: 4096, num_registers: 4, layer_scale: true}"
        give = f"Shapes of others are given by 'policy.vision=[{shape}, …]'."
        raise UserError(f"'{directory}/config.json': expected two vision transformers; {problem} {give}")
    return VIT_SHAPES[names[0]], VIT_SHAPES[names[1]]


def _fresh_json(config: OpenVLAConfig) -> dict[str, Any]:
    """`config.json` of a model that was not read from one, in the original loader's form."""
    names = {shape: name for name, shape in VIT_SHAPES.items()}
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "llm_max_length": 2048,
        "timm_model_ids": [names.get(shape, "custom") for shape in config.vision],
        "timm_override_act_layers": [None, None],
        "image_sizes": [shape.image_size for shape in config.vision],
        "use_fused_vision_backbone": True,
        "n_action_bins": config.num_action_bins,
        "pad_to_multiple_of": config.pad_to_multiple_of,
        "pad_token_id": config.pad_token_id,
    }
