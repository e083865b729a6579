"""The routes of Anthropic's interface."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from tllm.server.anthropic.replies import error_events, message, message_events
from tllm.server.anthropic.requests import CountTokensRequest, MessagesRequest, as_chat
from tllm.server.http.auth import cache_salt
from tllm.server.http.caller import caller_of
from tllm.server.http.errors import MESSAGES
from tllm.server.http.routed import decode, json_reply, routes
from tllm.server.openai.completions import Completions
from tllm.server.openai.prepared_reply import Prepare, PreparedReply
from tllm.server.reply.reply_ids import ReplyIds


class MessagesRoutes:
    """Chats by another name."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def table(self) -> list[Route]:
        """What needs no reply of the model."""
        batches = {f"{MESSAGES}/batches": _missing, f"{MESSAGES}/batches/{{rest:path}}": _missing}
        return [
            *routes("POST", {f"{MESSAGES}/count_tokens": self.count_tokens}),
            *(route for method in ("GET", "POST", "DELETE") for route in routes(method, batches)),
        ]

    def prepare(self) -> dict[str, Prepare]:
        """How the requests of these paths become replies."""
        return {MESSAGES: self.messages}

    async def messages(self, body: bytes, scope: Scope, ids: ReplyIds) -> PreparedReply:
        """`POST /v1/messages`."""
        request = decode(body, MessagesRequest)
        chat = as_chat(request)
        chat.cache_salt = cache_salt(scope, None)
        job = await self._completions.chat(chat, caller_of(scope), ids)
        return PreparedReply(
            job=job,
            is_stream=bool(request.stream),
            may_be_taken_up=bool(request.store),
            whole=lambda: message(job),
            events=lambda: message_events(job),
            failed=error_events,
        )

    async def count_tokens(self, http: HttpRequest) -> Response:
        chat = as_chat(decode(await http.body(), CountTokensRequest))
        return json_reply({"input_tokens": await self._completions.count_tokens(chat)})


async def _missing(http: HttpRequest) -> Response:
    """As where there is no route: `batches` is no id of a reply."""
    raise HTTPException(404)
