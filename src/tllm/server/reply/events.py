"""What a reply is made of, as one stream of events. Every interface over chat is built on it.

For whoever writes another interface (another shape of request and reply): `ReplyChoice.read` gives a `ChoiceProgress`
for each output of the engine, and its `events` are those of this module, in the order in which the model wrote them:

- `ReasoningPiece`: text of the model's reasoning, to be appended to what came before;
- `TextPiece`: text for the user, likewise. Text may come before, between and after calls;
- `ToolCallBegin`: a call of a function begins. Its name is whole, its `id` is new and nobody else's, and its `index`
  counts the calls of this reply from 0;
- `ArgumentsPiece`: the next part of the arguments of the call `index`. All parts together are the JSON text of an
  object. Parts of one call come together, before the next call begins. A reply that ran into `max_tokens` may leave
  them incomplete;
- `ReplyFinish`: the last event. `reason` is "stop", "length" or "tool_calls"; the latter stands for "stop" where the
  reply has a call. `stop_reason` is the stop string or the id of the stop token that the request named.

The pieces depend on how the text came, what they add up to does not (`merged`): a format that streams sends each as it
comes, one that answers at once adds them up. Tokens, log-probabilities and counts are fields of `ChoiceProgress`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tllm.core.errors import UNREADABLE


class ReasoningPiece(msgspec.Struct, frozen=True):
    """More of the model's reasoning."""

    text: str


class TextPiece(msgspec.Struct, frozen=True):
    """More text for the user."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call begins."""

    index: int
    name: str
    id: str = ""


class ArgumentsPiece(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are JSON text."""

    index: int
    text: str


class ReplyFinish(msgspec.Struct, frozen=True):
    """The reply has ended."""

    reason: str
    stop_reason: str | int | None = None


ReplyEvent = ReasoningPiece | TextPiece | ToolCallBegin | ArgumentsPiece | ReplyFinish


class MergedCall(msgspec.Struct):
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


class MergedReply(msgspec.Struct):
    """What events add up to."""

    reasoning: str = ""
    text: str = ""
    calls: list[MergedCall] = []
    finish: ReplyFinish | None = None


def arguments_of(text: str) -> Any:
    """A whole call's arguments as an object, for formats that have no text of them. A reply that was cut may leave them
    incomplete, and there is no place for that."""
    try:
        return msgspec.json.decode(text or "{}")
    except UNREADABLE:
        return {}


def merged(events: Iterable[ReplyEvent]) -> MergedReply:
    """All of a reply, or of a part of it that begins with no call under way."""
    reply = MergedReply()
    for event in events:
        if isinstance(event, ReasoningPiece):
            reply.reasoning += event.text
        elif isinstance(event, TextPiece):
            reply.text += event.text
        elif isinstance(event, ToolCallBegin):
            reply.calls.append(MergedCall(event.id, event.name))
        elif isinstance(event, ArgumentsPiece):
            reply.calls[event.index].arguments += event.text
        else:
            reply.finish = event
    return reply
