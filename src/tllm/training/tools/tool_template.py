"""`ToolTemplate`: puts the results of tools into a conversation whose turns the model wrote, as token ids.

What the model wrote is never encoded anew: its ids may not be those that its text has, and a template may write
earlier turns otherwise, say without their reasoning. So the ids of a result are found in a conversation of no meaning,
as TRL does: rendered up to a call, and rendered with the result after it. The second must begin with the first, and
what it has more is appended to the ids of the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tllm.core.errors import ConfigError, RequestError
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer
from tllm.training.tools.tool_functions import FunctionCall, ToolResult
from tllm.training.tools.tool_replies import Message

ARGUMENT, VALUE, RESULT, REASONING = "tllm_argument", "tllm_value", "tllm_result", "tllm reasoning"
HINT = "take a model whose chat template writes tools, calls and their results"


class ToolTemplate:
    """A model's chat template, checked when it is made: ConfigError for one that cannot carry on after a call."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._template, self._tokenizer, self._schemas = template, tokenizer, schemas
        name = str(schemas[0]["function"]["name"])
        call = FunctionCall("call00001", name, {ARGUMENT: VALUE})
        beginning = _beginning(call, {})
        prompt = self._rendered(beginning[:1], True)
        unseen = [str(one["function"]["name"]) for one in schemas if str(one["function"]["name"]) not in prompt]
        if unseen:
            raise ConfigError(f"the model's chat template does not write the tool {unseen[0]} into a prompt", HINT)
        whole = self._rendered([*beginning, _message(call, ToolResult(RESULT, False))], True)
        for what, sign in (("calls", name), ("arguments of calls", VALUE), ("results of tools", RESULT)):
            if whole.count(sign) <= (prompt.count(sign) if sign == name else 0):
                raise ConfigError(f"the model's chat template does not write {what}", HINT)
        self._more = self._reasoning(call)

    def messages(self, calls: Sequence[FunctionCall], results: Sequence[ToolResult]) -> list[Message]:
        """Of the results of a turn's calls."""
        return [_message(call, result) for call, result in zip(calls, results, strict=True)]

    def suffix(self, calls: Sequence[FunctionCall], messages: Sequence[Message], last: int) -> list[int]:
        """The ids that come after a turn with these calls: all results, and what begins the model's next turn.

        `last` is the id that the model's turn ended with. Some models end it with what a template puts before results.
        """
        ids = self._suffix(calls[0], messages, self._more)
        return ids[1:] if ids[0] == last else ids

    def _reasoning(self, call: FunctionCall) -> Message:
        """What a turn has beside its call, for the template to write it alike at the end and before a result.

        Some write an empty reasoning into a last turn only; those do not once it has a reasoning.
        """
        refusal: ConfigError | None = None
        for more in ({}, {"reasoning_content": REASONING}):
            try:
                self._suffix(call, [_message(call, ToolResult(RESULT, False))], more)
            except ConfigError as error:
                refusal = refusal or error
            else:
                return more
        assert refusal is not None, "both have failed"
        raise refusal

    def _suffix(self, call: FunctionCall, messages: Sequence[Message], more: Message) -> list[int]:
        beginning = _beginning(call, more)
        before, whole = self._rendered(beginning, False), self._rendered([*beginning, *messages], True)
        if not whole.startswith(before):
            raise ConfigError(
                "the model's chat template writes a turn with a call otherwise once its result follows, so that there "
                "is nothing to be appended to what the model wrote",
                "take a template that leaves earlier turns as they are (TRL calls it prefix-preserving)",
            )
        encoding = self._tokenizer.inner.encode(whole, add_special_tokens=False)
        called = before.rindex(VALUE) + len(VALUE)
        ends = [
            place
            for place, (start, end) in enumerate(encoding.offsets)
            if called <= start and end <= len(before) and encoding.ids[place] in self._tokenizer.eos_ids
        ]
        # The model has written the token that ends its turn, and none of what a template puts after it.
        first = ends[0] + 1 if ends else sum(end <= len(before) for _, end in encoding.offsets)
        return list(encoding.ids[first:])

    def _rendered(self, messages: Sequence[Message], is_open: bool) -> str:
        try:
            return self._template.render(messages, tools=self._schemas, add_generation_prompt=is_open)
        except RequestError as error:
            raise ConfigError(f"{error.message}, and the job has tools", HINT) from error


def _beginning(call: FunctionCall, more: Message) -> list[Message]:
    """A conversation up to a call. Its arguments tell where in the text the call is."""
    function = {"name": call.name, "arguments": {ARGUMENT: VALUE}}
    written = {"id": call.id, "type": "function", "function": function}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [written], **more},
    ]


def _message(call: FunctionCall, result: ToolResult) -> Message:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result.text}
