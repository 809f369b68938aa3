"""A small random Llama with its own tokenizer, as an ordinary Hugging Face folder: for tests, benchmarks and small experiments.

Nothing is downloaded: the tokenizer is trained on the given texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from embodied_rl.errors import UserError, from_extra
from embodied_rl.files import reset_mode
from embodied_rl.memory import parameter_bytes, require_memory
from embodied_rl.policies.model_folder import import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
"""Special tokens, ids 0, 1 and 2. END closes every turn and ends a sequence."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: each turn between START and END, with its role in the first line."""


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the model; by default about 0.2 million weights plus the embeddings."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    """Number of heads, each of size 32: the smallest that vLLM supports on a CPU."""
    num_key_value_heads: int = 1
    intermediate_size: int = 256
    max_context: int = 512
    tied: bool = False
    """Whether the output layer is the embedding."""
    spread: float = 0.02
    """Standard deviation of random weights; tests that need distributions far from uniform use a larger one."""

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads) or self.num_heads % self.num_key_value_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_heads {self.num_heads}, "
                f"and num_heads one of num_key_value_heads {self.num_key_value_heads}."
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with transformers' interface; every text can be encoded and decodes to itself.

    Args:
        texts: training texts; frequent words become single tokens.
        vocab_size: upper limit; always includes 256 bytes and three special tokens.

    Raises MissingExtraError; UserError: `vocab_size` is too small for these.
    """
    with from_extra("A tokenizer", "language"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 3:
        raise UserError(f"vocab_size must be >= {len(alphabet) + 3} (the bytes and three special tokens), got {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START, END], initial_alphabet=sorted(alphabet), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Any, **special: str) -> Any:
    """A tokenizer of the library `tokenizers`, with transformers' interface."""
    wrapped = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        **special,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    *,
    shape: TinyShape | None = None,
    vocab_size: int = 512,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write config.json, model.safetensors, the tokenizer and its chat template; equal seed and texts give an equal folder.

    Args:
        texts: training texts of the tokenizer, with at most `vocab_size` tokens.
        tokenizer: tokenizer to use instead (`word_tokenizer`, say).

    Raises UserError: see `train_tokenizer`.
    """
    shape = shape or TinyShape()
    folder = Path(folder)
    tokenizer = train_tokenizer(texts, vocab_size) if tokenizer is None else tokenizer
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_context,
        tie_word_embeddings=shape.tied,
        initializer_range=shape.spread,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):  # shapes without memory, and without drawing random numbers
        parts = parameter_bytes(transformers.LlamaForCausalLM(config))
    require_memory("policy.tiny with these sizes", parts, "policy.tiny.hidden_size, intermediate_size or num_layers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    reset_mode(folder)
    return folder


UNKNOWN = "<|unk|>"
_PIECE = re.compile(r" ?[a-z]+| ?[^ ]| ")
"""A run of small letters is one piece; every other character (capital, digit, sign, line end) is its own piece. A space belongs to the
piece after it."""
_SIGNS = ["\n", " ", *(space + chr(code) for code in range(33, 127) for space in ("", " "))]
"""Pieces that are always known: printable ASCII signs, with and without a leading space."""


def word_tokenizer(texts: Iterable[str], max_words: int = 4096) -> Any:
    """Make a word-level tokenizer with transformers' interface, from the pieces in `texts` and the ASCII signs.

    Texts of these pieces decode to themselves; any other piece becomes the unknown token.

    `max_words`: number of most frequent words to keep. Raises MissingExtraError: transformers is not installed.
    """
    with from_extra("A tokenizer", "language"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    counted = Counter(piece for text in [*texts, "user", "assistant", "system"] for piece in _PIECE.findall(text))
    frequent = [piece for piece, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:max_words]]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([PAD, START, END, UNKNOWN, *_SIGNS, *frequent]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE.pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer, unk_token=UNKNOWN)
