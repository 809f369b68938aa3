"""A Hugging Face causal language model as a policy: log-probabilities, entropies and values of sampled tokens by teacher forcing.

Shape legend: B sequences of at most S tokens; E evaluated tokens of one forward; V tokens of the vocabulary; H hidden size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_rl.config.policy import LanguageConfig
from embodied_rl.errors import UserError
from embodied_rl.policies import model_folder
from embodied_rl.policies.base import Role
from embodied_rl.policies.chat_tokenizer import ChatTokenizer
from embodied_rl.policies.language_weights import LanguageWeights, base_of, with_lora
from embodied_rl.policies.packing import Layout, Rows, TokenSequence, by_sequence, pack, packed_inputs, plan_micro_batches
from embodied_rl.policies.structures import Structures
from embodied_rl.policies.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_CHUNK = 1024
"""Number of evaluated tokens whose logits become log-probabilities at a time."""


@dataclass(frozen=True)
class TokenEvaluation:
    """Result of `LanguagePolicy.evaluate`; with gradients if they are enabled."""

    log_prob: Tensor
    """[B, S] float32 log-probability of each token given those before it; 0 where `mask` is False."""
    entropy: Tensor
    """[B, S] float32 entropy of the token's distribution; 0 where `mask` is False."""
    value: Tensor | None
    """[B, S] float32 value of the state before the token; 0 where `mask` is False. None: the policy has no value head."""
    mask: Tensor
    """[B, S] bool: the sequences' own masks, False after a sequence's end."""


class LanguagePolicy(LanguageWeights):
    """A causal language model, or vision-language model, with optional LoRA and value head. Built by `build_language_policy`.

    Dropout is off everywhere, so that a sampled token has the same log-probability in training.
    """

    def __init__(self, model: nn.Module, config: LanguageConfig, tokenizer: ChatTokenizer, vision: VisionInputs | None = None) -> None:
        """Wrap a loaded transformers model, or a peft model around one."""
        super().__init__()
        self.model = cast("PreTrainedModel", model)
        self.config = config
        self.tokenizer = tokenizer
        self.vision = vision
        self._structures: Structures | None = None
        self.value_head = _make_value_head(config.value_head, int(model_folder.text_config(self.hf_config).hidden_size))
        if config.gradient_checkpointing:
            self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.layout: Layout
        self._apart: bool
        self._choose_layout()

    @staticmethod
    def role_of(name: str) -> Role:
        return "value" if name.startswith("value_head") else "backbone"

    def describe(self) -> dict[str, Any]:
        """See `TrainedModule.describe`; the test whether a model keeps packed sequences apart used the real weights."""
        return {"policy": dataclasses.asdict(self.config), "layout": self.layout, "apart": self._apart}

    @property
    def hf_config(self) -> PretrainedConfig:
        """transformers' configuration of the whole model."""
        return self.base.config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def micro_batches(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        """Indices of the sequences of each forward, for which a learner calls `evaluate` and `backward` part by part."""
        return plan_micro_batches([len(sequence) for sequence in sequences], self.config.max_tokens_per_micro_batch, self.layout)

    def evaluate(self, sequences: Sequence[TokenSequence]) -> TokenEvaluation:
        """Log-probabilities, entropies and values of the tokens in the sequences' masks, in as many forwards as `micro_batches`.

        Raises:
            UserError: images for a model without vision, or image tokens that do not match the images.
            ValueError: no sequence was given, one is longer than the model's context, or a token id is outside its embedding.
        """
        return self._evaluate(self.model, sequences)

    @torch.no_grad()
    def reference_log_prob(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """[B, S] float32 log-probabilities under the reference policy: the model without its LoRA, or the copy from `keep_reference`.
        Raises UserError: there is neither."""
        model = self.model if self.has_lora else next(iter(self.reference), None)
        if model is None:
            raise UserError("No reference policy: train with policy.lora_rank > 0, or call keep_reference() before training.")
        with self.adapted.disable_adapter() if self.has_lora else nullcontext():
            return self._evaluate(cast("PreTrainedModel", model), sequences).log_prob

    def keep_reference(self) -> None:
        """Keep the current weights as the reference. With LoRA nothing is copied: the reference is the model without it."""
        if not self.has_lora:
            self.reference = (copy.deepcopy(self.model).eval().requires_grad_(False),)

    def expand_images(self, prompt_ids: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
        """[P'] int64 prompt with as many placeholders as its images take tokens. Raises UserError as `VisionInputs.expand` does."""
        return self._vision().expand(prompt_ids, images)

    def _vision(self) -> VisionInputs:
        if self.vision is None:
            raise UserError(f"Model '{self.config.folder}' takes no images: it is a {self.hf_config.model_type} model, without vision.")
        return self.vision

    def _evaluate(self, model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> TokenEvaluation:
        self._check(sequences)
        # Checkpointing works only in training mode, which changes nothing else, since dropout is off.
        model.train(self.config.gradient_checkpointing and torch.is_grad_enabled())
        shape = (len(sequences), max(len(sequence) for sequence in sequences))
        numbers, columns, answers = [], [], []
        for indices in self.micro_batches(sequences):
            rows = pack([sequences[index] for index in indices], self.layout)
            if len(rows.target) == 0:
                continue
            numbers.append(torch.tensor(indices)[torch.from_numpy(rows.sequence)])
            columns.append(torch.from_numpy(rows.column))
            answers.append(self._forward(model, rows, [sequences[index] for index in indices]))
        mask = torch.zeros(shape, dtype=torch.bool)
        if not answers:
            zeros = torch.zeros(shape, device=self.device)
            return TokenEvaluation(zeros, zeros, None if self.value_head is None else zeros, mask.to(self.device))
        where = (torch.cat(numbers), torch.cat(columns))
        mask[where] = True
        on_device = (where[0].to(self.device), where[1].to(self.device))

        def scatter(parts: list[Tensor]) -> Tensor:
            flat = torch.cat(parts)
            return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put(on_device, flat)

        log_prob, entropy, value = zip(*answers, strict=True)
        values = None if self.value_head is None else scatter([part for part in value if part is not None])
        return TokenEvaluation(scatter(list(log_prob)), scatter(list(entropy)), values, mask.to(self.device))

    def _check(self, sequences: Sequence[TokenSequence]) -> None:
        """Raise ValueError for inputs on which a model would fail without a clear error."""
        if not sequences:
            raise ValueError("evaluate needs at least one sequence.")
        vocabulary, limit = cast(nn.Embedding, self.base.get_input_embeddings()).num_embeddings, model_folder.context_limit(self.hf_config)
        for sequence in sequences:
            largest = int(sequence.token_ids.max())
            if largest >= vocabulary or int(sequence.token_ids.min()) < 0:
                raise ValueError(f"Token ids must be in [0, {vocabulary}), got {largest}: were they made by another tokenizer?")
            if limit is not None and len(sequence) > limit:
                raise ValueError(f"A sequence of {len(sequence)} tokens does not fit the model's context of {limit}.")

    def _forward(self, model: PreTrainedModel, rows: Rows, sequences: Sequence[TokenSequence]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log_prob, entropy and value, each [E]."""
        keep, kept = np.unique(rows.place, return_inverse=True)
        row, column = torch.from_numpy(rows.row).to(self.device), torch.from_numpy(kept).to(self.device)
        target = torch.from_numpy(rows.target).to(self.device)
        with _only(model.get_output_embeddings(), row, column) as hidden:
            output = model(
                **self._inputs(rows, sequences), use_cache=False, logits_to_keep=torch.from_numpy(keep).to(self.device), return_dict=True
            )
        logits = output.logits
        logits = self._keeping(logits if self.vision is None else self.vision.exclude(logits), rows, sequences)
        temperature = torch.tensor([sequence.temperature for sequence in sequences])[torch.from_numpy(rows.sequence)]
        log_prob, entropy = token_statistics(logits, target, None if bool((temperature == 1.0).all()) else temperature.to(self.device))
        value = None if self.value_head is None else self.value_head(hidden[0].float()).squeeze(-1)
        return log_prob, entropy, value

    def _keeping(self, logits: Tensor, rows: Rows, sequences: Sequence[TokenSequence]) -> Tensor:
        """[E, V] logits, -inf for tokens that the answer's structure excluded."""
        excluded: Tensor | None = None
        for number, sequence in enumerate(sequences):
            for first, end, structure, stop_ids in sequence.structures:
                if self._structures is None:
                    self._structures = Structures(self.tokenizer, logits.shape[1])
                allowed = self._structures.allowed_along(structure, stop_ids, sequence.token_ids[first:end].tolist(), logits.device)
                own = np.flatnonzero((rows.sequence == number) & (rows.column >= first) & (rows.column < end))
                excluded = torch.zeros_like(logits, dtype=torch.bool) if excluded is None else excluded
                excluded[torch.from_numpy(own).to(logits.device)] = ~allowed[torch.from_numpy(rows.column[own] - first).to(logits.device)]
        # Once for all answers: a vocabulary's logits are large, and autograd keeps each mask.
        return logits if excluded is None else logits.masked_fill(excluded, float("-inf"))

    def _inputs(self, rows: Rows, sequences: Sequence[TokenSequence]) -> dict[str, Any]:
        images = [image for sequence in sequences for image in sequence.images]
        position_ids = rows.position_ids
        inputs: dict[str, Any] = {}
        if images or self.vision is not None:
            vision = self._vision()
            for sequence in sequences:
                vision.check(sequence.token_ids, sequence.images)
            position_ids = self._positions(vision, rows, sequences)
            inputs = vision.tensors(images) if images else {}
        inputs["input_ids"] = torch.from_numpy(rows.token_ids)
        inputs["position_ids"] = torch.from_numpy(position_ids)
        if rows.attention_mask is not None:
            inputs["attention_mask"] = torch.from_numpy(rows.attention_mask)
        if images and self.vision is not None and self.vision.has_grids:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.vision.image_token_id).int()
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        if rows.attention_mask is None and self._apart:
            inputs |= packed_inputs([len(sequence) for sequence in sequences], self.device)
        return inputs

    def _positions(self, vision: VisionInputs, rows: Rows, sequences: Sequence[TokenSequence]) -> np.ndarray:
        """[R, W] or [3, R, W] int64: the model's own positions of each sequence, at its columns in the row."""
        assert rows.attention_mask is not None
        own = [vision.position_ids(self.base, sequence.token_ids, sequence.images) for sequence in sequences]
        positions = np.zeros((*own[0].shape[:-1], *rows.token_ids.shape), np.int64)
        for row, part in enumerate(own):
            positions[..., row, rows.attention_mask[row]] = part
        return positions

    # ---- layout -----------------------------------------------------------------------------------------------------

    def lay_out(self, layout: Layout, apart: bool) -> None:
        """Use this layout. `apart`: attention of packed rows runs per sequence (`attention_by_sequence`), not with a mask."""
        self.layout, self._apart = layout, apart
        if self.config.attention == "sdpa":
            self.base.set_attn_implementation(by_sequence() if apart else "sdpa")

    def _choose_layout(self) -> None:
        wanted = self.config.layout
        if wanted in ("right", "left") or (wanted == "auto" and self.vision is not None):
            self.lay_out("left" if wanted == "left" else "right", apart=False)
            return
        for apart in (True, False) if self.config.attention == "sdpa" else (False,):
            self.lay_out("packed", apart)
            if self.vision is None and self.keeps_packed_apart():
                return
        if wanted == "packed":
            kind = self.hf_config.model_type
            raise UserError(
                f"policy.layout=packed: a {kind} model with attention '{self.config.attention}' does not keep packed sequences apart. "
                "Use policy.layout=auto or right."
            )
        self.lay_out("right", apart=False)

    @torch.no_grad()
    def keeps_packed_apart(self) -> bool:
        """Whether a packed sequence gets the same logits as an unpacked one; a test on six tokens.

        Models and attention kernels differ: recurrent layers, for example, carry their state over the border, and some models interpret
        masks in their own way.
        """
        vocabulary = int(model_folder.text_config(self.hf_config).vocab_size)
        first = torch.arange(3) % vocabulary
        second, other = (first + 3) % vocabulary, (first + 6) % vocabulary
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)

        def run(tokens: Tensor, position_ids: Tensor) -> Tensor:
            lengths = packed_inputs([3, 3], self.device) if self._apart and len(tokens) == 6 else {}
            return self.model(tokens[None].to(self.device), position_ids=position_ids, use_cache=False, **lengths).logits[0, -3:].float()

        single = run(second, positions[:, :3])
        try:
            packed, changed = run(torch.cat([first, second]), positions), run(torch.cat([other, second]), positions)
        except (TypeError, ValueError, RuntimeError, IndexError):
            if not self._apart:
                raise
            return False  # the model rejects its mask or lengths
        # The preceding sequence must not matter at all; the difference from the unpacked sequence may only be rounding.
        return bool(torch.equal(packed, changed)) and bool((packed - single).abs().max() <= 0.05 * single.std() + 1e-5)


def build_language_policy(config: LanguageConfig, device: str | torch.device = "cpu", *, weights: bool = True) -> LanguagePolicy:
    """Load a model folder, and add LoRA and a value head.

    A value head stored in the adapter's folder, or in the model's, is loaded; a new one starts at 0 everywhere.

    `weights`: False leaves the weights random, for a state that is loaded next; the folder then needs none.
    Raises MissingExtraError; UserError: a file is missing or damaged, or the configuration does not fit the model.
    """
    if weights:
        model_folder.check_model_folder(Path(config.folder))
    model_folder.check_tokenizer(Path(config.folder))  # before reading gigabytes
    model = model_folder.load_model(config.folder, dtype=config.dtype, attention=config.attention, device=device, weights=weights)
    described = base_of(model).config
    tokenizer = ChatTokenizer.read(config.folder, described)
    vision = VisionInputs.read(config.folder, described) if model_folder.is_vision_language(described) else None
    policy = LanguagePolicy(with_lora(model, config), config, tokenizer, vision).to(device)
    for folder in (config.adapter, config.model):
        if folder is not None and policy.load_value_head(Path(folder)):
            break
    return policy


def token_statistics(logits: Tensor, target: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, both [E] float32, from logits [E, V], targets [E] and temperatures [E] (None: 1).

    In float32, some tokens at a time: the softmax of a large vocabulary dominates memory.
    """
    every = [logits, target] if temperature is None else [logits, target, temperature]
    parts = [[one[start : start + _CHUNK] for one in every] for start in range(0, len(target), _CHUNK)]
    if len(parts) == 1 or not torch.is_grad_enabled():
        results = [_statistics(*part) for part in parts]
    else:
        results = [checkpoint(_statistics, *part, use_reentrant=False) for part in parts]
    return torch.cat([result[0] for result in results]), torch.cat([result[1] for result in results])


def _statistics(logits: Tensor, target: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    own = logits.float()
    log_probs = torch.log_softmax(own if temperature is None else own / temperature[:, None], dim=-1)
    # A logit of -inf (a token that the model excludes) has p log p = 0. Clamped before the product, otherwise its gradient would be 0 times
    # infinity. The changed tokens have probability 0 in float32.
    terms = log_probs.exp() * log_probs.clamp(min=-1e4)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -terms.sum(-1)


@contextmanager
def _only(head: nn.Module, row: Tensor, column: Tensor) -> Iterator[list[Tensor]]:
    """Make the model's own head compute logits [E, V] of only these hidden states, and collect them, [E, H] per call. With padded rows,
    selecting whole columns would cost far more."""
    seen: list[Tensor] = []

    def narrowed(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
        seen.append(arguments[0][row, column])
        return (seen[-1],)

    handle = head.register_forward_pre_hook(narrowed)
    try:
        yield seen
    finally:
        handle.remove()


def _make_value_head(kind: str, hidden_size: int) -> nn.Module | None:
    if kind == "none":
        return None
    for width in (hidden_size, hidden_size // 2):  # the first one's random numbers are drawn for either kind
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        if kind == "linear":
            return last
    return nn.Sequential(nn.Linear(hidden_size, hidden_size // 2), nn.GELU(), last)
