"""Questions with one right answer, as episodes of one or several attempts: generated arithmetic, and data sets of questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodied_rl.errors import UserError, did_you_mean, require_known
from embodied_rl.files import assets_dir
from embodied_rl.reading import json_lines
from embodied_rl.sim.text.answers import KINDS, equal, final_answer, kind_of
from embodied_rl.sim.text.tasks import TaskSim, TextTask

OPERATIONS = ("+", "-", "*", "/")


@dataclass(frozen=True)
class Question:
    """A question and its right answer."""

    text: str
    answer: str
    kind: str = "auto"
    """How answers are compared (`embodied_rl.sim.text.answers.KINDS`)."""


@dataclass(eq=False)
class QuestionTask(TextTask):
    """A question, and up to `attempts` answers to it.

    The right answer gives 1 and ends the episode; a wrong one gives `wrong_reward` and, while attempts are left, the question again.
    Raises UserError for a number out of its range.
    """

    question_of: Callable[[int], Question]
    """Function from a seed to its question."""
    attempts: int = 1
    wrong_reward: float = 0.0
    tolerance: float = 0.0
    instruction: str | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.tolerance < 0:
            raise UserError(f"attempts must be >= 1 and tolerance >= 0, got {self.attempts} and {self.tolerance}.")
        self.max_turns = self.attempts
        self._question, self._turn = Question("", "0"), 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._question, self._turn = self.question_of(seed), 0
        return self._question.text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `TextTask.step`; ``info`` has ``correct`` and the answer that was read, ``given``."""
        self._turn += 1
        wanted, kind = self._question.answer, kind_of(self._question.answer, self._question.kind)
        given = final_answer(action, kind)
        right = given is not None and equal(given, wanted, kind=kind, tolerance=self.tolerance)
        over = right or self._turn >= self.max_turns
        verdict = "Right." if right else "Wrong." if given is not None else "There is no answer."
        text = verdict if over else f"{verdict} Try again.\n{self._question.text}"
        info = {"correct": right, "given": given or "", "success": right}
        return text, 1.0 if right else self.wrong_reward, over, False, info

    def sample_random_action(self) -> str:
        """The right answer, in a box."""
        return f"\\boxed{{{self._question.answer}}}"

    def get_state(self) -> dict[str, Any]:
        return {"question": asdict(self._question), "turn": self._turn}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._question, self._turn = Question(**state["question"]), int(state["turn"])


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arithmetic:
    """Draws questions such as ``7 + 12 * 3 = ?``. Raises UserError for an invalid setting."""

    operations: tuple[str, ...] = ("+", "-")
    terms: Sequence[int] = (2, 2)
    """Least and most numbers in a question."""
    digits: Sequence[int] = (1, 2)
    """Least and most digits of a number."""
    template: str = "{expression} = ?"

    def __post_init__(self) -> None:
        for operation in self.operations:
            require_known(operation, OPERATIONS, f"operations={operation!r} is not a choice.")
        for name, least, most in (("terms", 2, 20), ("digits", 1, 9)):
            pair = vars(self)[name]
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not least <= pair[0] <= pair[1] <= most:
                raise UserError(f"{name} must be [least, most] between {least} and {most}, got {pair!r}.")
        if not self.operations or "{expression}" not in self.template:
            raise UserError("operations must not be empty, and template must name {expression}.")

    def question(self, seed: int) -> Question:
        """Question of a seed; ``/`` is exact, and its answer a fraction."""
        random = np.random.default_rng(seed)
        count = int(random.integers(self.terms[0], self.terms[1] + 1))
        numbers = [self._number(random) for _ in range(count)]
        signs = [self.operations[int(random.integers(len(self.operations)))] for _ in range(count - 1)]
        words = [str(numbers[0])]
        for sign, drawn in zip(signs, numbers[1:], strict=True):
            words += [sign, str(drawn if sign != "/" else max(drawn, 1))]
        return Question(self.template.format(expression=" ".join(words)), str(_evaluate(words)), "number")

    def _number(self, random: np.random.Generator) -> int:
        digits = int(random.integers(self.digits[0], self.digits[1] + 1))
        return int(random.integers(0 if digits == 1 else 10 ** (digits - 1), 10**digits))


def _evaluate(words: Sequence[str]) -> Fraction:
    """Value of alternating numbers and signs: products before sums, from left to right."""
    total, product, sign = Fraction(0), Fraction(int(words[0])), 1
    for operation, word in zip(words[1::2], words[2::2], strict=True):
        value = Fraction(int(word))
        if operation == "*":
            product *= value
        elif operation == "/":
            product /= value
        else:
            total, product, sign = total + sign * product, value, 1 if operation == "+" else -1
    return total + sign * product


def make_arithmetic(
    num_envs: int,
    task: str = "arithmetic",
    operations: Sequence[str] = ("+", "-"),
    terms: Sequence[int] = (2, 2),
    digits: Sequence[int] = (1, 2),
    template: str = "{expression} = ?",
    attempts: int = 1,
    wrong_reward: float = 0.0,
    tolerance: float = 0.0,
    instruction: str | None = "Work out the value; a number or a fraction is the answer.",
) -> TaskSim:
    """`num_envs` environments of arithmetic: see `Arithmetic` and `QuestionTask` for the arguments."""
    source = Arithmetic(tuple(operations), terms, digits, template)
    return TaskSim(task, num_envs, partial(QuestionTask, source.question, attempts, wrong_reward, tolerance, instruction))


def player(observation: str) -> str:
    """The answer to a question of `Arithmetic` in its plain form, ``7 + 12 = ?``. Raises ValueError for another text."""
    return str(_evaluate(observation.strip().splitlines()[-1].removesuffix(" = ?").split()))


# ---- data sets ------------------------------------------------------------------------------------------------------


def make_questions(
    num_envs: int,
    path: str | None = None,
    task: str = "questions",
    kind: str = "auto",
    attempts: int = 1,
    wrong_reward: float = 0.0,
    tolerance: float = 0.0,
    instruction: str | None = None,
) -> TaskSim:
    """`num_envs` environments over a data set of questions.

    Args:
        path: a .jsonl file of {"question": text, "answer": text}; "choices": [text, …] are shown with letters, and "answer" is then
            a letter; "kind" overrides `kind`. None: a few of our own examples.
        kind: how answers are compared.
        attempts, wrong_reward, tolerance, instruction: see `QuestionTask`.

    Raises UserError: the file cannot be read, or a line is not a question.
    """
    questions = read_questions(path or example("questions.jsonl"), kind)

    def chosen(seed: int) -> Question:
        return questions[int(np.random.default_rng(seed).integers(len(questions)))]

    return TaskSim(task, num_envs, partial(QuestionTask, chosen, attempts, wrong_reward, tolerance, instruction))


def read_questions(path: str, kind: str = "auto") -> list[Question]:
    return [_question(row, where, kind) for where, row in read_rows(path, ("question", "answer"), optional=("choices", "kind"))]


def example(name: str) -> str:
    """Path of one of our own small data sets."""
    return str(assets_dir() / "text" / name)


def read_rows(path: str, names: Sequence[str], optional: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(position, row) of a .jsonl file of objects that have `names`, and otherwise only `optional` and ``id``.

    Raises UserError: the file cannot be read, is empty, or a line is not such an object.
    """
    found = json_lines(Path(path).expanduser(), "Data set")
    for where, row in found:
        if not isinstance(row, dict) or any(name not in row for name in names):
            raise UserError(f"Data set {where} must be an object with {' and '.join(names)}, got {row!r:.80}.")
        if unknown := [name for name in row if name not in (*names, *optional, "id")]:
            raise UserError(f"Data set {where}: '{unknown[0]}' is not known.{did_you_mean(unknown[0], (*names, *optional))}")
    if not found:
        raise UserError(f"Data set '{path}' is empty.")
    return found


def _question(row: Mapping[str, Any], where: str, kind: str) -> Question:
    text, answer = row["question"], row["answer"]
    if not isinstance(text, str) or not text.strip() or isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise UserError(f"Data set {where}: question must be a text and answer a text or a number, got {text!r:.60} and {answer!r:.60}.")
    own = row.get("kind", kind)
    require_known(own, KINDS, f"Data set {where}: kind={own!r} is not a kind of answers.")
    choices = row.get("choices")
    if choices is not None:
        if not isinstance(choices, list) or not 2 <= len(choices) <= 26 or not all(isinstance(choice, str) for choice in choices):
            raise UserError(f"Data set {where}: choices must be 2 to 26 texts, got {choices!r:.60}.")
        letters = [chr(ord("A") + index) for index in range(len(choices))]
        if str(answer).strip().upper() not in letters:
            raise UserError(f"Data set {where}: the answer must be one of the letters {letters[0]} to {letters[-1]}, got {answer!r}.")
        text += "".join(f"\n({letter}) {choice}" for letter, choice in zip(letters, choices, strict=True))
        own, answer = "choice", str(answer).strip().upper()
    if not str(answer).strip():
        raise UserError(f"Data set {where}: the answer is empty.")
    return Question(text, str(answer), own)
