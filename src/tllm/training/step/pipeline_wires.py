"""How activations and their gradients travel between the stages of one replica while a schedule is executed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tllm.comm.links.link import Link
from tllm.spec.pipeline_schedule import Schedule, StageTransfer


@dataclass(frozen=True)
class Wires:
    """One rank's links along the pipeline, by the number of the other stage.

    A stage may have more ranks than its neighbour, so that one sends to several and some send to none; who they are,
    `spec.process_groups` tells. Sending must never wait for the other end to receive.
    """

    send: Mapping[int, Sequence[Link]] = field(default_factory=dict)
    recv: Mapping[int, Link] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_moved for links in self.send.values() for link in links)


class Mail:
    """What one stage sends and receives while it executes a schedule once.

    Each pair of stages shares one wire each way. Tensors arrive on it in the order in which the other stage's list
    sends them; one that arrives before this stage needs it is buffered. `shapes`: of the activations, by microbatch;
    they are received onto `device`.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        wires: Wires,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stage, self._wires, self._shapes, self._dtype, self._device = stage, wires, shapes, dtype, device
        self._expected: dict[int, deque[StageTransfer]] = {}
        for other in range(schedule.stages):
            hops = (schedule.sends(other, op) for op in schedule.lists[other])
            self._expected[other] = deque(hop for hop in hops if hop is not None and hop.target.stage == stage)
        self._buffered: dict[StageTransfer, Tensor] = {}
        self.waited = 0.0
        """Seconds in which this stage had nothing to do but to wait for another."""

    def send(self, hop: StageTransfer, x: Tensor) -> None:
        if hop.target.stage == self._stage:
            assert self._expected[self._stage].popleft() == hop
            self._buffered[hop] = x.detach()
            return
        for link in self._wires.send[hop.target.stage]:
            link.send(x.detach())

    def receive(self, hop: StageTransfer) -> Tensor:
        """The tensor of this hop; waits for it, and keeps what the same stage sent before it."""
        expected = self._expected[hop.source.stage]
        while hop not in self._buffered:
            assert hop.source.stage != self._stage, f"{hop} is wanted before it is made"
            first = expected.popleft()
            began = time.monotonic()
            came = self._wires.recv[hop.source.stage].recv(self._shapes[first.microbatch], self._dtype)
            self._buffered[first] = came.to(self._device)
            self.waited += time.monotonic() - began
        return self._buffered.pop(hop)
