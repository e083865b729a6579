"""Replies of Anthropic's Messages API, whole and as a stream of named events, from the events of a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from tllm.core.errors import TllmError
from tllm.server.http.errors import MESSAGES, as_http, body_of
from tllm.server.http.sse import named_event
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.reply.events import (
    ArgumentsPiece,
    ReasoningPiece,
    ReplyEvent,
    ReplyFinish,
    TextPiece,
    ToolCallBegin,
    arguments_of,
)

Event = dict[str, Any]
Block = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageStream:
    """Makes the stream's events of one reply. Blocks follow one another; each is opened by what comes first of it."""

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._index = -1  # of the block that is open, or was last
        self._open: str | int = ""  # its kind, or for a call the number of the call

    def begin(self) -> Event:
        """The first event. How much of the prompt was in the cache is known at the end."""
        usage = {"input_tokens": self._job.prompt_tokens, "output_tokens": 0}
        return {"type": "message_start", "message": {**envelope(self._job), "content": [], "usage": usage}}

    def events(self, events: Iterable[ReplyEvent]) -> Iterator[Event]:
        """What more of a reply becomes."""
        for event in events:
            if isinstance(event, TextPiece):
                yield from self._opened("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": event.text})
            elif isinstance(event, ReasoningPiece):
                yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": event.text})
            elif isinstance(event, ToolCallBegin):
                call = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                yield from self._opened(event.index, call)
            elif isinstance(event, ArgumentsPiece):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            else:
                yield from self._finished(event)

    def _opened(self, kind: str | int, block: Block) -> Iterator[Event]:
        if kind == self._open:
            return
        yield from self._closed()
        self._index, self._open = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _closed(self) -> Iterator[Event]:
        if self._open != "":
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _delta(self, delta: Block) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _finished(self, finish: ReplyFinish) -> Iterator[Event]:
        yield from self._closed()
        yield {"type": "message_delta", "delta": stopped(finish), "usage": usage_of(self._job)}
        yield {"type": "message_stop"}


def message_of(job: GenerationJob, events: Sequence[ReplyEvent]) -> Event:
    """A whole reply."""
    blocks = list[Block]()
    for event in events:
        if isinstance(event, TextPiece):
            _append(blocks, "text", event.text)
        elif isinstance(event, ReasoningPiece):
            _append(blocks, "thinking", event.text)
        elif isinstance(event, ToolCallBegin):
            blocks.append({"type": "tool_use", "id": event.id, "name": event.name, "input": ""})
        elif isinstance(event, ArgumentsPiece):
            blocks[-1]["input"] += event.text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = arguments_of(block["input"])
    finish = events[-1]
    assert isinstance(finish, ReplyFinish), "a whole reply has ended"
    return {**envelope(job), "content": blocks, **stopped(finish), "usage": usage_of(job)}


async def message(job: GenerationJob) -> Event:
    """Run to the end."""
    events = list[ReplyEvent]()
    async with aclosing(job.steps(is_whole=True)) as steps:
        async for progress in steps:
            events += progress.events
    return message_of(job, events)


async def message_events(job: GenerationJob) -> AsyncGenerator[bytes, None]:
    """Run, and give out events as they come."""
    stream, has_begun = MessageStream(job), False
    async with aclosing(job.steps()) as steps:
        async for progress in steps:
            if not has_begun:
                has_begun = True
                yield named_event(stream.begin())
            for event in stream.events(progress.events):
                yield named_event(event)


def error_events(error: TllmError) -> tuple[bytes]:
    """The event of an error in mid-stream, after which nothing comes."""
    return (b"event: error\ndata: " + body_of(as_http(error), MESSAGES) + b"\n\n",)


def envelope(job: GenerationJob) -> Event:
    """What every message has."""
    return {
        "id": f"msg_{job.ids.stem}",
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def stopped(finish: ReplyFinish) -> Event:
    """Why the reply ended: at one of the request's stop sequences, or else."""
    if finish.reason == "stop" and isinstance(finish.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
    return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": None}


def usage_of(job: GenerationJob) -> Event:
    """Tokens of prompt and reply; those of the prompt that were in the cache are counted apart, as Anthropic does."""
    usage = job.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _append(blocks: list[Block], kind: str, text: str) -> None:
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
    blocks[-1][kind] += text
