"""Runs an application on an address: binds, tells when it is ready, drains on the first signal, stops on the second."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from tllm.core.errors import ConfigError, counted
from tllm.core.tasks import background
from tllm.server.app import App
from tllm.server.http.protocol import protocol
from tllm.server.http.settings import ServerSettings

_log = logging.getLogger("tllm.server")
_CLOSING_SECONDS = 2  # for connections to end once their work is done or cancelled


async def serve_http(
    app: App,
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    signals: bool = True,
    leaves: Callable[[], bool] = lambda: False,
    lingers: Callable[[], bool] = lambda: False,
) -> OpenReplies | None:
    """Serve until a signal or until `stop` is set, then let requests in hand finish for `drain_seconds`.

    If `leaves` says so on a SIGTERM, another process will go on with what nodes have asked for and with what is kept:
    that is not waited for (`RequestRouter.leaving`). If `lingers` says so in the end, nothing is waited for: what is in
    hand goes on in this event loop, and is returned, while others may listen at the address.

    `on_ready` gets the URL once connections are taken. A second signal ends it at once. A busy port is a `ConfigError`.
    Used inside another program, `signals=False` leaves signal handlers alone.
    """
    listening = bind(app.settings.host, app.settings.port)
    server = _Server(_config(app, app.settings))
    asked, now = stop or asyncio.Event(), asyncio.Event()
    with _handlers(asked, now, lambda: _leave(app, leaves)) if signals else contextlib.nullcontext():
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        recording = background(app.recorder.run(), "what samples the server for its page")
        watching = background(app.keys.watch(), "what reads the file of API keys anew")
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)  # uvicorn sets a flag, and wakes nobody
            if on_ready is not None and server.started:
                on_ready(_url(listening))
            await _first(serving, asked.wait())
            app.router.draining = True
            if lingers():
                return await _let_linger(server, serving, listening, app)
            await _first(serving, now.wait(), _idle(app), asyncio.sleep(app.settings.drain_seconds))
            if not app.router.is_idle:
                _log.warning("stopping with %s in hand", counted(app.router.in_hand, "sequence"))
                app.stop()
                await _first(serving, _idle(app), asyncio.sleep(_CLOSING_SECONDS))
        finally:
            recording.cancel()
            watching.cancel()
            if server.config.timeout_graceful_shutdown is not None:  # else it lingers
                server.should_exit = True
                server.force_exit = now.is_set()
                await serving
                listening.close()
    return None


class OpenReplies:
    """What a server has in hand that takes no more requests; `serving` ends with the last of it."""

    def __init__(self, app: App, serving: asyncio.Task[None]) -> None:
        self._app, self._serving = app, serving

    async def end(self) -> None:
        """Let it finish for `drain_seconds`, and break off what is left then."""
        await _first(self._serving, asyncio.sleep(self._app.settings.drain_seconds))
        if not self._serving.done():
            _log.warning("stopping with %s in hand", counted(self._app.router.in_hand, "sequence"))
            self._app.stop()
            await _first(self._serving, asyncio.sleep(_CLOSING_SECONDS))
        if self._app.tracing is not None:
            await self._app.tracing.close()


async def _let_linger(server: _Server, serving: asyncio.Task[None], listening: socket.socket, app: App) -> OpenReplies:
    """Take no more connections, and wait for none of those that are open."""
    server.config.timeout_graceful_shutdown = None
    server.should_exit = True
    while listening.fileno() != -1 and not serving.done():
        await asyncio.sleep(0.005)  # uvicorn closes it, and wakes nobody
    return OpenReplies(app, serving)


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, settings: ServerSettings) -> AsyncIterator[str]:
    """Serve while the block runs, and give it the URL. A busy port is a `ConfigError`."""
    listening = bind(settings.host, settings.port)
    server = _Server(_config(app, settings))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield _url(listening)
    finally:
        server.should_exit = server.force_exit = True
        await task
        listening.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a `ConfigError` that says why not."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:  # the latter of a name with an empty or a very long part
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host}:{port} is no address to serve on: {reason}", "check --host") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
        made.setblocking(False)
    except OSError as error:
        made.close()
        busy = error.errno == errno.EADDRINUSE
        hint = "another program uses it: give --port another number, or 0 for a free one" if busy else "check --host"
        raise ConfigError(f"cannot serve on {host}:{port}: {error.strerror}", hint) from error
    return made


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the caller's own decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )


@contextlib.contextmanager
def _handlers(asked: asyncio.Event, now: asyncio.Event, on_terminate: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(kind: signal.Signals) -> None:
        if kind == signal.SIGTERM and not asked.is_set():
            on_terminate()
        (now if asked.is_set() else asked).set()

    kinds = (signal.SIGTERM, signal.SIGINT)
    for kind in kinds:
        loop.add_signal_handler(kind, on_signal, kind)
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


def _leave(app: App, leaves: Callable[[], bool]) -> None:
    app.router.leaving = leaves()


async def _idle(app: App) -> None:
    while not app.router.is_idle:
        await asyncio.sleep(0.02)  # what is in hand ends in many places, none of which wakes anybody


async def _first(serving: asyncio.Task[None], *others: object) -> None:
    """Wait for the first of these; `serving` itself is left running."""
    tasks = [asyncio.ensure_future(other) for other in others]  # type: ignore[call-overload]
    try:
        await asyncio.wait({serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
