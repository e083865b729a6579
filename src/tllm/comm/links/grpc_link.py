"""Links over gRPC: one server-streaming call for each wire, whose responses are the frames; with mutual TLS.

The source is the gRPC server, because our link, over which it sends its port, leads from source to target. It accepts
one call, from a client that has the wire's secret and a certificate of this cluster. The messages are the frames' bytes
as they are, without protobuf.
"""

from __future__ import annotations

import hmac
import importlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from tllm.cluster.certificates import Identity
from tllm.cluster.connection import format_address
from tllm.comm.links.errors import target_gone
from tllm.comm.links.handshake import LinkHello
from tllm.comm.links.link import DEADLINE, Link
from tllm.comm.links.transport_link import CHUNK_BYTES, OFFER_LIMIT, TransportLink, TransportOffer
from tllm.core.errors import UNREADABLE, AuthError, ConfigError, LinkClosed, LinkError, LinkTimeout

SERVICE, METHOD = "tllm.Link", "Open"
BEGUN = b"\1"  # the first response, before any frame
CALLS = 2  # handled at once: that of the link, and one to be refused
NEVER = 2**31 - 1
"""For gRPC, of milliseconds. The control wire notices who is lost; an unanswered ping may be of who is suspended."""
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),  # so that routers between two nodes keep an idle connection
    ("grpc.keepalive_timeout_ms", NEVER),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)

logger = logging.getLogger("tllm.comm")


class Call(msgspec.Struct, frozen=True):
    """The request of the target's call."""

    hello: LinkHello
    secret: bytes


_CALLS = msgspec.msgpack.Decoder(Call)


class GrpcTransport:
    """The gRPC transport. ConfigError where gRPC is not installed."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._grpc = installed_grpc()

    def open_source(self, ours: Link, hello: LinkHello, host: str, seconds: float) -> Link:
        server = _Server(self._grpc, self._identity, hello, host)
        try:
            server.offer.send(ours)
        except LinkError:
            server.link.interrupt()
            raise
        if not server.called.wait(seconds):
            server.link.interrupt()
            raise LinkTimeout(
                f"rank {hello.target} did not call the gRPC port of rank {hello.source} within {seconds:.3g} s",
                f"see whether rank {hello.target} reaches {host}, where a port is open for each link",
            )
        return server.link

    def open_target(self, ours: Link, hello: LinkHello, host: str, here: str, seconds: float) -> Link:
        return _Client(self._grpc, self._identity, hello, host, TransportOffer.receive(ours, seconds), seconds).link


def installed_grpc() -> Any:
    """The module of gRPC, an optional dependency; ConfigError where it is missing."""
    try:
        return importlib.import_module("grpc")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "links over gRPC need grpcio, which is not installed", 'pip install "together-llm[grpc]"'
        ) from error


class _Server:
    """The source's end: a gRPC server that accepts one call."""

    def __init__(self, grpc: Any, identity: Identity, hello: LinkHello, host: str) -> None:
        self.link = TransportLink(hello, DEADLINE)
        self.called = threading.Event()
        self._grpc, self._hello = grpc, hello
        options = [("grpc.max_receive_message_length", OFFER_LIMIT), ("grpc.so_reuseport", 0), *KEEPALIVE]
        self._pool = ThreadPoolExecutor(CALLS, f"link {hello.source}>{hello.target}")
        self._server = grpc.server(self._pool, options=options)
        serve = grpc.unary_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: serve}),))
        trust = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)], identity.authority, require_client_auth=True
        )
        try:
            port = self._server.add_secure_port(format_address((host, 0)), trust)
        except RuntimeError as error:
            raise LinkClosed(f"rank {hello.source} cannot listen on {host} for gRPC: {error}") from error
        self.offer = TransportOffer.make(port, identity.name)
        self.link.attach(self)
        self._server.start()

    def finish(self, seconds: float) -> bool:
        return bool(self._server.stop(seconds + 1).wait(seconds))

    def stop(self) -> None:
        self._server.stop(None)
        self._pool.shutdown(wait=False)

    def _serve(self, request: bytes, context: Any) -> Any:
        if why := self._refused(request):
            logger.warning("refused a gRPC call from %s: %s", context.peer(), why)
            context.abort(self._grpc.StatusCode.PERMISSION_DENIED, why)
        self.called.set()
        context.add_callback(self._end)
        yield BEGUN
        for chunk in self.link.outgoing.chunks():
            yield bytes(chunk)

    def _refused(self, request: bytes) -> str:
        try:
            call = _CALLS.decode(request)
        except UNREADABLE as error:
            return f"not a Call: {error}"
        if self.called.is_set():
            return "the link was opened before"
        if call.hello != self._hello:
            return f"{call.hello} is not expected"
        return "" if hmac.compare_digest(call.secret, self.offer.secret) else "not the secret of this wire"

    def _end(self) -> None:
        self.link.outgoing.mark_lost(target_gone(self._hello.source, self._hello.target, "its gRPC call is over"))


class _Client:
    """The target's end: the call, and a thread that reads its responses."""

    def __init__(
        self, grpc: Any, identity: Identity, hello: LinkHello, host: str, offer: TransportOffer, seconds: float
    ) -> None:
        self.link = TransportLink(hello, DEADLINE)
        self._grpc = grpc
        trust = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
        options = [
            ("grpc.ssl_target_name_override", offer.name),
            ("grpc.max_receive_message_length", CHUNK_BYTES),
            ("grpc.enable_http_proxy", 0),
            *KEEPALIVE,
        ]
        self._channel = grpc.secure_channel(format_address((host, offer.port)), trust, options)
        request = msgspec.msgpack.encode(Call(hello, offer.secret))
        self._responses = self._channel.unary_stream(f"/{SERVICE}/{METHOD}")(request)
        self.link.attach(self)
        timer = threading.Timer(seconds, self._responses.cancel)
        timer.start()
        try:
            next(self._responses)
        except grpc.RpcError as error:
            self.stop()
            self._channel.close()
            raise _failure(grpc, error, hello, seconds) from error
        finally:
            timer.cancel()
        name = f"link {hello.source}>{hello.target}"
        threading.Thread(target=self._receive, name=name, daemon=True).start()

    def finish(self, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        self._responses.cancel()
        self.link.incoming.end("closed")

    def _receive(self) -> None:
        try:
            for chunk in self._responses:
                if not self.link.incoming.put(chunk):
                    break
            self.link.incoming.end("connection closed")
        except self._grpc.RpcError as error:
            self.link.incoming.end(_error_text(error))
        finally:
            self._channel.close()


def _failure(grpc: Any, error: Any, hello: LinkHello, seconds: float) -> AuthError | LinkTimeout:
    if error.code() == grpc.StatusCode.CANCELLED:
        return LinkTimeout(
            f"rank {hello.source} did not answer the gRPC call of rank {hello.target} within {seconds:.3g} s",
            f"see whether rank {hello.source} runs",
        )
    return AuthError(
        f"rank {hello.source} did not take the gRPC call of rank {hello.target}: {_error_text(error)}",
        "both nodes must have joined the same cluster; its log says more",
    )


def _error_text(error: Any) -> str:
    return f"gRPC says {error.code().name}: {error.details()}"
