"""Answers against what they mean, written out."""

from __future__ import annotations

import random
import re

import pytest

from embodied_rl.agents.parsing import ActionParser, InvalidAction, ValidAction
from embodied_rl.sim.text.answers import tagged

MOVES = ("up", "down", "pick up")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("up", ValidAction("up")),
        ("  UP \n", ValidAction("up")),
        ("Pick  Up", ValidAction("pick up")),
        ("upwards", InvalidAction("unknown_action", "upwards")),
        ("", InvalidAction("empty", "")),
        (" \n", InvalidAction("empty", " \n")),
    ],
)
def test_words(answer: str, expected: object) -> None:
    assert ActionParser(tag=None, actions=MOVES).parse(answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The goal is above. <action>up</action>", ValidAction("up")),
        ("<ACTION> pick up </ACTION>", ValidAction("pick up")),
        ("up", InvalidAction("no_tag", "up")),
        ("<action>up", InvalidAction("no_tag", "<action>up")),
        ("<action>up</action><action>down</action>", InvalidAction("several_tags", "<action>up</action><action>down</action>")),
        ("<action>jump</action>", InvalidAction("unknown_action", "<action>jump</action>")),
        ("<action> </action>", InvalidAction("empty", "<action> </action>")),
        ("", InvalidAction("empty", "")),
    ],
)
def test_tags(answer: str, expected: object) -> None:
    assert ActionParser(tag="action", actions=MOVES).parse(answer) == expected


def test_any_text_where_no_action_is_listed_and_its_letters_stay_as_they_are() -> None:
    assert ActionParser(tag="answer").parse("So: <answer>\\boxed{Seven}</answer>") == ValidAction("\\boxed{Seven}")


def test_an_action_that_is_too_long_for_its_simulator_is_none() -> None:
    """It would end the run."""
    parser = ActionParser(tag=None, most_bytes=4)
    assert parser.parse(" öö\n") == ValidAction("öö")
    assert parser.parse("ööx") == InvalidAction("too_long", "ööx")
    assert parser.parse("\ud800xx", cut=True) == InvalidAction("cut", "\ud800xx")


def test_a_cut_answer_counts_when_it_is_an_action_all_the_same() -> None:
    parser = ActionParser(tag="action", actions=MOVES)
    assert parser.parse("<action>up</action> because", cut=True) == ValidAction("up")
    assert parser.parse("<action>u", cut=True) == InvalidAction("cut", "<action>u")


def test_tags_are_paired_as_an_expression_pairs_them() -> None:
    chance = random.Random(5)
    for _ in range(500):
        text = "".join(chance.choice(["<a>", "</A>", "</a>", "<A>", "x\n", "<b>", "</b>"]) for _ in range(chance.randrange(12)))
        assert [text[place] for place in tagged(text, "a")] == re.findall("<a>(.*?)</a>", text, re.DOTALL | re.IGNORECASE), text
        kept = re.sub("<b>.*?</b>", "", text, flags=re.DOTALL | re.IGNORECASE)
        found = re.findall("<a>(.*?)</a>", kept, re.DOTALL | re.IGNORECASE)
        parsed = ActionParser(tag="a", beside="b").parse(text)
        assert isinstance(parsed, ValidAction) == (len(found) == 1 and found[0].strip() != ""), text
        assert isinstance(parsed, InvalidAction) or parsed.text == found[0].strip()
    assert tagged("<a>" * 1_000_000, "a") == [], "in one pass: what a model repeats is not read again and again"


def test_the_last_summary_counts() -> None:
    text = "<summary>one</summary> then <summary> two\nlines </summary> up"
    assert text[tagged(text, "summary")[-1]] == " two\nlines "
    assert tagged("nothing", "summary") == []
