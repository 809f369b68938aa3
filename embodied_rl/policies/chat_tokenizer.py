"""A model's own tokenizer and chat template, with errors that name the folder. Contains no weights and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_rl.errors import UserError
from embodied_rl.policies.model_folder import check_tokenizer, first_line, import_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text, or a list of parts {"type": "text" | "image", …}}"""


class ChatTokenizer:
    """Converts text to token ids and back.

    Prompts are tokenised here once. Sampled tokens stay token ids: `decode` is for people and simulators, and its text is never tokenised
    again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._tokenizer = tokenizer
        self._source = source

    @staticmethod
    def read(folder: str | Path, config: PretrainedConfig | None = None) -> ChatTokenizer:
        """Read from a model folder, whose config.json is read too unless it is given as `config`.
        Raises UserError: there is no tokenizer, or it cannot be read."""
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"Tokenizer folder '{folder}' does not exist.")
        check_tokenizer(folder)
        transformers = import_transformers()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"Cannot read the tokenizer in '{folder}': {type(error).__name__}: {first_line(error)}") from error
        return ChatTokenizer(tokenizer, str(folder))

    @property
    def of_transformers(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added ones (a model's embedding may be larger)."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def id_of(self, token: str) -> int:
        """Id of one token. Raises UserError if the vocabulary lacks it."""
        found = self._tokenizer.get_vocab().get(token)
        if found is None:
            raise UserError(f"The tokenizer in '{self._source}' has no token '{token}'.")
        return int(found)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """Token ids [n] int64 of a text; n may be 0. Half of a surrogate pair, which tools and simulators may send, counts as "?"."""
        text = text.encode("utf-8", "replace").decode()
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), np.int64)

    def decode(self, token_ids: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with unchanged spaces. Ids outside the vocabulary (padding of the embedding) are ignored."""
        known = [int(token) for token in token_ids if 0 <= int(token) < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> np.ndarray:
        """[P] int64 token ids of messages through the model's chat template, which adds its special tokens itself.
        Raises UserError: there is no template, it refuses the messages, or its result is empty."""
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        token_ids = self.encode(text)
        if len(token_ids) == 0:
            raise UserError(f"The chat template of '{self._source}' makes an empty prompt of {len(messages)} messages.")
        return token_ids

    def chat_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Text that `chat` tokenises. Raises UserError as `chat` does."""
        if not self.has_chat_template:
            raise UserError(
                f"The tokenizer in '{self._source}' has no chat template, so messages cannot be put into a prompt. "
                "Use a model that was made for chat, add chat_template.jinja to the folder, or set agent.chat=false (plain texts)."
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
            )
            return str(text)
        except Exception as error:  # templates are programs: jinja2's errors, KeyError, TypeError, …
            roles = ", ".join(str(message.get("role", "?")) for message in messages) or "none"
            raise UserError(
                f"The chat template of '{self._source}' fails on messages with roles {roles}: {type(error).__name__}: {first_line(error)}"
            ) from error

    def stop_ids(self, *tokens: str) -> tuple[int, ...]:
        """End-of-sequence ids, and those of further tokens, such as a template's end of turn. Raises UserError for an unknown token."""
        found = [] if self.eos_id is None else [int(self.eos_id)]
        return tuple(dict.fromkeys([*found, *(self.id_of(token) for token in tokens)]))

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and its chat template into a model folder."""
        self._tokenizer.save_pretrained(str(folder))
