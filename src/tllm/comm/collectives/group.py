"""Collectives that go on while their caller does: `group.start.all_reduce(x)` gives a `Handle` to wait on.

One thread carries out what a group has started, in order: every rank must start the same in the same order, as it must
call. Until a handle is done its tensors are the thread's. A group's other calls wait for what was started before.

`Group`: the ranks along one axis of the mesh, and what they do together. A group of one does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from tllm.comm.collectives.algorithm_choice import AlgorithmChoice, LengthChoice
from tllm.comm.collectives.all_reduce import Ends, cut, exchange, fold_piece
from tllm.comm.collectives.fold import check_op
from tllm.comm.collectives.scratch import Scratch
from tllm.comm.collectives.typed_tensors import recv_typed, send_typed
from tllm.comm.collectives.worker_thread import WorkerThread
from tllm.comm.links.frame import is_plain
from tllm.comm.links.link import DEADLINE, Link, LocalLink
from tllm.core.errors import LinkClosed, LinkError, LinkTimeout

if TYPE_CHECKING:
    pass


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


class AsyncCollectives:
    """A group's collectives, each of which returns at once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lane = WorkerThread(f"{group.name} {group.rank} of {group.size}")
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


Shape = tuple[int, ...]
BYTES_LIMIT = 16 * 1024 * 1024  # of one broadcast_bytes, unless the caller says otherwise
ROOM_BYTES = 32 * 1024 * 1024  # of a sum, and so of what it is received into: longer ones are made in parts


class Group:
    """Collectives among `size` ranks; `send` and `recv` hold a link to and from each other one, by index in the group.

    Every rank must make the same calls in the same order. An `op` is one of sum, mean, product, max and min; `choice`
    says how each is carried out. After a link has failed the group is over: ranks may be out of step, so that each
    later call raises again. Errors name the rank that failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: dict[int, Link],
        recv: dict[int, Link],
        name: str = "tp",
        choice: AlgorithmChoice | None = None,
    ) -> None:
        peers = set(range(size)) - {rank}
        assert 0 <= rank < size and set(send) == set(recv) == peers, "a group needs a link to and from each other rank"
        self.rank, self.size, self.name = rank, size, name
        self.send, self.recv = send, recv
        self.choice: AlgorithmChoice = choice or LengthChoice(size)
        self._ends = Ends(rank, send, recv, Scratch())
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self.seconds = 0.0  # that `all_reduce` took so far, with what it waited for others
        self._failure: LinkError | None = None
        self._started: AsyncCollectives | None = None

    @cached_property
    def start(self) -> AsyncCollectives:
        """The same collectives in a thread of their own: each returns a handle at once."""
        self._started = AsyncCollectives(self)
        return self._started

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """All ranks' `x` combined, in place; the same bits on every rank."""
        if op != "sum":
            check_op(op, x.dtype)
        if self.size == 1:
            return x
        y = x if is_plain(x) else x.detach().cpu().contiguous()
        if y.requires_grad:
            y = y.detach()
        if self._started is not None:
            self._started.settle()
        if self._failure is not None:
            raise self._over()
        began = time.perf_counter()
        try:
            for part in (y,) if y.nbytes <= ROOM_BYTES else cut(y, -(-y.nbytes // ROOM_BYTES)):
                self.choice.all_reduce(part, op)(part, self._ends, op)
        except LinkError as error:
            self._failure = error
            raise
        self.seconds += time.perf_counter() - began
        return _filled(x, y)

    def reduce(self, x: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
        """Root's `x` becomes all ranks' combined, in place, with the bits of `all_reduce`; the others' stays."""
        check_op(op, x.dtype)
        if self.size == 1:
            return x
        y = _flat(x).clone()
        with self._together():
            self.choice.reduce(y, op, root)(y, self._ends, op, root)
        return _filled(x, y) if self.rank == root else x

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Everyone's `x` becomes root's, in place."""
        if self.size == 1:
            return x
        y = _flat(x)
        with self._together():
            self.choice.broadcast(y, root)(y, self._ends, root)
        return x if self.rank == root else _filled(x, y)

    def broadcast_bytes(self, payload: bytes | None, root: int = 0, limit: int = BYTES_LIMIT) -> bytes:
        """Root's `payload` on every rank; what the others pass is not read. More than `limit` bytes are refused."""
        if self.rank != root:
            with self._together():
                return self.recv[root].recv_bytes(limit)
        assert payload is not None and len(payload) <= limit, "root broadcasts bytes, and no more than all agreed to"
        with self._together():
            for link in self.send.values():
                link.send_bytes(payload)
        return payload

    def scatter(self, pieces: Sequence[torch.Tensor] | None, out: torch.Tensor, root: int = 0) -> torch.Tensor:
        """This rank's `out` becomes root's piece for it, in place; only root has `pieces`, one for each rank."""
        if self.rank != root:
            return self.recv_from(root, out)
        assert pieces is not None and len(pieces) == self.size, "root has a piece for each rank"
        self.exchange({peer: pieces[peer].contiguous() for peer in self.send}, {})
        return _filled(out, pieces[root])

    def gather(self, x: torch.Tensor, shapes: Sequence[Shape], root: int = 0) -> list[torch.Tensor] | None:
        """Every rank's `x` at root, in rank order; None elsewhere. `shapes` are those of all ranks and may differ."""
        self._check_shapes(x, shapes)
        with self._together():
            if self.rank != root:
                self.send[root].send(x)
                return None
            return [x if p == root else self.recv[p].recv(tuple(shapes[p]), x.dtype) for p in range(self.size)]

    def all_gather(self, x: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Every rank's `x` on every rank, in rank order; this rank's own is `x` itself."""
        self._check_shapes(x, shapes)
        pieces = [x if peer == self.rank else torch.empty(shapes[peer], dtype=x.dtype) for peer in range(self.size)]
        self.exchange(dict.fromkeys(self.send, x), {peer: pieces[peer] for peer in self.recv})
        return pieces

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Every rank's rows, one after the other, in `out`; rank p has `counts[p]` of them, or all as many."""
        rows = torch.split(out, list(counts or [len(x)] * self.size))
        assert len(rows) == self.size and rows[self.rank].shape == x.shape, "`out` holds every rank's rows"
        self.exchange(dict.fromkeys(self.send, x.contiguous()), {peer: rows[peer] for peer in self.recv})
        _filled(rows[self.rank], x)
        return out

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int], op: str = "sum") -> torch.Tensor:
        """This rank's rows of all ranks' `x` combined, with the bits of `all_reduce`; rank p gets `counts[p]` rows."""
        rows = self._rows(x.detach().contiguous(), counts, op)
        return self._folded(rows, rows[self.rank].clone(), op)

    def reduce_scatter_(self, x: torch.Tensor, counts: Sequence[int], op: str = "sum") -> torch.Tensor:
        """The same in `x`'s own memory: a view of this rank's rows of it, while the others' stay as they were."""
        rows = self._rows(_flat(x), counts, op)
        return _filled(torch.split(x, list(counts))[self.rank], self._folded(rows, rows[self.rank], op))

    def all_to_all(self, pieces: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Rank p's piece for rank q becomes q's `outs[p]`, of its shape; empty ones travel too."""
        assert len(pieces) == len(outs) == self.size, "a piece for each rank, and a place for one from each"
        sends = {peer: pieces[peer].contiguous() for peer in self.send}
        self.exchange(sends, {peer: outs[peer] for peer in self.recv})
        _filled(outs[self.rank], pieces[self.rank])

    def exchange(self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor of its own to some ranks and receive one from some, by index, all at once."""
        with self._together():
            exchange([(self.send[p], x) for p, x in sends.items()], [(self.recv[p], x) for p, x in recvs.items()])

    def send_to(self, peer: int, x: torch.Tensor) -> None:
        """Send to one rank, which calls `recv_from`; `x` may be overwritten afterwards."""
        with self._together():
            self.send[peer].send(x)

    def recv_from(self, peer: int, out: torch.Tensor) -> torch.Tensor:
        """Receive `out`, of its shape and dtype, from one rank."""
        with self._together():
            self.recv[peer].recv(out.shape, out.dtype, out.detach())
        return out

    def send_any(self, peer: int, x: torch.Tensor) -> None:
        """Send to one rank that does not know the shape, and calls `recv_any`."""
        with self._together():
            send_typed(self.send[peer], x)

    def recv_any(self, peer: int, limit: int) -> torch.Tensor:
        """Receive a tensor of any shape and dtype; one of more than `limit` bytes ends the group before it is read."""
        with self._together():
            return recv_typed(self.recv[peer], limit)

    def barrier(self) -> None:
        """Return when every rank has called."""
        self.all_gather(self._nothing, [(0,)] * self.size)

    def set_deadline(self, seconds: float) -> None:
        """Seconds that each send and each receive may take."""
        for link in self._links():
            link.set_deadline(seconds)

    def stats(self) -> dict[str, int]:
        """Payload bytes moved over each link, named "source>target" by their ranks in the plan."""
        return {f"{link.source}>{link.target}": link.bytes_moved for link in self._links()}

    def close(self) -> None:
        """Close every link; the first failure among them is raised when all are closed."""
        failures = []
        for link in self._links():
            try:
                link.close()
            except LinkError as error:
                failures.append(error)
        if self._started is not None:
            self._started.close()
        self._failure = self._failure or LinkClosed(f"the {self.name} group of rank {self.rank} is closed")
        if failures:
            raise failures[0]

    def _links(self) -> list[Link]:
        return [*self.send.values(), *self.recv.values()]

    def _check_shapes(self, x: torch.Tensor, shapes: Sequence[Shape]) -> None:
        assert len(shapes) == self.size and x.shape == tuple(shapes[self.rank]), "`shapes` holds each rank's shape"

    def _rows(self, x: torch.Tensor, counts: Sequence[int], op: str) -> Sequence[torch.Tensor]:
        """Each rank's, to be combined."""
        assert len(counts) == self.size and sum(counts) == len(x), "`counts` share out the rows of x"
        check_op(op, x.dtype)
        return torch.split(x, list(counts))

    def _folded(self, rows: Sequence[torch.Tensor], mine: torch.Tensor, op: str) -> torch.Tensor:
        """`mine`, which holds this rank's own rows, combined with what the others send of them; part by part."""
        if self.size > 1:
            parts = max(1, -(-sum(one.nbytes for one in rows) // ROOM_BYTES))
            with self._together():
                for out, *pieces in zip(*(cut(one, parts) for one in (mine, *rows)), strict=True):
                    fold_piece(pieces, out, self._ends, op)
        return mine

    def _over(self) -> LinkClosed:
        assert self._failure is not None
        return LinkClosed(f"the {self.name} group is over: {self._failure.message}", self._failure.hint)

    @contextmanager
    def _together(self) -> Iterator[None]:
        if self._started is not None:
            self._started.settle()
        if self._failure is not None:
            raise self._over()
        try:
            yield
        except LinkError as error:
            self._failure = error
            raise


def solo() -> Group:
    """A group of one."""
    return Group(0, 1, {}, {})


def local_groups(size: int, deadline: float = DEADLINE, name: str = "tp") -> list[Group]:
    """One group for each of `size` ranks that are threads of this process."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    links = {pair: LocalLink(*pair, deadline) for pair in pairs}
    return [
        Group(
            rank,
            size,
            {b: links[rank, b] for b in range(size) if b != rank},
            {a: links[a, rank] for a in range(size) if a != rank},
            name,
        )
        for rank in range(size)
    ]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`x` where a link can read and write it, or a copy that is there."""
    return x.detach() if is_plain(x) else x.detach().cpu().contiguous()


def _filled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` with the numbers of `y`, which may be its own memory."""
    if x.data_ptr() != y.data_ptr():
        x.detach().copy_(y)
    return x
