"""`RankThread`: one rank of an engine in this process, which makes its stage and runs it in one thread.

`Engine`: a whole model in this process, on one rank or on several as threads; submit, stream, generate.
"""

from __future__ import annotations

import itertools
import math
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from tllm.comm.collectives.group import local_groups
from tllm.comm.links.link import Link, LocalLink
from tllm.core.errors import ClusterError, RequestError
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.driver import CancelRequest, CloseRing, Command, Driver
from tllm.engine.schedule.limits import EngineConfig, Limits, limits_of
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage, RingLinks
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.spec.cut import cut_stage
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request, SamplingParams
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.load import load
from tllm.weights.manifest import checked
from tllm.weights.safetensors_index import Index

Work = Callable[[], None]


class RankThread(threading.Thread):
    """Makes a stage, `made`, then waits for the work that `begin` gives it.

    The weights are loaded here too: torch's helper threads belong to the thread that first wants them, and with a
    second set on the same cores both sets sleep between products instead of spinning (a third of decoding speed).
    """

    def __init__(self, rank: int, make: Callable[[], PipelineStage]) -> None:
        super().__init__(name=f"tllm-rank-{rank}", daemon=True)
        self.made: Future[PipelineStage] = Future()
        self._make = make
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def begin(self, work: Work | None) -> None:
        """Run the stage by `work`, or end without (None)."""
        self._work.put(work)

    def run(self) -> None:
        """The thread: what goes wrong in making is carried by `made`."""
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: self._fail(error))
            self.made.set_result(self._make())
        work = self._work.get()
        if work is not None:
            work()

    def _fail(self, error: BaseException | None) -> bool:
        if error is not None:
            self.made.set_exception(error)
        return True


Fill = Callable[[int, Transformer], None]
"""fill(rank, model) puts the weights of a rank into its model."""


def make_stage(model: Transformer, mesh: Mesh, plan: Plan, ring: RingLinks | None, limits: Limits) -> PipelineStage:
    """One rank's stage with its cache, from a model that holds its weights."""
    spec = model.spec
    dtype = next(model.parameters()).dtype
    cache = KVCache(model.attention_specs(), model.kv_shape, limits, dtype)
    vocabs = [cut.vocab for cut in cut_stage(spec, plan.stages[mesh.stage].shares, plan.experts)]
    return PipelineStage(model, cache, mesh.tp, ring, limits, spec.hidden_size, vocabs, spec.scales_by_length)


def make_driver(stage: PipelineStage, spec: ModelSpec, plan: Plan) -> Driver:
    """The driver of a replica, beside its first rank's stage."""
    return Driver(stage, Scheduler(stage.limits, plan.pp, spec.eos_token_ids))


class Engine:
    """Serves requests in threads of its own: one for each rank of the plan. Close it, or use it in a `with`."""

    def __init__(self, spec: ModelSpec, plan: Plan, limits: Limits, dtype: torch.dtype, fill: Fill) -> None:
        self.spec = spec
        self.plan = plan
        self.limits = limits
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._streams: dict[str, queue.SimpleQueue[Output | ClusterError]] = {}
        self._lock = threading.Lock()
        self._failure: ClusterError | None = None
        self._closed = False
        self._links, places = _local_places(spec, plan)

        def make(rank: int, mesh: Mesh, ring: RingLinks | None) -> PipelineStage:
            model = build(spec, mesh, dtype, "meta")
            fill(rank, model)
            return make_stage(model, mesh, plan, ring, limits)

        self._threads = [RankThread(rank, partial(make, rank, *place)) for rank, place in enumerate(places)]
        self.stages = self._start()
        self.driver = make_driver(self.stages[0], spec, plan)
        work = [self._drive, *(stage.serve for stage in self.stages[1:])]
        for rank, (thread, run) in enumerate(zip(self._threads, work, strict=True)):
            thread.begin(partial(self._guard, rank, run))

    @classmethod
    def load(
        cls,
        folder: Path | str,
        plan: Plan | str = "pp=1",
        config: EngineConfig | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> Engine:
        """An engine for a Hugging Face folder. `progress(rank, bytes done, bytes in all)` is told of loading."""
        config = config or EngineConfig()
        spec = spec_from_config(read_config(Path(folder)))
        if isinstance(plan, str):
            plan = Plan.parse(plan, spec.num_layers)
        index = Index.read(LocalFiles(folder))
        dtype = torch_dtype(config.dtype or spec.dtype)

        def fill(rank: int, model: Transformer) -> None:
            source = checked(LocalFiles(folder))
            load(model, index, source, dtype, progress and (lambda done, total: progress(rank, done, total)))

        return cls(spec, plan, limits_of(spec, plan, config), dtype, fill)

    def submit(self, request: Request) -> Stream:
        """Start a request and return its outputs as they come. A sampled request without a seed is given one."""
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        outputs: queue.SimpleQueue[Output | ClusterError] = queue.SimpleQueue()
        with self._lock:
            if self._failure is not None or self._closed:
                raise ClusterError(f"the engine has ended: {self._failure or 'it was closed'}")
            if request.id in self._streams:
                raise RequestError(f"a request with id {request.id!r} is already running", "give each its own id")
            self._streams[request.id] = outputs
            self._inbox.put(request)
        return Stream(request.id, outputs, lambda: self._inbox.put(CancelRequest(request.id)))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Continue several prompts together; the new ids of each. Raises RequestError if one cannot be served."""
        names = (f"generate-{n}" for n in itertools.count())
        free = (name for name in names if name not in self._streams)
        requests = [Request(id=next(free), prompt_ids=tuple(prompt), params=params) for prompt in prompts]
        streams = [self.submit(request) for request in requests]
        return [[token for output in stream for token in output.token_ids] for stream in streams]

    def stats(self) -> dict[str, float]:
        return self.driver.stats()

    def close(self) -> None:
        """Cancel what is running and end every rank."""
        with self._lock:
            self._closed = True
        self._inbox.put(CloseRing())
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> list[PipelineStage]:
        """Every rank's stage; if one cannot be made, all threads end and its error is raised."""
        for thread in self._threads:
            thread.start()
        wait([thread.made for thread in self._threads])
        failure = next((error for thread in self._threads if (error := thread.made.exception())), None)
        if failure is not None:
            for thread in self._threads:
                thread.begin(None)
            raise failure
        return [thread.made.result() for thread in self._threads]

    def _drive(self) -> None:
        self.driver.run(self._inbox, self._deliver)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            with self._lock:
                ended = output.finish_reason is not None
                stream = (self._streams.pop if ended else self._streams.get)(output.request_id)
            assert stream is not None, f"an output for {output.request_id}, which nobody reads"
            stream.put(output)

    def _guard(self, rank: int, run: Callable[[], None]) -> None:
        """Run one rank; what ends it is carried to everyone who waits, and raised there."""
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: error is not None and self._carry(rank, error))
            run()

    def _carry(self, rank: int, error: BaseException) -> bool:
        """End the other ranks, whose links close, and tell every stream the cause. True: the failure went that way."""
        failure = ClusterError(f"rank {rank} failed: {str(error) or type(error).__name__}")
        failure.__cause__ = error
        with self._lock:
            # The first tells most: links that close are what follows from it.
            self._failure = self._failure or failure
            streams, self._streams = list(self._streams.values()), {}
        for link in self._links:
            link.close()
        for stream in streams:
            stream.put(self._failure)
        return True


class Stream:
    """The outputs of one request, the last with its finish reason. Closing it early cancels the request."""

    def __init__(
        self, request_id: str, outputs: queue.SimpleQueue[Output | ClusterError], cancel: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self._outputs = outputs
        self._cancel = cancel
        self._ended = False

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        if self._ended:
            raise StopIteration
        output = self._outputs.get()
        if isinstance(output, ClusterError):
            self._ended = True
            raise output
        self._ended = output.finish_reason is not None
        if output.finish_reason == "error":
            raise RequestError(output.error)
        return output

    def close(self) -> None:
        if not self._ended:
            self._cancel()


def _local_places(spec: ModelSpec, plan: Plan) -> tuple[list[Link], list[tuple[Mesh, RingLinks | None]]]:
    """Each rank's place in this process, and all links between them, which wait for ever: nothing is lost here."""
    groups = [group for stage in plan.stages for group in local_groups(stage.tp, math.inf)]
    leaders = [plan.ranks(index).start for index in range(plan.pp)]
    hops: list[Link] = [LocalLink(rank, leaders[(i + 1) % plan.pp], math.inf) for i, rank in enumerate(leaders)]
    places: list[tuple[Mesh, RingLinks | None]] = []
    for rank, tp in enumerate(groups):
        mesh = mesh_of(spec, plan, rank, tp)
        leads = plan.pp > 1 and rank == leaders[mesh.stage]
        places.append((mesh, RingLinks(hops[mesh.stage - 1], hops[mesh.stage]) if leads else None))
    links = [link for group in groups for link in group.send.values()] + hops
    return links, places
