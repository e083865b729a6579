"""`PointToPoint`: tensors from one rank to another beside a group's collectives, each way and tag on a link of its own.

So a receive that waits holds up nothing else: neither collectives nor what goes to and comes from other ranks.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from tllm.comm.c10d.dense_tensors import DenseTensor
from tllm.comm.c10d.rendezvous import FIRST_TAG, RendezvousPlace
from tllm.comm.collectives.worker_thread import Handle, WorkerThread
from tllm.comm.links.link import Link
from tllm.core.errors import LinkError
from tllm.spec.plan import Wire


class PointToPoint:
    """Sends and receives of one rank; links of tags but the first are opened when they are used. Ranks are global."""

    def __init__(self, place: RendezvousPlace) -> None:
        self._place = place
        self._ways: dict[Wire, _OneWay] = {}
        self._given_up = threading.Event()
        for wire, link in place.links.items():
            if wire.name == place.name_of(FIRST_TAG):
                self._way(wire).opened = link

    def send(self, peer: int, x: torch.Tensor, tag: int) -> Handle[None]:
        """Send `x`, which must stay as it is until the handle is done; then it is on its way."""
        way = self._way(self._wire(self._place.rank, peer, tag))
        return Handle(way.lane.submit(lambda: way.link().send(DenseTensor(x).run)), f"a send to rank {peer}")

    def recv(self, peer: int, out: torch.Tensor, tag: int) -> Handle[None]:
        """Receive `out`: as many elements as it has, of its dtype."""
        wire = self._wire(peer, self._place.rank, tag)
        if wire not in self._ways:
            self._place.expect(wire)
        way = self._way(wire)

        def work() -> None:
            with DenseTensor(out) as flat:
                way.link().recv(tuple(flat.run.shape), flat.run.dtype, flat.run)

        return Handle(way.lane.submit(work), f"a receive from rank {peer}")

    def interrupt(self) -> None:
        """Break every link: whoever waits is woken by a LinkError."""
        self._given_up.set()
        for way in self._ways.values():
            if way.opened is not None:
                way.opened.interrupt()

    def close(self) -> None:
        """Let what was sent leave, and end. The place's listener is closed before, so that nobody waits for a link."""
        self._given_up.set()
        for wire, way in self._ways.items():
            if way.opened is None:
                continue
            if wire.target == self._place.rank:
                way.opened.interrupt()
            with contextlib.suppress(LinkError):  # whoever waits for the other end knows by its own error
                way.opened.close()
        for way in self._ways.values():
            way.lane.close()

    def _way(self, wire: Wire) -> _OneWay:
        if wire not in self._ways:
            self._ways[wire] = _OneWay(self._place, wire, self._given_up)
        return self._ways[wire]

    def _wire(self, source: int, target: int, tag: int) -> Wire:
        return Wire(source, target, self._place.name_of(tag))


class _OneWay:
    """One wire, and the lane that its messages go by in order."""

    def __init__(self, place: RendezvousPlace, wire: Wire, given_up: threading.Event) -> None:
        self.lane = WorkerThread(f"{wire.name} {wire.source}>{wire.target}")
        self.opened: Link | None = None
        self._place, self._wire, self._given_up = place, wire, given_up

    def link(self) -> Link:
        """The link; the first to ask waits for the other rank to open it too."""
        if self.opened is None:
            mine = self._wire.source == self._place.rank
            self.opened = (
                self._place.dial(self._wire, self._given_up) if mine else self._place.take(self._wire, self._given_up)
            )
        return self.opened
