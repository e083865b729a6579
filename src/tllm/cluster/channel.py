"""`Channel`: one end of a control wire. Length-prefixed msgpack messages, questions with answers, streams of answers.

    length u32 | kind u8 | number u32 | one message       big-endian; `length` counts the message only

`number` ties an answer to its question; each end numbers its own questions.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, SupportsIndex

import msgspec

from tllm.cluster.messages import MEMBER_BYTES, Message, Refused
from tllm.cluster.remote_errors import error_of, printable, refused
from tllm.cluster.tls import peer_name
from tllm.core.errors import UNREADABLE, ClusterError, TllmError

log = logging.getLogger("tllm.cluster")

ONE_WAY, QUESTION, ANSWER, ITEM, END, REFUSAL = range(6)
HEAD = struct.Struct(">IBI")
SEND_SECONDS = 30.0  # how long the other end may leave its socket unread
CLOSE_SECONDS = 1.0

Act = Callable[[Any], Awaitable[Message | None] | AsyncGenerator[Message, None]]

_encode = msgspec.msgpack.Encoder().encode


def one_way(message: Message) -> bytes:
    """A message that expects no answer, as it goes over the wire."""
    body = _encode(message)
    return HEAD.pack(len(body), ONE_WAY, 0) + body


class Frame(NamedTuple):
    """One message as it came, with what it is."""

    kind: int
    number: int
    message: Message


class Gone(ClusterError):
    """The other end of a channel went away: its process ended, or it closed."""


class TimedReader(asyncio.StreamReader):
    """A reader that knows when bytes last came, by time.monotonic(); a long message takes its time."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.heard = time.monotonic()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.heard = time.monotonic()
        super().feed_data(data)


class Channel:
    """`accepts` is the union of message types that the other end may send; anything else ends the channel.

    After `run` has begun, only it reads. All methods belong to one event loop. `refused` counts what came and is no
    message that the other end may send.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        accepts: Any,
        limit: int = MEMBER_BYTES,
    ) -> None:
        self.peer = peer
        self.limit = limit
        self.refused = 0
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(accepts)
        self._number = 0
        self._asked: dict[int, asyncio.Queue[Frame | None]] = {}
        self._over = False
        self._answering = 0
        self._told = ""  # of a question that was refused: one that is asked again and again is told once

    async def send(self, message: Message) -> None:
        """Send and expect no answer."""
        await self.write(ONE_WAY, 0, message)

    async def ask(self, message: Message, deadline: float) -> Any:
        """Send a question and return its answer. The error that it was refused with, ClusterError if none comes, or one
        that answers another question."""
        async with aclosing(self.stream(message, deadline)) as answers:
            async for answer in answers:
                return answer
        raise ClusterError(f"{self.peer} answered {_name(message)} with nothing")

    async def stream(self, message: Message, deadline: float) -> AsyncGenerator[Any, None]:
        """Send a question and yield its answers; each must come within the deadline."""
        self._number = (self._number + 1) % 2**32
        number, queue = self._number, asyncio.Queue[Frame | None]()
        self._asked[number] = queue
        if self._over:
            queue.put_nowait(None)
        try:
            await self.write(QUESTION, number, message)
            while True:
                try:
                    async with asyncio.timeout(deadline):
                        frame = await queue.get()
                except TimeoutError as error:
                    raise ClusterError(
                        f"{self.peer} did not answer {_name(message)} within {deadline:g} s",
                        f"see the log of {self.peer}",
                    ) from error
                if frame is None:
                    raise Gone(f"{self.peer} went away before it answered {_name(message)}")
                if frame.kind == END:
                    return
                if frame.kind == REFUSAL:
                    assert isinstance(frame.message, Refused)
                    raise error_of(frame.message)
                if _name(frame.message) not in message.answers:
                    raise self._refused(f"answered {_name(message)} with a {_name(frame.message)}")
                yield frame.message
                if frame.kind == ANSWER:
                    return
        finally:
            del self._asked[number]

    async def run(self, acts: Mapping[type, Act]) -> None:
        """Read until the other end closes. What an act raises ends the channel and comes out here.

        One-way messages are handled one after another; a question's act runs beside them and returns the answer,
        or is an async generator of answers. A TllmError raised by it is an answer too: no, and why.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while (frame := await self.receive()) is not None:
                    await self._take(frame, acts, tasks)
                raise _Closed
        except ExceptionGroup as group:
            failures = [error for error in group.exceptions if not isinstance(error, _Closed)]
            if failures:
                raise failures[0] from None
        finally:
            self._over = True
            for queue in self._asked.values():
                queue.put_nowait(None)

    async def receive(self) -> Frame | None:
        """The next message, None when the other end has gone. ClusterError for all that is not one of `accepts`."""
        head = b""
        try:
            head = await self._reader.readexactly(HEAD.size)
            length, kind, number = HEAD.unpack(head)
            if length > self.limit:
                raise self._refused(f"declares a message of {length} bytes, at most {self.limit} are taken")
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            if head or error.partial:
                raise ClusterError(f"{self.peer} stopped in the middle of a message") from error
            return None
        except ConnectionError:  # its process ended with some of what we sent unread
            return None
        except OSError as error:  # ssl's are such too
            raise ClusterError(f"the channel to {self.peer} broke: {error}") from error
        if kind > REFUSAL:
            raise self._refused(f"sent a message of kind {kind}, there is none above {REFUSAL}")
        if kind == END:
            return Frame(kind, number, Refused(""))
        try:
            return Frame(kind, number, self._decoder.decode(body))
        except UNREADABLE as error:
            raise self._refused(f"sent {length} bytes that are no message: {printable(str(error))}") from error

    async def receive_within(self, seconds: float) -> Frame | None:
        """As `receive`, for an end that does not `run` yet. ClusterError when nothing comes in time."""
        try:
            async with asyncio.timeout(seconds):
                return await self.receive()
        except TimeoutError as error:
            raise ClusterError(f"{self.peer} was silent for {seconds:g} s", f"see the log of {self.peer}") from error

    @property
    def heard(self) -> float:
        """When bytes last came, by time.monotonic()."""
        assert isinstance(self._reader, TimedReader)
        return self._reader.heard

    @property
    def is_answering(self) -> bool:
        """Whether the other end waits for an answer to what it has asked."""
        return self._answering > 0

    def peer_name(self) -> str | None:
        """The name on the other end's certificate; None when it showed none."""
        return peer_name(self._writer.get_extra_info("ssl_object"))

    def promote(self, peer: str, accepts: Any, limit: int) -> None:
        """The other end has shown who it is: take from it what a member may send."""
        self.peer, self.limit = peer, limit
        self._decoder = msgspec.msgpack.Decoder(accepts)

    async def write(self, kind: int, number: int, message: Message | None) -> None:
        """Send one message of any kind. Gone when nobody is there to take it, ClusterError when it is not taken."""
        await self._push(self._framed(kind, number, message))

    def post(self, message: Message) -> None:
        """Send without waiting; nothing happens when the channel is closed."""
        self.post_frame(one_way(message))

    def post_frame(self, frame: bytes) -> None:
        """As `post`, of a message that was framed for several channels at once."""
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def close(self) -> None:
        """Let what is written leave, then close; never waits for longer than a second."""
        # Python 3.11.2 (Debian 12) lets go of a TLS transport that is closed twice, and then fails to abort it.
        if not self._writer.is_closing():
            self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    def _framed(self, kind: int, number: int, message: Message | None) -> bytes:
        """A message as it goes over the wire. ClusterError for one that is too large."""
        body = b"" if message is None else _encode(message)
        if len(body) > self.limit:
            raise ClusterError(f"a {_name(message)} of {len(body)} bytes is too large for {self.peer}: {self.limit}")
        return HEAD.pack(len(body), kind, number) + body

    async def _push(self, frame: bytes) -> None:
        if self._writer.is_closing():
            raise Gone(f"{self.peer} went away")
        self._writer.write(frame)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._writer.drain()
        except TimeoutError as error:
            self.abort()
            raise ClusterError(f"{self.peer} took nothing from its channel for {SEND_SECONDS:g} s") from error
        except ConnectionError as error:
            raise Gone(f"{self.peer} went away") from error
        except OSError as error:
            raise ClusterError(f"the channel to {self.peer} broke: {error}") from error

    async def _take(self, frame: Frame, acts: Mapping[type, Act], tasks: asyncio.TaskGroup) -> None:
        if frame.kind in (ANSWER, ITEM, END, REFUSAL):
            if frame.kind == REFUSAL and not isinstance(frame.message, Refused):
                raise self._refused(f"refuses with a {_name(frame.message)}")
            queue = self._asked.get(frame.number)
            if queue is not None:  # else it came after its deadline
                queue.put_nowait(frame)
            return
        act = acts.get(type(frame.message))
        if act is None:
            raise self._refused(f"sent a {_name(frame.message)}, which has no place here")
        if frame.kind == QUESTION:
            self._answering += 1
            tasks.create_task(self._answer(frame.number, act, frame.message)).add_done_callback(self._answered)
            return
        result = act(frame.message)
        assert isinstance(result, Awaitable), "a stream needs a question"
        await result

    def _refused(self, what: str) -> ClusterError:
        self.refused += 1
        return ClusterError(f"{self.peer} {what}")

    def _answered(self, _: asyncio.Task[None]) -> None:
        self._answering -= 1

    async def _answer(self, number: int, act: Act, message: Message) -> None:
        result = act(message)
        try:
            if isinstance(result, AsyncGenerator):
                async with aclosing(result):  # also when the other end has gone and takes no item
                    async for item in result:
                        await self.write(ITEM, number, item)
                await self.write(END, number, None)
                return
            answer = await result
            assert answer is not None, "a question needs an answer"
            frame = self._framed(ANSWER, number, answer)
        except TllmError as error:  # an answer that is too large, too
            told = f"{self.peer} asked for {_name(message)}: {error.message}"
            log.log(logging.DEBUG if told == self._told else logging.INFO, "%s", told)
            self._told = told
            frame = self._framed(REFUSAL, number, refused(error))
        await self._push(frame)


class _Closed(Exception):
    """The other end has closed: ends the tasks that still answer it."""


def _name(message: Message | None) -> str:
    return type(message).__name__
