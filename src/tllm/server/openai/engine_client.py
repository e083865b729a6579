"""Between the routes and the engine: what the server needs of an engine, and how a choice runs on it.

`EngineClient` is all that the server knows of an engine. `RequestRouter` admits sequences and runs them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import msgspec

from tllm.core.errors import ClusterError, TllmError
from tllm.server.http.errors import HttpError, draining, overloaded
from tllm.server.http.metrics import Metrics, SequenceTimer
from tllm.server.openai.choice import ChoiceProgress, ReplyChoice
from tllm.spec.request import Output, Request


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is. `node` and `reason` say who and what is at fault where something is.

    `waits_for`: the node that what runs waits for, though nothing may be wrong with it.
    """

    alive: bool = True
    ready: bool = True
    running: int = 0
    seconds_since_step: float = 0.0  # since any step of any kind was done; counts only while something runs
    node: str = ""
    reason: str = ""
    waits_for: str = ""


class EngineClient(Protocol):
    """What the server needs of an engine, wherever it runs.

    `submit` gives the request's tokens as they come; closing it cancels the request. It raises `RequestError` where
    the request cannot be served as written and `ClusterError` where a node was lost. `stats` may hold running, waiting,
    kv_usage, preemptions, prefix_queries, prefix_hits and more.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    def submit(self, request: Request) -> AsyncGenerator[Output, None]: ...

    def stats(self) -> Mapping[str, float]: ...

    def status(self) -> Mapping[str, Any]: ...

    def health(self) -> Health: ...


class RequestRouter:
    """Hands requests to the engine, and refuses those beyond `max_sequences`, or all while it is `draining`.

    `in_hand` are the sequences that run or wait. Each is timed for the metrics: `open` has the timers of those that the
    engine has, by the id of their request.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, max_sequences: int) -> None:
        self.client = client
        self.metrics = metrics
        self.max_sequences = max_sequences
        self.in_hand = 0
        self.open: dict[str, SequenceTimer] = {}
        self.draining = False

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Room for `count` sequences, given back at the end; `HttpError` 429 or 503 where there is none."""
        if self.draining:
            raise draining()
        if count > self.max_sequences:
            message = f"the request asks for {count} sequences, at most {self.max_sequences} are taken at once"
            raise HttpError(400, message, code="too_many_sequences")
        if self.in_hand + count > self.max_sequences:
            raise overloaded(f"{self.in_hand} sequences are in hand and {self.max_sequences} the most")
        self.in_hand += count
        try:
            yield
        finally:
            self.in_hand -= count

    async def pool(self, request: Request) -> Output:
        """What a prompt comes to that is pooled. Cancelling this cancels it; an engine's error is raised."""
        timer = self.open[request.id] = SequenceTimer(self.metrics.sequences, len(request.prompt_ids))
        try:
            output = await pooled_output(self.client, request)
            timer.pooled()
            return output
        except TllmError:
            timer.reason = "error"
            raise
        finally:
            del self.open[request.id]
            timer.close()

    async def run(
        self, choice: ReplyChoice, keep: Callable[[Output], None] = lambda output: None
    ) -> AsyncGenerator[ChoiceProgress, None]:
        """Run one choice to its end. Closing this cancels its sequence; an engine's error is raised.

        Each output goes to `keep` before anything is made of it.
        """
        timer = SequenceTimer(self.metrics.sequences, len(choice.request.prompt_ids))
        self.open[choice.request.id] = timer
        try:
            async with aclosing(self.client.submit(choice.request)) as outputs:
                async for output in outputs:
                    keep(output)
                    _check_end(output)
                    timer.count(len(output.token_ids))
                    progress = choice.read(output)
                    timer.reason = choice.finish_reason or timer.reason
                    yield progress
                    if choice.finish_reason is not None:
                        return
            raise HttpError(500, "the engine ended the request without a reason", "server_error", "engine_error")
        except TllmError:
            timer.reason = "error"
            raise
        finally:
            del self.open[choice.request.id]
            timer.close()


async def read_outputs(
    choices: Sequence[ReplyChoice], outputs: AsyncGenerator[Output, None]
) -> AsyncGenerator[ChoiceProgress, None]:
    """What all choices of a reply make of outputs that come mixed, until each has ended or there are no more.

    An output says by its request whose it is; those of a choice that has ended are dropped.
    """
    running = {choice.request.id: choice for choice in choices}
    async with aclosing(outputs):
        async for output in outputs:
            choice = running.get(output.request_id)
            if choice is None:
                continue
            _check_end(output)
            yield choice.read(output)
            if choice.finish_reason is not None:
                del running[output.request_id]
            if not running:
                return


def _check_end(output: Output) -> None:
    """HttpError where the engine ended a request before its time."""
    if output.finish_reason in ("error", "cancelled"):
        reason = output.error or f"the engine ended the request: {output.finish_reason}"
        raise HttpError(500, reason, "server_error", f"engine_{output.finish_reason}")


async def pooled_output(client: EngineClient, request: Request) -> Output:
    """The one output of a request that is pooled. ClusterError where the engine ended it without."""
    async with aclosing(client.submit(request)) as outputs:
        async for output in outputs:
            if output.finish_reason == "stop" and output.pooled:
                return output
    raise ClusterError("the engine ended a request that is pooled without what it comes to", "ask again")
