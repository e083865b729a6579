"""A process that stood still itself, as one that somebody suspends, does not take that for another's silence."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.comm.ranks import tcp_groups, transport_links
from tllm.comm.links.grpc_link import KEEPALIVE
from tllm.comm.links.link import Link, LocalLink
from tllm.comm.links.shared_memory import SharedMemory, meet_in_memory
from tllm.core.errors import LinkError
from tllm.spec.plan import Wire

DEADLINE, STOPPED_SECONDS = 5.0, 8.0
KINDS = ("local", "tcp", "torch", *(["grpc"] if find_spec("grpc") else []))
LONG = 1 << 18
"""Bytes of a message; no link takes 100 of them while nobody reads."""

Work = Callable[[], object]


def both_ends(kind: str) -> tuple[Link, Link]:
    """A link of this process with itself: its source, its target."""
    if kind == "local":
        link = LocalLink(0, 1)
        ends: tuple[Link, Link] = link, link
    elif kind == "tcp":
        source, target = tcp_groups(2)
        ends = source.send[1], target.recv[0]
    else:
        sources, targets = transport_links(kind, (0, 1))  # type: ignore[arg-type]
        ends = sources[Wire(0, 1)], targets[Wire(0, 1)]
    for end in ends:
        end.set_deadline(DEADLINE)
    return ends


def receives(source: Link, target: Link) -> tuple[Work, Work]:
    """What waits, and what ends that."""
    return lambda: target.recv_bytes(1), lambda: source.send_bytes(b"x")


def sends(source: Link, target: Link) -> tuple[Work, Work]:
    def send() -> None:
        for _ in range(100):
            source.send_bytes(bytes(LONG))

    def receive() -> None:
        for _ in range(100):
            target.recv_bytes(LONG)

    return send, receive


def pushes(source: Link, target: Link) -> tuple[Work, Work]:
    """A rank that waits for another's message and sends its own long one meanwhile."""
    there, back = both_ends("tcp")
    x = torch.zeros(100 * LONG // 4)

    def exchange() -> None:
        left = source.start_send(x)
        back.recv((1,), torch.float32, pending_sends=() if left is None else (left,))

    def answer() -> None:
        target.recv(tuple(x.shape), x.dtype)
        there.send(torch.zeros(1))

    return exchange, answer


def sums() -> tuple[Work, Work]:
    """Two ranks of this process that share memory; one comes later."""
    groups = tcp_groups(2)

    def meet(rank: int) -> SharedMemory | None:
        return meet_in_memory(rank, groups[rank].send, groups[rank].recv, True, DEADLINE)

    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(meet, range(2))
    assert here is not None and there is not None
    there._words[8 + 1 + 1] = 8  # what it is to sum, in the place of the first piece

    def come() -> None:
        there._words[8] = 1

    return lambda: here.wait(1, 8), come


def scenes() -> Iterator[tuple[str, tuple[Work, Work]]]:
    for kind in KINDS:
        yield f"{kind} receives", receives(*both_ends(kind))
        yield f"{kind} sends", sends(*both_ends(kind))
    yield "tcp exchanges", pushes(*both_ends("tcp"))
    yield "memory sums", sums()


def wait_all(test: Connection) -> None:
    """A process: waits in every way, and tells the test how each ended once it was told to end them."""
    all_scenes = dict(scenes())
    waiting = {name: run(wait) for name, (wait, _) in all_scenes.items()}
    time.sleep(1.0)  # until what is sent has filled all that is between
    test.send("waits")
    test.recv()
    for _, end in all_scenes.values():
        run(end)
    said = {}
    for name, done in waiting.items():
        error = done.exception(30)
        said[name] = str(error) if error else "well"
    test.send(said)
    os._exit(0)


def run(work: Work) -> Future[object]:
    """In a thread that no end of the process waits for."""
    done: Future[object] = Future()

    def go() -> None:
        try:
            done.set_result(work())
        except LinkError as error:
            done.set_exception(error)

    threading.Thread(target=go, daemon=True).start()
    return done


def test_a_process_waits_on_after_its_own_pause_and_no_longer_than_it_may_without() -> None:
    """After `kill -STOP` and `kill -CONT` each rank found that the others had sent nothing for longer than they may."""
    context = multiprocessing.get_context("forkserver")  # which has imported torch
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe() for _ in range(2)]
    both = [context.Process(target=wait_all, args=(theirs,)) for _, theirs in pipes]
    for process in both:
        process.start()
    assert [ours.recv() for ours, _ in pipes] == ["waits"] * 2
    suspended = both[0].pid
    assert suspended is not None
    os.kill(suspended, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    os.kill(suspended, signal.SIGCONT)
    time.sleep(1.0)  # for a waiter that would give up now
    for ours, _ in pipes:
        ours.send("end")
    told, of_awake = (ours.recv() for ours, _ in pipes)
    for process in both:
        process.join()
    assert len(told) == len(of_awake) == 2 * len(KINDS) + 2
    assert set(told.values()) == {"well"}, told
    assert all(f"within {DEADLINE:g} s" in words for words in of_awake.values()), of_awake


SERVER = """
import concurrent.futures, json, sys, time, grpc

def serve(request, context):
    while True:
        yield b"on"
        time.sleep(1.0)

server = grpc.server(concurrent.futures.ThreadPoolExecutor(1), options=[tuple(one) for one in json.loads(sys.argv[1])])
handler = grpc.method_handlers_generic_handler("S", {"M": grpc.unary_stream_rpc_method_handler(serve)})
server.add_generic_rpc_handlers((handler,))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""
"""Of gRPC, with options as JSON: prints its port, and sends something each second to whoever calls it."""


@pytest.mark.soak
def test_grpc_does_not_give_up_who_stands_still_while_a_ping_is_on_its_way() -> None:
    """By itself it ends a connection on which a ping is not answered for a minute."""
    grpc = pytest.importorskip("grpc")
    options = list(dict(KEEPALIVE, **{"grpc.keepalive_time_ms": 500}).items())
    with subprocess.Popen([sys.executable, "-c", SERVER, json.dumps(options)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        with grpc.insecure_channel(f"127.0.0.1:{int(server.stdout.readline())}", options) as channel:
            answers = channel.unary_stream("/S/M")(b"")
            next(answers)
            time.sleep(1.5)
            server.send_signal(signal.SIGSTOP)
            time.sleep(70.0)
            server.send_signal(signal.SIGCONT)
            for _ in range(5):
                assert next(answers) == b"on"
        server.kill()
