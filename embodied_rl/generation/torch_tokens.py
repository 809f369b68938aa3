"""Continuous batching in this process with a transformers model: no separate engine, any attention model, CPU or GPU.

Each `poll` runs decode steps of all active rows at once. Between two steps, waiting requests replace rows that ended, weights may change,
requests may be aborted, and calls from other threads get their turn.

The cached keys and values of a prompt's beginning are reused: those of earlier turns, of other members of its group, and of the beginning
that all prompts share.
"""

from __future__ import annotations

import math
import warnings
import weakref
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from embodied_rl.errors import UserError
from embodied_rl.generation.slab_cache import SlabCache, attention_by_group, decode_mask
from embodied_rl.generation.tokens import (
    ContextRoom,
    Failure,
    FinishReason,
    GenerationRequest,
    Growing,
    Stepwise,
    uniform_stream,
)
from embodied_rl.policies.accelerated import Accelerated, GenerationMode
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language_weights import load_named_weights
from embodied_rl.policies.model_folder import caps_attention, first_line, max_context, text_config, value_of
from embodied_rl.policies.packing import registered
from embodied_rl.policies.structures import Structures
from embodied_rl.policies.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher

# ---- Drawing tokens from logits: a pure function of the logits, each row's settings and one uniform number a row ------


@dataclass(frozen=True)
class SampledTokens:
    """One sampled token for each of n rows."""

    token: Tensor
    """[n] int64 sampled tokens."""
    log_prob: Tensor
    """[n] float32 log-probability under the model's own distribution."""
    sampling_log_prob: Tensor
    """[n] float32 log-probability under the sampling distribution; 0 at temperature 0."""


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    uniform: Tensor,
    allowed: Tensor | None = None,
    *,
    cuts: bool = True,
) -> SampledTokens:
    """Apply temperature, the allowed tokens, top-k and top-p, and sample by the inverse of the cumulative distribution in vocabulary order.

    Args:
        logits: [n, V]
        temperature: [n] float64; 0 takes the likeliest token.
        top_p: [n] float64; 1 keeps all.
        top_k: [n] int64; 0 keeps all.
        uniform: [n] float64 in [0, 1).
        allowed: [n, V] bool, at least one per row; None: all tokens. The model's own distribution then covers the allowed tokens.
        cuts: whether any row uses top-k or top-p: only then is the vocabulary sorted.

    The order of the vocabulary decides between tokens at the border of top-k that are equally likely; at least one token is kept.
    """
    possible = logits.float() if allowed is None else logits.float().masked_fill(~allowed, float("-inf"))
    own = torch.log_softmax(possible, dim=-1)
    greedy = temperature == 0
    scaled = own / torch.where(greedy, 1.0, temperature)[:, None].to(own.dtype)
    used = torch.log_softmax(_cut(scaled, top_p, top_k) if cuts else scaled, dim=-1)
    cumulative = used.double().exp_().cumsum_(-1)
    # Scaled by the rounded sum, so that a uniform number near 1 cannot fall behind the last token.
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    token = torch.where(greedy, own.argmax(-1), drawn)
    sampling = torch.where(greedy, torch.zeros_like(own[:, 0]), used.gather(-1, token[:, None]).squeeze(-1))
    return SampledTokens(token, own.gather(-1, token[:, None]).squeeze(-1), sampling)


def _cut(scaled: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set tokens outside top-k and top-p to -inf."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    size = scaled.shape[-1]
    rank = torch.arange(size, device=scaled.device)
    kept = rank < torch.where(top_k > 0, top_k, size)[:, None]
    probability = torch.softmax(torch.where(kept, ordered, float("-inf")).double(), dim=-1)
    before = probability.cumsum(-1) - probability
    # The smallest set that reaches top_p contains a token if those before it do not reach top_p yet.
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0) | (rank == 0)
    return torch.empty_like(scaled).scatter_(-1, order, torch.where(kept, ordered, float("-inf")))


@dataclass(frozen=True)
class _Logits:
    logits: Tensor
    """[n, V]"""


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")

_FIRST_COLUMNS = 128
"""Initial number of columns of the cache; it doubles as it fills."""
_LEAST_SHARED, _WORTH_SHARING = 64, 2**25
"""Number of shared first tokens that is worth its own forward: at least the first value, and tokens x parameters at least the second."""
_CAPTURED_TOKENS = 2**12
"""Number of tokens, spare ones included, of a forward of prompts up to which a GPU replays it: longer ones keep it busy."""
_STUCK = Failure("rejected", "The structure of the answer (response_format, tools) allows no further token here: no text satisfies it.")
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass
class _Row(Growing):
    """A request in progress."""

    uniform: np.random.Generator
    matcher: GrammarMatcher | None = None
    """State of the row's structure; None: no structure."""
    position_offset: int = 0
    """Positions minus number of tokens: image tokens share positions in models with three-part rotary positions."""
    shares: bool = True
    """Whether the row's cache is of the current weights and depends only on its tokens."""
    is_stuck: bool = False
    """Whether the structure allows no further token."""

    @property
    def cached(self) -> int:
        """Number of cached tokens: all but the last sampled one, which is the next input."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def known(self) -> np.ndarray:
        """[n] int64 tokens that are cached, or will be after the prompt's forward."""
        return np.concatenate([self.request.prompt_ids, np.asarray(self.token_ids[:-1], np.int64)]).astype(np.int64)

    def add(self, token: int, log_prob: float, sampling_log_prob: float, version: int) -> None:
        if self.matcher is not None and not self.matcher.accept_token(token):
            self.is_stuck, self.shares = True, False  # no token was allowed
            return
        super().add(token, log_prob, sampling_log_prob, version)

    def end(self) -> FinishReason | None:
        if self.is_stuck:
            return "failed"
        if self.token_ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.room.max_new_tokens else None


@dataclass(order=True, frozen=True)
class _Beginning:
    """Cached tokens of a row, in an order in which entries with the longest common beginning are neighbours."""

    key: bytes
    place: int = field(compare=False)
    """Row that contains them."""

    @staticmethod
    def of(token_ids: np.ndarray, place: int = 0) -> _Beginning:
        return _Beginning(token_ids.astype(">u4").tobytes(), place)

    def shared(self, ordered: list[_Beginning], least: int) -> tuple[int, int]:
        """Largest number of first tokens that an entry of `ordered` shares with this prompt (its last token excluded), and that entry's
        row; 0 if fewer than `least`."""
        at, own, best = bisect(ordered, self), np.frombuffer(self.key, ">u4")[:-1], (0, 0)
        for other in ordered[max(at - 1, 0) : at + 1]:
            theirs = np.frombuffer(other.key, ">u4")[: len(own)]
            differs = own[: len(theirs)] != theirs
            best = max(best, (int(differs.argmax()) if differs.any() else len(theirs), other.place))
        return best if best[0] >= least else (0, 0)


@dataclass
class _Admitted:
    """A row that is about to enter the batch."""

    row: _Row
    shared: int
    """Number of first tokens of its prompt that are cached."""
    source: int
    """Row that caches them."""


class TorchTokens(Stepwise):
    """Implements `TokenBackend` with a transformers model that it owns (`LanguagePolicy.generation_model()`)."""

    can_free_memory: bool = True
    """See `TokenCache`; always True, because the cache is a tensor."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_batch: int = 64,
        max_prefill_tokens: int = 8192,
        context: int | None = None,
        version: int = 0,
        seed: int = 0,
        on_update: Literal["recompute", "keep"] = "recompute",
        vision: VisionInputs | None = None,
        tokenizer: ChatTokenizer | None = None,
        least_shared: int | None = None,
        few_shapes: bool | None = None,
    ) -> None:
        """Start with a model's current weights.

        Args:
            model: a transformers causal language model, used in place; `load_weights` writes into it.
            max_batch: rows of one decode step; each row of the cache has room for the longest.
            max_prefill_tokens: columns x rows of one forward of new prompts.
            context: tokens of prompt and answer together; None: the value in the model's configuration.
            seed: seed for requests without one.
            on_update: handling of the cache of requests in flight when weights change. recompute: the new weights recompute it, so each
                token's log-probability is that of its version given all earlier tokens. keep: later tokens attend to keys and values of
                older versions (cheaper, but their log-probabilities belong to no version).
            vision: inputs of a vision-language model.
            tokenizer: tokenizer for answers with structures; None: such requests are refused.
            least_shared: number of shared first tokens that run only once; None: derived from the model's size.
            few_shapes: decode steps and short prompts have few numbers of rows and columns, with spare ones, so that a GPU captures and
                replays them as CUDA graphs: it then does not wait for the host to start one kernel after another. None: on a GPU.

        Raises:
            UserError: the model has layers other than attention, whose state cannot move between rows.
        """
        _check_layers(model.config)
        super().__init__(context or max_context(model.config), seed)
        self._config = model.config
        if caps_attention(self._config):
            model.set_attn_implementation("eager")
        if self._config._attn_implementation != "eager":
            # Other implementations take no mask with a separate length for each row.
            model.set_attn_implementation(registered("sdpa_by_group", attention_by_group))
        self._model = model.eval()
        self._vision = vision
        self._tokenizer = tokenizer
        self._structures: Structures | None = None
        self._three_positions = vision is not None and hasattr(model.model, "get_rope_index")
        self._max_batch, self._max_prefill_tokens = max_batch, max_prefill_tokens
        self.version, self.can_constrain = version, tokenizer is not None
        self._on_update = on_update
        layers = text_config(self._config).num_hidden_layers
        self._few_shapes = self.device.type == "cuda" if few_shapes is None else few_shapes
        mode: GenerationMode = "cuda_graph" if self._few_shapes else "eager"
        appended = _weak(self._appended)
        self._decode, self._sample = Accelerated(appended, mode), Accelerated(_sampled, mode)
        self._prefill = Accelerated(appended, mode, direct_calls=2)
        self._cache = SlabCache(layers, max_batch, min(_FIRST_COLUMNS, self._context), self._context, _weak(self._forget_captures))
        self._rows: list[_Row] = []
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._least_shared = max(_LEAST_SHARED, _WORTH_SHARING // max(parameters, 1)) if least_shared is None else least_shared
        self._kept: dict[int, np.ndarray] = {}
        """{row behind the active ones: its cached tokens}"""
        self._waiting: deque[_Row] = deque()

    # ---- requests, weights and memory -------------------------------------------------------------------------------

    def _check(self, request: GenerationRequest) -> None:
        if self._vision is not None:
            self._vision.check(request.prompt_ids, request.images)
        elif request.images:
            raise UserError(f"Request {request.request_id} has images, but the model that generates takes none.")

    def _grow(self, request: GenerationRequest, room: ContextRoom) -> _Row:
        return _Row(request, room, uniform_stream(self._seed_of(request)), self._matcher(request), shares=not request.images)

    def _begin(self, growing: Growing) -> None:
        assert isinstance(growing, _Row)
        self._waiting.append(growing)

    @torch.inference_mode()
    def _drop(self, growing: Sequence[Growing]) -> None:
        dropped = {id(one) for one in growing}
        for index in reversed([index for index, row in enumerate(self._rows) if id(row) in dropped]):
            self._remove(index)
        self._waiting = deque(row for row in self._waiting if id(row) not in dropped)

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """See `TokenBackend.load_weights`; loads between two decode steps."""
        with self._turn():
            load_named_weights(self._model, tensors)
            self.version = version
            self._kept.clear()
            for row in self._rows:
                row.shares &= self._on_update == "recompute"
            if self._on_update == "recompute" and not self._paused:
                self._refill()

    @property
    def device(self) -> torch.device:
        """Device of the model and its cache."""
        return next(self._model.parameters()).device

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def _forget_captures(self) -> None:
        for captured in (self._decode, self._prefill, self._sample):
            captured.clear()

    def _free(self) -> int:
        freed = self._cache.num_bytes
        self._kept.clear()
        self._cache.free(min(_FIRST_COLUMNS, self._context))
        torch.cuda.empty_cache()  # training may be another process
        return freed

    @torch.inference_mode()
    def _refill(self) -> None:
        """Compute keys and values of all active rows with the current weights."""
        for group in self._groups(list(range(len(self._rows)))):
            self._run_prompts([self._rows[index] for index in group], group)

    def forget(self) -> None:
        with self._turn():
            self._kept.clear()

    def close(self) -> None:
        """Drop requests and cache."""
        with self._turn():
            self._growing, self._ready, self._rows, self._kept = {}, [], [], {}
            self._waiting.clear()
            self._cache.free(1)

    # ---- one step ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        """Admit what fits, then sample one token for each active row."""
        self._admit()
        if not self._rows:
            return
        starts = [row.cached for row in self._rows]
        last = np.array([row.token_ids[-1] for row in self._rows])
        offsets = [row.position_offset for row in self._rows]
        logits = self._append(self._decode, range(len(self._rows)), starts, np.ones(len(starts), np.int64), last, offsets)
        self._take(self._rows, logits, self._sample)
        self._give_out(range(len(self._rows)))

    def _append(
        self,
        forward: Accelerated[_Logits],
        indices: Sequence[int],
        starts: Sequence[int],
        lengths: np.ndarray,
        token_ids: np.ndarray,
        offsets: Sequence[int] | None = None,
    ) -> Tensor:
        """Append tokens to n rows, each after its cached ones.

        Args:
            starts, lengths: number of cached and of new tokens of each row.
            token_ids: [lengths.sum()] new tokens, row after row.
            offsets: positions minus places; None: 0.

        Returns:
            logits [n, V] after each row's last token, with spare rows behind them.
        """
        (count, longest), first = (len(indices), int(lengths.max())), indices[0] if _are_contiguous(indices) else -1
        num_rows, width = count, int((np.asarray(starts) + lengths).max())
        self._cache.make_room(width)
        spacious = self._with_spare(count, longest)
        if spacious is not None:
            (num_rows, longest), first = spacious, 0 if first == 0 else -1
            width = min(_rounded(width), self._cache.num_columns)
        step = np.zeros((num_rows, longest, 3), np.int64)
        step[..., 2] = self._cache.spare_column
        # Padding comes first, so that the last token of each row is in the last place.
        places = np.arange(longest) + (np.asarray(starts) + lengths - longest)[:, None]
        new = np.arange(longest) >= longest - lengths[:, None]
        step[:count][new] = np.stack(
            [token_ids, (places if offsets is None else places + np.asarray(offsets)[:, None])[new], places[new]], 1
        )
        rows = np.arange(num_rows) if first == 0 else np.zeros(num_rows, np.int64)
        rows[:count] = indices
        there = [torch.from_numpy(array).to(self.device) for array in (step, rows)]
        if spacious is None:
            return self._appended(*there, width=width, first=first).logits
        return _replayed(forward, {"step": there[0], "rows": there[1]}, width=width, first=first).logits

    def _with_spare(self, count: int, longest: int) -> tuple[int, int] | None:
        """Rows, and tokens of each, of a forward that a GPU replays; None: it keeps its own shape, and is not replayed."""
        rows, tokens = min(1 << (count - 1).bit_length(), self._max_batch), 1 if longest == 1 else _rounded(longest)
        return (rows, tokens) if self._few_shapes and (tokens == 1 or rows * tokens <= _CAPTURED_TOKENS) else None

    def _appended(self, step: Tensor, rows: Tensor, *, width: int, first: int) -> _Logits:
        """`_append` on the device: step [n, q, 3] has ids, positions and columns; `first`: first row if they are contiguous, else -1."""
        token_ids, position, places = step.unbind(-1)
        self._cache.begin_step(rows, None if first < 0 else slice(first, first + len(rows)), places, width)
        output = self._model(
            input_ids=token_ids,
            position_ids=position.expand(3, -1, -1) if self._three_positions else position,
            attention_mask=self._mask(),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return _Logits(output.logits[:, -1])

    def _give_out(self, indices: range) -> None:
        """Hand out those of these rows that have ended."""
        for index in reversed(indices):
            reason = self._rows[index].end()
            if reason is not None:
                self._end(self._rows[index], reason, _STUCK if reason == "failed" else None)
                self._remove(index)

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._max_batch:
            free = self._max_batch - len(self._rows)
            left = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            start = len(self._rows)
            while left:
                first = len(self._rows)
                admitted, left = self._next_admitted(left)
                shared = self._place(admitted)
                for group in self._groups([index for index in range(first, len(self._rows)) if index not in shared]):
                    rows = [self._rows[index] for index in group]
                    self._take(rows, self._run_prompts(rows, group))
                for group in map(sorted, self._groups(list(shared), shared)):
                    self._take([self._rows[index] for index in group], self._run_rests(group, [shared[index] for index in group]))
            self._give_out(range(start, len(self._rows)))

    def _next_admitted(self, left: list[_Row]) -> tuple[list[_Admitted], list[_Row]]:
        """Split rows into those that run now, and those that wait because they share a beginning with one of these."""
        least = self._least_shared
        if max(len(row.request.prompt_ids) for row in left) <= least:
            return [_Admitted(row, 0, 0) for row in left], []
        held = {index: row.known for index, row in enumerate(self._rows) if row.shares} | self._kept
        sources = sorted(_Beginning.of(token_ids, place) for place, token_ids in held.items())
        now: list[_Admitted] = []
        later: list[_Row] = []
        chosen: list[_Beginning] = []
        for row in left:
            own = _Beginning.of(row.request.prompt_ids)
            shared, source = own.shared(sources, least) if row.shares else (0, 0)
            if row.shares and own.shared(chosen, least)[0] - shared >= least:
                later.append(row)
                continue
            now.append(_Admitted(row, shared, source))
            if row.shares:
                insort(chosen, own)
        return now, later

    def _place(self, admitted: list[_Admitted]) -> dict[int, int]:
        """Append rows to the active ones with their shared beginnings; return {row: number of shared tokens}.

        A new row takes over the inactive row that it shares most with. Afterwards all other shared tokens are in active rows, and inactive
        rows may be lost.
        """
        num_active, taken_over, others = len(self._rows), dict[int, _Admitted](), list[_Admitted]()
        for one in sorted(admitted, key=lambda one: -one.shared):
            if one.shared and one.source >= num_active and one.source not in taken_over:
                taken_over[one.source] = one
            else:
                others.append(one)
        at = {source: source for source in taken_over}  # {row taken over: its current row}
        found: dict[int, int] = {}
        for source, one in taken_over.items():
            place, now = len(self._rows), at[source]
            own, displaced = self._kept.pop(now), self._kept.pop(place, None)
            if displaced is not None:
                self._cache.swap(now, place, max(len(own), len(displaced)))
                self._kept[now] = displaced
                at |= {other: now for other, where in at.items() if where == place}
            elif now != place:
                self._cache.move(now, place, one.shared)
            at[source] = place
            self._rows.append(one.row)
            found[place] = one.shared
        for one in others:
            place = len(self._rows)
            self._kept.pop(place, None)
            self._rows.append(one.row)
            if one.shared:
                self._cache.move(at.get(one.source, one.source), place, one.shared)
                found[place] = one.shared
        return found

    def _groups(self, indices: list[int], shared: Mapping[int, int] | None = None) -> list[list[int]]:
        """Group rows whose prompts share one forward: neighbours in length, split where that saves a forward's worth of padding; a row with
        images runs by itself. `shared`: number of tokens of each row that are not run."""
        groups: list[list[int]] = []
        longest = 0
        lengths = {index: self._length(index) - (shared[index] if shared else 0) for index in indices}
        for done, index in enumerate(sorted(indices, key=lambda index: -lengths[index])):
            length, single = lengths[index], bool(self._rows[index].request.images)
            count = len(groups[-1]) + 1 if groups else 1
            fits = groups and math.prod(self._with_spare(count, longest) or (count, longest)) <= self._max_prefill_tokens
            padded = 4 * length < 3 * longest and (len(indices) - done) * (longest - length) >= self._least_shared
            if fits and not padded and not single and not self._rows[groups[-1][0]].request.images:
                groups[-1].append(index)
            else:
                groups.append([index])
                longest = length
        return groups

    def _length(self, index: int) -> int:
        row = self._rows[index]
        return row.cached if row.token_ids else len(row.request.prompt_ids)

    def _run_prompts(self, rows: list[_Row], indices: list[int]) -> Tensor:
        """Cache each row's tokens up to its next input; return the last logits [n, V]."""
        known = [row.known for row in rows]
        lengths = [len(token_ids) for token_ids in known]
        if not rows[0].request.images and self._with_spare(len(rows), max(lengths)) is not None:
            return self._run_rests(indices, [0] * len(rows))
        token_ids, mask = _padded(known)
        inputs: dict[str, Tensor] = {"input_ids": torch.from_numpy(token_ids), "attention_mask": torch.from_numpy(mask)}
        inputs["position_ids"] = torch.from_numpy(self._positions(rows, known, mask.shape[1]))
        images = rows[0].request.images
        if images:
            assert self._vision is not None
            inputs |= self._vision.tensors(images)
            if self._vision.has_grids:
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._vision.image_token_id).int()
        prompts = DynamicCache()
        device = self.device
        last = torch.tensor(lengths, device=device) - 1
        keep, kept = torch.unique(last, return_inverse=True)
        output = self._model(
            **{name: tensor.to(device) for name, tensor in inputs.items()}, past_key_values=prompts, use_cache=True, logits_to_keep=keep
        )
        for number, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            self._cache.fill(index, prompts, number, length)
        return output.logits[torch.arange(len(rows), device=device), kept]

    def _run_rests(self, indices: list[int], shared: list[int]) -> Tensor:
        """Cache the rest of the rows' known tokens after the shared ones; return the last logits [n, V]."""
        rests = [self._rows[index].known[count:] for index, count in zip(indices, shared, strict=True)]
        return self._append(self._prefill, indices, shared, np.array([len(rest) for rest in rests]), np.concatenate(rests))

    def _positions(self, rows: list[_Row], known: list[np.ndarray], width: int) -> np.ndarray:
        """Positions [n, width] or [3, n, width], int64; also sets each row's offset."""
        plain = np.broadcast_to(np.arange(width), (len(rows), width))
        if not self._three_positions:
            return plain.copy()
        positions = np.broadcast_to(plain, (3, len(rows), width)).copy()
        assert self._vision is not None
        for number, (row, token_ids) in enumerate(zip(rows, known, strict=True)):
            own = self._vision.position_ids(self._model, token_ids, row.request.images)
            positions[:, number, : len(token_ids)] = own
            row.position_offset = int(own.max()) + 1 - len(token_ids)
        return positions

    def _take(self, rows: list[_Row], logits: Tensor, sample: Accelerated[SampledTokens] | None = None) -> None:
        """Sample one token for each row from logits [n, V], whose spare rows come last; `sample` replays a capture."""
        if self._vision is not None:
            logits = self._vision.exclude(logits)
        asked = [row.request for row in rows]
        settings = np.zeros((len(logits), 4))
        settings[: len(rows)] = [
            (one.temperature, one.top_p, one.top_k, row.uniform.random()) for one, row in zip(asked, rows, strict=True)
        ]
        matchers = [row.matcher for row in rows] + [None] * (len(logits) - len(rows))
        allowed = None if self._structures is None else self._structures.allowed(matchers, logits.device)
        there = torch.from_numpy(settings).to(logits.device)
        cuts = any(one.top_k > 0 or one.top_p < 1.0 for one in asked)
        if sample is None:
            sampled = _sampled(logits, there, allowed, cuts=cuts)
        else:
            sampled = _replayed(sample, {"logits": logits, "settings": there, "allowed": allowed}, cuts=cuts)
        self._take_top(rows, logits)
        columns = torch.stack([sampled.token.double(), sampled.log_prob.double(), sampled.sampling_log_prob.double()]).tolist()
        for row, token, log_prob, sampling_log_prob in zip(rows, *columns, strict=False):
            row.add(int(token), log_prob, sampling_log_prob, self.version)

    @staticmethod
    def _take_top(rows: list[_Row], logits: Tensor) -> None:
        """Record the likeliest tokens for rows that request them."""
        most = max(row.request.top_logprobs for row in rows)
        if most == 0:
            return
        found = torch.log_softmax(logits.float(), dim=-1).topk(most)
        for row, token_ids, log_probs in zip(rows, found.indices.tolist(), found.values.tolist(), strict=False):
            if count := row.request.top_logprobs:
                row.top.append(list(zip(token_ids[:count], log_probs[:count], strict=True)))

    def _matcher(self, request: GenerationRequest) -> GrammarMatcher | None:
        if request.structure is None:
            return None
        if self._tokenizer is None:
            raise UserError(f"Request {request.request_id} has a structure, and this backend was made without a tokenizer.")
        if self._structures is None:
            self._structures = Structures(self._tokenizer, text_config(self._config).vocab_size)
        return self._structures.matcher(request.structure, request.stop_ids)

    def _remove(self, index: int) -> None:
        """Move the last active row to the place of an ended one, so that active rows always come first."""
        ended, last = self._rows[index], self._rows.pop()
        place, holds = len(self._rows), not self._paused
        if index < place:
            self._rows[index] = last
        if not holds or not ended.shares or ended.cached < self._least_shared:
            if holds and index < place:
                self._cache.move(place, index, last.cached)
            return
        if index < place:
            self._cache.swap(index, place, max(ended.cached, last.cached))
        self._kept[place] = ended.known

    def _mask(self) -> Tensor | dict[str, Tensor]:
        """Mask of a decode step; one for each kind of layer if a model has several."""
        additive = self._config._attn_implementation == "eager"
        config = text_config(self._config)
        window = None if value_of(config, "use_sliding_window") is False else value_of(config, "sliding_window")
        kinds = set(value_of(config, "layer_types") or ())

        def of(span: int | None) -> Tensor:
            return decode_mask(self._cache.places, self._cache.width, span, self._model.dtype, additive)

        if "sliding_attention" in kinds:
            return {"full_attention": of(None), "sliding_attention": of(window)}
        return of(None if kinds else window)


def _weak(method: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """The method without its object, which stays its owner's: in a circle, a model's memory would wait for the garbage collector."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: _Given.args, **named: _Given.kwargs) -> _Found:
        bound = reference()
        assert bound is not None, "its object is in use"
        return bound(*arguments, **named)

    return call


def _are_contiguous(indices: Sequence[int]) -> bool:
    return list(indices) == list(range(indices[0], indices[0] + len(indices)))


def _rounded(length: int) -> int:
    """The next multiple of 64, or from 256 of a quarter of a power of two."""
    part = max(64, (1 << (length - 1).bit_length()) // 4)
    return -(-length // part) * part


def _sampled(logits: Tensor, settings: Tensor, allowed: Tensor | None, *, cuts: bool) -> SampledTokens:
    """Sample from logits [n, V]; settings [n, 4] float64: temperature, top-p, top-k and a uniform number."""
    temperature, top_p, top_k, uniform = settings.unbind(1)
    return sample_tokens(logits, temperature, top_p, top_k.long(), uniform, allowed, cuts=cuts)


def _replayed(function: Accelerated[_Found], tensors: dict[str, Tensor | None], **key: bool | float) -> _Found:
    """Call a function; the first capture that fails is the last."""
    try:
        return function(tensors, **key)
    except RuntimeError as error:
        if function.mode == "eager":
            raise
        function.clear()
        function.mode = "eager"
        warnings.warn(f"Tokens are generated without CUDA graphs, more slowly: {first_line(error)}", stacklevel=2)
        return function(tensors, **key)


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, q] int64, with zeros on the right, and [n, q] bool where there are any."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    token_ids = np.zeros(mask.shape, np.int64)
    token_ids[mask] = np.concatenate(rows)
    return token_ids, mask


def _check_layers(config: PretrainedConfig) -> None:
    """Raise UserError for a model whose layers keep anything other than keys and values of every token."""
    text = text_config(config)
    unknown = sorted(set(value_of(text, "layer_types") or ()) - _KNOWN_LAYERS)
    states = ("state_size", "ssm_cfg", "time_mix_extra_dim", "conv_kernel", "rescale_every")
    recurrent = [name for name in states if hasattr(text, name)]
    if unknown or recurrent:
        reason = f"its layers ({', '.join(unknown or recurrent)}) keep a state that is not keys and values"
    elif "local" in (value_of(text, "attention_layers") or ()):
        reason = "its local layers measure their window from the longest row of a step"
    elif config.model_type == "bloom" or value_of(text, "alibi"):
        reason = "it derives distances from a mask of whole prompts (ALiBi)"
    else:
        return
    raise UserError(f"The torch backend cannot run model type '{config.model_type}': {reason}. Use the vllm backend.")
