"""How an engine is put together: a rank's stage, the driver, and `LocalRanks`, which are threads of this process.

Requests do not pass here.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial

import torch

from tllm.cluster.settings import PageDisk
from tllm.comm.collectives.group import local_groups
from tllm.comm.links.link import Link, LocalLink
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.pooler import Pooler
from tllm.engine.compute.sampler import Sampler
from tllm.engine.decode_graphs import decode_graphs
from tllm.engine.decode_recordings import decode_recordings
from tllm.engine.driver import Driver
from tllm.engine.grid.grid_stage import FollowingSampler, GridModel
from tllm.engine.overlapped_steps import overlapped_steps
from tllm.engine.page_store.open_store import open_store
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.proposer import Proposer
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.serving_counters import ReplyCounters
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import Transformer, build
from tllm.parallel.grid.grid_mesh import StationaryMesh, serving_mesh_of
from tllm.parallel.mesh import Mesh
from tllm.parallel.quantized_weight import is_empty, stands_for
from tllm.spec.cut import Range, stage_cuts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

LoadWeights = Callable[[int, Transformer], None]
"""load_weights(rank, model) puts the weights of a rank into its model."""

OnFailure = Callable[[int, BaseException], None]
"""on_failure(rank, error) is called from the thread of a rank that has failed."""


@torch.inference_mode()
def make_stage(
    model: Transformer,
    mesh: Mesh,
    plan: Plan,
    ring: RingLinks | None,
    limits: Limits,
    disk: PageDisk | None = None,
    trained_on: torch.device | None = None,
) -> PipelineStage:
    """One rank's stage with its cache, from a model that has its weights, on whose device it computes.

    Its pages are kept on `disk` too.

    `trained_on` is the device of a trainer whose model it is. The weights have yet to get their values and their place
    in memory, so that no graphs are recorded here. Attention gives the same bits however prompts are cut and batched,
    and is not measured for the fastest way.
    """
    first = next(model.parameters())
    dtype = stands_for(first)[1]
    few_bits = any(is_empty(parameter) for parameter in model.parameters())
    is_exact = trained_on is not None or few_bits
    device = trained_on or first.device
    cache = KVCache(model.attention_specs(), limits, dtype, model.state_shapes(), is_exact, device)
    vocab_ranges = [cut.vocab for cut in stage_cuts(model.spec, plan, mesh.stage)]
    if isinstance(mesh, StationaryMesh):
        stage = _grid_stage(model, mesh, cache, ring, limits, vocab_ranges)
    else:
        stage = PipelineStage(model, cache, mesh.tp, ring, limits, vocab_ranges)
        if trained_on is None:
            graphs = decode_graphs(model, cache, limits) if mesh.tp.size == 1 else None
            stage.graphs = graphs or decode_recordings(model, cache, limits)
        if stage.sampler is not None:
            stage.pooler = Pooler(model.normed, model.scores, stage.sampler)
    if disk is not None and limits.enable_prefix_caching:
        stage.pages.store = open_store(disk, cache, model.spec, mesh.cut)
    return stage


def _grid_stage(
    model: Transformer,
    mesh: StationaryMesh,
    cache: KVCache,
    ring: RingLinks | None,
    limits: Limits,
    vocab_ranges: list[Range],
) -> PipelineStage:
    """A rank of a grid. What it computes is not recorded: its norms are sums over ranks, which no kernel stands for.

    The first row has every part of the vocabulary, and samples.
    """
    on_grid = GridModel(model, mesh)
    stage = PipelineStage(on_grid, cache, mesh.stage_group, ring, limits, vocab_ranges)
    stage.counters = ReplyCounters(mesh.grid.row, mesh.grid.width)
    if model.is_last:
        samples = (mesh.grid.at.layer, mesh.grid.at.row) == (0, 0)
        stage.sampler = (Sampler if samples else FollowingSampler)(model.logits, mesh.tp, vocab_ranges[: mesh.tp.size])
        stage.pooler = Pooler(on_grid.normed, model.scores, stage.sampler, is_cut=True)
    return stage


def make_driver(stage: PipelineStage, spec: ModelSpec, plan: Plan, draft_model: Proposer | None = None) -> Driver:
    """The driver of a replica, beside its first rank's stage; a draft model runs in the driver's thread."""
    scheduler = Scheduler(stage.limits, plan.pp, spec.eos_token_ids, draft_model)
    driver = Driver(stage, scheduler)
    driver.overlap = overlapped_steps(stage, scheduler)
    return driver


class LocalRanks:
    """All ranks of a plan as threads of this process, with the links between them.

    `stages` are made at once, each in its rank's thread. If one cannot be made, all threads end and its error is
    raised. `run` then gives each thread the loop that it is to run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        limits: Limits,
        dtype: torch.dtype,
        load_weights: LoadWeights,
        disk: PageDisk | None = None,
    ) -> None:
        self._links, places = _links_and_places(spec, plan)

        def make(rank: int, mesh: Mesh, ring: RingLinks | None) -> PipelineStage:
            model = build(spec, mesh, dtype, "meta")
            load_weights(rank, model)
            return make_stage(model, mesh, plan, ring, limits, disk)

        self._threads = [_RankThread(rank, partial(make, rank, *place)) for rank, place in enumerate(places)]
        for thread in self._threads:
            thread.start()
        wait([thread.made for thread in self._threads])
        failure = next((error for thread in self._threads if (error := thread.made.exception())), None)
        if failure is not None:
            for thread in self._threads:
                thread.begin(None)
                thread.join()
            raise failure
        self.stages = [thread.made.result() for thread in self._threads]

    def run(self, drive: Callable[[], None], on_failure: OnFailure) -> None:
        """Let rank 0 `drive` and the others serve; a rank that fails calls `on_failure` and ends."""
        for rank, (thread, stage) in enumerate(zip(self._threads, self.stages, strict=True)):
            thread.begin(partial(self._guard, rank, drive if rank == 0 else stage.serve, on_failure))

    def join(self) -> None:
        """Wait until every rank has ended."""
        for thread in self._threads:
            thread.join()
        for stage in self.stages:
            stage.pages.close()

    def _guard(self, rank: int, loop: Callable[[], None], on_failure: OnFailure) -> None:
        def fail(kind: object, error: BaseException | None, trace: object) -> bool:
            if error is None:
                return False
            on_failure(rank, error)
            return True

        with ExitStack() as stack:
            stack.push(fail)
            loop()

    def close_links(self) -> None:
        """Wake every rank that waits for another; each fails then."""
        for link in self._links:
            link.close()


class _RankThread(threading.Thread):
    """One rank: makes its stage, `made`, then runs the loop that `begin` gives it.

    The weights are loaded here too: torch's helper threads belong to the thread that first wants them, and with a
    second set on the same cores both sets sleep between products instead of spinning (a third of decoding speed).
    """

    def __init__(self, rank: int, make: Callable[[], PipelineStage]) -> None:
        super().__init__(name=f"tllm-rank-{rank}", daemon=True)
        self.made: Future[PipelineStage] = Future()
        self._make = make
        self._loop: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def begin(self, loop: Callable[[], None] | None) -> None:
        """Run this in the thread, or end without (None)."""
        self._loop.put(loop)

    def run(self) -> None:
        """The thread: what goes wrong in making is carried by `made`."""
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: self._fail(error))
            self.made.set_result(self._make())
        loop = self._loop.get()
        if loop is not None:
            loop()

    def _fail(self, error: BaseException | None) -> bool:
        if error is not None:
            self.made.set_exception(error)
        return True


def _links_and_places(spec: ModelSpec, plan: Plan) -> tuple[list[Link], list[tuple[Mesh, RingLinks | None]]]:
    """All links between ranks in this process, and of each rank its mesh and its links of the ring.

    The links wait for ever: inside a process nothing is lost.
    """
    groups = [group for stage in plan.stages for group in local_groups(stage.tp, math.inf)]
    leaders = [plan.ranks(index).start for index in range(plan.pp)]
    hops: list[Link] = [LocalLink(rank, leaders[(i + 1) % plan.pp], math.inf) for i, rank in enumerate(leaders)]
    places: list[tuple[Mesh, RingLinks | None]] = []
    for rank, tp in enumerate(groups):
        mesh = serving_mesh_of(spec, plan, rank, tp)
        is_leader = plan.pp > 1 and rank == leaders[mesh.stage]
        places.append((mesh, RingLinks(hops[mesh.stage - 1], hops[mesh.stage]) if is_leader else None))
    links = [link for group in groups for link in group.send.values()] + hops
    return links, places
