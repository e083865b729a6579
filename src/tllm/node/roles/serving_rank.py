"""`ServingRank`: one node's part in serving a plan, from the assignment to the running engine."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from tllm.cluster.certificates import Identity
from tllm.cluster.messages import AdapterReady, Assign, Loaded, Prepared
from tllm.cluster.settings import EngineSettings, PageDisk
from tllm.cluster.weight_messages import AdapterFiles, HeldPiece, adapter_file
from tllm.comm.collectives.group import group_of
from tllm.comm.collectives.intra_host import connect_devices
from tllm.comm.collectives.tuning import tune_between_hosts
from tllm.comm.links.connect import Listener
from tllm.comm.links.link import Link, break_off
from tllm.core.errors import ClusterError, ConfigError, LinkError
from tllm.core.memory import give_back_memory
from tllm.devices.choose import CPU, check_float64
from tllm.devices.memory import forget_peak, held_memory
from tllm.engine.assembly import make_driver, make_stage
from tllm.engine.draft.draft_model import DraftModel
from tllm.engine.draft.load_draft import draft_loader
from tllm.engine.driver import CloseRing, Command, Driver
from tllm.engine.page_store.page_folder import make_private
from tllm.engine.page_store.remote_pages import RemotePages
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.limits import Limits
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import Transformer, build
from tllm.node.roles.compressed_ring import narrow_error, narrowed
from tllm.node.roles.control import Control
from tllm.node.roles.role import Role, bytes_by_wire, connect_wires, fetched, model_source
from tllm.node.weights.chunk_fetcher import ChunkFetcher
from tllm.node.weights.page_exchange import PageExchange
from tllm.node.weights.tokenizer_file import fetch_tokenizer
from tllm.parallel.collectives import sum_in_memory
from tllm.parallel.grid.grid_mesh import serving_mesh_of
from tllm.parallel.mesh import whole
from tllm.parallel.weight_reuse import Kept, wanted, weights_of
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.spec.families import spec_from_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Wire
from tllm.spec.quantized.weight_form import keeps_few_bits
from tllm.spec.request import StageSpan
from tllm.weights.byte_source import Fetch, RemoteFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import HeldAs, Progress, held_of, load
from tllm.weights.lora.adapter_files import read_adapter
from tllm.weights.manifest import checked
from tllm.weights.remote_files import FetchedFiles
from tllm.weights.safetensors_index import Index

log = logging.getLogger("tllm.node")


class RankLinks:
    """A serving rank's links to others: to those of its stage, and round the ring of stages if it leads its own.

    `network` says in words what the links were measured to do, and what was chosen by it.
    """

    def __init__(self, assign: Assign, links: Mapping[Wire, Link]) -> None:
        assert isinstance(assign.settings, EngineSettings)
        plan, rank, settings = assign.plan, assign.rank, assign.settings
        self.all = links
        stage, _ = plan.place(rank)
        self.group = group_of("tp", plan.ranks(stage), rank, self.all, wires="")
        hosts = [assign.places[rank].host for rank in plan.ranks(stage)]
        device, seconds = torch.device(settings.device), settings.link_seconds
        joined, inside = "", settings.wiring.intra_host
        if inside == "nccl":
            joined = connect_devices(self.group, hosts[self.group.rank], device, seconds)
        elif inside == "memory":
            joined = sum_in_memory(self.group, hosts, device == CPU, seconds)
        self.network = "; ".join(filter(None, (joined, tune_between_hosts(self.group, hosts))))
        self.ring = _ring(plan, rank, self.all)

    def compress(self, assign: Assign, width: int) -> None:
        """Send hidden states, `width` elements a token, round the ring in fewer bits, if the settings ask for it."""
        assert isinstance(assign.settings, EngineSettings)
        if self.ring is None or assign.settings.narrow_wire == "off":
            return
        dtype = torch_dtype(assign.settings.dtype)
        self.ring, words = narrowed(self.ring, assign.plan, assign.rank, assign.settings, width, dtype)
        self.network = "; ".join(filter(None, (self.network, words)))

    def interrupt(self) -> None:
        for link in self.all.values():
            link.interrupt()

    def close(self) -> None:
        """Let what was sent leave; that a link broke is known by then."""
        self.group.close_devices()
        for link in self.all.values():
            with contextlib.suppress(LinkError):
                link.close()


class RankWeights:
    """The model's files, wherever they are, and the parameters that were loaded from them until now.

    Those of an `earlier` rank of the same files on this node are taken over, with the files' headers, so that these
    need not cross a slow link again.
    """

    def __init__(self, assign: Assign, fetch: Fetch, earlier: RankWeights | None) -> None:
        config = json.loads(assign.config)
        if earlier is None:
            self.files = model_source(assign, fetch)
            self.source = checked(self.files)
            self.index = open_index(self.source, config)
        else:
            self.files, self.source, self.index = earlier.files, earlier.source, earlier.index
        self._packed = keeps_few_bits(config)
        assert isinstance(assign.settings, EngineSettings)
        self._device = torch.device(assign.settings.device)
        self._loaded: Kept = {} if earlier is None else earlier._loaded

    def keep_what(self, model: Transformer) -> None:
        """Let go of all but what this model can take over."""
        self._loaded = wanted(model, self._loaded) if self._loaded else {}

    def load(self, model: Transformer, dtype: torch.dtype, progress: Progress) -> tuple[int, int]:
        """Fill the model; bytes that were read for it, and of these the bytes that came from other nodes."""
        read, came = self.source.bytes_read, fetched(self.files)
        load(model, self.index, self.source, dtype, progress, self._loaded, HeldAs(self._packed, self._device))
        self._loaded = weights_of(model)
        if isinstance(self.files, FetchedFiles):
            log.info("weights came %s", self.files.told())
        return self.source.bytes_read - read, fetched(self.files) - came


class ServingRank:
    """Connects the links and builds the model without its weights; then `load`, then `run` until the ring stops.

    Parameters that the role `before` has already, of the same files, are taken over and not read again.
    """

    outlives = True

    def __init__(
        self, assign: Assign, identity: Identity, listener: Listener, fetch: Fetch, before: Role | None = None
    ) -> None:
        assert isinstance(assign.settings, EngineSettings), "training is another part"
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._assign, self._settings = assign, assign.settings
        self.rank = assign.rank
        self.spec = spec_from_config(json.loads(assign.config))
        check_float64(self._device)
        earlier = before._weights if isinstance(before, ServingRank) and before.is_of(assign) else None
        self._fetch = fetch
        self._weights: RankWeights = RankWeights(assign, fetch, earlier)
        wired, seconds = wires(assign.plan), self._settings.link_seconds
        links = connect_wires(assign, wired, identity, listener, seconds, self._settings.wiring)
        with contextlib.ExitStack() as unmade:
            unmade.callback(break_off, links.values())  # others wait for this rank
            self._links = RankLinks(assign, links)
            self._mesh = serving_mesh_of(self.spec, assign.plan, self.rank, self._links.group)
            self._links.compress(assign, self.spec.hidden_size)
            self._model = build(self.spec, self._mesh, torch_dtype(self._settings.dtype), "meta")
            self._weights.keep_what(self._model)
            unmade.pop_all()
        self._stage: PipelineStage | None = None
        self._driver: Driver | None = None

    @property
    def _device(self) -> torch.device:
        return torch.device(self._settings.device)

    def is_of(self, assign: Assign) -> bool:
        """Whether another assignment is of the same files."""
        return (assign.config, assign.files) == (self._assign.config, self._assign.files)

    def prepared(self) -> Prepared:
        """What this rank will hold, for the check that all ranks together hold each element once."""
        held = held_of(self._model)
        settings = self._settings
        bytes_of = rank_bytes(self.spec, self._assign.plan, settings.dtype, settings.kv_cache_dtype)[self.rank]
        cache_tokens = settings.num_pages * settings.page_size
        return Prepared(
            rank=self.rank,
            pieces=tuple(HeldPiece(block.name, block.box, block.replicated) for block in held),
            needed=_needed(self.spec, self._weights.index) if self.rank == 0 else {},
            parameter_bytes=bytes_of.weights,
            cache_bytes=bytes_of.kv_per_token * cache_tokens,
        )

    def load(self, progress: Progress) -> Loaded:
        """Read this rank's weights, and make its cache."""
        start = time.monotonic()
        give_back_memory()
        forget_peak(self._device)  # of the role before, in another epoch or a survey
        read, came = self._weights.load(self._model, torch_dtype(self._settings.dtype), progress)
        limits, plan = _limits(self._settings, self.spec), self._assign.plan
        disk = _usable(self._settings.page_disk)
        self._stage = make_stage(self._model, self._mesh, plan, self._links.ring, limits, disk)
        for adapter in self._assign.adapters:
            self.load_adapter(adapter)
        self._share_pages(self._stage)
        if self.rank == 0:
            self._driver = make_driver(self._stage, self.spec, plan, _draft_model(self._settings, limits))
            self._driver.scheduler.grammars.load_tokenizer = lambda: fetch_tokenizer(self._fetch)
        return Loaded(
            rank=self.rank,
            bytes_read=read,
            fetched=came,
            seconds=time.monotonic() - start,
            rss_bytes=held_memory(self._device),
            network=self._links.network,
        )

    def load_adapter(self, adapter: AdapterFiles) -> AdapterReady:
        """Read this rank's part of an adapter from the coordinator. Any thread but the control thread may call it."""
        stage = self._stage
        if stage is None:
            raise ClusterError("this node has not loaded its part of the model yet")

        def ask(file: str, start: int, stop: int) -> bytes:
            return self._fetch(adapter_file(adapter.lora, file), start, stop)

        source = RemoteFiles(ask, adapter.sizes)
        dtype = torch_dtype(self._settings.dtype)
        updates = read_adapter(source).load(self._model, source, dtype, self._mesh.tp)
        stage.adapters.add(adapter.lora, updates, adapter.number)
        return AdapterReady(stage.adapters.nbytes)

    def _share_pages(self, stage: PipelineStage) -> None:
        """Pass pages on disk on to other nodes, and let this rank have theirs; keep a copy of those of the node before
        this one."""
        store, places = stage.pages.store, self._assign.places
        if not isinstance(self._fetch, ChunkFetcher):
            return
        self._fetch.share_pages(None if store is None else store.folder)
        own, model = places[self.rank].node, "" if store is None else store.folder.folder.name
        before = (*places[self.rank :], *places[: self.rank])[::-1]  # the nearest before this one first
        others = dict.fromkeys(place for place in before if place.node != own and place.lends)
        if store is not None and others:
            disks = [PageExchange(self._fetch, place, model) for place in others]
            store.others = RemotePages(store.folder, disks, disks[0], lambda: stage.batches)

    def run(self, control: Control) -> None:
        """Compute until the driver is told to close, and with it the ring."""
        assert self._stage is not None, "load comes before run"
        if self._driver is not None:
            self._driver.run(self._inbox, lambda outputs: control.deliver(self._assign.epoch, outputs))
        else:
            self._stage.serve()

    def stats(self) -> dict[str, float]:
        """The engine's numbers; of a rank that does not drive, how many batches it has computed."""
        error = narrow_error(self._links.ring)
        if self._driver is not None:
            return {**self._driver.stats(), **self._driver.stage.counters.stats(), **error}
        if self._stage is None:
            return {}
        return {"batches": self._stage.batches, **self._stage.counters.stats(), **error}

    def spans(self) -> tuple[StageSpan, ...]:
        """What this rank did of late for sequences that are traced."""
        return () if self._stage is None else self._stage.traced.spans()

    def link_bytes(self) -> dict[str, int]:
        return bytes_by_wire(self._links.all)

    def command(self, command: Command) -> None:
        self._inbox.put(command)

    def interrupt(self) -> None:
        """Break the links; a driver without any is told to close."""
        self._inbox.put(CloseRing())
        self._links.interrupt()

    def close(self) -> None:
        """Close the links, letting what was sent leave, and let pages that were copied be written."""
        self._links.close()
        if self._stage is not None:
            self._stage.pages.close()


def wires(plan: Plan) -> list[Wire]:
    """Every directed wire of a plan: between all ranks of a stage, and round the ring of the stages' first ranks."""
    leaders = [plan.ranks(stage).start for stage in range(plan.pp)]
    inside = [Wire(a, b) for stage in range(plan.pp) for a in plan.ranks(stage) for b in plan.ranks(stage) if a != b]
    ring = [Wire(leaders[i - 1], leaders[i]) for i in range(plan.pp)] if plan.pp > 1 else []
    return inside + ring


def _ring(plan: Plan, rank: int, links: Mapping[Wire, Link]) -> RingLinks | None:
    stage, place = plan.place(rank)
    if plan.pp == 1 or place:
        return None
    before, after = plan.ranks((stage - 1) % plan.pp).start, plan.ranks((stage + 1) % plan.pp).start
    return RingLinks(links[Wire(before, rank)], links[Wire(rank, after)])


def _needed(spec: ModelSpec, index: Index) -> dict[str, tuple[int, ...]]:
    """Every tensor that the uncut model reads, with its shape in the files."""
    model = build(spec, whole(spec), torch_dtype("float32"), "meta")
    return {block.name: index.shape(block.name) for block in held_of(model)}


def _usable(disk: PageDisk | None) -> PageDisk | None:
    """The folder for pages, if this node can use it; its neighbours' folders are of no use without it."""
    try:
        if disk is not None:
            make_private(Path(disk.folder))
    except ConfigError as error:
        log.warning("no pages are kept on disk: %s", error.message)
        return None
    return disk


def _draft_model(settings: EngineSettings, limits: Limits) -> DraftModel | None:
    """The draft model, loaded. Where the first rank is on a node without its files, drafts are only looked up."""
    draft = draft_loader(settings.speculative_config, limits, settings.dtype)
    if draft is None:
        return None
    if not draft.is_here:
        log.warning("the draft model is not on this node, which has the first rank: drafts are only looked up")
        return None
    draft.load()
    return draft.model


def _limits(settings: EngineSettings, spec: ModelSpec) -> Limits:
    return Limits(
        num_pages=settings.num_pages,
        vocab_size=spec.vocab_size,
        max_model_len=settings.max_model_len,
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        kv_cache_dtype=settings.kv_cache_dtype,
        num_state_slots=settings.max_num_seqs if spec.delta else 0,
        hidden_size=spec.hidden_size,
        num_labels=spec.num_labels,
        is_headless=spec.is_headless,
        is_bidirectional=spec.bidirectional,
    )
