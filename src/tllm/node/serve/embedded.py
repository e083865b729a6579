"""An engine in this process, its ranks as threads, as the HTTP server and the other commands want one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from tllm.core.errors import ClusterError, TllmError
from tllm.engine.engine import Engine, Stream
from tllm.server.openai.engine_client import Health
from tllm.spec.request import Output, Request


class Embedded:
    """An `EngineClient` over an `Engine`; one small thread a request carries its outputs to the event loop."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.model_name = model_name
        self.max_model_len = engine.limits.max_model_len
        self._engine = engine
        self._last_step = time.monotonic()
        self._failure = ""

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs as they come; closing this cancels it."""
        arrived: asyncio.Queue[Output | TllmError] = asyncio.Queue()
        stream = self._engine.submit(request)
        pump = threading.Thread(
            target=self._pump,
            args=(stream, asyncio.get_running_loop(), arrived),
            name=f"tllm-{request.id}",
            daemon=True,
        )
        pump.start()
        try:
            while True:
                output = await arrived.get()
                if isinstance(output, TllmError):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            stream.close()

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def status(self) -> Mapping[str, Any]:
        return {"plan": str(self._engine.plan), "ready": not self._failure, "nodes": []}

    def health(self) -> Health:
        running = int(self._engine.stats()["running"])
        silent = time.monotonic() - self._last_step
        alive = not self._failure
        return Health(alive=alive, ready=alive, running=running, seconds_since_step=silent, reason=self._failure)

    def _pump(
        self, stream: Stream, loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Output | TllmError]
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before the engine: nobody waits any more
            try:
                for output in stream:
                    self._last_step = time.monotonic()
                    loop.call_soon_threadsafe(arrived.put_nowait, output)
            except TllmError as error:
                if isinstance(error, ClusterError):
                    self._failure = error.message
                loop.call_soon_threadsafe(arrived.put_nowait, error)
