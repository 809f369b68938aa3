"""OpenVLA: two vision transformers and a projector before a Llama, with the key names of the published checkpoints.

Shape legend: B rows, I images of a row, S pixels of a side, N patch tokens of all images, P prompt tokens, T = N + P (plus later tokens), L
action tokens, V action tokens of the vocabulary (256), D width of the language model.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_rl.errors import UserError, from_extra
from embodied_rl.files import write_atomic
from embodied_rl.policies.heads import ActionTokenizer, TokenDistribution
from embodied_rl.policies.model_folder import check_names, load_state, names_of, read_safetensors, save_state, weight_files
from embodied_rl.policies.openvla.config import OFT_KEY, OFTConfig, OpenVLAConfig, ViTShape
from embodied_rl.policies.openvla.vision import Layers, Projector, VisionBackbone

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, LlamaModel

BOS_TOKEN = 1
EMPTY_TOKEN = 29871
"""Token of the lone space between "Out:" and the first action token, as Llama's tokenizer wrote it in training."""
STOP_TOKEN = 2
MAX_SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = "oft_modules.safetensors"
"""File with OpenVLA-OFT's action head, robot state projector and FiLM, which the original keeps in separate files."""


@dataclass(frozen=True)
class Embedded:
    """A batch of sequences in the language model's input form."""

    embeds: Tensor
    """Embeddings [B, T, D]."""
    mask: Tensor
    """[B, T] bool: False at padding."""
    padded: bool
    """Whether any position is padding. It selects the attention kernel; a Python value, since reading a tensor would wait for the GPU."""

    @property
    def positions(self) -> Tensor:
        """[B, T] int64 positions counted without padding, so that a row's numbers do not depend on its neighbours' lengths."""
        return (self.mask.long().cumsum(dim=-1) - 1).clamp(min=0)

    def places(self, num_more: int) -> Tensor:
        """[B, T + num_more] int64 positions of these tokens and of later ones; [1, T + num_more] if they are equal in all rows."""
        positions = self.positions if self.padded else torch.arange(self.mask.shape[1], device=self.mask.device).unsqueeze(0)
        if not num_more:
            return positions
        more = torch.arange(1, num_more + 1, device=positions.device)
        return torch.cat([positions, positions[:, -1:] + more], dim=1)

    def followed_by(self, embeds: Tensor) -> Embedded:
        """Append tokens [B, n, D] without padding."""
        more = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.mask.device)
        return Embedded(torch.cat([self.embeds, embeds], dim=1), torch.cat([self.mask, more], dim=1), self.padded)


@dataclass(frozen=True)
class Generated:
    """Sampled action tokens."""

    choices: Tensor
    """[B, L] int64 indices among the action tokens."""
    log_prob: Tensor
    """[B, L] float32 log-probabilities at the sampling temperature."""
    hidden: Tensor
    """[B, D] hidden state at the prompt's last token, for the value head."""


class VisionLanguageModel(nn.Module):
    """Base of OpenVLA and OpenVLA-OFT: images and text to the language model's hidden states, and to action tokens."""

    def __init__(self, config: OpenVLAConfig, oft: OFTConfig | None = None) -> None:
        """`oft`: settings of OpenVLA-OFT; None: the model is OpenVLA."""
        with from_extra("OpenVLA", "language"):
            from transformers import LlamaForCausalLM
        super().__init__()
        self.config, self.oft = config, oft
        self.tokens = ActionTokenizer(config.vocab_size, config.num_action_bins)
        self.vision_backbone = VisionBackbone(config.vision, config.hidden_size if oft is not None and oft.film else None)
        self.projector = Projector(config.vision_width, config.hidden_size)
        self.language_model: LlamaForCausalLM = LlamaForCausalLM(config.llama())
        _fuse_norms(self.language_model.model)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        oft: OFTConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        vision: tuple[ViTShape, ViTShape] | None = None,
    ) -> Self:
        """Read a checkpoint folder: `config.json` and safetensors, in one file or in shards with an index, and `PARTS` if OpenVLA-OFT has
        additional modules. Nothing is downloaded.

        Args:
            oft: settings of OpenVLA-OFT; None: those that `save_pretrained` wrote into `config.json`.
            dtype: dtype of the weights; None: as stored (bfloat16 in the published ones).
            vision: shapes of vision transformers that `config.VIT_SHAPES` does not name.

        Raises UserError: a file or shard is missing or damaged, a key is missing, unknown or of the wrong shape.
        """
        directory = Path(directory)
        config = OpenVLAConfig.read(directory, vision)
        with torch.device("meta"):
            model = cls(config, oft or config.noted_oft(directory))
        extra, wanted, found = model.parts(), model.state_dict(), set[str]()
        for path in weight_files(directory, "model"):  # shard by shard: memory contains at most the model and one tensor
            state = read_safetensors(path, dtype=dtype, device=device)
            check_names(directory, wanted, state)
            found |= state.keys()
            model.load_state_dict(state, strict=False, assign=True)
        missing = [name for name in wanted if name not in found and name not in extra]
        if missing:
            raise UserError(f"The checkpoint in '{directory}' lacks {names_of(missing)}. Is it complete, and OpenVLA's?")
        # Rotary frequencies are not in a checkpoint, and those of the meta device are empty.
        llama = model.language_model.model
        llama.rotary_emb = type(llama.rotary_emb)(llama.config).to(device)
        if extra:
            model._load_parts(directory / PARTS, dtype, device)
        return model.eval()

    def save_pretrained(self, directory: str | Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write files that the original's code loads, with the same keys and `config.json`; OpenVLA-OFT's other modules into `PARTS`, its
        settings into `config.json`. The processor saves the tokenizer's files.

        Files are written under temporary names and renamed, the index and the configuration last. Weights left from an earlier save are
        removed.
        """
        from huggingface_hub import split_torch_state_dict_into_shards  # a dependency of transformers

        directory, parts, whole = Path(directory), self.parts(), self.state_dict()
        if parts:
            save_state({stored: whole[name] for name, stored in parts.items()}, directory / PARTS)
        state = {name: tensor for name, tensor in whole.items() if name not in parts}
        split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_bytes)
        for file, keys in split.filename_to_tensors.items():
            save_state({key: state[key] for key in keys}, directory / file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
            write_atomic(directory / INDEX, json.dumps(index, indent=2))
        else:
            (directory / INDEX).unlink(missing_ok=True)
        for stale in {*directory.glob("model-?????-of-?????.safetensors"), directory / SINGLE}:
            if stale.name not in split.filename_to_tensors:
                stale.unlink(missing_ok=True)
        config = self.config.to_json() | {"torch_dtype": str(self.dtype).removeprefix("torch.")}
        config |= {} if self.oft is None else {OFT_KEY: asdict(self.oft)}
        write_atomic(directory / "config.json", json.dumps(config, indent=2, sort_keys=True))

    def parts(self) -> dict[str, str]:
        """{parameter that OpenVLA itself does not have: its name in `PARTS`}"""
        return {name: stored for name in self.state_dict() if (stored := _name_in_parts(name)) is not None}

    def _load_parts(self, path: Path, dtype: torch.dtype | None, device: str | torch.device) -> None:
        """Load this model's parts, ignoring those of other variants. Raises UserError."""
        described = "the parts of OpenVLA-OFT" if self.oft is None else self.oft.parts
        if not path.exists():
            raise UserError(f"'{path}' is missing: it holds {described} (docs/openvla.md shows how to make it).")
        state, parts = read_safetensors(path, dtype=dtype, device=device), self.parts()
        missing = [stored for stored in parts.values() if stored not in state]
        if missing:
            raise UserError(f"'{path}' lacks '{missing[0]}' and {len(missing) - 1} more of {described}.")
        load_state(self, self.state_dict() | {name: state[stored] for name, stored in parts.items()}, str(path))

    # ---- what a policy computes ---------------------------------------------------------------------------------------

    @abstractmethod
    def sequence(self, pixels: Tensor, input_ids: Tensor, mask: Tensor, *, padded: bool, proprio: Tensor | None = None) -> Embedded:
        """Embed the whole input of one decision.

        Args:
            pixels: [B, I, 6, S, S] normalised.
            input_ids: [B, P] ``[BOS, padding…, text, 29871]``: BOS first in every row, so that the images come right after it.
            mask: [B, P] bool, False at padding.
            padded: whether `mask` has a False.
            proprio: [B, proprio_dim] scaled to [-1, 1], if the model reads it.
        """

    @abstractmethod
    def decide(self, sequence: Embedded, noise: Tensor | None, num_tokens: int, temperature: float = 1.0) -> Generated:
        """Sample `num_tokens` action tokens for every row, without gradients, as one fixed program that can be captured.

        Args:
            sequence: padded so that all rows end together.
            noise: [B, num_tokens] uniform in [0, 1), or None for the most likely tokens.
            temperature: > 0; log-probabilities are of the distribution at this temperature.
        """

    @abstractmethod
    def scores(self, sequence: Embedded, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] of all choices for action tokens [B, L], and the hidden state [B, D] at the prompt's last token."""

    @abstractmethod
    def state(self, sequence: Embedded) -> Tensor:
        """[B, D] hidden state at the prompt's last token."""

    # ---- inside -------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.projector.fc1.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.projector.fc1.weight.device

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """[B, P] → [B, P, D]"""
        return self.language_model.model.embed_tokens(ids)

    def embed_images(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """Normalised pixels [B, I, 6, S, S] → patch tokens [B, N, D]; `language` [B, D] for FiLM."""
        return self.projector(self.vision_backbone(pixels.to(self.dtype), language))

    def hidden(self, sequence: Embedded, *, causal: bool = True) -> Tensor:
        """[B, T, D] hidden states after the final norm. Without `causal`, every token attends to all tokens that are not padding."""
        mask, positions = None, None
        if sequence.padded:
            mask, positions = attention_mask(sequence.mask, causal=causal), sequence.positions
        output = self.language_model.model(
            inputs_embeds=sequence.embeds, attention_mask=mask, position_ids=positions, use_cache=False, is_causal=causal
        )
        return output.last_hidden_state

    def action_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] → [..., V] float32 logits of the action tokens only."""
        return self.action_scorer()(hidden)

    def action_scorer(self) -> Callable[[Tensor], Tensor]:
        """`action_logits` with its weights looked up once, for a loop over tokens."""
        head, tokens = self.language_model.lm_head, slice(self.tokens.first_token, self.tokens.vocab_size)
        if type(head) is nn.Linear:
            weight = head.weight[tokens]
            return lambda hidden: F.linear(hidden, weight).float()
        # An adapter or a sharded layer looks its weights up itself.
        return lambda hidden: head(hidden)[..., tokens].float()

    def action_embedder(self) -> Callable[[Tensor], Tensor]:
        """Choices [...] among the action tokens → their embeddings [..., D], with the weights looked up once."""
        embedding, first = self.language_model.model.embed_tokens, self.tokens.first_token
        if type(embedding) is nn.Embedding:
            weight = embedding.weight[first:]
            return lambda choices: F.embedding(choices, weight)
        return lambda choices: embedding(choices + first)


class OpenVLA(VisionLanguageModel):
    """OpenVLA (Kim et al. 2024): the sequence ``[BOS, patches, rest of the prompt]``, then action tokens one by one."""

    def __init__(self, config: OpenVLAConfig, oft: OFTConfig | None = None) -> None:
        super().__init__(config)

    def sequence(self, pixels: Tensor, input_ids: Tensor, mask: Tensor, *, padded: bool, proprio: Tensor | None = None) -> Embedded:
        return join(self.embed_tokens(input_ids), self.embed_images(pixels), mask, padded=padded)

    def decide(self, sequence: Embedded, noise: Tensor | None, num_tokens: int, temperature: float = 1.0) -> Generated:
        """See `VisionLanguageModel.decide`: a prefill, then short steps over a key-value cache of fixed size, all rows together."""
        # transformers' `generate` supports any model and any stopping rule; its bookkeeping costs more than a step of a small model, and
        # its shapes change from step to step. Here the number of steps is fixed, nothing stops early, every shape is fixed and nothing
        # waits for the GPU. So a whole decision (images, prefill, steps, sampling) is one CUDA graph or one `torch.compile` region.
        # `vision.Layers` runs a step.
        layers, scores, embedding = Layers.of(self.language_model.model), self.action_scorer(), self.action_embedder()
        length = sequence.mask.shape[1]
        cache = layers.allocate(sequence.embeds, sequence.places(num_tokens - 1), keep=True)
        mask = attention_mask(sequence.mask, causal=True) if sequence.padded else None
        hidden = at_prompt = layers.read(sequence.embeds, cache, start=0, mask=mask, causal=not sequence.padded, last=1)
        choices, log_probs = [], []
        for step in range(num_tokens):
            distribution = TokenDistribution.from_logits(scores(hidden), temperature)
            log_probs.append(distribution.log_probs)
            choices.append(distribution.sample(None if noise is None else noise[:, step : step + 1]))
            if step + 1 < num_tokens:
                mask = F.pad(sequence.mask, (0, step + 1), value=True)[:, None, None, :] if sequence.padded else None
                hidden = layers.read(embedding(choices[-1]), cache, start=length + step, mask=mask, causal=False, last=1)
        chosen = torch.cat(choices, dim=1)
        return Generated(chosen, TokenDistribution(torch.cat(log_probs, dim=1)).log_prob(chosen), at_prompt[:, 0])

    def scores(self, sequence: Embedded, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `VisionLanguageModel.scores`: one causal pass over the sequence and its action tokens."""
        # The last token's prediction is unused, so the token need not be read.
        forced = sequence.followed_by(self.embed_tokens(tokens[:, :-1])) if tokens.shape[1] > 1 else sequence
        hidden = self.hidden(forced)[:, -tokens.shape[1] :]
        return self.action_logits(hidden), hidden[:, 0]

    def state(self, sequence: Embedded) -> Tensor:
        return self.hidden(sequence)[:, -1]


def _name_in_parts(name: str) -> str | None:
    """Name in `PARTS` of a parameter of the action head, of the robot state's projector or of FiLM; None for OpenVLA's own."""
    if name.startswith(("action_head.", "proprio_projector.")):
        return name
    is_film = name.startswith("vision_backbone.") and name.split(".")[-2] in ("scale", "shift")
    return f"film_vision_backbone.{name}" if is_film else None


def _fuse_norms(llama: LlamaModel) -> None:
    """Give Llama torch's own RMSNorm, one kernel instead of transformers' six; same formula, same parameter."""
    config = llama.config
    for layer in llama.layers:
        layer.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    llama.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # type: ignore[assignment]


def join(text: Tensor, patches: Tensor, mask: Tensor, *, padded: bool) -> Embedded:
    """Put patch tokens [B, N, D] between the first and the other tokens of a prompt [B, P, D]; `mask` [B, P] is the prompt's."""
    seen = torch.ones(patches.shape[:2], dtype=torch.bool, device=mask.device)
    return Embedded(
        torch.cat([text[:, :1], patches, text[:, 1:]], dim=1), torch.cat([mask[:, :1], seen, mask[:, 1:]], dim=1), padded=padded
    )


def attention_mask(mask: Tensor, *, causal: bool) -> Tensor:
    """[B, T] bool → [B, 1, T, T] bool: which key (last axis) each query sees. No query sees padding.

    Padded queries see BOS, which is never padding, so that every softmax is defined.
    """
    length = mask.shape[1]
    seen = mask[:, None, None, :].expand(-1, 1, length, length)
    if not causal:
        return seen
    return seen & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
