"""`LastingEngine`: the engine of a first machine's HTTP server, whose requests outlive the office of its process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from tllm.cluster.channel import Gone
from tllm.cluster.consensus.replica import Deposed
from tllm.node.front_end.remote_engine import RemoteEngine
from tllm.server.openai.engine_client import EngineClient, Health
from tllm.spec.request import Output, Request


class LastingEngine:
    """Passes everything to the cluster that this process coordinates, its `own`.

    A request that is in hand when the process is deposed goes on at whoever coordinates then, asked by `successor`,
    from the tokens that came: as those of nodes' servers do. New requests are refused from `refuse` on.
    """

    def __init__(self, own: EngineClient, successor: RemoteEngine) -> None:
        self._own, self._successor = own, successor
        self._refusal: Deposed | None = None

    @property
    def model_name(self) -> str:
        return self._own.model_name

    @property
    def max_model_len(self) -> int:
        return self._own.max_model_len

    def refuse(self, why: Deposed) -> None:
        """Begin no request any more, for which this is the reason."""
        self._refusal = why

    async def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs as they come; closing this cancels it, wherever it runs."""
        if self._refusal is not None:
            raise Deposed(self._refusal.message, self._refusal.hint)
        request = request.seeded()
        token_ids = list(request.output_ids)
        try:
            async with aclosing(self._own.submit(request)) as outputs:
                async for output in outputs:
                    token_ids += output.token_ids
                    yield output
            return
        except Deposed:
            rest = msgspec.structs.replace(request, output_ids=tuple(token_ids))
        try:
            async with aclosing(self._successor.submit(rest)) as outputs:
                async for output in outputs:
                    yield output
        except Gone:  # nobody was found who coordinates: what this one was deposed by is told
            if self._refusal is None:
                raise
            raise Deposed(self._refusal.message, self._refusal.hint) from None

    def stats(self) -> Mapping[str, float]:
        return self._own.stats()

    def status(self) -> Mapping[str, Any]:
        return self._own.status()

    def health(self) -> Health:
        return self._own.health()
