"""Questions with searches: the agent searches a local corpus, then gives an answer that is compared with the known ones.

The form is that of Search-R1 (Jin et al. 2025, arXiv:2503.09516): an action contains ``<search>…</search>``, whose results are the next
observation, or ``<answer>…</answer>``, which ends the episode. Answers are normalised and scored as in SQuAD (Rajpurkar et al. 2016).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from embodied_rl.errors import MissingAssetsError, UserError, require_known
from embodied_rl.files import assets_dir
from embodied_rl.reading import json_lines
from embodied_rl.sim.seeding import chosen
from embodied_rl.sim.text.turns import TextGame, TextSim, TextTurn

# ---- search by BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond") -----------


_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    title: str
    text: str


class Bm25:
    """Ranks documents by score(q, d) = Σ_w idf(w) · f (k1 + 1) / (f + k1 (1 - b + b · length / mean length)), with f the count of the word
    in the document, and idf = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word in n of N documents."""

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
        """The `count` best documents that contain any word of the query, best first; ties in the corpus's order."""
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
    """Documents of a folder of .txt and .md files (titled by their names), or of a .jsonl file of {"title", "text"}.

    Raises UserError: there is neither, or a line is malformed.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
        return [Document(file.stem, file.read_text(encoding="utf-8", errors="replace")) for file in files]
    if not path.is_file():
        raise UserError(f"Corpus '{path}' is neither a folder of .txt and .md files nor a .jsonl file.")
    documents = []
    for where, found in json_lines(path, "Corpus"):
        try:
            documents.append(Document(str(found.get("title", "")), str(found["text"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f'Corpus {where} is not {{"title": …, "text": …}}: {error!r}') from error
    return documents


# ---- questions --------------------------------------------------------------------------------------------------------


SAMPLE = "sample"
"""The package's own corpus of twelve texts and 24 questions."""
INSTRUCTION = "Search with <search>keywords</search>, then answer with <answer>…</answer>."
_TAG = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SHOWN_CHARS = 400


def tasks() -> list[str]:
    return [SAMPLE]


@dataclass(frozen=True)
class Question:
    """One question and all its right answers."""

    text: str
    answers: tuple[str, ...]


def make(
    num_envs: int,
    task: str = SAMPLE,
    corpus: str | None = None,
    questions: str | None = None,
    held_out_questions: str | None = None,
    reward: Literal["exact", "f1"] = "exact",
    num_results: int = 3,
    max_turns: int = 5,
    observation_bytes: int = 2**16,
) -> TextSim:
    """`num_envs` askers in this process.

    Args:
        task: "sample", or any name together with `corpus` and `questions`.
        corpus: folder of .txt and .md files, or a .jsonl file of {"title", "text"}.
        questions: .jsonl file of {"question", "answers": […]} ("golden_answers" and "answer" are read too).
        held_out_questions: of the held-out seeds; None: the same questions.
        reward: exact: 1 for an answer that is one of the known ones. f1: the best share of words in common.
        max_turns: searches and the answer together.

    Raises MissingAssetsError: a file is missing; UserError: a file is malformed, or a value out of its range.
    """
    require_known(reward, ("exact", "f1"), f"Search-QA: reward='{reward}' is not a choice.")
    if not 1 <= num_results <= 20:
        raise UserError(f"Search-QA: num_results must be between 1 and 20, got {num_results}.")
    if task == SAMPLE and corpus is None and questions is None:
        folder = assets_dir() / "search_qa"
        corpus, questions = str(folder / "corpus.jsonl"), str(folder / "questions.jsonl")
    if corpus is None or questions is None:
        raise MissingAssetsError(
            f"Search-QA task '{task}' needs sim.kwargs.corpus (a folder of texts, or .jsonl of title and text) and sim.kwargs.questions "
            "(.jsonl of question and answers). Those of Search-R1: huggingface-cli download --repo-type dataset "
            "PeterJinGo/nq_hotpotqa_train and PeterJinGo/wiki-18-corpus. Offline: sim.task=sample."
        )
    for path in filter(None, (corpus, questions, held_out_questions)):
        if not Path(path).exists():
            raise MissingAssetsError(f"Search-QA: '{path}' does not exist. Offline, sim.task=sample needs no files.")
    index = Bm25(read_corpus(Path(corpus)))
    training = read_questions(Path(questions))
    held_out = training if held_out_questions is None else read_questions(Path(held_out_questions))
    return TextSim(
        f"SearchQA/{task}",
        lambda: SearchGame(index, training, held_out, reward, num_results),
        num_envs,
        max_turns=max_turns,
        instruction=INSTRUCTION,
        observation_bytes=observation_bytes,
    )


class SearchGame(TextGame):
    """One agent with a question."""

    def __init__(self, index: Bm25, training: Sequence[Question], held_out: Sequence[Question], reward: str, num_results: int) -> None:
        self._index, self._training, self._held_out = index, training, held_out
        self._reward, self._num_results = reward, num_results
        self.question = training[0]

    def reset(self, seed: int) -> str:
        """Choose the question by the seed; consecutive held-out seeds take the held-out ones in order."""
        self.question = chosen(seed, self._training, self._held_out)
        return f"{INSTRUCTION}\nQuestion: {self.question.text}"

    def step(self, action: str) -> TextTurn:
        found = _TAG.search(action)
        if found is None:
            return TextTurn(f"No <search> and no <answer> was found. {INSTRUCTION}", info={"kind": "invalid"})
        kind, content = found[1].lower(), found[2].strip()
        if kind == "search":
            best = enumerate(self._index.best(content, self._num_results), 1)
            shown = "\n".join(f"[{rank}] {doc.title}: {doc.text[:_SHOWN_CHARS]}" for rank, (_, doc) in best) or "nothing found"
            return TextTurn(f"<information>\n{shown}\n</information>", info={"kind": "search"})
        exact = float(any(normalised(content) == normalised(answer) for answer in self.question.answers))
        f1 = max(word_f1(content, answer) for answer in self.question.answers)
        reward = exact if self._reward == "exact" else f1
        figures = {"kind": "answer", "exact": exact, "f1": f1}
        return TextTurn(f"The answer was {self.question.answers[0]}.", reward, terminated=True, success=exact == 1.0, info=figures)

    def sample_action(self, random: np.random.Generator) -> str:
        """A search for two words of the question, or a random answer."""
        if random.random() < 0.3:
            chosen = self._training[int(random.integers(len(self._training)))]
            return f"<answer>{chosen.answers[0]}</answer>"
        words = self.question.text.split()
        return f"<search>{' '.join(words[int(place)] for place in random.integers(len(words), size=2))}</search>"


def read_questions(path: Path) -> list[Question]:
    """Questions of a .jsonl file. Raises UserError naming an invalid line."""
    found = []
    for where, data in json_lines(path, "Questions"):
        try:
            answers = next(data[key] for key in ("answers", "golden_answers", "answer") if key in data)
            answers = [answers] if isinstance(answers, str) else answers
            found.append(Question(str(data["question"]), tuple(str(answer) for answer in answers)))
            if not answers:
                raise ValueError("no answer")
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise UserError(f'Questions {where} is not {{"question": …, "answers": […]}}: {error!r}') from error
    if not found:
        raise UserError(f"'{path}' has no questions.")
    return found


def normalised(answer: str) -> str:
    """SQuAD's form: lower case, without punctuation, articles and extra spaces."""
    plain = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def word_f1(answer: str, known: str) -> float:
    """Harmonic mean of precision and recall of words, as in SQuAD; 1 for two empty answers."""
    given, wanted = normalised(answer).split(), normalised(known).split()
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2.0 * common / (len(given) + len(wanted))
