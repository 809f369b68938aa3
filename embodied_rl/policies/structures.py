"""Structured decoding (a JSON schema, a tool call) with xgrammar: which tokens may come next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied_rl.errors import UserError, from_extra
from embodied_rl.policies.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher

_CACHE_BYTES = 64 * 2**20
"""Size of the cache of compiled structures."""


def not_compiled(error: BaseException) -> UserError:
    """xgrammar's error for a structure, in one line and without the location in its source."""
    # "[12:30:00] /project/cpp/x.cc:12: Check failed: (…) is false: what is wrong"
    said = re.sub(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: .*? is false: )?", "", str(error).strip())
    return UserError(f"The structure of an answer cannot be compiled: {' '.join(said.split())[:300] or type(error).__name__}")


class Structures:
    """Compiles and caches structures for one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """`vocab_size`: columns of the model's logits. Raises MissingExtraError: xgrammar is not installed."""
        with from_extra("An answer that keeps to a structure (response_format)", "language"):
            import xgrammar
        self._vocab_size, self._new_matcher = vocab_size, xgrammar.GrammarMatcher
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer.of_transformers, vocab_size=vocab_size)
        # One thread: the others sample.
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def matcher(self, structure: str, stop_ids: Iterable[int]) -> GrammarMatcher:
        """Matcher at the beginning of an answer that a stop token ends. Raises UserError for a structure that cannot be compiled."""
        try:
            compiled = self._compiler.compile_structural_tag(structure)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise not_compiled(error) from error
        matcher: GrammarMatcher = self._new_matcher(compiled, override_stop_tokens=list(stop_ids))
        return matcher

    def allowed(self, matchers: Sequence[GrammarMatcher | None], device: torch.device) -> Tensor | None:
        """[n, V] bool mask of the tokens that may come next; None if no row has a structure."""
        if not any(matcher is not None for matcher in matchers):
            return None
        bits = self._all_allowed(len(matchers))
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.fill_next_token_bitmask(bits, row)
        return self._expanded(bits, device)

    def allowed_along(self, structure: str, stop_ids: Iterable[int], token_ids: Sequence[int], device: torch.device) -> Tensor:
        """[n, V] bool mask of the possible tokens at each position of an n-token answer. Raises ValueError for an invalid answer."""
        matcher, bits = self.matcher(structure, stop_ids), self._all_allowed(len(token_ids))
        for place, token in enumerate(token_ids):
            matcher.fill_next_token_bitmask(bits, place)
            if not matcher.accept_token(int(token)):
                raise ValueError(f"token {place} of an answer violates the structure that it was sampled with: {int(token)}")
        return self._expanded(bits, device)

    def _all_allowed(self, count: int) -> Tensor:
        return torch.full((count, (self._vocab_size + 31) // 32), -1, dtype=torch.int32)

    def _expanded(self, bits: Tensor, device: torch.device) -> Tensor:
        places = torch.arange(32, dtype=torch.int32, device=device)
        return ((bits.to(device)[..., None] >> places) & 1).bool().flatten(1)[:, : self._vocab_size]
