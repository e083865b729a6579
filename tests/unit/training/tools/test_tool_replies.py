"""Turns of the model as messages: text, reasoning and calls, by the parser that the chat template tells."""

from __future__ import annotations

import pytest
import tokenizers

from tests.unit.text import kits
from tllm.core.errors import ConfigError
from tllm.text.tokenizer import Tokenizer
from tllm.training.tools.tool_functions import FunctionCall
from tllm.training.tools.tool_replies import ToolReplies

PARAMETERS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}
HARMONY = (
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|message|>{"a": 1}'
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(kits.byte_level().to_str())
    inner.add_special_tokens(["<end>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"])
    return Tokenizer(inner, {"eos_token": "<end>"})


@pytest.mark.parametrize(
    ("source", "said", "text", "reasoning"),
    [
        ("<tool_call>", 'One.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "One.", ""),
        ("<tool_call><think>", '<think>so</think><tool_call>{"name": "add", "arguments": {"a": 1}}', "", "so"),
        ("ipython", '{"name": "add", "parameters": {"a": 1}}', "", ""),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", ""),
        ("<function=", "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "", ""),
        ("<arg_key>", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", ""),
        ("<|channel|>", HARMONY, "", "so"),
    ],
)
def test_a_call_is_read_as_the_server_reads_it(
    source: str, said: str, text: str, reasoning: str, tokenizer: Tokenizer
) -> None:
    """The token that ends the turn says nothing; special tokens that are signs of the format do."""
    replies = ToolReplies(tokenizer, source, PARAMETERS)
    ids = tokenizer.encode(said + "<end>", add_special_tokens=False)
    message, calls = replies.read(tokenizer.encode("hello"), ids, False, 3)
    assert calls == (FunctionCall("call00004", "add", {"a": 1}),)
    assert message.pop("reasoning_content", "") == reasoning
    written = {"id": "call00004", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert message == {"role": "assistant", "content": text, "tool_calls": [written]}


def test_reasoning_that_the_prompt_has_begun_is_reasoning(tokenizer: Tokenizer) -> None:
    replies = ToolReplies(tokenizer, "<tool_call> <think>", PARAMETERS)
    ids = tokenizer.encode("so</think>Done.<end>", add_special_tokens=False)
    message, calls = replies.read(tokenizer.encode("<|user|>hello<think>\n"), ids, False, 0)
    assert message == {"role": "assistant", "content": "Done.", "reasoning_content": "so"} and not calls
    plain, _ = replies.read(tokenizer.encode("<|user|>hello"), ids, False, 0)
    assert plain == {"role": "assistant", "content": "so</think>Done."}


def test_a_turn_that_was_cut_off_makes_no_call(tokenizer: Tokenizer) -> None:
    replies = ToolReplies(tokenizer, "<tool_call>", PARAMETERS)
    ids = tokenizer.encode('<tool_call>{"name": "add", "arguments": {"a": 1', add_special_tokens=False)
    message, calls = replies.read((), ids, True, 0)
    assert not calls and message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1'}


@pytest.mark.parametrize(
    "arguments", ['{"a": one}', '{"a": 1e999}', '{"a": ' + "9" * 30 + "}", "[" * 3000 + "]" * 3000]
)
def test_arguments_that_cannot_be_read_are_kept_as_they_are_written(arguments: str, tokenizer: Tokenizer) -> None:
    """They are no JSON, or more than what is kept of it: deeper, or numbers beyond 64 bits."""
    replies = ToolReplies(tokenizer, "<tool_call>", PARAMETERS)
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call><end>'
    _, (call,) = replies.read((), tokenizer.encode(said, add_special_tokens=False), False, 0)
    assert call == FunctionCall("call00001", "add", arguments)


def test_a_template_without_calls_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="tells no format of calls that is known, and the job has tools"):
        ToolReplies(tokenizer, "{{ messages }}", PARAMETERS)
