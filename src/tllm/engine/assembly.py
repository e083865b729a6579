"""How an engine is put together: a rank's stage, the driver, and for ranks in this process their threads and links.

Nothing here is touched by a request.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from tllm.comm.collectives.group import local_groups
from tllm.comm.links.link import Link, LocalLink
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.driver import Driver
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage, RingLinks
from tllm.model.transformer import Transformer
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


def make_stage(model: Transformer, mesh: Mesh, plan: Plan, ring: RingLinks | None, limits: Limits) -> PipelineStage:
    """One rank's stage with its cache, from a model that has its weights."""
    dtype = next(model.parameters()).dtype
    cache = KVCache(model.attention_specs(), model.kv_shape, limits, dtype)
    cuts = cut_stage(model.spec, plan.stages[mesh.stage].shares, plan.experts)
    return PipelineStage(model, cache, mesh.tp, ring, limits, [cut.vocab for cut in cuts])


def make_driver(stage: PipelineStage, spec: ModelSpec, plan: Plan) -> Driver:
    """The driver of a replica, beside its first rank's stage."""
    return Driver(stage, Scheduler(stage.limits, plan.pp, spec.eos_token_ids))


class RankThread(threading.Thread):
    """One rank of an engine in this process: makes its stage, `made`, then runs it as `begin` says.

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


def local_ranks(spec: ModelSpec, plan: Plan) -> tuple[list[Link], list[tuple[Mesh, RingLinks | None]]]:
    """All links between ranks in this process, and of each rank its mesh and its links of the ring.

    The links wait for ever: inside a process nothing is lost.
    """
    groups = [group for stage in plan.stages for group in local_groups(stage.tp, math.inf)]
    leaders = [plan.ranks(index).start for index in range(plan.pp)]
    hops: list[Link] = [LocalLink(rank, leaders[(i + 1) % plan.pp], math.inf) for i, rank in enumerate(leaders)]
    ranks: list[tuple[Mesh, RingLinks | None]] = []
    for rank, tp in enumerate(groups):
        mesh = mesh_of(spec, plan, rank, tp)
        is_leader = plan.pp > 1 and rank == leaders[mesh.stage]
        ranks.append((mesh, RingLinks(hops[mesh.stage - 1], hops[mesh.stage]) if is_leader else None))
    links = [link for group in groups for link in group.send.values()] + hops
    return links, ranks
