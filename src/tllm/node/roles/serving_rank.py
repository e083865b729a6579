"""`Rank`: one node's part in serving a plan, from the assignment to the running engine."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from collections.abc import Mapping

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import Assign, HeldPiece, Loaded, Prepared
from tllm.cluster.settings import EngineSettings
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import tune_between_hosts
from tllm.comm.links.connect import Listener
from tllm.comm.links.link import Link
from tllm.core.errors import LinkError
from tllm.core.memory import give_back_memory, reset_peak_bytes, rss_bytes
from tllm.engine.driver import CloseRing, Command, Driver
from tllm.engine.engine import make_driver, make_stage
from tllm.engine.schedule.limits import Limits
from tllm.engine.stage import PipelineStage, RingLinks
from tllm.model.transformer import build
from tllm.node.roles.compressed_ring import narrow_error, narrowed
from tllm.node.roles.control import Control
from tllm.node.roles.role import Role, bytes_by_wire, connect_wires, fetched, model_source
from tllm.parallel.mesh import mesh_of, whole
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Wire
from tllm.weights.byte_source import Fetch
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import Progress, held_of, load
from tllm.weights.manifest import checked
from tllm.weights.remote_files import FetchedFiles
from tllm.weights.safetensors_index import Index
from tllm.weights.weight_reuse import Kept, wanted, weights_of

log = logging.getLogger("tllm.node")


class Rank:
    """Connects the wires and builds the model without its weights; then `load`, then `run` until the ring stops.

    Parameters that the part `before` has already, of the same files, are taken over and not read again.
    """

    outlives = True

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        assert isinstance(assign.settings, EngineSettings), "training is another part"
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._assign = assign
        self.rank, self.plan, self.settings = assign.rank, assign.plan, assign.settings
        self.spec = spec_from_config(json.loads(assign.config))
        earlier = before if isinstance(before, Rank) and before.is_of(assign) else None
        if earlier is None:
            self._found = model_source(assign, fetch)
            self._source = checked(self._found)
            self._index = Index.read(self._source)
        else:  # the headers need not cross a wide link again
            self._found, self._source, self._index = earlier._found, earlier._source, earlier._index
        seconds, wiring = self.settings.link_seconds, self.settings.wiring
        self.links = connect_wires(assign, wires(self.plan), identity, listener, seconds, wiring)
        group = _group(self.plan, self.rank, self.links)
        stage, _ = self.plan.place(self.rank)
        self._network = tune_between_hosts(group, [assign.places[rank].host for rank in self.plan.ranks(stage)])
        self._mesh = mesh_of(self.spec, self.plan, self.rank, group)
        self._dtype = torch_dtype(self.settings.dtype)
        self._ring = _ring(self.plan, self.rank, self.links)
        if self._ring is not None and self.settings.narrow_wire != "off":
            width = self.spec.hidden_size
            self._ring, words = narrowed(self._ring, self.plan, self.rank, self.settings, width, self._dtype)
            self._network = "; ".join(filter(None, (self._network, words)))
        self._model = build(self.spec, self._mesh, self._dtype, "meta")
        self._kept: Kept = wanted(self._model, earlier._kept) if earlier is not None else {}
        self._stage: PipelineStage | None = None
        self._driver: Driver | None = None

    def is_of(self, assign: Assign) -> bool:
        """Whether another assignment is of the same files."""
        return (assign.config, assign.files) == (self._assign.config, self._assign.files)

    def prepared(self) -> Prepared:
        """What this rank will hold, for the check that all ranks together hold each element once."""
        held = held_of(self._model)
        bytes_of = rank_bytes(self.spec, self.plan, self.settings.dtype)[self.rank]
        slots = self.settings.num_pages * self.settings.page_size
        return Prepared(
            rank=self.rank,
            pieces=tuple(HeldPiece(block.name, block.box, block.replicated) for block in held),
            needed=_needed(self.spec, self._index) if self.rank == 0 else {},
            parameter_bytes=bytes_of.weights,
            cache_bytes=bytes_of.kv_per_token * slots,
        )

    def load(self, progress: Progress) -> Loaded:
        """Read this rank's weights, and make its cache."""
        start = time.monotonic()
        give_back_memory()
        reset_peak_bytes()  # of the part before, in another epoch or a survey
        before, fetched_before = self._source.bytes_read, fetched(self._found)
        load(self._model, self._index, self._source, self._dtype, progress, self._kept)
        self._kept = weights_of(self._model)
        limits = _limits(self.settings, self.spec.vocab_size)
        self._stage = make_stage(self._model, self._mesh, self.plan, self._ring, limits)
        if self.rank == 0:
            self._driver = make_driver(self._stage, self.spec, self.plan)
        if isinstance(self._found, FetchedFiles):
            log.info("weights came %s", self._found.told())
        return Loaded(
            rank=self.rank,
            bytes_read=self._source.bytes_read - before,
            fetched=fetched(self._found) - fetched_before,
            seconds=time.monotonic() - start,
            rss_bytes=rss_bytes(),
            network=self._network,
        )

    def run(self, control: Control) -> None:
        """Compute until the driver is told to close, and with it the ring."""
        assert self._stage is not None, "load comes before run"
        if self._driver is not None:
            self._driver.run(self._inbox, lambda outputs: control.deliver(self._assign.epoch, outputs))
        else:
            self._stage.serve()

    def stats(self) -> dict[str, float]:
        """The engine's numbers; of a rank that does not drive, how many batches it has computed."""
        if self._driver is not None:
            return {**self._driver.stats(), **self._driver.stage.tally.stats(), **narrow_error(self._ring)}
        if self._stage is None:
            return {}
        return {"batches": self._stage.batches, **self._stage.tally.stats(), **narrow_error(self._ring)}

    def link_bytes(self) -> dict[str, int]:
        return bytes_by_wire(self.links)

    def command(self, command: Command) -> None:
        self._inbox.put(command)

    def interrupt(self) -> None:
        """Break the wires; a driver without any is told to close."""
        self._inbox.put(CloseRing())
        for link in self.links.values():
            link.interrupt()

    def close(self) -> None:
        """Close the wires, letting what was sent leave; that they broke is known by then."""
        for link in self.links.values():
            with contextlib.suppress(LinkError):
                link.close()


def wires(plan: Plan) -> list[Wire]:
    """Every directed wire of a plan: between all ranks of a stage, and round the ring of the stages' first ranks."""
    leaders = [plan.ranks(stage).start for stage in range(plan.pp)]
    inside = [Wire(a, b) for stage in range(plan.pp) for a in plan.ranks(stage) for b in plan.ranks(stage) if a != b]
    ring = [Wire(leaders[i - 1], leaders[i]) for i in range(plan.pp)] if plan.pp > 1 else []
    return inside + ring


def _group(plan: Plan, rank: int, links: Mapping[Wire, Link]) -> Group:
    stage, place = plan.place(rank)
    others = {index: other for index, other in enumerate(plan.ranks(stage)) if other != rank}
    send = {index: links[Wire(rank, other)] for index, other in others.items()}
    recv = {index: links[Wire(other, rank)] for index, other in others.items()}
    return Group(place, plan.stages[stage].tp, send, recv)


def _ring(plan: Plan, rank: int, links: Mapping[Wire, Link]) -> RingLinks | None:
    stage, place = plan.place(rank)
    if plan.pp == 1 or place:
        return None
    before, after = plan.ranks((stage - 1) % plan.pp).start, plan.ranks((stage + 1) % plan.pp).start
    return RingLinks(links[Wire(before, rank)], links[Wire(rank, after)])


def _needed(spec: ModelSpec, index: Index) -> dict[str, tuple[int, ...]]:
    """Every tensor that the uncut model reads, with its shape in the files."""
    model = build(spec, whole(spec), torch_dtype("float32"), "meta")
    return {block.name: index.entry(block.name).shape for block in held_of(model)}


def _limits(settings: EngineSettings, vocab_size: int) -> Limits:
    return Limits(
        num_pages=settings.num_pages,
        vocab_size=vocab_size,
        max_model_len=settings.max_model_len,
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
    )
