"""HTTP/1.1 by h11, which keeps headers small; here it also ends connections that do not move, or are too many."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tllm.core.disk import open_files
from tllm.server.http.errors import HttpError, body_of, retry_after
from tllm.server.http.request_head import has_end, head_fault
from tllm.server.http.settings import ServerSettings

DESCRIPTORS_BESIDE = 128
"""Open files of this process that are no connections of clients: links, logs, weights that are being read."""

_log = logging.getLogger("tllm.server")


class Connections:
    """All connections of a server, `most` at a time. Where one more comes, the one that idles longest has to go.

    A connection idles while no request of it is in work: it is new, or its last request is answered.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = 0
        self._idle: dict[_Attentive, None] = {}  # in the order in which they began to idle

    def __len__(self) -> int:
        return self.busy + len(self._idle)

    def idle(self, connection: _Attentive) -> None:
        """A connection begins to idle, one that is new included."""
        self._idle[connection] = None

    def work(self, connection: _Attentive) -> None:
        """A request of it begins."""
        if connection in self._idle:
            del self._idle[connection]
            self.busy += 1

    def rest(self, connection: _Attentive) -> None:
        """Its request is answered."""
        if connection not in self._idle:
            self.busy -= 1
            self.idle(connection)

    def forget(self, connection: _Attentive) -> None:
        """It is closed."""
        self.rest(connection)
        del self._idle[connection]

    def make_room(self) -> bool:
        """Whether one more may come; for that the one that idles longest may be closed."""
        if len(self) < self.most:
            return True
        if not self._idle:
            return False
        next(iter(self._idle)).abort()
        return True


class _Attentive(H11Protocol):
    """Closes a connection whose head does not arrive in time, or whose client takes nothing; bad requests get JSON.

    What a client is sent and does not take is kept up to the transport's high-water mark (64 KiB); beyond it whoever
    sends waits. A client that takes nothing for `send_seconds` is cut off, which cancels its request.
    """

    settings: ServerSettings
    room: Connections
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_counted = False
    _looked_at = 0  # bytes of the next head among which is not its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.room.make_room():
            text = f"{len(self.room)} connections have requests in work, and {self.room.most} are the most"
            headers = retry_after(1)
            self._refuse(HttpError(503, text, "server_error", "too_many_connections", headers=headers))
            return
        self._is_counted = True
        self.room.idle(self)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._disarm()
        elif self.conn.trailing_data[0]:
            self._arm()

    def handle_events(self) -> None:
        """The same, once the head that comes next is one that proxies cannot read otherwise.

        It is looked at once, when it is whole: each look is at all of it, and it may come byte by byte.
        """
        if self.conn.their_state is h11.IDLE:
            data = self.conn.trailing_data[0]
            is_whole = has_end(data, self._looked_at)
            self._looked_at = 0 if is_whole else len(data)
            if is_whole and (fault := head_fault(data, self.settings.max_header_count)):
                self.send_400_response(fault)
                return
        super().handle_events()
        # A body that goes on after its request was answered, as one without a key is, is no work.
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE and self._is_counted:
            self.room.work(self)

    def on_response_complete(self) -> None:
        if self._is_counted:
            self.room.rest(self)
        if self.conn.their_state is h11.SEND_BODY:
            self._arm()  # what is left of the body has as long as a head
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_sending()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unwatch_sending()
        self._give_room()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._unwatch_sending()
        super().resume_writing()
        if self.transport.is_closing():
            self._watch_sending()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_sending()  # what is still to be sent has its time, too

    def abort(self) -> None:
        """Close at once, without what is still to be sent."""
        self._give_room()
        self.transport.abort()

    def _give_room(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self.room.forget(self)

    def send_400_response(self, msg: str) -> None:
        """What h11 cannot read at all is answered in the same shape as every other error."""
        self._refuse(HttpError(400, msg, code="bad_http"))

    def _refuse(self, error: HttpError) -> None:
        """Answer without the application, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body, reason = body_of(error), HTTPStatus(error.status).phrase.encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=error.status, headers=[*headers, *error.headers.items()], reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._watch_sending()

    def _arm(self) -> None:
        if self._head_timer is None and self.settings.header_seconds:
            self._head_timer = self.loop.call_later(self.settings.header_seconds, self._late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
            self._watch_sending()

    def _watch_sending(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self._send_timer is None and self.settings.send_seconds and left:
            self._send_timer = self.loop.call_later(self.settings.send_seconds, self._look_at_sending, left)

    def _unwatch_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _look_at_sending(self, before: int) -> None:
        """So many bytes were left when this was last looked at. Who takes some, however slowly, may go on."""
        self._send_timer = None
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_sending()
        else:
            seconds = self.settings.send_seconds
            _log.info("a client took nothing for %g s and is cut off; %d bytes were left", seconds, left)
            self.abort()


def protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class of one server, which all its connections share."""
    return type("Protocol", (_Attentive,), {"settings": settings, "room": Connections(_most_connections(settings))})


def _most_connections(settings: ServerSettings) -> int:
    """As many as are wanted, or as the system's limit of open files leaves, which is raised as far as it may be."""
    wanted = settings.max_connections + DESCRIPTORS_BESIDE
    files = open_files(wanted)
    most = max(1, files - DESCRIPTORS_BESIDE)
    if files < wanted:
        text = "the system allows %d open files, so that at most %d connections are taken, not %d"
        _log.warning(text, files, most, settings.max_connections)
    return most
