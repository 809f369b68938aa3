"""Tokenizers whose merges and templates make decoding and tokenising again give other tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

STOP = 1


class MergingTokenizer:
    """Bytes, and one merge: "ab" is token 300 wherever it occurs. The template drops thoughts and strips answers, as many do.

    ``<s>`` opens a turn (token 2), ``</s>`` ends it (token 1).
    """

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        known = {"</s>": STOP, "<s>": 2, "ab": 300}
        return np.array([known.get(part) or ord(part) for part in re.findall(r"</s>|<s>|ab|[\s\S]", text)], np.int64)

    def decode(self, token_ids: np.ndarray | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = {STOP: "" if skip_special_tokens else "</s>", 2: "" if skip_special_tokens else "<s>", 300: "ab"}
        return "".join(special[int(token)] if int(token) in special else chr(int(token)) for token in token_ids)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        text = ""
        for message in messages:
            content = str(message["content"])
            if message["role"] == "assistant":
                content = re.sub(r"<think>.*?</think>", "", content).strip()
            text += f"<s>{str(message['role'])[0]}:{content}</s>\n"
        return text + ("<s>a:" if add_generation_prompt else "")

    def stop_ids(self, *tokens: str) -> tuple[int, ...]:
        return (STOP,)


class ForgetfulTokenizer(MergingTokenizer):
    """Its template leaves earlier answers out."""

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        kept = [message for message in messages if message["role"] != "assistant"]
        return super().chat_text(kept, add_generation_prompt=add_generation_prompt)
