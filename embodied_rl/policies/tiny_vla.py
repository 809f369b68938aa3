"""A small vision-language-action model with the interface of OpenVLA-OFT: an image and an instruction in, a chunk of action tokens out.

Convolutions make patches, words scale and shift them (FiLM, Perez et al. 2018, arXiv:1709.07871), and a transformer decoder reads both by
cross-attention, with one query per action token. It trains from scratch on a CPU.

Shape legend: B rows, K steps of a chunk, A action dimensions, L = K·A action tokens, V choices of a token, W words, N patches, D width.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodied_rl.config import TinyVLAConfig
from embodied_rl.errors import UserError
from embodied_rl.policies import base
from embodied_rl.policies.heads import ActionTokenizer, TokenDistribution, mean_of_steps
from embodied_rl.types import SimSpec

_Memory = tuple[Tensor, Tensor, Tensor]
"""Inputs of the decoders: tokens (patches, words, keypoints, state) [B, M, D]; mask [B, M]; the keypoints again [B, 1, D]."""

PREPARED = ("image", "words")
"""Parts that `prepare` makes of an observation, with "state" if the policy reads it."""


def word_ids(text: str, vocabulary: int, max_words: int) -> list[int]:
    """A row of the embedding for each word: 1 + a hash of the word in lower case; 0 is padding. Words beyond `max_words` are dropped.
    Raises UserError: there is no word."""
    words = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    if not words:
        raise UserError("The instruction is empty. A vision-language-action policy acts on language: set policy.instruction='reach the …'.")
    return [1 + zlib.crc32(word.encode()) % (vocabulary - 1) if vocabulary > 1 else 0 for word in words[:max_words]]


@functools.lru_cache(maxsize=4096)
def _padded_ids(text: str, vocabulary: int, max_words: int) -> np.ndarray:
    """[max_words] int64: `word_ids` of an instruction, zero-padded; cached, since few instructions recur at every decision. Read-only."""
    row = np.zeros(max_words, np.int64)
    ids = word_ids(text, vocabulary, max_words)
    row[: len(ids)] = ids
    return row


def shifted(image: Tensor, shift: Tensor) -> Tensor:
    """Shift each image of uint8 [B, H, W, 3] by int64 [B, 2] pixels down and right, repeating its border (Kostrikov et al. 2020,
    arXiv:2004.13649)."""
    rows, height, width, _ = image.shape
    down = (torch.arange(height, device=image.device) + shift[:, :1]).clamp(0, height - 1)
    right = (torch.arange(width, device=image.device) + shift[:, 1:]).clamp(0, width - 1)
    return image[torch.arange(rows, device=image.device)[:, None, None], down[:, :, None], right[:, None, :]]


class TinyVLAPolicy(base.Policy):
    """Policy whose actions are token ids [B, L]; `simulator_action` turns them into chunks."""

    translates = True
    critics_train = ("value_decoder.",)
    temperature: float
    action_tokens: ActionTokenizer
    noise_kind: Literal["uniform"] = "uniform"
    """Kind of `act`'s noise: uniform in [0, 1), one number per action token."""

    def __init__(self, config: TinyVLAConfig, spec: SimSpec) -> None:
        """Weights come from torch's global generator. Raises UserError if the simulator lacks an observation of the policy."""
        super().__init__()
        if spec.action.kind != "continuous":
            raise UserError(
                f"Task '{spec.task}' takes {spec.action.kind} actions; policy.name=tiny_vla gives continuous ones: use policy=mlp."
            )
        self.config, self.spec, self.temperature = config, spec, config.temperature
        self.built_from = config
        self._has_words = config.instruction is None and config.instruction_key in spec.variables
        if config.instruction is None and not self._has_words and spec.instruction is None:
            raise UserError(f"Task '{spec.task}' gives no instruction. A VLA acts on language: set policy.instruction='reach the …'.")
        self.action_tokens = ActionTokenizer(config.num_bins, config.num_bins)
        height, width, _ = base.image_of(spec, config.image_key, "policy.image_key").shape
        state_size = 0 if config.state_key is None else base.vector_of(spec, config.state_key, "policy.state_key").shape[0]
        self.encoder = _Encoder(config, (height, width), state_size)
        self.decoder = _Decoder(config, self.num_units, config.num_layers, causal=config.decoding == "autoregressive")
        self.action_head = Linear(config.width, config.num_bins)
        nn.init.normal_(self.action_head.weight, std=0.01)
        nn.init.zeros_(self.action_head.bias)
        self.token_embedding = nn.Embedding(config.num_bins, config.width) if config.decoding == "autoregressive" else None
        self.value_decoder = _Decoder(config, config.chunk if config.value == "action" else 1, 1, causal=False)
        self.value_head = nn.Sequential(Linear(config.width, config.width), nn.GELU(), Linear(config.width, 1))

    @property
    def chunk_size(self) -> int:
        return self.config.chunk

    @property
    def num_units(self) -> int:
        return self.config.chunk * self.spec.action.dim

    @property
    def observation_keys(self) -> tuple[str, ...]:
        state = () if self.config.state_key is None else (self.config.state_key,)
        return (self.config.image_key, *state, *((self.config.instruction_key,) if self._has_words else ()))

    @staticmethod
    def role_of(name: str) -> base.Role:
        return "value" if name.startswith("value_") else "head" if name.startswith("action_head") else "backbone"

    # ---- observations -------------------------------------------------------------------------------------------------

    def prepare(self, observation: Mapping[str, Any]) -> base.TensorObservation:
        """image uint8 [B, H, W, 3], words int64 [B, max_words], and, if used, state float32 [B, S]; on the CPU.
        Raises UserError: an instruction is empty."""
        config = self.config
        image = torch.as_tensor(observation[config.image_key])
        texts = base.instructions_of(observation, self.spec, config.instruction, config.instruction_key, len(image))
        rows = [_padded_ids(text, config.vocabulary, config.max_words) for text in texts]
        words = torch.from_numpy(np.array(rows, np.int64).reshape(len(texts), config.max_words))
        prepared = {"image": image, "words": words}
        if config.state_key is not None:
            prepared["state"] = torch.as_tensor(observation[config.state_key]).float()
        return prepared

    def _memory(self, observation: Mapping[str, Any]) -> _Memory:
        ready = cast(base.TensorObservation, observation) if "words" in observation else self.prepare(observation)
        device = self.action_head.weight.device
        return self.encoder({key: part.to(device) for key, part in ready.items()})

    # ---- Policy -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, observation: Mapping[str, Any], noise: Tensor | None) -> base.ActionOutput:
        """Token ids [B, L] and their log-probabilities [B, L].

        Args:
            observation: the simulator's, or from `prepare`.
            noise: [B, L] uniform in [0, 1); None: the likeliest tokens.
        """
        memory = self._memory(observation)
        if self.token_embedding is None:
            distribution = self._distribution(self.decoder(memory))
            tokens = distribution.sample(noise)
            return base.ActionOutput(tokens, distribution.log_prob(tokens))
        chosen = torch.zeros(len(memory[0]), 0, dtype=torch.int64, device=memory[0].device)
        log_probs = []
        remembered = self.decoder.remember(memory)
        for unit in range(self.num_units):
            distribution = self._distribution(self.decoder(memory, self._shifted(chosen), remembered)[:, -1:])
            token = distribution.sample(None if noise is None else noise[:, unit : unit + 1])
            log_probs.append(distribution.log_prob(token))
            chosen = torch.cat([chosen, token], dim=1)
        return base.ActionOutput(chosen, torch.cat(log_probs, dim=1))

    def evaluate(self, observation: Mapping[str, Any], action: Tensor) -> base.Evaluation:
        """Log-probabilities and entropies [B, L] of token ids [B, L], and values [B] (or [B, K]: `value`); all with gradients."""
        memory = self._memory(observation)
        tokens = action.to(memory[0].device)
        distribution = self._scores(memory, tokens)
        return base.Evaluation(distribution.log_prob(tokens), distribution.entropy, self._value(memory))

    def value(self, observation: Mapping[str, Any]) -> Tensor:
        return self._value(self._memory(observation))

    def cloning_noise(self, num_rows: int) -> Tensor | None:
        """Shifts of the images, [B, 2] int64; see `shifted`."""
        pixels = self.config.cloning_shift if self.training else 0
        return torch.randint(-pixels, pixels + 1, (2, num_rows)).T if pixels else None

    def cloning_loss(
        self, observation: Mapping[str, Any], action: Tensor, mask: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """[B] mean cross-entropy of the recorded actions' tokens.

        Args:
            action: [B, K, A] normalised.
            mask: [B, K] bool, steps that exist (a chunk may extend beyond the episode's end); None: all.
            noise: from `cloning_noise`.
        """
        ready = dict(cast(base.TensorObservation, observation)) if "words" in observation else self.prepare(observation)
        if noise is not None:
            ready["image"] = shifted(ready["image"], noise)
        memory = self._memory(ready)
        tokens = self.units_of(action).to(memory[0].device)
        return mean_of_steps(-self._scores(memory, tokens).log_prob(tokens), mask)

    def units_of(self, action: Tensor) -> Tensor:
        return torch.from_numpy(self.action_tokens.encode(action.cpu().numpy())).flatten(1)

    # ---- beside critics of actions: the value's decoder reads for them ------------------------------------------------

    @property
    def num_features(self) -> int:
        return self.config.width

    def features(self, observation: Mapping[str, Any]) -> Tensor:
        """Features [B, D]; their gradients do not reach the encoder, which trains with the policy."""
        with torch.no_grad():
            memory = self._memory(observation)
        return self.value_decoder(memory)[:, 0]

    def state_value(self, features: Tensor) -> Tensor:
        return self.value_head(features).squeeze(-1)

    def drawn(self, observation: Mapping[str, Any], features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Centers [B, L] of sampled tokens, and minus the entropy [B, L] of an action that is uniform within its token's interval.

        An action's gradient is that of the tokens' mean (straight-through; Bengio et al. 2013, arXiv:1308.3432).
        """
        tokens = self.act(observation, noise).action
        distribution = self._scores(self._memory(observation), tokens)
        probability = distribution.log_probs.exp()
        centers = torch.from_numpy(self.action_tokens.decode(np.arange(self.config.num_bins))).to(probability)
        mean = probability @ centers
        return centers[tokens] + mean - mean.detach(), -distribution.entropy - math.log(2.0 / (self.config.num_bins - 1))

    def simulator_action(self, action: Tensor | np.ndarray) -> np.ndarray:
        """Convert token ids [B, L] to chunks [B, K, A] float32 in the simulator's units."""
        return self.spec.action.denormalise(self.normalised_action(base.numpy_of(action))).astype(np.float32)

    def normalised_action(self, action: np.ndarray) -> np.ndarray:
        """Convert token ids [B, L] to chunks [B, K, A] float32."""
        return self.action_tokens.decode(action).reshape(len(action), self.config.chunk, self.spec.action.dim).astype(np.float32)

    # ---- inside -------------------------------------------------------------------------------------------------------

    def _distribution(self, hidden: Tensor) -> TokenDistribution:
        return TokenDistribution.from_logits(self.action_head(hidden), self.temperature)

    def _scores(self, memory: _Memory, tokens: Tensor) -> TokenDistribution:
        before = None if self.token_embedding is None else self._shifted(tokens[:, :-1])
        return self._distribution(self.decoder(memory, before))

    def _shifted(self, tokens: Tensor) -> Tensor:
        """[B, l] → [B, l + 1, D]: for each query, the embedding of the token before it; zeros for the first."""
        assert self.token_embedding is not None, "autoregressive decoding"
        return F.pad(self.token_embedding(tokens), (0, 0, 1, 0))

    def _value(self, memory: _Memory) -> Tensor:
        hidden = self.value_decoder(memory if self.config.value_gradient else (memory[0].detach(), memory[1], memory[2].detach()))
        value = self.value_head(hidden).squeeze(-1).float()
        return value if self.config.value == "action" else value[:, 0]


def _waves(height: int, width: int, num_frequencies: int = 4) -> Tensor:
    """Position features of each patch [N, 2 + 4 F]: coordinates in [-1, 1] along both axes, with sines and cosines. Smooth, so that
    training generalises to nearby patches."""
    # An explicit device: transformers replaces `torch.linspace` by a version that leaves the meta device, on which `build_policy` counts.
    down, across = (torch.linspace(-1, 1, size, device="cpu") for size in (height, width))
    place = torch.stack(torch.meshgrid(down, across, indexing="ij"), dim=-1).flatten(0, 1)
    angles = 0.5 * torch.pi * (place[:, :, None] * 2.0 ** torch.arange(num_frequencies, device="cpu")).flatten(1)
    return torch.cat([place, angles.sin(), angles.cos()], dim=1)


class _Encoder(nn.Module):
    """Encodes image and words for the decoders."""

    waves: Tensor
    """Position features [N, 2 + 4 F]."""

    def __init__(self, config: TinyVLAConfig, size: tuple[int, int], state_size: int) -> None:
        super().__init__()
        height, width = size
        layers: list[nn.Module] = []
        channels = [3, *config.conv_channels, config.width]
        for inputs, outputs in itertools.pairwise(channels):
            before, height, width = (height, width), height // 2, width // 2
            convolution = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)
            nn.init.kaiming_normal_(convolution.weight)
            layers += [convolution, nn.GELU()]
        if min(height, width) < 1:
            raise UserError(
                f"policy.conv_channels={list(config.conv_channels)} has too many layers for an image of {size[0]}x{size[1]} pixels."
            )
        # Keypoints read the picture at full resolution: before the last convolution halves it.
        self.fine, self.coarse = nn.Sequential(*layers[:-2]), nn.Sequential(*layers[-2:])
        self.keypoints = _Keypoints(config, channels[-2], before, state_size)
        self.register_buffer("waves", _waves(height, width), persistent=False)
        self.places = Linear(self.waves.shape[1], config.width)
        self.words = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.word_places = nn.Parameter(0.1 * torch.randn(config.max_words, config.width))
        # A sum: instructions that differ in one word of many would hardly differ in their mean.
        self.text = nn.Sequential(nn.LayerNorm(config.width), Linear(config.width, config.width), nn.GELU())
        self.film = Linear(config.width, 2 * config.width)
        self.state = Linear(state_size, config.width) if state_size else None
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ready: Mapping[str, Tensor]) -> _Memory:
        pixels = ready["image"].permute(0, 3, 1, 2).to(dtype=torch.float32, memory_format=torch.channels_last)
        fine = self.fine(pixels / 64.0 - 1.0)
        patches = self.coarse(fine).flatten(2).transpose(1, 2)
        there = ready["words"] != 0
        words = self.words(ready["words"])
        text = self.text(words.sum(1))
        scale, shift = self.film(text).unsqueeze(1).chunk(2, dim=-1)
        parts = [patches * (1.0 + scale) + shift + self.places(self.waves), words + self.word_places]
        keypoints = self.keypoints(fine, text, ready.get("state")).unsqueeze(1)
        parts.append(keypoints)
        if self.state is not None:
            parts.append(self.state(ready["state"]).unsqueeze(1))
        memory = self.norm(torch.cat(parts, dim=1))
        seen = there.new_ones(len(there), memory.shape[1])
        seen[:, patches.shape[1] : patches.shape[1] + there.shape[1]] = there
        return memory, seen, keypoints


class _Keypoints(nn.Module):
    """Positions in the picture of the things that the words name: M maps, and the mean position of each map's weight (spatial softmax,
    Levine et al. 2016, arXiv:1504.00702)."""

    places: Tensor
    """Patch positions [N, 2] in [-1, 1]."""

    def __init__(self, config: TinyVLAConfig, num_channels: int, size: tuple[int, int], state_size: int) -> None:
        super().__init__()
        self.film = Linear(config.width, 2 * num_channels)
        self.maps = nn.Conv2d(num_channels, config.num_keypoints, 1)
        self.sharpness = nn.Parameter(torch.full((config.num_keypoints, 1), 3.0))
        """Sharpness of a map in standard deviations: a map selects something from the first step on, not the center of everything."""
        num_inputs = config.num_keypoints * (2 + size[0] * size[1]) + state_size
        self.output = nn.Sequential(Linear(num_inputs, config.width), nn.GELU(), Linear(config.width, config.width))
        self.register_buffer("places", _waves(*size, num_frequencies=0), persistent=False)

    def forward(self, features: Tensor, words: Tensor, state: Tensor | None) -> Tensor:
        """(features [B, C, h, w], words [B, D], state [B, S]) → [B, D]"""
        scale, shift = self.film(words)[:, :, None, None].chunk(2, dim=1)
        maps = self.maps(F.gelu(features * (1.0 + scale) + shift)).flatten(2)
        maps = F.layer_norm(maps, maps.shape[-1:])
        found = (self.sharpness * maps).softmax(-1) @ self.places
        own = [] if state is None else [state]
        return self.output(torch.cat([found.flatten(1), maps.flatten(1), *own], dim=1))


class _Decoder(nn.Module):
    """Learned queries that read a memory."""

    def __init__(self, config: TinyVLAConfig, num_queries: int, num_layers: int, *, causal: bool) -> None:
        super().__init__()
        self.queries = nn.Parameter(0.1 * torch.randn(num_queries, config.width))
        self.layers = nn.ModuleList(_Layer(config.width, config.num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.causal, self.recompute = causal, config.gradient_checkpointing

    def remember(self, read: _Memory) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer from the memory: equal for every token of a decision, so acting computes them once."""
        return [cast(_Layer, layer).remember(read[0]) for layer in self.layers]

    def forward(self, read: _Memory, earlier: Tensor | None = None, remembered: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """[B, l, D]; `earlier` [B, l, D] is added to the first l queries, and only those run; `remembered`: see `remember`."""
        memory, there, keypoints = read
        x = (self.queries if earlier is None else self.queries[: earlier.shape[1]] + earlier) + keypoints
        for index, layer in enumerate(self.layers):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, memory, there, self.causal, use_reentrant=False)
            else:
                x = layer(x, memory, there, self.causal, None if remembered is None else remembered[index])
        return self.norm(x)


class _Layer(nn.Module):
    """Attention among the queries, attention to the memory, and a perceptron; each with pre-norm and residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = Linear(width, 3 * width)
        self.own_out = Linear(width, width)
        self.query = Linear(width, width)
        self.memory = Linear(width, 2 * width)
        self.memory_out = Linear(width, width)
        self.perceptron = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, M, D] of the memory."""
        key, value = self.memory(memory).chunk(2, dim=-1)
        return key, value

    def forward(self, x: Tensor, memory: Tensor, there: Tensor, causal: bool, remembered: tuple[Tensor, Tensor] | None = None) -> Tensor:
        query, key, value = self.own(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.own_out(self._attend(query, key, value, None, causal))
        asked = self.query(self.norms[1](x))
        found = self._read(asked, memory, there) if remembered is None else self._attend(asked, *remembered, there, False)
        x = x + self.memory_out(found)
        return x + self.perceptron(self.norms[2](x))

    def _read(self, query: Tensor, memory: Tensor, there: Tensor) -> Tensor:
        """`_attend` to `remember(memory)` without computing its keys and values.

        Each query is multiplied by its head's key weights, and its result by the value weights: few queries cost less than the memory's
        rows. A key's bias adds the same to every row's score and cancels (the absorbed form of DeepSeek-V2's latent attention,
        arXiv:2405.04434, section 2.1.2).
        """
        rows, count, width = query.shape
        key, value = self.memory.weight.unflatten(0, (2, self.num_heads, -1))
        query = (query.reshape(rows * count, self.num_heads, -1).transpose(0, 1) @ key).unflatten(1, (rows, count))
        shared = memory.unsqueeze(1)
        asked = query.transpose(0, 1).reshape(rows, 1, self.num_heads * count, width)
        scale = (width // self.num_heads) ** -0.5
        found = F.scaled_dot_product_attention(asked, shared, shared, attn_mask=there[:, None, None, :], scale=scale)
        by_head = found.reshape(rows, self.num_heads, count, width).transpose(0, 1).flatten(1, 2) @ value.transpose(1, 2)
        return by_head.unflatten(1, (rows, count)).permute(1, 2, 0, 3).flatten(-2) + self.memory.bias[width:]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, there: Tensor | None, causal: bool) -> Tensor:
        def heads(part: Tensor) -> Tensor:
            return part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        mask = None if there is None else there[:, None, None, :]
        found = F.scaled_dot_product_attention(heads(query), heads(key), heads(value), attn_mask=mask, is_causal=causal)
        return found.transpose(1, 2).flatten(-2)


# ---- a linear layer whose float32 products run in oneDNN on CPUs with AVX-512 -----------------------------------------

# torch passes float32 products to MKL, which uses only AVX2 on CPUs that are not Intel's. On one core of an AMD EPYC (Zen 5), rows x
# inputs x outputs: 1024 x 112 x 448 forward takes 0.43 ms instead of 0.96, its two products backward 1.06 instead of 1.95; 64 x 112 x 448
# forward 41 us instead of 64.


WORTH_IT = 1 << 20
"""Number of multiplications from which a product outweighs oneDNN's longer preparation."""


@functools.cache
def _is_there() -> bool:
    has_product = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # internal op: may disappear
    return has_product and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [n, I] times the transpose of weight [O, I], plus bias [O]: [n, O]; without gradients."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        context.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = context.saved_tensors
        by_rows, by_weight, by_bias = context.needs_input_grad
        gradient = gradient.contiguous()
        return (
            _product(gradient, weight.t()) if by_rows else None,
            _product(gradient.t(), rows.t()) if by_weight else None,
            gradient.sum(0) if by_bias else None,
        )


class Linear(nn.Linear):
    """`nn.Linear` with a bias, the same weights and the same sums; only their order, and so the last bits, are the library's."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        suits = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32 and _is_there()
        if not suits or input.numel() * self.out_features < WORTH_IT or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        product = _Differentiable.apply(rows, weight, bias) if torch.is_grad_enabled() else _product(rows, weight, bias)
        return product.view(*input.shape[:-1], self.out_features)
