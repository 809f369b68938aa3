"""Action tokens one by one: a prefill, then short steps over a key-value cache of fixed size, all rows together.

transformers' `generate` serves any model and any stopping rule; its bookkeeping costs more than a step of a small model, and its
shapes change from step to step. Here the number of steps is known, nothing stops early, every shape is fixed and nothing waits for
the GPU, so that a whole decision (images, prefill, steps, sampling) is one CUDA graph or one `torch.compile` region. `layers.py` has
what a step runs.

Shape legend: B rows, T tokens of the prefix, L action tokens, D width of the language model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_rl.policies.action_tokens import TokenDistribution
from embodied_rl.policies.openvla.model import Embedded, OpenVLA, attention_mask
from embodied_rl.policies.openvla.vision import Layers

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


def generate(model: OpenVLA, prefix: Embedded, noise: Tensor | None, num_tokens: int, temperature: float = 1.0) -> Generated:
    """Sample `num_tokens` action tokens for every row.

    Args:
        prefix: what `OpenVLA.prefix` gives, padded on the left so that all rows end together.
        noise: [B, num_tokens] uniform in [0, 1), or None for the most likely tokens.
        temperature: > 0; log-probabilities are of the distribution at this temperature.
    """
    layers, scores, embedding = Layers.of(model.language_model.model), model.action_scorer(), model.action_embedder()
    length = prefix.mask.shape[1]
    cache = layers.allocate(prefix.embeds, prefix.places(num_tokens - 1), keep=True)
    mask = attention_mask(prefix.mask, causal=True) if prefix.padded else None
    hidden = at_prompt = layers.read(prefix.embeds, cache, start=0, mask=mask, causal=not prefix.padded, last=1)
    choices, log_probs = [], []
    for step in range(num_tokens):
        distribution = TokenDistribution.from_logits(scores(hidden), temperature)
        log_probs.append(distribution.log_probs)
        choices.append(distribution.sample(None if noise is None else noise[:, step : step + 1]))
        if step + 1 < num_tokens:
            mask = _step_mask(prefix, step)
            hidden = layers.read(embedding(choices[-1]), cache, start=length + step, mask=mask, causal=False, last=1)
    chosen = torch.cat(choices, dim=1)
    return Generated(chosen, TokenDistribution(torch.cat(log_probs, dim=1)).log_prob(chosen), at_prompt[:, 0])


def _step_mask(prefix: Embedded, step: int) -> Tensor | None:
    """[B, 1, 1, T + step + 1] bool: the prefix without its padding, and all action tokens so far; None when nothing is padded."""
    return F.pad(prefix.mask, (0, step + 1), value=True)[:, None, None, :] if prefix.padded else None


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
        """For a policy's copy, whose weights lie elsewhere: the copy compiles and captures again."""
        return Accelerated(copy.deepcopy(self._function, memo), self.mode, compile_backend=self._compile_backend)

    @property
    def num_graphs(self) -> int:
        """Shapes captured so far."""
        return len(self._graphs)

    def __call__(self, tensors: dict[str, Tensor | None], **key: bool | float) -> Output:
        """Run on `tensors`; `key` goes to the function unchanged and distinguishes captures."""
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
        copies = {name: part.clone() for name, part in vars(self._outputs).items()}
        return type(self._outputs)(**copies)
