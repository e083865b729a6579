"""Links and groups over loopback TCP, plain and TLS: sums, long frames both ways, and ranks that die, hang or lie."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.comm.ranks import Contexts, join_group, make_contexts, run_ranks, tcp_groups, transport_links
from tests.support.properties import examples
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.group_links import exchange_messages
from tllm.comm.links import frame
from tllm.comm.links.connect import LinkHello, Listener, connect
from tllm.comm.links.link import Link
from tllm.comm.links.send_buffer import DEPTH
from tllm.comm.links.tcp_link import TcpLink
from tllm.core.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from tllm.recipes.bench.processes import free_row
from tllm.spec.plan import Wire

MB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return make_contexts(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def contexts(request: pytest.FixtureRequest, tls: Contexts) -> Contexts | None:
    return tls if request.param == "tls" else None


def close_both(pair: tuple[Link, Link]) -> None:
    for link in pair:
        link.set_deadline(30)
        link.close()


@pytest.fixture
def pair(contexts: Contexts | None) -> Iterator[tuple[TcpLink, TcpLink]]:
    """Both ends of the link from rank 3 to rank 8, epoch 5."""
    both = tcp_pair(contexts)
    yield both
    close_both(both)


@pytest.fixture(params=["plain", "tls", "grpc", "torch"])
def any_pair(request: pytest.FixtureRequest, tls: Contexts) -> Iterator[tuple[Link, Link]]:
    """The same ends, of each kind that a link between processes may be."""
    if request.param in ("plain", "tls"):
        both: tuple[Link, Link] = tcp_pair(tls if request.param == "tls" else None)
        yield both
        close_both(both)
        return
    if request.param == "grpc":
        pytest.importorskip("grpc")
    sources, targets = transport_links(request.param, (3, 8), epoch=5)
    yield sources[Wire(3, 8)], targets[Wire(3, 8)]
    for links in (sources, targets):  # after what a test did to them, an end may have to be torn off
        for link in links.values():
            link.interrupt()
            with contextlib.suppress(LinkError):
                link.close()


def tcp_pair(contexts: Contexts | None) -> tuple[TcpLink, TcpLink]:
    listener = Listener("127.0.0.1", 0, contexts[0] if contexts else None)
    listener.expect("test", 5, [Wire(3, 8)])
    source = connect(listener.address, contexts[1] if contexts else None, LinkHello("test", 5, 3, 8))
    target = listener.accept(Wire(3, 8), 30)
    listener.close()
    return source, target


def close_all(groups: list[Group]) -> None:
    for group in groups:
        group.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_short_and_long_gives_the_same_bits(size: int, contexts: Contexts | None) -> None:
    groups = tcp_groups(size, contexts)
    for numel in (0, 1, 2048, 20_000, 500_001):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(numel)
            given = [torch.randn(numel).to(dtype) for _ in range(size)]

            def work(group: Group, given: list[torch.Tensor] = given) -> torch.Tensor:
                x = given[group.rank].clone()
                for _ in range(3):
                    x.copy_(given[group.rank])
                    group.all_reduce(x)
                return x

            results = run_ranks(groups, work)
            exact = torch.stack([x.double() for x in given]).sum(0)
            tolerance = torch.finfo(dtype).eps * 2 * size
            torch.testing.assert_close(results[0].double(), exact, rtol=tolerance, atol=tolerance)
            assert all(torch.equal(result, results[0]) for result in results)
    close_all(groups)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_a_sum_short_and_long_have_the_bits_of_the_sum(size: int, contexts: Contexts | None) -> None:
    groups = tcp_groups(size, contexts)
    for rows in (1, size, 1000, 100_003):
        counts = [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]
        given = torch.randn(size, rows, 5, generator=torch.Generator().manual_seed(rows))

        def work(
            group: Group, given: torch.Tensor = given, counts: list[int] = counts
        ) -> tuple[torch.Tensor, torch.Tensor]:
            part = group.reduce_scatter(given[group.rank], counts)
            return part, group.all_reduce(given[group.rank].clone())

        results = run_ranks(groups, work)
        assert torch.equal(torch.cat([part for part, _ in results]), results[0][1])
    close_all(groups)


def test_each_rank_exchanges_with_some_what_they_agree_on(contexts: Contexts | None) -> None:
    """Rank 0 with both others, long and short; ranks 1 and 2 have nothing for each other."""
    groups = tcp_groups(3, contexts)
    sizes = {(0, 1): 3 * MB, (1, 0): 5 * MB, (0, 2): 1, (2, 0): 7}

    def work(group: Group) -> None:
        here = group.rank
        sends = {b: torch.full((n,), 10 * a + b, dtype=torch.uint8) for (a, b), n in sizes.items() if a == here}
        recvs = {a: torch.zeros(n, dtype=torch.uint8) for (a, b), n in sizes.items() if b == here}
        group.exchange(sends, recvs)
        for peer, got in recvs.items():
            assert (got == 10 * peer + here).all()

    run_ranks(groups, work)
    close_all(groups)


def test_long_sends_both_ways_do_not_lock_up(contexts: Contexts | None) -> None:
    groups = tcp_groups(2, contexts)

    def work(group: Group) -> None:
        other = 1 - group.rank
        x = torch.full((8 * MB,), group.rank + 1, dtype=torch.uint8)
        for _ in range(3):
            group.send[other].send(x)
        x.zero_()  # the sender's to overwrite
        for _ in range(3):
            got = group.recv[other].recv((8 * MB,), torch.uint8)
            assert torch.equal(got, torch.full_like(got, other + 1))

    run_ranks(groups, work)
    close_all(groups)


def test_short_and_long_frames_keep_their_order(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    lengths = [1, 300_000, 2, 3, 900_000, 0, 70_000, 5]
    for length in lengths:
        source.send(torch.full((length,), length, dtype=torch.int32))
    for length in lengths:
        assert torch.equal(target.recv((length,), torch.int32), torch.full((length,), length, dtype=torch.int32))
    assert source.bytes_moved == target.bytes_moved == 4 * sum(lengths)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_arrives(shape: tuple[int, ...], any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    for dtype in frame.DTYPES:
        x = (torch.rand(shape) * 2).to(dtype)
        source.send(x)
        assert torch.equal(target.recv(shape, dtype), x)
        out = torch.empty(shape, dtype=dtype)
        source.send(x)
        assert target.recv(shape, dtype, out) is out
        assert torch.equal(out, x)


def test_strided_tensors_are_sent_and_filled(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    source.send(torch.arange(12).view(3, 4).t())
    base = torch.zeros(4, 6, dtype=torch.int64)
    target.recv((4, 3), torch.int64, base[:, ::2])
    assert torch.equal(base[:, ::2], torch.arange(12).view(3, 4).t())
    assert not base[:, 1::2].any()


def test_bytes_arrive_and_a_longer_run_is_refused(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    source.send_bytes(b"")
    source.send_bytes(b"x" * 200_000)
    source.send_bytes(b"12345")
    assert target.recv_bytes(0) == b""
    assert target.recv_bytes(200_000) == b"x" * 200_000
    with pytest.raises(FrameError, match=r"rank 3 sent rank 8 5 bytes.*up to 4 bytes"):
        target.recv_bytes(4)


@pytest.mark.parametrize(
    ("shape", "dtype", "epoch", "sequence", "flip", "words"),
    [
        ((4,), torch.float32, 5, 0, 0, r"float32 \(4,\)"),
        ((2**31, 2**20), torch.float32, 5, 0, 0, r"float32 \(2147483648, 1048576\)"),
        ((3,), torch.int32, 5, 0, 0, r"int32 \(3,\)"),
        ((3,), torch.float32, 4, 0, 0, "epoch 4"),
        ((3,), torch.float32, 5, 1, 0, "frame 1"),
        ((3,), torch.float32, 5, 0, 1, "checksum"),
    ],
    ids=["shape", "huge", "dtype", "epoch", "sequence", "checksum"],
)
def test_a_frame_that_is_not_the_planned_one_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, epoch: int, sequence: int, flip: int, words: str
) -> None:
    ours, theirs = socket.socketpair()
    target = TcpLink(ours, 3, 8, epoch=5, deadline=5)
    whole = bytearray(frame.seal(frame.tensor_prefix(shape, dtype, epoch) + frame.pack_sequence(sequence), b"\1" * 12))
    whole[-1] ^= flip
    theirs.sendall(whole)
    plan = r"the plan says float32 \(3,\), epoch 5, frame 0"
    with pytest.raises(FrameError, match=rf"rank 3 sent rank 8 .*{words}.*; {plan}"):
        target.recv((3,), torch.float32)
    with contextlib.suppress(ConnectionResetError):
        assert theirs.recv(1) == b"", "the link is closed"
    with pytest.raises(LinkClosed):
        target.recv((3,), torch.float32)
    theirs.close()


@settings(max_examples=examples(150))
@given(st.data())
def test_no_bytes_whatever_get_past_the_checks(data: st.DataObject) -> None:
    good = frame.seal(frame.tensor_prefix((3,), torch.float32, 5) + frame.pack_sequence(0), b"\1" * 12)
    raw = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    raw = data.draw(st.binary(max_size=200)) if data.draw(st.integers(0, 3)) == 0 else raw
    as_bytes = data.draw(st.booleans())
    ours, theirs = socket.socketpair()
    target = TcpLink(ours, 3, 8, epoch=5, deadline=5)
    theirs.sendall(raw)
    theirs.close()
    if raw.startswith(good) and not as_bytes:
        target.recv((3,), torch.float32)
    elif as_bytes:
        with pytest.raises(LinkError, match=r"rank 3 .*rank 8"):
            target.recv_bytes(16)
    else:
        with pytest.raises(LinkError, match=r"rank 3 .*rank 8"):
            target.recv((3,), torch.float32)
    target.close()


def test_a_peer_that_trickles_is_late_all_the_same() -> None:
    """A byte each tenth of a second, for as long as it is let: the whole tensor would take an hour."""
    ours, theirs = socket.socketpair()
    target = TcpLink(ours, 3, 8, epoch=5, deadline=0.5)
    done = threading.Event()

    def trickle() -> None:
        shape = (36_000,)
        for byte in frame.seal(frame.tensor_prefix(shape, torch.uint8, 5) + frame.pack_sequence(0), bytes(shape[0])):
            if done.wait(0.1):
                return
            with contextlib.suppress(BrokenPipeError):  # whoever gave up has closed
                theirs.sendall(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(LinkTimeout, match=r"rank 3 sent nothing to rank 8 within 0\.5 s"):
        target.recv((36_000,), torch.uint8)
    done.set()
    thread.join()
    theirs.close()


def test_a_target_that_takes_nothing_is_named(any_pair: tuple[Link, Link]) -> None:
    source, _ = any_pair
    source.set_deadline(0.3)
    x = torch.zeros(8 * MB, dtype=torch.uint8)

    def send_too_many() -> None:
        for _ in range(DEPTH + 3):
            source.send(x)

    with pytest.raises(LinkTimeout, match=r"rank 8 did not take what rank 3 sent it within 0\.3 s"):
        send_too_many()
    with pytest.raises(LinkError):
        source.send(torch.zeros(1))


def test_a_source_that_sends_nothing_is_named(any_pair: tuple[Link, Link]) -> None:
    _, target = any_pair
    target.set_deadline(0.2)
    with pytest.raises(LinkTimeout, match=r"rank 3 sent nothing to rank 8 within 0\.2 s, which waited for float32"):
        target.recv((3,), torch.float32)
    with pytest.raises(LinkClosed):
        target.recv((3,), torch.float32)


def test_an_unbounded_link_lets_its_sender_go_on_whatever_waits(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    source.unbounded()
    for number in range(DEPTH + 20):
        source.send(torch.full((MB,), number, dtype=torch.uint8))  # nobody receives: any wait would last for 30 s
    for number in range(DEPTH + 20):
        assert torch.equal(target.recv((MB,), torch.uint8), torch.full((MB,), number, dtype=torch.uint8))


def receive(link: Link) -> None:
    link.recv((3,), torch.float32)


def send_for_ever(link: Link) -> None:
    while True:
        link.send(torch.zeros(8 * MB, dtype=torch.uint8))


def exchange_for_ever(link: Link) -> None:
    while True:
        exchange_messages([(link, torch.zeros(8 * MB, dtype=torch.uint8))], [])


@pytest.mark.parametrize("work", [receive, send_for_ever, exchange_for_ever])
def test_an_interrupt_wakes_both_ends_whatever_their_deadline(
    work: Callable[[Link], None], any_pair: tuple[Link, Link]
) -> None:
    source, target = any_pair
    here = target if work is receive else source
    for link in any_pair:
        link.set_deadline(600)
    timer = threading.Timer(0.3, here.interrupt)
    timer.start()
    start = time.monotonic()
    with pytest.raises(LinkClosed, match=r"from rank 3 to rank 8 was closed on this side|rank 8 went away"):
        work(here)
    with pytest.raises(LinkError):
        send_for_ever(source) if work is receive else receive(target)
    assert time.monotonic() - start < 60
    timer.join()
    with contextlib.suppress(LinkError):
        source.close()


def test_what_fails_in_the_thread_is_raised_at_the_next_send(pair: tuple[TcpLink, TcpLink]) -> None:
    source, target = pair
    source.send(torch.zeros(32 * MB, dtype=torch.uint8))
    target.close()
    source._sender._thread.join(30)  # type: ignore[union-attr]
    with pytest.raises(LinkClosed, match="rank 8 went away while rank 3 sent to it"):
        source.send(torch.zeros(1))
    source.close()  # told already


def test_what_fails_in_the_thread_is_raised_at_close(pair: tuple[TcpLink, TcpLink]) -> None:
    source, target = pair
    source.send(torch.zeros(32 * MB, dtype=torch.uint8))
    target.close()
    with pytest.raises(LinkClosed, match="rank 8 went away while rank 3 sent to it"):
        source.close()


def test_close_ends_a_receive_that_waits(any_pair: tuple[Link, Link]) -> None:
    _, target = any_pair
    timer = threading.Timer(0.2, target.close)
    timer.start()
    start = time.monotonic()
    with pytest.raises(LinkClosed, match="from rank 3 to rank 8 was closed on this side"):
        target.recv((3,), torch.float32)
    assert time.monotonic() - start < 25, "the deadline is 30 s"
    timer.join()


def test_what_was_sent_before_close_still_arrives(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    source.send(torch.ones(100_000))
    source.send_bytes(b"last")
    closing = threading.Thread(target=source.close)
    closing.start()
    assert target.recv((100_000,), torch.float32).sum() == 100_000
    assert target.recv_bytes(10) == b"last"
    with pytest.raises(LinkClosed, match="rank 3 went away while rank 8 waited"):
        target.recv_bytes(10)
    closing.join()


def test_wait_tells_without_harm(any_pair: tuple[Link, Link]) -> None:
    source, target = any_pair
    assert not target.wait(0.01)
    source.send_bytes(b"x")
    source.send_bytes(b"y")
    assert target.wait(30)
    assert target.recv_bytes(1) == b"x"
    assert target.wait(30)
    assert target.recv_bytes(1) == b"y"
    assert not target.wait(0.01)


def sum_and_wait(address: tuple[str, int], port: int, rounds: int) -> None:
    """Rank 1 of two, as a process: sums `rounds` times, then does nothing."""
    listener = Listener("127.0.0.1", port)
    group = join_group(1, listener, {0: address, 1: ("127.0.0.1", port)}, None, deadline=60)
    for _ in range(rounds):
        group.all_reduce(torch.ones(2048))
    time.sleep(60)


@pytest.mark.parametrize(
    ("number", "deadline", "error", "words"),
    [
        (signal.SIGKILL, 60, LinkClosed, "rank 1 went away"),
        (signal.SIGSTOP, 1, LinkTimeout, "rank 1 sent nothing to rank 0 within 1 s"),
    ],
    ids=["killed", "stopped"],
)
@pytest.mark.parametrize("nbytes", [8192, 8 * MB])
def test_a_rank_that_dies_or_hangs_is_named_in_time(
    number: signal.Signals, deadline: float, error: type[LinkError], words: str, nbytes: int
) -> None:
    listener, port = Listener("127.0.0.1", 0), free_row(1)
    arguments = (listener.address, port, 3)
    context = multiprocessing.get_context("forkserver")  # which has imported torch
    context.set_forkserver_preload([__name__])
    peer = context.Process(target=sum_and_wait, args=arguments)
    peer.start()
    group = join_group(0, listener, {0: listener.address, 1: ("127.0.0.1", port)}, None, deadline=60)
    for _ in range(3):
        group.all_reduce(torch.ones(2048))
    group.set_deadline(deadline)
    assert peer.pid is not None
    os.kill(peer.pid, number)
    start = time.monotonic()
    with pytest.raises(error, match=words):
        group.all_reduce(torch.ones(nbytes // 4))
    assert time.monotonic() - start < 40, "the deadline was 60 s"
    with pytest.raises(LinkClosed, match="group is over"):
        group.all_reduce(torch.ones(2048))
    peer.kill()
    peer.join()
    group.close()


def test_a_fault_at_one_rank_does_not_disturb_the_links_of_others(contexts: Contexts | None) -> None:
    groups = tcp_groups(3, contexts)
    groups[2].close()
    fresh = [Group(g.rank, 2, {1 - g.rank: g.send[1 - g.rank]}, {1 - g.rank: g.recv[1 - g.rank]}) for g in groups[:2]]
    assert [float(x) for x in run_ranks(fresh, lambda group: group.all_reduce(torch.ones(())))] == [2.0, 2.0]
    close_all(groups[:2])


def test_long_pieces_are_gathered(contexts: Contexts | None) -> None:
    groups = tcp_groups(3, contexts)
    shapes = [(300_000,), (0,), (5, 100_000)]

    def work(group: Group) -> None:
        mine = torch.full(shapes[group.rank], group.rank)
        everyone = [torch.full(shape, rank) for rank, shape in enumerate(shapes)]
        assert all(torch.equal(a, b) for a, b in zip(group.all_gather(mine, shapes), everyone, strict=True))
        got = group.gather(mine, shapes, root=1)
        assert (got is None) == (group.rank != 1)
        assert got is None or all(torch.equal(a, b) for a, b in zip(got, everyone, strict=True))
        x = torch.full((700_000,), group.rank)
        assert torch.equal(group.broadcast(x, root=2), torch.full((700_000,), 2))

    run_ranks(groups, work)
    close_all(groups)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 2 * frame.PIECE_BYTES + 5])
def test_long_tensors_travel_in_pieces_and_arrive_whole(beyond: int, any_pair: tuple[Link, Link]) -> None:
    left, right = any_pair
    x = torch.arange(frame.PIECE_BYTES + beyond, dtype=torch.int64).to(torch.uint8).view(-1, 1)
    for send in (left.send, lambda x: exchange_messages([(left, x)], [])):
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, x)
            assert torch.equal(right.recv(tuple(x.shape), torch.uint8), x)
            sent.result()
    left.send(torch.ones(1))
    assert right.recv((1,), torch.float32) == 1, "what follows is in step"
    assert left.bytes_moved == right.bytes_moved == 2 * x.nbytes + 4


@pytest.mark.parametrize("at", ["payload", "header", "order"])
def test_a_later_piece_that_was_changed_is_refused(at: str) -> None:
    near, far = socket.socketpair()
    link = TcpLink(near, 0, 1, deadline=10)
    x = torch.zeros(2 * frame.PIECE_BYTES, dtype=torch.uint8)
    prefix = frame.tensor_prefix((x.numel(),), torch.uint8, 0)
    piece = bytes(frame.PIECE_BYTES)
    first, second = (
        bytearray(frame.seal(prefix + frame.pack_sequence(number), piece))
        for number in ((0, 1) if at != "order" else (0, 0))
    )
    if at != "order":
        second[-1 if at == "payload" else 20] ^= 1
    with ThreadPoolExecutor(1) as pool, far:
        sent = pool.submit(far.sendall, first + second)
        with pytest.raises(FrameError, match="rank 0 sent rank 1"):
            link.recv((x.numel(),), torch.uint8)
        with contextlib.suppress(OSError):  # the link closed under it
            sent.result()


def test_other_collectives_over_loopback(contexts: Contexts | None) -> None:
    groups = tcp_groups(3, contexts)

    def work(group: Group) -> None:
        here = group.rank
        for n in (3, 200_000):
            outs = [torch.empty(n + source) for source in range(3)]
            group.all_to_all([torch.full((n + here,), 10.0 * here + to) for to in range(3)], outs)
            assert all((out == 10.0 * source + here).all() for source, out in enumerate(outs))
            pieces = [torch.full((n,), float(to)) for to in range(3)] if here == 1 else None
            assert (group.scatter(pieces, torch.empty(n), root=1) == here).all()
            most = group.reduce(torch.full((n,), float(here)), root=2, op="max")
            assert (most == (2 if here == 2 else here)).all()
            handles = [group.start(group.all_reduce, torch.full((n,), float(here)), "mean") for _ in range(3)]
            assert all((handle.wait() == 1).all() for handle in handles)

    run_ranks(groups, work)
    close_all(groups)
