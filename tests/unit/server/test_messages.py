"""`/v1/messages` by Anthropic's own client, over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anthropic
import httpx2
import pytest
from anthropic.types import ContentBlockParam

from tests.support.serving.fake_engine import FakeEngine
from tests.unit.server.kit import TOKENIZER, get, post, say, serve
from tests.unit.server.test_tools import SAID, TEMPLATE
from tllm.core.errors import ClusterError
from tllm.server.app import App

_T = TypeVar("_T")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: list[Any] = [{"name": name, "description": "does it", "input_schema": SCHEMA} for name in ("f", "g")]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": HELLO}


def over(engine: FakeEngine, **settings: Any) -> App:
    return serve(engine, template=TEMPLATE, **settings)


def by_client(app: App, work: Callable[[anthropic.AsyncAnthropic], Awaitable[_T]], key: str = "any-key") -> _T:
    """What the client's own methods make of the replies."""

    async def run() -> _T:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            client = anthropic.AsyncAnthropic(
                api_key=key, base_url="http://127.0.0.1:8000", http_client=http, max_retries=0
            )
            return await work(client)

    return asyncio.run(run())


def prompt_of(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.submitted[-1].prompt_ids, False)


def test_a_reply_has_reasoning_text_and_calls_in_their_order() -> None:
    made = by_client(over(say(SAID)), lambda client: client.messages.create(**ASKED, tools=TOOLS))
    reasoning, text, first, second = (block.model_dump() for block in made.content)
    assert (reasoning["type"], reasoning["thinking"]) == ("thinking", "so")
    assert (text["type"], text["text"]) == ("text", "Ok.")
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "f", {"a": 1})
    assert (second["type"], second["name"], second["input"]) == ("tool_use", "g", {})
    assert made.stop_reason == "tool_use" and made.role == "assistant" and made.id.startswith("msg_")
    assert made.usage.input_tokens > 0 and made.usage.output_tokens > 10


def test_a_stream_adds_up_to_the_reply() -> None:
    async def work(client: anthropic.AsyncAnthropic) -> tuple[Any, list[str]]:
        async with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            return await stream.get_final_message(), kinds

    streamed, kinds = by_client(over(say(SAID)), work)
    whole = by_client(over(say(SAID)), lambda client: client.messages.create(**ASKED, tools=TOOLS))
    shown = [[{**block.model_dump(), "id": ""} for block in made.content] for made in (streamed, whole)]
    assert shown[0] == shown[1]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_names_of_tools_are_as_long_as_agents_make_them() -> None:
    """`mcp__SERVER__TOOL` has more than 64 characters soon."""
    for length, status in ((128, 200), (129, 400)):
        tools = [{**TOOLS[0], "name": "m" * length}]
        reply = post(over(say(SAID, max_model_len=2000)), "/v1/messages", {**ASKED, "tools": tools})
        assert reply.status_code == status, reply.text


def test_events_are_named_and_in_the_order_of_the_api() -> None:
    reply = post(over(say(" a b")), "/v1/messages", {**ASKED, "stream": True})
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in reply.text.strip().split("\n\n")]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    names = [event["event"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_conversation_with_results_of_tools_reaches_the_template() -> None:
    engine = say(" fine")
    call = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 7}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "seven"}]}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "ask", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    asked = {**ASKED, "messages": messages}
    by_client(over(engine), lambda client: client.messages.create(**asked, system="be brief", tools=TOOLS))
    assert prompt_of(engine) == "<system>be brief<user>ask<assistant>7<tool>seven<user>go on[f][g]<assistant>"


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "any"}, "json_schema"),
        ({"type": "tool", "name": "g"}, "json_schema"),
        ({"type": "auto"}, "grammar"),
        ({"type": "none"}, ""),
    ],
)
def test_a_choice_of_tools_holds_the_reply(choice: dict[str, Any], kind: str) -> None:
    engine = say(" x")
    post(over(engine), "/v1/messages", {**ASKED, "tools": TOOLS, "tool_choice": choice})
    grammar = engine.submitted[-1].params.grammar
    assert (grammar.kind if grammar is not None else "") == kind


def test_a_strict_tool_whose_schema_cannot_be_followed_is_refused() -> None:
    odd = {"type": "object", "properties": {"b": {"type": "string", "pattern": "(?=x)"}}}
    for strict, status in ((None, 200), (True, 400)):
        tools = [{"name": "f", "input_schema": odd, "strict": strict}]
        reply = post(over(say(" x")), "/v1/messages", {**ASKED, "tools": tools})
        assert reply.status_code == status
    assert "the tool f is strict" in reply.json()["error"]["message"]


def test_servers_of_tools_are_refused_by_name() -> None:
    servers = [{"type": "url", "url": "https://example.com/sse", "name": "mine"}]
    reply = post(over(say(" x")), "/v1/messages", {**ASKED, "mcp_servers": servers})
    assert reply.status_code == 400 and "mcp_servers is not supported" in reply.json()["error"]["message"]
    assert post(over(say(" x")), "/v1/messages", {**ASKED, "mcp_servers": []}).status_code == 200


def test_sampling_fields_mean_what_they_say() -> None:
    engine = say(" one two")
    fields = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "stop_sequences": [" two"]}
    made = post(over(engine), "/v1/messages", {**ASKED, **fields}).json()
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.5, 3)
    assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", " two")
    assert made["content"] == [{"type": "text", "text": " one"}]


def test_more_tokens_than_the_context_leaves_are_no_error() -> None:
    engine = say(" a" * 500)
    made = by_client(over(engine), lambda client: client.messages.create(**{**ASKED, "max_tokens": 20_000}))
    assert made.stop_reason == "max_tokens"
    assert made.usage.input_tokens + made.usage.output_tokens == engine.max_model_len


def test_the_assistants_last_words_are_gone_on_with() -> None:
    for words in ("{", [{"type": "text", "text": "{"}]):
        engine, said = say(" x"), [*HELLO, {"role": "assistant", "content": words}]
        assert post(over(engine), "/v1/messages", {**ASKED, "messages": said}).status_code == 200
        assert prompt_of(engine).endswith("<assistant>{")


def test_output_config_asks_for_a_form() -> None:
    engine = say(" x")
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    for asks in ({"output_config": form}, {"output_format": form["format"]}):  # the latter is its older name
        assert post(over(engine), "/v1/messages", {**ASKED, **asks}).status_code == 200
        assert engine.submitted[-1].params.grammar is not None
    assert post(over(say()), "/v1/messages", {**ASKED, "output_config": {"format": {"type": "xml"}}}).status_code == 400


def test_tokens_are_counted_with_the_template() -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "system": "be brief", "tools": TOOLS}
    counted = by_client(over(say()), lambda client: client.messages.count_tokens(**asked))
    made = by_client(over(say()), lambda client: client.messages.create(**asked, max_tokens=5))
    assert counted.input_tokens == made.usage.input_tokens


def test_what_was_in_the_cache_is_counted_apart() -> None:
    engine = say(" fine")
    engine.cached = lambda request: list(request.prompt_ids[:4])
    made = by_client(over(engine), lambda client: client.messages.create(**ASKED))
    assert made.usage.cache_read_input_tokens == 4
    assert made.usage.input_tokens == len(engine.submitted[-1].prompt_ids) - 4


def test_documents_of_text_and_search_results_are_read_as_text() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    parts = {
        "type": "document",
        "context": "C",
        "source": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    }
    found = {"type": "search_result", "title": "F", "source": "S", "content": [{"type": "text", "text": "b"}]}
    results = [{"type": "tool_result", "tool_use_id": "t", "content": [found]}]
    engine = say(" x")
    asked = {**ASKED, "messages": [{"role": "user", "content": [plain, parts]}, {"role": "user", "content": results}]}
    assert post(over(engine), "/v1/messages", asked).status_code == 200
    assert "<user>T\nwords\nC\na<tool>F\nS\nb<assistant>" in prompt_of(engine)


def kinds_of(union: Any) -> dict[str, Any]:
    """The types of blocks that the installed client knows, each by the name that it has in JSON."""
    hints = [typing.get_type_hints(kind) for kind in typing.get_args(union)]
    return {typing.get_args(hint["type"])[0]: hint for hint in hints}


def test_every_block_of_the_client_is_read_or_refused_by_its_name() -> None:
    kinds = kinds_of(ContentBlockParam)
    read = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "search_result"}
    assert read < set(kinds) and len(kinds) >= 16
    for kind in sorted(set(kinds) - read):
        block = {"type": kind, "id": "a", "name": "f", "input": {}, "tool_use_id": "a", "source": {}, "content": {}}
        for role in ("user", "assistant"):
            asked = {**ASKED, "messages": [{"role": role, "content": [block]}, *HELLO]}
            refused = post(over(say()), "/v1/messages", asked)
            assert refused.status_code == 400 and repr(kind) in refused.json()["error"]["message"], refused.text


IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
NAMELESS = [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({**ASKED, "model": "claude"}, 404, "not_found_error", "is not served here"),
        ({"model": "tiny", "messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
        ({**ASKED, "messages": []}, 400, "invalid_request_error", "length >= 1"),
        ({**ASKED, "messages": IMAGE}, 400, "invalid_request_error", "'image' is not supported"),
        ({**ASKED, "tools": [{"type": "web_search", "name": "w"}]}, 400, "invalid_request_error", "web_search"),
        ({**ASKED, "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        ({**ASKED, "messages": NAMELESS}, 400, "invalid_request_error", "needs tool_use_id"),
        (b"{", 400, "invalid_request_error", "not JSON"),
    ],
)
def test_errors_have_the_shape_of_the_api(body: Any, status: int, kind: str, words: str) -> None:
    reply = post(over(say()), "/v1/messages", body)
    assert reply.status_code == status
    assert reply.json().keys() == {"type", "error"} and reply.json()["type"] == "error"
    assert reply.json()["error"].keys() == {"type", "message"}
    assert reply.json()["error"]["type"] == kind and words in reply.json()["error"]["message"]


def test_the_key_comes_by_the_header_of_that_api_too() -> None:
    app = over(say(" x"), api_keys=("a-long-key",))
    assert by_client(app, lambda client: client.messages.create(**ASKED), "a-long-key").stop_reason == "end_turn"
    with pytest.raises(anthropic.AuthenticationError, match="a valid API key is needed"):
        by_client(app, lambda client: client.messages.create(**ASKED), "another-key")
    assert get(app, "/v1/models", headers={"x-api-key": "a-long-key"}).status_code == 200
    wrong = {"x-api-key": "a-long-key", "authorization": "Bearer no"}
    assert get(app, "/v1/models", headers=wrong).status_code == 401


def test_an_error_in_mid_stream_is_an_event() -> None:
    engine = say(" a b c d")
    engine.fail_after, engine.error = 2, ClusterError("node lab-2 went away")

    async def work(client: anthropic.AsyncAnthropic) -> None:
        async with client.messages.stream(**ASKED) as stream:
            async for _ in stream:
                pass

    with pytest.raises(anthropic.APIStatusError, match="node lab-2 went away"):
        by_client(over(engine), work)
    engine.fail_after = 0
    assert post(over(engine), "/v1/messages", {**ASKED, "stream": True}).json()["error"]["type"] == "overloaded_error"
