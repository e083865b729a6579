"""`Echo`, one interface to send a tensor to another process and back: by our own links and by other libraries.

The other libraries are imported by name when they are asked for: none is a dependency of this project. Only our own TLS
and gRPC links are encrypted here. Our links of every kind have the same frames and checks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tllm.cluster.connection import format_address
from tllm.cluster.settings import LinkKind
from tllm.comm.links.frame import memory_of
from tllm.comm.links.torch_link import interface_of
from tllm.recipes.bench.processes import Seat

TLS, PLAIN, GLOO, GRPC, ZEROMQ, RPC = range(6)  # services: each has ports of its own, as CONTROL has
LINK_GRPC, LINK_TORCH = 8, 9
GRPC_METHOD = "/tllm.Bench/Echo"
MESSAGE_BYTES = 1 << 30


class Echo(Protocol):
    """Round trips of bytes: rank 0 calls `ask` and rank 1 `answer`."""

    def ask(self, x: torch.Tensor) -> None:
        """Send the flat bytes `x` to rank 1, and receive as many into `x`."""

    def answer(self, x: torch.Tensor) -> None:
        """Receive into `x` and send it back; nothing, where the library answers in a thread or process of its own."""

    def close(self) -> None: ...


class Ours:
    """Two of our links of one kind, one in each direction."""

    def __init__(self, seat: Seat, service: int, encrypted: bool = True, kind: LinkKind = "tls") -> None:
        self._group = seat.group(encrypted, service, "echo", kind)
        self._peer = 1 - seat.rank

    def ask(self, x: torch.Tensor) -> None:
        self._group.exchange({self._peer: x}, {})
        self._group.recv_from(self._peer, x)

    def answer(self, x: torch.Tensor) -> None:
        self._group.recv_from(self._peer, x)
        self._group.exchange({self._peer: x}, {})

    def close(self) -> None:
        self._group.close()


class Gloo:
    """`torch.distributed` send and recv over gloo."""

    def __init__(self, seat: Seat) -> None:
        open_gloo(seat)
        self._peer = 1 - seat.rank

    def ask(self, x: torch.Tensor) -> None:
        dist.send(x, self._peer)
        dist.recv(x, self._peer)

    def answer(self, x: torch.Tensor) -> None:
        dist.recv(x, self._peer)
        dist.send(x, self._peer)

    def close(self) -> None:
        dist.destroy_process_group()


class Grpc:
    """One unary gRPC call with bytes, over HTTP/2 without TLS."""

    def __init__(self, seat: Seat) -> None:
        grpc: Any = importlib.import_module("grpc")
        options = [("grpc.max_send_message_length", MESSAGE_BYTES), ("grpc.max_receive_message_length", MESSAGE_BYTES)]
        self._server = self._channel = None
        if seat.rank == 1:
            serve = grpc.unary_unary_rpc_method_handler(lambda payload, _: payload)
            service, _, method = GRPC_METHOD[1:].partition("/")
            self._server = grpc.server(ThreadPoolExecutor(1), options=options)
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: serve}),))
            self._server.add_insecure_port(format_address(seat.address(1, GRPC)))
            self._server.start()
        else:
            self._channel = grpc.insecure_channel(format_address(seat.address(1, GRPC)), options=options)
            grpc.channel_ready_future(self._channel).result(60)
            self._call = self._channel.unary_unary(GRPC_METHOD)

    def ask(self, x: torch.Tensor) -> None:
        _fill(x, self._call(bytes(memory_of(x))))

    def answer(self, x: torch.Tensor) -> None:
        """The server's own threads answer."""

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.stop(None).wait()


class ZeroMq:
    """A ZeroMQ PAIR socket, which sends without a copy."""

    def __init__(self, seat: Seat) -> None:
        zmq: Any = importlib.import_module("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        where = f"tcp://{format_address(seat.address(1, ZEROMQ))}"
        if seat.rank == 1:
            self._socket.bind(where)
        else:
            self._socket.connect(where)

    def ask(self, x: torch.Tensor) -> None:
        self._socket.send(memory_of(x), copy=False, track=True).wait()
        _fill(x, self._socket.recv(copy=False).buffer)

    def answer(self, x: torch.Tensor) -> None:
        _fill(x, self._socket.recv(copy=False).buffer)
        self._socket.send(memory_of(x), copy=False, track=True).wait()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class TorchRpc:
    """One synchronous call of `torch.distributed.rpc` with a tensor."""

    def __init__(self, seat: Seat) -> None:
        os.environ["TP_SOCKET_IFNAME"] = interface_of(seat.hosts[seat.rank])
        self._rpc: Any = importlib.import_module("torch.distributed.rpc")
        options = self._rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{format_address(seat.address(0, RPC))}", rpc_timeout=600
        )
        self._rpc.init_rpc(f"rank{seat.rank}", rank=seat.rank, world_size=2, rpc_backend_options=options)

    def ask(self, x: torch.Tensor) -> None:
        x.copy_(self._rpc.rpc_sync("rank1", same, (x,)))

    def answer(self, x: torch.Tensor) -> None:
        """The library's own threads answer."""

    def close(self) -> None:
        self._rpc.shutdown()


class Ray:
    """A call of a Ray actor in another process of this machine, which gets the bytes in shared memory."""

    def __init__(self, seat: Seat) -> None:
        self._actor: Any = None
        if seat.rank == 0:
            self._ray: Any = importlib.import_module("ray")
            self._ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
            self._actor = self._ray.remote(_Actor).remote()

    def ask(self, x: torch.Tensor) -> None:
        _fill(x, self._ray.get(self._actor.same.remote(x.numpy())))

    def answer(self, x: torch.Tensor) -> None:
        """The actor answers."""

    def close(self) -> None:
        if self._actor is not None:
            self._ray.shutdown()


class _Actor:
    def same(self, x: Any) -> Any:
        return x


WAYS: dict[str, tuple[str, Callable[[Seat], Echo]]] = {
    "tllm TLS": ("tllm.comm.links.tcp_link", lambda seat: Ours(seat, TLS)),
    "tllm plain": ("tllm.comm.links.tcp_link", lambda seat: Ours(seat, PLAIN, encrypted=False)),
    "tllm gRPC": ("grpc", lambda seat: Ours(seat, LINK_GRPC, kind="grpc")),
    "tllm torch p2p": ("torch.distributed", lambda seat: Ours(seat, LINK_TORCH, kind="torch")),
    "gloo": ("torch.distributed", Gloo),
    "gRPC": ("grpc", Grpc),
    "ZeroMQ": ("zmq", ZeroMq),
    "torch RPC": ("torch.distributed.rpc", TorchRpc),
    "Ray": ("ray", Ray),
}
"""What can be measured, by its name: the module that it needs, and how to open it."""


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(WAYS[name][0]) is not None


def open_gloo(seat: Seat) -> None:
    """Begin `torch.distributed` over gloo, on the interface of this seat's address only."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(seat.hosts[seat.rank])
    where = f"tcp://{format_address(seat.address(0, GLOO))}"
    dist.init_process_group("gloo", init_method=where, rank=seat.rank, world_size=seat.size)


def same(x: torch.Tensor) -> torch.Tensor:
    """What rank 1 does in a call of torch RPC."""
    return x


def _fill(x: torch.Tensor, payload: Any) -> None:
    memoryview(memory_of(x)).cast("B")[:] = memoryview(payload).cast("B")
