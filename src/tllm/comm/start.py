"""Collectives that go on while their caller does: `group.start.all_reduce(x)` gives a `Handle` to wait on.

One thread carries out what a group has started, in order: every rank must start the same in the same order, as it must
call. Until a handle is done its tensors are the thread's. A group's other calls wait for what was started before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from tllm.comm.lane import Lane
from tllm.ground.errors import LinkClosed, LinkTimeout

if TYPE_CHECKING:
    from tllm.comm.group import Group, Shape

P = ParamSpec("P")
T = TypeVar("T")


class Handle(Generic[T]):
    """A collective under way."""

    def __init__(self, future: Future[T], what: str) -> None:
        self._future, self._what = future, what

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What it failed with, once it has ended."""
        return LinkClosed(f"{self._what} had not begun") if self._future.cancelled() else self._future.exception()

    def then(self, call: Callable[[], None]) -> None:
        """Call when it has ended, well or not, in the group's thread; at once if it has."""
        self._future.add_done_callback(lambda _: call())

    def wait(self, seconds: float | None = None) -> T:
        """What the collective gives; raises what it failed with. LinkTimeout after `seconds`, while it goes on."""
        try:
            return self._future.result(seconds)
        except TimeoutError as error:
            raise LinkTimeout(f"{self._what} is not done within {seconds:g} s", "it goes on: wait again") from error
        except CancelledError as error:
            raise LinkClosed(f"{self._what} had not begun when the group was closed") from error


class Start:
    """A group's collectives, each of which returns at once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lane = Lane(f"{group.name} {group.rank} of {group.size}")
        self._pending: deque[Future[Any]] = deque()

    @property
    def is_here(self) -> bool:
        """Whether it is the group's own thread that asks."""
        return self._lane.is_here

    def call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Run a method of the group after all that was started before."""
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        inference = torch.is_inference_mode_enabled()  # a thread's own: in-place work on such tensors needs it
        future = self._lane.submit(partial(_run, inference, partial(work, *args, **kwargs)))
        self._pending.append(future)
        return Handle(future, f"a {work.__name__} of the {self._group.name} group")

    def all_reduce(self, x: Tensor, op: str = "sum") -> Handle[Tensor]:
        return self.call(self._group.all_reduce, x, op)

    def reduce(self, x: Tensor, root: int = 0, op: str = "sum") -> Handle[Tensor]:
        return self.call(self._group.reduce, x, root, op)

    def broadcast(self, x: Tensor, root: int = 0) -> Handle[Tensor]:
        return self.call(self._group.broadcast, x, root)

    def scatter(self, pieces: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> Handle[Tensor]:
        return self.call(self._group.scatter, pieces, out, root)

    def gather(self, x: Tensor, shapes: Sequence[Shape], root: int = 0) -> Handle[list[Tensor] | None]:
        return self.call(self._group.gather, x, shapes, root)

    def all_gather(self, x: Tensor, shapes: Sequence[Shape]) -> Handle[list[Tensor]]:
        return self.call(self._group.all_gather, x, shapes)

    def all_gather_into(self, out: Tensor, x: Tensor, counts: Sequence[int] | None = None) -> Handle[Tensor]:
        return self.call(self._group.all_gather_into, out, x, counts)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int], op: str = "sum") -> Handle[Tensor]:
        return self.call(self._group.reduce_scatter, x, counts, op)

    def all_to_all(self, pieces: Sequence[Tensor], outs: Sequence[Tensor]) -> Handle[None]:
        return self.call(self._group.all_to_all, pieces, outs)

    def exchange(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Handle[None]:
        return self.call(self._group.exchange, sends, recvs)

    def send_to(self, peer: int, x: Tensor) -> Handle[None]:
        return self.call(self._group.send_to, peer, x)

    def recv_from(self, peer: int, out: Tensor) -> Handle[Tensor]:
        return self.call(self._group.recv_from, peer, out)

    def barrier(self) -> Handle[None]:
        return self.call(self._group.barrier)

    def settle(self) -> None:
        """Return when nothing is under way; a failure is raised to whoever waits on its handle, not here."""
        if self._pending and not self._lane.is_here:
            wait(self._pending)
            self._pending.clear()

    def close(self) -> None:
        """Drop what has not begun, and end the thread; what it waits for must have been ended."""
        self._lane.close()


def _run(inference: bool, work: Callable[[], T]) -> T:
    with torch.inference_mode(inference):
        return work()
