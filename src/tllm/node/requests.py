"""`Requests`: the open requests of the coordinator, each with the queue that its outputs go to."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from tllm.cluster.messages import Cancel, Message, Submit
from tllm.ground.errors import RequestError, TllmError
from tllm.spec.request import Output, Request


class Requests:
    """`send` posts to the node of rank 0, or raises what is wrong with the cluster."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.busy_since = 0.0  # when the first of those that are open now began, by time.monotonic()
        self._open: dict[str, asyncio.Queue[Output | TllmError]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it. Raises RequestError, or what the cluster failed with."""
        if request.id in self._open:
            raise RequestError(f"a request with id {request.id!r} is already running", "give each its own id")
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        self._send(Submit(request))
        if not self._open:
            self.busy_since = time.monotonic()
        outputs = self._open[request.id] = asyncio.Queue()
        ended = False
        try:
            while not ended:
                output = await outputs.get()
                ended = isinstance(output, TllmError) or output.finish_reason is not None
                if isinstance(output, TllmError):
                    raise output
                if output.finish_reason == "error":
                    message, _, hint = output.error.partition("\nhint: ")
                    raise RequestError(message, hint)
                yield output
        finally:
            del self._open[request.id]
            if not ended:
                self._cancel(request.id)

    def deliver(self, outputs: tuple[Output, ...]) -> None:
        """Outputs from the driver; those of a request that was closed meanwhile are dropped."""
        for output in outputs:
            if output.request_id in self._open:
                self._open[output.request_id].put_nowait(output)

    def fail(self, error: TllmError) -> None:
        """End every open request with an error of its own."""
        for queue in self._open.values():
            queue.put_nowait(type(error)(error.message, error.hint))

    def _cancel(self, request_id: str) -> None:
        try:
            self._send(Cancel(request_id))
        except TllmError:  # the cluster is lost, and the request with it
            return
