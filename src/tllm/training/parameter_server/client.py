"""`ParameterServerClient`: a replica's side of the parameter-server architecture. It takes the place of an
`OptimizerUpdate`.

Ψ are the parameters, V D of them those of an input table that is not tied. A step that touches u different rows of the
table moves, for each replica, beside messages of some bytes,

    4 (Ψ - V D + u D) up in gradients (8 in float64)        4 u up in row numbers
    b (Ψ - V D + u D) down in weights of b bytes             u = V and no row numbers where the table is tied
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tllm.comm.collectives.group import Group, solo
from tllm.core.errors import NonFiniteError
from tllm.training.data.batch_tensors import Tokens
from tllm.training.gradients.gradient_buckets import GradientBuckets
from tllm.training.gradients.gradient_clipping import GradientNorm
from tllm.training.optim.flat_parameters import FlatParameters
from tllm.training.parameter_server import messages as say
from tllm.training.parameter_server.connections import ReplicaLinks, ServerConnections
from tllm.training.parameter_server.segments import ServerSegment, ServerSegments, part_of


class ParameterServerClient:
    """Pulls a step's weights from the servers at `lines` and pushes its gradient, held in `buckets` of solo groups.

    The parameters become views of flat tensors that are made here. `table` is the number of the parameter that travels
    by rows: a row that no token of a step uses is as old as when it was last pulled.
    `world` are all replicas, who tell each other what was not finite where the step is one for all.
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
        self.buckets = buckets
        self.synchronous = max_staleness == 0
        self.max_grad_norm = max_grad_norm or math.inf
        self.clocks: tuple[int, ...] = ()
        """The steps of each replica that are in the weights last pulled, of any server the fewest."""
        self.step = 0
        """The steps taken: to be set where a run goes on."""
        self.flat = FlatParameters(buckets.layout)
        self.servers = ServerConnections(lines)
        self._segments = ServerSegments(buckets.layout, table, len(lines))
        self._world = world or solo()
        self._norm = GradientNorm(buckets, lines[0].send.source)
        self._rows = [torch.empty(0, dtype=torch.int64)] * len(lines)  # of the table, that the step pulled
        self._empty = True  # whether the step has no token to learn from

    def scale(self, mine: int, everyones: int) -> float:
        """What losses are multiplied by before the backward pass, from this replica's predicted tokens and everyone's.

        Not synchronous, each replica learns from the mean over its own.
        """
        return 1 / max(everyones if self.synchronous else mine, 1)

    def give(self) -> None:
        """Servers begin with this replica's weights. One replica gives, before anyone's first step."""
        with self.servers.explained():
            self.servers.broadcast(say.Give())
            self._send(lambda server, segment: part_of(self.flat.whole, segment))

    def begin(self, microbatches: Sequence[Tokens]) -> None:
        """Pull the weights to compute the next step with; waits while this replica is too far ahead."""
        self._empty = not any(microbatch.predicted for microbatch in microbatches)
        ids = [microbatch.ids_T.cpu() for microbatch in microbatches]
        used = torch.unique(torch.cat(ids)) if ids else torch.empty(0, dtype=torch.int64)
        self._rows = self._segments.rows_by_server(used)
        with self.servers.explained():
            self._pull(self._rows)

    def apply(self, step: int, learning_rate: float, loss: float = 0.0) -> float:
        """Push the gradient of `step`, counted from 1; its norm over all replicas, or of this one if not synchronous.

        NonFiniteError, before any weight moves, where the norm or the `loss` is not finite.
        """
        assert step == self.step + 1, f"step {step} comes after {self.step}"
        self.step = step
        with self.servers.explained():
            if self.synchronous:
                self._push(learning_rate, loss)
                return self._apply_sum(learning_rate, loss)
            norm = self._norm.clip(self.max_grad_norm, loss)
            self._check(norm, loss, solo())
            self._push(learning_rate, loss)
            return norm

    def save(self) -> int:
        """Let the servers save after the present step; the updates so far. Every replica calls it at the same steps."""
        with self.servers.explained():
            self.servers.broadcast(say.Save(self.step))
            updates = {reply.updates for reply in self.servers.replies(say.Settled)}
        assert len(updates) == 1, f"servers have taken unlike numbers of updates at a save: {updates}"
        return updates.pop()

    def close(self, failure: BaseException | None = None) -> None:
        """Say farewell, or what this replica fails with."""
        if failure is not None:
            self.servers.tell_failure(say.failed(self.servers.lines[0].send.source, failure))
            return
        with self.servers.explained():
            self.servers.broadcast(say.Farewell())

    @property
    def bytes_moved(self) -> int:
        """Payload over all links, both ways."""
        return self.servers.bytes_moved

    def _pull(self, rows: list[Tensor]) -> None:
        """Receive weights straight into their places, those of rows by way of a tensor of their own."""
        for server, line in enumerate(self.servers.lines):
            say.send(line.send, say.Pull(self.step + 1, len(rows[server])))
            line.send.send(rows[server].int())
        clocks = [reply.clocks for reply in self.servers.replies(say.Weights)]
        self.clocks = tuple(min(of_replica) for of_replica in zip(*clocks, strict=True))
        for group in self._segments.rounds():
            places = [part_of(self.flat.whole, segment) for _, segment in group]
            received = [
                self._travelling(place, s, segment, rows) for place, (s, segment) in zip(places, group, strict=True)
            ]
            self.servers.receive_into([(s, x) for x, (s, _) in zip(received, group, strict=True)])
            for place, x, (s, segment) in zip(places, received, group, strict=True):
                if segment.row:
                    segment.by_rows(place)[rows[s]] = x

    def _send(self, of: Callable[[int, ServerSegment], Tensor]) -> None:
        """The tensors of a message: of each server's segments in turn what `of` gives."""
        self.servers.send_tensors(
            [(server, of(server, segment)) for server, segment in group] for group in self._segments.rounds()
        )

    def _push(self, learning_rate: float, loss: float) -> None:
        gradients = [self.buckets.reduced(number) for number in range(len(self.buckets.layout.buckets))]
        self.servers.broadcast(say.Push(self.step, self._empty, learning_rate, loss))
        if not self._empty:
            self._send(
                lambda server, segment: self._travelling(part_of(gradients, segment), server, segment, self._rows)
            )

    def _apply_sum(self, learning_rate: float, loss: float) -> float:
        """Let all servers apply the sum of the step's gradients, clipped over all of them; its norm before clipping."""
        norm = math.sqrt(sum(reply.total for reply in self.servers.replies(say.Square)))
        self._check(norm, loss, self._world)
        factor = self.max_grad_norm / norm if self.max_grad_norm < norm else 1.0
        self.servers.broadcast(say.Apply(self.step, learning_rate, factor))
        return norm

    def _check(self, norm: float, loss: float, others: Group) -> None:
        """End the run, servers and all, where the norm is not finite."""
        try:
            self._norm.check(self.step, norm, loss, self.flat.blocks, others)
        except NonFiniteError as error:
            self.close(error)
            raise

    def _travelling(self, x: Tensor, server: int, segment: ServerSegment, rows: list[Tensor]) -> Tensor:
        """What travels of a segment: a copy of the given rows of the table; of any other all that there is."""
        return segment.by_rows(x)[rows[server]] if segment.row else x
