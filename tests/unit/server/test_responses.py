"""`/v1/responses` by OpenAI's own client, over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseInputItemParam

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, post, refusal, say, serve
from tests.unit.server.test_tools import SAID, TEMPLATE
from tllm.core.errors import ClusterError
from tllm.server.app import App

_T = TypeVar("_T")
PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("f", "g")]


def over(engine: FakeEngine, **settings: Any) -> App:
    return serve(engine, template=TEMPLATE, **settings)


def by_client(app: App, work: Callable[[openai.AsyncOpenAI], Awaitable[_T]]) -> _T:
    """What the client's own methods make of the replies."""

    async def run() -> _T:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            client = openai.AsyncOpenAI(
                api_key="any-key", base_url="http://127.0.0.1:8000/v1", http_client=http, max_retries=0
            )
            return await work(client)

    return asyncio.run(run())


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.submitted[-1].prompt_ids, False)


def shown(made: Any) -> list[dict[str, Any]]:
    """The items of a response without their ids, which are new each time."""
    return [{**item.model_dump(), "id": "", "call_id": ""} for item in made.output]


def test_a_reply_has_reasoning_a_message_and_calls_in_their_order() -> None:
    made = by_client(over(say(SAID)), lambda client: client.responses.create(model="tiny", input="hi", tools=TOOLS))
    reasoning, message, first, second = (item.model_dump() for item in made.output)
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "so")
    assert (message["type"], message["content"][0]["text"]) == ("message", "Ok.")
    assert (first["type"], first["name"], json.loads(first["arguments"])) == ("function_call", "f", {"a": 1})
    assert (second["name"], second["arguments"]) == ("g", "{}")
    assert made.output_text == "Ok." and made.status == "completed" and made.id.startswith("resp_")
    assert made.usage is not None and made.usage.output_tokens_details.reasoning_tokens > 0
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_a_stream_adds_up_to_the_reply() -> None:
    async def work(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            events = [event async for event in stream]
            return await stream.get_final_response(), events

    streamed, events = by_client(over(say(SAID)), work)
    whole = by_client(over(say(SAID)), lambda client: client.responses.create(model="tiny", input="hi", tools=TOOLS))
    for item in (found := shown(streamed)):
        for extra in ("parsed_arguments",):
            item.pop(extra, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    assert found == shown(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 4
    said = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(said) == '{"a": 1}{}'


def test_a_conversation_with_results_of_tools_reaches_the_template() -> None:
    engine = say(" fine")
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "ask"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 7}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": 8}'},
        {"type": "function_call_output", "call_id": "c1", "output": "seven"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "eight"}]},
        {"role": "developer", "content": "go on"},
    ]
    search: Any = {"type": "web_search"}

    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(
            model="tiny", input=items, instructions="be brief", tools=[*TOOLS, search], store=False
        )

    made = by_client(over(engine), work)
    said = "<system>be brief<user>ask<assistant>so78<tool>seven<tool>eight<system>go on[f][g]<assistant>"
    assert prompt_of(engine) == said
    assert [tool.name for tool in made.tools] == ["f", "g"], "only what the model was offered"


def test_a_reply_that_is_cut_is_incomplete() -> None:
    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(model="tiny", input="hi", max_output_tokens=4)

    made = by_client(over(say(" a" * 50)), work)
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 4
    assert [item.status for item in made.output] == ["incomplete"]


def test_a_form_is_asked_for_as_the_client_does() -> None:
    class Answer(pydantic.BaseModel):
        a: int

    engine = say('{"a": 5}')

    async def work(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.parse(model="tiny", input="hi", text_format=Answer)

    assert by_client(over(engine), work).output_parsed == Answer(a=5)
    grammar = engine.submitted[-1].params.grammar
    assert grammar is not None and '"a"' in grammar.text


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("required", "json_schema"),
        ({"type": "function", "name": "g"}, "json_schema"),
        ("auto", "grammar"),
        ("none", ""),
    ],
)
def test_a_choice_of_tools_holds_the_reply(choice: Any, kind: str) -> None:
    engine = say(" x")
    body = {"input": "hi", "tools": TOOLS, "tool_choice": choice}
    assert post(over(engine), PATH, body).status_code == 200
    grammar = engine.submitted[-1].params.grammar
    assert (grammar.kind if grammar is not None else "") == kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "input has no items"),
        (
            {"input": "hi", "previous_response_id": "resp_1"},
            "previous_response_id is not supported by this server (send the whole conversation as input)",
        ),
        ({"input": "hi", "background": True, "store": False}, "in the background is stored"),
        ({"input": [{"type": "image_generation_call"}]}, "'image_generation_call' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image' is not supported"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "needs call_id"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "needs a name"),
        ({"input": "hi", "text": {"format": {"type": "xml"}}}, "no type 'xml'"),
    ],
)
def test_what_is_not_done_is_refused_by_name(body: Any, words: str) -> None:
    assert words in refusal(post(over(say()), PATH, body), 400)["message"]


def test_every_item_of_the_client_is_read_or_refused_by_its_name() -> None:
    hints = [typing.get_type_hints(kind)["type"] for kind in typing.get_args(ResponseInputItemParam)]
    literals = [one for hint in hints for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is Literal]
    kinds = {typing.get_args(literal)[0] for literal in literals}
    read = {"message", "function_call", "function_call_output", "reasoning"}
    assert read < kinds and len(kinds) >= 31
    for kind in sorted(kinds - read):
        refused = refusal(post(over(say()), PATH, {"input": [{"type": kind, "id": "a", "call_id": "a"}]}), 400)
        assert repr(kind) in refused["message"] and refused["param"] == "input"


def test_log_probabilities_are_of_the_message_alone() -> None:
    """However many tokens come at once, and streamed or whole."""
    asked = {"input": "hi", "tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = []
    for together in (1, 3, 100):
        engine = say(SAID)
        engine.together = together
        made = post(over(engine), PATH, asked).json()
        [message] = [item for item in made["output"] if item["type"] == "message"]
        found.append(message["content"][0]["logprobs"])
        events = post(over(engine), PATH, {**asked, "stream": True}).text.strip().split("\n\n")
        deltas = [json.loads(event.split("data: ")[1]) for event in events if "output_text.delta" in event]
        assert [one for delta in deltas for one in delta["logprobs"]] == found[-1]
    assert found == [found[0]] * 3
    assert "Ok." in "".join(one["token"] for one in found[0]) and "so" not in [one["token"] for one in found[0]]
    assert {len(one["top_logprobs"]) for one in found[0]} == {2}
    bare = post(over(say(SAID)), PATH, {"input": "hi", "include": ["reasoning.encrypted_content"]}).json()
    assert [part["logprobs"] for item in bare["output"] if item["type"] == "message" for part in item["content"]] == [
        []
    ]


def test_an_error_in_mid_stream_is_two_events() -> None:
    engine = say(" a b c d")
    engine.fail_after, engine.error = 2, ClusterError("node lab-2 went away")
    reply = post(over(engine), PATH, {"input": "hi", "stream": True})
    *_, error, failed = (json.loads(event.split("data: ")[1]) for event in reply.text.strip().split("\n\n"))
    assert (error["type"], error["code"], error["message"]) == ("error", "node_lost", "node lab-2 went away")
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    engine.fail_after = 0
    assert refusal(post(over(engine), PATH, {"input": "hi", "stream": True}), 503)["code"] == "node_lost"
