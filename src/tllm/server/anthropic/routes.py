"""The routes of Anthropic's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tllm.core.errors import TllmError
from tllm.server.anthropic.replies import error_event, message, message_events
from tllm.server.anthropic.requests import CountTokensRequest, MessagesRequest, as_chat
from tllm.server.http.auth import cache_salt
from tllm.server.http.caller import caller_of
from tllm.server.http.errors import MESSAGES
from tllm.server.http.routed import decode, json_reply
from tllm.server.openai.completions import Completions

Stream = Callable[[AsyncGenerator[bytes, None], Callable[[TllmError], bytes]], Response]
"""A reply of events, and how an error ends it."""


class MessagesRoutes:
    """Chats by another name."""

    def __init__(self, completions: Completions, stream: Stream) -> None:
        self._completions, self._stream = completions, stream

    def table(self) -> list[Route]:
        return [
            Route(MESSAGES, self.messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, http: HttpRequest) -> Response:
        request = decode(await http.body(), MessagesRequest)
        chat = as_chat(request)
        chat.cache_salt = cache_salt(http.scope, None)
        job = await self._completions.chat(chat, caller_of(http.scope))
        if not request.stream:
            return json_reply(await message(job))
        return self._stream(message_events(job), error_event)

    async def count_tokens(self, http: HttpRequest) -> Response:
        chat = as_chat(decode(await http.body(), CountTokensRequest))
        return json_reply({"input_tokens": await self._completions.count_tokens(chat)})
