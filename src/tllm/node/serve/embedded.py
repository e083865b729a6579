"""An engine in this process, with its ranks as threads, for the HTTP server and the commands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from tllm.core.errors import ClusterError
from tllm.engine.engine import Engine
from tllm.node.serve.dense_layers import DenseLayers
from tllm.server.openai.engine_client import Health
from tllm.spec.request import Output, Request


class Embedded:
    """An `EngineClient` over an `Engine`, whose threads hand outputs to the event loop. Embeddings go
    through the `dense` layers of the model's folder."""

    def __init__(self, engine: Engine, model_name: str, dense: DenseLayers | None = None) -> None:
        self.model_name = model_name
        self.max_model_len = engine.limits.max_model_len
        self._engine = engine
        self._last_step = time.monotonic()
        self._failure = ""
        self._dense = dense

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs as they come; closing this cancels it."""
        outputs = self._submit(request)
        return outputs if self._dense is None else self._dense.follow(request, outputs)

    async def _submit(self, request: Request) -> AsyncGenerator[Output, None]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Output | ClusterError] = asyncio.Queue()

        def put(output: Output | ClusterError) -> None:
            self._last_step = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop was closed before the engine: nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, output)

        self._engine.start(request, put)
        ended = False
        try:
            while not ended:
                output = await arrived.get()
                ended = isinstance(output, ClusterError) or output.finish_reason is not None
                yield self._checked(output)
        finally:
            if not ended:
                self._engine.cancel(request.id)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def status(self) -> Mapping[str, Any]:
        return {"plan": str(self._engine.plan), "ready": not self._failure, "nodes": []}

    def health(self) -> Health:
        running = int(self._engine.stats()["running"])
        silent = time.monotonic() - self._last_step
        alive = not self._failure
        return Health(alive=alive, ready=alive, running=running, seconds_since_step=silent, reason=self._failure)

    def _checked(self, output: Output | ClusterError) -> Output:
        """An output, or the error that it stands for."""
        if isinstance(output, ClusterError):
            self._failure = output.message
            raise output
        if output.finish_reason == "error":
            raise output.failure()
        return output
