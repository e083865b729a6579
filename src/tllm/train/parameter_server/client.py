"""`ParameterServerClient`: a replica's side of the parameter-server architecture, in the place of an `Update` of its
own.

Of Ψ parameters the input table's V D are not tied; a step of which u different rows of it are touched moves, for each
replica, beside messages of some bytes,

    4 (Ψ - V D + u D) up in gradients (8 in float64)        4 u up in row numbers
    b (Ψ - V D + u D) down in weights of b bytes             u = V and no row numbers where the table is tied
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from tllm.comm.collectives.all_reduce import exchange
from tllm.comm.collectives.group import Group, solo
from tllm.core.errors import FrameError, LinkClosed, LinkError, NonFiniteError
from tllm.train.data.batch_tensors import Tokens
from tllm.train.gradients.gradient_buckets import GradientBuckets
from tllm.train.gradients.gradient_clipping import GradientNorm
from tllm.train.optim.flat_parameters import FlatParameters
from tllm.train.parameter_server import messages as say
from tllm.train.parameter_server.segments import ServerSegment, first_row, segments
from tllm.train.parameter_server.server import ReplicaLinks

R = TypeVar("R", say.Weights, say.Square, say.Settled)


class ParameterServerClient:
    """Pulls a step's weights from the servers at `lines` and pushes its gradient, held in `buckets` of solo groups.

    The parameters become views of runs of memory made here. `table` is the number of the one that travels by rows: a
    row of it that no token of a step has is as old as when it was last pulled, and `pull_all` makes all new. `world`
    are all replicas, who tell each other what went bad where the step is one for all.
    """

    def __init__(
        self,
        buckets: GradientBuckets,
        table: int | None,
        lines: Sequence[ReplicaLinks],
        max_staleness: int = 0,
        max_grad_norm: float = 0.0,
        world: Group | None = None,
    ) -> None:
        self.buckets, self.lines = buckets, lines
        self.max_staleness, self.limit = max_staleness, max_grad_norm or math.inf
        self.clocks: tuple[int, ...] = ()
        """The steps of each replica that are in the weights last pulled, of any server the fewest."""
        self.step = 0
        """The steps taken: to be set where a run goes on."""
        self._table = table
        self._world = world or solo()
        self._norm = GradientNorm(buckets, lines[0].send.source)
        self.flat = FlatParameters(buckets.layout)
        everyone = range(len(lines))
        self._segments = [
            segments(buckets.layout.buckets, buckets.layout.parameters, table, s, len(lines)) for s in everyone
        ]
        self._rows = [torch.empty(0, dtype=torch.int64)] * len(lines)
        self._empty = True
        self._reason: LinkClosed | None = None
        self._midway = False  # between a message and the last of its tensors, where no other message may come

    @property
    def synchronous(self) -> bool:
        return self.max_staleness == 0

    def scale(self, mine: int, everyones: int) -> float:
        """What losses are multiplied by before the backward pass, from this replica's predicted tokens and everyone's.

        Not synchronous, each replica learns from the mean over its own.
        """
        return 1 / max(everyones if self.synchronous else mine, 1)

    def give(self) -> None:
        """Servers begin with this replica's weights. One replica gives, before anyone's first step."""
        with self._explained():
            self._say(say.Give())
            self._send(lambda server, segment: _part(self.flat.whole, segment))

    def begin(self, microbatches: Sequence[Tokens]) -> None:
        """Pull the weights to compute the next step with; waits while this replica is too far ahead."""
        self._empty = not any(microbatch.predicted for microbatch in microbatches)
        ids = [microbatch.ids_T.cpu() for microbatch in microbatches]
        touched = torch.unique(torch.cat(ids)) if ids else torch.empty(0, dtype=torch.int64)
        self._rows = [self._rows_of(of_server, touched) for of_server in self._segments]
        with self._explained():
            self._pull(self._rows)

    def apply(self, step: int, rate: float, loss: float = 0.0) -> float:
        """Push the gradient of `step`, counted from 1; its norm over all replicas, or of this one if not synchronous.

        NonFiniteError, before any weight moves, where that is no number or the `loss` is none.
        """
        assert step == self.step + 1, f"step {step} comes after {self.step}"
        self.step = step
        with self._explained():
            if self.synchronous:
                self._push(rate, loss)
                return self._apply_sum(rate, loss)
            norm = self._norm.clip(self.limit, loss)
            self._check(norm, loss, solo())
            self._push(rate, loss)
            return norm

    def save(self) -> int:
        """Let the servers save after the present step; the updates so far. Every replica calls it at the same steps."""
        with self._explained():
            self._say(say.Save(self.step))
            updates = {self._reply(line, say.Settled).updates for line in self.lines}
        assert len(updates) == 1, f"servers have taken unlike numbers of updates at a save: {updates}"
        return updates.pop()

    def pull_all(self) -> None:
        """The whole model as it is after every replica's present step: waits for all of them."""
        with self._explained():
            self._pull(None)

    def close(self, failure: BaseException | None = None) -> None:
        """Say farewell, or what this replica fails with."""
        if failure is not None:
            self._tell(say.failed(self.lines[0].send.source, failure))
            return
        with self._explained():
            self._say(say.Farewell())

    @property
    def bytes_moved(self) -> int:
        """Payload over all links, both ways."""
        return sum(line.send.bytes_moved + line.recv.bytes_moved for line in self.lines)

    def _pull(self, rows: list[Tensor] | None) -> None:
        """Weights straight to their places, those of rows by way of a tensor of their own."""
        for server, line in enumerate(self.lines):
            say.send(line.send, say.Pull(self.step + 1, None if rows is None else len(rows[server])))
            if rows is not None:
                line.send.send(rows[server].int())
        clocks = [self._reply(line, say.Weights).clocks for line in self.lines]
        self.clocks = tuple(min(of_replica) for of_replica in zip(*clocks, strict=True))
        for group in self._rounds():
            places = [_part(self.flat.whole, segment) for _, segment in group]
            comes = [self._by_rows(place, s, segment, rows) for place, (s, segment) in zip(places, group, strict=True)]
            exchange([], [(self.lines[s].recv, x) for x, (s, _) in zip(comes, group, strict=True)])
            for place, x, (s, segment) in zip(places, comes, group, strict=True):
                if segment.row and rows is not None:
                    segment.by_rows(place)[rows[s]] = x

    def _send(self, of: Callable[[int, ServerSegment], Tensor]) -> None:
        """The tensors of a message to all servers side by side, so that no link waits for another."""
        self._midway = True
        for group in self._rounds():
            exchange([(self.lines[server].send, of(server, segment)) for server, segment in group], [])
        self._midway = False

    def _push(self, rate: float, loss: float) -> None:
        gradients = [self.buckets.reduced(number) for number in range(len(self.buckets.layout.buckets))]
        self._say(say.Push(self.step, self._empty, rate, loss))
        if not self._empty:
            self._send(lambda server, segment: self._by_rows(_part(gradients, segment), server, segment, self._rows))

    def _apply_sum(self, rate: float, loss: float) -> float:
        """Let all servers take the sum of the step's gradients, made as short as it must be; its norm."""
        norm = math.sqrt(sum(self._reply(line, say.Square).total for line in self.lines))
        self._check(norm, loss, self._world)
        self._say(say.Apply(self.step, rate, self.limit / norm if self.limit < norm else 1.0))
        return norm

    def _check(self, norm: float, loss: float, others: Group) -> None:
        """End the run, servers and all, where the norm is no number."""
        try:
            self._norm.check(self.step, norm, loss, self.flat.blocks, others)
        except NonFiniteError as error:
            self.close(error)
            raise

    def _by_rows(self, x: Tensor, server: int, segment: ServerSegment, rows: list[Tensor] | None) -> Tensor:
        """What travels of a segment: the rows of the table, a copy, or all that there is."""
        return x if not segment.row or rows is None else segment.by_rows(x)[rows[server]]

    def _rounds(self) -> Iterator[list[tuple[int, ServerSegment]]]:
        """The segments of all servers side by side, in the order in which each server's travel."""
        for group in zip_longest(*self._segments):
            yield [(server, segment) for server, segment in enumerate(group) if segment is not None]

    def _rows_of(self, of_server: Sequence[ServerSegment], touched: Tensor) -> Tensor:
        """Which of these rows of the whole table a server holds, by their number in its segment."""
        for segment in of_server:
            if segment.row and self._table is not None:
                own = touched - first_row(segment, self.buckets.layout.buckets, self._table)
                return own[(own >= 0) & (own < segment.rows)]
        return touched[:0]

    def _say(self, message: say.Request) -> None:
        for line in self.lines:
            say.send(line.send, message)

    def _reply(self, line: ReplicaLinks, kind: type[R]) -> R:
        reply = say.receive_reply(line.recv)
        if isinstance(reply, say.Failed):
            self._reason = LinkClosed(reply.message, reply.hint)
            raise self._reason
        if not isinstance(reply, kind):
            raise FrameError(f"rank {line.recv.source} answered {reply}; {kind.__name__} was to come")
        return reply

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A link that fails may do so since its server has ended: then that one's reason is raised, and passed on."""
        try:
            yield
        except LinkError as error:
            words = (say.last_words(line.recv) for line in self.lines if isinstance(error, LinkClosed))
            reason = self._reason or next((one for one in words if one is not None), error)
            if not self._midway:
                self._tell(say.Failed(reason.message, reason.hint))
            if reason is error:
                raise
            raise reason from error

    def _tell(self, failed: say.Failed) -> None:
        """To all servers that still listen."""
        for line in self.lines:
            with contextlib.suppress(LinkError):
                say.send(line.send, failed)


def _part(runs: Sequence[Tensor], segment: ServerSegment) -> Tensor:
    return runs[segment.bucket][segment.start : segment.stop]
