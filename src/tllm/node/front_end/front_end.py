"""`FrontEnd`: the HTTP server of a node that is not the first machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping

import msgspec

from tllm.cluster.channel import Act, Channel
from tllm.cluster.http_messages import ServedModel, ServesHttp
from tllm.cluster.weight_messages import ReadBytes
from tllm.core.errors import TllmError
from tllm.core.tasks import background, end_tasks
from tllm.node.front_end.remote_engine import RemoteAdapters, RemoteEngine, RemoteStreamStore
from tllm.node.front_end.server_loop import ServerLoop
from tllm.node.weights.model_folder import checked_bytes
from tllm.node.weights.tokenizer_file import fetch_tokenizer
from tllm.server.app import App, build_app
from tllm.server.http.settings import ServerSettings
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.run import serve_http
from tllm.server.tracing.tracing import OpenTracing, no_tracing
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

log = logging.getLogger("tllm.node")

CLOSE_SECONDS = 2.0
RETRY_SECONDS = 5.0


class FrontEnd:
    """Serves as the first machine does, from when that tells what it serves until `leave` or `close`.

    `settings` are this node's own: its address, keys, names and limits. What the replies are made by comes from the
    first machine (`ServedModel`). `on_ready` gets the model's name and the URL; `on_left` is called once `leave` was
    asked for and the requests in hand have ended.
    `open_tracing` makes what traces them. With a `loop` it runs in that of a server before it, whose replies go on.
    """

    def __init__(
        self,
        settings: ServerSettings,
        on_ready: Callable[[str, str], None],
        on_left: Callable[[], None],
        open_tracing: OpenTracing = no_tracing,
        loop: ServerLoop | None = None,
    ) -> None:
        settings.check()
        self._settings, self._on_ready, self._on_left = settings, on_ready, on_left
        self._open_tracing = open_tracing
        self._server_loop = loop or ServerLoop()
        self._loop = self._server_loop.take()
        self._model: ServedModel | None = None
        self._changed, self._leaving = asyncio.Event(), asyncio.Event()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    # --- the control thread
    def attached(self, channel: Channel) -> None:
        """This is the coordinator from now on."""
        self._server_loop.link.attach(channel)
        channel.post(ServesHttp())
        log.info("HTTP is served once the first machine has said what it serves")

    def detached(self) -> None:
        """The coordinator is lost. Requests are refused until there is another."""
        self._server_loop.link.detach()

    def acts(self) -> Mapping[type, Act]:
        """What to do with its messages."""

        async def served(model: ServedModel) -> None:
            self._in_loop(lambda: self._serve(model))

        return {ServedModel: served}

    # --- any thread
    @property
    def is_leaving(self) -> bool:
        """Whether it takes no new requests, and ends."""
        return self._is_leaving

    def leave(self) -> None:
        """Take no new requests, and let those in hand end, as `tllm serve` does on its first signal."""
        self._is_leaving = True
        if self._thread.is_alive():
            self._in_loop(self._leaving.set)
        else:  # it failed, and there is nothing to wait for
            self._on_left()

    def close(self) -> None:
        """End: the node has nothing more to do, and what is in hand fails for want of a coordinator."""
        self._server_loop.link.is_closed = True
        self._server_loop.link.detach()
        self._is_leaving, self._on_left = True, lambda: None
        self._in_loop(self._leaving.set)
        self._thread.join(CLOSE_SECONDS)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(call)

    # --- its own thread
    def _run(self) -> None:
        try:
            with self._server_loop.runner as runner:
                runner.run(self._follow())
        finally:
            if self._is_leaving:
                self._on_left()

    def _serve(self, model: ServedModel) -> None:
        if model != self._model:
            self._model = model
            self._changed.set()

    async def _follow(self) -> None:
        """Serve one model after another: another coordinator may serve another one. Once it leaves, what a server
        before it has in hand ends within the same seconds as what this one has."""
        replies = background(self._end_replies(), "end of the replies in hand")
        while not self._leaving.is_set():
            await _first(self._changed, self._leaving)
            self._changed.clear()
            if self._model is None:
                continue
            try:
                await self._serve_model(self._model)
            except TllmError as error:
                log.error("no HTTP is served: %s", error)
                self._changed.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self._leaving.wait()
        await replies

    async def _end_replies(self) -> None:
        await self._leaving.wait()
        if self._server_loop.replies is not None:
            await self._server_loop.replies.end()

    async def _serve_model(self, model: ServedModel) -> None:
        engine = RemoteEngine(self._server_loop.link, model)
        await engine.refresh()
        tokenizer = await asyncio.to_thread(fetch_tokenizer, self._read)
        app = self._app(engine, model, tokenizer)
        app.tracing = self._open_tracing(model.model_name, engine.node_spans)
        stop = asyncio.Event()
        tasks = [
            background(engine.watch(), "engine report"),
            background(_set_after(stop, self._changed, self._leaving), "end of this model"),
        ]
        try:
            await serve_http(app, lambda url: self._on_ready(model.model_name, url), stop, signals=False)
        finally:
            await end_tasks(*tasks)
            if app.tracing is not None:
                await app.tracing.close()

    def _app(self, engine: RemoteEngine, model: ServedModel, tokenizer: Tokenizer | None) -> App:
        settings = dataclasses.replace(
            self._settings,
            model_aliases=model.model_aliases,
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
            generation_config=model.generation_config,
            started=model.started,
            fingerprint=model.fingerprint,
        )
        template = None
        if model.chat_template is not None and tokenizer is not None:
            template = ChatTemplate(model.chat_template, tokenizer.special_tokens, model.tool_template)
        store = RemoteStreamStore(self._server_loop.link, model)
        pooling = msgspec.json.decode(model.pooling, type=ModelPooling)
        return build_app(engine, tokenizer, template, settings, store, RemoteAdapters(engine), pooling)

    def _read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes of one of the model's files, in a thread beside the loop."""
        wanted = ReadBytes(file, start, stop)
        asked = asyncio.run_coroutine_threadsafe(self._server_loop.link.ask(wanted), self._loop)
        return checked_bytes(wanted, asked.result())


async def _first(*events: asyncio.Event) -> None:
    """Until one of these is set."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _set_after(stop: asyncio.Event, *events: asyncio.Event) -> None:
    await _first(*events)
    stop.set()
