"""Links over gRPC and torch.distributed: whom they let in, what they refuse, and that they change no number.

What every kind of link promises is in `test_tcp_link.py`, which asks it of these too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
import pytest
import torch

from tests.support.comm.ranks import all_pairs, group_of, run_ranks, transport_groups, transport_links
from tests.support.models.families import save_model
from tests.support.training.runs import job_for, records, train
from tllm.cli.arguments.options import wiring
from tllm.cli.arguments.parser import Parser
from tllm.cli.commands import serve
from tllm.cli.commands import train as train_command
from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.settings import LinkKind, Wiring
from tllm.cluster.tls import data_client, data_server
from tllm.comm.collectives.group import Group, local_groups
from tllm.comm.links import frame, transport_link
from tllm.comm.links.connect import LinkHello, LinkOptions, Listener, open_links, transport_for
from tllm.comm.links.link import Link, LocalLink
from tllm.comm.links.send_buffer import DEPTH
from tllm.comm.links.torch_link import CHUNKS, SOURCE, TARGET, TorchTransport, _group, _Pair, _Target, interface_of
from tllm.comm.links.transport_link import Transport, TransportLink, TransportOffer
from tllm.core.errors import AuthError, ConfigError, FrameError, LinkClosed, LinkError, LinkTimeout
from tllm.engine.engine import Engine
from tllm.engine.schedule.limits import EngineConfig
from tllm.node.serve.open_cluster import open_cluster
from tllm.node.train.open_training import TrainingWork, open_training
from tllm.recipes.bench.processes import free_row
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan, Wire
from tllm.spec.request import Request, SamplingParams
from tllm.training.job.job_file import ResolvedJob

HELLO = LinkHello("test", 5, 3, 8)
LOOPBACK = "127.0.0.1"


@pytest.fixture(params=["grpc", "torch"])
def kind(request: pytest.FixtureRequest) -> LinkKind:
    if request.param == "grpc":
        pytest.importorskip("grpc")
    return request.param


@pytest.fixture
def authority() -> Authority:
    return Authority.create()


def both_ends(source: Transport, target: Transport, seconds: float = 30.0) -> tuple[Link | Exception, Link | Exception]:
    """What each end has of the wire 3>8, which is introduced by a link inside this process; the source waits for the
    other so many seconds."""
    ours = LocalLink(3, 8)

    def told(work: object) -> Link | Exception:
        try:
            return work()  # type: ignore[operator, no-any-return]
        except (LinkError, AuthError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(told, lambda: source.open_source(ours, HELLO, LOOPBACK, seconds)),
            pool.submit(told, lambda: target.open_target(ours, HELLO, LOOPBACK, LOOPBACK, 30.0)),
        ]
        return ends[0].result(), ends[1].result()


def transport(kind: LinkKind, identity: Identity) -> Transport:
    made = transport_for(Wiring(kind), identity, [LOOPBACK])
    assert made is not None
    return made


def test_groups_have_the_bits_that_they_have_in_one_process(kind: LinkKind) -> None:
    def work(group: Group) -> list[torch.Tensor]:
        sums = []
        for numel in (0, 1, 2048, 500_001):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(numel + group.rank))
            sums.append(group.all_reduce(x))
        group.barrier()
        outs = [torch.empty(200_000 + other) for other in range(3)]
        group.all_to_all([torch.full((200_000 + group.rank,), 10.0 * group.rank + to) for to in range(3)], outs)
        return [*sums, *outs, torch.frombuffer(bytearray(group.broadcast_bytes(b"words", root=1)), dtype=torch.uint8)]

    groups = transport_groups(kind, 3)
    for ours, truth in zip(run_ranks(groups, work), run_ranks(local_groups(3), work), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))
    assert groups[0].stats()["0>1"] == groups[1].stats()["0>1"] > 2_000_000
    run_ranks(groups, lambda group: group.close())


def test_both_ways_at_once_do_not_lock_up_whatever_the_length(kind: LinkKind) -> None:
    groups = transport_groups(kind, 2)

    def work(group: Group) -> None:
        other, long = 1 - group.rank, (DEPTH + 4) * frame.PIECE_BYTES
        x, got = torch.full((long,), group.rank, dtype=torch.uint8), torch.empty(long, dtype=torch.uint8)
        group.exchange({other: x}, {other: got})
        assert (got == other).all()

    run_ranks(groups, work)
    run_ranks(groups, lambda group: group.close())


def test_nothing_is_left_open_when_a_link_is_closed(kind: LinkKind) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> int:
        sources, targets = transport_links(kind, (3, 8), epoch=5)
        for links in (sources, targets):
            for link in links.values():
                link.interrupt()
                with contextlib.suppress(LinkError):
                    link.close()
        return files()

    once()  # what the library opens once for all
    before = once()
    for _ in range(4):
        once()
    until = time.monotonic() + 20
    while files() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert files() <= before


@pytest.mark.parametrize(
    ("shape", "dtype", "epoch", "sequence", "flip", "words"),
    [
        ((2**31, 2**20), torch.float32, 5, 0, 0, r"float32 \(2147483648, 1048576\)"),
        ((3,), torch.int32, 5, 0, 0, r"int32 \(3,\)"),
        ((3,), torch.float32, 4, 0, 0, "epoch 4"),
        ((3,), torch.float32, 5, 1, 0, "frame 1"),
        ((3,), torch.float32, 5, 0, 1, "checksum"),
    ],
    ids=["huge", "dtype", "epoch", "sequence", "checksum"],
)
def test_a_frame_that_is_not_the_planned_one_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype, epoch: int, sequence: int, flip: int, words: str
) -> None:
    target = TransportLink(HELLO, 5)
    whole = bytearray(frame.seal(frame.tensor_prefix(shape, dtype, epoch) + frame.pack_sequence(sequence), b"\1" * 12))
    whole[-1] ^= flip
    for at in range(len(whole)):  # runs may begin and end anywhere
        if at % DEPTH == 0:
            assert target.incoming.put(bytes(whole[at : at + DEPTH]))
    with pytest.raises(FrameError, match=rf"rank 3 sent rank 8 .*{words}.*; the plan says float32 \(3,\), epoch 5"):
        target.recv((3,), torch.float32)
    assert not target.incoming.put(b"more"), "the library's thread is told to end"
    with pytest.raises(LinkClosed):
        target.recv((3,), torch.float32)


def test_a_frame_that_nobody_takes_in_time_fails_the_next_send_of_an_unbounded_link() -> None:
    source = TransportLink(HELLO, 0.05)
    source.unbounded()
    source.send(torch.zeros(3))
    runs = source.outgoing.chunks()
    assert len(next(runs)) == frame.HEADER_SIZE + 12
    time.sleep(0.1)
    with pytest.raises(LinkTimeout, match=r"rank 8 did not take what rank 3 sent it within 0\.05 s"):
        source.send(torch.zeros(3))


def test_that_nothing_was_sent_for_long_is_no_delay_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still but for the hour in which nobody sends."""
    now = [1000.0]
    monkeypatch.setattr(transport_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    source = TransportLink(HELLO, 0.5)
    runs = source.outgoing.chunks()
    source.send(torch.zeros(3))
    next(runs)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, runs)
        with source.outgoing._changed:
            assert source.outgoing._changed.wait_for(lambda: not source.outgoing._waiting, 30), "the first is written"
        now[0] += 3600.0
        with source.outgoing._changed:
            # The thread must have this lock before it takes the next: that waits as another is sent.
            for _ in range(2):
                source.send(torch.zeros(3))
        following.result(30)
    source.outgoing.interrupt()


class TestGrpc:
    @pytest.fixture(autouse=True)
    def grpc(self) -> object:
        return pytest.importorskip("grpc")

    def test_a_rank_of_another_cluster_is_refused(self, authority: Authority) -> None:
        stranger = Authority.create().identity("node-8")
        source, target = both_ends(transport("grpc", authority.identity("node-3")), transport("grpc", stranger), 1.0)
        assert isinstance(target, AuthError)
        assert "rank 3 did not take the gRPC call of rank 8" in str(target)
        assert isinstance(source, LinkTimeout)
        assert "rank 8 did not call the gRPC port of rank 3 within 1 s" in str(source)

    def test_no_port_stays_open_where_the_other_end_went_away_before_it_heard_of_it(self, authority: Authority) -> None:
        def files() -> int:
            source, _ = both_ends(transport("grpc", authority.identity("node-3")), transport("grpc", stranger), 0.2)
            assert isinstance(source, LinkError)
            ours = LocalLink(3, 8)
            ours.close()
            with pytest.raises(LinkClosed):
                transport("grpc", authority.identity("node-3")).open_source(ours, HELLO, LOOPBACK, 0.2)
            return len(os.listdir("/proc/self/fd"))

        stranger = Authority.create().identity("node-8")
        before = files()  # with what the library opens once for all
        counts = [files() for _ in range(3)]
        until = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
            time.sleep(0.02)
        assert len(os.listdir("/proc/self/fd")) <= before, counts

    def test_a_source_with_another_name_than_it_said_is_refused(self, authority: Authority) -> None:
        def other_name(port: int, name: str) -> TransportOffer:
            return TransportOffer(port, "node-4", b"x" * 32)

        ends = transport("grpc", authority.identity("node-3")), transport("grpc", authority.identity("node-8"))
        with patch.object(TransportOffer, "make", other_name):
            _, target = both_ends(*ends, 1.0)
        assert isinstance(target, AuthError)

    @pytest.mark.parametrize("wrong", ["secret", "hello", "bytes", "certificate"])
    def test_a_caller_is_refused_and_the_rightful_one_comes_in(
        self, wrong: str, authority: Authority, grpc: object
    ) -> None:
        from tllm.comm.links.grpc_link import METHOD, SERVICE, Call

        ours = LocalLink(3, 8)
        with ThreadPoolExecutor(1) as pool:
            source = pool.submit(
                transport("grpc", authority.identity("node-3")).open_source, ours, HELLO, LOOPBACK, 20.0
            )
            told = ours.recv_bytes(1024)
            offer = msgspec.msgpack.decode(told, type=TransportOffer)
            call = Call(
                HELLO if wrong != "hello" else LinkHello("test", 4, 3, 8),
                offer.secret if wrong != "secret" else b"x" * 32,
            )
            request = msgspec.msgpack.encode(call) if wrong != "bytes" else b"\xc1"
            code = self.answer(grpc, authority, offer, request, certified=wrong != "certificate")
            assert code == ("UNAVAILABLE" if wrong == "certificate" else "PERMISSION_DENIED")
            assert not source.done()
            again = LocalLink(3, 8)
            again.send_bytes(told)
            target = transport("grpc", authority.identity("node-8")).open_target(again, HELLO, LOOPBACK, LOOPBACK, 20.0)
            request = msgspec.msgpack.encode(Call(HELLO, offer.secret))
            assert self.answer(grpc, authority, offer, request, certified=True) == "PERMISSION_DENIED", (
                "one call a link"
            )
            source.result().send(torch.ones(3))
            assert torch.equal(target.recv((3,), torch.float32), torch.ones(3))
            for end in (source.result(), target):
                end.close()
        assert (SERVICE, METHOD) == ("tllm.Link", "Open")

    def answer(self, grpc: object, authority: Authority, offer: TransportOffer, request: bytes, certified: bool) -> str:
        """The status by which a call ends that another program makes."""
        one = authority.identity("node-7")
        mine = (one.key, one.certificate) if certified else ()
        trust = grpc.ssl_channel_credentials(one.authority, *mine)  # type: ignore[attr-defined]
        options = [("grpc.ssl_target_name_override", offer.name)]
        with grpc.secure_channel(f"{LOOPBACK}:{offer.port}", trust, options) as channel:  # type: ignore[attr-defined]
            with pytest.raises(grpc.RpcError) as caught:  # type: ignore[attr-defined]
                next(channel.unary_stream("/tllm.Link/Open")(request, timeout=10))
            return str(caught.value.code().name)

    def test_a_message_longer_than_any_of_ours_is_not_read(self) -> None:
        sources, targets = transport_links("grpc", (3, 8), epoch=5)
        source, target = sources[Wire(3, 8)], targets[Wire(3, 8)]
        with patch("tllm.comm.links.transport_link.CHUNK_BYTES", 1 << 30):
            source.send(torch.zeros(4 << 20, dtype=torch.uint8))
            with pytest.raises(LinkClosed, match=r"rank 3 went away while rank 8 waited .*RESOURCE_EXHAUSTED"):
                target.recv((4 << 20,), torch.uint8)
        for links in (sources, targets):
            for link in links.values():
                with contextlib.suppress(LinkError):
                    link.close()


class TestTorch:
    def test_a_network_that_nobody_trusts_is_refused(self) -> None:
        with pytest.raises(AuthError, match=r"not encrypted, and 192\.0\.2\.7 is not this machine's alone") as caught:
            TorchTransport(["127.0.0.1", "192.0.2.7"], trusted=False)
        assert "--trusted-network" in caught.value.hint
        TorchTransport(["127.0.0.1", "192.0.2.7"], trusted=True)
        TorchTransport(["127.0.0.1", "localhost", "::1"], trusted=False)

    def test_an_address_that_is_not_here_is_told(self) -> None:
        assert interface_of(LOOPBACK) == "lo"
        with pytest.raises(ConfigError, match=r"no network interface here has the address 192\.0\.2\.7"):
            interface_of("192.0.2.7")

    def test_every_port_is_on_the_given_interface_only(self) -> None:
        before = listening()
        sources, targets = transport_links("torch", (3, 8), epoch=5)
        new = listening() - before
        assert new
        assert {address for address, _ in new} == {"0100007F"}, "127.0.0.1 as the kernel writes it"
        for links in (sources, targets):
            for link in links.values():
                link.interrupt()
                with contextlib.suppress(LinkError):
                    link.close()

    @pytest.mark.parametrize("size", [1 << 40, -1, frame.PIECE_BYTES + frame.HEADER_SIZE + 1])
    def test_a_lying_length_takes_no_memory(self, size: int) -> None:
        from torch.distributed import HashStore

        offer, store = TransportOffer.make(0, ""), HashStore()
        with ThreadPoolExecutor(2) as pool:
            groups = [pool.submit(_group, store, offer, rank, LOOPBACK, HELLO, 10.0) for rank in (SOURCE, TARGET)]
            liar, end = _Pair(groups[0].result(), TARGET), _Target(HELLO, _Pair(groups[1].result(), SOURCE))
        liar.send(torch.tensor([size]), CHUNKS)
        with pytest.raises(LinkClosed, match=rf"rank 3 went away while rank 8 waited .*declared {size} bytes"):
            end.link.recv((3,), torch.float32)
        with pytest.raises(RuntimeError):
            liar.send(torch.zeros(1), CHUNKS)
        end.link.close()

    def test_a_default_process_group_is_the_users_own(self) -> None:
        sources, targets = transport_links("torch", (3, 8), epoch=5)
        assert not torch.distributed.is_initialized()
        for links in (sources, targets):
            for link in links.values():
                link.interrupt()
                with contextlib.suppress(LinkError):
                    link.close()


def listening() -> set[tuple[str, str]]:
    """Addresses, as the kernel writes them, and inodes of the TCP ports that are listened on in this process."""
    mine = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{file}").removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {(row[1].partition(":")[0], row[9]) for row in rows if row[3] == "0A" and row[9] in mine}


def join(kind: LinkKind, rank: int, ports: tuple[int, int], identity: Identity) -> Group:
    """This rank's group of two, over links of a kind."""
    listener = Listener(LOOPBACK, ports[rank], data_server(identity))
    links = open_links(
        rank,
        {other: (LOOPBACK, port) for other, port in enumerate(ports)},
        listener,
        all_pairs(2),
        cluster="test",
        epoch=1,
        options=LinkOptions(context=data_client(identity), deadline=40, transport=transport(kind, identity)),
    )
    listener.close()
    return group_of(rank, 2, links)


def sum_and_wait(kind: LinkKind, ports: tuple[int, int], identity: Identity) -> None:
    """Rank 1 of two, as a process: sums once, then does nothing."""
    join(kind, 1, ports, identity).all_reduce(torch.ones(2048))
    time.sleep(60)


def test_a_rank_that_dies_is_named_at_once(kind: LinkKind, authority: Authority) -> None:
    ports = free_row(1), free_row(1)
    arguments = (kind, ports, authority.identity("node-1"))
    context = multiprocessing.get_context("forkserver")  # which has imported torch
    context.set_forkserver_preload([__name__])
    peer = context.Process(target=sum_and_wait, args=arguments)
    peer.start()
    group = join(kind, 0, ports, authority.identity("node-0"))
    group.set_deadline(600)  # far beyond this test's own
    assert float(group.all_reduce(torch.ones(2048))[0]) == 2
    peer.kill()
    with pytest.raises(LinkClosed, match="rank 1 went away"):
        group.all_reduce(torch.ones(2048))
    peer.join()
    for link in (*group.send.values(), *group.recv.values()):
        link.interrupt()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@pytest.mark.parametrize("kind", ["grpc", pytest.param("torch", marks=pytest.mark.soak)], indirect=True)
def test_two_processes_serve_the_same_words(kind: LinkKind, model: Path) -> None:
    prompt, params = tuple(range(1, 60)), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    sizes = EngineConfig(cache_tokens=1024, max_model_len=256, dtype="float32", wiring=Wiring(kind))
    with Engine.load(model, "pp=1", sizes) as engine:
        truth = engine.generate([prompt], params)[0]

    async def served() -> list[int]:
        async with asyncio.timeout(200), open_cluster(model, "pp=2", sizes) as cluster:
            request = Request(id="r", prompt_ids=prompt, params=params)
            return [token async for output in cluster.submit(request) for token in output.token_ids]

    assert asyncio.run(served()) == truth


@pytest.mark.parametrize("kind", [pytest.param("grpc", marks=pytest.mark.soak), "torch"], indirect=True)
def test_two_processes_train_to_the_same_losses(kind: LinkKind, model: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name / "run" for name in ("threads", "processes")]
    for run in runs:
        run.mkdir(parents=True)
    truth = [one.loss for one in records(train(job_for(model, runs[0], max_steps=2, dtype="float64"), "dp=2"))]
    job, config = job_for(model, runs[1], max_steps=2, dtype="float64"), read_config(model)
    plan = Plan.parse("dp=2", spec_from_config(config).num_layers)
    opening = open_training(TrainingWork(ResolvedJob(job, {}), plan, json.dumps(config), Wiring(kind)))

    async def trained() -> list[float]:
        async with asyncio.timeout(200), opening as run:
            return [one.loss for one in records([news async for news in run.events()])]

    assert asyncio.run(trained()) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--nodes 2", True),
        ("--nodes 2 --trusted-network", False),
        ("--nodes 2 --cluster-host 127.0.0.1", False),
        ("", False),
    ],
)
def test_tensors_in_clear_are_to_be_asked_for(words: str, refused: bool) -> None:
    for command in (serve, train_command):
        parser = Parser("tllm", "")
        command.add_arguments(parser)
        args = parser.parse_args(["MODEL", "--link", "torch", *words.split()])
        if refused:
            with pytest.raises(AuthError, match="--link torch does not encrypt, and --nodes 2 are other machines"):
                wiring(args)
        else:
            assert wiring(args) == Wiring("torch", "--trusted-network" in words)
