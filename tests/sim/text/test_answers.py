"""Answers: what a text says in the end, and what means the same. Every expectation is written out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from embodied_rl.errors import UserError
from embodied_rl.sim.text.answers import boxed, choice, equal, final_answer, kind_of, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42), ("-7", -7), ("+7", 7), ("1,234", 1234), ("1,234,567.5", Fraction(2469135, 2)), ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)), ("5.", 5), ("1/2", Fraction(1, 2)), ("-1/2", Fraction(-1, 2)), (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\dfrac{-3}{4}", Fraction(-3, 4)), (r"-\frac{3}{4}", Fraction(-3, 4)), ("3 1/2", Fraction(7, 2)), ("-3 1/2", Fraction(-7, 2)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        ("50%", Fraction(1, 2)), (r"12.5\%", Fraction(1, 8)), ("2.5e3", 2500), ("1e-3", Fraction(1, 1000)),
        ("$5", 5), ("-$5", -5), ("$5$", 5), ("$\\$1{,}000$", 1000), ("x = 3", 3), ("5 cm", 5), ("5cm^2", 5), ("90°", 90), (r"90^\circ", 90),
        (r"5\text{ cm}", 5), ("42.", 42), ("**42**", 42), ("− 3", -3), ("(1)/(4)", Fraction(1, 4)), ("007", 7),
    ],
)  # fmt: skip
def test_numbers(text: str, value: Fraction | int) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1/0",
        "1,23",
        "1.2.3",
        "3 apples and 4 pears",
        "1 2",
        "--3",
        "nan",
        "inf",
        "1e99999",
        "1/2/3",
        "four",
        "x = y = 3",
        "٣ ٤",
        "9" * 600,
    ],
)
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("b.", "B"),
        ("B) four", "B"),
        ("The answer is B", "B"),
        ("**C**", "C"),
        (r"\text{D}", "D"),
        ("option E.", "E"),
    ],
)
def test_choices(text: str, letter: str) -> None:
    assert choice(text) == letter


@pytest.mark.parametrize("text", ["", "A or B", "four", "Both A and C", "AB"])
def test_what_is_no_choice(text: str) -> None:
    assert choice(text) is None


@pytest.mark.parametrize(
    ("text", "kind", "answer"),
    [
        (r"so \boxed{4} … no, \boxed{\frac{1}{2}}.", "number", r"\frac{1}{2}"),
        (r"\boxed{5} and \boxed{unclosed", "number", "5"),
        ("I think 3.\n<answer> 12 </answer> bye 9", "number", "12"),
        ("The answer is 12 apples, not 13.", "number", "12"),
        ("The answer is: 12", "number", "12"),
        ("3 + 4 = 7\n#### 7", "number", "7"),
        ("First 3, then 4,000", "number", "4,000"),
        ("It is 3/4", "number", "3/4"),
        ("It is -2.", "number", "-2"),
        ("So B fits; A does not. Answer: (B)", "choice", "(B)"),
        ("A is wrong, so it must be C", "choice", "C"),
        ("\u0130\u0130\u0130\u0130 The Answer is Paris", "text", "Paris"),  # which have more letters in lower case
        ("It must be C, I think", "choice", "C"),
        ("thinking\nParis\n", "text", "Paris"),
        ("", "text", None),
        ("no digits", "number", None),
        ("x" * 600, "text", None),
    ],
)
def test_what_a_text_says_in_the_end(text: str, kind: str, answer: str | None) -> None:
    assert final_answer(text, kind) == answer


def test_boxes_may_hold_braces() -> None:
    assert boxed(r"\boxed{\sqrt{x^{2}}} and {more}") == r"\sqrt{x^{2}}"
    assert boxed("no box") is None
    assert boxed(r"\boxed{1} then \boxed{2") == "1", "the last one that is closed"
    assert boxed(r"} \boxed{a \fbox{b} \boxed {c}} \boxed{d} {") == "d"
    assert boxed(r"\boxed{" * 200_000) is None, "in one pass: what a model repeats is not read again and again"


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("0.5", "1/2", True),
        ("50%", "0.5", True),
        ("0.33", "1/3", False),
        ("1200", "1,200", True),
        ("12", "12.0", True),
        ("12.01", "12", False),
        ("twelve", "12", False),
        ("b", "B", True),
        ("C", "B", False),
        ("paris.", "Paris", True),
        (r"\text{Paris}", "paris", True),
        ("x+1", "x + 1", True),
        ("(1, 2)", "(1,2)", True),
        ("(2, 1)", "(1,2)", False),
        (r"\left(1,2\right)", "(1,2)", True),
        ("Paris, France", "Paris", False),
    ],
)
def test_same_answers(given: str, wanted: str, same: bool) -> None:
    assert equal(given, wanted) is same


def test_tolerance_is_relative_to_the_right_answer() -> None:
    assert equal("3.14", "3.14159", tolerance=1e-3)
    assert not equal("3.13", "3.14159", tolerance=1e-3)
    assert equal("0.0005", "0", tolerance=1e-3)


def test_kinds() -> None:
    assert [kind_of(wanted) for wanted in ("1/2", "B", "(C)", "Paris", "AB")] == ["number", "choice", "choice", "text", "text"]
    assert kind_of("5", "text") == "text"
    assert not equal("5.0", "5", kind="text")
    with pytest.raises(UserError, match=r"kind='numbr' is not a kind of answers\. Did you mean 'number'"):
        kind_of("5", "numbr")
