"""The official `openai` client asks clusters of the tiny model for calls and for forms: the same as of one process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tllm.api.engine_options import engine_options
from tllm.api.open_engine import open_engine
from tllm.server.app import build_app
from tllm.server.http.settings import ServerSettings
from tllm.server.run import serve_http
from tllm.text.chat_template import ChatTemplate
from tllm.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # it starts several processes that load torch

TINY = Path(__file__).parents[3] / "models" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
MESSAGES: Any = [{"role": "user", "content": "def f(x):"}]


class Person(pydantic.BaseModel):
    name: str
    age: int


def ask(url: str) -> list[Any]:
    """What a client sees of calls, whole and streamed, of a parsed model and of a regular expression."""
    asked: Any = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=120)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            **asked,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"return_token_ids": True},
        ).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.tool_calls is not None
        [call] = whole.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        with client.chat.completions.stream(**asked, tools=TOOLS, tool_choice=named) as stream:
            stream.until_done()
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        streamed = final.message.tool_calls[0].function.arguments
        assert set(json.loads(streamed)) == {"city", "days"}
        person = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
        assert isinstance(person, Person)
        text = client.completions.create(
            model="tiny", prompt="x = ", max_tokens=20, temperature=0, extra_body={"guided_regex": "[ab]{3}z"}
        )
        with pytest.raises(openai.BadRequestError, match="cannot be followed"):
            client.chat.completions.create(**asked, extra_body={"guided_regex": "((("})
        token_ids = (whole.model_extra or {})["token_ids"]
        return [token_ids, call.function.arguments, streamed, person.model_dump(), text.choices[0].text]


async def answers(plan: str) -> list[Any]:
    tokenizer = Tokenizer.from_folder(TINY)
    async with open_engine(engine_options(TINY, plan, threads=1)) as engine:
        app = build_app(engine, tokenizer, ChatTemplate.from_folder(TINY, tokenizer), ServerSettings(port=0))
        stop, urls = asyncio.Event(), list[str]()
        serving = asyncio.create_task(serve_http(app, on_ready=urls.append, stop=stop, signals=False))
        while not urls:
            await asyncio.sleep(0.01)
        try:
            return await asyncio.to_thread(ask, urls[0])
        finally:
            stop.set()
            await serving


def test_clusters_answer_as_one_process_does() -> None:
    truth = asyncio.run(answers("pp=1"))
    assert truth[0]
    for plan in ("tp=2", "pp=2"):
        assert asyncio.run(answers(plan)) == truth
