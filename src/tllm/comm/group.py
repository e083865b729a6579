"""`Group`: the ranks along one axis of the mesh, and what they do together. A group of one does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tllm.comm.algorithms import LATENCY_BYTES, add_as_tree, exchange, one_shot, one_shot_limit, two_step
from tllm.comm.frame import is_plain
from tllm.comm.link import DEADLINE, Link, LocalLink
from tllm.comm.scratch import Scratch
from tllm.ground.errors import LinkClosed, LinkError

Shape = tuple[int, ...]
BYTES_LIMIT = 16 * 1024 * 1024  # of one broadcast_bytes, unless the caller says otherwise


class Group:
    """Collectives among `size` ranks; `send` and `recv` hold a link to and from each other one, by index in the group.

    Every rank must make the same calls in the same order. After a link has failed the group is over: ranks may be out
    of step, so that each later call raises again. Errors name the rank that failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: dict[int, Link],
        recv: dict[int, Link],
        name: str = "tp",
        latency_bytes: float = LATENCY_BYTES,
    ) -> None:
        peers = set(range(size)) - {rank}
        assert 0 <= rank < size and set(send) == set(recv) == peers, "a group needs a link to and from each other rank"
        self.rank, self.size, self.name = rank, size, name
        self.send, self.recv = send, recv
        self._one_shot_limit = one_shot_limit(size, latency_bytes)
        self._scratch = Scratch()
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._failure: LinkError | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; the same bits on every rank."""
        if self.size == 1:
            return x
        plain = is_plain(x)
        y = x if plain else x.detach().cpu().contiguous()
        if y.requires_grad:
            y = y.detach()
        algorithm = one_shot if y.nbytes <= self._one_shot_limit else two_step
        if self._failure is not None:
            raise self._over()
        try:
            algorithm(y, self.rank, self.send, self.recv, self._scratch)
        except LinkError as error:
            self._failure = error
            raise
        if not plain:
            x.detach().copy_(y)
        return x

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Everyone's `x` becomes root's, in place."""
        with self._together():
            if self.rank == root:
                for link in self.send.values():
                    link.send(x)
            else:
                self.recv[root].recv(x.shape, x.dtype, x.detach())
        return x

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
        with self._together():
            exchange([(link, x) for link in self.send.values()], [(link, pieces[p]) for p, link in self.recv.items()])
        return pieces

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """This rank's rows of the sum over ranks, the same bits as `all_reduce` gives; rank p gets `counts[p]` rows."""
        assert len(counts) == self.size and sum(counts) == len(x), "`counts` share out the rows of x"
        rows = torch.split(x.detach().contiguous(), list(counts))
        mine = rows[self.rank].clone()
        parts = [
            mine if peer == self.rank else self._scratch.piece(peer, tuple(mine.shape), mine.dtype)
            for peer in range(self.size)
        ]
        self.exchange({peer: rows[peer] for peer in self.send}, {peer: parts[peer] for peer in self.recv})
        if self.size > 1:
            add_as_tree(parts, mine)
        return mine

    def exchange(self, sends: Mapping[int, torch.Tensor], recvs: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor of its own to some ranks and receive one from some, by index, all at once and contiguous."""
        with self._together():
            exchange([(self.send[p], x) for p, x in sends.items()], [(self.recv[p], x) for p, x in recvs.items()])

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
        self._failure = self._failure or LinkClosed(f"the {self.name} group of rank {self.rank} is closed")
        if failures:
            raise failures[0]

    def _links(self) -> list[Link]:
        return [*self.send.values(), *self.recv.values()]

    def _check_shapes(self, x: torch.Tensor, shapes: Sequence[Shape]) -> None:
        assert len(shapes) == self.size and x.shape == tuple(shapes[self.rank]), "`shapes` holds each rank's shape"

    def _over(self) -> LinkClosed:
        assert self._failure is not None
        return LinkClosed(f"the {self.name} group is over: {self._failure.message}", self._failure.hint)

    @contextmanager
    def _together(self) -> Iterator[None]:
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
