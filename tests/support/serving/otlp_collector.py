"""A small OpenTelemetry collector: takes traces over HTTP and keeps the spans, decoded by that library's messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class CollectedSpan(NamedTuple):
    """A span as it came; ids as hexadecimal digits, times in Unix nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    service: str


class Collector:
    """`spans` are all that have come so far."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.url = ""
        self.raw = b""

    def wait(self, count: int, seconds: float = 60.0) -> list[CollectedSpan]:
        """So many spans, once they have come."""
        until = time.monotonic() + seconds
        while len(self.spans) < count and time.monotonic() < until:
            time.sleep(0.02)
        return list(self.spans)

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    CollectedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _attributes(span.attributes),
                        service,
                    )
                    for span in scope.spans
                ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens while the block runs."""
    collector = Collector()

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
