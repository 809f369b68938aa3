"""A tokenizer of words and single signs: short prompts for small models, on boards whose letters each mean something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from embodied_rl.errors import MissingExtraError
from embodied_rl.policies.model_folder import import_transformers
from embodied_rl.policies.tiny_language import CHAT_TEMPLATE, END, PAD, START

UNKNOWN = "<|unk|>"
_PIECE = re.compile(r" ?[a-z]+| ?[^ ]| ")
"""A run of small letters is one piece, everything else is a separate piece: capitals, digits, signs, line ends. A space belongs to what
stands behind it."""
_SIGNS = ["\n", " ", *(space + chr(code) for code in range(33, 127) for space in ("", " "))]
"""Always known: the printable signs of ASCII, without and after a space."""


def word_tokenizer(texts: Iterable[str], max_words: int = 4096) -> Any:
    """A word-level tokenizer in transformers' clothes, of the pieces that occur in `texts` and the signs of ASCII.

    Texts of these pieces decode to themselves; any other piece becomes one unknown token.

    Args:
        max_words: the most frequent ones are kept.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = import_transformers()
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingExtraError("A tokenizer", "language", error) from error
    counted = Counter(piece for text in [*texts, "user", "assistant", "system"] for piece in _PIECE.findall(text))
    frequent = [piece for piece, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:max_words]]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([PAD, START, END, UNKNOWN, *_SIGNS, *frequent]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE.pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
