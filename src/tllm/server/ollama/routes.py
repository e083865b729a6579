"""The routes of ollama's interface."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tllm.server.http.auth import cache_salt
from tllm.server.http.caller import caller_of
from tllm.server.http.routed import decode, json_reply, lines_reply, routes
from tllm.server.ollama.models import SPOKEN, listed, running, shown
from tllm.server.ollama.replies import NANOSECONDS, Kind, OllamaReply, error_line, loaded, reply_lines, whole_reply
from tllm.server.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaRequest,
    as_chat,
    as_generation,
    named,
)
from tllm.server.openai.choice import ScoredToken
from tllm.server.openai.completions import Completions
from tllm.server.openai.engine_client import EngineClient
from tllm.server.openai.generation_job import GenerationJob
from tllm.server.openai.prompts import Prompts
from tllm.server.openai.reply_format import chat_logprobs, labeller
from tllm.server.openai.requests import ChatRequest
from tllm.server.pooling.routes import PoolingRoutes
from tllm.server.pooling.vectors import as_list


class OllamaRoutes:
    """Chats and completions by other names, and what ollama's programs ask of a server before. Models were `created`
    at these Unix seconds."""

    def __init__(
        self, completions: Completions, prompts: Prompts, client: EngineClient, pooled: PoolingRoutes, created: int
    ) -> None:
        self._completions, self._prompts, self._client, self._pooled = completions, prompts, client, pooled
        self._created = created

    def table(self) -> list[Route]:
        get = {"/api/version": self.version, "/api/tags": self.tags, "/api/ps": self.running}
        post = {
            "/api/show": self.show,
            "/api/pull": self.pull,
            "/api/chat": self.chat,
            "/api/generate": self.generate,
            "/api/embed": self.embed,
            "/api/embeddings": self.embedding,
        }
        return routes("GET", get) + routes("POST", post)

    async def version(self, http: HttpRequest) -> Response:
        return json_reply({"version": SPOKEN})

    async def tags(self, http: HttpRequest) -> Response:
        return json_reply(listed(self._completions.models, self._client, self._created))

    async def running(self, http: HttpRequest) -> Response:
        return json_reply(running(self._completions.models, self._client))

    async def show(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), OllamaModelRequest)
        self._completions.check_model(named(request.model or request.name or ""))
        template = self._prompts.template.source if self._prompts.template is not None else ""
        parsers = self._completions.parsers
        told = shown(self._client, template, bool(parsers.tools), bool(parsers.reasoning), self._created)
        return json_reply(told)

    async def pull(self, http: HttpRequest) -> Response:
        """Programs pull a model before they use it: what is served is there, as a reply and as the last of a stream."""
        request = decode(await http.body(), OllamaModelRequest)
        self._completions.check_model(named(request.model or request.name or ""))
        return json_reply({"status": "success"})

    async def chat(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), OllamaChatRequest)
        if not request.messages:
            return self._loaded("chat", request)
        chat = as_chat(request)
        chat.cache_salt = cache_salt(http.scope, None)
        return await self._answer(await self._completions.chat(chat, caller_of(http.scope)), "chat", request)

    async def generate(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), OllamaGenerateRequest)
        asked = as_generation(request)
        if not request.prompt:
            return self._loaded("generate", request)
        asked.cache_salt = cache_salt(http.scope, None)
        if isinstance(asked, ChatRequest):
            job = await self._completions.chat(asked, caller_of(http.scope))
        else:
            job = await self._completions.completion(asked, caller_of(http.scope))
        return await self._answer(job, "generate", request)

    async def embed(self, http: HttpRequest) -> Response:
        request, began = decode(await http.body(), OllamaEmbedRequest), time.monotonic()
        model = self._completions.check_model(named(request.model))
        encoded = self._pooled.encoded if request.truncate is False else self._pooled.cut
        ids = await encoded(request.input)
        found = await self._pooled.embed(ids, http.scope, model, dimensions=request.dimensions)
        counts = {
            "total_duration": round((time.monotonic() - began) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, ids)),
        }
        return json_reply({"model": request.model, "embeddings": [as_list(one.vector) for one in found], **counts})

    async def embedding(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), OllamaEmbeddingsRequest)
        model = self._completions.check_model(named(request.model))
        ids = await self._pooled.encoded(request.prompt)
        [found] = await self._pooled.embed(ids, http.scope, model)
        return json_reply({"embedding": as_list(found.vector)})

    def _named_tokens(self, scored: list[ScoredToken]) -> list[Any]:
        tokenizer = self._prompts.tokenizer
        return list(chat_logprobs(scored, tokenizer, labeller(tokenizer, False)).content)

    def _loaded(self, kind: Kind, request: OllamaRequest) -> Response:
        """ollama's programs send a request without words to have the model loaded, as it is."""
        self._completions.check_model(named(request.model))
        return json_reply(loaded(kind, request.model))

    async def _answer(self, job: GenerationJob, kind: Kind, request: OllamaRequest) -> Response:
        reply = OllamaReply(job, kind, request.model, self._named_tokens if request.logprobs else None)
        if request.stream is False:
            return json_reply(await whole_reply(reply, job))
        return await lines_reply(reply_lines(reply, job), error_line)
