"""Replies of OpenAI's Responses API, whole and as a stream of named events, from the events of a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from tllm.core.errors import RequestError, TllmError
from tllm.server.http.errors import as_http
from tllm.server.http.sse import named_event
from tllm.server.openai.choice import ChoiceProgress, ScoredToken
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.prepared_reply import PreparedReply
from tllm.server.openai.reply_format import chat_logprobs
from tllm.server.openai.responses_request import ResponsesRequest
from tllm.server.reply.events import ArgumentsPiece, ReasoningPiece, ReplyEvent, ReplyFinish, TextPiece, ToolCallBegin

Event = dict[str, Any]
Item = dict[str, Any]


class ResponseStream:
    """Makes the stream's events of one reply, and the response that they add up to.

    Items follow one another; each is opened by what comes first of it, and closed before the next. `is_stored`: the
    response can be asked for again. Tokens with log-probabilities are those of the text that came with them or next.
    """

    def __init__(self, request: ResponsesRequest, job: GenerationJob, is_stored: bool = False) -> None:
        self._request, self._job, self._is_stored = request, job, is_stored
        self._items: list[Item] = []
        self._open: str | int = ""  # the kind of the item that is open, or for a call its number
        self._text = ""  # of the open item
        self._number = 0  # of the next event
        self._scored: list[ScoredToken] = []  # those whose text has not come
        self._logprobs: list[Event] = []  # of the open item
        self._finish: ReplyFinish | None = None

    def begin(self) -> Iterator[bytes]:
        """The first two events."""
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())

    def progress(self, progress: ChoiceProgress) -> Iterator[bytes]:
        """What more of a reply becomes."""
        at = 0
        for token in progress.scored:
            self._scored.append(token)
            yield from self._events(progress.events[at : token.num_events])
            at = token.num_events
        yield from self._events(progress.events[at:])

    def _events(self, events: Iterable[ReplyEvent]) -> Iterator[bytes]:
        for event in events:
            scored, self._scored = self._scored, []
            if isinstance(event, TextPiece):
                yield from self._piece("output_text", event.text, self._named(scored))
            elif isinstance(event, ReasoningPiece):
                yield from self._piece("reasoning_text", event.text)
            elif isinstance(event, ToolCallBegin):
                yield from self._close()
                names = {"call_id": event.id, "name": event.name, "arguments": ""}
                yield self._opened(event.index, {"id": self._job.ids.new("fc"), "type": "function_call", **names})
            elif isinstance(event, ArgumentsPiece):
                self._text += event.text
                yield self._of_item("response.function_call_arguments.delta", delta=event.text)
            else:
                yield from self._close("incomplete" if event.reason == "length" else "completed")
                self._finish = event
                kind = "incomplete" if event.reason == "length" else "completed"
                yield self._event(f"response.{kind}", response=self.response())

    def failed(self, error: TllmError) -> Iterator[bytes]:
        """The events of an error in mid-stream, after which nothing comes."""
        info, response = as_http(error).info, self.failure(error)
        if response["status"] == "failed":
            yield self._event("error", code=info.code or info.type, message=info.message, param=info.param)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: TllmError) -> Event:
        """The response that an error ended, or somebody who cancelled it."""
        info, response = as_http(error).info, self.response("incomplete")
        if info.code == "engine_cancelled":
            return {**response, "status": "cancelled"}
        return {**response, "status": "failed", "error": {"code": "server_error", "message": info.message}}

    def response(self, open_status: str = "in_progress") -> Event:
        """As far as it has come. The item that is open, if there is one, has that status."""
        request, finish, params = self._request, self._finish, self._job.choices[0].request.params
        is_cut = finish is not None and finish.reason == "length"
        return {
            "id": f"resp_{self._job.ids.stem}",
            "object": "response",
            "created_at": self._job.ids.created,
            "status": "in_progress" if finish is None else "incomplete" if is_cut else "completed",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._job.model,
            "output": self._items if self._open == "" else [*self._items[:-1], self._so_far(open_status)],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": self._is_stored,
            "temperature": params.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.functions()),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if finish is None else _usage(self._job),
        }

    def _named(self, scored: list[ScoredToken]) -> list[Event]:
        fields = self._job.reply_format.fields
        named = chat_logprobs(scored, fields.tokenizer, fields.label).content
        return [msgspec.to_builtins(one) for one in named]

    def _piece(self, kind: str, text: str, logprobs: Sequence[Event] = ()) -> Iterator[bytes]:
        """More text of a message, or of reasoning."""
        if self._open != kind:
            yield from self._close()
            if kind == "output_text":
                yield self._opened(
                    kind, {"id": self._job.ids.new("msg"), "type": "message", "role": "assistant", "content": []}
                )
            else:
                yield self._opened(
                    kind, {"id": self._job.ids.new("rs"), "type": "reasoning", "summary": [], "content": []}
                )
            yield self._of_item("response.content_part.added", content_index=0, part=_part(kind, "", []))
        self._text += text
        self._logprobs += logprobs
        more: Event = {"logprobs": list(logprobs)} if kind == "output_text" else {}
        yield self._of_item(f"response.{kind}.delta", content_index=0, delta=text, **more)

    def _opened(self, kind: str | int, item: Item) -> bytes:
        self._open, self._text, self._logprobs = kind, "", []
        self._items.append({**item, "status": "in_progress"})
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _so_far(self, status: str) -> Item:
        """The open item with what has come of it."""
        kind = self._open
        if isinstance(kind, int):
            return {**self._items[-1], "status": status, "arguments": self._text}
        return {**self._items[-1], "status": status, "content": [_part(kind, self._text, self._logprobs)]}

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """The last events of the open item, if there is one. The reply may have been cut inside of it."""
        if self._open == "":
            return
        item = self._items[-1] = self._so_far(status)
        kind, self._open = self._open, ""
        if isinstance(kind, int):
            name = item["name"]
            yield self._of_item("response.function_call_arguments.done", arguments=self._text, name=name)
        else:
            more: Event = {"logprobs": self._logprobs} if kind == "output_text" else {}
            yield self._of_item(f"response.{kind}.done", content_index=0, text=self._text, **more)
            yield self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(event)


async def response(stream: ResponseStream, job: GenerationJob) -> Event:
    """Run to the end."""
    async with aclosing(job.steps(is_whole=True)) as steps:
        async for progress in steps:
            for _ in stream.progress(progress):
                pass
    return stream.response()


async def response_state(stream: ResponseStream, job: GenerationJob) -> Event:
    """The response as far as it has come, whatever became of it."""
    try:
        return await response(stream, job)
    except TllmError as error:
        return stream.failure(error)


async def response_events(stream: ResponseStream, job: GenerationJob) -> AsyncGenerator[bytes, None]:
    """Run, and give out events as they come."""
    has_begun = False
    async with aclosing(job.steps()) as steps:
        async for progress in steps:
            if not has_begun:
                has_begun = True
                for event in stream.begin():
                    yield event
            for event in stream.progress(progress):
                yield event


def _part(kind: str, text: str, logprobs: list[Event]) -> Event:
    more: Event = {"annotations": [], "logprobs": logprobs} if kind == "output_text" else {}
    return {"type": kind, "text": text, **more}


def _usage(job: GenerationJob) -> Event:
    usage = job.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in job.choices)},
        "total_tokens": usage.total_tokens,
    }


def prepared_response(request: ResponsesRequest, job: GenerationJob, keeps: bool) -> PreparedReply:
    """A response that can be run. `keeps`: the server keeps those that ask for it."""
    if request.background and not keeps:
        raise RequestError(
            "this server keeps no replies, which a response in the background needs",
            "start it with --keep-streams SECONDS",
            "background",
        )
    stream = ResponseStream(request, job, request.may_be_taken_up and keeps)
    return PreparedReply(
        job=job,
        is_stream=bool(request.stream),
        may_be_taken_up=request.may_be_taken_up,
        is_background=bool(request.background),
        whole=lambda: response(stream, job),
        events=lambda: response_events(stream, job),
        failed=stream.failed,
        state=lambda: response_state(stream, job),
    )
