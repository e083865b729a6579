"""`Serving`: a cluster that serves requests, as the HTTP server and the commands want an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from tllm.cluster.certificates import Authority
from tllm.cluster.channel import Act
from tllm.cluster.connection import Address
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.heartbeat import holder
from tllm.cluster.http_messages import AskSpans, ServedModel, ToldSpans
from tllm.cluster.messages import Message, Outputs, Prepared
from tllm.cluster.settings import EngineSettings
from tllm.cluster.state import ClusterState
from tllm.core.errors import ClusterError, TllmError
from tllm.core.model_folders import model_name
from tllm.node.coordinator.cluster_options import OnProgress
from tllm.node.coordinator.coordinator import Coordinator
from tllm.node.coordinator.job import check_pieces
from tllm.node.coordinator.losses import Loss
from tllm.node.coordinator.status_report import engine_stats, report
from tllm.node.coordinator.workload import Workload
from tllm.node.recovery.recovery import Policy, Recovery
from tllm.node.serve.dense_layers import DenseLayers
from tllm.node.serve.lora_adapters import LoraAdapters
from tllm.node.serve.node_requests import NodeRequests
from tllm.node.serve.open_requests import OpenRequests
from tllm.planner.cost.cache_room import RUNTIME_BYTES, check_machines, working_bytes
from tllm.planner.cost.draft_bytes import draft_bytes
from tllm.planner.cost.rank_bytes import ITEM_BYTES, rank_bytes
from tllm.planner.search.replan import replan
from tllm.server.openai.engine_client import Health, RequestRouter
from tllm.server.openai.lora_adapters import ServedAdapters
from tllm.server.stored.stream_store import LocalStreamStore
from tllm.server.tracing.tracing import NodeSpan
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request


class Serving:
    """An engine for the HTTP server (its `EngineClient`) whose ranks live on nodes; requests go to rank 0, in whatever
    epoch.

    It is the coordinator's job, and one that outlives lost nodes: `recovery` begins the epochs. `advice` says what
    another plan would gain, and `gain` is that as a part of 1; `predicted` is what the present plan is predicted to do
    (`ServingPrediction.shown`) and, as `beside`, the outcome of what was served; None where nobody predicted it.
    Whoever watches over the plan writes all three. `ended` is set once nothing can be served from here any more, for
    which `fault` is the reason.
    """

    def __init__(
        self,
        work: Workload,
        authority: Authority,
        address: Address,
        first: Sequence[str] = (),
        policy: Policy = "replan",
    ) -> None:
        assert isinstance(work.settings, EngineSettings) and work.folder is not None, "serving takes a model's folder"
        self.model_name = model_name(work.folder)
        self.requests = OpenRequests(self._send, lambda: self.coordinator.members.now())
        self.node_requests = NodeRequests(self._post)
        self.fault: TllmError | None = None
        self.advice, self.gain = "", 0.0
        self.predicted: Mapping[str, Any] | None = None
        self._settings = work.settings
        self.ended = asyncio.Event()
        self.coordinator = Coordinator(self, work, authority, address, first)
        self.recovery = Recovery(self, self.coordinator, policy)
        self.adapters = LoraAdapters(self.model_name, self._spec, self.coordinator, self.recovery, self._check_present)

    @cached_property
    def _spec(self) -> ModelSpec:
        return spec_from_config(json.loads(self.coordinator.work.config))

    @cached_property
    def _dense(self) -> DenseLayers:
        folder = self.coordinator.work.folder
        assert folder is not None, "serving takes a model's folder"
        return DenseLayers(folder)

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and reply together, in tokens."""
        return self._settings.max_model_len

    @property
    def state(self) -> ClusterState:
        return self.coordinator.state

    @property
    def is_open(self) -> bool:
        """Whether requests are computed now."""
        return self.recovery.is_open

    @property
    def is_idle(self) -> bool:
        return len(self.requests) == 0

    async def form(self, seconds: float | None = None, on_progress: OnProgress | None = None) -> None:
        """Wait for enough nodes, `seconds` at most, and begin the first epoch on them."""
        nodes = await self.coordinator.choose(await self.coordinator.wait_for_nodes(seconds), on_progress)
        await self.recovery.begin(nodes, on_progress)

    @property
    def served(self) -> ServedModel | None:
        """What HTTP servers serve, here and on nodes; None where none do."""
        return self.coordinator.work.served

    def open_to_nodes(self, router: RequestRouter, store: LocalStreamStore, adapters: ServedAdapters | None) -> None:
        """Let HTTP servers of nodes answer as this machine's does.

        A coordinator that takes this one's place keeps the replies of `store` too.
        """
        assert self.served is not None, "it was said when the cluster was opened"
        if self.coordinator.replication is not None:
            self.coordinator.replication.keep_replies(store.streams)
        self.node_requests.open(self.served, router, store, adapters)

    @property
    def can_hand_over(self) -> bool:
        """Whether another process may go on with the cluster when this one leaves."""
        return self.coordinator.can_hand_over

    async def hand_over(self) -> bool:
        """Let another process coordinate: what nodes asked for, and what is kept, goes on there. False where none
        could, so that the cluster ends with this process."""
        if not await self.coordinator.hand_over():
            return False
        self.fail(ClusterError("another machine coordinates this cluster now"))  # which nobody hears
        return True

    def submit(self, request: Request) -> AsyncGenerator[Output, None]:
        """The request's outputs; closing this cancels it."""
        outputs = self._dense.follow(request, self.requests.submit(request))
        return self.adapters.counted(request.lora, outputs) if request.lora else outputs

    def move(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Go on under another plan, whose ranks these nodes take in order; streams go on too.

        CapacityError where nodes lack the memory for it. If the plan cannot begin, the one before is returned to.
        """
        plan.check_serving()
        self.check_room(plan, nodes)
        self.recovery.move.begin(plan, nodes)

    def node_spans(self, traces: Collection[int]) -> list[NodeSpan]:
        """What the ranks have told of what they did for these traces."""
        ranks = enumerate(self.state.ranks)
        return [
            NodeSpan(one.node, rank, span) for rank, one in ranks for span in one.beat.spans if span.trace in traces
        ]

    def stats(self) -> Mapping[str, float]:
        stats, server = engine_stats(self.state), self.coordinator.control_server
        return {
            **stats,
            **self.coordinator.weights.stats(),
            "refused_links": stats["refused_links"] + server.refused,
            "refused_frames": stats["refused_frames"] + server.refused_frames,
            "epoch": float(self.state.epoch),
            "losses": float(self.recovery.lost_ranks),
            "plan_gain": self.gain,
        }

    def status(self) -> Mapping[str, Any]:
        return {
            **report(self.state, self.coordinator.invitation),
            "model": self.model_name,
            "fault": self.fault.message if self.fault else "",
            "trouble": self.recovery.trouble()[1],
            "doing": self.recovery.doing(),
            "wanted": str(self.coordinator.work.plan),
            "losses": self.recovery.lost_ranks,
            "recent_losses": [loss.error.message for loss in self.recovery.losses.recent],
            "advice": self.advice,
            "predicted": self.predicted,
            "survey": msgspec.to_builtins(self.coordinator.selection.survey),
            "weights": self.coordinator.weights.report(),
            "replicas": None if self.coordinator.replication is None else self.coordinator.replication.status(),
        }

    def health(self) -> Health:
        if self.ended.is_set():  # a process that was deposed joins whoever followed it
            why = "" if self.fault is None else self.fault.message
            return Health(alive=isinstance(self.fault, Deposed), ready=False, reason=why)
        ranks, running = self.state.ranks, len(self.requests)
        since = max(self.requests.busy_since, ranks[0].stepped if ranks else 0.0)
        node, reason = self.recovery.trouble()
        return Health(
            ready=(self.is_open and self.state.is_ready) or self._only_moves(),
            running=running,
            seconds_since_step=self.coordinator.members.now() - since if running else 0.0,
            node=node,
            reason=reason,
            waits_for=holder(self.state) if running else "",
        )

    def adopt(self, work: Workload) -> Workload:
        assert isinstance(work.settings, EngineSettings), "serving stays serving"
        self._settings = work.settings
        if (served := self.served) is not None:
            served = msgspec.structs.replace(served, max_model_len=work.settings.max_model_len)
        return dataclasses.replace(work, served=served, adapters=self.coordinator.work.adapters)

    def fail(self, error: TllmError) -> None:
        """The coordinator itself cannot go on: every open request ends with this, and no new one is taken."""
        self.ended.set()
        self.fault = error
        self.requests.fail(error)

    def before_epoch(self, plan: Plan, nodes: Sequence[str]) -> None:
        """Nothing: `plan_on` and `move` have looked for room."""

    def resume(self) -> None:
        """Send the open requests to the driver of the new epoch."""
        self.fault = None
        self.recovery.move.confirm()
        self.requests.resume()

    def give_up(self, error: TllmError) -> None:
        self.fault = error
        self.requests.fail(error)

    def survives(self, error: TllmError) -> bool:
        """Always: what another node fails of may be its own."""
        return True

    def interrupted(self, loss: Loss | None) -> None:
        """Nothing: open requests wait for the next epoch."""

    def plan_on(self, taken: Mapping[int, str]) -> tuple[Plan, tuple[str, ...]]:
        plan, nodes = replan(self.coordinator.work.plan, taken), tuple(taken.values())
        self.check_room(plan, nodes)
        return plan, nodes

    def check_room(self, plan: Plan, nodes: Sequence[str]) -> None:
        """CapacityError where these nodes lack the memory for the ranks of a plan."""
        rooms = {member.node: member.facts.room for member in self.state.living}
        machines = [rooms[node] for node in nodes]
        settings = self._settings
        cache_tokens = settings.num_pages * settings.page_size
        rows = settings.max_num_seqs * (1 + settings.num_speculative_tokens)
        needs = [
            rank.weights
            + rank.kv_per_token * cache_tokens
            + working_bytes(self._spec, rank, settings.dtype, settings.max_num_batched_tokens, rows)
            + RUNTIME_BYTES
            + self.adapters.elements(rank.layers) * ITEM_BYTES[settings.dtype]
            for rank in rank_bytes(self._spec, plan, settings.dtype, settings.kv_cache_dtype)
        ]
        drafts = None if settings.speculative_config is None else settings.speculative_config.draft_spec()
        if drafts is not None:
            needs[0] += draft_bytes(drafts, settings.dtype, settings.num_pages, settings.page_size).total
        check_machines(needs, machines)

    def _check_present(self) -> None:
        """CapacityError where the nodes lack the memory for the present plan with the adapters that there are."""
        if self.state.plan is not None:
            self.check_room(self.state.plan, [member.node for member in self.state.ranks])

    def check(self, prepared: Mapping[int, Prepared]) -> None:
        check_pieces(prepared)

    def acts(self, node: str) -> Mapping[type, Act]:
        async def outputs(message: Outputs) -> None:
            ranks = self.state.ranks
            if ranks and ranks[0].node == node and message.epoch == self.state.epoch:
                self.requests.deliver(message.outputs)

        async def spans(message: AskSpans) -> ToldSpans:
            return ToldSpans(tuple(self.node_spans(message.traces)))

        return {**self.node_requests.acts(node), Outputs: outputs, AskSpans: spans}

    def _only_moves(self) -> bool:
        """Whether a request would wait for nothing but a move to another plan."""
        return self.recovery.move.is_pending and not len(self.recovery.losses) and self.fault is None

    def _post(self, node: str, message: Message) -> None:
        """Post to a node, if it is still here."""
        if (channel := self.coordinator.members.channels.get(node)) is not None:
            channel.post(message)

    def _send(self, message: Message) -> None:
        """Post to the node of rank 0; a message before the epoch is open is dropped, as `resume` sends it again."""
        if self.fault is not None:
            raise type(self.fault)(self.fault.message, self.fault.hint)
        if self.is_open:
            self._post(self.state.ranks[0].node, message)
