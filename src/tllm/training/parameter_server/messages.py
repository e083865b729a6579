"""The messages between replicas and parameter servers. A message's tensors follow it on the same link, in order."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec

from tllm.comm.links.link import Link
from tllm.core.errors import UNREADABLE, LinkClosed, LinkError, TllmError, decoded

T = TypeVar("T")

LIMIT = 64 * 1024
"""Bytes of a message, its tensors left out."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all; the tag is the class's name."""


class Give(_Message, frozen=True):
    """The weights that a run begins with: every segment, then nothing is answered."""


class Pull(_Message, frozen=True):
    """Asks for the weights to compute step `step` with; the numbers of so many `rows` of the table follow."""

    step: int
    rows: int


class Push(_Message, frozen=True):
    """A replica's gradient of a step: the segments in order, of the table the rows that it pulled for the step.

    No tensor follows where it is `empty`: the replica had nothing to learn from. `loss` is what its tokens came to.
    """

    step: int
    empty: bool
    learning_rate: float
    loss: float


class Apply(_Message, frozen=True):
    """Synchronous only: the sum of this step's gradients is to be taken times `factor`."""

    step: int
    learning_rate: float
    factor: float


class Save(_Message, frozen=True):
    """This replica has taken `step` steps and waits to go on until the servers have saved."""

    step: int


class Farewell(_Message, frozen=True):
    """This replica is done."""


class Weights(_Message, frozen=True):
    """The segments follow, of the table the rows asked for. `clocks` are the steps of each replica that they hold."""

    clocks: tuple[int, ...]


class Square(_Message, frozen=True):
    """The sum of squares of the summed gradient of a step, of this server's segments; no number if any loss is none."""

    total: float


class Settled(_Message, frozen=True):
    """All replicas have come to the save; so many updates were taken."""

    updates: int


class Failed(_Message, frozen=True):
    """The sender ends, and why; it is passed on to everybody."""

    message: str
    hint: str


Request = Give | Pull | Push | Apply | Save | Farewell | Failed
Reply = Weights | Square | Settled | Failed
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_FAILURES = msgspec.msgpack.Decoder(Failed)

WORDS_SECONDS = 1.0
"""How long one whose link has failed may take to say why."""


def failed(rank: int, failure: BaseException) -> Failed:
    """What rank `rank` says when it ends because of this. A link's failure names its own two ranks."""
    if isinstance(failure, LinkError):
        return Failed(failure.message, failure.hint)
    if isinstance(failure, TllmError):
        return Failed(f"rank {rank} ended the run: {failure.message}", failure.hint)
    return Failed(f"rank {rank} ended the run: {failure!r}", f"see the log of rank {rank}")


def send(link: Link, message: Request | Reply) -> None:
    """Send a message; its tensors follow."""
    link.send_bytes(msgspec.msgpack.encode(message))


def receive_request(link: Link) -> Request:
    """The next message of a replica."""
    return _received(link, _REQUESTS)


def receive_reply(link: Link) -> Reply:
    """The next message of a server."""
    return _received(link, _REPLIES)


def last_words(link: Link) -> LinkClosed | None:
    """Why the other end ended, if it said so: to be asked when a link to or from it has failed."""
    with contextlib.suppress(LinkError):
        while link.wait(WORDS_SECONDS):
            with contextlib.suppress(*UNREADABLE):
                said = _FAILURES.decode(link.recv_bytes(LIMIT))
                return LinkClosed(said.message, said.hint)
    return None


def _received(link: Link, decoder: msgspec.msgpack.Decoder[T]) -> T:
    what = f"what rank {link.source} sent rank {link.target} is no message between replica and server"
    return decoded(link.recv_bytes(LIMIT), decoder, what)
