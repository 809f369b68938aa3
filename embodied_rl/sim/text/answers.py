r"""Answers to questions with one right answer: find the answer in a text, and compare two answers by meaning.

Numbers are compared as exact fractions: ``1/2``, ``0.5``, ``50%``, ``\frac{1}{2}`` and ``.50`` are one number, ``1,200`` and ``1200`` are,
``0.33`` and ``1/3`` are not (unless a tolerance is given). Everything else is compared as text, ignoring LaTeX, case and spaces.
"""

from __future__ import annotations

import re
from fractions import Fraction

from embodied_rl.errors import require_known

KINDS = ("auto", "number", "choice", "text")
"""Kinds of answers; auto decides by the right answer."""

MAX_CHARS = 500
"""Most characters of an answer that is examined; a longer one counts as no answer."""
_MAX_EXPONENT = 1000
_MARK = re.compile("final answer is|final answer:|the answer is|answer is|answer:|####", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.)?(?:[eE][-+]?\d{1,4})?")
_LAST_NUMBER = re.compile(
    r"\\d?frac\{[^{}]*\}\{[^{}]*\}|[-+]?\d[\d,]*\s+\d+\s*/\s*\d+|[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?\s*\\?%?"
)
_CHOICE = re.compile(r"(?<![A-Za-z0-9])\(?([A-Z])\)?(?![A-Za-z0-9'])")
_WORDS = re.compile(r"\b[AI]\b(?= (?!or\b|and\b|is\b|does\b|fits\b)[a-z])")
"""The letters A and I as words: "A cat", "I think"."""
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_MIXED = re.compile(r"([-+]?)(\d+) (\d+)/(\d+)")
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")


def boxed(text: str) -> str | None:
    r"""Contents of the last ``\boxed{…}``, inner braces included; None: no closed one."""
    starts = {found.end() for found in re.finditer(r"\\f?boxed\s*\{", text)}
    opened, last = list[int](), (-1, -1)
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in starts:
            last = max(last, (start, brace.start()))
    return text[last[0] : last[1]].strip() if last[0] >= 0 else None


def tagged(text: str, tag: str) -> list[slice]:
    """Places of the contents of each ``<tag>…</tag>``, in any letter case; in one pass, however often a tag is opened and not closed."""
    found, start = list[slice](), None
    for mark in re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE):
        if not mark[1]:
            start = mark.end() if start is None else start
        elif start is not None:
            found.append(slice(start, mark.start()))
            start = None
    return found


def final_answer(text: str, kind: str = "text") -> str | None:
    r"""Answer in a text: the last ``\boxed{…}``, else the last ``<answer>…</answer>``, else the text after the last "the answer is", else
    the last number or choice letter (kind ``number``, ``choice``), else the last line.

    None: there is no answer, or it has more than `MAX_CHARS` characters.
    """
    found = boxed(text)
    if found is None:
        tags = tagged(text, "answer")
        found = text[tags[-1]] if tags else _after_mark(text)
    reader = {"number": number, "choice": choice}.get(kind)
    if found is None or (reader is not None and found.strip() and reader(found) is None):
        found = _named(text if found is None else found, kind, first=found is not None)
    found = None if found is None else found.strip()
    return found if found and len(found) <= MAX_CHARS else None


def equal(given: str, wanted: str, *, kind: str = "auto", tolerance: float = 0.0) -> bool:
    """Whether two answers mean the same.

    Args:
        kind: one of `KINDS`; auto: a number or a single capital letter if `wanted` is one, else text.
        tolerance: for numbers, relative to `wanted` (absolute if that is 0).

    Raises UserError: `kind` is not known.
    """
    kind = kind_of(wanted, kind)
    if kind == "number":
        one, other = number(given), number(wanted)
        if one is None or other is None:
            return False
        return abs(one - other) <= Fraction(tolerance) * (abs(other) or 1)
    if kind == "choice":
        return choice(given) == choice(wanted) is not None
    return plain(given) == plain(wanted)


def kind_of(wanted: str, kind: str = "auto") -> str:
    """Kind of a right answer. Raises UserError for an unknown kind."""
    require_known(kind, KINDS, f"kind='{kind}' is not a kind of answers.")
    if kind != "auto":
        return kind
    if number(wanted) is not None:
        return "number"
    return "choice" if re.fullmatch(r"\s*\(?[A-Z][).]?\s*", wanted) else "text"


def number(text: str) -> Fraction | None:
    """Exact number that a text states; None: it states none. A unit may follow, and a currency or a name (``x = 3``) may precede it."""
    text = _without_decoration(text)
    text = text.rpartition("=")[2].strip() if text.count("=") == 1 else text
    if len(text) > MAX_CHARS:
        return None
    text = re.sub(r"^([-+]?)[$€£]\s*", r"\1", text).removesuffix(".").rstrip()
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    value = _value(text)
    if value is None and (found := re.fullmatch(r"(.*?\d)\s*(?:°|degrees?|[a-zA-Z]{1,12}(?:\^?[23])?)", text)) is not None:
        value = _value(found.group(1).strip())
    return value if value is None or not percent else value / 100


def choice(text: str) -> str | None:
    """Letter of a choice: "B", "(b)", "b.", "B) four" and "option B"; None: none, or several."""
    text = _without_decoration(text)
    if (single := re.fullmatch(r"\(?([A-Za-z])\s*[).:]?", text)) is not None:
        return single.group(1).upper()
    if (first := re.match(r"\(?([A-Z])[).:]\s", text)) is not None:
        return first.group(1)
    found = set(_CHOICE.findall(_WORDS.sub("", text)))
    return found.pop() if len(found) == 1 else None


def plain(text: str) -> str:
    """Text without LaTeX's decorations, case, spaces and a final full stop."""
    text = _without_decoration(text).removesuffix(".")
    return re.sub(r"\s+", "", text.replace("\\ ", "")).casefold()


def _value(text: str) -> Fraction | None:
    if (mixed := _MIXED.fullmatch(text)) is not None and int(mixed.group(4)):
        value = int(mixed.group(2)) + Fraction(int(mixed.group(3)), int(mixed.group(4)))
        return -value if mixed.group(1) == "-" else value
    above, slash, below = text.partition("/")
    first = _decimal(above.strip().removeprefix("(").removesuffix(")"))
    if not slash:
        return _decimal(text)
    second = _decimal(below.strip().removeprefix("(").removesuffix(")"))
    return None if first is None or not second else first / second


def _decimal(text: str) -> Fraction | None:
    text = text.replace("−", "-").replace(" ", "") if re.fullmatch(r"[-+−]?\s*[\d.,eE+-]+", text) else text
    if not any(character.isdigit() for character in text) or _NUMBER.fullmatch(text) is None:
        return None
    exponent = re.search(r"[eE]([-+]?\d+)$", text)
    if exponent is not None and abs(int(exponent.group(1))) > _MAX_EXPONENT:
        return None
    return Fraction(text.replace(",", ""))


def _without_decoration(text: str) -> str:
    text = text.strip().strip("$").strip().strip("*`").strip()
    for old, new in (
        ("\\left", ""),
        ("\\right", ""),
        ("\\!", ""),
        ("\\,", " "),
        ("\\;", " "),
        ("\\$", "$"),
        ("\\%", "%"),
        ("^\\circ", "°"),
        ("^{\\circ}", "°"),
        ("{,}", ","),
    ):
        text = text.replace(old, new)
    text = _UNITS.sub(r" \1", text)
    text = _FRACTION.sub(_written_fraction, text)
    return " ".join(text.split())


def _written_fraction(found: re.Match[str]) -> str:
    sign, above, below = (part.strip() for part in found.groups())
    mixed = " " if found.start() and found.string[found.start() - 1].isdigit() else ""
    if above.isdigit() and below.isdigit():
        return f"{mixed}{sign}{above}/{below}"
    return f"{sign}({above})/({below})"


def _after_mark(text: str) -> str | None:
    ends = [found.end() for found in _MARK.finditer(text)]
    if not ends:
        return None
    lines = text[ends[-1] :].strip().lstrip(":").strip().splitlines()
    return lines[0].strip() if lines else None


def _named(text: str, kind: str, *, first: bool) -> str | None:
    """The last number, letter or line of a text, or the first one if the text follows "the answer is"."""
    if kind == "number":
        found = [number.group().strip() for number in _LAST_NUMBER.finditer(text) if any(letter.isdigit() for letter in number.group())]
    elif kind == "choice":
        found = [str(letter) for letter in _CHOICE.findall(_WORDS.sub("", text))]
    else:
        found = [line for line in text.splitlines() if line.strip()]
    return (found[0] if first else found[-1]) if found else None
