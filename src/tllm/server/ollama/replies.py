"""Replies of ollama's interface: JSON, or a stream with a JSON object on each line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tllm.core.errors import TllmError
from tllm.server.http.errors import as_http
from tllm.server.openai.choice import ChoiceProgress, ScoredToken
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.reply.events import ArgumentsPiece, MergedReply, ReplyEvent, ToolCallBegin, arguments_of, merged

Line = dict[str, Any]
Kind = Literal["chat", "generate"]

NameTokens = Callable[[list[ScoredToken]], list[Any]]

NANOSECONDS = 1_000_000_000
OF_CALLS = (ToolCallBegin, ArgumentsPiece)


class OllamaReply:
    """Makes the lines of one reply. A call comes whole, with its last part.

    With `named`, which names tokens with their log-probabilities, a line has those of its text.
    """

    def __init__(self, job: GenerationJob, kind: Kind, model: str, named: NameTokens | None = None) -> None:
        self._job, self._kind, self._model, self._named = job, kind, model, named
        self._scored: list[ScoredToken] = []  # those that no line has yet
        self._began = time.monotonic()
        self._first: float | None = None
        self._calls: list[ReplyEvent] = []  # all events of calls

    def lines(self, progress: ChoiceProgress) -> list[Line]:
        """What an output of the engine adds."""
        self._first = self._first or time.monotonic()
        reply = merged(event for event in progress.events if not isinstance(event, OF_CALLS))
        if not self._job.reply_format.reads_events:
            reply.text = progress.text
        self._calls += [event for event in progress.events if isinstance(event, OF_CALLS)]
        self._scored += progress.scored
        lines = [self._with_logprobs(self._line(reply))] if reply.text or reply.reasoning else []
        if progress.finish_reason is None:
            return lines
        if self._calls:
            lines.append(self._line(MergedReply(calls=merged(self._calls).calls)))
        reason = "length" if progress.finish_reason == "length" else "stop"
        last = self._with_logprobs(self._line(MergedReply()))
        return [*lines, {**last, "done": True, "done_reason": reason, **self._counts()}]

    def _line(self, reply: MergedReply) -> Line:
        return line_of(self._kind, self._model, reply)

    def _with_logprobs(self, line: Line) -> Line:
        scored, self._scored = self._scored, []
        return {**line, "logprobs": self._named(scored)} if self._named is not None and scored else line

    def _counts(self) -> Line:
        """Tokens and nanoseconds. A prompt's time is that to the first token."""
        now, usage = time.monotonic(), self._job.usage()
        first = self._first or now
        return {
            "total_duration": round((now - self._began) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((first - self._began) * NANOSECONDS),
            "eval_count": usage.completion_tokens,
            "eval_duration": round((now - first) * NANOSECONDS),
        }


def line_of(kind: Kind, model: str, reply: MergedReply) -> Line:
    """A line with some of a reply, or all of it."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line: Line = {"model": model, "created_at": now, "done": False}
    thinking = {"thinking": reply.reasoning} if reply.reasoning else {}
    if kind == "generate":
        return {**line, "response": reply.text, **thinking}
    message: Line = {"role": "assistant", "content": reply.text, **thinking}
    if reply.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": arguments_of(call.arguments)}} for call in reply.calls
        ]
    return {**line, "message": message}


def loaded(kind: Kind, model: str) -> Line:
    """The reply to who asks for nothing but that the model be loaded."""
    return {**line_of(kind, model, MergedReply()), "done": True, "done_reason": "load"}


async def reply_lines(reply: OllamaReply, job: GenerationJob) -> AsyncGenerator[bytes, None]:
    """Run, and give out lines as they come."""
    async with aclosing(job.steps()) as steps:
        async for progress in steps:
            for line in reply.lines(progress):
                yield encoded(line)


def error_line(error: TllmError) -> bytes:
    """The line with which an error ends a stream."""
    return encoded({"error": as_http(error).info.message})


async def whole_reply(reply: OllamaReply, job: GenerationJob) -> Line:
    """Run to the end; the last line, with what all of them say."""
    lines = list[Line]()
    async with aclosing(job.steps(is_whole=True)) as steps:
        async for progress in steps:
            lines += reply.lines(progress)
    said = [line.get("message", line) for line in lines]
    whole: Line = {}
    for name in ("content", "response", "thinking"):
        if any(name in one for one in said):
            whole[name] = "".join(one.get(name, "") for one in said)
    for one in said:
        whole |= {"tool_calls": one["tool_calls"]} if "tool_calls" in one else {}
    last = lines[-1]
    if any("logprobs" in line for line in lines):
        last["logprobs"] = [one for line in lines for one in line.get("logprobs", ())]
    return {**last, "message": {**last["message"], **whole}} if "message" in last else {**last, **whole}


def encoded(line: Line) -> bytes:
    """A line as it is sent."""
    return msgspec.json.encode(line) + b"\n"
