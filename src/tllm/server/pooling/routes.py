"""The routes of embeddings, scores and rankings."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from tllm.core.errors import RequestError
from tllm.server.http.auth import cache_salt
from tllm.server.http.caller import Caller, caller_of
from tllm.server.http.errors import HttpError, prompt_too_long
from tllm.server.http.routed import decode, json_reply, routes
from tllm.server.http.settings import ServerSettings
from tllm.server.openai.completions import Completions
from tllm.server.openai.engine_client import RequestRouter
from tllm.server.openai.prompts import Prompt, Prompts
from tllm.server.pooling.pooled_prompts import AT_ONCE, Asker, EmbeddedPrompt, PooledPrompts, Scores
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.server.pooling.requests import ClassificationRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from tllm.server.pooling.score_prompts import ScorePrompts
from tllm.server.pooling.vectors import as_base64, as_list

Pays = Callable[[int, int], None]

COHERE = "/v2/rerank"
"""At this path replies are as Cohere's version 2 has them: without the documents."""


class PoolingRoutes:
    """What the engine makes of prompts besides replies, over HTTP."""

    def __init__(
        self,
        completions: Completions,
        router: RequestRouter,
        prompts: Prompts,
        settings: ServerSettings,
        pooling: ModelPooling | None,
    ) -> None:
        self._completions, self._router, self._prompts, self._settings = completions, router, prompts, settings
        self._pooled: PooledPrompts | None = None
        if pooling is not None:
            of_scores = ScorePrompts(prompts.tokenizer, prompts.template, pooling.answers)
            at_once = min(AT_ONCE, router.max_sequences)
            self._pooled = PooledPrompts(router.pool, pooling, of_scores, self._check_length, at_once)

    def table(self) -> list[Route]:
        post = {
            "/v1/embeddings": self.embeddings,
            "/classify": self.classify,
            "/score": self.score,
            "/v1/score": self.score,
            "/rerank": self.rerank,
            "/v1/rerank": self.rerank,
            COHERE: self.rerank,
        }
        return routes("POST", post)

    async def embeddings(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), EmbeddingRequest)
        model = self._completions.check_model(request.model)
        request.check()
        ids = await self.encoded(request.input, request.add_special_tokens is not False)
        found = await self.embed(ids, http.scope, model, request.cache_salt, request.dimensions, request.normalize)
        write = as_base64 if request.encoding_format == "base64" else as_list
        data = [{"object": "embedding", "index": i, "embedding": write(one.vector)} for i, one in enumerate(found)]
        return json_reply({"object": "list", "data": data, "model": model, "usage": _usage(sum(map(len, ids)))})

    async def classify(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), ClassificationRequest)
        model = self._completions.check_model(request.model)
        request.check()
        ids = await self.encoded(request.input, request.add_special_tokens is not False)
        caller, tokens = caller_of(http.scope), sum(map(len, ids))
        with self._room(len(ids), caller, tokens) as (pooled, pays):
            asker = self._asker(http.scope, model, request.cache_salt, caller, pays)
            found = await pooled.classify(ids, asker, request.use_activation is not False)
            labels = pooled.pooling.labels
        data = [
            {"index": i, "label": labels[probs.index(max(probs))], "probs": probs, "num_classes": len(probs)}
            for i, probs in enumerate(found)
        ]
        return json_reply(_list_of("classify", model, data, tokens))

    async def score(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), ScoreRequest)
        model, pairs = self._completions.check_model(request.model), request.pairs()
        scores = await self._score(pairs, http.scope, model, request)
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores.values)]
        return json_reply(_list_of("score", model, data, scores.prompt_tokens))

    async def rerank(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), RerankRequest)
        model, texts = self._completions.check_model(request.model), request.texts()
        scores = await self._score([(request.query, text) for text in texts], http.scope, model, request)
        # Of equal documents the earlier one comes first.
        order = sorted(range(len(texts)), key=lambda i: -scores.values[i])[: request.top_n or None]
        shows = request.return_documents if request.return_documents is not None else http.url.path != COHERE
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores.values[i]} for i in order]
        for result in results if shows else ():
            result["document"] = {"text": texts[result["index"]]}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model}
        return json_reply({**head, "results": results, "usage": _usage(scores.prompt_tokens)})

    async def encoded(self, given: Any, add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """A text, ids, or a batch of either, as ids."""
        return await _ids_of(self._prompts.batch(given, add_special_tokens))

    async def cut(self, given: str | Sequence[str]) -> list[tuple[int, ...]]:
        """A text, or several, as ids, of which the context holds all."""
        return await _ids_of(self._prompts.cut([given] if isinstance(given, str) else given))

    async def embed(
        self,
        ids: Sequence[Sequence[int]],
        scope: Scope,
        model: str,
        salt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddedPrompt]:
        """The embedding of each prompt by the model of this name, or by an adapter of it, where the server has room."""
        caller = caller_of(scope)
        with self._room(len(ids), caller, sum(map(len, ids))) as (pooled, pays):
            return await pooled.embed(ids, dimensions, normalize, self._asker(scope, model, salt, caller, pays))

    async def _score(
        self, pairs: Sequence[tuple[str, str]], scope: Scope, model: str, request: ScoreRequest | RerankRequest
    ) -> Scores:
        caller, activation = caller_of(scope), request.use_activation is not False
        with self._room(len(pairs), caller) as (pooled, pays):
            asker = self._asker(scope, model, request.cache_salt, caller, pays)
            return await pooled.score(pairs, request.instruction, asker, activation)

    def _asker(self, scope: Scope, model: str, salt: str | None, caller: Caller, pays: Pays) -> Asker:
        lora, scheduling = self._completions.lora_of(model), caller.scheduling(None, self._settings)
        return Asker(cache_salt(scope, salt) or "", lora, scheduling, pays)

    @contextmanager
    def _room(self, count: int, caller: Caller, prompt_tokens: int = 0) -> Iterator[tuple[PooledPrompts, Pays]]:
        """Room for so many prompts, as far as they run at once. Each is paid for when it is done."""
        if self._pooled is None:
            raise RequestError("this server was not told how its model is pooled", "start it with `tllm serve`")
        with self._router.admit(min(count, self._pooled.at_once), caller.account, prompt_tokens, 0) as charge:
            charge.prompt_tokens = 0  # so far

            def pays(tokens: int, cached: int) -> None:
                charge.prompt_tokens += tokens
                charge.use(0, charge.cached + cached)

            yield self._pooled, pays

    def _check_length(self, ids: Sequence[int]) -> None:
        longest, most = self._router.client.max_model_len, self._settings.limits.max_input_tokens
        if len(ids) > longest:
            raise prompt_too_long(f"an input has {len(ids)} tokens > {longest}", longest, "input")
        if most and len(ids) > most:
            message = f"an input has {len(ids)} tokens, at most {most} are taken (shorten it)"
            raise HttpError(400, message, code="prompt_too_long", param="input")


async def _ids_of(prompts: Awaitable[Sequence[Prompt]]) -> list[tuple[int, ...]]:
    try:
        return [prompt.ids for prompt in await prompts]
    except RequestError as error:
        raise RequestError(error.message, error.hint, "input") from error
    except HttpError as error:
        error.info.param = "input"
        raise


def _list_of(kind: str, model: str, data: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """A reply with an entry for each input, for which so many tokens were read. The kind begins its id."""
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": _usage(tokens)}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
