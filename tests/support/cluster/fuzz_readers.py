"""What reads bytes of others, each as a function of any bytes: it takes them for what they are, or refuses them as it
should, and AssertionError tells that it did neither. `corpora` are good ones to begin with; `twisted` damages them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from tests.unit.cluster.kits import facts
from tllm.cluster import messages, weight_messages
from tllm.cluster.channel import ANSWER, END, HEAD, ITEM, ONE_WAY, QUESTION, REFUSAL, Channel
from tllm.cluster.consensus.raft_messages import (
    Appended,
    AppendEntries,
    CoordinatorFound,
    FindCoordinator,
    FromReplica,
    InstallSnapshot,
    LogEntry,
    LogSnapshot,
    RequestVote,
    ToReplica,
    Vote,
)
from tllm.cluster.consensus.replicated_state import (
    ClusterFounded,
    CoordinatorBegan,
    EpochBegan,
    MembersChanged,
    ReplicatedMachine,
    ReplyGrown,
    ReplyOpened,
    SigningKey,
    encoded,
)
from tllm.cluster.join_token import JoinToken
from tllm.cluster.messages import GUEST_BYTES, PROTOCOL, FromFetcher, FromGuest, FromNode, ToFetcher, ToGuest, ToNode
from tllm.comm.links import frame
from tllm.comm.links.handshake import LINK_HELLOS, LINK_WELCOMES, LinkHello, LinkWelcome, receive_message, send_message
from tllm.comm.links.tcp_link import TcpLink
from tllm.core.errors import AuthError, ClusterError, FrameError, LinkClosed, LinkError
from tllm.engine.pages import page_messages
from tllm.engine.schedule import batch
from tllm.engine.schedule.limits import Limits, check_batch
from tllm.hub.repository import HubFile, Repository
from tllm.node.roles.rank_addresses import pack_addresses
from tllm.spec.plan import Plan
from tllm.spec.request import Output, Request, SamplingParams, StreamRecord
from tllm.training.questions.run_connection import RUN_HELLOS, RunHello

SHAPE, DTYPE, EPOCH, LIMIT = (3, 5), torch.float32, 7, 256
SECONDS = 20.0
LIMITS = Limits(num_pages=16, vocab_size=101, max_model_len=64, page_size=4, max_num_seqs=4, max_num_batched_tokens=32)
TENSOR = frame.seal(
    frame.tensor_prefix(SHAPE, DTYPE, EPOCH) + frame.pack_sequence(0), torch.arange(15.0).numpy().tobytes()
)
BYTES = frame.seal(frame.bytes_prefix(5, EPOCH) + frame.pack_sequence(0), b"hello")
GREETING = LinkHello("cluster", 7, 0, 1, "dp")

Target = Callable[[bytes], None]


def read_header(data: bytes) -> None:
    raw = data[: frame.HEADER_SIZE].ljust(frame.HEADER_SIZE, b"\0")
    assert frame.describe(raw)
    try:
        header = frame.parse(raw)
    except FrameError:
        return
    size = frame.math.prod(header.shape) * header.dtype.itemsize if header.dtype else header.length
    assert header.length == size and len(header.shape) <= frame.MAX_DIMS


def receive_tensor(data: bytes) -> None:
    """Nothing but the one frame that the plan has here is taken; anything else ends the link."""
    with _target(data) as link:
        taken = _taken(link, lambda: link.recv(SHAPE, DTYPE))
    assert taken is None or data.startswith(frame.seal(TENSOR[: frame.CRC_AT], taken.numpy().tobytes()))


def receive_bytes(data: bytes) -> None:
    with _target(data) as link:
        taken = _taken(link, lambda: link.recv_bytes(LIMIT))
    if taken is not None:
        assert len(taken) <= LIMIT
        head = frame.bytes_prefix(len(taken), EPOCH) + frame.pack_sequence(0)
        assert data.startswith(frame.seal(head, taken))


def hear_hello(data: bytes) -> None:
    _hear(data, LINK_HELLOS)


def hear_run(data: bytes) -> None:
    _hear(data, RUN_HELLOS)


def hear_welcome(data: bytes) -> None:
    _hear(data, LINK_WELCOMES)


def from_guest(data: bytes) -> None:
    _channel(data, FromGuest)


def to_guest(data: bytes) -> None:
    _channel(data, ToGuest)


def from_node(data: bytes) -> None:
    _channel(data, FromNode)


def to_node(data: bytes) -> None:
    _channel(data, ToNode)


def from_borrower(data: bytes) -> None:
    _channel(data, FromFetcher)


def to_borrower(data: bytes) -> None:
    _channel(data, ToFetcher)


def to_replica(data: bytes) -> None:
    _channel(data, ToReplica)


def from_replica(data: bytes) -> None:
    _channel(data, FromReplica)


def replicated_entry(data: bytes) -> None:
    """An entry changes the state to one that can be written down and read; what is none is refused."""
    machine, other = ReplicatedMachine(), ReplicatedMachine()
    try:
        machine.apply(data)
    except ClusterError:
        assert machine.state == other.state
        return
    other.restore(machine.snapshot())
    assert other.state == machine.state


def ring_message(data: bytes) -> None:
    """A batch that passes the checks is one that this rank can compute."""
    try:
        message = batch.decode(data)
        if isinstance(message, batch.Batch):
            check_batch(message, LIMITS)
    except FrameError:
        return
    if isinstance(message, batch.Batch):
        assert len(message.token_ids) == sum(entry.count for entry in message.entries) <= LIMITS.max_num_batched_tokens
        assert all(token < LIMITS.vocab_size for token in message.token_ids)


def join_token(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    try:
        token = JoinToken.parse(text)
    except AuthError as refusal:
        said = str(refusal)
    else:
        said = repr(token)
        assert JoinToken.parse(str(token)) == token
    assert len(text) < 20 or text[:40] not in said, "a token is a secret"


class _target:
    """The receiving end of a link whose source has said `data` and gone."""

    def __init__(self, data: bytes) -> None:
        self._source, here = _pair(data)
        self._link = TcpLink(here, 0, 1, EPOCH, SECONDS)

    def __enter__(self) -> TcpLink:
        return self._link

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._source.close()


def _taken(link: TcpLink, receive: Callable[[], Any]) -> Any:
    """What was received, or None if it was refused, after which the link must be closed."""
    start = time.monotonic()
    try:
        return receive()
    except LinkError:
        assert time.monotonic() - start < SECONDS, "it waited for what cannot come"
    try:
        receive()
    except LinkClosed:
        return None
    raise AssertionError("a link that has refused a frame is still open")


def _hear(data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> None:
    source, here = _pair(data)
    try:
        assert isinstance(receive_message(here, decoder, time.monotonic() + SECONDS), decoder.type)
    except (FrameError, ConnectionError):  # a TimeoutError would say that it waited for what cannot come
        return
    finally:
        source.close()
        here.close()


def _pair(data: bytes) -> tuple[socket.socket, socket.socket]:
    """A connection on which one end has said `data` and nothing more will come."""
    source, here = socket.socketpair()
    source.setblocking(False)
    sent = 0
    while sent < len(data) < 100_000:  # far less than what such a connection holds
        sent += source.send(data[sent:])
    source.shutdown(socket.SHUT_WR)
    return source, here


def _channel(data: bytes, accepts: Any) -> None:
    """Every message of the bytes is read, up to the first that is none; that one is counted."""
    loop = _loop()

    async def read() -> None:
        reader = asyncio.StreamReader(loop=loop)
        reader.feed_data(data)
        reader.feed_eof()
        channel = Channel(reader, None, "somebody", accepts, GUEST_BYTES)  # type: ignore[arg-type]
        place, wrong = 0, ""
        try:
            while (found := await channel.receive()) is not None:
                place += HEAD.size + HEAD.unpack_from(data, place)[0]
                assert isinstance(found.message, accepts | messages.Refused)
        except ClusterError as refusal:
            wrong = refusal.message
        assert bool(wrong) == (place < len(data)), "all is read, or it is said why not"
        assert bool(channel.refused) == (bool(wrong) and "in the middle of a message" not in wrong)

    loop.run_until_complete(read())


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One for all calls: making one takes longer than what is tried."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def close_loops() -> None:
    while _loops:
        _loops.pop().close()


def _said(message: Any) -> bytes:
    """What `say` writes."""
    here, there = socket.socketpair()
    with here, there:
        send_message(here, message, time.monotonic() + SECONDS)
        return there.recv(1 << 16)


def _messages(*found: messages.Message, kind: int = ONE_WAY) -> bytes:
    bodies = [msgspec.msgpack.encode(message) for message in found]
    return b"".join(HEAD.pack(len(body), kind, number) + body for number, body in enumerate(bodies))


def _raft_messages() -> tuple[messages.Message, ...]:
    here, there = (messages.ReplicaPlace(f"{node}/{number:016x}", "10.0.0.1", 7) for number, node in enumerate("ab"))
    entries = (LogEntry(1, b"content"), LogEntry(2, b"", (here, there)))
    return (
        RequestVote(2, here, 3, 1, True),
        Vote(2, there, True, False),
        AppendEntries(2, here, 1.5, 3, 1, entries, 3),
        InstallSnapshot(2, here, 1.5, LogSnapshot(3, 1, (here,), b"data")),
        Appended(2, there, 1.5, True, 5),
    )


def _examples() -> dict[Target, list[bytes]]:
    request = Request(id="r", prompt_ids=(1, 2, 300), params=SamplingParams(seed=7, stop_token_ids=(3,)))
    assign = messages.Assign(
        cluster="c",
        epoch=1,
        rank=0,
        plan=Plan.parse("pp=2,tp=1+2", 4),
        places=(messages.RankAddress("a", "10.0.0.1", 1), messages.RankAddress("b", "10.0.0.2", 2)),
        config="{}",
        settings=messages.Settings.__args__[0](  # type: ignore[attr-defined]
            dtype="float32",
            num_pages=1,
            page_size=1,
            max_model_len=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
            threads=0,
            link_seconds=1.0,
        ),
        folder="m",
        files=(messages.ModelFileFacts("f", 1, b"d"),),
    )
    sampled = batch.Sampling(temperature=0.5, seed=3, history=(1, 2), logit_bias={4: 0.5})
    pages = page_messages.PageChain((bytes(32), b"n" * 32), 5, bytes(32), bytes(2 * 64), bytes(32))
    entry = batch.BatchEntry(1, 0, 3, 3, ((0, 1), (2, 1)), sampled, (1, 2), 2)
    frames = [TENSOR, BYTES, TENSOR + BYTES]
    return {
        read_header: frames,
        receive_tensor: frames,
        receive_bytes: frames,
        hear_hello: [_said(GREETING)],
        hear_run: [_said(RunHello("session", "questions", "run"))],
        hear_welcome: [_said(LinkWelcome("no", True)), _said(LinkWelcome())],
        from_guest: [_messages(messages.Hello(PROTOCOL), kind=QUESTION)],
        to_guest: [_messages(messages.Welcome(PROTOCOL, b"pem"), kind=ANSWER)],
        from_node: [
            _messages(messages.Attach(PROTOCOL, facts()), kind=QUESTION),
            _messages(messages.Heartbeat(links={"0>1": 3}, stats={"batches": 1.0}), messages.Failure(message="m")),
            _messages(messages.Progress(1, 2), messages.Prepared(rank=1), kind=ITEM),
            _messages(messages.Outputs(1, (Output(request_id="r", token_ids=(1, 2)),))),
            _messages(messages.Refused("no", "hint", "plan"), kind=REFUSAL) + HEAD.pack(0, END, 3),
        ],
        to_node: [
            _messages(assign, kind=QUESTION),
            _messages(messages.RankAddresses(1, 0, pack_addresses((), assign.places))),
            _messages(messages.Submit(request), messages.Cancel("r"), messages.Shutdown("why")),
            _messages(
                weight_messages.Bytes(b"data", b"digest"),
                weight_messages.ChunkFound(b"digest", "node-a", "host", 1),
                kind=ANSWER,
            ),
        ],
        from_borrower: [
            _messages(weight_messages.OpenChunkConnection(), kind=QUESTION),
            _messages(weight_messages.GetChunk("f", 1, b"digest"), kind=QUESTION),
            _messages(
                weight_messages.ListHubChunks(Repository("org/name", "a" * 40, (HubFile("f", 1, "b" * 64),)), "f"),
                kind=QUESTION,
            ),
            _messages(weight_messages.FindPages("m", (bytes(32),)), weight_messages.ListPages("m"), kind=QUESTION),
            _messages(weight_messages.GetPage("m", bytes(32), (0, 4, 0, 2, 0)), kind=QUESTION),
        ],
        to_borrower: [
            _messages(weight_messages.ChunkBytes(b"bytes"), weight_messages.ChunkBytes(b"more"), kind=ITEM),
            _messages(weight_messages.PagesFound((((0, 4, 0, 2, 0),), ())), kind=ANSWER),
            _messages(weight_messages.PageNames((bytes(32),)), kind=ITEM),
        ],
        to_replica: [
            _messages(*_raft_messages()),
            _messages(FindCoordinator(), kind=QUESTION),
        ],
        from_replica: [_messages(CoordinatorFound(3, "10.0.0.1", 7000), kind=ANSWER)],
        replicated_entry: [
            encoded(ClusterFounded("c", SigningKey(b"pem", b"key"))),
            encoded(CoordinatorBegan(1, "10.0.0.1", 7000)),
            encoded(EpochBegan(1, Plan.parse("pp=2,tp=1+2", 4), ("a", "b", "c"))),
            encoded(MembersChanged(("a", "b"), ("b",))),
            encoded(ReplyOpened(StreamRecord(id="a", body=b"{}", owner="", created=1), (request,))),
            encoded(ReplyGrown("a", 0, (Output(request_id="r", token_ids=(1, 2)),), is_over=True)),
        ],
        ring_message: [
            batch.encode(batch.Batch(1, (entry,), (1, 2, 3))),
            batch.encode(batch.Results(number=1, token_ids=(5,))),
            batch.encode(batch.RingHeartbeat()),
            batch.encode(page_messages.SavePages(pages, ((3, 2),))),
            batch.encode(page_messages.FetchPages(7, pages)),
            batch.encode(page_messages.TakePages(7, ((3, 1), (9, 1)), 2)),
        ],
        join_token: [str(JoinToken(bytes(range(32)), bytes(32))).encode()],
    }


corpora: dict[Target, list[bytes]] = _examples()


def twisted(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A good one after a few changes: bits, bytes, numbers, places, lengths; or what was never any good."""
    if dice.random() < 0.02:
        return dice.randbytes(dice.randrange(200))
    data = bytearray(dice.choice(corpus))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        _twist(dice, data, corpus)
    return bytes(data)


def _twist(dice: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = dice.randrange(len(data) + 1)
    size = dice.choice((1, 1, 2, 4, 8, 16))
    match dice.randrange(6):
        case 0 if data:
            data[at % len(data)] ^= 1 << dice.randrange(8)
        case 1:
            data[at : at + size] = dice.randbytes(size)
        case 2:
            number = dice.choice((0, 1, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, dice.choice(("little", "big")))
        case 3:
            del data[at : at + dice.choice((1, size, len(data)))]
        case 4:
            data[at:at] = data[dice.randrange(len(data) + 1) :][: dice.choice((size, 64))]
        case _:
            other = dice.choice(corpus)
            cut = dice.randrange(len(other) + 1)
            data[at:] = other[cut:]
