"""The application: middleware around the routes, and the routes, each of which calls the module that answers it.

A completion: `Guard` checks host, origin and key; `Attended` reads the body; the route decodes it (`decode`) and asks
`Completions` for a `GenerationJob`, whose reply or chunks it sends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tllm.core.errors import TllmError
from tllm.server.admission.key_ring import KeyRing
from tllm.server.anthropic.routes import MessagesRoutes
from tllm.server.http.attended_request import Attended
from tllm.server.http.auth import PAGE_FILES, Guard, cache_salt, keys_of
from tllm.server.http.caller import caller_of
from tllm.server.http.metrics import Metrics
from tllm.server.http.query import number_of
from tllm.server.http.routed import decode, json_reply, routed
from tllm.server.http.settings import ServerSettings
from tllm.server.http.sse import EventStream, events, last_error
from tllm.server.live.recorder import LiveRecorder
from tllm.server.ollama.routes import OllamaRoutes
from tllm.server.openai import info as about
from tllm.server.openai.completions import Completions
from tllm.server.openai.engine_client import EngineClient, RequestRouter
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.prompts import Prompts
from tllm.server.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tllm.server.openai.responses_reply import ResponseStream, response, response_events
from tllm.server.openai.responses_request import ResponsesRequest
from tllm.server.openai.responses_request import as_chat as responses_chat
from tllm.server.page.page_files import PageFiles
from tllm.server.reply.parser_choice import choose_parsers
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer


class App:
    """The whole server as one ASGI application. `router` knows the sequences in hand, and refuses while draining.

    `recorder` keeps the last minutes for the page and `tllm top`, and `keys` reads its file anew, once somebody runs
    them.
    """

    def __init__(
        self, inner: ASGIApp, router: RequestRouter, settings: ServerSettings, recorder: LiveRecorder, keys: KeyRing
    ) -> None:
        self._attended = Attended(inner, settings)
        self._outer = Guard(self._attended, settings, router.metrics, keys)
        self.router = router
        self.keys = keys
        self.settings = settings
        self.recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._outer(scope, receive, send)

    def stop(self) -> None:
        """Cancel every request in hand."""
        self._attended.stop()


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | None = None,
    settings: ServerSettings | None = None,
) -> App:
    """The server for one engine. Without a tokenizer only token ids work, without a template only completions."""
    settings = settings or ServerSettings()
    settings.check()
    keys = keys_of(settings)
    router = RequestRouter(client, Metrics(client.model_name), settings, keys)
    prompts = Prompts(tokenizer, chat_template, client.max_model_len)
    source = chat_template.all_sources if chat_template is not None else ""
    parsers = choose_parsers(settings.tool_call_parser, settings.reasoning_parser, source)
    recorder = LiveRecorder(router)
    routes = _Routes(router, prompts, Completions(router, prompts, settings, parsers), settings, recorder)
    completions = routes.completions
    others = MessagesRoutes(completions, routes.stream).table() + OllamaRoutes(completions, prompts, client).table()
    inner = routed([*routes.table(), *others])
    return App(inner, router, settings, recorder, keys)


class _Routes:
    def __init__(
        self,
        router: RequestRouter,
        prompts: Prompts,
        completions: Completions,
        settings: ServerSettings,
        recorder: LiveRecorder,
    ) -> None:
        self._router = router
        self._prompts = prompts
        self.completions = completions
        self._settings = settings
        self._recorder = recorder
        self._page = PageFiles()

    def table(self) -> list[Route]:
        get: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
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
        post: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "/v1/completions": self.completion,
            "/v1/chat/completions": self.chat,
            "/v1/responses": self.responses,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        return [
            *(Route(path, function, methods=["GET"]) for path, function in get.items()),
            *(Route(path, function, methods=["POST"]) for path, function in post.items()),
        ]

    async def completion(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), CompletionRequest)
        request.cache_salt = cache_salt(http.scope, request.cache_salt)
        return await self._answer(
            await self.completions.completion(request, caller_of(http.scope)), bool(request.stream)
        )

    async def chat(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), ChatRequest)
        request.cache_salt = cache_salt(http.scope, request.cache_salt)
        return await self._answer(await self.completions.chat(request, caller_of(http.scope)), bool(request.stream))

    async def responses(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), ResponsesRequest)
        chat = responses_chat(request)
        chat.cache_salt = cache_salt(http.scope, request.cache_salt)
        job = await self.completions.chat(chat, caller_of(http.scope))
        if not request.stream:
            return json_reply(await response(request, job))
        stream = ResponseStream(request, job)
        return self.stream(response_events(stream, job), lambda error: b"".join(stream.failed(error)))

    async def _answer(self, job: GenerationJob, stream: bool) -> Response:
        return self.stream(events(job.chunks()), last_error) if stream else json_reply(await job.reply())

    def stream(self, source: AsyncGenerator[bytes, None], failed: Callable[[TllmError], bytes]) -> EventStream:
        """A reply of events; `failed` is how an error ends it."""
        waiting = partial(about.waiting, self._router, self._settings.stall_seconds)
        return EventStream(source, self._settings.keep_alive_seconds, waiting, failed)

    async def tokenize(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), TokenizeRequest)
        request.check(self._settings.limits)
        return json_reply(await about.tokenize(self._prompts, request, self._router.client.max_model_len))

    async def detokenize(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), DetokenizeRequest)
        return json_reply({"prompt": self._prompts.need_tokenizer("/detokenize").decode(request.tokens)})

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        return json_reply(about.tokenizer_info(self._prompts))

    async def models(self, http: HttpRequest) -> Response:
        data = [about.model_card(name, self._router.client) for name in self.completions.models]
        return json_reply({"object": "list", "data": data})

    async def model(self, http: HttpRequest) -> Response:
        name = self.completions.check_model(http.path_params["name"])
        return json_reply(about.model_card(name, self._router.client))

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
        return Response(self._router.metrics.render(self._router.client.stats()), media_type=CONTENT_TYPE_LATEST)

    async def health(self, http: HttpRequest) -> Response:
        return json_reply(about.alive(self._router))

    async def ready(self, http: HttpRequest) -> Response:
        return json_reply(about.ready(self._router))

    async def progress(self, http: HttpRequest) -> Response:
        return json_reply(about.progress(self._router, self._settings.stall_seconds))
