"""One rank's part in a batch: take it from the stage before, compute, give it to the next; the last stage samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tllm.comm.collectives.compressed_hop import CompressedHop
from tllm.comm.collectives.group import Group
from tllm.comm.links.link import Link
from tllm.core.errors import FrameError
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.compute.sampling_head import Head
from tllm.engine.reply_counters import ReplyCounters
from tllm.engine.schedule.batch import Batch, Message, Results, StopRing, decode, encode
from tllm.engine.schedule.limits import Limits, check_batch, check_results
from tllm.model.attention import Attend
from tllm.spec.cut import Range


class StageModel(Protocol):
    """What a stage needs of `model.Transformer`."""

    is_first: bool
    is_last: bool

    def __call__(self, x: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Tensor | None = None) -> Tensor: ...

    def logits(self, x_TD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class RingLinks:
    """A stage leader's two links: from the leader of the stage before (the last one's, for stage 0) and to the next.

    The hidden states that come and go travel as they are, or narrow by a hop over the same link.
    """

    previous: Link
    next: Link
    narrow_previous: CompressedHop | None = None
    narrow_next: CompressedHop | None = None

    def send(self, x_TD: Tensor) -> None:
        """Give hidden states to the next stage."""
        (self.narrow_next or self.next).send(x_TD)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take hidden states from the stage before."""
        return (self.narrow_previous or self.previous).recv(shape, dtype)


class PipelineStage:
    """One rank. The stage's leader (tp rank 0) holds the `ring`; it is None for its other ranks, and where pp is 1.

    `width` is the model's hidden size; `vocabs` are the parts of the vocabulary of this stage's ranks; `by_length`: its
    rope goes by the length of a sequence.
    Every wait on a link has that link's deadline: an idle ring is kept alive by beats (see driver.py). Whatever
    fails, here or in a link, leaves as an exception; links name the rank at fault.
    """

    def __init__(
        self,
        model: StageModel,
        cache: KVCache,
        tp: Group,
        ring: RingLinks | None,
        limits: Limits,
        width: int,
        vocabs: list[Range],
        by_length: bool = True,
    ) -> None:
        self.model = model
        self.cache = cache
        self.tp = tp
        self.ring = ring
        self.limits = limits
        self.width = width
        self.by_length = by_length
        self.head = Head(model.logits, tp, vocabs) if model.is_last else None
        self.batches = 0
        self.tally = ReplyCounters(tp)

    def serve(self) -> None:
        """Take part in batches until the ring stops: the loop of every rank but the driver's."""
        with torch.inference_mode():
            while self.serve_one():
                pass

    def serve_one(self) -> bool:
        """Take part in what comes next, in inference mode. False after a stop."""
        payload = self._receive()
        message = decode(payload)
        if not isinstance(message, Batch):
            if isinstance(message, Results):
                raise FrameError("results came to a rank that waits for batches")
            if self.ring is not None:
                self.ring.next.send_bytes(payload)
            return not isinstance(message, StopRing)
        check_batch(message, self.limits)
        if self.ring is not None and self.head is None:
            self.ring.next.send_bytes(payload)
        x_TD = self._compute(message, None if self.model.is_first else self._receive_hidden(message))
        if self.head is not None:
            results = self._end(x_TD, message)
            if self.ring is not None and results is not None:
                self.ring.next.send_bytes(encode(results))
        elif self.ring is not None:
            self.ring.send(x_TD)
        return True

    @torch.inference_mode()
    def start(self, batch: Batch) -> Results | None:
        """On stage 0's leader: begin a batch. Returns its results if this is the only stage."""
        self.send_round(batch)
        x_TD = self._compute(batch, None)
        if self.head is not None:
            return self._end(x_TD, batch)
        assert self.ring is not None
        self.ring.send(x_TD)
        return None

    def finish(self, batch: Batch) -> Results:
        """On stage 0's leader: wait for the results of the oldest batch under way."""
        results = self.receive_round()
        if not isinstance(results, Results):
            raise FrameError(f"{type(results).__name__} came round the ring while batch {batch.number} was next")
        check_results(results, batch, self.limits)
        return results

    def send_round(self, message: Message) -> None:
        """On stage 0's leader: give a message to this stage's ranks and to the next stage."""
        if self.ring is None and self.tp.size == 1:
            return
        payload = encode(message)
        self.tp.broadcast_bytes(payload, limit=self.limits.batch_bytes)
        if self.ring is not None:
            self.ring.next.send_bytes(payload)

    def receive_round(self) -> Message:
        """On stage 0's leader: what comes from the last stage."""
        assert self.ring is not None, "a single stage has no ring"
        return decode(self.ring.previous.recv_bytes(self.limits.results_bytes))

    def _receive(self) -> bytes:
        """The next message: from the stage before on a leader, from the leader on its peers."""
        payload = self.ring.previous.recv_bytes(self.limits.batch_bytes) if self.ring is not None else None
        return self.tp.broadcast_bytes(payload, limit=self.limits.batch_bytes)

    def _receive_hidden(self, batch: Batch) -> Tensor:
        shape, dtype = (len(batch.token_ids), self.width), self.cache.dtype
        if self.ring is None:
            return self.tp.broadcast(torch.empty(shape, dtype=dtype))
        return self.tp.broadcast(self.ring.recv(shape, dtype))

    def _compute(self, batch: Batch, x_TD: Tensor | None) -> Tensor:
        self.batches += 1
        x = torch.tensor(batch.token_ids) if x_TD is None else x_TD
        lengths_T = lengths(batch) if self.by_length else None
        with self.tally.of(batch):
            found = self.model(x, positions(batch), PagedAttend(self.cache, batch.entries), lengths_T)
        self.tally.counted(batch)
        return found

    def _end(self, x_TD: Tensor, batch: Batch) -> Results | None:
        assert self.head is not None, "only the last stage has an end"
        with self.tally.of(batch):
            return self.head(x_TD, batch)


def positions(batch: Batch) -> Tensor:
    """Each token's place in its sequence."""
    return torch.tensor([p for entry in batch.entries for p in range(entry.start, entry.stop)])


def lengths(batch: Batch) -> Tensor:
    """How long each token's sequence was when it was first computed: what rope that scales by length goes by.

    The prompt's length for a prompt token, its own place + 1 for a later one, however the batches are cut.
    """
    return torch.tensor([max(p + 1, e.prompt_length) for e in batch.entries for p in range(e.start, e.stop)])
