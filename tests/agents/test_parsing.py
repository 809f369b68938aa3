"""Answers against what they mean, written out."""

from __future__ import annotations

import pytest

from embodied_rl.agents.parsing import ActionParser, InvalidAction, ValidAction, tagged

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


def test_the_last_summary_counts() -> None:
    assert tagged("<summary>one</summary> then <summary> two\nlines </summary> up", "summary") == "two\nlines"
    assert tagged("nothing", "summary") is None
