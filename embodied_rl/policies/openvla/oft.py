"""OpenVLA-OFT (Kim et al. 2025): a whole chunk of actions from one pass with bidirectional attention.

The sequence is ``[BOS, patches of all images, (robot state), rest of the prompt, K·A zero embeddings, </s>]``. Placeholders carry only
their rotary position; the model reads the hidden state *before* a placeholder, as in a causal model.

Shape legend: B rows, I images of a row, N patch tokens of all images, P prompt tokens, K steps of a chunk, A action dimensions, L = K·A, V
action tokens of the vocabulary, D width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied_rl.errors import UserError
from embodied_rl.policies.openvla.checkpoint import load_state, read_safetensors, save_state
from embodied_rl.policies.openvla.config import OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.model import MAX_SHARD_BYTES, STOP_TOKEN, Embedded, VisionLanguageModel, attention_mask, join
from embodied_rl.policies.openvla.vision import MLP, L1ActionHead, Layers

Head = Literal["discrete", "l1"]
"""discrete: K·A independent categorical distributions over the action tokens, for RL. l1: regression, without probabilities."""
Variant = Literal["openvla-oft", "rlinf"]
"""openvla-oft: </s> follows the placeholders, as in the original's training. rlinf: no </s>, as in RLinf's checkpoints. A checkpoint of one
variant does not work with the other: every token sees </s>."""

OFT_KEY = "embodied_rl_oft"
"""This package's entry in `config.json`."""
PARTS = "oft_modules.safetensors"
"""File with action head, robot state projector and FiLM, which the original keeps in separate files."""
_FILM_PREFIX = "film_vision_backbone.vision_backbone."


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


class OpenVLAOFT(VisionLanguageModel):
    """OpenVLA with parallel decoding."""

    def __init__(self, config: OpenVLAConfig, oft: OFTConfig) -> None:
        super().__init__(config, film=oft.film)
        self.oft = oft
        width = config.hidden_size
        self.action_head = L1ActionHead(width, oft.action_dim) if oft.head == "l1" else None
        # The robot's own state as one token.
        self.proprio_projector = None if oft.proprio_dim is None else MLP(oft.proprio_dim, width, width)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        oft: OFTConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        vision: tuple[ViTShape, ViTShape] | None = None,
    ) -> OpenVLAOFT:
        """Read a checkpoint folder with merged weights and, if the model has additional modules, `oft_modules.safetensors`.

        Args:
            oft: training settings of the checkpoint; None: those that `save_pretrained` wrote into `config.json`.
            dtype, vision: see `OpenVLA.from_pretrained`.

        Raises UserError: a file is missing, or keys or shapes do not fit.
        """
        directory = Path(directory)
        config = OpenVLAConfig.read(directory, vision)
        if oft is None and OFT_KEY not in config.raw:
            raise UserError(
                f"'{directory}/config.json' does not describe the OpenVLA-OFT training: give its chunk, num_images, head, film, "
                "proprio_dim and variant (OFTConfig)."
            )
        try:
            oft = oft or OFTConfig(**config.raw[OFT_KEY])
        except TypeError as error:
            raise UserError(f"'{directory}/config.json': entry '{OFT_KEY}' is damaged: {error}.") from error
        with torch.device("meta"):
            model = cls(config, oft)
        extra = model.own_names()
        model.load(directory, dtype=dtype, device=device, optional=extra)
        if extra:
            path = directory / PARTS
            if not path.exists():
                raise UserError(f"'{path}' is missing: it holds {_described(model.oft)} (docs/openvla.md shows how to make it).")
            load_parts(model, read_safetensors(path, dtype=dtype, device=device), str(path))
        return model.eval()

    def save_pretrained(self, directory: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write OpenVLA's part in the original's form, the other parts into `oft_modules.safetensors`, the OFTConfig into config.json."""
        parts = parts_state(self)
        if parts:
            save_state(parts, Path(directory) / PARTS)
        self.save_main(Path(directory), max_shard_bytes=max_shard_bytes, skip=self.own_names(), extra={OFT_KEY: asdict(self.oft)})

    def own_names(self) -> set[str]:
        """Parameters that OpenVLA itself does not have."""
        return {name for name in self.state_dict() if part_of(name) is not None}

    def sequence(self, pixels: Tensor, input_ids: Tensor, mask: Tensor, *, padded: bool, proprio: Tensor | None = None) -> Embedded:
        """Embed the whole input of one decision.

        Padding may be anywhere: positions are counted without it and no token attends to it, so its location (at the end in the original,
        before the text in RLinf) changes no number.

        Args:
            pixels: [B, I, 6, S, S] normalised.
            input_ids: [B, P] ``[BOS, padding…, text, 29871]``.
            mask: [B, P] bool, False at padding.
            padded: whether `mask` has a False.
            proprio: [B, proprio_dim] scaled to [-1, 1], if the model reads it.
        """
        text = self.embed_tokens(input_ids)
        stop = self.embed_tokens(torch.full_like(input_ids[:, :1], STOP_TOKEN))
        patches = self.embed_images(pixels, _mean(text, mask, stop) if self.oft.film else None)
        if self.proprio_projector is not None:
            assert proprio is not None, "this model reads the robot's state"
            patches = torch.cat([patches, self.proprio_projector(proprio.to(self.dtype)).unsqueeze(1)], dim=1)
        placeholders = text.new_zeros(text.shape[0], self.oft.num_units, text.shape[2])
        prompt = join(text, patches, mask, padded=padded)
        return prompt.followed_by(torch.cat([placeholders, stop], dim=1) if self.oft.variant == "openvla-oft" else placeholders)

    def action_hidden(self, sequence: Embedded) -> Tensor:
        """[B, L, D] hidden states one position before each placeholder; the first is the prompt's last token, for the value head."""
        return self.hidden(sequence, causal=False)[:, -self._num_last :][:, : self.oft.num_units]

    def decide_hidden(self, sequence: Embedded) -> Tensor:
        """`action_hidden` for acting: through `Layers`, without gradients, with only the needed tokens in the last layer."""
        layers = Layers.of(self.language_model.model)
        cache = layers.allocate(sequence.embeds, sequence.places(0), keep=False)
        mask = attention_mask(sequence.mask, causal=False) if sequence.padded else None
        hidden = layers.read(sequence.embeds, cache, start=0, mask=mask, causal=False, last=self._num_last)
        return hidden[:, : self.oft.num_units]

    @property
    def _num_last(self) -> int:
        """Number of tokens from the one before the first placeholder to the end."""
        return self.oft.num_units + (2 if self.oft.variant == "openvla-oft" else 1)

    def regressed(self, hidden: Tensor) -> Tensor:
        """[B, L, D] → normalised actions [B, L] float32 of the regression head."""
        assert self.action_head is not None, "head='l1' has an action head"
        return self.action_head(hidden).flatten(1).float()


def _mean(text: Tensor, mask: Tensor, stop: Tensor) -> Tensor:
    """[B, D] mean embedding of all tokens that are neither actions nor padding, </s> included."""
    total = (text * mask.unsqueeze(-1).to(text.dtype)).sum(dim=1) + stop[:, 0]
    return total / (mask.sum(dim=1, keepdim=True) + 1).to(text.dtype)


# ---- checkpoints ------------------------------------------------------------------------------------------------------


def part_of(name: str) -> str | None:
    """Part that a parameter belongs to (``action_head.``, ``proprio_projector.`` or FiLM's prefix); None for OpenVLA's own."""
    if name.startswith(("action_head.", "proprio_projector.")):
        return name.split(".")[0] + "."
    if name.startswith("vision_backbone.") and name.split(".")[-2] in ("scale", "shift"):
        return _FILM_PREFIX
    return None


def parts_state(model: OpenVLAOFT) -> dict[str, Tensor]:
    """{name in `oft_modules.safetensors`: tensor} of all modules that OpenVLA itself lacks."""
    found = {}
    for name, tensor in model.state_dict().items():
        part = part_of(name)
        if part is not None:
            found[_FILM_PREFIX + name.removeprefix("vision_backbone.") if part == _FILM_PREFIX else name] = tensor
    return found


def load_parts(model: OpenVLAOFT, state: Mapping[str, Tensor], source: str) -> None:
    """Load this model's parts from `state`, ignoring those of other variants. Raises UserError."""
    wanted = parts_state(model)
    missing = [name for name in wanted if name not in state]
    if missing:
        raise UserError(f"'{source}' lacks '{missing[0]}' and {len(missing) - 1} more of {_described(model.oft)}.")
    ours = {"vision_backbone." + name.removeprefix(_FILM_PREFIX) if name.startswith(_FILM_PREFIX) else name: state[name] for name in wanted}
    whole: dict[str, Tensor] = {name: tensor for name, tensor in model.state_dict().items() if part_of(name) is None}
    load_state(model, whole | ours, source)


def _described(oft: OFTConfig) -> str:
    parts = {"the action head": oft.head == "l1", "the robot state's projector": oft.proprio_dim is not None, "FiLM": oft.film}
    return " and ".join(name for name, present in parts.items() if present)
