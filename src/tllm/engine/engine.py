"""`Engine`: a whole model in this process, on one rank or on several as threads; submit, stream, generate.

A request's way: `submit` puts it into the driver's queue and returns a `Stream`. The driver's thread (driver.py) runs
it through the ranks' stages (stage.py) and hands new tokens to `_deliver`, which puts them into that stream.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from tllm.cluster.settings import PageDisk
from tllm.core.errors import ClusterError, RequestError
from tllm.devices.choose import CPU, check_float64, compute_on
from tllm.engine.assembly import LoadWeights, LocalRanks, make_driver
from tllm.engine.draft.load_draft import DraftLoader, draft_loader
from tllm.engine.driver import CancelRequest, CloseRing, Command
from tllm.engine.page_store.page_model import page_disk
from tllm.engine.schedule.limits import EngineConfig, Limits, limits_of
from tllm.model.transformer import Transformer
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.quantized.weight_form import keeps_few_bits, with_weight_form
from tllm.spec.request import Output, Request, SamplingParams
from tllm.text.tokenizer import Tokenizer
from tllm.weights.byte_source import LocalFiles
from tllm.weights.dtypes import torch_dtype
from tllm.weights.formats.open_index import open_index
from tllm.weights.load import HeldAs, load
from tllm.weights.manifest import checked

Put = Callable[[Output | ClusterError], None]
"""put(output) is called for each output of a request, or at last with why the engine has ended. It must not wait."""


class Engine:
    """Serves requests in threads of its own: one for each rank of the plan. Close it, or use it in a `with`."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        limits: Limits,
        dtype: torch.dtype,
        load_weights: LoadWeights,
        disk: PageDisk | None = None,
        draft: DraftLoader | None = None,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.limits = limits
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._puts: dict[str, Put] = {}  # by request
        self._lock = threading.Lock()
        self._failure: ClusterError | None = None
        self._closed = False
        self._ranks = LocalRanks(spec, plan, limits, dtype, load_weights, disk)
        self.stages = self._ranks.stages
        self.driver = make_driver(self.stages[0], spec, plan, draft.model if draft else None)
        self._ranks.run(partial(self.driver.run, self._inbox, self._deliver), self._fail)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        plan: Plan | str = "pp=1",
        config: EngineConfig | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> Engine:
        """An engine for a Hugging Face folder. Loading calls `progress(rank, bytes done, bytes in all)`.

        `devices` are those of the ranks, in order; without any all of them compute on the processor. ConfigError for
        what a device cannot serve.
        """
        config = config or EngineConfig()
        raw = with_weight_form(read_config(Path(folder)), config.quantize, config.dequantize)
        spec = spec_from_config(raw)
        plan = Plan.parse(plan, spec.num_layers) if isinstance(plan, str) else plan
        index = open_index(LocalFiles(folder), raw)
        dtype, limits = torch_dtype(config.dtype or spec.dtype), limits_of(spec, plan, config)
        draft = draft_loader(config.speculative_config, limits, config.dtype)
        for device in devices:
            check_float64(device)

        def load_weights(rank: int, model: Transformer) -> None:
            source = checked(LocalFiles(folder))
            told, device = progress and partial(progress, rank), devices[rank] if devices else CPU
            compute_on(device)  # this is the rank's thread
            load(model, index, source, dtype, told, held=HeldAs(keeps_few_bits(raw), device))
            if rank == 0 and draft is not None:
                draft.load()

        disk = page_disk(Path(folder), raw, config, config.dtype or spec.dtype)
        engine = cls(spec, plan, limits, dtype, load_weights, disk, draft)
        engine.driver.scheduler.grammars.load_tokenizer = partial(Tokenizer.from_folder, Path(folder))
        return engine

    def submit(self, request: Request) -> Stream:
        """Start a request and return its outputs as they come. A sampled request without a seed is given one."""
        outputs: queue.SimpleQueue[Output | ClusterError] = queue.SimpleQueue()
        self.start(request, outputs.put)
        return Stream(request.id, outputs, partial(self.cancel, request.id))

    def start(self, request: Request, put: Put) -> None:
        """`submit` whose outputs are `put`, from the threads of the ranks, by whoever started the request."""
        request = request.seeded()
        with self._lock:
            if self._failure is not None or self._closed:
                raise ClusterError(f"the engine has ended: {self._failure or 'it was closed'}")
            if request.id in self._puts:
                raise RequestError(f"a request with id {request.id!r} is already running", "give each its own id")
            self._puts[request.id] = put
            self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request early, if it has not ended."""
        self._inbox.put(CancelRequest(request_id))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Continue several prompts together; the new ids of each. RequestError, and none goes on, if one is refused."""
        requests = [Request(id=secrets.token_hex(), prompt_ids=tuple(p), params=params).seeded() for p in prompts]
        # Now that all have a seed, whose drawing lets other threads run, no prompt begins before the next is there.
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(self.submit(request))) for request in requests]
            return [[token for output in stream for token in output.token_ids] for stream in streams]

    def stats(self) -> dict[str, float]:
        """The driver's numbers."""
        return self.driver.stats()

    def close(self) -> None:
        """Cancel what is running and end every rank."""
        with self._lock:
            self._closed = True
        self._inbox.put(CloseRing())
        self._ranks.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deliver(self, outputs: list[Output]) -> None:
        """Put each output into its request's stream; the driver calls it from its thread."""
        for output in outputs:
            with self._lock:
                ended = output.finish_reason is not None
                put = (self._puts.pop if ended else self._puts.get)(output.request_id)
            assert put is not None, f"an output for {output.request_id}, which nobody reads"
            put(output)

    def _fail(self, rank: int, error: BaseException) -> None:
        """A rank has failed: end the others, whose links close, and raise the cause wherever a stream is read."""
        failure = ClusterError(f"rank {rank} failed: {str(error) or type(error).__name__}")
        failure.__cause__ = error
        with self._lock:
            # The first tells most: links that close are what follows from it.
            self._failure = self._failure or failure
            puts, self._puts = list(self._puts.values()), {}
        self._ranks.close_links()
        for put in puts:
            put(self._failure)


class Stream:
    """The outputs of one request, the last with its finish reason. Closing it early cancels the request.

    Reading it raises RequestError or NonFiniteError if the request cannot be served, ClusterError if a rank has failed.
    """

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
        while isinstance(output := self._outputs.get(), Output) and output.computed_tokens:
            pass  # it tells nothing else
        if isinstance(output, ClusterError):
            self._ended = True
            raise output
        self._ended = output.finish_reason is not None
        if output.finish_reason == "error":
            raise output.failure()
        return output

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        if not self._ended:
            self._cancel()
