"""Action tokens one by one: a prefill, then short steps over a key-value cache of fixed size, all rows together.

transformers' `generate` serves any model and any stopping rule; its bookkeeping costs more than a step of a small model, and its
shapes change from step to step. Here the number of steps is known, nothing stops early, every shape is fixed and nothing waits for
the GPU, so that a whole decision (images, prefill, steps, sampling) is one CUDA graph or one `torch.compile` region. Layers are
called part by part with the modules' own projections and norms: adapters work, and numbers agree with the training pass to rounding;
hooks are not run. Weights must be whole: give generation its own copy where training shards them.

Shape legend: B rows, T tokens of the prefix, L action tokens, H heads, h width of a head, D width of the language model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_rl.policies.action_tokens import TokenDistribution
from embodied_rl.policies.openvla.model import Embedded, OpenVLA, attention_mask

GenerationMode = Literal["eager", "compile", "cuda_graph"]
"""eager: anywhere. compile: `torch.compile` of the whole decision, once for each shape. cuda_graph: a CUDA graph for each shape."""


@dataclass(frozen=True)
class Generated:
    """Sampled action tokens."""

    choices: Tensor
    """[B, L] int64, index among the action tokens."""
    log_prob: Tensor
    """[B, L] float32 at the temperature that was sampled with."""
    hidden: Tensor
    """[B, D] at the prompt's last token: what the value head reads."""


@dataclass(frozen=True)
class Cache:
    """Memory of one generation, written in place, and the rotations of all its places."""

    keys: tuple[Tensor, ...]
    """Of each layer: [B, H, T + L - 1, h]."""
    values: tuple[Tensor, ...]
    cosine: Tensor
    """[B, 1, T + L - 1, h]"""
    sine: Tensor
    """[B, 1, T + L - 1, h], negative in the first half: the half-turned vector is then a plain roll."""


def generate(model: OpenVLA, prefix: Embedded, noise: Tensor | None, num_tokens: int, temperature: float = 1.0) -> Generated:
    """Sample `num_tokens` action tokens for every row.

    Args:
        prefix: what `OpenVLA.prefix` gives, padded on the left so that all rows end together.
        noise: [B, num_tokens] uniform in [0, 1), or None for the most likely tokens.
        temperature: > 0; log-probabilities are of the distribution at this temperature.
    """
    length = prefix.mask.shape[1]
    cache = _allocate(model, prefix, num_tokens)
    mask = attention_mask(prefix.mask, causal=True) if prefix.padded else None
    hidden = _layers(model, prefix.embeds, mask, cache, start=0)
    at_prompt = hidden[:, 0]
    choices, log_probs = [], []
    for step in range(num_tokens):
        distribution = TokenDistribution.from_logits(model.action_logits(hidden), temperature)
        choice = distribution.sample(None if noise is None else noise[:, step : step + 1])
        choices.append(choice)
        log_probs.append(distribution.log_prob(choice))
        if step + 1 < num_tokens:
            embeds = model.embed_tokens(choice + model.tokens.first_token)
            hidden = _layers(model, embeds, _step_mask(prefix, step), cache, start=length + step)
    return Generated(torch.cat(choices, dim=1), torch.cat(log_probs, dim=1), at_prompt)


def _allocate(model: OpenVLA, prefix: Embedded, num_tokens: int) -> Cache:
    llama = model.language_model.model
    config = llama.config
    num_heads = config.num_key_value_heads or config.num_attention_heads
    width = config.head_dim or config.hidden_size // config.num_attention_heads
    positions = prefix.positions
    more = torch.arange(1, num_tokens, device=positions.device)
    positions = torch.cat([positions, positions[:, -1:] + more], dim=1)
    cosine, sine = llama.rotary_emb(prefix.embeds, positions)
    first, second = sine.chunk(2, dim=-1)
    sine = torch.cat([-first, second], dim=-1)
    shape = (2, config.num_hidden_layers, len(positions), num_heads, positions.shape[1], width)
    keys, values = torch.empty(shape, dtype=model.dtype, device=model.device).unbind(0)
    return Cache(keys.unbind(0), values.unbind(0), cosine.unsqueeze(1), sine.unsqueeze(1))


def _step_mask(prefix: Embedded, step: int) -> Tensor | None:
    """[B, 1, 1, T + step + 1] bool: the prefix without its padding, and all action tokens so far; None when nothing is padded."""
    return F.pad(prefix.mask, (0, step + 1), value=True)[:, None, None, :] if prefix.padded else None


def _layers(model: OpenVLA, x: Tensor, mask: Tensor | None, cache: Cache, start: int) -> Tensor:
    """[B, n, D] → [B, 1, D]: the last token's hidden state after the final norm; keys and values go to places start … start + n - 1."""
    llama = model.language_model.model
    end = start + x.shape[1]
    cosine, sine = cache.cosine[:, :, start:end], cache.sine[:, :, start:end]
    causal = not start and mask is None
    last = len(llama.layers) - 1
    for index, layer in enumerate(llama.layers):
        keys, values = cache.keys[index], cache.values[index]
        query = _project(layer, x, cosine, sine, keys[:, :, start:end], values[:, :, start:end])
        if index == last and end - start > 1:
            # Nobody reads what the last layer makes of the other tokens.
            x, query, causal = x[:, -1:], query[:, :, -1:], False
            mask = None if mask is None else mask[:, :, -1:]
        mixed = F.scaled_dot_product_attention(
            query, keys[:, :, :end], values[:, :, :end], attn_mask=mask, is_causal=causal, enable_gqa=query.shape[1] != keys.shape[1]
        )
        x = x + _linear(layer.self_attn.o_proj, mixed.transpose(1, 2).flatten(2))
        mlp, normed = layer.mlp, _norm(layer.post_attention_layernorm, x)
        x = x + _linear(mlp.down_proj, mlp.act_fn(_linear(mlp.gate_proj, normed)) * _linear(mlp.up_proj, normed))
    return _norm(llama.norm, x)


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    """A plain layer without a module call, which costs more than a small layer's arithmetic; adapters and the like are called."""
    return F.linear(x, module.weight, module.bias) if type(module) is nn.Linear else module(x)


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    return torch.rms_norm(x, module.normalized_shape, module.weight, module.eps) if type(module) is nn.RMSNorm else module(x)


def _project(layer: Any, x: Tensor, cosine: Tensor, sine: Tensor, key_place: Tensor, value_place: Tensor) -> Tensor:
    """Queries [B, H, n, h] of a layer's input [B, n, D]; its keys and values are written to their places."""
    attention, normed = layer.self_attn, _norm(layer.input_layernorm, x)
    heads = (*x.shape[:2], -1, key_place.shape[-1])
    value_place.copy_(_linear(attention.v_proj, normed).view(heads).transpose(1, 2))
    # Rotary positions, with pairs (i, i + h/2) as in Llama's published weights, for queries and keys in one go.
    pairs = torch.cat([_linear(attention.q_proj, normed).view(heads), _linear(attention.k_proj, normed).view(heads)], dim=2).transpose(1, 2)
    rotated = pairs * cosine + pairs.roll(heads[-1] // 2, dims=-1) * sine
    query, key = rotated.split([rotated.shape[1] - key_place.shape[1], key_place.shape[1]], dim=1)
    key_place.copy_(key)
    return query


Output = TypeVar("Output")
"""A frozen dataclass of tensors."""


class Accelerated(Generic[Output]):
    """A function of tensors, run as it stands, compiled, or captured once for each shape of its inputs and replayed.

    The function takes tensors and None by name and a key of Python values that it may branch on, and returns a frozen dataclass of
    tensors. It must not wait for the device. Weights are read where they lay at capture: change them in place.
    """

    def __init__(self, function: Callable[..., Output], mode: GenerationMode, *, compile_backend: str = "inductor") -> None:
        self.mode = mode
        self._function = function
        self._compile_backend = compile_backend
        self._compiled: Callable[..., Output] | None = None
        self._graphs: dict[tuple[object, ...], _Graph[Output]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated[Output]:
        """Of a policy's copy, whose weights lie elsewhere: it compiles and captures anew."""
        return Accelerated(copy.deepcopy(self._function, memo), self.mode, compile_backend=self._compile_backend)

    @property
    def num_graphs(self) -> int:
        """Shapes captured so far."""
        return len(self._graphs)

    def __call__(self, tensors: dict[str, Tensor | None], **key: bool | float) -> Output:
        """Run on `tensors`; `key` goes to the function as it is and tells captures apart."""
        if self.mode == "compile":
            if self._compiled is None:
                self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=self._compile_backend)
            return self._compiled(**tensors, **key)
        on_gpu = all(tensor.is_cuda for tensor in tensors.values() if tensor is not None)
        if self.mode != "cuda_graph" or not on_gpu:
            return self._function(**tensors, **key)
        signature = tuple((name, None if x is None else (tuple(x.shape), x.dtype)) for name, x in tensors.items())
        place = (*signature, *sorted(key.items()))
        if place not in self._graphs:
            self._graphs[place] = _Graph(self._function, tensors, key)
        return self._graphs[place].replay(tensors)


class _Graph(Generic[Output]):
    """One captured shape: inputs are copied into its own memory, outputs are cloned out of it."""

    def __init__(self, function: Callable[..., Output], tensors: dict[str, Tensor | None], key: dict[str, bool | float]) -> None:
        self._inputs = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
        # Libraries choose and load kernels in their first calls, which a capture must not contain.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(**self._inputs, **key)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(**self._inputs, **key)

    def replay(self, tensors: dict[str, Tensor | None]) -> Output:
        for name, place in self._inputs.items():
            source = tensors[name]
            if place is not None and source is not None:
                place.copy_(source)
        self._graph.replay()
        copies = {part.name: getattr(self._outputs, part.name).clone() for part in fields(self._outputs)}  # type: ignore[arg-type]
        return type(self._outputs)(**copies)
