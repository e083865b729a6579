"""HTTP/1.1 by h11, which keeps headers small; here it also ends connections whose headers do not arrive."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tllm.server.http.errors import HttpError, body_of


class _Deadline(H11Protocol):
    """Closes a connection that has not sent a whole head `head_seconds` after it began; bad requests get JSON."""

    head_seconds = 10.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._disarm()
        elif self.conn.trailing_data[0]:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What h11 cannot read at all is answered in the same shape as every other error."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = body_of(HttpError(400, msg, code="bad_http"))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _arm(self) -> None:
        if self._head_timer is None and self.head_seconds:
            self._head_timer = self.loop.call_later(self.head_seconds, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def protocol(head_seconds: float) -> type[asyncio.Protocol]:
    """The protocol class with its deadline."""
    return type("Protocol", (_Deadline,), {"head_seconds": head_seconds})
