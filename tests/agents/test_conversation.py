"""Every strategy's prompts, token by token, with a tokenizer and a template that are not stable under decoding and tokenising again."""

from __future__ import annotations

import numpy as np
import pytest

from embodied_rl.agents.agent import Agent, Prompt
from embodied_rl.agents.parsing import ValidAction
from embodied_rl.agents.turns import Turn, rows_of
from embodied_rl.config import AgentConfig
from embodied_rl.errors import UserError
from tests.agents.toys import STOP, ForgetfulTokenizer, MergingTokenizer

TOKENS = MergingTokenizer()
SPLIT_AB = np.array([ord("a"), ord("b"), STOP])
"""The text "ab" sampled as two tokens: tokenised again it would be the one token 300."""


def make(max_context: int = 500, tokenizer: MergingTokenizer = TOKENS, **options: object) -> Agent:
    config = AgentConfig(**{"answer": "word", "max_new_tokens": 8, **options})  # type: ignore[arg-type]
    return Agent(config, tokenizer, instruction="win", max_context=max_context)


def talk(agent: Agent, observations: list[str], answers: list[np.ndarray]) -> list[np.ndarray]:
    """The prompts of an episode."""
    conversation, prompts = agent.begin(), []
    for observation, answer in zip(observations, answers, strict=True):
        prompt = conversation.prompt(observation)
        assert isinstance(prompt, Prompt)
        prompts.append(prompt.token_ids)
        text = TOKENS.decode(answer)
        conversation.answered(answer, text, text.strip())
    return prompts


def turns(prompts: list[np.ndarray], answers: list[np.ndarray]) -> list[Turn]:
    return [
        Turn(
            "o", prompt, answer, -np.arange(len(answer), dtype=np.float32), np.zeros(len(answer), np.int64), "x", ValidAction("x"), 0.0, 0.0
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def test_full_history_continues_from_the_very_tokens_that_were_sampled() -> None:
    thinking = np.concatenate([TOKENS.encode("<think>c</think> "), SPLIT_AB])
    answers = [thinking, SPLIT_AB, SPLIT_AB]
    prompts = talk(make(strategy="full", system="To {instruction}."), ["one", "two", "three"], answers)
    # The premise: through text, the conversation would be made of other tokens.
    text = TOKENS.decode(SPLIT_AB)
    assert TOKENS.encode(text).tolist() == [300]
    for number in (1, 2):
        before = np.concatenate([prompts[number - 1], answers[number - 1]])
        np.testing.assert_array_equal(prompts[number][: len(before)], before)
        assert 300 not in prompts[number]
    expected = "<s>s:To win.</s>\n<s>u:one</s>\n<s>a:<think>c</think> ab</s>\n<s>u:two</s>\n<s>a:ab</s>\n<s>u:three</s>\n<s>a:"
    assert TOKENS.decode(prompts[2], skip_special_tokens=False) == expected
    (row,) = rows_of(turns(prompts, answers))
    np.testing.assert_array_equal(row.token_ids, np.concatenate([prompts[2], answers[2]]))
    np.testing.assert_array_equal(row.token_ids[row.mask], np.concatenate(answers))
    assert row.turn[row.mask].tolist() == [0] * len(thinking) + [1] * 3 + [2] * 3
    assert row.log_prob[row.mask][-3:].tolist() == [0.0, -1.0, -2.0]
    assert not row.log_prob[~row.mask].any()


def test_a_cut_answer_is_ended_by_the_prompt_and_that_token_is_not_trained() -> None:
    cut = np.array([ord("a"), ord("b")])
    prompts = talk(make(strategy="full"), ["one", "two"], [cut, SPLIT_AB])
    tail = prompts[1][len(prompts[0]) + len(cut) :]
    assert tail[0] == STOP
    assert TOKENS.decode(tail, skip_special_tokens=False) == "</s>\n<s>u:two</s>\n<s>a:"
    (row,) = rows_of(turns(prompts, [cut, SPLIT_AB]))
    assert row.mask.sum() == 5


def test_plain_prompts_stand_behind_one_another() -> None:
    agent = make(strategy="full", chat=False, system="To {instruction}: ", template="{step}. {observation}\n")
    prompts = talk(agent, ["one", "two"], [SPLIT_AB, SPLIT_AB])
    assert TOKENS.decode(prompts[1], skip_special_tokens=False) == "To win: 1. one\nab</s>2. two\n"


def test_the_last_turns_alone_are_shown_and_rows_break_where_one_falls_out() -> None:
    observations, answers = ["one", "two", "three", "four"], [SPLIT_AB] * 4
    prompts = talk(make(strategy="last_k", last_turns=1, chat=False, template="{observation}>"), observations, answers)
    shown = [TOKENS.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    assert shown == ["one>", "one>ab</s>two>", "two>ab</s>three>", "three>ab</s>four>"]
    assert all(300 not in prompt for prompt in prompts)
    rows = rows_of(turns(prompts, answers))
    assert [row.turn[row.mask].tolist() for row in rows] == [[0, 0, 0, 1, 1, 1], [2, 2, 2], [3, 3, 3]]


def test_no_earlier_turn_where_none_is_wanted() -> None:
    prompts = talk(make(strategy="last_k", last_turns=0, chat=False), ["one", "two"], [SPLIT_AB] * 2)
    assert [TOKENS.decode(prompt) for prompt in prompts] == ["one", "two"]


def test_memory_holds_the_last_observations_and_actions_and_each_turn_is_a_row() -> None:
    agent = make(
        strategy="memory",
        last_turns=2,
        chat=False,
        template="{instruction}|{memory}|{step}:{observation}",
        memory_item="{step}:{observation}>{action};",
    )
    prompts = talk(agent, ["one", "two", "three", "four"], [SPLIT_AB] * 4)
    shown = [TOKENS.decode(prompt) for prompt in prompts]
    assert shown == ["win||1:one", "win|1:one>ab;|2:two", "win|1:one>ab;2:two>ab;|3:three", "win|2:two>ab;3:three>ab;|4:four"]
    rows = rows_of(turns(prompts, [SPLIT_AB] * 4))
    assert len(rows) == 4


def test_a_summary_is_carried_on_until_there_is_a_new_one() -> None:
    agent = make(strategy="summarised", chat=False, system="<summary>", template="[{summary}]{observation}", summary_chars=4)
    said = [TOKENS.encode("<summary>I was here</summary>up"), TOKENS.encode("up"), TOKENS.encode("<summary>no</summary>")]
    prompts = talk(agent, ["one", "two", "three"], said)
    assert [TOKENS.decode(prompt) for prompt in prompts] == ["<summary>[]one", "<summary>[I wa]two", "<summary>[I wa]three"]


def test_a_summary_is_asked_for_and_shown_where_the_prompts_do_not_say_how() -> None:
    agent = make(strategy="summarised", chat=False, template="{observation}", actions=("up", "down"))
    first, second = talk(agent, ["one", "two"], [TOKENS.encode("up <summary>down there</summary>")] * 2)
    told = "You will see nothing of what came before but the summary that you give: write <summary>what you need to remember</summary>"
    assert TOKENS.decode(first).startswith(told)
    assert TOKENS.decode(first).endswith(" in every answer.\n\none")
    assert TOKENS.decode(second).endswith(" in every answer.\ndown there\ntwo")
    assert agent.parser.parse("up <summary>down there</summary>") == ValidAction("up"), "the summary is no part of the action"


def test_a_memory_that_the_template_does_not_name_stands_before_it() -> None:
    agent = make(strategy="memory", last_turns=1, chat=False, template="{observation}", memory_item="{observation}>{action};")
    prompts = talk(agent, ["one", "two"], [SPLIT_AB] * 2)
    assert [TOKENS.decode(prompt) for prompt in prompts] == ["one", "one>ab;two"]


def test_what_is_too_long_is_dropped_from_the_past_and_told() -> None:
    # "o1>" and "xy" with its end: 3 tokens each. Room for 20 - 8 = 12: three observations and two answers are 15, one turn less is 9.
    agent = make(20, strategy="full", chat=False, template="{observation}>")
    conversation = agent.begin()
    answer = np.array([ord("x"), ord("y"), STOP])
    found = []
    for observation in ("o1", "o2", "o3"):
        found.append(conversation.prompt(observation))
        conversation.answered(answer, "xy", "xy")
    assert [prompt.dropped for prompt in found if isinstance(prompt, Prompt)] == [0, 0, 1]
    assert isinstance(found[2], Prompt)
    assert TOKENS.decode(found[2].token_ids) == "o2>xyo3>"


def test_memory_drops_its_oldest_items_and_tells_how_many() -> None:
    agent = make(20, strategy="memory", last_turns=4, chat=False, template="{memory}{observation}", memory_item="{observation}{action},")
    conversation = agent.begin()
    for observation in ("o1", "o2", "o3"):
        assert isinstance(conversation.prompt(observation), Prompt)
        conversation.answered(np.array([1]), "xy", "xy")
    prompt = conversation.prompt("o4")  # 3 x 5 + 2 tokens, and 12 fit
    assert isinstance(prompt, Prompt)
    assert prompt.dropped == 1
    assert TOKENS.decode(prompt.token_ids) == "o2xy,o3xy,o4"


def test_an_observation_that_does_not_fit_at_all_is_no_prompt() -> None:
    agent = make(20, strategy="memory", chat=False)
    assert agent.begin().prompt("x" * 13) is None
    ending = make(20, strategy="full", chat=False, overflow="end_episode", template="{observation}>").begin()
    assert isinstance(ending.prompt("123456"), Prompt)
    ending.answered(SPLIT_AB, "ab", "ab")
    assert ending.prompt("123456") is None


def test_templates_that_cannot_continue_a_conversation_are_one_line() -> None:
    agent = make(strategy="full", tokenizer=ForgetfulTokenizer())
    conversation = agent.begin()
    conversation.prompt("one")
    conversation.answered(SPLIT_AB, "ab", "ab")
    with pytest.raises(UserError, match=r"leaves earlier answers out.*agent.strategy=memory"):
        conversation.prompt("two")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"template": "{board}"}, r"agent.template must be a template of \{observation\}"),
        ({"memory_item": "{summary}"}, r"agent.memory_item must be a template of \{observation\}, \{action\}, \{step\}"),
        ({"template": "{observation"}, "double the braces"),
        ({"template": "{observation} {step:s}"}, "agent.template must be .*Unknown format code 's'"),
        ({"strategy": "summarised", "tag": "Summary"}, "agent.summary_tag must be another tag than agent.tag"),
        ({"actions": ("up", "UP")}, "agent.actions must be different words"),
        ({"max_new_tokens": 0}, "agent.max_new_tokens must be between 1 and 100,000,000, got 0"),
    ],
)
def test_configurations_that_make_no_sense(options: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        AgentConfig(**options)  # type: ignore[arg-type]


def test_a_context_without_room_is_told_before_anything_is_played() -> None:
    with pytest.raises(UserError, match=r"agent.max_new_tokens=8 leaves no room for a prompt in the model's context of 8"):
        make(8)


def test_prompts_that_no_observation_fits_into_are_told_before_anything_is_played() -> None:
    # A context of 500 less an answer of 8.
    assert make(max_prompt_tokens=492).begin().prompt("x" * 600) is None
    told = "agent.max_prompt_tokens=493 is more than the 492 tokens that agent.max_new_tokens=8 leaves of the model's context of 500"
    with pytest.raises(UserError, match=told):
        make(max_prompt_tokens=493)
    # "<s>s:Win.</s>\n", "<s>u:.</s>\n" and "<s>a:" are 9 + 6 + 3 tokens.
    assert isinstance(make(system="Win.", max_prompt_tokens=18).begin().prompt("o"), Prompt)
    with pytest.raises(
        UserError, match=r"agent.max_prompt_tokens=17 is too few for a prompt: .* need 18 with an observation of one letter"
    ):
        make(system="Win.", max_prompt_tokens=17)
    with pytest.raises(UserError, match=r"The 17 tokens that agent.max_new_tokens=8 leaves of 25 of context are too few.* need 18 with"):
        make(25, system="Win.")
    assert isinstance(make(26, system="Win.").begin().prompt("o"), Prompt)
    # Memory and summary are dropped first: they may fill the rest, and need no room.
    assert isinstance(make(max_prompt_tokens=1, strategy="memory", chat=False).begin().prompt("o"), Prompt)


def test_a_request_says_how_to_sample_and_what_was_seen() -> None:
    agent = make(temperature=0.7, top_p=0.9, top_k=5)
    prompt = agent.begin().prompt("one")
    assert isinstance(prompt, Prompt)
    sampled, greedy = (agent.request(1, prompt, "one", seed=3, temperature=which) for which in (None, 0.0))
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed, sampled.stop_ids) == (0.7, 0.9, 5, 3, (STOP,))
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
    assert sampled.messages == ({"role": "user", "content": "one"},)
    assert agent.answer_ids("ab") == [300, STOP]
