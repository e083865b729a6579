"""The `torch.distributed` backend "tllm": encrypted collectives with deadlines, for any PyTorch program on CPUs.

    import tllm.comm
    torch.distributed.init_process_group("tllm")

Each process group is a `Group` over links of its own, with mutual TLS 1.3, checksums and sequence numbers.
`rendezvous.py` opens the links, `secret.py` decides whom they trust. Sums have the bits of the balanced tree over ranks
(`fold.py`), which are the same on every rank. A collective that is not asynchronous runs in the caller's thread. Every
rank of a group must call the same collectives in the same order. Sends and receives are independent of that order
(`point_to_point.py`).
"""

# mypy: disable-error-code="override, assignment"
# torch declares several overloads of each method; it calls a method of a Python class by the first of them only.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from tllm.comm.c10d.dense_tensors import DenseTensor, as_numbers, check_dense
from tllm.comm.c10d.point_to_point import PointToPoint
from tllm.comm.c10d.rendezvous import ProcessGroupLinks, closed_on_failure, join_rendezvous
from tllm.comm.c10d.shutdown import end_with_program
from tllm.comm.c10d.work import CollectiveWork, run_now
from tllm.comm.collectives.group import Group
from tllm.core.errors import ConfigError, LinkError

NAME = "tllm"
OPS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
)

UNASKED = AllgatherOptions()
"""What torch 2.11 leaves out where it gathers several at once."""


class ProcessGroup(dist.ProcessGroup):
    """One rank's end of a process group. torch gives the methods' names and arguments; roots are ranks in the group."""

    def __init__(self, rank: int, size: int, rank_links: ProcessGroupLinks | None, group: Group) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for Python classes
        self._rank_links, self._group = rank_links, group
        self._point_to_point = PointToPoint(rank_links) if rank_links else None
        self._group_name, self._group_text = group.name, "undefined"
        self._me = f"rank {rank_links.rank if rank_links else 0} in group {group.name}"

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        self._group_text = text

    def getGroupDesc(self) -> str:
        return self._group_text

    def allreduce(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        op = _op(opts)
        numbers = [as_numbers(x, op) for x in tensors]
        return self._carry_out("all_reduce", opts, tensors, lambda: [self._group.all_reduce(x, op) for x in numbers])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        op, root = _op(opts), opts.rootRank
        numbers = [as_numbers(x, op) for x in tensors]
        return self._carry_out("reduce", opts, tensors, lambda: [self._group.reduce(x, root, op) for x in numbers])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        def work() -> None:
            for x in tensors:
                with DenseTensor(x) as dense:
                    self._group.broadcast(dense.flat, opts.rootRank)

        return self._carry_out("broadcast", opts, tensors, work)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        def work() -> None:
            for outs, x in zip(outputs, inputs, strict=True):
                self._all_to_all([x] * len(outs), outs)

        return self._carry_out("all_gather", opts, [out for outs in outputs for out in outs], work)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = UNASKED
    ) -> CollectiveWork:
        def work() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._check_widths("all_gather_single", out, x)
                with DenseTensor(out) as dense_out, DenseTensor(x, written=False) as dense:
                    self._group.all_gather_into(dense_out.flat, dense.flat)

        return self._carry_out("all_gather_single", opts, outputs, work)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> CollectiveWork:
        op = _op(opts)

        def work() -> None:
            for out, pieces in zip(outputs, inputs, strict=True):
                flats = [as_numbers(x, op).reshape(-1) for x in pieces]
                counts = [len(flat) for flat in flats]
                _fill(out, self._group.reduce_scatter(torch.cat(flats), counts, op), op)

        return self._carry_out("reduce_scatter", opts, outputs, work)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        op, n = _op(opts), self._group.size

        def work() -> None:
            for out, x in zip(outputs, inputs, strict=True):
                self._check_widths("reduce_scatter_single", x, out)
                flat = as_numbers(x, op).reshape(-1)
                _fill(out, self._group.reduce_scatter(flat, [len(flat) // n] * n, op), op)

        return self._carry_out("reduce_scatter_single", opts, outputs, work)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        return self._carry_out("all_to_all", opts, outputs, lambda: self._all_to_all(inputs, outputs))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> CollectiveWork:
        def work() -> None:
            with DenseTensor(output) as dense_out, DenseTensor(input, written=False) as dense:
                outs = torch.split(dense_out.flat, self._counts(output, dense_out.flat, output_splits))
                self._all_to_all(torch.split(dense.flat, self._counts(input, dense.flat, input_splits)), outs)

        return self._carry_out("all_to_all_single", opts, [output], work)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        (x,), root = inputs, opts.rootRank

        def work() -> None:
            if self._group.rank == root:
                self._receive_from_each(outputs[0], x)
            else:
                with DenseTensor(x, written=False) as dense:
                    self._group.exchange({root: dense.flat}, {})

        return self._carry_out("gather", opts, outputs[0] if outputs else [], work)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> CollectiveWork:
        (out,), root = outputs, opts.rootRank

        def work() -> None:
            with DenseTensor(out) as dense_out, contextlib.ExitStack() as stack:
                inputs_of_root = inputs[0] if inputs else []
                pieces = [stack.enter_context(DenseTensor(x, written=False)).flat for x in inputs_of_root]
                self._group.scatter(pieces or None, dense_out.flat, root)

        return self._carry_out("scatter", opts, outputs, work)

    def barrier(self, opts: Any) -> CollectiveWork:
        return self._carry_out("barrier", opts, [], self._group.barrier)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> CollectiveWork:
        (x,), point_to_point = tensors, self._require_peers()
        check_dense(x)
        return CollectiveWork(point_to_point.send(self._rank(dst), x, tag), f"send of {self._me}", tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> CollectiveWork:
        (x,), point_to_point = tensors, self._require_peers()
        check_dense(x)
        return CollectiveWork(point_to_point.recv(self._rank(src), x, tag), f"recv of {self._me}", tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> CollectiveWork:
        raise ConfigError(f"recv from any rank is not known to backend {NAME!r}", "name the rank: recv(x, src=1)")

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_deadline(timeout.total_seconds())

    def abort(self) -> None:
        """Break every link: whoever waits is woken by an error."""
        if self._point_to_point is not None:
            self._point_to_point.interrupt()
        for link in [*self._group.send.values(), *self._group.recv.values()]:
            link.interrupt()

    def shutdown(self) -> None:
        """Let what was sent leave, and end."""
        if self._rank_links is not None:
            self._rank_links.listener.close()
        if self._point_to_point is not None:
            self._point_to_point.close()
        with contextlib.suppress(LinkError):  # whoever waits for the other end has an error of its own
            self._group.close()

    def _carry_out(self, name: str, opts: Any, tensors: Sequence[Tensor], work: Callable[[], object]) -> CollectiveWork:
        for x in tensors:
            check_dense(x)
        what = f"{name} of {self._me}"
        if self._group.is_own_thread:
            raise ConfigError(
                f"{what} was started where another has just ended, and so ranks may start them in different orders",
                "wait for the first, then start the second, both in your own thread",
            )
        if not opts.asyncOp:
            return run_now(work, what, tensors)

        def named() -> object:
            return work()

        named.__name__ = name  # by which the group tells of it
        return CollectiveWork(self._group.start(named), what, tensors)

    def _all_to_all(self, pieces: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        with contextlib.ExitStack() as stack:
            flats = [stack.enter_context(DenseTensor(x, written=False)).flat for x in pieces]
            self._group.all_to_all(flats, [stack.enter_context(DenseTensor(out)).flat for out in outs])

    def _receive_from_each(self, outs: Sequence[Tensor], mine: Tensor) -> None:
        with contextlib.ExitStack() as stack:
            flats = [stack.enter_context(DenseTensor(out)).flat for out in outs]
            self._group.exchange({}, {peer: flats[peer] for peer in self._group.recv})
            flats[self._group.rank].copy_(stack.enter_context(DenseTensor(mine, written=False)).flat)

    def _counts(self, x: Tensor, flat: Tensor, splits: Sequence[int]) -> list[int]:
        """Elements of `flat` for each rank. `splits` has the rows of `x` for each; without it all have as many."""
        n = self._group.size
        rows = list(splits) or [len(x) // n] * n
        if sum(rows) != len(x):
            raise ConfigError(f"{len(x)} rows cannot be split as {rows}", "give as many rows as there are, by rank")
        width = len(flat) // len(x) if len(x) else 0
        return [count * width for count in rows]

    def _check_widths(self, what: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._group.size or whole.dtype != part.dtype:
            raise ConfigError(
                f"{what} has {part.dtype} {tuple(part.shape)} a rank and {whole.dtype} {tuple(whole.shape)} for all "
                f"{self._group.size}",
                "the whole has as many elements as all parts together",
            )

    # What torch 2.11 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _require_peers(self) -> PointToPoint:
        if self._point_to_point is None:
            raise ConfigError("a group of one rank has nobody to send to or receive from", "start more ranks")
        return self._point_to_point

    def _rank(self, index: int) -> int:
        assert self._rank_links is not None
        return self._rank_links.ranks[index]


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """What torch calls for `init_process_group("tllm")` and `new_group`: the rendezvous of the group's ranks."""
    size, rank = options.group_size, options.group_rank
    ranks = list(options.global_ranks_in_group) or list(range(size))
    if size == 1:
        group = ProcessGroup(rank, size, None, Group(0, 1, {}, {}, options.group_id))
    else:
        seconds = options.timeout.total_seconds()
        rank_links = join_rendezvous(options.store, ranks[rank], ranks, options.group_id, seconds)
        with closed_on_failure(rank_links.listener):
            group = ProcessGroup(rank, size, rank_links, rank_links.group())
    end_with_program(group)
    return group


def _op(opts: Any) -> str:
    names = [name for op, name in OPS if opts.reduceOp == op]
    if not names:
        known = ", ".join(str(op).rpartition(".")[2] for op, _ in OPS)
        raise ConfigError(f"backend {NAME!r} combines by {known} alone", "for PREMUL_SUM scale the tensor and take SUM")
    return names[0]


def _fill(out: Tensor, numbers: Tensor, op: str) -> None:
    with torch.no_grad():
        as_numbers(out, op).copy_(numbers.view(as_numbers(out, op).shape))


dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
