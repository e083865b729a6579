"""`Serving`: a cluster that serves requests, as the HTTP server and the commands want an engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tllm.cluster.channel import Act
from tllm.cluster.identity import Authority
from tllm.cluster.messages import Message, Outputs, Prepared
from tllm.cluster.settings import EngineSettings
from tllm.cluster.wire import Address
from tllm.ground.errors import ClusterError, TllmError
from tllm.node.coordinator import Coordinator, Work
from tllm.node.report import engine_stats, report
from tllm.node.requests import Requests
from tllm.server.router import Health
from tllm.spec.request import Output, Request
from tllm.weights.cover import Held, check_coverage


class Serving(Coordinator):
    """An engine for the server whose ranks live on nodes; its requests go to rank 0."""

    def __init__(self, work: Work, authority: Authority, address: Address, first: Sequence[str] = ()) -> None:
        assert isinstance(work.settings, EngineSettings) and work.folder is not None, "serving takes a model's folder"
        self.model_name = work.folder.resolve().name
        self.max_model_len = work.settings.max_model_len
        self.requests = Requests(self._send)
        super().__init__(work, authority, address, first)

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it."""
        return self.requests.submit(request)

    def stats(self) -> Mapping[str, float]:
        return engine_stats(self.state)

    def status(self) -> Mapping[str, Any]:
        return {**report(self.state), "model": self.model_name, "fault": self.fault.message if self.fault else ""}

    def health(self) -> Health:
        ranks, lost = self.state.ranks, self.state.lost
        since = max(self.requests.busy_since, ranks[0].stepped if ranks else 0.0)
        return Health(
            alive=self.fault is None,
            ready=self.state.is_ready,
            running=len(self.requests),
            seconds_since_step=time.monotonic() - since if len(self.requests) else 0.0,
            node=self.losses[0][0] if self.losses else lost[0].node if lost else "",
            reason=self.fault.message if self.fault else "",
        )

    def fail(self, error: TllmError) -> None:
        """Every open request ends with this, and no new one is taken."""
        self.fault = error
        self.requests.fail(error)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Each element that the model needs is held exactly once, or as often as the plan means it to be."""
        held = {
            rank: [Held(piece.name, piece.source, piece.replicated) for piece in one.pieces]
            for rank, one in prepared.items()
        }
        check_coverage(held, prepared[0].needed)

    def acts(self, node: str) -> Mapping[type, Act]:
        async def outputs(message: Outputs) -> None:
            if self.state.ranks and self.state.ranks[0].node == node:
                self.requests.deliver(message.outputs)

        return {**super().acts(node), Outputs: outputs}

    def _send(self, message: Message) -> None:
        if self.fault is not None:
            raise type(self.fault)(self.fault.message, self.fault.hint)
        driver = self.state.ranks[0].node if self.state.is_ready else ""
        if driver not in self.members.channels:
            raise ClusterError("the cluster is not ready", "wait until every node has loaded its part")
        self.members.channels[driver].post(message)
