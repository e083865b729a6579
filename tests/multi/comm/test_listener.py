"""Who may open a link: all but the planned hello is refused within a second, and the planned one still gets in."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.comm.ranks import Contexts, make_contexts
from tllm.comm.links import frame
from tllm.comm.links.connect import LinkHello, LinkOptions, Listener, connect, open_links
from tllm.comm.links.link import Link
from tllm.comm.links.listener import HALF_OPEN
from tllm.core.errors import AuthError, ClusterError, LinkClosed, LinkError, LinkTimeout
from tllm.spec.plan import Wire

GOOD = LinkHello("test", 5, 0, 1)
PATIENT = 60.0
"""Seconds of a deadline that nothing here is to wait for: of who dials, and of a listener that is to refuse a hello for
what it says."""

SOON = 25.0
"""Seconds for what must not wait for such a deadline; a busy machine may take some of them."""

SHORT = 0.3
"""Seconds of a deadline that must pass, since what it is for cannot happen."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return make_contexts(tmp_path_factory.mktemp("certificates"), name="node-a")


@pytest.fixture(params=["plain", "tls"])
def contexts(request: pytest.FixtureRequest, tls: Contexts) -> Contexts | None:
    return tls if request.param == "tls" else None


@pytest.fixture
def listener(contexts: Contexts | None) -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, contexts[0] if contexts else None, hello_seconds=PATIENT)
    listener.expect("test", 5, [Wire(0, 1), Wire(2, 1)])
    yield listener
    listener.close()


@pytest.fixture
def nobody() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens and which nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


def dial(listener: Listener, contexts: Contexts | None, hello: LinkHello = GOOD) -> None:
    """Open the link, use it, close it."""
    source = connect(listener.address, contexts[1] if contexts else None, hello, PATIENT)
    target = listener.accept(hello.wire, PATIENT)
    source.send(torch.ones(2))
    assert torch.equal(target.recv((2,), torch.float32), torch.ones(2))
    source.close()
    target.close()


def refusal(listener: Listener, count: int = 1) -> None:
    """Wait for the counter; it must come before a hello that is late is refused for that."""
    until = time.monotonic() + SOON
    while listener.refused < count and time.monotonic() < until:
        time.sleep(0.005)
    assert listener.refused == count


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (LinkHello("other", 5, 0, 1), "not cluster 'other'"),
        (LinkHello("test", 4, 0, 1), "epoch 4 is over, epoch 5 runs"),
        (LinkHello("test", 5, 3, 1), "no link from rank 3 to rank 1"),
        (LinkHello("test", 5, 0, 2), "no link from rank 0 to rank 2"),
    ],
)
def test_a_wrong_hello_is_refused_on_both_sides(
    listener: Listener, contexts: Contexts | None, hello: LinkHello, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "tllm.comm"), pytest.raises(LinkClosed, match=words):
        connect(listener.address, contexts[1] if contexts else None, hello, PATIENT)
    assert time.monotonic() - start < SOON
    refusal(listener)
    assert "refused a link from 127.0.0.1:" in caplog.text
    assert f"refused the link from rank {hello.source}" in caplog.text
    dial(listener, contexts)


def hello_frame(payload: bytes, length: int | None = None, epoch: int = 0) -> bytes:
    whole = bytearray(frame.seal(frame.bytes_prefix(len(payload), epoch) + frame.pack_sequence(0), payload))
    if length is not None:
        whole[12:20] = length.to_bytes(8, "little")
    return bytes(whole)


NONSENSE = {
    "text": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".ljust(80),
    "zeros": bytes(100),
    "lying length": hello_frame(msgspec.msgpack.encode(GOOD), length=2**63),
    "short length": hello_frame(msgspec.msgpack.encode(GOOD), length=3),
    "not msgpack": hello_frame(b"\xc1\xc1"),
    "not a hello": hello_frame(msgspec.msgpack.encode({"cluster": "test"})),
    "tensor": frame.seal(frame.tensor_prefix((1,), torch.int8, 0) + frame.pack_sequence(0), b"1"),
    "wrong frame epoch": hello_frame(msgspec.msgpack.encode(GOOD), epoch=5),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_within_a_second(
    listener: Listener, contexts: Contexts | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(listener.address) as plain:
        sock = contexts[1].wrap_socket(plain, server_hostname="127.0.0.1") if contexts else plain
        sock.sendall(NONSENSE[name])
        refusal(listener)
        sock.close()
    assert "refused a link from 127.0.0.1:" in caplog.text
    dial(listener, contexts)


def test_plain_text_to_a_tls_listener_is_refused(tls: Contexts) -> None:
    listener = Listener("127.0.0.1", 0, tls[0], hello_seconds=PATIENT)
    listener.expect("test", 5, [Wire(0, 1)])
    start = time.monotonic()
    with pytest.raises(AuthError, match=r"rank 1 at 127.0.0.1:.* and rank 0 do not trust each other"):
        connect(listener.address, None, GOOD, PATIENT)
    assert time.monotonic() - start < SOON
    refusal(listener)
    dial(listener, tls)
    listener.close()


def test_tls_to_a_plain_listener_is_refused(tls: Contexts) -> None:
    listener = Listener("127.0.0.1", 0, hello_seconds=PATIENT)
    listener.expect("test", 5, [Wire(0, 1)])
    start = time.monotonic()
    with pytest.raises(AuthError, match="do not trust each other"):
        connect(listener.address, tls[1], GOOD, PATIENT)
    assert time.monotonic() - start < SOON
    refusal(listener)
    dial(listener, None)
    listener.close()


def test_strangers_certificates_are_refused_both_ways(tls: Contexts, tmp_path: Path) -> None:
    stranger = make_contexts(tmp_path)
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.load_verify_locations(tmp_path / "ca.pem")
    listener = Listener("127.0.0.1", 0, tls[0], hello_seconds=PATIENT)
    listener.expect("test", 5, [Wire(0, 1)])
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE  # shows no certificate, takes any
    for context in (stranger[1], without, unchecked):
        start = time.monotonic()
        with pytest.raises(AuthError, match="do not trust each other"):
            connect(listener.address, context, GOOD, PATIENT)
        assert time.monotonic() - start < SOON
    refusal(listener, 3)
    dial(listener, tls)
    listener.close()


def test_a_certificate_speaks_only_for_its_own_rank(tls: Contexts) -> None:
    def authorize(hello: LinkHello, certificate: dict[str, Any] | None) -> None:
        assert certificate is not None
        names = {value for kind, value in certificate["subjectAltName"] if kind == "DNS"}
        if hello.source != 0 or names != {"node-a"}:
            raise AuthError(f"node-a does not hold rank {hello.source}")

    listener = Listener("127.0.0.1", 0, tls[0], authorize, hello_seconds=PATIENT)
    listener.expect("test", 5, [Wire(0, 1), Wire(2, 1)])
    with pytest.raises(LinkClosed, match="node-a does not hold rank 2"):
        connect(listener.address, tls[1], LinkHello("test", 5, 2, 1), PATIENT)
    refusal(listener)
    dial(listener, tls)

    def refuse(hello: LinkHello, certificate: dict[str, Any] | None) -> None:
        raise AuthError(f"this is not rank {hello.target}")

    listener.expect("test", 5, [Wire(0, 1)])
    with pytest.raises(AuthError, match="not rank 1"):
        connect(listener.address, tls[1], GOOD, PATIENT, refuse)
    listener.close()


def test_silent_connections_delay_nobody(listener: Listener, contexts: Contexts | None) -> None:
    silent = [socket.create_connection(listener.address) for _ in range(HALF_OPEN - 1)]
    start = time.monotonic()
    dial(listener, contexts)
    assert time.monotonic() - start < SOON and listener.refused == 0, "the good one waited for the silent ones"
    for sock in silent:
        sock.close()


def test_silent_connections_are_closed_in_time(contexts: Contexts | None) -> None:
    """Those that wait, too, once there is room for them."""
    listener = Listener("127.0.0.1", 0, contexts[0] if contexts else None, hello_seconds=SHORT)
    silent = [socket.create_connection(listener.address) for _ in range(HALF_OPEN + 5)]
    for sock in silent:
        sock.settimeout(PATIENT)
        assert sock.recv(1) == b"" or contexts
        sock.close()
    refusal(listener, len(silent))
    listener.close()


def test_more_half_open_connections_than_allowed_only_wait(listener: Listener, contexts: Contexts | None) -> None:
    """Until others have said what they came for, or are gone."""
    before = set(threading.enumerate())
    silent = [socket.create_connection(listener.address) for _ in range(HALF_OPEN + 5)]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(dial, listener, contexts)
        with pytest.raises(TimeoutError):
            waits.result(SHORT)
        greeting = [t for t in threading.enumerate() if t.name == "link hello" and t not in before]
        assert len(greeting) <= HALF_OPEN
        for sock in silent:
            sock.close()
        waits.result(PATIENT)
    refusal(listener, len(silent))


def test_a_process_that_may_start_no_more_threads_refuses_links_and_takes_them_again(
    listener: Listener, contexts: Contexts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "link hello":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    for _ in range(HALF_OPEN + 1):  # one more than may be half open: each makes room for the next
        with socket.create_connection(listener.address, SOON) as refused:
            assert refused.recv(1) == b""
    refusal(listener, HALF_OPEN + 1)
    monkeypatch.undo()
    dial(listener, contexts)


def test_each_link_is_opened_once(listener: Listener, contexts: Contexts | None) -> None:
    dial(listener, contexts)
    with pytest.raises(LinkClosed, match="no link from rank 0 to rank 1 is expected"):
        connect(listener.address, contexts[1] if contexts else None, GOOD, PATIENT)


def test_wires_of_several_names_between_two_ranks_are_not_mixed_up(contexts: Contexts | None) -> None:
    listeners = [Listener("127.0.0.1", 0, contexts[0] if contexts else None) for _ in range(2)]
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    wires = [Wire(a, 1 - a, name) for a in range(2) for name in ("", "tp", "dp")]

    def work(rank: int) -> dict[Wire, Link]:
        context = contexts[1] if contexts else None
        order = wires if rank else wires[::-1]
        return open_links(
            rank, addresses, listeners[rank], order, cluster="test", epoch=5, options=LinkOptions(context=context)
        )

    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(work, range(2))
    for number, wire in enumerate(wires):
        source, target = (here, there) if wire.source == 0 else (there, here)
        source[wire].send(torch.tensor(number))
        assert int(target[wire].recv((), torch.int64)) == number
    assert set(here) == set(there) == set(wires)
    for link in (*here.values(), *there.values(), *listeners):
        link.close()


def test_a_wire_of_another_name_is_refused_and_named(listener: Listener, contexts: Contexts | None) -> None:
    with pytest.raises(LinkClosed, match="no 'dp' link from rank 0 to rank 1 is expected"):
        connect(listener.address, contexts[1] if contexts else None, LinkHello("test", 5, 0, 1, "dp"), PATIENT)
    with pytest.raises(LinkTimeout, match=r"rank 0 did not open its 'tp' link to rank 1 within 0\.1 s"):
        listener.accept(Wire(0, 1, "tp"), 0.1)  # nobody opens it


def test_a_link_that_is_refused_ends_those_that_would_wait(contexts: Contexts | None) -> None:
    """One rank knows nothing of this epoch yet, which may be waited for; the other refuses, which may not."""
    listeners = [Listener("127.0.0.1", 0, contexts[0] if contexts else None) for _ in range(3)]
    listeners[2].expect("test", 5, [])
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    wires = [Wire(0, 1, "dp"), Wire(0, 2, "dp")]
    start = time.monotonic()
    with pytest.raises(LinkClosed, match="no 'dp' link from rank 0 to rank 2 is expected"):
        open_links(
            0,
            addresses,
            listeners[0],
            wires,
            cluster="test",
            epoch=5,
            options=LinkOptions(context=contexts[1] if contexts else None, deadline=PATIENT),
        )
    assert time.monotonic() - start < SOON
    for listener in listeners:
        listener.close()


def test_the_rank_at_the_other_end_of_a_transport_that_fails_is_named() -> None:
    """Who cannot take its part says which rank it was with, or the coordinator leaves out the wrong one."""

    class Broken:
        def open_source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link:
            raise LinkTimeout("it does not open")

        def open_target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link:
            raise LinkTimeout("it does not open")

    listeners = [Listener("127.0.0.1", 0) for _ in range(2)]
    addresses = {rank: listener.address for rank, listener in enumerate(listeners)}
    options = LinkOptions(transport=Broken())

    def named(rank: int) -> int | None:
        with pytest.raises(LinkTimeout) as broken:
            open_links(rank, addresses, listeners[rank], [Wire(0, 1)], cluster="test", epoch=5, options=options)
        return broken.value.peer

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(named, range(2))) == [1, 0]
    for listener in listeners:
        listener.close()


def test_a_source_that_is_early_waits_for_the_epoch(contexts: Contexts | None) -> None:
    listener = Listener("127.0.0.1", 0, contexts[0] if contexts else None)
    timer = threading.Timer(0.3, listener.expect, ["test", 5, [Wire(0, 1)]])
    timer.start()
    dial(listener, contexts)
    timer.join()
    listener.close()


def test_a_new_epoch_ends_the_old_one(listener: Listener, contexts: Contexts | None) -> None:
    listener.expect("test", 6, [Wire(0, 1)])
    with pytest.raises(LinkClosed, match="epoch 5 is over, epoch 6 runs"):
        connect(listener.address, contexts[1] if contexts else None, GOOD, PATIENT)
    dial(listener, contexts, LinkHello("test", 6, 0, 1))


def test_a_new_epoch_wakes_whoever_opens_links_of_the_old_one(
    contexts: Contexts | None, nobody: tuple[str, int]
) -> None:
    """One rank of the old epoch never dials, another is not there: waiting for them would take a minute."""
    listener, patient = Listener("127.0.0.1", 0, contexts[0] if contexts else None), LinkOptions(deadline=PATIENT)
    for epoch, wires in ((5, [Wire(2, 1)]), (7, [Wire(1, 0)])):
        timer = threading.Timer(0.3, listener.end_epochs_before, ["test", epoch + 1])
        timer.start()
        start = time.monotonic()
        with pytest.raises(LinkError):
            open_links(1, {0: nobody}, listener, wires, cluster="test", epoch=epoch, options=patient)
        assert time.monotonic() - start < SOON
        timer.join()
        with pytest.raises(LinkClosed, match=f"epoch {epoch} is over, epoch {epoch + 1} runs"):
            open_links(1, {0: nobody}, listener, wires, cluster="test", epoch=epoch, options=patient)
    timer = threading.Timer(0.3, listener.expect, ["test", 8, [Wire(0, 1)]])
    timer.start()
    dial(listener, contexts, LinkHello("test", 8, 0, 1))  # which is told to come again while epoch 8 has not begun
    timer.join()
    listener.close()


def test_a_rank_that_is_not_there_is_named_in_time(nobody: tuple[str, int]) -> None:
    start = time.monotonic()
    with pytest.raises(LinkTimeout, match=r"rank 0 could not open its link to rank 1 at .* within 0.3 s"):
        connect(nobody, None, GOOD, SHORT)
    listener = Listener("127.0.0.1", 0)
    with pytest.raises(LinkTimeout, match=r"rank 2 did not open its link to rank 1 within \S+ s"):
        open_links(1, {}, listener, [Wire(2, 1)], cluster="test", epoch=5, options=LinkOptions(deadline=SHORT))
    assert time.monotonic() - start < SOON
    listener.close()


def test_a_listener_that_accepts_and_says_nothing_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(LinkTimeout, match=r"rank 1 at .* said nothing"):
        connect(mute.getsockname()[:2], None, GOOD, SHORT)


def test_a_busy_port_is_an_error_that_names_it() -> None:
    listener = Listener("127.0.0.1", 0)
    with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{listener.address[1]}"):
        Listener("127.0.0.1", listener.address[1])
    listener.close()
