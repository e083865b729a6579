"""`Group`: the ranks along one axis of the mesh, their collectives, and messages from one rank to another.

It is what MPI calls a communicator and `torch.distributed` a process group. A group of one rank sends nothing. Its
public methods are, in the order below:

    collectives       all_reduce, reduce, reduce_scatter, reduce_scatter_, broadcast, scatter, gather, all_gather,
                      all_gather_into, all_to_all, barrier; and of byte strings broadcast_bytes, scatter_bytes,
                      gather_bytes, all_gather_bytes
    point to point    send_to and recv_from, exchange of several at once
    administration    start, set_deadline, stats, close

`group.start(group.all_reduce, x)` carries out any of them in a thread of the group's own, and returns a `Handle` at
once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from tllm.comm.collectives.algorithm_choice import AlgorithmChoice, LengthChoice
from tllm.comm.collectives.device_links import DeviceLinks
from tllm.comm.collectives.fold import check_op
from tllm.comm.collectives.group_links import GroupLinks, ReceiveBuffers, equal_pieces
from tllm.comm.collectives.worker_thread import Handle, WorkerThread
from tllm.comm.links.link import DEADLINE, Link, LocalLink
from tllm.core.errors import CapacityError, LinkClosed, LinkError, decoded
from tllm.spec.plan import Wire

P = ParamSpec("P")
T = TypeVar("T")
Shape = tuple[int, ...]

BYTES_LIMIT = 16 * 1024 * 1024
"""Of one `broadcast_bytes`, unless the caller says otherwise."""

GATHERED_LIMIT = 256 * 1024 * 1024
"""Of all ranks' bytes together in one `all_gather_bytes`, unless the caller says otherwise."""

ROOM_BYTES = 32 * 1024 * 1024
"""A longer reduction is made in parts of at most so many bytes, which bounds the memory of the receive buffers."""


class MemorySums(Protocol):
    """Sums of ranks that share memory (`kernels.recording.shared_sums`); `seconds` that they took until now."""

    @property
    def seconds(self) -> float: ...

    def takes(self, x: Tensor) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Group:
    """One rank's end of a group of `size`; `send` and `recv` have a link to and from each other rank, by index.

    Every rank must make the same calls in the same order. An `op` is a name of `fold.COMBINE`: sum, mean, product, max
    or min, and for whole numbers and, or and xor. `choice` picks the algorithm of each collective. After a LinkError
    the group is unusable, because ranks may be out of step: each later call raises LinkClosed. Errors name the rank
    that failed.

    Tensors may be on any device and have any strides; those that are not contiguous in this process's memory are
    copied. With `device_links` tensors of that device go to ranks of the same machine without the host, but for those
    of `send_to`; in one call two such ranks must both have theirs on it, or neither. With `memory_sums` an `all_reduce`
    that sums takes no link. Costs in rounds and bytes are in `all_reduce.py`, `reduce_scatter.py` and
    `reduce_and_broadcast.py`; scatter, gather, all-to-all and `all_gather` are direct, with one message for each pair
    of ranks, all in one round.
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
        self._links = GroupLinks(rank, send, recv, ReceiveBuffers())
        self.device_links: DeviceLinks | None = None
        self.memory_sums: MemorySums | None = None
        self._seconds = 0.0
        self._failure: LinkError | None = None
        self._started: StartedWork | None = None

    # Collectives.

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """All ranks' `x` combined, in place; the same bits on every rank."""
        if op != "sum":
            check_op(op, x.dtype)
        if self.size == 1:
            return x
        if op == "sum" and self.memory_sums is not None and self.memory_sums.takes(x):
            with self._in_step():
                return self.memory_sums(x)
        y, links = self._routed(x)
        if self._started is not None:
            self._started.wait_all()
        if self._failure is not None:
            raise self._unusable()
        began = time.perf_counter()
        try:
            for part in (y,) if y.nbytes <= ROOM_BYTES else equal_pieces(y, -(-y.nbytes // ROOM_BYTES)):
                self.choice.all_reduce(part, op)(part, links, op)
        except LinkError as error:
            self._failure = error
            raise
        self._seconds += time.perf_counter() - began
        return _filled(x, y)

    def reduce(self, x: torch.Tensor, root: int = 0, op: str = "sum") -> torch.Tensor:
        """The root's `x` becomes all ranks' combined, in place, with the bits of `all_reduce`; others keep theirs."""
        check_op(op, x.dtype)
        if self.size == 1:
            return x
        y, links = self._routed(x)
        y = y.clone()
        with self._in_step():
            self.choice.reduce(y, op, root)(y, links, op, root)
        return _filled(x, y) if self.rank == root else x

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int], op: str = "sum") -> torch.Tensor:
        """This rank's rows of all ranks' `x` combined, with the bits of `all_reduce`; rank p gets `counts[p]` rows."""
        y, links = self._routed(x)
        rows = self._rows(y, counts, op)
        return self._reduce_scattered(rows, rows[self.rank].clone(), op, links).to(x.device)

    def reduce_scatter_(self, x: torch.Tensor, counts: Sequence[int], op: str = "sum") -> torch.Tensor:
        """`reduce_scatter` in the memory of `x`: returns a view of this rank's rows; other rows stay as they are."""
        y, links = self._routed(x)
        rows = self._rows(y, counts, op)
        mine = self._reduce_scattered(rows, rows[self.rank], op, links)
        return _filled(torch.split(x, list(counts))[self.rank], mine)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Everyone's `x` becomes the root's, in place."""
        if self.size == 1:
            return x
        y, links = self._routed(x)
        with self._in_step():
            self.choice.broadcast(y, root)(y, links, root)
        return x if self.rank == root else _filled(x, y)

    def scatter(self, pieces: Sequence[torch.Tensor] | None, out: torch.Tensor, root: int = 0) -> torch.Tensor:
        """This rank's `out` becomes the root's piece for it, in place; only the root has `pieces`, one a rank."""
        if self.rank != root:
            self.exchange({}, {root: out})
            return out
        assert pieces is not None and len(pieces) == self.size, "root has a piece for each rank"
        self.exchange({peer: pieces[peer].contiguous() for peer in self.send}, {})
        return _filled(out, pieces[root])

    def gather(self, x: torch.Tensor, shapes: Sequence[Shape], root: int = 0) -> list[torch.Tensor] | None:
        """Every rank's `x` at the root, in rank order; None elsewhere. `shapes` has each rank's, which may differ."""
        self._check_shapes(x, shapes)
        y, links = self._routed(x)
        with self._in_step():
            if self.rank != root:
                links.exchange({root: y}, {})
                return None
            pieces = self._pieces(x, y, shapes)
            links.exchange({}, {peer: pieces[peer] for peer in self.recv})
        return [piece.to(x.device) for piece in pieces]

    def all_gather(self, x: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """Every rank's `x` on every rank, in rank order; this rank's own entry is `x` itself."""
        self._check_shapes(x, shapes)
        y, links = self._routed(x)
        pieces = self._pieces(x, y, shapes)
        with self._in_step():
            links.exchange(dict.fromkeys(self.send, y), {peer: pieces[peer] for peer in self.recv})
        return [piece.to(x.device) for piece in pieces]

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, counts: Sequence[int] | None = None) -> torch.Tensor:
        """Every rank's rows, in rank order, in `out`; rank p has `counts[p]` rows, by default all have as many."""
        y, links = self._routed(x)
        whole = out if out.device == y.device else torch.empty_like(out, device=y.device)
        rows = torch.split(whole, list(counts or [len(x)] * self.size))
        assert len(rows) == self.size and rows[self.rank].shape == x.shape, "`out` holds every rank's rows"
        with self._in_step():
            _filled(rows[self.rank], y)
            self.choice.all_gather(whole.nbytes)(rows, links)
        return _filled(out, whole)

    def all_to_all(self, pieces: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Rank p's `pieces[q]` becomes rank q's `outs[p]`, which has its shape; empty ones travel too."""
        assert len(pieces) == len(outs) == self.size, "a piece for each rank, and a place for one from each"
        sends = {peer: pieces[peer].contiguous() for peer in self.send}
        self.exchange(sends, {peer: outs[peer] for peer in self.recv})
        _filled(outs[self.rank], pieces[self.rank])

    def barrier(self) -> None:
        """Return when every rank has called."""
        self.all_gather(torch.empty(0, dtype=torch.uint8), [(0,)] * self.size)

    def broadcast_bytes(self, payload: bytes | None, root: int = 0, limit: int = BYTES_LIMIT) -> bytes:
        """The root's `payload` on every rank; the others pass None. FrameError for more than `limit` bytes."""
        if self.rank != root:
            with self._in_step():
                return self.recv[root].recv_bytes(limit)
        assert payload is not None and len(payload) <= limit, "root broadcasts bytes, and no more than all agreed to"
        with self._in_step():
            for link in self.send.values():
                link.send_bytes(payload)
        return payload

    def scatter_bytes(self, payloads: Sequence[bytes] | None, limit: int = BYTES_LIMIT) -> bytes:
        """On each rank its own of rank 0's `payloads`; the others pass None. FrameError for more than `limit` bytes."""
        with self._in_step():
            if self.rank != 0:
                return self.recv[0].recv_bytes(limit)
            assert payloads is not None and len(payloads) == self.size, "rank 0 has one payload for each rank"
            for peer, link in self.send.items():
                link.send_bytes(payloads[peer])
            return payloads[0]

    def all_gather_bytes(self, payload: bytes, limit: int = GATHERED_LIMIT) -> list[bytes]:
        """Every rank's `payload` on every rank, in rank order: gathered by rank 0, which broadcasts the list.

        For what ranks must agree on before they act. CapacityError, on every rank, for more than `limit` bytes of all
        of them together.
        """
        gathered = self.gather_bytes(payload[:limit], limit)  # of one that is too long alone, enough to be too much
        if self.size == 1:
            return [payload]
        told = msgspec.msgpack.encode(gathered)
        if len(told) > limit:
            told = msgspec.msgpack.encode(len(told))
        found = decoded(
            self.broadcast_bytes(told if self.rank == 0 else None, 0, limit),
            _GATHERED,
            "what rank 0 passed on is no list of bytes",
        )
        if isinstance(found, int):
            raise CapacityError(f"ranks are to tell each other {found} bytes or more, and {limit} are the most")
        return found

    def gather_bytes(self, payload: bytes, limit: int = BYTES_LIMIT) -> list[bytes]:
        """Every rank's `payload` on rank 0, in rank order, each of at most `limit` bytes; nothing elsewhere."""
        with self._in_step():
            if self.rank != 0:
                self.send[0].send_bytes(payload)
                return []
            return [payload, *(self.recv[peer].recv_bytes(limit) for peer in range(1, self.size))]

    # Point to point.

    def send_to(self, peer: int, x: torch.Tensor) -> None:
        """Send to one rank, which calls `recv_from`; `x` may be overwritten afterwards."""
        with self._in_step():
            self.send[peer].send(x)

    def recv_from(self, peer: int, out: torch.Tensor) -> torch.Tensor:
        """Receive `out`, of its shape and dtype, from one rank."""
        with self._in_step():
            self.recv[peer].recv(out.shape, out.dtype, out.detach())
        return out

    def exchange(self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor]) -> None:
        """Send one tensor to each of some ranks and receive one from each of some, by index, all at once."""
        with self._in_step():
            self._links_for([*sends.values(), *recvs.values()]).exchange(sends, recvs)

    # Administration.

    @property
    def seconds(self) -> float:
        """That `all_reduce` took so far, with the time that it waited for others."""
        return self._seconds + (0.0 if self.memory_sums is None else self.memory_sums.seconds)

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Carry out a function, such as a method of this group, after all that was started before; returns at once.

        Every rank must start the same in the same order. Until the handle is done, its tensors belong to the group's
        own thread. A method that is called, and not started, first waits for all that was.
        """
        if self._started is None:
            self._started = StartedWork(f"{self.name} {self.rank} of {self.size}")
        return Handle(self._started.submit(partial(work, *args, **kwargs)), f"{work.__name__} of the {self.name} group")

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the thread of what was started."""
        return self._started is not None and self._started.is_current_thread

    def set_deadline(self, seconds: float) -> None:
        """Seconds that each send and each receive may take."""
        for link in self._all_links():
            link.set_deadline(seconds)
        if self.device_links is not None:
            self.device_links.channel.deadline = seconds

    def stats(self) -> dict[str, int]:
        """Payload bytes moved over each link so far, by "source>target", with their ranks in the plan."""
        return {f"{link.source}>{link.target}": link.bytes_moved for link in self._all_links()}

    def close(self) -> None:
        """Close every link; the first failure among them is raised when all are closed."""
        failures = []
        self.close_devices()
        for link in self._all_links():
            try:
                link.close()
            except LinkError as error:
                failures.append(error)
        if self._started is not None:
            self._started.close()
        self._failure = self._failure or LinkClosed(f"the {self.name} group of rank {self.rank} is closed")
        if failures:
            raise failures[0]

    def close_devices(self) -> None:
        """Give up the way between devices; from now on tensors of the device go by links."""
        if self.device_links is not None:
            self.device_links.channel.close()
            self.device_links = None

    def _all_links(self) -> list[Link]:
        return [*self.send.values(), *self.recv.values()]

    def _check_shapes(self, x: torch.Tensor, shapes: Sequence[Shape]) -> None:
        assert len(shapes) == self.size and x.shape == tuple(shapes[self.rank]), "`shapes` holds each rank's shape"

    def _rows(self, x: torch.Tensor, counts: Sequence[int], op: str) -> Sequence[torch.Tensor]:
        """The rows of `x` for each rank, once `counts` and `op` are checked."""
        assert len(counts) == self.size and sum(counts) == len(x), "`counts` share out the rows of x"
        check_op(op, x.dtype)
        return torch.split(x, list(counts))

    def _routed(self, x: torch.Tensor) -> tuple[torch.Tensor, GroupLinks]:
        """`x`, contiguous, where what it is sent by can read and write it; and by what it is sent."""
        links = self._links if self.device_links is None else self._links_for((x,))
        y = (x.detach() if x.requires_grad else x).contiguous()
        return (y if y.is_cpu or links is not self._links or self.size == 1 else y.cpu()), links

    def _links_for(self, tensors: Sequence[torch.Tensor]) -> GroupLinks:
        near = self.device_links
        return self._links if near is None or any(x.device != near.device for x in tensors) else near

    def _pieces(self, x: torch.Tensor, y: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """`x`, and room for the other ranks' beside `y`, which is `x` as it is sent."""
        room = partial(torch.empty, dtype=y.dtype, device=y.device)
        return [x if peer == self.rank else room(shapes[peer]) for peer in range(self.size)]

    def _reduce_scattered(
        self, rows: Sequence[torch.Tensor], mine: torch.Tensor, op: str, links: GroupLinks
    ) -> torch.Tensor:
        """`mine`, which holds this rank's part of its own rows, combined with the others' parts of them."""
        if self.size > 1:
            nbytes = sum(piece.nbytes for piece in rows)
            algorithm, parts = self.choice.reduce_scatter(nbytes, mine.dtype, op), max(1, -(-nbytes // ROOM_BYTES))
            with self._in_step():
                for out, *pieces in zip(*(equal_pieces(piece, parts) for piece in (mine, *rows)), strict=True):
                    algorithm(pieces, out, links, op)
        return mine

    def _unusable(self) -> LinkClosed:
        assert self._failure is not None
        return LinkClosed(f"the {self.name} group is over: {self._failure.message}", self._failure.hint)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Begin after what was started before, unless the group has failed; a LinkError fails it."""
        if self._started is not None:
            self._started.wait_all()
        if self._failure is not None:
            raise self._unusable()
        try:
            yield
        except LinkError as error:
            self._failure = error
            raise


class StartedWork:
    """What a group has started: one thread carries it out, in order."""

    def __init__(self, name: str) -> None:
        self._worker = WorkerThread(name)
        self._pending: deque[Future[Any]] = deque()

    @property
    def is_current_thread(self) -> bool:
        return self._worker.is_current

    def submit(self, work: Callable[[], T]) -> Future[T]:
        while self._pending and self._pending[0].done():
            self._pending.popleft()
        inference = torch.is_inference_mode_enabled()  # is set for each thread; in-place work on such tensors needs it
        future = self._worker.submit(partial(_run, inference, work))
        self._pending.append(future)
        return future

    def wait_all(self) -> None:
        """Return when nothing is under way. A failure is raised by its handle, not here."""
        if self._pending and not self._worker.is_current:
            wait(self._pending)
            self._pending.clear()

    def close(self) -> None:
        """Cancel what has not begun, and join the thread; what it waits for must have been ended before."""
        self._worker.close()


def solo() -> Group:
    """A group of one."""
    return Group(0, 1, {}, {})


def group_of(name: str, ranks: Sequence[int], rank: int, links: Mapping[Wire, Link], wires: str | None = None) -> Group:
    """The group of these global ranks, by the links of its name, or of the name that `wires` gives."""
    wire_name = name if wires is None else wires
    others = {index: other for index, other in enumerate(ranks) if other != rank}
    send = {index: links[Wire(rank, other, wire_name)] for index, other in others.items()}
    recv = {index: links[Wire(other, rank, wire_name)] for index, other in others.items()}
    return Group(ranks.index(rank), len(ranks), send, recv, name)


def local_groups(size: int, deadline: float = DEADLINE, name: str = "tp") -> list[Group]:
    """One group for each of `size` ranks that are threads of this process."""
    links = {Wire(*pair, name): LocalLink(*pair, deadline) for pair in permutations(range(size), 2)}
    return [group_of(name, range(size), rank, links) for rank in range(size)]


def _run(inference: bool, work: Callable[[], T]) -> T:
    with torch.inference_mode(inference):
        return work()


def _filled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` with the numbers of `y`, which may be the same memory."""
    if x.data_ptr() != y.data_ptr():
        x.detach().copy_(y)
    return x


_GATHERED: msgspec.msgpack.Decoder[list[bytes] | int] = msgspec.msgpack.Decoder(list[bytes] | int)
"""Every rank's bytes, or how many these are where they are too many."""
