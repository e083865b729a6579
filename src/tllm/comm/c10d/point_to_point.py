"""`PointToPoint`: the sends and receives of a `torch.distributed` process group.

Each peer, direction and tag has a link and a thread of its own. So a receive that waits delays neither collectives nor
messages to and from other ranks.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from tllm.comm.c10d.dense_tensors import DenseTensor
from tllm.comm.c10d.rendezvous import FIRST_TAG, ProcessGroupLinks
from tllm.comm.collectives.worker_thread import Handle, WorkerThread
from tllm.comm.links.link import Link
from tllm.core.errors import LinkError
from tllm.spec.plan import Wire


class PointToPoint:
    """Sends and receives of one rank; ranks are global. Links of tags other than FIRST_TAG are opened at first use."""

    def __init__(self, rank_links: ProcessGroupLinks) -> None:
        self._rank_links = rank_links
        self._queues: dict[Wire, _WireQueue] = {}
        self._cancelled = threading.Event()
        for wire, link in rank_links.links.items():
            if wire.name == rank_links.name_of(FIRST_TAG):
                self._queue(wire).opened = link

    def send(self, peer: int, x: torch.Tensor, tag: int) -> Handle[None]:
        """Send `x`, which must stay as it is until the handle is done."""
        queue = self._queue(self._wire(self._rank_links.rank, peer, tag))
        return Handle(queue.worker.submit(lambda: queue.link().send(DenseTensor(x).flat)), f"a send to rank {peer}")

    def recv(self, peer: int, out: torch.Tensor, tag: int) -> Handle[None]:
        """Receive `out`: as many elements as it has, of its dtype."""
        wire = self._wire(peer, self._rank_links.rank, tag)
        if wire not in self._queues:
            self._rank_links.expect(wire)
        queue = self._queue(wire)

        def work() -> None:
            with DenseTensor(out) as dense:
                queue.link().recv(tuple(dense.flat.shape), dense.flat.dtype, dense.flat)

        return Handle(queue.worker.submit(work), f"a receive from rank {peer}")

    def interrupt(self) -> None:
        """Break every link: whoever waits is woken by a LinkError."""
        self._cancelled.set()
        for queue in list(self._queues.values()):
            if queue.opened is not None:
                queue.opened.interrupt()

    def close(self) -> None:
        """Let what was sent leave, and end. The listener must be closed before, so that nobody waits for a link."""
        self._cancelled.set()
        for wire, queue in self._queues.items():
            if queue.opened is None:
                continue
            if wire.target == self._rank_links.rank:
                queue.opened.interrupt()
            with contextlib.suppress(LinkError):  # whoever waits for the other end knows by its own error
                queue.opened.close()
        for queue in self._queues.values():
            queue.worker.close()
            if queue.opened is not None:  # meanwhile
                with contextlib.suppress(LinkError):
                    queue.opened.close()

    def _queue(self, wire: Wire) -> _WireQueue:
        if wire not in self._queues:
            self._queues[wire] = _WireQueue(self._rank_links, wire, self._cancelled)
        return self._queues[wire]

    def _wire(self, source: int, target: int, tag: int) -> Wire:
        return Wire(source, target, self._rank_links.name_of(tag))


class _WireQueue:
    """The messages of one wire: its link, once it is open, and the worker that sends or receives them in order."""

    def __init__(self, rank_links: ProcessGroupLinks, wire: Wire, cancelled: threading.Event) -> None:
        self.worker = WorkerThread(f"{wire.name} {wire.source}>{wire.target}")
        self.opened: Link | None = None
        self._rank_links, self._wire, self._cancelled = rank_links, wire, cancelled

    def link(self) -> Link:
        """The link; the first call waits for the other rank to open it too."""
        if self.opened is None:
            is_source = self._wire.source == self._rank_links.rank
            open_link = self._rank_links.dial if is_source else self._rank_links.accept
            self.opened = open_link(self._wire, self._cancelled)
            if self._cancelled.is_set():  # whoever ends all links may have looked just before
                self.opened.interrupt()
        return self.opened
