"""The tool that searches a local corpus (`embodied_rl.sim.text.search_qa`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied_rl.agents.tools.base import ToolError, argument
from embodied_rl.sim.text.search_qa import Bm25, Document, read_corpus, words

__all__ = ["Bm25", "Document", "Search", "read_corpus", "words"]


class Search:
    """The tool ``search``: {query, count} to the best documents."""

    name = "search"
    description = "Search a collection of texts by keywords."

    def __init__(self, index: Bm25, *, max_count: int = 10, max_chars: int = 1000) -> None:
        """`max_chars`: of each document that are shown."""
        self._index, self._max_count, self._max_chars = index, max_count, max_chars
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "keywords"},
                "count": {"type": "integer", "description": f"how many results, at most {max_count}; 3 if left out"},
            },
            "required": ["query"],
        }

    def run(self, arguments: Mapping[str, Any]) -> str:
        """See `Tool.run`."""
        query, count = argument(arguments, "query", str), argument(arguments, "count", int, 3)
        if not 1 <= count <= self._max_count:
            raise ToolError(f"count must be between 1 and {self._max_count}, got {count}")
        found = self._index.best(query, count)
        if not found:
            return "nothing found"
        return "\n\n".join(f"[{rank}] {doc.title}\n{doc.text[: self._max_chars]}" for rank, (_, doc) in enumerate(found, start=1))

    def close(self) -> None:
        """Nothing is held."""
