"""`StreamStore`: where replies that may be taken up are run and kept. On the first machine that is `LocalStreamStore`.

A node's HTTP server has another one, which asks the first machine's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tllm.core.errors import TllmError
from tllm.server.admission.account import Account, Charge
from tllm.server.http.errors import HttpError, as_http, overloaded, too_late
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.choice import ChoiceOptions, ReplyChoice, charge_choices
from tllm.server.openai.engine_client import LOST, RequestRouter
from tllm.server.stored.stored_streams import StoredStream, StoredStreams
from tllm.spec.request import KeptReply, Output, Request, StreamRecord
from tllm.text.tokenizer import Tokenizer

Rest = Callable[[str, str, int], AsyncGenerator[Output, None]]
"""rest(stream id, owner, given): what follows so many outputs of a stream, from whoever goes on with it"""


@dataclass(frozen=True)
class TakenStream:
    """A stream as it is taken up: `outputs` gives all from the first on, and of these `seen` are there already.

    `outputs` ends with the stream, or raises the error that the stream ended with. Closing it leaves the stream alone.
    """

    record: StreamRecord
    seen: int
    is_over: bool
    outputs: AsyncGenerator[Output, None]


class StreamStore(Protocol):
    """Runs and keeps replies. Only who has the key that a reply was begun with finds it (`StreamRecord.owner`)."""

    is_on: bool
    """Whether anything is kept."""

    async def open(self, record: StreamRecord, requests: Sequence[Request], account: Account) -> None:
        """Begin: the engine's requests run to their ends, whoever reads, on an account. HttpError or ClusterError if
        they cannot."""

    async def take_up(self, stream_id: str, owner: str) -> TakenStream | None:
        """The stream from its beginning on; None where there is none that is this owner's."""

    async def end(self, stream_id: str, owner: str, forget: bool) -> bool:
        """Cancel what still runs of it, and with `forget` keep it no more; whether there was such a stream."""


class LocalStreamStore:
    """Runs streams on this process's engine, by `router`, and keeps them as the settings say.

    A reply is read here as far as its stop strings ask for it, so that it ends where it ends for whoever reads it,
    even if nobody does.
    """

    def __init__(
        self,
        router: RequestRouter,
        tokenizer: Tokenizer | None,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = settings.keep_streams > 0
        self.streams = StoredStreams(settings.keep_streams, settings.keep_streams_bytes, self._dropped, clock)
        self._router, self._tokenizer, self._seconds = router, tokenizer, settings.keep_streams
        self._running: dict[str, asyncio.Task[None]] = {}
        self._refusal: TllmError | None = None
        self._rest: Rest | None = None

    def refuse(self, why: TllmError, rest: Rest | None = None) -> None:
        """Begin no reply, and run none any more, for which this is the reason: another process may go on with them.

        Who reads one here gets what comes there, as `rest` tells it, or without that the reason.
        """
        self._refusal, self._rest = why, rest
        for stream in self.streams.kept():
            if not stream.is_shown:
                stream.is_elsewhere = True
                stream.tell()
                if (task := self._running.get(stream.record.id)) is not None:
                    task.cancel()

    async def open(self, record: StreamRecord, requests: Sequence[Request], account: Account) -> None:
        """Begin. It counts among what is in hand until all its requests have ended."""
        self._check_refusal()
        with ExitStack() as entered:
            charge = entered.enter_context(self._router.admit(len(requests), account, *size_of(requests), lasting=True))
            stream = self.streams.opened(record, [request.seeded() for request in requests])
            if not self.streams.is_kept(stream):
                raise no_room()
            admitted = entered.pop_all()
        choices = [self._choice(record, request) for request in stream.requests]
        self._begin(stream, choices, charge, admitted)
        await stream.until_known()
        self._check_refusal()

    def restore(self, kept: KeptReply, account: Account) -> None:
        """Keep a reply that another process began, and run what is left of it, from the tokens that it has.

        The rest is what it would have been, as a token follows from those before it, the request's seed and its place.
        """
        stream = self.streams.opened(kept.record, kept.requests)
        choices = {request.id: self._choice(kept.record, request) for request in kept.requests}
        for output in kept.outputs:
            self.streams.delivered(stream, output)
            if (choice := choices[output.request_id]).finish_reason is None:
                choice.read(output)
        if not self.streams.is_kept(stream):
            return  # there is no room for it here, and nobody reads it
        if kept.is_over:
            error = TllmError(kept.error) if kept.error else None
            for request in kept.requests:
                self.streams.closed(stream, request.id, error)
            self._expire_later()
            return
        left = []
        for choice in choices.values():
            if choice.finish_reason is None:
                choice.request = continued(choice.request, kept.outputs)
                left.append(choice)
            else:
                self.streams.closed(stream, choice.request.id)
        with ExitStack() as entered:
            entered.enter_context(self._router.held(len(left)))
            size = size_of([choice.request for choice in left])
            charge = entered.enter_context(account.charged(len(left), *size))
            admitted = entered.pop_all()
        self._begin(stream, left, charge, admitted)

    def _begin(self, stream: StoredStream, choices: Sequence[ReplyChoice], charge: Charge, admitted: ExitStack) -> None:
        name = stream.record.id
        running = self._running[name] = asyncio.create_task(self._run(stream, choices, charge), name=name)

        def ended(_: asyncio.Task[None]) -> None:  # also where it was cancelled before it began
            admitted.close()
            del self._running[name]
            self._expire_later()

        running.add_done_callback(ended)

    def _expire_later(self) -> None:
        """Forget what ends now in its time, if nobody comes until then."""
        asyncio.get_running_loop().call_later(self._seconds, self.streams.expire)

    async def take_up(self, stream_id: str, owner: str) -> TakenStream | None:
        """The stream from its beginning on; None where there is none that is this owner's."""
        self._check_refusal()
        stream = self.streams.find(stream_id, owner)
        if stream is None:
            return None
        return TakenStream(stream.record, stream.shown, stream.is_shown, self._follow(stream))

    async def end(self, stream_id: str, owner: str, forget: bool) -> bool:
        """Cancel what still runs of it, and with `forget` keep it no more; whether there was such a stream."""
        stream = self.streams.find(stream_id, owner)
        if stream is None:
            return False
        self._cancel(stream)
        if forget:
            self.streams.forget(stream)
        return True

    def _check_refusal(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(self._refusal.message, self._refusal.hint)

    async def _run(self, stream: StoredStream, choices: Sequence[ReplyChoice], charge: Charge) -> None:
        """Run all choices, until each has ended or the first fails, which ends all, as does too long a time."""
        error = TllmError("the server failed; its log says more")
        try:
            async with asyncio.timeout(self._router.request_seconds or None), asyncio.TaskGroup() as tasks:
                for choice in choices:
                    tasks.create_task(self._run_one(stream, choice, charge, choices))
        except TimeoutError:
            error = TllmError(too_late(self._router.request_seconds).message)
        except ExceptionGroup as group:
            failures = [failure for failure in group.exceptions if isinstance(failure, TllmError)]
            if not charge.has_begun and all(as_http(failure).status in LOST for failure in failures):
                charge.lost()  # what was computed of prompts came to nothing by no fault of whoever asked
            if not failures:
                raise
            # An HttpError was made of an output that is kept, of which every reader makes it again.
            error = TllmError(failures[0].message) if isinstance(failures[0], HttpError) else failures[0]
        finally:
            for choice in choices:
                self.streams.closed(stream, choice.request.id, error)

    def _choice(self, record: StreamRecord, request: Request) -> ReplyChoice:
        options = ChoiceOptions(
            stops=record.stops,
            include_stop_str_in_output=record.include_stop_str_in_output,
            skip_special_tokens=record.skip_special_tokens,
        )
        return ReplyChoice(0, request, self._tokenizer if record.stops else None, options)

    async def _run_one(
        self, stream: StoredStream, choice: ReplyChoice, charge: Charge, choices: Sequence[ReplyChoice]
    ) -> None:
        def look(output: Output) -> None:
            if output.computed_tokens:  # whoever goes on with the reply computes its prompt again
                charge.compute(output.request_id, output.computed_tokens)
            else:
                self.streams.delivered(stream, output)

        async with aclosing(self._router.run(choice, look)) as steps:
            async for _ in steps:
                _use(charge, choices)
        self.streams.closed(stream, choice.request.id)

    async def _follow(self, stream: StoredStream) -> AsyncGenerator[Output, None]:
        place = 0
        stream.readers += 1
        try:
            while True:
                await stream.wait(place)
                if place == stream.shown:
                    break
                place += 1
                yield stream.outputs[place - 1]
            if stream.is_elsewhere:
                async with aclosing(self._elsewhere(stream, place)) as outputs:
                    async for output in outputs:
                        yield output
            elif stream.error is not None:
                raise type(stream.error)(stream.error.message, stream.error.hint)
        finally:
            stream.readers -= 1
            if not stream.readers and not self.streams.is_kept(stream):
                self._cancel(stream)

    def _elsewhere(self, stream: StoredStream, given: int) -> AsyncGenerator[Output, None]:
        if self._rest is None:
            self._check_refusal()
        assert self._rest is not None, "what is refused says why"
        return self._rest(stream.record.id, stream.record.owner, given)

    def _dropped(self, stream: StoredStream) -> None:
        """It cannot be taken up any more, so it runs only as long as somebody reads it."""
        if not stream.readers:
            self._cancel(stream)

    def _cancel(self, stream: StoredStream) -> None:
        for request_id in sorted(stream.running):
            output = Output(request_id=request_id, finish_reason="cancelled", error="the reply was cancelled")
            self.streams.delivered(stream, output)
            self.streams.closed(stream, request_id)
        if (task := self._running.get(stream.record.id)) is not None:
            task.cancel()


def no_room() -> HttpError:
    """A reply is too large to be kept beside those that somebody reads."""
    return overloaded("the replies that are kept leave no room for this one", 1.0)


def continued(request: Request, outputs: Sequence[Output]) -> Request:
    """The request from where these outputs have brought it: what they told once is not asked for again."""
    mine = [output for output in outputs if output.request_id == request.id]
    token_ids = tuple(token for output in mine for token in output.token_ids)
    params = request.params
    if any(output.prompt_logprobs for output in mine):
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return msgspec.structs.replace(request, params=params, output_ids=token_ids)


def size_of(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens of the prompts, those of a prompt with several replies once, and the most that may be generated."""
    prompts = {request.prompt_ids for request in requests}
    return sum(map(len, prompts)), sum(request.params.max_tokens for request in requests)


def _use(charge: Charge, choices: Sequence[ReplyChoice]) -> None:
    """Charge what has been computed so far. Of a prompt's choices, the one that found least had the most computed."""
    cached: dict[tuple[int, ...], int] = {}
    for choice in choices:
        prompt = choice.request.prompt_ids
        cached[prompt] = min(choice.cached_tokens, cached.get(prompt, choice.cached_tokens))
    charge_choices(charge, choices, sum(cached.values()))
