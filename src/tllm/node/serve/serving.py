"""`Serving`: a cluster that serves requests, as the HTTP server and the commands want an engine."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.heartbeat import holder
from tllm.cluster.messages import Message, Outputs, Prepared
from tllm.cluster.settings import EngineSettings
from tllm.core.errors import TllmError
from tllm.node.coordinator.coordinator import Workload
from tllm.node.coordinator.recovery import Policy, RecoveringCoordinator
from tllm.node.coordinator.status_report import engine_stats, report
from tllm.node.serve.open_requests import OpenRequests
from tllm.planner.cost.cache_room import RUNTIME_BYTES, check_machines, working_bytes
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.search.replan import replan
from tllm.server.openai.engine_client import Health
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request
from tllm.weights.coverage import HeldBlock, check_coverage


class Serving(RecoveringCoordinator):
    """An engine for the server whose ranks live on nodes; its requests go to rank 0, in whatever epoch."""

    def __init__(
        self,
        work: Workload,
        authority: Authority,
        address: Address,
        first: Sequence[str] = (),
        policy: Policy = "replan",
    ) -> None:
        assert isinstance(work.settings, EngineSettings) and work.folder is not None, "serving takes a model's folder"
        self.model_name = work.folder.resolve().name
        self.max_model_len = work.settings.max_model_len
        self.requests = OpenRequests(self._send)
        self._settings = work.settings
        self._spec = spec_from_config(json.loads(work.config))
        self._is_over = False
        self.advice, self.gain = "", 0.0  # what another plan would be faster by, in words and as a part of 1
        super().__init__(work, authority, address, first, policy)

    @property
    def is_idle(self) -> bool:
        return len(self.requests) == 0

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it."""
        return self.requests.submit(request)

    def move(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Go on under another plan, streams too. CapacityError where nodes lack the memory for it."""
        plan.check_serving()
        self.check_room(plan, nodes)
        super().move(plan, nodes)

    def stats(self) -> Mapping[str, float]:
        stats = engine_stats(self.state)
        return {
            **stats,
            **self.origin.stats(),
            "refused_links": stats["refused_links"] + self.door.refused,
            "refused_frames": stats["refused_frames"] + self.door.refused_frames,
            "epoch": float(self.state.epoch),
            "losses": float(self.count),
            "plan_gain": self.gain,
        }

    def status(self) -> Mapping[str, Any]:
        return {
            **report(self.state),
            "model": self.model_name,
            "fault": self.fault.message if self.fault else "",
            "trouble": self.trouble()[1],
            "doing": self.doing(),
            "wanted": str(self.work.plan),
            "losses": self.count,
            "advice": self.advice,
            "survey": msgspec.to_builtins(self.survey),
            "weights": self.origin.report(),
        }

    def health(self) -> Health:
        ranks = self.state.ranks
        since = max(self.requests.busy_since, ranks[0].stepped if ranks else 0.0)
        node, reason = self.trouble()
        return Health(
            alive=not self._is_over,
            ready=(self.is_open and self.state.is_ready) or self._only_moves(),
            running=len(self.requests),
            seconds_since_step=time.monotonic() - since if len(self.requests) else 0.0,
            node=node,
            reason=reason,
            waits_for=holder(self.state) if len(self.requests) else "",
        )

    def _only_moves(self) -> bool:
        """Whether a request would wait for a move alone."""
        return self._moves and not self.losses and self.fault is None

    def take(self, work: Workload) -> None:
        assert isinstance(work.settings, EngineSettings), "serving stays serving"
        super().take(work)
        self._settings, self.max_model_len = work.settings, work.settings.max_model_len

    def fail(self, error: TllmError) -> None:
        """The coordinator itself cannot go on: every open request ends with this, and no new one is taken."""
        self._is_over = True
        self.fault = error
        self.requests.fail(error)

    def go_on(self) -> None:
        self._before = None  # a move went well
        self.requests.resume()

    def give_up(self, error: TllmError) -> None:
        self.requests.fail(error)

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        plan, nodes = replan(self.work.plan, taken), tuple(taken.values())
        self.check_room(plan, nodes)
        return plan, nodes

    def check_room(self, plan: Plan, nodes: Sequence[str]) -> None:
        """CapacityError where these nodes lack the memory for the ranks of a plan."""
        rooms = {member.node: member.facts.room for member in self.state.living}
        machines = [rooms[node] for node in nodes]
        made = self._settings
        slots, rows = made.num_pages * made.page_size, made.max_num_seqs * (1 + made.num_speculative_tokens)
        needs = [
            rank.weights
            + rank.kv_per_token * slots
            + working_bytes(self._spec, rank, made.dtype, made.max_num_batched_tokens, rows)
            + RUNTIME_BYTES
            for rank in rank_bytes(self._spec, plan, made.dtype)
        ]
        check_machines(needs, machines)

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        """Each element that the model needs is held exactly once, or as often as the plan means it to be."""
        held = {
            rank: [HeldBlock(piece.name, piece.source, piece.replicated) for piece in one.pieces]
            for rank, one in prepared.items()
        }
        check_coverage(held, prepared[0].needed)

    def acts(self, node: str) -> Mapping[type, Act]:
        async def outputs(message: Outputs) -> None:
            ranks = self.state.ranks
            if ranks and ranks[0].node == node and message.epoch == self.state.epoch:
                self.requests.deliver(message.outputs)

        return {**super().acts(node), Outputs: outputs}

    def _send(self, message: Message) -> None:
        if self.fault is not None:
            raise type(self.fault)(self.fault.message, self.fault.hint)
        if self.is_open:
            self.members.channels[self.state.ranks[0].node].post(message)
