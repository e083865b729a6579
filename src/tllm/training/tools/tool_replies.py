"""`ToolReplies`: parses a turn that the model wrote into a message of the assistant with its tool calls.

The model's chat template decides which parser reads it, as in `tllm serve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tllm.core.errors import UNREADABLE, ConfigError
from tllm.server.reply.events import MergedCall, merged
from tllm.server.reply.parser_choice import AUTO, ReplyParsers, choose_parsers
from tllm.text.tokenizer import Tokenizer
from tllm.training.tools.tool_functions import FunctionCall

Message = dict[str, Any]
TAIL = 16
"""Tokens of what stands before a turn that say whether its reasoning has begun there already."""


class AssistantTurn(NamedTuple):
    """A message, and the calls in it."""

    message: Message
    calls: tuple[FunctionCall, ...]


class ToolReplies:
    """Reads turns. ConfigError where the chat template, by its source, tells no format of calls."""

    def __init__(self, tokenizer: Tokenizer, template_source: str, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._tokenizer, self._parameters = tokenizer, parameters
        self._parsers: ReplyParsers = choose_parsers(AUTO, AUTO, template_source)
        if not self._parsers.tools:
            raise ConfigError(
                "the model's chat template tells no format of calls that is known, and the job has tools",
                "take a model whose template writes calls as Hermes, Llama 3, Mistral, Qwen3-Coder, GLM 4.5 or gpt-oss",
            )

    def read(self, before: Sequence[int], ids: Sequence[int], is_truncated: bool, num_calls: int) -> AssistantTurn:
        """The turn of these ids, which came after those `before`. `num_calls` came in earlier turns.

        Of a turn that is truncated no call is made, as its end is not known.
        """
        said = ids if is_truncated else ids[:-1]  # the last ends the turn and says nothing
        parser = self._parsers.parser(self._tokenizer.decode(before[-TAIL:]), schemas=self._parameters)
        text = self._tokenizer.decode(said, skip_special_tokens=not self._parsers.needs_special_tokens)
        reply = merged([*parser.push(text), *parser.finish("stop", None)])
        calls = [_call(call, number) for number, call in enumerate(reply.calls, num_calls + 1)]
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if calls:
            message["tool_calls"] = [_written(call) for call in calls]
        return AssistantTurn(message, () if is_truncated else tuple(calls))


def _call(call: MergedCall, number: int) -> FunctionCall:
    """With an id of nine letters and digits, as the templates of Mistral's models want it.

    Arguments that could not be written down again stay text: those with numbers beyond 64 bits.
    """
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
        msgspec.msgpack.encode(arguments)
    except (*UNREADABLE, OverflowError):
        arguments = call.arguments
    return FunctionCall(f"call{number:05}", call.name, arguments)


def _written(call: FunctionCall) -> Message:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
