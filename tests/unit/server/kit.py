"""A server over a fake engine, reached without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.text import kits
from tllm.server.app import App, build_app
from tllm.server.http.settings import ServerSettings
from tllm.server.pooling.pooler_config import ModelPooling
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

TOKENIZER = kits.both()["byte-level"]
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<｜assistant｜>{% endif %}",
    TOKENIZER.special_tokens,
)
POOLING = ModelPooling(hidden_size=4)
SAID = " hello world\n\nhow are you? 🙂 fine"
_T = TypeVar("_T")


def say(text: str = SAID, **options: Any) -> FakeEngine:
    return FakeEngine.saying(TOKENIZER, text, **options)


def serve(
    engine: FakeEngine,
    tokenizer: Tokenizer | None = TOKENIZER,
    template: ChatTemplate | None = TEMPLATE,
    pooling: ModelPooling | None = POOLING,
    **settings: Any,
) -> App:
    return build_app(engine, tokenizer, template, ServerSettings(**settings), pooling=pooling)


def client(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8000", timeout=20)


def new_loop() -> asyncio.AbstractEventLoop:
    """That of `run`; the fixture `virtual_time` puts another in its place."""
    return asyncio.new_event_loop()


def run(work: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


def post(app: App, path: str, body: Any, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client(app) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, **options)
            return await http.post(path, json=body, **options)

    return run(work())


def get(app: App, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client(app) as http:
            return await http.request(method, path, **options)

    return run(work())


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ends as it must."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1] if not event.startswith(":")]


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a reply that must be one."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) <= 8192
    return dict(error)


def said(response: httpx.Response, status: int) -> str:
    """The message of an error, in whichever shape the interface has."""
    assert response.status_code == status, response.text
    assert len(response.content) <= 8192
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message
    return str(message)
