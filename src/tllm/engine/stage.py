"""`PipelineStage`: one rank's part in computing a batch.

The stages of a plan form a ring of their leaders (tp rank 0 of each). A batch goes round it like this:

1. The driver, on the leader of stage 0, calls `start`: the batch goes to the other ranks of its stage and to the next
   leader, and its layers are computed.
2. Every other rank waits in `serve`. A leader hands the batch on at once, takes the hidden states of the stage before,
   shares them with its ranks, computes its layers, and sends hidden states to the next stage.
3. On the last stage the `Sampler` turns hidden states into tokens, and the `Pooler` those of prompts that are pooled
   into numbers; the leader sends these `Results` to stage 0.
4. The driver takes them by `finish`.

A heartbeat or the stop goes round without computing. With one stage, `start` has the results at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.core.errors import FrameError
from tllm.engine.compute.adapted_rows import RankAdapters
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.pooler import Pooler
from tllm.engine.compute.positions import lengths, positions
from tllm.engine.compute.sampler import Sampler
from tllm.engine.decode_recordings import RecordedSteps
from tllm.engine.pages.page_messages import PageMessage
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import Batch, ForgetAdapter, Results, RingMessage, StopRing, decode, encode
from tllm.engine.schedule.limits import Limits, check_batch, check_results
from tllm.engine.serving_counters import ReplyCounters
from tllm.engine.span_recorder import SpanRecorder
from tllm.engine.stage_model import StageModel
from tllm.engine.stage_pages import StagePages
from tllm.spec.cut import Range


class PipelineStage:
    """One rank: its layers, its part of the KV cache, and its links.

    `tp` are the ranks of this stage. `ring` is None but on the stage's leader, and where there is one stage.
    `vocab_ranges` are the parts of the vocabulary of this stage's ranks. The last stage of a model that is served has a
    `pooler` too. `graphs` are its layers recorded for replies, where that can be.

    Every wait on a link has that link's deadline; heartbeats (see driver.py) keep an idle ring within it. Whatever
    fails, here or in a link, leaves as an exception; links name the rank at fault.
    """

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        tp: Group,
        ring: RingLinks | None,
        limits: Limits,
        vocab_ranges: list[Range],
    ) -> None:
        self.model = model
        self.cache = cache
        self.tp = tp
        self.ring = ring
        self.sampler = Sampler(model.logits, tp, vocab_ranges) if model.is_last else None
        self.pooler: Pooler | None = None
        self.graphs: RecordedSteps | None = None
        self.batches = 0
        self.counters, self.traced = ReplyCounters(tp), SpanRecorder()
        self.adapters = RankAdapters()
        self.pages = StagePages(tp, ring, limits, model.is_last)

    @property
    def limits(self) -> Limits:
        """The sizes that all ranks agree on."""
        return self.pages.limits

    @torch.inference_mode()
    def start(self, batch: Batch) -> Results | None:
        """On stage 0's leader: begin a batch. Returns its results if this is the only stage."""
        self.send_round(batch)
        output = self._compute(batch, None)
        if isinstance(output, Results):
            return output
        assert self.ring is not None and output is not None
        self.ring.send(output)
        return None

    def finish(self, batch: Batch) -> Results:
        """On stage 0's leader: wait for the results of the oldest batch under way, which is this one."""
        results = self.receive_round()
        if not isinstance(results, Results):
            raise FrameError(f"{type(results).__name__} came round the ring while batch {batch.number} was next")
        check_results(results, batch, self.limits)
        return results

    def serve(self) -> None:
        """Compute batches until the ring stops: the loop of every rank but the driver's."""
        with torch.inference_mode():
            while self.serve_one():
                pass

    def serve_one(self) -> bool:
        """Wait for the next message and do what it asks for, in inference mode. False after a stop."""
        payload = self._receive()
        message = decode(payload)
        if isinstance(message, PageMessage):
            self.pages.serve(message)
            return True
        if isinstance(message, Results):
            raise FrameError("results came to a rank that waits for batches")
        if isinstance(message, Batch):
            check_batch(message, self.limits)
        ends_here = self.sampler is not None and isinstance(message, Batch | ForgetAdapter)
        if self.ring is not None and not ends_here:
            self.ring.next.send_bytes(payload)
        if isinstance(message, ForgetAdapter):
            self.adapters.remove(message)
        if not isinstance(message, Batch):
            return not isinstance(message, StopRing)
        output = self._compute(message, None if self.model.is_first else self._receive_hidden(message))
        if self.ring is not None:
            if isinstance(output, Results):
                self.ring.next.send_bytes(encode(output))
            elif output is not None:
                self.ring.send(output)
        return True

    def send_round(self, message: RingMessage) -> None:
        """On stage 0's leader: give a message to this stage's ranks and to the next stage."""
        if self.ring is None and self.tp.size == 1:
            return
        payload = encode(message)
        self.tp.broadcast_bytes(payload, limit=self.limits.batch_bytes)
        if self.ring is not None:
            self.ring.next.send_bytes(payload)

    def receive_round(self) -> RingMessage:
        """On stage 0's leader: what comes from the last stage."""
        assert self.ring is not None, "a single stage has no ring"
        return decode(self.ring.previous.recv_bytes(self.limits.results_bytes))

    def _receive(self) -> bytes:
        """The next message: from the stage before on a leader, from the leader on its other ranks."""
        payload = self.ring.previous.recv_bytes(self.limits.batch_bytes) if self.ring is not None else None
        return self.tp.broadcast_bytes(payload, limit=self.limits.batch_bytes)

    def _receive_hidden(self, batch: Batch) -> Tensor:
        """The hidden states of the stage before, [tokens, received width], on every rank of this one: on the host."""
        shape, dtype = (len(batch.token_ids), self.model.received_width), self.cache.dtype
        if self.ring is None:
            return self.tp.broadcast(torch.empty(shape, dtype=dtype))
        return self.tp.broadcast(self.ring.recv(shape, dtype))

    def _compute(self, batch: Batch, x_TD: Tensor | None) -> Tensor | Results | None:
        """This stage's layers over a batch; the first stage (x_TD None) embeds its token ids.

        Gives hidden states on the host; on the last stage the results, which only its leader has (None on the others).
        """
        self.batches += 1
        with self.counters.counting(batch), self.traced.timing(batch):
            if self.graphs is not None and self.graphs.takes(batch):
                x_TD = self.graphs(batch, x_TD)
            else:
                x_TD = self._layers(batch, x_TD)
            if self.sampler is None:
                return x_TD.cpu()  # what a device computes counts until it is here, from where it is sent
            results = self.sampler(x_TD, batch)
            return results if self.pooler is None else self.pooler(x_TD, batch, results)

    def _layers(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        """The layers over any batch."""
        device = self.cache.device
        ids_T = torch.tensor(batch.token_ids).to(device)
        x = ids_T if x_TD is None else x_TD.to(device)
        lengths_T = lengths(batch, device) if self.model.scales_by_length else None
        attend, adapt = PagedAttend(self.cache, batch.entries), self.adapters.of_batch(batch, device)
        return self.model(x, positions(batch, device), attend, lengths_T, adapt, ids_T)
