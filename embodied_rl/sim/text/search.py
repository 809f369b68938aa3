"""Search over a local corpus by BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond")."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embodied_rl.errors import UserError

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    title: str
    text: str


class Bm25:
    """Ranks documents by score(q, d) = Σ_w idf(w) · f (k1 + 1) / (f + k1 (1 - b + b · length / mean length)), with f how often the word
    stands in the document, and idf = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word in n of N documents."""

    def __init__(self, documents: Sequence[Document], *, k1: float = 1.2, b: float = 0.75) -> None:
        """Raises UserError for an empty corpus."""
        if not documents:
            raise UserError("A corpus to search needs at least one document.")
        self.documents = tuple(documents)
        self._k1, self._b = k1, b
        counts = [Counter(words(f"{document.title} {document.text}")) for document in documents]
        self._lengths = [count.total() for count in counts]
        self._mean = max(sum(self._lengths) / len(self._lengths), 1e-9)
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word, times in count.items():
                self._places[word].append((number, times))

    def best(self, query: str, count: int) -> list[tuple[float, Document]]:
        """The `count` best documents that hold any word of the query, best first; equal ones in the corpus's order."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in words(query):
            places = self._places.get(word, [])
            idf = math.log(1.0 + (len(self.documents) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                norm = 1.0 - self._b + self._b * self._lengths[number] / self._mean
                scores[number] += idf * times * (self._k1 + 1.0) / (times + self._k1 * norm)
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [(scores[number], self.documents[number]) for number in ranked[:count]]


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case."""
    return _WORD.findall(text.lower())


def read_corpus(path: Path) -> list[Document]:
    """A folder of .txt and .md files (titled by their names), or a .jsonl file of {"title", "text"}.

    Raises:
        UserError: there is neither, or a line is malformed.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
        return [Document(file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in files]
    if not path.is_file():
        raise UserError(f"Corpus '{path}' is neither a folder of .txt and .md files nor a .jsonl file.")
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                found = json.loads(line)
                documents.append(Document(str(found.get("title", "")), str(found["text"])))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f'Corpus \'{path}\', line {number} is not {{"title": …, "text": …}}: {error!r}') from error
    return documents
