"""gloo in the place of NCCL: a backend that takes the processor's memory for that of a device of each rank's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from tllm.comm.collectives.group import Group
from tllm.comm.collectives.intra_host import connect_devices

CPU = torch.device("cpu")


class GlooDevices:
    """A `DeviceBackend`; each thread has another device. `hold`, if given, is called with the number of a
    rank's exchange before that is said to be done."""

    name = "gloo"

    def __init__(self, identity: str | None = None, hold: Callable[[int], None] = lambda number: None) -> None:
        self._identity, self._hold = identity, hold

    def identity(self, device: torch.device) -> str:
        return f"{id(self)} {threading.get_ident()}" if self._identity is None else self._identity

    def process_group(self, store: Store, place: int, size: int, seconds: float) -> CoalescedGloo:
        return CoalescedGloo(ProcessGroupGloo(store, place, size, timedelta(seconds=seconds)), self._hold)


class CoalescedGloo:
    """gloo's process group with messages put together, as NCCL's has them: they wait for each other in a thread."""

    def __init__(self, group: Any, hold: Callable[[int], None]) -> None:
        self._group, self._hold, self._exchanges = group, hold, 0
        self._given: list[Callable[[], Any]] | None = None
        self._thread = ThreadPoolExecutor(1, "gloo devices")
        self.aborted = False

    def _start_coalescing(self) -> None:
        assert self._given is None, "one at a time"
        self._given = []

    def _end_coalescing(self) -> UnderWay:
        assert self._given is not None
        given, self._given = self._given, None
        self._exchanges += 1
        return UnderWay(self._thread.submit(self._carry_out, given, self._exchanges))

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int) -> None:
        self._give(partial(self._group.send, tensors, dst_rank, tag), tensors)

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int) -> None:
        self._give(partial(self._group.recv, tensors, src_rank, tag), tensors)

    def abort(self) -> None:
        self.aborted = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._group = None

    def _give(self, begin: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        assert self._given is not None and len(tensors) == 1, "messages are put together, one tensor each"
        (tensor,) = tensors
        assert tensor.is_contiguous() and tensor.numel() and tensor.dtype == torch.uint8, "as NCCL takes it"
        self._given.append(begin)

    def _carry_out(self, given: list[Callable[[], Any]], number: int) -> None:
        for work in [begin() for begin in given]:
            work.wait()
        self._hold(number)


class UnderWay:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


def connected(groups: Sequence[Group], hosts: Sequence[str], seconds: float = 20.0) -> list[str]:
    """Connect the ranks of each host by gloo, as their threads do; what each of them says of it."""
    backend = GlooDevices()
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda g: connect_devices(g, hosts[g.rank], CPU, seconds, backend), groups))
