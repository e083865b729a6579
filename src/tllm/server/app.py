"""The application: middleware around the routes, and the routes, each of which calls the module that answers it.

A completion: `Guard` checks host, origin and key; `Attended` reads the body; `ReplyRoutes` has it decoded (`decode`)
and made a `GenerationJob` by `Completions`, whose reply or chunks it sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tllm.server.anthropic.models import VERSION, listed_models, model_info
from tllm.server.anthropic.routes import MessagesRoutes
from tllm.server.http.attended_request import Attended
from tllm.server.http.auth import PAGE_FILES, Guard, cache_salt, keys_of
from tllm.server.http.caller import caller_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.query import number_of
from tllm.server.http.routed import Endpoint, decode, json_reply, routed, routes
from tllm.server.http.settings import ServerSettings
from tllm.server.http.sse import EventStream
from tllm.server.live.recorder import LiveRecorder
from tllm.server.ollama.routes import OllamaRoutes
from tllm.server.openai import info as about
from tllm.server.openai.completions import Completions
from tllm.server.openai.engine_client import EngineClient, RequestRouter
from tllm.server.openai.lora_adapters import LoraRoutes, NoAdapters, ServedAdapters
from tllm.server.openai.prepared_reply import Prepare, PreparedReply, prepared
from tllm.server.openai.prompts import Prompts
from tllm.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tllm.server.openai.responses_reply import prepared_response
from tllm.server.openai.responses_request import ResponsesRequest
from tllm.server.openai.responses_request import as_chat as responses_chat
from tllm.server.page.page_files import PageFiles
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.pooling.routes import PoolingRoutes
from tllm.server.reply.parser_choice import choose_parsers
from tllm.server.reply.reply_ids import ReplyIds
from tllm.server.stored.routes import CHAT, COMPLETIONS, RESPONSES, ReplyRoutes
from tllm.server.stored.stream_store import LocalStreamStore, StreamStore
from tllm.server.tracing.tracing import Tracing
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer


class App:
    """The whole server as one ASGI application. `router` knows the sequences in hand, and refuses while draining.

    `recorder` keeps the last minutes for the page and `tllm top`, and `keys` reads its file anew, once somebody runs
    them. `store` has the replies that may be taken up. Where there is `tracing`, requests are traced.
    """

    def __init__(
        self,
        inner: ASGIApp,
        router: RequestRouter,
        settings: ServerSettings,
        recorder: LiveRecorder,
        store: StreamStore,
    ) -> None:
        self._attended = Attended(inner, settings)
        self._outer = Guard(self._attended, settings, router.metrics, router.keys)
        self.router = router
        self.keys = router.keys
        self.settings = settings
        self.recorder = recorder
        self.store = store
        self.tracing: Tracing | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self.tracing is None:
            await self._outer(scope, receive, send)
        else:
            await self.tracing.answer(self._outer, scope, receive, send)

    def stop(self) -> None:
        """Cancel every request in hand."""
        self._attended.stop()


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | None = None,
    settings: ServerSettings | None = None,
    store: StreamStore | None = None,
    adapters: ServedAdapters | None = None,
    pooling: ModelPooling | None = None,
) -> App:
    """The server for one engine. Without a tokenizer only token ids work, without a template only completions.

    Replies that may be taken up are run and kept by the `store`; without one, in this process. `pooling` says how
    prompts become embeddings and scores; without it there are none.
    """
    adapters = adapters or NoAdapters()
    settings = settings or ServerSettings()
    settings.check()
    keys = keys_of(settings)
    router = RequestRouter(client, Metrics(client.model_name), settings, keys)
    prompts = Prompts(tokenizer, chat_template, client.max_model_len)
    source = chat_template.all_sources if chat_template is not None else ""
    parsers = choose_parsers(settings.tool_call_parser, settings.reasoning_parser, source)
    recorder = LiveRecorder(router)
    store = store or LocalStreamStore(router, tokenizer, settings)
    completions = Completions(router, prompts, settings, parsers, adapters)
    own = _Routes(router, prompts, completions, settings, recorder, store)
    messages = MessagesRoutes(completions)
    pooled = PoolingRoutes(completions, router, prompts, settings, pooling)
    parts = (
        own,
        messages,
        ReplyRoutes({**own.prepare(), **messages.prepare()}, store, own.stream),
        pooled,
        OllamaRoutes(completions, prompts, client, pooled, settings.created),
        LoraRoutes(adapters, settings.model_aliases),
    )
    inner = routed([route for part in parts for route in part.table()])
    return App(inner, router, settings, recorder, store)


class _Routes:
    def __init__(
        self,
        router: RequestRouter,
        prompts: Prompts,
        completions: Completions,
        settings: ServerSettings,
        recorder: LiveRecorder,
        store: StreamStore,
    ) -> None:
        self._router = router
        self._store = store
        self._prompts = prompts
        self.completions = completions
        self._settings = settings
        self._recorder = recorder
        self._page = PageFiles()

    def table(self) -> list[Route]:
        get: dict[str, Endpoint] = {
            "/": self._page.index,
            PAGE_FILES + "{name}": self._page.file,
            "/health": self.health,
            "/health/ready": self.ready,
            "/health/progress": self.progress,
            "/metrics": self.metrics,
            "/version": self.version,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/v1/cluster": self.cluster,
            "/v1/cluster/live": self.live,
            "/tokenizer_info": self.tokenizer_info,
        }
        return routes("GET", get) + routes("POST", {"/tokenize": self.tokenize, "/detokenize": self.detokenize})

    def prepare(self) -> dict[str, Prepare]:
        """How the requests of these paths become replies."""
        return {COMPLETIONS: self.completion, CHAT: self.chat, RESPONSES: self.responses}

    async def completion(self, body: bytes, scope: Scope, ids: ReplyIds) -> PreparedReply:
        request = decode(body, CompletionRequest)
        request.cache_salt = cache_salt(scope, request.cache_salt)
        return prepared(request, await self.completions.completion(request, caller_of(scope), ids))

    async def chat(self, body: bytes, scope: Scope, ids: ReplyIds) -> PreparedReply:
        request = decode(body, ChatRequest)
        request.cache_salt = cache_salt(scope, request.cache_salt)
        return prepared(request, await self.completions.chat(request, caller_of(scope), ids))

    async def responses(self, body: bytes, scope: Scope, ids: ReplyIds) -> PreparedReply:
        request = decode(body, ResponsesRequest)
        chat = responses_chat(request)
        chat.cache_salt = cache_salt(scope, request.cache_salt)
        job = await self.completions.chat(chat, caller_of(scope), ids)
        return prepared_response(request, job, self._store.is_on)

    def stream(self, source: AsyncGenerator[bytes, None], reply: PreparedReply) -> EventStream:
        """The events of a reply."""
        waiting = partial(about.waiting, self._router, self._settings.stall_seconds)
        return EventStream(source, self._settings.keep_alive_seconds, waiting, reply.failed)

    async def tokenize(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), TokenizeRequest)
        request.check(self._settings.limits)
        return json_reply(await about.tokenize(self._prompts, request, self._router.client.max_model_len))

    async def detokenize(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), DetokenizeRequest)
        tokenizer = self._prompts.need_tokenizer("/detokenize")
        return json_reply({"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens)})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        return json_reply(about.tokenizer_info(self._prompts))

    async def models(self, http: HttpRequest) -> Response:
        data = [self._card(name) for name in self.completions.models]
        return json_reply(listed_models(data) if VERSION in http.headers else {"object": "list", "data": data})

    async def model(self, http: HttpRequest) -> Response:
        name = self.completions.check_model(http.path_params["name"])
        card = self._card(name)
        return json_reply(model_info(card) if VERSION in http.headers else card)

    def _card(self, name: str) -> dict[str, Any]:
        adapter = self.completions.adapters.paths.get(name, "")
        return about.model_card(name, self._router.client, self._settings.created, adapter)

    async def cluster(self, http: HttpRequest) -> Response:
        return json_reply(self._router.client.status())

    async def live(self, http: HttpRequest) -> Response:
        after, events_after = (number_of(http, name) for name in ("after", "events_after"))
        return json_reply(self._recorder.report(after, events_after))

    async def version(self, http: HttpRequest) -> Response:
        return json_reply({"version": self._settings.version})

    async def metrics(self, http: HttpRequest) -> Response:
        keys = self._router.keys
        self._router.metrics.keys.file(keys.faults, bool(keys.fault))
        text = self._router.metrics.render(self._router.client.stats(), len(asyncio.all_tasks()))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def health(self, http: HttpRequest) -> Response:
        return json_reply(about.alive(self._router))

    async def ready(self, http: HttpRequest) -> Response:
        return json_reply(about.ready(self._router))

    async def progress(self, http: HttpRequest) -> Response:
        return json_reply(about.progress(self._router, self._settings.stall_seconds))
