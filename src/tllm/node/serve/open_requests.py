"""`OpenRequests`: the coordinator's open requests, each with its tokens so far and the queue that takes its outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from tllm.cluster.messages import Cancel, Message, Submit
from tllm.core.errors import ClusterError, RequestError, TllmError
from tllm.spec.request import Output, Request

TRIES = 4
"""A request is begun in so many epochs in a row without getting a token: it may be what makes nodes fail."""


@dataclass
class _Open:
    request: Request
    outputs: asyncio.Queue[Output | TllmError] = field(default_factory=asyncio.Queue)
    token_ids: list[int] = field(default_factory=list)
    tries: int = 1
    is_over: bool = False

    def put(self, output: Output | TllmError) -> None:
        if self.is_over:
            return
        if isinstance(output, TllmError):
            self.is_over = True
        else:
            self.token_ids += output.token_ids
            self.tries = 0 if output.token_ids else self.tries
            self.is_over = output.finish_reason is not None
        self.outputs.put_nowait(output)


class OpenRequests:
    """`send` posts to the node of rank 0, does nothing while there is none, or raises why there will not be one soon.

    A request keeps the tokens that it got: `resume` sends them to the driver of the next epoch, where the request goes
    on with the very next token. That is the same in any epoch, as it follows from the tokens before it, the request's
    seed and its position. `busy_since`: when the first of those that are open now began, by the clock.
    """

    def __init__(self, send: Callable[[Message], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self.busy_since = 0.0
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it. Raises RequestError or NonFiniteError, or what the cluster
        failed with."""
        if request.id in self._open:
            raise RequestError(f"a request with id {request.id!r} is already running", "give each its own id")
        request = request.seeded()
        self._send(Submit(request))
        if not self._open:
            self.busy_since = self._clock()
        open_request = self._open[request.id] = _Open(request)
        ended = False
        try:
            while not ended:
                output = await open_request.outputs.get()
                ended = isinstance(output, TllmError) or output.finish_reason is not None
                if isinstance(output, TllmError):
                    raise output
                if output.finish_reason == "error":
                    raise output.failure()
                yield output
        finally:
            del self._open[request.id]
            if not ended:
                self._cancel(request.id)

    def deliver(self, outputs: tuple[Output, ...]) -> None:
        """Outputs from the driver; those of a request that was closed meanwhile are dropped."""
        for output in outputs:
            if output.request_id in self._open:
                self._open[output.request_id].put(output)

    def resume(self) -> None:
        """Send the open requests to the driver of a new epoch, which knows nothing of them."""
        for open_request in self._open.values():
            if open_request.is_over:
                continue
            open_request.tries += 1
            request = open_request.request
            if open_request.tries > TRIES:
                open_request.put(_futile(request.id))
            else:
                token_ids = (*request.output_ids, *open_request.token_ids)
                self._send(Submit(msgspec.structs.replace(request, output_ids=token_ids)))

    def fail(self, error: TllmError) -> None:
        """End every open request with an error of its own."""
        for open_request in self._open.values():
            open_request.put(type(error)(error.message, error.hint))

    def _cancel(self, request_id: str) -> None:
        try:
            self._send(Cancel(request_id))
        except TllmError:  # the cluster is lost, and the request with it
            return


def _futile(request_id: str) -> ClusterError:
    return ClusterError(
        f"request {request_id} was begun {TRIES} times, and each time a node was lost before its next token",
        "see the logs of the nodes: the request itself may be what they fail of",
    )
