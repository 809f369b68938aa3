"""A function of tensors, run directly, compiled, or as a CUDA graph: where starting kernels one by one costs more than running them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

GenerationMode = Literal["eager", "compile", "cuda_graph"]
"""eager: anywhere. compile: `torch.compile` of the whole decision, once per shape. cuda_graph: a CUDA graph per shape."""


Output = TypeVar("Output")
"""A frozen dataclass of tensors."""


class Accelerated(Generic[Output]):
    """A function of tensors, run directly, compiled, or captured once for each shape of its inputs and replayed.

    The function takes tensors and None by name and a key of Python values on which it may branch, and returns a frozen dataclass of
    tensors. It must not wait for the device. Weights are read at their addresses of the capture: change them in place.
    """

    def __init__(
        self, function: Callable[..., Output], mode: GenerationMode, *, compile_backend: str = "inductor", direct_calls: int = 0
    ) -> None:
        """`direct_calls`: calls of a shape before it is captured, which costs as much as three."""
        self.mode = mode
        self._direct_calls = direct_calls
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._function = function
        self._compile_backend = compile_backend
        self._compiled: Callable[..., Output] | None = None
        self._graphs: dict[tuple[object, ...], _Graph[Output]] = {}
        self._pool: Any = None
        """Memory that all graphs share: one runs at a time, and its outputs are copied before the next."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated[Output]:
        """Copy for a policy's copy with weights elsewhere: the copy compiles and captures again."""
        function = copy.deepcopy(self._function, memo)
        return Accelerated(function, self.mode, compile_backend=self._compile_backend, direct_calls=self._direct_calls)

    @property
    def num_graphs(self) -> int:
        """Number of shapes captured so far."""
        return len(self._graphs)

    def __call__(self, tensors: dict[str, Tensor | None], **key: bool | float) -> Output:
        """Run on `tensors`; `key` is passed on unchanged and distinguishes captures."""
        if self.mode == "compile":
            if self._compiled is None:
                self._compiled = torch.compile(self._function, fullgraph=True, dynamic=False, backend=self._compile_backend)
            # Inside inference mode, arrays that the function reads would become tensors of another kind than where they are guarded.
            with torch.inference_mode(False), torch.no_grad():
                return self._compiled(**tensors, **key)
        given = [tensor for tensor in tensors.values() if tensor is not None]
        if self.mode != "cuda_graph" or not all(tensor.is_cuda for tensor in given):
            return self._function(**tensors, **key)
        signature = tuple((name, None if x is None else (tuple(x.shape), x.dtype)) for name, x in tensors.items())
        place = (*signature, *sorted(key.items()))
        self._calls[place] += 1
        if self._calls[place] <= self._direct_calls:
            return self._function(**tensors, **key)
        with torch.cuda.device_of(given[0]):
            if place not in self._graphs:
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._graphs[place] = _Graph(self._function, tensors, key, self._pool)
            return self._graphs[place].replay(tensors)

    def clear(self) -> None:
        """Forget all captures, with their memory: the function reads tensors that have moved."""
        self._graphs.clear()
        self._calls.clear()
        self._pool = None


class _Graph(Generic[Output]):
    """One captured shape: inputs are copied into its own memory, outputs are cloned from it."""

    def __init__(
        self, function: Callable[..., Output], tensors: dict[str, Tensor | None], key: dict[str, bool | float], pool: Any = None
    ) -> None:
        self._inputs = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
        # Libraries choose and load kernels in their first calls, which a capture must not contain.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                function(**self._inputs, **key)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is one of the first GPU that captured. Other threads may go on with what a capture forbids.
        # A capture that fails would leave this thread on its stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self._outputs = function(**self._inputs, **key)

    def replay(self, tensors: dict[str, Tensor | None]) -> Output:
        for name, place in self._inputs.items():
            source = tensors[name]
            if place is not None and source is not None:
                place.copy_(source)
        self._graph.replay()
        copies = {name: part.clone() for name, part in vars(self._outputs).items()}
        return type(self._outputs)(**copies)
