"""The links between one replica and the parameter servers, and why the run ends when one of them fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from tllm.comm.collectives.group_links import exchange_messages
from tllm.comm.links.link import Link
from tllm.core.errors import FrameError, LinkClosed, LinkError
from tllm.training.parameter_server import messages as say

R = TypeVar("R", say.Weights, say.Square, say.Settled)


class ReplicaLinks(NamedTuple):
    """The two links between a replica and a server, as one of them holds them."""

    send: Link
    recv: Link


def lines_of(to: Mapping[int, Link], back: Mapping[int, Link]) -> list[ReplicaLinks]:
    """By the rank at the other end: links `to` it and those `back` from it."""
    return [ReplicaLinks(to[rank], back[rank]) for rank in sorted(to)]


class ServerConnections:
    """A replica's links to all servers, by the server's number. Calls are made within `explained`."""

    def __init__(self, lines: Sequence[ReplicaLinks]) -> None:
        self.lines = lines
        self._reason: LinkClosed | None = None  # what a server said of its end
        self._midway = False  # between a message and the last of its tensors, where no other message may come

    def broadcast(self, message: say.Request) -> None:
        """Send a message to every server."""
        for line in self.lines:
            say.send(line.send, message)

    def replies(self, kind: type[R]) -> list[R]:
        """The next message of each server, which must be of this kind."""
        return [self._reply(line, kind) for line in self.lines]

    def send_tensors(self, rounds: Iterator[list[tuple[int, Tensor]]]) -> None:
        """The tensors of a message, as rounds of (server, tensor), one of each server: no link waits for another."""
        self._midway = True
        for tensors in rounds:
            exchange_messages([(self.lines[server].send, tensor) for server, tensor in tensors], [])
        self._midway = False

    def receive_into(self, targets: Sequence[tuple[int, Tensor]]) -> None:
        """One round of tensors from servers, straight to their places."""
        exchange_messages([], [(self.lines[server].recv, tensor) for server, tensor in targets])

    def tell_failure(self, failed: say.Failed) -> None:
        """Tell all servers that still listen why this replica ends."""
        for line in self.lines:
            with contextlib.suppress(LinkError):
                say.send(line.send, failed)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A link that fails may do so since its server has ended: then that one's reason is raised, and passed on."""
        try:
            yield
        except LinkError as error:
            words = (say.last_words(line.recv) for line in self.lines if isinstance(error, LinkClosed))
            reason = self._reason or next((said for said in words if said is not None), error)
            if not self._midway:
                self.tell_failure(say.Failed(reason.message, reason.hint))
            if reason is error:
                raise
            raise reason from error

    @property
    def bytes_moved(self) -> int:
        """Payload over all links, both ways."""
        return sum(line.send.bytes_moved + line.recv.bytes_moved for line in self.lines)

    def _reply(self, line: ReplicaLinks, kind: type[R]) -> R:
        reply = say.receive_reply(line.recv)
        if isinstance(reply, say.Failed):
            self._reason = LinkClosed(reply.message, reply.hint)
            raise self._reason
        if not isinstance(reply, kind):
            raise FrameError(f"rank {line.recv.source} answered {reply}; {kind.__name__} was to come")
        return reply
