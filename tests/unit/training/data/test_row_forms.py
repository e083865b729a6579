"""Rows as other programs write them: ShareGPT's conversations and Alpaca's instructions, in the forms that are ours."""

from __future__ import annotations

from typing import Any

import pytest

from tllm.core.errors import ConfigError
from tllm.training.data.row_forms import instruction_row, is_instruction, with_messages, with_prompt

HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def test_conversations_of_sharegpt_become_messages() -> None:
    row = {"id": 7, "conversations": [{"from": "system", "value": "Be kind"}, HUMAN, {**GPT, "weight": 0}]}
    messages = [{"role": "system", "content": "Be kind"}, USER, {**ASSISTANT, "weight": 0}]
    assert with_messages(row) == {"id": 7, "messages": messages}


def test_conversations_with_replies_are_their_prompt() -> None:
    other = {"from": "gpt", "value": "Go away"}
    pair = with_messages({"conversations": [HUMAN], "chosen": GPT, "rejected": [other]})
    assert pair == {
        "prompt": [USER],
        "chosen": [ASSISTANT],
        "rejected": [{"role": "assistant", "content": "Go away"}],
    }


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "conversations": [HUMAN]},
        {"conversations": "a"},
        {"conversations": []},
        {"conversations": [1]},
        {"messages": [USER, ASSISTANT]},
    ],
)
def test_any_other_row_stays_as_it_is(row: dict[str, Any]) -> None:
    assert with_messages(row) is row


def test_conversations_that_have_roles_are_messages_already() -> None:
    assert with_messages({"conversations": [USER, ASSISTANT]}) == {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    "turn", [{"from": "function_call", "value": "{}"}, {"from": "gpt"}, {"value": "a"}, {"from": ["gpt"], "value": "a"}]
)
def test_a_turn_of_nobody_that_is_known_is_refused(turn: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a turn of the conversation is from") as caught:
        with_messages({"conversations": [HUMAN, turn]})
    assert "human, user, gpt" in caught.value.hint


def test_an_instruction_is_a_prompt_and_its_completion() -> None:
    row = {"instruction": "Add", "input": "1 {2}", "output": "3"}
    assert is_instruction(row)
    said = instruction_row(row, as_messages=True)
    assert said["prompt"] == [{"role": "user", "content": "Add\n1 {2}"}]
    assert said["completion"] == [{"role": "assistant", "content": "3"}]
    text = instruction_row(row, as_messages=False)
    assert text["completion"] == "3"
    assert text["prompt"].endswith("### Instruction:\nAdd\n\n### Input:\n1 {2}\n\n### Response:")


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_without_input_has_no_place_for_one(given: dict[str, Any]) -> None:
    row = {"instruction": "Say hello", "output": "Hello", **given}
    assert instruction_row(row, as_messages=True)["prompt"] == [{"role": "user", "content": "Say hello"}]
    assert "Input" not in instruction_row(row, as_messages=False)["prompt"]


@pytest.mark.parametrize(
    ("more", "message"), [({"history": [["a", "b"]]}, "has a history"), ({"input": 3}, "input is not a text")]
)
def test_what_an_instruction_has_no_place_for_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        instruction_row({"instruction": "a", "output": "b", **more}, as_messages=True)


def test_a_row_that_says_what_it_is_is_no_instruction() -> None:
    assert not is_instruction({"instruction": "a", "output": "b", "text": "a b"})
    assert not is_instruction({"instruction": "a"})


@pytest.mark.parametrize("output", [{}, {"output": "Hello"}], ids=["alone", "answered"])
def test_what_an_instruction_asks_is_a_prompt_beside_its_columns(output: dict[str, str]) -> None:
    row = {"instruction": "Say", "input": "hello", "words": 3, **output}
    chat = with_prompt(row, as_messages=True)
    assert chat == {**row, "prompt": [{"role": "user", "content": "Say\nhello"}]}
    text = with_prompt(row, as_messages=False)
    assert text["prompt"].endswith("### Instruction:\nSay\n\n### Input:\nhello\n\n### Response:")
    asked = {"prompt": "a", "instruction": "b"}
    assert with_prompt(asked, as_messages=False) is asked


def test_a_row_whose_instruction_is_no_text_has_no_prompt() -> None:
    with pytest.raises(ConfigError, match="instruction is not a text"):
        with_prompt({"instruction": ["a"]}, as_messages=False)
